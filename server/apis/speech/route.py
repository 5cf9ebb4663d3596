"""POST /v1/audio/transcriptions and /v1/audio/translations: a file of sound becomes text, streamed or whole."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing

import msgspec
from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from weft.server.apis.openai.render import DONE, stream_error
from weft.server.apis.speech.body import REFUSED, SpeechBody, read_body, read_wishes
from weft.server.http.auth import tenant_of
from weft.server.http.context import Context, ServerContext, with_early_headers
from weft.server.http.form import CountedFile, read_form
from weft.server.http.metrics import RequestTimer
from weft.server.http.sse import EventStream, encode_event
from weft.server.models.whisper import LANGUAGES
from weft.server.speech.formats import srt, verbose, vtt, words
from weft.server.speech.questions import Questions
from weft.server.speech.segments import Segment
from weft.server.speech.sound import check_decoder, decode
from weft.server.speech.windows import Wishes, segments
from weft.server.task.body import CLIENT_CLOSED, while_wanted
from weft.server.task.request_options import deadline_of
from weft.server.task.validation import ignored_fields, ignored_header

router = APIRouter()


@router.post("/v1/audio/transcriptions")
async def transcribe(request: Request, context: Context) -> Response:
    """The text of what is spoken."""
    return await _speech(request, context, "transcribe")


@router.post("/v1/audio/translations")
async def translate(request: Request, context: Context) -> Response:
    """The text of what is spoken, in English."""
    return await _speech(request, context, "translate")


async def _speech(request: Request, context: ServerContext, task: str) -> Response:
    upload = CountedFile(context.files)

    async def write(data: bytes) -> None:
        upload.count(len(data))
        await asyncio.to_thread(upload.file.write, data)

    try:
        form = await read_form(request, "file", context.settings.max_body_bytes, write)
        upload.file.flush()
        body = read_body(form)
    except ClientDisconnect:
        upload.close()
        return Response(status_code=CLIENT_CLOSED)
    except BaseException:
        upload.close()
        raise
    work = _answer(body, upload, request, context, task)
    answer = with_early_headers(work, stream_error, context.settings.sse_ping_s) if body.stream else work
    return await while_wanted(request, answer) or Response(status_code=CLIENT_CLOSED)


async def _answer(
    body: SpeechBody, upload: CountedFile, request: Request, context: ServerContext, task: str
) -> Response:
    settings, is_stream = context.settings, bool(body.stream)
    deadline = deadline_of(request, is_stream=is_stream, ping_s=settings.sse_ping_s)
    with closing(upload):
        ignored = ignored_fields(body, REFUSED, strict=settings.strict_params)
        model = await context.check_model(request, body.model)
        info, metrics = model.engine_info, context.metrics.of(model.name)
        shape, wishes = await context.workers.run_light(len(body.prompt or ""), read_wishes, body, model, info, task)
        metrics.note_retry(request.headers.get("x-stainless-retry-count", ""))
        check_decoder()
        sound = await decode(upload.file, shape.sample_rate, settings.max_audio_s, context.decoders, context.files)
    timer = RequestTimer(metrics, request.state.arrival_time, 1)
    asked = Questions(model, info, shape, sound, timer, tenant_of(request), deadline)
    written, headers = _Written(asked, wishes, body), ignored_header(ignored)
    if is_stream:
        return EventStream(
            written.events(),
            written.end,
            stream_error,
            headers=headers,
            ping_s=settings.sse_ping_s,
            close=asked.close,
        )
    try:
        async for _ in written.events():
            pass
    finally:
        asked.close()  # also if this task is cancelled
    if body.response_format in ("json", "verbose_json"):
        return Response(msgspec.json.encode(written.json()), headers=headers, media_type="application/json")
    return Response(written.plain(), headers=headers, media_type="text/plain")


class _Written:
    """What was written until now, and how it is shown. `events` alone mutates it."""

    def __init__(self, asked: Questions, wishes: Wishes, body: SpeechBody) -> None:
        self._asked, self._wishes, self._body = asked, wishes, body
        self._segments: list[Segment] = []
        self._text = ""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """An event for each segment, once it is certain."""
        async with aclosing(segments(self._asked, self._wishes)) as windows:
            async for window in windows:
                for segment in window:
                    delta = segment.text if self._text else segment.text.lstrip()
                    self._text += delta
                    self._segments.append(segment)
                    shown = {"type": "transcript.text.delta", "delta": delta}
                    yield encode_event(shown | self._logprobs([segment]))

    def end(self) -> bytes:
        """The last events, with the whole text."""
        audio, text, output = self._asked.num_positions, len(self._wishes.prompt_ids), self._asked.num_output
        usage = {
            "type": "tokens",
            "input_tokens": audio + text,
            "output_tokens": output,
            "total_tokens": audio + text + output,
            "input_token_details": {"audio_tokens": audio, "text_tokens": text},
            "seconds": self._seconds,
        }
        done = {"type": "transcript.text.done", "text": self._text.rstrip(), "usage": usage}
        return encode_event(done | self._logprobs(self._segments)) + DONE

    def json(self) -> dict[str, object]:
        """The answer in JSON."""
        usage = {"type": "duration", "seconds": self._seconds}
        shown = {"text": self._text.rstrip(), "usage": usage} | self._logprobs(self._segments)
        if self._body.response_format == "json":
            return shown
        is_english, code = self._wishes.task == "translate", self._wishes.language
        language = "english" if is_english else "unknown" if code is None else LANGUAGES.get(code, code)
        facts = {"task": self._wishes.task, "language": language, "duration": self._seconds}
        granularities = self._body.timestamp_granularities or ("segment",)
        parts = {"segments": verbose(self._segments)} if "segment" in granularities else {}
        return facts | shown | parts | ({"words": words(self._segments)} if "word" in granularities else {})

    def plain(self) -> str:
        """The answer as text or subtitles."""
        write = {"srt": srt, "vtt": vtt}.get(self._body.response_format)
        return f"{self._text.rstrip()}\n" if write is None else write(self._segments)

    @property
    def _seconds(self) -> float:
        return round(self._asked.sound.seconds, 3)

    def _logprobs(self, shown: Sequence[Segment]) -> dict[str, object]:
        if not self._body.include:
            return {}
        tokenizer = self._asked.model.tokenizer
        entries = [
            {
                "token": tokenizer.token_text(token_id),
                "bytes": list(tokenizer.token_bytes(token_id)),
                "logprob": logprob,
            }
            for segment in shown
            for token_id, logprob in segment.spoken
        ]
        return {"logprobs": entries}
