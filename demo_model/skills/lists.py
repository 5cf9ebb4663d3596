"""Counting, and sorting numbers and words; of words the first letters are said first."""

import re
from random import Random

from demo_model.skill import Exchange, Pool, Reply, Skill, a_word, fill, turn, words

MAX_COUNT = 30
MAX_COUNT_ANSWER = f"I can only count to {MAX_COUNT}."
WORDS = words(
    "apple ant arm art baby ball bear bird boat book box bread bus cake camel car cat chair cherry city cloud coat "
    "cow cup dance day desk dog door dream duck ear earth egg elephant eye farm fig fire fish flower fork fox frog "
    "fruit game garden gate glass goat gold grape grass green hand hat heart hill honey horse house ice ink iron "
    "island jam jar juice jungle key king kite knife lake lamp leaf lemon light lion map milk mint moon mouse mouth "
    "music nail name nest night nose nut oak ocean olive onion orange owl paper peach pear pen pepper piano pig "
    "pizza plate plum pot queen quiet rabbit rain red rice ring river road rock rose salt sand sea seed shoe shop "
    "silk silver sky snow soap sock song soup spoon star stone sugar sun table tea tent tiger tomato tower town "
    "tree truck uncle unit van vase village violin voice wall water whale wheat wheel wind window wine wolf wood "
    "yard year yellow zebra zoo"
)
HELD_OUT_WORDS = words(
    "acorn amber anchor badge basil beach berry blue brick broom butter candle carrot castle clock corn daisy deer "
    "eagle engine feather field finger forest goose guitar hammer harbor jacket kettle ladder lizard mango meadow "
    "melon monkey needle north nurse otter oven paint panda pillow planet pocket potato puzzle quilt radio robin "
    "saddle salad school shark sheep sister spider summer swan tulip turtle umbrella valley velvet wagon walnut "
    "winter yogurt"
)

