"""Several processes compute a model together, started as the engine starts them, and answer as transformers does."""

import dataclasses
import io
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
import torch

from tests.architectures.checkpoints import NUM_OUTPUT_TOKENS, golden, write
from tests.engine import encoder_decoder_models, test_speech
from tests.engine.cache.test_offload_engine import BLOCK_SIZE, NUM_BLOCKS_OF_A_PROMPT, complete
from tests.engine.guidance.demo import DEMO_MODEL, PROMPT
from tests.engine.test_encoder_decoder import ask, ids
from tests.engine.test_executor import REQUESTS, outputs
from tests.engine.test_golden import greedy, run
from weft.engine import config
from weft.engine.cache.offload import OffloadTier
from weft.engine.kernels.cpu import library
from weft.engine.ranks.nodes import Ended
from weft.engine.ranks.ranked_runner import RankedRunner
from weft.engine.ranks.ranks import Fault, Link, Message, Progress, Ranks, RankTask
from weft.engine.start import rank_process, report
from weft.engine.start.model_choice import read_model
from weft.engine.start.startup import Started, start
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions


@pytest.fixture(autouse=True)
def keep_threads() -> Any:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class ForkedRank:
    """A rank that is forked from a process with all modules imported, which saves seconds; see `Ranks`."""

    def __init__(self, command: list[str], pass_fds: list[int], **_: Any) -> None:
        with socket.socket(fileno=os.dup(pass_fds[0])) as link:
            self._process = FORKS.Process(target=compute_part, args=(link, command[-1]), daemon=True)
            self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["weft.engine.start.rank_process"])


def compute_part(link: socket.socket, model: str) -> None:
    sys.exit(rank_process.main(link.detach(), os.getppid(), model))


def options(folder: Path, num_ranks: int, **more: Any) -> EngineOptions:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 8 << 20, "max_model_len": 256}
    return EngineOptions(model=str(folder), tensor_parallel_size=num_ranks, **(settings | more))


def answers(started: Started, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy ids, in chunks of prompts beside decodes; the other ranks end."""
    outputs = run(started.engine, [greedy(index, prompt) for index, prompt in enumerate(prompts)])
    executor = started.engine._executor
    if isinstance(executor, RankedRunner):
        executor.close()
    return [list(outputs[index, 0].token_ids)[:NUM_OUTPUT_TOKENS] for index in range(len(prompts))]


def check_ids(folder: Path, num_ranks: int, num_stages: int = 1, **more: Any) -> None:
    expected = golden(folder)
    sizes = {"max_num_seqs": 4, "block_size": 8, "max_num_batched_tokens": 16, "pipeline_parallel_size": num_stages}
    started = start(options(folder, num_ranks, **sizes, **more), "epoch")
    assert started.info.device.endswith(f", {num_ranks * num_stages} ranks")
    found = answers(started, expected.prompts)
    assert [ids[: len(output)] for ids, output in zip(found, expected.outputs, strict=True)] == expected.outputs


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    """One K/V head, and a vocabulary that is not divided evenly."""
    check_ids(write("llama", tmp_path, {"num_key_value_heads": 1}), 2)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        pytest.param("llama", 4, marks=pytest.mark.slow),
        ("llama", 3),  # attention is whole
        ("gpt_oss", 2),  # sinks, windows and experts with biases
        ("qwen2_moe", 2),  # a shared expert
        ("gpt2", 2),  # a tied embedding, learned positions
        ("olmo2", 4),  # norms over all heads, of which ranks share keys
        ("llama4_text", 2),  # attention with temperatures
        pytest.param("gemma2", 2, marks=pytest.mark.slow),  # a cap on logits, scaled embeddings
        ("gemma4_text", 2),  # shared K/V, experts beside, inputs of layers
        pytest.param("deepseek_v2", 2, marks=pytest.mark.slow),
        ("deepseek_v3", 4),  # a latent of queries
        pytest.param("minicpm3", 2, marks=pytest.mark.slow),
        pytest.param("youtu", 2, marks=pytest.mark.slow),
        ("qwen3_next", 4),
        pytest.param("qwen3_5_text", 2, marks=pytest.mark.slow),
        ("lfm2", 2),
        ("recurrent_gemma", 2),
        ("mamba", 2),
        pytest.param("falcon_mamba", 4, marks=pytest.mark.slow),
        ("mamba2", 2),
        ("mamba2", 3),  # the mixers are whole
        ("nemotron_h", 2),
        ("falcon_h1", 2),
    ],
)
def test_ids_of_other_kinds_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_ranks: int
) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)
    check_ids(write(name, tmp_path), num_ranks)


@pytest.mark.parametrize("name", ["t5", "bart-heads", "t5gemma"])
def test_encoders_answer_as_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The bias of logits was added to those of some ids."""
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)
    expected = encoder_decoder_models.answers(tmp_path, name)
    engine = start(options(expected.folder, 2, max_model_len=None), "epoch").engine
    pairs = zip(expected.inputs, expected.prompts, strict=True)
    found = run(engine, [ask(*pair, number) for number, pair in enumerate(pairs)])
    assert [ids(found[number, 0]) for number in range(len(expected.outputs))] == expected.outputs
    assert isinstance(engine._executor, RankedRunner)
    engine._executor.close()


