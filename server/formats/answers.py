"""Rules of a grammar that several formats share: how calls follow content, and members of an object in their order."""

from collections.abc import Sequence

from weft.server.formats import grammar as lark
from weft.server.formats.parser import AnswerRules, Mark


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
