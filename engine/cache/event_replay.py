"""Sends block events again to who missed them, in vLLM's format, on a second ZeroMQ socket.

A request has two frames behind the client's name: an empty one and the first number that is wanted (8 bytes,
big-endian). The answer is each kept message from there on, as empty frame, number and data, and a last one with number
-1 and no data. Any other request is ignored. A thread of its own answers, so a slow client delays other clients, never
a step. An answer ends when a client does not take a message within `_PATIENCE_MS`, or the whole within `_ANSWER_S`.
"""

import threading
import time
from collections import deque

import zmq

_MAX_BYTES = 64 << 20
"""Kept, whatever the number of messages: the tokens of some ten million positions."""
_PATIENCE_MS = 1000
_ANSWER_S = 30.0
_MAX_FRAME_BYTES = 1024
"""Of what a client sends: a request takes 8, but ZeroMQ's greeting, which counts, holds a name of up to 255 bytes."""
_END = (-1).to_bytes(8, "big", signed=True)


class EventReplay:
    """Owner of the messages that may be sent again, and of the socket, which its thread alone uses."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, max_num_messages: int) -> None:
        """Listen for requests until the context ends, such as at tcp://*:5558.

        Raises:
            zmq.ZMQError: The address cannot be listened on.
        """
        self._messages: deque[tuple[bytes, bytes]] = deque()
        self._max_num_messages = max_num_messages
        self._num_bytes = 0
        self._lock = threading.Lock()
        router = context.socket(zmq.ROUTER)
        router.set(zmq.LINGER, 0)
        router.set(zmq.ROUTER_MANDATORY, 1)  # wait for a slow client; without it, the rest is dropped unsaid
        router.set(zmq.SNDTIMEO, _PATIENCE_MS)
        router.set(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)  # beyond it, the client is cut off
        try:
            router.bind(address)
        except zmq.ZMQError:
            router.close()
            raise
        threading.Thread(target=self._serve, args=(router,), name="kv_events_replay", daemon=True).start()

    def add(self, number: bytes, data: bytes) -> None:
        """Keep a message, and drop the oldest beyond the bounds."""
        with self._lock:
            self._messages.append((number, data))
            self._num_bytes += len(data)
            while len(self._messages) > self._max_num_messages or self._num_bytes > _MAX_BYTES:
                self._num_bytes -= len(self._messages.popleft()[1])

    def _serve(self, router: "zmq.Socket[bytes]") -> None:
        with router:
            while True:
                try:
                    match router.recv_multipart():
                        case [client, _, first] if len(first) == len(_END):
                            self._answer(router, client, first)
                except zmq.ContextTerminated:
                    return
                except zmq.ZMQError:  # the client left, or takes nothing
                    continue

    def _answer(self, router: "zmq.Socket[bytes]", client: bytes, first: bytes) -> None:
        deadline = time.monotonic() + _ANSWER_S
        with self._lock:
            messages = list(self._messages)
        for number, data in messages:
            if time.monotonic() > deadline:
                return
            if number >= first:  # big-endian, so bytes compare as the numbers do
                router.send_multipart((client, b"", number, data))
        router.send_multipart((client, b"", _END, b""))
