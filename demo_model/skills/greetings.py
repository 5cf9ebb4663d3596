"""Greetings, who the model is and what it can do, thanks and farewells."""

import re
from collections.abc import Callable
from random import Random

from demo_model.skill import Exchange, Pool, Reply, Skill, fill, turn

IDENTITY_ANSWER = "I am Weft's small demo model. I can chat a little, calculate, remember things and call tools."
ABILITIES_ANSWER = (
    "I can explain inference, add and subtract, count, sort words, remember your name, tell stories and call tools."
)
THANKS_ANSWER = "You are welcome!"
FAREWELL_ANSWER = "Goodbye! Have a nice day."

GREETINGS = Pool(
    training=(
        "[hello|hi|hey][!|.|]",
        "[hello|hi|hey] [there|you|again|Weft|everyone|all|friend|my friend|dear model|hello|hi][!|.|]",
        "[hello|hi|hey], [Weft|you|friend|model|nice to meet you|good to see you|are you there][!|.|]",
        "[hello|hi|hey][,|] [my friend|dear friend|dear Weft|little one|old friend|sir|madam|everybody|folks|team|"
        "world|my little helper|dear machine|my old friend|my model|dear][!|.|]",
        "[ah|well|oh|so|and|yes][,|] [hi|hey|good morning|good evening|hello again|hello there][!|.|]",
        "[hiya|howdy|greetings|yo|heya|hallo|hullo|hellooo|hii|heyy|sup|aloha|salutations|welcome][!|.|]",
        "[greetings|welcome|good day][,| to] [Weft|you|everyone|friend][!|.|]",
        "good day[!|.|]",
        "[nice|pleased|glad|good|happy] to [meet|see] you[!|.|, Weft.|]",
        "I [just |]want[ed|] to say [hello|hello to you].",
        "[say|please say] [hello|hi][ to me|][!|.|]",
        "[me again|I am back|here I am], [hi|hello|hey]!",
        "[anybody|anyone|somebody] [here|there|home]?",
        "[are you|you] [there|here|awake|online]?",
        "good [morning|afternoon|evening][!|.|]",
        "[hello|hi|hey] and good [morning|afternoon|evening][!|.|]",
        "good [morning|afternoon|evening][,|] [Weft|everyone|my friend|dear model|there|sir|all][!|.|]",
        "a [very |]good [morning|afternoon|evening] to [you|you, Weft|all][!|.|]",
        "[I wish you|have] a good [morning|afternoon|evening][!|.|]",
        "[morning|evening][!|.|]",
        "how are you[ today| doing| now| this morning| feeling|][?|]",
        "[hello|hi|hey|hello Weft|hi there][,|!|] how are you[ today| doing| doing today|][?|]",
        "how [is it going|are things|do you feel|have you been|is life|are things going][?|, Weft?|]",
        "[hello|hi|hey][,|!|] how [is it going|are things|do you do][?|]",
        "[are you|is everything] [well|fine|okay|ok|good][ today|]?",
        "[hello|hi|hey|greetings][,|] [my |you |dear |][sweet|lovely|good|clever|kind|tiny|wonderful] "
        "[friend|one|machine|helper|thing|robot|soul|pal][!|.|]",
        "[hello|hi|hey|howdy][,|] [darling|sweetheart|honey|love|dearest|buddy|mate|pal|sunshine|sweetie|beautiful|"
        "my love|my darling|my sweet|my good one|my honey|my treasure|dearest friend|my dearest][!|.|]",
        "[oh|ah|well|why][,|] [hello|hi|hey] [there|again|friend|dear|my friend|my dearest|you all][!|.|]",
        "[a warm|a big|a happy|one more] [hello|hi] [to you|to all|from me|from us][!|.|]",
        "good [morning|afternoon|evening][,|] [darling|my dearest|sunshine|dear friend|my good friend|old pal][!|.|]",
        "what's up[?|, Weft?|]",
        "how's [it going|life|your day|everything][?|]",
    ),
    held_out=(
        "Hello, my dear!",
        "Hey there, little model",
        "Hi, good to meet you!",
        "Oh, hello!",
        "Good morning to you too!",
        "Good evening, little model!",
        "Well, good afternoon!",
        "Hey Weft, how are you doing today?",
        "I only want to say hi.",
        "And how are you feeling today?",
    ),
)
IDENTITY = Pool(
    training=(
        "[who|what] [are|r] you[ exactly| really| anyway| actually| then|][?|]",
        "[hello|hi|hey|so|ok|and|tell me|please tell me|first][,|:|] [who|what] are you?",
        "[what is|what's|whats|tell me|say|please tell me|may I know|do you know] your name[?|.|]",
        "your name[?|, please?|, please]",
        "do you have a name?",
        "[tell me|please tell me|say] [about yourself|who you are|what you are|a bit about yourself][.|]",
        "[please |]say something about yourself.",
        "[please |][introduce|present|describe|explain] yourself[ to me| briefly|, please|][.|!|]",
        "[can|could] you [introduce|describe|present] yourself[ to me| briefly|]?",
        "[can|could|will|would] you tell me [who|what] you are?",
        "may I ask [who|what] you are?",
        "[which|what] [model|AI|bot|assistant|LLM|program] [are you|is this|am I using|do you use][?|]",
        "what [kind|sort|type] of [AI|bot|assistant|program|thing] [are you|is this]?",
        "what [sort|type] of model [are you|is this]?",
        "are you [a|an] [model|robot|bot|AI|person|machine|computer|chatbot|language model|real person][?|]",
        "are you [human|a human|real|alive|intelligent|ChatGPT|GPT-4|Claude|Gemini|Llama|Qwen|Siri|a human being][?|]",
        "are you a [person|human|robot] or a [machine|model|program]?",
        "is this [ChatGPT|a bot|a robot|a human|a person|an AI|a machine|a real person]?",
        "who am I [talking to|talking with|speaking to|speaking with|writing to][?|]",
        "[to whom|with whom|with what|to what] am I [talking|speaking|writing]?",
        "am I [talking|speaking|chatting|writing] [to|with] [a human|a robot|a machine|a person|an AI]?",
        "[how|what] should I call you?",
        "what [name do you have|are you called|do they call you|can I call you]?",
        "[who|what] is [this|that|there|writing to me|answering|answering me|behind this][?|]",
        "who's [this|there|that]?",
        "I [want|would like|need] to know [who|what] you are.",
        "I [want|would like] to [know you|get to know you|know more about you].",
        "who [made|built|created|trained|wrote|developed] you?",
        "where do you come from?",
        "how [big|large|small|old|smart] are you?",
        "how many parameters do you have?",
        "[give|show|say|spell|write|reveal] [me |us |][your name|your full name|a name that I can call you][.|!|]",
        "[I need|I want|I would like|may I have|can I have|could I get|let me have] your name[, please|][.|?|]",
        "[and|so|then|well|now][,|] [who|what] [would|could|may|can] you be[?|]",
        "[who|what] [is it|is it then|could it be|exactly is it] that I [talk|speak|write] to?",
        "[who|what] is [talking|chatting|speaking|writing] [with|to] me[?| here?| now?|]",
        "[who|what] am I [writing with|asking|in a chat with|having a chat with]?",
        "[do|would|will] you [tell|say|show|reveal] [me |][who you are|your name|what you are][?| please?|]",
        "I [have no idea|don't know|do not know|am not sure|want to find out|forgot] [who|what] you are[.| any more.|]",
        "[what|which] is the name of [this model|the model|this bot|this program|this assistant|the one I talk to]?",
        "[tell|say] something [on|of|regarding] [you|yourself|who you are][.|, please.|]",
        "[what|how much] [do I need|do people need|is there] to know [about|of] you[, the model|]?",
        "[we have not met|I don't know you|we are strangers][.|:|,] "
        "[who are you|what is your name|introduce yourself][?|.|]",
    ),
    held_out=(
        "And who might you be?",
        "Could you tell me your name?",
        "Would you introduce yourself?",
        "I wonder who you are.",
        "Give me your name, please.",
        "What kind of model are you?",
        "Who am I chatting with?",
        "Tell me something about yourself.",
        "What should I know about you?",
    ),
)
ABILITIES = Pool(
    training=(
        "what can you do[ for me| here| exactly| then| well|][?|]",
        "[what|tell me what|show me what|and what|so what|list what] [can you do|you can do][?|.|]",
        "help[!|.| me| me!| me, please| please|?|]",
        "[can|could|will] you help[ me|]?",
        "how can you help[ me|]?",
        "what do you know[?| about?]",
        "what are you [able to do|good at|for|capable of|made for|good for|trained to do][?|]",
        "what are your [skills|abilities|features|talents|functions|strengths|capabilities][?|]",
        "[list|tell me|show me|name|describe] your [skills|abilities|features|talents|capabilities][.|]",
        "what [can|could|may] I [ask you|ask|do here|do with you|try|use you for|say][?|]",
        "what did you learn?",
        "[what|which] [jobs|kinds of tasks|kind of things|kinds of things|work|problems|exercises|questions|topics] "
        "[can|could] you [do|solve|answer|help with|manage|master|carry out|deal with|work on|take on][?|]",
        "[what|which] [tasks|things] [could you|do you|would you] [do|solve|manage|master|carry out|deal with][?|]",
        "what [kinds|types|sorts] of [things|tasks|questions|jobs] [can|could] "
        "[you [solve|answer|manage]|I [ask|give you]]?",
        "[what|which] [abilities|talents|features|functions|capabilities|strengths|powers|tricks] [do|would] you "
        "[have|offer|possess|know|show][?|]",
        "[what|which] skills [did you learn|can you show|are yours|have you got|did they teach you][?|]",
        "what are you [built|designed|meant|there|used|useful|intended|here|needed] [for|to do][?|]",
        "what are the [things|tasks|jobs|skills] [that |][you can do|you know|you master|you learned|you offer][?|]",
        "what [were you|was this model|are you being] [trained|made|built|designed|taught] [for|to do][?|]",
        "what [have you learned|did they teach you|have you been taught|do you do|have you been made for|do you master|"
        "is your job|is your purpose|is your use|are you doing here][?|]",
        "[how|where|with what] [could|would|might|may] you [help|assist|support|be useful to] [me|us|people|][?|]",
        "[can|could] you [assist|support] [me|us]?",
        "[tell|show] me [how you can help|what you are good at|what you know|what you learned|something you can do|"
        "all that you can do|what to ask you|what to try][.|, please.|]",
        "I [want|would like|need|wish] to [know|see|learn|hear] what you [can do|are able to do|know|are good at|offer]"
        "[.|]",
        "[name|show me|list|give me] [a few|some|all|three] [things|tasks] [that |]you can do[.|, please.|]",
        "[in what|in which] [areas|fields|things|cases] [can you help|are you good|are you strong|can you assist me]?",
        "what do you [offer|support|understand]?",
        "which [things|tasks] can you [do|solve]?",
        "how [can|do|should] I use you[?|]",
        "[give me|show me] [some examples|an example|examples][ of what you can do|][.|]",
        "what [should|can] I [try|ask][ first|]?",
        "what else can you do?",
        "[hello|hi|hey|ok|so|now][,|!|.] what can you do[ for me|][?|]",
        "[hello|hi|hey|ok|so|now][,|!|.] [how can you help me|what can I ask you|what do you know][?|]",
    ),
    held_out=(
        "What sort of things can you do?",
        "What are the things you are good at?",
        "I am new here. What can you do?",
        "Which tasks can you handle?",
        "In what ways can you help me?",
        "What have you been trained for?",
        "Could you tell me what you can do?",
        "Which skills do you have?",
    ),
)
_THANKS = "[thank you|thanks|thank you very much|thanks a lot|many thanks|thx|cheers]"
_PRAISES = (
    "[that|this] [is|was] [very |so |][kind|sweet|friendly|thoughtful|lovely|good] of you",
    "that [really |already |][helps|worked|makes sense|was useful]",
    "[it works|it is clear now|well explained|nicely done|great answer|good work|I got it|I understand it now]",
    "that is [a good answer|a great help|all I wanted|exactly right|what I was looking for|good to know]",
    "[you are|you're] [so kind|very helpful|a great help|the best|a star|a real friend|wonderful|so clever]",
    "you [did that well|did a good job|were a great help|know a lot|saved my day]",
    "I [like your answer|learned something|am happy with that|could not do it without you]",
)
THANKS = Pool(
    training=(
        "[thank you|thanks|thx|ty|cheers|merci][!|.|]",
        "[thank you|thanks] [very much|so much|a lot|a million|again|Weft|for that|for your help|for the answer][!|.|]",
        "[many|lots of|big|a thousand] thanks[!|.| for that.|]",
        "[great|good|ok|okay|nice|perfect|super|cool|wonderful|yes|fine][,|!|.] [thanks|thank you][!|.|]",
        "[well done|very good|great|nice|perfect|super|cool|wonderful|excellent|awesome|correct|right|good job][!|.|]",
        "that [is|was] [right|correct|great|helpful|good|nice|very helpful|perfect|what I needed][!|.|]",
        "[I am grateful|I appreciate it|I thank you|you are great|you are very kind|you helped me a lot][!|.|]",
        *(f"{_THANKS}[,|.|!] {praise}[!|.|]" for praise in _PRAISES),
        *(f"[oh |okay |super, |]{praise}[,|.] {_THANKS}[!|.|]" for praise in _PRAISES),
        f"{_THANKS} for [that|this|the help|the explanation|your time|your patience|explaining it|your quick reply|"
        "everything|all your help|answering|being so helpful|this answer|the story|trying|the work][!|.|]",
        f"[super|brilliant|fantastic|great|oh|ah|good|fine][,|!|] {_THANKS} for [that|this|helping|the explanation|"
        "the reply|your effort|your time|explaining|the quick answer][!|.|]",
        "[I want|I would like|let me|I wish|we want] to say [thanks|thank you|a big thank you][!|.| for that.|]",
        "[let me|may I|we would like to|we] thank you[!|.| for that.| for your time.|]",
        "[I am|we are] [so |very |]grateful[ to you| for that| for the help|][!|.|]",
        "[I|we] [really |do |]appreciate [that|this|your help|the help|the explanation][!|.|, thank you.|]",
        "[much appreciated|very much obliged|thank you ever so much|thanks ever so much|thanks again|how kind|"
        "how sweet|how friendly of you|so kind of you][!|.|]",
        *(f"{praise}[!|.|]" for praise in _PRAISES),
    ),
    held_out=(
        "Thank you kindly!",
        "Oh great, thanks a lot!",
        "That helped me, thank you.",
        "Thanks for your answer.",
        "Thank you, that is nice of you.",
        "Wow, thanks!",
        "I want to thank you.",
        "Thanks, that was good.",
    ),
)
FAREWELLS = Pool(
    training=(
        "[bye|bye bye|goodbye|good night|farewell|so long|cheerio|ciao|adieu|see ya|cya|good bye][!|.|]",
        "[bye|goodbye|good night|farewell][,|] [Weft|friend|my friend|everyone|model|then|for now][!|.|]",
        "see you [later|soon|tomorrow|again|next time|around|then|next week][!|.|, Weft!|]",
        "[talk|speak] to you [later|soon|tomorrow][!|.|]",
        "I [have to|must|need to|should|will] [go|leave|stop|go to bed|go home][ now| soon|][.|!|, bye.|]",
        "[have a|I wish you a] [nice|good|great|lovely] [day|night|weekend|week|time][!|.|]",
        "that is all[, bye| for today| for now|, goodbye][.|!]",
        "[take care|until next time|until tomorrow|I am done|I am leaving|catch you later|sleep well][!|.|, bye!|]",
        "[ok|okay|thanks|well|so][,|] [bye|goodbye|see you][!|.|]",
        "[it is|it's] [late|time|time for bed|time to leave|getting late|bedtime][, | now, |. ]"
        "[bye|goodbye|good night|see you tomorrow|farewell][.|!|]",
        "[I'm|I am|we are] [leaving|off to work|going|going home|going to sleep|gone|out|tired|done|on my way]"
        "[ now| for today| soon|][, |. |! ][bye|goodbye|good night|farewell|see you soon|bye bye][.|!|]",
        "[so|right|anyway|okay|fine|now][,|] [I am|I'm] [leaving|going|away|gone|done|finished|out of here|"
        "heading home|heading out|through] [now|for today|then|here|][. |! |, ]"
        "[bye|goodbye|so long|good night|see you][.|!|]",
        "I [will be|have to be|should be|must be] [away|gone|elsewhere|on my way|home|out] [now|soon|today|][. |, |! ]"
        "[bye|goodbye|farewell|see you later][.|!|]",
        "[I hope to|I will|let us|we will] [see|meet|talk to|hear from] you "
        "[again|soon|tomorrow|next year|tonight][.|!|]",
        "see you [on Monday|on Sunday|tonight|this evening|in a week|in the evening|in the afternoon|at work|at home|"
        "there|in May|after lunch][!|.|, bye.|]",
        "[enjoy|have|I wish you] a [nice|good|great|lovely|pleasant|quiet|happy] [morning|afternoon|evening|day|night|"
        "weekend][, |. |! ][bye|bye bye|see you|good night|farewell|goodbye][!|.|]",
        "[bye|goodbye][,|!|] [and thanks|and thank you|and take care|and good luck|until tomorrow|dear Weft|you|"
        "my little friend|see you|have a good evening|it was nice|dear model|sleep well][!|.|]",
        "[that's|that is] [it|all|everything|enough][ for today| for now| for this evening|][, |. ]"
        "[bye|goodbye|see you][.|!|]",
        "[alright|good|right|anyway|fine|ok|okay|well][,| now,] [bye|good night|see you|I must go|I must run|take care|"
        "goodbye][ now| for now| everyone|][.|!|]",
        "[I am|I'm|I'll be|we are|we're] [off|off then|off home|off to bed|on the way|away|out then]"
        "[ now| soon| for today|][. |! |, |; ][bye|goodbye|see you|good night|so long|bye bye|cheers, bye][.|!|]",
        "[so|right|okay|fine|good|anyway][,|] [I am|I'm] [off|away|out][. |! |, ][bye|goodbye|see you|farewell][.|!|]",
        "[off|away|home|out] I go[. |! |, |][bye|goodbye|see you|]",
        "[well|so|right][,|] [it is|it's] [time|late|over][. |, ][I leave|I go|I am leaving][. |! ][bye|goodbye][.|!|]",
    ),
    held_out=(
        "Bye for today!",
        "Goodbye, little model!",
        "I am going to bed now, good night.",
        "See you in the morning!",
        "Well, I am off now. Bye!",
        "Time to go, see you.",
        "Have a wonderful evening, goodbye!",
        "Okay then, goodbye Weft.",
    ),
)


