"""Causal depthwise convolution over the tokens of each request, with the inputs before the step as its state."""

import itertools

import torch
import torch.nn.functional as F

from weft.engine.layers.step_caches import StateStep
from weft.engine.step.batch import Ints


class CausalConvolution:
    """Every channel is a weighted sum of its last kernel inputs; computed in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, has_silu: bool = False) -> None:
        """Take weight (channels, kernel), whose last column is for the token itself, and bias (channels,).

        Applies SiLU to the sums if has_silu.
        """
        self.weight = weight.float()
        self.bias = None if bias is None else bias.float()
        self._has_silu = has_silu
        self.taps = self.weight.t().contiguous()  # (kernel, channels)

    @property
    def state_shape(self) -> tuple[int, int]:
        """(channels, kernel - 1): the inputs before the next token, the latest one last."""
        channels, kernel = self.weight.shape
        return channels, kernel - 1

    def __call__(self, inputs: torch.Tensor, states: torch.Tensor, starts: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve a step.

        Args:
            inputs: (num_tokens, channels).
            states: (num_requests, *state_shape), zeros for a new request.
            starts: (num_requests + 1,) where each request's tokens start; each has one at least.

        Returns:
            Outputs (num_tokens, channels) of the inputs' dtype, and the states after the step.
        """
        if len(inputs) == len(states):
            return self._decode(inputs, states)
        return self._prefill(inputs, states, starts)

    def step(self, inputs: torch.Tensor, states: StateStep, cache: int) -> torch.Tensor:
        """`__call__` with the states of a cache, which it updates: (num_tokens, channels) -> the same."""
        outputs, after = self(inputs, states.read(cache), states.query_start_locs)
        states.write(cache, after)
        return outputs

    def _decode(self, inputs: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One token per request, whose states stand at the same row: no value from the host, no loop."""
        window = torch.cat((states, inputs.unsqueeze(-1).to(states.dtype)), -1)  # (num_requests, channels, kernel)
        return self._finish((window * self.weight).sum(-1), inputs.dtype), window[..., 1:]

    def _prefill(self, inputs: torch.Tensor, states: torch.Tensor, starts: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """Lay every request's state before its tokens, so that each sum reads kernel rows that follow each other."""
        length = states.size(-1)
        spans = list(itertools.pairwise(starts.tolist()))
        pairs = ((state, inputs[start:end]) for state, (start, end) in zip(states.mT, spans, strict=True))
        rows = torch.cat([piece.float() for pair in pairs for piece in pair])
        num_sums = len(rows) - length
        sums = rows[:num_sums] * self.taps[0]
        for tap in range(1, length + 1):
            sums.addcmul_(rows[tap : tap + num_sums], self.taps[tap])
        # A request's sums start where its state stands in the rows. The sums after them mix two requests.
        places = [slice(start + length * index, end + length * index) for index, (start, end) in enumerate(spans)]
        after = torch.stack([rows[place.stop : place.stop + length] for place in places]).mT
        return self._finish(torch.cat([sums[place] for place in places]), inputs.dtype), after.to(states.dtype)

    def _finish(self, sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.bias is not None:
            sums = sums.add_(self.bias)
        return (F.silu(sums, inplace=True) if self._has_silu else sums).to(dtype)
