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
from weft.engine.shared.messages import EngineOptions

_MAX_NUM_MESSAGES = 4096
"""Kept while nobody subscribes, and for each subscriber that is slow."""


def open_publisher(options: EngineOptions) -> "EventPublisher | None":
    """The publisher that the options ask for; None if they ask for none."""
    if not options.kv_events:
        return None
    return EventPublisher(
        options.kv_events, options.kv_events_topic or "", options.kv_events_replay, options.kv_events_buffer
    )


class EventPublisher:
    """Owner of the socket. For one thread; nothing it does waits."""

    def __init__(self, address: str, topic: str, replay_address: str | None = None, max_num_kept: int = 10_000) -> None:
        """Listen for subscribers, such as at tcp://*:5557; max_num_kept messages are sent again at replay_address.

        Raises:
            ModelError: pyzmq is missing, or an address cannot be listened on.
        """
        try:
            import zmq  # not installed without the extra

            from weft.engine.cache.event_replay import EventReplay
        except ImportError:
            raise ModelError("kv_events needs a package more: pip install 'weft[events]'") from None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)  # one that is told of subscribers; to them it is a PUB
        self._socket.set(zmq.SNDHWM, _MAX_NUM_MESSAGES)
        self._socket.set(zmq.LINGER, 0)
        self._nowait, self._nothing = zmq.NOBLOCK, zmq.Again
        self._replay: EventReplay | None = None
        setting, tried = "kv_events", address
        try:
            self._socket.bind(address)
            if replay_address is not None:
                setting, tried = "kv_events_replay", replay_address
                self._replay = EventReplay(self._context, replay_address, max_num_kept)
        except zmq.ZMQError as error:
            self.close()
            fault = zmq.strerror(error.errno or 0).lower()
            raise ModelError(f"{setting}: cannot listen on {tried}: {fault}") from None
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
            message = next(self._numbers).to_bytes(8, "big"), data
            self._messages.append(message)
            if self._replay is not None:
                self._replay.add(*message)
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
