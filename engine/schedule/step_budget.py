"""Limits what one step computes: tokens, and predicted time while anything decodes or steps are launched ahead.

Decodes are charged first. Several prefills share what is left. The first prefill of a step is granted a block even
beyond the time limit, so prefill never starves. A target that cannot be met is logged once.

`TokenBudget` keeps the most tokens of a step, by the memory that steps ran out of. `PromptBurst` decides whether
prompts go first, however long their step takes for the running streams.
"""

import logging

from weft.engine.schedule.step_cost import StepCostModel, StepLoad

logger = logging.getLogger(__name__)

SLOWDOWN = 1.8
"""Without a target, a step may take the time of its decodes times this. Prefill gets nearly half the time."""

SHARE_FOR_OTHERS = 0.25
"""Part of a step's prefill that the longest one leaves to others, so that a short prompt overtakes a long one."""


class StepBudget:
    """Made by the scheduler for each step; counts down as requests are scheduled."""

    def __init__(
        self, cost: StepCostModel, *, max_num_tokens: int, block_size: int, limit_s: float | None, decodes: StepLoad
    ) -> None:
        """Charge the decodes of the step.

        Args:
            block_size: Least tokens that a step grants to prefill.
            limit_s: Longest predicted step, from `LatencyTarget`; None when only tokens count.
        """
        self._cost = cost
        self._load = decodes
        self._limit_s = limit_s
        self._num_tokens_left = max(max_num_tokens - decodes.num_tokens, 0)
        self._block_size = block_size
        self._has_granted = False

    def grant(self, num_tokens: int, context: int, share: float = 1.0, *, is_whole: bool = False) -> int:
        """How many of num_tokens prefill tokens, after `context` computed ones, may be computed; 0 when spent.

        At most `share` of what is left is granted, but for the first block. Nothing is charged yet.

        Args:
            is_whole: Grant all or nothing; the first of a step gets all.
        """
        if is_whole:
            return num_tokens if num_tokens <= self._num_tokens_left or not self._has_granted else 0
        limit = float(self._num_tokens_left)
        if self._limit_s is not None:
            limit = min(limit, self._cost.num_tokens_within(self._load, context, self._limit_s))
        granted = min(num_tokens, int(limit * share))
        if granted < min(num_tokens, self._block_size) and not self._has_granted:
            granted = min(num_tokens, self._block_size, self._num_tokens_left)
        return granted

    def charge(self, num_tokens: int, context: int) -> None:
        """Take what a prefill computes off the budget."""
        self._load.add(num_tokens, context)
        self._num_tokens_left = max(self._num_tokens_left - num_tokens, 0)
        self._has_granted = True


class LatencyTarget:
    """Limits the predicted time of a step while anything decodes.

    A target given as a time is kept by 99 of 100 steps. With None, prefill may slow the running streams down by a
    factor, `SLOWDOWN`, on any model and machine. A burst of prompts then goes before them (`PromptBurst`), but 99 of
    100 steps keep `MAX_DELAY_S`. If decoding alone cannot meet a given time, that is logged once.

    Where steps are launched ahead, a request that arrives waits for two of them. So they keep the time even if nothing
    decodes. Prompts lose little by that on a GPU: its matrix units are busy with far fewer tokens.
    """

    def __init__(self, seconds: float | None, *, is_ahead: bool = False) -> None:
        """Take the target in seconds; None follows the decodes.

        Args:
            is_ahead: Whether a step is launched before the one before it has ended.
        """
        self._seconds = seconds
        self._is_ahead = is_ahead
        self._burst = PromptBurst()
        self._is_said = False

    def limit_s(
        self, decodes: StepLoad, cost: StepCostModel, *, num_streams: int, num_prompts: int, now_s: float
    ) -> float | None:
        """Longest predicted time allowed for a step; None for no limit.

        Args:
            decodes: The decodes of the step.
            num_streams: Requests that decode, in the step or as soon as their ids are known.
            num_prompts: Requests whose prompts could be computed further.
            now_s: Time of a monotonic clock.
        """
        if not num_streams:
            self._burst = PromptBurst()
            return self._seconds / cost.tail_ratio if self._seconds and self._is_ahead else None
        predicted_s = cost.predict(decodes)
        if self._seconds is None:
            goes_first = self._burst.goes_first(num_streams, num_prompts, predicted_s, now_s)
            is_free = goes_first or not predicted_s  # nothing is known before the first step
            longest_s = MAX_DELAY_S / cost.tail_ratio
            return longest_s if is_free else min(predicted_s * SLOWDOWN, longest_s)
        if predicted_s > self._seconds and not self._is_said:
            self._is_said = True
            logger.warning(
                "itl_target_ms=%.0f cannot be met: a step of %d decodes alone takes about %.0f ms",
                self._seconds * 1e3,
                decodes.num_tokens,
                predicted_s * 1e3,
            )
        return self._seconds / cost.tail_ratio

    def draft_limit_s(self, decodes: StepLoad, cost: StepCostModel, *, is_awaited: bool) -> float | None:
        """Longest predicted time allowed for a step with drafts; None for no limit.

        Args:
            decodes: The decodes of the step, without drafts.
            is_awaited: Whether a decode of the step has no draft, so that it only waits for the drafts of others.
        """
        if self._seconds is not None:
            return self._seconds / cost.tail_ratio
        return cost.predict(decodes) * SLOWDOWN or None if is_awaited else None


