"""An engine with K and V in int8: what it answers, and what a block takes, through the real start-up."""

import random
from typing import Any

import pytest

from tests.engine.quality import FOLDER, held_out_chats
from tests.engine.requests_for_tests import add_request
from weft.engine.kernels.cpu import library
from weft.engine.loop.engine import Engine
from weft.engine.start.startup import Started, start
from weft.engine.wire.messages import EngineOptions

pytestmark = pytest.mark.skipif(library.load() is None, reason="no native kernels")

CHATS = [chat[:80].tolist() for chat in held_out_chats()[0][:6]]


def started(kv_cache_dtype: str, kv_cache_memory: int = 8 << 20, **changes: Any) -> Started:
    sizes = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory": kv_cache_memory} | changes
    return start(EngineOptions(model=str(FOLDER), device="cpu", kv_cache_dtype=kv_cache_dtype, **sizes), "epoch")


def answers(engine: "Engine[Any]", chats: list[list[int]]) -> list[list[int]]:
    """Greedy continuations of chats that run side by side."""
    ids: list[list[int]] = [[] for _ in chats]
    for number, chat in enumerate(chats):
        engine.add(0, add_request(chat, number, max_tokens=24, temperature=0.0, ignore_eos=True))
    while engine.has_work:
        for _, output in engine.step():
            ids[output.request_id] += output.token_ids
        engine.scheduler.check_integrity()
    return ids


def test_answers_are_nearly_those_of_16_bits_and_a_block_is_half_as_large() -> None:
    plain, rounded = started("auto"), started("int8")
    ratio = rounded.plan.kv_cache_bytes / rounded.plan.num_blocks * plain.plan.num_blocks / plain.plan.kv_cache_bytes
    head_dim = 32
    assert ratio == (head_dim + 4) / (2 * head_dim)
    expected, got = answers(plain.engine, CHATS), answers(rounded.engine, CHATS)
    same = sum(a == b for one, other in zip(expected, got, strict=True) for a, b in zip(one, other, strict=True))
    assert same >= 0.9 * sum(map(len, expected))


def test_what_is_cached_and_computed_beside_others_answers_as_alone() -> None:
    """The bits of a row do not depend on how its K and V came into the cache."""
    alone = [answers(started("int8").engine, [chat])[0] for chat in CHATS[:3]]
    plan = started("int8").plan
    tight = started("int8", kv_cache_memory=9 * plan.kv_cache_bytes // plan.num_blocks)
    for _ in range(3):
        order = random.Random(1).sample(range(3), 3)
        assert answers(tight.engine, [CHATS[index] for index in order]) == [alone[index] for index in order]
    assert tight.engine.scheduler.counters.prefix_cache_hits > 0
