"""Beam search over an engine that knows nothing of it: an engine client that answers with the best beams.

Each step asks the engine for one token after every live beam, with the most probable alternatives; what the beams have
in common comes out of the prefix cache, so a step computes the last, partly filled block of each. The prompt is
accepted or rejected as any other; the choices come whole, at the end, best first.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import msgspec

from engine.protocol import UNGUIDED, AddRequest, EngineInfo, FinishReason, RequestOutput, TokenLogprobs
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.status_page import Status
from server.beams import Beam, BeamOptions, Beams
from server.engine_client import EngineClient, Generation
from server.errors import InvalidRequestError
from server.schemas.common import GenerationBody
from server.validation import shown

MAX_BEAMS = MAX_LOGPROBS // 2

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0,)),
    **dict.fromkeys(("logit_bias", "bad_words", "stop", "logprob_token_ids"), ({}, [])),
    **dict.fromkeys(("allowed_token_ids", "prompt_logprobs", "suffix"), ()),
    **dict.fromkeys(("stream", "echo", "prewarm"), (False,)),
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "repetition_penalty": (1,),
}
"""Fields that the search, which follows the model's own probabilities to the end, cannot honour, and neutral values."""


def beam_options(body: GenerationBody) -> BeamOptions | None:
    """Read the options of a body; None when it asks for no beam search.

    Raises:
        InvalidRequestError: Another field has no meaning with beams, or one of theirs has none without.
    """
    if not body.use_beam_search:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(body, name) not in (None, neutral):
                raise InvalidRequestError(f"{name} is only allowed when use_beam_search is true", param=name)
        return None
    neutral_values = {**_NEUTRAL, "best_of": (1 if body.n is None else body.n,)}
    for name, values in neutral_values.items():
        value = getattr(body, name, None)
        if value is not None and value not in values:
            raise InvalidRequestError(f"{name} cannot be used with use_beam_search, got {shown(value)}", param=name)
    if body.n is not None and body.n > MAX_BEAMS:
        raise InvalidRequestError(f"n must be at most {MAX_BEAMS} with use_beam_search, got {body.n}", param="n")
    caching = body.prompt_cache_options
    if caching is not None and caching.mode == "explicit":
        raise InvalidRequestError(  # every step of every beam would compute the prompt again
            "prompt_cache_options.mode must be 'implicit' with use_beam_search, got 'explicit'",
            param="prompt_cache_options.mode",
        )
    length_penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if not -10.0 <= length_penalty <= 10.0:
        raise InvalidRequestError(
            f"length_penalty must be between -10 and 10, got {length_penalty}", param="length_penalty"
        )
    return BeamOptions(length_penalty, body.early_stopping or False)


class BeamSearchClient:
    """An engine client whose `num_choices` are the width of a beam search."""

    def __init__(self, engine_client: EngineClient, options: BeamOptions, info: EngineInfo) -> None:
        self._client = engine_client
        self._options = options
        self.info: EngineInfo | None = info
        self._max_model_len = info.max_model_len
        self._eos_token_ids = info.eos_token_ids

    def status(self) -> Status:
        """See `EngineClient.status`."""
        return self._client.status()

    async def meet(self) -> None:
        """See `EngineClient.meet`."""
        await self._client.meet()

    async def generate(self, request: AddRequest) -> Generation:
        """See `EngineClient.generate`; of the sampling parameters only those that end an output have an effect.

        Raises:
            InvalidRequestError: The output has to follow a grammar, or its reasoning has a budget.
        """
        if request.guidance.grammar is not None or request.guidance.reasoning_budget is not None:
            raise InvalidRequestError(
                "use_beam_search can follow neither a grammar nor a budget for reasoning", param="use_beam_search"
            )
        sampling_params, num_choices = request.sampling_params, request.num_choices
        max_tokens = self._max_model_len - len(request.prompt_token_ids)
        if sampling_params.max_tokens is not None:
            max_tokens = min(max_tokens, sampling_params.max_tokens)
        stop_ids = frozenset(sampling_params.stop_token_ids)
        if not sampling_params.ignore_eos:
            stop_ids |= frozenset(self._eos_token_ids)
        one_token = msgspec.structs.replace(
            request,
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, logprobs=2 * num_choices),
            num_choices=1,
            guidance=UNGUIDED,  # a prediction has nothing to make faster here
        )

        def ask(token_ids: tuple[int, ...]) -> Awaitable[Generation]:
            prompt = [*request.prompt_token_ids, *token_ids]
            return self._client.generate(msgspec.structs.replace(one_token, prompt_token_ids=prompt))

        search = _Search(ask, Beams(num_choices, max_tokens, stop_ids, self._options), stop_ids, sampling_params)
        await search.ask_all()
        return search


class _Search:
    """One search, as the `Generation` that its reader sees."""

    def __init__(
        self,
        ask: Callable[[tuple[int, ...]], Awaitable[Generation]],
        beams: Beams,
        stop_ids: frozenset[int],
        params: SamplingParams,
    ) -> None:
        self._ask = ask
        self._beams = beams
        self._stop_ids = stop_ids
        self._num_logprobs = params.logprobs
        self._asked: dict[int, Generation] = {}  # by live beam; those of ended beams stay, finished

    async def ask_all(self) -> None:
        """Have the next token of every live beam computed; raises what the engine answers to one of them."""

        async def ask(index: int, beam: Beam) -> None:
            self._asked[index] = await self._ask(beam.token_ids)

        asks = (ask(index, beam) for index, beam in enumerate(self._beams.live))
        try:
            for result in await asyncio.gather(*asks, return_exceptions=True):
                if result is not None:
                    raise result
        except BaseException:
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Yield one whole output for each choice, when the search is over."""
        first: RequestOutput | None = None
        while True:
            outputs = [await _last(self._asked[index]) for index in range(len(self._beams.live))]
            first = first or outputs[0]
            failed = next((output for output in outputs if output.finish_reason not in _ENDS), None)
            if failed is not None:
                yield RequestOutput(0, 0, [], failed.finish_reason, message=failed.message)
                return
            self._beams.advance([output.logprobs[0] for output in outputs if output.logprobs])
            if self._beams.is_done:
                break
            await self.ask_all()
        for index, beam in enumerate(self._beams.best):
            output = self._output(index, beam)
            output.num_cached_tokens, output.queue_time_s = first.num_cached_tokens, first.queue_time_s
            yield output

    def abort(self, index: int | None = None) -> None:
        """See `Generation.abort`; every output is whole when it comes, so there is never one choice to abort."""
        self.close()

    def close(self) -> None:
        """See `Generation.close`."""
        for generation in self._asked.values():
            generation.close()

    def _output(self, index: int, beam: Beam) -> RequestOutput:
        last = beam.token_ids[-1]
        is_stop = last in self._stop_ids
        reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
        output = RequestOutput(0, index, list(beam.token_ids), reason, stop_token_id=last if is_stop else None)
        if (count := self._num_logprobs) is not None:
            output.logprobs = [
                TokenLogprobs(entry.logprob, entry.top_token_ids[:count], entry.top_logprobs[:count])
                for entry in beam.entries
            ]
        return output


_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


async def _last(generation: Generation) -> RequestOutput:
    """The outputs of a request for one token, as one."""
    whole: RequestOutput | None = None
    async for output in generation:
        if whole is None:
            whole = output
        else:
            whole.merge(output)
    assert whole is not None, "every generation ends with a finish reason"
    return whole
