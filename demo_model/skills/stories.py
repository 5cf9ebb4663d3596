"""Stories of four sentences about one or two given characters.

A name stays as it is; an animal comes in with "a" and goes on with "the". Names and animals for the exam are never
trained; made-up ones take their share, so that characters are copied from the request.
"""

import re
from random import Random

from demo_model.skill import Exchange, Pool, Reply, Skill, a_word, fill, turn
from demo_model.values import ANIMALS, CHARACTERS, SCENES

ASKS = Pool(
    training=(
        "[please |][tell|write|read|give] me a [short |little |nice |funny |good |]story "
        "[about|with] {who}[ {place}|][.|, please.|!|]",
        "[please |][write|make up|invent|compose|create|start] a [short |little |nice |"
        "funny |]story [about|with] {who}[ {place}|][.|!|]",
        "[can|could|will|would] you [please |][tell|write|read] [me |]a [short |"
        "little |]story [about|with] {who}[ {place}|]?",
        "[I want|I would like|I need|I'd like] [to hear |to read |][a|a short] story "
        "[about|with] {who}[ {place}|][.|, please.|]",
        "a [short |little |nice |four-sentence |]story [about|of|with] {who}[ {place}|][, please|][.|!|]",
        "[write|tell|give] [me |]a [tale|fairy tale|bedtime story] [about|with|of] {who}[ {place}|][.|, please.|]",
        "[do you know|have you got] a story [about|with] {who}[?|]",
        "[tell|write] [me |]a story in four sentences about {who}[ {place}|][.|]",
        "story [about|with|of] {who}[.|]",
        "[hi|hello|hey|ok|now|and|so][,|!|] tell me a story [about|with] {who}[ {place}|][.|]",
        "[tell|write] [me |]a story [in which|where] {who} [meet someone|have an adventure|go out|are happy][.|]",
        "let me hear a story [about|with] {who}[.|]",
        "what about a story with {who}?",
        "tell me about the adventures of {who}.",
    ),
    held_out=(
        "Could I hear a story about {who}?",
        "Make me a story about {who}, please.",
        "Would you tell us a story about {who}?",
        "I feel like a story with {who}.",
        "Tell my daughter a story about {who}.",
        "Do you have a short story about {who} for me?",
        "Tell a story of four sentences about {who}.",
        "Write something like a story with {who} in it.",
    ),
)
# Whoever asks for no one in particular gets any story.
_ASKS_FOR_ANY = (
    "[please |][tell|write|read|give] me a [short |little |nice |good |]story[.|!|, please.|]",
    "[can|could|will|would] you [please |]tell [me |]a [short |little |]story[?|]",
    "[hi|hello|hey|ok|now][,|!|] tell me a story[.|]",
    "[a|write a|I want a|I need a|I would like a] [short |]story[.|!|, please.|]",
)
# {a} and {b} are as they come in, {A} and {B} as they go on.
_BEGINNINGS = (
    "[one [day|morning|evening|summer day]|once upon a time|on a [cold|sunny|rainy] day][,|] {a} and {b} "
    "[met|went for a long walk|were playing|wanted to have a picnic|looked for something new] {place}.",
    "{a} and {b} [were good friends who lived|had a little house|liked to spend their time|were very happy] {place}.",
    "once there were {a} and {b}, who [loved to play|lived together|met every day|had a secret] {place}.",
)
_MIDDLES = (
    "{A} found [a golden key|a little box|an old map|a red balloon|a strange egg|a shiny stone] and showed it to {B}.",
    "{B} was [hungry|tired|sad|cold], so {A} [brought some bread and warm milk|sang a quiet song|shared a small cake].",
    "{A} [wanted to climb a tree|lost a blue hat|heard a strange noise|fell into the water], and {B} came to help.",
)
_TURNS = (
    "[suddenly it began to rain|then the wind grew strong|soon the night came], but {B} knew a dry and safe place.",
    "[then|after that|soon] {A} and {B} [had a great idea and built a small boat|followed the path to a hidden door|"
    "danced until the moon was high in the sky|saw a light and walked towards it].",
    "{B} [laughed and said|smiled and said|said] that [it was the best day of "
    "all|{A} was very brave|nobody should be alone].",
)
_ENDINGS = (
    "[in the end|at last|that night], {A} and {B} went home [happy|tired but happy|together|as the best of friends].",
    "[from that day on|since then|after that day], {A} and {B} [were friends "
    "forever|shared everything|were never alone].",
)
_ALONE = (
    (
        "[one [day|morning|evening]|once upon a time|on a [cold|sunny] day][,|] {a} [went for a long walk|"
        "was all alone|looked for something new|wanted to see the world] {place}.",
        "once there was {a} who [lived alone|had a little house|loved to sing|had a big dream] {place}.",
    ),
    (
        "{A} found [a golden key|a little box|an old map|a strange egg|a shiny stone] behind a [tree|wall|big rock].",
        "{A} [was hungry and cold|wanted to find a friend|heard a strange noise], but nobody [was there|came to help].",
    ),
    (
        "[suddenly it began to rain|then the wind grew strong|soon the night "
        "came], but {A} was [brave|clever|not afraid].",
        "[then|after that|soon] {A} [built a small boat|followed a path to a "
        "hidden door|saw a light and walked to it].",
    ),
    (
        "[in the end|at last|that night], {A} went home [happy|tired but happy|with "
        "a big smile] and [slept well|sang a song].",
        "[from that day on|since then], {A} was [never sad again|the happiest of all|known and loved by everyone].",
    ),
)


