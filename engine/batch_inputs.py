"""What some requests bring to a step beside tokens: hidden states that are wanted, inputs of encoders, pictures."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PoolBatch:
    """Tokens whose final hidden states are wanted, as sums over runs of them.

    Attributes:
        token_indices: (n,) flat token indices, run after run.
        lengths: (num_runs,) how many tokens each run has, at least one.
    """

    token_indices: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class InputBatch:
    """What the requests of a step begin with where a model has an encoder.

    Attributes:
        lengths: (num_requests,) tokens of each request's input.
        num_slots: (num_requests,) leading tokens of the request that stand for it: the input, padded to whole blocks.
        sounds: Of an encoder that hears, the inputs that it reads in this step, in the order of their requests.
    """

    lengths: npt.NDArray[np.int64]
    num_slots: npt.NDArray[np.int64]
    sounds: tuple[npt.NDArray[np.int16], ...] = ()


@dataclass(frozen=True, slots=True)
class PictureTokens:
    """The part of a picture whose tokens a step computes; or a whole one that layers attend to.

    Attributes:
        key: That of its features, see `picture_key`.
        targets: (n,) flat indices of tokens that its features take the place of; or of those that see it.
        first: Which feature the first of them is; the others follow.
    """

    key: bytes
    targets: npt.NDArray[np.int64]
    first: int
