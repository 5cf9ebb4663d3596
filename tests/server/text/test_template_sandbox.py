"""What a chat template may take: whatever it does, one line says what was too much, and the server is as before."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from weft.server.text import chat_template, template_process
from weft.server.text.chat_template import ChatTemplate, ChatTemplateError
from weft.server.text.template_files import TemplateFileError, read_text
from weft.server.text.template_process import TemplateProcesses

MESSAGES = [{"role": "user", "content": "Hi there"}]
MEMORY, SECONDS = 64, 0.3
GROWING = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = ns.x %s ns.x %%}{%% endfor %%}{{ ns.x }}"
)
NESTED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
TWO_NESTED = NESTED + NESTED.replace("ns", "other")

TOO_MUCH_MEMORY = {
    "product": "{{ 'x' * 10000000000 }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "method": "{{ '{:>10000000000}'.format(1) }}",
    "indent of JSON": "{{ {'a': 1} | tojson(indent=10000000000) }}",
    "batch": "{{ [1] | batch(10000000000, 'x') | list }}",
    "replace": "{{ ('x' * 1000000).replace('x', 'y' * 100000) }}",
    "sum": GROWING % ("'x'", "+"),
    "sum of lists": GROWING % ("[1]", "+"),
    "output": "{% set x = 'x' * 50000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "output of a macro": "{% macro f() %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endmacro %}"
    "{% set x = 'x' * 50000000 %}{{ f() }}",
}
TOO_MUCH_TIME = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(x) %}{% if x %}{{ f(x - 1) }}{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a comparison": TWO_NESTED + "{{ ns.x == other.x }}",
    "a power": "{{ 3 ** 99999999 }}",
    "words of a product": "{{ lipsum(99999999) }}",
    "sorting": "{% for i in range(9999) %}{% set x = range(99999) | map('string') | sort %}{% endfor %}",
}
SLOW = (
    "{% for m in messages[2:] %}{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}{% endfor %}x"
)
"""For more than two messages."""
REFUSED = {
    "parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "lists": "{{ " + "[" * 50_000 + "]" * 50_000 + " }}",
    "blocks": "{% if a %}" * 5000 + "{% endif %}" * 5000,
    "negations": "{{ " + "not " * 50_000 + "1 }}",
    "sums": "{{ 1" + "+1" * 50_000 + " }}",
    "length": "x" * (chat_template.MAX_SOURCE_CHARS + 1),
}


@pytest.fixture(scope="module")
def runner() -> Iterator[TemplateProcesses]:
    runner = TemplateProcesses(MEMORY << 20)
    yield runner
    runner.close()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", SECONDS)
    monkeypatch.setattr(chat_template, "COMPILE_SECONDS", SECONDS)
    monkeypatch.setattr(chat_template, "PROBE_SECONDS", SECONDS)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        *((source, f"it takes (more than {MEMORY} MiB of|too much) memory") for source in TOO_MUCH_MEMORY.values()),
        *((source, rf"it takes more than {SECONDS} s") for source in TOO_MUCH_TIME.values()),
    ],
    ids=[*TOO_MUCH_MEMORY, *TOO_MUCH_TIME],
)
def test_what_takes_too_much_is_one_line(
    source: str, fault: str, runner: TemplateProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template took 10.5 GB at the start, and others never ended: filters in C knew no time."""
    if "memory" in fault:  # A busy machine needs more than the short time to fill it.
        for each in ("MAX_SECONDS", "COMPILE_SECONDS", "PROBE_SECONDS"):
            monkeypatch.setattr(chat_template, each, 20.0)
    with pytest.raises(ChatTemplateError, match=fault) as caught:
        ChatTemplate(source, runner).render(MESSAGES, True, {})
    assert "\n" not in str(caught.value)


def test_what_failed_for_short_messages_is_not_tried_again(runner: TemplateProcesses) -> None:
    template = ChatTemplate(TOO_MUCH_TIME["loops"], runner)
    for _ in range(2):
        began = time.thread_time()
        with pytest.raises(
            ChatTemplateError, match=r"is not used: .* to render two short messages: use /v1/completions"
        ):
            template.render(MESSAGES, True, {})
    assert time.thread_time() - began < 0.01
    assert ChatTemplate("{{ messages[0].content }}", runner).render(MESSAGES, True, {}) == "Hi there"


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compiled_is_one_line(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "COMPILE_SECONDS", 10.0)
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
        ("{{ tools[0] }} {{ n }} {{ x is none }} {{ f }}", f"{2**70} {-(2**64)} True 0.1"),
        ("{{ s }}{{ messages[0].content }}", "\ufffd\U0001f600\0Hi there"),
    ],
)
def test_what_is_usual_is_as_it_was(source: str, text: str) -> None:
    values = {"tools": [2**70], "n": -(2**64), "x": None, "f": 0.1, "s": "\ufffd\U0001f600\0"}
    assert ChatTemplate(source).render(MESSAGES, True, values, repairs=False) == text


