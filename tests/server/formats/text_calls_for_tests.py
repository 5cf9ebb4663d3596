# ruff: noqa: RUF001 (the bars of Step)
"""Outputs in the formats whose calls are not JSON, written as the models' templates write them, and what they say."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tests.tokenizers_for_tests import byte_level
from weft.server.formats import xml_families
from weft.server.formats.harmony import HARMONY
from weft.server.formats.parser import AnswerRules, Kind, OutputParser, Piece, Tool, ToolFormat
from weft.server.formats.pythonic_calls import LFM2, OLMO3, PYTHONIC
from weft.server.formats.xml_families import GLM, MINIMAX_M2, QWEN3_CODER, SEED, STEP3

_DEMO = Path(__file__).parents[3] / "server" / "demo_model" / "tokenizer.json"

TOOLS = (
    Tool("ping", {"type": "object", "properties": {}}),
    Tool("get", {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}),
    Tool(
        "get_all",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "score": {"type": "number"},
                "exact": {"type": "boolean"},
                "unit": {"enum": ["km", "miles", 3]},
                "since": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "filter": {"$ref": "#/$defs/Filter"},
            },
            "required": ["query"],
            "$defs": {
                "Filter": {
                    "type": "object",
                    "properties": {"inner": {"$ref": "#/$defs/Filter"}, "name": {"type": "string"}},
                    "additionalProperties": False,
                }
            },
        },
    ),
)

Call = tuple[str, dict[str, Any]]
Said = list[tuple[Kind, str]]

_LOOKS_LIKE_MARKUP = [
    "</par",
    "<tool_call>",
    "</tool_call>",
    "<function=get>",
    "[get(",
    "<|call|>",
    "<|end|>",
    "\\u00e9",
    "'",
]
_TEXT = st.lists(
    st.text("ab<>/'\"\\\n\t é中😀{}[]=,():|", max_size=6) | st.sampled_from(_LOOKS_LIKE_MARKUP), max_size=4
)
_VALUE = _TEXT.map("".join)
_FILTER = st.recursive(
    st.fixed_dictionaries({}, optional={"name": _VALUE}),
    lambda inner: st.fixed_dictionaries({}, optional={"name": _VALUE, "inner": inner}),
    max_leaves=3,
)
_CALL = st.one_of(
    st.just(("ping", {})),
    st.tuples(st.just("get"), st.fixed_dictionaries({"key": _VALUE})),
    st.tuples(
        st.just("get_all"),
        st.fixed_dictionaries(
            {"query": _VALUE},
            optional={
                "limit": st.integers(-(10**9), 10**9),
                "score": st.floats(-1e6, 1e6, allow_subnormal=False).map(lambda x: round(x, 3)),
                "exact": st.booleans(),
                "unit": st.sampled_from(["km", "miles", 3]),
                "since": st.none() | st.integers(0, 9),
                "tags": st.lists(_VALUE, max_size=3),
                "filter": _FILTER,
            },
        ),
    ),
)
CALLS = st.lists(_CALL, min_size=1, max_size=3)
PROSE = st.text("ab \n<[|", max_size=8)


def write_qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_raw(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def write_glm_4_6(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n" for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def write_glm_4_7(calls: Sequence[Call]) -> str:
    return "".join(
        f"<tool_call>{name}"
        + "".join(f"<arg_key>{key}</arg_key><arg_value>{_raw(value)}</arg_value>" for key, value in arguments.items())
        + "</tool_call>"
        for name, arguments in calls
    )


def write_seed(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<seed:tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{_raw(value)}</parameter>\n" for key, value in arguments.items())
        + "</function>\n</seed:tool_call>"
        for name, arguments in calls
    )


def write_minimax_m2(calls: Sequence[Call]) -> str:
    written = (
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{_raw(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{''.join(written)}</minimax:tool_call>"


def write_step3(calls: Sequence[Call]) -> str:
    written = (
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">'
        + "".join(
            f'<steptml:parameter name="{key}">{_raw(value)}</steptml:parameter>' for key, value in arguments.items()
        )
        + "</steptml:invoke><｜tool_call_end｜>"
        for name, arguments in calls
    )
    return f"<｜tool_calls_begin｜>{''.join(written)}<｜tool_calls_end｜>"


def write_pythonic(calls: Sequence[Call], literal: Callable[[Any], str] = repr) -> str:
    written = (
        f"{name}({', '.join(f'{key}={literal(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(written)}]"


def write_llama_4(calls: Sequence[Call]) -> str:
    return f"<|python_start|>{write_pythonic(calls, json_literal)}<|python_end|>"


def write_lfm2(calls: Sequence[Call]) -> str:
    return f"<|tool_call_start|>{write_pythonic(calls, json_literal)}<|tool_call_end|>"


def write_olmo3(calls: Sequence[Call]) -> str:
    lines = "\n".join(write_pythonic([call], json_literal)[1:-1] for call in calls)
    return f"<function_calls>\n{lines}\n</function_calls>"


def write_harmony(calls: Sequence[Call]) -> str:
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"
        for name, arguments in calls
    ) + "<|call|>"  # fmt: skip


def write_gpt_oss_template(calls: Sequence[Call]) -> str:
    return "<|call|><|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{_json(arguments)}" for name, arguments in calls
    ) + "<|call|>"  # fmt: skip


def json_literal(value: Any) -> str:
    """A Python literal as the grammar writes it: containers and strings as in JSON."""
    return repr(value) if isinstance(value, bool) or value is None else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


@dataclass(frozen=True)
class Writer:
    """One way to write calls, and a text that always ends a value there ("" if there is none)."""

    format: ToolFormat
    write: Callable[[Sequence[Call]], str]
    ends_value: str = ""

    def can_write(self, calls: Sequence[Call]) -> bool:
        return not self.ends_value or self.ends_value not in _json(calls)


WRITERS = {
    "qwen3_coder": Writer(QWEN3_CODER, write_qwen3_coder, "</parameter>"),
    "glm_4_6": Writer(GLM, write_glm_4_6, "</arg_value>"),
    "glm_4_7": Writer(GLM, write_glm_4_7, "</arg_value>"),
    "seed": Writer(SEED, write_seed, "</parameter>"),
    "minimax_m2": Writer(MINIMAX_M2, write_minimax_m2, "</parameter>"),
    "step3": Writer(STEP3, write_step3, "</steptml:parameter>"),
    "lfm2": Writer(LFM2, write_lfm2),
    "olmo3": Writer(OLMO3, write_olmo3),
    "pythonic": Writer(PYTHONIC, write_pythonic),
    "llama_4": Writer(PYTHONIC, write_llama_4),
    "harmony": Writer(HARMONY, write_harmony),
    "gpt_oss_template": Writer(HARMONY, write_gpt_oss_template),
}


def said_by_calls(calls: Sequence[Call]) -> Said:
    return [said for name, arguments in calls for said in ((Kind.CALL, name), (Kind.ARGUMENTS, _json(arguments)))]


def parse(parser: OutputParser, pieces: Iterable[str]) -> Said:
    """Feed the pieces; return what they said, neighbours of a kind joined. Checks what holds for every answer."""
    told: list[Piece] = []
    for text in filter(None, pieces):
        told += _checked(parser.feed(text))
    return join(told + _checked(parser.finish()))


def _checked(pieces: list[Piece]) -> list[Piece]:
    assert all(piece.text for piece in pieces)
    assert all(first.kind is not second.kind for first, second in pairwise(pieces))
    return pieces


def join(pieces: Iterable[Piece]) -> Said:
    return [(kind, "".join(piece.text for piece in run)) for kind, run in groupby(pieces, key=lambda piece: piece.kind)]


@cache
def tokenizer(name: str) -> tuple[tokenizers.Tokenizer, LLTokenizer]:
    """The demo model's, which has none of the markers, or one that has all of them."""
    if name == "demo":
        backend = tokenizers.Tokenizer.from_file(str(_DEMO))
    else:
        backend = byte_level(("<|endoftext|>", "<|im_end|>", *HARMONY.markers, *PYTHONIC.markers, *LFM2.markers))
        markers = dict.fromkeys(marker for format in (*xml_families.ALL, OLMO3) for marker in format.markers)
        backend.add_tokens([tokenizers.AddedToken(marker, special=False) for marker in markers])
    return backend, LLTokenizer(backend.to_str(), eos_token=backend.token_to_id("<|im_end|>"))


@cache
def matcher(
    format: ToolFormat,
    vocabulary: str,
    content: str | None = None,
    is_required: bool = False,
    allows_many: bool = True,
    tools: tuple[str, ...] = tuple(tool.name for tool in TOOLS),
) -> LLMatcher:
    backend, vocabulary_of_matcher = tokenizer(vocabulary)

    def mark(marker: str) -> str:
        token_id = backend.token_to_id(marker)
        return json.dumps(marker) if token_id is None else f"<[{token_id}]>"

    rules = format.grammar(
        AnswerRules([tool for tool in TOOLS if tool.name in tools], mark, content, is_required, allows_many)
    )
    rules += f'{content}: %json {{"type": "boolean"}}\n' if content else ""
    made = LLMatcher(vocabulary_of_matcher, f"start: answer\n{rules}")
    assert not made.is_error(), made.get_error()
    return made


def accepts(format: ToolFormat, vocabulary: str, text: str, **options: Any) -> bool:
    """Whether the grammar lets a model write just this and end there."""
    made = matcher(format, vocabulary, **options).deep_copy()
    ids = tokenizer(vocabulary)[0].encode(text, add_special_tokens=False).ids
    return made.try_consume_tokens(ids) == len(ids) and made.is_accepting()
