"""The results of a step as plain host values; the runner makes them and the collector reads them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.engine.shared.messages import TokenLogprobs

# The id of a masked row for which bans and mask together leave no id.
NO_TOKEN_ID = -1


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the batch.

    Attributes:
        token_ids: Sampled id of every row, or NO_TOKEN_ID.
        logprobs: By row, for rows that report them.
        scores: One entry per scored prompt position.
        pooled: (num_runs, hidden_size) sums of hidden states; None when nobody wants any.
        device_s: Seconds from the start of the step to its end, by the device's own clock; None on the CPU. Outside of
            CUDA graphs this includes waiting for the next launch within the step.
        drafts_device_s: The same for the steps of a draft model since the previous result.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]
    scores: list[TokenLogprobs]
    device_s: float | None = None
    drafts_device_s: float = 0.0
    pooled: npt.NDArray[np.float32] | None = None
