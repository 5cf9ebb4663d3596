"""A fake engine client, a byte tokenizer, and the real app around them."""

import asyncio
import codecs
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from huggingface_hub import constants

from tests.hub_mirror import Mirror, hub_mirror
from weft.engine.wire.messages import AddRequest, EngineInfo, FinishReason, RequestOutput, TokenLogprobs, TokensOutput
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.status_page import Status
from weft.server.app.app import create_app
from weft.server.errors import EngineUnavailableError
from weft.server.models.served_model import served_model
from weft.server.settings import Settings
from weft.server.text.chat_template import ChatTemplateError, TemplateOptions
from weft.server.text.text_tokenizer import TokenRoom, fitted

BOS, EOS, END = 256, 257, 258
VOCAB_SIZE = 300
MAX_MODEL_LEN = 1000
MODEL = "org/fake model"


class ByteDetokenizer:
    def __init__(self, skip_special_tokens: bool) -> None:
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        if token_id >= 256:
            return "" if self._skip else self.finish() + f"<{token_id}>"
        return self._decoder.decode(bytes([token_id]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """Ids 0..255 are bytes; the others are control tokens, written <256> and so on."""

    bos_token_id: int | None = BOS
    vocab_size = VOCAB_SIZE

    def __init__(self) -> None:
        self.rendered: list[dict[str, Any]] = []
        self.num_renderings = 0
        self.template = ""
        self.threads: set[str] = set()
        self.variables: dict[str, Any] = {}
        self.template_variables: frozenset[str] = frozenset()
        self.token_ids: dict[str, int] = {}
        self.added_ids: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = True, room: TokenRoom | None = None) -> list[int]:
        self.threads.add(threading.current_thread().name)
        return [BOS] * add_special_tokens + list(fitted(text, room, len).encode())

    def encode_pair(self, first: str, second: str, room: TokenRoom | None = None) -> tuple[list[int], list[int]]:
        sides = [BOS, *fitted(first, room, len).encode(), END], [*fitted(second, room, len).encode(), END]
        return sides[0] + sides[1], [0] * len(sides[0]) + [1] * len(sides[1])

    def encode_continuation(self, text: str, room: TokenRoom | None = None) -> list[int]:
        return self.encode(text, False, room)

    def render_chat(self, messages: Any, options: TemplateOptions) -> list[str]:
        self.threads.add(threading.current_thread().name)
        self.num_renderings += 1
        self.rendered, self.variables = list(messages), dict(options.variables)
        if any(message["content"] == "refuse me" for message in messages):
            raise ChatTemplateError("the chat template refuses these messages: no")
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        if options.continue_final_message:
            text = text.removesuffix("\n")
        return [text, "assistant:" * options.add_generation_prompt]

    def encode_rendered(self, pieces: list[str], room: TokenRoom | None = None) -> list[int]:
        return [BOS, *fitted("".join(pieces), room, len).encode()]

    def encode_inserted(self, text: str, end: list[str], room: TokenRoom | None = None) -> list[int]:
        return self.encode(text + "".join(end), False, room)

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        detokenizer = ByteDetokenizer(skip_special_tokens)
        return "".join(map(detokenizer.feed, token_ids)) + detokenizer.finish()

    def token_text(self, token_id: int) -> str:
        return f"<{token_id}>" if token_id >= 256 else bytes([token_id]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode() if token_id >= 256 else bytes([token_id])

    def added_id(self, text: str) -> int | None:
        return self.added_ids.get(text)

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256

    def template_source(self, has_tools: bool) -> str:
        return self.template

    def token_id(self, text: str) -> int | None:
        return self.token_ids.get(text)

    def detokenizer(self, skip_special_tokens: bool = True, kept: Any = frozenset()) -> ByteDetokenizer:
        return ByteDetokenizer(skip_special_tokens)

    def bad_word_ids(self, word: str) -> tuple[tuple[int, ...], ...]:
        self.threads.add(threading.current_thread().name)
        return tuple(word.encode()), tuple(f" {word}".encode())


class FakeGeneration:
    def __init__(self, outputs: list[RequestOutput], error: Exception | None, may_go_on: Callable[[int], bool]) -> None:
        self._outputs = outputs
        self._error = error
        self._may_go_on = may_go_on
        self.aborted: set[int] = set()
        self.closed = threading.Event()
        self.num_read = 0

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        for output in self._outputs:
            while not self._may_go_on(self.num_read):
                await asyncio.sleep(0.005)
            await asyncio.sleep(0)
            if output.index not in self.aborted:
                self.num_read += 1
                yield output
        if self._error is not None:
            raise self._error

    def abort(self, index: int | None = None) -> None:
        assert index is not None
        self.aborted.add(index)

    def close(self) -> None:
        self.closed.set()


@dataclass
class Asked:
    request: AddRequest
    generation: FakeGeneration

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.input.token_ids

    @property
    def params(self) -> SamplingParams:
        return self.request.sampling_params


def logprobs_of(token_id: int, count: int) -> TokenLogprobs:
    """The token itself is always the most probable one; its alternatives are the next ids."""
    return TokenLogprobs(-0.5, [(token_id + i) % 256 for i in range(count)], [-0.5 - i for i in range(count)])


@dataclass(eq=False)
class FakeEngine:
    """Answers every choice with `answers` in turn, token by token; `refuse` and `error` make it fail.

    A generation of which n outputs were read waits with the next one until `may_go_on(n)`.
    """

    answers: list[str] = field(default_factory=lambda: ["Hällo, wörld!"])
    info: EngineInfo | None = field(
        default_factory=lambda: EngineInfo(
            "epoch", "Fake", VOCAB_SIZE, MAX_MODEL_LEN, (EOS,), "cpu", "float32", "sdpa", 4, 100, 8, 512
        )
    )
    page: Status = field(default_factory=lambda: Status(epoch_id=1, is_ready=1))
    refuse: Exception | None = None
    error: Exception | None = None
    error_after: int = 0
    finish: FinishReason | None = None
    chunk: int = 1
    may_go_on: Callable[[int], bool] = lambda num_read: True
    num_cached_tokens: int = 4
    logprob_of_choice: Callable[[int], float] | None = None
    asked: list[Asked] = field(default_factory=list)

    def status(self) -> Status:
        return self.page

    async def meet(self) -> None:
        """It was there before the server."""

    async def load(self) -> None:
        await self.meet()

    async def generate(self, request: AddRequest) -> FakeGeneration:
        await asyncio.sleep(0)
        if self.info is None:
            raise EngineUnavailableError
        if self.refuse is not None:
            raise self.refuse
        outputs: list[RequestOutput] = []
        for index in range(request.num_choices):
            outputs += self._outputs(index, request.input.token_ids, request.sampling_params)
        outputs.sort(key=lambda output: len(outputs))  # stable: choices stay whole
        if self.error is not None:
            outputs = outputs[: self.error_after]
        generation = FakeGeneration(outputs, self.error, self.may_go_on)
        self.asked.append(Asked(request, generation))
        return generation

    def _outputs(self, index: int, prompt_token_ids: list[int], params: SamplingParams) -> list[RequestOutput]:
        answer = self.answers[(len(self.asked) + index) % len(self.answers)]
        token_ids = list(answer.encode())
        reason, stop_token_id = FinishReason.LENGTH, None
        if params.max_tokens is None or len(token_ids) < params.max_tokens:
            token_ids.append(EOS)
            reason, stop_token_id = FinishReason.STOP, EOS
        else:
            token_ids = token_ids[: params.max_tokens]
        for i, token_id in enumerate(token_ids):
            if token_id in params.stop_token_ids:
                token_ids, reason, stop_token_id = token_ids[: i + 1], FinishReason.STOP, token_id
                break
        outputs = []
        for start in range(0, max(1, len(token_ids)), self.chunk):
            ids = token_ids[start : start + self.chunk]
            output = TokensOutput(0, index, ids)
            if params.logprobs is not None and ids:
                output.logprobs = [self._logprobs(index, token_id, params.logprobs) for token_id in ids]
                for entry in output.logprobs:
                    entry.top_token_ids.extend(params.logprob_token_ids)
                    entry.top_logprobs.extend(-9.0 for _ in params.logprob_token_ids)
            outputs.append(output)
        outputs[0].num_cached_tokens = self.num_cached_tokens
        outputs[0].queue_time_s = 0.0
        if params.prompt_logprobs is not None and index == 0:
            count = params.prompt_logprobs
            outputs[0].prompt_logprobs = [logprobs_of(token_id, count) for token_id in prompt_token_ids[1:]]
        outputs[-1].finish_reason, outputs[-1].stop_token_id = self.finish or reason, stop_token_id
        return outputs

    def _logprobs(self, index: int, token_id: int, count: int) -> TokenLogprobs:
        logprobs = logprobs_of(token_id, count)
        if self.logprob_of_choice is not None:
            return TokenLogprobs(self.logprob_of_choice(index), logprobs.top_token_ids, logprobs.top_logprobs)
        return logprobs


@dataclass
class Reply:
    status: int
    headers: httpx.Headers
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(self.json) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The JSON of every event; the last one is [DONE]."""
        lines = [line for line in self.text.split("\n\n") if line]
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class Site:
    """An app, its fake engine and tokenizer; `call` goes through ASGI without a socket."""

    def __init__(self, **settings: Any) -> None:
        self.engine = FakeEngine()
        self.tokenizer = ByteTokenizer()
        self.settings = Settings.model_validate({"served_model_name": (MODEL, "alias"), **settings})
        self.rebuild()

    def rebuild(self) -> None:
        """Build the app anew, around the tokenizer as it is now."""
        model = served_model(self.engine, self.tokenizer, self.settings)
        self.app = create_app(dict.fromkeys(self.settings.served_model_name, model), self.settings)
        if isinstance(self.tokenizer, ByteTokenizer):  # formats were tried at the start, before anybody asked
            self.tokenizer.threads.clear()
            self.tokenizer.num_renderings = 0

    def call(self, method: str, path: str, **request: Any) -> Reply:
        async def run() -> Reply:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                response = await client.request(method, path, **request)
                return Reply(response.status_code, response.headers, response.text)

        return asyncio.run(run())

    def chat(self, **body: Any) -> Reply:
        messages = body.pop("messages", [{"role": "user", "content": "Hi"}])
        return self.call("POST", "/v1/chat/completions", json={"messages": messages, **body})

    def complete(self, **body: Any) -> Reply:
        return self.call("POST", "/v1/completions", json={"prompt": "Hi", **body})

    @contextlib.contextmanager
    def live(self) -> Iterator[str]:
        """The app behind a real socket; yields its base URL."""
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(self.app, log_config=None, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            deadline = time.monotonic() + 60
            while not server.started:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            listener.close()


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def make_site() -> type[Site]:
    return Site


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """A mirror of the hub, for this process too, and an empty library."""
    with hub_mirror() as mirror:
        for name, value in mirror.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        template = f"{mirror.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", mirror.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr("weft.server.library.download._PAUSE_S", 0.0)
        yield mirror
