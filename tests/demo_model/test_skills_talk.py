"""What the demo model learns of talking: greetings, knowledge, refusals, memory, stories, emoji and accents."""

import re
from functools import cache
from random import Random

import pytest

from demo_model.skill import Exchange, Reply, Skill
from demo_model.skills import greetings, knowledge, memory, refusals, small_answers, stories

MODULES = (greetings, knowledge, refusals, memory, stories, small_answers)
SKILLS = {skill.name: skill for module in MODULES for skill in module.SKILLS}
NOT_RIGHT = ("", "I do not know.", "Weft", "Yes, of course.", "Hmm, hello the the the")


def bare(text: str) -> str:
    """Return `text` without case, punctuation and spacing."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def exchanges(skill: Skill, number: int, held_out: bool = False, seed: int = 1) -> list[Exchange]:
    random = Random(f"{skill.name} {seed} {held_out}")
    return [skill.make(random, held_out) for _ in range(number)]


@cache
def trained() -> set[str]:
    return {bare(exchange.asked) for skill in SKILLS.values() for exchange in exchanges(skill, 3_000)}


@pytest.mark.parametrize("skill", SKILLS.values(), ids=SKILLS)
@pytest.mark.parametrize("held_out", (False, True))
def test_answers_are_right_and_exchanges_repeat_for_a_seed(skill: Skill, held_out: bool) -> None:
    made = exchanges(skill, 400, held_out)
    assert made == exchanges(skill, 400, held_out)
    assert made != exchanges(skill, 400, held_out, seed=2)
    for exchange in made:
        assert exchange.answer["role"] == "assistant"
        assert not re.search(r"[{}\[\]|]", exchange.answer["content"])
        assert skill.is_right(exchange, Reply(exchange.answer["content"])), exchange


@pytest.mark.parametrize("skill", SKILLS.values(), ids=SKILLS)
def test_no_held_out_message_is_trained(skill: Skill) -> None:
    assert not trained() & {bare(exchange.asked) for exchange in exchanges(skill, 500, held_out=True)}


@pytest.mark.parametrize("skill", SKILLS.values(), ids=SKILLS)
def test_poor_answers_are_wrong(skill: Skill) -> None:
    for exchange in exchanges(skill, 100, held_out=True):
        marks = [skill.is_right(exchange, Reply(answer)) for answer in NOT_RIGHT]
        assert not any(marks), (exchange, marks)


@pytest.mark.parametrize("asked", knowledge.TOPICS, ids=lambda topic: topic.answer[:30])
def test_the_answer_to_another_topic_is_wrong(asked: knowledge.Topic) -> None:
    exchange = next(e for e in exchanges(SKILLS["knowledge"], 2_000) if e.answer["content"] == asked.answer)
    right = [topic for topic in knowledge.TOPICS if SKILLS["knowledge"].is_right(exchange, Reply(topic.answer))]
    assert right == [asked]


def test_memory_marks_another_value_wrong() -> None:
    for exchange in exchanges(SKILLS["memory"], 200, held_out=True):
        other = re.sub(r"\S+\.$", "Nobody.", exchange.answer["content"])
        assert not SKILLS["memory"].is_right(exchange, Reply(other))
        assert not SKILLS["memory"].is_right(exchange, Reply("You have not told me your name."))
        value = exchange.answer["content"].split()[-1].rstrip(".")
        assert any(value in message["content"] for message in exchange.opening)


def test_memory_knows_what_was_never_told() -> None:
    untold = [e for e in exchanges(SKILLS["memory"], 500) if "not told" in e.answer["content"]]
    assert 30 < len(untold) < 120
    assert not any(SKILLS["memory"].is_right(exchange, Reply("Your name is Anna.")) for exchange in untold)


def test_stories_need_four_sentences_with_everyone() -> None:
    skill = SKILLS["story"]
    for exchange in exchanges(skill, 200, held_out=True):
        story = exchange.answer["content"]
        assert stories.characters(exchange)
        assert not skill.is_right(exchange, Reply(story.rsplit(". ", 1)[0] + "."))
        assert not skill.is_right(exchange, Reply(story + " And then they all went to sleep."))
        for character in stories.characters(exchange):
            assert not skill.is_right(exchange, Reply(story.replace(character, "someone")))


def test_emoji_and_accents_tell_values_apart() -> None:
    for exchange in exchanges(SKILLS["emoji"], 200, held_out=True):
        others = [emoji for emoji in small_answers.EMOJI if emoji not in exchange.answer["content"]]
        assert not any(SKILLS["emoji"].is_right(exchange, Reply(emoji)) for emoji in others)
    for exchange in exchanges(SKILLS["accents"], 100, held_out=True):
        words = [words for table in small_answers.LANGUAGES.values() for words in table]
        right = [words for words in words if SKILLS["accents"].is_right(exchange, Reply(words))]
        assert right == [exchange.answer["content"]]
