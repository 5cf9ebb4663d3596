"""Decisions in the shapes of SGLang and of System One, over a fake engine: every asked id has log-probability -9."""

import math
from typing import Any

import jsonschema
import pytest

CHOICE = {
    "id": "c",
    "type": "choice",
    "question": "Which?",
    "options": [{"name": "x", "description": {"k": 1}}, {"name": "y"}],
}
SCORE = {"id": "s", "type": "score", "question": ["How", "much?"], "levels": ["low", "high"]}
YES_NO = {"id": "b", "type": "yes_no", "question": "It is late.", "yes": "after ten"}
NOUL = {"type": "noul", "instructions": "It is late.", "criteria": {"true": "after ten"}}
NUMBER, TEXT = {"type": "number"}, {"type": "string"}
SHARES = {"type": "object", "additionalProperties": {"type": "number", "minimum": 0, "maximum": 1}}


def shape(**members: Any) -> dict[str, Any]:
    """An object with exactly these members."""
    return {"type": "object", "required": list(members), "properties": members, "additionalProperties": False}


SGLANG = shape(
    model=TEXT,
    prompt_format_version={"const": 1},
    answers=shape(
        c=shape(type={"const": "choice"}, choice=TEXT, probabilities=SHARES, label_mass=NUMBER),
        s=shape(type={"const": "score"}, score=NUMBER, probabilities=SHARES, label_mass=NUMBER),
        b=shape(type={"const": "yes_no"}, probabilities=SHARES, label_mass=NUMBER),
    ),
    usage=shape(prompt_tokens={"type": "integer"}, total_tokens={"type": "integer"}, completion_tokens={"const": 0}),
)
SYSTEM_ONE = shape(
    model=TEXT,
    answers=shape(
        n=shape(type={"const": "noul"}, noul=NUMBER, x_label_mass=NUMBER),
        c=shape(type={"const": "choice"}, choice=TEXT, confidence=NUMBER, probabilities=SHARES, x_label_mass=NUMBER),
        s=shape(
            type={"const": "score"},
            score=NUMBER,
            confidence=NUMBER,
            legend={"const": {"0": "low", "1": {"k": 2}}},
            probabilities=SHARES,
            x_label_mass=NUMBER,
        ),
    ),
    usage=shape(input_tokens={"type": "integer"}, output_tokens={"const": 0}),
)
STATE = {
    "state": {"a": 1},
    "questions": {
        "n": NOUL,
        "c": {"type": "choice", "criteria": {"x": None, "y": "why"}},
        "s": {"type": "score", "instructions": "How much?", "criteria": ["low", {"k": 2}]},
    },
}


def post(site: Any, path: str = "/v1/decisions", **body: Any) -> Any:
    return site.call("POST", path, json=body)


def prompts(site: Any) -> list[str]:
    return [bytes(i for i in asked.prompt_token_ids if i < 256).decode() for asked in site.engine.asked]


def test_sglangs_shape(site: Any) -> None:
    reply = post(site, input={"ä": [1]}, questions=[CHOICE, SCORE, YES_NO], temperature=0.5, prompt_format_version=1)
    assert reply.status == 200, reply.text
    jsonschema.validate(reply.json, SGLANG)
    shown = prompts(site)
    options = 'A: x - {"k":1}\nB: y\nAnswer with the letter of one option only.'
    assert shown[0] == f'user: {{"ä":[1]}}\n\nQuestion: Which?\n{options}\nassistant:'
    assert 'Question: ["How","much?"]\n0: low\n1: high\nAnswer with the number of one level only.' in shown[1]
    assert "Is the following true? It is late.\nyes: after ten\nAnswer with yes or no only." in shown[2]
    answers = reply.json["answers"]
    assert answers["c"]["label_mass"] == pytest.approx(2 * math.exp(-9))
    share = answers["b"]["probabilities"]["yes"]
    assert share == pytest.approx(1 / (1 + math.exp(9 / 0.5)), rel=1e-6)  # three bytes against two


@pytest.mark.parametrize("path", ["/v1/systemone", "/v1/decisions"])
def test_system_ones_shape(site: Any, path: str) -> None:
    reply = post(site, path, **STATE)
    assert reply.status == 200, reply.text
    jsonschema.validate(reply.json, SYSTEM_ONE)
    assert prompts(site)[1].startswith('user: {"a":1}\n\nA: x\nB: y - why\nAnswer with')


