"""Publishes what the KV cache holds, in vLLM's format, on a ZeroMQ socket.

A message has three frames: the topic, its number (8 bytes, big-endian), and `[time, events, rank]` in msgpack. No step
waits for a subscriber. While there is none, the newest messages are kept; what a slow one does not take is dropped.
Numbers tell subscribers what they missed. The first message says that nothing is cached, as after a restart.
"""

import itertools
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from weft.engine.cache.events import AllBlocksCleared, Event
from weft.engine.shared.errors import ModelError

_MAX_NUM_MESSAGES = 4096
"""Kept while nobody subscribes, and for each subscriber that is slow."""


class EventPublisher:
    """Owner of the socket. For one thread; nothing it does waits."""

    def __init__(self, address: str, topic: str) -> None:
        """Listen for subscribers, such as at tcp://*:5557.

        Raises:
            ModelError: pyzmq is missing, or the address cannot be listened on.
        """
        try:
            import zmq  # not installed without the extra
        except ImportError:
            raise ModelError("kv_events needs a package more: pip install 'weft[events]'") from None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)  # one that is told of subscribers; to them it is a PUB
        self._socket.set(zmq.SNDHWM, _MAX_NUM_MESSAGES)
        self._socket.set(zmq.LINGER, 0)
        self._nowait, self._nothing = zmq.NOBLOCK, zmq.Again
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ModelError(
                f"kv_events: cannot listen on {address}: {zmq.strerror(error.errno or 0).lower()}"
            ) from None
        self._topic = topic.encode()
        self._numbers = itertools.count()
        self._messages: deque[tuple[bytes, bytes]] = deque(maxlen=_MAX_NUM_MESSAGES)
        self._num_topics = 0
        self.publish([AllBlocksCleared()])

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        self._context.term()

    def publish(self, events: Sequence[Event]) -> None:
        """Send events as one message, behind those that are kept; without events only those."""
        if events:
            data = msgspec.msgpack.encode((time.time(), events, 0))
            self._messages.append((next(self._numbers).to_bytes(8, "big"), data))
        if self._messages and self._has_subscriber():
            for number, data in self._messages:
                self._socket.send_multipart((self._topic, number, data), self._nowait)
            self._messages.clear()

    def _has_subscriber(self) -> bool:
        """Whether anybody subscribes to anything, by what the socket tells: 1 before a new topic, 0 before one less."""
        try:
            while True:
                self._num_topics += {b"\1": 1, b"\0": -1}.get(self._socket.recv(self._nowait)[:1], 0)
        except self._nothing:
            return self._num_topics > 0
