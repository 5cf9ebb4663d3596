"""Drafts the next tokens of a step's requests after the step is collected.

The drafters are asked in order, and the first draft wins. The draft model, if there is one, drafts for the remaining
requests in one call. A draft is cut to the length that pays (`Pace`). Drafting needs the last id on the host. With
overlap, a request for which there is a draft waits for that id (`awaits_ids`). All others go on. A drafter or a draft
model may fail, for example for lack of memory. That costs requests only time, and it is left out for a while (`Pause`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from weft.engine.drafts import DraftPause, Pace
from weft.engine.request import Request, RequestStatus
from weft.engine.schedule.scheduler import ScheduledStep, Scheduler
from weft.engine.schedule.step_cost import StepCostModel, StepLoad

_LEAST_PRICE = 0.02
"""Least price of a draft: rows cost the host time even where they cost the device none."""


class Drafter(Protocol):
    """Guesses the next tokens of a request, to be verified in its next step."""

    def propose(self, request: Request) -> list[int]:
        """Token ids that may follow request.token_ids; empty for no guess."""


class BatchDrafter(Protocol):
    """Guesses for many requests in one call. `pace` learns from all its drafts."""

    pace: Pace

    def price(self, step_s: float) -> float:
        """Time to draft one more token for each request, as a fraction of a step of step_s seconds."""

    def propose(self, requests: Sequence[Request], num_drafts: int) -> list[list[int]]:
        """Up to num_drafts (>= 1) ids for each request; all ids of the requests are known."""


class Speculator:
    """Owner of the drafters."""

    def __init__(self, scheduler: Scheduler, drafters: Sequence[Drafter], draft_model: BatchDrafter | None) -> None:
        self._scheduler = scheduler
        self._drafters = drafters
        self._draft_model = draft_model
        self._pause = DraftPause("drafting")
        self._model_pause = DraftPause("the draft model")

    def draft(self, step: ScheduledStep) -> None:
        """Propose for every request of the step that decodes next."""
        for scheduled in step.requests:
            scheduled.request.awaits_ids = False
        requests = [s.request for s in step.requests if _can_draft(s.request)]
        others = self._guarded(self._pause, self._ask_drafters, requests)
        if model := self._draft_model:
            self._guarded(self._model_pause, lambda others: self._ask_model(model, others, requests), others)

    def _guarded(
        self, pause: DraftPause, ask: Callable[[list[Request]], list[Request]], requests: list[Request]
    ) -> list[Request]:
        """Ask for drafts outside a pause, and return the requests that got none. A failure begins a pause."""
        if pause.is_on() or not requests:
            return requests
        try:
            others = ask(requests)
            pause.observe_success()
            return others
        except Exception:
            pause.begin()
            for request in requests:
                request.awaits_ids = False
            return requests

    def _ask_drafters(self, requests: list[Request]) -> list[Request]:
        proposals = [(request, *self._first_proposal(request)) for request in requests]
        if not any(draft for _, _, draft in proposals):
            return requests
        price, _ = price_of_drafts(self._scheduler.cost, [r.num_computed_tokens for r in requests])
        others = []
        for request, drafter, draft in proposals:
            lookup = request.drafting.lookups.get(drafter)
            if lookup is not None:
                draft = draft[: lookup.pace.num_drafts(price)]
            if draft:
                _give(request, drafter, lookup.pace if lookup else None, draft)
            else:
                others.append(request)
        return others

    def _first_proposal(self, request: Request) -> tuple[Drafter | None, list[int]]:
        for drafter in self._drafters:
            if draft := drafter.propose(request)[: request.num_remaining_tokens - 1]:
                return drafter, draft
        return None, []

    def _ask_model(self, model: BatchDrafter, others: list[Request], decoding: list[Request]) -> list[Request]:
        price, step_s = price_of_drafts(self._scheduler.cost, [r.num_computed_tokens for r in decoding])
        num_drafts = model.pace.num_drafts(price + model.price(step_s))
        if not num_drafts:
            return others
        for request in others:
            request.awaits_ids = True
        known = [request for request in others if not request.num_placeholders]
        if known:
            for request, draft in zip(known, model.propose(known, num_drafts), strict=True):
                _give(request, model, model.pace, draft)
        return []


def price_of_drafts(cost: StepCostModel, contexts: Iterable[int]) -> tuple[float, float]:
    """What one more token for each decoding request costs.

    Args:
        contexts: Computed tokens of each request that decodes.

    Returns:
        The price, as a fraction of the step that computes one token for each, and the seconds of that step (0 before
        anything was measured).
    """
    plain, longer = StepLoad(), StepLoad()
    for context in contexts:
        plain.add(1, context)
        longer.add(2, context)
    seconds = cost.predict(plain)
    price = cost.predict(longer) / seconds - 1.0 if seconds else 0.0
    return max(price, _LEAST_PRICE), seconds


def _can_draft(request: Request) -> bool:
    """Whether its next step computes one token and samples one that is not the last. Beams have no single next id."""
    is_decoding = (
        request.status is RequestStatus.RUNNING and request.num_new_tokens == 1 and request.continuation is None
    )
    return is_decoding and request.num_remaining_tokens > 1


def _give(request: Request, drafter: object, pace: Pace | None, draft: list[int]) -> None:
    request.awaits_ids = bool(draft)
    if not request.num_placeholders:
        request.drafting.drafter, request.drafting.pace = drafter, pace
        request.draft_token_ids = draft
