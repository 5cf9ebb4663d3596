"""Whether prompts go first and the streams that run stand still.

Computing a prompt takes the same time whether it is done at once or beside decodes; done at once it delays the streams
by one long wait instead of many short ones, and whoever waits for a first token gets it sooner. So one prompt that
arrives while others run is computed beside them, but a burst, of at least as many prompts as there are streams, goes
first, and to its end: the last prompts of a burst, computed beside all those before, would slow every stream down for
as long as they take. The streams wait for a bounded time only, counted in their own steps.
"""

END_OF_BURST = 1 / 8
"""A burst has ended when fewer prompts than this share of the streams are left."""

MAX_STANDSTILL = 64.0
"""How long streams stand still at a stretch, on average, in units of the time that a step of theirs takes."""


class PromptBurst:
    """Made anew whenever nothing decodes, asked once a step from then on."""

    def __init__(self) -> None:
        """Begin with a burst, if there are prompts: whatever has been computed so far let nobody wait."""
        self._is_on = True
        self._is_exhausted = False
        self._standstill_s = 0.0
        self._num_streams = 0
        self._asked_at_s = 0.0

    def goes_first(self, num_streams: int, num_prompts: int, stream_step_s: float, now_s: float) -> bool:
        """Whether the next step is for prompts, however long that takes.

        Args:
            num_streams: Requests that decode, at least 1.
            num_prompts: Requests that could go on with their prompts.
            stream_step_s: How long a step of the streams alone would take.
            now_s: Of a clock that never goes back.
        """
        if self._num_streams:  # a step has been taken since
            passed_s = now_s - self._asked_at_s if self._is_on else -stream_step_s
            self._standstill_s = max(self._standstill_s + passed_s, 0.0)
            self._standstill_s *= min(self._num_streams / num_streams, 1.0)  # who has just joined has not waited
        self._num_streams, self._asked_at_s = num_streams, now_s
        if not self._standstill_s:
            self._is_exhausted = False
        elif self._standstill_s > MAX_STANDSTILL * stream_step_s:
            self._is_exhausted = True  # until the streams have taken as long as they stood still
        least = num_streams * END_OF_BURST if self._is_on else num_streams
        self._is_on = num_prompts >= max(least, 1) and not self._is_exhausted
        return self._is_on
