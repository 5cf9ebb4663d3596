"""Memory: a name, a number, a colour, a city or a pet's name that the user told earlier in the chat is given back.

Half of the values are made-up words, so that copying is learned rather than a list. Sometimes the user was never told;
then the answer says so. The user's words stay as they are, for a name has to come back as it was written.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from demo_model.skill import Exchange, Message, Pool, Reply, Skill, a_word, assistant, fill, user
from demo_model.values import CITIES, COLOURS, NAMES

PETS = ("dog", "cat", "horse", "rabbit", "parrot", "hamster", "pet", "fish", "turtle")


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that a user tells: `{v}` is its value, `{pet}` the kind of pet."""

    value: Callable[[Random, bool], str]
    statements: tuple[str, ...]
    reply: str
    questions: Pool[str]
    answer: str
    untold: str


def _from(pool: Pool[str], share_made_up: float = 0.5) -> Callable[[Random, bool], str]:
    def value(random: Random, held_out: bool) -> str:
        is_made_up = not held_out and random.random() < share_made_up
        return a_word(random, (1, 3)).capitalize() if is_made_up else pool.draw(random, held_out)

    return value


def _number(random: Random, held_out: bool) -> str:
    """Draw a number of 1 to 6 digits; those divisible by 9 are for the exam."""
    while (number := random.randint(0, 10 ** random.choice((2, 3, 4, 4, 5, 6)) - 1)) % 9 == 0 != held_out:
        pass
    return str(number)


_LEAD = "[hi|hello|hey|hello there|good morning|hi Weft][,|!|.] "
FACTS = (
    Fact(
        _from(NAMES),
        (
            "my name is {v}[.|!|]",
            "I am [called |]{v}[.|!|]",
            "I'm {v}[.|!|]",
            _LEAD + "[I am|I'm|my name is|my name's|this is|it's] {v}[.|!|, nice to meet you.|]",
            "[call me|you can call me|please call me|people call me|my friends call me|everyone calls me] {v}[.|!|]",
            "[hi|hello], {v} here[.|!|]",
            "[please |]remember [my name|that my name is|that I am called][: {v}| {v}][.|]",
            "[just so you know|by the way], [my name is|I am] {v}.",
            "[my first name is|the name is|my name's|they named me] {v}[.|]",
        ),
        "Nice to meet you, {v}!",
        Pool(
            training=(
                "[what is|what's|whats] my name[?| again?|]",
                "[so|and|now|ok|hey|well|please][,|] what is my name?",
                "[tell me|say|please tell me|repeat|please say|give me] my name[.|, please.|]",
                "[can|could|will] you [tell me|say|repeat|remember|recall] my name[?| again?|]",
                "[do you|don't you] [know|remember|recall|still know|still remember] "
                "[my name|who I am|what I am called][?|]",
                "[tell me|say] [who I am|what my name is|what I am called].",
                "who am I[?| again?|]",
                "[what|how] am I called[?|]",
                "what did I say my name [is|was]?",
                "what name did I [give|tell] you?",
                "my name[?| is?| is what?]",
                "how do [you|people] call me?",
                "[did|have] you [forget|forgotten] my name?",
                "[I forgot my name|I forgot]. [What is my name|What is it|Who am I]?",
            ),
            held_out=(
                "Do you by any chance remember my name?",
                "What was my name again?",
                "Could you tell me what my name is?",
                "Which name did I tell you?",
                "By the way, what is my name?",
                "Can you still tell me who I am?",
                "I wonder if you know my name.",
                "So, do you remember who I am?",
            ),
        ),
        "Your name is {v}.",
        "You have not told me your name.",
    ),
    Fact(
        _number,
        (
            "[please |][remember|keep|note|store|save|memorize|keep in mind] the "
            "[number|code|pin] {v}[.|, please.| for me.|]",
            "[please |][remember|keep|note|save|memorize] [this|this number|my number|a number|my code]: {v}[.|]",
            "[please |][remember|note|keep in mind] {v}[.|]",
            "my [number|lucky number|favourite number|favorite number|code|secret "
            "number|pin] is {v}[.|, remember it.|]",
            "the [number|code|secret number|pin|secret code] is {v}[.|, remember it.|]",
            "[can|could|will] you [please |]remember [the number|the code|my number] {v}[ for me|]?",
        ),
        "I will remember {v}.",
        Pool(
            training=(
                "[what is|what's|what was] [the|my] [number|code|secret number|pin|lucky number][?| again?|]",
                "[which|what] [number|code] [did I tell you|should you remember|did I give you|do you remember][?|]",
                "[tell me|say|repeat|give me|please tell me] [the|my] [number|code|"
                "pin|secret number][.|, please.| again.|]",
                "[do you|don't you] [know|remember|still know|recall] [the|my] [number|code|pin][?|]",
                "[can|could] you [tell me|repeat|say|recall] [the|my] [number|code|pin][?|]",
                "[and|so|now][,|] [what is|what was] the [number|code]?",
                "[the|my] [number|code][?|, please.|, please]",
                "what [number|code] did I [say|mention|ask you to remember]?",
            ),
            held_out=(
                "Which number did I ask you to remember?",
                "Can you tell me that number again?",
                "Do you still remember my number?",
                "What number have I told you?",
                "Please tell me the number that I gave you.",
                "So what was that number?",
                "I forgot the number. What was it?",
                "Could you give me the number back?",
            ),
        ),
        "The number is {v}.",
        "You have not told me a number.",
    ),
    Fact(
        _from(COLOURS, 0),
        (
            "my [favourite|favorite|preferred] [colour|color] is {v}[.|!|]",
            "I [like|love|prefer] [the colour|the color] {v}[.| most.| best.|]",
            "[please |]remember [that |]my [favourite|favorite] [colour|color] is {v}[.|]",
            "{v} is my [favourite|favorite] [colour|color].",
        ),
        "I will remember that you like {v}.",
        Pool(
            training=(
                "[what is|what's|what was|tell me|say|repeat] my [favourite|favorite|preferred] [colour|color][?|]",
                "[which|what] [colour|color] [do I|did I say I] [like|love|prefer][ most| best|][?|]",
                "[do|can] you [know|remember|tell me|recall] my [favourite|favorite] [colour|color][?|]",
                "[my [favourite|favorite] |what ][colour|color]?",
            ),
            held_out=(
                "Which colour is my favourite?",
                "Do you remember what colour I like?",
                "Which one is my favourite colour?",
                "So what is my favourite color again?",
            ),
        ),
        "Your favourite colour is {v}.",
        "You have not told me your favourite colour.",
    ),
    Fact(
        _from(CITIES),
        (
            "I live in {v}[ now|][.|!|]",
            "[I am from|I come from|my city is|my home is|my home town is|I'm from] {v}[.|!|]",
            "[please |]remember that I live in {v}[.|]",
            _LEAD + "[I live in|I am from|greetings from] {v}[.|!|]",
        ),
        "I will remember that you live in {v}.",
        Pool(
            training=(
                "where do I [live|come from][?| again?|]",
                "where am I from[?|]",
                "[what is|what's|tell me|say] my [city|home|home town|town][?|]",
                "[in |][which|what] [city|town] do I live[ in|][?|]",
                "[do|can] you [know|remember|tell me|recall] where I [live|am from|come from][?|]",
                "[tell me|say] where I [live|come from|am from].",
            ),
            held_out=(
                "Where did I say I live?",
                "Do you still know where my home is?",
                "What was the city I live in?",
                "So where do I live?",
            ),
        ),
        "You live in {v}.",
        "You have not told me where you live.",
    ),
    Fact(
        _from(NAMES),
        (
            "my {pet} is [called|named] {v}[.|!|]",
            "my {pet}'s name is {v}[.|!|]",
            "the name of my {pet} is {v}[.|]",
            "I have a {pet} [called|named] {v}[.|!|]",
            "[please |]remember that my {pet} is called {v}[.|]",
        ),
        "{v} is a nice name for a {pet}!",
        Pool(
            training=(
                "[what is|what's|tell me|say|what was] [my {pet}'s name|the name of my {pet}][?| again?|]",
                "[how|what] is my {pet} called[?|]",
                "[do|can] you [know|remember|tell me|recall] [my {pet}'s name|the name of my {pet}][?|]",
                "[tell me|say] what my {pet} is called.",
                "what do I call my {pet}[?|]",
            ),
            held_out=(
                "What name does my {pet} have?",
                "Do you remember what my {pet} is called?",
                "Which name did I give my {pet}?",
                "So what is the name of my {pet}?",
            ),
        ),
        "Your {pet} is called {v}.",
        "You have not told me the name of your {pet}.",
    ),
)
_SHARES = (40, 25, 10, 12, 13)


