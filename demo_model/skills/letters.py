"""Reversing words, spelled first, and writing them in capitals."""

from random import Random

from demo_model.skill import Exchange, Pool, Reply, Skill, a_word, fill, turn, words
from demo_model.skills.lists import HELD_OUT_WORDS, WORDS

MAX_LETTERS = 9
MORE_WORDS = words(
    "hello world weft token model cache server python computer reverse upper letter word prompt stream engine batch "
    "block thread loom weave data code test example sample banana kitten puppy friend family happy morning evening "
    "coffee winter spring love peace hope smile magic number animal planet rocket dragon castle pirate wizard robot "
    "secret simple strong little yellow purple orange black white brown quick lazy jumps over the and with from "
    "that"
)

# A word that is one token can be spelled only by who has seen its letters: these are in the tokenizer as they are.
COMMON_WORDS = words(
    """
about add added address after afternoon again age aged alarm all alone always am an answer answers are
arguments around arrange as ascending ask assistant at attention au available away backward backwards balance
balls batching be before began beginning begins behind best better between big blocks body born borrow bought
brand brave briefly brought built but buyer by bye caching cakes calculate call called came can cannot capital
capitals caps cards carry case celsius chat checks climb club coins color colour com come comes company
complete compute computed concert concise convert copy cost costs could count country cups currency current
customer czech danced date decode decoding decrease decreased degrees delay demo describe details did different
distance do does dollars don down draft draws dry duration each earlier eat echo eggs else email emoji end
enjoys equal equals eur euros evaluate event every everyone examples explain explains extract facts false
favorite favourite fee fell fewest fields fill fills film find fine first fixed flip followed following for
forever forgot form formula found four friendly friends gather generated german get give given gives go goes
going golden good goodbye great greedy greek grew grows guess guests had happens has have he hear heard help
helpful here hey hi hidden hobbies home host hosted how humidity hungry id idea if in increase increased
inference integer integers interests into invited is it item japanese job join just keep keeps keys kg kilos
kind knew know korean label language large largest last later laughed learn least leave left less let lets
letters level like likely likes list live lived lives local location long longest look looked lookup lose loved
loves lower made mail make maker makes many marbles married me mean means meet member message met mind minus
minutes models monday more most mountains moved much mul multiply must my named names near need needed network
neural never new next nice no nobody noise none not now numbers nuts object of ok on once one ones only or
order ordered org organizer other our out owner paged parameter park parse part path pens people per percent
person pet phase phone piece pieces pin place platform please plums plus polite precise predicted predicts
prefer preferred prefers prefill prefix price processes produces product public put quantity query raise random
rating reach reached reads recall recipient reduce reduced relevance remain remains remember remind reminder
repeat reply request requests result return reuses reversed right round run russian sad safe said same sampling
sang saw say schema score search seats sells send sends sentence sentences set sets several shared she shiny
short should shout show showed simply since single size slept small smallest smiled so sold solve some somebody
something sort sorted spanish speed spell spelled split stamps starts state status step still stock stones
stores stories story strange streaming string subject subtract such suddenly sum symbol system tagged tags take
takes talk talks target teacher tell tens text than thank them then there these they thing things this ticker
tickets time timer times timezone tired title to today together tokens told tool tools top topic total toys
translate true try turn turned two under until up upon uppercase us use user uses value values varied very wait
waits wake walk walked want wanted was way wears weather weaves web weighs weight weighted well went were what
when where which while who whole whose why will wish words work works would write writes years you your
yourself
"""
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
        f"How [is|would] {_WORD} [spelled|written|read|be|go|sound|turn out] [backwards|in reverse|reversed][?|]",
        f"What [does|would|will] {_WORD} [become|give|make|be|say|turn into] [backwards|in reverse|when reversed][?|]",
        f"[I need|I would like|I'd like|We want|Let me see|Let me have] {_WORD} [backwards|in reverse][.|, please.|]",
        f"[Take|Look at|Read|See|Here is|I have] {_WORD}[. Reverse it| and reverse it|. Write it backwards| and spell "
        "it backwards|. What is it backwards| from right to left| from the end][.|?|]",
        f"[If|When] you [reverse|turn round|flip] {_WORD}, what [is it|comes out|does it say]?",
        f"{_PLEASE}reverse [the following|my|the next|that|one] word: [{{word}}|'{{word}}']",
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
        f"How [is|would|do I write|do you write|does one write] {_WORD} [written |spelled |]in "
        "[capitals|capital letters|upper case|uppercase][?|]",
        f"What [does|would|will] {_WORD} [become|give|make|be|turn into] in [capitals|capital letters|upper case][?|]",
        f"[I need|I would like|I'd like|We want|Let me see|Let me have] {_WORD} in [capitals|upper case][.|, please.|]",
        f"[Take|Look at|Read|See|Here is|I have] {_WORD}[. Write it| and write it|. Put it| and put it] in "
        "[capitals|capital letters|upper case][.|, please.|]",
        f"{_PLEASE}[write|set|raise|change] [each letter|every letter|the letters] of {_WORD} "
        "[in|to] [capitals|upper case][.|]",
        f"{_PLEASE}[capitalize|uppercase] [the following|my|the next|that|one] word: [{{word}}|'{{word}}']",
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

_KNOWN_WORDS = WORDS + MORE_WORDS + COMMON_WORDS


def _word(random: Random, held_out: bool) -> str:
    if held_out:
        return random.choice([word for word in HELD_OUT_WORDS if len(word) <= MAX_LETTERS])
    while True:
        draw = random.random()
        word = random.choice(_KNOWN_WORDS) if draw < 0.6 else a_word(random)
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
    Skill("reversing", 40, _reversing, _ends_alike, is_typed=False),
    Skill("capitals", 25, _capitals, _ends_alike, is_typed=False),
)
