"""Engine clients around another one: the engine is loaded when it is needed, or others compute its long prompts."""

import asyncio
import logging
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Literal

import httpx
import msgspec

from weft.engine.wire.messages import AddRequest, EngineInfo
from weft.engine.wire.status_page import Status
from weft.server.errors import EngineLeftError, EngineUnavailableError, ModelFailedError, ModelLoadingError
from weft.server.models.engine_client import EngineClient, Generation, SocketEngineClient
from weft.server.models.fleet import ASK_EVERY_S, Ask, Fleet, ModelState
from weft.server.settings import Settings
from weft.server.text.shield import one_line

_log = logging.getLogger(__name__)

_LOOK_S = 0.03
"""Pause between two looks at whether the model is loaded."""


class OnDemandClient:
    """An `EngineClient` whose engine may have to be loaded first, and leaves when others need its memory.

    Invariant: a request that the engine has not accepted is sent again once the model is loaded again; one that it has
    accepted ends there, since an engine that is to leave ends what it has begun. So none is lost.
    """

    def __init__(self, name: str, engine_client: SocketEngineClient, fleet: Fleet, timeout_s: float) -> None:
        """Load the model of that name within timeout_s."""
        self._name = name
        self._engine_client = engine_client
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._info: EngineInfo | None = None  # of its latest engine, which the next one will equal; None: never met

    @property
    def info(self) -> EngineInfo | None:
        """See `EngineClient.info`; after the first handshake it stays, whether the model is loaded or not."""
        self._info = self._engine_client.info or self._info
        return self._info

    def status(self) -> Status:
        """See `EngineClient.status`."""
        return self._engine_client.status()

    async def meet(self) -> None:
        """See `EngineClient.meet`."""
        if self._state.state == "ready":
            self._engine_client.connect()
            await self._engine_client.meet()

    async def load(self) -> None:
        """See `EngineClient.load`."""
        await self._load(time.monotonic() + self._timeout_s)

    async def generate(self, request: AddRequest) -> Generation:
        """See `EngineClient.generate`. Sent again as long as no engine has accepted it."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            await self._load(deadline)
            try:
                return await self._engine_client.generate(request)
            except EngineUnavailableError:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_LOOK_S)

    @property
    def _state(self) -> ModelState:
        return self._fleet.read().models[self._name]

    async def _load(self, deadline: float) -> None:
        num_failures, ask_time = self._state.num_failures, 0.0
        while (state := self._state).state != "ready" or self._engine_client.info is None:
            now = time.monotonic()
            if self._engine_client.has_left:  # this server is told to cut its requests
                raise EngineLeftError()
            if state.state == "failed" and (state.num_failures > num_failures or now < state.retry_time):
                raise ModelFailedError(f"the model {self._name} cannot be loaded: {state.message}")
            if now >= deadline:
                raise ModelLoadingError(f"the model {self._name} is not loaded within {self._timeout_s:g} s")
            if state.state == "ready":
                self._engine_client.connect()
            elif state.state != "loading" and now >= ask_time:
                self._fleet.ask(Ask("load", self._name))
                ask_time = now + ASK_EVERY_S
            await asyncio.sleep(_LOOK_S)


_CONNECT_S = 2.0
_REST_S = 10.0
"""How long a server that failed is left alone."""
_REFUSED_S = 1.0
"""The same for one that is full or does not take a prompt: it seems to be the least busy one, which is asked."""
_TELL_S = 10.0
"""Least time between two lines of log about refusals: a full server refuses every prompt."""
_MAX_ANSWER_BYTES = 64 << 10
"""Of an answer, of which only the status counts; more than a server for prefill ever says."""
_LEAST_PIECE = 64
"""Bytes that any piece of an answer counts for: each costs time, however short it is."""
_SLICE = 64
"""Tokens of a prompt's beginning that are remembered together."""
_MAX_SLICES = 1 << 16

Outcome = Literal["computed", "refused", "failed", "late"]
"""Of a prompt that went to a prefill server; late: its caller could wait no longer."""


