"""The routes that turn speech into text, over a fake engine and with the OpenAI SDK."""

import http.client
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from msgspec import structs
from openai.types.audio import Transcription, TranscriptionVerbose, TranslationVerbose

from tests.server.conftest import EOS, MODEL, Reply
from tests.server.hearing import (
    CONFIG,
    ENGLISH,
    GENERATION,
    GERMAN,
    MAX_OWN,
    NO_TIMES,
    PREVIOUS,
    SILENCE,
    START,
    TIME,
    TRANSCRIBE,
    TRANSLATE,
    hearing_and_chatting_site,
    hearing_site,
    saying,
    wav,
    wav_header,
)
from weft.engine.wire.inputs import AudioShape
from weft.engine.wire.params import TimestampRule
from weft.server.errors import QueueFullError
from weft.server.http import form
from weft.server.speech import questions

PLAIN = {"model_type": "moonshine", "is_encoder_decoder": True, "decoder_start_token_id": 1}
UNPADDED = AudioShape(16000, 16000, ((127, 64, 0), (7, 3, 0)), False)
BAN_TIMES = ((7,), (8,))


def say(site: Any, data: bytes = b"", path: str = "transcriptions", **fields: Any) -> Reply:
    reply: Reply = site.call("POST", f"/v1/audio/{path}", data=fields, files={"file": ("a.wav", data or wav(0.5))})
    return reply


def timed(*parts: int | str) -> list[int]:
    """Ids of texts and of times in positions."""
    return [i for part in parts for i in ([TIME + part] if isinstance(part, int) else part.encode())]


@pytest.fixture
def site(tmp_path: Path) -> Any:
    return hearing_site(tmp_path, saying(" Hällo."))


def test_a_short_sound(site: Any) -> None:
    data = wav(0.5)
    reply = say(site, data)
    assert reply.json == {"text": "Hällo.", "usage": {"type": "duration", "seconds": 0.5}}
    language, text = site.engine.asked
    assert language.request.input.samples == text.request.input.samples == data[44:]
    assert (language.prompt_token_ids, language.params.allowed_token_ids) == ([START], (ENGLISH, GERMAN))
    assert text.prompt_token_ids == [START, GERMAN, TRANSCRIBE, NO_TIMES]
    assert text.request.input.num_positions == 50
    params = text.params
    assert (params.temperature, params.max_tokens, params.timestamps) == (0, MAX_OWN - 4, None)
    assert (params.begin_bans, params.bad_words_token_ids) == ((32, EOS), BAN_TIMES)
    assert all(each.generation.closed.is_set() for each in site.engine.asked)


def test_models_say_whether_they_hear(tmp_path: Path) -> None:
    """Who chats is not offered those that do."""
    site = hearing_and_chatting_site(tmp_path, saying(""))
    listed = site.call("GET", "/v1/models").json
    assert [(each["id"], each["input_modalities"]) for each in listed["data"]] == [
        ("ears", ["audio"]),
        ("chat", ["text"]),
    ]
    assert [(each["slug"], each["priority"]) for each in listed["models"]] == [("chat", 0)]
    assert [site.call("GET", path).json["model"] for path in ("/stats", "/stats?model=ears")] == ["chat", "ears"]


@pytest.mark.parametrize(("config", "hears"), [(CONFIG, ["audio"]), (PLAIN, None)])
def test_only_the_files_of_a_whisper_say_it_before_the_handshake(tmp_path: Path, config: Any, hears: Any) -> None:
    site = hearing_site(tmp_path, saying(""), config=config)
    site.engine.info = None
    listed = site.call("GET", "/v1/models").json
    assert [each["input_modalities"] for each in listed["data"]] == [hears, hears]
    assert len(listed["models"]) == (2 if hears is None else 0)
    assert site.call("GET", "/stats").json["model"] == MODEL


