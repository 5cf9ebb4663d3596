from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import load_reference
from tests.engine.fallback.checkpoints import write
from weft.engine.fallback.config import load_fallback_config
from weft.engine.fallback.loading import TransformersModel, load_fallback
from weft.engine.families.registry import identify
from weft.engine.models.loading import LoadFormat
from weft.engine.weights.reader import Progress
from weft.engine.wire.errors import ModelError

CPU = torch.device("cpu")
IDS = torch.arange(4, 14)[None]


def load(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    load_format: LoadFormat = "auto",
    progress: Progress = lambda done, total: None,
) -> TransformersModel:
    config = load_fallback_config(folder, identify(folder))
    with torch.inference_mode():
        return load_fallback(folder, config, device=CPU, dtype=dtype, load_format=load_format, progress=progress)


def change(folder: Path, changes: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    changes(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "cohere", "gpt2"])
def test_weights_are_those_that_transformers_loads(tmp_path: Path, name: str) -> None:
    """Experts are merged, names changed, shards read, heads tied; frequencies are in no file."""
    folder = write(name, tmp_path)
    with torch.inference_mode():
        assert torch.equal(load(folder).plain_logits(IDS), load_reference(folder)(IDS).logits)


def test_16_bits_are_as_in_transformers_and_take_half_the_memory(tmp_path: Path) -> None:
    folder = write("cohere", tmp_path)
    model, half = load(folder), load(folder, torch.bfloat16)
    assert half.weights_bytes == pytest.approx(model.weights_bytes / 2, rel=0.01)  # frequencies stay float32
    with torch.inference_mode():
        expected = load_reference(folder).to(torch.bfloat16)(IDS).logits.float()
        assert (half.plain_logits(IDS) - expected).abs().max() < 0.05 * expected.std()


def test_progress_ends_at_the_size_of_the_weights(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    model = load(write("cohere", tmp_path), progress=lambda done, total: calls.append((done, total)))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len(calls) > 10
    assert calls[-1][0] == calls[-1][1] == pytest.approx(model.weights_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        (lambda t: t.update({"model.extra.weight": torch.ones(2)}), r"model\.extra\.weight of the checkpoint has no"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(3)}),
            r"model\.norm\.weight has shape \[3\], config.json asks for \[48\]",
        ),
    ],
)
def test_refusals_name_the_tensor(
    tmp_path: Path, changes: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    folder = write("olmo2", tmp_path)
    change(folder, changes)
    with pytest.raises(ModelError, match=message):
        load(folder)


_GATE = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda t: t.pop(_GATE), r"tensor .*\.layers\.1\..*experts\.2\.w1\.weight is missing"),
        (
            lambda t: t.update({_GATE: t[_GATE][:-1].clone()}),
            r"experts\.2\.w1\.weight has shape \[79, 48\], others .* \[80,",
        ),
        (lambda t: t[_GATE].fill_(float("nan")), r"safetensors: tensor .*experts\.2\.w1\.weight holds .* not numbers"),
    ],
)
def test_an_expert_that_cannot_be_stacked_is_named(
    tmp_path: Path, changes: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    folder = write("mixtral", tmp_path)
    change(folder, changes)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = write("olmo2", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors: not readable"):
        load(tmp_path)
    path.unlink()
    with pytest.raises(ModelError, match=r"nor pytorch_model\.bin"):
        load(tmp_path)


def test_dummy_weights_need_no_file(tmp_path: Path) -> None:
    folder = write("qwen3_moe", tmp_path)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    with torch.inference_mode():
        logits = load(folder, load_format="dummy").plain_logits(IDS)
        assert torch.equal(logits, load(folder, load_format="dummy").plain_logits(IDS))
    assert logits.std() > 0
