"""Rules of a grammar that several formats share: how calls follow content, members in order, values of a schema."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from weft.server.formats import grammar as lark
from weft.server.formats.grammar import resolve, types_of, values_of
from weft.server.formats.parser import AnswerRules, Mark, Tool


def answer_rules(
    wanted: AnswerRules, opening: str, markers: Sequence[str], others: Sequence[str] = (), lead: str = ""
) -> str:
    """Define the rule `answer`: content, or what may stand before calls, `opening` and the rule `calls`.

    Args:
        opening: What begins calls. It may hold markers and other text.
        markers: As in `ToolFormat`.
        others: More texts that do not occur in content.
        lead: What may stand before an opening that no content precedes, in Lark.
    """
    spelled = lark.spell(opening, markers, wanted.mark)
    if wanted.is_required or wanted.content is not None:
        start = "" if wanted.is_required else f"{wanted.content} | "
        return f"answer: {start}{lead}{spelled} calls\n"
    return f"answer: PLAIN | before calls\nPLAIN: {lark.text_without((opening, *others))}\n" + text_up_to(
        "before", opening, markers, wanted.mark, others
    )


def text_up_to(
    rule: str, end: str, markers: Sequence[str], mark: Mark, without: Sequence[str] = (), within: str | None = None
) -> str:
    """Define a rule as `grammar.text_up_to` does, for an end that may hold several markers and other text.

    The first marker that is a token ends the text. What stands before it in `end` belongs to the lexeme of the text.
    """
    tokens = [marker for marker in markers if marker in end and not mark(marker).startswith('"')]
    token = min(tokens, key=lambda marker: (end.index(marker), -len(marker)), default=end)
    head, _, rest = end.partition(token)
    if head:
        within = f"(({within or '/(?s:.*)/'}) {lark.literal(head)})"
    if not rest:
        return lark.text_up_to(rule, token, mark, without, within=within)
    begun = lark.text_up_to(f"{rule}_begun", token, mark, (end, *without), within=within)
    return f"{rule}: {rule}_begun {lark.spell(rest, markers, mark)}\n{begun}"


def member_rules(rule: str, members: Sequence[tuple[str, bool]], separator: str, end: str) -> str:
    """Define a rule for members in this order, of which some may be missing, and what ends them.

    Args:
        rule: Its name, with which the names of more rules begin.
        members: Each in Lark, and whether it is required.
        separator: Between two members, in Lark.
        end: In Lark.
    """
    lines: list[str] = []
    firsts: list[str] = []
    for i, (member, is_required) in enumerate(members):
        firsts.append(f"{rule}_{i} {rule}_from_{i + 1}")
        lines.append(f"{rule}_{i}: {member}\n")
        lines.append(f"{rule}_from_{i}: ({separator} {rule}_{i}){'' if is_required else '?'} {rule}_from_{i + 1}\n")
    lines.append(f"{rule}_from_{len(members)}: {end}\n")
    num_firsts = next((i + 1 for i, (_, is_required) in enumerate(members) if is_required), None)
    firsts = firsts[:num_firsts] if num_firsts else [*firsts, end]
    return f"{rule}: {' | '.join(firsts)}\n" + "".join(lines)


class ValueRules(ABC):
    """Writes the rules of one tool's values, for formats that write values in a notation of their own.

    A schema that is met again, also inside itself, has its rule already.

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
