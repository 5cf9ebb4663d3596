"""What steps may cost: predicts their time, keeps their most tokens, and decides when prompts may delay streams.

`StepCostModel` predicts how long a step takes, and how many prefill tokens fit into a time limit. `TokenBudget` keeps
the most tokens of a step, by the memory that steps ran out of. `PromptBurst` decides whether prompts go first, however
long their step takes for the running streams. Times are in seconds. Nothing here knows single requests.
"""

import logging
from dataclasses import dataclass
from operator import mul

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

_FORGETTING = 0.98
"""Factor on the weight of a step with every later step. About the last fifty steps count."""

_SURPRISE, _FIT_EVERY = 0.3, 8
"""The model is fitted at every eighth step, or at once if a prediction is wrong by this share. A fit
at each step took a seventh of the time that Python needs for a step of a small model."""

_RIDGE = 1e-4
"""Strength of the pull towards the previous fit, relative to what recent steps say of each coefficient."""

_TAIL, _TAIL_GAIN = 0.99, 0.05
"""The quantile that `tail_ratio` follows, and how fast."""

_NUM_FEATURES = 4
_SCALES = np.array([1.0, 1e2, 1e4, 1e6])
"""Scales the features to similar sizes, against rounding errors."""


@dataclass(slots=True)
class StepLoad:
    """What a step computes, as the cost model sees it.

    Attributes:
        num_tokens: Tokens computed.
        num_kv_tokens: Tokens read from the cache that earlier steps wrote. Each request's context counts once. Tokens
            of this step do not count, or prefills could not be told from decodes.
        query_context: Sum over all computed tokens of the tokens they attend to.
    """

    num_tokens: int = 0
    num_kv_tokens: int = 0
    query_context: int = 0

    def add(self, num_tokens: int, context: int) -> None:
        """Add a request that computes num_tokens tokens after `context` computed ones."""
        self.num_kv_tokens += context
        self.extend(num_tokens, context)

    def extend(self, num_tokens: int, context: int) -> None:
        """Add num_tokens more tokens to a request that was added, after `context` tokens."""
        self.num_tokens += num_tokens
        self.query_context += num_tokens * context + num_tokens * (num_tokens + 1) // 2

    def features(self) -> tuple[int, int, int, int]:
        """What the time of a step is linear in."""
        return 1, self.num_tokens, self.num_kv_tokens, self.query_context


class StepCostModel:
    """A linear model over four features of a step: a constant, tokens, KV tokens read, and query x context.

    It is fitted to the times of recent steps while the engine runs, by weighted least squares with
    exponential forgetting. Before the first observation it predicts zero, so it limits nothing. Coefficients are never
    negative. A coefficient that recent steps say nothing about (prefill, after a long time of mere decoding) keeps its
    last value.

    Attributes:
        coefficients: Seconds of a step, and of one token, KV token and pair of query and context more in it.
        tail_ratio: Ratio of actual to predicted time that 99 of 100 steps stay below. To keep a limit in 99 of 100
            steps, plan for the limit divided by this.
    """

    def __init__(self, forgetting: float = _FORGETTING) -> None:
        """Know nothing; `forgetting` is the weight of a step one step later."""
        self._forgetting = forgetting
        self._gram = np.eye(_NUM_FEATURES) * 1e-9
        self._moment = np.zeros(_NUM_FEATURES)
        self.coefficients = [0.0] * _NUM_FEATURES
        self._observed: list[tuple[tuple[int, ...], float]] = []
        """Steps since the last fit: their features and times."""
        self.tail_ratio = 1.25

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Take the time of one more step. Relative errors count, so long steps do not outweigh short ones."""
        predicted = self.predict(load)
        if predicted > 0:  # stochastic estimate of a quantile: up by much when exceeded, down by little when not
            self.tail_ratio += _TAIL_GAIN * (_TAIL if seconds > predicted * self.tail_ratio else _TAIL - 1.0)
            self.tail_ratio = min(max(self.tail_ratio, 1.0), 2.0)
        self._observed.append((load.features(), seconds))
        if abs(seconds - predicted) > _SURPRISE * seconds or len(self._observed) == _FIT_EVERY:
            self.fit()

    def predict(self, load: StepLoad) -> float:
        """Predicted seconds of such a step."""
        seconds: float = sum(map(mul, self.coefficients, load.features()))
        return seconds

    def predict_prefill(self, num_tokens: int, context: int) -> float:
        """Predicted seconds of a step that computes num_tokens tokens of one request, after context computed ones."""
        load = StepLoad()
        load.add(num_tokens, context)
        return self.predict(load)

    def num_tokens_within(self, load: StepLoad, context: int, seconds: float) -> int:
        """Most tokens of one request, after `context` computed ones, that fit beside load into `seconds`.

        Solves base + a n + b n^2 <= seconds for n.
        """
        per_token, per_kv, per_pair = self.coefficients[1:]
        left = seconds - self.predict(load) - per_kv * context
        a, b = per_token + per_pair * context, per_pair / 2
        if left <= 0:
            return 0
        if b > 0:
            return int((-a + (a * a + 4 * b * left) ** 0.5) / (2 * b))
        return int(left / a) if a > 0 else 1 << 30

    def fit(self) -> None:
        """Fit to all that was observed; `observe` does so when it is due."""
        for features, seconds in self._observed:
            scaled = np.array(features) / _SCALES / max(seconds, 1e-6)
            self._gram *= self._forgetting
            self._moment *= self._forgetting
            self._gram += np.outer(scaled, scaled)
            self._moment += scaled
        self._observed.clear()
        self.coefficients = (self._solve() / _SCALES).tolist()

    def _solve(self) -> npt.NDArray[np.float64]:
        """Least squares with coefficients >= 0: drop the most negative one and solve again (active set)."""
        ridge = _RIDGE * np.diag(self._gram) + 1e-12
        gram = self._gram + np.diag(ridge)
        moment = self._moment + ridge * np.array(self.coefficients) * _SCALES
        active = list(range(_NUM_FEATURES))
        while active:
            solution = np.linalg.solve(gram[np.ix_(active, active)], moment[active])
            if solution.min() >= 0:
                coefficients = np.zeros(_NUM_FEATURES)
                coefficients[active] = solution
                return coefficients
            active.pop(int(solution.argmin()))
        return np.zeros(_NUM_FEATURES)


FIRST_TRIAL, LONGEST_TRIAL = 256, 1 << 14
"""Steps that must succeed before the budget grows again: after the first failure, and at most."""


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


END_OF_BURST = 1 / 8
"""A burst ends when fewer prompts are left than this share of the streams."""

MAX_DELAY = 64.0
"""Longest mean delay of the streams by a burst, in units of the time of a step of the streams alone."""

MAX_DELAY_S = 0.5
"""Longest such delay in seconds, on any machine. It is also the longest planned time of a step beside streams."""


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
