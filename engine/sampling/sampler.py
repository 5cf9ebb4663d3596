"""Samples token ids from logits and reports log-probabilities.

Owns the order in which a row's parameters act. Promises that a row is sampled alone: its id and its log-probabilities
are the same, bit for bit, whatever other rows share the step. `sample` draws no random numbers, since each row brings
its own, which `uniforms` makes. Never waits for the device. A `GraphSampler` samples plain rows inside a CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor
from typing_extensions import override

from weft.engine.batch import Floats, Ints, RowMasks, SamplingBatch
from weft.engine.device import to_device
from weft.engine.sampling.edits import ApplyPenalties, edit_logits
from weft.engine.sampling.scores import LogprobTensors, log_softmax, pick


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What a step sampled, still on the device.

    Attributes:
        token_ids: (num_rows,) int64.
        logprobs: Of the rows that ask for them; None when none does.
    """

    token_ids: Tensor
    logprobs: LogprobTensors | None


PickIds = Callable[[Tensor, SamplingBatch, RowMasks | None], Tensor]
"""Steps 3 to 8 of `sample`: edited logits, which it may overwrite -> (num_rows,) int64 ids."""


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """The steps of `sample` for which a device may have kernels of Weft's own."""

    apply_penalties: ApplyPenalties
    pick_ids: PickIds


def sample(
    logits: Tensor,
    batch: SamplingBatch,
    previous_token_ids: Tensor | None,
    masks: RowMasks | None = None,
    *,
    kernels: SamplingKernels,
) -> SampleResult:
    """Pick one id for every row.

    1. Log-probabilities of the rows that ask, from the logits as the model gave them.
    2. Penalties, then bias, allowed ids and bans (`edit_logits`). In `edited_rows` they change what 1 made.
    3. Masks.
    4. Rows of temperature 0: the most probable id, the lowest of equals. Done.
    5. Temperature.
    6. min-p and top-k, each of the distribution after 5.
    7. top-p, of what 6 leaves.
    8. Inverse CDF in vocabulary order with the row's uniform number.

    Filters keep ids that tie with the last one they keep. When everything is banned the row yields the lowest id,
    or NO_TOKEN_ID where there is a mask.

    Args:
        logits: (num_rows, vocab_size) float32, contiguous; may be overwritten.
        previous_token_ids: (num_previous_rows,) int64, what the previous step sampled; None when nothing needs it.
        kernels: Computes the penalties of step 2, and steps 3 to 8.
    """
    reporting = np.flatnonzero(batch.num_logprobs >= 0)
    all_logprobs = log_softmax(_rows(logits, reporting)) if len(reporting) else None
    edit_logits(logits, batch, previous_token_ids, kernels.apply_penalties, (reporting, all_logprobs))
    token_ids = kernels.pick_ids(logits, batch, masks)
    logprobs = None
    if all_logprobs is not None:
        reported_ids = _rows(token_ids, reporting).clamp(min=0)  # NO_TOKEN_ID ends the request anyway
        num_logprobs = batch.num_logprobs[reporting]
        logprobs = pick(all_logprobs, reported_ids, reporting, num_logprobs, batch.asked_logprobs)
    return SampleResult(token_ids, logprobs)


def _rows(values: Tensor, rows: Ints) -> Tensor:
    """Select rows, which ascend and are distinct. Returns values itself, not a copy, when that is all of them."""
    return values if len(rows) == len(values) else values.index_select(0, to_device(rows, values.device))


class GraphSampler(Protocol):
    """Samples in a CUDA graph the same ids as `PickIds` outside of it.

    A graph samples rows whose logits are not edited and that report nothing but the id. All other rows are sampled
    after the graph. Parameters are copied into memory that stays in place.
    """

    def can_sample(self, batch: SamplingBatch) -> bool:
        """Whether the graph can sample these rows, which are plain (`is_plain`)."""

    def parameters(self, batch: SamplingBatch, num_rows: int) -> Floats:
        """What `sample` needs of each row, (n, num_rows); rows beyond the batch's own are padding."""

    def sample(self, logits: Tensor, parameters: Tensor) -> Tensor:
        """Logits (num_rows, vocab_size) float32, may be overwritten -> (num_rows,) int64. Never waits."""


class GreedySampler(GraphSampler):
    """Picks the most probable ids; needs no parameters."""

    @override
    def can_sample(self, batch: SamplingBatch) -> bool:
        return not batch.temperatures.any()

    @override
    def parameters(self, batch: SamplingBatch, num_rows: int) -> Floats:
        return np.zeros((0, num_rows), np.float32)

    @override
    def sample(self, logits: Tensor, parameters: Tensor) -> Tensor:
        return logits.argmax(-1)


def is_plain(batch: SamplingBatch) -> bool:
    """Whether no logit is edited and only ids are reported. Grammar masks are not part of a batch."""
    others = (batch.penalties, batch.conditional_bans, batch.asked_logprobs, batch.times)
    is_edited = len(batch.bias_rows) or len(batch.allowed_rows) or any(other is not None for other in others)
    return not is_edited and bool((batch.num_logprobs < 0).all())


_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_NUM_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

_Words = npt.NDArray[np.uint64]


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], choices: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """One uniform number in [0, 1) for each (seed, position, choice), in steps of 2**-24.

    The seed is the key of Philox4x32-10, position and choice are the two halves of its counter, so different
    triples give independent numbers. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.

    This map must never change: the same request with the same seed gives the same ids in every release, whatever the
    load. It holds no state.

    Args:
        seeds: (n,) uint64, one per request.
        positions: (n,) int64 >= 0, position of the token that is drawn.
        choices: (n,) int64 >= 0, which of the request's choices draws.

    Returns:
        (n,) float32.
    """
    word = philox4x32(_halves(positions) + _halves(choices), _halves(seeds))[0]
    return ((word >> np.uint64(8)).astype(np.float32)) * np.float32(2.0**-24)


def philox4x32(
    counter: tuple[_Words, _Words, _Words, _Words], key: tuple[_Words, _Words]
) -> tuple[_Words, _Words, _Words, _Words]:
    """Philox4x32-10 on arrays: each word is an (n,) uint64 array of values below 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _LOW
        k1 = (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _halves(values: npt.NDArray[np.int64] | npt.NDArray[np.uint64]) -> tuple[_Words, _Words]:
    """Low and high 32 bits of 64-bit values."""
    words = values.astype(np.uint64)
    return words & _LOW, words >> _HALF