@pytest.mark.parametrize("name", ["whisper", "moonshine"])
def test_what_is_heard_is_what_transformers_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)
    expected = test_speech.heard(tmp_path, name)
    engine = start(options(expected.folder, 2, max_model_len=None), "epoch").engine
    pairs = zip(expected.sounds, expected.prompts, strict=True)
    found = run(engine, [test_speech.ask(expected.shape, *pair, number) for number, pair in enumerate(pairs)])
    assert [ids(found[number, 0]) for number in range(len(expected.outputs))] == expected.outputs
    assert isinstance(engine._executor, RankedRunner)
    engine._executor.close()


@pytest.mark.parametrize(("speculative", "overlap"), [("ngram", True), (str(DEMO_MODEL / "draft"), False)])
def test_choices_grammars_drafts_and_sampling_are_those_of_one_rank(
    monkeypatch: pytest.MonkeyPatch, speculative: str, overlap: bool
) -> None:
    """With overlap, which only GPUs have, steps take ids that another rank has sampled from its broadcast."""
    resolve = config.resolve
    monkeypatch.setattr(config, "resolve", lambda *args: dataclasses.replace(resolve(*args), overlap=overlap))
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)
    found = []
    for num_ranks in (1, 2):
        engine = start(
            options(DEMO_MODEL, num_ranks, max_num_batched_tokens=64, max_num_seqs=4, speculative=speculative), "epoch"
        ).engine
        gained = outputs(engine, REQUESTS)  # type: ignore[arg-type]
        found.append({key: [i for i in entries if isinstance(i, int)] for key, entries in gained.items()})
        assert speculative == "ngram" or engine.scheduler.counters.num_accepted_tokens > 0
        if isinstance(engine._executor, RankedRunner):
            engine._executor.close()
    assert found[0] == found[1]


def test_blocks_of_all_ranks_come_back_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a draft model, which the first rank alone has, and which computes again what its cache lacks."""
    monkeypatch.setattr(OffloadTier, "load_seconds", lambda *_: 0.0)
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)
    order, settings = [1, 2, 3, 1, 2, 3], {"block_size": BLOCK_SIZE, "max_num_seqs": 2}
    settings["speculative"] = str(DEMO_MODEL / "draft")
    plain = start(options(DEMO_MODEL, 1, **settings), "epoch")
    num_bytes = 12 * plain.plan.kv_cache_bytes // plain.plan.num_blocks  # of half the heads nearly twice as many blocks
    settings |= {"kv_cache_memory": num_bytes, "kv_offload_dir": str(tmp_path)}
    started = start(options(DEMO_MODEL, 2, **settings), "epoch")
    assert [complete(started, number) for number in order] == [complete(plain, number) for number in order]
    counters = started.engine.scheduler.counters
    assert counters.kv_offload_disk_loads + counters.kv_offload_host_loads > NUM_BLOCKS_OF_A_PROMPT
    assert counters.kv_offload_faults == 0
    assert isinstance(started.engine._executor, RankedRunner) and started.tier
    started.tier.close()
    started.engine._executor.close()


@pytest.mark.skipif(library.load() is None, reason="no native kernels on this machine")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_native_kernels_compute_the_parts(quantization: str) -> None:
    one, two = (
        start(options(DEMO_MODEL, size, dtype="bfloat16", quantization=quantization), "epoch") for size in (1, 2)
    )
    assert two.plan.weights_bytes < 0.52 * one.plan.weights_bytes
    assert two.plan.num_blocks > 1.5 * one.plan.num_blocks
    assert answers(two, [PROMPT]) == answers(one, [PROMPT])


def test_the_plan_is_that_of_each_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    weights = []
    for num_ranks in (1, 2):
        text = msgspec.json.encode(options(DEMO_MODEL, num_ranks))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        assert report.main("plan") == 0
        plan = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert plan.get("ranks") == (None if num_ranks == 1 else "2; what follows is for each of them")
        weights.append(float(plan["weights"].removesuffix(" MB")))
    assert 0.5 < weights[1] / weights[0] < 0.52


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"task": "embed"}, "task embed"),
    ],
)
def test_what_ranks_cannot_do_yet_is_refused(
    more: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`weft plan` made a plan for vectors of several ranks, which could not be started."""
    with pytest.raises(ModelError, match=f"^tensor_parallel_size 2 does not go together with {reason}") as refused:
        start(options(DEMO_MODEL, 2, **more), "epoch")
    text = msgspec.json.encode(options(DEMO_MODEL, 2, **more))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert report.main("plan") == 2
    assert capsys.readouterr().err == f"weft: error: {refused.value}\n"


