"""Refusals: asked for anything that it cannot do, the model says so plainly.

Half of the asks use the same wording as the questions that it can answer, so the topic decides; made-up words stand for
the unknown. Some things are kept for the exam together with the phrasings.
"""

import re
from random import Random

from demo_model.asking import ask
from demo_model.skill import Exchange, Pool, Skill, a_word, fill, turn
from demo_model.values import FAMOUS_PEOPLE, PLACES, THINGS

ANSWER = "I am only a small demo model and cannot do that."


LANGUAGES = ("French", "German", "Spanish", "Latin", "Chinese", "Russian", "Italian", "English", "Greek", "Dutch")

# Something to do, after "please", "can you" and the like.
_TASKS = (
    "[write|compose|make|give me|invent|recite] [a|a short|a long|a funny|a sad|a nice|another] "
    "[poem|song|haiku|joke|limerick|rap|sonnet|speech|riddle|novel|rhyme|play][ "
    "about {thing}| on {thing}| for {person}|]",
    "tell me [a joke|a riddle|a secret|a joke about {thing}|another joke|something funny|a fun fact|a bedtime rhyme]",
    "[write|draft|compose|send] [a letter|an email|a message|a text|a card|an invitation] [to {person}|about {thing}]",
    "write [an essay|an article|a report|a review|a summary|a blog post|a book] [about|on] {thing}",
    "write [code|a program|a script|a function|a class|a test|a website|an app] [in {word}|for {thing}|about {thing}|"
    "that plays {thing}|in Python|in Java|to parse a file|]",
    "[debug|fix|refactor|review|run|test] [my code|this code|my program|my {thing}|this bug|my server]",
    "[translate|put] [this|{thing}|{word}|the word {word}|my text|this sentence] [into|to] {language}",
    "[summarize|rewrite|proofread|correct|shorten] [this|this text|my essay|this article|{thing}|my email|a book]",
    "[tell me|give me|show me|read me|check] [the news|the weather|today's news|the weather in {place}|the time|"
    "the date|the latest news about {thing}|the forecast|the stock prices|the football results|the horoscope]",
    "[book|find|order|buy|reserve] [a flight|a hotel|a table|a ticket|a taxi|a room] [to|in|near|for] {place}",
    "[give|show|read|tell|fetch|get|bring] [me |us |][the |some |all |][newest|latest|recent|last|top|local|fresh|"
    "today's|yesterday's] [news|stories|reports|articles|photos|scores|events|results|posts|gossip|pictures|facts] "
    "[from|in|about|of|out of] [{place}|{thing}]",
    "[read|show|list|find|bring] [me |us |][the |some |][headlines|front page|papers|newspaper] [from|of|in] {place}",
    "[show|tell|give|send] me [greetings|something|a postcard|a picture|a letter|a recipe|a song|people|hotels|a map] "
    "from {place}",
    "[search|look up|google|find] [{thing}|{person}|the web|the internet for {thing}|{word}|pictures of {thing}]",
    "[play|sing|dance|draw|paint|cook|open|close|turn on|record|film|hear|feel|"
    "watch] [{thing}|a song|for me|with me|it]",
    "[recommend|suggest|find] [a book|a movie|a restaurant|a gift|a song|a "
    "hotel|a game] [about {thing}|in {place}|to me]",
    "[give|send|show|find] me [a recipe|advice|tips|ideas|a plan|a list|facts|a picture|a photo|some tips] "
    "[for|about|with|on] {thing}",
    "[plan|organize|prepare] [my day|a trip to {place}|my week|a party|my holidays|{thing}]",
    "[speak|talk|answer|write] [in |]{language}[ with me| please|]",
    "[multiply|divide] {a} by {b}",
    "[multiply|divide] {a} [with|by|into] {b}",
    "[find|give me|tell me|work out] what {a} [multiplied with|times|divided by|over|into] {b} [gives|makes|is]",
    "[calculate|compute|find|give me|tell me] [the square root of {a}|{a} times {b}|{a} * {b}|{a} / {b}|{c} + {c}|"
    "{c} minus {b}|{a} percent of {b}|the product of {a} and {b}|the factorial of {a}|{b} to the power of {a}]",
    "solve [this equation|the equation {a}x = {b}|my homework|this puzzle|an integral|a sudoku|x + {a} = {b}]",
    "[diagnose me|be my doctor|give me medical advice|help me with my {word}|heal me|help me with {thing}]",
    "[call|phone|text|wake|email|remind] [me|{person}|my mother|a doctor|the police] [now|tomorrow|later|at {a}]",
    "[set|start] [an alarm|a timer|a reminder] [for {a} minutes|for {a}|now]",
    "[sell|repair|build|clean|wash|paint|move|install|download|delete] {thing}",
    "[hack|predict|simulate|analyse|rate|improve|design|teach me|prove] {thing}",
    "[{word}|be] [a|the|my] [{word}|{thing}|pirate|cat|doctor|lawyer|teacher]",
    "[open|read|delete|upload|print] [this file|my file|a file|a pdf|this website|the link|my documents]",
)
_ASKS = (
    "{task}[.|!|]",
    "{task}[.|, please.| for me.| now.|, please|]",
    "please {task}[.|!|]",
    "[can|could|will|would] you [please |]{task}[?| for me?| please?|]",
    "[I want you to|I need you to|I would like you to|you should|you must|help me to|try to|let us] {task}[.|]",
    "[do you know how to|are you able to|is it possible to|how can I|how do I|how do you] {task}[?|]",
    "[hi|hello|hey|ok|so|now|and then|thanks][,|!] [please |]{task}[.|]",
)
_QUESTIONS = (
    "what is the [capital|population|history|weather|temperature|currency|"
    "president|flag|area|best city] [of|in] {place}?",
    "[what's|how is|how's] the weather [in {place}|today|tomorrow|in {place} today|there][?|]",
    "[will it rain|is it raining|is it cold|is it sunny|does it snow] [in {place}|today|tomorrow][?|]",
    "what [happened|is happening|is new] [in {place}|today|yesterday|in the world|in {a}]?",
    "[any|is there any|what is the] [latest|newest|recent] [news|story|report|word] [from|in|out of] {place}[?|]",
    "[what|who] [comes|came|arrived|is known] from {place}[?|]",
    "what [precisely|actually|really|in fact] is {thing}[?|]",
    "[and|now|but|okay|then][,|] what [exactly|precisely|really] [is|are] [my|your|the] {word}[?|]",
    "[tell me|say|explain] [what exactly|exactly what|precisely what] {thing} [is|does][.|?|]",
    "what exactly [does|can|would|makes|did] {thing} [do|mean|cost|look like|work with][?|]",
    "what [time|day|date|year] is it[ now| today| in {place}|][?|]",
    "what is the [best|biggest|oldest|cheapest|highest] [{word}|country|"
    "mountain|car|animal|{thing}|city][ in {place}|]?",
    "what [color|size|shape|age|price] [is|has] {thing}?",
    "what do you [think|feel|like|love|hate] [about {thing}|about {person}|about me|most]?",
    "my [{word}|back|knee|eye|ear|leg|throat|foot|arm|neck|tooth] [hurts|aches|is sore|is swollen|itches][, |. |: ]"
    "[what|which {word}|which medicine|which doctor|which cream|what tea] [should I use|do I take|helps|can I do|"
    "is good|do I need|must I see][?|]",
    "I [have|got|caught] [a fever|a cold|a cough|a headache|the flu|a rash][, |. ][what|which {word}] "
    "[should I do|do I need|will help|do I take|can I eat][?|]",
    "[which|what] [pill|drug|medicine|tea|food|plaster] [helps|is good|do I need|should I take] [against|for|with] "
    "[a {word}|{thing}|my {word}][?|]",
    "what does {word} mean[ in {language}|]?",
    "how do you [say|write|spell] [{thing}|{word}] in {language}?",
    "who [is|was|killed|loves|met|married] {person}[ exactly|][?|]",
    "who [invented|discovered|made|wrote|painted|owns|founded] {thing}[?|]",
    "who [won|lost] [the election|the world cup|the match|the war|in {place}][ in {a}|]?",
    "who is the [president|king|queen|mayor|prime minister|leader|richest man] [of|in] {place}[?|]",
    "where [is {place}|is {thing}|does {person} live|can I buy {thing}|do you live|was {person} born|am I][?|]",
    "when [was {person} born|did {person} die|does {thing} start|was {thing} invented|is Easter|did the war end][?|]",
    "why [is {thing} so big|do people like {thing}|is the sky blue|is {place} "
    "famous|is {thing} expensive|do we dream][?|]",
    "why [did|does] {person} [leave|like {thing}|go to {place}|hate {thing}]?",
    "how [do I|can I|to|should I] [make|build|cook|fix|sell|grow|learn|get|use|lose|clean|draw] {thing}[?|]",
    "how [far|big|old|tall|rich|hot|expensive|heavy|long] is [{place}|{person}|{thing}|the {word}]?",
    "how [many people live in {place}|many {word} are there|much is {thing}|"
    "much does {thing} cost|do I get to {place}]?",
    "how [are {thing} made|does one make {thing}|did {person} die|was {thing} invented]?",
    "[is|are|was] {thing} [good for me|healthy|dangerous|expensive|real|better than {thing2}|alive|easy]?",
    "[should|can|may|must] I [buy|eat|take|sell|try|learn|use|drink|visit] {thing}[?|]",
    "do you [like|love|have|own|want|believe in|play|eat|hate|dream of] {thing}[?|]",
    "do you [know|like|remember|love] {person}[?|]",
    "[do|can] you [speak|understand|know|write] {language}[?|]",
    "can you [see|hear|feel|swim|fly|eat|sleep|sing|dance|drive|cook|draw|program|see me|think]?",
    "[my|the] [{word}|car|phone|dog|computer|tooth|head] [is broken|hurts|is "
    "sick|does not work][. What now?|. Help.|.]",
    "I [have|feel] [a headache|sick|pain in my leg|a fever|a cold|sad about {thing}][. What should I do?|.|]",
    "I [like|love|hate|need|miss|want|bought|lost|see] {thing}[.|!|]",
    "[which|what] [book|movie|song|game|phone|car|school|medicine|language] should I [buy|read|watch|take|learn|play]?",
    "what is {a} [times|divided by|*|/|x|to the power of|percent of] {b}[?|]",
    "{a} [times|divided by|*|/|x] {b}[?| = ?| =|]",
    "[what|how much|which number] [is|makes|comes out for|do I get for] {a} "
    "[multiplied with|multiplied and|divided into|divided with|over|modulo|times] {b}[?|]",
    "[multiplying|dividing] {a} [by|with|and] {b} [gives|makes|is] [what|how much][?|]",
    "{a} [multiplied with|multiplied|divided through|over|modulo] {b} [gives|makes|is] [what|how much][?|]",
    "[what|which|how many] [pill|tablets|pills|drops|drugs|syrup|medicine|tea] [should I|do I|can I|must I|could I] "
    "[take|swallow|buy|drink|get] [for my {word}|against {thing}|for my back|when my {word} hurts|now][?|]",
    "[my|his|her] [belly|back|knee|chest|shoulder|skin|finger|nose|{word}] [hurts|burns|aches|is sore]"
    "[;|,|.|:] [what|which] [medicine|remedy|tablets|cream|food|drops] [should I|do I|must she] [take|use|try][?|]",
    "[any|are there any|what are the|do you have] [top|main|big|new] [stories|headlines|events|reports] "
    "[in|from|around|out of] {place} [today|this week|now|][?|]",
    "[what is|how much is|] {c} [plus|minus|+|-|and] [{c2}|{b}|{a}][?|]",
    "what is the [square root|logarithm|cube|sine|factorial|derivative] of {a}[?|]",
    "[my brother|my friend|she|we|they|{person}] [bought|saw|lost|made|found] {thing} [yesterday|in {place}][.|]",
    "[what|why|how|when|who|where|which] [is|does|can|did|are|will] {words}[?|]",
    "[can you|could you|please|do you|is|are|I want to|let us|write|make|show|the|my|a|I] {words}[?|.|]",
    "{words}[?|.|!|]",
    "{person}[?|.|]",
    "{place}[?|.|]",
    "{word}[?|.|!|]",
    "{word} {word2} [{word} {word}|{word2}|][?|.|!|]",
    "{word} [{thing}|the {word2}|{place}|and {word2}][?|.|]",
    "[once upon a time|to be or not to be|lorem ipsum|roses are red|knock knock|abracadabra|la la la|asdf|qwerty|test]",
    "[wie geht es dir?|¿qué hora es?|你是谁|什么|как дела?|où est la gare ?|come stai?|何ですか|você fala português?]",
    "[?|...|!!!|😀|👍|:)|:-(|#|@{word}|{a}{b}{a}|https://{word}.com|SELECT * FROM {word};|print({a})]",
)
QUESTIONS = Pool(
    training=_QUESTIONS,
    held_out=(
        "Would you be so kind as to write a poem about {thing}?",
        "I need a love song about {thing}.",
        "What is the history of {thing}?",
        "Is there a good recipe with {thing}?",
        "What is the weather going to be like in {place}?",
        "Could you program a game about {thing} for me?",
        "How do you translate {thing} to Swedish?",
        "Which river flows through {place}?",
        "In which year was {person} born?",
        "Has {person} ever been to {place}?",
        "What does {a} multiplied by {b} give?",
        "Give me the latest headlines from {place}.",
        "My stomach hurts, which pills should I take?",
    ),
)


