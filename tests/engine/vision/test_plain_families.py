"""Families whose pictures stand at plain positions: what the reader and the engine make is what transformers makes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.engine.runs import run
from tests.further_picture_checkpoints import FURTHER
from tests.picture_checkpoints import encoded, picture, processor_of
from tests.plain_picture_checkpoints import PLAIN
from weft.engine.describe.config import ModelConfig
from weft.engine.fallback.vision import load_encoder
from weft.engine.fields import Fields
from weft.engine.start.model_choice import read_model
from weft.engine.start.startup import Started, start
from weft.engine.vision.checkpoint import read_vision
from weft.engine.vision.eyes import tensors
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import TokensInput, TokenSpan
from weft.engine.wire.messages import AddRequest, EngineOptions, TokensOutput
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.pictures import Picture
from weft.server.pictures.child import PictureFaultError, PictureReader

FAMILIES = PLAIN | FURTHER
NUM_IDS = 10
DTYPES = torch.float32, torch.bfloat16
LARGE, TALL, SMALL = picture(1, 80, 50), picture(2, 31, 64), picture(3, 20, 20)
PROMPTS = {
    "one at the start": ("{}what is it?", [LARGE]),
    "three of several sizes": ("first {} then {}{} and so on", [LARGE, SMALL, TALL]),
    "the same one twice, at the end": ("what is {}{}", [SMALL, SMALL]),
    "only words": ("only words", []),
}


class Checkpoint:
    """A checkpoint, transformers' module of it, and the reader of its pictures."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.model = FAMILIES[name].write(folder)
        vision = read_vision(folder, Fields.read(folder / "config.json"))
        assert vision is not None
        self.token_id, self._target = vision.token_id, os.memfd_create("arrays")
        self.reader = PictureReader(folder, vision.token_id, "float32", self._target)
        self.processor = processor_of(folder)

    def expected(self, text: str, images: list[Image.Image]) -> tuple[list[int], list[int], list[float]]:
        """Ids of a prompt that has the sign of a picture at each {}, and how transformers goes on: ids, logprobs."""
        signs = text.replace("{}", self.reader.sign)
        made = self.processor(text=signs, images=images or None, return_tensors="pt")
        options: dict[str, Any] = {"max_new_tokens": NUM_IDS, "do_sample": False, "return_dict_in_generate": True}
        with torch.inference_mode():
            found = self.model.generate(**made, **options, output_logits=True)  # type: ignore[operator]
        scale = FAMILIES[self.name].logit_scale
        logprobs = [(each[0] * scale).log_softmax(-1).max().item() for each in found.logits]
        prompt = made["input_ids"][0].tolist()
        return prompt, found.sequences[0, len(prompt) :].tolist(), logprobs

    def asked(self, text: str, images: list[Image.Image], number: int) -> AddRequest:
        """The request of it, read as the server reads pictures."""
        ids, spans, pictures = list[int](), list[TokenSpan](), list[Picture]()
        first, *rest = text.split("{}")
        ids += self._ids(first)
        for image, words in zip(images, rest, strict=True):
            made = self.reader.read(encoded(image))
            assert made.fault is None and made.num_tokens
            own = self._ids(made.text)
            places = [i for i, each in enumerate(own, len(ids)) if each == self.token_id]
            assert len(places) == made.num_tokens
            spans.append(TokenSpan(places[0], places[-1] + 1 - places[0], made.digest))
            pictures.append(Picture(self.token_id, made.arrays, os.pread(self._target, made.num_bytes, 0)))
            ids += own + self._ids(words)
        given = TokensInput(ids, spans=spans, pictures=pictures)
        return AddRequest(given, SamplingParams(temperature=0, max_tokens=NUM_IDS, logprobs=0), request_id=number)

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def close(self) -> None:
        os.close(self._target)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    found = Checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    yield found
    found.close()


def started(folder: Path, **options: Any) -> Started:
    options = {"block_size": 8, "kv_cache_memory": 4 << 20, "pictures": True, **options}
    return start(EngineOptions(model=str(folder), device="cpu", dtype="float32", **options), "test")


def answers(built: Started, adds: list[AddRequest]) -> list[TokensOutput]:
    outputs = run(built.engine, adds)
    return [outputs[add.request_id, 0] for add in adds]


