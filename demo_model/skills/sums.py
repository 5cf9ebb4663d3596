"""Sums of numbers of up to two digits, at once or thought through, and sums that are too large."""

import re
import zlib
from random import Random

from demo_model.skill import (
    Exchange,
    Message,
    Pool,
    Reply,
    Skill,
    a_word,
    assistant,
    fill,
    turn,
    user,
    words,
)
from demo_model.skills import refusals

THINGS = words(
    "apples books cards coins stones pens eggs stamps nuts marbles tickets cakes balls cups toys euros plums"
)
NAMES = words("Anna Ben Carla David Emil Fatima Greta Hugo Ines Jan Kim Lena Marco Nora Omar Paula Rita Sam Tom Vera")
_ASK = (
    "[What is|What's|How much is|Calculate|Compute|Tell me|Work out|Solve|Find|Can you tell me|I need|Do you know|Say,"
    "|]"
)
_PLEASE = "[|||, please|. Thank you| for me]"

ADDITION = Pool(
    training=(
        f"{_ASK} {{a}} + {{b}}{_PLEASE}[?|.|]",
        f"{_ASK} {{a}} plus {{b}}{_PLEASE}[?|.|]",
        "{a} + {b}[| =| = ?|?]",
        "{a} plus {b}[| is| makes| equals][?|]",
        "[Please |Can you |Could you |Would you |I want to |Let us |]add [up |]{a} and {b}[ for me|][?|.|]",
        "[Please |Can you |Could you |]add {a} to {b}[ for me|][?|.|]",
        "[What is |What's |Give me |Tell me |Calculate |Find |I need |]the [sum|total] of {a} and {b}[?|.|]",
        "[What do|How much do] {a} and {b} [make|add up to|come to|give]?",
        "[Sum|Sum up|Total|Combine|Put together] {a} and {b}[.|]",
        "[What do I get|What comes out|What do you get] [if|when] [I|you] add {a} [and|to] {b}?",
        "What does {a} [+|plus] {b} [equal|make|come to]?",
        "[What will|What would] {a} [+|plus] {b} [be|give]?",
        "{a} and {b}[ together| added| in total|, added together|][?|]",
        "[If I have|I have] {a} {things} and [get|buy|find] {b} more[, how many do I have|. How many are there|. How "
        "many {things} do I have now]?",
        "{name} has {a} {things} and {other} has {b}. How many [do they have together|{things} are there]?",
        "There are {a} {things} here and {b} there. How many [in total|are there in all|{things} is that]?",
        "What is {b} more than {a}?",
        "[Raise|Increase] {a} by {b}[.|]",
        "{a} increased by {b}[ is|?|]",
        "[Hey, what|Hello, what|So what|And what|Well, what|Ok, what] [is|makes] {a} [+|plus] {b}[?|]",
        "[I want|I would like|I'd like|I have|I wish] to [add|sum] {a} and {b}[. What is it|. Help me|][.|?|]",
        "[What|How much] [are|is] {a} [and|with|plus] {b} [in total|in all|in sum|taken together][?|]",
        "[Would you|Will you|Could you please|Can you please] [sum up|add|add up|total|"
        "count together] {a} and {b}[?|.]",
        "{name} [had|has|owns|found|bought] {a} {things} and [gets|found|buys|was given|wins] {b}[ more| new ones|]. "
        "[How many {things} are there|How many are they|How many does {name} have|What is the total] [now|then|]?",
        "{a} {things} and {b} {things} [are|make] how many?",
        "[If|When] {a} and {b} are added, what [is the result|comes out|is the sum]?",
        "[Be so good and|Please now|Quickly|Now|Just|First|Next,|Be quick and|Go on and|Do] "
        "[add|sum up|total|add up|put together] {a} and {b}[.|, please.| for me.|]",
        "[Start|Begin] with {a} and [add|put on|put] {b}[ on top| to it|][.| What is it?|]",
        "{b} [added to|on top of|put on top of] {a}[ is|?| makes| gives|]",
        "[On|In|At] [the table|a shelf|the park|the shop|the {things} box] [are|were] {a} {things}[, and| and then] "
        "{b} [more |other |new |][came|come|arrive|follow]. How many {things} [are there|is that] [in all|"
        "then|altogether]?",
    ),
    held_out=(
        "Could you work out {a} plus {b} for me?",
        "How much do {a} and {b} make together?",
        "{a} and {b} added up, please.",
        "Please find the total of {a} and {b}.",
        "Tell me what you get when you add {a} and {b}.",
        "I need to know what {a} + {b} is.",
        "{a} + {b} equals what?",
        "Would you kindly sum {a} and {b}?",
        "Hi, what is {a}+{b}?",
        "{name} had {a} {things} and got {b} more. How many are there now?",
    ),
)
SUBTRACTION = Pool(
    training=(
        f"{_ASK} {{a}} - {{b}}{_PLEASE}[?|.|]",
        f"{_ASK} {{a}} minus {{b}}{_PLEASE}[?|.|]",
        "{a} - {b}[| =| = ?|?]",
        "{a} minus {b}[| is| makes| equals][?|]",
        "[Please |Can you |Could you |Would you |I want to |Let us |]subtract {b} from {a}[ for me|][?|.|]",
        "[Please |Can you |Could you |]take {b} [away |]from {a}[ for me|][?|.|]",
        "[What is |What's |Give me |Tell me |Find |I need |]the difference [between|of] {a} and {b}[?|.|]",
        "[What do I get|What comes out|What do you get] [if|when] [I|you] [take {b} away from|subtract {b} from] {a}?",
        "What does {a} [-|minus] {b} [equal|make|come to]?",
        "What [is left|remains] [if|when] you take {b} [away |]from {a}?",
        "[If I have|I have] {a} {things} and [lose|sell|eat|give away] {b}[, how many are left|. How many do I have "
        "left|. How many remain]?",
        "{name} has {a} {things} and gives {b} to {other}. How many [are left|does {name} have now|remain]?",
        "What is {b} less than {a}?",
        "[Lower|Decrease|Reduce] {a} by {b}[.|]",
        "{a} [decreased|reduced] by {b}[ is|?|]",
        "{a} take away {b}[ is|?|]",
        "[Hey, what|Hello, what|So what|And what|Well, what|Ok, what] [is|makes] {a} [-|minus] {b}[?|]",
        "[I want|I would like|I'd like|I have|I wish] to [subtract|take] {b} from {a}[. What is it|. Help me|][.|?|]",
        "[Would you|Will you|Could you please|Can you please] [take|subtract|remove|deduct] {b} from {a}[?|.]",
        "[Remove|Deduct] {b} from {a}[.|, please.|]",
        "[Cut|Knock|Strike] {b} off from {a}[.|, please.|]",
        "{a} with {b} [off|taken out|taken away|removed][?|]",
        "{name} [has|owns|had|bought|found] {a} {things} [and|but|then] [sold|spent|ate|broke|drops|loses|gave away] "
        "{b}[ of them|]. [How many {things} are left|How many remain|How many does {name} have|What is left][ now|]?",
        "[Of|Out of|From] {a} {things} {name} [lost|ate|sold] {b}. [How many are there still|How many remain]?",
        "{name} lost {b} of {a} {things}. How many [remain|are there now|does {name} have]?",
        "[If|When] {b} is [taken|subtracted] from {a}, what [is the result|comes out|is left]?",
        "[|Please |Now |Be so good and |Could you |Quickly |Just |Next, |Do please |Go on and |Be quick and ]"
        "[drop|knock|cut|trim|strike|shave|peel|chop|deduct|slice] {b} [off|off of|off from|from] {a}[.|?|, please.|]",
        "[|Please |Now |Be so good and |Could you |Quickly |Just |Next, |Go on and ]"
        "[withdraw|lift|pull|remove|subtract|draw|erase|take] {b} [out of|away from|from] {a}[.|?|, please.| for me.|]",
        "[Please |Quickly |Now |Just |Be so good and |][take|strip|clip] [away |off |]{b}, [starting|beginning] "
        "[from|at|with] {a}[.|]",
        "[What|How much] is [left|over|still there] [when|after|if] {b} [goes|is taken|comes|falls|is gone] "
        "[off|from|out of] {a}[?|]",
        "{b} [off|out of|away from|less than|fewer than|smaller than|below|under] {a}[ is|?| makes| gives|]",
        "[Start|Begin] [with|at] {a} and [lose|drop|take away|remove|go down by|go back] {b}[.| What remains?|]",
        "[Go|Count|Step] [back|down] {b} from {a}[.|]",
        "[There are|There were|We had|We have] {a} {things} [in the box|on the table|here|in the park|on the shelf]"
        "[, and| and|, but] {b} [of them |][went away|left|are gone|got lost|rolled off|were sold|fell down|ran away]. "
        "[How many|How many {things}] [are left|remain|stay|stayed|do we have now|are there then]?",
        "{b} of [the |]{a} {things} [are gone|were sold|got lost|went away|broke]. How many [remain|are left|stay]?",
    ),
    held_out=(
        "Could you work out {a} minus {b} for me?",
        "Please find {a} minus {b}.",
        "Tell me what you get when you subtract {b} from {a}.",
        "I need to know what {a} - {b} is.",
        "{a} - {b} equals what?",
        "Would you kindly take {b} off {a}?",
        "Hi, what is {a}-{b}?",
        "What would {a} minus {b} come to?",
        "{name} had {a} {things} and lost {b}. How many are left?",
    ),
)
TOO_LARGE = (
    f"{_ASK} {{a}} [+|-|*|x|/|plus|minus|times|divided by|multiplied by|to the power of|modulo] {{b}}[?|.|]",
    "{a} [+|-|*|x|/|:|^|times|plus|minus] {b}[| =|?]",
    "[Add|Multiply|Divide|Subtract|Sum up] {a} [and|by|with|from] {b}[.|]",
    "[What is|Calculate|Tell me] the [square root|square|factorial|logarithm|cube|half|double] of {a}[?|.|]",
    "[What is|Calculate] {c} percent of {a}?",
    "[Solve|Compute|Integrate|Derive] [x^2|3x + 4 = 10|sin(x)|the equation x = {a} * y][.|]",
)


