"""Which libraries are offered."""

import pytest
import torch

from weft.engine.kernels.triton import prompts as prompt_libraries
from weft.engine.kernels.triton.prompts import FlashAttention2


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ([], ["flash2"]),
        (["flash_attn_interface"], ["flash2", "flash3"]),
        (["flashinfer"], ["flash2"]),
        (["flashinfer", "flashinfer_jit_cache"], ["flash2", "flashinfer"]),
    ],
)
def test_those_that_are_installed(monkeypatch: pytest.MonkeyPatch, packages: list[str], expected: list[str]) -> None:
    monkeypatch.setattr(prompt_libraries, "find_spec", lambda name: name if name in packages else None)
    libraries = prompt_libraries.installed_libraries(torch.device("cpu"))
    assert list(libraries) == expected
    assert isinstance(libraries["flash2"](), FlashAttention2)
