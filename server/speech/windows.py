"""From sound to segments of text, window by window.

Whisper's long form is that of transformers and of OpenAI's `transcribe.py`: the times in an output say where the next
window begins; an output that repeats itself or is improbable is made anew at a higher temperature; a silent window is
left out. As in transformers, no window is conditioned on the text of the one before. Features are made of each window
alone. The windows of other models lie side by side, and several are in the engine at once.
"""

import asyncio
import dataclasses
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from msgspec.structs import replace

from weft.engine.wire.messages import FinishReason
from weft.engine.wire.params import SamplingParams
from weft.server.errors import InvalidRequestError, UnsupportedValueError
from weft.server.models.seq2seq import Encoded
from weft.server.models.whisper import Whisper
from weft.server.speech.questions import Output, Questions
from weft.server.speech.segments import Facts, Frames, Segment, Slice, compression_ratio, divide, mean_logprob
from weft.server.speech.words import timed_words

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Tried in turn where the caller asks for none."""
MAX_COMPRESSION = 2.4
MIN_LOGPROB = -1.0
MIN_SILENCE = 0.6
"""OpenAI's bounds. Beyond the first two an output is made anew; if it is silence too, it is left out."""
MAX_WINDOWS = 8
"""Most windows of one file in the engine at once."""


@dataclass(slots=True)
class Wishes:
    """What a caller asks for.

    Attributes:
        task: `transcribe` or `translate`.
        language: Its code; of a Whisper it is known once the first window is.
        prompt_ids: What stands before the beginning of each window.
        temperature: 0 for fallback.
        has_times: Whether the text is to be divided by times, also that of a short sound.
        has_words: Whether the times of words are wanted.
        has_silence: Whether the probability of silence is reported.
    """

    task: str = "transcribe"
    language: str | None = None
    prompt_ids: Sequence[int] = ()
    temperature: float = 0.0
    seed: int = 0
    has_times: bool = False
    has_words: bool = False
    has_silence: bool = False


async def segments(asked: Questions, wishes: Wishes) -> AsyncGenerator[list[Segment], None]:
    """The segments with text of each window, once they are certain.

    Raises:
        ApiError: The sound is too short, or the engine gave a request up.
    """
    whisper = asked.model.whisper
    made = _side_by_side(asked, wishes) if whisper is None else _Windows(asked, wishes, whisper).segments()
    async with aclosing(made) as windows:
        async for each in windows:
            yield [segment for segment in each if segment.text.strip()]
    asked.reason = FinishReason.STOP


class _Windows:
    """The windows of a Whisper."""

    def __init__(self, asked: Questions, wishes: Wishes, whisper: Whisper) -> None:
        self._asked, self._wishes, self._whisper = asked, wishes, whisper
        self._frames = Frames.of(asked.shape)

    async def segments(self) -> AsyncGenerator[list[Segment], None]:
        frames, wishes, sound, whisper = self._frames, self._wishes, self._asked.sound, self._whisper
        if whisper.languages and wishes.language is None:
            wishes.language = whisper.language or await self._language()
        is_short = sound.num_samples <= self._asked.shape.max_samples
        wishes.has_times = wishes.has_times or not is_short
        seek, total = 0, max(sound.num_samples // frames.hop, 1)
        while seek < total:
            num_frames = min(total - seek, frames.most)
            samples = sound.read(seek * frames.hop, self._asked.shape.max_samples)
            made, num_done = await self._window(samples, seek, num_frames)
            yield made
            seek += num_done

    async def _window(self, samples: bytes, seek: int, num_frames: int) -> tuple[list[Segment], int]:
        """The segments of a window, and where behind its beginning the next one begins."""
        asked, wishes, whisper = self._asked, self._wishes, self._whisper
        begin = [*wishes.prompt_ids, *whisper.begin(wishes.language, wishes.task, has_times=wishes.has_times)]
        end_id = min(asked.info.eos_token_ids, default=0)
        params = whisper.params(len(begin), asked.info.max_own, end_id, has_times=wishes.has_times)
        beams = asked.model.seq2seq.beams(begin[-1:], 1) if asked.model.seq2seq else None
        silence: float | None = None
        for temperature in (wishes.temperature,) if wishes.temperature else TEMPERATURES:
            params = replace(params, temperature=temperature, seed=wishes.seed)
            output = await asked.ask(samples, begin, params, None if temperature else beams)
            asked.num_output += len(output.token_ids)
            mean, text_ids = mean_logprob(output.logprobs), output.text_ids
            ratio = compression_ratio(_text(asked, text_ids, whisper.first_time))
            if silence is None and (wishes.has_silence or mean < MIN_LOGPROB):
                silence = await self._silence(samples)
            if mean < MIN_LOGPROB and silence is not None and silence > MIN_SILENCE:
                return [], num_frames
            if mean >= MIN_LOGPROB and ratio <= MAX_COMPRESSION:
                break
        divided_from = whisper.first_time if wishes.has_times else asked.info.vocab_size
        slices, num_done = divide(text_ids, divided_from, num_frames, self._frames.stride)
        num_done = num_done or num_frames  # the first time may be the last
        begin_s, position_s = self._frames.seconds(seek), self._frames.seconds(self._frames.stride)
        facts = Facts(seek, temperature, mean, ratio, silence or 0.0)
        made = []
        for each in slices:
            times = begin_s + each.start * position_s, begin_s + each.end * position_s
            made.append(_segment(asked, output, each, whisper.first_time, times, facts))
        if wishes.has_words:
            made = await self._with_words(made, samples, seek, min(num_done, num_frames))
        return made, num_done

    async def _with_words(self, made: list[Segment], samples: bytes, seek: int, num_frames: int) -> list[Segment]:
        """The segments of a window with the times of their words: the sound is heard once more, with their text.

        Args:
            num_frames: Of the window, to where the next one begins: no word is spoken behind that.
        """
        asked, wishes, frames = self._asked, self._wishes, self._frames
        begin = self._whisper.begin(wishes.language, wishes.task, has_times=False)
        spoken = [token_id for segment in made for token_id, _ in segment.spoken]
        spoken = spoken[: asked.info.max_own - len(begin) - 1]
        if not spoken:
            return made
        end_id, most = min(asked.info.eos_token_ids, default=0), max(num_frames // frames.stride, 1)
        begins = await asked.begins(samples, [*begin, *spoken, end_id], len(begin), most)
        times = [frames.seconds(seek) + each * frames.seconds(frames.stride) for each in begins]
        timed, first, language = [], 0, "en" if wishes.task == "translate" else wishes.language
        for segment in made:
            ids = spoken[first : first + len(segment.spoken)]
            own = times[first : first + len(ids) + 1]
            timed.append(dataclasses.replace(segment, words=timed_words(asked.model.tokenizer, ids, own, language)))
            first += len(ids)
        return timed

    async def _language(self) -> str:
        asked, languages = self._asked, self._whisper.languages
        params = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=tuple(languages.values()))
        samples = asked.sound.read(0, asked.shape.max_samples)
        found = (await asked.ask(samples, [self._whisper.start], params)).token_ids
        return next(code for code, token_id in languages.items() if token_id in found)

    async def _silence(self, samples: bytes) -> float:
        """The probability that nobody speaks."""
        whisper, prompt_ids = self._whisper, self._wishes.prompt_ids
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=(whisper.silence,))
        (found,) = (await self._asked.ask(samples, [*prompt_ids, whisper.start], params)).logprobs
        return math.exp(found.top_logprobs[found.top_token_ids.index(whisper.silence)])


