import json
from pathlib import Path

import pytest

from benchmarks.compare import checkpoints
from benchmarks.compare.machine import Model, read_bandwidth, read_model
from benchmarks.compare.workloads import NUM_ODD_IDS, WORKLOADS, Workload
from weft.server.text.chat_template import TemplateOptions
from weft.server.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint, where the cache is a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        folder = checkpoints.checkpoint("tiny")
        written_at = (folder / "config.json").stat().st_mtime_ns
        assert checkpoints.checkpoint("tiny") == folder
        assert (folder / "config.json").stat().st_mtime_ns == written_at
    assert [path.name for path in folder.parent.iterdir()] == ["qwen3-tiny-random"]
    return folder


def test_every_id_of_a_prompt_has_text(tiny: Path) -> None:
    """A model with random weights repeats what it read, and a server sends no event for an id without text."""
    tokenizer = Tokenizer.load(tiny)
    assert tokenizer.vocab_size == checkpoints.VOCAB_SIZE == 151_936
    ids = range(NUM_ODD_IDS, checkpoints.VOCAB_SIZE - NUM_ODD_IDS)
    assert all(tokenizer.token_bytes(token_id).decode("ascii") for token_id in ids)
    assert len(tokenizer.encode("Hello, world")) < 10
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}], TemplateOptions())
    assert tokenizer.eos_token_id == json.loads((tiny / "config.json").read_text())["eos_token_id"] == 151_935


def test_sizes_of_the_tiny_checkpoint(tiny: Path) -> None:
    model = read_model(tiny)
    layer = 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256 + 2 * 128 + 2 * 32
    assert (model.name, model.vocab_size, model.kv_bytes_per_token) == (
        "qwen3-tiny-random",
        151_936,
        2 * 2 * 2 * 32 * 2,
    )
    assert 0 <= model.weight_bytes - 2 * (151_936 * 128 + 2 * layer + 128) < 8192  # the header of the file


def test_an_embedding_that_is_no_head_is_not_read(tmp_path: Path) -> None:
    config = {"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 3, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert read_model(tmp_path) == Model(tmp_path.name, 10, 1000 - 10 * 8 * 2, 2 * 3 * 2 * 4 * 2)


def test_the_floor_is_weights_and_cache_over_the_bus() -> None:
    model = Model("m", 10, weight_bytes=1_000_000, kv_bytes_per_token=100)
    assert model.floor_ms(Workload("X", "", "main", 4, 1, 200, 100), 1e9) == pytest.approx((1_000_000 + 100_000) / 1e6)
    contexts = {workload.key: workload.mean_context for workload in WORKLOADS}
    assert (contexts["B"], contexts["C"], contexts["L"]) == (320, 1104, 8032)


def test_memory_is_read_at_some_speed() -> None:
    assert 1e8 < read_bandwidth(1 << 22, num_rounds=2) < 1e13