class TokenBudget:
    """Keeps the most tokens of a step: halved after a step runs out of memory, doubled again later.

    Whatever took the memory may be gone later: another process on the device, or an unusual batch. So the budget is
    doubled after many steps that needed it and succeeded. It never exceeds the configured one. A failed step ends its
    requests, so each failure doubles the number of steps to wait. As many good steps with the whole budget halve that
    number again.

    Owned by the scheduler, which reads `max_num_tokens`. The engine reports how steps ended.
    """

    def __init__(self, configured: int, least: int) -> None:
        """Start with the configured budget. Halving stops at `least`, or at the configured budget if that is lower."""
        self.max_num_tokens = configured
        self._configured = configured
        self._least = min(least, configured)
        self._trial = FIRST_TRIAL // 2
        self._num_good = 0

    def halve(self) -> None:
        """Halve the budget, because a step ran out of memory."""
        self._trial = min(2 * self._trial, LONGEST_TRIAL)
        self._set(max(self.max_num_tokens // 2, self._least))

    def observe(self, num_tokens: int) -> None:
        """Count a step that succeeded, if half the budget would have been too little for it."""
        if 2 * num_tokens <= self.max_num_tokens:
            return
        self._num_good += 1
        if self._num_good < self._trial:
            return
        if self.max_num_tokens < self._configured:
            self._set(min(2 * self.max_num_tokens, self._configured))
        else:
            self._num_good, self._trial = 0, max(self._trial // 2, FIRST_TRIAL // 2)

    def _set(self, max_num_tokens: int) -> None:
        self._num_good = 0
        self.max_num_tokens = max_num_tokens
        logger.warning("steps compute at most %d tokens from now on", max_num_tokens)


class PromptBurst:
    """Decides whether prompts go first, however long their step takes for the running streams.

    A stream is a request that decodes. Computing a prompt takes the same time whether it is done at once or beside
    decodes. Done at once, it delays the streams by one long wait instead of many short ones, and the prompt's first
    token comes sooner. So prompts are computed beside the streams while they are fewer than the streams. A burst, with
    at least as many prompts as streams, goes first.

    A burst goes on to its end. Otherwise its last prompts would be computed beside all the earlier ones, which are
    streams by then, and slow every stream down for as long as they take. A burst also ends with the step in which it
    has delayed the streams by a bounded time, counted in their own steps and in seconds. No other burst begins until
    the streams have computed for as long. A burst that has used half of that time goes on only while there are at least
    as many prompts as streams.

    It keeps count of the delay. It is made anew whenever nothing decodes, and asked once per step from then on.
    """

    def __init__(self) -> None:
        """Begin with a burst, if there are prompts: no stream has been delayed yet."""
        self._is_on = True
        self._is_spent = False
        self._delay_s = 0.0
        self._most_streams = 0
        """Most streams since the delay was 0. A stream that joins dilutes the mean only once."""
        self._asked_at_s: float | None = None
        self._step_s = 0.0

    def goes_first(self, num_streams: int, num_prompts: int, step_s: float, now_s: float) -> bool:
        """Whether the next step is for prompts, however long it takes.

        Args:
            num_streams: Requests that decode, at least 1.
            num_prompts: Requests that could go on with their prompts.
            step_s: How long a step of the streams alone would take.
            now_s: Time of a monotonic clock.
        """
        if self._asked_at_s is not None:
            late_s = max(now_s - self._asked_at_s - self._step_s, 0.0)
            self._delay_s = max(self._delay_s + (late_s if self._is_on else -step_s), 0.0)
        self._asked_at_s, self._step_s = now_s, step_s
        if not self._delay_s:
            self._is_spent, self._most_streams = False, num_streams
        elif num_streams > self._most_streams:  # streams that just joined have not waited
            self._delay_s *= self._most_streams / num_streams
            self._most_streams = num_streams
        max_delay_s = min(MAX_DELAY * step_s, MAX_DELAY_S)
        if self._delay_s > max_delay_s:
            self._is_spent = True
        is_short = self._is_on and self._delay_s <= max_delay_s / 2
        least = num_streams * END_OF_BURST if is_short else num_streams
        self._is_on = num_prompts >= max(least, 1) and not self._is_spent
        return self._is_on


FIRST_TRIAL, LONGEST_TRIAL = 256, 1 << 14
"""Steps that must succeed before the budget grows again: after the first failure, and at most."""


END_OF_BURST = 1 / 8
"""A burst ends when fewer prompts are left than this share of the streams."""


MAX_DELAY = 64.0
"""Longest mean delay of the streams by a burst, in units of the time of a step of the streams alone."""


MAX_DELAY_S = 2.0
"""Longest such delay in seconds, on any machine. It is also the longest planned time of a step beside streams."""
