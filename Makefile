# The commands of the README. The first target that needs .venv makes it; later ones find it done.
#
#   make serve      the demo model on 127.0.0.1:8000      (MODEL= HOST= PORT= ARGS=)
#   make test       the tests, without the slow ones      (WORKERS= ARGS=)
#   make test-slow  the slow ones alone                   (ARGS=)
#   make test-cluster  the tests on a cluster of Ray alone, for minutes  (ARGS=)
#   make test-agents  coding agents at work on scripts, alone with the server (ARGS=)
#   make faults     hung, hostile and starved, at length  (ARGS=)
#   make real       fetches small real models and tokenizers, 0.7 GB, and runs the tests that need them  (ARGS=)
#   make lint       format, lint and type checks
#   make wheel      dist/weft-*.whl, with the native kernels for every processor, for pip install elsewhere
#   make docs       rewrites the generated parts of README.md and docs/
#   make bench      Weft beside the peers that are installed, or the server at URL=           (ARGS=)
#                   BENCH=long_prompt: what running streams feel while a long prompt is prefilled, at URL=
#                   BENCH=embeddings: vectors of 1,000 texts beside sentence-transformers
#                   BENCH=batch_beside: what running streams feel while a batch runs, at URL=
#                   BENCH=offload: the first token of a prompt whose blocks come back from disk, beside computing it
#                   BENCH=start: from the command to the first answer, beside Python loading torch
#                   BENCH=seq2seq: models with an encoder beside transformers
#                   BENCH=speech: a real Whisper beside transformers and faster-whisper; `make real` fetches it
#                   BENCH=quantized: decode steps and first tokens on one GGUF file, beside llama.cpp
#                   BENCH=real: the GGUF files of `make real` over HTTP, beside llama.cpp's server
#                   BENCH=edits: what speculation brings to the models of `make real` on edits of code, and on prose
#                   BENCH=pictures: what a picture costs a model that sees, beside transformers, and what text costs beside it
#                   BENCH=quality: what every form of weights does to the demo model
#                   BENCH=real_quality: what they do to the models of `make real`, beside transformers and llama.cpp
#                   BENCH=simulation: what `weft simulate` predicts beside what two servers do
#                   BENCH=router: the router over simulated replicas that come and go
#                   BENCH=architectures: decode steps of every kind of model beside what memory allows
#   make gpu        on a machine with a GPU, within nine minutes: its tests, then what it reaches beside what it could;
#                   installs nothing: GPU_PYTHON= is an interpreter that has torch for CUDA and what Weft needs (ARGS=)
#   make gpu-cache  compiles the kernels of these in parallel, here or on a machine like it: build/triton may be copied
#   make clean      remove caches and build products; `make distclean` removes .venv, .venv-clients and .agents, too
#
# TORCH= chooses the build of torch, PYTHON= the interpreter (3.11 or newer) that .venv is made with.

SHELL := /bin/sh
.DEFAULT_GOAL := serve
.PHONY: serve test test-slow test-cluster test-agents faults real lint wheel docs bench gpu gpu-cache clean distclean

# Empty means Weft's own default, so that WEFT_PORT and a configuration file have their say.
MODEL ?=
HOST ?=
PORT ?=
ARGS ?=
URL ?=
BENCH ?= compare
# Processes that run tests side by side. Each starts servers of its own, and these have threads of their own.
WORKERS ?= 2

# Installed before anything else: of this very version pip takes a CPU build that its configuration offers, and what
# follows is content with it, so nothing fetches CUDA packages onto a machine without a GPU.
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
# Third-party clients that the tests run: one of them needs an older SDK than the tests themselves.
CLIENTS := .venv-clients
# Coding agents that the tests run: programs from npm, and Python's own.
AGENTS := .agents
IS_GOOD := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c '$(IS_GOOD)' >/dev/null 2>&1 && { echo $$python; break; }; done)

NAMES := build/path/weft
KERNELS := engine/kernels/cpu
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Every process would compile a thousand modules again, and the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
# pip would compile every module of every package, which takes it more than half of its time. A module that is imported
# is compiled then, once.
PIP_INSTALL := -m pip install --no-compile
PIP := $(BIN)/python $(PIP_INSTALL)
# pip shows its bars on a terminal; in a log it keeps quiet.
QUIET := $(if $(MAKE_TERMOUT),,--quiet)

serve: $(VENV)/.installed
	@$(BIN)/weft serve $(MODEL) $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(ARGS)

# Threads of torch that wait for work would spin, on cores that the tests beside them need.
test test-slow test-cluster test-agents faults real: export OMP_WAIT_POLICY := passive

# The two environments side by side: pip uses one core.
test:
	@$(MAKE) --no-print-directory --jobs=2 $(VENV)/.installed-test $(CLIENTS)/.installed
	$(BIN)/python -m pytest -m "not slow and not cluster and not agents" --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow $(ARGS)

test-cluster: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m cluster $(ARGS)

# In a network namespace that has loopback alone, where the kernel lets this user make one.
UNSHARE := unshare --user --map-root-user --net sh -c
ALONE = $(shell $(UNSHARE) 'ip link set lo up' 2>/dev/null && \
	echo "$(UNSHARE) 'ip link set lo up && exec \"\$$@\"' alone")

test-agents: $(VENV)/.installed-test $(AGENTS)/.installed
	$(ALONE) $(BIN)/python -m pytest -m agents $(ARGS)

faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/faults --long-faults $(ARGS)

# What cannot be fetched is said, and its tests skip.
real: $(VENV)/.installed-test
	@status=0; \
	$(BIN)/python -m tests.real.fetch || status=1; \
	$(BIN)/python -m pytest -m real --whole-real $(ARGS) || status=1; \
	exit $$status

