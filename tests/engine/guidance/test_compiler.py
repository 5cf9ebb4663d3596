import json
import threading

import llguidance
import pytest

from tests.engine.guidance.demo import json_grammar
from weft.engine.guidance.compiler import MAX_GRAMMAR_BYTES, GrammarCompiler, InvalidGrammarError
from weft.engine.guidance.matcher import Forcing

TIMEOUT_S = 120.0
"""Of what is waited for; only a failure takes so long."""


@pytest.fixture(scope="module")
def compiler(vocabulary: llguidance.LLTokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: Forcing(vocabulary))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no start rule found"),
        ("start: foo", 'unknown name: "foo"'),
        ("start: /a(/", "unclosed group"),
        ("{", "Expecting property name"),
        ('{"grammars":[]}', "out of range"),
        ('{"grammars":[{"json_schema":{"type":"strin"}}]}', "Invalid type: strin"),
        (json_grammar({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (json_grammar({"not": {"type": "string"}}), 'Unimplemented keys: ["not"]'),
        (json_grammar({"type": "string", "minLength": 5, "maxLength": 2}), "Unsatisfiable schema"),
        (json_grammar({"$ref": "#/$defs/none"}), "$defs"),
        ("start: " + "(" * 500 + '"a"' + ")" * 500, "too deeply nested"),
        ('start: a "x"\na[max_tokens=5]: /[a-z]*/', "not supported with max_tokens"),
        ('start: a "x"\na[stop="x"]: /[a-z]*/', "not supported with max_tokens=... or stop="),
    ],
)
def test_a_fault_is_one_line_that_names_it(compiler: GrammarCompiler, text: str, fault: str) -> None:
    error = compiler.compile(text).exception(timeout=TIMEOUT_S)
    assert isinstance(error, InvalidGrammarError)
    assert str(error).startswith("the grammar cannot be used: ")
    assert fault in str(error)
    assert "\n" not in str(error)
    assert "<" not in str(error)
    assert len(str(error)) < 400


def test_a_text_that_is_too_long_is_refused_at_once(compiler: GrammarCompiler) -> None:
    longest = "start: /a/ //" + "é" * ((MAX_GRAMMAR_BYTES - 13) // 2)
    assert compiler.compile(longest).exception(timeout=TIMEOUT_S) is None
    with pytest.raises(InvalidGrammarError, match="a grammar may have at most 131072 bytes, got 131073"):
        compiler.compile("x" * (MAX_GRAMMAR_BYTES + 1))


def test_a_text_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.compile('start: "once"')
    assert compiler.compile('start: "once"') is first
    assert compiler.compile("start: wrong") is compiler.compile("start: wrong")


def test_the_cache_forgets_what_was_used_longest_ago(vocabulary: llguidance.LLTokenizer) -> None:
    compiler = GrammarCompiler(lambda: Forcing(vocabulary))
    first, second = compiler.compile('start: "0"'), compiler.compile('start: "1"')
    for i in range(2, 64):
        compiler.compile(f'start: "{i}"')
    assert compiler.compile('start: "0"') is first
    compiler.compile('start: "64"')
    assert compiler.compile('start: "0"') is first
    assert compiler.compile('start: "1"') is not second


def test_the_cache_is_bounded_by_the_length_of_the_texts_too(vocabulary: llguidance.LLTokenizer) -> None:
    compiler = GrammarCompiler(lambda: Forcing(vocabulary))
    texts = [f"start: /a/ // {i}" + "x" * 100_000 for i in range(11)]
    futures = [compiler.compile(text) for text in texts]
    assert [compiler.compile(text) is future for text, future in zip(texts[1:], futures[1:], strict=True)] == [
        True
    ] * 10
    assert compiler.compile(texts[0]) is not futures[0]


def test_the_vocabulary_is_read_once_and_at_first_use(vocabulary: llguidance.LLTokenizer) -> None:
    threads: list[str] = []

    def load() -> Forcing:
        threads.append(threading.current_thread().name)
        return Forcing(vocabulary)

    compiler = GrammarCompiler(load)
    assert threads == []
    futures = [compiler.compile(f'start: "{i}"') for i in range(10)]
    assert [future.exception(timeout=TIMEOUT_S) for future in futures] == [None] * 10
    assert len(threads) == 1
    assert threads[0].startswith("grammar")


def test_a_chain_as_long_as_a_text_can_be_does_not_overflow_the_stack(compiler: GrammarCompiler) -> None:
    """Some 5,000 rules that refer to one another ended the process."""
    rules = "start:a0\n" + "\n".join(f"a{i}:a{i + 1}" for i in range(10_000)) + '\na10000:"x"'
    defs = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(2_500)}
    schema = json.dumps({"$ref": "#/$defs/d0", "$defs": {**defs, "d2500": {"type": "string"}}})
    for text in (rules, json_grammar(json.loads(schema))):
        assert 80_000 < len(text) <= MAX_GRAMMAR_BYTES
        assert compiler.compile(text).exception(timeout=TIMEOUT_S) is None


def test_gbnf_is_translated(compiler: GrammarCompiler, vocabulary: llguidance.LLTokenizer) -> None:
    text = json.dumps({"grammars": [{"gbnf": 'root ::= answer "!"\nanswer ::= "yes" | "no"'}]})
    matcher = compiler.compile(text).result(timeout=TIMEOUT_S).copy()
    for token_id in vocabulary.tokenize_str("no!"):
        assert matcher.accept(token_id) is None
    assert matcher.is_stopped


def test_gbnf_that_is_none_is_a_fault(compiler: GrammarCompiler) -> None:
    error = compiler.compile(json.dumps({"grammars": [{"gbnf": "root ::= ("}]})).exception(timeout=TIMEOUT_S)
    assert isinstance(error, InvalidGrammarError)
    assert str(error).startswith("the grammar cannot be used: ")


def test_a_tokenizer_that_cannot_be_used_is_tried_once() -> None:
    """Each grammar of a checkpoint without a usable vocabulary read its files anew, for seconds."""
    tries = []

    def load() -> Forcing:
        tries.append(1)
        raise InvalidGrammarError("no vocabulary")

    compiler = GrammarCompiler(load)
    for text in ("start: /a/", "start: /b/"):
        assert str(compiler.compile(text).exception(timeout=TIMEOUT_S)) == "no vocabulary"
    assert len(tries) == 1


def test_what_was_cancelled_is_compiled_again(vocabulary: llguidance.LLTokenizer) -> None:
    busy, gate = threading.Event(), threading.Event()

    def load() -> Forcing:
        busy.set()
        assert gate.wait(TIMEOUT_S)
        return Forcing(vocabulary)

    compiler = GrammarCompiler(load)
    for letter in "defg":  # all threads
        compiler.compile(f"start: /{letter}/")
    assert busy.wait(TIMEOUT_S)
    waiting = compiler.compile("start: /c/")
    assert waiting.cancel()
    again = compiler.compile("start: /c/")
    gate.set()
    assert again.exception(timeout=TIMEOUT_S) is None
