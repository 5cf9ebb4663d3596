"""Turns a Lark grammar into one regular expression, where it is regular: no rule uses itself.

The input of a custom tool is a string inside JSON. There a pattern can be enforced and a grammar cannot. What agents
declare, such as the format of a patch, is regular.
"""

import ast
import re
from collections.abc import Iterator

MAX_REGEX_CHARS = 1 << 16
"""Longest expression that is made; each use of a rule repeats it."""
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
}
_STATEMENT = re.compile(r"(?m)^(?=[ \t]*(?:%|[?!]?[A-Za-z_]\w*(?:\.-?\d+)?[ \t]*:))")
_RULE = re.compile(r"\s*[?!]?([A-Za-z_]\w*)(?:\.-?\d+)?[ \t]*:(.*)", re.S)
_IMPORT = re.compile(r"\s*%import\s+common\s*\.\s*(\w+)(?:\s*->\s*(\w+))?\s*")
_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*"i?|/(?!/)(?:[^/\\\n]|\\.)+/[a-z]*)|//[^\n]*|#[^\n]*')
_TOKEN = re.compile(
    r'\s*(?:(?P<text>"(?:[^"\\\n]|\\.)*")(?P<any_case>i?)|/(?P<regex>(?:[^/\\\n]|\\.)+)/(?P<flags>[a-z]*)'
    r"|(?P<alias>->\s*\w+)|(?P<low>~\s*\d+)(?:\s*\.\.\s*(?P<high>\d+))?|(?P<mark>[?*+|()\[\]])|(?P<name>[A-Za-z_]\w*))"
)


class NotRegularError(ValueError):
    """The grammar is not regular, is too large, or has parts that are not read here."""


def lark_regex(grammar: str) -> str:
    """A regular expression for the texts that follow the grammar from its rule `start`.

    Raises:
        NotRegularError: There is none that is made here.
    """
    if len(grammar) > MAX_REGEX_CHARS:
        raise NotRegularError(f"it has more than {MAX_REGEX_CHARS} characters")
    rules: dict[str, str] = {}
    made: dict[str, str] = {}
    for statement in _STATEMENT.split(_COMMENT.sub(lambda found: found[1] or "", grammar)):
        if found := _IMPORT.fullmatch(statement):
            if found[1] not in _COMMON:
                raise NotRegularError(f"common.{found[1]} is not known")
            made[found[2] or found[1]] = _COMMON[found[1]]
        elif found := _RULE.fullmatch(statement):
            rules[found[1]] = found[2]
        elif statement.strip():
            raise NotRegularError(f"{statement.strip()[:40]!r} cannot be read")
    try:
        return _Expander(rules, made).rule("start")
    except RecursionError:
        raise NotRegularError("it is nested too deeply") from None


class _Expander:
    """Writes rules as expressions. Only its own methods mutate it: it keeps the rules that are made or begun."""

    def __init__(self, rules: dict[str, str], made: dict[str, str]) -> None:
        self._rules = rules
        self._made = made
        self._begun: set[str] = set()

    def rule(self, name: str) -> str:
        """The expression of a rule or a terminal."""
        if name in self._made:
            return self._made[name]
        if name in self._begun:
            raise NotRegularError(f"the rule {name[:40]!r} uses itself")
        if name not in self._rules:
            raise NotRegularError(f"there is no rule {name[:40]!r}")
        self._begun.add(name)
        tokens = _tokens(self._rules[name])
        self._made[name] = self._group(tokens, "")
        return self._made[name]

    def _group(self, tokens: Iterator[re.Match[str]], end: str) -> str:
        """The alternatives up to the closing bracket `end`, or to the last token."""
        done, parts, size = "", list[str](), 0
        for token in tokens:
            mark = token["mark"]
            if mark and mark in ")]":
                if mark != end:
                    break
                return f"(?:{done}{''.join(parts)})" + ("?" if end == "]" else "")
            if mark == "|":
                done, parts = f"{done}{''.join(parts)}|", []
                size += 1
            elif (mark and mark in "?*+") or token["low"]:
                if not parts:
                    raise NotRegularError("a repetition follows nothing")
                parts[-1] = f"(?:{parts[-1]}){mark or _count(token)}"
            elif not token["alias"]:
                parts.append(self._item(token, tokens))
                size += len(parts[-1])
            if size > MAX_REGEX_CHARS:
                raise NotRegularError(f"it takes more than {MAX_REGEX_CHARS} characters")
        else:
            if not end:
                return f"(?:{done}{''.join(parts)})"
        raise NotRegularError("its brackets do not match")

    def _item(self, token: re.Match[str], tokens: Iterator[re.Match[str]]) -> str:
        if token["mark"]:
            return self._group(tokens, {"(": ")", "[": "]"}[token["mark"]])
        if token["name"]:
            return self.rule(token["name"])
        if token["regex"]:
            if set(token["flags"]) - set("ims"):
                raise NotRegularError(f"the flags {token['flags']!r} are not known")
            return f"(?{token['flags']}:{token['regex'].replace(chr(92) + '/', '/')})"
        try:
            text = str(ast.literal_eval(token["text"]))
        except (ValueError, SyntaxError):
            raise NotRegularError(f"{token['text'][:40]} is no text") from None
        escaped = re.sub(r"([\\^$.|?*+()\[\]{}])", r"\\\1", text).replace("\n", r"\n")
        return f"(?i:{escaped})" if token["any_case"] else f"(?:{escaped})"


def _tokens(expression: str) -> Iterator[re.Match[str]]:
    at, end = 0, len(expression.rstrip())
    while at < end:
        token = _TOKEN.match(expression, at)
        if token is None:
            raise NotRegularError(f"{expression[at : at + 40].strip()!r} cannot be read")
        at = token.end()
        yield token


def _count(token: re.Match[str]) -> str:
    low = int(token["low"].removeprefix("~"))
    return f"{{{low},{int(token['high'])}}}" if token["high"] else f"{{{low}}}"
