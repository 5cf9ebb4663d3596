"""Structured answers over HTTP, sampled from the demo model, which knows nothing of JSON."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import llguidance
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer
from tests.engine.guidance.demo import TOKENIZER
from tests.json_schemas import JSON_SCHEMAS
from weft.server.formats.grammar import guided_schema

NUM_CONNECTIONS = 16
MAX_TOKENS = 700
QUESTION = [{"role": "user", "content": "Tell me something"}]

Post = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def post(live_server: LiveServer) -> Iterator[Post]:
    def post(path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
        asked = {"prompt": "Say"} if path == "/v1/completions" else {"messages": QUESTION}
        return client.post(path, json={**asked, **body})

    with httpx.Client(base_url=live_server.base_url, timeout=TIMEOUT_S) as client:
        yield post


def contents(reply: httpx.Response) -> list[str]:
    assert reply.status_code == 200, reply.text
    choices = reply.json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * len(choices), choices
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]


def json_schema(schema: object, **more: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def is_begun(schema: dict[str, Any], text: str) -> bool:
    """Whether a text may go on to be an answer of the schema."""
    vocabulary = llguidance.LLTokenizer(TOKENIZER.to_str())
    matcher = llguidance.LLMatcher(vocabulary, json.dumps({"grammars": [{"json_schema": guided_schema(schema)}]}))
    token_ids = vocabulary.tokenize_str(text)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids))


def num_incomplete(post: Post, num_answers: int, index: int, schema: dict[str, Any]) -> int:
    """Ask for answers of one schema and check them; how many of them met the limit."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    reply = post(
        response_format=json_schema(schema, strict=True),
        temperature=1,
        n=num_answers,
        seed=index,
        max_tokens=MAX_TOKENS,
    )
    assert reply.status_code == 200, (schema, reply.text)
    choices = reply.json()["choices"]
    assert len(choices) == num_answers
    ended = [choice["message"]["content"] for choice in choices if choice["finish_reason"] == "stop"]
    for text in ended:
        validator.validate(json.loads(text))
    cut = [choice["message"]["content"] for choice in choices if choice["finish_reason"] == "length"]
    assert all(is_begun(schema, text) for text in cut), (schema, cut)
    assert len(ended) + len(cut) == num_answers
    return len(cut)


@pytest.mark.parametrize("num_answers", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_sampled_answers_of_two_hundred_schemas_are_valid(post: Post, num_answers: int) -> None:
    with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        counts = list(pool.map(lambda pair: num_incomplete(post, num_answers, *pair), enumerate(JSON_SCHEMAS.values())))
    assert len(counts) == 200
    # Some forms have no longest one, and it is the model that chooses.
    assert sum(counts) <= len(counts) * num_answers // 10, dict(zip(JSON_SCHEMAS, counts, strict=True))


# --- every other way to ask -----------------------------------------------------------------------------------------

WORDS = ["red", "green", "deep blue"]
LARK = 'start: sum\nsum: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[1-9][0-9]?/'
TAGS = {
    "structures": [
        {"begin": "<n>", "schema": {"type": "integer", "minimum": 0, "maximum": 9}, "end": "</n>"},
        {"begin": "<word>", "schema": {"enum": WORDS}, "end": "</word>"},
    ],
    "triggers": ["<n", "<w"],
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-z]{3}/[0-9]{2,4}"}}, "[a-z]{3}/[0-9]{2,4}"),
        ({"guided_regex": "(é|ü){2}"}, "(é|ü){2}"),
        ({"structured_outputs": {"choice": WORDS}}, "|".join(WORDS)),
        ({"guided_choice": WORDS}, "|".join(WORDS)),
        ({"structured_outputs": {"grammar": LARK}}, r"[1-9]\d?(\+[1-9]\d?){1,3}"),
        ({"guided_grammar": LARK}, r"[1-9]\d?(\+[1-9]\d?){1,3}"),
        ({"structured_outputs": {"json": '{"enum": [1, "a"]}'}}, '1|"a"'),
        ({"guided_json": {"enum": [1, "a"]}}, '1|"a"'),
        ({"response_format": json_schema({"enum": [1, "a"]})}, '1|"a"'),
    ],
)
def test_every_answer_follows(post: Post, path: str, field: dict[str, Any], pattern: str) -> None:
    for text in contents(post(path, **field, n=4, seed=5, temperature=1, max_tokens=60)):
        assert re.fullmatch(pattern, text), text


