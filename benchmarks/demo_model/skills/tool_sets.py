"""Tools that a chat may declare, with a request for each: well-known ones, and ones composed of a verb and a noun.

Most tools are composed, and many of their nouns are made up, so that a name can only be copied from the declaration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.demo_model.skill import Json, Pool, a_word, fill, pool_of
from benchmarks.demo_model.skills import values
from benchmarks.demo_model.skills.known_tools import KNOWN_TOOLS, KnownTool

VERBS = pool_of(
    (
        "find, get, show, check, open, book, order, buy, start, stop, delete, create, add, send, play, read, print,"
        " share, update, cancel, rename, move, lock, count, rate, track, measure, paint, repair, rent, sell, clean,"
        " load, save, scan, sort, test, watch, pick, plan, list, log, fetch, reserve, pause, review, archive, copy,"
        " export, install, ship, bake"
    ),
    "hide, draw, weigh, close, import, wash, deliver, remove, label, resize",
)
NOUNS = pool_of(
    (
        "table, room, train, flight, ticket, hotel, car, bike, song, movie, book, note, task, event, order, parcel,"
        " invoice, report, file, photo, video, light, lamp, door, window, alarm, robot, drone, printer, camera, "
        "recipe, meal, pizza, coffee, garden, plant, dog, cat, horse, house, street, map, route, bus, taxi, ship, "
        "plane, phone, message, letter, contact, user, account, card, payment, budget, stock, price, news, game, "
        "player, team, match, lesson, course, exam, book, list, page, server, backup, job, shift, shop, product, "
        "box, key, code, badge, visa, loan, tax, fridge, oven, heater, fan, pump, sensor, meter"
    ),
    "boat, tent, sofa, bridge, poster, picture, engine, fence, river, cake, wallet, mirror",
)
OPENERS = Pool(
    (
        *("",) * 8,
        *("Please ",) * 3,
        *("Can you ", "Could you ", "I want to ", "I would like to ", "Help me ", "Now ") * 2,
        *(
            "Would you ",
            "Will you ",
            "Can you please ",
            "You should ",
            "You must ",
            "Try to ",
            "I have to ",
            "I'd like to ",
        ),
        *(
            "We want to ",
            "We have to ",
            "It is time to ",
            "Be so kind to ",
            "Let's ",
            "Hey, ",
            "Just ",
            "Then ",
            "And ",
        ),
    ),
    ("I need to ", "Would you please ", "Let us ", "Go and ", ""),
)
ARTICLES = Pool(
    (*("the ", "the ", "a ", "my ", "", "this ") * 3, "your ", "his ", "her ", "their ", "one ", "another ", "every "),
    ("our ", "the ", "that "),
)


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter of composed tools: its possible keys, its type, and how a sentence says its value."""

    keys: tuple[str, ...]
    type: str
    make: values.Maker
    said: Pool[str]


def _with(before: str, after: str = "") -> tuple[str, ...]:
    """Return ways to say a value: the words before it, with "|" between them, and those after it."""
    return tuple(f"{words} {{v}}{after}" for words in before.split("|"))


