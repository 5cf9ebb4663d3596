"""What a chat template may take: whatever it does, one line says what was too much, and the process is as before."""

import resource
import threading
import time
from pathlib import Path

import pytest

from weft.server.text import template_sandbox
from weft.server.text.chat_template import ChatTemplate, ChatTemplateError
from weft.server.text.template_files import TemplateFileError, read_text
from weft.server.text.template_sandbox import TemplateLimitError, limits

MESSAGES = [{"role": "user", "content": "Hi there"}]
GROWING = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = ns.x %s ns.x %%}{%% endfor %%}{{ ns.x }}"
)

TOO_MUCH_MEMORY = {
    "product": "{{ 'x' * 10000000000 }}",
    "product of a list": "{% set x = [1] * 10000000000 %}{{ x | length }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '%10000000000d' | format(1) }}",
    "method": "{{ '{:>10000000000}'.format(1) }}",
    "center": "{{ 'x' | center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10000000000) }}",
    "indent of JSON": "{{ {'a': 1} | tojson(indent=10000000000) }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list }}",
    "replace": "{{ ('x' * 1000000).replace('x', 'y' * 100000) }}",
    "concatenation": GROWING % ("'x'", "~"),
    "sum": GROWING % ("'x'", "+"),
    "sum of lists": GROWING % ("[1]", "+"),
    "output": "{% set x = 'x' * 50000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "output of a macro": "{% macro f() %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endmacro %}"
    "{% set x = 'x' * 50000000 %}{{ f() }}",
}
TOO_MUCH_TIME = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "silent loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(9999) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(x) %}{% if x %}{{ f(x - 1) }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loops": "{% for i in [[60]] recursive %}{% if i[0] %}{{ loop([[i[0] - 1], [i[0] - 1]]) }}{% endif %}"
    "{% endfor %}",
}
TOO_LARGE_NUMBERS = {
    "power": "{{ 2 ** 999999999 }}",
    "power of powers": "{{ 9 ** (9 ** 9) }}",
    "product of integers": GROWING % ("3", "*"),
    "a power that nobody asks for": "{% set x = 7 ** 99999 %}",
}
REFUSED = {
    "parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "lists": "{{ " + "[" * 50_000 + "]" * 50_000 + " }}",
    "blocks": "{% if a %}" * 5000 + "{% endif %}" * 5000,
    "negations": "{{ " + "not " * 50_000 + "1 }}",
    "sums": "{{ 1" + "+1" * 50_000 + " }}",
    "length": "x" * (template_sandbox.MAX_SOURCE_CHARS + 1),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_BYTES", 128 << 20)
    monkeypatch.setattr("weft.server.text.template_forms.PROBE_SECONDS", 0.2)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        *((source, "it takes more than 128 MiB of memory") for source in TOO_MUCH_MEMORY.values()),
        *((source, r"it takes more than 0\.2 s") for source in TOO_MUCH_TIME.values()),
        *((source, "its numbers have more than 4096 bits") for source in TOO_LARGE_NUMBERS.values()),
    ],
    ids=[*TOO_MUCH_MEMORY, *TOO_MUCH_TIME, *TOO_LARGE_NUMBERS],
)
def test_what_takes_too_much_is_one_line(source: str, fault: str) -> None:
    """A template took 10.5 GB at the start, and another never ended."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    template = ChatTemplate(source)
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(ChatTemplateError, match=fault) as caught:
            template.render(MESSAGES, True, {})
        assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 0.1  # it was not tried again
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compiled_is_one_line(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template is invalid: ") as caught:
        ChatTemplate(source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 2 ** 10 }} {{ 2 ** -1 }} {{ 2.0 ** 3 }} {{ 7 * 6 }} {{ 1.5 * 2 }}", "1024 0.5 8.0 42 3.0"),
        ("{{ '-' * 20 }}{{ [1, 2] * 2 }}", "-" * 20 + "[1, 2, 1, 2]"),
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% else %}none{% endfor %}", "1Hi there"),
        ("{% for i in range(3) if i %}{{ i }}{% if i == 1 %}{% continue %}{% endif %}x{% endfor %}", "12x"),
        ("{% for i in [[1, [2]]] recursive %}{{ i if i is number else loop(i) }}{% endfor %}", "12"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) ~ 'a' ~ 2 }}", "<1>a2"),
        ("{% macro f(obj, context) %}{{ obj }}{{ context }}{% endmacro %}{{ f(obj=1, context=3) }}", "13"),
    ],
)
def test_what_is_usual_is_as_it_was(source: str, text: str) -> None:
    assert ChatTemplate(source).render(MESSAGES, True, {}, repairs=False) == text


def test_one_slow_conversation_does_not_spoil_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% for m in messages %}{% for c in m.content * 5000 %}{% endfor %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source)
    assert template.render(MESSAGES, True, {}) == "Hi there"
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    with pytest.raises(ChatTemplateError, match=r"cannot render these messages: it takes more than 0\.2 s"):
        template.render([{"role": "user", "content": "long" * 1000}] * 9, True, {})
    assert template.render(MESSAGES, True, {}) == "Hi there"


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_CHARS", 100)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert template.render(MESSAGES * 12, True, {})
    with pytest.raises(ChatTemplateError, match="it writes more than 100 characters"):
        template.render(MESSAGES * 13, True, {})


def test_what_a_template_says_is_cut() -> None:
    with pytest.raises(ChatTemplateError, match="refuses these messages: xxx") as caught:
        ChatTemplate("{{ raise_exception('x' * 1000000) }}").render(MESSAGES, True, {})
    assert len(str(caught.value)) < 1100


def test_threads_have_limits_of_their_own() -> None:
    """The limit of the process is as before once the last of them is done."""
    before, inside, may_end, told = resource.getrlimit(resource.RLIMIT_DATA), threading.Event(), threading.Event(), []

    def work() -> None:
        with limits(60):
            inside.set()
            assert may_end.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(30)
    try:
        with limits():
            bytearray(1 << 33)
    except TemplateLimitError as error:
        told.append(str(error))
    may_end.set()
    thread.join()
    assert told == ["it takes more than 128 MiB of memory"]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_time_in_which_a_thread_had_no_core_does_not_count() -> None:
    with limits(0.05):
        time.sleep(0.1)
        template_sandbox.environment().tick  # noqa: B018 (which raises)


def test_a_file_is_bounded_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.server.text.template_files.MAX_FILE_BYTES", 10)
    (tmp_path / "chat_template.jinja").write_text("x" * 11)
    with pytest.raises(TemplateFileError, match="must have at most 10 bytes, has 11"):
        read_text(tmp_path / "chat_template.jinja")
