"""The demo model's tokenizer: how it is trained, written in Hugging Face layout, and used to mark what to learn.

A byte-level BPE in Qwen's manner: the same split pattern, so that every digit is a token of its own, and ChatML
around messages. Invariant (tested): `encode_conversation` gives the ids that the shipped chat template gives.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from benchmarks.demo_model.generate import Message

END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE)
VOCAB_SIZE = 1536

# Qwen's pattern: contractions, words with one leading mark, single digits, runs of marks, line ends, spaces.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a byte-level BPE with `VOCAB_SIZE` entries learned from `texts`; the same texts give the same entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
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


def encode_conversation(tokenizer: Tokenizer, messages: Iterable[Message]) -> tuple[list[int], list[bool]]:
    """Return the chat's token ids and, for each, whether it is one that the model itself must produce.

    The model produces what an assistant message says and the `<|im_end|>` that closes it.
    """
    token_ids: list[int] = []
    is_learned: list[bool] = []
    for message in messages:
        head, body = f"{START_OF_MESSAGE}{message['role']}\n", message["content"] + END_OF_MESSAGE
        pieces = [(head + body + "\n", False)]
        if message["role"] == "assistant":
            pieces = [(head, False), (body, True), ("\n", False)]
        for text, learned in pieces:
            piece_ids = tokenizer.encode(text).ids
            token_ids += piece_ids
            is_learned += [learned] * len(piece_ids)
    return token_ids, is_learned
