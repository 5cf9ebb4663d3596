"""Filling a JSON schema from a sentence.

The schema is not in the prompt: the server forces its keys by a grammar, and the model has to know for each key which
part of the sentence is its value. So the same sentence is asked about with many keys, in every order.
"""

import json
import zlib
from random import Random

from demo_model.skill import Exchange, Json, Pool, Reply, Skill, a_word, assistant, fill, user, words
from demo_model.skills import connecting, values
from demo_model.skills.json_facts import (
    EVENT,
    EVENT_FACTS,
    NAME,
    PERSON_FACTS,
    PRODUCT_FACTS,
    SUBJECTS,
    Fact,
)

BEFORE = Pool(
    (
        "[Extract|Get|Give me|Return|Find|List] the [data|facts|details|information|fields] as JSON: {s}",
        "[Extract|Get|Give me|Return] the [data|facts|details|fields] [from|of] this [sentence|text][| as JSON]: {s}",
        "[Fill in|Fill|Complete] the [form|schema|JSON|fields]: {s}",
        "[Extract|Fill in|Return|Write|Give me]: {s}",
        "[Turn|Convert|Put] this [into|to] JSON: {s}",
        "[As JSON|JSON|In JSON|Data]: {s}",
        "[Answer|Reply] [in|with] JSON. {s}",
        "Parse this [text|sentence]: {s}",
        "Extract [the person|the product|the order|the event|the user|everything]: {s}",
        "[Write|Store|Save|Note|List|Collect] the [data|facts|details] [of|in] [the|this] "
        "[line|text|sentence|note]: {s}",
        "[I want|I would like|We need] [JSON|the facts|the data] [from|of] [this|the following]: {s}",
        "[Take|Copy|Lift|Pick|Collect] the [facts|data|values|fields|details] [from|in|of] "
        "[this|the|that|my] [passage|paragraph|message|mail|remark|entry|record|caption|snippet|row|phrase]: {s}",
        "[Build|Form|Create|Produce|Generate|Compose] [JSON|an object|a record|a JSON object] [from|out of|with] "
        "[this|the following|what follows|this remark|this entry|this message|these words]: {s}",
        "[Look at|Go through|Study|Take] [this|that|the] [row|entry|passage|message|remark|phrase|report] and "
        "[fill in the fields|give me the data|answer in JSON|note the facts]: {s}",
        "[What are the facts|What is said|Which facts are given|What does it say] [here|in this] [as JSON|]? {s}",
    ),
    ("Please make JSON of this: {s}", "Read the data out of this line: {s}", "Pull the facts out of this: {s}"),
)
AFTER = Pool(
    (
        "{s} [Extract|Give me|Return] the [data|facts|details|information][| as JSON].",
        "{s} [As JSON|In JSON|JSON], please.",
        "{s} [Fill in the form|Fill the schema|Answer in JSON|Turn this into JSON|Give me JSON].",
        "{s} [Now|Please|Then|And now] [write|store|save|note|list|collect] [this|it|the facts|all of it|that] "
        "[as|in|into] JSON.",
        "{s} [Write|Store|Save|Note|List|Collect|Show] [this|it|the facts|all of it|that] "
        "[as|in|into] JSON[.|, please.|]",
        "{s} [Build|Form|Create|Produce|Generate|Compose|Draw up] [JSON|a JSON|an object|a record|a JSON object] "
        "[from|out of|with] [this|it|the above|these|all that][.|, please.|]",
        "{s} [Bring|Turn|Cast|Change|Move|Get] [this|it|all that|the facts|these] [into|to] "
        "[JSON|an object|a record|JSON form][.|, please.|]",
        "{s} [What is that|How is that|What does it look like|That|All that] [as|in] JSON[?|.|]",
        "{s} {w} [JSON of|the JSON for|a JSON from] [this|it|all this][.|, please.|]",
        "{s}",
        "{s} [as JSON|as JSON please]",
    ),
    ("{s} Make JSON of that.", "{s} Put the data into JSON."),
)
STRANGE = (
    "{s} {w} [JSON of|the JSON for|a JSON from|it all as|a record of] [this|it|all this|that {u}|it {v}][.|]",
    "{s} {w} [the|all|these|my|this] [data|facts|{u}|details|{v}] [{v}|in|to|as|for|by] [JSON|{u}|an object][.|]",
    "{s} {w} {v} {k} [as|in|to|{u}] JSON[.|, please.|]",
    "{s} [I|We|You|Please] {v} {k} [as|in|to|{u}] JSON[.|, please.|]",
    "{s} {w} {k}[.|]",
    "{w} {v} [the|all|] [data|facts|{u}|details|fields] [of|from|out of|in] [this|the|my] {u}: {s}",
    "{w} [this|the|what] {v}: {s}",
    "{w} {v} {k} [from|of|in|as|for] {u}: {s}",
)
"""Wishes of which some words are unknown, for training: what they are, is no value."""
NAMED = Pool(
    (
        "[Extract|Get|Give me|Return|Fill in] [|the ]{k}[| as JSON]: {s}",
        "[Extract|Return|Give me] [JSON|the data|an object] with [|the ]{k}: {s}",
        "{s} [Extract|Get|Give me|Return] {k}[| as JSON].",
        "{s} [Give me|Return|Answer with] JSON with [the keys |]{k}.",
        "{s} [I want|I would like|We need|Show me|Tell me|Write|Note|List] {k}[| in JSON].",
        "[I want|I would like|We need|Show me|Note|List] {k}[| in JSON][ from this|]: {s}",
    ),
    ("Write {k} as JSON for this: {s}", "{s} I need {k} as JSON."),
)  # fmt: skip