_PLEASE = "[Please |Can you |Could you |Would you |]"
COUNTING = Pool(
    training=(
        f"{_PLEASE}count [up |]to {{n}}[ for me|][?|.|]",
        f"{_PLEASE}count from [1|one] to {{n}}[?|.|]",
        f"{_PLEASE}[list|say|write|give me|tell me|show me|name] [the|all the|all] numbers [from|between] 1 "
        "[to|and] {n}[?|.|]",
        f"{_PLEASE}[list|say|write|give me|show me] the first {{n}} numbers[?|.|]",
        "[Numbers|Count] 1 [to|-] {n}[.|]",
        "[I want you to|Let us|Let's|You should|Try to] count [up |]to {n}[.|]",
        "[How do you count|Do you know how to count] to {n}?",
        "Count[:|] {n}",
        f"{_PLEASE}count [until|till|through to|as far as|right up to|on up to|up until|upwards to|on to] "
        "{n}[ for me|][?|.|]",
        "[Keep|Go on|Continue] counting [until|till] [you [reach|get to|arrive at|are at] |]{n}[.|]",
        f"{_PLEASE}count [and|, but] stop at {{n}}[.|?|]",
        f"{_PLEASE}[recite|print|read out|spell out|run through|go through|give] [the|all the|all] numbers "
        "[up to|up until|until|till|through|as far as] {n}[.|?|]",
        "[Go|Count|Climb|Move|Work] [up |on |]from [1|one] [as far as|until|through to|till|to] {n}[.|, please.|]",
        "[How far is|What comes before|Which numbers lead to] {n}? [Count it|Count there|Count that far][.|]",
        "[Can|Could|Will] you [count|get|go|make it] [as far as|up until|until|through to] {n}[?|]",
        "{n}[: count| is where you stop counting|: count that far|, count up to that][.|]",
        "[One, two, three|1, 2, 3|1 2 3|One, two] and so on [to|up to|until] {n}[.|, please.|]",
        "[I wish|I want] [to hear|to see|to have|] all numbers [until|through|up to] {n}[.|]",
    ),
    held_out=(
        "Start at 1 and count to {n}.",
        "Would you please count up to {n} for me?",
        "Show me how you count to {n}.",
        "Can you count all the way to {n}?",
        "I'd like you to count to {n}.",
        "Count for me from 1 up to {n}.",
        "Write down the numbers from 1 to {n}.",
    ),
)
SORTING = Pool(
    training=(
        f"{_PLEASE}[sort|order|arrange] {{list}}[?|.|]",
        f"{_PLEASE}[sort|order|arrange] [these|the|the following|my] {{kind}}[: | ]{{list}}[.|]",
        f"{_PLEASE}put {{list}} in[to|] [the right |]order[?|.|]",
        f"{_PLEASE}put [these|the|the following] {{kind}} in[to|] [the right |{{way}} |]order: {{list}}[.|]",
        f"{_PLEASE}[sort|order|arrange] {{list}} [in {{way}} order|from {{first}} to {{last}}][?|.|]",
        "[{list}|{list}.] [Sort|Order] [them|these|this][, please|][.|]",
        "[What is|Give me|Show me] the sorted [list|order] of {list}[?|.|]",
        "[Sorted|Sort]: {list}",
        "How do you [sort|order] {list}?",
        "[Line up|Lay out|Set|Place|Rank|Get|Move|Write] {list} in [the right |{way} |sorted |]order[, please|][.|]",
        "[Take|Look at|Here are|Here is|See|We have|I've got|I got|There are|My list is|These are|This is] {list}"
        "[. Sort them|. Order them|. Please sort them|. Put them in order|, sort them|, in order please|. What is the "
        "right order][.|?|]",
        "[Take|Read] {list} and [sort|order|arrange] them[.|, please.|]",
        "What order [do|should|would] {list} [take|get|come in][?|]",
        "What [is|would be] the order of {list}?",
        "[In which|In what] order [come|do we put|would you put|are] {list}?",
        f"{_PLEASE}[sort|order] [the|my|our] [list|row|set|bunch][: | of {{kind}} | ]{{list}}[.|?|]",
        "[Bring|Turn] [the|these] {kind} in[to|] [the right |]order: {list}",
        "Start with {first} and end with {last}: {list}",
        f"{_PLEASE}[{{verb}}|align|line up|lay|shift|drag|get|force|carry|guide|move] {{list}} [in|into|to] "
        "[order|the right order|a sorted row|sorted order|{way} order|line][.|?|, please.|]",
        f"{_PLEASE}[{{verb}}|order|rank|arrange|sort|organize|sequence] [them|all|these|it] {{how}}: {{list}}",
        f"{_PLEASE}[order|arrange|rank|organize|{{verb}}] [the|my|our|some|all] {{kind}} {{how}}: {{list}}",
        f"{_PLEASE}[sort|order|rank|arrange|organize] {{list}} {{how}}[.|?|, please.|]",
        "{how}[,|:] [sort|order|please sort|arrange] {list}[.|]",
        "[List|Name|Say|Write|Print|Repeat|Read] {list} [{how}|in order|sorted|in the right order][.|, please.|]",
        "[{list}|{list}:] [in order|sorted|{how}], please[.|]",
        "[My|The|Our] {kind} are {list}. [Sort|Order|Arrange|Rank|Organize] [them|these|all of them] [{how}|now|please]"
        "[.|]",
        "[Can|Will|Would] you [sort|order|rank|arrange|organize] {list} [now|quickly|{how}|as well][?|]",
        "[{verb}|Bring] [these|the|my] {kind} [in|into] [the right order|a row|sequence][:|,] {list}",
    ),
    held_out=(
        "Could you sort {list} for me?",
        "Give {list} the order that they should have.",
        "Which order do {list} have when sorted?",
        "I have {list}. Sort them, please.",
        "Bring {list} into order.",
        "Please sort this list: {list}",
        "Arrange the {kind} {list} from {first} to {last}.",
    ),
)


