"""What the log and `weft plan` say of how matrices are kept is what the plan counts."""

from pathlib import Path

import pytest

from tests.engine.weights.test_quantized import checkpoint, root
from weft.engine import config as engine_config
from weft.engine.kernels.cpu import library
from weft.engine.start.model_choice import plan_model, read_model, weights_note
from weft.engine.wire.messages import EngineOptions

__all__ = ["root"]


@pytest.mark.skipif(library.load() is None, reason="no native kernels on this machine")
@pytest.mark.parametrize("name", ["gptq", "gptq order", "awq", "modelopt nvfp4", "modelopt fp8", "torchao fp8"])
def test_the_note_is_what_the_plan_counts(root: Path, name: str) -> None:
    """Floats of 4 bits, which stay packed, were said to be kept in bfloat16."""
    folder, plain = checkpoint(root, name)
    options = EngineOptions(model=str(folder), device="cpu", dtype="bfloat16", max_model_len=32)
    facts, other = read_model(folder, "auto"), read_model(plain, "auto")
    config = engine_config.resolve(options, facts)
    planned = plan_model(facts, config)
    note = weights_note(facts, config, planned.kernels)
    assert note is not None
    assert note.endswith("kept in bfloat16") == (planned.weights_bytes == plan_model(other, config).weights_bytes)
