"""Everyday tools beside those of `known_tools`, in training alone: what each exam asks stays as it was. Data only."""

from collections.abc import Sequence
from random import Random

from demo_model.skill import Pool, a_word, fill, words
from demo_model.skills import plain_texts, values
from demo_model.skills.known_tools import KnownTool, Parameter


def _tool(topic: str, names: str, description: str, parameters: Sequence[Parameter], *asked: str) -> KnownTool:
    return KnownTool(topic, Pool(tuple(names.split()), ()), description, tuple(parameters), Pool(asked, ()))


def _from(listed: str) -> values.Maker:
    """Draw from a list, now and then a made-up word."""
    return lambda random, held_out: (
        a_word(random, (1, 3)) if random.random() < 0.25 else random.choice(listed.split(", "))
    )


def _within(first: int, last: int) -> values.Maker:
    return lambda random, held_out: random.randint(first, last)


def _degrees(random: Random, held_out: bool) -> float | int:
    whole = random.randint(1, 39)
    return whole if random.random() < 0.4 else round(whole + random.choice((5, random.randint(1, 9))) / 10, 1)


def _goods(random: Random, held_out: bool) -> str:
    """What is bought by the piece."""
    thing = random.choice(plain_texts.THINGS) if random.random() < 0.6 else a_word(random, (1, 2))
    thing = plain_texts.plural(thing) if random.random() < 0.8 else thing
    return f"{random.choice(plain_texts.ADJECTIVES)} {thing}" if random.random() < 0.35 else thing


def _title(random: Random, held_out: bool) -> str:
    text = values.phrase(random, held_out)
    return text.title() if random.random() < 0.5 else text


def _artist(random: Random, held_out: bool) -> str:
    if random.random() < 0.6:
        return values.name(random, held_out)
    return fill(random, "The [{a}|{b} {a}]", {"a": a_word(random, (1, 2)).title() + "s", "b": a_word(random).title()})


_room = _from(", ".join((*plain_texts.ROOMS, "living room", "guest room", "dining room", "small bedroom")))
_MONEY = words("euros dollars pounds yen francs pesos rupees crowns EUR USD GBP JPY CHF SEK INR CAD AUD PLN")
_FOODS = "pizza, a burger, sushi, two salads, noodles, fried rice, a big soup, tacos, three pancakes, a cheese sandwich"