def test_texts_and_subtitles(site: Any) -> None:
    site.engine.writes = lambda request: (timed(0, " Hi", 12, 12, " you.", 20), -0.1)
    reply = say(site, response_format="text", language="en")
    assert (reply.text, reply.headers["content-type"]) == ("Hi you.\n", "text/plain; charset=utf-8")
    reply = say(site, response_format="srt", language="en")
    assert reply.text == ("1\n00:00:00,000 --> 00:00:00,240\nHi\n\n2\n00:00:00,240 --> 00:00:00,400\nyou.\n\n")
    reply = say(site, response_format="vtt", language="en")
    assert reply.text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.240\nHi\n\n")
    params = site.engine.asked[-1].params
    assert params.timestamps == TimestampRule(TIME, TIME + 5, EOS)
    assert params.bad_words_token_ids == (*BAN_TIMES, (NO_TIMES,))
    assert site.engine.asked[-1].prompt_token_ids == [START, ENGLISH, TRANSCRIBE]


def test_a_long_sound_goes_on_at_the_last_pair_of_times(site: Any) -> None:
    outputs = [timed(0, " one", 10, 10, " two", 40, 40, " thr"), timed(0, " three", 30), timed(0, " four", 5)]
    site.engine.writes = lambda request: (outputs[len(site.engine.texts)], -0.1)
    data = wav(2.05)
    reply = say(site, data, response_format="verbose_json", language="German")
    assert reply.json["text"] == "one two three four"
    times = [(each["seek"], each["start"], each["end"], each["text"]) for each in reply.json["segments"]]
    assert times == [(0, 0, 0.2, " one"), (0, 0.2, 0.8, " two"), (80, 0.8, 1.4, " three"), (180, 1.8, 1.9, " four")]
    assert [each.request.input.samples for each in site.engine.texts] == [
        data[44 + 2 * 160 * seek :][:32000] for seek in (0, 80, 180)
    ]
    assert (reply.json["language"], reply.json["duration"], reply.json["task"]) == ("german", 2.05, "transcribe")
    assert reply.json["segments"][1]["tokens"] == timed(10, " two", 40, 40)
    assert reply.json["segments"][0]["no_speech_prob"] == pytest.approx(0.01)
    site.engine.writes = lambda request: (timed(0, " five"), -0.1)
    assert say(site, data[:60000]).json["text"] == "five five"  # longer than a window, so with times
    assert site.engine.texts[-1].params.timestamps is not None


def test_no_progress_is_no_loop(site: Any) -> None:
    site.engine.writes = lambda request: (timed(0, 0), -0.1)
    assert say(site, wav(1.5), response_format="verbose_json", language="en").json["segments"] == []
    assert len(site.engine.texts) == 2


def test_improbable_and_repeated_texts_are_made_anew(site: Any) -> None:
    """And the last one is taken, whatever it is."""
    outputs = [(" a a a" * 40, -0.1), (" b", -1.5), (" c", -0.3)]
    site.engine.writes = lambda request: saying(*outputs[len(site.engine.texts)])(request)
    assert say(site, language="en").json["text"] == "c"
    assert [each.params.temperature for each in site.engine.texts] == [0, 0.2, 0.4]
    site.engine.asked.clear()
    site.engine.writes = saying(" d", -2.0)
    assert say(site, language="en").json["text"] == "d"
    assert [each.params.temperature for each in site.engine.texts] == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    site.engine.asked.clear()
    assert say(site, language="en", temperature=0.3).json["text"] == "d"
    assert [each.params.temperature for each in site.engine.texts] == [0.3]


def test_the_search_of_the_checkpoint(tmp_path: Path) -> None:
    """Without one where an output is made anew."""
    logprobs = iter([-2.0, -0.5])
    site = hearing_site(
        tmp_path, lambda request: (list(b"x"), next(logprobs)), generation=GENERATION | {"num_beams": 3}
    )
    say(site, language="en")
    assert [each.request.beams and each.request.beams.width for each in site.engine.texts] == [3, None]


