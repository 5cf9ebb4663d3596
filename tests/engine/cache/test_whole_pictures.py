"""whole_pictures.py: a chunk ends before or behind the tokens of a picture that see each other, or among markers."""

import dataclasses

import pytest

from tests.engine.requests_for_tests import request
from weft.engine.cache.manager import KVCacheManager
from weft.engine.cache.specs import PagedKV
from weft.engine.cache.whole_pictures import WholePictures
from weft.engine.request import Request
from weft.engine.wire.inputs import TokenSpan
from weft.engine.wire.pictures import Picture

PICTURE, MARKER, WORD = 5, 6, 7
PROMPT = [WORD] * 3 + [PICTURE] * 4 + [MARKER] * 2 + [PICTURE] * 3 + [PICTURE] * 2 + [WORD] * 3
"""A picture of two parts with markers between them, at 3 to 11, and another one behind it, at 12 and 13."""

MUTUAL = WholePictures([PagedKV(1, 8), PagedKV(1, 8, num_mutual=4)])


def seeing() -> Request:
    spans = [TokenSpan(3, 9, b"a"), TokenSpan(12, 2, b"b")]
    return dataclasses.replace(request(PROMPT), spans=spans, pictures=[Picture(PICTURE, {})] * 2)


def test_tokens_that_see_each_other_are_counted() -> None:
    assert [MUTUAL.least(seeing(), start) for start in range(17)] == [0, 0, 0, 4, 3, 2, 1, 0, 0, 3, 2, 1, 2, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("start", "ends"),
    [
        (0, [1, 2, 3, 3, 3, 3, 7, 8, 9, 9, 9, 12, 12, 14, 15, 16, 17]),
        (3, [3, 3, 3, 7, 8, 9, 9, 9, 12, 12, 14, 15, 16, 17]),
        (5, [5, 7, 8, 9, 9, 9, 12, 12, 14, 15, 16, 17]),  # the first two are cached
        (13, [14, 15, 16, 17]),
    ],
)
def test_a_chunk_cuts_no_picture(start: int, ends: list[int]) -> None:
    """Where it would end for 1, 2, ... tokens."""
    assert [start + MUTUAL.cut(seeing(), start, n) for n in range(1, 18 - start)] == ends


def test_pictures_whose_tokens_see_only_back_are_cut_anywhere() -> None:
    plain, mutual = (KVCacheManager(20, 4, [PagedKV(1, 8, num_mutual=number)]) for number in (0, 4))
    assert (plain.pictures.least(seeing(), 3), mutual.pictures.least(seeing(), 3)) == (0, 4)
    assert (plain.num_tokens_before_stop(seeing(), 0, 5), mutual.num_tokens_before_stop(seeing(), 0, 5)) == (5, 3)


def test_no_picture_is_cut_where_blocks_are_few() -> None:
    """Two blocks of three have room for only three of the four tokens."""
    for num_mutual, num_tokens in ((0, 3), (4, 0)):
        kv, r = KVCacheManager(3, 3, [PagedKV(1, 8, num_mutual=num_mutual)]), seeing()
        kv.hash_blocks(r)
        assert kv.admit(r, 0, 3)
        r.num_computed_tokens = 3
        assert kv.num_available_tokens(r) == num_tokens


def test_who_stands_before_a_picture_goes_first() -> None:
    """Of several ones the first; without any the one with the fewest tokens."""
    long, short, *standing = [seeing() for _ in range(4)]
    short.num_computed_tokens = 14
    standing[0].num_computed_tokens, standing[1].num_computed_tokens = 3, 12
    assert MUTUAL.first([long, short]) is short
    assert MUTUAL.first([long, short, *standing]) is standing[0]