HOME_TOOLS = (
    _tool(
        "temperature heat heater",
        "set_temperature set_temp thermostat set_heating heating change_temperature",
        "[Set|Change] the [temperature|heating|room temperature][| in degrees][|.]",
        (Parameter("degrees|temperature|value|celsius", "number", _degrees),),
        "[set|turn|put] the [heating|temperature|thermostat] to {a}[| degrees][.|, please.|]",
        "[heat|warm|cool] the [flat|room|house|place] [up |down |]to {a} degrees[.|]",
        "[it should be|I want it|I would like to have] {a} degrees [|warm |cold ][in this room|inside|at home][.|]",
        "[temperature|heating|thermostat][:| to| at] {a}[| degrees|, please]",
        "[can|could|will] you [set|change|bring] [it|the temperature] to {a} degrees?",
        "[keep|hold|have] [the room|the flat|it] at {a} degrees[.| tonight.|]",
        "[I am cold|I am freezing|it is too hot|it is chilly][.|,] {a} degrees[, please|][.|]",
        "[raise|lower|change|move] the [heating|temperature] to {a}[| degrees][.|]",
        "{a} degrees would be [nice|good|fine][| in this house][.|]",
    ),
    _tool(
        "light lamp brightness",
        "set_brightness dim_light set_light light_level lights",
        "[Set|Change] the [brightness|light] [of|in] a room[| in percent][|.]",
        (
            Parameter("room|place|location", "string", _room),
            Parameter("percent|level|brightness", "integer", _within(0, 100)),
        ),
        "[dim|turn] the [light|lights|lamp] [of|in] the {a} [up |down |]to {b}[| percent|%][.|]",
        "[dim|set|turn] the {a} [light|lights|lamp] to {b}[| percent|%][.|, please.|]",
        "[light|brightness|lamp] in the {a}[:|,] {b}[| percent|%][.|]",
        "[can|could|would] you [make|have] the {a} {b} percent bright?",
        "the {a} [needs|should have|gets|wants] {b} percent [light|brightness][.|]",
        "{b} percent [light|brightness] [for|in] the {a}[.|, please.|]",
        "[give|bring] [us|me] {b} percent of light in the {a}[.|]",
        "I [want|need|would like] the lamp in the {a} at {b}[| percent|%][.|]",
        "[brighten|darken] the {a} to {b}[| percent|%][.|]",
    ),
    _tool(
        "volume sound",
        "set_volume change_volume volume sound_level",
        "[Set|Change] the [volume|loudness][| of a device][|.]",
        (Parameter("level|volume|percent", "integer", _within(0, 100)),),
        "[set|turn|put] the [volume|sound] [up |down |]to {a}[| percent][.|, please.|]",
        "[volume|sound|loudness][:| to| at] {a}[| percent|%][.|]",
        "[louder|quieter|not so loud][, please|][:|,] {a}[| percent][.|]",
        "[can|could|will] you [change|turn|raise|lower] the [sound|volume] to {a}?",
        "I [want|would like] to [hear|have] it at [volume|level] {a}[.|]",
        "[play|keep] it at [volume|loudness] {a}[.|]",
        "[make|turn] it [louder|softer|quieter][,| now,] to {a}[.|]",
        "the [sound|volume] should be [at |]{a}[| percent][.|]",
    ),
    _tool(
        "music song play radio",
        "play_music play_song play_track start_music music",
        "[Play|Start] [music|a song][| by an artist| of a band][|.]",
        (Parameter("song|title|track", "string", _title), Parameter("artist|band|singer", "string", _artist)),
        'play [{a}|"{a}"] by {b}[.|, please.|]',
        'I [want|would like|wish|love] to [hear|listen to] [{a}|"{a}"] by {b}[.|]',
        'put on "{a}" [by|of|from] {b}[.|]',
        'the [song|track] "{a}" [by|from] {b}[.|, please.|]',
        '{b} with [the song |]"{a}"[.|, please.|]',
        'let me [hear|enjoy] {b}: [{a}|"{a}"][.|]',
        '[can|could|will] you [start|play|put on] "{a}" from {b}?',
        'start [{a}|"{a}"], [by|artist|singer|band] {b}[.|]',
    ),
    _tool(
        "music song play radio",
        "play_artist play_music listen_to radio",
        "[Play|Start] [the music|songs] of [an artist|a band][|.]",
        (Parameter("artist|name|band", "string", _artist),),
        "play [something|anything|songs|music|some music|the best] [by|from|of] {a}[.|]",
        "I [want|would like|am in the mood] to [hear|listen to|dance to] {a}[.|]",
        "[music|songs|a song] [by|from|of] {a}[, please|][.|]",
        "[put on|start|let us hear] [a bit of|some|more] {a}[.|]",
        "[can|could|will] you [play|put on] [something by|] {a}?",
        "[what about|how about] [some|a song by|music from] {a}?",
        "[more|now] {a}, please[.|]",
        "{a} [is what I want to hear|is my favourite, play it|on the speakers][.|]",
    ),
    _tool(
        "cart product buy order",
        "add_to_cart add_item put_in_basket buy add_product",
        "[Add|Put] a product [to|into] the [cart|basket][|.]",
        (
            Parameter("product|item|name", "string", _goods),
            Parameter("quantity|count|number|amount", "integer", _within(2, 60)),
        ),
        "[add|move] {b} {a} to [the|my] [cart|basket|shopping bag|trolley][.|, please.|]",
        "[put|place|lay] {b} {a} [into|on|onto] [the|my] [basket|shopping list|trolley][.|]",
        "I [will take|want to buy|need to buy|would like to order] {b} {a}[.|]",
        "[cart|basket|shopping list|list]: {b} {a}",
        "{b} {a} [for|to|into] the [cart|basket|trolley][.|, please.|]",
        "[throw|drop|pack] {b} {a} in the [trolley|basket|shopping bag][.|]",
        "[can|could|will] you [buy|order|add] {b} {a}[| for me]?",
        "[we need|we are out of|buy] {a}, {b} [of them|pieces|of those][.|]",
        "my [cart|basket|trolley] [needs|should get|gets] {b} [more |]{a}[.|]",
    ),
    _tool(
        "book author library",
        "find_book search_book book_search books_by library",
        "[Find|Search for] a book [by|of] an author[|.]",
        (Parameter("author|writer|name", "string", values.name),),
        "[find|get|show|bring] me [books|a book|something|novels|the books] [by|of|from] {a}[.|]",
        "[what|which books] [did|has] {a} [write|written|publish|published]?",
        "I [want|would like|wish] to read [a book|something|a novel] [by|of|from] {a}[.|]",
        "[books|novels|a novel|stories] [by|of|written by] {a}[.|?|, please|]",
        "[do you have|is there|have you got] [anything|a book|something] [by|from] {a}?",
        "[author|writer][:|] {a}",
        "[look for|search for|look up] the [author|writer|books of] {a}[.|]",
        "[which|what] [books|novels|works] are [by|from] {a}?",
    ),
    _tool(
        "book title library",
        "find_book search_title book_by_title lookup_book",
        "[Find|Search for] a book by [its |]title[|.]",
        (Parameter("title|name|book", "string", _title),),
        '[find|get|show] me the book [{a}|"{a}"][.|]',
        'the book [called|named|with the title] [{a}|"{a}"][.|, please.|]',
        'do you have the [book|novel] [{a}|"{a}"]?',
        'I [look for|am looking for|want to read] [the novel|the book] [{a}|"{a}"][.|]',
        '[who wrote|who is the author of] [{a}|"{a}"]?',
        '[title|book][:|] [{a}|"{a}"]',
        '[is there|have you got] a [book|novel|story] [called|named|under the name] [{a}|"{a}"]?',
        '[look up|search for] the [title|novel] [{a}|"{a}"][.|]',
    ),
    _tool(
        "email message letter text phone send",
        "send_message message text_message send_text sms send_sms post_message",
        "[Send|Write] a [text |]message[| to somebody][|.]",
        (
            Parameter("to|recipient|person|name", "string", values.name),
            Parameter("text|message|content", "string", values.subject),
        ),
        '[text|message|write|tell|send] {a}: [{b}|"{b}"]',
        'send [{a} a message|a message to {a}|a text to {a}|{a} a text] [that says|saying|which says] [{b}|"{b}"]',
        '[let|have] {a} know[: |, |that ][{b}|"{b}"]',
        'message [to|for] {a}: [{b}|"{b}"]',
        '[tell|write to|inform] {a} that [{b}|"{b}"]',
        '[send|pass|write] the words "{b}" to {a}[.|]',
        'I [want|need|would like] to [tell|text|message] {a} [this|the following]: [{b}|"{b}"]',
        '[can|could|will] you [text|tell|message] {a} "{b}"?',
        '"{b}" [to|for] {a}[, please|, by message|].',
        'a [text|message] for {a}[ with the words|, it says|, content]: [{b}|"{b}"]',
    ),
    _tool(
        "remind event task calendar meeting",
        "create_event add_event new_event calendar add_to_calendar schedule",
        "[Create|Add] [an event|a date|an entry][| in the calendar| with date and time][|.]",
        (
            Parameter("title|name|event", "string", values.subject),
            Parameter("date|day", "string", values.date),
            Parameter("time|start|at", "string", values.time),
        ),
        '[create|add|make] an [event|entry|appointment] "{a}" [on|for] {b} at {c}[.|]',
        '[schedule|plan|book|arrange] "{a}" for {b} at {c}[.|]',
        '[on|for] {b} at {c}[: |, please note |, we have ][{a}|"{a}"]',
        '[calendar|new event|new entry|event]: [{a}|"{a}"], {b}, {c}',
        '[put|write|enter] "{a}" [into|in] [my|the] calendar, {b} at {c}[.|]',
        'I have [an appointment|a date|something] on {b} at {c}: [{a}|"{a}"]',
        'at {c} on {b} [there is|comes|we do] "{a}"[. Note it|. Add it|][.|]',
        'my calendar [for|on] {b} [needs|gets] "{a}" at {c}[.|]',
        '"{a}" [takes place|happens|starts] on {b} at {c}[.|]',
    ),
    _tool(
        "currency money exchange convert",
        "convert_currency exchange currency convert_money change_money",
        "[Convert|Change] [money|an amount] [from one currency to another|between currencies][|.]",
        (
            Parameter("amount|value", "number", values.price),
            Parameter("from|source|from_currency", "string", _from(", ".join(_MONEY))),
            Parameter("to|target|to_currency", "string", _from(", ".join(_MONEY))),
        ),
        "[convert|change|exchange|turn] {a} {b} [to|into] {c}[.|, please.|]",
        "how [much is|much are|many are|much makes] {a} {b} in {c}?",
        "how many {c} [are|do I get for|make|is] {a} {b}?",
        "what [is|are|do] {a} {b} [worth |make |come to |]in {c}?",
        "{a} {b} [in|to|into|as] {c}[?|, please.|]",
        "I [have|own|got|hold] {a} {b} and [want|need|would like] {c}[.|]",
        "[give|tell|show] me {a} {b} in {c}[.|]",
        "[how much|what] would {a} {b} be in {c}?",
        "[can|could] you [change|convert|swap] {a} {b} [to|into|for] {c}?",
    ),
    _tool(
        "table restaurant book reserve reservation dinner",
        "book_table reserve_table table_booking reservation restaurant_booking",
        "[Book|Reserve] a table[| in a restaurant| at a restaurant][|.]",
        (
            Parameter("people|guests|persons", "integer", _within(1, 20)),
            Parameter("time|at", "string", values.time),
            Parameter("restaurant|place|name", "string", _artist),
        ),
        "[book|reserve|get] [us |me |]a table for {a} [|people |persons |guests ]at {b} [at|in] {c}[.|]",
        "a table [at|in] {c} for {a} [|people |of us ]at {b}[.|, please.|]",
        "[we are|there will be] {a} [people|guests][.|,] [book|reserve] {c} at {b}[.|]",
        "[reservation|table] for {a} at {b}[:|,] {c}",
        "I [want|would like|need] to [eat|dine] at {c} with {a} people at {b}[.|]",
        "at {b} [we|the {a} of us] want to eat at {c}[, {a} people|, we are {a}][.|]",
        "[can|could] you [get|find|hold] {a} [seats|places] at {c} for {b}?",
        "{c}, {b}, {a} [people|persons|guests][.|, please.|]",
    ),
    _tool(
        "directions route way map drive",
        "get_directions directions route find_route navigate way",
        "[Get|Find|Show] [the way|directions|a route] [from one place to another|between places][|.]",
        (
            Parameter("from|start|origin", "string", values.city),
            Parameter("to|destination|target|end", "string", values.city),
        ),
        "[how|which way] do [I|we] [get|drive|go|come|travel] from {a} to {b}?",
        "[directions|route|way|the way|drive|trip] from {a} to {b}[.|?|, please.|]",
        "[show|tell|give] me [the way|the route|a route|directions] from {a} to {b}[.|]",
        "I am in {a} and [want|need|have|would like] to [go|get|drive] to {b}[.|]",
        "[take|bring|drive|guide|lead] me [from {a} to {b}|to {b} from {a}][.|]",
        "[what is|which is|find] the [best|fastest|shortest] [way|route|road] [from {a} to {b}|to {b} from {a}][?|.|]",
        "[from|start:|start in] {a}[,|] [to|end:|end in] {b}[.|]",
        "[can|could] you [plan|find] [the route|my way] between {a} and {b}?",
    ),
    _tool(
        "news search headlines",
        "get_news news latest_news find_news headlines",
        "[Get|Find|Show] [the |]news [about|on] a topic[|.]",
        (Parameter("topic|about|subject|query", "string", values.phrase),),
        "[what is|is there anything] new [about|on|in the matter of] {a}?",
        "[show|tell|give|read] me [the news|news|the latest|all news] [about|on|concerning] {a}[.|]",
        "[news|the news|headlines|fresh news] [about|on|regarding] {a}[.|?|, please.|]",
        "I [want|would like|need] [the news|to hear the news|to read the news] [about|on] {a}[.|]",
        "[what|anything] [has happened|happened|is going on] [with|around|to] {a}?",
        "[any|are there] news [about|on] {a}?",
        "[what do|do] the papers [say|write] about {a}[?| today?]",
        "[keep me up to date|inform me] [about|on] {a}[.|]",
    ),
    _tool(
        "define word dictionary search meaning",
        "define define_word dictionary lookup_word meaning_of",
        "[Define a word|Look up a word|The meaning of a word][| in a dictionary][|.]",
        (Parameter("word|term", "string", values.word),),
        "[what does|what would] [the word |]{a} mean?",
        "define [the word |]{a}[.|, please.|]",
        "[what is|give me|tell me|show me] the [meaning|definition] of [the word |]{a}[?|.|]",
        "[meaning|definition] of [the word |]{a}[?|]",
        "[look up|find|check] [the word |]{a} in [the|a|your] dictionary[.|]",
        "I [do not know|never heard] the word {a}[. What is it|][.|]",
        "[explain|describe] the word {a}[.|]",
        "[can|could] you [say|tell me] what [the word |]{a} means?",
    ),
    _tool(
        "food meal order pizza restaurant eat recipe",
        "order_food food_delivery get_food order_meal delivery",
        "[Order|Get] food[| from a restaurant| to an address][|.]",
        (
            Parameter("dish|food|meal|item", "string", _from(_FOODS)),
            Parameter("from|restaurant|place", "string", _artist),
        ),
        "[order|get|fetch] [me |us |]{a} from {b}[.|, please.|]",
        "I [want|would like|need|feel like] [to eat |]{a} from {b}[.|]",
        "[bring|send] [me|us] {a} from {b}[.|]",
        "[call|ask|phone] {b} and [order|get] {a}[.|]",
        "{a} from {b}[, please|, quickly|][.|]",
        "[we|I] [are hungry|am hungry][.|:|,] {a} from {b}[.|, please.|]",
        "[can|could|will] you [order|get] {a} [at|from] {b}?",
        "at {b} [order|get|take] {a}[.|]",
    ),
    _tool(
        "count letters characters text length",
        "count_characters count_letters text_length word_count length",
        "[Count|Get] the [characters|letters|length] of a text[|.]",
        (Parameter("text|string|input", "string", values.subject),),
        'how [many characters|many letters|long] [are in|has|is] "{a}"?',
        '[count|get me] the [letters|characters|words] [of|in][:| the text:| this:] [{a}|"{a}"]',
        '[length|letters|number of characters] of[:|] "{a}"[?|]',
        '[what is|tell me|find] the length of "{a}"[?|.|]',
        'how long is [this|the text|the following]: [{a}|"{a}"]',
        '"{a}": how many [letters|characters|signs] [are there|is that|does it have]?',
        'I [want|need] to know how many letters "{a}" has[.|]',
        '[measure|check] the length of the [text|line]: [{a}|"{a}"]',
    ),
    _tool(
        "list task todo note event",
        "add_todo add_task new_task todo create_task note add_note",
        "[Add|Create] [a task|an entry on the list|a note][|.]",
        (Parameter("text|task|note|content", "string", values.subject),),
        '[add|put|write] "{a}" [to|on] my [list|tasks|to-do list|notes][.|]',
        '[note|write down|note down|new task|task|to do|my list][:|] [{a}|"{a}"]',
        'I [must|have to|need to|should] do this: [{a}|"{a}"]',
        '[make|take|create] a note[:| that says| saying] [{a}|"{a}"]',
        '[a|one] [new|more] [task|thing|point] for my list: [{a}|"{a}"]',
        '[keep|save] [this|the following] [for me|in my notes|on the list]: [{a}|"{a}"]',
        '[can|could|will] you [note|write down|save] "{a}"?',
        'my [notes|tasks] [should say|get|need]: [{a}|"{a}"]',
    ),
)
