import codecs
import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft.engine.wire.messages import FinishReason, RequestOutput, TokenLogprobs, TokensOutput
from weft.server.generate.choice_stream import ChoiceStream
from weft.server.generate.events import End, Event, Part, Text, Token, TokenIds, WholeChoice, whole_choice
from weft.server.task.task import TextOptions

EOS = 300


class Bytes:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return "" if token_id >= 256 else self._decoder.decode(bytes([token_id]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def stream(stops: list[str] | None = None, **options: Any) -> ChoiceStream:
    return ChoiceStream(Bytes(), TextOptions(stops=stops or (), tracks_tokens=True, **options))


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


def run(choice: ChoiceStream, outputs: list[RequestOutput]) -> list[list[Event]]:
    return [events for events in map(choice.feed, outputs) if events is not None]


def text_of(events: list[Event] | None) -> Text:
    """What came, without the end."""
    assert events is not None
    return next((event for event in events if isinstance(event, Text)), Text(""))


def ids_of(events: list[Event] | None) -> list[int]:
    return [token.token_id for token in text_of(events).tokens]


def last(choice: ChoiceStream, last_output: RequestOutput) -> WholeChoice:
    events = choice.feed(last_output)
    assert events is not None and choice.is_finished
    return whole_choice(0, events)


def test_a_character_is_never_split_and_its_tokens_travel_with_it() -> None:
    choice = stream()
    first, second = "é".encode()
    assert choice.feed(output([ord("a")])) == [Text("a", [choice_token(ord("a"), 0)])]
    assert choice.feed(output([first])) is None
    assert choice.feed(output([second])) == [Text("é", [choice_token(first, 1), choice_token(second, 1)])]


def choice_token(token_id: int, start: int) -> Token:
    return Token(token_id, start, TokenLogprobs(-float(token_id), [], []))


def test_text_that_may_become_a_stop_string_waits_with_its_tokens() -> None:
    choice = stream(["STOP"])
    events = choice.feed(output(b"aST"))
    assert text_of(events).text == "a" and ids_of(events) == list(b"a")
    events = choice.feed(output(b"x"))
    assert text_of(events).text == "STx" and ids_of(events) == list(b"STx")


def test_match_cuts_the_text_marks_cut_tokens_and_counts_up_to_the_match() -> None:
    choice = stream(["ST"])
    whole = last(choice, output(b"abSTcd"))
    assert (whole.text, whole.end) == ("ab", End(FinishReason.STOP, "ST"))
    assert [(token.token_id, token.part) for token in whole.tokens] == [
        (ord("a"), Part.TEXT),
        (ord("b"), Part.TEXT),
        (ord("S"), Part.CUT),
        (ord("T"), Part.CUT),
    ]
    assert choice.num_output_tokens == 4
    assert choice.feed(output(b"more")) is None


def test_match_included() -> None:
    whole = last(stream(["ST"], include_stop=True), output(b"abSTcd"))
    assert whole.text == "abST"
    assert all(token.part is Part.TEXT for token in whole.tokens)


def test_match_in_what_the_detokenizer_still_held() -> None:
    whole = last(stream(["\ufffd"]), output([ord("a"), 0xC3], FinishReason.LENGTH))
    assert (whole.text, whole.end) == ("a", End(FinishReason.STOP, "\ufffd"))


def test_the_end_releases_what_was_held() -> None:
    choice = stream(["STOP"])
    told = run(choice, [output(b"aST"), output([0xC3], FinishReason.LENGTH)])
    assert "".join(text_of(events).text for events in told) == "aST\ufffd"
    assert [ids_of(events) for events in told] == [list(b"a"), [*b"ST", 0xC3]]


def test_end_of_sequence_has_no_text_and_no_stop_reason() -> None:
    whole = last(stream(), output([ord("a"), EOS], FinishReason.STOP, EOS))
    assert (whole.text, whole.end.stop_reason) == ("a", None)
    assert [token.part for token in whole.tokens] == [Part.TEXT, Part.END]


def test_own_stop_token_is_the_stop_reason_and_hidden_unless_asked_for() -> None:
    ids, stop = list(b"ab"), ord("b")
    hidden = last(stream(stop_token_ids=frozenset([stop])), output(ids, FinishReason.STOP, stop))
    shown = last(stream(stop_token_ids=frozenset([stop]), include_stop=True), output(ids, FinishReason.STOP, stop))
    assert (hidden.text, hidden.end.stop_reason) == ("a", stop)
    assert (shown.text, shown.end.stop_reason) == ("ab", stop)


def test_min_tokens_are_not_searched() -> None:
    whole = last(stream(["b"], min_tokens=3), output(b"abcdbe"))
    assert (whole.text, whole.end.stop_reason) == ("abcd", "b")


def test_mean_logprob() -> None:
    choice = stream()
    assert choice.mean_logprob == 0.0
    choice.feed(output([1, 3]))
    assert choice.mean_logprob == -2.0


def test_tokens_are_not_kept_unless_tracked() -> None:
    assert ChoiceStream(Bytes(), TextOptions()).feed(output(b"ab")) == [Text("ab", [])]


def test_ids_are_told_with_the_text_that_they_complete() -> None:
    choice = stream(tells_ids=True)
    first, second = "é".encode()
    assert choice.feed(output([ord("a"), first])) == [TokenIds([ord("a")]), Text("a", [choice_token(ord("a"), 0)])]
    events = choice.feed(output([second]))
    assert events is not None and events[0] == TokenIds([first, second])


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
    told = run(split, cut(ids, places, reason, stop_id))
    assert len(expected) == 1
    assert whole_choice(0, list(itertools.chain(*told))) == whole_choice(0, expected[0])
    assert not any(isinstance(event, End) for events in told[:-1] for event in events)
    assert split.num_output_tokens == whole.num_output_tokens == len(text_of(expected[0]).tokens)
    assert all(text_of(events).text or text_of(events).tokens for events in told[:-1])


@given(texts, st.lists(st.integers(0, 12), max_size=6))
def test_no_token_comes_before_its_text(ids: list[int], places: list[int]) -> None:
    released = 0
    for events in run(stream(["STab"]), cut(ids, places, FinishReason.LENGTH, None)):
        released += len(text_of(events).text)
        if not isinstance(events[-1], End):
            assert all(token.start < released for token in text_of(events).tokens)


@given(texts, st.lists(st.integers(0, 12), max_size=6), st.booleans())
def test_without_logprobs_and_tokens_the_text_is_the_same(ids: list[int], places: list[int], ends: bool) -> None:
    """That case has a short way through the pipeline."""
    reason, stop_id = (FinishReason.STOP, EOS) if ends else (FinishReason.LENGTH, None)
    outputs = cut([*ids, EOS] if ends else ids, places, reason, stop_id)
    tracked, bare = stream(), ChoiceStream(Bytes(), TextOptions())
    expected = [
        (text_of(e).text, ends)
        for e in run(tracked, outputs)
        if (ends := [event for event in e if isinstance(event, End)]) or text_of(e).text
    ]
    for each in outputs:
        each.logprobs = None
    told = run(bare, outputs)
    assert [(text_of(e).text, [event for event in e if isinstance(event, End)]) for e in told] == expected
    assert bare.num_output_tokens == tracked.num_output_tokens
