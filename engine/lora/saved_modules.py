"""Embeddings and output heads that adapters have in place of the model's: `modules_to_save` of PEFT.

What the model's own matrix makes of the rows of such an adapter is replaced. Rows of other adapters keep their bits.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from typing_extensions import override

from weft.engine.layers.parts import Layer
from weft.engine.lora.peft_folder import AdapterConfig
from weft.engine.lora.step_rows import Delta, Site, StepRows
from weft.engine.lora.targets import Targets
from weft.engine.shared.errors import ModelError

MakeHead = Callable[[torch.Tensor], Layer]
"""Makes a head of a weight (num_ids, hidden_size), in a thread beside the steps: hidden states -> float32 logits."""


_ROWS_AT_ONCE = 128
"""More rows of logits would take memory that no plan has counted."""


class SavedLimits(NamedTuple):
    """The slots that have room for whole matrices, from 1 on, and what makes heads of them."""

    num_slots: int
    make_head: MakeHead


class SavedSite(Site):
    """The site of a matrix that adapters may have a whole one for."""

    def __init__(self, inner: Site, make: Callable[[torch.Tensor], Layer], num_bytes: int) -> None:
        """Begin without adapters; num_bytes: what whole matrices in all slots that may have one will take."""
        self.num_reserved_bytes = inner.num_reserved_bytes + num_bytes
        self._inner, self._make = inner, make
        self._layers: dict[int, Layer] = {}

    @override
    def put(self, slot: int, deltas: Sequence[Delta]) -> None:
        self._layers.pop(slot, None)  # before the next one comes: there is no room for both
        self._inner.put(slot, deltas)

    def save(self, slot: int, weight: torch.Tensor) -> None:
        """Have a matrix of this weight in place of the model's, after `put`."""
        self._layers[slot] = self._make(weight)

    @override
    def add(self, outputs: torch.Tensor, inputs: torch.Tensor, rows: StepRows) -> None:
        for slot, places in rows.by_slot:
            if layer := self._layers.get(slot):
                for some in torch.split(places, _ROWS_AT_ONCE):
                    outputs[some] = layer(inputs[some]).to(outputs.dtype)
        self._inner.add(outputs, inputs, rows)


def table(weight: torch.Tensor) -> Layer:
    """An embedding of a weight (num_ids, hidden_size)."""
    return partial(F.embedding, weight=weight)


def replaced(
    path: Path, weights: Mapping[str, torch.Tensor], config: AdapterConfig, targets: Targets
) -> dict[str, torch.Tensor]:
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
