"""Makes batches without requests, of token id 0, for measurements and warm-up at start-up."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from weft.engine.batch import Batch, GroupBatch, Ints, PenaltyBatch, Placeholders, SamplingBatch, ScoreBatch
from weft.engine.batch_inputs import InputBatch
from weft.engine.cache.specs import CacheSpec, StateSpec
from weft.engine.config import EngineConfig


def dummy_batch(
    num_tokens: int,
    specs: Sequence[CacheSpec],
    block_size: int,
    num_rows: int,
    max_model_len: int | None = None,
    *,
    num_cached: int = 0,
    capacity: int = 0,
) -> Batch:
    """Prompts of num_tokens zeros in all, of which the last num_rows are sampled greedily; block ids start at 1.

    Where there is an encoder, all but the last block of each is its input, up to the most that it reads. Sound is the
    longest one, or none where that is too long.

    Args:
        specs: One entry per cache group.
        max_model_len: Tokens of each prompt except the last, which may be shorter; None makes a single prompt.
        num_cached: Tokens of each prompt that an earlier step computed. Steps that go on need the same capacity.
        capacity: Tokens of each prompt that there are blocks for, at least those that it has.
    """
    longest = min(max_model_len or num_tokens, num_tokens)
    num_rows = min(num_rows, num_tokens)
    at = np.arange(num_tokens)
    requests, positions = np.divmod(at, longest)
    starts = np.arange(0, num_tokens, longest)
    positions += num_cached
    num_blocks = -(-max(capacity, num_cached + longest) // block_size)
    none = np.zeros(0, np.int64)
    no_copies = np.zeros((0, 2), np.int64)
    paged = GroupBatch(
        slot_mapping=(1 + requests * num_blocks) * block_size + positions,
        block_tables=1 + np.arange(len(starts) * num_blocks).reshape(-1, num_blocks),
        block_copies=no_copies,
    )
    lengths = np.diff(np.append(starts, num_tokens))
    longest_input = max((spec.num_input_tokens for spec in specs), default=0)
    num_slots = np.minimum(lengths - 1, longest_input + block_size - 1) // block_size * block_size
    num_samples = max((spec.num_input_samples for spec in specs), default=0)
    if num_samples:
        num_slots *= num_slots >= longest_input
    sounds = (np.zeros(num_samples, np.int16),) * np.count_nonzero(num_slots) if num_samples and not num_cached else ()
    inputs = InputBatch(np.minimum(num_slots, longest_input), num_slots, sounds) if longest_input else None
    states = GroupBatch(none, 1 + np.arange(len(starts))[:, None], no_copies)
    return Batch(
        token_ids=np.zeros(num_tokens, np.int64),
        positions=positions,
        placeholders=Placeholders(none, none),
        query_start_locs=np.append(starts, num_tokens),
        seq_lens=lengths + num_cached,
        groups=tuple(states if isinstance(spec, StateSpec) else paged for spec in specs),
        row_indices=at[-num_rows:],
        inputs=inputs,
        sampling=SamplingBatch(
            temperatures=np.zeros(num_rows, np.float32),
            top_ks=np.zeros(num_rows, np.int64),
            top_ps=np.ones(num_rows, np.float32),
            min_ps=np.zeros(num_rows, np.float32),
            uniforms=np.zeros(num_rows, np.float32),
            num_logprobs=np.full(num_rows, -1),
            bias_rows=none,
            bias_ids=none,
            bias_values=np.zeros(0, np.float32),
            allowed_rows=none,
            allowed_entries=none,
            allowed_ids=none,
        ),
    )


def largest_batch(config: EngineConfig, specs: Sequence[CacheSpec]) -> Batch:
    """The step that needs the most memory: all tokens, and filters and log-probabilities for the most rows.

    These rows need more memory than any layer. One prompt position is scored, which keeps the hidden states of all
    tokens. One row is penalised: this takes little memory, but its kernel must be compiled. No prompt is longer than
    the model's context, since there are no positions beyond it.
    """
    num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)
    batch = dummy_batch(num_tokens, specs, config.block_size, config.max_num_seqs, config.max_model_len)
    num_rows = len(batch.row_indices)
    first = np.zeros(1, np.int64)
    sampling = dataclasses.replace(
        batch.sampling,
        temperatures=np.ones(num_rows, np.float32),
        top_ks=np.full(num_rows, 50),
        top_ps=np.full(num_rows, 0.9, np.float32),
        min_ps=np.full(num_rows, 0.01, np.float32),
        num_logprobs=np.full(num_rows, 20),
        penalties=penalised(0, first, first),
    )
    return dataclasses.replace(batch, sampling=sampling, scores=ScoreBatch(first, first, np.full(1, 20)))


def penalised(row: int, ids: Ints, counts: Ints) -> PenaltyBatch:
    """Every penalty for one row, whose output has each of these ids so often."""
    one, none = np.ones(1, np.float32), np.zeros(0, np.int64)
    return PenaltyBatch(
        rows=np.array([row]),
        presence=one,
        frequency=one,
        repetition=1.5 * one,
        starts=np.array([0, len(ids)]),
        ids=ids,
        counts=counts,
        placeholders=Placeholders(none, none),
    )