def test_a_json_object_is_begun_and_ended(post: Post) -> None:
    (text,) = contents(
        post(
            response_format={"type": "json_object"},
            logit_bias={str(TOKENIZER.token_to_id(mark)): 100 for mark in "{}"},
            max_tokens=20,
        )
    )
    assert json.loads(text) == {}
    reply = post(response_format={"type": "json_object"}, temperature=1, seed=3, n=8, max_tokens=60)
    texts = [choice["message"]["content"] for choice in reply.json()["choices"]]
    assert all(is_begun({"type": "object"}, text) for text in texts), texts


@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
def test_what_a_trigger_opens_is_structured(post: Post, field: str) -> None:
    tag = {"type": "structural_tag", **TAGS}
    asked = tag if field == "response_format" else {"structural_tag": json.dumps(tag)}
    lure = {str(TOKENIZER.token_to_id(token)): 100 for token in "<n"}
    turns = {"frequency_penalty": 2}  # or the one that the model likes better would come alone
    reply = post(**{field: asked}, **turns, logit_bias=lure, temperature=2, n=8, seed=1, max_tokens=60)
    assert reply.status_code == 200, reply.text
    texts = [choice["message"]["content"] for choice in reply.json()["choices"]]
    opened = [part for text in texts for part in text.split("<n")[1:-1]]
    assert opened, texts
    assert all(re.match(r">\d</n>", part) for part in opened), texts


@pytest.mark.parametrize(
    ("field", "code", "param", "said"),
    [
        (
            {"response_format": json_schema({"type": "array", "uniqueItems": True}, strict=True)},
            "invalid_json_schema",
            "response_format.json_schema.schema",
            "uniqueItems",
        ),
        ({"guided_json": {"type": "nothing"}}, "invalid_json_schema", "guided_json", "nothing"),
        ({"structured_outputs": {"regex": "(a"}}, "invalid_grammar", "structured_outputs.regex", ""),
        ({"structured_outputs": {"grammar": "start: other"}}, "invalid_grammar", "structured_outputs.grammar", "other"),
        ({"guided_grammar": "start: ("}, "invalid_grammar", "guided_grammar", ""),
        ({"guided_choice": []}, "invalid_value", "guided_choice", "1 to 4096"),
        ({"structured_outputs": {}}, "invalid_value", "structured_outputs", "exactly one"),
        ({"response_format": {"type": "json_schema"}}, "invalid_value", "response_format.json_schema", "required"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_refused_before_the_answer_begins(
    post: Post, stream: bool, field: dict[str, Any], code: str, param: str, said: str
) -> None:
    reply = post(**field, stream=stream, max_tokens=5)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param), error
    assert said in error["message"]


def test_a_schema_that_is_not_strict_is_enforced_as_far_as_it_can_be(post: Post) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2, "maxItems": 2}
    for text in contents(post(response_format=json_schema(schema), n=4, temperature=1, max_tokens=40)):
        assert re.fullmatch(r"\[[12], [12]\]", text), text


@pytest.mark.parametrize("name", ["person", "forty members", "format date-time", "array of objects"])
def test_a_streamed_answer_is_the_plain_one(post: Post, name: str) -> None:
    asked = {"response_format": json_schema(JSON_SCHEMAS[name]), "temperature": 1, "seed": 11, "max_tokens": MAX_TOKENS}
    (plain,) = post(**asked).json()["choices"]
    lines = post(**asked, stream=True).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    content = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert content
    assert content == plain["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == plain["finish_reason"]
