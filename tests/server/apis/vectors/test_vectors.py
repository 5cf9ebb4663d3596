"""Embeddings, scores, reranking, classes and hidden states: wire shapes, and what is refused before any work."""

import asyncio
import base64
from array import array
from typing import Any

import msgspec
import openai
import pytest

from weft.engine.wire.messages import AddRequest, FinishReason, TokensOutput
from weft.engine.wire.params import PooledOutput, VectorInfo
from weft.server.generate import vectors
from weft.server.models.served_model import VectorPrompts
from weft.server.task.vectors import MAX_INPUTS

DECISION = {"input": "too long" * 1000, "questions": [{"type": "predicate", "instructions": "It is late."}]}
TOOLS = [{"type": "function", "name": "f", "function": {"name": "f"}, "parameters": {}}]
PROMPTS = VectorPrompts({"query": "Q:", "document": ""})


class Generation:
    """One output, after others had their turn."""

    def __init__(self, engine: "VectorEngine", output: Any) -> None:
        self.engine, self.output = engine, output

    async def __aiter__(self) -> Any:
        await asyncio.sleep(0.001)
        yield self.output

    def close(self) -> None:
        self.engine.num_open -= 1


class VectorEngine:
    """A vector is the number of tokens, then the last id; of a classifier the number of tokens, and a label each."""

    def __init__(self, usual: Any, task: str, info: VectorInfo) -> None:
        self.usual, self.info = usual, msgspec.structs.replace(usual.info, task=task, vectors=info)
        self.asked: list[AddRequest] = []
        self.num_open = self.most_open = 0
        self.failure: FinishReason | None = None

    def status(self) -> Any:
        return self.usual.status()

    async def meet(self) -> None:
        """It was there before the server."""

    async def load(self) -> None:
        await self.meet()

    async def generate(self, request: AddRequest) -> Generation:
        self.asked.append(request)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        if self.failure is not None:
            return Generation(self, TokensOutput(0, 0, [], self.failure))
        ids, pooling = request.input.token_ids, request.pooling
        assert pooling is not None
        rows = [[float(i), 0.5] for i in ids] if pooling.is_per_token else [[float(len(ids)), float(ids[-1])]]
        rows = [row[: self.info.vectors.size][: pooling.dimensions] for row in rows]  # type: ignore[union-attr]
        content = b"".join(array("f", row).tobytes() for row in rows)
        return Generation(self, PooledOutput(0, 0, content, len(rows), FinishReason.STOP))


@pytest.fixture
def vector_site(make_site: Any) -> Any:
    def make(task: str = "embed", info: VectorInfo | None = None, template: str = "", **settings: Any) -> Any:
        site = make_site(**settings)
        site.tokenizer.template = template
        site.engine = VectorEngine(site.engine, task, info or VectorInfo(2, 2))
        site.rebuild()
        context = site.app.state.context
        models = {name: with_prompts(model) for name, model in context.models.items()}
        object.__setattr__(context, "models", models)
        return site

    return make


def with_prompts(model: Any) -> Any:
    import dataclasses

    return dataclasses.replace(model, prompts=PROMPTS)


def post(site: Any, path: str, **body: Any) -> Any:
    return site.call("POST", path, json=body)


def test_embeddings_in_both_encodings(vector_site: Any) -> None:
    site = vector_site()
    reply = post(site, "/v1/embeddings", input=["a", "bcd"], user="me").json
    assert reply == {
        "id": reply["id"],
        "created": reply["created"],
        "object": "list",
        "model": "org/fake model",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [2.0, 97.0]},
            {"object": "embedding", "index": 1, "embedding": [4.0, 100.0]},
        ],
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
    }
    coded = post(site, "/v1/embeddings", input="a", encoding_format="base64").json["data"][0]["embedding"]
    assert array("f", base64.b64decode(coded)).tolist() == [2.0, 97.0]
    assert post(site, "/v1/embeddings", input="a", user="me").headers["x-ignored-params"] == "user"


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("ab", [[256, 97, 98]]), ([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]]), (["a", "b"], [[256, 97], [256, 98]])],
)
def test_inputs_of_every_kind(vector_site: Any, given: Any, prompts: Any) -> None:
    site = vector_site()
    assert len(post(site, "/v1/embeddings", input=given).json["data"]) == len(prompts)
    assert [add.input.token_ids for add in site.engine.asked] == prompts
    assert {add.sampling_params.max_tokens for add in site.engine.asked} == {0}


def test_prompts_of_the_checkpoint(vector_site: Any) -> None:
    site = vector_site()
    for field in ({"prompt_name": "query"}, {"input_type": "query"}, {"input_type": "search_query"}):
        post(site, "/v1/embeddings", input="a", **field)
    assert {tuple(add.input.token_ids) for add in site.engine.asked} == {(256, *b"Q:a")}


def test_many_inputs_leave_room_for_others(vector_site: Any) -> None:
    site = vector_site()
    reply = post(site, "/v1/embeddings", input=["a"] * MAX_INPUTS).json
    assert [entry["index"] for entry in reply["data"]] == list(range(MAX_INPUTS))
    assert (site.engine.most_open, site.engine.num_open) == (64, 0)