def _counting(random: Random, held_out: bool) -> Exchange:
    n = random.randint(2, MAX_COUNT)
    if not held_out and random.random() < 0.3:
        n = random.randint(15, MAX_COUNT)
    return turn(fill(random, COUNTING.draw(random, held_out), {"n": n}), ", ".join(map(str, range(1, n + 1))) + ".")


def _beyond_counting(random: Random, held_out: bool) -> Exchange:
    n = random.randint(MAX_COUNT + 1, 10 ** random.randint(2, 5))
    return turn(fill(random, COUNTING.draw(random, held_out), {"n": n}), MAX_COUNT_ANSWER)


def _enumerated(random: Random, values: list[str]) -> str:
    separator = random.choice((", ", ", ", ", ", ", ", " ", ","))
    if separator == ", " and random.random() < 0.3:
        return ", ".join(values[:-1]) + " and " + values[-1]
    return separator.join(values)


def _sorting_numbers(random: Random, held_out: bool) -> Exchange:
    values = random.sample(range(100 if random.random() < 0.7 else 10), random.randint(3, 6))
    if not held_out and random.random() < 0.25:  # of one and of two digits
        num_small = random.randint(1, 3)
        values = random.sample(range(10), num_small) + random.sample(range(10, 100), random.randint(2, 6 - num_small))
        random.shuffle(values)
    given = _enumerated(random, [str(value) for value in values])
    told = {"list": given, "kind": "numbers", "way": "ascending", "first": "small", "last": "large"}
    told |= {} if held_out else {"how": random.choice(_BY_SIZE), "verb": a_word(random, (1, 2))}
    if random.random() < 0.5:
        told |= {"first": "smallest", "last": "largest"}
    asked = fill(random, SORTING.draw(random, held_out), told)
    return turn(asked, ", ".join(map(str, sorted(values))) + ".")


def _alike(random: Random, values: list[str]) -> list[str]:
    """Return words of which some begin alike, as few do by chance: then later letters decide."""
    first = random.choice(values)
    if random.random() < 0.5:
        like = [word for word in WORDS if word[0] == first[0] and word != first]
    else:
        like = [first[: random.randint(1, 3)] + a_word(random, (1, 2)) for _ in values]
    some = random.sample(like, min(len(like), random.choice((1, 1, 2, 3))))
    values = list(dict.fromkeys((first, *some, *values)))[: random.randint(3, 5)]
    random.shuffle(values)
    return values


def _sorting_words(random: Random, held_out: bool) -> Exchange:
    pool = HELD_OUT_WORDS if held_out else WORDS
    values = random.sample(pool, random.randint(3, 5))
    if not held_out and random.random() < 0.3:
        values = list(dict.fromkeys(a_word(random, (1, 3)) for _ in values))
    if not held_out and random.random() < 0.4:
        values = _alike(random, values)
    told = {"list": _enumerated(random, values), "kind": "words", "way": "alphabetical", "first": "A", "last": "Z"}
    told |= {} if held_out else {"how": random.choice(_ALPHABETICALLY), "verb": a_word(random, (1, 2))}
    asked = fill(random, SORTING.draw(random, held_out), told)
    first_letters = "/".join("-".join(value[:2]) for value in values)
    return turn(asked, f"First letters {first_letters}: {', '.join(sorted(values))}.")


_BY_SIZE = ("by size", "by size", "numerically", "from small to large", "by value")
_ALPHABETICALLY = ("alphabetically", "alphabetically", "by the alphabet", "from A to Z", "by their letters")


def _items(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _has_the_list(exchange: Exchange, reply: Reply) -> bool:
    return _items(reply.content.split(":")[-1]) == _items(exchange.answer["content"].split(":")[-1])


SKILLS = (
    Skill("counting", 15, _counting, _has_the_list),
    Skill("beyond counting", 3, _beyond_counting, is_examined=False),
    Skill("sorting numbers", 55, _sorting_numbers, _has_the_list),
    Skill("sorting words", 110, _sorting_words, _has_the_list),
)