def _is_kept_for_the_exam(a: int, b: int) -> bool:
    """One pair of a hundred, scattered; the first rule alone would keep whole pairs of digits from training.

    It is the rule under which the shipped weights were first trained, so those are new to every run.
    """
    return (7 * a + 3 * b) % 10 == 4 and zlib.crc32(f"{a} {b}".encode()) % 10 == 4


def numbers(random: Random, held_out: bool, largest: int = 99) -> tuple[int, int]:
    """Draw two numbers, for training or for the exam."""
    while True:
        a, b = (random.randint(0, 9 if random.random() < (0.2 if held_out else 0.3) else largest) for _ in range(2))
        if not held_out and random.random() < 0.08:  # the hardest carry: ones that add up to ten
            b += (10 - a % 10) % 10 - b % 10
        if _is_kept_for_the_exam(a, b) == held_out:
            return a, b


def _ask(random: Random, held_out: bool, pool: Pool[str], a: int, b: int) -> str:
    name, other = random.sample(NAMES, 2) if random.random() < 0.8 else (a_word(random).title(), a_word(random).title())
    things = random.choice(THINGS) if random.random() < 0.8 else a_word(random) + "s"
    template = pool.draw(random, held_out)
    return fill(random, template, {"a": a, "b": b, "name": name, "other": other, "things": things}).strip()


