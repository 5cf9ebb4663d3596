"""What a step brings back from the device, as plain host values. The runner makes it; the collector reads it."""

from dataclasses import dataclass

from weft.engine.shared.messages import TokenLogprobs

NO_TOKEN_ID = -1
"""What a row with a mask yields when bans and mask together leave nothing."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the batch.

    Attributes:
        token_ids: Sampled id of every row, or NO_TOKEN_ID.
        scores: One entry per scored prompt position.
        device_s: What the device has spent on steps, by its own clock, since the result before; None on the CPU, where
            the host computes. In steps that are no CUDA graphs, waiting for the next launch is part of it.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]
    scores: list[TokenLogprobs]
    device_s: float | None = None
