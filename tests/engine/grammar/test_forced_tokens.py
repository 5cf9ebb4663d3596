import llguidance

from engine.grammar.matcher import GrammarMatcher
from engine.speculation.drafters import ForcedTokens
from tests.engine.requests_for_tests import request


def test_only_forced_ids_are_proposed(vocabulary: llguidance.LLTokenizer) -> None:
    asked = request([1, 2])
    assert ForcedTokens().propose(asked) == []
    asked.grammar = GrammarMatcher(llguidance.LLMatcher(vocabulary, 'start: "{\\"name\\":" /[0-9]{3}/'))
    forced = ForcedTokens().propose(asked)
    assert len(forced) > 1
    assert [asked.grammar.accept(token_id) for token_id in forced] == [None] * len(forced)
    while vocabulary.decode_str(forced) != '{"name":':
        token_id = vocabulary.tokenize_str('{"name":'[len(vocabulary.decode_str(forced)) :])[0]
        assert asked.grammar.accept(token_id) is None
        forced.append(token_id)
    assert ForcedTokens().propose(asked) == []
