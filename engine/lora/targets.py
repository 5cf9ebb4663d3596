"""Finds the matrices of a model that the tensors of an adapter are for.

`Targets` has the projections of a model by the names that adapters call them. `projections` says where their outputs
lie in a matrix of this process, and `rank_bytes` how much memory an adapter of all matrices takes.

`replaced` and `SavedSite` are for `modules_to_save` of PEFT: embeddings and output heads that adapters have in place of
the model's. `split` is for its `target_parameters`: adapters of parameters that hold all experts of a layer.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from weft.engine.describe.config import ModelConfig
from weft.engine.describe.specs import DecoderSpec
from weft.engine.lora.peft_folder import AdapterConfig
from weft.engine.weights.reader import ExpertsRef, Run, Share, WeightRef
from weft.engine.weights.tensor_files import CheckpointSource, shortened, text_name
from weft.engine.wire.errors import ModelError


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
        here = {name for name, _, _ in _all_projections(part)}
        embeddings = {ref.names[0] for ref in (whole.embedding, whole.positions, whole.layer_embedding) if ref}
        self._targets = {
            name: Target(name, size, inputs, name in embeddings, name in here)
            for name, size, inputs in _all_projections(whole)
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

    def is_own_weight(self, name: str, values: Tensor) -> bool:
        """Whether a projection of the checkpoint has these values."""
        try:
            checkpoint = CheckpointSource(self._folder, torch.device("cpu"))
            stored = f"{name}.weight" if checkpoint.has(f"{name}.weight") else f"{self.tied_to}.weight"
            own = checkpoint.read(stored)
            return torch.equal(own, values.to(own.dtype))  # in float32 both would take gigabytes
        except ModelError:
            return False


def _all_projections(spec: DecoderSpec) -> Iterator[tuple[str, int, int]]:
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
    places: Tensor
    rows: Tensor
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


_ROWS_AT_ONCE = 128
"""More rows of logits would take memory that no plan has counted."""


def replaced(path: Path, weights: Mapping[str, Tensor], config: AdapterConfig, targets: Targets) -> dict[str, Tensor]:
    """Which matrices of the model an adapter has others for, as in PEFT.

    Of two that are tied, a copy that `modules_to_save` made replaces one, unless `ensure_weight_tying` is set. What was
    saved without it, since the vocabulary had changed, replaces both.

    Args:
        path: Of the adapter's tensors.
        weights: The whole matrices there, by module.

    Returns:
        Them by name in the model.

    Raises:
        ModelError: A matrix that is to be replaced is not there.
    """
    for name in config.modules_to_save:  # one that no module has is ignored
        if any(end.endswith(name) for end in targets.ends) and not any(module.endswith(name) for module in weights):
            raise ModelError(f"{path}: tensor weight of {name}, which is in modules_to_save, is missing")
    found = {target.name: weights[module] for module in weights if (target := targets.find(module))}
    for module, weight in weights.items():
        is_apart = not config.ensures_tying and any(module.endswith(name) for name in config.modules_to_save)
        if targets.tied_to is not None and not is_apart:
            found = dict.fromkeys((targets.tied_to, targets.head), weight) | found
    return found


_EXPERTS_MODULE = re.compile(r"(.*\blayers\.\d+\.).*\bexperts(?:\.base_layer)*")


def is_stacked(module: str) -> bool:
    """Whether a module holds the experts of a layer."""
    return _EXPERTS_MODULE.fullmatch(module) is not None


def split(
    module: str, parts: Mapping[str, Tensor], experts: Sequence[ExpertsRef], config: AdapterConfig
) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
    """Split an adapter of all experts by expert.

    For a parameter of E experts lora_A is (E * rank, inputs), expert by expert, and lora_B (outputs, rank * E), in
    which the expert changes fastest. The gate and up projections are one parameter, gate first. The name of the
    parameter is not stored: the shapes tell which one it is.

    Args:
        parts: lora_A and lora_B.
        experts: Of the whole model.

    Returns:
        For each projection of each expert its name in the model, that of the parameter, and its lora_A and lora_B.

    Raises:
        ModelError: The model has no experts of these shapes there, one by one in its checkpoint.
    """
    match = _EXPERTS_MODULE.fullmatch(module)
    layer = re.search(r"\blayers\.\d+\.", match[1]) if match else None
    shapes = {kind: list(values.shape) for kind, values in parts.items()}
    for ref in experts:
        matrix, count = ref.matrix, ref.num_experts
        is_there = layer and layer[0] in matrix.names[0] and all("{}" in name for name in matrix.names)
        parameter = f"{module.replace('.base_layer', '')}.{'gate_up_proj' if len(matrix.names) > 1 else 'down_proj'}"
        rank = config.rank_of(parameter)
        expected = {"lora_A": [count * rank, matrix.in_features], "lora_B": [sum(matrix.sizes), rank * count]}
        if is_there and shapes == expected:
            a = parts["lora_A"].view(count, rank, -1)
            b = parts["lora_B"].view(-1, rank, count).permute(2, 0, 1)
            sizes = list(matrix.sizes) if len(matrix.names) > 1 else [sum(matrix.sizes)]
            for number in range(count):
                for name, rows in zip(matrix.names, b[number].split_with_sizes(sizes), strict=True):
                    yield name.format(number), parameter, {"lora_A": a[number], "lora_B": rows}
            return
    raise ModelError(f"tensors of {module} have shapes {shapes}, which no experts of the model have there")
