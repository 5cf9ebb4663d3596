"""Ways to ask what something is, or how two things differ: `{x}` and `{y}`.

Knowledge and refusals share them, so that the topic alone decides between an answer and a refusal.
"""

from random import Random

from demo_model.skill import Pool, fill

WAYS_TO_ASK = Pool(
    training=(
        "[what is|what's|whats] {x}?",
        "[what is|what's] {x}[ in short| in one sentence| in simple words| exactly| actually| really|]?",
        "[hi|hello|hey|ok|okay|so|and|now|well|please|quick question|one more question][,|:|!|] what is {x}?",
        "[and|so|now] {x}?",
        "{x}?",
        "{x}",
        "{x}[, please| please|, what is it|, what does it mean|, explained| meaning| definition| explanation][?|.|]",
        "[please |]explain {x}[ to me| for me|][ in one sentence| in simple words| briefly| like I am five|][.|]",
        "[please |]explain what {x} [is|means|does][ to me|].",
        "[please |]describe {x}[ to me|][ in one sentence| briefly| in your own words|].",
        "[please |]define {x}[ for me| briefly|].",
        "[please |]tell me [about|more about|something about|everything about|a bit about] {x}[.|, please.]",
        "[please |]tell me what {x} [is|means|does|is for].",
        "[can|could|would|will] you [please |]explain {x}[ briefly| in one sentence| in simple words|]?",
        "[can|could|would|will] you [please |]explain what {x} [is|means|does]?",
        "[can|could|would|will] you [please |]tell me [about|more about|something about] {x}?",
        "[can|could|would|will] you [please |]tell me what {x} [is|means|does]?",
        "[can|could|would|will] you [please |]describe {x}[ to me| for me|]?",
        "[can|could] you [say|write|give me] a few words about {x}?",
        "[do you know|have you heard of|are you familiar with|did you hear of] {x}?",
        "do you know [what {x} is|what {x} means|anything about {x}|about {x}]?",
        "[what do you know|what can you tell me|what can you say] about {x}?",
        "how does {x} [work|help]?",
        "how [would you|do you|can one] [explain|describe|define] {x}?",
        "what does {x} [do|mean|stand for]?",
        "what do [you|people|they] mean by {x}?",
        "what is the [meaning|purpose|idea|point|use|definition] of {x}?",
        "what is {x} [for|good for|used for|about]?",
        "why [is {x} useful|do we need {x}|would I want {x}|does {x} matter|is {x} important]?",
        "when [do I need|would I use|is] {x}[ useful|]?",
        "[what kind of thing|what sort of thing] is {x}?",
        "I keep [reading|hearing] about {x}. [What is it|What is that|What does it mean|Can you explain]?",
        "I [read|heard] [about|of] {x}[ today| yesterday|]. [What is it|What is that|What does it do]?",
        "I [want|would like|need] to [know|learn|understand] [more about|something about] {x}.",
        "I [want|would like|need] to [know|understand|learn] what {x} is.",
        "I [do not|don't] [know|understand|get] [what {x} is|{x}][. Can you help?|. Please explain.|.]",
        "I have never heard of {x}[. What is it?|.]",
        "I have a question[ about {x}|: what is {x}|. What does {x} mean]?",
        "[give me|I need|I want|I am looking for|write] [a short|an|a simple] "
        "[definition|description|explanation] of {x}.",
        "[a short|a quick|a simple] [definition|description] of {x}[, please|].",
        "[in one sentence|in short|in simple words|briefly][,|:] what is {x}?",
        "[in one sentence|in short|in simple words|briefly][,|:] explain {x}.",
        "who or what is {x}?",
        "[please |][give|offer|write|send] me [the|a] [brief|rough|clear|first|plain] "
        "[idea|overview|account|summary|picture|notion] of {x}[.|, please.|]",
        "[what's|what is] [the story with|the matter with|behind|so special about|to know about] {x}[?|]",
        "what is {x} [supposed to be|then|really about|made for|all for][?|]",
        "[tell me, |say, |listen, ]what [is|would be] {x}[?|]",
        "how [should|do|can] I [understand|picture|imagine|think of] {x}[?|]",
        "{x} [is what|means what|- what is that|: what is it][?|]",
        "[what|which thing] [do|would] [you|they|we] call {x}[?|]",
        "what [do people understand|is understood] by {x}[?|]",
        "my [boss|teacher|friend] talks about {x}. What is it?",
        "remind me what {x} is[, please|].",
        "let's talk about {x}.",
        "[introduce|introduce me to] {x}.",
        "what about {x}?",
        "what is {x} and [why is it useful|how does it work|why do I need it|what is it for|what does it do]?",
        "[what is|what does|explain|how does|tell me about] {x} [in an LLM|in LLM inference|in Weft|for a model]?",
        "what are the [benefits|advantages|parts|steps] of {x}?",
        "[how|why] [does|would] {x} make [it|things|inference|answers] [faster|better|cheaper]?",
        "[so|well|right|okay|right then|tell me][,|] what [precisely|really|actually|in fact|in truth] is {x}[?|]",
        "what, [exactly|precisely|in short|really], is {x}[?|]",
        "[what|what exactly|which thing] [is intended|is described|is named|is called|is said] [by|with] {x}[?|]",
        "what [is|was] [said|thought|known|taught|written] [about|of] {x}[?|]",
        "[I am|I'm] [a beginner|new to this|not an expert|curious|lost|a newcomer|just starting|no expert]"
        "[, | here, |. |: |; ][what is|explain|what's|what does one call] {x}[?|.|]",
        "[this is|it is] [my first day|all new to me|new to me][, |. |: ][what is|what's|explain] {x}[?|.|]",
        "[a|one] [short|quick|brief|simple] [explanation|description|account|word] [of|on|about] {x}[, please|][.|]",
        "[let me have|let me hear|share] a [short|brief|rapid|simple] [explanation|account|word] [of|on] {x}[.|]",
        "[pardon|excuse me|forgive me|sorry][,|:|;] what [was|does] {x} [mean|again|stand for|once more][?|]",
        "[educate me|school me|instruct me|inform me] [about|on] {x}[.|]",
        "[help me|let me|make me] [see|grasp|learn|get] [what {x} is|{x}|the idea of {x}][.|]",
    ),
    held_out=(
        "So what exactly is {x}?",
        "Could you explain {x} to me, please?",
        "I am new here, what is {x}?",
        "Do you happen to know what {x} is?",
        "What should I know about {x}?",
        "Help me understand {x}.",
        "What is meant by {x}?",
        "Please give me a quick explanation of {x}.",
        "What's {x} all about?",
        "Sorry, what is {x} again?",
        "Teach me about {x}.",
        "I wonder what {x} is.",
    ),
)
WAYS_TO_COMPARE = Pool(
    training=(
        "[what is|what's|explain|tell me|describe|I want to know|give me] the difference between {x} and {y}[?|.|]",
        "[what are|explain|tell me] the differences between {x} and {y}[?|.|]",
        "[can|could] you [explain|tell me|describe] the difference between {x} and {y}?",
        "[how|in what way] [does {x} differ|is {x} different] from {y}?",
        "how [do|are] {x} and {y} [differ|different]?",
        "{x} [vs|vs.|versus|or|and|against|compared to|compared with] {y}[?|]",
        "[please |]compare {x} [and|with|to] {y}[ for me|].",
        "[difference|differences] [between|of] {x} and {y}[?|]",
        "[is|are] {x} and {y} [the same|different]?",
        "is {x} the same as {y}?",
        "what [is|makes] {x} [compared to|different from] {y}?",
        "what distinguishes {x} from {y}?",
        "why are {x} and {y} [different|not the same]?",
        "I [mix up|confuse] {x} and {y}. [What is the difference|Which is which]?",
        "I [do not|don't] [know|understand|see] the difference between {x} and {y}.",
    ),
    held_out=(
        "How would you tell {x} and {y} apart?",
        "Where is the difference between {x} and {y}?",
        "Could you compare {x} with {y} in one sentence?",
        "Please tell me how {x} and {y} differ.",
        "What sets {x} apart from {y}?",
        "Isn't {x} the same thing as {y}?",
    ),
)


def ask(random: Random, held_out: bool, name: str, versus: str = "") -> str:
    """Ask what `name` is, or how it differs from `versus`."""
    ways = WAYS_TO_COMPARE if versus else WAYS_TO_ASK
    asked = fill(random, ways.draw(random, held_out), {"x": name, "y": versus})
    return asked[:1].upper() + asked[1:] if random.random() < 0.5 else asked
