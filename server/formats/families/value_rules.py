"""Turns JSON schemas into rules of a grammar, for formats that write values in a notation of their own."""

from abc import ABC, abstractmethod
from typing import Any

from weft.server.formats.grammar import resolve, types_of, values_of
from weft.server.formats.parser import Mark, Tool


class ValueRules(ABC):
    """Writes the rules of one tool's values; a schema that is met again, also inside itself, has its rule already.

    Attributes:
        lines: The rules so far.
    """

    def __init__(self, tool: Tool, name: str, mark: Mark) -> None:
        """Begin the names of all rules with `name`."""
        self.lines: list[str] = []
        self._tool, self._name, self._mark = tool, name, mark
        self._known: dict[int, str] = {}

    def value(self, schema: Any) -> str:
        """The name of the rule for values of a schema."""
        schema = resolve(schema, self._tool.parameters)
        if (known := self._known.get(id(schema))) is not None and schema:
            return known
        rule = self._known[id(schema)] = f"{self._name}_{len(self._known)}"
        values, parts = values_of(schema), schema.get("anyOf") or schema.get("oneOf")
        if values is not None:
            options = [self._literal(value) for value in values]
        elif parts and "type" not in schema:
            options = [self.value(part) for part in parts]
        else:
            named = types_of(schema, self._tool.parameters)
            options = [self._of_type(name, schema, rule) for name in named] or ["anything"]
        self.lines.append(f"{rule}: {' | '.join(options)}\n")
        return rule

    @abstractmethod
    def _of_type(self, name: str, schema: dict[str, Any], rule: str) -> str:
        """The values of a JSON type, in Lark; more rules may be added, with names that begin with `rule`."""

    @abstractmethod
    def _literal(self, value: Any) -> str:
        """Exactly this value, in Lark."""
