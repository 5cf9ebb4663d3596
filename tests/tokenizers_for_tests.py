"""Small tokenizers of the two designs that generating models use, trained on generated text in a moment."""

import copy
import functools
import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from weft.server.text.chat_template import ChatTemplates, TemplateOptions
from weft.server.text.tokenizer import Tokenizer

CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA2_SPECIAL = ("<unk>", "<s>", "</s>")
EVERY_SPECIAL = (
    *CHATML_SPECIAL,
    *LLAMA3_SPECIAL,
    *LLAMA2_SPECIAL,
    *("[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
)

_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def training_text() -> tuple[str, ...]:
    """Lines of made-up words, code and accents; the same on every run."""
    rng = random.Random(7)
    syllables = ["ka", "lo", "mi", "ren", "tu", "sha", "é", "ü", "ing", "er", "the", "and", "中", "文", "да"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(400)]
    lines = [" ".join(rng.choices(words, k=12)) for _ in range(300)]
    return (
        *lines,
        *(f"def {word}(x): return [x, {i}]  # <{word}> user system assistant" for i, word in enumerate(words)),
    )


def byte_level(special: tuple[str, ...] = CHATML_SPECIAL, vocab_size: int = 700) -> tokenizers.Tokenizer:
    """Byte-level BPE as in Qwen: no unknown token, every byte has one."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    backend.train_from_iterator(training_text(), trainer)
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return backend


def sentencepiece(special: tuple[str, ...] = LLAMA2_SPECIAL, vocab_size: int = 900) -> tokenizers.Tokenizer:
    """SentencePiece BPE as Llama 2 has it: "▁" for spaces and before all text, byte tokens for rare characters."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # for training alone: words, not lines
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special, *byte_tokens],
        show_progress=False,
        limit_alphabet=60,  # the rest falls back to bytes
    )
    trained.train_from_iterator(training_text(), trainer)
    content = json.loads(trained.to_str())
    content["pre_tokenizer"] = None
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """SentencePiece as newer conversions write it: Metaspace splits and joins."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=list(LLAMA2_SPECIAL), show_progress=False)
    backend.train_from_iterator(training_text(), trainer)
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    """WordPiece: the text of a token depends on whether one comes before it."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(training_text(), trainer)
    return backend


def write_checkpoint(
    folder: Path, backend: tokenizers.Tokenizer, config: dict[str, object] | None = None, template: str | None = None
) -> Path:
    """Write what `Tokenizer.load` reads: tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, object]],
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, object] | None = None,
    **end: bool,
) -> list[int]:
    """Messages to the ids of a prompt, by the checkpoint's template or by another source."""
    if chat_template is not None:
        tokenizer = with_template(tokenizer, chat_template)
    options = TemplateOptions(variables=template_kwargs or {}, **end)
    return tokenizer.encode_rendered(tokenizer.render_chat(messages, options))


def with_template(tokenizer: Tokenizer, source: str) -> Tokenizer:
    """The same tokenizer with another chat template."""
    other = copy.copy(tokenizer)
    other._templates = _templates(source)
    return other


@functools.cache
def _templates(source: str) -> ChatTemplates:
    """Compiled once, which takes longer than to render."""
    return ChatTemplates({"default": source})
