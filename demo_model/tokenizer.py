"""The demo model's tokenizer: how it is made, written in Hugging Face layout, and used to mark what to learn.

A byte-level BPE in Qwen's manner: nearly the same split pattern, so that every digit is a token of its own, and ChatML
around messages. But the words that most chats are made of are whole, and all other words are letter by letter:
whatever has to be copied, spelled or sorted is made of tokens that the model has seen a million times. Invariant
(tested): `encode_conversation` gives the ids that the shipped chat template gives.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jinja2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from demo_model.skill import Json, Message

END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE)
BEGIN_THINKING, END_THINKING, BEGIN_CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
MARKERS = (BEGIN_THINKING, END_THINKING, BEGIN_CALL, END_CALL)
"""Single tokens as well, but text that users may see, so they are not special."""
VOCAB_SIZE = 1280

_SMALL_WORDS = (
    "a an and are as at be by can do does for from get has have how i in is it its me my of on one or so than that the "
    "them then there they this to was we were what when which who will with would you your"
)
# Qwen's pattern: contractions, words, single digits, runs of marks, line ends, spaces. But only small words take the
# space before them along: what is copied (names, values, tools) has the same tokens in a sentence and in a call.
# And words in capitals are letters one by one, as in the spelling of a word; "labelPicture" is two words.
SPLIT_PATTERN = (
    rf" (?:{_SMALL_WORDS.replace(' ', '|')})(?![\p{{L}}-])|(?i:'s|'t|'re|'ve|'m|'ll|'d)(?!\p{{L}})"
    r"|\p{Lu}?[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|\p{L}|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {%- set declared, parameters = tool.function, tool.function.parameters or {} %}
        {{- '\\n' + (declared.description + '\\n' if declared.description else '') }}
        {{- '{"name": "' + declared.name + '", "arguments": {' }}
        {%- for key, value in (parameters.properties or {}).items() %}
            {{- '' if loop.first else ', ' }}
            {{- '"' + key + ('"?: ' if parameters.required and key not in parameters.required else '": ') }}
            {%- if value.enum %}
                {{- value.enum | tojson }}
            {%- else %}
                {{- '"string"' if value.type == 'string' else value.type if value.type is string else 'any' }}
            {%- endif %}
        {%- endfor %}
        {{- '}}' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + ('system' if message.role == 'developer' else message.role) + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content and loop.last %}
            {{- '<think>\\n' + message.reasoning_content + '\\n' }}
        {%- endif %}
        {{- '</think>' }}
    {%- endif %}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content or [] %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' if message.content or not loop.first else '' }}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking else '</think>') }}
{%- endif %}
"""
_TEMPLATE = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)


def plain_parts(text: str) -> list[str]:
    """Return what stands between special tokens and markers, from which no entry may be learned."""
    return re.split("|".join(map(re.escape, (*SPECIAL_TOKENS, *MARKERS))), text)


_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _byte_level(text: str) -> str:
    """Return the form that `text` has in a vocabulary: a printable character for each byte."""
    return "".join(part for part, _ in _BYTE_LEVEL.pre_tokenize_str(text))


def make_tokenizer(texts: Iterable[str], is_whole: Callable[[str], bool]) -> Tokenizer:
    """Return a byte-level BPE with `VOCAB_SIZE` entries: bytes, characters beyond ASCII, and the most frequent words.

    Args:
        texts: Where words and characters are taken from.
        is_whole: Whether a word may be one token; if not, or if it is rare, it is letters.

    Raises:
        ValueError: The texts have too few words.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, _BYTE_LEVEL])
    tokenizer.decoder = decoders.ByteLevel()
    words = Counter(word for text in texts for word, _ in split.pre_tokenize_str(text))
    characters = [_byte_level(character) for character in sorted(set("".join(words))) if not character.isascii()]
    merges = list(dict.fromkeys((c[:length], c[length]) for c in characters for length in range(1, len(c))))
    entries = [*SPECIAL_TOKENS, *MARKERS, *sorted(_BYTE_LEVEL.alphabet()), *(a + b for a, b in merges)]
    entries += [
        _byte_level(word) for word, _ in sorted(words.items(), key=lambda item: (-item[1], item[0])) if is_whole(word)
    ]
    entries = list(dict.fromkeys(entries))[:VOCAB_SIZE]
    if len(entries) < VOCAB_SIZE:
        raise ValueError(f"only {len(entries)} of {VOCAB_SIZE} entries: more texts are needed")
    # With `ignore_merges` a whole word is found in the vocabulary at once, and merges are for characters alone.
    tokenizer.model = models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=merges, ignore_merges=True)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKERS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`; `max_length` is in tokens."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": None,
        "eos_token": END_OF_MESSAGE,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def render(messages: Sequence[Message], tools: Sequence[Json] = ()) -> str:
    """Return a chat as the model sees it; ends with the last message, so nothing is left to generate."""
    return _TEMPLATE.render(messages=messages, tools=tools)


def encode_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Json] = ()
) -> tuple[list[int], list[bool]]:
    """Return the chat's token ids and, for each, whether it is one that the model itself must produce.

    The model produces what stands behind the opening of an assistant's message, which ends with `</think>` or with
    `<think>` and a line end, up to the `<|im_end|>` that closes it.
    """
    token_ids: list[int] = tokenizer.encode(render(messages, tools)).ids
    end, begin_thinking = tokenizer.token_to_id(END_OF_MESSAGE), tokenizer.token_to_id(BEGIN_THINKING)
    opening = tokenizer.encode(f"{START_OF_MESSAGE}assistant\n").ids
    is_learned = [False] * len(token_ids)
    at = 0
    while at < len(token_ids):
        if token_ids[at : at + len(opening)] != opening:
            at += 1
            continue
        at += len(opening)
        at += 2 if token_ids[at] == begin_thinking else 1
        while not is_learned[at - 1] or token_ids[at - 1] != end:
            is_learned[at] = True
            at += 1
    return token_ids, is_learned
