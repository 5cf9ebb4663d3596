"""The seam between scheduling and the device: a step as flat arrays, its masks, its results, and what computes it.

The scheduler's side makes a `Batch` of requests and reads a `StepResult`. An executor sees these alone and never a
request. Batches, masks and results are plain data, so that they can be sent to another process (tensor-parallel ranks).
"""

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.engine.batch_inputs import InputBatch, PictureTokens, PoolBatch
from weft.engine.device import to_device
from weft.engine.wire.messages import TokenLogprobs

Ints = npt.NDArray[np.int64]

Floats = npt.NDArray[np.float32]

Bits = npt.NDArray[np.int32]

Samples = npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """The step as one cache group (layers that share their block tables) sees it.

    Attributes:
        slot_mapping: (num_tokens,) flat cache slot, block id * block size + offset, that each token's K/V goes to;
            empty where a block is the state of a whole request.
        block_tables: (num_requests, max_num_blocks) block ids, padded with 0. Blocks that left the sliding window are 0
            too. The zeros must not be read.
        block_copies: (num_copies, 2) source and destination block ids, copied before the forward pass.
    """

    slot_mapping: Ints
    block_tables: Ints
    block_copies: Ints


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Ids that the previous launched step samples, and that the host does not know yet.

    `rows[i]` of that step belongs to `targets[i]` here. The ids themselves stay on the device.
    """

    targets: Ints
    rows: Ints


@dataclass(frozen=True, slots=True)
class PenaltyBatch:
    """Penalties of the rows that ask for any; the other rows do not appear.

    Attributes:
        rows: (num_penalised,) the row of the step that entry i stands for.
        presence, frequency, repetition: (num_penalised,) float32.
        starts: (num_penalised + 1,) where each entry's ids start, and the last one's end.
        ids: (n,) the distinct ids of an entry: those of the output and, under a repetition penalty, of the prompt.
        counts: (n,) how often each is in the output that the host knows, drafts before the row included.
        placeholders: output tokens that the host does not know yet, at most one per entry; targets are entry indices.
    """

    rows: Ints
    presence: Floats
    frequency: Floats
    repetition: Floats
    starts: Ints
    ids: Ints
    counts: Ints
    placeholders: Placeholders


@dataclass(frozen=True, slots=True)
class ConditionalBans:
    """Ban ids[i] on rows[i] if the previous step's row source_rows[i] sampled required_ids[i] (ends of bad words)."""

    rows: Ints
    ids: Ints
    source_rows: Ints
    required_ids: Ints


@dataclass(frozen=True, slots=True)
class AskedLogprobs:
    """Report the log-probability of ids[i] on rows[i]. These rows report logprobs, and are in ascending order."""

    rows: Ints
    ids: Ints


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How every row is sampled. A request contributes one row for each position it samples at.

    Attributes:
        temperatures: (num_rows,) float32; 0 is greedy.
        top_ks: (num_rows,) int64; 0 keeps all.
        top_ps, min_ps: (num_rows,) float32; 1 and 0 keep all.
        uniforms: (num_rows,) float32 in [0, 1), one random number per row, from (seed, position, choice).
        num_logprobs: (num_rows,) int64, alternatives to report; -1 reports nothing.
        bias_rows, bias_ids, bias_values: (b,) sparse addition to the logits; -inf bans.
        allowed_rows: (a,) rows where only some ids may be sampled, each once.
        allowed_entries, allowed_ids: (c,) index into allowed_rows, and an id allowed there.
        penalties: None when no row asks for a penalty.
        conditional_bans: None when there are none.
        asked_logprobs: None when no row asks for certain ids.
        times: (t, 5) rows whose output is divided by times, each with its `TimestampRule.bounds`; None for none.
        edited_rows: (e, 2) rows that report log-probabilities, and edits change these in the place of logits; and
            whether these then sum to 1 again. None for none.
    """

    temperatures: Floats
    top_ks: Ints
    top_ps: Floats
    min_ps: Floats
    uniforms: Floats
    num_logprobs: Ints
    bias_rows: Ints
    bias_ids: Ints
    bias_values: Floats
    allowed_rows: Ints
    allowed_entries: Ints
    allowed_ids: Ints
    penalties: PenaltyBatch | None = None
    conditional_bans: ConditionalBans | None = None
    asked_logprobs: AskedLogprobs | None = None
    times: Ints | None = None
    edited_rows: Ints | None = None


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """Prompt positions whose next token is scored, not sampled (prompt log-probabilities).

    Attributes:
        token_indices: (num_scores,) flat token index whose hidden state predicts the target.
        target_ids: (num_scores,) the prompt token that follows.
        num_logprobs: (num_scores,) alternatives to report.
    """

    token_indices: Ints
    target_ids: Ints
    num_logprobs: Ints


class GraphKey(NamedTuple):
    """What a recorded step can compute.

    Attributes:
        num_tokens: Tokens of the step, padding included.
        samples: Whether every request computes one token, which the graph samples. If not, the graph computes any step
            of at most num_tokens tokens, or of one token for each request if layers keep states, and leaves sampling
            to others.
    """

    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, flattened: the tokens of all scheduled requests one after another.

    It is made of numpy arrays and plain values alone.

    Attributes:
        token_ids: (num_tokens,) input ids; 0 where a placeholder goes.
        positions: (num_tokens,) position of each token in its request.
        placeholders: input ids that the previous step samples; targets are flat token indices.
        query_start_locs: (num_requests + 1,) where each request's tokens start.
        seq_lens: (num_requests,) tokens in the cache after this step, this step's included.
        groups: one entry per cache group.
        row_indices: (num_rows,) flat token index whose hidden state each sampled row uses.
        sampling: how the rows are sampled.
        scores: None when no prompt is scored.
        token_types: (num_tokens,) type of each token, such as the side of a pair; None when all are of type 0.
        pooling: None when nobody wants hidden states.
        adapters: (num_requests,) slot of each request's adapter, from 1; 0 is the model itself.
            None when all requests use the model itself.
        table_rows: (num_tokens,) where the model looks up each position; None where that is the position itself.
            (3, num_tokens) for time, row and column, if these differ in a token of a picture.
        inputs: The inputs of an encoder; None for a model without one.
        next_ids: Of each request without a row, in order, the id behind its tokens of this step, or 0 if there is none
            yet; None where every request has rows.
        pictures: Those that are seen.
        is_mutual: Whether each token also sees those behind it, up to the end of its request in this step.
        graph: The recorded step that computes this one. It has graph.num_tokens tokens: those of the batch, then
            padding, which belongs to no request. None when the step is computed by launches of its own.
    """

    token_ids: Ints
    positions: Ints
    placeholders: Placeholders
    query_start_locs: Ints
    seq_lens: Ints
    groups: tuple[GroupBatch, ...]
    row_indices: Ints
    sampling: SamplingBatch
    scores: ScoreBatch | None = None
    token_types: Ints | None = None
    pooling: PoolBatch | None = None
    adapters: Ints | None = None
    table_rows: Ints | None = None
    inputs: InputBatch | None = None
    next_ids: Ints | None = None
    pictures: tuple[PictureTokens, ...] = ()
    is_mutual: bool = False
    graph: GraphKey | None = None

    @property
    def lookups(self) -> Ints:
        """(num_tokens,) or (3, num_tokens) where the model looks up each position."""
        return self.positions if self.table_rows is None else self.table_rows

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.token_ids)

    @property
    def num_requests(self) -> int:
        """Requests that take part in this step."""
        return len(self.seq_lens)


