"""Parameters of composed tools, and how a sentence says their values. Data only."""

from dataclasses import dataclass

from demo_model.skill import Pool
from demo_model.skills import values


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
            _with(
                "in|in|near|near|at|from|inside|outside of|close to|next to|not far from|north of|there in|by|"
                "somewhere in|out in|over in|towards|right in|at the edge of"
            ),
            ("around {v}",),
        ),
    ),
    Slot(
        ("name", "person", "owner", "customer", "user"),
        "string",
        values.name,
        Pool(
            _with(
                "for|for|for|of|by|with|from|together with|belonging to|in the name of|owned by|"
                "at the request of|as wished by|in place of|meant for|to help"
            ),
            ("on behalf of {v}",),
        ),
    ),
    Slot(
        ("title", "label", "name"),
        "string",
        values.phrase,
        Pool(
            (
                'called "{v}"',
                *_with(
                    "called|called|named|with the title|under the name|marked|with the name|headed|known as|"
                    "which is called|with the heading|whose title is|bearing the name|with the label|by the name of"
                ),
            ),
            ("titled {v}",),
        ),
    ),
    Slot(
        ("date", "day"),
        "string",
        values.date,
        Pool(
            _with(
                "on|on|for|for|by|until|before|after|starting|starting on|no later than|from|since|dated|"
                "set for|planned for|ready by|meant for|as of"
            ),
            ("due {v}",),
        ),
    ),
    Slot(
        ("time", "at", "start_time"),
        "string",
        values.time,
        Pool(
            _with(
                "at|at|at|by|before|after|until|around|not before|starting at|shortly after|as of|beginning at|"
                "no later than|just before|close to|past"
            ),
            ("from {v}",),
        ),
    ),
    Slot(
        ("id", "number", "code"),
        "integer",
        values.integer,
        Pool(
            _with(
                "number|number|with number|with the number|with the id|id|code|with code|#|nr.|"
                "having the number|listed as|numbered|under the number|marked as"
            ),
            ("no. {v}",),
        ),
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
                "{v} times over",
                "{v} times altogether",
                "a total of {v} times",
                "at least {v} times",
                "no more than {v} times",
                "{v} times in all",
                "{v} times all in all",
                "{v} times and no more",
                "{v} times if possible",
                "not fewer than {v} times",
                "{v} times as a whole",
            ),
            ("{v} times in total",),
        ),
    ),
    Slot(
        ("colour", "color"),
        "string",
        values.of(values.COLOURS),
        Pool(
            _with(
                "in|in|in|painted|dyed|that is|all in|made of|with a touch of|tinted|in the colour|covered in|"
                "in shades of|having the colour|sprayed"
            ),
            ("coloured {v}",),
        ),
    ),
    Slot(
        ("price", "max_price"),
        "number",
        values.price,
        Pool(
            _with(
                "for|for|under|under|below|up to|for less than|for at most|over|costing|not above|worth|priced|"
                "no more than|within a budget of",
                " euros",
            ),
            ("at {v} euros",),
        ),
    ),
    Slot(
        ("country",),
        "string",
        values.of(values.COUNTRIES),
        Pool(
            _with(
                "in|in|from|from|within|inside|all over|throughout|through|outside of|of|around|anywhere in|"
                "all around|to"
            ),
            ("across {v}",),
        ),
    ),
    Slot(
        ("topic", "text"),
        "string",
        values.phrase,
        Pool(
            _with(
                "about|about|about|regarding|concerning|with the text|on the subject of|saying|on|dealing with|"
                "to do with|covering|touching on|relating to|on the theme of|in the matter of|that says|all about"
            ),
            ("on the topic of {v}",),
        ),
    ),
    Slot(
        ("minutes", "duration"),
        "integer",
        values.integer,
        Pool(
            _with(
                "for|for|for|in|every|after|lasting|over|at most|during the next|not longer than|up to|"
                "for the next|taking|around",
                " minutes",
            ),
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
                "addressed to|and pass it to|and alert|and report to|and forward it to|and copy in|and let it reach"
            ),
            ("and tell {v}",),
        ),
    ),
)