def test_a_cut_text_keeps_its_beginning(vector_site: Any) -> None:
    site = vector_site("classify", VectorInfo(1, 2, ("yes",)))
    post(site, "/v1/score", text_1="q", text_2="abcdef" * 300, truncate_prompt_tokens=7)
    post(site, "/v1/classify", input=[[1, 2, 3]], truncate_prompt_tokens=2)
    pair, ids = (add.input.token_ids for add in site.engine.asked)
    assert pair == [256, 113, 258, 97, 98, 99, 258], "the special token at the end stays"
    assert ids == [1, 2]


def test_dimensions(vector_site: Any) -> None:
    site = vector_site(info=VectorInfo(2, 2, is_matryoshka=True))
    assert post(site, "/v1/embeddings", input="a", dimensions=1).json["data"][0]["embedding"] == [2.0]
    assert post(site, "/v1/embeddings", input="a", dimensions=3).error["message"] == (
        "dimensions must be between 1 and 2, got 3"
    )
    error = post(vector_site(), "/v1/embeddings", input="a", dimensions=1).error
    assert (error["code"], error["param"]) == ("unsupported_value", "dimensions")
    listed = vector_site(info=VectorInfo(4, 4, dimensions=(2,), is_matryoshka=True))
    assert "one of 2, got 3" in post(listed, "/v1/embeddings", input="a", dimensions=3).error["message"]


def test_hidden_states_of_all_tokens(vector_site: Any) -> None:
    site = vector_site()
    entry = post(site, "/pooling", input="a").json["data"][0]
    assert entry == {"object": "pooling", "index": 0, "data": [[256.0, 0.5], [97.0, 0.5]]}
    assert post(site, "/pooling", input="a", task="embed").json["data"][0]["data"] == [2.0, 97.0]
    assert post(site, "/pooling", input="a", task="classify").error["param"] == "task"
    assert post(site, "/pooling", input="a", normalize=True).error["param"] == "normalize"


