"""Formats of calls against the chat templates of published models: in the folder that WEFT_REAL names, if it is there.

Every template that shows tools has a format that reads its own calls back, however they are cut, and whose grammar
writes them; or the server says that the format is not known.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from tests.server.formats.feeding import feed_all
from tests.tokenizers_for_tests import byte_level
from weft.server.formats import detection as trial
from weft.server.formats.detection import NOT_SHOWN, UNKNOWN, OutputFormats, choose_formats
from weft.server.formats.parser import AnswerRules, ToolFormat
from weft.server.text.chat_template import ChatTemplate, ChatTemplateError

pytestmark = pytest.mark.real

FOLDER = Path(os.environ.get("WEFT_REAL") or Path.home() / ".cache" / "weft-real")
_SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
_WRITES_OTHERWISE = {
    "command_r_plus": "each argument on a line of its own",
    "gigachat3": "a second call behind the first, not in a turn of its own",
    "deepseek_v3": "without the end of all calls behind a single one",
}
"""Formats whose grammar writes calls in another way than some templates."""


def _templates() -> Iterator[tuple[str, str]]:
    for path in sorted(FOLDER.rglob("*.jinja")):
        yield path.stem, path.read_text(encoding="utf-8")
    for path in sorted(FOLDER.rglob("tokenizer_config.json")):
        template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, str):
            yield path.parent.name, template


def _compiles(template: str) -> bool:
    try:
        return bool(ChatTemplate(template))
    except ChatTemplateError:
        return False


TEMPLATES = {name: template for name, template in _templates() if _compiles(template)}
_each = pytest.mark.parametrize("name", TEMPLATES or [pytest.param("", marks=pytest.mark.skip("no real templates"))])


def _render(name: str) -> trial.Render:
    template = ChatTemplate(TEMPLATES[name])

    def render(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, object]], has_prompt: bool) -> str:
        return template.render(messages, has_prompt, {**_SPECIAL, **({"tools": list(tools)} if tools else {})})

    return render


def _found(name: str) -> tuple[OutputFormats, list[trial.WrittenCalls]]:
    formats = choose_formats(TEMPLATES[name], "auto", lambda _: None, _render(name))
    ids = formats.tools.call_id if formats.tools else ""
    return formats, trial.written_calls(_render(name), ids or trial.PLAIN_ID)


@_each
def test_calls_are_read_as_the_template_writes_them(name: str) -> None:
    formats, written = _found(name)
    if formats.tools is None:
        shows = trial.shows_tools(_render(name)) or written
        assert formats.no_tools == (UNKNOWN if shows else NOT_SHOWN)
        return
    tools = formats.tools
    for calls in written:
        assert calls.leftover(tools) is not None
        whole = feed_all(tools.parser(trial.TOOLS), [calls.text])
        assert feed_all(tools.parser(trial.TOOLS), calls.text) == whole
        for cut in range(1, len(calls.text)):
            assert feed_all(tools.parser(trial.TOOLS), [calls.text[:cut], calls.text[cut:]]) == whole


@_each
def test_grammars_write_what_the_template_writes(name: str) -> None:
    formats, written = _found(name)
    if formats.tools is None or formats.tools.name in _WRITES_OTHERWISE:
        pytest.skip("no format, or one that writes otherwise")
    backend = byte_level(("<|endoftext|>", "<|im_end|>"))
    markers = [marker for marker in formats.tools.markers if "\n" not in marker]
    backend.add_tokens([AddedToken(marker, special=True) for marker in markers])
    matcher = _matcher(formats.tools, backend)
    for calls in written:
        assert any(_writes(matcher, backend, calls, start) for start in range(len(calls.text))), calls.text


def _matcher(tools: ToolFormat, backend: Tokenizer) -> LLMatcher:
    def mark(marker: str) -> str:
        token_id = backend.token_to_id(marker)
        return json.dumps(marker) if token_id is None else f"<[{token_id}]>"

    rules = tools.grammar(AnswerRules(trial.TOOLS, mark, is_required=True))
    vocabulary = LLTokenizer(backend.to_str(), eos_token=backend.token_to_id("<|im_end|>"))
    made = LLMatcher(vocabulary, f"start: answer\n{rules}")
    assert not made.is_error(), made.get_error()
    return made


def _writes(matcher: LLMatcher, backend: Tokenizer, calls: trial.WrittenCalls, start: int) -> bool:
    """Whether the text from `start` on begins with all calls, as a model may write them and end there."""
    ids = backend.encode(calls.text[start:], add_special_tokens=False).ids
    fresh = matcher.deep_copy()
    size = 0
    for at, token_id in enumerate(ids, 1):
        if fresh.try_consume_tokens([token_id]) != 1:
            break
        size = at if fresh.is_accepting() else size
    written = backend.decode(ids[:size], skip_special_tokens=False)
    return all(tool.name in written for tool in trial.TOOLS[: calls.called])