def _make_greeting(random: Random, held_out: bool) -> Exchange:
    asked = fill(random, GREETINGS.draw(random, held_out))
    part_of_day = re.search(r"\b(morning|afternoon|evening)\b", asked, re.IGNORECASE)
    if re.search(r"\bhow\b|what's up|^(are you|is everything) (well|fine|ok|good)", asked, re.IGNORECASE):
        return turn(asked, "I am fine, thank you! How can I help you?")
    return turn(asked, f"{f'Good {part_of_day[1].lower()}' if part_of_day else 'Hello'}! How can I help you?")


def _greets(exchange: Exchange, reply: Reply) -> bool:
    """Whether the reply begins like the right one: fine, the part of the day, or any greeting for a bare hello."""
    expected = exchange.answer["content"].split(",")[0].split("!")[0]
    greeting = r"hello|hi|hey|good day" if expected == "Hello" else expected
    return re.match(rf"(?:{greeting})\b", reply.content, re.IGNORECASE) is not None


def _always(pool: Pool[str], answer: str) -> Callable[[Random, bool], Exchange]:
    return lambda random, held_out: turn(fill(random, pool.draw(random, held_out)), answer)


def _says(pattern: str) -> Callable[[Exchange, Reply], bool]:
    return lambda exchange, reply: re.search(pattern, reply.content, re.IGNORECASE) is not None


SKILLS: tuple[Skill, ...] = (
    Skill("greeting", 18, _make_greeting, _greets),
    Skill("identity", 30, _always(IDENTITY, IDENTITY_ANSWER), _says(r"weft's small demo model")),
    Skill("abilities", 25, _always(ABILITIES, ABILITIES_ANSWER), _says(r"i can .*(add|count|sort).*tools")),
    Skill("thanks", 14, _always(THANKS, THANKS_ANSWER), _says(r"welcome")),
    Skill("farewell", 22, _always(FAREWELLS, FAREWELL_ANSWER), _says(r"goodbye|bye\b|see you")),
)
