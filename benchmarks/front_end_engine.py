"""An engine that computes nothing, for front_end.py: every running request gets one token a step, at a fixed pace.

    python -m benchmarks.front_end_engine RUNTIME_DIR TOKEN_ID STEPS_PER_S

It speaks the real protocol through the real `ServerLink`, and notes in a shared table when each step was handed over,
so that clients can tell how long each token was on its way. A request is known by its seed.
"""

import pathlib
import sys
import time
from dataclasses import dataclass

import numpy as np

from weft.engine.loop.server_link import ServerLink
from weft.engine.wire.messages import (
    SOCKET_NAME,
    STATUS_NAME,
    Accepted,
    AddRequest,
    EngineInfo,
    FinishReason,
    RequestOutput,
    ToEngine,
    TokensOutput,
)
from weft.engine.wire.status_page import Status, StatusPage

INFO = EngineInfo("e", "Fake", 1536, 1 << 20, (2,), "cpu", "float32", "sdpa", 16, 256, 1024, 8192)
MAX_NUM_STEPS = 1 << 20
MAX_NUM_REQUESTS = 1 << 16


class StepTable:
    """Shared memory: when each step was handed over (`time.monotonic`), its tokens, and each request's first step."""

    def __init__(self, runtime_dir: pathlib.Path) -> None:
        path = runtime_dir / "steps"
        with path.open("ab") as file:
            file.truncate(8 * (2 * MAX_NUM_STEPS + MAX_NUM_REQUESTS))
        self.times = np.memmap(path, np.float64, "r+", shape=(MAX_NUM_STEPS,))
        self.num_tokens = np.memmap(path, np.int64, "r+", 8 * MAX_NUM_STEPS, (MAX_NUM_STEPS,))
        self.first_steps = np.memmap(path, np.int64, "r+", 16 * MAX_NUM_STEPS, (MAX_NUM_REQUESTS,))  # by seed


@dataclass(slots=True)
class Running:
    """One request: who it is, and how many tokens it is still to get."""

    connection: int
    request_id: int
    seed: int
    num_left: int
    has_begun: bool = False


class FakeEngine:
    """Takes requests in between two steps, as the real one does."""

    def __init__(self, runtime_dir: pathlib.Path, token_id: int, steps_per_s: float) -> None:
        self._token_id = token_id
        self._step_s = 1 / steps_per_s
        self._num_steps = 0
        self._running: dict[tuple[int, int], Running] = {}
        self._table = StepTable(runtime_dir)
        self._link = ServerLink(runtime_dir / SOCKET_NAME, INFO)
        StatusPage(runtime_dir / STATUS_NAME).write(Status(epoch_id=1, is_ready=1))

    def run(self) -> None:
        """Step for ever, each step at its time; one that is late moves those after it."""
        due_time = time.monotonic()
        while True:
            while (wait_s := due_time - time.monotonic()) > 0:
                self._listen(wait_s)
            self._listen(0)
            due_time = max(due_time, time.monotonic() - self._step_s) + self._step_s
            self._step()

    def _listen(self, timeout_s: float) -> None:
        for connection, message in self._link.poll(timeout_s):
            self._apply(connection, message)

    def _apply(self, connection: int, message: ToEngine | None) -> None:
        if isinstance(message, AddRequest):
            params = message.sampling_params
            assert params.max_tokens is not None and params.seed is not None, "the clients say both"
            request = Running(connection, message.request_id, params.seed, params.max_tokens)
            self._running[connection, message.request_id] = request
            self._link.put(connection, Accepted(message.request_id))
        elif message is not None:
            self._running.pop((connection, message.request_id), None)
        else:
            self._running = {key: request for key, request in self._running.items() if key[0] != connection}

    def _step(self) -> None:
        outputs = [(request.connection, self._advance(request)) for request in list(self._running.values())]
        if outputs:
            self._table.times[self._num_steps] = time.monotonic()
            self._table.num_tokens[self._num_steps] = len(outputs)
            self._num_steps += 1
            self._link.put_outputs(outputs)

    def _advance(self, request: Running) -> RequestOutput:
        output = TokensOutput(request.request_id, 0, [self._token_id])
        if not request.has_begun:
            request.has_begun = True
            self._table.first_steps[request.seed] = self._num_steps
            output.num_cached_tokens, output.queue_time_s = 0, 0.0
        request.num_left -= 1
        if request.num_left == 0:
            output.finish_reason = FinishReason.LENGTH
            del self._running[request.connection, request.request_id]
        return output


if __name__ == "__main__":
    FakeEngine(pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])).run()
