"""The served models by every name that they have now: aliases may move from one to another while the server runs."""

from collections.abc import Iterator, Mapping

from typing_extensions import override

from weft.server.model.fleet import Fleet
from weft.server.model.served_model import ServedModel


class LiveModels(Mapping[str, ServedModel]):
    """Each model under its own name, followed by the aliases that mean it now."""

    def __init__(self, models: Mapping[str, ServedModel], fleet: Fleet) -> None:
        """Serve these models, by their own names."""
        self._models = models
        self._fleet = fleet

    @override
    def __getitem__(self, name: str) -> ServedModel:
        return self._models[self._fleet.read().aliases.get(name, name)]

    @override
    def __iter__(self) -> Iterator[str]:
        aliases = self._fleet.read().aliases
        for name in self._models:
            yield name
            yield from (alias for alias, meant in aliases.items() if meant == name)

    @override
    def __len__(self) -> int:
        return len(self._models) + len(self._fleet.read().aliases)
