"""Phrases and short sentences of plain words, without end: what is copied is copied to its end, not known by heart.

Only training draws from them; the exam has its own lists.
"""

from random import Random

from demo_model.skill import a_word, fill, words
from demo_model.skills.letters import COMMON_WORDS
from demo_model.skills.lists import WORDS

CONNECTING = frozenset(
    words(
        "about across after all and around as at before by close concerning containing dated during every exactly for "
        "from in inside is lasting like made near next no not number of on or over regarding saying since starting "
        "that times to toward towards under until up with within"
    )
)
"""Words that may begin another value of a request: a value with one of them needs a mark of its end."""
ADJECTIVES = words(
    "red black white yellow brown pink cheap good bad big little small tall long old young fresh cold hot warm dry "
    "heavy easy hard quick slow quiet loud nice pretty strange simple strong sweet sour soft clean dirty empty full "
    "free open new early daily local public modern ancient famous golden wooden electric digital healthy happy lucky "
    "lazy rich brave kind secret short deep wild round broken best better missing second final"
)
THINGS = words(
    "bread milk butter cheese sugar lemon onion rice pasta soup ticket key lamp paper letter parcel report invoice "
    "plan list photo film song story game lesson match team trip room hotel shop train bus plane car road door kitchen "
    "garden office school computer phone camera robot guitar recipe dinner breakfast party market price job news law "
    "history weather doctor teacher neighbour uncle sister dog horse tomato pancake sandwich cookie drink sport bag "
    "box shoe jumper glove hat ring coin map book page poem garage roof bottle cup fork plate chair desk bed"
)
ROOMS = words("kitchen office hall bedroom bathroom garage cellar attic nursery corridor studio library lounge shed")
VERBS = words("need like want see buy sell know read hear love eat keep take hold clean find visit cook feed mend")
STATES = words(
    "late ready open closed full empty warm cold new old broken lost here there red tired hungry happy sick busy cheap "
    "gone early wet dry quiet loud nice sold done finished away outside asleep alone free wrong right small big"
)
NUMBERS = words("one two three four five seven eight nine ten eleven twelve noon midnight")
_NOUNS = tuple(dict.fromkeys((*THINGS, *WORDS)))
_COMMON = tuple(word for word in COMMON_WORDS if word not in CONNECTING and len(word) > 2)

