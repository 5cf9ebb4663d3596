"""Checks an `AddRequest` for everything but its length.

This is the only check between the socket and the scheduler. The ranges of sampling parameters are not checked here:
`SamplingParams` does that when it is made. Nor is anything that depends on the state of the engine.
"""

from collections.abc import Iterator

from weft.engine.core.beam_search import beam_fault
from weft.engine.core.pooler import VectorModel, pooling_fault
from weft.engine.shared.messages import AddRequest, RejectReason, id_fault


class RejectedError(Exception):
    """The request cannot be accepted; the message is fit for the caller."""

    def __init__(self, reason: RejectReason, message: str) -> None:
        """Keep the reason beside the message."""
        super().__init__(message)
        self.reason = reason


def request_fault(add: AddRequest, vocab_size: int, num_adapter_slots: int, vectors: VectorModel | None) -> str | None:
    """The first fault, fit for the caller; None when there is none. O(ids listed)."""
    return next((fault for fault in _faults(add, vocab_size, num_adapter_slots, vectors) if fault is not None), None)


def _faults(
    add: AddRequest, vocab_size: int, num_adapter_slots: int, vectors: VectorModel | None
) -> Iterator[str | None]:
    params, budget = add.sampling_params, add.guidance.reasoning_budget
    yield add.input.fault(vocab_size)
    if add.num_choices < 1:
        yield f"num_choices must be at least 1, got {add.num_choices}"
    if add.adapter is not None and not num_adapter_slots:
        yield f"this model takes no adapters, got {add.adapter.name}: max_loras must be at least 1, but is 0"
    if add.pooling is not None:
        yield pooling_fault(add, add.pooling, vectors)
    if add.beams is not None:
        yield beam_fault(add, vocab_size)
    if budget is not None and budget.max_tokens < 0:
        yield f"reasoning_budget must be at least 0, got {budget.max_tokens}"
    allowed = params.allowed_token_ids or ()
    for name, listed in (("stop_token_ids", params.stop_token_ids), ("allowed_token_ids", allowed)):
        if len(listed) > vocab_size:
            yield f"{name} must hold at most {vocab_size} ids, got {len(listed)}"
    yield id_fault("prediction", add.guidance.prediction_token_ids, vocab_size)
    yield id_fault("logit_bias", params.logit_bias, vocab_size)
    yield id_fault("stop_token_ids", params.stop_token_ids, vocab_size)
    yield id_fault("allowed_token_ids", allowed, vocab_size)
    yield id_fault("logprob_token_ids", params.logprob_token_ids, vocab_size)
    yield id_fault("bad_words", [i for word in params.bad_words_token_ids for i in word], vocab_size)
    yield id_fault("reasoning_budget", (budget.end_token_id,) if budget is not None else (), vocab_size)