SLOTS = (
    Slot(
        ("city", "location", "place", "town"),
        "string",
        values.city,
        Pool(
            _with("in|in|near|near|at|from|inside|outside of|close to|next to|not far from|north of|there in"),
            ("around {v}",),
        ),
    ),
    Slot(
        ("name", "person", "owner", "customer", "user"),
        "string",
        values.name,
        Pool(_with("for|for|for|of|by|with|from|together with|belonging to|in the name of"), ("on behalf of {v}",)),
    ),
    Slot(
        ("title", "label", "name"),
        "string",
        values.phrase,
        Pool(
            ('called "{v}"', *_with("called|called|named|with the title|under the name|marked|with the name")),
            ("titled {v}",),
        ),
    ),
    Slot(
        ("date", "day"),
        "string",
        values.date,
        Pool(_with("on|on|for|for|by|until|before|after|starting|starting on|no later than|from|since"), ("due {v}",)),
    ),
    Slot(
        ("time", "at", "start_time"),
        "string",
        values.time,
        Pool(_with("at|at|at|by|before|after|until|around|not before|starting at|shortly after"), ("from {v}",)),
    ),
    Slot(
        ("id", "number", "code"),
        "integer",
        values.integer,
        Pool(_with("number|number|with number|with the number|with the id|id|code|with code|#|nr."), ("no. {v}",)),
    ),
    Slot(
        ("count", "quantity", "times"),
        "integer",
        values.integer,
        Pool(
            (
                "{v} times",
                "{v} times",
                "{v} times in a row",
                "exactly {v} times",
                "{v} times more",
                "up to {v} times",
                "{v}x",
            ),
            ("{v} times in total",),
        ),
    ),
    Slot(
        ("colour", "color"),
        "string",
        values.of(values.COLOURS),
        Pool(_with("in|in|in|painted|dyed|that is|all in|made of|with a touch of"), ("coloured {v}",)),
    ),
    Slot(
        ("price", "max_price"),
        "number",
        values.price,
        Pool(
            _with("for|for|under|under|below|up to|for less than|for at most|over|costing", " euros"), ("at {v} euros",)
        ),
    ),
    Slot(
        ("country",),
        "string",
        values.of(values.COUNTRIES),
        Pool(_with("in|in|from|from|within|inside|all over|throughout|through|outside of|of"), ("across {v}",)),
    ),
    Slot(
        ("topic", "text"),
        "string",
        values.phrase,
        Pool(
            _with(
                "about|about|about|regarding|concerning|with the text|on the subject of|saying|on|dealing with|"
                "to do with"
            ),
            ("on the topic of {v}",),
        ),
    ),
    Slot(
        ("minutes", "duration"),
        "integer",
        values.integer,
        Pool(
            _with("for|for|for|in|every|after|lasting|over|at most|during the next", " minutes"),
            ("within {v} minutes",),
        ),
    ),
    Slot(
        ("to", "recipient"),
        "string",
        values.email,
        Pool(
            _with(
                "for|for|and mail it to|and mail it to|to|and send it to|and inform|and notify|and write to|and ask|"
                "addressed to"
            ),
            ("and tell {v}",),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Request:
    """A tool, the words that ask for it, and the arguments that they give it.

    Attributes:
        tool: In OpenAI's form.
        asked: What the user says.
        arguments: In the order of the tool's parameters.
        words: What it is about: other tools that share one of these are told apart by the rest.
        verb: The one of them that is a verb, if any.
    """

    tool: Json
    asked: str
    arguments: dict[str, Json]
    words: frozenset[str]
    verb: str = ""

    @property
    def name(self) -> str:
        """The name of the tool."""
        return str(self.tool["function"]["name"])


def declared(name: str, description: str, properties: Json, required: list[str]) -> Json:
    """Return the declaration of a tool in OpenAI's form."""
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def typed(random: Random, asked: str, arguments: dict[str, Json], make: Callable[[str], str] = str.lower) -> Json:
    """Return the words and arguments as a hurried user types them: at times in lower case or without a last mark."""
    if random.random() < 0.1:
        asked = make(asked)
        arguments = {key: make(value) if isinstance(value, str) else value for key, value in arguments.items()}
    return (asked.rstrip(".?!") or asked) if random.random() < 0.2 else asked, arguments


def known(random: Random, held_out: bool, kind: KnownTool) -> Request:
    """Ask for a well-known tool."""
    given, properties, arguments = {}, {}, {}
    for letter, parameter in zip("abc", kind.parameters, strict=False):
        key = random.choice(parameter.keys.split("|"))
        given[letter] = parameter.make(random, held_out)
        properties[key] = {"type": parameter.type}
        arguments[key] = given[letter]
    asked = fill(random, kind.asked.draw(random, held_out), given)
    if random.random() < 0.08:
        asked = random.choice(("Hi! ", "Hello! ", "Hello, ", "Hey, ", "Hi, ", "Please: ")) + asked
    required = list(properties)
    if kind.choices and random.random() < 0.4:
        key, choices = kind.choices
        properties[key] = {"type": "string", "enum": list(choices)}
        if random.random() < 0.4:
            arguments[key] = random.choice(choices)
            bare = asked.rstrip("?.! ")
            asked = f"{bare} in {arguments[key]}{asked[len(bare) :].rstrip()}"
    asked, arguments = typed(random, asked, arguments)
    tool = declared(kind.names.draw(random, held_out), fill(random, kind.description), properties, required)
    return Request(tool, asked, arguments, frozenset({kind.topic}))


def _joined(random: Random, verb: str, noun: str) -> str:
    """Join two words to the name of a tool."""
    draw = random.random()
    if draw < 0.8:
        return f"{verb}_{noun}"
    return f"{verb}{noun.capitalize()}" if draw < 0.93 else f"{noun}_{verb}"


def composed(random: Random, held_out: bool, verb: str = "", noun: str = "") -> Request:
    """Ask for a tool made of a verb and a noun, of which one may be given."""
    is_made_up = not held_out and random.random() < 0.2
    verb = verb or (a_word(random, (1, 2)) if is_made_up else VERBS.draw(random, held_out))
    noun = noun or (a_word(random, (2, 2)) if random.random() < 0.35 else NOUNS.draw(random, held_out))
    slots = random.sample(SLOTS, random.choice((0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2)))
    keys: list[str] = []
    for slot in slots:
        keys.append(random.choice([key for key in slot.keys if key not in keys]))
    properties = {key: {"type": slot.type} for key, slot in zip(keys, slots, strict=True)}
    arguments = {key: slot.make(random, held_out) for key, slot in zip(keys, slots, strict=True)}
    forms = [slot.said.draw(random, held_out) for slot in slots]
    if forms and not held_out and random.random() < 0.15:
        # No list of such words is complete: that they are no part of a value holds for those nobody has heard of.
        strange = a_word(random, (1, 2))
        forms[0] = random.choice((f"{strange} {{v}}", f"{strange} {{v}}", f"{strange} {a_word(random, (1, 1))} {{v}}"))
    said = [form.replace("{v}", str(arguments[key])) for form, key in zip(forms, keys, strict=True)]
    random.shuffle(said)
    body = " ".join((f"{verb} {ARTICLES.draw(random, held_out)}{noun}", *said))
    opener = OPENERS.draw(random, held_out)
    end = "?" if opener.startswith(("Can ", "Could ", "Would ", "Will ")) else "."
    asked = opener + body + end if opener else body[0].upper() + body[1:] + end
    by = f"[| by {keys[0]}| for a {keys[0]}| with a {keys[0]}]" if keys else ""
    description = fill(random, f"{verb.capitalize()} [a|the] {noun}{by}[|.]")
    asked, arguments = typed(random, asked, arguments)
    tool = declared(_joined(random, verb, noun), description, properties, keys)
    return Request(tool, asked, arguments, frozenset({verb, noun}), verb)


def a_request(random: Random, held_out: bool) -> Request:
    """Ask for one of all tools."""
    if random.random() < 0.4:
        return known(random, held_out, random.choice(KNOWN_TOOLS))
    return composed(random, held_out)


def others(random: Random, held_out: bool, request: Request, number: int, *, are_near: bool = True) -> list[Json]:
    """Return `number` tools beside the one of `request`; with `are_near` some share its verb or its noun.

    Without it, none could serve the request.
    """
    names, tools = {request.name}, list[Json]()
    words = sorted(request.words)
    while len(tools) < number:
        if are_near and len(words) == 2 and random.random() < 0.35:
            shared = random.choice(words)
            is_verb = shared == request.verb
            other = composed(random, held_out, verb=shared if is_verb else "", noun="" if is_verb else shared)
            if other.words == request.words:
                continue
        else:
            other = a_request(random, held_out)
            if other.words & request.words:
                continue
        if other.name not in names:
            names.add(other.name)
            tools.append(other.tool)
    return tools
