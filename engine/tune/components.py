"""Says what is settled at start-up for a model on a device: components, and what there is to choose from.

A further candidate for a component is a name here that `engine/kernels/choice.py` understands; a further component
is a function in `_COMPONENTS`. Candidates run with random tensors of the model's shapes, before weights are loaded.

What restricts the choice: if results must be deterministic, Weft's first candidate is compared but nothing is timed,
so that two starts compute the same bits. An fp8 cache leaves attention to Triton, one in int8 to the native kernels:
nothing else reads them, so the engine does not start if these are wrong there.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from weft.engine.cache.specs import CacheGroup
from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelConfig, ModelFacts
from weft.engine.describe.specs import PartSpec
from weft.engine.kernels.choice import FEW_ROWS, has_triton, packed_products
from weft.engine.kernels.cpu import library
from weft.engine.kernels.triton.attention_tiles import tile_names
from weft.engine.kernels.triton.prompts import installed_libraries
from weft.engine.tune import trials as step_trials
from weft.engine.tune.compare import Candidate, Component, Trial, Tuner, measure_on, open_choices
from weft.engine.tune.layer_trials import ExpertsTrials, SamplerTrials
from weft.engine.tune.trials import AttentionTrials, BlockTrials, StepShape, Trials, paged_specs
from weft.engine.wire.errors import ModelError

logger = logging.getLogger(__name__)

# Largest relative error of a row, twice what rounding causes. A mask or a sum that is wrong causes ten times as much.
_TOLERANCES = {torch.bfloat16: 0.04, torch.float16: 5e-3, torch.float32: 2e-3}
_TOLERANCES |= {torch.float8_e4m3fn: 0.15, torch.int8: 0.05}  # of caches
_QUANTIZED_TOLERANCES = {"int8": 0.1, "int4": 0.4, "fp8": 0.15}
_FP8_TOLERANCE = 0.08
"""Of products with inputs in fp8, which are rounded by 2.5 %."""

_SAMPLER_TOLERANCE = 1e-3
"""In probability."""

# Tokens of a measured prompt on CUDA, and its contexts of decodes. A CPU only compares.
_PROMPT_TOKENS, _CONTEXT_TOKENS, _NUM_DECODES = 2048, 512, 64
_CPU_PROMPT_TOKENS = 300


def tuner_for(device: torch.device) -> Tuner:
    """What settles components on a device."""
    check_device = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    return Tuner(open_choices(device), measure_on(device), check_device)


@torch.inference_mode()
def tune_kernels(model: ModelFacts, config: EngineConfig, tuner: Tuner, *, is_draft: bool = False) -> EngineConfig:
    """Name in `kernels` what computes every component of the model.

    Of a module of transformers only the sampler is settled here. What attends to its cache is the preferred candidate,
    which is compared once the module is loaded. A draft model leaves out what is asked for and not possible for it.

    Raises:
        ModelError: The settings name a component or a candidate that does not exist here.
    """
    components = _COMPONENTS[config.device.type]
    known = (*components, "threads") if config.device.type == "cpu" else tuple(components)
    for name in config.options.kernels:
        if name not in known:
            there_is = ", ".join(known)
            raise ModelError(f"kernels: there is no component {name} on {config.device.type}: there is {there_is}")
    if config.device.type == "cpu":
        library.load()  # it takes the number of threads from torch
        _check_threads(config.options.kernels.get("threads"))
    config = replace(config, kernels={})  # what is asked for later must not spoil what is tried and kept before
    with _one_torch_thread():
        for name, make in components.items():
            asked = config.options.kernels.get(name)
            component = make(name, model, config) if isinstance(model, ModelConfig) else _of_module(name, model, config)
            if is_draft and asked not in (component.names if component else ()):
                asked = None
            if component is None and asked is not None:
                raise ModelError(f"kernels: {name} leaves no choice for this model with these settings")
            if component is not None:
                chosen = tuner.tune(component, asked)
                config = replace(config, kernels={**config.kernels, name: chosen})
    config = _with_one_cache(config)
    if config.device.type == "cuda":
        torch.cuda.empty_cache()  # what the trials took is free for the cache
    return config


def _check_threads(asked: str | None) -> None:
    known = dict.fromkeys(("1", str(torch.get_num_threads())))
    if asked is not None and asked not in known:
        raise ModelError(f"kernels: threads cannot be {asked} here: there is {', '.join(known)}")


def _with_one_cache(config: EngineConfig) -> EngineConfig:
    """Torch's attention has a cache of its own, so it computes decodes and prompts, or neither.

    Raises:
        ModelError: The settings ask for torch in one and for something else in the other.
    """
    names = ("decode_attention", "prefill_attention")
    if config.kernels.get(names[1]) != "torch" or config.kernels.get(names[0]) == "torch":
        return config
    asked = config.options.kernels
    if asked.get(names[1]) == "torch" and asked.get(names[0]):
        raise ModelError(f"kernels: {names[0]} must be torch, too, if {names[1]} is, got {asked[names[0]]}")
    logger.warning("decode_attention: torch as well, since one cache serves decodes and prompts")
    return replace(config, kernels={**config.kernels, names[0]: "torch"})


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Several spin for a while after each operation, on the cores that Weft's need; trials took four times as long."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(number)


def threads(shapes: str, number: int, set_number: Callable[[int], None], run: Callable[[], object]) -> Component:
    """One thread for a whole step, or all of them: a small model may lose more by sharing a step than it gains."""

    def candidate(num_threads: int) -> Candidate:
        def timed() -> None:
            set_number(num_threads)
            run()

        return Candidate(str(num_threads), lambda: Trial(lambda: (), timed))

    return Component("threads", shapes, (candidate(1), candidate(number)), str(number), None)


Make = Callable[[str, ModelConfig, EngineConfig], Component | None]
"""Describes the component of a name for a model; None if the model has no such part."""


def _component(
    name: str,
    names: tuple[str, ...],
    trials: Trials,
    shapes: str,
    tolerance: float,
    config: EngineConfig,
    fallback: str = "torch",
) -> Component:
    """A component whose candidates have these names, with something to fall back on."""
    candidates = tuple(
        Candidate(named, partial(trials.trial, replace(config, kernels={**config.kernels, name: named})))
        for named in names[: 1 if config.options.deterministic else None]
    )
    return Component(name, shapes, candidates, fallback, trials.reference, tolerance)


Names = Callable[[ModelConfig, EngineConfig], tuple[str, ...]]
"""What there is to choose from for a model, the preferred one first."""


def _attention(
    find_names: Names,
    make_steps: Callable[[ModelConfig, EngineConfig], list[StepShape]],
    name: str,
    model: ModelConfig,
    config: EngineConfig,
) -> Component | None:
    if not paged_specs(model, config):
        return None
    by_torch = name == "prefill_attention" and config.kernels["decode_attention"] == "torch"
    names = () if by_torch else find_names(model, config)  # one cache serves both
    steps = make_steps(model, config)
    cache = str(config.kv_cache_dtype).removeprefix("torch.")
    shapes = f"{_attention_text(model, config)}, {_dtype_text(config)}, cache {cache}, {_limits_text(config)}"
    trials = AttentionTrials(model, config, steps)
    return _component(name, names, trials, shapes, _TOLERANCES[config.kv_cache_dtype], config)


def _decode_names(model: ModelConfig, config: EngineConfig) -> tuple[str, ...]:
    """Tiles of Weft's kernel."""
    return _tile_names(model, config)[0]