def test_hidden_states_of_a_call_are_bounded_before_the_engine_works(
    vector_site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those of one input were: a call could hold a vector of each token of 8,192 of them."""
    monkeypatch.setattr(vectors, "MAX_LISTED_VALUES", 16)
    monkeypatch.setattr(vectors, "MAX_HIDDEN_VALUES", 20)
    site = vector_site(info=VectorInfo(2, 2, is_matryoshka=True))
    error = post(site, "/pooling", input=["a"] * 5).error
    assert (error["param"], "between 1 and 16, got 20" in error["message"]) == ("input", True), error
    assert not site.engine.asked
    assert post(site, "/pooling", input=["a"] * 4).status == 200
    assert post(site, "/pooling", input=["a"] * 5, encoding_format="base64").status == 200
    assert post(site, "/pooling", input=["a"] * 6, encoding_format="base64").error["param"] == "input"
    assert post(site, "/pooling", input=["a"] * 8, dimensions=1).status == 200
    assert post(site, "/pooling", input=["a"] * 9, task="embed").status == 200


def test_classes(vector_site: Any) -> None:
    site = vector_site("classify", VectorInfo(2, 2, ("no", "yes")))
    entry = post(site, "/v1/classify", input="a").json["data"][0]
    assert entry == {"index": 0, "label": "yes", "probs": [2.0, 97.0], "num_classes": 2}
    error = post(site, "/v1/score", text_1="a", text_2="b").error
    assert (error["param"], error["code"]) == ("model", "unsupported_value")


def test_scores_of_pairs(vector_site: Any) -> None:
    site = vector_site("classify", VectorInfo(1, 2, ("yes",)))
    reply = post(site, "/v1/score", text_1="q", text_2=["a", "bc"]).json
    assert reply["data"] == [
        {"object": "score", "index": 0, "score": 5.0},
        {"object": "score", "index": 1, "score": 6.0},
    ]
    assert site.engine.asked[0].input.token_ids == [256, 113, 258, 97, 258]
    post(site, "/v1/score", text_1=["q", "r"], text_2=["a", "b"])
    assert [add.input.token_ids[1] for add in site.engine.asked[2:]] == [113, 114]
    error = post(site, "/v1/score", text_1=["q", "r"], text_2=["a"]).error
    assert error["message"] == "text_1 must hold one text or as many as text_2, which has 1, got 2"


def test_a_first_text_that_leaves_no_room_is_refused_before_it_is_encoded_with_each_second(vector_site: Any) -> None:
    """It is never cut, and took seconds for each document."""
    site = vector_site("classify", VectorInfo(1, 2, ("yes",)))
    error = post(site, "/v1/rerank", query="q" * 100_000, documents=["d"] * 64, truncate_prompt_tokens=-1).error
    assert error["code"] == "context_length_exceeded"
    assert not site.engine.asked


def test_pairs_through_a_chat_template(vector_site: Any) -> None:
    site = vector_site("classify", VectorInfo(1, 2, ("yes",)), template="{# query document #}")
    post(site, "/rerank", query="q", documents=["d"], instruction="find")
    assert bytes(site.engine.asked[0].input.token_ids[1:]) == b"system: find\nquery: q\ndocument: d\nassistant:"


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_ranking(vector_site: Any, path: str) -> None:
    site = vector_site("classify", VectorInfo(1, 2, ("yes",)))
    reply = post(site, path, query="q", documents=["a", {"text": "bcd"}, "ef"], top_n=2, return_documents=True).json
    assert reply["results"] == [
        {"index": 1, "relevance_score": 7.0, "document": {"text": "bcd"}},
        {"index": 2, "relevance_score": 6.0, "document": {"text": "ef"}},
    ]
    assert reply["meta"] == {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    assert "document" not in post(site, path, query="q", documents=["a"]).json["results"][0]


def test_a_bound_per_document_never_cuts_the_query(vector_site: Any) -> None:
    body: Any = {"query": "query", "documents": ["abc" * 300, "d"], "max_tokens_per_doc": 2}
    site = vector_site("classify", VectorInfo(1, 2, ("yes",)))
    post(site, "/rerank", **body)
    pairs = [add.input.token_ids for add in site.engine.asked]
    assert pairs == [[256, *b"query", 258, *text, 258] for text in (b"ab", b"d")]
    site = vector_site()
    post(site, "/rerank", **body)
    assert [add.input.token_ids for add in site.engine.asked] == [[256, *b"Q:query"], [256, *b"ab"], [256, *b"d"]]
    post(site, "/rerank", **{**body, "documents": ["a" * 5000], "max_tokens_per_doc": 9999})
    assert len(site.engine.asked[-1].input.token_ids) == 1000


def test_a_model_for_embeddings_ranks_by_cosine(vector_site: Any) -> None:
    site = vector_site()
    reply = post(site, "/rerank", query="q", documents=["bb", "a"]).json
    expected = [(4 * n + 113 * i) / ((16 + 113**2) * (n * n + i * i)) ** 0.5 for n, i in ((3, 98), (2, 97))]
    assert {r["index"]: r["relevance_score"] for r in reply["results"]} == pytest.approx(dict(enumerate(expected)))
    assert site.engine.asked[0].input.token_ids == [256, *b"Q:q"]


@pytest.mark.parametrize(
    ("path", "body", "param", "part"),
    [
        ("/v1/embeddings", {}, "input", "required"),
        ("/v1/embeddings", {"input": []}, "input", "between 1 and 8192, got 0"),
        ("/v1/embeddings", {"input": ["a"] * (MAX_INPUTS + 1)}, "input", "between 1 and 8192, got 8193"),
        ("/v1/embeddings", {"input": [[1], []]}, "input", "input[1] must hold at least one token"),
        ("/v1/embeddings", {"input": [[1, 300]]}, "input[0][1]", "between 0 and 299, got 300"),
        ("/v1/embeddings", {"input": "a" * 1000}, "input", "at most 1000 tokens, but input[0] has 1001"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "'int8'"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "got 0"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, "prompt_name", "(query, document), got 'x'"),
        ("/v1/embeddings", {"input": [1], "prompt_name": "query"}, "prompt_name", "token ids"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model", "does not exist"),
        ("/v1/classify", {"input": "a"}, "model", "needs a model for the task classify, and the task"),
        ("/v1/completions", {"prompt": "a"}, "model", "needs a model for the task generate, and the task"),
        ("/v1/chat/completions", {"messages": [], "tools": TOOLS}, "model", "needs a model for the task generate"),
        ("/v1/responses", {"input": "a", "tools": TOOLS}, "model", "needs a model for the task generate"),
        ("/v1/decisions", DECISION, "model", "needs a model for the task generate, and the task"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "got 0"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "at least 1, got 0"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text", "required"),
        ("/rerank", {"query": "a", "documents": ["b"], "use_activation": True}, "use_activation", "classify"),
    ],
)
def test_refused(vector_site: Any, path: str, body: Any, param: str, part: str) -> None:
    error = post(vector_site(), path, **body).error
    assert (error["param"], part in error["message"]) == (param, True), error


def test_models_that_generate_make_no_vectors(site: Any) -> None:
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        error = post(site, path, **body).error
        assert (error["code"], error["param"]) == ("unsupported_value", "model")


def test_a_failure_ends_the_call_and_leaves_nothing(vector_site: Any) -> None:
    site = vector_site()
    for failure, status in ((FinishReason.TIMEOUT, 504), (FinishReason.ERROR, 500), (FinishReason.ABORT, 503)):
        site.engine.failure = failure
        assert post(site, "/v1/embeddings", input=["a"] * 100).status == status
        assert site.engine.num_open == 0


def test_the_sdk_parses_what_it_asks_for(vector_site: Any) -> None:
    """The SDK asks for base64 by itself."""
    with vector_site().live() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-") as client:
        answer = client.embeddings.create(model="alias", input=["a", "bcd"])
    assert [entry.embedding for entry in answer.data] == [[2.0, 97.0], [4.0, 100.0]]
    assert (answer.usage.total_tokens, answer.model) == (6, "alias")