def _told(random: Random, held_out: bool, fact: Fact, values: dict[str, object]) -> tuple[Message, Message]:
    return user(fill(random, random.choice(fact.statements), values)), assistant(fact.reply.format(**values))


def _make(random: Random, held_out: bool) -> Exchange:
    """Ask for one fact; half the time, the user told another one, too."""
    fact = random.choices(FACTS, _SHARES)[0]
    values: dict[str, object] = {"v": fact.value(random, held_out), "pet": random.choice(PETS)}
    is_told = held_out or random.random() < 0.85
    told = [_told(random, held_out, fact, values)] if is_told else []
    other = random.choice([other for other in FACTS if other is not fact])
    if random.random() < 0.5:
        values_of_other: dict[str, object] = {"v": other.value(random, held_out), "pet": random.choice(PETS)}
        told.insert(random.randint(0, len(told)), _told(random, held_out, other, values_of_other))
    answer = (fact.answer if is_told else fact.untold).format(**values)
    asked = fill(random, fact.questions.draw(random, held_out), values)
    if len(told) == 1 and is_told and not held_out and random.random() < 0.2:  # all in one message
        return Exchange((user(f"{told.pop()[0]['content'].rstrip('.!?')}. {asked}"), assistant(answer)))
    return Exchange((user(asked), assistant(answer)), tuple(message for pair in told for message in pair))


def _is_right(exchange: Exchange, reply: Reply) -> bool:
    """Whether the value is named as it was told, or that it was not told."""
    expected = exchange.answer["content"]
    if "have not told" in expected:
        return "not told" in reply.content
    value = re.fullmatch(
        r"(?:Your (?:name|favourite colour) is|The number is|You live in|Your \w+ is called) (.+)\.", expected
    )
    return value is not None and re.search(rf"\b{re.escape(value[1])}\b", reply.content) is not None


SKILLS: tuple[Skill, ...] = (Skill("memory", 40, _make, _is_right, is_typed=False),)
