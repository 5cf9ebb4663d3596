import llguidance

from tests.engine.guidance.demo import matcher
from tests.engine.requests_for_tests import request
from weft.engine.drafts import MAX_NUM_DRAFTS
from weft.engine.loop.output_collector import ForcedTokens, certain_token_ids
from weft.engine.request import Request
from weft.engine.wire.messages import ReasoningBudget


def ask(vocabulary: llguidance.LLTokenizer, grammar: str, **options: object) -> Request:
    asked = request([1, 2], **options)  # type: ignore[arg-type]
    asked.grammar = matcher(vocabulary, grammar)
    return asked


def test_only_forced_ids_are_certain(vocabulary: llguidance.LLTokenizer) -> None:
    assert certain_token_ids(request([1, 2])) == []
    asked = ask(vocabulary, 'start: "{\\"name\\":" /[0-9]{3}/')
    assert asked.grammar is not None
    forced = certain_token_ids(asked)
    assert len(forced) > 1
    assert [asked.grammar.accept(token_id) for token_id in forced] == [None] * len(forced)
    while vocabulary.decode_str(forced) != '{"name":':
        token_id = vocabulary.tokenize_str('{"name":'[len(vocabulary.decode_str(forced)) :])[0]
        assert asked.grammar.accept(token_id) is None
        forced.append(token_id)
    assert certain_token_ids(asked) == []


def test_what_may_end_the_output_is_not_certain(vocabulary: llguidance.LLTokenizer) -> None:
    """With min_tokens such an id may be forbidden."""
    grammar = 'start: "0123456789"'
    forced = certain_token_ids(ask(vocabulary, grammar))
    assert len(set(forced)) > 5
    assert certain_token_ids(ask(vocabulary, grammar, stop_token_ids=(forced[5],))) == forced[:5]


def test_where_an_id_may_be_forbidden_or_is_asked_about_it_is_a_draft(vocabulary: llguidance.LLTokenizer) -> None:
    """Drafts were as long as what was forced: 1,684 rows of logits in one step."""
    options: list[dict[str, object]] = [
        {"logprobs": 0},
        {"bad_words_token_ids": ((9,),)},
        {"allowed_token_ids": tuple(range(1000))},
        {"reasoning_budget": ReasoningBudget(5, 9)},
    ]
    grammar = f'start: "{"once upon a time " * 20}"'
    certain = certain_token_ids(ask(vocabulary, grammar, max_tokens=100))
    assert len(certain) == 100
    for option in options:
        asked = ask(vocabulary, grammar, max_tokens=100, **option)
        assert certain_token_ids(asked) == []
        assert ForcedTokens().propose(asked) == certain[:MAX_NUM_DRAFTS]
    assert ForcedTokens().propose(ask(vocabulary, grammar)) == []


def test_behind_the_end_of_reasoning_its_budget_forbids_nothing(vocabulary: llguidance.LLTokenizer) -> None:
    asked = ask(vocabulary, 'start: "0123456789"', reasoning_budget=ReasoningBudget(5, 9))
    asked.append(9)
    assert len(certain_token_ids(asked)) > 5
