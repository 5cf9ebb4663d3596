"""Facts about persons, products and events: how a sentence says them, and what a JSON schema calls them. Data only."""

from dataclasses import dataclass

from demo_model.skill import Pool, pool_of
from demo_model.skills import values


@dataclass(frozen=True, slots=True)
class Fact:
    """Something a sentence may say.

    Attributes:
        keys: What a schema may call it.
        type: JSON type of its value; "truth" is said by one of two phrasings, the first of which means yes.
        make: Makes its value.
        said: How a sentence says it; {v} is the value.
        states: Of a truth: what somebody or something is then, to be said in ways without end, for training.
    """

    keys: tuple[str, ...]
    type: str
    make: values.Maker
    said: Pool[str]
    states: tuple[str, ...] = ()


NAME = Fact(("name", "name", "name", "full_name", "person"), "string", values.name, pool_of("{v}", "{v}"))
PERSON_FACTS = (
    Fact(
        ("age",),
        "integer",
        lambda random, held_out: random.randint(1, 99),
        pool_of(
            (
                "is {v} years old, is {v}, is aged {v}, turned {v}, has lived {v} years, turns {v} soon, became {v}"
                " last week, is a {v} year old, has reached {v}"
            ),
            "has turned {v} years old, is {v} years of age",
        ),
    ),
    Fact(
        ("city", "city", "city", "town", "home"),
        "string",
        values.city,
        pool_of(
            (
                "lives in {v}, is from {v}, lives near {v}, works in {v}, moved to {v}, has a flat in {v}, is at "
                "home in {v}, has moved to {v}, sits in {v}, went to {v}, was seen in {v}, resides in {v}, has "
                "settled in {v}, keeps a house in {v}, rents a room in {v}, spends the week in {v}, calls {v} a "
                "home, can be found in {v}"
            ),
            "has a home in {v}, stays in {v}",
        ),
    ),
    Fact(
        ("country",),
        "string",
        values.of(values.COUNTRIES, 0.05),
        pool_of(
            (
                "was born in {v}, comes from {v}, is a citizen of {v}, went to school in {v}, has roots in {v}, was"
                " raised in {v}, spent the first years in {v}, left {v} as a child, "
                "carries a passport of {v}, has a passport from {v}, belongs to {v}"
            ),
            "grew up in {v}",
        ),
    ),
    Fact(
        ("job", "job", "profession"),
        "string",
        values.of(values.JOBS),
        pool_of(
            (
                "works as a {v}, is a {v}, is a {v} by profession, has a job as a {v}, is employed as a {v}, has "
                "become a {v}, makes a living as a {v}, was trained as a {v}, serves as a {v}, "
                "lives off being a {v}, started as a {v}, found work as a {v}, wants to stay a {v}"
            ),
            "earns money as a {v}, became a {v}",
        ),
    ),
    Fact(
        ("email", "email", "mail"),
        "string",
        values.email,
        pool_of(
            (
                "has the address {v}, uses {v}, can be reached at {v}, reads mail at {v}, answers at {v}, has the "
                "mail {v}, can be written to at {v}"
            ),
            "gets mail at {v}, writes from {v}",
        ),
    ),
    Fact(
        ("phone",),
        "string",
        lambda random, held_out: "".join(random.choices("0123456789", k=random.randint(5, 8))),
        pool_of(
            (
                "has the phone number {v}, can be called at {v}, is on the phone at {v}, takes calls at {v}, uses "
                "the number {v}, has the number {v}"
            ),
            "answers the phone at {v}",
        ),
    ),
    Fact(
        ("is_member", "member"),
        "truth",
        values.integer,
        pool_of(
            (
                "is a member|is not a member, is a club member|is no member, has been a member|has never been a "
                "member, joined already|has not joined yet, is now a member|is no longer a member, "
                "has become a member|has not become a member, counts as a member|does not count as a member, "
                "has joined the club|has left the club"
            ),
            "is already a member|is not yet a member",
        ),
        states=("a member", "a club member", "a member here", "in the club", "one of us"),
    ),
    Fact(
        ("is_married", "married"),
        "truth",
        values.integer,
        pool_of(
            (
                "is married|is not married, is married|is single, got married|never married, is already married|is "
                "not yet married, "
                "lives in a marriage|lives without a marriage, was wed|was not wed, "
                "has a wife or husband|has no wife or husband"
            ),
            "has been married|has not been married",
        ),
        states=("married", "happily married", "wed", "a married person"),
    ),
    Fact(
        ("hobbies", "likes", "interests"),
        "array",
        values.of(values.HOBBIES, 0.1),
        pool_of(
            (
                "likes {v}, enjoys {v}, loves {v}, is a friend of {v}, has fun with {v}, is good at {v}, is full of"
                " love for {v}, adores {v}, spends days with {v}"
            ),
            "is fond of {v}",
        ),
    ),
    Fact(
        ("colour", "color", "favourite_colour"),
        "string",
        values.of(values.COLOURS),
        pool_of(
            (
                "prefers {v}, wears {v}, is dressed in {v}, paints all in {v}, has a love for {v}, buys clothes in "
                "{v}, goes for {v}"
            ),
            "dresses in {v}",
        ),
    ),
)
PRODUCT = Fact(
    ("product", "product", "item", "name"),
    "string",
    values.of(values.THINGS, 0.3),
    pool_of(
        (
            "The {v}, The {v}, This {v}, A {v}, Our {v}, Product {v}, Your {v}, My {v}, Each {v}, Every {v}, "
            "Another {v}, The new {v}, The old {v}, Her {v}, Some {v}"
        ),
        "That {v}, One {v}",
    ),
)
PRODUCT_FACTS = (
    Fact(
        ("price", "price", "cost"),
        "number",
        values.price,
        pool_of(
            (
                "costs {v} euros, costs {v} dollars, is {v} euros, sells for {v} euros, costs {v}, is sold for {v} "
                "euros, can be bought for {v} euros, goes for {v} euros, has the price {v}, is worth {v} dollars, "
                "is yours for {v} euros, is offered at {v} euros, sets you back {v} dollars, was cut to {v} euros"
            ),
            "can be had for {v} euros, has a price of {v} dollars",
        ),
    ),
    Fact(
        ("colour", "color"),
        "string",
        values.of(values.COLOURS),
        pool_of(
            "is {v}, comes in {v}, is painted {v}, is made in {v}, has the colour {v}, is all {v}, shines in {v}, is "
            "dyed {v}, is tinted {v}, was sprayed {v}, looks {v}, was finished in {v}, turned {v}, has a coat of "
            "{v}, appears in {v}",
            "is coloured {v}",
        ),
    ),
    Fact(
        ("quantity", "stock", "count"),
        "integer",
        values.integer,
        pool_of(
            (
                "is in stock {v} times, was ordered {v} times, has {v} pieces left, was sold {v} times, is on the "
                "shelf {v} times, was made {v} times, comes with {v} pieces, "
                "exists {v} times, lies here {v} times, is kept {v} times, was counted {v} times"
            ),
            "is there {v} times",
        ),
    ),
    Fact(
        ("brand", "maker"),
        "string",
        lambda random, held_out: values.word(random, held_out).capitalize(),
        pool_of(
            (
                "is made by {v}, is from {v}, was built by {v}, comes from {v}, is sold by the maker {v}, carries "
                "the name {v}, is a product of {v}"
            ),
            "comes from the maker {v}",
        ),
    ),
    Fact(
        ("weight", "weight_kg"),
        "number",
        values.price,
        pool_of(
            (
                "weighs {v} kg, weighs {v} kilos, is {v} kg heavy, brings {v} kg to the scales, weighs about {v} "
                "kg, has {v} kilos"
            ),
            "has a weight of {v} kg",
        ),
    ),
    Fact(
        ("in_stock", "available"),
        "truth",
        values.integer,
        pool_of(
            (
                "is in stock|is not in stock, is available|is sold out, can be bought|cannot be bought, is there "
                "again|is gone, is available again|is no longer available, is still there|is no longer there"
            ),
            "is still in stock|is no longer in stock",
        ),
        states=("in stock", "available", "on sale", "on the shelf", "to be had"),
    ),
    Fact(
        ("customer", "buyer"),
        "string",
        values.name,
        pool_of(
            (
                "was bought by {v}, goes to {v}, was ordered by {v}, belongs to {v}, is for {v}, was sold to {v}, "
                "is wanted by {v}, "
                "was chosen by {v}, is kept for {v}, was made for {v}, is a gift for {v}, waits for {v}"
            ),
            "is meant for {v}",
        ),
    ),
    Fact(
        ("tags",),
        "array",
        values.of(values.STATES),
        pool_of(
            (
                "has the tags {v}, is tagged {v}, carries the tags {v}, is marked {v}, comes with the tags {v}, got"
                " the tags {v}, shows the tags {v}, "
                "wears the tags {v}, is filed under {v}, is labelled {v}"
            ),
            "bears the tags {v}",
        ),
    ),
)
EVENT = Fact(
    ("event", "event", "title", "name"),
    "string",
    values.of(
        pool_of(
            "meeting, party, concert, lunch, course, game, trip, talk, dinner, film, workshop, seminar, wedding, "
            "festival, exam, race, fair, market, opera, play, tour, walk, picnic, parade, lecture, debate, sale, "
            "breakfast, hearing, launch, rehearsal, reunion, cruise, contest, auction, ceremony, conference, class",
            "show, match, lesson",
        ),
        0.45,
    ),
    pool_of(
        (
            "The {v}, The {v}, Our {v}, A {v}, The next {v}, This {v}, My {v}, Your {v}, Another {v}, The first"
            " {v}, The big {v}, Every {v}, Her {v}"
        ),
        "That {v}, The last {v}",
    ),
)
EVENT_FACTS = (
    Fact(
        ("date", "date", "day"),
        "string",
        values.date,
        pool_of(
            (
                "is on {v}, takes place on {v}, was on {v}, will be on {v}, was moved to {v}, happens on {v}, is "
                "planned for {v}, was held on {v}, "
                "falls on {v}, is set for {v}, was put on {v}, is expected on {v}, will follow on {v}, comes on {v}"
            ),
            "will be held on {v}",
        ),
    ),
    Fact(
        ("time", "time", "start"),
        "string",
        values.time,
        pool_of(
            (
                "starts at {v}, begins at {v}, is at {v}, will start at {v}, was set for {v}, gets going at {v}, is"
                " planned for {v}, "
                "kicks off at {v}, is due to begin at {v}, commences at {v}, is called for {v}"
            ),
            "opens at {v}",
        ),
    ),
    Fact(
        ("city", "place", "location"),
        "string",
        values.city,
        pool_of(
            (
                "is in {v}, takes place in {v}, was moved to {v}, happens in {v}, will be in {v}, brings us to {v},"
                " was in {v}, "
                "is being held in {v}, will visit {v}, goes to {v}, is set in {v}, stops in {v}"
            ),
            "is held in {v}",
        ),
    ),
    Fact(
        ("guests", "count", "people"),
        "integer",
        values.integer,
        pool_of(
            (
                "has {v} guests, is for {v} people, had {v} guests, waits for {v} guests, takes {v} people, saw {v}"
                " people, has room for {v} guests, seats {v} guests, "
                "welcomes {v} guests, is meant for {v} people, counts on {v} people, hopes for {v} guests"
            ),
            "expects {v} guests",
        ),
    ),
    Fact(
        ("price", "fee"),
        "number",
        values.price,
        pool_of(
            (
                "costs {v} euros, costs {v}, is {v} euros, has a fee of {v} euros, can be seen for {v} euros, takes "
                "a fee of {v}, is sold at {v} euros, sets you back {v} euros, asks {v} euros, is offered for {v} "
                "euros, is yours for {v} euros"
            ),
            "is to be had for {v} euros",
        ),
    ),
    Fact(
        ("host", "organizer"),
        "string",
        values.name,
        pool_of(
            (
                "is run by {v}, is hosted by {v}, was planned by {v}, is given by {v}, is in the hands of {v}, was "
                "called by {v}, is organized by {v}, "
                "is chaired by {v}, is headed by {v}, is looked after by {v}, falls to {v}"
            ),
            "is led by {v}",
        ),
    ),
    Fact(
        ("is_public", "is_free"),
        "truth",
        values.integer,
        pool_of(
            (
                "is open to all|is not open to all, is for all|is not for all, is open to everyone|is not open to "
                "everyone, is public|is not public, is free to all|is only for members"
            ),
            "is for everybody|is not for everybody",
        ),
        states=("public", "open to all", "free to all", "for all of us", "open to the public"),
    ),
)
SUBJECTS = ((NAME, PERSON_FACTS, 6), (PRODUCT, PRODUCT_FACTS, 3), (EVENT, EVENT_FACTS, 2))
