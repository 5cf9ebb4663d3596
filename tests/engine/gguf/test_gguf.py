"""GGUF files: every type bit for bit, and answers as transformers gives them with the weights that the file means."""

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests import gguf_files
from tests.checkpoints import LLAMA3_ROPE, YARN_ROPE, Checkpoint, load_reference
from tests.engine.layers.test_decoder import Runner, make_prompts
from tests.engine.models.test_cut import put
from weft.engine.describe.config import load_model_config
from weft.engine.gguf.folder import made_folder
from weft.engine.gguf.tensors import GgufSource
from weft.engine.kernels.cpu import library
from weft.engine.kernels.cpu.layer_kernels import CpuKernels
from weft.engine.models.cut import shard
from weft.engine.models.loading import DecodedSource, load_weights
from weft.engine.parts.decoder import decoder_spec
from weft.engine.start.vector_model import find_task, read_vector_model
from weft.engine.weights.reader import DenseReader, WeightRef
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions

CPU, BF16 = torch.device("cpu"), torch.bfloat16
KINDS = (
    *(Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
    *(Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4, Kind.F32, Kind.F16, Kind.BF16),
)
PLAIN: dict[str, object] = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96}
SMALL = PLAIN | {"head_dim": 16}
LARGE: dict[str, object] = {"vocab_size": 300, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
EXPERTS: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED: dict[str, object] = {"shared_expert_intermediate_size": 64, "norm_topk_prob": False}
GEMMA: dict[str, object] = {"tie_word_embeddings": True, "query_pre_attn_scalar": 16, "num_hidden_layers": 4}
CAPS: dict[str, object] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 12.0, "sliding_window": 9}
LOCAL: dict[str, object] = {"sliding_window": 9, "num_hidden_layers": 7}
LONG = [1.0 + 0.25 * index for index in range(8)]
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": LONG,
    "long_factor": LONG,
    "attention_factor": 1.25,
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 0.5,
}
PARTIAL: dict[str, object] = {"num_attention_heads": 2, "partial_rotary_factor": 0.5}
OSS_ROPE = YARN_ROPE | {"rope_theta": 150000.0, "truncate": False}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}

FAMILIES: dict[str, tuple[str, Checkpoint, dict[str, object]]] = {
    "llama": ("llama", Checkpoint("llama", SMALL | {"attention_bias": False}), {}),
    "yarn": ("llama", Checkpoint("llama", SMALL | {"rope_parameters": YARN_ROPE}), YARN),
    "mixtral": ("llama", Checkpoint("mixtral", SMALL | {"num_local_experts": 4, "sliding_window": None}), {}),
    "qwen2": ("qwen2", Checkpoint("qwen2", PLAIN), {}),
    "qwen3": ("qwen3", Checkpoint("qwen3", SMALL | {"tie_word_embeddings": True, "head_dim": 32}), {}),
    "qwen2moe": ("qwen2moe", Checkpoint("qwen2_moe", SMALL | EXPERTS | SHARED), {}),
    "qwen3moe": ("qwen3moe", Checkpoint("qwen3_moe", SMALL | EXPERTS | {"norm_topk_prob": True}), {}),
    "gemma": ("gemma", Checkpoint("gemma", SMALL | {"tie_word_embeddings": True}), {}),
    "gemma2": ("gemma2", Checkpoint("gemma2", SMALL | GEMMA | CAPS), {}),
    "gemma3": ("gemma3", Checkpoint("gemma3_text", SMALL | GEMMA | LOCAL), {}),
    "phi3": (
        "phi3",
        Checkpoint("phi3", PLAIN | PARTIAL | {"pad_token_id": 0, "sliding_window": 9, "rope_parameters": LONG_ROPE}),
        {"rope.dimension_count": 16, "rope.scaling.attn_factor": 1.25},
    ),
    "starcoder2": ("starcoder2", Checkpoint("starcoder2", PLAIN | {"sliding_window": None}), {}),
    "gpt-oss": (
        "gpt-oss",
        Checkpoint("gpt_oss", SMALL | {"num_local_experts": 4, "sliding_window": 9, "rope_parameters": OSS_ROPE}),
        YARN | {"expert_feed_forward_length": 96},
    ),
}


