"""Tells the server's side what only the engine's side knows, in a process of its own that loads no model.

`plan`: how much memory a model takes and how many requests it serves; the options are on standard input. `memory`: the
same of several models as JSON, a list of `ModelMemory`; one that does not fit is no error, since they are planned
together. `check FOLDER MODEL_IMPL`: whether a model can be served, from its configuration alone, before its weights are
downloaded. `machine`: what torch and the native kernels know of this machine, as JSON, for `weft doctor`. Exit code 2:
the model does not fit or cannot be read, and one line on stderr says why.
"""

import pathlib
import sys
from dataclasses import dataclass, replace

import msgspec
import torch
from msgspec.structs import replace as replace_fields

from weft.engine import config as engine_config
from weft.engine.cache.specs import CacheGroup, CacheSpec
from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelFacts
from weft.engine.kernels.cpu import library
from weft.engine.memory_plan import MemoryPlan, check_fit, estimate_activations_bytes, least_kv_bytes, make_plan
from weft.engine.start.draft_model import DraftCheckpoint, find_draft_checkpoint
from weft.engine.start.model_choice import ModelPlan, plan_largest, read_model, weights_note
from weft.engine.start.vector_model import find_task
from weft.engine.tune.compare import open_choices
from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import CudaDevice, MachineFacts, ModelMemory, cache_bytes, format_size
from weft.engine.wire.messages import EngineOptions

_PROCESS_BYTES = {"cpu": 250_000_000, "cuda": 600_000_000}
"""Of an engine that has loaded next to nothing: Python and torch, or CUDA's context with the kernels."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What is known of a model before the KV cache is divided; bytes are those of a rank."""

    model: ModelFacts
    config: EngineConfig
    chosen: ModelPlan
    draft: DraftCheckpoint | None
    groups: tuple[CacheGroup[CacheSpec], ...]
    weights_bytes: int
    activations_bytes: int
    free_bytes: int

    def plan(self, left_bytes: int, kv_cache_memory: int | None) -> MemoryPlan:
        """Divide left_bytes of what weights and activations leave; raises ModelError if no request fits."""
        options = replace_fields(self.config.options, kv_cache_memory=kv_cache_memory)
        return make_plan(
            replace(self.config, options=options),
            self.groups,
            weights_bytes=self.weights_bytes,
            activations_bytes=self.activations_bytes,
            free_bytes=left_bytes,
            adapters_bytes=self.chosen.adapters_bytes,
            vision_bytes=self.chosen.vision_bytes,
        )


def _read(options: EngineOptions) -> _Sizes:
    """Read the configuration of a model; raises ModelError if it cannot be served with these options."""
    folder = pathlib.Path(options.model)
    task = find_task(folder, options.task, engine_config.settings_of_ranks(options))
    model = read_model(folder, options.model_impl, task.max_num_tokens)
    config = engine_config.resolve(options, model)
    chosen = plan_largest(model, config)
    draft = find_draft_checkpoint(config, model.vocab_size, chosen)
    activations_bytes = estimate_activations_bytes(model, config, chosen.cache_specs)
    return _Sizes(
        model=model,
        config=config,
        chosen=chosen,
        draft=draft,
        groups=chosen.planned_groups + (draft.groups if draft else ()),
        weights_bytes=chosen.weights_bytes + (draft.plan.weights_bytes if draft else 0),
        activations_bytes=max(activations_bytes, draft.activations_bytes if draft else 0),
        free_bytes=engine_config.free_bytes(config),
    )