def test_one_slow_conversation_does_not_spoil_a_template(runner: TemplateProcesses) -> None:
    source = "{% for m in messages %}{% for c in m.content * 5000 %}{% endfor %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, runner)
    assert template.render(MESSAGES, True, {}) == "Hi there"
    with pytest.raises(ChatTemplateError, match=rf"cannot render these messages: it takes more than {SECONDS} s"):
        template.render([{"role": "user", "content": "long" * 1000}] * 9, True, {})
    assert template.render(MESSAGES, True, {}) == "Hi there"


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 10.0)
    source = "{% for m in messages if m.content|length > 99 %}{{ m.content * 150000 }}{% endfor %}"
    with pytest.raises(ChatTemplateError, match="it writes more than 134217728 characters"):
        ChatTemplate(source).render([{"role": "user", "content": "x" * 1000}], True, {}, repairs=False)


@pytest.mark.parametrize(
    "written", ["'\\ud800'", "'a\\udfffb' * 3", "m.content[:1] ~ '\\ud83d'", "messages | tojson ~ '\\udc00'"]
)
def test_half_a_surrogate_is_refused(written: str) -> None:
    """The tokenizer failed with it: a 500 for every chat."""
    template = ChatTemplate("{% for m in messages %}{{ m.content ~ " + written + " }}{% endfor %}")
    with pytest.raises(ChatTemplateError, match="writes half a surrogate"):
        template.render(MESSAGES, True, {})


def test_what_a_template_says_is_cut() -> None:
    with pytest.raises(ChatTemplateError, match="refuses these messages: xxx") as caught:
        ChatTemplate("{{ raise_exception('x' * 1000000) }}").render(MESSAGES, True, {})
    assert len(str(caught.value)) < 1100


def test_messages_that_nest_too_deeply_are_refused() -> None:
    value: object = 1
    for _ in range(5000):
        value = [value]
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        ChatTemplate("x").render(MESSAGES, True, {"x": value})


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_a_process_that_dies_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is idle, nobody notices; when it renders, that chat alone is refused."""
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 20.0)  # it dies before
    before, runner = set(_children()), TemplateProcesses()
    template = ChatTemplate(SLOW, runner)
    [pid] = set(_children()) - before
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert template.render(MESSAGES, True, {}) == "x"
    [pid] = set(_children()) - before - {pid}
    threading.Timer(0.1, os.kill, (pid, signal.SIGSEGV)).start()
    with pytest.raises(ChatTemplateError, match=r"its process died of it \(exit status -11\)"):
        template.render(MESSAGES * 3, True, {})
    assert template.render(MESSAGES, True, {}) == "x"
    runner.close()
    assert set(_children()) == before


def test_a_call_that_is_broken_off_leaves_nothing_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TemplateProcesses()
    template = ChatTemplate("{{ messages[0].content }}", runner)
    template.render(MESSAGES, True, {})
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(template_process, "read_exactly", Mock(side_effect=KeyboardInterrupt))
        template.render(MESSAGES, True, {})
    assert template.render([{"role": "user", "content": "other"}], True, {}) == "other"
    runner.close()


def test_nobody_waits_for_a_template_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 10.0)
    before, runner = set(_children()), TemplateProcesses()
    slow = ChatTemplate(SLOW, runner)
    quick = ChatTemplate("{{ messages[0].content }}", runner)
    assert slow.render(MESSAGES, True, {}) == "x"

    def wait() -> None:
        with pytest.raises(ChatTemplateError, match="its process died of it"):
            slow.render(MESSAGES * 3, True, {})

    thread = threading.Thread(target=wait)
    thread.start()
    assert quick.render(MESSAGES, True, {}) == "Hi there"
    assert thread.is_alive()
    for pid in set(_children()) - before:
        os.kill(pid, signal.SIGKILL)
    thread.join()
    runner.close()


def test_a_process_sees_no_keys_and_leaves_this_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_API_KEY", "secret")
    before, runner = set(_children()), TemplateProcesses()
    limits = [resource.getrlimit(each) for each in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    ChatTemplate("x", runner).render(MESSAGES, True, {})
    [pid] = set(_children()) - before
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert not any(f"/{name}/" in maps for name in ("torch", "transformers", "tokenizers", "pydantic_core"))
    assert [resource.getrlimit(each) for each in (resource.RLIMIT_DATA, resource.RLIMIT_AS)] == limits
    runner.close()


def test_a_limit_of_the_server_itself_holds_for_its_processes() -> None:
    """A process could not start where the limit was below its own."""
    code = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (800 << 20, 900 << 20))
from weft.server.text.chat_template import ChatTemplate
print(ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "Hi"}], True, {}))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("Hi\n", 0), done.stderr


def test_what_a_template_says_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no\\nINFO \\x1b[31mforged') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    messages = [{"role": "system", "content": "a"}, *MESSAGES]
    assert "Hi there" in ChatTemplate(source).render(messages, True, {})
    [record] = caplog.records
    assert record.getMessage().isprintable() and "no INFO [31mforged" in record.getMessage()


def test_a_file_is_bounded_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.server.text.template_files.MAX_FILE_BYTES", 10)
    (tmp_path / "chat_template.jinja").write_text("x" * 11)
    with pytest.raises(TemplateFileError, match="must have at most 10 bytes, has 11"):
        read_text(tmp_path / "chat_template.jinja")
