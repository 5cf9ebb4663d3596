"""Tells routers which blocks became cached and which no longer are, so that they send prompts where their prefix is.

`RecordingCache` records events, and `EventPublisher` sends them on a ZeroMQ socket. Events have the fields and the
order of vLLM's. A message has three frames: the topic, its number (8 bytes, big-endian), and `[time, events, rank]` in
msgpack.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal

import msgspec
from typing_extensions import override

from weft.engine.cache.block_pool import BlockPool
from weft.engine.cache.manager import KVCacheManager
from weft.engine.cache.prefixes import BlockHashes
from weft.engine.request import Request
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Blocks that follow each other, and whose content is cached now.

    Attributes:
        parent_block_hash: Of the block before the first; None at the beginning of a prompt.
        token_ids: Of all these blocks.
        lora_name: Of the adapter that made them; None: the model itself.
        medium: The first tier in vLLM's words, whatever the device.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: Literal["GPU"] = "GPU"
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """Blocks whose content is cached no longer."""

    block_hashes: list[int]
    medium: Literal["GPU"] = "GPU"


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """Nothing is cached."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class RecordingPool(BlockPool):
    """A pool that tells which content is no longer found."""

    on_unindex: Callable[[bytes], object] | None = None

    @override
    def unindex(self, block: int) -> None:
        block_hash = self._hashes[block]
        super().unindex(block)
        if block_hash is not None and self.on_unindex is not None:
            self.on_unindex(block_hash)


class BlockEvents:
    """Owner of the events of one pool since they were last taken.

    Only blocks of requests without a salt are recorded: an event holds the token ids of its block, and a salt says that
    a prefix is nobody else's business. The list grows during a step, and `take` empties it.
    """

    def __init__(self, pool: RecordingPool, block_size: int, hashes: BlockHashes) -> None:
        """Record the blocks of requests whose cache seed is one without a salt."""
        self._pool = pool
        self._block_size = block_size
        self._hashes, self._seed = hashes, hashes.seed("", None, ())
        self._known: set[bytes] = set()
        self._events: list[Event] = []
        pool.on_unindex = self._removed

    def stored(self, request: Request, first: int, end: int) -> None:
        """Record the request's blocks from first to end (exclusive) that are indexed and were not recorded before.

        A block that a tier brings back is not known by its tokens until a request is admitted with it.
        """
        adapter = request.adapter
        if request.cache_seed != (self._hashes.seed("", adapter, ()) if adapter else self._seed):
            return
        hashes, size = request.block_hashes, self._block_size
        for block in range(first, end):
            if hashes[block] in self._known or self._pool.lookup(hashes[block]) is None:
                continue
            self._known.add(hashes[block])
            parent = _name(hashes[block - 1]) if block else None
            token_ids = request.token_ids[block * size : (block + 1) * size]
            last = self._events[-1] if self._events else None
            if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
                last.block_hashes.append(_name(hashes[block]))
                last.token_ids += token_ids
            else:
                name = adapter.name if adapter is not None else None
                self._events.append(BlockStored([_name(hashes[block])], parent, token_ids, size, lora_name=name))

    def take(self) -> list[Event]:
        """Return the events so far, and begin anew."""
        events, self._events = self._events, []
        return events

    def _removed(self, block_hash: bytes) -> None:
        if block_hash not in self._known:
            return
        self._known.remove(block_hash)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(_name(block_hash))
        else:
            self._events.append(BlockRemoved([_name(block_hash)]))


def _name(block_hash: bytes) -> int:
    """The last 64 bits, which is what routers make of a longer hash."""
    return int.from_bytes(block_hash[-8:], "big")


class RecordingCache(KVCacheManager):
    """A KV cache manager that records events of what it caches."""

    pool_class = RecordingPool

    @cached_property
    def events(self) -> BlockEvents | None:
        """Of the group that keeps most, one that sees all if there is one; None if no blocks of tokens are cached."""
        if not self.prefix_caching or not self._paged:
            return None
        pool = self.pools[min(self._paged, key=lambda group: not self.specs[group].sees_all)]
        assert isinstance(pool, RecordingPool)
        return BlockEvents(pool, self.block_size, self.hashes)

    @override
    def admit(self, request: Request, num_cached_tokens: int, num_tokens: int) -> bool:
        is_admitted = super().admit(request, num_cached_tokens, num_tokens)
        if is_admitted and self.events is not None:
            self.events.stored(request, 0, request.first_new_block)
        return is_admitted

    @override
    def index_computed_blocks(self, request: Request) -> None:
        first = request.num_indexed_blocks
        super().index_computed_blocks(request)
        if self.events is not None:
            self.events.stored(request, first, request.num_indexed_blocks)


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
    """Owner of the ZeroMQ socket that sends events. For one thread; nothing it does waits.

    No step waits for a subscriber. While there is none, the newest messages are kept; what a slow one does not take is
    dropped. The numbers of messages tell subscribers what they missed. The first message says that nothing is cached,
    as after a restart.
    """

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
