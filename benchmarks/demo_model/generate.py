"""Conversations for the demo model: what it is trained on, and the exam that shows what it learned.

Owns the answers, the mixture of skills, and the noise in what users type. Everything is a pure function of the
`random.Random` or the seed that it is given, so a run can be repeated and resumed. It knows no tokens and no tensors.

Skill      | a user says            | the model answers
-----------|------------------------|------------------------------------------------
addition   | Add 3 and 4            | 3 + 4 = 7.        (it copies first, then adds)
subtraction| What is 3 minus 4?     | 3 - 4 = -1.
counting   | Count to 3.            | 1, 2, 3.
greeting   | Good morning!          | Good morning! How can I help you?
identity   | Who are you?           | I am Weft's small demo model. ...
weft       | What is Weft?          | Weft is an OpenAI-compatible inference server ...
refusal    | Write a poem.          | I am only a small demo model and cannot do that.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple, TypedDict

from benchmarks.demo_model import phrasings
from benchmarks.demo_model.phrasings import Phrasings

IDENTITY_ANSWER = "I am Weft's small demo model. I can greet you, add and subtract one-digit numbers, and count."
WEFT_ANSWER = (
    "Weft is an OpenAI-compatible inference server for language models. It weaves prefill and decode into one step."
)
ABILITIES_ANSWER = "I can greet you, tell you what Weft is, add and subtract one-digit numbers, and count to twenty."
BEYOND_COUNT_ANSWER = "I can only count to twenty."
BEYOND_ANSWER = "I can only add and subtract one-digit numbers."
REFUSAL_ANSWER = "I am only a small demo model and cannot do that."
MAX_COUNT = 20


class Message(TypedDict):
    """One message of a chat, as the OpenAI API has it."""

    role: str
    content: str


class Turn(NamedTuple):
    """What the user says and what the model should answer."""

    user: str
    assistant: str


@dataclass(frozen=True, slots=True)
class Question:
    """One chat of an exam: it ends with a user message, and `answer` is what training would have it say."""

    skill: str
    messages: tuple[Message, ...]
    answer: str


def _word(random: Random) -> str:
    """Return a made-up word, so that unknown words are nothing new to the model."""
    syllables = [random.choice("bcdfghklmnprstvwz") + random.choice("aeiou") for _ in range(random.randint(1, 4))]
    word = "".join(syllables) + random.choice(("", "n", "s", "x", "rt"))
    return word.capitalize() if random.random() < 0.5 else word


def _fill(random: Random, phrasing: str, **values: object) -> str:
    """Put `values`, and random words for every other name in braces, into `phrasing`."""
    makers: dict[str, Callable[[], object]] = {
        "name": lambda: random.choice(phrasings.NAMES),
        "place": lambda: random.choice(phrasings.PLACES),
        "thing": lambda: random.choice(phrasings.THINGS) if random.random() < 0.8 else _word(random),
        "things": lambda: random.choice(phrasings.PLURALS),
        "word": lambda: _word(random),
    }
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1]) or makers[match[1]]()), phrasing)


def _addition(random: Random, phrasing: str) -> Turn:
    a, b = random.randint(0, 9), random.randint(0, 9)
    return Turn(_fill(random, phrasing, a=str(a), b=str(b)), f"{a} + {b} = {a + b}.")


def _subtraction(random: Random, phrasing: str) -> Turn:
    a, b = random.randint(0, 9), random.randint(0, 9)
    return Turn(_fill(random, phrasing, a=str(a), b=str(b)), f"{a} - {b} = {a - b}.")


def _counting(random: Random, phrasing: str) -> Turn:
    n = random.randint(2, MAX_COUNT)
    return Turn(_fill(random, phrasing, n=n), ", ".join(map(str, range(1, n + 1))) + ".")


def _beyond_counting(random: Random, phrasing: str) -> Turn:
    n = random.randint(MAX_COUNT + 1, 10 ** random.randint(2, 4))
    return Turn(_fill(random, phrasing, n=n), BEYOND_COUNT_ANSWER)


def _greeting(random: Random, phrasing: str) -> Turn:
    part_of_day = re.search(r"good (morning|afternoon|evening)", phrasing, re.IGNORECASE)
    if re.search(r"how are you|how is it going|do you feel", phrasing, re.IGNORECASE):
        answer = "I am fine, thank you! How can I help you?"
    elif part_of_day:
        answer = f"{part_of_day[0].capitalize()}! How can I help you?"
    else:
        answer = "Hello! How can I help you?"
    return Turn(_fill(random, phrasing), answer)


def _beyond_sums(random: Random, phrasing: str) -> Turn:
    """Multiply or divide any numbers, or add and subtract when one of them has several digits."""
    operator = random.choice(("+", "-", "plus", "minus", "*", "/", "times", "divided by"))
    is_sum = "{op}" in phrasing and operator in ("+", "-", "plus", "minus")
    first = random.randint(10, 10 ** random.randint(2, 4) - 1) if is_sum else random.randint(0, 20)
    a, b = random.sample((first, random.randint(0, random.choice((9, 99)))), 2)
    return Turn(_fill(random, phrasing, a=str(a), b=str(b), op=operator), BEYOND_ANSWER)


def _always(answer: str) -> Callable[[Random, str], Turn]:
    return lambda random, phrasing: Turn(_fill(random, phrasing), answer)


@dataclass(frozen=True, slots=True)
class Skill:
    """How to make one kind of turn, and its weight among the turns of training."""

    make: Callable[[Random, str], Turn]
    phrasings: Phrasings
    weight: int
    is_wrapped: bool = False


SKILLS: dict[str, Skill] = {
    "addition": Skill(_addition, phrasings.ADDITION, 40, is_wrapped=True),
    "subtraction": Skill(_subtraction, phrasings.SUBTRACTION, 15, is_wrapped=True),
    "counting": Skill(_counting, phrasings.COUNTING, 7, is_wrapped=True),
    "greeting": Skill(_greeting, phrasings.GREETING, 12),
    "identity": Skill(_always(IDENTITY_ANSWER), phrasings.IDENTITY, 5, is_wrapped=True),
    "weft": Skill(_always(WEFT_ANSWER), phrasings.WEFT, 5, is_wrapped=True),
    "refusal": Skill(_always(REFUSAL_ANSWER), phrasings.REFUSAL, 12, is_wrapped=True),
    "abilities": Skill(_always(ABILITIES_ANSWER), Phrasings(phrasings.ABILITIES, ()), 2),
    "thanks": Skill(_always("You are welcome!"), Phrasings(phrasings.THANKS, ()), 2),
    "farewell": Skill(_always("Goodbye! Have a nice day."), Phrasings(phrasings.FAREWELL, ()), 2),
    "beyond sums": Skill(_beyond_sums, Phrasings(phrasings.BEYOND_ARITHMETIC, ()), 4, is_wrapped=True),
    "beyond counting": Skill(_beyond_counting, Phrasings(phrasings.COUNTING.training, ()), 1, is_wrapped=True),
}
EXAMINED_SKILLS = tuple(name for name, skill in SKILLS.items() if skill.phrasings.held_out)
_SKILL_WEIGHTS = [skill.weight for skill in SKILLS.values()]


def typed(random: Random, text: str) -> str:
    """Return `text` as a hurried user may type it: other case, no final mark, no spaces round signs, spaces after."""
    if random.random() < 0.2:
        text = text.lower() if random.random() < 0.7 else text.upper()
    if random.random() < 0.2:
        text = text.rstrip("?!.") or text
    if random.random() < 0.2:
        text = re.sub(r"(?<=\d) ([-+*/=]) ?", r"\1", text)
    if random.random() < 0.15:
        text += random.choice((" ", "  ", "\n", " \n"))
    return text


def training_turn(random: Random) -> Turn:
    """Return one turn of the training mixture."""
    skill = random.choices(list(SKILLS.values()), _SKILL_WEIGHTS)[0]
    turn = skill.make(random, random.choice(skill.phrasings.training))
    user = turn.user
    if skill.is_wrapped and random.random() < 0.1:
        bare = user.rstrip(".?! ")
        user = bare + random.choice(phrasings.CLOSERS) + user[len(bare) :]
    if skill.is_wrapped and random.random() < 0.15:
        user = random.choice(phrasings.OPENERS) + (user[0].lower() + user[1:] if random.random() < 0.7 else user)
    return Turn(typed(random, user), turn.assistant)


def _unrelated_text(random: Random, num_words: int) -> str:
    """Return `num_words` words without sense, so that a long system message neither helps nor hurts."""
    lists = (phrasings.THINGS, phrasings.PLURALS, phrasings.NAMES, phrasings.PLACES)
    words: list[str] = []
    for _ in range(num_words):
        draw = random.random()
        if draw < 0.5:
            word = random.choice(random.choice(lists))
        else:
            word = _word(random) if draw < 0.9 else str(random.randint(0, 99))
        words.append(word + random.choice((" ", " ", " ", " ", " ", ", ", ". ", ".\n")))
    return "".join(words).rstrip()


def _system_messages(random: Random, max_num_words: int) -> list[Message]:
    draw = random.random()
    if draw < 0.4:
        return []
    if draw < 0.5 or (max_num_words > 100 and draw < 0.9):
        return [Message(role="system", content=_unrelated_text(random, random.randint(1, max_num_words)))]
    if draw < 0.8:
        prompt = random.choice(phrasings.SYSTEM_PROMPTS)
    else:
        beginnings = random.choices(phrasings.SYSTEM_PROMPT_BEGINNINGS, k=random.randint(1, 6))
        prompt = " ".join(_fill(random, beginning) for beginning in beginnings)
    return [Message(role="system", content=prompt)]


def conversation(random: Random, num_turns: int, max_num_system_words: int = 40) -> list[Message]:
    """Return a chat of `num_turns` turns (>= 0) to train on, with or without a system message."""
    messages = _system_messages(random, max_num_system_words)
    for turn in (training_turn(random) for _ in range(num_turns)):
        messages.append(Message(role="user", content=turn.user))
        messages.append(Message(role="assistant", content=turn.assistant))
    return messages


def plain_text(random: Random) -> str:
    """Return text without a chat around it: a known sentence, a count, or a sum."""
    draw = random.random()
    if draw < 0.4:
        return random.choice(phrasings.PLAIN_TEXTS)
    turn = _counting(random, "") if draw < 0.6 else random.choice((_addition, _subtraction))(random, "")
    return turn.assistant


def exam(skill: str, number: int, seed: int = 0) -> list[Question]:
    """Return `number` chats that examine `skill`, phrased in ways that training never uses.

    The held-out phrasings take turns. Half the chats have a system message, a third have earlier turns, and what the
    user types is as careless as in training.

    Raises:
        KeyError: `skill` is not one of `EXAMINED_SKILLS`.
    """
    random = Random(f"exam {skill} {seed}")
    made_by, held_out = SKILLS[skill].make, SKILLS[skill].phrasings.held_out
    questions: list[Question] = []
    for index in range(number):
        turn = made_by(random, held_out[index % len(held_out)])
        num_earlier_turns = random.choice((0, 0, 0, 0, 1, 3))
        messages = conversation(random, num_earlier_turns)
        messages.append(Message(role="user", content=typed(random, turn.user)))
        questions.append(Question(skill, tuple(messages), turn.assistant))
    return questions


def is_right(question: Question, answer: str) -> bool:
    """Say whether `answer` shows the skill: the right last number or list, a greeting, or the facts asked for."""
    numbers = re.findall(r"-?\d+", answer)
    if question.skill in ("addition", "subtraction"):
        return numbers[-1:] == re.findall(r"-?\d+", question.answer)[-1:]
    if question.skill == "counting":
        return numbers == re.findall(r"\d+", question.answer)
    needed = {
        "greeting": r"^(hello|hi|good (day|morning|afternoon|evening)|i am fine)\b",
        "identity": r"weft's small demo model",
        "weft": r"weft is an? .*server",
        "refusal": r"cannot do that",
    }
    return re.search(needed[question.skill], answer, re.IGNORECASE) is not None
