"""Checkpoints with random weights, in Hugging Face layout: what is fast with them is fast with trained ones.

They are written once, into a cache folder. The tokenizer is made up, too: as many entries as the models have, nearly
all of them text, because a server that sends no text before it is whole sends nothing for an id without one.
"""

import itertools
import json
import os
import pathlib
import shutil
import string
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

VOCAB_SIZE = 151_936
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": VOCAB_SIZE - 3,
    "eos_token_id": VOCAB_SIZE - 1,
}
SHAPES: Mapping[str, Mapping[str, int]] = {
    "main": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
    },
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
    },
}
NAMES = {"main": "qwen3-0.6b-random", "tiny": "qwen3-tiny-random"}
CHAT_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def cache_folder() -> pathlib.Path:
    """Where checkpoints and logs are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(home).expanduser() / "weft" / "bench"


def checkpoint(shape: str) -> pathlib.Path:
    """Return the folder of a checkpoint, which is written if it is not there.

    Args:
        shape: A key of SHAPES.
    """
    folder = cache_folder() / NAMES[shape]
    if not (folder / "config.json").is_file():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            write(unfinished, SHAPES[shape])
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def write(folder: pathlib.Path, shape: Mapping[str, int]) -> None:
    """Write a random Qwen3 in bfloat16, and the tokenizer of VOCAB_SIZE entries."""
    import torch  # seconds, and not needed when the checkpoint is there
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    values: dict[str, Any] = {**COMMON, **shape}
    model: Any = Qwen3ForCausalLM(Qwen3Config(**values))
    model.to(torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: pathlib.Path) -> None:
    """Write the made-up tokenizer, its settings and a chat template."""
    made_up_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def made_up_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE of VOCAB_SIZE entries: bytes, pairs of printable characters, and words of two pairs of letters."""
    space = "Ġ"  # how byte-level BPE writes a space
    letters = string.ascii_letters + space
    printable = string.ascii_letters + string.digits + string.punctuation + space
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.product(printable, printable))
    pairs = ["".join(pair) for pair in itertools.product(letters, string.ascii_lowercase)]
    num_words = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(tokens) - len(merges)
    merges += itertools.islice(((a, b) for a, b in itertools.product(pairs, pairs) if space not in b), num_words)
    vocabulary = {token: index for index, token in enumerate([*tokens, *(a + b for a, b in merges)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
