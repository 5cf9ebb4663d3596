import codecs
import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft.engine.shared.messages import FinishReason, RequestOutput, TokenLogprobs, TokensOutput
from weft.server.generate.choice_stream import ChoiceStream, Delta, Part, TextOptions, Token
from weft.server.text.stop_strings import StopStrings

EOS = 300


class Bytes:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return "" if token_id >= 256 else self._decoder.decode(bytes([token_id]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def stream(stops: list[str] | None = None, **options: Any) -> ChoiceStream:
    matcher = StopStrings(stops, options.get("include_stop", False)) if stops else None
    return ChoiceStream(Bytes(), matcher, TextOptions(track_tokens=True, **options))


def output(
    ids: bytes | list[int], finish_reason: FinishReason | None = None, stop_token_id: int | None = None
) -> RequestOutput:
    logprobs = [TokenLogprobs(-float(token_id), [], []) for token_id in ids]
    return TokensOutput(0, 0, list(ids), finish_reason, stop_token_id, logprobs=logprobs)


def cut(
    ids: list[int], places: list[int], finish_reason: FinishReason, stop_token_id: int | None
) -> list[RequestOutput]:
    """One output per run of ids between places; the last one ends."""
    bounds = sorted({place % (len(ids) + 1) for place in places} | {0, len(ids)})
    outputs = [output(ids[a:b]) for a, b in itertools.pairwise(bounds)] or [output([])]
    outputs[-1].finish_reason, outputs[-1].stop_token_id = finish_reason, stop_token_id
    return outputs


def run(choice: ChoiceStream, outputs: list[RequestOutput]) -> list[Delta]:
    return [delta for delta in map(choice.feed, outputs) if delta is not None]


def ids_of(delta: Delta | None) -> list[int]:
    assert delta is not None
    return [token.token_id for token in delta.tokens]


def test_a_character_is_never_split_and_its_tokens_travel_with_it() -> None:
    choice = stream()
    first, second = "é".encode()
    assert choice.feed(output([ord("a")])) == Delta("a", [choice_token(ord("a"), 0)])
    assert choice.feed(output([first])) is None
    assert choice.feed(output([second])) == Delta("é", [choice_token(first, 1), choice_token(second, 1)])


def choice_token(token_id: int, start: int) -> Token:
    return Token(token_id, start, TokenLogprobs(-float(token_id), [], []))


def test_text_that_may_become_a_stop_string_waits_with_its_tokens() -> None:
    choice = stream(["STOP"])
    delta = choice.feed(output(b"aST"))
    assert delta is not None and delta.text == "a" and ids_of(delta) == list(b"a")
    delta = choice.feed(output(b"x"))
    assert delta is not None and delta.text == "STx" and ids_of(delta) == list(b"STx")


def test_match_cuts_the_text_marks_cut_tokens_and_counts_up_to_the_match() -> None:
    choice = stream(["ST"])
    delta = choice.feed(output(b"abSTcd"))
    assert delta is not None
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ab", FinishReason.STOP, "ST")
    assert [(token.token_id, token.part) for token in delta.tokens] == [
        (ord("a"), Part.TEXT),
        (ord("b"), Part.TEXT),
        (ord("S"), Part.CUT),
        (ord("T"), Part.CUT),
    ]
    assert choice.num_output_tokens == 4
    assert choice.feed(output(b"more")) is None


def test_match_included() -> None:
    delta = stream(["ST"], include_stop=True).feed(output(b"abSTcd"))
    assert delta is not None and delta.text == "abST"
    assert all(token.part is Part.TEXT for token in delta.tokens)


def test_match_in_what_the_detokenizer_still_held() -> None:
    delta = stream(["\ufffd"]).feed(output([ord("a"), 0xC3], FinishReason.LENGTH))
    assert delta is not None
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", FinishReason.STOP, "\ufffd")


def test_the_end_releases_what_was_held() -> None:
    choice = stream(["STOP"])
    deltas = run(choice, [output(b"aST"), output([0xC3], FinishReason.LENGTH)])
    assert "".join(delta.text for delta in deltas) == "aST\ufffd"
    assert [ids_of(delta) for delta in deltas] == [list(b"a"), [*b"ST", 0xC3]]


def test_end_of_sequence_has_no_text_and_no_stop_reason() -> None:
    delta = stream().feed(output([ord("a"), EOS], FinishReason.STOP, EOS))
    assert delta is not None
    assert (delta.text, delta.stop_reason) == ("a", None)
    assert [token.part for token in delta.tokens] == [Part.TEXT, Part.END]


def test_own_stop_token_is_the_stop_reason_and_hidden_unless_asked_for() -> None:
    ids, stop = list(b"ab"), ord("b")
    hidden = stream(stop_token_ids=frozenset([stop])).feed(output(ids, FinishReason.STOP, stop))
    shown = stream(stop_token_ids=frozenset([stop]), include_stop=True).feed(output(ids, FinishReason.STOP, stop))
    assert hidden is not None and shown is not None
    assert (hidden.text, hidden.stop_reason) == ("a", stop)
    assert (shown.text, shown.stop_reason) == ("ab", stop)


def test_min_tokens_are_not_searched() -> None:
    delta = stream(["b"], min_tokens=3).feed(output(b"abcdbe"))
    assert delta is not None and (delta.text, delta.stop_reason) == ("abcd", "b")


def test_mean_logprob() -> None:
    choice = stream()
    assert choice.mean_logprob == 0.0
    choice.feed(output([1, 3]))
    assert choice.mean_logprob == -2.0


def test_tokens_are_not_kept_unless_tracked() -> None:
    choice = ChoiceStream(Bytes(), None, TextOptions())
    delta = choice.feed(output(b"ab"))
    assert delta == Delta("ab", [])


texts = st.lists(st.sampled_from([*b"abST", *"é😀".encode(), 0xFF, 299]), max_size=12)
stop_lists = st.lists(st.sampled_from(["ST", "STab", "T", "é", "a😀", "\ufffd"]), max_size=3)


@given(texts, st.lists(st.integers(0, 12), max_size=6), stop_lists, st.booleans(), st.integers(0, 4), st.booleans())
def test_every_split_gives_the_same_answer(
    ids: list[int], places: list[int], stops: list[str], include_stop: bool, min_tokens: int, ends_with_eos: bool
) -> None:
    reason, stop_id = (FinishReason.STOP, EOS) if ends_with_eos else (FinishReason.LENGTH, None)
    ids = [*ids, EOS] if ends_with_eos else ids
    whole, split = (stream(stops, include_stop=include_stop, min_tokens=min_tokens) for _ in range(2))
    expected = run(whole, cut(ids, [], reason, stop_id))
    deltas = run(split, cut(ids, places, reason, stop_id))
    assert len(expected) == 1
    assert "".join(delta.text for delta in deltas) == expected[0].text
    assert [token for delta in deltas for token in delta.tokens] == expected[0].tokens
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (expected[0].finish_reason, expected[0].stop_reason)
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    assert split.num_output_tokens == whole.num_output_tokens == len(expected[0].tokens)
    assert all(delta.text or delta.tokens for delta in deltas[:-1])


@given(texts, st.lists(st.integers(0, 12), max_size=6))
def test_no_token_comes_before_its_text(ids: list[int], places: list[int]) -> None:
    released = 0
    for delta in run(stream(["STab"]), cut(ids, places, FinishReason.LENGTH, None)):
        released += len(delta.text)
        if delta.finish_reason is None:
            assert all(token.start < released for token in delta.tokens)


@given(texts, st.lists(st.integers(0, 12), max_size=6), st.booleans())
def test_without_logprobs_and_tokens_the_text_is_the_same(ids: list[int], places: list[int], ends: bool) -> None:
    """That case has a short way through the pipeline."""
    reason, stop_id = (FinishReason.STOP, EOS) if ends else (FinishReason.LENGTH, None)
    outputs = cut([*ids, EOS] if ends else ids, places, reason, stop_id)
    tracked, bare = stream(), ChoiceStream(Bytes(), None, TextOptions())
    expected = [(d.text, d.finish_reason) for d in run(tracked, outputs) if d.text or d.finish_reason is not None]
    for each in outputs:
        each.logprobs = None
    assert [(d.text, d.finish_reason) for d in run(bare, outputs)] == expected
    assert bare.num_output_tokens == tracked.num_output_tokens
