"""A real encoder beside sentence-transformers."""

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.engine.start.test_vector_model import started, vectors
from tests.odd_lines import odd_lines
from weft.server.text.tokenizer import Tokenizer

REAL = Path(os.environ.get("WEFT_REAL") or Path.home() / ".cache" / "weft-real")
pytestmark = [pytest.mark.real, pytest.mark.skipif(not REAL.is_dir(), reason=f"no real files in {REAL}")]


def test_all_minilm() -> None:
    from sentence_transformers import SentenceTransformer

    folder = REAL / "all-MiniLM-L6-v2"
    reference, tokenizer = SentenceTransformer(str(folder), device="cpu"), Tokenizer.load(folder)
    ready = started(folder, kv_cache_memory=64 << 20)
    assert ready.info.max_model_len == reference.max_seq_length == 256
    texts = odd_lines()[::8]
    prompts = [tokenizer.encode(text) for text in texts]
    assert prompts == [reference.tokenizer(text)["input_ids"] for text in texts]
    found, expected = np.concatenate(vectors(ready.engine, prompts)), reference.encode(list(texts))
    assert_allclose((found * expected).sum(1), 1.0, atol=1e-4)