OUTINGS = Pool(
    (
        "{who} [{are} going|{are} invited|want to go|{are} coming|{are} on the way|will come|{are} welcome] to "
        "[a|the|our|this] {event} on {date}.",
        "{who} [{are} expected|{are} booked|{are} ready|will dress up|will be back|{are} free] for [a|the|our] {event} "
        "on {date}.",
        "{who} [will see|will join|plan|like|will help with|{are} part of] [a|the|our] {event} on {date}.",
        "On {date} {who} [will see|will join|{are} part of|will be back for|go to|want to see] [a|the|our] {event}.",
        "[The|Our|A] {event} on {date} is [for|with|of] {who}.",
        "[The|Our|This] {event} with {who} is on {date}.",
        "{who} [{are} found|{are} listed|{are} seated|{are} signed up|will speak|will sing|will wait|meet] at "
        "[a|this|our|some|every] {event} on {date}.",
        "{who} [visit|attend|host|open|leave|enjoy|share|run|miss|arrange] [a|the|our|this] {event} on {date}.",
        "[For|At|In|To] [the|our|this] {event} on {date} [{who} {are} there|we expect {who}|come {who}|we see {who}].",
    ),
    ("{who} {are} at the {event} on {date}.",),
)
"""Who goes where and when."""


_TRUTHS_OF_EXAM = frozenset(
    said
    for fact in (*PERSON_FACTS, *PRODUCT_FACTS, *EVENT_FACTS)
    if fact.type == "truth"
    for form in fact.said.held_out
    for said in form.split("|")
)
_SHARES_OF_TRAINING = (4, 3, 4)
"""Of persons, products and events: what an event is called is the hardest to find."""
_PEOPLE = words("friend neighbour boss sister brother teacher colleague client guest uncle aunt cousin coach partner")
_KINDS = {"age": "number", "phone": "number", "price": "number", "quantity": "number", "weight": "number"}
_KINDS |= {"guests": "number", "city": "place", "country": "place", "brand": "place", "customer": "place"}
_KINDS |= {"host": "place", "job": "word", "hobbies": "word", "colour": "word", "tags": "word"}
"""What values look like, by the first of a fact's keys; the others look like nothing else."""


