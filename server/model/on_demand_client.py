"""An engine that is loaded when it is needed, and leaves when others need its room.

Invariant: a request that the engine has not accepted is sent again once the model is loaded again; one that it has
accepted ends there, since an engine that is to leave ends what it has begun. So none is lost.
"""

import asyncio
import time
from collections.abc import Callable

from weft.engine.shared.messages import AddRequest, EngineInfo
from weft.engine.wire.status_page import Status
from weft.server.errors import EngineLeftError, EngineUnavailableError, ModelFailedError, ModelLoadingError
from weft.server.models.engine_client import Generation, SocketEngineClient
from weft.server.models.fleet import ASK_EVERY_S, Ask, Fleet, ModelState

_LOOK_S = 0.03


class OnDemandClient:
    """An `EngineClient` whose engine may have to be loaded first."""

    def __init__(
        self,
        name: str,
        engine_client: SocketEngineClient,
        fleet: Fleet,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the model of that name within timeout_s."""
        self._name = name
        self._engine_client = engine_client
        self._fleet = fleet
        self._timeout_s = timeout_s
        self._clock = clock
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
        await self._load(self._clock() + self._timeout_s)

    async def generate(self, request: AddRequest) -> Generation:
        """See `EngineClient.generate`. Sent again as long as no engine has accepted it."""
        deadline = self._clock() + self._timeout_s
        while True:
            await self._load(deadline)
            try:
                return await self._engine_client.generate(request)
            except EngineUnavailableError:
                if self._clock() >= deadline:
                    raise
            await asyncio.sleep(_LOOK_S)

    @property
    def _state(self) -> ModelState:
        return self._fleet.read().models[self._name]

    async def _load(self, deadline: float) -> None:
        num_failures, ask_time = self._state.num_failures, 0.0
        while (state := self._state).state != "ready" or self._engine_client.info is None:
            now = self._clock()
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
