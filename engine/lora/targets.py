"""The matrices of a model by the names that adapters call them, and the memory that adapters of all of them take."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from weft.engine.describe.specs import DecoderSpec
from weft.engine.models.config import ModelConfig
from weft.engine.shared.errors import ModelError
from weft.engine.weights.refs import ExpertsRef, Run, Share, WeightRef
from weft.engine.weights.tensor_files import CheckpointSource, shortened, text_name


@dataclass(frozen=True, slots=True)
class Target:
    """A projection of the model, the whole one.

    Attributes:
        name: In the model's checkpoint.
        is_embedding: Whether it is (ids, hidden_size) and looked up by ids.
        is_here: Whether this process computes a part of it, and not another pipeline stage.
    """

    name: str
    out_features: int
    in_features: int
    is_embedding: bool
    is_here: bool

    def shape(self, kind: str, rank: int) -> list[int] | None:
        """That of an adapter's tensor of this kind; None if there is no such tensor of this projection."""
        shapes = {
            "base_layer": [self.out_features, self.in_features],
            "weight": [self.out_features, self.in_features],
            "lora_A": None if self.is_embedding else [rank, self.in_features],
            "lora_B": None if self.is_embedding else [self.out_features, rank],
            "lora_embedding_A": [rank, self.out_features] if self.is_embedding else None,
            "lora_embedding_B": [self.in_features, rank] if self.is_embedding else None,
        }
        return shapes[kind]


class Targets:
    """All projections of a model."""

    def __init__(self, config: ModelConfig, folder: Path, whole: DecoderSpec, part: DecoderSpec) -> None:
        """List them.

        Args:
            folder: Of the model.
            whole: The whole model.
            part: What this process computes.
        """
        self.embedding, self.head = config.switches.names.embedding, config.switches.names.head
        self.ends = {self.embedding, self.head}
        self.experts = [weight for weight in whole.weights if isinstance(weight, ExpertsRef)]
        self._folder = folder
        here = {name for name, _, _ in _projections(part)}
        embeddings = {ref.names[0] for ref in (whole.embedding, whole.positions, whole.layer_embedding) if ref}
        self._targets = {
            name: Target(name, size, inputs, name in embeddings, name in here)
            for name, size, inputs in _projections(whole)
        }
        self.tied_to: str | None = None
        """The embedding whose matrix is also the output head; None if the head has its own."""
        if whole.head is None and whole.embedding is not None:
            self.tied_to = whole.embedding.names[0]
            head = replace(self._targets[self.tied_to], name=self.head, is_embedding=False)
            self._targets[self.head] = head
        self._short = {shortened(name): name for name in self._targets}
        self._short["lm_head"] = self.head  # as transformers 5 says

    def find(self, module: str) -> Target | None:
        """The projection that a module of transformers holds; None if the model has no such projection."""
        name = text_name(module) or module
        return self._targets.get(name) or self._targets.get(self._short.get(name, ""))

    def is_own_weight(self, name: str, values: torch.Tensor) -> bool:
        """Whether a projection of the checkpoint has these values."""
        try:
            checkpoint = CheckpointSource(self._folder, torch.device("cpu"))
            stored = f"{name}.weight" if checkpoint.has(f"{name}.weight") else f"{self.tied_to}.weight"
            own = checkpoint.read(stored)
            return torch.equal(own, values.to(own.dtype))  # in float32 both would take gigabytes
        except ModelError:
            return False


def _projections(spec: DecoderSpec) -> Iterator[tuple[str, int, int]]:
    """Name, outputs and inputs of every projection."""
    for weight in spec.weights:
        ref = weight.matrix if isinstance(weight, ExpertsRef) else weight
        if isinstance(ref, WeightRef):
            numbers = range(weight.num_experts if isinstance(weight, ExpertsRef) else 1)
            for name, size in zip(ref.names, ref.sizes if len(ref.names) > 1 else (ref.out_features,), strict=False):
                yield from ((name.format(number), size, ref.in_features) for number in numbers)


class Projection(NamedTuple):
    """One projection of a stacked matrix, as far as this process has it.

    Attributes:
        places, rows: Its outputs in the matrix, in order, and for each the row of the projection in the checkpoint.
        runs, run_sizes: The first of neighbouring outputs, and how many these are.
    """

    name: str
    places: torch.Tensor
    rows: torch.Tensor
    runs: list[int]
    run_sizes: list[int]


def projections(ref: WeightRef, names: tuple[str, ...]) -> Iterator[Projection]:
    """The projections of these names of a matrix that have outputs here."""
    if ref.share:
        stored = ref.stored_rows(ref.share)
    else:
        stored = ref.order.indices(ref.out_features) if ref.order else torch.arange(ref.out_features)
    sizes, start = (ref.share or ref).sizes, 0
    for name, size in zip(names, sizes if len(names) > 1 else (sum(sizes),), strict=True):
        (places,) = torch.where((stored >= start) & (stored < start + size))
        if len(places):
            firsts = torch.cat((places[:1], places[1:][places.diff() != 1]))
            ends = torch.cat((places[:-1][places.diff() != 1], places[-1:])) + 1
            yield Projection(name, places, stored[places] - start, firsts.tolist(), (ends - firsts).tolist())
        start += size


def turned_embedding(ref: WeightRef) -> WeightRef:
    """An embedding (ids, hidden_size) as the matrix (hidden_size, ids), whose inputs would be ones and zeros."""
    share = None
    if ref.share:
        hidden = (ref.in_features,)
        share = Share(hidden, (Run(0, ref.in_features),), sum(ref.share.sizes), ref.share.runs[0].first)
    return WeightRef(ref.names, (ref.in_features,), ref.out_features, share=share)


def rank_values(ref: WeightRef) -> int:
    """Values of an adapter of all projections of a matrix, for each rank that it has."""
    return ref.in_features * len(ref.names) + ref.out_features


def rank_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Bytes of an adapter of all matrices of a decoder that take one, for each rank that it has."""
    values = sum(rank_values(weight) for weight in spec.weights if isinstance(weight, WeightRef))
    values += sum(ref.num_experts * rank_values(ref.matrix) for ref in spec.weights if isinstance(ref, ExpertsRef))
    if spec.head is None and spec.embedding is not None:
        values += rank_values(spec.embedding)
    return values * dtype.itemsize


def saved_bytes(ref: WeightRef, dtype: torch.dtype) -> int:
    """Bytes of a matrix that an adapter has in place of the one of the model."""
    return ref.out_features * ref.in_features * dtype.itemsize
