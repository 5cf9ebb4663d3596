import math
from typing import Any

import msgspec
import pytest

from weft.engine.wire.params import MAX_LOGPROBS, SamplingParams


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"max_tokens": 5, "min_tokens": 5},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_p": 0.0, "min_p": 1.0, "top_k": 0},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 100.0},
        {"seed": 2**64 - 1},
        {"logit_bias": {0: -100.0, 1: 100.0}},
        {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
    ],
)
def test_bounds_are_inclusive(params: dict[str, object]) -> None:
    SamplingParams(**params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": -1}, "max_tokens must be at least 0, got -1"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens must be between 0 and 5, got 6"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
        ({"temperature": 2.1}, "temperature must be between 0.0 and 2.0, got 2.1"),
        ({"temperature": math.nan}, "temperature must be between 0.0 and 2.0, got nan"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 1.1}, "top_p must be between 0.0 and 1.0, got 1.1"),
        ({"min_p": -0.1}, "min_p must be between 0.0 and 1.0, got -0.1"),
        ({"presence_penalty": 2.5}, "presence_penalty must be between -2.0 and 2.0, got 2.5"),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be between -2.0 and 2.0, got -2.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be greater than 0 and at most 100, got 0.0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty must be greater than 0 and at most 100, got nan"),
        ({"seed": -1}, "seed must be between 0 and 18446744073709551615, got -1"),
        ({"logit_bias": {3: 101.0}}, "logit_bias must be between -100.0 and 100.0, got 101.0"),
        ({"no_repeat_ngram_size": 1025}, "no_repeat_ngram_size must be between 0 and 1024, got 1025"),
        ({"encoder_no_repeat_ngram_size": -1}, "encoder_no_repeat_ngram_size must be between 0 and 1024, got -1"),
        ({"bad_words_token_ids": ((1,), ())}, "bad_words must not hold an empty word"),
        ({"allowed_token_ids": ()}, "allowed_token_ids must hold at least one id, got none"),
        ({"logprobs": 65}, "logprobs must be between 0 and 64, got 65"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be between 0 and 64, got -1"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_bound(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**params)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_ranges_are_checked_when_a_message_is_decoded_too() -> None:
    body = msgspec.msgpack.encode({"temperature": 9.0})
    with pytest.raises(msgspec.ValidationError, match=r"temperature must be between 0\.0 and 2\.0, got 9\.0"):
        msgspec.msgpack.decode(body, type=SamplingParams)


def test_defaults_cost_no_bytes() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams())) == {}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprob_token_ids": (1,)}, "logprob_token_ids is only allowed with logprobs"),
        ({"logprob_token_ids": tuple(range(1025)), "logprobs": 0}, "at most 1024 ids, got 1025"),
    ],
)
def test_asked_ids_need_logprobs_and_have_a_bound(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)
    assert SamplingParams(logprob_token_ids=(1,), logprobs=0).logprob_token_ids == (1,)
