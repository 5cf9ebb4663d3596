"""What requests of models with an encoder add to a step: their inputs, and outputs that are divided by times."""

import numpy as np

from weft.engine.batch import InputBatch, Ints
from weft.engine.schedule.scheduler import ScheduledRequest


def input_batch(requests: list[ScheduledRequest]) -> InputBatch:
    """The inputs that requests begin with; sounds of those that begin in this step."""
    return InputBatch(
        np.array([s.request.input_length for s in requests]),
        np.array([s.request.num_input_slots for s in requests]),
        tuple(np.frombuffer(s.request.samples, np.int16) for s in requests if s.request.samples and not s.start),
    )


def time_bounds(rows: list[tuple[ScheduledRequest, int]]) -> Ints | None:
    """`SamplingBatch.times` of rows, each with how many drafts are before it; None where no output is divided."""
    times = [
        (row, *rule.bounds([*s.request.token_ids[s.request.num_prompt_tokens :], *s.draft_token_ids[:offset]]))
        for row, (s, offset) in enumerate(rows)
        if (rule := s.request.params.timestamps)
    ]
    return np.array(times) if times else None
