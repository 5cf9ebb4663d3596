"""Words that stand before a value and are no part of it, of more kinds than any list of phrasings has. For training.

A model that has only met "called {v}" and "in {v}" takes an unknown word before a value for the value itself, the more
so if it begins like the key: these teach it that a value is what is left.
"""

from random import Random

from demo_model.skill import a_word, words

PARTICIPLES = words(
    "written filed set agreed noted chosen made given taken put held kept fixed stored placed sent shown seen picked "
    "booked ordered listed printed drawn cut built found saved counted measured written wanted needed asked paid "
    "billed valued estimated rated signed stamped sealed bound tied linked joined attached added assigned allotted "
    "granted offered promised reserved arranged scheduled expected announced declared registered recorded entered "
    "typed spelled pronounced advertised described defined introduced presented delivered handed passed shipped "
    "carried moved shifted finished begun opened coated varnished toned glazed stained sprayed washed polished "
    "decorated covered wrapped"
)
PREPOSITIONS = words("in on at by for with as to under over from of about through near into onto upon beside behind")
NOUNS = words(
    "name matter field help case hands form shape sign line part interest favour honour memory light course middle "
    "region area neighbourhood company care service order amount sum value rate limit range speed hope view style "
    "manner tone shade mark heading banner motto theme question idea spirit company presence absence wake front back"
)
PARTICLES = words("up down out off away back along around over on through together aside ahead forth apart")
ADJECTIVES = words(
    "first second third final only next new old big small great long short late early same other whole main real true "
    "good best fine yearly annual monthly weekly daily local public private open closed free joint grand royal rare "
    "famous popular favourite special usual regular recent future former modern ancient quiet loud bright dark cheap "
    "dear fresh warm cold spare heavy simple complete certain various further latest upcoming previous current "
    "winter summer spring autumn morning evening night city village school family office"
)
_DETERMINERS = words("The The The This Our My Your Their His Her A Another Every Each Any No Some")
_SUFFIXES = words("ing wise ish er ly ful like ness ment ation able y")


def before_a_value(random: Random) -> str:
    """Return one to four words that lead to a value: real ones in combinations without end, or made-up ones."""
    draw = random.random()
    if draw < 0.15:
        verb = random.choice((a_word(random, (1, 2)) + random.choice(("", "s", "ed")), random.choice(PARTICIPLES)))
        return f"{verb} {random.choice(PARTICLES)} {random.choice((*PREPOSITIONS, ''))}".rstrip()
    if draw < 0.3:
        return f"{random.choice(PARTICIPLES)} {random.choice(PREPOSITIONS)}"
    if draw < 0.45:
        return random.choice(PARTICIPLES)
    if draw < 0.65:
        article = random.choice(("the", "the", ""))
        start = " ".join((random.choice(PREPOSITIONS), article)).strip()
        return f"{start} {random.choice(NOUNS)} {random.choice(('of', 'of', 'of', 'for', 'with'))}"
    made_up = a_word(random, (1, 2))
    if draw < 0.8:
        return made_up
    if draw < 0.9:
        return (
            f"{made_up}{random.choice(('ed', 'ing', 's'))} {random.choice(('', random.choice(PREPOSITIONS)))}".rstrip()
        )
    return f"{made_up} {a_word(random, (1, 1))}"


def before_a_thing(random: Random) -> str:
    """Return how a sentence may begin before what it is about: "The", an adjective or a made-up word, or all three."""
    described = random.choice((random.choice(ADJECTIVES), random.choice(ADJECTIVES), a_word(random, (1, 2))))
    if random.random() < 0.15:
        described = f"{described} {random.choice((random.choice(ADJECTIVES), a_word(random, (1, 2))))}"
    return f"{random.choice(_DETERMINERS)} {described}"


def like_the_key(random: Random, key: str, *, is_made_up: bool) -> str:
    """Return words before a value that name its key, or that only look like it."""
    said = key.replace("_", " ")
    if random.random() < 0.4:
        return random.choice(
            (
                f"has the {said}",
                f"has a {said} of",
                f"has {said}",
                f"got the {said}",
                f"with the {said}",
                f"shows {said}",
            )
        )
    verb = f"{said}{random.choice(('ed', 's', 'd') if is_made_up else _SUFFIXES)}"
    link = random.choice(("", "", " in", " at", " as", " by", " with", " to", " of"))
    return f"{random.choice(('is ', 'is ', 'was ', 'has been ', 'comes ', ''))}{verb}{link}"
