"""Decides whether prompts go first, however long their step takes for the running streams.

A stream is a request that decodes. Computing a prompt takes the same time whether it is done at once or beside decodes.
Done at once, it delays the streams by one long wait instead of many short ones, and the prompt's first token comes
sooner. So prompts are computed beside the streams while they are fewer than the streams. A burst, with at least as many
prompts as streams, goes first.

A burst goes on to its end. Otherwise its last prompts would be computed beside all the earlier ones, which are streams
by then, and slow every stream down for as long as they take. A burst also ends with the step in which it has delayed
the streams by a bounded time, counted in their own steps and in seconds. No other burst begins until the streams have
computed for as long. A burst that has used half of that time goes on only while there are at least as many prompts as
streams.
"""

END_OF_BURST = 1 / 8
"""A burst ends when fewer prompts are left than this share of the streams."""

MAX_DELAY = 64.0
"""Longest mean delay of the streams by a burst, in units of the time of a step of the streams alone."""

MAX_DELAY_S = 2.0
"""Longest such delay in seconds, on any machine. It is also the longest planned time of a step beside streams."""


class PromptBurst:
    """Keeps count of the delay. Made anew whenever nothing decodes, and asked once per step from then on."""

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