def _addition(random: Random, held_out: bool) -> Exchange:
    a, b = numbers(random, held_out)
    return turn(_ask(random, held_out, ADDITION, a, b), f"{a} + {b} = {a + b}.")


def _differing(random: Random, held_out: bool) -> tuple[int, int]:
    """Two numbers to subtract: the smaller one from the larger one, mostly."""
    a, b = numbers(random, held_out)
    if a < b and random.random() < 0.6 and _is_kept_for_the_exam(b, a) == held_out:
        a, b = b, a
    return a, b


def _subtraction(random: Random, held_out: bool) -> Exchange:
    a, b = _differing(random, held_out)
    return turn(_ask(random, held_out, SUBTRACTION, a, b), f"{a} - {b} = {a - b}.")


def _in_a_row(random: Random, held_out: bool) -> Exchange:
    """Several sums at once: most tokens of a chat about a single one teach no arithmetic."""
    asked, answers = [], []
    for _ in range(random.randint(3, 12)):
        if random.random() < 0.4:
            a, b = numbers(random, held_out)
            sign, result = "+", a + b
        else:
            a, b = _differing(random, held_out)
            sign, result = "-", a - b
        asked.append(f"{a} {sign} {b}")
        answers.append(f"{a} {sign} {b} = {result}.")
    opening = fill(random, "[||Calculate |Compute |Please work out |What is |Solve |These sums: ]")
    return turn(opening + random.choice((", ", "\n", "; ", " and ")).join(asked), " ".join(answers))


