import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import CHECKPOINTS, Checkpoint, load_reference, write_checkpoint
from tests.engine.given_weights import Given
from weft.engine.describe.config import load_model_config
from weft.engine.kernels.torch.layer_kernels import OnednnLinear, TorchKernels, TorchLinear
from weft.engine.layers.block import Decoder, Layer, Linear
from weft.engine.models.loading import LoadFormat, load_weights
from weft.engine.parts.decoder import decoder_spec
from weft.engine.weights.reader import Progress, WeightReader, WeightRef
from weft.engine.wire.errors import ModelError

CPU, CPU_DTYPE = torch.device("cpu"), torch.bfloat16


class RecordingKit(TorchKernels):
    """Keeps the matrices that it is given, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []

    def linear(self, ref: WeightRef, reader: WeightReader) -> TorchLinear:
        weight, bias = reader.dense(ref)
        self.weights.append(weight)
        return super().linear(ref, Given(weight, bias))

    def norm(self, weight: torch.Tensor, eps: float) -> Layer:
        self.norms.append(weight)
        return super().norm(weight, eps)

    def tied(self, ref: WeightRef, reader: WeightReader) -> tuple[Layer, Linear]:
        table, _ = reader.dense(ref)
        self.weights.append(table)
        return super().tied(ref, Given(table))


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    progress: Progress = lambda done, total: None,
    kernels: TorchKernels | None = None,
    seed: int = 0,
    load_format: LoadFormat = "auto",
) -> Decoder:
    return load_weights(
        folder,
        load_model_config(folder),
        kernels or TorchKernels(),
        device=CPU,
        dtype=dtype,
        max_model_len=32,
        load_format=load_format,
        seed=seed,
        progress=progress,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(Checkpoint("qwen3", {"head_dim": 16, "tie_word_embeddings": True}), tmp_path)
    return tmp_path


def change(folder: Path, changes: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    changes(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_tensors_end_up_fused_in_the_dtype_asked_for(folder: Path) -> None:
    kernels = RecordingKit()
    load(folder, torch.float16, kernels=kernels)
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.layers.0."
    table, qkv, _, gate_up = kernels.weights[:4]
    assert torch.equal(
        gate_up, torch.cat([tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")]).half()
    )
    assert torch.equal(qkv, torch.cat([tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]).half())
    assert len(kernels.weights) == 4 * load_model_config(folder).num_layers + 1
    assert torch.equal(table, tensors["model.embed_tokens.weight"].half())


def test_progress_ends_at_the_size_of_the_weights(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    decoder = load(folder, progress=lambda done, total: calls.append((done, total)))
    size = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert {total for _, total in calls} == {size}
    assert calls[-1][0] == size
    assert decoder.weights_bytes == size


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_parameters_are_counted_as_transformers_does(checkpoint_folder: Callable[[str], Path], name: str) -> None:
    folder = checkpoint_folder(name)
    assert decoder_spec(load_model_config(folder)).num_parameters == load_reference(folder).num_parameters()  # type: ignore[operator]


def test_norms_around_one_are_float32_beside_weights_of_16_bits(checkpoint_folder: Callable[[str], Path]) -> None:
    """A weight of 1.003 is 1 in bfloat16, and one of 0.003 is not 0."""
    kernels, folder = RecordingKit(), checkpoint_folder("gemma2")
    decoder = load(folder, torch.bfloat16, kernels=kernels)
    tensors = load_file(folder / "model.safetensors")
    assert len(kernels.norms) == 4 * 4 + 1
    assert torch.equal(kernels.norms[0], 1 + tensors["model.norm.weight"].bfloat16().float())
    assert decoder.weights_bytes == sum(tensor.nbytes for tensor in (*kernels.weights, *kernels.norms))


def test_a_packed_copy_of_a_tied_head_counts(folder: Path) -> None:
    config = load_model_config(folder)
    spec = decoder_spec(config)
    difference = spec.weights_bytes(TorchKernels(OnednnLinear), CPU_DTYPE) - spec.weights_bytes(
        TorchKernels(), CPU_DTYPE
    )
    assert difference == config.vocab_size * config.hidden_size * CPU_DTYPE.itemsize


def test_tensors_that_old_checkpoints_carry_are_passed_over(folder: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change(folder, add)
    load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
            r"model\.layers\.0\.self_attn\.q_proj\.bias of the checkpoint has no place",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.ones(48, 79)}),
            r"model\.layers\.0\.mlp\.down_proj\.weight has shape \[48, 79\], config.json asks for \[48, 80\]",
        ),
        (
            # Broadcasting would have accepted it.
            lambda t: t.update({"model.layers.0.input_layernorm.weight": torch.ones(1)}),
            r"input_layernorm\.weight has shape \[1\]",
        ),
    ],
)
def test_refusals_name_the_tensor(
    folder: Path, changes: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    change(folder, changes)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_files_that_are_missing_or_broken(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors: not readable"):
        load(folder)
    path.unlink()
    with pytest.raises(ModelError, match=r"nor pytorch_model\.bin"):
        load(folder)
    names = {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight is not readable"):
        load(folder)


@pytest.mark.parametrize("name", ["llama2", "gemma2"])
def test_dummy_norms_scale_by_one(checkpoint_folder: Callable[[str], Path], name: str) -> None:
    kernels = RecordingKit()
    load(checkpoint_folder(name), kernels=kernels, load_format="dummy")
    assert kernels.norms and all(torch.equal(weight, torch.ones(48)) for weight in kernels.norms)


def test_dummy_weights_are_the_same_for_the_same_seed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    def gate_up(seed: int) -> torch.Tensor:
        kernels = RecordingKit()
        load(folder, kernels=kernels, load_format="dummy", seed=seed)
        return kernels.weights[1]

    assert torch.equal(gate_up(1), gate_up(1))
    assert not torch.equal(gate_up(1), gate_up(2))
    assert gate_up(1).std() == pytest.approx(0.02, rel=0.05)
    assert gate_up(1).mean().abs() < 2e-3
