"""A real Whisper: CTranslate2's file of it, as a package carries it, becomes a checkpoint as transformers saves it.

The layout is that of CTranslate2's `ModelSpec.save` and of its converter for Whisper. Projections of keys have no bias
in the original, so the zeros that stand for them here are checked and left out.
"""

import json
import re
import shutil
import struct
import subprocess
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

RATE = 16_000
_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
END, NO_TIMES, _PREVIOUS, START, TRANSCRIBE, _TRANSLATE = 50257, 50363, 50361, 50258, 50359, 50358
ENGLISH = 50259

SENTENCES = (
    "The quick brown fox jumps over the lazy dog while the farmer watches from the old wooden fence.",
    "Scientists have discovered a new species of butterfly in the mountains of northern Peru.",
    "Please remember to bring your passport and two copies of the application form tomorrow morning.",
    "The train to London leaves at half past seven from the second platform.",
    "She opened the letter slowly, knowing that its contents would change everything.",
    "Our company was founded in the year nineteen ninety two by three engineers from Toronto.",
    "Water boils at a lower temperature when you are high up in the mountains.",
    "He asked the waiter for a cup of black coffee and a slice of apple pie.",
    "The children built a large sand castle on the beach before the tide came in.",
    "Every student in the class must hand in the essay before Friday afternoon.",
    "The museum is closed on Mondays, but the garden behind it is always open.",
    "My grandmother keeps her old photographs in a small box under the bed.",
    "The pilot announced that we would land in Berlin twenty minutes early.",
    "A strong wind from the west pushed the little boat towards the rocks.",
    "They painted the kitchen yellow and put new handles on all the doors.",
    "The doctor told him to drink more water and to sleep at least eight hours.",
)


def _read(file: BinaryIO) -> dict[str, np.ndarray]:
    def numbers(form: str) -> Any:
        return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))

    def text() -> str:
        (size,) = numbers("H")
        return file.read(size)[:-1].decode()

    numbers("I"), text(), numbers("I")  # versions, and the name of the layout
    found = {}
    (count,) = numbers("I")
    for _ in range(count):
        name, (rank,) = text(), numbers("B")
        shape, kind, size = numbers("I" * rank), *numbers("BI")
        found[name] = np.frombuffer(file.read(size), _TYPES[kind]).reshape(shape)
    return found


def _names(layer: str, own: str, half: str) -> dict[str, str]:
    """transformers' names of the tensors of a layer but for those that are stacked, by CTranslate2's."""
    attention = {"linear_0": "q_proj", "linear_2": "out_proj"} if half == "decoder" else {}
    return {
        f"{layer}/self_attention/linear_1": f"{own}.self_attn.out_proj",
        f"{layer}/self_attention/layer_norm": f"{own}.self_attn_layer_norm",
        **{f"{layer}/attention/{theirs}": f"{own}.encoder_attn.{ours}" for theirs, ours in attention.items()},
        **({f"{layer}/attention/layer_norm": f"{own}.encoder_attn_layer_norm"} if attention else {}),
        f"{layer}/ffn/linear_0": f"{own}.fc1",
        f"{layer}/ffn/linear_1": f"{own}.fc2",
        f"{layer}/ffn/layer_norm": f"{own}.final_layer_norm",
    }


