"""An executor whose model runs in another process: batches and masks go there as bytes, results come back.

`python -m tests.engine.process_executor SOCKET OPTIONS` is that process.
"""

import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from weft.engine.batch import Batch, RowMasks, StepResult
from weft.engine.start.startup import start
from weft.engine.wire.messages import EngineOptions

_LENGTH = struct.Struct("<I")


def _encode_array(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array.dtype.str, array.shape, array.tobytes()
    raise NotImplementedError(type(array))


def _decode_array(kind: Any, data: Any) -> Any:
    dtype, shape, content = data
    return np.frombuffer(content, dtype).reshape(shape)


def encode(message: object) -> bytes:
    return msgspec.msgpack.encode(message, enc_hook=_encode_array)


def decode(kind: Any, data: bytes) -> Any:
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)


def send(sock: socket.socket, message: object) -> None:
    data = encode(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket, kind: Any) -> Any:
    def exactly(number: int) -> bytes:
        data = b""
        while len(data) < number:
            data += sock.recv(number - len(data)) or sys.exit(0)
        return data

    return decode(kind, exactly(_LENGTH.unpack(exactly(_LENGTH.size))[0]))


class ProcessExecutor:
    """`weft.engine.batch.Executor`, whose handle of a step is the future of its result."""

    def __init__(self, options: EngineOptions) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), msgspec.json.encode(options).decode()]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.num_launched = 0

    def launch(self, batch: Batch, masks: "Future[RowMasks] | None") -> Callable[[], StepResult]:
        self.num_launched += 1
        send(self._socket, batch)
        send(self._socket, masks.result() if masks else None)
        return lambda: receive(self._socket, StepResult)

    def collect(self, launched: Callable[[], StepResult]) -> StepResult:
        return launched()

    def prepare(self) -> bool:
        return False

    def check_device(self) -> None:
        assert self._process.poll() is None

    def close(self) -> None:
        self._socket.close()
        assert self._process.wait(60) == 0


def _serve(sock: socket.socket, options: EngineOptions) -> None:
    """Launch what comes while what was launched is collected, as a rank would."""
    runner = start(options, "rank").engine._executor
    while True:
        batch = receive(sock, Batch)
        masks: Future[RowMasks] = Future()
        bits = receive(sock, RowMasks | None)
        masks.set_result(bits)
        send(sock, runner.collect(runner.launch(batch, masks if bits else None)))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), msgspec.json.decode(sys.argv[2], type=EngineOptions))
