"""Reversing words, spelled first, and writing them in capitals."""

from random import Random

from benchmarks.demo_model.skill import Exchange, Pool, Reply, Skill, a_word, fill, turn, words
from benchmarks.demo_model.skills.lists import HELD_OUT_WORDS, WORDS

MAX_LETTERS = 9
MORE_WORDS = words(
    "hello world weft token model cache server python computer reverse upper letter word prompt stream engine batch "
    "block thread loom weave data code test example sample banana kitten puppy friend family happy morning evening "
    "coffee winter spring love peace hope smile magic number animal planet rocket dragon castle pirate wizard robot "
    "secret simple strong little yellow purple orange black white brown quick lazy jumps over the and with from "
    "that"
)

_PLEASE = "[Please |Can you |Could you |Would you |]"
_WORD = "[|the word |the word |the text |this: ][{word}|'{word}'|\"{word}\"]"
REVERSING = Pool(
    training=(
        f"{_PLEASE}reverse {_WORD}[ for me|][?|.|]",
        f"{_PLEASE}[write|spell|say|print|give me|show me] {_WORD} "
        "[backwards|backward|in reverse|reversed|the other way round][?|.|]",
        f"[What is|What's] {_WORD} [backwards|reversed|spelled backwards|in reverse]?",
        f"{_PLEASE}[turn|flip] {_WORD} [around|round|over][?|.|]",
        "{word} [backwards|reversed|in reverse][?|]",
        "[Reverse|Backwards|Reversed]: {word}",
        f"How [do you|would you] [spell|write] {_WORD} backwards?",
        f"{_PLEASE}reverse the letters [of|in] {_WORD}[?|.|]",
    ),
    held_out=(
        "Could you write the word {word} backwards for me?",
        "Reverse this word: {word}",
        "What do you get when you reverse {word}?",
        "Spell '{word}' in reverse, please.",
        "I want the word {word} reversed.",
        "How does {word} look backwards?",
    ),
)
CAPITALS = Pool(
    training=(
        f"{_PLEASE}[write|spell|print|put|give me|show me] {_WORD} in "
        "[capitals|capital letters|upper case|uppercase|all caps|big letters][?|.|]",
        f"{_PLEASE}[convert|change|turn|make] {_WORD} [to|into] [upper case|uppercase|capitals|capital letters][?|.|]",
        f"{_PLEASE}[capitalize|upper-case|uppercase] {_WORD}[ for me|][?|.|]",
        f"[What is|What's] {_WORD} in [capitals|capital letters|upper case|uppercase]?",
        "{word} in [capitals|capital letters|upper case|uppercase][?|]",
        "[Uppercase|Upper case|Capitals|In capitals]: {word}",
        f"{_PLEASE}shout {_WORD}[?|.|!|]",
    ),
    held_out=(
        "Could you write the word {word} in upper case for me?",
        "Make this word uppercase: {word}",
        "I want the word {word} in capital letters.",
        "How does {word} look in capitals?",
        "Uppercase the word '{word}', please.",
        "Put all letters of {word} in capitals.",
    ),
)


def _word(random: Random, held_out: bool) -> str:
    if held_out:
        return random.choice([word for word in HELD_OUT_WORDS if len(word) <= MAX_LETTERS])
    while True:
        draw = random.random()
        word = random.choice(WORDS + MORE_WORDS) if draw < 0.5 else a_word(random)
        if draw > 0.95:
            word = "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(2, 6)))
        if 2 <= len(word) <= MAX_LETTERS and word not in HELD_OUT_WORDS:
            return word


def _reversing(random: Random, held_out: bool) -> Exchange:
    word = _word(random, held_out)
    asked = fill(random, REVERSING.draw(random, held_out), {"word": word})
    return turn(asked, f"Spelled {'-'.join(word)}, backwards {'-'.join(reversed(word))}: {word[::-1]}")


def _capitals(random: Random, held_out: bool) -> Exchange:
    word = _word(random, held_out)
    asked = fill(random, CAPITALS.draw(random, held_out), {"word": word})
    return turn(asked, word.upper())


def _ends_alike(exchange: Exchange, reply: Reply) -> bool:
    last = reply.content.split(":")[-1].strip(" .\"'")
    return last == exchange.answer["content"].split(":")[-1].strip()


SKILLS = (
    Skill("reversing", 50, _reversing, _ends_alike, is_typed=False),
    Skill("capitals", 35, _capitals, _ends_alike, is_typed=False),
)
