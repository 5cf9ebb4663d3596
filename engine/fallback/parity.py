"""Compares a module over Weft's cache with the same module alone, on two short prompts, before it serves anything.

A module may do what no recording shows, such as ignoring positions, and a new version of transformers may change it.
Both would give wrong answers without an error.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weft.engine.batch import Batch
from weft.engine.cache.specs import group_layers
from weft.engine.config import EngineConfig
from weft.engine.fallback.config import FallbackConfig
from weft.engine.fallback.loading import TransformersModel, load_fallback
from weft.engine.fallback.request_model import GoingOn, RequestModel
from weft.engine.kernels.choice import make_caches
from weft.engine.kernels.torch.caches import Caches, Context
from weft.engine.layers.kernels import LayerKernels
from weft.engine.runner.dummy_batch import dummy_batch
from weft.engine.weights.reader import Progress
from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import format_size

logger = logging.getLogger(__name__)

_NUM_TOKENS = 16
"""Tokens of each prompt, at most."""

_NUM_TOKENS_OF_REQUEST = 64
"""The same of the prompt of a module that runs request by request, whose layers may be of any kind."""

_FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
"""What somebody else's module may raise."""

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.4}
"""Bounds on the root mean square of the error, in standard deviations of a row of logits. In bfloat16 and with random
weights, 28 layers of Qwen3-0.6B's shape differ by 0.06, because the module's own attention rounds its scores. The
tiniest model of any architecture differs by 0.26."""


_MAX_COMPARED_BYTES = {"cpu": 32_000_000_000, "cuda": 160_000_000_000}
"""Above this size of the weights the comparison at start-up is left out: it reads them four times."""


def load_compared(
    model: FallbackConfig, config: EngineConfig, kernels: LayerKernels | None, folder: Path, progress: Progress
) -> TransformersModel | RequestModel:
    """Load transformers' module, and compare it with itself over Weft's cache.

    Raises:
        ModelError: It cannot be loaded, or it differs.
    """
    loaded = load_fallback(
        folder,
        model,
        device=config.device,
        dtype=config.dtype,
        kernels=kernels,
        load_format=config.options.load_format,
        progress=progress,
    )
    is_compared = loaded.weights_bytes <= _MAX_COMPARED_BYTES[config.device.type]
    if not is_compared:
        size = format_size(loaded.weights_bytes)
        logger.warning("transformers' module is not compared with itself over its cache, since it takes %s", size)
    if isinstance(loaded, RequestModel):
        logger.warning("%s runs request by request, which is slow: %s", model.architecture, model.reason)
        prepare_requests(loaded, config, model.vocab_size, is_compared)
    elif is_compared:
        config = dataclasses.replace(config, rounded_kv=None)
        caches = make_caches(group_layers(loaded.cache_specs), num_blocks(config), config, model.num_heads)
        compare(loaded, caches, config, model.vocab_size)
    return loaded


