"""Saying again what the user said: the purest copying, from which the other skills that copy profit."""

import re
from random import Random

from demo_model.skill import Exchange, Pool, Reply, Skill, a_word, fill, turn
from demo_model.skills import plain_texts
from demo_model.skills.lists import HELD_OUT_WORDS, WORDS

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
        "[Can|Could|Will|Would] you [please |now |][say|write|repeat|copy|type|spell out|read out] {quoted}[?|]",
        "[Please |Now |][say|write|repeat|copy|type|echo|print|read] {quoted}[.|!|, please.| please|]",
        "[Say|Write|Repeat|Copy] [exactly |only |just |word for word |][this|what I say|my words|the next line]"
        "[:|] {quoted}",
        "[I say|My text is|The text is|The words are|Here it comes]: {text}. [You say|Now you|Repeat it|Say it].",
        "[My turn|I go first|I say]: {text}[. Your turn.|, and you?|. You, too.|]",
        "[I would like|I want|I'd love] [you to say|to hear|to read|to hear you say][:|] {quoted}",
        "[Let me hear|Let me see|Show me|Let us hear][ the words| the sentence| this|][:|] {quoted}",
        "[Repeat|Speak|Say] [after|with|like] me[:|,] {text}",
        "[Quote|Parrot|Mirror|Return|Output|Type|Print][ this| me| the words|][:|] {quoted}",
        "{quoted}[. |, |: |, please ][repeat|say|copy|write] [that|this|it] [again|once more|back|word for word][.|]",
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


def _quoted(random: Random, text: str) -> str:
    """The text as it is, or in quotes."""
    before, after = random.choice(('""', '""', '""', "''", "“”", ("", "")))
    return f"{before}{text}{after}"


def _repeating(random: Random, held_out: bool) -> Exchange:
    if held_out:
        text = _text(random, held_out)
        return turn(fill(random, REPEATING.draw(random, held_out), {"text": text, "line": "\n"}), text)
    draw = random.random()
    if draw < 0.4:
        text = _text(random, held_out)
    else:
        text = plain_texts.phrase(random) if draw < 0.55 else plain_texts.sentence(random)
        if draw > 0.92:
            text = f"{text}, {plain_texts.sentence(random)}"
    given = {"text": text if random.random() < 0.8 else _quoted(random, text), "quoted": _quoted(random, text)}
    return turn(fill(random, REPEATING.draw(random, held_out), given | {"line": "\n"}), text)


def _is_repeated(exchange: Exchange, reply: Reply) -> bool:
    return re.sub(r"[\s.]+$", "", reply.content) == exchange.answer["content"]


SKILLS = (Skill("repeating", 25, _repeating, _is_repeated, is_typed=False),)
