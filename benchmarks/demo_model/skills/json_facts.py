"""Facts about persons, products and events: how a sentence says them, and what a JSON schema calls them. Data only."""

from dataclasses import dataclass

from benchmarks.demo_model.skill import Pool
from benchmarks.demo_model.skills import values


@dataclass(frozen=True, slots=True)
class Fact:
    """Something a sentence may say.

    Attributes:
        keys: What a schema may call it.
        type: JSON type of its value; "truth" is said by one of two phrasings, the first of which means yes.
        make: Makes its value.
        said: How a sentence says it; {v} is the value.
    """

    keys: tuple[str, ...]
    type: str
    make: values.Maker
    said: Pool[str]


NAME = Fact(("name", "name", "name", "full_name", "person"), "string", values.name, Pool(("{v}",), ("{v}",)))
PERSON_FACTS = (
    Fact(
        ("age",),
        "integer",
        lambda random, held_out: random.randint(1, 99),
        Pool(
            ("is {v} years old", "is {v}", "is aged {v}", "turned {v}"),
            ("has turned {v} years old", "is {v} years of age"),
        ),
    ),
    Fact(
        ("city", "city", "city", "town", "home"),
        "string",
        values.city,
        Pool(
            ("lives in {v}", "is from {v}", "lives near {v}", "works in {v}", "moved to {v}"),
            ("has a home in {v}", "stays in {v}"),
        ),
    ),
    Fact(
        ("country",),
        "string",
        values.of(values.COUNTRIES, 0.05),
        Pool(("was born in {v}", "comes from {v}"), ("grew up in {v}",)),
    ),
    Fact(
        ("job", "job", "profession"),
        "string",
        values.of(values.JOBS),
        Pool(("works as a {v}", "is a {v}", "is a {v} by profession"), ("earns money as a {v}", "became a {v}")),
    ),
    Fact(
        ("email", "email", "mail"),
        "string",
        values.email,
        Pool(("has the address {v}", "uses {v}", "can be reached at {v}"), ("gets mail at {v}", "writes from {v}")),
    ),
    Fact(
        ("phone",),
        "string",
        lambda random, held_out: "".join(random.choices("0123456789", k=random.randint(5, 8))),
        Pool(("has the phone number {v}", "can be called at {v}"), ("answers the phone at {v}",)),
    ),
    Fact(
        ("is_member", "member"),
        "truth",
        values.integer,
        Pool(
            ("is a member|is not a member", "is a club member|is no member"),
            ("is already a member|is not yet a member",),
        ),
    ),
    Fact(
        ("is_married", "married"),
        "truth",
        values.integer,
        Pool(("is married|is not married", "is married|is single"), ("has been married|has not been married",)),
    ),
    Fact(
        ("hobbies", "likes", "interests"),
        "array",
        values.of(values.HOBBIES, 0.1),
        Pool(("likes {v}", "enjoys {v}", "loves {v}"), ("is fond of {v}",)),
    ),
    Fact(
        ("colour", "color", "favourite_colour"),
        "string",
        values.of(values.COLOURS),
        Pool(("prefers {v}", "wears {v}"), ("dresses in {v}",)),
    ),
)
PRODUCT = Fact(
    ("product", "product", "item", "name"),
    "string",
    values.of(values.THINGS, 0.3),
    Pool(("The {v}", "This {v}", "A {v}", "Our {v}", "Product {v}"), ("That {v}", "One {v}")),
)
PRODUCT_FACTS = (
    Fact(
        ("price", "price", "cost"),
        "number",
        values.price,
        Pool(
            ("costs {v} euros", "costs {v} dollars", "is {v} euros", "sells for {v} euros", "costs {v}"),
            ("can be had for {v} euros", "has a price of {v} dollars"),
        ),
    ),
    Fact(
        ("colour", "color"), "string", values.of(values.COLOURS), Pool(("is {v}", "comes in {v}"), ("is coloured {v}",))
    ),
    Fact(
        ("quantity", "stock", "count"),
        "integer",
        values.integer,
        Pool(("is in stock {v} times", "was ordered {v} times", "has {v} pieces left"), ("is there {v} times",)),
    ),
    Fact(
        ("brand", "maker"),
        "string",
        lambda random, held_out: values.word(random, held_out).capitalize(),
        Pool(("is made by {v}", "is from {v}"), ("comes from the maker {v}",)),
    ),
    Fact(
        ("weight", "weight_kg"),
        "number",
        values.price,
        Pool(("weighs {v} kg", "weighs {v} kilos"), ("has a weight of {v} kg",)),
    ),
    Fact(
        ("in_stock", "available"),
        "truth",
        values.integer,
        Pool(("is in stock|is not in stock", "is available|is sold out"), ("is still in stock|is no longer in stock",)),
    ),
    Fact(
        ("customer", "buyer"), "string", values.name, Pool(("was bought by {v}", "goes to {v}"), ("is meant for {v}",))
    ),
    Fact(
        ("tags",),
        "array",
        values.of(values.STATES),
        Pool(("has the tags {v}", "is tagged {v}"), ("bears the tags {v}",)),
    ),
)
EVENT = Fact(
    ("event", "event", "title", "name"),
    "string",
    values.of(
        Pool(
            ("meeting", "party", "concert", "lunch", "course", "game", "trip", "talk", "dinner", "film"),
            ("show", "match", "lesson"),
        ),
        0.2,
    ),
    Pool(("The {v}", "Our {v}", "A {v}", "The next {v}"), ("That {v}", "The last {v}")),
)
EVENT_FACTS = (
    Fact(
        ("date", "date", "day"),
        "string",
        values.date,
        Pool(("is on {v}", "takes place on {v}", "was on {v}"), ("will be held on {v}",)),
    ),
    Fact(
        ("time", "time", "start"),
        "string",
        values.time,
        Pool(("starts at {v}", "begins at {v}", "is at {v}"), ("opens at {v}",)),
    ),
    Fact(
        ("city", "place", "location"),
        "string",
        values.city,
        Pool(("is in {v}", "takes place in {v}"), ("is held in {v}",)),
    ),
    Fact(
        ("guests", "count", "people"),
        "integer",
        values.integer,
        Pool(("has {v} guests", "is for {v} people"), ("expects {v} guests",)),
    ),
    Fact(
        ("price", "fee"),
        "number",
        values.price,
        Pool(("costs {v} euros", "costs {v}"), ("is to be had for {v} euros",)),
    ),
    Fact(("host", "organizer"), "string", values.name, Pool(("is run by {v}", "is hosted by {v}"), ("is led by {v}",))),
    Fact(
        ("is_public", "is_free"),
        "truth",
        values.integer,
        Pool(("is open to all|is not open to all",), ("is for everybody|is not for everybody",)),
    ),
)
SUBJECTS = ((NAME, PERSON_FACTS, 6), (PRODUCT, PRODUCT_FACTS, 3), (EVENT, EVENT_FACTS, 2))
