"""What one step may compute: tokens, and predicted time while anything decodes.

Decodes are charged first; what is left is shared by several prefills. A prefill that is granted less than a block
while the budget is whole gets a block all the same, so that prefill never starves; a target that cannot be met is
said once in the log.
"""

import logging

from engine.step_cost import StepCostModel, StepLoad

logger = logging.getLogger(__name__)

SHARE_FOR_OTHERS = 0.25
"""Part of a step's prefill that the longest one leaves to others, so that a short prompt overtakes a long one."""


class StepBudget:
    """Made by the scheduler for each step; counts down as requests are scheduled."""

    def __init__(
        self, cost: StepCostModel, *, max_num_tokens: int, block_size: int, target_s: float, decodes: StepLoad
    ) -> None:
        """Charge the decodes of the step.

        Args:
            cost: Predicts step times.
            max_num_tokens: Most tokens in a step.
            block_size: The least that a step grants to prefill, in tokens.
            target_s: Longest predicted step while anything decodes.
            decodes: The load of the requests that decode in this step.
        """
        self._cost = cost
        self._load = decodes
        self._target_s = target_s if decodes.num_tokens else None
        self._num_tokens_left = max(max_num_tokens - decodes.num_tokens, 0)
        self._block_size = block_size
        self._has_granted = False

    def grant(self, num_tokens: int, context: int, share: float = 1.0) -> int:
        """How many of num_tokens prefill tokens, behind `context` computed ones, may be computed; 0 when spent.

        `share` of what is left is the most that is granted. Nothing is charged yet.
        """
        limit = float(self._num_tokens_left)
        if self._target_s is not None:
            limit = min(
                limit, self._cost.num_tokens_within(self._load, context, self._target_s / self._cost.tail_ratio)
            )
        granted = min(num_tokens, int(limit * share))
        if granted < min(num_tokens, self._block_size) and not self._has_granted:
            granted = min(num_tokens, self._block_size, self._num_tokens_left)
        return granted

    def charge(self, num_tokens: int, context: int) -> None:
        """Take what a prefill computes off the budget."""
        self._load.add(num_tokens, context)
        self._num_tokens_left = max(self._num_tokens_left - num_tokens, 0)
        self._has_granted = True


class TargetWarning:
    """Says once that decoding alone takes longer than the target, so that no setting of Weft's can meet it."""

    def __init__(self, target_s: float) -> None:
        """Watch for steps longer than target_s."""
        self._target_s = target_s
        self._is_said = False

    def check(self, decodes: StepLoad, predicted_s: float) -> None:
        """Log when the decodes of a step are predicted to take longer than the target."""
        if decodes.num_tokens and predicted_s > self._target_s and not self._is_said:
            self._is_said = True
            logger.warning(
                "itl_target_ms=%.0f cannot be met: a step of %d decodes alone takes about %.0f ms",
                self._target_s * 1e3,
                decodes.num_tokens,
                predicted_s * 1e3,
            )
