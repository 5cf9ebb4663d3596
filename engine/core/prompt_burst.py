"""Whether prompts go first, however long their step takes for the streams that run.

Computing a prompt takes the same time whether it is done at once or beside decodes; done at once it delays the streams
by one long wait instead of many short ones, and whoever waits for a first token gets it sooner. So prompts of which
there are fewer than streams are computed beside these; a burst, of at least as many as there are streams, goes first,
and to its end: the last prompts of a burst, computed beside all those before, would slow every stream down for as long
as they take. A burst ends, too, with the step in which it has delayed the streams by a bounded time, counted in their
own steps and in seconds; until they have computed for as long, none begins. One that has used half of that time
goes on only while the prompts are as many as the streams.
"""

END_OF_BURST = 1 / 8
"""A burst has ended when fewer prompts than this share of the streams are left."""

MAX_DELAY = 64.0
"""How long a burst may delay the streams, on average, in units of the time that a step of theirs takes."""

MAX_DELAY_S = 2.0
"""And at most in seconds, whatever the machine: no step beside streams is planned to take longer, either."""


class PromptBurst:
    """Made anew whenever nothing decodes, asked once a step from then on."""

    def __init__(self) -> None:
        """Begin with a burst, if there are prompts: whatever has been computed so far let nobody wait."""
        self._is_on = True
        self._is_spent = False
        self._delay_s = 0.0
        self._most_streams = 0
        """Since nobody was delayed: who joins dilutes the mean once, not again after others have left."""
        self._asked_at_s: float | None = None
        self._step_s = 0.0

    def goes_first(self, num_streams: int, num_prompts: int, step_s: float, now_s: float) -> bool:
        """Whether the next step is for prompts, however long that takes.

        Args:
            num_streams: Requests that decode, at least 1.
            num_prompts: Requests that could go on with their prompts.
            step_s: How long a step of the streams alone would take.
            now_s: Of a clock that never goes back.
        """
        if self._asked_at_s is not None:
            late_s = max(now_s - self._asked_at_s - self._step_s, 0.0)
            self._delay_s = max(self._delay_s + (late_s if self._is_on else -step_s), 0.0)
        self._asked_at_s, self._step_s = now_s, step_s
        if not self._delay_s:
            self._is_spent, self._most_streams = False, num_streams
        elif num_streams > self._most_streams:  # who has just joined has not waited
            self._delay_s *= self._most_streams / num_streams
            self._most_streams = num_streams
        max_delay_s = min(MAX_DELAY * step_s, MAX_DELAY_S)
        if self._delay_s > max_delay_s:
            self._is_spent = True
        is_short = self._is_on and self._delay_s <= max_delay_s / 2
        least = num_streams * END_OF_BURST if is_short else num_streams
        self._is_on = num_prompts >= max(least, 1) and not self._is_spent
        return self._is_on
