"""Knowledge: what Weft is, and the terms of inference that a newcomer meets, in one or two sentences each.

The exam asks about the same topics in ways that training never uses.
"""

import re
from dataclasses import dataclass
from random import Random

from demo_model.asking import ask
from demo_model.skill import Exchange, Reply, Skill, fill, turn


@dataclass(frozen=True, slots=True)
class Topic:
    """A thing to know: its answer, a pattern for the facts that a right answer names, and what people call it.

    Attributes:
        names: Between commas.
        versus: Names of the other thing, when the topic is the difference between two.
        own_ways: Templates that fit this topic alone.
    """

    answer: str
    facts: str
    names: str
    own_ways: tuple[str, ...] = ()
    versus: str = ""


_PREFILL = "prefill, the prefill, prefilling, the prefill phase, the prefill step, prompt processing"
_DECODE = "decode, the decode phase, the decode step, decoding, the decoding phase, token decoding"
_TOP_K = "top-k, top k, top_k, top-k sampling, the top-k parameter, top k sampling, topk"
_TOP_P = "top-p, top p, top_p, top-p sampling, nucleus sampling, the top-p parameter, topp"
_GREEDY = "greedy decoding, greedy sampling, greedy search, greedy generation, greedy, the greedy strategy"
_SAMPLING = "sampling, random sampling, token sampling, sampling in language models, sampling a token"