async def _side_by_side(asked: Questions, wishes: Wishes) -> AsyncGenerator[list[Segment], None]:
    """Windows without times, of one length, each one segment."""
    sound, shape, stated = asked.sound, asked.shape, asked.model.seq2seq
    if stated is None:
        message = f"the files of {asked.model.name} do not say how its decoder begins"
        raise UnsupportedValueError(message, param="model")
    length = -(-sound.num_samples // -(-sound.num_samples // shape.max_samples))
    if shape.num_positions(length) < 1:
        raise InvalidRequestError(f"file: it is too short for this model, {sound.seconds:g} s", param="file")
    encoded, room = Encoded(stated.begin, stated=stated), asked.info.room(0, len(stated.begin))
    longest = room if encoded.max_tokens is None else min(encoded.max_tokens, room)
    params = SamplingParams(
        max_tokens=longest,
        min_tokens=min(encoded.min_tokens, longest),
        temperature=wishes.temperature,
        seed=wishes.seed,
        bad_words_token_ids=stated.banned,
        no_repeat_ngram_size=stated.no_repeat_ngram_size,
        begin_bans=stated.begin_bans,
        forced_end_id=stated.forced_end_id,
        renormalizes=stated.renormalizes,
        logprobs=0,
    )
    beams = None if wishes.temperature else stated.beams(stated.begin, 1)

    async def one(start: int) -> Segment:
        output = await asked.ask(sound.read(start, length), stated.begin, params, beams)
        asked.num_output += len(output.token_ids)
        end = min(start + length, sound.num_samples)
        whole, no_time = Slice(0, len(output.text_ids), 0, 0), asked.info.vocab_size
        ratio = compression_ratio(_text(asked, output.text_ids, no_time))
        facts = Facts(100 * start // sound.rate, wishes.temperature, mean_logprob(output.logprobs), ratio)
        return _segment(asked, output, whole, no_time, (start / sound.rate, end / sound.rate), facts)

    for first in range(0, sound.num_samples, MAX_WINDOWS * length):
        starts = range(first, min(first + MAX_WINDOWS * length, sound.num_samples), length)
        tasks = [asyncio.create_task(one(start)) for start in starts]
        try:
            for task in tasks:
                yield [await task]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _segment(
    asked: Questions,
    output: Output,
    part: Slice,
    first_time: int,
    times: tuple[float, float],
    facts: Facts,
) -> Segment:
    """A part of an output, spoken between these times."""
    span = slice(part.first, part.last)
    tokens = output.token_ids[span]
    logprobs = [each.logprob for each in output.logprobs[span]]
    kept = set(_spoken(asked, tokens, first_time))
    spoken = [(token_id, logprob) for token_id, logprob in zip(tokens, logprobs, strict=True) if token_id in kept]
    text = _text(asked, tokens, first_time)
    if asked.model.whisper is None:  # else the text has the space between two segments, where the language has one
        text = f" {text.strip()}"
    return Segment(*times, text, tokens, spoken, facts)


def _spoken(asked: Questions, token_ids: Sequence[int], first_time: int) -> list[int]:
    """Those that are text."""
    special = asked.model.tokenizer.is_special
    return [token_id for token_id in token_ids if token_id < first_time and not special(token_id)]


def _text(asked: Questions, token_ids: Sequence[int], first_time: int) -> str:
    return asked.model.tokenizer.decode(_spoken(asked, token_ids, first_time))