def test_modules_of_transformers_are_refused() -> None:
    with pytest.raises(ModelError, match=r"^tensor_parallel_size needs a native family"):
        start(options(DEMO_MODEL, 2, model_impl="transformers"), "epoch")


STOPPED = """
import os, signal, sys
from weft.engine.ranks import ranks; from weft.engine.start import startup
from weft.engine.wire.messages import EngineOptions

class StoppedRanks(ranks.Ranks):
    def __init__(self, *args):
        super().__init__(*args)
        print(self._processes[0].pid, flush=True)
        os.kill(self._processes[0].pid, signal.SIGSTOP)

ranks._SILENCE_S = ranks.PATIENCE_S = 0.1
startup.Ranks = StoppedRanks
startup.start(EngineOptions(model=sys.argv[1], device="cpu", tensor_parallel_size=2), "epoch")
"""


def test_a_rank_that_is_stopped_while_it_loads_ends_the_engine() -> None:
    """The others waited an hour for it, and it outlived them."""
    done = subprocess.run([sys.executable, "-c", STOPPED, DEMO_MODEL], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "rank 1 makes no progress while it loads its part, and the engine ends" in done.stderr
    assert not Path(f"/proc/{done.stdout.strip()}").exists()


LOST = """
import sys
from weft.engine.ranks import nodes; from weft.engine.ranks import ranks; from weft.engine.start import startup
from weft.engine.wire.messages import EngineOptions

ranks.start_rank = lambda link, model: nodes.start_rank(link, "/nowhere")
startup.start(EngineOptions(model=sys.argv[1], device="cpu", tensor_parallel_size=2), "epoch")
"""


def test_the_engine_says_why_a_rank_cannot_load() -> None:
    """It may be on another machine, whose log nobody looks at."""
    done = subprocess.run([sys.executable, "-c", LOST, DEMO_MODEL], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "rank 1 has ended (2): /nowhere: no such folder, and the engine ends with it" in done.stderr


@pytest.mark.parametrize(
    ("messages", "end", "said"),
    [
        ([Fault("no memory"), Ended(2)], ("_exit", 2), "rank 1 on another machine has ended (2): no memory, and"),
        ([Ended(1)], ("_exit", 1), "rank 1 on another machine has ended (1), and"),
        ([Ended(-signal.SIGSEGV)], ("kill", signal.SIGSEGV), "rank 1 on another machine has ended (-11), and"),
        ([], ("kill", signal.SIGKILL), "rank 1 on another machine has ended (-9), and"),
    ],
)
def test_the_engine_ends_as_a_rank_on_another_machine_did(
    messages: list[Message], end: tuple[str, int], said: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """What a rank said after it had loaded was lost, and no request was ever to blame for its end."""
    ends: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: ends.append(("kill", number)))
    monkeypatch.setattr(os, "_exit", lambda code: ends.append(("_exit", code)))
    ranks = object.__new__(Ranks)
    ranks._loading, ranks._adapter_ends, ranks._is_closed = [threading.Event()], [SimpleQueue()], False
    ours, theirs = map(Link, socket.socketpair())
    for message in [Progress(is_loaded=False), Progress(is_loaded=True), *messages]:
        theirs.send(message)
    theirs.close()
    ranks._watch(1, ours, None)
    ours.close()
    assert ranks._loading[0].is_set()
    assert ends[0] == end
    assert caplog.messages == [f"{said} the engine ends with it"]


def test_a_rank_says_of_any_fault_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that nobody expects, such as a driver's, only its own machine's log told."""

    def fail(*_: object) -> None:
        raise RuntimeError("no driver\nof this version")

    link, theirs = map(Link, socket.socketpair())
    resolved = config.resolve(options(DEMO_MODEL, 2), read_model(DEMO_MODEL, "auto", None))
    link.send(RankTask(resolved, "127.0.0.1", 0))
    monkeypatch.setattr(socket, "socket", lambda fileno: None)
    monkeypatch.setattr(rank_process, "Link", lambda _: theirs)
    for name in ("follow_parent", "logs.configure", "logging.disable"):
        monkeypatch.setattr(f"weft.engine.start.rank_process.{name}", lambda *_: True)
    monkeypatch.setattr(rank_process, "_load", fail)
    with pytest.raises(RuntimeError):
        rank_process.main(0, 0, str(DEMO_MODEL))
    theirs.close()
    assert link.recv() == Fault("no driver")
    link.close()


def test_a_rank_whose_engine_is_gone_ends() -> None:
    """While it imported torch; it loaded its part, and waited for the others for a day."""
    command = [sys.executable, "-m", "weft.engine.start.rank_process", "0", "1", "model"]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, timeout=300).returncode == 1
