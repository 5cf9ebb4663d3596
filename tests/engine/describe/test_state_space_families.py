"""State space models and their hybrids, with options that published ones use, against a full forward pass."""

from pathlib import Path

import pytest
import torch

from tests.checkpoints import Checkpoint, load_reference, write_checkpoint
from tests.engine.layers.test_decoder import Runner, make_prompts
from weft.engine.describe.config import load_model_config
from weft.engine.families.hybrids import falcon_h1, nemotron_h
from weft.engine.families.mamba import mamba
from weft.engine.families.switches import UseModule
from weft.engine.fields import Fields

MAMBA2 = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
CASES = {
    "mamba": Checkpoint("mamba", {"state_size": 6, "conv_kernel": 3, "use_bias": True, "intermediate_size": 96}),
    "falcon-mamba": Checkpoint("falcon_mamba", {"use_conv_bias": False, "intermediate_size": 96}),
    "mamba2": Checkpoint("mamba2", {"num_heads": 6, "head_dim": 16, "n_groups": 3, "time_step_limit": [0.3, 2.0]}),
    "falcon-h1": Checkpoint(
        "falcon_h1",
        {
            **(MAMBA2 | {"mamba_d_ssm": 96, "mlp_multipliers": [0.9, 0.6], "key_multiplier": 0.4}),
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.2,
            "ssm_multipliers": [0.7, 0.9, 1.1, 0.8, 1.3],
            "ssm_out_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.3,
            "mlp_bias": True,
            "projectors_bias": True,
        },
    ),
    "bamba": Checkpoint("bamba", {**MAMBA2, "attn_layer_indices": [1], "attention_bias": True}),
    "granite": Checkpoint(
        "granitemoehybrid",
        {
            **(MAMBA2 | {"num_local_experts": 0, "shared_intermediate_size": 56, "position_embedding_type": "rope"}),
            "layer_types": ["mamba", "attention", "mamba"],
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.0,
            "mamba_proj_bias": True,
        },
    ),
    "jamba": Checkpoint(
        "jamba", {"num_experts": 3, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 6}
    ),
    "nemotron-h": Checkpoint(
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "mlp", "attention"],
            "head_dim": 12,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "time_step_min": 0.5,
        },
    ),
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_logprobs_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    write_checkpoint(CASES[name], tmp_path)
    prompts, reference = make_prompts(40, 11, 1), load_reference(tmp_path)
    with torch.inference_mode():
        expected = [reference(prompt[None]).logits[0].log_softmax(-1) for prompt in prompts]
    for chunk_size in (1, 7, 40):
        for logits, target in zip(Runner(tmp_path).run(prompts, chunk_size), expected, strict=True):
            torch.testing.assert_close(logits.log_softmax(-1), target, atol=1e-4, rtol=0)


def test_sizes_that_transformers_writes_count_before_factors(tmp_path: Path) -> None:
    """A Mamba checkpoint with intermediate_size was refused: expand was read in its place."""
    write_checkpoint(CASES["mamba"], tmp_path)
    assert load_model_config(tmp_path).switches.mixers[0].width == 96  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        (mamba, {"hidden_act": "relu"}, "hidden_act relu"),
        (falcon_h1, {"mamba_rms_norm": True}, "mamba_norm_before_gate"),
        (falcon_h1, {"attention_bias": True, "attention_in_multiplier": 2.0}, "attention_bias"),
        (nemotron_h, {"hybrid_override_pattern": "M", "moe_latent_size": 8}, "moe_latent_size"),
    ],
)
def test_what_the_parts_cannot_compute_goes_to_the_module(
    family: object, changes: dict[str, object], named: str
) -> None:
    fields = Fields({"hidden_size": 64, "num_hidden_layers": 2, "mamba_n_heads": 4, "mamba_d_ssm": 64, **changes}, "x")
    with pytest.raises(UseModule, match=named):
        family(fields)  # type: ignore[operator]
