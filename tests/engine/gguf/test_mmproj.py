"""What sees out of mmproj files: features are those of transformers for every type, and what is refused is named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from tests.checkpoints import Checkpoint
from tests.engine.vision.test_eyes import NUM_IDS, PROMPTS, asked, ids_of, started
from tests.gguf_files import write_model
from tests.mmproj_files import (
    SIZES,
    WITH_PROCESSORS,
    Written,
    of_gemma3,
    of_internvl,
    of_pixtral,
    of_qwen,
    write_halves,
    write_mmproj,
    write_text,
)
from tests.picture_checkpoints import PAD, expected, picture, processor_of, tokenizer
from weft.engine.fallback.vision import load_encoder
from weft.engine.gguf.config import describe
from weft.engine.gguf.file import GgufError, read_model
from weft.engine.gguf.folder import made_folder
from weft.engine.gguf.mmproj import add_mmproj, choose_mmproj, mmproj_beside
from weft.engine.vision.checkpoint import seeing_tensors
from weft.engine.vision.families import SEEING, SeeingFamily

CPU, F32 = torch.device("cpu"), torch.float32
SMALL = {**SIZES, "vision.image_size": 32, "vision.patch_size": 8}
QWEN = {**SIZES, "vision.image_size": 560, "vision.patch_size": 14}
SECTIONS = {"rope.dimension_sections": [2, 2, 2, 0]}
WRITTEN = {
    **WITH_PROCESSORS,
    "gemma3": Written("gemma3", "gemma3", {**SMALL, "vision.projector.scale_factor": 2}, of_gemma3),
    "qwen2_vl": Written("qwen2vl_merger", "qwen2vl", QWEN, of_qwen, SECTIONS),
    "qwen2_5_vl": Written(
        "qwen2.5vl_merger", "qwen2vl", {**QWEN, "vision.n_wa_pattern": 2, "use_silu": True}, of_qwen, SECTIONS
    ),
    "mistral3": Written("pixtral", "llama", {**SMALL, "vision.spatial_merge_size": 2, "use_silu": True}, of_pixtral),
    "internvl": Written("internvl", "qwen2", {**SMALL, "vision.projector.scale_factor": 2}, of_internvl),
}
TOKENS = {
    "gemma3": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl"), ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    ),
    "mistral3": ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "internvl": ("<IMG_CONTEXT>", "<img>", "</img>"),
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "layer_norm_eps": 1e-5,
}
OF_QWEN: dict[str, Any] = {"depth": 3, "num_heads": 2}
TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}


def model_of(name: str, vocab_size: int) -> PreTrainedModel:
    """A tiny random one; its text half is of no use."""
    text = TEXT | {"vocab_size": vocab_size}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}
    siglip = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
    match name:
        case "gemma3":
            gemma = Gemma3Config(vision_config=siglip, text_config=text, mm_tokens_per_image=4)
            return Gemma3ForConditionalGeneration(gemma)
        case "qwen2_vl":
            vision = {**OF_QWEN, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2}
            return Qwen2VLForConditionalGeneration(Qwen2VLConfig(vision_config=vision, text_config=text | rope))
        case "qwen2_5_vl":
            vision = {**OF_QWEN, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48}
            vision |= {"fullatt_block_indexes": [1]}
            return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(vision_config=vision, text_config=text | rope))
        case "mistral3":
            vision = {**VISION, "model_type": "pixtral", "hidden_act": "silu"}
            mistral = Mistral3Config(vision_config=vision, text_config={**text, "model_type": "mistral"})
            return Mistral3ForConditionalGeneration(mistral)
    vision = {**VISION, "model_type": "internvl_vision", "attention_bias": True}
    return InternVLForConditionalGeneration(
        InternVLConfig(vision_config=vision, text_config={**text, "model_type": "qwen2"}, downsample_ratio=0.5)
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(name: str, folder: Path) -> tuple[PreTrainedModel, Path, Path]:
    """A model, and the files of its halves."""
    if name in WITH_PROCESSORS:
        return write_halves(name, folder)
    torch.manual_seed(0)
    texts = tokenizer(TOKENS[name], "")
    model = model_of(name, len(texts)).eval().float()
    for parameter_name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, "norm" in parameter_name, 0.25)
    model.save_pretrained(folder / "whole")
    kinds = {"gemma3": Gemma3TextConfig, "llama": LlamaConfig}
    config = kinds.get(WRITTEN[name].text, Qwen2Config)(**TEXT, vocab_size=len(texts))
    file = write_text(AutoModelForCausalLM.from_config(config), texts, folder, WRITTEN[name])
    write_mmproj(folder / "whole", folder / "mmproj.gguf", WRITTEN[name])
    return model, file, folder / "mmproj.gguf"


@pytest.mark.parametrize("name", WRITTEN)
def test_features_are_those_of_transformers(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, file, mmproj = written(name, tmp_path)
    for architecture in model.config.architectures:
        monkeypatch.setitem(SEEING, architecture, SEEING.get(architecture, SeeingFamily()))  # type: ignore[arg-type]
    folder = made_folder(file, mmproj)
    pictures = AutoImageProcessor.from_pretrained(folder, backend="pil")
    made = pictures(images=[picture(1, 80, 50)], return_tensors="pt")
    arrays = {each: made[each] for each in made if each in ("pixel_values", "image_sizes", "image_grid_thw")}
    with torch.inference_mode():
        wanted = model.model.get_image_features(**arrays).pooler_output
        features = load_encoder(folder, CPU, F32)(arrays)
    wanted = torch.cat([part.reshape(-1, part.shape[-1]) for part in wanted])
    torch.testing.assert_close(features, wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def idefics3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with `whole` and mmproj.gguf, and the file of the text half."""
    folder = tmp_path_factory.mktemp("idefics3")
    return folder, write_halves("idefics3", folder)[1]