def test_greedy_answers_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    """Alone in whole prompts, then beside each other in chunks that cut every picture, and then found in the cache."""
    wanted = [checkpoint.expected(*prompt) for prompt in PROMPTS.values()]
    adds = [checkpoint.asked(*prompt, i) for i, prompt in enumerate(PROMPTS.values())]
    assert [add.input.token_ids for add in adds] == [ids for ids, _, _ in wanted]
    whole, chunks = started(checkpoint.folder), started(checkpoint.folder, max_num_seqs=4, max_num_batched_tokens=13)
    for found in ([answer for add in adds for answer in answers(whole, [add])], answers(chunks, adds)):
        assert [answer.token_ids for answer in found] == [ids for _, ids, _ in wanted]
        for answer, (_, _, logprobs) in zip(found, wanted, strict=True):
            assert [each.logprob for each in answer.logprobs or []] == pytest.approx(logprobs, abs=1e-3)
    again = answers(chunks, adds)
    assert [answer.token_ids for answer in again] == [ids for _, ids, _ in wanted]
    for answer, add in zip(again, adds, strict=True):
        assert (answer.num_cached_tokens or 0) >= len(add.input.token_ids) // 8 * 8 - 8


def test_features_are_the_same_in_16_bits(checkpoint: Checkpoint) -> None:
    """Some towers of transformers take values of pictures in their own type only."""
    add = checkpoint.asked(*PROMPTS["one at the start"], 1)
    assert isinstance(add.input, TokensInput)
    arrays = tensors(add.input.pictures[0], torch.device("cpu"))
    with torch.inference_mode():
        wanted, found = (load_encoder(checkpoint.folder, torch.device("cpu"), dtype)(arrays) for dtype in DTYPES)
    assert found.dtype == torch.bfloat16
    assert (found.float() - wanted).norm() < 0.05 * wanted.norm()


NEWER = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "image_newline": "model.image_newline",
}
"""What transformers 5 writes under old names it calls so in memory, and the last of its 4 in files."""
OLDER = {"vision_tower.": "vision_tower.vision_model."}
"""In files of transformers 4, where it is a tower of CLIP or SigLIP."""


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("internvl", NEWER),
        ("llava_onevision", NEWER),
        ("llava_onevision", OLDER),
        ("mistral3", NEWER),
        ("pixtral", NEWER),
        ("vipllava", OLDER),
    ],
)
def test_files_may_have_other_names(tmp_path: Path, name: str, names: dict[str, str]) -> None:
    checkpoint, path = Checkpoint(name, tmp_path), tmp_path / "model.safetensors"
    prompt = PROMPTS["one at the start"]
    add, (_, ids, _) = checkpoint.asked(*prompt, 1), checkpoint.expected(*prompt)
    tensors = load_file(path)
    for old, new in names.items():
        tensors = {name.replace(old, new, 1) if name.startswith(old) else name: t for name, t in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    (answer,) = answers(started(tmp_path), [add])
    checkpoint.close()
    assert answer.token_ids == ids


def test_a_picture_that_fails_in_transformers_is_refused(tmp_path: Path) -> None:
    """Mistral 3's module takes the features of a single token for a vector of numbers."""
    checkpoint = Checkpoint("mistral3", tmp_path)
    with pytest.raises(PictureFaultError, match=r"at least 2 tokens to the model, got 1 \(9 x 16 pixels\)"):
        checkpoint.reader.read(encoded(picture(4, 9, 16)))
    assert checkpoint.reader.read(encoded(picture(4, 17, 16))).num_tokens == 2
    checkpoint.close()


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ({"model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864,
          "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 152_000}, (152_000, 896, 64, 32_768)),
        ({"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "head_dim": 128,
          "vocab_size": 131_072, "max_position_embeddings": 1_024_000, "sliding_window": None},
         (131_072, 5120, 128, 1_024_000)),
        ({"model_type": "granite", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40,
          "num_key_value_heads": 8, "vocab_size": 49_156, "max_position_embeddings": 131_072},
         (49_156, 2048, 64, 131_072)),
        ({"model_type": "cohere2", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8}, (256_000, 4096, 128, 8192)),
    ],
    ids=["LLaVA-OneVision 0.5B", "Pixtral 12B", "Granite Vision 2B", "Aya Vision 8B"],
)  # fmt: skip
def test_fields_that_are_left_out_are_those_of_the_class(
    tmp_path: Path, text: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_model(tmp_path, "native")
    assert isinstance(facts, ModelConfig)
    assert (facts.vocab_size, facts.hidden_size, facts.head_dim, facts.max_position_embeddings) == sizes


def test_a_prompt_that_is_read_in_both_directions_is_refused(tmp_path: Path) -> None:
    """It would be computed as text alone, and its answers be wrong."""
    config = {"architectures": ["PaliGemmaForConditionalGeneration"], "text_config": {"model_type": "gemma"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model_impl in ("auto", "native", "transformers"):
        with pytest.raises(ModelError, match="each token of a prompt sees those behind it"):
            read_model(tmp_path, model_impl)