def test_the_callers_variables_reach_the_template_with_thinking_off(site: Any) -> None:
    site.tokenizer.template = "{% if enable_thinking %}<think>{% endif %}"
    site.rebuild()
    post(site, input="Hi", questions=[CHOICE], chat_template_kwargs={"mood": "kind"})
    assert site.tokenizer.variables == {"mood": "kind", "enable_thinking": False}
    reply = post(site, input="Hi", questions=[CHOICE], chat_template_kwargs={"enable_thinking": True})
    assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs.enable_thinking")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"questions": [CHOICE, CHOICE]}, "questions[1].id"),
        ({"questions": [{**CHOICE, "id": " "}]}, "questions[0].id"),
        ({"questions": [{**CHOICE, "question": ""}]}, "questions[0].question"),
        ({"questions": [{**CHOICE, "options": [{"name": "a"}, {"name": "A "}]}]}, "questions[0].options"),
        ({"questions": [{**CHOICE, "options": [{"name": "a"}, {"name": "b\n"}]}]}, "questions[0].options"),
        ({"questions": [{**CHOICE, "options": [{"name": str(i)} for i in range(27)]}]}, "questions[0].options"),
        ({"questions": [{**CHOICE, "levels": ["a", "b"]}]}, "questions[0].levels"),
        ({"questions": [{**SCORE, "levels": ["a"] * 11}]}, "questions[0].levels"),
        ({"questions": [{**SCORE, "levels": ["a", ""]}]}, "questions[0].levels[1]"),
        ({"questions": [{**SCORE, "levels": ["a", "b", "A "]}]}, "questions[0].levels"),
        ({"questions": [{**SCORE, "levels": [{"a": 1}, {"a": 1}]}]}, "questions[0].levels"),
        ({"questions": [{**CHOICE, "optoins": []}]}, "questions[0].optoins"),
        ({"questions": [{**CHOICE, "type": "noul"}]}, "questions[0].type"),
        ({"input": " "}, "input"),
        ({"temperature": 0}, "temperature"),
        ({"prompt_format_version": 2}, "prompt_format_version"),
        ({"return_prompt_token_ids": True}, "return_prompt_token_ids"),
    ],
)
def test_sglangs_errors_are_400(site: Any, body: dict[str, Any], param: str) -> None:
    reply = post(site, **{"input": "Hi", "questions": [CHOICE], **body})
    assert (reply.status, reply.error["param"]) == (400, param), reply.text
    assert site.engine.asked == []


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"questions": {}}, 422, "questions"),
        ({"questions": {"n": {"type": "noul"}}}, 422, "questions.n.instructions"),
        ({"questions": {"n": {**NOUL, "criteria": [{}]}}}, 422, "questions.n.criteria"),
        ({"questions": {"n": {**NOUL, "criteria": {"maybe": "x"}}}}, 422, "questions.n.criteria"),
        ({"questions": {"c": {"type": "choice"}}}, 422, "questions.c.criteria"),
        ({"questions": {"c": {"type": "choice", "criteria": ["x"]}}}, 422, "questions.c.criteria"),
        ({"questions": {"s": {"type": "score", "criteria": [""]}}}, 422, "questions.s.criteria[0]"),
        ({"state": ""}, 422, "state"),
        ({"state": 5}, 422, "state"),
        ({"temperature": 1}, 400, "temperature"),
        ({"model": "unknown"}, 404, "model"),
    ],
)
def test_what_breaks_system_ones_schema_is_422(site: Any, body: dict[str, Any], status: int, param: str) -> None:
    reply = post(site, "/v1/systemone", **{**STATE, **body})
    assert (reply.status, reply.error["param"]) == (status, param), reply.text
    assert site.engine.asked == []


@pytest.mark.parametrize("content", [b"null", b"", b"[]", b"{"])
def test_a_body_that_is_no_object_is_422_too(site: Any, content: bytes) -> None:
    reply = site.call("POST", "/v1/systemone", content=content, headers={"content-type": "application/json"})
    assert (reply.status, reply.error["param"]) == (422, None), reply.text
