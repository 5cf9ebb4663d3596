"""Engines with a draft model or a head, what they are asked, and what they proposed."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.checkpoints import VOCAB_SIZE
from weft.engine.loop.engine import Engine
from weft.engine.request import Request
from weft.engine.start.draft_head import DraftHead
from weft.engine.start.startup import start
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, EngineOptions
from weft.engine.wire.params import SamplingParams


def make_engine(
    folder: Path, speculative: Path | str | None, *, dtype: str = "float32", overlap: bool = False, **more: int
) -> Engine:
    options = EngineOptions(
        model=str(folder),
        device="cpu",
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=16,
        speculative=str(speculative) if speculative else None,
        kv_cache_memory=more.get("kv_cache_memory", 4_000_000),
        max_num_batched_tokens=more.get("max_num_batched_tokens", 512),
        itl_target_ms=1e6,  # or prompts are cut as time passes, and torch computes a row differently beside others
    )
    engine = start(options, "epoch").engine
    engine._overlap = overlap
    return engine


def texts(*lengths: int) -> list[AddRequest]:
    """Random prompts of so many tokens, continued greedily."""
    generator = random.Random(3)
    return [
        AddRequest(
            TokensInput([generator.randrange(4, VOCAB_SIZE) for _ in range(length)]),
            SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
            request_id=number,
        )
        for number, length in enumerate(lengths)
    ]


def requests(temperature: float, num_tokens: int, vocab_size: int = VOCAB_SIZE) -> list[AddRequest]:
    """Some share a prefix, some have two choices."""
    generator = random.Random(2)
    prefix = [generator.randrange(4, vocab_size) for _ in range(40)]
    return [
        AddRequest(
            TokensInput(
                prefix[: 40 * (number % 2)] + [generator.randrange(4, vocab_size) for _ in range(5 + 7 * number)]
            ),
            SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=number, ignore_eos=True, logprobs=2),
            num_choices=1 + number % 2,
            request_id=number,
        )
        for number in range(6)
    ]


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def recorded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Texts, and what was proposed behind them, three ids each if there is room."""
    assert engine._speculator is not None
    head, seen = engine._speculator._draft_model, []
    assert isinstance(head, DraftHead)
    propose = head.propose
    monkeypatch.setattr(head.pace, "num_drafts", lambda price: 3)

    def record(asked: Sequence[Request], num_drafts: int) -> list[list[int]]:
        drafts = propose(asked, num_drafts)
        seen.extend((list(r.token_ids), draft) for r, draft in zip(asked, drafts, strict=True))
        return drafts

    monkeypatch.setattr(head, "propose", record)
    return seen