def test_matrices_in_blocks_are_dequantized(idefics3: tuple[Path, Path], tmp_path: Path) -> None:
    """A file in Q8_0, whose values are those of the package."""
    folder, file = idefics3
    write_mmproj(folder / "whole", mmproj := tmp_path / "mmproj.gguf", WRITTEN["idefics3"], Kind.Q8_0)
    whole, names = seeing_tensors(made_folder(file, mmproj))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(mmproj).tensors}
    for own, name in (("attn_q", "self_attn.q_proj"), ("ffn_up", "mlp.fc1")):
        tensor = stored[f"v.blk.1.{own}.weight"]
        assert tensor.tensor_type == Kind.Q8_0
        read = whole.read(f"model.vision_model.encoder.layers.1.{name}.weight")
        assert read.numpy().tobytes() == gguf.dequantize(tensor.data, tensor.tensor_type).tobytes()
    assert len(names) == len(stored)


@pytest.mark.parametrize("name", ["llava", "idefics3"])
def test_greedy_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """In chunks that cut the pictures, which the folder's own processor reads."""
    model, file, mmproj = write_halves(name, tmp_path)
    folder = made_folder(file, mmproj)
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]  # more than the checkpoint says
    adds, wanted = [], []
    for i, (text, images) in enumerate(PROMPTS[each] for each in ("one at the end", "three of several sizes")):
        made, ids = expected(model, tmp_path / "whole", text, images, NUM_IDS)
        adds.append(asked(folder, text, images, i))
        assert adds[-1].input.token_ids == made["input_ids"][0].tolist()
        wanted.append(ids[: next((at + 1 for at, each in enumerate(ids) if each in ends), None)])
    assert ids_of(started(folder, max_num_seqs=2, block_size=4, max_num_batched_tokens=7), *adds) == wanted


def test_llava_over_a_vocabulary_without_a_token_for_pictures(tmp_path: Path) -> None:
    """Then the unknown token stands for them, which no text becomes."""
    _, file, mmproj = write_halves("llava", tmp_path, {"<image>": "<unk>", PAD: "<0x00>"})
    folder = made_folder(file, mmproj)
    token_id = json.loads((folder / "config.json").read_text())["image_token_id"]
    made = (processor := processor_of(folder))(text="see <unk>", images=[picture(1, 80, 50)])
    assert processor.image_token == "<unk>" and made["input_ids"][0].count(token_id) == 9
    _, other, mmproj = write_halves("llava", tmp_path / "other", {"<image>": "<unk>"})
    with pytest.raises(GgufError, match="the model has no control token <image>, which pictures need"):
        made_folder(other, mmproj)


KINDS = ("qwen3", "llama")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"projector_type": "ldpv2"},
            r"changed\.gguf: projectors of type ldpv2 are not supported \(supported: mlp, idefics3",
        ),
        (
            {"general.architecture": "llama"},
            r"changed\.gguf is no file of a projector for pictures: its architecture is llama",
        ),
        ({"vision.block_count": 1}, r"changed\.gguf: tensor v\.blk\.1\.\S+ has no place in a model of type idefics3"),
        (
            {"vision.block_count": 4},
            r"changed\.gguf: a tensor is missing: what becomes model\.vision_model\.encoder\.layers\.3",
        ),
        ({"vision.block_count": 10**6}, "block_count is 1,000,000, and the file has"),
        ({"vision.patch_size": 0}, r"changed\.gguf: clip\.vision\.patch_size must be a number above 0, got 0"),
        ({"projector_type": "mlp", "vision.feature_layer": [1, 2]}, r"changed\.gguf lacks tensor mm\.2\.weight"),
        ({"vision.image_mean": [0.5]}, r"changed\.gguf: clip\.vision\.image_mean must have 3 numbers, got 1"),
    ],
)
def test_what_is_refused_is_named(idefics3: tuple[Path, Path], change: dict[str, Any], fault: str) -> None:
    folder, file = idefics3
    write_mmproj(folder / "whole", folder / "changed.gguf", WRITTEN["idefics3"], metadata=change)
    with pytest.raises(GgufError, match=fault):
        made_folder(file, folder / "changed.gguf")


