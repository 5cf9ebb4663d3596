"""Sends block events on a ZeroMQ socket, and again to who missed them. Needs the extra `events`.

A message has three frames: the topic, its number (8 bytes, big-endian), and `[time, events, rank]` in msgpack.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from weft.engine.cache.events import AllBlocksCleared, Event
from weft.engine.wire.errors import ModelError

try:
    import zmq
except ImportError:
    raise ModelError("kv_events needs a package more: pip install 'weft[events]'") from None

_MAX_NUM_MESSAGES = 4096
"""Kept while nobody subscribes, and for each subscriber that is slow."""
_MAX_BYTES = 64 << 20
"""Kept, whatever the number of messages: the tokens of some ten million positions."""
_PATIENCE_MS = 1000
_ANSWER_S = 30.0
_MAX_FRAME_BYTES = 1024
"""Of what a client sends: a request takes 8, but ZeroMQ's greeting, which counts, holds a name of up to 255 bytes."""
_END = (-1).to_bytes(8, "big", signed=True)


class EventReplay:
    """Sends messages again to who missed them, on a second socket, in vLLM's format.

    Owner of these messages, and of the socket, which its thread alone uses. A slow client delays other clients, never a
    step. A request has two frames behind the client's name: an empty one and the first number that is wanted (8 bytes,
    big-endian). The answer is each kept message from there on, as empty frame, number and data, and a last one with
    number -1 and no data. Any other request is ignored. An answer ends when a client does not take a message within
    `_PATIENCE_MS`, or the whole within `_ANSWER_S`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, max_num_messages: int) -> None:
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

    def _serve(self, router: zmq.Socket[bytes]) -> None:
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

    def _answer(self, router: zmq.Socket[bytes], client: bytes, first: bytes) -> None:
        deadline = time.monotonic() + _ANSWER_S
        with self._lock:
            messages = list(self._messages)
        for number, data in messages:
            if time.monotonic() > deadline:
                return
            if number >= first:  # big-endian, so bytes compare as the numbers do
                router.send_multipart((client, b"", number, data))
        router.send_multipart((client, b"", _END, b""))


class EventPublisher:
    """Owner of the ZeroMQ socket that sends events. For one thread; nothing it does waits.

    No step waits for a subscriber. While there is none, the newest messages are kept; what a slow one does not take is
    dropped. The numbers of messages tell subscribers what they missed. The first message says that nothing is cached,
    as after a restart.
    """

    def __init__(self, address: str, topic: str, replay_address: str | None = None, max_num_kept: int = 10_000) -> None:
        """Listen for subscribers, such as at tcp://*:5557; max_num_kept messages are sent again at replay_address.

        Raises:
            ModelError: An address cannot be listened on.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)  # one that is told of subscribers; to them it is a PUB
        self._socket.set(zmq.SNDHWM, _MAX_NUM_MESSAGES)
        self._socket.set(zmq.LINGER, 0)
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
                self._socket.send_multipart((self._topic, number, data), zmq.NOBLOCK)
            self._messages.clear()

    def _has_subscriber(self) -> bool:
        """Whether anybody subscribes to anything, by what the socket tells: 1 before a new topic, 0 before one less."""
        try:
            while True:
                self._num_topics += {b"\1": 1, b"\0": -1}.get(self._socket.recv(zmq.NOBLOCK)[:1], 0)
        except zmq.Again:
            return self._num_topics > 0