lint: $(VENV)/.installed-test $(NAMES)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

# pip shows nothing of what it runs: so the kernels are compiled before it asks for them.
wheel: $(VENV)/.made
	@WEFT_VARIANTS=all $(BIN)/python -P $(KERNELS)/variants.py build/kernels
	@echo 'Building the wheel: some seconds'
	@rm -rf build/lib* build/bdist*
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/weft-*.whl

docs: $(VENV)/.installed-test
	$(BIN)/python -m docs.generate

bench: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.$(BENCH) $(if $(URL),--url $(URL)) $(ARGS)

# Kernels are compiled first, by all cores; a cache that was copied here has them already. Tests that are not done after
# 150 s are interrupted, so those whose faults explain others' come first and the longest last; the benchmark is run
# whatever came of them. What other versions of libraries warn of is no failure here.
GPU_FIRST := $(patsubst %,tests/gpu/test_%.py,kernels host_syncs memory determinism traffic)

# The engine sets it as well; here, so that Triton's keys are the same without an engine.
gpu: export TRITON_DEFAULT_FP_FUSION := 1
gpu gpu-cache: export PYTHONPATH := $(CURDIR)/build/path$(if $(PYTHONPATH),:$(PYTHONPATH))

gpu-cache: $(NAMES)
	$(GPU_PYTHON) -m tests.gpu.compile_cache $(ARGS)

gpu: $(NAMES)
	@status=0; \
	timeout --signal=INT 90 $(GPU_PYTHON) -m tests.gpu.compile_cache || status=1; \
	export TRITON_CACHE_DIR="$$($(GPU_PYTHON) -m tests.gpu.compile_cache --print-folder)"; \
	timeout --signal=INT 150 $(GPU_PYTHON) -m pytest -m gpu -W default --traffic-seconds 45 \
		$(GPU_FIRST) $(filter-out $(GPU_FIRST),$(wildcard tests/gpu/test_*.py)) || status=1; \
	$(GPU_PYTHON) -m benchmarks.gpu --minutes 5.3 $(ARGS) || status=1; \
	exit $$status

# The folders under the names that they have as packages, for what runs from a checkout without an installation.
$(NAMES):
	@mkdir -p $@
	@ln -sfn ../../../server $@/server
	@ln -sfn ../../../engine $@/engine

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(KERNELS)/*.so $(VENV)/.installed* $(VENV)/.kernels
	find server engine tests benchmarks demo_model docs -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(CLIENTS) $(AGENTS)

OFFLINE := echo 'pip failed; its reason is above. It needs a connection to PyPI, or the index that pip.conf names.' >&2

# Each stamp is written last, so an interrupted installation is taken up again.
$(VENV)/.made:
	@test -n '$(PYTHON)' || { \
		echo 'Weft needs Python 3.11 or newer with venv and pip, and found none.' >&2; \
		echo 'On Debian or Ubuntu: apt install python3-venv. Elsewhere name one: make PYTHON=/path/to/python3' >&2; \
		exit 1; }
	@$(PYTHON) -c '$(IS_GOOD)' || { echo '$(PYTHON) is older than Python 3.11 or lacks venv and pip.' >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version): some seconds"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The one variant that this machine runs best, and of it only what has changed. Without a compiler there is none, until
# there is a compiler.
$(VENV)/.kernels: $(wildcard $(KERNELS)/c/*.c $(KERNELS)/c/include/*.h) $(KERNELS)/variants.py $(KERNELS)/variants.toml | $(VENV)/.made
	@$(BIN)/python -P $(KERNELS)/variants.py && touch $@ || true

$(VENV)/.torch: | $(VENV)/.made
	@echo 'Installing $(TORCH): some hundred MB, then about 10 s, once'
	@$(PIP) $(QUIET) '$(TORCH)' || { $(OFFLINE); exit 1; }
	@touch $@

$(VENV)/.installed: pyproject.toml setup.py $(VENV)/.torch | $(VENV)/.kernels
	@echo 'Installing Weft and what it needs: 100 MB, then about 20 s, once'
	@$(PIP) $(QUIET) --editable . || { $(OFFLINE); exit 1; }
	@touch $@

$(VENV)/.installed-test: pyproject.toml setup.py $(VENV)/.torch | $(VENV)/.kernels
	@echo 'Installing Weft, what it needs and what its tests need: 500 MB, then about a minute, once'
	@$(PIP) $(QUIET) --editable '.[test]' || { $(OFFLINE); exit 1; }
	@touch $(VENV)/.installed $@

# Of the interpreter of $(VENV), which has been found good.
$(CLIENTS)/.installed: tests/clients/requirements.txt | $(VENV)/.made
	@echo 'Installing the clients that the tests run into $(CLIENTS), meanwhile: about half a minute, once'
	@$(BIN)/python -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python $(PIP_INSTALL) --quiet --requirement tests/clients/requirements.txt
	@touch $@

$(AGENTS)/.installed: tests/agents/package.json tests/agents/requirements.txt | $(VENV)/.made
	@command -v npm >/dev/null || { echo 'The agents need Node.js with npm, and there is none.' >&2; exit 1; }
	@echo 'Installing the agents that the tests run into $(AGENTS): 2 GB, some minutes, once'
	@mkdir -p $(AGENTS)
	@cp tests/agents/package.json $(AGENTS)/
	@cd $(AGENTS) && npm install --no-audit --no-fund --loglevel=error
	@$(BIN)/python -m venv --clear $(AGENTS)/venv
	@$(AGENTS)/venv/bin/python $(PIP_INSTALL) --quiet --requirement tests/agents/requirements.txt
	@touch $@
