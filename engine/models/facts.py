"""What the engine needs to know of a model before anything is loaded, whoever computes it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes and limits of a model.

    Attributes:
        num_kv_heads, head_dim: Of the largest layer.
        intermediate_size: Widest activation of a token inside a layer.
        max_position_embeddings: Longest context that the model is meant for.
        dtype: What the checkpoint declares, float32 if it declares nothing.
        eos_token_ids: Ids that end an answer, from generation_config.json, else config.json. Each is an id of the
            vocabulary. May be empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see those behind them, so that a request is computed whole, in one step."""
        return False

    @property
    def feed_forward_values(self) -> int:
        """Values of a token inside the widest feed-forward layer at once."""
        return self.intermediate_size

    @property
    def kept_values(self) -> int:
        """Values of a token that are kept through all layers, beside its hidden states."""
        return 0

    @property
    def position_values(self) -> int:
        """Values of each position in the tables that are made when the model is loaded."""
        return 0