NO_TOKEN_ID = -1
"""The id of a masked row for which bans and mask together leave no id."""

# (256, 8): what a byte of eight ids adds to their logits. On a CPU adding is several times as fast as masked_fill.
_OCTETS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BIASES = torch.from_numpy(np.where(_OCTETS, np.float32(0), np.float32(-np.inf)))


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks over the vocabulary, for rows of a step where only some ids may be sampled.

    torch's sampler applies them to logits by the methods here; Weft's own kernels read the bits.

    Attributes:
        rows: (n,) int64, ascending.
        bits: (n, vocab_size / 32, rounded up); the lowest bit is the lowest id, 1 allows.
    """

    rows: Ints
    bits: Bits

    def apply(self, logits: Tensor) -> None:
        """Ban the ids that are not allowed in logits (num_rows, vocab_size), in place."""
        device = logits.device
        octets = to_device(self.bits.view(np.uint8).reshape(-1), device).to(torch.int32)
        biases = torch.index_select(_BIASES.to(device), 0, octets).view(len(self.rows), -1)[:, : logits.shape[1]]
        if len(self.rows) == len(logits):
            logits.add_(biases)
        else:
            logits.index_add_(0, to_device(self.rows, device), biases)

    def are_empty(self, logits: Tensor) -> Tensor:
        """Whether the edited logits of each masked row leave no id, (n,) bool."""
        return logits.index_select(0, to_device(self.rows, logits.device)).amax(-1) == float("-inf")

    def withdraw(self, token_ids: Tensor, is_empty: Tensor) -> None:
        """Replace the sampled ids of the empty masked rows by NO_TOKEN_ID, in place."""
        rows = to_device(self.rows, token_ids.device)
        token_ids.index_copy_(0, rows, token_ids[rows].masked_fill(is_empty, NO_TOKEN_ID))


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the batch, as plain values of the host.

    Attributes:
        token_ids: Sampled id of every row, or NO_TOKEN_ID.
        logprobs: By row, for rows that report them.
        scores: One entry per scored prompt position.
        pooled: (num_runs, hidden_size) sums of hidden states; None when nobody wants any.
        device_s: Seconds from the start of the step to its end, by the device's own clock; None on the CPU. Outside of
            CUDA graphs this includes waiting for the next launch within the step.
        drafts_device_s: The same for the steps of a draft model since the previous result.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]
    scores: list[TokenLogprobs]
    device_s: float | None = None
    drafts_device_s: float = 0.0
    pooled: Floats | None = None


# What an executor keeps of a step until it is collected.
Launched = TypeVar("Launched")


class Executor(Protocol[Launched]):
    """Computes batches, in this process or by ranks in others. Steps run in the order of their launches.

    `weft.engine.runner.model_runner.ModelRunner` is the executor of one rank. An executor whose ranks are elsewhere
    waits for the masks before it sends them.
    """

    def launch(self, batch: Batch, masks: "Future[RowMasks] | None") -> Launched:
        """Queue a step. masks are for the rows that follow a grammar; sampling waits for them."""
        ...

    def collect(self, launched: Launched) -> StepResult:
        """Wait for the results of a step."""
        ...

    def prepare(self) -> bool:
        """Spend idle time on work that steps would wait for; returns whether more is left."""
        ...

    def load_adapter(self, slot: int, folder: Path) -> "Future[str]":
        """Read an adapter in the background and put it in a slot, from 1, that no request of a step in flight uses.

        The future brings the `Adapter.content` that was read. It fails with ModelError if this is not one of the model.
        """
        ...

    def check_device(self) -> None:
        """Wait for the device; raises if it has failed."""
        ...
