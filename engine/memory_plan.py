"""Divides memory among weights, activations and the KV cache.

`weft plan` prints the plan before anything is loaded: weights from their shapes, activations estimated. The engine
prints it after weights are loaded and a step is measured. Allocates nothing.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.engine.cache.specs import CacheGroup, CacheSpec, ModuleCache, PagedKV, StateSpec
from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelFacts
from weft.engine.host_memory import ALL_ON_DEVICE, HostShare
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import NO_INPUT, InputLimits
from weft.engine.wire.machine import MAX_CPU_CACHE_BYTES, cache_bytes, format_size

logger = logging.getLogger(__name__)

# States may take this share of the memory of the KV cache before fewer requests run at once, unless told otherwise.
_SHARE_OF_STATES = 0.5

# Beside the states of running requests, others are kept for prefixes and before drafts: as many as this share of the
# memory that is left holds, since a prefix needs blocks, too, and at most so many for each request.
_SHARE_OF_KEPT_STATES = 0.25
_MOST_KEPT_STATES = 4

# Lengths of requests, in tokens, for which the plan says how many run at once.
_LENGTHS = (1_024, 4_096, 16_384, 65_536)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose, and what the KV cache holds.

    Attributes:
        kv_cache_bytes: Of blocks and states.
        adapters_bytes: Of all slots for adapters, of weights_bytes.
        vision_bytes: Of what sees pictures, with the features that it keeps, of weights_bytes.
        encoding_bytes: To encode a picture; activations_bytes are at least as many.
        num_kept_states: States beside those of running requests, for prefixes and before drafts.
        host: What takes no memory of the device.
    """

    weights_bytes: int
    activations_bytes: int
    kv_cache_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    states_bytes: int = 0
    num_kept_states: int = 0
    adapters_bytes: int = 0
    host: HostShare = ALL_ON_DEVICE
    vision_bytes: int = 0
    encoding_bytes: int = 0

    @property
    def num_states(self) -> int:
        """States of a layer that keeps any."""
        return self.max_num_seqs + self.num_kept_states

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV cache holds; the null block holds none."""
        return (self.num_blocks - 1) * self.block_size

    def input_limits(self, model: ModelFacts) -> InputLimits:
        """What an encoder may read and its decoder write, so that both fit together.

        A context that was shortened is divided as the whole one is.

        Raises:
            ModelError: It has no room for the longest sound.
        """
        if not model.num_input_tokens:
            return NO_INPUT
        longest, own, size = model.num_input_tokens, model.max_position_embeddings, self.block_size
        num_blocks = -(-longest // size)
        if num_blocks * size + own > self.max_model_len:
            if model.audio:
                least = num_blocks * size + own
                message = f"max_model_len must be at least {least} for a model that hears, got {self.max_model_len}"
                raise ModelError(message)
            num_blocks = max(self.max_model_len * num_blocks // (num_blocks * size + own), 1)
        num_slots = num_blocks * size
        return InputLimits(min(longest, num_slots), min(own, self.max_model_len - num_slots), model.audio)

    def num_requests(self, num_tokens: int) -> int:
        """Requests of num_tokens each that the KV cache holds at once, if they share no prefix."""
        return (self.num_blocks - 1) // -(-num_tokens // self.block_size)

    def concurrency(self) -> str:
        """A printable line: how many requests of each length run at once."""
        lengths = [n for n in _LENGTHS if n < self.max_model_len] + [self.max_model_len]
        counts = [(min(self.num_requests(n), self.max_num_seqs), n) for n in lengths]
        listed = ", ".join(f"{count:,} with {n:,} tokens each" for count, n in counts)
        return f"at once      {listed} (never more than {self.max_num_seqs} requests)"

    def lines(self) -> list[str]:
        """The plan as printable lines."""
        at_once = self.num_tokens / self.max_model_len
        states = (
            f"states       {format_size(self.states_bytes)} of the KV cache = {self.max_num_seqs:,} requests and "
            f"{self.num_kept_states:,} for prefixes and drafts"
        )
        parts = {"adapters": self.adapters_bytes, "what sees pictures": self.vision_bytes}
        shown = ", ".join(f"{name} {format_size(num_bytes)}" for name, num_bytes in parts.items() if num_bytes)
        return [
            f"weights      {format_size(self.weights_bytes)}" + (f", of which {shown}" if shown else ""),
            f"activations  {format_size(self.activations_bytes)}"
            + (f", to encode a picture {format_size(self.encoding_bytes)}" if self.encoding_bytes else ""),
            f"KV cache     {format_size(self.kv_cache_bytes)} = {self.num_blocks:,} blocks of {self.block_size} = "
            f"{self.num_tokens:,} tokens = {at_once:.1f} requests of {self.max_model_len:,} tokens at once",
            *([states] if self.states_bytes else []),
            *([self.host.line] if self.host.num_layers else []),
        ]


def check_fit(*, weights_bytes: int, activations_bytes: int, free_bytes: int, host: HostShare = ALL_ON_DEVICE) -> None:
    """Refuse, before anything is loaded, a model that leaves nothing for the KV cache.

    Raises:
        ModelError: Weights and activations take all the free_bytes that there are now.
    """
    if weights_bytes + activations_bytes >= free_bytes:
        moved = f" with {host.whose} in host memory" * (host.num_layers > 0)
        raise ModelError(
            f"the model does not fit{moved}: weights take {format_size(weights_bytes)} and activations "
            f"{format_size(activations_bytes)}, but only {format_size(free_bytes)} are free; take a smaller model, or "
            "one in fewer bits, such as a Q4_K_M (`weft pull` lists some)"
        )


def make_plan(
    config: EngineConfig,
    groups: Sequence[CacheGroup[CacheSpec]],
    *,
    weights_bytes: int,
    activations_bytes: int,
    free_bytes: int,
    adapters_bytes: int = 0,
    host: HostShare = ALL_ON_DEVICE,
    vision_bytes: int = 0,
    encoding_bytes: int = 0,
) -> MemoryPlan:
    """Divide the memory: first the states of as many requests as may run at once, then kept states, then blocks.

    Raises:
        ModelError: Not even one request fits.
    """
    block_bytes = sum(group.block_bytes(config.block_size, config.kv_cache_dtype) for group in groups)
    state_bytes = sum(group.request_bytes for group in groups)
    kv_bytes = config.options.kv_cache_memory
    if kv_bytes is None:
        kv_bytes = cache_bytes(free_bytes, config.device.type)
    elif kv_bytes > free_bytes:
        message = f"kv_cache_memory is {format_size(kv_bytes)}, but only {format_size(max(free_bytes, 0))} are free"
        raise ModelError(message)
    max_num_seqs, num_kept_states = _divide_states(config, groups, kv_bytes)
    states_bytes = (max_num_seqs + num_kept_states + 1) * state_bytes
    blocks_per_request = -(-config.max_model_len // config.block_size)
    num_blocks = max_num_seqs * blocks_per_request + 1
    if any(group.spec.is_bidirectional for group in groups):  # kept for a step only, of which two may be under way
        num_blocks = min(num_blocks, 2 * (config.max_num_batched_tokens // config.block_size + max_num_seqs) + 1)
    paged_bytes = max(kv_bytes - states_bytes, 0)
    if block_bytes:
        num_blocks = min(paged_bytes // block_bytes, num_blocks)
    if num_blocks < 2 or kv_bytes < states_bytes:
        states = f", the states of {max_num_seqs} requests {format_size(states_bytes)}" if states_bytes else ""
        raise ModelError(
            f"no memory is left for the KV cache: {format_size(kv_bytes)}, a block takes {format_size(block_bytes)}"
            f"{states}"
        )
    max_model_len = min(config.max_model_len, (num_blocks - 1) * config.block_size)
    if max_model_len < config.max_model_len:
        logger.warning(
            "max_model_len lowered from %d to %d tokens, which fill the KV cache of %s",
            config.max_model_len,
            max_model_len,
            format_size(num_blocks * block_bytes + states_bytes),
        )
    return MemoryPlan(
        weights_bytes=weights_bytes,
        activations_bytes=activations_bytes,
        kv_cache_bytes=num_blocks * block_bytes + states_bytes,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        states_bytes=states_bytes,
        num_kept_states=num_kept_states,
        adapters_bytes=adapters_bytes,
        host=host,
        vision_bytes=vision_bytes,
        encoding_bytes=encoding_bytes,
    )


def least_kv_bytes(config: EngineConfig, groups: Sequence[CacheGroup[CacheSpec]]) -> int:
    """A KV cache for one request of max_model_len tokens, if that is asked for, or else of one step's tokens."""
    num_tokens = min(config.max_model_len, config.options.max_model_len or config.max_num_batched_tokens)
    block_bytes = sum(group.block_bytes(config.block_size, config.kv_cache_dtype) for group in groups)
    num_states = (config.options.max_num_seqs or 1) + 1
    states_bytes = num_states * sum(group.request_bytes for group in groups)
    return (-(-num_tokens // config.block_size) + 1) * block_bytes + states_bytes


def _divide_states(config: EngineConfig, groups: Sequence[CacheGroup[CacheSpec]], kv_bytes: int) -> tuple[int, int]:
    """How many requests run at once, and how many states are kept besides, in a cache of kv_bytes."""
    max_num_seqs, state_bytes = config.max_num_seqs, sum(group.request_bytes for group in groups)
    if not state_bytes:
        return max_num_seqs, 0
    if config.options.max_num_seqs is None:
        max_num_seqs = max(1, min(max_num_seqs, int(kv_bytes * _SHARE_OF_STATES) // state_bytes - 1))
        if max_num_seqs < config.max_num_seqs:
            size = format_size(state_bytes)
            logger.warning("at most %d requests run at once, since the states of one take %s", max_num_seqs, size)
    kinds = {type(group.spec) for group in groups}
    if ModuleCache in kinds:  # an object of a module is never copied
        return max_num_seqs, 0
    left = max(kv_bytes - (max_num_seqs + 1) * state_bytes, 0)
    share = 1.0 if kinds == {StateSpec} else _SHARE_OF_KEPT_STATES
    return max_num_seqs, min(int(left * share) // state_bytes, _MOST_KEPT_STATES * max_num_seqs)


def estimate_activations_bytes(model: ModelFacts, config: EngineConfig, specs: Sequence[CacheSpec]) -> int:
    """Bytes of the largest step, from the shapes alone: the widest layer for all tokens, and logits in float32.

    On a CPU a matrix may also keep its inputs in float32. specs are those of the model's caches. The tables of
    positions, which outlast the step, count here, too.
    """
    heads = max(
        (_head_values(spec, spec.num_heads or model.num_heads) for spec in specs if isinstance(spec, PagedKV)),
        default=0,
    )
    per_token = 4 * model.hidden_size + heads + 3 * model.feed_forward_values + model.kept_values
    logits = 3 * min(config.max_num_seqs, config.max_num_batched_tokens) * model.vocab_size * 4
    widened = max(model.feed_forward_values, model.num_heads * model.head_dim) * 4 if config.device.type == "cpu" else 0
    # Where no kernel updates states in place, those of one layer are copied: read, changed, put together again.
    states = 3 * config.max_num_seqs * max((s.bytes_per_request for s in specs if isinstance(s, StateSpec)), default=0)
    tables = (num_positions(config, specs) + model.short_context) * model.position_values * config.dtype.itemsize
    return config.max_num_batched_tokens * (per_token * config.dtype.itemsize + widened) + logits + states + tables


def num_positions(config: EngineConfig, specs: Sequence[CacheSpec]) -> int:
    """Positions that tables need to have: no plan has blocks for a longer request, however much memory is free.

    Measured steps may go as far as the token budget. specs are those of the model's caches.
    """
    block_bytes = sum(spec.bytes_per_block(config.block_size, config.kv_cache_dtype) for spec in specs)
    kv_bytes = config.options.kv_cache_memory
    if kv_bytes is None:
        is_cuda = config.device.type == "cuda"
        kv_bytes = torch.cuda.mem_get_info(config.device)[1] if is_cuda else MAX_CPU_CACHE_BYTES
    num_tokens = kv_bytes // max(block_bytes, 1) * config.block_size
    return min(config.max_model_len, max(num_tokens, config.max_num_batched_tokens))


def _head_values(spec: PagedKV, num_heads: int) -> int:
    """Values of a token's queries, keys, values and results; queries of latents are put together of two parts."""
    copies = 1 if spec.latent_dim is None else 2
    return num_heads * (copies * spec.head_dim + spec.value_dim) + 2 * spec.num_kv_heads * spec.head_dim
