import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from weft.engine.layers.rotary import (
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RopeConfig,
    RotaryTable,
    YarnScaling,
    rotate,
)

HEAD_DIM, LENGTH = 128, 9000
CASES: dict[str, tuple[RopeConfig, dict[str, object]]] = {
    "default": (RopeConfig(500000.0), {"rope_type": "default"}),
    "linear": (RopeConfig(500000.0, LinearScaling(4.0)), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "yarn": (
        RopeConfig(500000.0, YarnScaling(16.0, 8192, 1.25)),
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192, "attention_factor": 1.25},
    ),
    "yarn, other ends": (
        RopeConfig(500000.0, YarnScaling(16.0, 8192, 1.0, beta_fast=20.0, beta_slow=2.0, truncate=False)),
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 8192,
            "attention_factor": 1.0,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rotation_equals_that_of_transformers(name: str) -> None:
    rope, parameters = CASES[name]
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=8192 * 16,
        rope_parameters=parameters | {"rope_theta": 500000.0},
    )
    positions = torch.tensor([0, 1, 77, 4000, LENGTH - 1])
    heads = torch.randn(5, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    rotation = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], *rotation)

    table = RotaryTable(rope, HEAD_DIM, LENGTH, torch.float32, torch.device("cpu"))
    rotated = rotate(heads, table.gather(positions))
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1), atol=1e-5, rtol=0)


def test_table_has_the_dtype_asked_for_and_is_computed_in_float32() -> None:
    exact = RotaryTable(RopeConfig(10_000.0), 8, 3000, torch.float32, torch.device("cpu"))
    rounded = RotaryTable(RopeConfig(10_000.0), 8, 3000, torch.bfloat16, torch.device("cpu"))
    position = torch.tensor([2999])
    assert torch.equal(rounded.gather(position), exact.gather(position).bfloat16())


@pytest.mark.parametrize("rotary_dim", [None, 8])
def test_requests_beyond_the_short_context_have_rows_of_their_own(rotary_dim: int | None) -> None:
    dim = rotary_dim or 16

    def table(scaling: LongScaling | LinearScaling, short_context: int = 0) -> RotaryTable:
        rope = RopeConfig(1e4, scaling, rotary_dim)
        return RotaryTable(rope, 16, 50, torch.float32, torch.device("cpu"), short_context)

    short, long = (1.5,) * (dim // 2), tuple(float(3 + n) for n in range(dim // 2))
    both = table(LongScaling(short, long, 20, 1.1), 20)
    positions = torch.arange(50)
    torch.testing.assert_close(both.gather(positions[:20]), table(LinearScaling(1.5, 1.1)).gather(positions[:20]))
    alone = table(LongScaling(long, long, 20, 1.1))
    torch.testing.assert_close(both.gather(20 + positions), alone.gather(positions))
    assert not torch.equal(both.gather(20 + positions[:20]), both.gather(positions[:20]))


def test_a_layer_of_one_set_of_frequencies_has_them_at_all_lengths() -> None:
    """Gemma 3 has another rotary embedding in its layers with windows."""
    rope, cpu = RopeConfig(1e4), torch.device("cpu")
    both, alone = (RotaryTable(rope, 16, 50, torch.float32, cpu, short) for short in (20, 0))
    positions = torch.arange(50)
    assert torch.equal(both.gather(20 + positions), alone.gather(positions))
    assert torch.equal(both.gather(positions[:20]), alone.gather(positions[:20]))
