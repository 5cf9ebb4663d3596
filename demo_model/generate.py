"""Conversations for the demo model: what it is trained on, and the exam that shows what it learned.

Owns the mixture of skills, the way chats are put together, and the noise in what users type. Everything is a pure
function of the `random.Random` or the seed that it is given, so a run can be repeated and resumed. It knows no tokens
and no tensors. What the model can do is in `skills/`, one file for skills of a kind.
"""

import re
from dataclasses import dataclass, replace
from random import Random

from demo_model import values as subjects
from demo_model.skill import Exchange, Json, Message, Pool, Reply, Skill, a_word
from demo_model.skills import (
    greetings,
    json_answers,
    knowledge,
    letters,
    lists,
    memory,
    refusals,
    repeating,
    small_answers,
    stories,
    sums,
    tool_calls,
    tool_words,
    values,
)

SKILLS: dict[str, Skill] = {
    skill.name: skill
    for module in (
        greetings,
        knowledge,
        refusals,
        memory,
        stories,
        small_answers,
        sums,
        lists,
        letters,
        tool_calls,
        json_answers,
        repeating,
    )
    for skill in module.SKILLS
}
EXAMINED_SKILLS = tuple(name for name, skill in SKILLS.items() if skill.is_examined)

MAX_ANSWER_TOKENS = 160
"""More than any answer of an exam has."""

IDLE_THOUGHT = "I can answer this at once."
"""What a chat with thinking on has before an answer that needs none."""
_SHARE_OF_IDLE_THOUGHTS = 0.04

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are Weft's demo model.",
    "You are a friendly assistant.",
    "Answer in one sentence.",
    "Be concise.",
    "You are a calculator.",
    "You are a teacher who explains things simply.",
    "Today is Monday.",
    "Be polite and precise. Do not make things up.",
    "The user is new here. Be kind.",
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A chat to train on. With `thinks`, the last answer is thought through, or at least begins with a thought."""

    messages: tuple[Message, ...]
    tools: tuple[Json, ...] = ()
    thinks: bool = False


@dataclass(frozen=True, slots=True)
class Question:
    """One chat of an exam; it ends with the user's message, or with the result of a tool."""

    skill: str
    messages: tuple[Message, ...]
    exchange: Exchange

    def is_right(self, reply: Reply) -> bool:
        """Mark an answer."""
        return SKILLS[self.skill].is_right(self.exchange, reply)


def typed(random: Random, text: str) -> str:
    """Return `text` as a hurried user may type it: other case, no final mark, no spaces round signs, spaces after."""
    if random.random() < 0.15:
        text = text.lower()
    if random.random() < 0.15:
        text = text.rstrip("?!.") or text
    if random.random() < 0.2:
        text = re.sub(r"(?<=\d) ([-+*/=]) ?", r"\1", text)
    if random.random() < 0.08:
        text += random.choice((" ", "  ", "\n"))
    return text


def _draw(random: Random) -> tuple[Skill, Exchange]:
    skill = random.choices(list(SKILLS.values()), [skill.weight for skill in SKILLS.values()])[0]
    return skill, _hurried(random, skill, skill.make(random, False))


def _hurried(random: Random, skill: Skill, exchange: Exchange) -> Exchange:
    if not skill.is_typed or exchange.tools or exchange.schema or exchange.opening:
        return exchange
    first = exchange.messages[0]
    return replace(
        exchange, messages=(Message(role="user", content=typed(random, first["content"])), *exchange.messages[1:])
    )


def _unrelated_text(random: Random, num_words: int) -> str:
    """Return words without sense, so that a long system message neither helps nor hurts."""
    words = (a_word(random) if random.random() < 0.9 else str(random.randint(0, 99)) for _ in range(num_words))
    return "".join(word + random.choice((" ", " ", " ", ", ", ". ", ".\n")) for word in words).rstrip()


def _system_messages(random: Random) -> list[Message]:
    draw = random.random()
    if draw < 0.7:
        return []
    if draw < 0.74:
        return [Message(role="system", content=_unrelated_text(random, random.randint(1, 30)))]
    return [Message(role="system", content=random.choice(SYSTEM_PROMPTS))]


def conversation(random: Random, num_turns: int) -> Conversation:
    """Return a chat of `num_turns` exchanges (>= 1) to train on.

    What belongs together with tools or with thinking on is a chat of its own; what is to be remembered stands
    somewhere before the question, with other exchanges between.
    """
    messages: list[Message] = _system_messages(random)
    start, remembers = len(messages), False
    for _ in range(num_turns):
        skill, exchange = _draw(random)
        if exchange.tools or exchange.thinks:
            if len(messages) > start:
                continue
            return Conversation((*messages, *exchange.messages), exchange.tools, exchange.thinks)
        if skill.name == "memory":
            if remembers:  # two could contradict each other
                continue
            remembers = True
            turns = [index for index in range(start, len(messages) + 1, 2) if index >= len(messages) - 6]
            place = random.choice(turns)
            messages[place:place] = exchange.opening
        messages += exchange.messages
    if len(messages) == start:
        return conversation(random, num_turns)
    if random.random() < _SHARE_OF_IDLE_THOUGHTS:
        last = messages[-1]
        messages[-1] = Message(role="assistant", content=last["content"], reasoning_content=IDLE_THOUGHT)
        return Conversation(tuple(messages), thinks=True)
    return Conversation(tuple(messages))


def values_of_chats() -> frozenset[str]:
    """Return the words, in lower case, that chats are about: those which are drawn, and then copied or spelled."""
    pools = [pool for module in (subjects, values) for pool in vars(module).values() if isinstance(pool, Pool)]
    texts = [text for pool in (*pools, tool_words.VERBS, tool_words.NOUNS) for text in (*pool.training, *pool.held_out)]
    return frozenset(re.findall(r"[^\W\d_]+", " ".join((*texts, *lists.WORDS, *lists.HELD_OUT_WORDS)).lower()))


def plain_text(random: Random) -> str:
    """Return text without a chat around it: a sentence from an answer, or a sum."""
    if random.random() < 0.3:
        return sums.plain_sum(random)
    while True:
        answer = _draw(random)[1].answer["content"]
        if answer:
            return answer


def exam(skill: str, number: int, seed: int = 0) -> list[Question]:
    """Return `number` chats that examine `skill`, phrased in ways and with values that training never uses.

    A third have earlier turns, where the chat has no tools; what the user types is as careless as in training.

    Raises:
        KeyError: `skill` is not one of `EXAMINED_SKILLS`.
    """
    random = Random(f"exam {skill} {seed}")
    questions: list[Question] = []
    for _ in range(number):
        exchange = _hurried(random, SKILLS[skill], SKILLS[skill].make(random, True))
        messages: list[Message] = []
        if not exchange.tools and not exchange.thinks and random.random() < 0.33:
            messages = [m for m in _plain_chat(random, random.choice((1, 2))).messages if m["role"] != "system"]
        messages = [*exchange.opening, *messages] if exchange.opening else messages
        questions.append(Question(skill, (*messages, *exchange.messages[:-1]), exchange))
    return questions


def _plain_chat(random: Random, num_turns: int) -> Conversation:
    while True:
        chat = conversation(random, num_turns)
        if not chat.tools and not chat.thinks and not any("name" in m["content"].lower() for m in chat.messages):
            return chat