def joined(parts: list[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _is_kept(keys: list[str]) -> bool:
    """Whether this combination of keys, in this order, is kept for the exam."""
    return zlib.crc32("|".join(keys).encode()) % 6 == 0


def _strange(random: Random) -> str:
    """Say it with words that tell nothing: what a value is shows in itself, too, and that a verb is not part of it."""
    if random.random() < 0.5:
        helper = random.choice(("is ", "is ", "is ", "was ", "has been ", "will be ", "gets ", ""))
        return f"{helper}{connecting.before_a_value(random)} {{v}}"
    verb = a_word(random, (1, 2)) + random.choice(("s", "s", "ed"))
    helper = random.choice(("", "", "has ", "has been ", "is ", "was ", "can be ", "will be "))
    link = random.choice((" ", " ", " in ", " at ", " of ", " as ", " by ", " with ", " to ", f" {a_word(random)} "))
    return f"{helper}{verb}{link}{{v}}"


def _of_a_state(random: Random, state: str, truth: bool) -> str:
    """Say that somebody or something is, or is not, in a state."""
    helper = random.choice(("is", "is", "is", "was", "has been", "will be"))
    if truth:
        return f"{helper} {random.choice(('', '', 'already ', 'still ', 'now ', 'also ', 'really ', 'again '))}{state}"
    said_no = random.choice(("not", "not", "not", "not yet", "no longer", "never", "not really", "hardly", "not even"))
    if helper == "is" and random.random() < 0.2:
        return f"isn't {state}"
    first, _, rest = helper.partition(" ")
    return " ".join(filter(None, (first, said_no, rest, state)))


def _said(random: Random, held_out: bool, fact: Fact, is_strange: bool) -> tuple[str, Json]:
    """Return how a sentence says the fact, and its value."""
    form = fact.said.draw(random, held_out)
    if fact.type == "truth":
        truth = random.random() < 0.5
        said = form.split("|")[0 if truth else 1]
        if is_strange and (strange := _of_a_state(random, random.choice(fact.states), truth)) not in _TRUTHS_OF_EXAM:
            said = strange
        return said, truth
    if fact.type == "array":
        items = list(dict.fromkeys(str(fact.make(random, held_out)) for _ in range(random.choice((1, 2, 2, 3)))))
        return form.replace("{v}", joined(items)), items
    value = fact.make(random, held_out)
    if is_strange:
        form = _strange(random)
    return form.replace("{v}", str(value)), value


def _to_be_strange(random: Random, facts: list[Fact]) -> set[int]:
    """Return which of the facts behind the first are said with words that tell nothing.

    Of two such values no word says which is which, so their looks must: there is one of a kind at most.
    """
    share = random.choice((0.0, 0.0, 0.3, 0.6))
    chosen: dict[str, int] = {}
    for index, fact in enumerate(facts[1:], 1):
        if random.random() < (share if facts[index - 1].type != "array" else share * 1.5):
            chosen.setdefault(_KINDS.get(fact.keys[0], fact.keys[0]), index)
    return set(chosen.values())


def _begun_strangely(random: Random, subject: Fact, value: Json) -> tuple[str, Json]:
    """Return another beginning of a sentence about a person or a thing."""
    if subject is NAME:
        return (
            f"{random.choice(('My', 'Our', 'Your', 'The'))} {random.choice((*_PEOPLE, a_word(random)))} {value}",
            value,
        )
    return f"{connecting.before_a_thing(random)} {value}", value


def _sentence(random: Random, held_out: bool) -> tuple[str, list[tuple[str, str, Json]]]:
    """Return a sentence and, for each fact in it, a key, the type and the value."""
    shares = [share for *_, share in SUBJECTS] if held_out else _SHARES_OF_TRAINING
    subject, facts, _ = random.choices(SUBJECTS, shares)[0]
    chosen = [subject, *random.sample(facts, random.choice((1, 2, 2, 2, 3, 3, 4)))]
    strange = set() if held_out else _to_be_strange(random, chosen)
    said = [_said(random, held_out, fact, is_strange=index in strange) for index, fact in enumerate(chosen)]
    if not held_out and random.random() < (0.3 if subject is NAME else 0.5):
        said[0] = _begun_strangely(random, subject, said[0][1])
    found: list[tuple[str, str, Json]] = []
    for fact, (_, value) in zip(chosen, said, strict=True):
        taken = {key for key, *_ in found}
        found.append((random.choice([key for key in fact.keys if key not in taken]), fact.type, value))
    if not held_out and random.random() < 0.25:
        _say_by_key(random, said, found)
    start, parts = said[0][0], [text for text, _ in said[1:]]
    if len(parts) > 1 and random.random() < 0.3:
        again = random.choice(("He", "She")) if subject is NAME else "It"
        sentence = f"{start} {joined(parts[:-1])}. {again} {parts[-1]}."
    else:
        sentence = f"{start} {joined(parts)}."
    return sentence, found


def _say_by_key(random: Random, said: list[tuple[str, Json]], found: list[tuple[str, str, Json]]) -> None:
    """Let one fact be said with words like its key, which may become a made-up one."""
    index = random.randrange(1, len(found))
    key, kind, value = found[index]
    if kind == "array":
        return
    is_made_up = random.random() < 0.5
    key = a_word(random, (1, 2)) if is_made_up else key
    if kind == "truth":
        if is_made_up:
            said[index] = _of_a_state(random, key, value), value
            found[index] = random.choice(("", "is_")) + key, kind, value
        return
    said[index] = f"{connecting.like_the_key(random, key, is_made_up=is_made_up)} {value}", value
    found[index] = key, kind, value


def _outing(random: Random, held_out: bool) -> tuple[str, list[tuple[str, str, Json]]]:
    """Return who goes where and when, as a sentence and as facts."""
    people = list(dict.fromkeys(values.NAMES.draw(random, held_out) for _ in range(random.choice((1, 2, 2, 3)))))
    event, date = str(EVENT.make(random, held_out)), values.date(random, held_out)
    verb = "is" if len(people) == 1 else "are"
    form = OUTINGS.draw(random, held_out)
    sentence = fill(random, form, {"who": joined(people), "are": verb, "event": event, "date": date})
    who = random.choice(("participants", "participants", "people", "names", "guests"))
    return sentence, [
        (random.choice(("name", "event", "title")), "string", event),
        (random.choice(("date", "date", "day")), "string", date),
        (who, "array", people),
    ]


def _lines(random: Random, held_out: bool) -> tuple[str, list[tuple[str, str, Json]]]:
    """Return "key: value" pairs in a row, some with made-up keys, and what stands in them."""
    facts = [NAME, *PERSON_FACTS, *PRODUCT_FACTS, *EVENT_FACTS]
    found: dict[str, tuple[str, Json]] = {}
    for fact in random.sample([fact for fact in facts if fact.type not in ("truth", "array")], random.randint(2, 4)):
        key = a_word(random, (2, 2)) if random.random() < 0.3 else random.choice(fact.keys)
        found[key] = (fact.type, fact.make(random, held_out))
    between = random.choice((", ", "; ", "\n"))
    text = between.join(f"{key.replace('_', ' ')}: {value}" for key, (_, value) in found.items())
    return text, [(key, kind, value) for key, (kind, value) in found.items()]


def _schema(kind: str) -> Json:
    if kind == "array":
        return {"type": "array", "items": {"type": "string"}}
    return {"type": "boolean" if kind == "truth" else kind}


def schema(random: Random, held_out: bool) -> Exchange:
    """Give a sentence whose facts are wanted as JSON."""
    while True:
        shares = (80, 14, 6) if held_out else (75, 20, 5)
        sentence, found = random.choices((_sentence, _lines, _outing), shares)[0](random, held_out)
        random.shuffle(found)
        wanted = found[: random.randint(1, len(found))] if random.random() < 0.4 else found
        if len(wanted) < 3 or _is_kept([key for key, *_ in wanted]) == held_out:
            break
    form = random.choice((BEFORE, BEFORE, AFTER, AFTER, NAMED)).draw(random, held_out)
    if not held_out and random.random() < (0.12 if sentence.endswith(".") else 0.4):
        form = random.choice(STRANGE)
    keys = joined([key.replace("_", random.choice("_ ")) for key, *_ in wanted])
    given = {"s": sentence, "k": keys}
    if "{w}" in form or "{v}" in form:  # where a list of values ends shows though its next word is unknown
        given |= {"w": a_word(random, (1, 2)).capitalize(), "v": a_word(random, (1, 2)), "u": a_word(random)}
    asked = fill(random, form, given)
    properties = {key: _schema(kind) for key, kind, _ in wanted}
    rules = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    answer = json.dumps({key: value for key, _, value in wanted}, ensure_ascii=False)
    if random.random() < 0.1:
        asked = asked.rstrip(".")
    return Exchange((user(asked), assistant(answer)), schema=rules)


def is_right(exchange: Exchange, reply: Reply) -> bool:
    """Whether the answer is JSON with the expected values."""
    try:
        given = json.loads(reply.content)
    except ValueError:
        return False
    wanted = json.loads(exchange.answer["content"])
    return json.dumps(given, sort_keys=True) == json.dumps(wanted, sort_keys=True) and not reply.calls


SKILLS = (Skill("schema", 450, schema, is_right, is_typed=False),)