def test_silence_is_left_out(site: Any) -> None:
    site.engine.silence, site.engine.writes = 0.7, saying(" Thank you.", -1.2)
    assert say(site, language="en", prompt="Hi").json["text"] == ""
    silence = site.engine.asked[1]
    assert silence.prompt_token_ids == [PREVIOUS, *b" Hi", START]
    assert silence.params.logprob_token_ids == (SILENCE,)
    site.engine.writes = saying(" Thank you.", -0.9)
    assert say(site, language="en").json["text"] == "Thank you."


def test_a_prompt_is_cut_to_half_of_the_decoder(site: Any) -> None:
    say(site, prompt=" word" * 50, language="en")
    ids = site.engine.asked[-1].prompt_token_ids
    assert ids == [PREVIOUS, *(b" word" * 50)[-31:], START, ENGLISH, TRANSCRIBE, NO_TIMES]
    assert site.engine.asked[-1].params.max_tokens == MAX_OWN - len(ids)


def test_translations(site: Any, tmp_path: Path) -> None:
    reply = say(site, path="translations", response_format="verbose_json")
    assert (reply.json["language"], reply.json["task"]) == ("english", "translate")
    assert site.engine.texts[0].prompt_token_ids == [START, GERMAN, TRANSLATE]
    english = hearing_site(tmp_path, saying("x"), generation={**GENERATION, "is_multilingual": False})
    assert say(english).status == 200
    assert english.engine.asked[0].prompt_token_ids == [START, NO_TIMES]
    assert say(english, language="en").status == 200
    for path, param in (("translations", "model"), ("transcriptions", "language")):
        reply = say(english, path=path, language="de")
        assert (reply.status, reply.error["param"]) == (400, param)


def test_log_probabilities_of_what_is_spoken(site: Any) -> None:
    reply = say(site, language="en", **{"include[]": "logprobs"})
    assert "".join(each["token"] for each in reply.json["logprobs"]) == " H\ufffd\ufffdllo."
    assert reply.json["logprobs"][0] == {"token": " ", "bytes": [32], "logprob": -0.2}


def events_of(reply: Reply) -> list[Any]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    return reply.events


def test_a_stream(site: Any) -> None:
    outputs = [timed(0, " one", 10, 10, " two", 40, 40), timed(0, " three", 30)]
    site.engine.writes = lambda request: (outputs[len(site.engine.texts)], -0.1)
    *deltas, done = events_of(say(site, wav(1.5), stream="true", language="en", **{"include[]": "logprobs"}))
    assert {each["type"] for each in deltas} == {"transcript.text.delta"}
    assert [each["delta"] for each in deltas] == ["one", " two", " three"]
    assert (done["type"], done["text"]) == ("transcript.text.done", "one two three")
    assert len(done["logprobs"]) == len(" one two three") == sum(len(each["logprobs"]) for each in deltas)
    assert done["usage"]["input_tokens"] == 75
    assert done["usage"]["output_tokens"] == sum(map(len, outputs)) + 2
    assert done["usage"]["seconds"] == 1.5


def test_words(tmp_path: Path) -> None:
    """The window's texts are heard once more, without times; a token of it is a position long to the fake engine."""
    parts = timed(5, " Oh, no.", 20, 20, " Yes", 40)
    site = hearing_site(tmp_path, lambda _: (parts, -0.1))
    fields = {"response_format": "verbose_json", "language": "en", "timestamp_granularities[]": ["word", "segment"]}
    reply = say(site, wav(0.9), **fields)
    text = b" Oh, no. Yes"
    given = [(word["word"], word["start"], word["end"]) for word in reply.json["words"]]
    assert given == [("Oh,", 0.0, 0.08), ("no.", 0.08, 0.16), ("Yes", 0.16, 0.24)]
    assert [segment["text"] for segment in reply.json["segments"]] == [" Oh, no.", " Yes"]
    asked = site.engine.asked[-1].request
    assert asked.input.token_ids == [START, ENGLISH, TRANSCRIBE, NO_TIMES, *text, EOS]
    assert (asked.pooling.aligned, asked.sampling_params.max_tokens) == ((4, 45), 0)
    parts[:] = timed(0, " one", 5, 5, " cut")  # what is behind the pair is heard again in the next window
    first, *_, last = (w for w in say(site, wav(0.9), **fields).json["words"] if w["start"] < 0.2)
    assert (first["word"], last["start"]) == ("one", 0.1)
    assert first["end"] <= 0.1
    parts[:] = timed(0, " one", 48, 48, " cut")  # behind the end of the sound
    say(site, wav(0.9), **fields)
    aligned = [each.request.pooling.aligned for each in site.engine.asked if each.request.pooling]
    assert aligned[:2] == [(4, 45), (4, 5)]
    assert aligned[-1] == (4, 45)
    parts[:] = timed(5, " Oh, no.", 20, 20, " Yes", 40)
    assert "segments" not in say(site, wav(0.9), **fields | {"timestamp_granularities[]": "word"}).json


