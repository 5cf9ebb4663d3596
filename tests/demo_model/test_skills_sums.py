"""What the demo model learns of sums, lists, letters and repeating."""

import re
from random import Random

import pytest

from demo_model.skill import Exchange, Reply, Skill
from demo_model.skills import letters, lists, refusals, repeating, sums

SKILLS = {skill.name: skill for module in (sums, lists, letters, repeating) for skill in module.SKILLS}
EXAMINED = [skill for skill in SKILLS.values() if skill.is_examined]


def exchanges(skill: Skill, number: int, held_out: bool = False, seed: int = 1) -> list[Exchange]:
    random = Random(f"{skill.name} {seed} {held_out}")
    return [skill.make(random, held_out) for _ in range(number)]


def bare(text: str) -> str:
    return " ".join(re.findall(r"\w+|[-+*/]", text.casefold()))


@pytest.mark.parametrize("skill", SKILLS.values(), ids=SKILLS)
@pytest.mark.parametrize("held_out", [False, True])
def test_answers_are_right_and_exchanges_repeat_for_a_seed(skill: Skill, held_out: bool) -> None:
    made = exchanges(skill, 300, held_out)
    assert made == exchanges(skill, 300, held_out)
    assert made != exchanges(skill, 300, held_out, seed=2)
    for exchange in made:
        reply = Reply(exchange.answer["content"], exchange.answer.get("reasoning_content", ""))
        assert skill.is_right(exchange, reply), exchange
        assert not re.search(r"[{}\[\]|]", exchange.asked), exchange


@pytest.mark.parametrize("skill", EXAMINED, ids=lambda skill: skill.name)
def test_nothing_held_out_is_trained_and_poor_answers_are_wrong(skill: Skill) -> None:
    trained = {bare(exchange.asked) for exchange in exchanges(skill, 3_000)}
    for exchange in exchanges(skill, 300, held_out=True):
        assert bare(exchange.asked) not in trained
        for answer in ("", "I do not know.", "Hello! How can I help you?", refusals.ANSWER):
            assert not skill.is_right(exchange, Reply(answer, "1")), (exchange, answer)


@pytest.mark.parametrize("name", ["addition", "subtraction", "thinking"])
def test_sums_are_true_and_pairs_of_the_exam_are_not_trained(name: str) -> None:
    pairs = {}
    for held_out in (False, True):
        made = exchanges(SKILLS[name], 3_000, held_out)
        found = [re.fullmatch(r"(\d+) ([-+]) (\d+) = (-?\d+)\.", exchange.answer["content"]) for exchange in made]
        for match in found:
            assert match is not None
            a, b = int(match[1]), int(match[3])
            assert int(match[4]) == (a + b if match[2] == "+" else a - b)
        pairs[held_out] = {(match[1], match[3]) for match in found if match}
    assert not pairs[False] & pairs[True]


def test_every_step_of_a_thought_is_true() -> None:
    for exchange in exchanges(SKILLS["thinking"], 2_000):
        steps = re.findall(r"((?:\d+ [-+] )+\d+) = (\d+)", exchange.answer["reasoning_content"])
        assert len(steps) == 2
        for sum_, value in steps:
            numbers = re.findall(r"[-+]?\d+", sum_.replace(" ", ""))
            assert sum(map(int, numbers)) == int(value), exchange


def test_a_thought_must_hold_a_calculation() -> None:
    (exchange,) = exchanges(SKILLS["thinking"], 1, held_out=True)
    answer = exchange.answer["content"]
    assert not SKILLS["thinking"].is_right(exchange, Reply(answer))
    assert SKILLS["thinking"].is_right(exchange, Reply(answer, exchange.answer["reasoning_content"]))


def test_lists_are_sorted_and_complete() -> None:
    for name in ("sorting numbers", "sorting words"):
        for exchange in exchanges(SKILLS[name], 1_000):
            items = re.findall(r"\w+", exchange.answer["content"].split(":")[-1])
            values: list[int] | list[str] = [int(item) for item in items] if name == "sorting numbers" else items
            assert values == sorted(values)
            assert set(items) <= set(re.findall(r"\w+", exchange.asked))
