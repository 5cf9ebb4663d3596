"""More ways to ask for the tools of `known_tools`, for training: verbs, orders and marks of many kinds. Data only."""

WEATHER = (
    "[Any|Is there any|Do you expect] [rain|snow|wind|sun|fog] in {a}[?| today?| tonight?| this week?]",
    "[Report|Find|Say|Bring up|Read out] the [weather|forecast] [of|for|in] {a}[.|, please.]",
    "[We|I|They] [travel|fly|go] to {a}[.|,|:] [what about the weather|how is the weather|which weather is there]?",
    "[Let me know|Say] [how warm|how cold|how hot|whether it rains|if it snows] in {a}[.|, please.]",
    "[{a}|In {a}|Over in {a}][,|:] how [is|does] the weather [look|now|right now]?",
    "[Forecast|Temperature|Weather report|Weather now|Degrees] [for|in|of] {a}[?|.|, please]",
    "What [should I wear|do I wear|does it look like outside|is it like outside] in {a}[| today]?",
)
TIME_IN = (
    "[Local|Present] time [of|in|at] {a}[?|.|, please.]",
    "[Let me know|Say] [what time it is|the hour|how late it is] in {a}[.|, please.]",
    "[{a}|In {a}|Over in {a}][,|:] [what time is it|which hour is it|how late is it][?| now?]",
    "[Is it|Are they] [late|early|awake|asleep|night] [already |]in {a}? [What time is it|Tell me the time][?|.]",
    "[Check|Read|Look at] the clock [for|of] {a}[.|, please.]",
    "[People|My friends] in {a} [have|see] [what|which] time[| now]?",
    "[When is it|How far is the day] in {a} [now|at the moment]?",
)
TIME = (
    "[Time|The time|The time, please|Clock|Which hour is it|How late][?|.| now?]",
    "[Say|Give me|Show me|Check|Read out] the [time|hour|current time|clock][.| now.|, please.]",
    "[Let me know|I must know|I would like to hear|I have to see] [the hour|how late it is|what the time is][.|]",
    "[Look at|Check] [the|your] [clock|watch][.|, please.| for me.]",
    "[Am I|Are we] [late|early]? [What time is it|What is the time|Tell me the time][?|.]",
    "[What|Which] [hour|time] is it [here|at the moment|already|by now]?",
    "[Have you got|Could I have|May I have|Can I get] the time[?|, please?]",
)
SUMS = (
    "[Let us|I want to|We have to|Help me to] [add|sum|total|put together] {a} and {b}[.|]",
    "[Find|Get|Work out|Say] the [sum|total] of {a} [and|plus|with] {b}[.|, please.]",
    "[Add up|Total|Count together][:|] {a} [and|,] {b}[.|]",
    "{a} [and|with] {b}[, added| together| in all|, what is the sum][?|.]",
    "How [much|many] [do|would] {a} [and|with] {b} [give|come to|add up to]?",
)
SEARCH = (
    '[Look|Search|Hunt|Dig] [around |]for [{a}|"{a}"][.|, please.|]',
    'What [can you find|is there|is written] [about|on|in the net about] [{a}|"{a}"]?',
    '[Web|Search|Internet|Google|Query][:|] [{a}|"{a}"]',
    'I [want|would like|need] to [find|read|learn|see] [something|more|all] [about|on] [{a}|"{a}"][.|]',
    '[Find|Bring|Get|Fetch] me [something|pages|facts|anything] [about|on] [{a}|"{a}"][.|]',
    'See what [people|sites|pages|others] [say|write] [about|on] [{a}|"{a}"][.|]',
    '[Type|Put|Enter] "{a}" [into|in] the [search|search box|search engine][.|]',
)
EMAIL = (
    'E-mail {a}, [subject|title|topic|heading][:|] [{b}|"{b}"][.|]',
    '[An email|A mail|An e-mail|Mail] [to|for] {a}[:|,] [{b}|"{b}"]',
    '[Could|Can|Would] you [mail|email|write to] {a}[:|,|? It says] [{b}|"{b}"]',
    '[Drop|Shoot] {a} [a mail|a line] [with|under] the [title|heading|line] [{b}|"{b}"][.|]',
    '[Compose|Prepare|Draft] [a mail|an email] [for|to] {a}[, subject:| headed| about] [{b}|"{b}"][.|]',
    '[Inform|Notify|Contact] {a} by [mail|e-mail|email][:|, subject|, title] [{b}|"{b}"][.|]',
    '"{b}" [should go|has to go|goes|must be mailed] to {a}[.|]',
    'I [must|have to|should|plan to] [mail|email|e-mail] {a} [about|regarding|on] [{b}|"{b}"][.|]',
    '[Mail|Email] to {a} [having|carrying|with] "{b}" in the [subject line|title|first line][.|]',
    '[Get|Let] "{b}" [sent|mailed|go] to {a}[.|]',
    '{a} [should get|gets|waits for|needs|must have] [a mail|an email|my mail][: |, title |, subject ][{b}|"{b}"][.|]',
    'Under the [title|heading|subject] "{b}" [write|mail] to {a}[.|]',
    'There is [a mail|an e-mail] to [send|write] to {a}[:|, about] [{b}|"{b}"][.|]',
)
ALARM = (
    "[The alarm|My alarm|The clock] [should|must|has to] [ring|sound|wake me] at {a}[.|]",
    "[I want|I have|I need] to [be awake|stand up|wake up|rise] [at|by] {a}[.|]",
    "[Tomorrow|Today] [wake|call|ring] me at {a}[.|, please.]",
    "[Don't let me sleep|I cannot sleep] [longer than|past|after] {a}[.|]",
    "[Alarm|Wake-up call|Wake me][:|,] {a}[.|, please.|]",
    "[Have|Put|Turn] [an|the|my] alarm [on |]for {a}[.|]",
    "[Could|Can] you [wake|call|ring] me at {a}?",
)
TIMER = (
    "[Time|Clock] {a} minutes[.| for me.|, please.]",
    "[My eggs|The cake|The pasta|The tea|The rice] [needs|takes|need] {a} minutes[.|, set a timer.]",
    "[Stop|Beep|Signal|Wake me] after {a} minutes[.|]",
    "[Could|Can] you [time|measure|start|set] {a} minutes[?| for me?]",
    "[Timer|Countdown|Clock][:| of| with| on] {a} minutes[.|]",
    "[In|After] {a} minutes [tell me|call me|ring|it should ring][.|]",
    "[Give me|Put on|Have] a [timer|countdown] [with|over|of] {a} minutes[.|]",
)
REMIND = (
    'I [might|may|could|will] [forget|miss|overlook] [{a}|"{a}"] on {b}[.|: remind me.|, so remind me.]',
    '[Keep me from|Stop me from] [forgetting|missing] [{a}|"{a}"] on {b}[.|]',
    '[On|For] {b}[:|,] [remind me: |do not forget: |reminder: |think of this: ][{a}|"{a}"]',
    'Reminder [for|on] {b}[:|,] [{a}|"{a}"]',
    '[Tell|Call|Wake|Ping] me on {b} [about|because of|for] [{a}|"{a}"][.|]',
    '[Make sure|See] that I [remember|recall|do not forget|think of] [{a}|"{a}"] on {b}[.|]',
    '[{a}|"{a}"] [must not be|should not be|is not to be] forgotten on {b}[.|]',
    '[Can|Could|Will] you remind me [of|about] [{a}|"{a}"] on {b}?',
    '[Put|Set] a [note|reminder] [with|saying] "{a}" [for|on] {b}[.|]',
)
STOCK = (
    "[Price|Value|Quote|Rate] of {a}[| stock| shares][?|.|, please.]",
    "[How|Where] [is|stands|does] {a} [stock |]on the [market|exchange][| stand][?| today?]",
    "I [want|would like|need] to [know|see|hear] the [price|value] of {a}[| stock| shares][.|]",
    "[Give|Bring|Send] me the [price|quote] [for|of] {a}[.|]",
    "[Can|Could] you [check|look up|find] {a} [on the stock market|at the exchange]?",
    "[For|At] how much [is|goes|sells] {a}[| stock] [now|today]?",
)
TRANSLATE = (
    '[Say|Write|Put down|Express] [{a}|"{a}"] in {b}[.|, please.|]',
    '[Get|Have|Make] [{a}|"{a}"] [translated|rendered|written|put] [into|in] {b}[.| for me.|]',
    '[Can|Could|Will] you [translate|say|write|render] [{a}|"{a}"] [in|into] {b}?',
    '[In|To|Into] {b}[:|, please:| please:] [{a}|"{a}"]',
    'What [is the {b} for|does {b} have for|do people say in {b} for] "{a}"?',
    '[A translation|The translation|Translation] of [{a}|"{a}"] [to|into] {b}[.|, please.|]',
    'My friend [speaks|reads|knows] {b}[.|,] [how do I say|translate|what is] "{a}"[?|]',
    'I [have|got] [{a}|"{a}"] [here |]and [want|need|would like] it in {b}[.|]',
    '[How|What] does "{a}" [sound|look|read|become] [like |]in {b}?',
)
USER = (
    "[Look|Search|Check|Dig] [for|up|out] [the |]user [number |with number |]{a}[.|, please.]",
    "[User|User number|Number|Id|User id][:|] {a}[.|, please.|]",
    "[What|Anything] do [you|we] [know|have] [about|on] [the |]user [number |with the number |]{a}?",
    "[Open|Pull up|Bring up|Fetch|Print|Load|Read] [the |]user [record |data |account |][number |with id |]{a}[.|]",
    "I [would like|want|have|need] to [see|know|meet|read about|hear about] user [number |]{a}[.|]",
    "[Can|Could|Will] you [find|show me|get|look up] [the |]user [number |with the id |]{a}?",
    "[Say|Tell us|Show me|Find out] who [has|owns|is|hides behind] [the |user ][id|number|code] {a}[.|]",
    "[Somebody|A user|One of our users] has [the |]number {a}[. Who is it?|, who?|. Find them.]",
    "[What|How] is user [number |]{a} [called|named]?",
)
CALCULATE = (
    "[Let us|We have to|Help me to] [calculate|compute|work out|solve] {a}[.|]",
    "[Result|Value|Answer] of {a}[?|.|, please.]",
    "[Formula|Sum|To solve|Exercise][:|] {a}",
    "[Say|Give me|Find out] what {a} [is|makes|comes to][.|]",
    "[Could|Will|Would] you [calculate|compute|solve|work out] {a}[?| for me?]",
)
