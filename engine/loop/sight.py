"""Pictures that requests wait for: which one is encoded between two steps, and which features are kept.

A request computes the tokens before its first picture without features, and then waits, while others go on. At most one
A request computes the tokens before its first picture without features, and then waits, while others go on. At most one
picture, or a part of one that takes long, is encoded between two steps, of the request that has waited longest since
its last one. Features are kept while there is room, those of running requests last of all to go; those that a running
request needs next do not go. A picture that cannot be encoded is the end of one request.

Where layers attend to pictures, tokens see pictures before them, too, up to the end of a request, and one may need many
at once. A request then has its turn until it has all of them. If there is no room for more, and no request that runs
can go on, the oldest of these is given the room of the others.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from weft.engine.device import is_out_of_memory
from weft.engine.loop.output_collector import end
from weft.engine.request import Outputs, Request, RequestKey
from weft.engine.schedule.pooled_requests import FAR, picture_key, views
from weft.engine.schedule.scheduler import Scheduler
from weft.engine.wire.inputs import TokenSpan
from weft.engine.wire.messages import FinishReason
from weft.engine.wire.pictures import Picture

logger = logging.getLogger(__name__)


class PictureError(Exception):
    """A picture cannot be encoded; the message is fit for the caller."""


Part = tuple[int, float] | None
"""Of an encoding: None where steps may come between; last of all the bytes of the features, and the seconds it took."""


class Features(Protocol):
    """Computes the features of pictures and keeps them, as it is told."""

    def encode(self, key: bytes, picture: Picture, num_features: int) -> Iterator[Part]:
        """Compute the features of a picture and keep them under a key.

        Raises:
            PictureError: The picture is not there, or has another number of features.
            Exception: Whatever the encoder raises. Then nothing is kept.
        """
        ...

    def drop(self, key: bytes) -> None:
        """Keep the features under a key no longer."""
        ...


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
        self._under_way: tuple[Request, bool, TokenSpan, Picture, Iterator[Part]] | None = None
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
        while self._awaited and not self._under_way:
            request = self._scheduler.requests.get(key := next(iter(self._awaited)))
            if request is None or (missing := self._missing(request)) is None:
                del self._awaited[key]
                continue
            seeing, is_alone = self._seeing(request), False
            if self._num_next_bytes(seeing) >= self._room:
                if any(self._can_go_on(each) for each in seeing if each in self._scheduler.running):  # they go on first
                    return []
                request, is_alone = seeing[0], True
                if (missing := self._missing(request)) is None:
                    return []
            self._awaited.pop(request.key, None)
            self._under_way = request, is_alone, *missing, self._begin(request, *missing)
        return self._go_on(*self._under_way) if self._under_way else []

    def _seeing(self, request: Request) -> list[Request]:
        """Who runs and has pictures, and this request, if it has not ended."""
        running = [each for each in self._scheduler.running if each.pictures]
        return running if request in running or request.key not in self._scheduler.requests else [*running, request]

    def _can_go_on(self, request: Request) -> bool:
        """Whether there are all features that the next token of a request needs."""
        start = self._position(request)
        return all(_key(request, *each) in self._kept for each in _coming(request, start, start + 1))

    def _begin(self, request: Request, span: TokenSpan, picture: Picture) -> Iterator[Part]:
        assert self._features is not None
        return self._features.encode(_key(request, span, picture), picture, _num_features(request, span, picture))

    def _go_on(
        self, request: Request, is_alone: bool, span: TokenSpan, picture: Picture, parts: Iterator[Part]
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
        self._make_room(key, self._needed([request] if is_alone else self._seeing(request)))
        if request.key in self._scheduler.requests and not self._can_go_on(request):  # its turn is not over
            self._awaited = {request.key: None, **self._awaited}
        return []

    def _make_room(self, new: bytes, needed: dict[bytes, bool]) -> None:
        """Drop features, but not those that were just made, nor those that are needed next."""
        for key in [key for key, is_next in needed.items() if not is_next]:
            self._kept.move_to_end(key)
        excess = sum(self._kept.values()) - self._room
        for key in [key for key in self._kept if key != new and not needed.get(key)]:
            if excess <= 0:
                return
            assert self._features is not None
            self._features.drop(key)
            excess -= self._kept.pop(key)

    def _needed(self, requests: list[Request]) -> dict[bytes, bool]:
        """The kept features that requests still need, and whether one of them needs these next."""
        needed: dict[bytes, bool] = {}
        for request in requests:
            position = self._position(request)
            for number, (span, picture) in enumerate(_coming(request, position)):
                if (key := _key(request, span, picture)) in self._kept:
                    needed[key] = needed.get(key, False) or not number or span.start <= position
        return needed

    def _num_next_bytes(self, requests: list[Request]) -> int:
        return sum(self._kept[key] for key, is_next in self._needed(requests).items() if is_next)

    def _missing(self, request: Request) -> tuple[TokenSpan, Picture] | None:
        """The first picture without features that a request needs; None if there is none."""
        coming = _coming(request, self._position(request))
        return next((each for each in coming if _key(request, *each) not in self._kept), None)

    def _position(self, request: Request) -> int:
        """Where a request goes on; its choices see again what the last token of the prompt sees."""
        if not request.block_tables:
            return self._scheduler.kv.find_prefix(request)
        last = request.num_prompt_tokens - 1
        return min(request.num_computed_tokens, last) if request.pending_indices else request.num_computed_tokens


def _coming(request: Request, start: int, end: int = FAR) -> Iterator[tuple[TokenSpan, Picture]]:
    """The pictures of a request, whole or in part, from start to end, exclusive; or those that tokens there see."""
    if not request.pictures:
        return
    if request.pictures[0].is_attended:
        stops = [view.stop for view in views(request)]
    elif start < request.spans[-1].start + request.spans[-1].num_tokens:
        stops = [span.start + span.num_tokens for span in request.spans]
    else:
        return
    for span, stop, picture in zip(request.spans, stops, request.pictures, strict=True):
        if span.start < end and start < stop:
            yield span, picture


def _num_features(request: Request, span: TokenSpan, picture: Picture) -> int:
    return request.token_ids[span.start : span.start + span.num_tokens].count(picture.token_id)


def _key(request: Request, span: TokenSpan, picture: Picture) -> bytes:
    return picture_key(request, span, _num_features(request, span, picture))
