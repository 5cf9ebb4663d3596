"""What a request may ask of vectors, and what the engine says of those that its model makes."""

import msgspec

from weft.engine.shared.finish_reason import FinishReason


class VectorInfo(msgspec.Struct, frozen=True):
    """What the vectors of a model are.

    Attributes:
        size: Values of a vector; of a classifier one for each label.
        hidden_size: Values of a token's hidden state.
        labels: Of a classifier; empty for embeddings.
        is_normalized: Whether vectors have length 1 unless a request asks otherwise.
        dimensions: Numbers of leading values that are vectors too; empty for any number if is_matryoshka.
        is_matryoshka: Whether such vectors may be asked for.
    """

    size: int
    hidden_size: int
    labels: tuple[str, ...] = ()
    is_normalized: bool = False
    dimensions: tuple[int, ...] = ()
    is_matryoshka: bool = False


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Asks for a vector of the prompt in place of output; answered by one `PooledOutput`.

    Attributes:
        is_per_token: The final hidden states of all tokens, as they are, in place of the model's own vector.
        dimensions: Keep this many leading values; None keeps all.
        is_finished: Whether the last step follows: length 1 of an embedding, the probabilities of a classifier. None:
            as the checkpoint says.
    """

    is_per_token: bool = False
    dimensions: int | None = None
    is_finished: bool | None = None


class PooledOutput(msgspec.Struct, array_like=True, tag=1):
    """The only output of a request with `pooling`, unless it fails: then a `TokensOutput` says so.

    Attributes:
        values: float32, little endian, row by row.
        num_rows: One, or one for each token of the prompt.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        queue_time_s: Seconds from arrival to the first step.
    """

    request_id: int
    index: int
    values: bytes
    num_rows: int
    finish_reason: FinishReason | None
    num_cached_tokens: int | None = None
    queue_time_s: float | None = None

    def merge(self, later: object) -> None:
        """Never called: nothing comes after the only output."""
        raise AssertionError("a vector comes whole")
