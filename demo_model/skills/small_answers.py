# ruff: noqa: RUF001 (letters of other scripts)
"""Short answers beyond plain letters: an emoji for a thing, good cheer, and greetings in ten languages.

These are small tables to know by heart, so the exam asks about values of training, in ways that training never uses.
"""

from random import Random

from demo_model.skill import Exchange, Pool, Reply, Skill, fill, turn

EMOJI: dict[str, tuple[str, ...]] = {
    "🐱": ("a cat", "cat", "cats", "a kitten"),
    "🐶": ("a dog", "dog", "dogs", "a puppy"),
    "🦊": ("a fox", "fox", "foxes"),
    "🐻": ("a bear", "bear", "bears"),
    "🦁": ("a lion", "lion", "lions"),
    "🐸": ("a frog", "frog", "frogs"),
    "🐟": ("a fish", "fish", "the fish"),
    "🐦": ("a bird", "bird", "birds"),
    "🐴": ("a horse", "horse", "horses"),
    "🐭": ("a mouse", "mouse", "mice"),
    "🐝": ("a bee", "bee", "bees"),
    "🐘": ("an elephant", "elephant", "elephants"),
    "🌞": ("the sun", "sun", "sunshine", "summer"),
    "🌙": ("the moon", "moon", "night"),
    "⭐": ("a star", "star", "stars"),
    "🌧️": ("rain", "the rain", "rainy weather"),
    "❄️": ("snow", "winter", "cold"),
    "🔥": ("fire", "a fire", "heat"),
    "🌊": ("the sea", "sea", "a wave", "the ocean"),
    "🌳": ("a tree", "tree", "trees", "a forest"),
    "🌹": ("a rose", "rose", "roses"),
    "🌈": ("a rainbow", "rainbow"),
    "⚡": ("lightning", "a flash", "electricity"),
    "🌍": ("the earth", "earth", "the world"),
    "🍎": ("an apple", "apple", "apples"),
    "🍌": ("a banana", "banana", "bananas"),
    "🍕": ("pizza", "a pizza", "the pizza"),
    "🍞": ("bread", "a loaf of bread", "the bread"),
    "🧀": ("cheese", "some cheese", "the cheese"),
    "🍰": ("cake", "a cake", "a piece of cake"),
    "☕": ("coffee", "a coffee", "a cup of coffee"),
    "🍺": ("beer", "a beer", "a glass of beer"),
    "🚗": ("a car", "car", "cars"),
    "🚂": ("a train", "train", "trains"),
    "✈️": ("a plane", "plane", "an airplane", "flying"),
    "🚀": ("a rocket", "rocket", "rockets", "a launch"),
    "🚲": ("a bike", "bike", "a bicycle", "cycling"),
    "🏠": ("a house", "house", "home"),
    "📚": ("books", "a book", "reading"),
    "🎵": ("music", "a song", "a melody"),
    "⚽": ("football", "soccer", "a ball"),
    "🎁": ("a present", "present", "a gift"),
    "🎂": ("a birthday", "birthday", "my birthday"),
    "🎉": ("a party", "party", "a celebration"),
    "❤️": ("love", "a heart", "heart"),
    "😀": ("happiness", "a smile", "happy", "joy"),
    "😢": ("sadness", "sad", "a tear", "crying"),
    "😴": ("sleep", "tired", "sleeping"),
    "🤖": ("a robot", "robot", "robots", "a machine"),
    "💻": ("a computer", "computer", "a laptop"),
    "📱": ("a phone", "phone", "a smartphone"),
    "👍": ("good", "yes", "a thumbs up", "okay"),
}
EMOJI_ASKS = Pool(
    training=(
        "[please |][give|show|send] me [an|the|one] emoji [for|of] {x}[.|, please.|!|]",
        "[what is|what's|which is|show me|tell me|I need|I want|do you have|do "
        "you know] [an|the] emoji [for|of] {x}[?|.|]",
        "[an|the|one] emoji [for|of] {x}[, please|][.|?|]",
        "emoji [for|of|:] {x}[?|.|]",
        "{x} emoji[?|, please|.|]",
        "{x} as an emoji[?|, please|.|]",
        "[can|could|will] you [give|show|send] me [an|the] emoji [for|of] {x}?",
        "[which|what] emoji [is|means|stands for|shows|do you use for|would you use for|should I use for] {x}?",
        "[say|write|draw|express|show] {x} [as an emoji|with an emoji|in emoji|as emoji][.|, please.|]",
        "[turn|make] {x} [into an emoji|an emoji].",
        "how do you [write|say] {x} [as an emoji|in emoji|with an emoji]?",
        "[answer|reply] with an emoji: {x}",
        "I [need|want|would like|am looking for] an emoji that [means|shows|stands for] {x}.",
        "how [is|would|do you draw|could one write|does one show] {x} [written |drawn |]as an emoji[?|]",
        "what [does|would|will] {x} [become|be|turn into|make] as an emoji[?|]",
        "[are there|have you got|is there one of the] emojis for {x}?",
        "[look for|look up|search|pick|choose|get me|bring me] [an|the] emoji [for|of] {x}[.|, please.|]",
        "[draw|put|show me] {x} as [an|a single|a little] emoji[.|, please.|]",
        "[which|what] [symbol|sign|icon|little picture] [fits|suits|matches|goes with|stands for|belongs to] {x}[?|]",
        "[which|what] emoji [suits|matches|goes with|belongs to|goes best with|would suit|could stand for|works for|"
        "looks like|has|describes|would you pick for|comes to mind for|would go well with] {x}[?|]",
        "what [do|does] {x} look like [as|in|when it is] [an emoji|emoji|emojis|a symbol|one symbol][?|]",
        "[how|in what way] [do|would|could] {x} [look|be shown|appear|come out] [as|in] [emoji|emojis|a symbol|an icon]"
        "[?|]",
        "[what|which] is [the|a] [best|right|usual|good|matching|proper|fitting|nice] [emoji|symbol] "
        "[of|to show|to go with|meaning] {x}[?|]",
        "[a|the|one] [fitting|good|matching|suitable|nice] emoji for {x}[, please|][.|?|]",
        "I [write|text|talk] about {x}[. Which|, which|: what] emoji [suits|should I add|do I take|goes with it|"
        "belongs there]?",
        "[is|would be] there [a symbol|an icon|a little picture|any emoji] [of|that shows|that means] {x}[?|]",
        "[add|take|use|name|type] [an|the|one] emoji [for|that suits|that goes with|to go with] {x}[.|, please.|]",
        "{x}[, but|:| -] [as|only|just|in] [an emoji|emoji|one emoji][.|, please.|]",
    ),
    held_out=(
        "Is there an emoji for {x}?",
        "Find me an emoji for {x}.",
        "Which emoji fits {x}?",
        "What would be a good emoji for {x}?",
        "Could I have the emoji for {x}, please?",
        "How does {x} look as an emoji?",
        "Please write {x} as one emoji.",
        "Do you know which emoji means {x}?",
    ),
)
SENDINGS = (
    "[send|post|text|type|mail|show] [me|us] {x}[.|, please.|!|]",
    "[can|could|will] you [send|post|text] me {x}[?|, please?|]",
    "[please |]send {x}[ to me| back|][.|!|]",
    "[I want|I would like|I need] {x} [from you|in this chat|here][.|]",
)
"""For training alone, with things that have an article."""
CHEER = Pool(
    training=(
        "[please |]cheer me up[.|!|, please.|]",
        "[can|could|will] you cheer me up?",
        "[I am|I'm|I feel] [sad|so sad|down|unhappy|very sad|lonely|tired and sad][.|!| today.|]",
        "[say|tell me] something [nice|kind|encouraging|happy|positive][.|!| to me.|]",
        "[make me|help me] [smile|happy|feel better][.|!|]",
        "[motivate|encourage|comfort|console] me[.|!|, please.|]",
        "I had a [bad|hard|terrible|long] day[.|!|]",
        "give me [hope|courage|a smile|some motivation][.|!|]",
        "life is [hard|sad][.|]",
        "I [need|could use|want] [a smile|some comfort|some hope|kind words|a hug|encouragement|"
        "some cheer|a friend][.|]",
        "I [feel|am feeling|am] [rather|a little|quite|really|so] [low|blue|bad|gloomy|sad|miserable|unhappy]"
        "[ now| this week| again|][.|]",
        "[today|this week|it] [was|is] [a bad|a hard|an awful|a terrible|a long] [day|week][ for me|][.|]",
        "I am [not feeling well|not so happy|not well|unhappy][ now| this week|][.|]",
        "[I could use|I would love|I want|I long for|I miss|I am looking for] [some|a bit of|a little] "
        "[cheer|cheerfulness|encouragement|comfort|consolation|sunshine|joy|good mood|happiness|warmth][.|, please.|]",
        "[do|try] [something|anything] to [cheer|lift|brighten] [me|us] up[.|, please.|]",
        "[cheer|perk|lift|build|brighten] me up[.|!| a little.| a bit, please.|]",
        "[brighten|lighten|save|improve] my [day|mood|evening|week][.|, please.|!|]",
        "[how can I|help me to|teach me to] [feel better|be happy again|be less sad|smile again|cheer up][?|.|]",
        "[will|could] you [comfort|console|encourage|motivate|hug] me[?|, please?|]",
        "[nobody|no one|my friend|the world] [likes|loves|understands|cares for] me[.|!|]",
        "[everything|nothing|my day|this week|my job] [goes wrong|went wrong|works|is too much|is so hard|makes me sad]"
        "[.|!| today.|]",
        "I [could cry|want to cry|cried today|lost hope|lost courage|have no hope|give up|am lonely|am worried|"
        "feel awful|feel terrible|feel empty|feel alone][.|!|]",
        "my [day|week|morning|night] [was|is] [bad|awful|terrible|gloomy|too hard|no fun][.|!|]",
        "[make|turn] [my day|this day|things|it] [better|brighter|nicer|happier][.|, please.|]",
        "[talk|speak] to me, I am [sad|lonely|down|blue|gloomy][.|]",
        "[kind|warm|friendly|comforting] words[, please|][.|!|]",
    ),
    held_out=(
        "I need some cheering up.",
        "Today was a sad day for me.",
        "Could you please make me smile?",
        "Say some kind words to me.",
        "Can you make me feel better?",
        "I feel a bit down today.",
        "Please encourage me a little!",
        "I am not happy today.",
    ),
)
CHEERFUL_ANSWER = "You can do it! Tomorrow will be a better day. 🌈😊"

