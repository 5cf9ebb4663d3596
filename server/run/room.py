"""Who must leave, so that another model has room. Knows bytes and names, no process and no clock."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes of a device while it is loaded."""

    device: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """What there is.

    Attributes:
        budgets: Bytes of each device.
        needs: By model. One that is not planned is not counted, and always fits.
    """

    budgets: Mapping[str, int]
    needs: Mapping[str, Need]

    def num_bytes(self, name: str) -> int | None:
        """What a model takes; None: it is not planned."""
        return self.needs[name].num_bytes if name in self.needs else None

    def device(self, name: str) -> str | None:
        """Where a model is loaded; None: it is not planned."""
        return self.needs[name].device if name in self.needs else None

    def lack(self, name: str, there: Collection[str]) -> int:
        """Bytes that are wanting for a model beside those that are there; 0 or less if it fits."""
        if (need := self.needs.get(name)) is None:
            return 0
        return need.num_bytes + self._taken(there, need.device) - self.budgets[need.device]

    def leavers(
        self, name: str, there: Collection[str], going: Collection[str], candidates: Sequence[str]
    ) -> Sequence[str] | None:
        """The first candidates that must leave besides those that are going; None if all together are too few.

        Args:
            there: All that are loaded, with those that are going.
            candidates: Those that may leave, in the order in which they should.
        """
        lack = self.lack(name, [other for other in there if other not in going])
        leavers: list[str] = []
        for candidate in candidates:
            if lack <= 0:
                break
            if freed := self._taken([candidate], self.needs[name].device):
                leavers.append(candidate)
                lack -= freed
        return leavers if lack <= 0 else None

    def _taken(self, names: Collection[str], device: str) -> int:
        needs = [self.needs[name] for name in names if name in self.needs]
        return sum(need.num_bytes for need in needs if need.device == device)
