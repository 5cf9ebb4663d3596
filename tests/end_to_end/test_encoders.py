"""Encoders through `weft serve` equal sentence-transformers: embeddings, and scores of pairs."""

from pathlib import Path

import httpx
import pytest
from numpy.testing import assert_allclose
from torch.nn import Identity

from tests.end_to_end.conftest import serving
from tests.end_to_end.test_vectors import OPTIONS
from tests.vector_checkpoints import TEXTS, write_encoder


def test_a_bare_encoder_pools_the_mean(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = write_encoder(tmp_path / "modernbert", "modernbert", cls_token_id=0, sep_token_id=0, bos_token_id=0)
    with serving(tmp_path / "log", str(folder), *OPTIONS) as server:
        data = httpx.post(f"{server.base_url}/v1/embeddings", json={"input": TEXTS}, timeout=60).json()["data"]
        refused = httpx.post(f"{server.base_url}/v1/embeddings", json={"input": "kalo " * 400}, timeout=60)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    assert_allclose([entry["embedding"] for entry in data], expected, rtol=0, atol=1e-4)
    assert refused.status_code == 400 and "at most 258 tokens" in refused.text


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta"])
def test_cross_encoders_score_pairs(tmp_path: Path, model_type: str) -> None:
    """BERT tells the sides of a pair by the types of tokens."""
    from sentence_transformers import CrossEncoder
    from transformers import AutoModelForSequenceClassification

    types = {"type_vocab_size": 1} if model_type == "xlm-roberta" else {}
    folder = write_encoder(tmp_path / model_type, model_type, AutoModelForSequenceClassification, num_labels=1, **types)
    with serving(tmp_path / "log", str(folder), *OPTIONS) as server:
        body = {"text_1": "the ring", "text_2": TEXTS, "use_activation": False}
        data = httpx.post(f"{server.base_url}/v1/score", json=body, timeout=60).json()["data"]
    reference = CrossEncoder(str(folder), device="cpu")
    expected = reference.predict(
        [("the ring", text) for text in TEXTS], convert_to_tensor=True, activation_fn=Identity()
    )
    assert expected.std() > 0.01
    assert_allclose([entry["score"] for entry in data], expected, rtol=0, atol=1e-4)
