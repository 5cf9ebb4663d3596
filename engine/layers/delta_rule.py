"""Linear attention: a matrix of fixed size per head stands for all earlier tokens; every token decays and changes it.

    state <- decay * state
    write  = rate * (value - key @ state)      the gated delta rule: Yang et al., 2024 (arXiv 2412.06464)
           = value                             without rates, as in lightning attention: Qin et al., 2024
    state <- state + outer(key, write)
    output = query @ state

A decay belongs to a head, or to each channel of its key (Kimi Linear, 2025: arXiv 2510.26692). All is float32.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from weft.engine.layers.recurrence import run_requests
from weft.engine.layers.step_caches import StateStep

_CHUNK, _CHANNEL_CHUNK = 64, 16
"""Tokens computed at a time; fewer with a decay for each channel, where a pair of tokens takes the memory of a key."""


class DeltaInputs(NamedTuple):
    """What the tokens of a step do to their states, float32.

    Attributes:
        queries, keys: (num_tokens, num_heads, key_dim).
        values: (num_tokens, num_heads, value_dim).
        log_decays: (num_tokens, num_heads, key_dim or 1), at most 0.
        rates: (num_tokens, num_heads, 1), how much of a state's answer to the key is replaced. Empty for nothing at
            all: (num_tokens, 0).
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    log_decays: torch.Tensor
    rates: torch.Tensor


class DeltaRule(Protocol):
    """Computes linear attention for the tokens of a step."""

    def __call__(self, inputs: DeltaInputs, states: StateStep, cache: int) -> torch.Tensor:
        """Outputs (num_tokens, num_heads, value_dim); the cache holds (num_heads, key_dim, value_dim) of a request."""


def delta_rule(inputs: DeltaInputs, states: StateStep, cache: int) -> torch.Tensor:
    """`DeltaRule` by torch's operations."""
    outputs, after = run_requests(delta_step, delta_scan, inputs, states.read(cache), states.query_start_locs)
    states.write(cache, after)
    return outputs


def delta_step(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    log_decays: torch.Tensor,
    rates: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each request; states (num_requests, num_heads, key_dim, value_dim)."""
    states = states * log_decays.exp().unsqueeze(-1)
    if rates.numel():
        values = (values - (keys.unsqueeze(-2) @ states).squeeze(-2)).mul_(rates)
    states.addcmul_(keys.unsqueeze(-1), values.unsqueeze(-2))
    return (queries.unsqueeze(-2) @ states).squeeze(-2), states


def delta_scan(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    log_decays: torch.Tensor,
    rates: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Consecutive tokens of one request; states (1, num_heads, key_dim, value_dim)."""
    size = _CHUNK if log_decays.size(-1) == 1 else _CHANNEL_CHUNK
    chunks = zip(*(torch.split(part, size) for part in (queries, keys, values, log_decays, rates)), strict=True)
    state, outputs = states[0].clone(), []
    for chunk in chunks:
        outputs.append(_scan_chunk(state, *chunk))
    return torch.cat(outputs), state.unsqueeze(0)


def _scan_chunk(
    state: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    log_decays: torch.Tensor,
    rates: torch.Tensor,
) -> torch.Tensor:
    """Change the state in place. What a token writes depends on what earlier ones wrote: a triangular system."""
    queries, keys, values = (part.transpose(0, 1) for part in (queries, keys, values))  # (num_heads, chunk, size)
    # The sums reach far below zero, where float32 would lose the difference of two neighbours.
    logs = log_decays.transpose(0, 1).double().cumsum(1)
    since_start, until_end = logs.exp().float(), (logs[:, -1:] - logs).exp_().float()
    products = _Products((logs.unsqueeze(2) - logs.unsqueeze(1)).clamp_(max=0).float().exp_())
    if rates.numel():
        rates = rates.transpose(0, 1)
        wanted = (values - (keys * since_start) @ state).mul_(rates)
        system = products(keys * rates, keys)  # of ones on the diagonal
        values = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    outputs = ((queries * since_start) @ state).baddbmm_(products(queries, keys), values)
    state.mul_(since_start[:, -1].unsqueeze(-1)).baddbmm_((keys * until_end).mT, values)
    return outputs.transpose(0, 1)


@dataclass(frozen=True, slots=True)
class _Products:
    """Products of each token's left row with the right rows up to it, decayed by what lies between.

    Attributes:
        decays: (num_heads, chunk, chunk, key_dim or 1), anything from a later token.
    """

    decays: torch.Tensor

    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Two of (num_heads, chunk, key_dim) -> (num_heads, chunk, chunk)."""
        if self.decays.size(-1) == 1:
            return (left @ right.mT).mul_(self.decays.squeeze(-1)).tril_()
        return ((self.decays * right.unsqueeze(1)) @ left.unsqueeze(-1)).squeeze(-1).tril_()