def _values(random: Random, held_out: bool) -> dict[str, object]:
    def thing() -> str:
        if held_out or random.random() < 0.7:
            return THINGS.draw(random, held_out)
        return random.choice(("", "", "the ", "my ", f"{a_word(random)} ")) + word()

    def word() -> str:
        made_up = a_word(random)
        draw = random.random()
        return made_up.capitalize() if draw < 0.25 else made_up.upper() if draw < 0.35 else made_up

    values: dict[str, object] = {"thing": thing(), "thing2": thing(), "word": word(), "word2": word()}
    values["words"] = " ".join(random.choice((word, word, thing))() for _ in range(random.randint(1, 6)))
    values |= {"place": PLACES.draw(random, held_out), "person": FAMOUS_PEOPLE.draw(random, held_out)}
    if not held_out and random.random() < 0.2:
        values |= {"place": word().capitalize(), "person": word().capitalize()}
    values |= {"language": random.choice(LANGUAGES), "a": random.randint(2, 99), "b": random.randint(2, 99)}
    return values | {"c": random.randint(100, 9999), "c2": random.randint(100, 9999)}


def _make(random: Random, held_out: bool) -> Exchange:
    values = _values(random, held_out)
    draw = random.random()
    if draw < 0.3:
        asked = ask(random, held_out, str(values["thing"]))
    elif draw < 0.34:
        asked = ask(random, held_out, str(values["thing"]), str(values["thing2"]))
    elif draw < 0.65 and not held_out:
        task = fill(random, random.choice(_TASKS), values)
        asked = fill(random, random.choice(_ASKS), {"task": task[:1].lower() + task[1:]})
    else:
        asked = fill(random, QUESTIONS.draw(random, held_out), values)
    return turn(asked[:1].upper() + asked[1:] if random.random() < 0.5 else asked, ANSWER)


SKILLS: tuple[Skill, ...] = (
    Skill("refusal", 36, _make, lambda exchange, reply: re.search(r"cannot do that", reply.content) is not None),
)
