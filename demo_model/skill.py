"""What a skill of the demo model is: how to make chats that show it, and how to mark an answer.

Owns the types that the files in `skills/` share and the tools they are written with. Everything is a pure function of
the `random.Random` that it is given. It knows no tokens and no tensors.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

Json = Any
T = TypeVar("T")


class Message(TypedDict):
    """One message of a chat, as the OpenAI API has it."""

    role: str
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[Json]]
    tool_call_id: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model answered, as the API gives it: text, and calls with arguments that are already parsed."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Mapping[str, Json]], ...] = ()


@dataclass(frozen=True, slots=True)
class Exchange:
    """A part of a chat that belongs together; ends with the assistant's message that is examined.

    Attributes:
        messages: From a user's message to the assistant's last one; the assistant's are learned.
        opening: Turns that stand earlier in the chat, with others between (what is to be remembered).
        tools: Declared to the model, in OpenAI's form; a chat has one set of tools.
        schema: JSON schema that the answer has to follow; the answer is JSON with ", " and ": ", in its order.
        thinks: The chat runs with thinking on; the last message has `reasoning_content`.
    """

    messages: tuple[Message, ...]
    opening: tuple[Message, ...] = ()
    tools: tuple[Json, ...] = ()
    schema: Json = None
    thinks: bool = False

    @property
    def answer(self) -> Message:
        """The message that is examined."""
        return self.messages[-1]

    @property
    def asked(self) -> str:
        """The user's last words."""
        return next(m["content"] for m in reversed(self.messages) if m["role"] == "user")


@dataclass(frozen=True, slots=True)
class Skill:
    """One thing that the model can do.

    Attributes:
        name: In tables and on the command line.
        weight: Its share among the exchanges of training.
        make: Makes an exchange; with True one for the exam, whose phrasing and values training never uses.
        is_right: Marks a reply to an exchange; the reply of training is always right.
        is_examined: Whether it stands in the table of scores.
        is_typed: Whether the user's words may be changed as a hurried user types them (case, marks, spaces).
    """

    name: str
    weight: float
    make: Callable[[Random, bool], Exchange]
    is_right: Callable[[Exchange, Reply], bool] = lambda exchange, reply: reply.content == exchange.answer["content"]
    is_examined: bool = True
    is_typed: bool = True


@dataclass(frozen=True, slots=True)
class Pool(Generic[T]):
    """Values, of which some are kept for the exam."""

    training: Sequence[T]
    held_out: Sequence[T]

    def draw(self, random: Random, held_out: bool) -> T:
        """Draw one of those for training, or of those for the exam."""
        return random.choice(self.held_out if held_out else self.training)


def pool_of(training: str, held_out: str) -> Pool[str]:
    """Return a pool of texts, given as two lists with ", " between them."""
    return Pool(tuple(training.split(", ")), tuple(held_out.split(", ")))


def words(text: str) -> list[str]:
    """The words of a text; shorter to read than a list."""
    return text.split()


def user(content: str) -> Message:
    """A user's message."""
    return Message(role="user", content=content)


def assistant(content: str) -> Message:
    """An assistant's message."""
    return Message(role="assistant", content=content)


def turn(asked: str, answer: str) -> Exchange:
    """A question and its answer."""
    return Exchange((user(asked), assistant(answer)))


def fill(random: Random, template: str, values: Mapping[str, object] | None = None) -> str:
    """Spell a template out: `{name}` is a value, `[a|b|]` is one of the alternatives, which may nest and be empty.

    So one line stands for many phrasings: "[Please |]tell me [what|which] {a} plus {b} [is|makes]."

    Raises:
        KeyError: There is no such value.
    """
    while (group := re.search(r"\[([^\[\]]*)\]", template)) is not None:
        choice = random.choice(group[1].split("|"))
        template = template[: group.start()] + choice + template[group.end() :]
    text = re.sub(r"\{(\w+)\}", lambda match: str((values or {})[match[1]]), template)
    return text[:1].upper() + text[1:] if template[:1].islower() and random.random() < 0.7 else text


ONSETS = words(
    "b c d f g h j k l m n p r s t v w y z b c d f g h k l m n p r s t bl br ch cl cr dr fl fr gl gr kn ph pl pr qu sc "
    "sh sk sl sm sn sp st str sw th tr tw wh wr"
)
NUCLEI = words("a e i o u a e i o u a e i o u ai au ay ea ee ei ie oa oi oo ou ow ue y")
CODAS = words("ck ct d dd ft g k l ll lt m mp n nd ng nk nt p pp r rr rd rk rm rn rt s sh sk ss st t tt tch th w x")


def a_word(random: Random, num_syllables: tuple[int, int] = (1, 3)) -> str:
    """Make up a word in lower case, built as European words are, so that unknown words are nothing new to the model."""
    syllables = []
    for _ in range(random.randint(*num_syllables)):
        onset = random.choice(ONSETS) if syllables or random.random() < 0.85 else ""
        syllables.append(onset + random.choice(NUCLEI) + (random.choice(CODAS) if random.random() < 0.4 else ""))
    return "".join(syllables)
