import msgspec
import pytest

from weft.engine.wire.inputs import TokensInput, TokenSpan
from weft.engine.wire.messages import (
    MAX_FRAME_BYTES,
    AbortRequest,
    Accepted,
    AddRequest,
    BeamOptions,
    EngineInfo,
    FinishReason,
    FrameReader,
    FromEngine,
    Rejected,
    RejectReason,
    StepOutput,
    ToEngine,
    TokenLogprobs,
    TokensOutput,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from weft.engine.wire.options import Adapter
from weft.engine.wire.params import SamplingParams

TO_ENGINE: list[ToEngine] = [
    AddRequest(TokensInput([1, 2, 3]), SamplingParams(), request_id=1),
    AddRequest(
        request_id=2,
        input=TokensInput([70_000], spans=[TokenSpan(0, 1, b"a")]),
        sampling_params=SamplingParams(
            max_tokens=5, seed=2**64 - 1, logit_bias={7: -100.0}, bad_words_token_ids=((1, 2), (3,)), logprobs=0
        ),
        num_choices=3,
        tenant="somebody",
        priority=-1,
        deadline=12.5,
        cache_salt="salt",
        adapter=Adapter("lora", "/lora", "0"),
        beams=BeamOptions(-0.5, "never"),
    ),
    AddRequest(TokensInput([1]), SamplingParams(), beams=BeamOptions(early_stopping=True), request_id=4),
    AbortRequest(3),
    AbortRequest(3, 1),
]
FROM_ENGINE: list[FromEngine] = [
    EngineInfo("epoch", "Qwen3ForCausalLM", 100, 4096, (1, 2), "cpu", "float32", "sdpa", 16, 9, 8, 2048),
    Accepted(1),
    Rejected(2, RejectReason.QUEUE_FULL, "full"),
    StepOutput(
        [
            TokensOutput(1, 0, [5]),
            TokensOutput(
                request_id=2,
                index=1,
                token_ids=[6, 7],
                finish_reason=FinishReason.STOP,
                stop_token_id=7,
                logprobs=[TokenLogprobs(-0.5, [6, 1], [-0.5, -2.0])],
                prompt_logprobs=[TokenLogprobs(-3.0, [], [])],
                num_cached_tokens=16,
                queue_time_s=0.25,
                message="",
            ),
        ]
    ),
]


def test_messages_survive_the_round_trip() -> None:
    assert [decode_to_engine(encode(m)[4:]) for m in TO_ENGINE] == TO_ENGINE
    assert [decode_from_engine(encode(m)[4:]) for m in FROM_ENGINE] == FROM_ENGINE


def test_a_frame_is_its_length_and_its_body() -> None:
    frame = encode(AbortRequest(1))
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4


def test_every_split_of_the_stream_gives_the_same_frames() -> None:
    stream = b"".join(map(encode, [TO_ENGINE[0], TO_ENGINE[2], TO_ENGINE[3]]))
    expected = FrameReader().feed(stream)
    assert len(expected) == 3
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1):
            reader = FrameReader()
            parts = (stream[:first], stream[first:second], stream[second:])
            assert [body for part in parts for body in reader.feed(part)] == expected


def test_a_frame_comes_with_its_last_byte_and_not_before() -> None:
    reader = FrameReader()
    frame = encode(Accepted(1))
    for byte in frame[:-1]:
        assert reader.feed(bytes([byte])) == []
    assert reader.feed(frame[-1:]) == [frame[4:]]
    assert reader.feed(b"\0\0\0\0") == [b""]


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read() -> None:
    reader = FrameReader()
    assert reader.feed(MAX_FRAME_BYTES.to_bytes(4, "little")) == []
    with pytest.raises(ValueError, match=f"frame of {MAX_FRAME_BYTES + 1} bytes"):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        encode(Accepted(1))[4:],
        msgspec.msgpack.encode({"type": "abort", "request_id": "one"}),
        msgspec.msgpack.encode(
            {
                "type": "add",
                "request_id": 1,
                "input": {"type": "tokens", "token_ids": [1]},
                "sampling_params": {"temperature": 3.0},
            }
        ),
    ],
)
def test_what_no_server_sends_is_an_error(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_to_engine(body)


def test_merging_outputs_equals_reading_them_one_by_one() -> None:
    def scored(value: float) -> TokenLogprobs:
        return TokenLogprobs(value, [], [])

    output = TokensOutput(1, 0, [], prompt_logprobs=[scored(-1.0)])
    output.merge(TokensOutput(1, 0, [4], logprobs=[scored(-2.0)], num_cached_tokens=0, queue_time_s=0.5))
    output.merge(TokensOutput(1, 0, [5, 6], FinishReason.STOP, 6, logprobs=[scored(-3.0), scored(-4.0)]))
    assert output == TokensOutput(
        request_id=1,
        index=0,
        token_ids=[4, 5, 6],
        finish_reason=FinishReason.STOP,
        stop_token_id=6,
        logprobs=[scored(-2.0), scored(-3.0), scored(-4.0)],
        prompt_logprobs=[scored(-1.0)],
        num_cached_tokens=0,
        queue_time_s=0.5,
    )
