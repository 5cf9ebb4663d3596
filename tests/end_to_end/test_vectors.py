"""Vectors through `weft serve` equal those of sentence-transformers; the examples of docs/api.md run as they stand."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
from numpy.testing import assert_allclose

from tests.end_to_end.conftest import LiveServer, serving
from tests.end_to_end.test_readme import example, run
from tests.vector_checkpoints import TEXTS, write_classifier, write_embedder, write_reranker

OPTIONS = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "16MB")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Any]]:
    folder = tmp_path_factory.mktemp("embedder")
    reference = write_embedder(folder / "qwen3", "qwen3", "lasttoken", is_deep=True)
    with serving(folder / "log", str(folder / "qwen3"), *OPTIONS) as server:
        yield server, reference


def answered(word: str, server: LiveServer) -> Any:
    return json.loads(run("sh", "-c", example("docs/api.md", "sh", word, server)))


def test_vectors_are_those_of_sentence_transformers(embedder: tuple[LiveServer, Any]) -> None:
    server, reference = embedder
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-") as client:
        for body in ({}, {"input_type": "query"}):
            vectors = client.embeddings.create(model="qwen3", input=TEXTS, extra_body=body).data
            name = "query" if body else None
            assert_allclose(
                [v.embedding for v in vectors], reference.encode(TEXTS, prompt_name=name), rtol=0, atol=1e-4
            )
        many = client.embeddings.create(model="qwen3", input=["the ring"] * 1000, encoding_format="float").data
    assert_allclose([v.embedding for v in many], [many[0].embedding] * 1000, rtol=0, atol=1e-5)


def test_the_client_of_ollama_gets_the_same_vectors(embedder: tuple[LiveServer, Any]) -> None:
    server, reference = embedder
    expected = reference.encode(TEXTS)
    with ollama.Client(server.base_url, timeout=100) as client:
        answer = client.embed("qwen3", TEXTS, keep_alive=5)
        assert_allclose(answer.embeddings, expected, rtol=0, atol=1e-4)
        assert (answer.total_duration or 0) > 0 and (answer.prompt_eval_count or 0) > len(TEXTS)
        assert_allclose(client.embeddings("qwen3", TEXTS[0]).embedding, expected[0], rtol=0, atol=1e-4)
        assert list(client.embed("qwen3", []).embeddings) == [] == list(client.embeddings("qwen3", "").embedding)
        long = "the ring " * 300
        assert len(client.embed("qwen3", long).embeddings[0]) == len(expected[0])
        for refused, message in (
            ({"truncate": False}, "context holds at most"),
            ({"dimensions": 7}, "dimensions must be 24"),
        ):
            with pytest.raises(ollama.ResponseError, match=message) as caught:
                client.embed("qwen3", long, **refused)  # type: ignore[arg-type]
            assert caught.value.status_code == 400


@needs_curl
def test_the_examples_for_embeddings(embedder: tuple[LiveServer, Any]) -> None:
    server, reference = embedder
    assert len(answered("/v1/embeddings", server)["data"]) == 2
    (best,) = answered("/v1/rerank", server)["results"]
    query = reference.encode(["the ring"], prompt_name="query")
    cosines = (query @ reference.encode(["a thread", "a ring of the king"]).T)[0]
    assert (best["index"], best["relevance_score"]) == (np.argmax(cosines), pytest.approx(cosines.max(), abs=1e-4))
    assert [entry["index"] for entry in answered("/v1/score", server)["data"]] == [0, 1]
    states = reference.encode("the ring", output_value="token_embeddings").numpy()
    assert_allclose(answered("/pooling", server)["data"][0]["data"], states, rtol=0, atol=1e-4)


@needs_curl
def test_the_example_for_classes(tmp_path: Path) -> None:
    with serving(tmp_path / "log", str(write_classifier(tmp_path / "three", 3)), *OPTIONS) as server:
        (entry,) = answered("/v1/classify", server)["data"]
    assert (entry["num_classes"], sum(entry["probs"])) == (3, pytest.approx(1.0, abs=1e-5))


def test_a_reranker_reads_pairs_as_sentence_transformers_does(tmp_path: Path) -> None:
    import httpx

    reference = write_reranker(tmp_path / "reranker")
    texts = ["kalo miren", "the ring", "a"]
    with serving(tmp_path / "log", str(tmp_path / "reranker"), *OPTIONS) as server:
        body = {"text_1": "the ring", "text_2": texts}
        data = httpx.post(f"{server.base_url}/v1/score", json=body, timeout=60).json()["data"]
    expected = reference.predict([("the ring", text) for text in texts])
    assert_allclose([entry["score"] for entry in data], expected, rtol=0, atol=1e-4)
