"""Finds the family of a checkpoint by the architecture name in its config.json. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.engine.models.families.cohere import cohere, cohere2
from weft.engine.models.families.deepseek import deepseek_v2, deepseek_v3, glm4_moe_lite
from weft.engine.models.families.exaone import exaone4
from weft.engine.models.families.family import Family, FamilySwitches, UseModule
from weft.engine.models.families.fields import Fields
from weft.engine.models.families.gemma import gemma, gemma2, gemma3, vaultgemma
from weft.engine.models.families.glm import glm, glm4
from weft.engine.models.families.gpt2 import biogpt, gpt2, gpt_bigcode, opt, starcoder2
from weft.engine.models.families.gpt_neox import falcon, gpt_neox, gptj, nemotron, persimmon, phi, stablelm
from weft.engine.models.families.granite import granite, granitemoe, hyperclovax
from weft.engine.models.families.hunyuan import hunyuan_v1_dense, hunyuan_v1_moe
from weft.engine.models.families.hybrids import bamba, falcon_h1, granite_hybrid, jamba, nemotron_h
from weft.engine.models.families.lfm2 import lfm2, lfm2_moe
from weft.engine.models.families.llama import arcee, cwm, ernie4_5, helium, jais2, llama, seed_oss, smollm3
from weft.engine.models.families.mamba import falcon_mamba, mamba, mamba2
from weft.engine.models.families.minicpm3 import minicpm3
from weft.engine.models.families.mistral import ministral, mistral
from weft.engine.models.families.mixtral import minimax_m2, mixtral, phimoe
from weft.engine.models.families.olmo import olmo, olmo2, olmo3
from weft.engine.models.families.phi3 import phi3
from weft.engine.models.families.qwen2 import qwen2
from weft.engine.models.families.qwen3 import qwen3
from weft.engine.models.families.qwen3_next import qwen3_5, qwen3_5_moe, qwen3_next
from weft.engine.models.families.qwen_moe import flex_olmo, olmoe, qwen2_moe, qwen3_moe
from weft.engine.models.families.recurrent_gemma import recurrent_gemma
from weft.engine.models.families.sigmoid_moe import (
    dots1,
    ernie4_5_moe,
    exaone_moe,
    glm4_moe,
    hy_v3,
    solar_open,
)
from weft.engine.models.families.wrappers import text_half
from weft.engine.models.families.youtu import youtu
from weft.engine.shared.errors import ModelError

FAMILIES: Mapping[str, Family] = {
    "ArceeForCausalLM": arcee,
    "BioGptForCausalLM": biogpt,
    "Cohere2ForCausalLM": cohere2,
    "CohereForCausalLM": cohere,
    "CwmForCausalLM": cwm,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "Ernie4_5ForCausalLM": ernie4_5,
    "Exaone4ForCausalLM": exaone4,
    "FalconForCausalLM": falcon,
    "FlexOlmoForCausalLM": flex_olmo,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "GemmaForCausalLM": gemma,
    "Glm4ForCausalLM": glm4,
    "Glm4MoeLiteForCausalLM": glm4_moe_lite,
    "GlmForCausalLM": glm,
    "GPT2LMHeadModel": gpt2,
    "GPTBigCodeForCausalLM": gpt_bigcode,
    "GPTJForCausalLM": gptj,
    "GPTNeoXForCausalLM": gpt_neox,
    "GraniteForCausalLM": granite,
    "HeliumForCausalLM": helium,
    "HunYuanDenseV1ForCausalLM": hunyuan_v1_dense,
    "HyperCLOVAXForCausalLM": hyperclovax,
    "Jais2ForCausalLM": jais2,
    "Lfm2ForCausalLM": lfm2,
    "Lfm2MoeForCausalLM": lfm2_moe,
    "LlamaForCausalLM": llama,
    "MiniCPM3ForCausalLM": minicpm3,
    "MiniMaxM2ForCausalLM": minimax_m2,
    "MinistralForCausalLM": ministral,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "NemotronForCausalLM": nemotron,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "OlmoeForCausalLM": olmoe,
    "OlmoForCausalLM": olmo,
    "OPTForCausalLM": opt,
    "PersimmonForCausalLM": persimmon,
    "Phi3ForCausalLM": phi3,
    "PhiForCausalLM": phi,
    "PhimoeForCausalLM": phimoe,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3_5ForCausalLM": qwen3_5,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3NextForCausalLM": qwen3_next,
    "RecurrentGemmaForCausalLM": recurrent_gemma,
    "SeedOssForCausalLM": seed_oss,
    "SmolLM3ForCausalLM": smollm3,
    "StableLmForCausalLM": stablelm,
    "Starcoder2ForCausalLM": starcoder2,
    "VaultGemmaForCausalLM": vaultgemma,
    "MambaForCausalLM": mamba,
    "FalconMambaForCausalLM": falcon_mamba,
    "Mamba2ForCausalLM": mamba2,
    "YoutuForCausalLM": youtu,
    "FalconH1ForCausalLM": falcon_h1,
    "BambaForCausalLM": bamba,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "JambaForCausalLM": jamba,
    "NemotronHForCausalLM": nemotron_h,
    "Glm4MoeForCausalLM": glm4_moe,
    "Dots1ForCausalLM": dots1,
    "SolarOpenForCausalLM": solar_open,
    "Ernie4_5_MoeForCausalLM": ernie4_5_moe,
    "ExaoneMoeForCausalLM": exaone_moe,
    "HYV3ForCausalLM": hy_v3,
    "GraniteMoeForCausalLM": granitemoe,
    "GraniteMoeSharedForCausalLM": granitemoe,
    "HunYuanMoEV1ForCausalLM": hunyuan_v1_moe,
}


# Names that some configurations have for fields of this meaning.
_ALIASES = {
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_inner": "intermediate_size",
    "ffn_dim": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
    "layer_norm_eps": "rms_norm_eps",
    "norm_epsilon": "rms_norm_eps",
    "norm_eps": "rms_norm_eps",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """What `identify` found: the architecture, its family's switches, and all fields of config.json.

    Those of the text half, where Weft serves that half of a checkpoint alone.

    Without switches, transformers' own module computes the model.
    """

    architecture: str
    switches: FamilySwitches | None
    fields: Fields


def identify(folder: Path, model_impl: str = "auto") -> Identity:
    """Find the family of a model folder.

    Args:
        model_impl: native refuses architectures without a family; transformers looks for none.

    Raises:
        ModelError: config.json is missing or malformed, the architecture is not supported, or weights are quantized.
    """
    fields = Fields.read(folder / "config.json")
    architectures = fields.texts("architectures")
    if not architectures:
        raise ModelError(f"{folder / 'config.json'}: names no architecture")
    architecture, family = architectures[0], None
    if model_impl != "transformers":
        half = text_half(architecture, fields)
        name, own = half if half and half[0] in FAMILIES else (architecture, fields)
        family = FAMILIES.get(name)
    if family is None and model_impl == "native":
        raise ModelError(f"architecture {architecture} is not supported (supported: {', '.join(FAMILIES)})")
    switches = None
    if family:
        try:
            switches = family(own := own.with_aliases(_ALIASES))
            architecture, fields = name, own
        except UseModule:
            if model_impl == "native":
                raise
    quantization = fields.section("quantization_config")
    if quantization.names():
        method = quantization.optional_text("quant_method") or "unnamed"
        raise ModelError(f"quantized checkpoints are not supported (quantization_config: {method})")
    return Identity(architecture, switches, fields)