def _measure(options: EngineOptions) -> ModelMemory:
    try:
        sizes = _read(options)
        device, left_bytes = sizes.config.device.type, sizes.free_bytes - sizes.weights_bytes - sizes.activations_bytes
        least_bytes, kv_bytes = least_kv_bytes(sizes.config, sizes.groups), options.kv_cache_memory
        if kv_bytes is None and cache_bytes(left_bytes, device) < least_bytes:
            kv_bytes = least_bytes
        plan = sizes.plan(max(left_bytes, kv_bytes or 0), kv_bytes)
    except ModelError as error:
        return ModelMemory(fault=str(error))
    num_sharing = len(options.ranks_here) if device == "cpu" else 1
    return ModelMemory(
        device=device,
        num_sharing=num_sharing,
        free_bytes=sizes.free_bytes * num_sharing,
        process_bytes=_PROCESS_BYTES[device] * num_sharing,
        weights_bytes=sizes.weights_bytes * num_sharing,
        activations_bytes=sizes.activations_bytes * num_sharing,
        least_kv_bytes=least_bytes * num_sharing,
        kv_bytes=(options.kv_cache_memory or plan.kv_cache_bytes) * num_sharing,
        is_kv_fixed=options.kv_cache_memory is not None,
        max_model_len=plan.max_model_len,
        num_requests=min(plan.num_requests(plan.max_model_len), plan.max_num_seqs),
    )


def _print(options: EngineOptions) -> None:
    """Print the plan of a model that is alone on its device; raises ModelError if it does not fit."""
    sizes = _read(options)
    model, config, draft = sizes.model, sizes.config, sizes.draft
    weights_bytes, activations_bytes, free_bytes = sizes.weights_bytes, sizes.activations_bytes, sizes.free_bytes
    check_fit(weights_bytes=weights_bytes, activations_bytes=activations_bytes, free_bytes=free_bytes)
    plan = sizes.plan(free_bytes - weights_bytes - activations_bytes, options.kv_cache_memory)
    dtype = str(config.dtype).removeprefix("torch.")
    print(f"model        {config.model.name} ({model.architecture}; layers: {sizes.chosen.name})")
    matrices = f", matrices in {options.quantization}" * (options.quantization != "none")
    cache = f", KV cache in {options.kv_cache_dtype}" * (options.kv_cache_dtype != "auto")
    print(f"device       {config.device.type}, {dtype}{matrices}{cache}")
    if note := weights_note(model, config, sizes.chosen.kernels):
        print(f"weights are  {note}")
    if draft and config.draft_model:
        print(f"draft model  {config.draft_model.name} ({draft.config.architecture})")
    if options.num_ranks > 1:
        stages = f" in {options.pipeline_parallel_size} stages" * (options.pipeline_parallel_size > 1)
        which = "the largest" if stages else "each"
        print(f"ranks        {options.num_ranks}{stages}; what follows is for {which} of them")
    print(f"free memory  {format_size(free_bytes)}")
    print("\n".join(plan.lines()))
    print(plan.concurrency())


def _machine() -> MachineFacts:
    """Ask torch, the kernels and the operating system."""
    native = library.load()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return MachineFacts(
        cuda_version=torch.version.cuda,
        cuda_devices=tuple(map(_cuda_device, range(torch.cuda.device_count()))),
        free_bytes=engine_config.available_memory_bytes(torch.device("cpu")),
        compiled=library.compiled_variants(),
        native=native.variant if native else None,
        settled=tuple(s for name in devices for s in open_choices(torch.device(name)).of_this_machine()),
    )


def _cuda_device(index: int) -> CudaDevice:
    major, minor = torch.cuda.get_device_capability(index)
    return CudaDevice(torch.cuda.get_device_name(index), f"{major}.{minor}", torch.cuda.mem_get_info(index)[0])


def main(*arguments: str) -> int:
    """Answer the question that the arguments ask."""
    given = sys.stdin.buffer
    try:
        match arguments:
            case ["plan"]:
                _print(msgspec.json.decode(given.read(), type=EngineOptions))
            case ["memory"]:
                models = msgspec.json.decode(given.read(), type=list[EngineOptions])
                sys.stdout.write(msgspec.json.encode([_measure(options) for options in models]).decode())
            case ["check", folder, model_impl]:
                read_model(pathlib.Path(folder), model_impl)
            case ["machine"]:
                sys.stdout.write(msgspec.json.encode(_machine()).decode())
            case _:
                raise ValueError(arguments)
    except ModelError as error:
        prefix = "weft: error: " if arguments[0] == "plan" else ""
        print(f"{prefix}{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