def _state(tensors: dict[str, np.ndarray], num_layers: int) -> dict[str, torch.Tensor]:
    state = {}

    def put(name: str, value: np.ndarray) -> None:
        state[name] = torch.from_numpy(value.astype(np.float32))

    def put_both(theirs: str, ours: str) -> None:
        for ends in (("weight", "weight"), ("bias", "bias"), ("gamma", "weight"), ("beta", "bias")):
            if (value := tensors.get(f"{theirs}/{ends[0]}")) is not None:
                put(f"{ours}.{ends[1]}", value)

    def put_stacked(theirs: str, ours: str, names: Sequence[str]) -> None:
        weights, biases = (np.split(tensors[f"{theirs}/{end}"], len(names)) for end in ("weight", "bias"))
        for name, weight, bias in zip(names, weights, biases, strict=True):
            put(f"{ours}.{name}.weight", weight)
            if name == "k_proj":
                assert not bias.any()
            else:
                put(f"{ours}.{name}.bias", bias)

    for half in ("encoder", "decoder"):
        put(f"model.{half}.embed_positions.weight", tensors[f"{half}/position_encodings/encodings"])
        put_both(f"{half}/layer_norm", f"model.{half}.layer_norm")
        for index in range(num_layers):
            layer, own = f"{half}/layer_{index}", f"model.{half}.layers.{index}"
            for theirs, ours in _names(layer, own, half).items():
                put_both(theirs, ours)
            put_stacked(f"{layer}/self_attention/linear_0", f"{own}.self_attn", ("q_proj", "k_proj", "v_proj"))
            if half == "decoder":
                put_stacked(f"{layer}/attention/linear_1", f"{own}.encoder_attn", ("k_proj", "v_proj"))
    for name in ("conv1", "conv2"):
        put_both(f"encoder/{name}", f"model.encoder.{name}")
    put("model.decoder.embed_tokens.weight", tensors["decoder/embeddings/weight"])
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    return state


def write_checkpoint(source: Path, folder: Path) -> WhisperForConditionalGeneration:
    """Write CTranslate2's folder of a multilingual Whisper as transformers' checkpoint; returns the module."""
    with (source / "model.bin").open("rb") as file:
        tensors = _read(file)
    said = json.loads((source / "config.json").read_text())
    added = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    (size, width), num_layers = tensors["decoder/embeddings/weight"].shape, sum("ffn/linear_0/w" in n for n in tensors)
    layers, heads = num_layers // 2, int(tensors["encoder/num_heads"])
    sizes = {f"{half}_{name}": n for half in ("encoder", "decoder") for name, n in
             (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * width))}  # fmt: skip
    ids = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START}
    model = WhisperForConditionalGeneration(WhisperConfig(vocab_size=size, d_model=width, **sizes, **ids)).eval()
    model.load_state_dict(_state(tensors, layers))
    model.generation_config = GenerationConfig(
        **ids,
        is_multilingual=True,
        lang_to_id={each["content"]: each["id"] for each in added if each["id"] in said["lang_ids"]},
        task_to_id={"transcribe": TRANSCRIBE, "translate": _TRANSLATE},
        no_timestamps_token_id=NO_TIMES,
        prev_sot_token_id=_PREVIOUS,
        max_initial_timestamp_index=50,
        max_length=448,
        suppress_tokens=said["suppress_ids"],
        begin_suppress_tokens=said["suppress_ids_begin"],
        alignment_heads=said["alignment_heads"],
    )
    model.save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)
    shutil.copy(source / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return model


def spoken(text: str, folder: Path) -> Path:
    """A file in which espeak-ng speaks a text."""
    path = folder / f"{abs(hash(text))}.wav"
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", str(path), text], check=True)
    return path


def samples_of(path: Path) -> np.ndarray:
    """(num_samples,) float32 at 16 kHz, as Weft's own decoder makes them."""
    import av

    resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
    with av.open(str(path)) as file:
        pieces = [piece for frame in file.decode(audio=0) for piece in resampler.resample(frame)]
    pieces += resampler.resample(None)
    return np.concatenate([piece.to_ndarray()[0] for piece in pieces]).astype(np.float32) / 32768


def seconds_of(path: Path) -> float:
    """How long a wav file is."""
    with wave.open(str(path)) as file:
        return file.getnframes() / file.getframerate()


def word_errors(said: str, written: str) -> tuple[int, int]:
    """Words to insert, to remove and to replace (Levenshtein) without regard to case and punctuation; and all words."""
    expected, found = (re.findall(r"[a-z0-9']+", text.lower()) for text in (said, written))
    row = list(range(len(found) + 1))
    for i, word in enumerate(expected, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(found, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1], len(expected)
