"""All caches of a model behind one object: each kind of spec has a backend that serves the groups of that kind.

The runner begins a step here, and the blocks of the model reach their caches, by index, through what that returns.
"""

import dataclasses
from dataclasses import dataclass

from weft.engine.kernels.torch.states import StateCache, StateStep
from weft.engine.layers.attention import AttentionBackend, AttentionStep
from weft.engine.step.batch import Batch


@dataclass(frozen=True, slots=True)
class StepCaches:
    """The caches of one step, by kind; states is None in a model that keeps none."""

    attention: AttentionStep
    states: StateStep | None = None


@dataclass(frozen=True, slots=True)
class Caches:
    """The backends of a model; states is None where no layer keeps one."""

    attention: AttentionBackend
    states: StateCache | None = None

    @property
    def name(self) -> str:
        """Of the attention, for people."""
        return self.attention.name

    @property
    def supports_graphs(self) -> bool:
        """See `AttentionBackend`."""
        return self.states is None and self.attention.supports_graphs

    @property
    def may_repeat(self) -> bool:
        """Whether a step that failed may be launched again: what it has written, it writes again."""
        return self.states is None

    def prepare(self) -> bool:
        """See `AttentionBackend`."""
        return self.attention.prepare()

    def begin(self, batch: Batch) -> StepCaches:
        """Do the copies that the batch asks for, and prepare what the layers of each kind share."""
        if self.states is None:
            return StepCaches(self.attention.begin(batch))
        paged = tuple(group for index, group in enumerate(batch.groups) if index not in self.states.groups)
        return StepCaches(self.attention.begin(dataclasses.replace(batch, groups=paged)), self.states.begin(batch))