def mixed(name: str) -> Kind:
    """Neighbours in a stack differ in bits, and in whether they have offsets."""
    of_parts = {"attn_k": Kind.Q4_1, "attn_v": Kind.Q8_0, "ffn_up": Kind.Q5_0, "exps": Kind.MXFP4, "token": Kind.F16}
    return next((kind for part, kind in of_parts.items() if part in name), Kind.Q5_1 if "down" in name else Kind.Q4_0)


def q4_k_m(name: str) -> Kind:
    """As llama.cpp's `quantize` mixes types: the more important half of two matrices, and the embedding, in Q6_K."""
    more = name.startswith(("token_embd", "output.")) or (name.startswith("blk.0.") and "attn_v" in name)
    return Kind.Q6_K if more or "blk.0.ffn_down" in name else Kind.Q4_K


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def reader(folder: Path) -> DenseReader:
    quantization = load_model_config(folder).quantization
    assert quantization is not None
    return DenseReader(DecodedSource(GgufSource(folder, CPU), quantization, CPU), CPU, torch.float32, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    architecture, checkpoint, changes = FAMILIES[name]
    file, plain = gguf_files.write_model(tmp_path / "model", architecture, checkpoint, mixed, **changes)
    reference, (prompt,) = load_reference(plain), make_prompts(40)
    with torch.inference_mode():
        expected = reference(prompt[None]).logits[0]
    logits = Runner(made_folder(file)).run([prompt], 7)[0]
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_dequantized_bit_for_bit(tmp_path: Path, kind: Kind) -> None:
    checkpoint = Checkpoint("qwen3", LARGE | {"num_hidden_layers": 1})
    file, _ = gguf_files.write_model(tmp_path / "model", "qwen3", checkpoint, lambda name: kind)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}["blk.0.ffn_down.weight"]
    weight, _ = reader(made_folder(file)).dense(WeightRef(("model.layers.0.mlp.down_proj",), (256,), 512))
    assert weight.numpy().tobytes() == gguf.dequantize(stored.data, stored.tensor_type).astype(np.float32).tobytes()


