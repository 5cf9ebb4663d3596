"""Pictures that requests wait for: which one is encoded between two steps, and which features are kept.

A request computes the tokens before its first picture without features, and then waits, while others go on. At most one
picture, or a part of one that takes long, is encoded between two steps, of the request that has waited longest since
its last one. Features are kept while there is room, those of running requests last of all to go; those that a running
request needs next never go. A picture that cannot be encoded is the end of one request.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from weft.engine.device import is_out_of_memory
from weft.engine.loop.output_collector import end
from weft.engine.request import Outputs, Request, RequestKey
from weft.engine.schedule.pooled_requests import picture_key
from weft.engine.schedule.scheduler import Scheduler
from weft.engine.wire.inputs import TokenSpan
from weft.engine.wire.messages import FinishReason
from weft.engine.wire.pictures import Picture

logger = logging.getLogger(__name__)


class PictureError(Exception):
    """A picture cannot be encoded; the message is fit for the caller."""


class Features(Protocol):
    """Computes the features of pictures and keeps them, as it is told."""

    def encode(self, key: bytes, picture: Picture, num_features: int) -> Iterator[tuple[int, float] | None]:
        """Compute the features of a picture and keep them under a key.

        Yields:
            None where steps may come between; last of all their bytes, and the seconds that it took.

        Raises:
            PictureError: The picture is not there, or has another number of features.
            Exception: Whatever the encoder raises. Then nothing is kept.
        """
        ...

    def drop(self, key: bytes) -> None:
        """Keep the features under a key no longer."""
        ...


_Encoding = tuple[Request, TokenSpan, Picture, Iterator[tuple[int, float] | None]]
"""A picture that is being encoded, for which request, and what is left to do."""


class Sight:
    """Owner of the decision which features there are. Belongs to the engine, whose scheduler asks it.

    Attributes:
        before_encode: Called with a request and the seconds that its picture may take, 0 if nothing is known yet.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        features: Features | None = None,
        check_device: Callable[[], None] = lambda: None,
        room_bytes: int = 0,
    ) -> None:
        """Keep nothing yet.

        Args:
            features: None if no request has pictures.
            check_device: See `Executor`.
            room_bytes: For features. Beyond it are at most those of the picture that was encoded last.
        """
        self.before_encode: Callable[[Request, float], None] = lambda request, seconds: None
        self._scheduler, self._check_device = scheduler, check_device
        self._features, self._room = features, room_bytes
        self._kept = OrderedDict[bytes, int]()  # their bytes, the least recently used first
        self._awaited: dict[RequestKey, None] = {}  # requests that wait for a picture, the longest first
        self._under_way: _Encoding | None = None
        self._largest = 0, 0.0  # bytes of the largest picture so far, and its seconds
        if features is not None:
            scheduler.kv.num_ready = self.num_ready

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits, or has ended waiting."""
        return bool(self._awaited or self._under_way)

    def num_ready(self, request: Request, start: int, num_tokens: int) -> int:
        """How many of num_tokens (>= 1) tokens from start on a request can compute with the features that there are.

        If not all, it waits from now on.
        """
        for span, picture in _coming(request, start, start + num_tokens):
            if (key := _key(request, span, picture)) not in self._kept:
                self._awaited.setdefault(request.key)
                return max(span.start - start, 0)
            self._kept.move_to_end(key)
            if span.start >= request.num_seen_tokens:
                request.num_seen_tokens = span.start + span.num_tokens
                self._scheduler.counters.picture_hits += 1
        return num_tokens

    def encode_next(self) -> Outputs:
        """Encode one picture or a part of it, if a request waits for one, and there is room. No step may be under way.

        Returns:
            The end of a request whose picture cannot be encoded.

        Raises:
            Exception: The device is lost.
        """
        while not self._under_way and self._awaited and self._num_next_bytes() < self._room:  # or who has some goes on
            del self._awaited[key := next(iter(self._awaited))]
            request = self._scheduler.requests.get(key)
            if request is not None and (missing := self._missing(request)) is not None:
                self._under_way = self._begin(request, *missing)
        return self._go_on(*self._under_way) if self._under_way else []

    def _begin(self, request: Request, span: TokenSpan, picture: Picture) -> _Encoding:
        assert self._features is not None
        key, num_features = _key(request, span, picture), _num_features(request, span, picture)
        return request, span, picture, self._features.encode(key, picture, num_features)

    def _go_on(
        self, request: Request, span: TokenSpan, picture: Picture, parts: Iterator[tuple[int, float] | None]
    ) -> Outputs:
        num_bytes, seconds = self._largest
        self.before_encode(request, seconds * max(picture.num_bytes / max(num_bytes, 1), 1.0))
        try:
            if (done := next(parts)) is None:
                return []
        except Exception as error:
            self._under_way = None
            logger.exception("a picture of request %s cannot be encoded, and the others go on", request.key)
            self._check_device()
            if request.key not in self._scheduler.requests:
                return []
            fault = "the device ran out of memory" if is_out_of_memory(error) else type(error).__name__
            message = str(error) if isinstance(error, PictureError) else f"a picture cannot be encoded: {fault}"
            return end(self._scheduler, request, FinishReason.ERROR, message)
        self._under_way, (taken, seconds) = None, done
        self._kept[key := _key(request, span, picture)] = taken
        request.num_seen_tokens = span.start + span.num_tokens
        if picture.num_bytes >= num_bytes:
            self._largest = picture.num_bytes, seconds
        self._scheduler.counters.count_picture(seconds)
        self._make_room(key)
        return []

    def _make_room(self, new: bytes) -> None:
        """Drop features, but not those that were just made, nor those that running requests need next."""
        needed = self._needed()
        for key in [key for key, is_next in needed.items() if not is_next]:
            self._kept.move_to_end(key)
        excess = sum(self._kept.values()) - self._room
        for key in [key for key in self._kept if key != new and not needed.get(key)]:
            if excess <= 0:
                return
            assert self._features is not None
            self._features.drop(key)
            excess -= self._kept.pop(key)

    def _needed(self) -> dict[bytes, bool]:
        """The kept features that running requests still need, and whether one of them needs these next."""
        needed: dict[bytes, bool] = {}
        for request in self._scheduler.running:
            for number, (span, picture) in enumerate(_coming(request, _position(request), request.num_prompt_tokens)):
                if (key := _key(request, span, picture)) in self._kept:
                    needed[key] = needed.get(key, False) or not number
        return needed

    def _num_next_bytes(self) -> int:
        return sum(self._kept[key] for key, is_next in self._needed().items() if is_next)

    def _missing(self, request: Request) -> tuple[TokenSpan, Picture] | None:
        """The first picture without features that a request needs; None if there is none."""
        start = _position(request) if request.block_tables else self._scheduler.kv.find_prefix(request)
        coming = _coming(request, start, request.num_prompt_tokens)
        return next((each for each in coming if _key(request, *each) not in self._kept), None)


def _position(request: Request) -> int:
    """Where a running request goes on; its choices see again what the last token of the prompt sees."""
    last = request.num_prompt_tokens - 1
    return min(request.num_computed_tokens, last) if request.pending_indices else request.num_computed_tokens


def _coming(request: Request, start: int, end: int) -> Iterator[tuple[TokenSpan, Picture]]:
    """The pictures of a request, whole or in part, from start to end, exclusive."""
    if request.pictures and start < request.spans[-1].start + request.spans[-1].num_tokens:
        for span, picture in zip(request.spans, request.pictures, strict=True):
            if span.start < end and start < span.start + span.num_tokens:
                yield span, picture


def _num_features(request: Request, span: TokenSpan, picture: Picture) -> int:
    return request.token_ids[span.start : span.start + span.num_tokens].count(picture.token_id)


def _key(request: Request, span: TokenSpan, picture: Picture) -> bytes:
    return picture_key(request, span, _num_features(request, span, picture))
