"""Applies the results of a step: appends ids, verifies drafts, ends requests.

Appends the sampled ids, and behind them the ids that a grammar forces. A draft is accepted while plain decoding samples
the same ids; behind a refused one `num_computed_tokens` is rolled back. Forks pending choices. Changes queues and
blocks only through the scheduler.

Where possible, forced ids join the output at once (`certain_token_ids`). They are then computed like a part of the
prompt: in chunks, under the budget of the steps, without rows of logits. Some parameters may forbid a forced id or ask
for its log-probability. Such requests need a row for every id, so their forced ids are drafts (`ForcedTokens`).
"""

import logging
from itertools import takewhile

from weft.engine.batch import StepResult
from weft.engine.drafts import MAX_NUM_DRAFTS, PredictionDrafter
from weft.engine.request import Outputs, Request, RequestStatus
from weft.engine.schedule.batch_builder import scored_range
from weft.engine.schedule.pooled_requests import give
from weft.engine.schedule.scheduler import ScheduledRequest, ScheduledStep, Scheduler
from weft.engine.wire.messages import FinishReason, TokenLogprobs, TokensOutput

logger = logging.getLogger(__name__)


def collect(scheduler: Scheduler, step: ScheduledStep, result: StepResult) -> Outputs:
    """Apply the results of a step, in the order of the batch.

    A request that ended after the launch gets nothing. One that was preempted after it keeps its new ids. An error in
    one request ends only that request.
    """
    outputs: Outputs = []
    scores = iter(result.scores)
    pooled = iter(() if result.pooled is None else result.pooled)
    for scheduled in step.requests:
        request = scheduled.request
        if request.pooler is not None:
            outputs += give(scheduler, scheduled, request.pooler, pooled)
            continue
        prompt_logprobs = [next(scores) for _ in scored_range(scheduled)]
        if request.is_finished:
            continue
        output = TokensOutput(request.key.request_id, request.key.choice, [])
        if request.params.prompt_logprobs is not None and prompt_logprobs:
            output.prompt_logprobs = prompt_logprobs
            request.num_scored_tokens += len(prompt_logprobs)
        try:
            if request.continuation is not None:
                outputs += request.continuation.take(request, scheduled.first_row, scheduled.num_rows, result)
            else:
                _advance(scheduler, scheduled, result, output)
        except Exception as error:
            logger.exception("request %s failed, and the others go on", request.key)
            if request.continuation is not None or not request.is_finished:  # which outlives its requests
                outputs += end(scheduler, request, FinishReason.ERROR, f"the request failed: {type(error).__name__}")
            continue
        if output.token_ids or output.finish_reason is not None or output.prompt_logprobs:
            outputs.append((request.key.connection, output))
    return outputs


def fail(scheduler: Scheduler, steps: list[ScheduledStep], message: str) -> Outputs:
    """End the requests of failed steps with an error, and un-index the blocks of these steps."""
    outputs: Outputs = []
    for step in steps:
        for scheduled in step.requests:
            request = scheduled.request
            if not request.is_finished:
                outputs += end(scheduler, request, FinishReason.ERROR, message)
    scheduler.fail_steps([step.blocks for step in steps])  # last: a request that ends indexes its blocks
    return outputs


def end(scheduler: Scheduler, request: Request, reason: FinishReason, message: str | None = None) -> Outputs:
    """End a request, with its pending choices or all that go on together, from the engine's side."""
    if request.continuation is not None:
        return request.continuation.end(reason, message)
    outputs: Outputs = []
    for index in [request.key.choice, *request.pending_indices]:
        output = TokensOutput(request.key.request_id, index, [], finish_reason=reason, message=message)
        outputs.append((request.key.connection, output))
    scheduler.finish(request)
    return outputs