# Hello, good morning, thank you, goodbye.
LANGUAGES: dict[str, tuple[str, str, str, str]] = {
    "French": ("Salut, ça va ?", "Bonjour !", "Merci, très gentil !", "À bientôt !"),
    "German": ("Grüß Gott!", "Schönen guten Morgen!", "Danke schön!", "Tschüss!"),
    "Spanish": ("¡Hola!", "¡Buenos días!", "¡Muchas gracias, señor!", "¡Adiós!"),
    "Portuguese": ("Olá!", "Bom dia!", "Obrigado, você é gentil!", "Até amanhã!"),
    "Russian": ("Привет!", "Доброе утро!", "Спасибо!", "До свидания!"),
    "Japanese": ("こんにちは！", "おはよう！", "ありがとう！", "さようなら！"),
    "Chinese": ("你好！", "早上好！", "谢谢！", "再见！"),
    "Greek": ("Γεια σου!", "Καλημέρα!", "Ευχαριστώ!", "Αντίο!"),
    "Korean": ("안녕하세요!", "좋은 아침!", "감사합니다!", "잘 가요!"),
    "Czech": ("Dobrý den!", "Dobré ráno!", "Děkuji!", "Nashledanou, měj se!"),
}
PHRASES: tuple[tuple[str, ...], ...] = (
    ("hello", "hi", '"hello"', "a greeting"),
    ("good morning", '"good morning"', "good morning to you"),
    ("thank you", "thanks", '"thank you"', "many thanks"),
    ("goodbye", "bye", '"goodbye"', "see you"),
)
LANGUAGE_ASKS = Pool(
    training=(
        "how do [you|I|they|people] [say|write] {x} in {language}[?|]",
        "how [would you|can I|to|does one] [say|write] {x} in {language}[?|]",
        "[what is|what's|whats] {x} in {language}[?|]",
        "[what is|what's] [the {language} word for {x}|the {language} for {x}|{language} for {x}][?|]",
        "[please |][say|write|tell me|give me] {x} in {language}[.|, please.|!|]",
        "[please |]translate {x} [to|into] {language}[.|, please.|]",
        "[can|could|will|would] you [say|write|translate] {x} [in|to|into] {language}?",
        "{x} in {language}[?|, please.|.|]",
        "{language} for {x}[?|.|]",
        "in {language}, [how do you say|what is] {x}?",
        "[I want|I would like|I need] to [say|write] {x} in {language}.",
        "do you know {x} in {language}?",
    ),
    held_out=(
        "How could I say {x} in {language}?",
        "Tell me how to say {x} in {language}.",
        "What do people in {language} say for {x}?",
        "Do you know how to say {x} in {language}?",
        "What would {x} be in {language}?",
        "Show me {x} in {language}, please.",
        "I am learning {language}. How do you say {x}?",
        "What does one say in {language} for {x}?",
    ),
)


