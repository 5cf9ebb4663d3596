"""Predicts how long a step takes, and how many prefill tokens fit into a time limit.

Times are in seconds. Nothing here knows single requests.
"""

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

_FORGETTING = 0.98
"""Factor on the weight of a step with every later step. About the last fifty steps count."""

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

    def features(self) -> npt.NDArray[np.float64]:
        """(4,) scaled features."""
        features: npt.NDArray[np.float64] = (
            np.array([1, self.num_tokens, self.num_kv_tokens, self.query_context]) / _SCALES
        )
        return features


class StepCostModel:
    """A linear model over four features of a step: a constant, tokens, KV tokens read, and query x context.

    It is fitted by `observe` to the times of recent steps while the engine runs, by weighted least squares with
    exponential forgetting. Before the first observation it predicts zero, so it limits nothing. Coefficients are never
    negative. A coefficient that recent steps say nothing about (prefill, after a long time of mere decoding) keeps its
    last value.

    Attributes:
        tail_ratio: Ratio of actual to predicted time that 99 of 100 steps stay below. To keep a limit in 99 of 100
            steps, plan for the limit divided by this.
    """

    def __init__(self, forgetting: float = _FORGETTING) -> None:
        """Know nothing; `forgetting` is the weight of a step one step later."""
        self._forgetting = forgetting
        self._gram = np.eye(_NUM_FEATURES) * 1e-9
        self._moment = np.zeros(_NUM_FEATURES)
        self._coefficients = np.zeros(_NUM_FEATURES)
        self.tail_ratio = 1.25

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Fit to the time of one more step. Relative errors count, so long steps do not outweigh short ones."""
        predicted = self.predict(load)
        if predicted > 0:  # stochastic estimate of a quantile: up by much when exceeded, down by little when not
            self.tail_ratio += _TAIL_GAIN * (_TAIL if seconds > predicted * self.tail_ratio else _TAIL - 1.0)
            self.tail_ratio = min(max(self.tail_ratio, 1.0), 2.0)
        features = load.features() / max(seconds, 1e-6)
        self._gram *= self._forgetting
        self._moment *= self._forgetting
        self._gram += np.outer(features, features)
        self._moment += features
        self._coefficients = self._solve()

    @property
    def coefficients(self) -> list[float]:
        """Seconds of a step, and of one token, KV token and pair of query and context more in it."""
        scaled: list[float] = (self._coefficients / _SCALES).tolist()
        return scaled

    def predict(self, load: StepLoad) -> float:
        """Predicted seconds of such a step."""
        return float(self._coefficients @ load.features())

    def predict_prefill(self, num_tokens: int, context: int) -> float:
        """Predicted seconds of a step that computes num_tokens tokens of one request, after context computed ones."""
        load = StepLoad()
        load.add(num_tokens, context)
        return self.predict(load)

    def num_tokens_within(self, load: StepLoad, context: int, seconds: float) -> int:
        """Most tokens of one request, after `context` computed ones, that fit beside load into `seconds`.

        Solves base + a n + b n^2 <= seconds for n.
        """
        per_token, per_kv, per_pair = (float(c) for c in (self._coefficients / _SCALES)[1:])
        left = seconds - self.predict(load) - per_kv * context
        a, b = per_token + per_pair * context, per_pair / 2
        if left <= 0:
            return 0
        if b > 0:
            return int((-a + (a * a + 4 * b * left) ** 0.5) / (2 * b))
        return int(left / a) if a > 0 else 1 << 30

    def _solve(self) -> npt.NDArray[np.float64]:
        """Least squares with coefficients >= 0: drop the most negative one and solve again (active set)."""
        ridge = _RIDGE * np.diag(self._gram) + 1e-12
        gram = self._gram + np.diag(ridge)
        moment = self._moment + ridge * self._coefficients
        active = list(range(_NUM_FEATURES))
        while active:
            solution = np.linalg.solve(gram[np.ix_(active, active)], moment[active])
            if solution.min() >= 0:
                coefficients = np.zeros(_NUM_FEATURES)
                coefficients[active] = solution
                return coefficients
            active.pop(int(solution.argmin()))
        return np.zeros(_NUM_FEATURES)
