"""The range of every number in the JSON files of a model folder, by the name of its field.

A file may come from anybody. Counts decide how much is made before the weights are looked at, divisors must not be 0,
and what has no end would never be computed. The ranges are far beyond what any published model has.
"""

import re
from functools import cache
from math import inf

MAX_NUM_LAYERS = 512
MAX_NUM_EXPERTS = 16_384
MAX_NUM_EXPERTS_IN_ALL = 65_536
"""Experts of all layers: each may have tensors of its own."""
MAX_SIZE = 1 << 24
"""Of a dimension of a tensor, and of the vocabulary."""
MAX_CONTEXT = 1 << 30
"""Tokens of the longest context, after it was extended."""

_ANY_INTEGER = 1 << 31
_ANY_NUMBER = 1e12

_RANGES: tuple[tuple[str, float, float], ...] = (
    (r"(num_)?(hidden|encoder|decoder)_layers|(n|num)_layers?|num_blocks", 1, MAX_NUM_LAYERS),
    (r"num_(nextn_predict|kv_shared|dense)_layers|max_window_layers|first_k_dense_replace", 0, _ANY_INTEGER),
    (r"(q_)?group_size", -1, MAX_SIZE),
    (r"hidden_size|vocab_size|block_multiple_of", 1, MAX_SIZE),
    (r".*experts(_per_tok(en)?)?|.*topk|moe_k", 0, MAX_NUM_EXPERTS),
    (r".*heads|n_head", 1, 1 << 16),
    ("sliding_window_pattern", 0, _ANY_INTEGER),
    (r".*_(interval|period)|(decoder|interleave|moe)_.*step|.*every_n_layers", 1, _ANY_INTEGER),
    (r"n_groups?|num_groups|mamba_n_groups", 1, 1 << 16),
    (r".*intermediate_size|.*_per_layer_input|q_lora_rank|(qk_)?rot?(pe|ary)_(head_)?dim|.*window_size", 0, MAX_SIZE),
    (
        r".*(_size|_dim|_rank|_width|_kernel|_d_conv|_expand|L_cache)|n_embd?|n_inner|d_model|.*d_state|expand|dim",
        1,
        MAX_SIZE,
    ),
    (r".*max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length", 1, MAX_CONTEXT),
    (r".*(theta|base_freq)|rotary_emb_base", 2.0, 1e15),
    (r"((short|long)_)?factor|alpha", 1e-3, 1e6),
    (r"(.*_)?(eps|epsilon)", 0.0, 1.0),
    (
        r".*soft_?cap(ping)?|logits_scaling|query_pre_attn_scalar|(low|high)_freq_factor|beta_(fast|slow)",
        1e-6,
        _ANY_NUMBER,
    ),
    (r"partial_rotary_factor|rotary_pct", 0.0, 1.0),
    ("time_step_limit", 0.0, inf),
)
"""The first pattern that a whole name has counts; other fields may have any number that is not beyond all use."""


@cache
def own_range(name: str) -> tuple[float, float] | None:
    """The least and the largest value of a field; None: it is like any other."""
    return next(((low, high) for pattern, low, high in _RANGES if re.fullmatch(pattern, name)), None)


def range_of(name: str, is_integer: bool) -> tuple[float, float]:
    """The least and the largest value of any field."""
    any_number = _ANY_INTEGER if is_integer else _ANY_NUMBER
    return own_range(name) or (-any_number, any_number)
