"""POST /v1/decisions against the real server and engine."""

import concurrent.futures
import functools
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.checkpoints import load_reference
from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, serving
from weft.server.supervise.checkpoint import DEMO_MODEL

CHOICE: Any = {
    "type": "choice",
    "name": "team",
    "instructions": "Which team?",
    "choices": [{"value": "billing", "description": "invoices"}, {"value": "technical"}, {"value": True}],
}
PREDICATE: Any = {"type": "predicate", "instructions": "The customer is angry."}
SCORE: Any = {"type": "score", "instructions": "How urgent?", "levels": [{"label": "low"}, {"label": "high"}]}
TICKET = "The invoice was charged twice."


@pytest.fixture(scope="module")
def client(live_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{live_server.base_url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as sdk:
        yield sdk


def ask(client: openai.OpenAI, questions: list[Any], input: Any = TICKET, **options: Any) -> Any:
    return client.decisions.create(model="weft-demo", input=input, questions=questions, **options)


def test_the_sdk_parses_every_answer(client: openai.OpenAI) -> None:
    decision = ask(client, [CHOICE, PREDICATE, SCORE])
    choice, predicate, score = decision.answers
    assert (choice.type, choice.name, predicate.name) == ("choice", "team", None)
    assert [entry.value for entry in choice.probabilities] == ["billing", "technical", True]
    assert math.isclose(sum(entry.probability for entry in choice.probabilities), 1.0)
    assert choice.choice == max(choice.probabilities, key=lambda entry: entry.probability).value
    assert 0 < predicate.probability < 1
    assert [(entry.value, entry.label) for entry in score.probabilities] == [(0, "low"), (1, "high")]
    assert math.isclose(score.score, score.probabilities[1].probability)
    assert decision.usage.output_tokens == 0
    assert decision.usage.input_tokens == decision.usage.total_tokens > 0


def test_probabilities_are_those_of_a_plain_forward_pass(client: openai.OpenAI, live_server: LiveServer) -> None:
    """Also those of labels of several tokens, which are sums over paths through a trie."""
    many = {"type": "choice", "instructions": "Pick.", "choices": [{"value": f"option {i}"} for i in range(30)]}
    answers = ask(client, [PREDICATE, many]).answers
    reference = load_reference(DEMO_MODEL)

    @functools.cache
    def ids_of(text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return list(httpx.post(f"{live_server.base_url}/tokenize", json=body, timeout=TIMEOUT_S).json()["tokens"])

    @functools.cache
    def logprobs(token_ids: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(reference(torch.tensor([token_ids])).logits[0, -1].double(), -1)

    def mass(prompt: str, label: str) -> float:
        total, before = 0.0, ids_of(prompt)
        for text in dict.fromkeys((label, label.capitalize() if label.islower() else label)):
            plain, spaced = ids_of("\n" + text)[1:], ids_of("\n " + text)[1:]
            for ids in {tuple(plain), tuple(spaced if len(spaced) <= len(plain) else plain)}:
                total += math.exp(sum(float(logprobs((*before, *ids[:n]))[t]) for n, t in enumerate(ids)))
        return total

    def prompt(question: str) -> str:
        return f"<|im_start|>user\n{TICKET}\n\n{question}<|im_end|>\n<|im_start|>assistant\n</think>"

    statement = prompt("Is the following true? The customer is angry.\nAnswer with yes or no only.")
    yes, no = mass(statement, "yes"), mass(statement, "no")
    assert answers[0].probability == pytest.approx(yes / (yes + no), abs=1e-3)
    assert answers[0].x_label_mass == pytest.approx(yes + no, abs=1e-3)
    labels = [f"{a}{b}" for a in "AB" for b in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"][:30]
    lines = "\n".join(f"{label}: option {i}" for i, label in enumerate(labels))
    masses = [mass(prompt(f"Question: Pick.\n{lines}\nAnswer with the letters of one option only."), x) for x in labels]
    shares = [one / sum(masses) for one in masses]
    assert [entry.probability for entry in answers[1].probabilities] == pytest.approx(shares, abs=1e-3)
    assert answers[1].confidence == pytest.approx((30 * max(shares) - 1) / 29, abs=1e-3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The demo model with Weft's own kernels."""
    with serving(tmp_path_factory.mktemp("decisions") / "server.log", "--max-model-len", "2048") as server:
        yield server


def decide(server: LiveServer, **body: Any) -> Any:
    reply = httpx.post(f"{server.base_url}/v1/decisions", json=body, timeout=TIMEOUT_S)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_400_questions_compute_the_input_once(server: LiveServer) -> None:
    text = "The invoice was charged twice and nobody answers the phone. " * 30
    questions = [{**CHOICE, "name": None, "instructions": f"Which team, customer {i}?"} for i in range(400)]
    before = server.metric("weft:engine_prefill_tokens_total")
    usage = decide(server, input=text, questions=questions)["usage"]
    computed = server.metric("weft:engine_prefill_tokens_total") - before
    num_tokens = usage["input_tokens"] / 400
    assert num_tokens > 1000
    assert computed == usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    assert computed < num_tokens + 400 * 96


def test_probabilities_do_not_depend_on_load(server: LiveServer) -> None:
    """Weft's own kernels compute the same bits whatever runs beside them, and whatever is cached."""

    def answers(key: str) -> Any:
        return decide(server, input=TICKET, questions=[CHOICE, PREDICATE, SCORE], cache_salt=key)["answers"]

    alone = answers("alone")
    assert answers("alone") == alone
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert list(threads.map(answers, "abcdefgh")) == [alone] * 8
