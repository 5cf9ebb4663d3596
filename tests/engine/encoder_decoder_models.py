"""Tiny random float32 checkpoints of encoder-decoder models, in every variation, and what transformers answers.

The weights are scaled up, so that logits differ clearly, and attention to the input matters.
"""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 120
LONGEST_INPUT = 100
NUM_OUTPUT_TOKENS = 12
MIN_GAP = 2e-3

_OF_SCORES, _OF_OTHERS = 0.4, 0.6
"""Deviations of matrices: of queries and keys, and of all others but embeddings."""

_T5: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_BART: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": LONGEST_INPUT,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "scale_embedding": True,
}
_MARIAN = _BART | {"pad_token_id": VOCAB_SIZE - 1, "decoder_start_token_id": VOCAB_SIZE - 1}
_GEMMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": LONGEST_INPUT,
    "query_pre_attn_scalar": 32,
    "sliding_window": 9,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 20.0,
}
_T5GEMMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "encoder": _GEMMA,
    "decoder": _GEMMA | {"hidden_size": 64, "num_hidden_layers": 2, "sliding_window": 5},
    "decoder_start_token_id": 2,
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", _T5),
    "t5-gated": ("T5", _T5 | _GATED),
    "t5-tied-gated": ("T5", _T5 | {"feed_forward_proj": "gated-silu"}),
    "mt5": ("MT5", _T5 | _GATED),
    "umt5": ("UMT5", _T5 | {"feed_forward_proj": "gated-gelu"}),
    "bart": ("Bart", _BART),
    "bart-heads": ("Bart", _BART | {"encoder_attention_heads": 8, "scale_embedding": False}),
    "mbart": ("MBart", _BART),
    "plbart": ("PLBart", _BART),
    "marian": ("Marian", _MARIAN),
    "marian-two-embeddings": ("Marian", _MARIAN | {"share_encoder_decoder_embeddings": False}),
    "pegasus": ("Pegasus", _BART),
    "m2m_100": ("M2M100", _BART),
    "blenderbot": ("Blenderbot", _BART),
    "t5gemma": ("T5Gemma", _T5GEMMA),
    "t5gemma-uncapped": (
        "T5Gemma",
        _T5GEMMA
        | {
            "encoder": _GEMMA | {"attn_logit_softcapping": None, "head_dim": 16, "attention_bias": True},
            "decoder": _GEMMA
            | {"num_attention_heads": 2, "final_logit_softcapping": None, "attention_bias": True}
            | {"layer_types": ["full_attention", "full_attention", "sliding_attention"], "rms_norm_eps": 1e-3},
            "tie_word_embeddings": True,
        },
    ),
}
"""Kind of model and config, by name."""


_WHISPER = _BART | {
    "num_mel_bins": 20,
    "max_source_positions": 50,
    "max_target_positions": 64,
    "pad_token_id": VOCAB_SIZE - 1,
    "bos_token_id": VOCAB_SIZE - 1,
    "eos_token_id": VOCAB_SIZE - 1,
    "scale_embedding": False,
}
_SPEECH2TEXT = _BART | {
    "input_feat_per_channel": 20,
    "conv_channels": 32,
    "max_source_positions": 180,
    "max_target_positions": 64,
}
_MOONSHINE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "encoder_num_hidden_layers": 3,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 2,
}
SPEECH: dict[str, tuple[str, dict[str, Any]]] = {
    "whisper": ("Whisper", _WHISPER),
    "whisper-scaled": ("Whisper", _WHISPER | {"scale_embedding": True, "encoder_attention_heads": 8}),
    "speech2text": ("Speech2Text", _SPEECH2TEXT),
    "speech2text-deep": (
        "Speech2Text",
        _SPEECH2TEXT | {"num_conv_layers": 3, "conv_kernel_sizes": [5, 3, 5], "tie_word_embeddings": False},
    ),
    "moonshine": ("Moonshine", _MOONSHINE),
    "moonshine-bias": ("Moonshine", _MOONSHINE | {"attention_bias": True, "encoder_hidden_act": "gelu_new"}),
}
"""As `MODELS`, of those that hear."""

