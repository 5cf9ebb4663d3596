"""Writes a tiny random checkpoint with an encoder whose tokenizer names languages, as NLLB's does."""

import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import M2M100Config, M2M100ForConditionalGeneration

EOS, ENGLISH, FRENCH = "</s>", "eng_Latn", "fra_Latn"


def letters() -> tokenizers.Tokenizer:
    """One token for each letter; a text is written behind its language."""
    pieces = ["<pad>", EOS, "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz.,:", ENGLISH, FRENCH]
    tokenizer = tokenizers.Tokenizer(models.Unigram([(piece, -3.0) for piece in pieces], 2, False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["<pad>", EOS, "<unk>", ENGLISH, FRENCH])
    special = [(text, pieces.index(text)) for text in (EOS, ENGLISH)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{ENGLISH} $A {EOS}", special_tokens=special)
    return tokenizer


def write_translator(folder: Path, **generation: object) -> M2M100ForConditionalGeneration:
    """Write the checkpoint and its tokenizer; returns transformers' module in float32.

    Args:
        generation: Added to generation_config.json.
    """
    tokenizer = letters()
    config = M2M100Config(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=96,
        bos_token_id=None,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=1,
    )
    torch.manual_seed(0)
    model = M2M100ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5)
            elif "norm" not in name:
                parameter.normal_(0, 0.1)
    model.generation_config.update(**generation)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS, "pad_token": "<pad>"}))
    return model