PHRASES = (
    *("{n}",) * 3,
    *("{j} {n}", "{j} {p}", "{n} {p}", "{n} {n2}", "{w} {n}") * 4,
    *("{j} {n} {p}", "{j} {j2} {n}", "{n} {n2} {p}", "{w} {w2} {n}") * 2,
    *("the {j} {n}", "the {n}", "my {n}", "my {j} {n}", "our {j} {p}"),
    *("{n} and {n2}", "{p} and {j} {p2}", "{n} of the {n2}", "the {n} of my {n2}", "{p} for {j} {p2}"),
    *("how {p} work", "why {p} are {j}", "{j} {p} at home", "{n} in the {n2}", "the {j} {n} {n2}", "{w} {w2}"),
    *("{c} {n}", "{n} {c}", "{c} {c2}", "{c} {c2} {n}"),
)
_PLACE = "[at home|at work|here|there|outside|in the {n2}|near the {n2}|at the {n2}|by the {j2} {n2}|under the {n2}]"
_TIME = "[today|tomorrow|now|again|at {t}|this week|tonight|soon|every day|in the evening|next week]"
_WHAT = "[the {n}|a {n}|a {j} {n}|more {n}|{j} {p}|your {n}|my {j} {n}|{t} {p}|{p} and {p2}|no {p}|some {n}]"
SENTENCES = (
    f"[I|we|they|you|my friends|the {{p}}] {{v}} {_WHAT}",
    f"[I|we|they|you|my friends|the {{p}}] {{v}} {_WHAT} [{_PLACE}|{_TIME}]",
    f"[he|she|my {{n}}|the {{j}} {{n}}|our {{n2}}|somebody] {{v}}s {_WHAT}",
    f"[he|she|my {{n}}|the {{j}} {{n}}|our {{n2}}] {{v}}s {_WHAT} [{_PLACE}|{_TIME}]",
    "[the {n}|my {n}|your {j} {n}|the {j} {n}|this {n}|she|he|it|everything] [is|was|will be] [{s}|not {s}|"
    "{s} {x}|very "
    "{s}|a {j} {n2}]".replace("{x}", _TIME),
    "[we|they|the {p}|my {p}|you] [are|were|will be] [{s}|not {s}|{s} {x}|so {s}]".replace("{x}", _PLACE),
    "I [am|was] [{s}|not {s}|very {s}|{s} and {s2}|a {j} {n}]",
    f"[there is|there was|here is|this is|that was] [a {{j}} {{n}}|a {{n}}|the {{n}} of my {{n2}}|more {{n}}] {_PLACE}",
    f"[I|we|they] [will|can|must|cannot|should] {{v}} {_WHAT}",
    f"[please |][bring|buy|take|open|leave|clean|send|fetch|get|call|forget|keep] {_WHAT}",
    f"[please |]do not [bring|buy|take|open|leave|clean|send|touch|eat|sell] {_WHAT}",
    f"[come|meet me|meet us|wait|call me|stay|wake up|call back|be {{s}}] [{_PLACE}|{_TIME}]",
    "[where|how|why|when] [is|was] [the {j} {n}|my {n}|your {n}|it]",
    f"[happy|merry|good|lovely|welcome|my best|many] [{{n}}|{{p}}|{{n}} and {{n2}}] [|{_TIME}|{_PLACE}]",
    "[do|did] you {v} [the {n}|{j} {p}|my {n2}]",
    "nobody [saw|heard|knew|likes|needs] [the {n}|the {j} {n}|my {n2}]",
    f"I [have|had|found|lost|bought|sold] {_WHAT} {_PLACE}",
    f"[{{s}}|{{j}} {{n}}|{{p}}] {_TIME}",
)


def plural(noun: str) -> str:
    """Return the plural of a noun, irregular ones as if they were not."""
    if noun.endswith(("s", "sh", "ch", "x", "z")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2:-1] not in "aeiou" else f"{noun}s"


def _noun(random: Random) -> str:
    return random.choice(_NOUNS) if random.random() < 0.75 else a_word(random, (1, 2))


def _parts(random: Random) -> dict[str, object]:
    """Draw the words of a phrase or sentence, those of a kind all different."""
    j, j2 = random.sample(ADJECTIVES, 2)
    s, s2 = random.sample(STATES, 2)
    c, c2 = random.sample(_COMMON, 2)
    parts: dict[str, object] = {"n": _noun(random), "n2": _noun(random), "j": j, "j2": j2, "s": s, "s2": s2}
    parts |= {"p": plural(_noun(random)), "p2": plural(_noun(random)), "c": c, "c2": c2}
    parts |= {"w": a_word(random, (1, 2)), "w2": a_word(random, (1, 2)), "t": random.choice(NUMBERS)}
    return parts | {"v": random.choice(VERBS)}


def phrase(random: Random) -> str:
    """One to five plain words that name something."""
    text = fill(random, random.choice(PHRASES), _parts(random))
    text = text[:1].lower() + text[1:]
    draw = random.random()
    if draw < 0.12:
        return text[:1].upper() + text[1:]
    return text.title() if draw < 0.2 else text


def sentence(random: Random) -> str:
    """A short sentence of plain words, without a mark at its end."""
    text = " ".join(fill(random, random.choice(SENTENCES), _parts(random)).split())
    if random.random() < 0.5 and not text.startswith("I "):
        return text[:1].lower() + text[1:]
    return text[:1].upper() + text[1:]
