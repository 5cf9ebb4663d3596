"""Runs a recurrence over the requests of a step: one update for all that compute one token, a scan for each other."""

import itertools
from collections.abc import Callable

import torch

from weft.engine.step.batch import Ints

# Takes what it needs of the tokens of some requests, (num_tokens, ...) each, then their states (num_requests, ...).
# Returns outputs (num_tokens, ...) and the states after the tokens.
Recurrence = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def run_requests(
    update: Recurrence, scan: Recurrence, inputs: tuple[torch.Tensor, ...], states: torch.Tensor, starts: Ints
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a step.

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
        indices = list(run)
        for first, last in [(indices[0], indices[-1])] if is_single else [(index, index) for index in indices]:
            tokens = slice(bounds[first], bounds[last + 1])
            results.append(
                (update if is_single else scan)(*(part[tokens] for part in inputs), states[first : last + 1])
            )
    outputs, after = zip(*results, strict=True)
    return torch.cat(outputs), torch.cat(after)
