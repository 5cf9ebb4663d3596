"""Encoders: BERT, RoBERTa, XLM-RoBERTa, DistilBERT and ModernBERT, plain and with the head of a classifier.

Tokens see those behind them, too, and norms follow the sums (Devlin et al., 2019) or precede the halves (ModernBERT:
Warner et al., 2024).
"""

from dataclasses import replace

from weft.engine.families.switches import Classifier, FamilySwitches, Fused, Norm, Norms, TensorNames, UseModule, family
from weft.engine.fields import Fields

_BERT = TensorNames(
    embedding="bert.embeddings.word_embeddings",
    layers="bert.encoder.layer",
    positions="bert.embeddings.position_embeddings",
    token_types="bert.embeddings.token_type_embeddings",
    embedding_norm="bert.embeddings.LayerNorm",
    mixer_post_norm="attention.output.LayerNorm",
    feed_forward_post_norm="output.LayerNorm",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    output="attention.output.dense",
    gate_up=("intermediate.dense",),
    down="output.dense",
)

_DISTILBERT = TensorNames(
    embedding="distilbert.embeddings.word_embeddings",
    layers="distilbert.transformer.layer",
    positions="distilbert.embeddings.position_embeddings",
    embedding_norm="distilbert.embeddings.LayerNorm",
    mixer_post_norm="sa_layer_norm",
    feed_forward_post_norm="output_layer_norm",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    output="attention.out_lin",
    gate_up=("ffn.lin1",),
    down="ffn.lin2",
)

_MODERN = TensorNames(
    embedding="model.embeddings.tok_embeddings",
    layers="model.layers",
    norm="model.final_norm",
    embedding_norm="model.embeddings.norm",
    mixer_norm="attn_norm",
    feed_forward_norm="mlp_norm",
    qkv=("attn.Wqkv",),
    output="attn.Wo",
    gate_up=("mlp.Wi",),
    down="mlp.Wo",
)

_HEAD_ACTIVATIONS = {"gelu": "GELU", "silu": "SiLU", "relu": "ReLU", "tanh": "Tanh"}

_UNUSED = (
    "embeddings.position_ids",
    "pooler.",
    "classifier.",
    "pre_classifier.",
    "cls.",
    "lm_head.",
    "decoder.",
    "vocab_",
)
"""What other tasks read, and constants."""


@family("BertModel", "BertForMaskedLM", "BertForPreTraining")
def bert(fields: Fields) -> FamilySwitches:
    """Positions and types of tokens are embedded."""
    if fields.flag("is_decoder", False) or fields.optional_text("position_embedding_type") not in (None, "absolute"):
        raise UseModule("decoders and relative positions are not supported")
    return FamilySwitches(
        names=_BERT,
        norm=Norm.LAYER_NORM,
        norms=Norms.OF_SUM,
        has_final_norm=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        is_gated=False,
        has_rope=False,
        is_bidirectional=True,
        activation=fields.optional_text("hidden_act") or "gelu",
        defaults={"rms_norm_eps": 1e-12, "type_vocab_size": 2, "max_position_embeddings": 512},
        unused=(*_UNUSED, *(f"bert.{name}" for name in _UNUSED)),
    )


@family("BertForSequenceClassification")
def bert_classifier(fields: Fields) -> FamilySwitches:
    """Reads the first token through the pooler."""
    return replace(bert(fields), classifier=Classifier("classifier", dense="bert.pooler.dense"))


@family("RobertaModel", "RobertaForMaskedLM", "XLMRobertaModel", "XLMRobertaForMaskedLM", "CamembertModel")
def roberta(fields: Fields) -> FamilySwitches:
    """Positions begin behind that of padding."""
    base = bert(fields)
    names = {
        name: getattr(_BERT, name).replace("bert.", "roberta.", 1)
        for name in ("embedding", "layers", "positions", "token_types", "embedding_norm")
    }
    return replace(
        base,
        names=replace(_BERT, **names),
        num_positions_skipped=fields.integer("pad_token_id", 1) + 1,
        counts_skipped=True,
        unused=(*_UNUSED, *(f"roberta.{name}" for name in _UNUSED)),
    )


@family("RobertaForSequenceClassification", "XLMRobertaForSequenceClassification", "CamembertForSequenceClassification")
def roberta_classifier(fields: Fields) -> FamilySwitches:
    """Reads the first token; bge-reranker is one."""
    return replace(roberta(fields), classifier=Classifier("classifier.out_proj", dense="classifier.dense"))


@family("DistilBertModel", "DistilBertForMaskedLM")
def distilbert(fields: Fields) -> FamilySwitches:
    """BERT without types of tokens."""
    base = bert(fields)
    return replace(
        base,
        names=_DISTILBERT,
        activation=fields.optional_text("activation") or "gelu",
        defaults={
            **base.defaults,
            "hidden_size": fields.integer("dim", 768),
            "intermediate_size": fields.integer("hidden_dim", 3072),
        },
        unused=(*_UNUSED, *(f"distilbert.{name}" for name in _UNUSED)),
    )


@family("DistilBertForSequenceClassification")
def distilbert_classifier(fields: Fields) -> FamilySwitches:
    """Reads the first token through ReLU."""
    head = Classifier("classifier", dense="pre_classifier", activation="ReLU")
    return replace(distilbert(fields), classifier=head)


@family("ModernBertModel", "ModernBertForMaskedLM")
def modernbert(fields: Fields) -> FamilySwitches:
    """Rotary embedding, gated layers, and windows on both sides in two of three layers."""
    num_layers, period = fields.integer("num_hidden_layers"), fields.integer("global_attn_every_n_layers", 3)
    kinds = fields.texts("layer_types") or tuple(
        "sliding_attention" if layer % period else "full_attention" for layer in range(num_layers)
    )
    window = fields.integer("local_attention", 128) // 2 + 1
    has_bias = fields.flag("attention_bias", False)
    return FamilySwitches(
        names=_MODERN,
        norm=Norm.LAYER_NORM if fields.flag("norm_bias", False) else Norm.LAYER_NORM_WITHOUT_BIAS,
        normless=frozenset({0}),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        fused=Fused.STACKED,
        local_rope_theta=fields.number("local_rope_theta", 10_000.0),
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        is_bidirectional=True,
        activation=fields.optional_text("hidden_activation") or "gelu",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": fields.number("global_rope_theta", 160_000.0),
            "max_position_embeddings": 8192,
        },
        unused=("head.", "decoder.", "classifier."),
    )


@family("ModernBertForSequenceClassification")
def modernbert_classifier(fields: Fields) -> FamilySwitches:
    """Reads the first token or the mean."""
    head = Classifier(
        "classifier",
        dense="head.dense",
        norm="head.norm",
        activation=_HEAD_ACTIVATIONS[fields.optional_text("classifier_activation") or "gelu"],
        eps=fields.number("norm_eps", 1e-5),
        pooling="mean" if fields.optional_text("classifier_pooling") == "mean" else "cls",
    )
    return replace(modernbert(fields), classifier=head)