def _advance(scheduler: Scheduler, scheduled: ScheduledRequest, result: StepResult, output: TokensOutput) -> None:
    """Append the ids sampled for one request."""
    request = scheduled.request
    if scheduled.num_rows:
        request.num_placeholders -= 1
        request.draft_token_ids = []
        is_first = len(request.token_ids) == request.num_prompt_tokens
        if request.pending_indices:
            scheduler.fork(request)
        rows = range(scheduled.first_row, scheduled.first_row + scheduled.num_rows)
        token_ids = result.token_ids[rows.start : rows.stop]
        num_accepted = _num_accepted_drafts(scheduled.draft_token_ids, token_ids)
        is_here = request.status is RequestStatus.RUNNING and request.num_preemptions == scheduled.num_preemptions
        if is_here and scheduled.draft_token_ids:
            scheduler.kv.accept(request, scheduled.start, scheduled.num_context_tokens + num_accepted)
        logprobs: list[TokenLogprobs] = []
        for row in rows[: num_accepted + 1]:
            _append(request, result.token_ids[row], output)
            if output.message is None and row in result.logprobs:
                is_sampled = output.token_ids[-1] == result.token_ids[row]
                logprobs.append(result.logprobs[row] if is_sampled else TokenLogprobs(0.0, [], []))
            if output.finish_reason is not None:
                break
        else:
            for token_id in certain_token_ids(request):
                _append(request, token_id, output)
                if output.finish_reason is not None:
                    break
        scheduler.counters.generation_tokens += len(output.token_ids)
        if scheduled.draft_token_ids:
            _count_drafts(scheduler, scheduled, min(num_accepted, len(output.token_ids)), output)
        output.logprobs = logprobs or None
        if is_first:
            output.num_cached_tokens = request.num_cached_tokens
            output.queue_time_s = request.queue_time_s
    elif scheduled.start + scheduled.num_tokens >= request.max_num_tokens:
        if request.pending_indices:
            scheduler.fork(request)
        output.finish_reason = FinishReason.LENGTH  # max_tokens=0: the prompt was only scored
        output.num_cached_tokens = request.num_cached_tokens
        output.queue_time_s = request.queue_time_s
    if output.finish_reason is not None:
        scheduler.finish(request)


def _append(request: Request, token_id: int, output: TokensOutput) -> None:
    is_end_forced = request.reasoning is not None and request.reasoning.is_used_up()  # whatever the parameters allow
    if request.grammar is not None:
        output.message = request.grammar.accept(token_id)
    elif not is_end_forced and _leaves_nothing(request, token_id):
        output.message = "no token is left that the parameters of the request allow"
    if output.message is not None:
        output.finish_reason = FinishReason.DEAD_END
        return
    output.finish_reason = request.append(token_id)
    output.token_ids.append(request.token_ids[-1])  # another one if the end is forced
    if output.finish_reason is FinishReason.STOP and token_id in request.stop_ids:
        output.stop_token_id = token_id


def _leaves_nothing(request: Request, token_id: int) -> bool:
    """Whether an id was sampled only because all are banned."""
    repeating = request.repeating_ids() if request.edits.ban_repeats else set()
    num_output_tokens, edits = len(request.token_ids) - request.num_prompt_tokens, request.edits
    if not num_output_tokens:
        repeating.update(request.params.begin_bans)
    state = num_output_tokens, request.params.min_tokens, request.last_ids(edits.longest_word)
    return token_id in repeating or edits.leave_nothing(*state, repeating)


def _num_accepted_drafts(draft_token_ids: tuple[int, ...], token_ids: list[int]) -> int:
    """Length of the prefix of drafts that plain decoding samples as well."""
    for index, draft in enumerate(draft_token_ids):
        if draft != token_ids[index]:
            return index
    return len(draft_token_ids)


def _count_drafts(scheduler: Scheduler, scheduled: ScheduledRequest, num_accepted: int, output: TokensOutput) -> None:
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


def certain_token_ids(request: Request) -> list[int]:
    """Ids that must follow the known output, up to the first one that may end the output, exclusive."""
    if request.grammar is None or _needs_rows(request):
        return []
    forced = request.grammar.forced_token_ids(request.num_remaining_tokens)
    return list(takewhile(lambda token_id: token_id not in request.stop_ids, forced))


class ForcedTokens:
    """Drafts forced ids for requests that need a row for each id."""

    def propose(self, request: Request) -> list[int]:
        """Return forced ids behind the known output."""
        if request.grammar is None or not _needs_rows(request):
            return []
        return request.grammar.forced_token_ids(MAX_NUM_DRAFTS)


def _needs_rows(request: Request) -> bool:
    """Whether even forced ids must be sampled."""
    params, reasoning = request.params, request.reasoning
    bans = params.allowed_token_ids, params.bad_words_token_ids, request.edits.ban_repeats
    is_restricted = any((*bans, params.begin_bans, params.timestamps))
    may_have_to_end = reasoning is not None and not reasoning.has_ended
    return is_restricted or may_have_to_end or params.logprobs is not None
