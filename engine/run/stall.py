"""How long an engine may be silent before it is taken to hang: one rule for probes, requests and the supervisor.

The engine says it on its status page with every sign of life, because it alone knows what its step will cost. Without
work it still gives one every `heartbeat_s`, so that an idle engine that was stopped is found out as well.
"""

_TIMES_PREDICTED = 10.0
_AT_LEAST_S = 10.0
_AT_LEAST_COMPILING_S = 30.0
"""Where a step may have to compile a kernel first."""

_MARGIN = 2.0
"""A step that is predicted to take longer than the setting allows is given this many times its time."""


class StallRule:
    """From what a step is predicted to take to the silence that it may cause. Times are seconds."""

    def __init__(self, timeout_s: float, device: str) -> None:
        """Take the setting, 0 for no limit, and what kind of device computes."""
        self._timeout_s = timeout_s
        self._at_least_s = _AT_LEAST_COMPILING_S if device.startswith("cuda") else _AT_LEAST_S
        self.heartbeat_s = min(1.0, timeout_s / 4) if timeout_s else None
        """How often an idle engine gives a sign of life; None for never."""

    def stall_time(self, now_s: float, predicted_s: float | None) -> float:
        """When an engine that gave a sign of life now hangs if it gives no other; 0 for never.

        Args:
            now_s: On the clock of `time.monotonic`, as the result.
            predicted_s: Of all steps on the device together; None without any, 0 where nothing is measured yet.
        """
        if not self._timeout_s:
            return 0.0
        if predicted_s == 0.0:
            return now_s + self._timeout_s
        needed_s = max(_TIMES_PREDICTED * (predicted_s or 0.0), self._at_least_s)
        return now_s + min(needed_s, max(self._timeout_s, _MARGIN * (predicted_s or 0.0)))
