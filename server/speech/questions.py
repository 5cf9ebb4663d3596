"""Asks the engine about windows of one sound, and counts what it wrote."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from weft.engine.wire.inputs import AudioInput, AudioShape
from weft.engine.wire.messages import (
    AddRequest,
    BeamOptions,
    EngineInfo,
    FinishReason,
    RequestOutput,
    TokenLogprobs,
    TokensOutput,
)
from weft.engine.wire.params import PooledOutput, Pooling, SamplingParams
from weft.server.errors import QueueFullError
from weft.server.generate.answer import failure
from weft.server.http.metrics import RequestTimer
from weft.server.models.engine_client import Generation
from weft.server.models.served_model import ServedModel
from weft.server.speech.sound import Sound

RETRY_S = 0.2


@dataclass(slots=True)
class Output:
    """The ids that the engine wrote, each with its log-probability."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_ended: bool = False

    @property
    def text_ids(self) -> list[int]:
        """Without the one that ended them."""
        return self.token_ids[:-1] if self.is_ended else self.token_ids


class Questions:
    """The requests of one call. Whoever makes one closes it; then nothing of it is left in the engine.

    Attributes:
        num_positions: That the sound has for the encoder.
        num_output: Tokens of all texts.
    """

    def __init__(
        self,
        model: ServedModel,
        info: EngineInfo,
        shape: AudioShape,
        sound: Sound,
        timer: RequestTimer,
        tenant: str,
        deadline: float | None,
    ) -> None:
        self.model, self.info, self.shape, self.sound = model, info, shape, sound
        self.num_positions = -(-sound.num_samples // shape.samples_per_position)
        self.num_output = 0
        self._timer, self._tenant, self._deadline = timer, tenant, deadline
        self._open: set[Generation] = set()
        self._is_accepted = self._is_closed = False
        self.reason = FinishReason.ABORT

    async def ask(
        self, samples: bytes, begin: Sequence[int], params: SamplingParams, beams: BeamOptions | None = None
    ) -> Output:
        """The output of a request about some samples.

        Raises:
            ApiError: The engine rejected it, or gave it up.
        """
        sound = AudioInput(samples, self.shape.num_positions(len(samples) // 2), list(begin))
        add = AddRequest(
            sound, params, tenant=self._tenant, deadline=self._deadline, adapter=self.model.adapter, beams=beams
        )
        made = Output()
        async with aclosing(self._outputs(add)) as outputs:
            async for output in outputs:
                assert isinstance(output, TokensOutput), "no vector was asked for"
                self._timer.note_output(0, output, time.monotonic())
                made.token_ids += output.token_ids
                made.logprobs += output.logprobs or ()
                made.is_ended = output.stop_token_id is not None
        return made

    async def _outputs(self, add: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        generation = await self._accepted(add)
        self._open.add(generation)
        if not self._is_accepted:
            self._is_accepted = True
            self._timer.accept([self.num_positions])
        try:
            async for output in generation:
                yield output
                message = output.message if isinstance(output, TokensOutput) else ""
                if output.finish_reason is not None and (error := failure(output.finish_reason, message)):
                    self.reason = output.finish_reason
                    raise error
        finally:
            generation.close()
            self._open.discard(generation)

    async def begins(self, samples: bytes, tokens: Sequence[int], num_begun: int, num_positions: int) -> list[float]:
        """The positions at which tokens behind the first ones are spoken; see the engine's `alignment`.

        Raises:
            ApiError: The engine rejected it, or gave it up.
        """
        sound = AudioInput(samples, self.shape.num_positions(len(samples) // 2), list(tokens))
        pooling, params = Pooling(aligned=(num_begun, num_positions)), SamplingParams(max_tokens=0)
        add = AddRequest(sound, params, tenant=self._tenant, deadline=self._deadline, pooling=pooling)
        made: list[float] = []
        async with aclosing(self._outputs(add)) as outputs:
            async for output in outputs:
                if isinstance(output, PooledOutput):
                    made = list(memoryview(output.values).cast("f"))
        return made

    async def _accepted(self, add: AddRequest) -> Generation:
        """Once a request of the call was accepted, a full queue does not throw the others' work away: it waits."""
        while True:
            try:
                return await self.model.engine_client.generate(add)
            except QueueFullError:
                if not self._is_accepted or (self._deadline is not None and time.monotonic() > self._deadline):
                    raise
            await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        """End what still runs in the engine, and let go of the sound. Idempotent."""
        for generation in self._open:
            generation.close()
        self.sound.kept.close()
        if self._is_accepted and not self._is_closed:
            self._timer.finish_choice(0, self.reason, self.num_output)
        self._is_closed = True