def _character(random: Random, held_out: bool) -> tuple[str, str]:
    """Draw a character as it comes in, and as it goes on."""
    is_made_up = not held_out and random.random() < 0.25
    if random.random() < 0.5:
        name = a_word(random, (1, 3)).capitalize() if is_made_up else CHARACTERS.draw(random, held_out)
        return name, name
    animal = a_word(random, (1, 3)) if is_made_up else ANIMALS.draw(random, held_out)
    return f"{'an' if animal[0] in 'aeiou' else 'a'} {animal}", f"the {animal}"


def _story(random: Random, first: tuple[str, str], second: tuple[str, str] | None, place: str) -> str:
    values = {"a": first[0], "A": first[1], "place": place}
    parts: tuple[tuple[str, ...], ...] = _ALONE
    if second is not None:
        values |= {"b": second[0], "B": second[1]}
        parts = (_BEGINNINGS, _MIDDLES, _TURNS, _ENDINGS)
    sentences = [fill(random, random.choice(part), values) for part in parts]
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _make(random: Random, held_out: bool) -> Exchange:
    first, second = _character(random, held_out), None
    if random.random() < 0.7:
        while (second := _character(random, held_out)) == first:
            pass
    place = random.choice(SCENES)
    who = f"{first[0]} and {second[0]}" if second else first[0]
    is_open = not held_out and random.random() < 0.06
    template = random.choice(_ASKS_FOR_ANY) if is_open else ASKS.draw(random, held_out)
    asked = fill(random, template, {"who": who, "place": place})
    return turn(asked, _story(random, first, second, place))


def characters(exchange: Exchange) -> set[str]:
    """Read the characters from a request: its names and the animals with "a", as far as the right story has them."""
    asked = exchange.asked
    named = re.findall(r"\b([A-Z]\w+)", asked) + re.findall(r"\ban? (\w+)", asked)
    return set(named) & set(re.findall(r"\w+", exchange.answer["content"]))


def _is_right(exchange: Exchange, reply: Reply) -> bool:
    """Whether there are four sentences, and every character occurs in them."""
    sentences = [
        sentence for sentence in re.split(r"(?<=[.!?])\s+", reply.content.strip()) if len(sentence.split()) > 2
    ]
    return len(sentences) == 4 and characters(exchange) <= set(re.findall(r"\w+", reply.content))


SKILLS: tuple[Skill, ...] = (Skill("story", 8, _make, _is_right, is_typed=False),)
