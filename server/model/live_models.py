"""The served models by every name that they have now: aliases may move, and adapters come and go."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from typing_extensions import override

from weft.server.model.served_model import ServedModel
from weft.server.models.fleet import Fleet


class LiveModels(Mapping[str, ServedModel]):
    """Each model under its own name, followed by the aliases that mean it now; then the adapters."""

    def __init__(self, models: Mapping[str, ServedModel], fleet: Fleet) -> None:
        """Serve these models, by their own names."""
        self._models = models
        self._fleet = fleet

    @override
    def __getitem__(self, name: str) -> ServedModel:
        state = self._fleet.read()
        if (served := state.adapters.get(name)) is not None:
            return replace(self._models[served.model], adapter=served.adapter)
        return self._models[state.aliases.get(name, name)]

    @override
    def __iter__(self) -> Iterator[str]:
        state = self._fleet.read()
        for name in self._models:
            yield name
            yield from (alias for alias, meant in state.aliases.items() if meant == name)
        yield from state.adapters

    @override
    def __len__(self) -> int:
        state = self._fleet.read()
        return len(self._models) + len(state.aliases) + len(state.adapters)