def test_a_failure_within_a_stream(site: Any) -> None:
    site.engine.error = openai.OpenAIError("boom")
    (failed,) = events_of(say(site, stream="true", language="en"))
    assert failed["error"]["code"] == "internal_error"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": "1.5"}, "temperature", "invalid_value"),
        ({"temperature": "warm"}, "temperature", "invalid_type"),
        ({"temperature": "nan"}, "temperature", "invalid_value"),
        ({"response_format": "diarized_json"}, "response_format", "invalid_value"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "invalid_value"),
        ({"include[]": "words"}, "include[0]", "invalid_value"),
        ({"include[]": "logprobs", "response_format": "text"}, "include", "invalid_value"),
        ({"timestamp_granularities[0]": "word"}, "timestamp_granularities", "invalid_value"),
        ({"language[]": "en"}, "language", "invalid_type"),
        ({"stream": "true", "response_format": "srt"}, "stream", "invalid_value"),
        ({"stream": "maybe"}, "stream", "invalid_type"),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy", "unsupported_parameter"),
        ({"known_speaker_names[]": ["Ada"]}, "known_speaker_names", "unsupported_parameter"),
        ({"language": "xx"}, "language", "invalid_value"),
        ({"prompt": "x" * 70000}, "prompt", "invalid_value"),
        ({"model": "other"}, "model", "model_not_found"),
    ],
)
def test_what_is_refused(site: Any, fields: Any, param: str, code: str) -> None:
    reply = say(site, **fields)
    assert (reply.error["param"], reply.error["code"]) == (param, code)
    assert site.engine.asked == []


@pytest.mark.parametrize(
    "shown", ["timestamp_granularities[]", "timestamp_granularities[0]", "timestamp_granularities"]
)
def test_words_are_refused_before_anything_is_heard(site: Any, shown: str) -> None:
    site.engine.info = structs.replace(site.engine.info, aligns=False)
    site.rebuild()
    error = say(site, **{shown: "word", "response_format": "verbose_json"}).error
    assert (error["param"], error["code"]) == ("timestamp_granularities", "unsupported_parameter")
    assert site.engine.asked == []


def test_control_tokens_in_a_prompt_are_refused(site: Any) -> None:
    site.tokenizer.encode = lambda text, add_special_tokens=True, room=None: [65, START]
    assert say(site, prompt="<|startoftranscript|>").error["param"] == "prompt"


def test_files_that_are_refused(site: Any, tmp_path: Path) -> None:
    assert site.call("POST", "/v1/audio/transcriptions", data={"model": MODEL}).status == 400
    assert site.call("POST", "/v1/audio/transcriptions", json={"model": MODEL}).status == 400
    reply = site.call("POST", "/v1/audio/transcriptions", data={"a": "b"}, files={"other": ("a", b"x")})
    assert (reply.status, reply.error["param"]) == (400, "file")
    for data, message in ((b"", "damaged"), (wav_header(80000, 16000, 400) + bytes(80000), "got 400")):
        reply = site.call("POST", "/v1/audio/transcriptions", files={"file": ("a.wav", data)})
        assert (reply.status, reply.error["param"]) == (400, "file")
        assert message in reply.error["message"]
    small = hearing_site(tmp_path, saying("x"), max_audio_s=1, max_body_bytes=50000)
    assert say(small, wav(1.2)).error["message"] == "file: it must have at most 1 s of sound, got more"
    assert (say(small, wav(1.2)).status, say(small, wav(2)).status) == (413, 413)