class PrefillingClient:
    """An `EngineClient` around another one, whose streams go on undisturbed: other servers compute its long prompts.

    A prompt goes to a prefill server as token ids. It answers once the prompt's blocks are in the folder that both
    share, from where this engine loads them. Invariant: whatever the other server does, the request then goes to this
    engine, which computes what it does not find. Prompts that a prefill server was sent by another one are never passed
    on.

    Attributes:
        observe: Called with what became of a prompt and the seconds that it took.
    """

    def __init__(self, name: str, engine_client: EngineClient, settings: Settings) -> None:
        """Let the `prefill_urls` compute long prompts of the model of that name."""
        self._name = name
        self._engine_client = engine_client
        self._urls = [url.rstrip("/") for url in settings.prefill_urls]
        self._min_tokens, self._timeout_s = settings.prefill_min_tokens, settings.prefill_timeout_s
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {settings.api_key[0]}"} if settings.api_key else {},
            timeout=httpx.Timeout(self._timeout_s, connect=min(_CONNECT_S, self._timeout_s)),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # prompts go to the named servers, through nobody
        )
        self._running: Counter[str] = Counter()
        self._resting: dict[str, float] = {}
        self._seen: OrderedDict[int, None] = OrderedDict()  # hashes of the beginnings of prompts, in slices
        self._next_tell = 0.0
        self.observe: Callable[[Outcome, float], None] = lambda outcome, seconds: None

    @property
    def info(self) -> EngineInfo | None:
        """See `EngineClient.info`."""
        return self._engine_client.info

    def status(self) -> Status:
        """See `EngineClient.status`."""
        return self._engine_client.status()

    async def meet(self) -> None:
        """See `EngineClient.meet`."""
        await self._engine_client.meet()

    async def load(self) -> None:
        """See `EngineClient.load`."""
        await self._engine_client.load()

    async def generate(self, request: AddRequest) -> Generation:
        """See `EngineClient.generate`. Before that, a long prompt is computed elsewhere, in a bounded time."""
        if self._is_shareable(request) and self.info is not None:
            num_new = self._num_new_tokens(request)
            urls = [url for url in self._urls if self._resting.get(url, 0.0) <= time.monotonic()]
            if num_new >= self._min_tokens and urls:
                await self._prefill(request, min(urls, key=lambda url: self._running[url]))
        return await self._engine_client.generate(request)

    async def aclose(self) -> None:
        """Close the connections to the prefill servers."""
        await self._http.aclose()

    @staticmethod
    def _is_shareable(request: AddRequest) -> bool:
        """Whether blocks that another server computes are of use; one that was asked itself does the work."""
        caching, is_scored = request.caching, request.sampling_params.prompt_logprobs is not None
        is_plain = request.pooling is None and not request.input.spans
        is_plain = is_plain and request.adapter is None  # the name of an adapter says not what it holds
        return is_plain and caching.is_used and not caching.is_stored and not is_scored

    def _num_new_tokens(self, request: AddRequest) -> int:
        """Tokens behind the longest beginning that a prompt before had too. O(tokens)."""
        data, size = array("I", request.input.token_ids).tobytes(), _SLICE * array("I").itemsize
        value, num_known, is_known = hash((request.cache_salt, request.adapter)), 0, True
        for start in range(0, len(data) - size + 1, size):
            value = hash((value, data[start : start + size]))
            is_known = is_known and value in self._seen
            num_known += _SLICE * is_known
            self._seen[value] = None
            self._seen.move_to_end(value)
        while len(self._seen) > _MAX_SLICES:
            self._seen.popitem(last=False)
        return len(request.input.token_ids) - num_known

    async def _prefill(self, request: AddRequest, url: str) -> None:
        """Have a prompt computed. Returns when its blocks are in the folder, or will not be in time."""
        body = {
            "model": self._name,
            "prompt": request.input.token_ids,
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "cache_salt": request.cache_salt},
        }
        timeout_s, began = self._timeout_s, time.monotonic()
        if request.deadline is not None:
            timeout_s = min(timeout_s, max(request.deadline - began, 0.0) / 2)
        self._running[url] += 1
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await self._post(url, msgspec.json.encode(body))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            outcome = "late" if isinstance(error, TimeoutError) and timeout_s < self._timeout_s else "failed"
            if outcome == "failed":
                self._resting[url] = time.monotonic() + _REST_S
                reason = one_line(str(error)) or type(error).__name__
                _log.warning("%s computes no prompt and is left alone for %g s: %s", url, _REST_S, reason)
        finally:
            self._running[url] -= 1
        if outcome == "refused":
            self._resting[url] = time.monotonic() + _REFUSED_S
        self.observe(outcome, time.monotonic() - began)

    async def _post(self, url: str, body: bytes) -> Outcome:
        """Send a prompt. Reads a bounded answer as it came: nothing is unpacked, and no redirection is followed."""
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        told, num_bytes = bytearray(), 0
        async with self._http.stream("POST", f"{url}/v1/completions", content=body, headers=headers) as answer:
            async for piece in answer.aiter_raw():
                num_bytes += max(len(piece), _LEAST_PIECE)
                if num_bytes > _MAX_ANSWER_BYTES:
                    raise httpx.ReadError(f"it answers with more than {_MAX_ANSWER_BYTES} bytes")
                told += piece
        if answer.status_code == httpx.codes.OK:
            return "computed"
        if time.monotonic() >= self._next_tell:
            self._next_tell = time.monotonic() + _TELL_S
            reason = one_line(told.decode("utf-8", "replace"))
            _log.warning("%s computes no prompt: %d %s", url, answer.status_code, reason)
        return "refused"


def with_prefill(name: str, engine_client: EngineClient, settings: Settings) -> EngineClient:
    """The client of the model of that name, by which `prefill_urls` compute its long prompts, if there are any."""
    is_served = settings.prefill_urls and settings.kv_role in ("decode", "both")
    return PrefillingClient(name, engine_client, settings) if is_served else engine_client