def test_a_file_for_another_model_is_refused(idefics3: tuple[Path, Path], tmp_path: Path) -> None:
    folder, file = idefics3
    mmproj, unfit = folder / "mmproj.gguf", r"^mmproj\.gguf does not go with model\.gguf: "
    sizes: dict[str, object] = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    files = [write_model(tmp_path / name, name, Checkpoint(name, sizes), lambda name: Kind.F32)[0] for name in KINDS]
    with pytest.raises(GgufError, match=f"{unfit}it is for models of architecture llama, not qwen3"):
        made_folder(files[0], mmproj)
    with pytest.raises(GgufError, match=f"{unfit}a feature of a picture has 48 values, and the model's .* have 32"):
        made_folder(files[1], mmproj)
    model = read_model(file)
    tokens = [token.replace("<fake", "<other") for token in model.values("tokenizer.ggml.tokens", str)]
    changed = replace(model, metadata={**model.metadata, "tokenizer.ggml.tokens": tokens})
    with pytest.raises(GgufError, match=f"{unfit}the model has no control token <fake_token_around_image>"):
        add_mmproj({"config.json": describe(model, [])}, changed, read_model(mmproj))


def test_a_damaged_file_is_named(idefics3: tuple[Path, Path], tmp_path: Path) -> None:
    folder, file = idefics3
    (tmp_path / "mmproj.gguf").write_bytes((folder / "mmproj.gguf").read_bytes()[:-100])
    with pytest.raises(GgufError, match=r"^mmproj\.gguf is truncated: tensor"):
        made_folder(file, tmp_path / "mmproj.gguf")


@pytest.mark.parametrize(
    ("names", "model", "found"),
    [
        (["m.gguf", "mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"], "m.gguf", "mmproj-F16.gguf"),
        (["mmproj-model-f16.gguf"], "llava-v1.6-mistral-7b.Q5_K_M.gguf", "mmproj-model-f16.gguf"),
        (["mmproj-a-4b-it-f16.gguf", "mmproj-a-12b-it-f16.gguf"], "A-12B-it-Q4_K_M.gguf", "mmproj-a-12b-it-f16.gguf"),
        (["a-4b.mmproj-Q8_0.gguf", "mmproj-f16.gguf"], "a-4b.Q4_K_M.gguf", "a-4b.mmproj-Q8_0.gguf"),
        (["mmproj-b-f16.gguf", "a.gguf"], "a.gguf", None),
        (["mmproj.txt", "a.gguf"], "a.gguf", None),
        (["mmproj-F16.gguf", "a-Q8_0.gguf", "b-Q8_0.gguf"], "a-Q8_0.gguf", None),
        (["mmproj-a-f16.gguf", "a-Q8_0.gguf", "b-Q8_0.gguf"], "a-Q8_0.gguf", "mmproj-a-f16.gguf"),
        (
            ["mmproj-F16.gguf", "a-4b-UD-Q4_K_XL.gguf", "a-4b-IQ2_XS.gguf", "a-4b.BF16-00001-of-00002.gguf"],
            "a-4b.BF16-00002-of-00002.gguf",
            "mmproj-F16.gguf",
        ),
        (["mmproj-F16.gguf", "a-Q8_0.gguf", "imatrix_b.gguf"], "a-Q8_0.gguf", "mmproj-F16.gguf"),
        (["mmproj-phi-3-f16.gguf"], "phi-3-5-mini-Q8_0.gguf", None),
        (["mmproj-phi-3-f16.gguf"], "phi-3.5-mini-Q8_0.gguf", None),
        (["mmproj-phi-3-f16.gguf"], "Phi-3-mini-4k-Q8_0.gguf", "mmproj-phi-3-f16.gguf"),
        (["mmproj-hi-3-f16.gguf"], "phi-3-Q8_0.gguf", None),
    ],
)
def test_which_file_goes_with_a_model(tmp_path: Path, names: list[str], model: str, found: str | None) -> None:
    assert choose_mmproj(names, model) == found
    for name in names:
        (tmp_path / name).touch()
    assert mmproj_beside(tmp_path / model) == (found and tmp_path / found)


def test_of_a_repository_in_the_cache_the_file_is_found_beside_the_folder_of_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "1234"
    (folder / "Q8_0").mkdir(parents=True)
    (folder / "mmproj-F16.gguf").touch()
    assert mmproj_beside(folder / "Q8_0" / "m.gguf") == folder / "mmproj-F16.gguf"
    assert mmproj_beside(folder / "Q8_0" / "deeper" / "m.gguf") is None