def num_blocks(config: EngineConfig) -> int:
    """Blocks that the caches need for the comparison."""
    return 1 + 2 * -(-_NUM_TOKENS // config.block_size)


def compare(model: TransformersModel, caches: Caches, config: EngineConfig, vocab_size: int) -> None:
    """Compute two prompts in three steps: a part of both, the rest but one token, a decode. Compare all logits.

    Args:
        caches: Of the model, with `num_blocks` blocks.

    Raises:
        ModelError: They differ by more than the dtype explains, or an id that is clearly the best one differs.
    """
    with _module_faults():
        _compare(model, caches, config, vocab_size)


def prepare_requests(model: RequestModel, config: EngineConfig, vocab_size: int, is_compared: bool) -> None:
    """Choose how a module that runs request by request goes on with a context, and measure what that keeps.

    Prompts in parts are compared with whole ones. Chunks must be as exact as single tokens, not only within the bound:
    in 16 bits, what a module forgets between chunks may be smaller than that.

    Args:
        is_compared: False takes the way of transformers' generate, without a comparison.

    Raises:
        ModelError: No way is right, or the module does not run.
    """
    with _module_faults(), torch.inference_mode():
        if is_compared:
            _choose_way(model, config, vocab_size)
        model.measure()
    logger.info("requests go on %s", model.going_on.value)


@contextlib.contextmanager
def _module_faults() -> Iterator[None]:
    try:
        yield
    except _FAULTS as error:
        fault = str(error).strip().partition("\n")[0]  # some begin with an empty line
        raise ModelError(f"transformers' module does not run ({type(error).__name__}: {fault})") from error


def _choose_way(model: RequestModel, config: EngineConfig, vocab_size: int) -> None:
    length = min(_NUM_TOKENS_OF_REQUEST, config.max_model_len)
    token_ids = _token_ids(2, length, config, vocab_size)
    expected = model.plain_logits(token_ids)  # (2, length, vocab_size)
    ends = sorted({length * 3 // 8, length * 5 // 8, length - 2, length - 1, length} - {-1, 0})
    parts = list(zip([0, *ends], ends, strict=False))
    tolerance, errors = _TOLERANCES[config.dtype], {}
    for way in GoingOn:
        model.going_on = way
        errors[way] = _error_of_parts(model, token_ids, parts, expected)
    exact = errors[GoingOn.ONE_BY_ONE]
    if errors[GoingOn.CHUNKS] <= min(2 * exact + _TOLERANCES[torch.float32], tolerance):
        model.going_on = GoingOn.CHUNKS
    elif exact <= tolerance:
        model.going_on = GoingOn.ONE_BY_ONE
    elif not errors[GoingOn.AGAIN] <= tolerance:
        raise ModelError(
            f"transformers' module answers differently in parts: logits by {errors[GoingOn.AGAIN]:.2g} standard "
            f"deviations (bound: {tolerance})"
        )


def _error_of_parts(model: RequestModel, token_ids: Tensor, parts: list[tuple[int, int]], expected: Tensor) -> float:
    """The error of the present way, infinite if the module cannot go this way.

    The prompts take turns, since a module may keep states in itself, where all requests share them.
    """
    contexts = [Context() for _ in token_ids]
    got = torch.empty_like(expected)
    try:
        for start, stop in parts:
            for prompt, context in enumerate(contexts):
                logits = model.go_on(context, token_ids[prompt : prompt + 1, start:stop], stop - start)
                got[prompt, start:stop] = logits[start - stop :]
    except _FAULTS:
        if model.going_on is GoingOn.AGAIN:
            raise
        return float("inf")
    return _error(got, expected)


def _compare(model: TransformersModel, caches: Caches, config: EngineConfig, vocab_size: int) -> None:
    length = min(_NUM_TOKENS, config.max_model_len)
    whole = dummy_batch(2 * length, list(dict.fromkeys(model.cache_specs)), config.block_size, 1, length)
    with torch.inference_mode():
        token_ids = _token_ids(2, length, config, vocab_size)
        expected = model.plain_logits(token_ids)  # (2, length, vocab_size)
        got = torch.empty_like(expected)
        ends = sorted({length // 2, length - 1, length} - {0})
        for start, stop in zip([0, *ends], ends, strict=False):
            positions = torch.arange(start, stop, device=config.device).repeat(2)
            caches_of_step = caches.begin(_part(whole, start, stop))
            hidden = model.forward(token_ids[:, start:stop].flatten(), positions, caches_of_step)
            got[:, start:stop] = model.compute_logits(hidden).view(2, stop - start, -1)
        _check(got, expected, _TOLERANCES[config.dtype])


def _check(got: Tensor, expected: Tensor, tolerance: float) -> None:
    error, spread = _error(got, expected), expected.std(-1, keepdim=True)
    best = expected.topk(2).values
    is_clear = best[..., 0] - best[..., 1] > 4 * tolerance * spread[..., 0]
    differ = int((is_clear & (got.argmax(-1) != expected.argmax(-1))).sum())
    if not error <= tolerance or differ:  # not a number is no parity either
        raise ModelError(
            f"transformers' module answers differently over Weft's cache: {differ} greedy ids differ, and logits by "
            f"{error:.2g} standard deviations (bound: {tolerance})"
        )
    logger.info("transformers' module answers the same over Weft's cache: logits differ by %.2g deviations", error)


def _token_ids(num_prompts: int, length: int, config: EngineConfig, vocab_size: int) -> Tensor:
    return (torch.arange(num_prompts * length, device=config.device).view(num_prompts, -1) + 1) * 7919 % vocab_size


def _error(got: Tensor, expected: Tensor) -> float:
    """Root mean square, in standard deviations of a row."""
    return float(((got - expected) / expected.std(-1, keepdim=True)).square().mean().sqrt())


def _part(whole: Batch, start: int, stop: int) -> Batch:
    """The step that computes positions [start, stop) of all prompts, which are equally long."""
    tokens = np.flatnonzero((whole.positions >= start) & (whole.positions < stop))
    groups = tuple(dataclasses.replace(group, slot_mapping=group.slot_mapping[tokens]) for group in whole.groups)
    num_requests = whole.num_requests
    return dataclasses.replace(
        whole,
        token_ids=whole.token_ids[tokens],
        positions=whole.positions[tokens],
        query_start_locs=np.arange(num_requests + 1) * (stop - start),
        seq_lens=np.full(num_requests, stop),
        groups=groups,
        row_indices=np.arange(len(tokens)),
    )
