"""The tools that a newcomer tries first, with many ways to ask for each. Data only."""

from dataclasses import dataclass

from demo_model.skill import Pool
from demo_model.skills import known_phrasings as more
from demo_model.skills import values


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: its possible keys, with "|" between them, its JSON type, and what makes its values."""

    keys: str
    type: str
    make: values.Maker


@dataclass(frozen=True, slots=True)
class KnownTool:
    """A tool that many know.

    Attributes:
        topic: What it is about.
        names: How it may be called.
        description: To be spelled out with `fill`.
        parameters: Their values are {a}, {b} and {c} in `asked`.
        asked: Phrasings, to be spelled out with `fill`.
        choices: Key and values of a parameter that need not be given.
    """

    topic: str
    names: Pool[str]
    description: str
    parameters: tuple[Parameter, ...]
    asked: Pool[str]
    choices: tuple[str, tuple[str, ...]] | None = None


def _pool(training: str, held_out: str) -> Pool[str]:
    return Pool(tuple(training.split()), tuple(held_out.split()))


CITY = Parameter("city|city|location|location|place", "string", values.place)
NUMBERS = (Parameter("a", "integer", values.integer), Parameter("b", "integer", values.integer))
NUMBERS_XY = (Parameter("x", "integer", values.integer), Parameter("y", "integer", values.integer))
WEATHER = Pool(
    (
        "What is the weather [|like ][|today |now |right now |tomorrow ]in {a}?",
        "What's the weather [|like ][|today |now |right now ]in {a}?",
        "How is the weather [|today |now |right now ]in {a}[| today| now]?",
        "[Please |Can you |]tell me the weather in {a}.",
        "[Show|Get|Check|Give] me the [|current ]weather [in|for] {a}.",
        "[Get|Check|Look up] the weather [in|for] {a}.",
        "Weather in {a}[|?| please]",
        "{a} weather[|?]",
        "Is it [raining|sunny|cold|warm|hot|windy] in {a}[| today| now| right now]?",
        "Do I need [an umbrella|a coat] in {a}[| today]?",
        "What is the [temperature|forecast] [in|for] {a}[| today| now]?",
        "How [hot|cold|warm] is it in {a}[| today| now]?",
        "Will it rain in {a}[| today| tomorrow]?",
        "I am [in|going to] {a}. What is the weather[| like]?",
        "[How|Which|What sort of] weather [is there|have they|is it|will there be] in {a}[?|]",
        "[Would|Will|Can] you [look up|check|see|find out] [how|what] the weather is [in|for] {a}[?|]",
        "[Tell|Show] me [how|what] [the weather|it] is like [in|for] {a}[.|, please.]",
        "I [would like|need|have] to [hear|see|find out|ask about] the weather [in|for] {a}[.|]",
        "[Are|Were] the skies [clear|blue|grey] in {a}[| today]?",
        "[Is it|Will it be] [good|bad|nice|fine] weather in {a}[| today| tomorrow]?",
        *more.WEATHER,
    ),
    (
        "What weather do they have in {a}?",
        "Could you check how the weather is in {a}?",
        "I wonder how the weather is in {a}.",
        "I want to know the weather in {a}.",
        "What kind of weather is it in {a} today?",
        "Is the weather good in {a}?",
    ),
)
KNOWN_TOOLS = (
    *(
        KnownTool(
            "weather",
            _pool(
                "get_weather get_weather get_current_weather weather getWeather weather_report forecast check_weather",
                "fetch_weather weather_now",
            ),
            "[[Get the|The|Current|Get the current|Look up the] weather[| in a city| for a location| of a place]|"
            "Get [the |]current [temperature|weather] [for|in] a given location][|.]",
            (CITY,),
            WEATHER,
            ("unit", ("celsius", "fahrenheit")),
        ),
    )
    * 3,
    *(
        KnownTool(
            "time",
            _pool(
                "get_time get_current_time time get_local_time local_time world_clock time_in city_time",
                "fetch_time clock_time",
            ),
            "[Get the|The|Tell the] [current |local |]time[| in a city| of a place| in a timezone][|.]",
            (Parameter("city|timezone|location", "string", values.city),),
            Pool(
                (
                    "What time is it [|now |right now ]in {a}[| now]?",
                    "What is the [|current |local ]time in {a}[| now]?",
                    "[Please |Can you |]tell me the time in {a}.",
                    "Time in {a}[|?]",
                    "[Get|Show me|Give me] the [|current ]time [in|for] {a}.",
                    "How late is it in {a}?",
                    "[Can|Could|Would] you [say|check|find out] what time it is in {a}?",
                    "[What|Which] [hour|time] [is it|do they have|have they] in {a}[| now]?",
                    "I [need|want|would like] the time in {a}[.|, please.]",
                    "[What|How late] is it by the clocks [in|of] {a}?",
                    *more.TIME_IN,
                ),
                ("Do you know the time in {a}?", "What does the clock say in {a}?", "Which time is it now in {a}?"),
            ),
        ),
    )
    * 2,
    KnownTool(
        "time",
        _pool(
            "get_time now get_current_time current_time clock read_clock tell_time getTime check_time",
            "time_now what_time",
        ),
        "[Get the|The|Tell the] [current |local |]time[| now][|.]",
        (),
        Pool(
            (
                "What time is it[| now| right now]?",
                "[Please |Can you |]tell me the time.",
                "What is the [|current ]time?",
                "How late is it?",
                "[Can|Could] you tell me the time?",
                "I [want|would like] to know [the time|how late it is].",
                "[Which|What] time do we have?",
                *more.TIME,
            ),
            ("Do you know what time it is?", "I need to know the time."),
        ),
    ),
    *(
        KnownTool(
            "sums",
            _pool("add add add_numbers sum sum_up plus total add_integers", "addition add_two"),
            "[Add|Sum] two [numbers|integers][|.]",
            numbers,
            Pool(
                (
                    "What is {a} [+|plus] {b}?",
                    "[Please |Can you |]add {a} and {b}.",
                    "{a} [+|plus] {b}[| =| = ?]",
                    "[Calculate|Compute] {a} [+|plus] {b}.",
                    "What is the sum of {a} and {b}?",
                    "How much is {a} [+|plus] {b}?",
                    "Add {a} to {b}.",
                    "Use the tool to add {a} and {b}.",
                    "[How much|What] [are|is] {a} and {b}[| in total| in all]?",
                    "[Tell|Show|Bring] me [{a} + {b}|the total of {a} and {b}|what {a} plus {b} is].",
                    "[Would|Will] you [sum|add|add up|total] {a} and {b}[| for me]?",
                    "[Take|Put] {a} and {b} together.",
                    *more.SUMS,
                ),
                ("What do {a} and {b} make together?", "Give me {a} plus {b}, please.", "Sum up {a} and {b}."),
            ),
        )
        for numbers in (NUMBERS, NUMBERS_XY)
    ),
    KnownTool(
        "sums",
        _pool("multiply multiply mul product multiply_numbers multiplier mult", "times multiplication"),
        "[Multiply|Multiply] two [numbers|integers][|.]",
        NUMBERS,
        Pool(
            (
                "What is {a} [*|x|times] {b}?",
                "[Please |Can you |]multiply {a} [and|by|with] {b}.",
                "{a} [*|times] {b}[| =]",
                "[Calculate|Compute] {a} [*|times] {b}.",
                "How much is {a} [*|times] {b}?",
                "[Tell|Show] me [the product of {a} and {b}|what {a} times {b} is].",
                "[What|How much] [does|do] {a} times {b} [make|give|come to]?",
                "[What comes out|What is it] [when|if] I multiply {a} [by|with] {b}?",
            ),
            ("What is the product of {a} and {b}?", "What do you get for {a} times {b}?"),
        ),
    ),
    KnownTool(
        "search",
        _pool(
            "search web_search search_web google internet_search query_web find_pages search_engine",
            "lookup_web find_online",
        ),
        "Search the [web|internet|web for a query][|.]",
        (Parameter("query|query|q", "string", values.phrase),),
        Pool(
            (
                "[Please |Can you |]search for {a}.",
                "Search [the web |the internet |online |]for {a}.",
                "[Please |]find {a} [online|on the web].",
                "Google {a}.",
                "Look up {a}[| online| on the web].",
                'Search for "{a}".',
                "What does the web say about {a}?",
                "I want to search for {a}.",
                "[Use|Ask|Try|Check] the [web|internet] [for|about] {a}.",
                "[Can|Could|Would] you [google|search for|look for|look up] {a}[| online| on the internet]?",
                "[I need|Get me|Show me] [web pages|results|pages|hits] [about|for|on] {a}.",
                "[Start|Make|Try] a [search|web search|query] [for|on] {a}.",
                *more.SEARCH,
            ),
            ("Do a search for {a}.", "Could you look on the web for {a}?", "Run a web search about {a}."),
        ),
    ),
    *(
        KnownTool(
            "email",
            _pool(
                "send_email send_email send_mail email sendEmail mail e_mail compose_email new_mail post_mail",
                "mail_to write_email",
            ),
            "[Send|Write] an [email|e-mail][| to somebody| with a subject][|.]",
            (
                Parameter("to|to|recipient", "string", to),
                Parameter("subject|subject|title|message|body|text", "string", values.subject),
            ),
            Pool(
                (
                    'Send [an email|an e-mail|a mail] to {a} with the subject [{b}|"{b}"].',
                    "[Please |Can you |]send {a} [an email|a mail] with [the |]subject {b}.",
                    '[Email|Mail] {a} about [{b}|"{b}"].',
                    "[Please |]write [an email|a mail] to {a} about {b}.",
                    'Send [{b}|"{b}"] to {a}.',
                    'Write to {a}: "{b}".',
                    'Send a mail to {a} that says [{b}|"{b}"].',
                    'Mail {a}[:|,] [{b}|"{b}"][.|]',
                    'Mail [{b}|"{b}"] to {a}.',
                    'Email {a} [under|using] the [title|heading] [{b}|"{b}"].',
                    'Write {a} a [mail|message] [called|titled|named] [{b}|"{b}"].',
                    'I [need|have] to [write|send|mail] {a} [a note|a message|something] [about|on] [{b}|"{b}"].',
                    'I would like to [email|mail] {a}[, title|, topic|. The subject is|, about] [{b}|"{b}"].',
                    '[Let|Make] {a} know by mail: [{b}|"{b}"].',
                    'The mail [for|to] {a} [has|gets] the subject [{b}|"{b}"].',
                    *more.EMAIL,
                ),
                ('Mail {a} with "{b}" as the subject.', "I want to send a mail to {a}, subject {b}."),
            ),
        )
        for to in (values.email, values.name)
    ),
    KnownTool(
        "alarm",
        _pool("set_alarm set_alarm wake_up alarm alarm_clock create_alarm wake_me setAlarm", "make_alarm ring_at"),
        "[Set|Set] an alarm[| for a time| clock][|.]",
        (Parameter("time|time|at", "string", values.time),),
        Pool(
            (
                "[Please |]set an alarm [for|at] {a}.",
                "Wake me[| up] at {a}.",
                "Alarm at {a}[|.| please]",
                "I must get up at {a}.",
                "[Let|Have] the alarm [ring|sound] at {a}.",
                "[Get|Ring] me [up|out of bed] at {a}.",
                "[I need|I want|Create|Start] an alarm [at|for] {a}.",
                *more.ALARM,
            ),
            ("Make an alarm go off at {a}.", "Ring me awake at {a}."),
        ),
    ),
    KnownTool(
        "timer",
        _pool("set_timer start_timer timer countdown create_timer kitchen_timer", "run_timer make_timer"),
        "[Set|Start] a timer[| in minutes][|.]",
        (Parameter("minutes|minutes|duration", "integer", values.integer),),
        Pool(
            (
                "[Please |][set|start] a timer for {a} minutes.",
                "Timer for {a} minutes[|.]",
                "{a} minute timer[| please]",
                "[I need|I want|Make|Give me] a timer [of|for|over] {a} minutes.",
                "[Tell|Call|Ring] me [in|after] {a} minutes.",
                "[Run|Begin] {a} minutes[| from now].",
                *more.TIMER,
            ),
            ("Count down {a} minutes.", "Let a timer run for {a} minutes."),
        ),
    ),
    KnownTool(
        "remind",
        _pool(
            "add_reminder remind set_reminder create_reminder reminder new_reminder remember_this note_reminder",
            "make_reminder remind_me",
        ),
        "[Set|Add|Create] a reminder[| for a day][|.]",
        (
            Parameter("text|message|task", "string", values.subject),
            Parameter("date|day", "string", values.date),
        ),
        Pool(
            (
                'Remind me of [{a}|"{a}"] on {b}.',
                "[Please |]set a reminder for {b}: {a}.",
                'Add a reminder on {b} for [{a}|"{a}"].',
                'On {b} I [want|need] to [think of|remember] [{a}|"{a}"].',
                'I must not miss [{a}|"{a}"] on {b}.',
                '[Help me|Make me] [remember|think of] [{a}|"{a}"] [on|for] {b}.',
                '[Save|Note|Write] [{a}|"{a}"] [for|on] {b}.',
                *more.REMIND,
            ),
            ("Do not let me forget {a} on {b}.", 'Put "{a}" in my reminders for {b}.'),
        ),
    ),
    KnownTool(
        "stock",
        _pool(
            "get_stock_price stock_price get_price stock_quote price_of_stock quote share_price",
            "stock_value share_value",
        ),
        "[Get the|The current] [stock |]price of a [stock|company][|.]",
        (
            Parameter(
                "symbol|company|ticker", "string", lambda random, held_out: values.word(random, held_out).upper()[:4]
            ),
        ),
        Pool(
            (
                "What is the [|stock ]price of {a}?",
                "[Get|Show] me the stock price [of|for] {a}.",
                "How much is {a} stock?",
                "{a} stock price[|?]",
                "[What|How much] [is|costs] one share of {a}[| today| now]?",
                "[Check|Look up|Find] [the price of |]{a} [stock|shares].",
                "How [high|low|much] [is|are] {a} [stock|shares]?",
                "At what price is {a} [stock |]traded?",
                *more.STOCK,
            ),
            ("What does a share of {a} cost?", "Tell me how {a} stock is priced."),
        ),
    ),
    KnownTool(
        "translate",
        _pool(
            "translate translate_text translation translator get_translation text_to_language",
            "translate_words to_language",
        ),
        "[Translate|Translate] [a |]text[| to a language][|.]",
        (
            Parameter("text", "string", values.phrase),
            Parameter(
                "language|target",
                "string",
                values.of(
                    Pool(
                        ("German", "French", "Spanish", "Italian", "Polish", "Greek", "Dutch", "Czech"),
                        ("Turkish", "Danish", "Hindi"),
                    )
                ),
            ),
        ),
        Pool(
            (
                '[Please |]translate [{a}|"{a}"] [to|into] {b}.',
                'How do you say [{a}|"{a}"] in {b}?',
                'What is "{a}" in {b}?',
                'I [want|would like|have] to [say|write|read] [{a}|"{a}"] in {b}.',
                '[Turn|Change|Bring|Render] [{a}|"{a}"] [into|to] {b}.',
                '[Give|Show|Tell] me [{a}|"{a}"] in {b}.',
                'I [want|would like] [{a}|"{a}"] [turned|changed] into {b}.',
                'The {b} for [{a}|"{a}"][?|, please.]',
                *more.TRANSLATE,
            ),
            ('Put "{a}" into {b}.', "I need {a} translated to {b}."),
        ),
    ),
    KnownTool(
        "user",
        _pool(
            "get_user find_user lookup_user user_info show_user fetch_user user_by_id search_user user_details",
            "user_data which_user",
        ),
        "[Get|Find|Look up] a user[| by id| by number][|.]",
        (Parameter("id|user_id", "integer", values.integer),),
        Pool(
            (
                "[Get|Find|Show|Look up] user {a}.",
                "Who is user [|number ]{a}?",
                "[Please |]show me the user with [the |]id {a}.",
                "[Which|What] user [is|has] [|the ][number|code] {a}?",
                "[Tell|Give] me [the data|the facts|all] [about|of|on] user [|number ]{a}.",
                "[What|Who] [stands behind|belongs to|is under] [|the ][user |][id|number] {a}?",
                "I [need|want] [the |]user [|with the id |number ]{a}.",
                *more.USER,
            ),
            ("Tell me about user {a}.", "Which user has the id {a}?"),
        ),
    ),
    KnownTool(
        "sums",
        _pool("calculate calculator evaluate calc solve math eval_expression", "compute work_out"),
        "[Calculate|Evaluate] [an expression|a formula][|.]",
        (
            Parameter(
                "expression",
                "string",
                lambda random, held_out: (
                    f"{values.integer(random, held_out)} {random.choice('+-*/')} {values.integer(random, held_out)}"
                ),
            ),
        ),
        Pool(
            (
                "What is {a}?",
                "[Please |Can you |][calculate|compute|evaluate] {a}.",
                "{a}[| =| = ?]",
                "How much is {a}?",
                "[Calculate|Compute|Solve] {a}.",
                "[What|How much] [is the result of|does it give|comes out of] {a}?",
                "[Tell|Show] me [what {a} is|the result of {a}].",
                "I [need|want] [|the value of |the result of ]{a}.",
                "[Work out|Run|Find|Do] {a}[|.| for me.]",
                *more.CALCULATE,
            ),
            ("What do you get for {a}?", "Give me the value of {a}."),
        ),
    ),
)
