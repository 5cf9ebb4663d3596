"""The selective scan of Mamba (Gu and Dao, 2023): a decay for each channel, state and token; states in float32.

A channel keeps state_size numbers. A token multiplies them by exp(dt * decays), adds dt * x * b, and reads them by c.
"""

import torch
import torch.nn.functional as F

from weft.engine.layers.recurrence import run_requests
from weft.engine.layers.step_caches import StateStep

# Tokens whose states are in memory at the same time.
_CHUNK = 64


class SelectiveScan:
    """Computes the scan by torch's operations."""

    def __init__(self, decays: torch.Tensor, skips: torch.Tensor, time_bias: torch.Tensor) -> None:
        """Take the parameters, all float32.

        Args:
            decays: (num_channels, state_size), below zero.
            skips: (num_channels,) factors of the inputs that are added to the outputs.
            time_bias: (num_channels,) added to the time steps, before softplus.
        """
        self.decays, self.skips, self.time_bias = decays, skips, time_bias

    def __call__(
        self,
        x: torch.Tensor,
        times: torch.Tensor,
        selection: tuple[torch.Tensor, torch.Tensor],
        gate: torch.Tensor,
        states: StateStep,
        cache: int,
    ) -> torch.Tensor:
        """Compute a step.

        Args:
            x: (num_tokens, num_channels) inputs.
            times: (num_tokens, num_channels) time steps.
            selection: b and c, (num_tokens, state_size) each.
            gate: (num_tokens, num_channels), whose SiLU multiplies the outputs.
            states: The caches of the step.
            cache: Index of the cache, (num_channels, state_size) of a request.

        Returns:
            Outputs (num_tokens, num_channels) of the dtype of x.
        """
        wide = x.float()
        steps = F.softplus(times.float() + self.time_bias)
        inputs = (steps, wide * steps, *(part.float() for part in selection))
        outputs, after = run_requests(self._update, self._scan, inputs, states.read(cache), states.query_start_locs)
        states.write(cache, after)
        return outputs.addcmul_(wide, self.skips).mul_(F.silu(gate.float())).to(x.dtype)

    def _update(
        self, steps: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        factors = (steps.unsqueeze(-1) * self.decays).exp_()  # (num_tokens, num_channels, state_size)
        states = torch.addcmul(x.unsqueeze(-1) * b.unsqueeze(1), states, factors)
        return (states @ c.unsqueeze(-1)).squeeze(-1), states

    def _scan(
        self, steps: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token by token, for products of decays over several tokens are too small for float32."""
        state, outputs = states[0], []
        for first in range(0, len(x), _CHUNK):
            chunk = slice(first, first + _CHUNK)
            factors = (steps[chunk].unsqueeze(-1) * self.decays).exp_()
            sums = x[chunk].unsqueeze(-1) * b[chunk].unsqueeze(1)  # becomes the state after each token
            for factor, after in zip(factors, sums, strict=True):
                state = after.addcmul_(state, factor)
            outputs.append((sums @ c[chunk].unsqueeze(-1)).squeeze(-1))
        return torch.cat(outputs), state.unsqueeze(0)