def test_factors_of_frequencies_are_those_of_llama_3(tmp_path: Path) -> None:
    checkpoint = Checkpoint("llama", SMALL | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True})
    file, plain = gguf_files.write_model(tmp_path / "model", "llama", checkpoint, mixed)
    reference, (prompt,) = load_reference(plain), make_prompts(200)
    with torch.inference_mode():
        expected = reference(prompt[None]).logits[0]
    torch.testing.assert_close(Runner(made_folder(file)).run([prompt], 64)[0], expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize(("number", "kind"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_the_pooling_of_a_model_for_embeddings(tmp_path: Path, number: int, kind: str) -> None:
    """Such a file generated, and as a model for embeddings it took the last token, whatever it says."""
    checkpoint = Checkpoint("qwen3", SMALL | {"num_hidden_layers": 1})
    file, _ = gguf_files.write_model(tmp_path / "model", "qwen3", checkpoint, mixed, pooling_type=number)
    task = find_task(folder := made_folder(file), "auto")
    model = read_vector_model(folder, task, load_model_config(folder), EngineOptions(model=str(folder)))
    assert model is not None and (task.name, model.kind, model.is_finished) == ("embed", kind, True)


def test_a_tensor_behind_two_gib_is_read(tmp_path: Path) -> None:
    """Its place was taken for a number of config.json that is beyond all use, and no larger file could be served."""
    checkpoint = Checkpoint("qwen3", SMALL | {"num_hidden_layers": 1})
    file, _ = gguf_files.write_model(tmp_path / "model", "qwen3", checkpoint, lambda name: Kind.F32)
    path = (folder := made_folder(file)) / "config.json"
    expected, config = GgufSource(folder, CPU).read("model.norm.weight"), json.loads(path.read_text())
    place = config["quantization_config"]["tensors"]["model.norm.weight"]
    with file.open("r+b") as data:
        data.seek(place["offset"])
        values = data.read(place["row_bytes"])
        data.seek(3 << 30)  # which leaves a hole
        data.write(values)
    place["offset"] = 3 << 30
    config["quantization_config"]["versions"] = [f"{file.stat().st_size} {file.stat().st_mtime_ns}"]
    path.write_text(json.dumps(config))
    assert torch.equal(GgufSource(folder, CPU).read("model.norm.weight"), expected)


def test_a_common_mixture_stays_packed(tmp_path: Path) -> None:
    native = library.load()
    if native is None:
        pytest.skip("no native kernels on this machine")
    checkpoint = Checkpoint("llama", LARGE | {"num_hidden_layers": 2})
    file, plain = gguf_files.write_model(tmp_path / "model", "llama", checkpoint, q4_k_m)
    config = load_model_config(folder := made_folder(file))
    kernels, prompts = CpuKernels(native, quantization=config.quantization), make_prompts(40)
    reference = load_reference(plain)
    with torch.inference_mode():
        expected = reference(prompts[0][None]).logits[0]
    logits = Runner(folder, kernels, BF16).run(prompts, 40)[0].float()
    of_plain = Runner(plain, CpuKernels(native), BF16).run(prompts, 40)[0].float()
    assert (logits - expected).norm() < 2 * (of_plain - expected).norm()  # inputs are rounded, too
    spec = decoder_spec(config)
    decoder = load_weights(folder, config, kernels, device=CPU, dtype=BF16, max_model_len=64)
    assert (
        decoder.weights_bytes == spec.weights_bytes(kernels, BF16) < 0.5 * spec.weights_bytes(CpuKernels(native), BF16)
    )
    assert {str(config.quantization)} <= {"Q4_K and Q6_K (GGUF)", "Q6_K and Q4_K (GGUF)"}


def test_ranks_read_their_parts(tmp_path: Path) -> None:
    checkpoint = Checkpoint("llama", LARGE | {"num_hidden_layers": 1})
    file, _ = gguf_files.write_model(tmp_path / "model", "llama", checkpoint, q4_k_m)
    folder = made_folder(file)
    spec, own = decoder_spec(load_model_config(folder)), reader(folder)
    of_ranks = (shard(spec, rank, 2).weights for rank in range(2))
    matrices = [refs for refs in zip(spec.weights, *of_ranks, strict=True) if isinstance(refs[0], WeightRef)]
    assert len(matrices) == 6
    for whole, *parts in matrices:
        weight = own.dense(whole)[0]
        joined = torch.empty_like(weight)
        for part in parts:
            put(part, own.dense(part)[0], joined)
            groups = own.groups(part)
            assert groups is not None and torch.equal(groups.dequantize(torch.float32), own.dense(part)[0])
        assert torch.equal(joined, weight)


def test_a_tensor_that_is_missing_or_too_much_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint("qwen3", SMALL | {"num_hidden_layers": 2})
    file, _ = gguf_files.write_model(tmp_path / "model", "qwen3", checkpoint, mixed, block_count=3)
    with pytest.raises(ModelError, match=r"^tensor model\.layers\.2\.\S+ is missing from the GGUF file$"):
        Runner(made_folder(file))
    file, _ = gguf_files.write_model(tmp_path / "other", "qwen3", checkpoint, mixed, block_count=1)
    with pytest.raises(ModelError, match=r"^tensor model\.layers\.1\.\S+ of the checkpoint has no place in the model$"):
        Runner(made_folder(file))
    file, _ = gguf_files.write_model(tmp_path / "third", "qwen3", checkpoint, mixed, feed_forward_length=64)
    with pytest.raises(ModelError, match=r"gate_proj\.weight has shape \[96, 64\], config\.json asks for \[64, 64\]$"):
        Runner(made_folder(file))


def test_a_newer_file_in_the_place_of_the_described_one_is_refused(tmp_path: Path) -> None:
    """An engine that started again read tensors at the places of those of the older file."""
    checkpoint = Checkpoint("qwen3", SMALL | {"num_hidden_layers": 1})
    file, _ = gguf_files.write_model(tmp_path / "model", "qwen3", checkpoint, mixed)
    folder = made_folder(file)
    os.utime(file, ns=(0, 1))
    with pytest.raises(ModelError, match=r"model\.gguf is not the file that the server found when it started"):
        GgufSource(folder, CPU)
    file.unlink()
    with pytest.raises(ModelError, match=r"model\.gguf: not readable \(No such file or directory\)$"):
        GgufSource(folder, CPU)
