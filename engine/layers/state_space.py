"""The state space of Mamba 2 (Dao and Gu, 2024): one decay per head and token, and states in float32.

A head keeps a matrix (head_dim, state_size). A token multiplies it by exp(dt * decay), adds dt * outer(x, b), and reads
it by c. A prompt is computed in chunks, by products of matrices (section 6 of the paper); a decode is one update.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.engine.layers.recurrence import run_requests
from weft.engine.layers.step_caches import StateStep

# Tokens of a chunk: products within a chunk grow with its length, the number of launches with its inverse.
_CHUNK = 64


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Sizes and parameters, which are float32.

    Attributes:
        head_dim, state_size: Sizes of a head's state.
        num_groups: Heads of a group share b and c.
        decays: (num_heads,) below zero.
        skips: (num_heads,) factors of the inputs that are added to the outputs.
        time_bias: (num_heads,) added to the time steps, before softplus.
        time_scale: Factor of the time steps, before the bias.
        time_limits: The least and the largest time step.
        gate_scale: Factor of the gate, before its activation.
    """

    head_dim: int
    state_size: int
    num_groups: int
    decays: torch.Tensor
    skips: torch.Tensor
    time_bias: torch.Tensor
    time_scale: float = 1.0
    time_limits: tuple[float, float] = (0.0, float("inf"))
    gate_scale: float = 1.0

    @property
    def num_heads(self) -> int:
        """Heads."""
        return len(self.decays)


class StateSpaceScan:
    """Computes a state space by torch's operations."""

    def __init__(self, space: StateSpace) -> None:
        """Compute this one."""
        self.space = space

    def __call__(
        self, channels: torch.Tensor, times: torch.Tensor, gate: torch.Tensor | None, states: StateStep, cache: int
    ) -> torch.Tensor:
        """Compute a step.

        Args:
            channels: (num_tokens, num_heads * head_dim + 2 * num_groups * state_size): x, b and c.
            times: (num_tokens, num_heads) time steps.
            gate: (num_tokens, num_heads * head_dim), whose SiLU multiplies the outputs; None for no gate.
            states: The caches of the step.
            cache: Index of the cache, (num_heads, head_dim, state_size) of a request.

        Returns:
            Outputs (num_tokens, num_heads * head_dim) of the dtype of channels.
        """
        space, num_tokens = self.space, len(channels)
        shared = space.num_groups * space.state_size
        x, b, c = channels.float().split_with_sizes((channels.size(1) - 2 * shared, shared, shared), 1)
        x = x.reshape(num_tokens, space.num_heads, space.head_dim)
        b, c = (part.reshape(num_tokens, space.num_groups, space.state_size) for part in (b, c))
        steps = F.softplus(times.float() * space.time_scale + space.time_bias).clamp(*space.time_limits)
        inputs = (steps * space.decays, x * steps.unsqueeze(-1), b, c)
        outputs, after = run_requests(self._update, self._scan, inputs, states.read(cache), states.query_start_locs)
        states.write(cache, after)
        outputs = outputs.addcmul_(x, space.skips.unsqueeze(-1)).flatten(1)
        if gate is not None:
            outputs *= F.silu(gate.float() * space.gate_scale)
        return outputs.to(channels.dtype)

    def _update(
        self, decays: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_requests, num_heads, head_dim = x.shape
        states = states * decays.exp()[..., None, None]
        grouped = states.view(num_requests, self.space.num_groups, -1, self.space.state_size)
        rows = x.view(num_requests, self.space.num_groups, -1)
        grouped.addcmul_(rows.unsqueeze(-1), b.unsqueeze(2))
        return (grouped @ c.unsqueeze(-1)).view(num_requests, num_heads, head_dim), states

    def _scan(
        self, decays: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state, outputs = states[0], []  # (num_heads, head_dim, state_size)
        for first in range(0, len(x), _CHUNK):
            chunk = slice(first, first + _CHUNK)
            output, state = self._scan_chunk(decays[chunk], x[chunk], b[chunk], c[chunk], state)
            outputs.append(output)
        return torch.cat(outputs), state.unsqueeze(0)

    def _scan_chunk(
        self, decays: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What each token takes from the tokens of the chunk, and what it takes from the state before the chunk."""
        heads_per_group = self.space.num_heads // self.space.num_groups
        b, c = (part.transpose(0, 1).repeat_interleave(heads_per_group, 0) for part in (b, c))  # (num_heads, chunk, n)
        x = x.transpose(0, 1)
        # The sums reach far below zero, where float32 would lose the difference of two neighbours.
        sums = decays.t().double().cumsum(1)  # (num_heads, chunk)
        between = (sums.unsqueeze(2) - sums.unsqueeze(1)).float()  # from token j to token i: [:, i, j]
        later = torch.ones_like(between[0], dtype=torch.bool).triu_(1)
        weights = (c @ b.mT) * between.masked_fill_(later, -torch.inf).exp_()
        outputs = weights @ x + (c @ state.mT) * sums.float().exp().unsqueeze(-1)
        left = (sums[:, -1:] - sums).float().exp().unsqueeze(-1)
        after = state * sums[:, -1].float().exp()[:, None, None] + (x * left).mT @ b
        return outputs.transpose(0, 1), after
