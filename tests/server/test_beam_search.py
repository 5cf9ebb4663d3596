"""Beam search over HTTP, over the fake engine; and over the real engine, beside transformers."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.engine import Engine
from engine.protocol import (
    AddRequest,
    EngineInfo,
    FinishReason,
    Guidance,
    ReasoningBudget,
    RejectReason,
    RequestOutput,
)
from engine.sampling_params import SamplingParams
from server.beam_search import BeamSearchClient
from server.beams import BeamOptions
from server.engine_client import RequestRejectedError
from server.errors import InvalidRequestError
from tests.checkpoints import CHECKPOINTS, VOCAB_SIZE, load_reference, write_checkpoint
from tests.engine.test_golden import build_engine
from tests.server.test_respond import send, wait_for


def test_each_beam_is_a_choice(site: Any) -> None:
    reply = site.complete(use_beam_search=True, n=2, max_tokens=2, logprobs=1)
    assert reply.status == 200
    first, second = reply.json["choices"]
    assert first["text"] == "HH"  # the fake begins its answer anew each time; the next letters are its alternatives
    assert second["text"] in ("HI", "IH")
    assert first["finish_reason"] == "length"
    assert [len(top) for top in first["logprobs"]["top_logprobs"]] == [1, 1]
    assert reply.json["usage"]["completion_tokens"] == 4
    assert reply.json["usage"]["prompt_tokens"] == 3
    assert {(a.params.max_tokens, a.params.logprobs, a.num_choices) for a in site.engine.asked} == {(1, 4, 1)}
    assert all(asked.generation.closed.is_set() for asked in site.engine.asked[-2:])


def test_chat_takes_beams_too(site: Any) -> None:
    reply = site.chat(use_beam_search=True, n=3, max_tokens=1, temperature=0)
    assert len(reply.json["choices"]) == 3
    assert reply.json["choices"][0]["message"]["content"] == "H"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True}, "stream"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"best_of": 5, "n": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"n": 33}, "n"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
def test_what_has_no_meaning_with_beams_is_refused(make_site: Any, body: dict[str, Any], param: str) -> None:
    site = make_site(max_n=64)
    reply = site.complete(**{"use_beam_search": True, **body})
    assert reply.status == 400
    assert reply.error["param"] == param
    assert not site.engine.asked


def test_a_rejected_prompt_is_an_ordinary_error(site: Any) -> None:
    site.engine.refuse = RequestRejectedError(RejectReason.QUEUE_FULL, "3 requests are waiting")
    assert site.complete(use_beam_search=True, n=2).status == 503


def test_an_engine_that_fails_within_the_search_is_an_error(site: Any) -> None:
    site.engine.finish = FinishReason.ERROR
    assert site.complete(use_beam_search=True, n=2).status == 500


def test_a_client_that_leaves_ends_the_search(site: Any) -> None:
    left = threading.Event()
    site.engine.may_go_on = lambda _: len(site.engine.asked) < 9 or left.is_set()  # in the midst of it
    with site.live() as base_url:
        body = {"prompt": "Hi", "use_beam_search": True, "n": 2, "max_tokens": 500}
        connection = send(base_url, "/v1/completions", body)
        assert wait_for(lambda: len(site.engine.asked) >= 9)
        connection.close()
        assert wait_for(lambda: site.app.state.lifecycle.num_active == 0)
        left.set()
        num_asked = len(site.engine.asked)
        assert all(asked.generation.closed.is_set() for asked in site.engine.asked[-2:])
        time.sleep(0.2)
        assert len(site.engine.asked) == num_asked


@pytest.mark.parametrize("guidance", [Guidance(grammar="start: /a/"), Guidance(reasoning_budget=ReasoningBudget(1, 2))])
def test_beams_follow_neither_grammar_nor_budget(site: Any, guidance: Guidance) -> None:
    client = BeamSearchClient(site.engine, BeamOptions(), site.engine.info)
    with pytest.raises(InvalidRequestError, match="neither a grammar nor a budget"):
        asyncio.run(client.generate(AddRequest(0, [1], SamplingParams(), 2, guidance=guidance)))
    assert not site.engine.asked


class DirectClient:
    """An engine of this process as an engine client: every request runs to its end when it is read."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.num_requests = 0
        self.outputs: dict[int, RequestOutput] = {}

    async def generate(self, request: AddRequest) -> "DirectGeneration":
        self.num_requests += 1
        self.engine.add(0, msgspec.structs.replace(request, request_id=self.num_requests))
        return DirectGeneration(self, self.num_requests)


class DirectGeneration:
    def __init__(self, client: DirectClient, request_id: int) -> None:
        self._client, self._request_id = client, request_id

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while self._client.engine.has_work:
            for _, output in self._client.engine.step():
                self._client.outputs[output.request_id] = output
        yield self._client.outputs.pop(self._request_id)

    def abort(self, index: int | None = None) -> None: ...
    def close(self) -> None: ...


async def search(
    client: BeamSearchClient, prompt: list[int], params: SamplingParams, width: int
) -> list[RequestOutput]:
    return [output async for output in await client.generate(AddRequest(0, prompt, params, width))]


def until_stop(token_ids: list[int], stop_ids: list[int]) -> list[int]:
    """Without the padding behind the id that ended an output."""
    end = next((i + 1 for i, token_id in enumerate(token_ids) if token_id in stop_ids), len(token_ids))
    return token_ids[:end]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beams") / "llama3"
    write_checkpoint(CHECKPOINTS["llama3"], folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference(folder)


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [(1, 1.0, False), (2, 1.0, False), (4, 1.0, False), (4, 0.0, "never"), (4, 2.0, "never"), (3, -1.0, True)],
)
def test_beams_are_those_of_transformers(
    folder: Path, reference: Any, width: int, length_penalty: float, early_stopping: Any
) -> None:
    """Ends of sequences are made likely: with many stop ids both searches finish beams on their way."""
    stop_ids = [2, 3, *range(20, 60)]
    engine = build_engine(folder)
    info = EngineInfo("e", "llama", VOCAB_SIZE, 256, (2, 3), "cpu", "float32", "sdpa", 16, 400, 64, 4096)
    client: Any = DirectClient(engine)
    for seed in range(2):
        prompt = torch.randint(60, VOCAB_SIZE, (1, 20 + seed), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            expected = reference.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                max_new_tokens=12,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                eos_token_id=stop_ids,
                pad_token_id=0,
            )
        params = SamplingParams(max_tokens=12, stop_token_ids=tuple(stop_ids))
        options = BeamOptions(length_penalty, early_stopping)

        outputs = asyncio.run(search(BeamSearchClient(client, options, info), prompt[0].tolist(), params, width))
        assert [output.index for output in outputs] == list(range(width))
        trimmed = [until_stop(row, stop_ids) for row in expected[:, prompt.shape[1] :].tolist()]
        assert [output.token_ids for output in outputs] == trimmed
        for output in outputs:
            ended = output.token_ids[-1] in stop_ids
            assert output.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
    assert engine.scheduler.kv.pools[0].num_used == 0
