"""Layers that keep a state of fixed size for each request, in torch: convolution, linear attention, and state spaces.

A step has one update for all requests that compute one token, and a scan for each other. All is computed in float32.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.batch import Ints
from weft.engine.layers.block import StateStep

# Takes what it needs of the tokens of some requests, (num_tokens, ...) each, then their states (num_requests, ...).
# Returns outputs (num_tokens, ...) and the states after the tokens.
Recurrence = Callable[..., tuple[Tensor, Tensor]]


def run_requests(
    update: Recurrence, scan: Recurrence, inputs: tuple[Tensor, ...], states: Tensor, starts: Ints
) -> tuple[Tensor, Tensor]:
    """Compute a step of a recurrence, by one update for all requests of one token and a scan for each other.

    Args:
        update: For requests of one token each, any number of them at a time.
        scan: For one request at a time, of any number of tokens.
        inputs: (num_tokens, ...) each, the first arguments of both.
        states: (num_requests, ...), zeros for a new request.
        starts: (num_requests + 1,) where each request's tokens start; each has one at least.

    Returns:
        The outputs of all tokens, and the states of all requests after them.
    """
    if len(inputs[0]) == len(states):  # no value from the host, so that a CUDA graph can hold it
        return update(*inputs, states)
    bounds = starts.tolist()
    results = []
    for is_single, run in itertools.groupby(range(len(states)), lambda index: bounds[index + 1] - bounds[index] == 1):
        indices, compute = list(run), update if is_single else scan
        for first, last in [(indices[0], indices[-1])] if is_single else [(index, index) for index in indices]:
            tokens = slice(bounds[first], bounds[last + 1])
            results.append(compute(*(part[tokens] for part in inputs), states[first : last + 1]))
    outputs, after = zip(*results, strict=True)
    return torch.cat(outputs), torch.cat(after)


class CausalConvolution:
    """Causal and depthwise: every channel is a weighted sum of its last kernel inputs; computed in float32.

    The state of a request is the inputs before the step.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, has_silu: bool = False) -> None:
        """Take weight (channels, kernel), whose last column is for the token itself, and bias (channels,).

        Applies SiLU to the sums if has_silu.
        """
        self.weight = weight.float()
        self.bias = None if bias is None else bias.float()
        self._has_silu = has_silu
        self.taps = self.weight.t().contiguous()  # (kernel, channels)

    def __call__(self, inputs: Tensor, states: Tensor, starts: Ints) -> tuple[Tensor, Tensor]:
        """Convolve a step.

        Args:
            inputs: (num_tokens, channels).
            states: (num_requests, channels, kernel - 1) the inputs before these, zeros for a new request.
            starts: (num_requests + 1,) where each request's tokens start; each has one at least.

        Returns:
            Outputs (num_tokens, channels) of the inputs' dtype, and the states after the step.
        """
        if len(inputs) == len(states):
            return self._decode(inputs, states)
        return self._prefill(inputs, states, starts)

    def step(self, inputs: Tensor, states: StateStep, cache: int) -> Tensor:
        """`__call__` with the states of a cache, which it updates: (num_tokens, channels) -> the same."""
        outputs, after = self(inputs, states.read(cache), states.query_start_locs)
        states.write(cache, after)
        return outputs

    def _decode(self, inputs: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One token per request, whose states stand at the same row: no value from the host, no loop."""
        window = torch.cat((states, inputs.unsqueeze(-1).to(states.dtype)), -1)  # (num_requests, channels, kernel)
        return self._finish((window * self.weight).sum(-1), inputs.dtype), window[..., 1:]

    def _prefill(self, inputs: Tensor, states: Tensor, starts: Ints) -> tuple[Tensor, Tensor]:
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

    def _finish(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        if self.bias is not None:
            sums = sums.add_(self.bias)
        return (F.silu(sums, inplace=True) if self._has_silu else sums).to(dtype)


class DeltaInputs(NamedTuple):
    """What the tokens of a step do to their states, float32.

    Attributes:
        queries, keys: (num_tokens, num_heads, key_dim).
        values: (num_tokens, num_heads, value_dim).
        log_decays: (num_tokens, num_heads, key_dim or 1), at most 0.
        rates: (num_tokens, num_heads, 1), how much of a state's answer to the key is replaced. Empty for nothing at
            all: (num_tokens, 0).
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    log_decays: Tensor
    rates: Tensor


class DeltaRule(Protocol):
    """Computes linear attention for the tokens of a step, in float32.

    A matrix of fixed size per head stands for all earlier tokens; every token decays and changes it:

        state <- decay * state
        write  = rate * (value - key @ state)      the gated delta rule: Yang et al., 2024 (arXiv 2412.06464)
               = value                             without rates, as in lightning attention: Qin et al., 2024
        state <- state + outer(key, write)
        output = query @ state

    A decay belongs to a head, or to each channel of its key (Kimi Linear, 2025: arXiv 2510.26692).
    """

    def __call__(self, inputs: DeltaInputs, states: StateStep, cache: int) -> Tensor:
        """Outputs (num_tokens, num_heads, value_dim); the cache holds (num_heads, key_dim, value_dim) of a request."""


def delta_rule(inputs: DeltaInputs, states: StateStep, cache: int) -> Tensor:
    """`DeltaRule` by torch's operations."""
    outputs, after = run_requests(delta_step, delta_scan, inputs, states.read(cache), states.query_start_locs)
    states.write(cache, after)
    return outputs


def delta_step(
    queries: Tensor, keys: Tensor, values: Tensor, log_decays: Tensor, rates: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each request; states (num_requests, num_heads, key_dim, value_dim)."""
    states = states * log_decays.exp().unsqueeze(-1)
    if rates.numel():
        values = (values - (keys.unsqueeze(-2) @ states).squeeze(-2)).mul_(rates)
    states.addcmul_(keys.unsqueeze(-1), values.unsqueeze(-2))
    return (queries.unsqueeze(-2) @ states).squeeze(-2), states


_DELTA_CHUNK, _CHANNEL_CHUNK = 64, 16
"""Tokens computed at a time; fewer with a decay for each channel, where a pair of tokens takes the memory of a key."""


def delta_scan(
    queries: Tensor, keys: Tensor, values: Tensor, log_decays: Tensor, rates: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Consecutive tokens of one request; states (1, num_heads, key_dim, value_dim)."""
    size = _DELTA_CHUNK if log_decays.size(-1) == 1 else _CHANNEL_CHUNK
    chunks = zip(*(torch.split(part, size) for part in (queries, keys, values, log_decays, rates)), strict=True)
    state, outputs = states[0].clone(), []
    for chunk in chunks:
        outputs.append(_scan_chunk(state, *chunk))
    return torch.cat(outputs), state.unsqueeze(0)


def _scan_chunk(
    state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, log_decays: Tensor, rates: Tensor
) -> Tensor:
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

    decays: Tensor

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        """Two of (num_heads, chunk, key_dim) -> (num_heads, chunk, chunk)."""
        if self.decays.size(-1) == 1:
            return (left @ right.mT).mul_(self.decays.squeeze(-1)).tril_()
        return ((self.decays * right.unsqueeze(1)) @ left.unsqueeze(-1)).squeeze(-1).tril_()


# Tokens of `SelectiveScan` whose states are in memory at the same time.
_SCAN_CHUNK = 64


class SelectiveScan:
    """The selective scan of Mamba (Gu and Dao, 2023): a decay for each channel, state and token; states in float32.

    A channel keeps state_size numbers. A token multiplies them by exp(dt * decays), adds dt * x * b, and reads them by
    c.
    """

    def __init__(self, decays: Tensor, skips: Tensor, time_bias: Tensor) -> None:
        """Take the parameters, all float32.

        Args:
            decays: (num_channels, state_size), below zero.
            skips: (num_channels,) factors of the inputs that are added to the outputs.
            time_bias: (num_channels,) added to the time steps, before softplus.
        """
        self.decays, self.skips, self.time_bias = decays, skips, time_bias

    def __call__(
        self, x: Tensor, times: Tensor, selection: tuple[Tensor, Tensor], gate: Tensor, states: StateStep, cache: int
    ) -> Tensor:
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

    def _update(self, steps: Tensor, x: Tensor, b: Tensor, c: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        factors = (steps.unsqueeze(-1) * self.decays).exp_()  # (num_tokens, num_channels, state_size)
        states = torch.addcmul(x.unsqueeze(-1) * b.unsqueeze(1), states, factors)
        return (states @ c.unsqueeze(-1)).squeeze(-1), states

    def _scan(self, steps: Tensor, x: Tensor, b: Tensor, c: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Token by token, for products of decays over several tokens are too small for float32."""
        state, outputs = states[0], []
        for first in range(0, len(x), _SCAN_CHUNK):
            chunk = slice(first, first + _SCAN_CHUNK)
            factors = (steps[chunk].unsqueeze(-1) * self.decays).exp_()
            sums = x[chunk].unsqueeze(-1) * b[chunk].unsqueeze(1)  # becomes the state after each token
            for factor, after in zip(factors, sums, strict=True):
                state = after.addcmul_(state, factor)
            outputs.append((sums @ c[chunk].unsqueeze(-1)).squeeze(-1))
        return torch.cat(outputs), state.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Sizes and parameters of a `StateSpaceScan`; parameters are float32.

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
    decays: Tensor
    skips: Tensor
    time_bias: Tensor
    time_scale: float = 1.0
    time_limits: tuple[float, float] = (0.0, float("inf"))
    gate_scale: float = 1.0

    @property
    def num_heads(self) -> int:
        """Heads."""
        return len(self.decays)


# Tokens of a chunk of `StateSpaceScan`. Products within a chunk grow with its length, the number of launches with its
# inverse.
_SPACE_CHUNK = 64


class StateSpaceScan:
    """The state space of Mamba 2 (Dao and Gu, 2024): one decay per head and token, and states in float32.

    A head keeps a matrix (head_dim, state_size). A token multiplies it by exp(dt * decay), adds dt * outer(x, b), and
    reads it by c. A prompt is computed in chunks, by products of matrices (section 6 of the paper); a decode is one
    update.
    """

    def __init__(self, space: StateSpace) -> None:
        """Compute this one."""
        self.space = space

    def __call__(self, channels: Tensor, times: Tensor, gate: Tensor | None, states: StateStep, cache: int) -> Tensor:
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

    def _update(self, decays: Tensor, x: Tensor, b: Tensor, c: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        num_requests, num_heads, head_dim = x.shape
        states = states * decays.exp()[..., None, None]
        grouped = states.view(num_requests, self.space.num_groups, -1, self.space.state_size)
        rows = x.view(num_requests, self.space.num_groups, -1)
        grouped.addcmul_(rows.unsqueeze(-1), b.unsqueeze(2))
        return (grouped @ c.unsqueeze(-1)).view(num_requests, num_heads, head_dim), states

    def _scan(self, decays: Tensor, x: Tensor, b: Tensor, c: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        state, outputs = states[0], []  # (num_heads, head_dim, state_size)
        for first in range(0, len(x), _SPACE_CHUNK):
            chunk = slice(first, first + _SPACE_CHUNK)
            output, state = self._scan_chunk(decays[chunk], x[chunk], b[chunk], c[chunk], state)
            outputs.append(output)
        return torch.cat(outputs), state.unsqueeze(0)

    def _scan_chunk(self, decays: Tensor, x: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
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
