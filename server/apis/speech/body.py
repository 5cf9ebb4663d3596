"""The form of the routes that turn speech into text, and what it asks for, checked against the model."""

import re
import secrets
from typing import Literal

from pydantic import ConfigDict, ValidationError

from weft.engine.wire.inputs import AudioShape
from weft.engine.wire.messages import EngineInfo
from weft.server.errors import InvalidRequestError, UnsupportedParameterError, UnsupportedValueError
from weft.server.http.form import Form
from weft.server.models.served_model import ServedModel
from weft.server.speech.windows import Wishes
from weft.server.task.schema import Text, WireModel
from weft.server.task.validation import NOTHING, Refused, as_invalid_request

REFUSED: Refused = {
    "chunking_strategy": (None, "auto"),
    **dict.fromkeys(("keywords", "languages", "known_speaker_names", "known_speaker_references"), NOTHING),
}
_LISTS = ("timestamp_granularities", "include")
_INDEXED = re.compile(r"[^\[]+\[\d+\]")


class SpeechBody(WireModel):
    """The fields beside the file. A form has texts alone, so numbers and truth values are read of these."""

    model_config = ConfigDict(strict=False)

    model: Text | None = None
    language: Text | None = None
    prompt: Text | None = None
    temperature: float | None = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    timestamp_granularities: tuple[Literal["segment", "word"], ...] = ()
    include: tuple[Literal["logprobs"], ...] = ()
    stream: bool | None = None


def read_body(form: Form) -> SpeechBody:
    """The body of a form.

    Raises:
        InvalidRequestError: A field is wrong, or is not allowed with another one.
    """
    fields = _fields(form)
    try:
        body = SpeechBody.model_validate(fields)
    except ValidationError as exc:
        raise as_invalid_request(exc.errors(include_url=False), fields) from None
    if body.temperature is not None and not 0 <= body.temperature <= 1:
        message = f"temperature must be between 0 and 1, got {body.temperature}"
        raise InvalidRequestError(message, param="temperature")
    given = body.response_format
    for name, value, formats in (
        ("timestamp_granularities", body.timestamp_granularities, ("verbose_json",)),
        ("include", body.include, ("json",)),
        ("stream", body.stream, ("json", "text")),
    ):
        if value and given not in formats:
            message = f"{name} is only allowed with response_format {' or '.join(formats)}, got {given}"
            raise InvalidRequestError(message, param=name)
    return body


def _fields(form: Form) -> dict[str, object]:
    """The texts by name. A name is a list's if it ends with [] or a number in brackets; empty texts say nothing."""
    texts: dict[str, str] = {}
    lists = {name.removesuffix("[]"): list(values) for name, values in form.lists.items()}
    for name, text in form.fields.items():
        base = name.partition("[")[0]
        if not text:
            continue
        if name in _LISTS or _INDEXED.fullmatch(name):
            lists.setdefault(base, []).append(text)
        else:
            texts[base if base == "chunking_strategy" else name] = text
    return {**texts, **lists}


def read_wishes(body: SpeechBody, model: ServedModel, info: EngineInfo, task: str) -> tuple[AudioShape, Wishes]:
    """What a model hears, and what a body asks of it.

    Raises:
        InvalidRequestError: The model reads text, or cannot do it.
    """
    shape, whisper = info.audio, model.whisper
    if shape is None:
        message = f"this route needs a model that turns speech into text, and {model.name} does not hear"
        raise UnsupportedValueError(message, param="model")
    temperature = body.temperature or 0.0
    wishes = Wishes(task, temperature=temperature, seed=secrets.randbits(64) if temperature else 0)
    if task == "translate" and (whisper is None or task not in whisper.tasks):
        raise UnsupportedValueError(f"{model.name} does not translate, it only transcribes", param="model")
    if whisper is None and shape.is_padded:
        message = f"the files of {model.name} do not say how the decoder of a Whisper begins"
        raise UnsupportedValueError(message, param="model")
    wishes.has_words = "word" in body.timestamp_granularities
    if wishes.has_words and (whisper is None or not info.aligns):
        message = (
            f"timestamp_granularities: {model.name} does not tell when words are spoken: that takes alignment_heads"
        )
        message += " in its generation_config.json, and one rank, got word"
        raise UnsupportedParameterError(message, param="timestamp_granularities")
    if whisper is None:
        for name in ("language", "prompt"):
            if getattr(body, name):
                message = f"{name} is only allowed for a model of the Whisper family, and {model.name} is none"
                raise UnsupportedParameterError(message, param=name)
        return shape, wishes
    if body.language:
        wishes.language = whisper.code_of(body.language)
    elif not whisper.languages:
        wishes.language = "en"
    if body.prompt and body.prompt.strip():
        wishes.prompt_ids = whisper.prompt_ids(body.prompt, model.tokenizer, info.max_own // 2 - 1)
    wishes.has_times = body.response_format in ("srt", "vtt", "verbose_json")
    wishes.has_silence = body.response_format == "verbose_json"
    return shape, wishes
