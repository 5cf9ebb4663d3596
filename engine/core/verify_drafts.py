"""Verifies drafts against what was sampled: a draft is accepted while plain decoding samples the same ids."""

from weft.engine.schedule.scheduler import ScheduledRequest, Scheduler
from weft.engine.shared.messages import TokensOutput
from weft.engine.speculation.drafters import PredictionDrafter


def num_accepted_drafts(draft_token_ids: tuple[int, ...], token_ids: list[int]) -> int:
    """Length of the prefix of drafts that plain decoding samples as well."""
    for index, draft in enumerate(draft_token_ids):
        if draft != token_ids[index]:
            return index
    return len(draft_token_ids)


def count_drafts(scheduler: Scheduler, scheduled: ScheduledRequest, num_accepted: int, output: TokensOutput) -> None:
    """Tell the counters, the source of the drafts, and the caller whose prediction they were from."""
    num_drafts = len(scheduled.draft_token_ids)
    scheduler.counters.num_drafts += 1
    scheduler.counters.num_draft_tokens += num_drafts
    scheduler.counters.num_accepted_tokens += num_accepted
    drafting = scheduled.request.drafting
    if drafting.pace is not None:
        drafting.pace.observe(num_drafts, num_accepted)
    if isinstance(drafting.drafter, PredictionDrafter):
        output.num_accepted_predictions = num_accepted
        output.num_rejected_predictions = num_drafts - num_accepted
