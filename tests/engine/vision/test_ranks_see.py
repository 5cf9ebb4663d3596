"""The first of two ranks encodes pictures, and both compute their parts with the features."""

import subprocess
from pathlib import Path

import pytest

from tests.engine.ranks.test_ranks import ForkedRank, keep_threads
from tests.engine.vision import test_mutual as mutual
from tests.engine.vision.test_axes import PROMPTS
from tests.engine.vision.test_axes import Checkpoint as OnAxes
from tests.engine.vision.test_eyes import LARGE, NUM_IDS, SMALL, TALL, asked, ids_of, num_encoded, started
from tests.gemma_picture_checkpoints import WRITERS as GEMMAS
from tests.picture_checkpoints import expected, write_idefics3
from weft.engine.vision.checkpoint import served_vision
from weft.engine.wire.messages import EngineOptions
from weft.engine.wire.pictures import Vision

__all__ = ["keep_threads"]


def test_two_ranks_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks that cut pictures, with room for one of them, so that both ranks drop the others."""
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)
    model = write_idefics3(tmp_path)
    prompts = [
        ("first <image> then <image><image> and so on", [LARGE, SMALL, TALL]),
        ("words", []),
        ("<image>", [TALL]),
    ]
    built = started(tmp_path, tensor_parallel_size=2, max_num_batched_tokens=12, max_num_seqs=4)
    try:
        built.engine.sight._room = 1
        found = ids_of(built, *(asked(tmp_path, *prompt, number) for number, prompt in enumerate(prompts)))
        assert found == [expected(model, tmp_path, *prompt, NUM_IDS)[1] for prompt in prompts]
        assert num_encoded(built) >= 3 and built.engine.scheduler.kv.pools[0].num_used == 0
        assert len(built.engine.sight._kept) == 1
    finally:
        built.engine._executor.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_every_rank_counts_on_axes_and_adds_stacked_features(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)
    checkpoint, prompt = OnAxes(tmp_path, name), PROMPTS["one at the start"]
    built = started(tmp_path, tensor_parallel_size=2)
    try:
        assert ids_of(built, checkpoint.asked(*prompt)) == [checkpoint.expected(*prompt)[1]]
    finally:
        built.engine._executor.close()  # type: ignore[attr-defined]


def test_stages_read_only_text() -> None:
    options = EngineOptions(model="m", pictures=True, pipeline_parallel_size=2)
    assert served_vision(Vision(5, 1), options) is None


@pytest.mark.parametrize("name", sorted(GEMMAS))
def test_pictures_see_both_ways_on_every_rank(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedRank)
    model, (prompt, *_) = GEMMAS[name](tmp_path), mutual.PROMPTS.values()
    built = mutual.started(tmp_path, tensor_parallel_size=2)
    try:
        found = mutual.ids_of(built, mutual.asked(tmp_path, *prompt, 1))
        assert found == [mutual.theirs((tmp_path, model), *prompt)]
    finally:
        built.engine._executor.close()  # type: ignore[attr-defined]