def test_no_room_for_files(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form, "MOST_BYTES", 20000)
    assert (say(site, wav(0.3)).status, say(site, wav(0.7)).error["code"]) == (200, "queue_full")  # the file and sound
    assert site.app.state.context.files.num_bytes == 0


def test_unknown_fields_are_reported_or_refused(site: Any, tmp_path: Path) -> None:
    fields = {"chunking_strategy": "auto", "user": "me", "other[]": ["1", "2"], "temperature[x]": "9"}
    reply = say(
        site, language="en", **fields, prompt="", temperature="", stream="", include=""
    )  # as forms of browsers send them
    assert set(reply.headers["x-ignored-params"].split(",")) == {"user", "other", "temperature[x]"}
    strict = hearing_site(tmp_path, saying("x"), strict_params=True)
    assert say(strict, **fields).error["code"] == "unknown_parameter"


def test_models_that_do_not_hear_and_those_that_do_not_read(site: Any, make_site: Any) -> None:
    reply = say(make_site())
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "does not hear" in reply.error["message"]
    for reply in (site.chat(), site.complete()):
        assert (reply.status, reply.error["param"]) == (400, "model")
        assert "/v1/audio/transcriptions" in reply.error["message"]


def test_keys(tmp_path: Path) -> None:
    assert say(hearing_site(tmp_path, saying("x"), api_key=("k",))).status == 401


def test_metrics(site: Any) -> None:
    say(site, language="en")
    text = site.call("GET", "/metrics").text
    assert f'weft:request_success_total{{finished_reason="stop",model_name="{MODEL}"}} 1.0' in text
    assert f'weft:request_prompt_tokens_sum{{model_name="{MODEL}"}} 25.0' in text
    assert f'weft:request_generation_tokens_sum{{model_name="{MODEL}"}} 9.0' in text


def test_a_client_that_leaves(site: Any) -> None:
    site.engine.may_go_on = lambda num_read: False
    form = httpx.Request("POST", "http://x", files={"file": wav(0.5)}, data={"language": "en"})
    with site.live() as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        headers = {**form.headers, "host": "localhost", "x-stainless-read-timeout": "60"}
        connection.request("POST", "/v1/audio/transcriptions", form.read(), headers)
        until(lambda: site.engine.asked)
        connection.close()
        until(lambda: site.engine.asked[0].generation.closed.is_set())
    assert site.engine.asked[0].deadline is not None