def _prefill_names(model: ModelConfig, config: EngineConfig) -> tuple[str, ...]:
    """Tiles of Weft's kernel, then the libraries that are installed."""
    return (*_tile_names(model, config)[1], *installed_libraries(config.device))


def _tile_names(model: ModelConfig, config: EngineConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """For decodes and for prompts; results that are deterministic have one tile, which needs no name."""
    if config.options.deterministic:
        return ("triton",), ("triton",)
    groups = [CacheGroup(spec, (index,)) for index, spec in enumerate(paged_specs(model, config))]
    decode, prompts = tile_names(groups, model.num_heads, config.dtype, config.device)
    return tuple(decode), tuple(prompts)


def _block(names: tuple[str, ...], num_rows: int, name: str, model: ModelConfig, config: EngineConfig) -> Component:
    """Everything in a block but attention: compared with a prompt and one-token requests, timed with the latter."""
    num_tokens = min(33, config.max_model_len, config.max_num_batched_tokens)
    steps = [StepShape(1, 0, num_tokens), StepShape(min(num_rows, config.max_num_seqs), 0, 1)]
    quantization = config.options.quantization
    stored = "" if quantization == "none" else f", {quantization}"
    shapes = f"{_block_text(model, config)}{stored}, {num_rows} rows"
    tolerance = _QUANTIZED_TOLERANCES.get(quantization, _TOLERANCES[config.dtype])
    return _component(name, names, BlockTrials(model, config, steps), shapes, tolerance, config)


def _few_row_products(names: tuple[str, ...], name: str, model: ModelConfig, config: EngineConfig) -> Component | None:
    """A block again, timed with few rows, whose products may be Weft's own; None where only cuBLAS may compute them."""
    if (
        config.options.deterministic
        or config.dtype == torch.float32
        or config.kernels["norm_and_activation"] == "torch"
    ):
        return None
    rows = [n for n in (8, 4, 2, 1) if n <= min(config.max_num_seqs, config.max_num_batched_tokens)]
    steps = [StepShape(num_rows, 0, 1) for num_rows in rows]
    trials = BlockTrials(model, config, steps, are_separate=True)
    shapes = f"{_block_text(model, config)}, at most {rows[0]} rows"
    return _component(name, names, trials, shapes, _TOLERANCES[config.dtype], config, "cublas")


def _packed_products(name: str, model: ModelConfig, config: EngineConfig) -> Component | None:
    """Products of matrices that stay packed, or are dequantized (torch); None if there are none."""
    is_packed = config.options.quantization != "none" or (model.quantization and config.options.load_format != "dummy")
    names = packed_products(model, config)
    if not is_packed or names == ("torch",) or not has_triton(config.device):
        return None
    from weft.engine.tune.triton_trials import PackedTrials, packed_parts

    parts = packed_parts(model, config)
    if not parts:
        return None
    shapes = ", ".join(f"{text}: {part.ref.out_features} x {part.ref.in_features}" for text, part in parts.items())
    tolerance = _TOLERANCES[config.dtype] if len(names) == 1 else _FP8_TOLERANCE
    trials = PackedTrials(model, config, parts)
    return _component(name, names, trials, f"{shapes}, {_dtype_text(config)}", tolerance, config)


def _experts(name: str, model: ModelConfig, config: EngineConfig) -> Component | None:
    """Products of experts that are plain; None if there are none."""
    spec = next(filter(None, map(step_trials.experts_of, step_trials.tried_blocks(model, config))), None)
    if spec is None or not has_triton(config.device):
        return None
    from weft.engine.kernels.triton.products import has_grouped  # not installed without CUDA
    from weft.engine.tune.triton_trials import packed_parts

    if any(part.is_expert for part in packed_parts(model, config).values()):
        return None
    is_grouped = has_grouped(config.device, config.dtype) and not config.options.deterministic
    names = ("grouped", "triton") if is_grouped else ("triton",)
    trials, shapes = ExpertsTrials(model, config, spec), _block_text(model, config, spec)
    return _component(name, names, trials, shapes, _TOLERANCES[config.dtype], config)


def _adapters(name: str, model: ModelConfig, config: EngineConfig) -> Component | None:
    """What low-rank adapters add; None if there are none."""
    if not config.options.max_loras or not has_triton(config.device):
        return None
    from weft.engine.tune.triton_trials import AdapterTrials  # not installed without CUDA

    shapes = f"{model.hidden_size} values, rank {config.options.max_lora_rank}, {_dtype_text(config)}"
    return _component(name, ("triton",), AdapterTrials(model, config), shapes, _TOLERANCES[config.dtype], config)


def _launches(names: tuple[str, ...], name: str, model: ModelConfig, config: EngineConfig) -> Component | None:
    """A block once more, whose kernels may start before the one before them has ended; None where they cannot."""
    if config.options.deterministic or not has_triton(config.device):
        return None
    from weft.engine.kernels.triton.layers_jit import supports_dependent_launch  # not installed without CUDA

    if not supports_dependent_launch(config.device):
        return None
    steps = [StepShape(1, 0, min(33, config.max_model_len, config.max_num_batched_tokens)), StepShape(1, 0, 1)]
    trials = BlockTrials(model, config, steps)
    return _component(name, names, trials, _block_text(model, config), _TOLERANCES[config.dtype], config, "plain")


def _of_module(name: str, model: ModelFacts, config: EngineConfig) -> Component | None:
    """The component of a model that is a module of transformers."""
    return _sampler(_SAMPLERS[config.device.type], name, model, config) if name == "sampler" else None


def _sampler(names: tuple[str, ...], name: str, model: ModelFacts, config: EngineConfig) -> Component:
    shapes = f"vocabulary of {model.vocab_size}"
    return _component(name, names, SamplerTrials(model, config), shapes, _SAMPLER_TOLERANCE, config)


def _cpu_steps(model: ModelConfig, config: EngineConfig) -> list[StepShape]:
    """A prompt, its continuation, a decode; of an encoder whole texts alone."""
    longest = min(_CPU_PROMPT_TOKENS, config.max_model_len // 2, config.max_num_batched_tokens // 2)
    num_tokens = max(longest, 1)
    if model.is_bidirectional:
        return _within(config, [StepShape(2, 0, num_tokens)])
    return _within(config, [StepShape(2, 0, num_tokens), StepShape(2, num_tokens, 9), StepShape(2, num_tokens + 9, 1)])


def _decode_steps(model: ModelConfig, config: EngineConfig) -> list[StepShape]:
    """Contexts in chunks, then a decode."""
    num_requests = min(_NUM_DECODES, config.max_num_seqs, max(config.max_num_batched_tokens // 16, 1))
    chunk = config.max_num_batched_tokens // num_requests
    num_tokens = max(min(_CONTEXT_TOKENS, config.max_model_len - 1), 1)
    starts = range(0, num_tokens, chunk)
    chunks = [StepShape(num_requests, start, min(chunk, num_tokens - start)) for start in starts]
    return _within(config, [*chunks, StepShape(num_requests, num_tokens, 1)])


def _prefill_steps(model: ModelConfig, config: EngineConfig) -> list[StepShape]:
    """Half of each prompt, the other half behind it, then whole prompts, as many as fit a step."""
    windows = [spec.sliding_window for spec in paged_specs(model, config) if spec.sliding_window]
    longest = min(_PROMPT_TOKENS, config.max_model_len, config.max_num_batched_tokens, *windows)
    num_requests = min(config.max_num_batched_tokens // longest, config.max_num_seqs)
    half = longest // 2
    halves = [StepShape(num_requests, 0, half), StepShape(num_requests, half, longest - half)]
    return _within(config, [*halves, StepShape(num_requests, 0, longest)])


def _within(config: EngineConfig, steps: list[StepShape]) -> list[StepShape]:
    """The steps that the model's context has room for."""
    return [s for s in steps if s.num_new and s.num_cached + s.num_new <= config.max_model_len]


def _attention_text(model: ModelConfig, config: EngineConfig) -> str:
    kinds, specs = [], paged_specs(model, config)
    for spec in specs:
        more = {"window": spec.sliding_window, "span": spec.span, "scale": spec.scale, "soft cap": spec.soft_cap}
        parts = [f"{name} {value:g}" for name, value in more.items() if value is not None]
        parts += ["with ALiBi"] * bool(spec.slopes) + ["with sinks"] * spec.has_sinks
        parts += ["both ways"] * spec.is_bidirectional
        kinds.append(" ".join([f"{spec.num_kv_heads} x {spec.head_dim}", *parts]))
    heads = " and ".join(dict.fromkeys(str(step_trials.num_heads(model, spec)) for spec in specs))
    return f"{heads} heads over {' and '.join(kinds)}{' with norms' * (model.switches.qk_norm is not None)}"


def _block_text(model: ModelConfig, config: EngineConfig, part: PartSpec | None = None) -> str:
    digest = hashlib.blake2b(repr(part or step_trials.tried_block(model, config)).encode(), digest_size=4).hexdigest()
    sizes = f"{model.hidden_size} x {model.intermediate_size}, {_attention_text(model, config)}, block {digest}"
    return f"{sizes}, {_dtype_text(config)}"


def _dtype_text(config: EngineConfig) -> str:
    return f"{str(config.dtype).removeprefix('torch.')}{', deterministic' * config.options.deterministic}"


def _limits_text(config: EngineConfig) -> str:
    limits = config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len
    return f"blocks of {config.block_size}, at most {' '.join(map(str, limits))}"


_SAMPLERS = {"cpu": ("native",), "cuda": ("triton",)}

_COMPONENTS: Mapping[str, Mapping[str, Make]] = {
    # The preferred candidate first. How kernels are launched comes before attention, and attention before what is tried
    # together with it, so that what serves is what was compared.
    "cpu": {
        "attention": partial(_attention, lambda model, config: ("native",), _cpu_steps),
        "layers": partial(_block, ("native",), 16),
        "sampler": partial(_sampler, _SAMPLERS["cpu"]),
    },
    "cuda": {
        "packed_products": _packed_products,
        "experts": _experts,
        "adapters": _adapters,
        "launches": partial(_launches, ("early", "plain")),
        "decode_attention": partial(_attention, _decode_names, _decode_steps),
        "prefill_attention": partial(_attention, _prefill_names, _prefill_steps),
        "norm_and_activation": partial(_block, ("triton", "torch"), 64),
        "few_row_products": partial(_few_row_products, tuple(FEW_ROWS)),
        "sampler": partial(_sampler, _SAMPLERS["cuda"]),
    },
}
