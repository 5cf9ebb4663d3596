import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weft.engine.weights.tensor_files import CheckpointSource
from weft.engine.wire.errors import ModelError

CPU = torch.device("cpu")
NORM = torch.arange(4.0)


def source(folder: Path, tensors: dict[str, torch.Tensor], *, is_half: bool = True) -> CheckpointSource:
    save_file(tensors, folder / "model.safetensors")
    return CheckpointSource(folder, CPU, is_half=is_half)


def filled(given: CheckpointSource, name: str) -> torch.Tensor:
    target = torch.empty(4)
    given.fill(name, target)
    return target


@pytest.mark.parametrize(
    ("norm", "head"),
    [
        ("model.language_model.norm.weight", "lm_head.weight"),
        ("language_model.model.norm.weight", "language_model.lm_head.weight"),
        ("language_model.norm.weight", "lm_head.weight"),
        ("model.norm.weight", "lm_head.weight"),
    ],
)
def test_the_text_half_is_read_under_the_names_it_has_alone(tmp_path: Path, norm: str, head: str) -> None:
    tensors = {norm: NORM, head: NORM + 1, "visual.norm.weight": NORM + 2}
    found = source(tmp_path, tensors)
    assert set(found.names) == {"model.norm.weight", "lm_head.weight"}
    assert torch.equal(filled(found, "model.norm.weight"), NORM)
    assert torch.equal(filled(found, "lm_head.weight"), NORM + 1)
    found.close()
    assert set(source(tmp_path, tensors, is_half=False).names) == set(tensors)


def test_the_first_part_of_names_may_be_left_out(tmp_path: Path) -> None:
    found = source(tmp_path, {"h.0.ln_1.weight": NORM, "h.0.attn.bias": NORM + 1})  # the second is a mask
    assert torch.equal(filled(found, "transformer.h.0.ln_1.weight"), NORM)
    found.close()


@pytest.mark.parametrize("packed", ["m.qweight", "m.weight_packed", "m._weight_qdata"])
def test_who_finds_a_weight_packed_is_told_what_config_lacks(tmp_path: Path, packed: str) -> None:
    """Checkpoints of before there was a `quantization_config` were said to lack a tensor, and no more."""
    found = source(tmp_path, {packed: NORM})
    with pytest.raises(
        ModelError, match=rf"m\.weight is missing .*, which has {packed}: quantization_config in config"
    ):
        filled(found, "m.weight")
    with pytest.raises(ModelError, match=r"n\.weight is missing from the checkpoint$"):
        filled(found, "n.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_no_numbers_are_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    """Infinite ones are numbers, as in masks."""
    spoiled = torch.ones(1000, dtype=dtype)
    spoiled[777] = float("nan")
    found = source(tmp_path, {"a.weight": spoiled, "b.weight": torch.full((4,), -float("inf"))})
    with pytest.raises(ModelError, match=rf"{tmp_path}/model\.safetensors: tensor a\.weight holds .* not numbers"):
        found.read("a.weight")
    assert found.read("b.weight").isinf().all()


def test_files_of_torch_are_read_whole_and_in_shards(tmp_path: Path) -> None:
    torch.save({"a.weight": NORM, "b.weight": NORM + 1}, tmp_path / "pytorch_model.bin")
    assert torch.equal(filled(CheckpointSource(tmp_path, CPU), "b.weight"), NORM + 1)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "pytorch_model-1.bin")
    torch.save({"c.weight": NORM + 2}, tmp_path / "pytorch_model-2.bin")
    shards = dict.fromkeys(("a.weight", "b.weight"), "pytorch_model-1.bin") | {"c.weight": "pytorch_model-2.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": shards}))
    found = CheckpointSource(tmp_path, CPU)
    assert [filled(found, name)[0].item() for name in ("c.weight", "a.weight", "b.weight")] == [2, 0, 1]


class _Code:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    torch.save({"a.weight": _Code(tmp_path / "made")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: not readable \(Weights only load failed"):
        CheckpointSource(tmp_path, CPU)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["consolidated.safetensors", "consolidated.00.pth", "original/params.json"])
def test_other_layouts_are_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"maker's own format only .* Fetch model\*\.safetensors .* or convert them"):
        CheckpointSource(tmp_path, CPU)


@pytest.mark.parametrize("size", [0, 9, 100])
def test_files_that_end_too_early_are_named(tmp_path: Path, size: int) -> None:
    for save, name in ((save_file, "model.safetensors"), (torch.save, "pytorch_model.bin")):
        path = tmp_path / name
        save({"a.weight": torch.ones(100)}, path)  # type: ignore[operator]
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(ModelError, match=rf"^{path}: not readable \([^\n]*\)$"):
            CheckpointSource(tmp_path, CPU)
        path.unlink()
