"""How long an engine may be silent before it counts as hung.

Probes, requests and the supervisor follow this one rule. The engine writes the time to its status page with every sign
of life, because it alone can predict its steps. An idle engine still gives a sign of life every `heartbeat_s`, so that
one that was stopped is noticed as well.
"""

_TIMES_PREDICTED = 10.0
_AT_LEAST_S = 10.0
_AT_LEAST_COMPILING_S = 30.0
"""On CUDA, where a step may have to compile a kernel first."""

_MARGIN = 2.0
"""A step predicted to take longer than the setting allows may take this many times its predicted time."""


class StallRule:
    """Turns the predicted time of steps into the longest silence allowed. Times are seconds."""

    def __init__(self, timeout_s: float, device: str) -> None:
        """Take the setting (0: no limit) and the name of the device."""
        self._timeout_s = timeout_s
        self._at_least_s = _AT_LEAST_COMPILING_S if device.startswith("cuda") else _AT_LEAST_S
        self.heartbeat_s = min(1.0, timeout_s / 4) if timeout_s else None
        """How often an idle engine gives a sign of life; None for never."""

    def stall_time(self, now_s: float, predicted_s: float | None) -> float:
        """When an engine counts as hung if it gives no sign of life after now; 0 for never.

        Args:
            now_s: On the clock of `time.monotonic`, like the result.
            predicted_s: Of all steps on the device together; None without any, 0 if nothing was measured yet.
        """
        if not self._timeout_s:
            return 0.0
        if predicted_s == 0.0:
            return now_s + self._timeout_s
        needed_s = max(_TIMES_PREDICTED * (predicted_s or 0.0), self._at_least_s)
        return now_s + min(needed_s, max(self._timeout_s, _MARGIN * (predicted_s or 0.0)))
