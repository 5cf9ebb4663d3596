"""Saying again what the user said: the purest copying, from which the other skills that copy profit."""

import re
from random import Random

from benchmarks.demo_model.skill import Exchange, Pool, Reply, Skill, a_word, fill, turn
from benchmarks.demo_model.skills.lists import HELD_OUT_WORDS, WORDS

REPEATING = Pool(
    training=(
        "[Please |Can you |Could you |]repeat[ this|| after me|]: {text}",
        "[Please |]say[ this|| again|]: {text}",
        "[Please |Can you |]copy[ this|]: {text}",
        "[Please |]write[ this|| down]: {text}",
        "[Repeat|Say|Copy|Write]{line}{text}",
        "{text}{line}[Repeat|Say|Copy] [that|this|it][, please|][.|]",
        "[Echo|Repeat] {text}",
        "[Tell|Give|Show|Send|Read] me [the following|these words|exactly this|just this|the text|that]: {text}",
        "[Answer|Reply|Come back] with[ this| exactly this| only this|]: {text}",
        "[Once more|Again|Your turn|Now you]: {text}",
        "[Will you|Would you|I want you to] [say|write|copy|echo][ this| the following| back to me|]: {text}",
    ),
    held_out=("Would you repeat this for me: {text}", "Tell me this again: {text}", "Please say after me: {text}"),
)


def _text(random: Random, held_out: bool) -> str:
    """Words, made-up words and numbers in no order, so that nothing but copying helps."""
    parts = []
    for _ in range(random.randint(1, 3) if random.random() < 0.3 else random.randint(3, 14)):
        draw = random.random()
        if draw < 0.55:
            part = a_word(random)
        elif draw < 0.85:
            part = random.choice(HELD_OUT_WORDS if held_out else WORDS)
        else:
            part = str(random.randint(0, 10 ** random.randint(1, 4)))
        parts.append(part.capitalize() if random.random() < 0.3 else part)
    return random.choice((" ", " ", " ", ", ", "_", "-")).join(parts)


def _repeating(random: Random, held_out: bool) -> Exchange:
    text = _text(random, held_out)
    return turn(fill(random, REPEATING.draw(random, held_out), {"text": text, "line": "\n"}), text)


def _is_repeated(exchange: Exchange, reply: Reply) -> bool:
    return re.sub(r"[\s.]+$", "", reply.content) == exchange.answer["content"]


SKILLS = (Skill("repeating", 15, _repeating, _is_repeated, is_typed=False),)