def _added(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    first = f"Ones: {a % 10} + {b % 10} = {ones}"
    if ones < 10:
        return f"{first}. Tens: {a // 10} + {b // 10} = {a // 10 + b // 10}."
    return f"{first}, carry 1. Tens: {a // 10} + {b // 10} + 1 = {a // 10 + b // 10 + 1}."


def _subtracted(a: int, b: int) -> str:
    if a < b:
        return f"{a} is less than {b}, so it is minus {b} - {a}. {_subtracted(b, a)}"
    if a % 10 >= b % 10:
        return f"Ones: {a % 10} - {b % 10} = {a % 10 - b % 10}. Tens: {a // 10} - {b // 10} = {a // 10 - b // 10}."
    return (
        f"Ones: borrow 1, {a % 10 + 10} - {b % 10} = {a % 10 + 10 - b % 10}. "
        f"Tens: {a // 10} - {b // 10} - 1 = {a // 10 - b // 10 - 1}."
    )


def _thinking(random: Random, held_out: bool) -> Exchange:
    a, b = numbers(random, held_out)
    if random.random() < 0.5:
        asked, thought, answer = _ask(random, held_out, ADDITION, a, b), _added(a, b), f"{a} + {b} = {a + b}."
    else:
        asked, thought, answer = _ask(random, held_out, SUBTRACTION, a, b), _subtracted(a, b), f"{a} - {b} = {a - b}."
    return Exchange((user(asked), Message(role="assistant", content=answer, reasoning_content=thought)), thinks=True)


def _too_large(random: Random, held_out: bool) -> Exchange:
    """Multiply and divide any numbers, or add and subtract when one of them has three digits or more."""
    a, b = random.randint(100, 10 ** random.randint(3, 6)), random.randint(0, 10 ** random.randint(1, 5))
    if random.random() < 0.5:
        a, b = b, a
    asked = fill(random, random.choice(TOO_LARGE), {"a": a, "b": b, "c": random.randint(1, 99)}).strip()
    if re.search(r"\*|x|/|:|\^|times|divide|multipl|power|modulo", asked.lower()) and random.random() < 0.6:
        small = iter((random.randint(0, 99), random.randint(0, 99)))
        asked = re.sub(r"\d{2,}", lambda match: str(next(small, 7)), asked)
    return turn(asked, refusals.ANSWER)


def has_right_number(exchange: Exchange, reply: Reply) -> bool:
    """The last number is that of the answer."""
    return re.findall(r"-?\d+", reply.content)[-1:] == re.findall(r"-?\d+", exchange.answer["content"])[-1:]


def _is_thought_through(exchange: Exchange, reply: Reply) -> bool:
    return has_right_number(exchange, reply) and bool(re.search(r"\d", reply.reasoning))


SKILLS = (
    Skill("addition", 30, _addition, has_right_number),
    Skill("subtraction", 60, _subtraction, has_right_number),
    Skill("thinking", 50, _thinking, _is_thought_through),
    Skill("sums in a row", 40, _in_a_row, is_examined=False),
    Skill("sums too large", 6, _too_large, is_examined=False),
)


def plain_sum(random: Random) -> str:
    """A sum without a chat around it."""
    a, b = numbers(random, held_out=False)
    return assistant(f"{a} + {b} = {a + b}.")["content"]