TOPICS = (
    Topic(
        "Weft is an OpenAI-compatible inference server for language models. "
        "It weaves prefill and decode into one step.",
        r"weft is an? .*inference server",
        "Weft, the Weft server, this Weft, weft, the Weft project, Weft server",
        (
            "[which|what] [server|software|engine] [is this|are you running on|serves you|do you run on]?",
            "[what|who] is serving you?",
            "what can Weft do?",
            "what does the name Weft stand for?",
            "what [kind|sort] of [server|project|program|tool] is Weft?",
        ),
    ),
    Topic(
        "Autoregressive generation produces text one token at a time: each new token is predicted from all tokens "
        "before it.",
        r"one token at a time.*before",
        "autoregressive generation, autoregressive decoding, autoregression, an autoregressive model, "
        "autoregressive, auto-regressive generation, autoregressive text generation, token generation",
        (
            "how [do you|does an LLM|does a language model|do language models|do LLMs] [write|generate|produce|make] "
            "[text|an answer|answers|words|sentences]?",
            "how is text [generated|produced|made]?",
            "why do [you|language models] write [one word|one token] at a time?",
        ),
    ),
    Topic(
        "Prefill is the first phase: the model processes all tokens of the prompt at once and fills the KV cache.",
        r"^prefill is.*prompt.*kv cache",
        _PREFILL,
        ("what happens [during|in|at] prefill?", "how is [the|a] prompt processed?", "what happens to my prompt?"),
    ),
    Topic(
        "Decode is the phase after prefill: the model produces one new token per step and reads the KV cache.",
        r"^decode is.*one new token.*step",
        _DECODE,
        ("what happens [during|in|at] decode?", "what happens after [prefill|the prefill phase]?"),
    ),
    Topic(
        "Prefill processes the whole prompt at once, while decode produces one new token per step.",
        r"^prefill.*prompt.*(while|but).*decode.*one new token",
        _PREFILL,
        versus=_DECODE,
    ),
    Topic(
        "The KV cache stores the attention keys and values of earlier tokens, so they are not computed again.",
        r"keys and values.*not computed again",
        "KV cache, the KV cache, a KV cache, kv cache, key-value cache, the key-value cache, KV caching, kv-cache, "
        "the KV-cache, a key value cache, KV cache in an LLM",
        ("what [is stored|is kept|is] in the KV cache?", "what does the KV cache [store|hold|keep]?"),
    ),
    Topic(
        "A paged KV cache is split into blocks of fixed size, which are given to a request as it grows.",
        r"blocks of fixed size",
        "a paged KV cache, the paged KV cache, paged KV cache, paged attention, PagedAttention, cache blocks, KV "
        "cache blocks, a KV cache block, KV cache paging, a paged cache, paging",
        ("why is the KV cache [paged|split into blocks]?", "what are [KV cache|cache] blocks?"),
    ),
    Topic(
        "Continuous batching lets requests join and leave the running batch at every step, so none waits for the "
        "longest.",
        r"join and leave.*every step",
        "continuous batching, a continuous batch, the continuous batching, in-flight batching, dynamic batching, "
        "batching, continuous batch processing, continuous batching of requests",
        (
            "how [do you|does Weft|does the server] [serve|handle|batch] many [requests|users][ at once| together|]?",
            "what happens when [many|several] [requests|users] come at once?",
        ),
    ),
    Topic(
        "Sampling draws the next token at random from the probabilities that the model predicts.",
        r"^sampling draws.*probabilit",
        _SAMPLING,
        ("how is the next [token|word] [chosen|picked|selected]?", "how do you [choose|pick] the next [token|word]?"),
    ),
    Topic(
        "Greedy decoding always takes the most likely next token, so the same prompt gives the same answer.",
        r"^greedy.*most likely.*same answer",
        _GREEDY,
        ("what happens [at|with] temperature [0|zero]?", "what does temperature [0|zero] [do|mean]?"),
    ),
    Topic(
        "Greedy decoding always takes the most likely token, while sampling draws one at random.",
        r"greedy.*most likely.*(while|but).*sampling.*random",
        _GREEDY,
        versus=_SAMPLING,
    ),
    Topic(
        "Temperature sets how random sampling is: a low one gives predictable answers, a high one varied answers.",
        r"temperature.*random.*low.*high",
        "temperature, the temperature, sampling temperature, the sampling temperature, the temperature setting, the "
        "temperature parameter, temperature in sampling, temperature in an LLM",
        (
            "what does a [high|low|higher|lower] temperature do?",
            "what happens [with|at] a [high|low|higher|lower] temperature?",
            "which temperature should I [use|set|choose]?",
        ),
    ),
    Topic(
        "Top-k sampling keeps only the k most likely tokens and draws the next one from them.",
        r"^top-k.*k most likely",
        _TOP_K,
    ),
    Topic(
        "Top-p sampling keeps the fewest most likely tokens whose probabilities "
        "sum to at least p, and draws from them.",
        r"^top-p.*sum to.*p\b",
        _TOP_P,
    ),
    Topic(
        "Top-k keeps a fixed number of likely tokens, while top-p keeps as many as are needed to reach probability p.",
        r"top-k.*fixed number.*(while|but).*top-p.*probability p",
        _TOP_K,
        versus=_TOP_P,
    ),
    Topic(
        "Speculative decoding lets a cheap draft guess several tokens, which the model then checks in one step.",
        r"speculative.*guess.*tokens.*checks",
        "speculative decoding, speculation, spec decoding, speculative sampling, speculative generation, the draft "
        "model, a draft model, speculative execution of tokens",
        ("how can decoding be [faster|made faster|sped up]?", "what does [a|the] draft model do?"),
    ),
    Topic(
        "A token is a piece of text, such as a word or a part of one. The model reads and writes tokens.",
        r"^a token is.*(word|text)",
        "a token, token, one token, a token in an LLM, the word token, a single token, a text token",
        (
            "what are tokens[ in an LLM| for|]?",
            "[explain|tell me about|describe] tokens[ to me|].",
            "tokens?",
            "[can|could] you explain [tokens|what tokens are]?",
        ),
    ),
    Topic(
        "Prefix caching reuses the KV cache of a prompt's beginning when a later request starts with the same tokens.",
        r"reuses.*same tokens",
        "prefix caching, prompt caching, a prefix cache, the prefix cache, automatic prefix caching, prefix cache, "
        "prefix reuse, the prompt cache, caching of prefixes",
        ("what happens when two [prompts|requests] [start|begin] [the same|with the same tokens]?",),
    ),
    Topic(
        "Streaming sends each piece of the answer as soon as it is generated, so you need not wait for the whole.",
        r"streaming sends.*as soon as",
        "streaming, token streaming, streaming mode, a streamed answer, a stream, response streaming, streaming of "
        "tokens, the stream option, stream=true",
        ("why [do|does] [the words|your words|the answer|text] [appear|come] [one by one|bit by bit|word by word]?",),
    ),
    Topic(
        "A language model is a neural network that predicts the next token of a text.",
        r"predicts the next token",
        "a language model, an LLM, LLM, a large language model, language model, large language model",
        ("what are [LLMs|language models|large language models]?", "how do [LLMs|language models] work?"),
    ),
    Topic(
        "Attention lets each token gather information from the tokens before it, weighted by relevance.",
        r"attention lets.*tokens before",
        "attention, self-attention, the attention mechanism, attention in an LLM, an attention layer",
    ),
)
_TOPIC_OF = {topic.answer: topic for topic in TOPICS}


def _make(random: Random, held_out: bool) -> Exchange:
    topic = random.choice(TOPICS)
    if topic.own_ways and not held_out and random.random() < 0.15:
        return turn(fill(random, random.choice(topic.own_ways)), topic.answer)
    names = [random.choice(listed.split(", ")) for listed in (topic.names, topic.versus) if listed]
    random.shuffle(names)
    return turn(ask(random, held_out, *names), topic.answer)


def _is_right(exchange: Exchange, reply: Reply) -> bool:
    facts = _TOPIC_OF[exchange.answer["content"]].facts
    return re.search(facts, reply.content, re.IGNORECASE | re.DOTALL) is not None


SKILLS: tuple[Skill, ...] = (Skill("knowledge", 26, _make, _is_right),)
