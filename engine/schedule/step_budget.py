"""Limits what one step computes: tokens, and predicted time while anything decodes or steps are launched ahead.

Decodes are charged first. Several prefills share what is left. The first prefill of a step is granted a block even
beyond the time limit, so prefill never starves. A target that cannot be met is logged once.
"""

import logging

from weft.engine.schedule.step_cost import MAX_DELAY_S, PromptBurst, StepCostModel, StepLoad

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
        self._cost, self._load, self._limit_s = cost, decodes, limit_s
        self._num_tokens_left = max(max_num_tokens - decodes.num_tokens, 0)
        self._block_size, self._has_granted = block_size, False

    def grant(self, num_tokens: int, context: int, share: float = 1.0, least: int = 0, is_whole: bool = False) -> int:
        """How many of num_tokens prefill tokens, after `context` computed ones, may be computed; 0 when spent.

        At most `share` of what is left is granted, but for the first block. Nothing is charged yet.

        Args:
            least: What the first of a step gets, if that is more than a block.
            is_whole: Grant all or nothing; the first of a step gets all.
        """
        if is_whole:
            return num_tokens if num_tokens <= self._num_tokens_left or not self._has_granted else 0
        limit = float(self._num_tokens_left)
        if self._limit_s is not None:
            limit = min(limit, self._cost.num_tokens_within(self._load, context, self._limit_s))
        granted, least = min(num_tokens, int(limit * share)), max(least, self._block_size)
        if granted < min(num_tokens, least) and not self._has_granted:
            granted = min(num_tokens, least, self._num_tokens_left)
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
        self._seconds, self._is_ahead = seconds, is_ahead
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