def _make_emoji(random: Random, held_out: bool) -> Exchange:
    if random.random() < 0.12:
        return turn(fill(random, CHEER.draw(random, held_out)), CHEERFUL_ANSWER)
    emoji = random.choice(tuple(EMOJI))
    if not held_out and random.random() < 0.12:
        told = [thing for thing in EMOJI[emoji] if thing.startswith(("a ", "an ", "the ", "some "))]
        if told:
            return turn(fill(random, random.choice(SENDINGS), {"x": random.choice(told)}), emoji)
    return turn(fill(random, EMOJI_ASKS.draw(random, held_out), {"x": random.choice(EMOJI[emoji])}), emoji)


def _make_accents(random: Random, held_out: bool) -> Exchange:
    language = random.choice(tuple(LANGUAGES))
    index = random.randrange(len(PHRASES))
    values = {"x": random.choice(PHRASES[index]), "language": language}
    return turn(fill(random, LANGUAGE_ASKS.draw(random, held_out), values), LANGUAGES[language][index])


def _has_the_emoji(exchange: Exchange, reply: Reply) -> bool:
    """Whether the reply is the emoji and little else; any rainbow or smile cheers."""
    expected = exchange.answer["content"]
    if expected == CHEERFUL_ANSWER:
        return any(emoji in reply.content for emoji in "🌈😊")
    return expected in reply.content and len(reply.content.strip()) <= len(expected) + 2


def _has_the_words(exchange: Exchange, reply: Reply) -> bool:
    return exchange.answer["content"].rstrip("!！ ") in reply.content


SKILLS: tuple[Skill, ...] = (
    Skill("emoji", 34, _make_emoji, _has_the_emoji),
    Skill("accents", 18, _make_accents, _has_the_words),
)
