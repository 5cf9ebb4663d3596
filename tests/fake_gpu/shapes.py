"""Models of real shapes as configurations, whose weights nobody reads."""

from benchmarks.compare.checkpoints import VOCAB_SIZE
from benchmarks.gpu.models import SHAPES
from tests.checkpoints import Checkpoint

_LARGE = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 40_960}
QWEN3_8B = Checkpoint("qwen3", {**_LARGE, **SHAPES["qwen3-8b"]})
QWEN3_600M = Checkpoint("qwen3", {**_LARGE, **SHAPES["qwen3-0.6b"], "tie_word_embeddings": True})
GEMMA2_2B = Checkpoint(
    "gemma2",
    {
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
)
"""What the first lacks: wide heads, scores with soft caps, windows, a tied head, no norm of heads."""
