"""Which tokens see which pictures, where layers attend to them, is what transformers' processor says."""

import random

import numpy as np
import pytest
from msgspec.structs import replace
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from tests.engine.requests_for_tests import add_request
from weft.engine.request import make_request
from weft.engine.schedule.pooled_requests import picture_tokens
from weft.engine.schedule.scheduler import ScheduledRequest
from weft.engine.wire.inputs import TokensInput, TokenSpan
from weft.engine.wire.pictures import Picture

PICTURE = 9


def scheduled(token_ids: list[int], start: int, num_tokens: int) -> ScheduledRequest:
    places = [place for place, token_id in enumerate(token_ids) if token_id == PICTURE]
    spans = [TokenSpan(place, 1, str(number).encode()) for number, place in enumerate(places)]
    given = TokensInput(token_ids, spans=spans, pictures=[Picture(PICTURE, {}, is_attended=True)] * len(places))
    clock = {"connection": 0, "arrival": 0, "arrival_time": 0.0, "eos_token_ids": frozenset[int]()}
    request = make_request(
        replace(add_request([1]), input=given), max_model_len=1000, cache_seed=b"", block_size=16, **clock
    )  # type: ignore[arg-type]
    return ScheduledRequest(request, start, num_tokens, len(token_ids), (), 0, 0, 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_tokens_see_the_last_picture_and_those_right_before_it(seed: int) -> None:
    """Every chunk of random prompts, behind another request in the step."""
    draw = random.Random(seed)
    token_ids = draw.choices((1, PICTURE), (2, 1), k=draw.randint(1, 14)) + [PICTURE] + [1] * draw.randint(0, 3)
    mask = [get_cross_attention_token_mask(token_ids, PICTURE)]
    count = token_ids.count(PICTURE)
    (wanted,) = convert_sparse_cross_attention_mask_to_dense(mask, [[1] * count], 1, len(token_ids))[..., 0]
    for start in range(len(token_ids)):
        for end in range(start + 1, len(token_ids) + 1):
            step = [scheduled([1, 1, PICTURE], 2, 1), scheduled(token_ids, start, end - start)]
            seen = np.zeros((end - start, count), bool)
            for part in picture_tokens(step, np.array([0, 1, 1 + end - start]))[1:]:
                seen[part.targets - 1, int(part.key[:-8])] = True
            assert (seen == wanted[start:end]).all()
