"""Tools that a chat may declare, with a request for each: well-known ones, and ones composed of a verb and a noun.

Most tools are composed, and many of their nouns are made up, so that a name can only be copied from the declaration.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from demo_model.skill import Json, a_word, fill
from demo_model.skills import connecting, values
from demo_model.skills.home_tools import HOME_TOOLS
from demo_model.skills.known_tools import KNOWN_TOOLS, KnownTool
from demo_model.skills.slots import SLOTS, Slot
from demo_model.skills.tool_words import ARTICLES, BY_NOUN, LOOKING_UP, NOUNS, OPENERS, VERBS

TOOLS_OF_TRAINING = (*KNOWN_TOOLS, *HOME_TOOLS)


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
    given: dict[str, Json] = {}
    properties: dict[str, Json] = {}
    arguments: dict[str, Json] = {}
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
    name, description = kind.names.draw(random, held_out), fill(random, kind.description)
    if not held_out:
        name, description = _less_telling(random, name, description)
    tool = declared(name, description, properties, required)
    return Request(tool, asked, arguments, frozenset(kind.topic.split()))


def _joined(random: Random, verb: str, noun: str) -> str:
    """Join two words to the name of a tool."""
    draw = random.random()
    if draw < 0.8:
        return f"{verb}_{noun}"
    return f"{verb}{noun.capitalize()}" if draw < 0.93 else f"{noun}_{verb}"


def _less_telling(random: Random, name: str, description: str) -> tuple[str, str]:
    """Return a declaration of training in which, at times, the name alone tells what it is for, or the description."""
    draw = random.random()
    if draw < 0.15:
        made_up = a_word(random, (1, 2))
        number = random.randint(1, 99)
        names = (
            f"tool_{number}",
            f"function_{number}",
            f"run_{made_up}",
            f"{made_up}_{number}",
            made_up,
            f"do{number}",
        )
        return random.choice((*names, f"{made_up}_{a_word(random, (1, 2))}")), description
    if draw < 0.3:
        general = ("A tool", "A tool.", "Use this tool if needed.", "A function of the server.", a_word(random))
        return name, random.choice(("", "", *general))
    return name, description


def _values_said(
    random: Random, held_out: bool, slots: Sequence[Slot], arguments: Sequence[str | int | float]
) -> list[str]:
    """Return how each value is said, in the order of the sentence."""
    forms = [slot.said.draw(random, held_out) for slot in slots]
    if forms and not held_out and random.random() < 0.35:
        # No list of such words is complete: that they are no part of a value holds for those nobody has heard of.
        forms[0] = f"{connecting.before_a_value(random)} {{v}}"
    said = list(zip(slots, forms, arguments, strict=True))
    random.shuffle(said)
    texts = []
    for index, (slot, form, argument) in enumerate(said):
        text = str(argument)
        if not held_out and slot.make is values.phrase and '"' not in form:
            text = values.quoted(random, text, index == len(said) - 1)
        texts.append(form.replace("{v}", text))
    return texts


def composed(random: Random, held_out: bool, verb: str = "", noun: str = "") -> Request:
    """Ask for a tool made of a verb and a noun, of which one may be given."""
    is_by_noun = not held_out and not verb and random.random() < 0.12
    is_made_up = not held_out and random.random() < 0.2
    verb = random.choice(LOOKING_UP) if is_by_noun else verb
    verb = verb or (a_word(random, (1, 2)) if is_made_up else VERBS.draw(random, held_out))
    noun = noun or (a_word(random, (2, 2)) if random.random() < 0.35 else NOUNS.draw(random, held_out))
    slots = random.sample(SLOTS, random.choice((0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2)))
    keys: list[str] = []
    for slot in slots:
        keys.append(random.choice([key for key in slot.keys if key not in keys]))
    properties = {key: {"type": slot.type} for key, slot in zip(keys, slots, strict=True)}
    arguments = {key: slot.make(random, held_out) for key, slot in zip(keys, slots, strict=True)}
    said = _values_said(random, held_out, slots, list(arguments.values()))
    if is_by_noun:
        asked = fill(random, BY_NOUN.draw(random, held_out), {"noun": noun, "said": "".join(f" {s}" for s in said)})
    else:
        body = " ".join((f"{verb} {ARTICLES.draw(random, held_out)}{noun}", *said))
        opener = OPENERS.draw(random, held_out)
        end = "?" if opener.startswith(("Can ", "Could ", "Would ", "Will ", "May ")) else "."
        asked = opener + body + end if opener else body[0].upper() + body[1:] + end
    by = f"[| by {keys[0]}| for a {keys[0]}| with a {keys[0]}]" if keys else ""
    description = fill(random, f"{verb.capitalize()} [a|the] {noun}{by}[|.]")
    asked, arguments = typed(random, asked, arguments)
    name = _joined(random, verb, noun)
    if not held_out:
        name, description = _less_telling(random, name, description)
    words = frozenset({noun}) if is_by_noun else frozenset({verb, noun})
    return Request(declared(name, description, properties, keys), asked, arguments, words, "" if is_by_noun else verb)


def a_request(random: Random, held_out: bool) -> Request:
    """Ask for one of all tools."""
    if random.random() < (0.4 if held_out else 0.47):
        return known(random, held_out, random.choice(KNOWN_TOOLS if held_out else TOOLS_OF_TRAINING))
    return composed(random, held_out)


def others(random: Random, held_out: bool, request: Request, number: int, *, are_near: bool = True) -> list[Request]:
    """Return requests for `number` tools beside that of `request`; with `are_near` some share its verb or its noun.

    Without it, none could serve the request.
    """
    names, found = {request.name}, list[Request]()
    words = sorted(request.words)
    while len(found) < number:
        if are_near and request.verb and len(words) == 2 and random.random() < 0.35:
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
            found.append(other)
    return found
