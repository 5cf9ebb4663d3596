"""few_rows.py: its machine code for GPUs that are not here, and its launches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.given_weights import given
from tests.triton_compilation import compile_kernel, instructions, resources
from tests.triton_interpreter import needs_triton
from weft.engine.layers.block import (
    Attention,
    AttentionStep,
    Decoder,
    GatedFeedForward,
    Heads,
    PreNormBlock,
    StepCaches,
)
from weft.engine.layers.rotary import RopeConfig, RotaryTable

TYPES = dict.fromkeys(("inputs", "weight", "bias", "norm_weight", "outputs"), "*bf16")
TYPES |= dict.fromkeys(("num_rows", "num_outs", "input_stride", "output_stride"), "i32") | {"eps": "fp32"}
PLAIN = {"HAS_BIAS": False, "HAS_NORM": False, "ADDS": False, "ACTIVATION": "", "COLUMNS": 4096, "PREFETCH": 0}
FUSED = {"HAS_NORM": True, "ACTIVATION": "silu"}

# What a thread of a program loads of a tile: 16 KB by 128 threads, 16 bytes at a time.
TILE_LOADS = 8

MOST_REGISTERS = {1: 102, 2: 128, 8: 168}
"""With these, five, four and three programs of 128 threads fit into the 65,536 registers of a multiprocessor."""


def compile_product(architecture: int, num_rows: int, *, is_dependent: bool, **flags: Any) -> Any:
    from weft.engine.kernels.triton.layers_jit import multiply

    uses_dot = num_rows > 2
    sizes = {"ROWS": num_rows, "OUTS": 16 if uses_dot else 8, "BLOCK": 512 if uses_dot else 1024, "USES_DOT": uses_dot}
    constants = PLAIN | sizes | {"IS_DEPENDENT": is_dependent} | flags
    return compile_kernel(multiply, architecture, 4, TYPES, constants, num_stages=1)


@needs_triton
@pytest.mark.parametrize("flags", [{"ADDS": True, "PREFETCH": 2048}, FUSED], ids=["residual", "fused"])
@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_weights_are_on_their_way_before_the_kernel_before_ends(
    num_rows: int, flags: dict[str, Any], tmp_path: Path
) -> None:
    compiled = compile_product(90, num_rows, is_dependent=True, **flags)
    used, code = resources(compiled, tmp_path), instructions(compiled, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"
    assert used["REG"] <= MOST_REGISTERS[num_rows]
    wait = code.index("ACQBULK")
    before, after = code[:wait], code[wait:]
    assert [name for name in code if ".EF" in name] == ["LDG.E.EF.128"] * 2 * TILE_LOADS  # weights are not read twice
    assert [name for name in before if name.startswith("LDG")] == ["LDG.E.EF.128"] * TILE_LOADS
    assert "LDG.E.128" in after
    assert before.count("PREEXIT") == 1
    assert any(name.startswith("UBLKPF") for name in before) == ("PREFETCH" in flags)
    assert not [name for name in before if name.startswith(("EXIT", "STG"))]
    assert any(name.startswith("HMMA") for name in after) == (num_rows == 8)
    ptx = compiled.asm["ptx"]
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait")


@needs_triton
@pytest.mark.parametrize("architecture", [80, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_other_architectures(architecture: int, num_rows: int, tmp_path: Path) -> None:
    compiled = compile_product(architecture, num_rows, is_dependent=False, **FUSED)
    assert "griddepcontrol" not in compiled.asm["ptx"]
    assert resources(compiled, tmp_path)["STACK"] == 0


class NoAttention(AttentionStep):
    """Computes nothing, with no launch."""

    def cache(self, layer: int) -> None:
        return None

    def attend(
        self, layer: int, heads: Heads, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.empty(heads[0].shape, dtype=heads[0].dtype)


class Operations(TorchDispatchMode):
    """Notes torch's operations but those that only allocate or view memory."""

    FREE = ("empty", "view", "slice", "split", "reshape", "detach", "select.int", "::t")

    def __init__(self, launches: list[str]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(name in f"::{operation}".replace("aten.", "") for name in self.FREE):
            self._launches.append(str(operation))
        return operation(*args, **kwargs or {})


def decoder(num_layers: int, few_rows: int) -> Decoder:
    from weft.engine.kernels.triton.layer_kernels import TritonKernels

    def draw(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16)

    kernels = TritonKernels(few_rows=few_rows)
    blocks = []
    for _ in range(num_layers):
        heads = kernels.heads(None, 4, 2)
        attention = Attention(kernels.linear(*given(draw(128, 64))), heads, kernels.linear(*given(draw(64, 64))), 16, 0)
        forward = GatedFeedForward(kernels.gated(*given(draw(192, 64)), "silu"), kernels.linear(*given(draw(64, 96))))
        blocks.append(PreNormBlock(kernels.norm(draw(64), 1e-6), attention, kernels.norm(draw(64), 1e-6), forward))
    embedding, head = kernels.tied(*given(draw(256, 64)))
    rotaries = (RotaryTable(RopeConfig(1e4), 16, 32, torch.bfloat16, torch.device("cpu")),)
    return Decoder(embedding, kernels.fuse(blocks), kernels.norm(draw(64), 1e-6), head, rotaries, (), 0)


@needs_triton
@pytest.mark.parametrize(
    ("few_rows", "num_rows", "of_a_layer", "beside"),
    [
        (8, 1, {"multiply": 4, "prepare_heads": 1}, {"multiply": 1, "rms_norm": 1}),
        (8, 8, {"multiply": 4, "prepare_heads": 1}, {"multiply": 1, "rms_norm": 1}),
        (0, 1, {"rms_norm": 2, "prepare_heads": 1, "activate": 1}, {"rms_norm": 1}),
        (8, 9, {"rms_norm": 2, "prepare_heads": 1, "activate": 1}, {"rms_norm": 1}),
    ],
)
def test_launches(
    few_rows: int, num_rows: int, of_a_layer: dict[str, int], beside: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer is five launches for few rows, and eight otherwise; attention adds at most two."""
    from triton.runtime.jit import JITFunction

    launches: list[str] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **options: launches.append(self.__name__))
    counts: list[dict[str, int]] = []
    for num_layers in (1, 3):
        model, tokens = decoder(num_layers, few_rows), torch.zeros(num_rows, dtype=torch.int64)
        launches.clear()
        with Operations(launches):
            model.compute_logits(model.forward(tokens, tokens, StepCaches(NoAttention())))
        counts.append({name: launches.count(name) for name in launches})
    one, three = counts
    names = one.keys()
    per_layer = {name: (three[name] - one[name]) // 2 for name in names}
    rest = {name: one[name] - per_layer[name] for name in names}
    is_few = num_rows <= few_rows
    matrices = {} if is_few else {"aten.mm.default": 2, "aten.addmm_.default": 2}
    assert {name: number for name, number in per_layer.items() if number} == of_a_layer | matrices
    gathers = {"aten.embedding.default": 1, "aten.index_select.default": 1}
    head = {} if is_few else {"aten.mm.default": 1, "aten._to_copy.default": 1}  # on CUDA one operation
    assert {name: number for name, number in rest.items() if number} == beside | gathers | head