EXTRACTORS: dict[str, tuple[str, dict[str, Any]]] = {
    "Whisper": ("WhisperFeatureExtractor", {"feature_size": 20, "chunk_length": 1}),
    "Speech2Text": ("Speech2TextFeatureExtractor", {"feature_size": 20, "num_mel_bins": 20}),
    "Moonshine": ("Wav2Vec2FeatureExtractor", {"do_normalize": False}),
}
"""What makes the features of each kind."""


@dataclass(frozen=True)
class Answers:
    """Inputs, what the decoder begins with, and what transformers writes."""

    folder: Path
    model: Any
    inputs: list[list[int]]
    prompts: list[list[int]]
    outputs: list[list[int]]


def write_model(name: str, folder: Path, gain: float = 1.0, **changes: Any) -> Any:
    """Write a checkpoint and return the model: `changes` of the config, and `gain` times the matrices."""
    kind, config = (MODELS | SPEECH)[name]
    config = config | changes
    head = "MarianMTModel" if kind == "Marian" else f"{kind}ForConditionalGeneration"
    torch.manual_seed(0)
    model = getattr(transformers, head)(getattr(transformers, f"{kind}Config")(**config)).eval().float()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            if weight.dim() > 1:
                is_score = any(part in key for part in (".q.", ".k.", "q_proj", "k_proj"))
                of_scores = _OF_SCORES / 2 if ".q." in key or ".k." in key else _OF_SCORES  # T5 does not scale scores
                is_embedding = "embed" in key or "shared" in key
                weight.normal_(0, of_scores if is_score else 0.3 if is_embedding else _OF_OTHERS).mul_(gain)
            elif "norm" in key and "weight" in key:
                weight.uniform_(0.5, 1.5).sub_(int(kind == "T5Gemma"))
            else:
                weight.normal_(0, 0.1)
        model.tie_weights()
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_(0, 0.2)
    model.save_pretrained(folder)
    if kind in EXTRACTORS:
        extractor(kind).save_pretrained(folder)
    return model


def extractor(kind: str) -> Any:
    """What transformers makes features with."""
    name, settings = EXTRACTORS[kind]
    return getattr(transformers, name)(**settings)


def answer(model: Any, input_ids: list[int], prompt: list[int], **options: Any) -> Any:
    """The ids of transformers' best outputs behind the prompt, a row for each, or `generate`'s dictionary."""
    with torch.no_grad():
        return model.generate(
            torch.tensor([input_ids]), decoder_input_ids=torch.tensor([prompt]), do_sample=False, **options
        )


@cache
def answers(root: Path, name: str) -> Answers:
    """Inputs of 1 token up to the longest, some alike in their beginning, with clear answers of transformers."""
    model = write_model(name, folder := root / name)
    draw, start = random.Random(3), model.config.decoder_start_token_id
    beginning = [draw.randrange(3, VOCAB_SIZE - 2) for _ in range(40)]
    lengths = [1, LONGEST_INPUT, 32, 33, 7, 64, 3, 16]
    found = Answers(folder, model, [], [], [])
    for _ in range(200):
        if len(found.inputs) == len(lengths):
            break
        index = len(found.inputs)
        kept = beginning if index % 2 else []
        tail = [draw.randrange(3, VOCAB_SIZE - 2) for _ in range(lengths[index])]
        input_ids = (kept + tail)[: max(lengths[index], 1)]
        if kept and len(input_ids) <= len(kept):
            input_ids = [*kept[: len(input_ids) - 1], tail[-1]]
        prompt = [start] + [draw.randrange(3, VOCAB_SIZE - 2) for _ in range(4 if index % 3 == 2 else 0)]
        result = answer(
            model,
            input_ids,
            prompt,
            num_beams=1,
            max_new_tokens=NUM_OUTPUT_TOKENS,
            output_scores=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(result.scores).topk(2).values
        if (best[..., 0] - best[..., 1]).min() > MIN_GAP:
            found.inputs.append(input_ids)
            found.prompts.append(prompt)
            found.outputs.append(result.sequences[0, len(prompt) :].tolist())
    assert len(found.inputs) == len(lengths), "too few inputs with clear answers"
    assert len({tuple(output) for output in found.outputs}) > 2, "the model answers everything alike"
    return found