def until(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


class TestModelsWithoutTimes:
    """Moonshine and others: windows side by side."""

    @pytest.fixture
    def site(self, tmp_path: Path) -> Any:
        return hearing_site(tmp_path, saying(" Hi"), UNPADDED, PLAIN, {"max_length": 20})

    def test_windows(self, site: Any) -> None:
        outputs = iter([" one", " two"] * 2)
        site.engine.writes = lambda request: (list(next(outputs).encode()), -3.0)
        data = wav(1.5)
        assert say(site, data).json["text"] == "one two"
        assert [each.request.input.num_positions for each in site.engine.asked] == [60, 60]
        assert {each.params.max_tokens for each in site.engine.asked} == {19}
        assert {tuple(each.prompt_token_ids) for each in site.engine.asked} == {(1,)}
        assert say(site, data, response_format="srt").text == (
            "1\n00:00:00,000 --> 00:00:00,750\none\n\n2\n00:00:00,750 --> 00:00:01,500\ntwo\n\n"
        )

    def test_many_windows_stay_in_order(self, site: Any) -> None:
        site.engine.writes = lambda request: (list(b" %d" % len(request.input.samples)), -0.1)
        assert say(site, wav(20.02), response_format="text").text == "30508 " * 20 + "30480\n"
        segments = say(site, wav(20.02), response_format="verbose_json").json["segments"]
        assert [each["seek"] for each in segments[:3]] == [0, 95, 190]

    def test_a_queue_that_is_full_is_waited_for(self, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """But not by the first request, before anything was done."""
        monkeypatch.setattr(questions, "RETRY_S", 0.001)
        generate, times = site.engine.generate, iter([False, True, True, False])

        async def full(request: Any) -> Any:
            if next(times):
                raise QueueFullError("too many")
            return await generate(request)

        site.engine.generate = full
        assert say(site, wav(1.5)).json["text"] == "Hi Hi"
        times = iter([True])
        assert say(site, wav(1.5)).error["code"] == "queue_full"

    def test_a_whisper_whose_files_say_nothing(self, tmp_path: Path) -> None:
        site = hearing_site(tmp_path, saying(" Hi"), config={"model_type": "whisper"}, generation={})
        reply = say(site)
        assert (reply.error["param"], reply.error["code"]) == ("model", "unsupported_value")
        assert "how the decoder of a Whisper begins" in reply.error["message"]

    @pytest.mark.parametrize("field", ["language", "prompt"])
    def test_refused(self, site: Any, field: str) -> None:
        assert say(site, **{field: "en"}).error["param"] == field
        assert say(site, path="translations").error["param"] == "model"

    def test_a_sound_that_is_too_short(self, site: Any) -> None:
        assert say(site, wav(0.01)).error["message"].startswith("file: it is too short")


class TestSdk:
    @pytest.fixture
    def client(self, site: Any) -> Any:
        with site.live() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            yield client

    @pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
    def test_every_format(self, client: openai.OpenAI, site: Any) -> None:
        site.engine.writes = lambda request: (timed(0, " Hi", 12), -0.1)
        create, file = client.audio.transcriptions.create, ("a.wav", wav(0.5))
        answer = create(model=MODEL, file=file, include=["logprobs"], temperature=0, prompt="x", language="en")
        assert isinstance(answer, Transcription)
        assert answer.usage is not None and answer.usage.type == "duration"
        assert answer.logprobs is not None and [each.token for each in answer.logprobs] == [" ", "H", "i"]
        assert (answer.text, answer.usage.seconds) == ("Hi", 0.5)
        verbose = create(model=MODEL, file=file, response_format="verbose_json", timestamp_granularities=["segment"])
        assert isinstance(verbose, TranscriptionVerbose) and verbose.segments is not None
        assert TranscriptionVerbose.model_validate_json(verbose.model_dump_json()) == verbose
        assert (verbose.language, verbose.duration, verbose.segments[0].end) == ("german", 0.5, 0.24)
        for shape in ("text", "srt", "vtt"):
            text = create(model=MODEL, file=file, response_format=shape)
            assert isinstance(text, str) and "Hi\n" in text
        translated = client.audio.translations.create(model=MODEL, file=file, response_format="verbose_json")
        assert isinstance(translated, TranslationVerbose) and translated.language == "english"
        assert client.audio.translations.create(model=MODEL, file=file).text == "Hi"

    def test_a_stream(self, client: openai.OpenAI) -> None:
        stream = client.audio.transcriptions.create(
            model=MODEL, file=("a.wav", wav(0.5)), stream=True, include=["logprobs"], chunking_strategy="auto"
        )
        delta, done = list(stream)
        assert delta.type == "transcript.text.delta" and delta.delta == "Hällo."
        assert done.type == "transcript.text.done" and done.text == "Hällo."
        assert done.usage is not None and done.usage.total_tokens == 25 + len(" Hällo.".encode()) + 1

    def test_errors(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.audio.transcriptions.create(model=MODEL, file=("a.wav", b"no sound"))
        assert caught.value.param == "file"
