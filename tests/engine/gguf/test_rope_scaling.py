"""What a GGUF file says of scaled rotary embeddings."""

import pytest

from weft.engine.gguf.config import _rope_scaling
from weft.engine.gguf.file import GgufModel


@pytest.mark.parametrize("kind", ["linear", "yarn", "none", None])
@pytest.mark.parametrize("factor", [None, 0.0, 1.0])
def test_a_scaling_without_factor_is_none(kind: str | None, factor: float | None) -> None:
    """Files that name a type and no factor were refused; llama.cpp takes them as they are meant."""
    metadata: dict[str, object] = {"general.architecture": "llama", "llama.context_length": 64}
    metadata |= {"llama.rope.scaling.type": kind} if kind else {}
    metadata |= {} if factor is None else {"llama.rope.scaling.factor": factor}
    assert _rope_scaling(GgufModel((), metadata, {})) is None  # type: ignore[arg-type]
