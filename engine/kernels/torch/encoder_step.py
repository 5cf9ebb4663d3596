"""Takes a step of a model with an encoder apart: the inputs, the decoder's tokens, and what these see of the inputs.

To the attention backend each part is a step of its own over the same blocks. The decoder's tokens of a request are a
request of their own, whose first block is the one behind the input. What they see of the input is another request of
one token for each, at the end of the input. So no backend knows of encoders.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from weft.engine.batch import Batch, GroupBatch, Ints
from weft.engine.device import to_device
from weft.engine.kernels.torch.sdpa import TextsStep
from weft.engine.layers.block import AttentionBackend
from weft.engine.layers.encoder_decoder import CrossStep, EncoderStep, InputCaches

_NO_COPIES = np.zeros((0, 2), np.int64)


class InputCross(CrossStep):
    """Keys and values of the inputs, by two steps of a backend."""

    def __init__(self, writing: CrossStep | None, reading: CrossStep) -> None:
        """Take the step of the inputs' tokens, None without any, and that of the decoder's tokens."""
        self._writing, self._reading = writing, reading

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `CrossStep`."""
        assert self._writing is not None
        self._writing.write(layer, keys, values)

    def read(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """See `CrossStep`."""
        return self._reading.read(layer, queries)


@dataclass(frozen=True, slots=True)
class EncoderCaches:
    """Begins the steps of a model with an encoder."""

    block_size: int
    device: torch.device

    def begin(self, backend: AttentionBackend, batch: Batch) -> InputCaches:
        """The caches of a step whose requests begin with inputs."""
        assert batch.inputs is not None
        lengths, num_slots = batch.inputs.lengths, batch.inputs.num_slots
        request_of = np.repeat(np.arange(batch.num_requests), np.diff(batch.query_start_locs))
        own = np.flatnonzero(batch.positions >= num_slots[request_of])
        read = np.flatnonzero(batch.positions < lengths[request_of])
        requests, positions = request_of[own], batch.positions[own] - num_slots[request_of[own]]
        places = np.zeros(batch.num_tokens, np.int64)
        places[own] = np.arange(len(own))
        attention = backend.begin(
            replace(
                batch,
                token_ids=batch.token_ids[own],
                positions=positions,
                query_start_locs=_starts(np.bincount(requests, minlength=batch.num_requests)),
                seq_lens=batch.seq_lens - num_slots,
                groups=tuple(_behind(group, num_slots // self.block_size, own) for group in batch.groups),
            )
        )
        begun = np.unique(request_of[read])
        starts = _starts(lengths[begun])
        writing = _step(backend, batch, read, starts, lengths[begun], begun) if len(read) else None
        ends = np.maximum(lengths[requests], 1)
        reading = _step(backend, batch, own, np.arange(len(own) + 1), ends, requests)
        arrays = (read, batch.positions[read], own, positions, places)
        inputs, input_positions, own_tokens, own_positions, own_places = (to_device(a, self.device) for a in arrays)
        of_inputs = [np.flatnonzero(requests == request) for request in begun] if batch.pooling is not None else []
        encoder = EncoderStep(
            inputs,
            input_positions,
            partial(TextsStep, starts[:-1], lengths[begun], self.device),
            own_tokens,
            own_positions,
            own_places,
            InputCross(writing, reading),
            batch.inputs.sounds,
            tuple(to_device(rows, self.device) for rows in of_inputs),
        )
        return InputCaches(attention, encoder=encoder)


def _starts(lengths: Ints) -> Ints:
    return np.append(0, np.cumsum(lengths))


def _behind(group: GroupBatch, num_blocks: Ints, tokens: Ints) -> GroupBatch:
    """A group without the first num_blocks (num_requests,) of each request, and with these tokens alone."""
    tables = group.block_tables
    columns = np.minimum(np.arange(tables.shape[1]) + num_blocks[:, None], tables.shape[1] - 1)
    shifted = np.take_along_axis(tables, columns, 1)[:, : max(tables.shape[1] - int(num_blocks.min()), 1)]
    return GroupBatch(group.slot_mapping[tokens], shifted, group.block_copies)


def _step(
    backend: AttentionBackend, batch: Batch, tokens: Ints, starts: Ints, seq_lens: Ints, requests: Ints
) -> CrossStep:
    """The step of `some_tokens`, which are all of inputs, or none."""
    step = backend.begin(replace(some_tokens(batch, tokens, starts, seq_lens, requests), inputs=None))
    assert isinstance(step, CrossStep)
    return step


def some_tokens(batch: Batch, tokens: Ints, starts: Ints, seq_lens: Ints, requests: Ints) -> Batch:
    """A batch of some tokens of another one, which copies no blocks, for that one does.

    Args:
        tokens: (n,) their indices.
        starts, seq_lens: Of the requests that they belong to here.
        requests: The request of the other batch that each of these is a part of.
    """
    groups = tuple(
        GroupBatch(group.slot_mapping[tokens], group.block_tables[requests], _NO_COPIES) for group in batch.groups
    )
    return replace(
        batch,
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        query_start_locs=starts,
        seq_lens=seq_lens,
        groups=groups,
    )
