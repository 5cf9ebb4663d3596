"""Engines for encoder-decoder models as they are started: disk, native kernels, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.encoder_decoder_models import Answers, answers, extractor, write_model
from tests.engine.test_encoder_decoder import ask, ids
from tests.engine.test_golden import run
from tests.engine.test_speech import Heard, heard
from tests.engine.test_speech import ask as hear
from weft.engine.cache.offload import OffloadTier
from weft.engine.describe.config import load_model_config
from weft.engine.kernels.cpu import library
from weft.engine.kernels.torch.layer_kernels import TorchKernels
from weft.engine.parts.decoder import decoder_spec
from weft.engine.start.startup import Started, start
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions, TokensOutput


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoder-decoder")


def begin(folder: Path, **more: Any) -> Started:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 8 << 20} | more
    return start(EngineOptions(model=str(folder), **settings), "epoch")


def check(started: Started, expected: Answers | Heard) -> None:
    if isinstance(expected, Heard):
        heard = zip(expected.sounds, expected.prompts, strict=True)
        adds = [hear(expected.shape, *pair, number) for number, pair in enumerate(heard)]
    else:
        adds = [ask(*pair, number) for number, pair in enumerate(zip(expected.inputs, expected.prompts, strict=True))]
    found = run(started.engine, adds)
    assert [ids(found[number, 0]) for number in range(len(expected.outputs))] == expected.outputs


@pytest.mark.parametrize("name", ["t5-gated", "mbart", "marian-two-embeddings", "t5gemma", "t5gemma-uncapped"])
def test_the_memory_of_both_halves_is_planned(tmp_path: Path, name: str) -> None:
    """An encoder's own embedding was left out."""
    write_model(name, tmp_path)
    spec = decoder_spec(load_model_config(tmp_path))
    assert spec.weights_bytes(TorchKernels(), torch.float32) == 4 * spec.num_parameters


@pytest.mark.parametrize(
    ("max_model_len", "limits"),
    [(None, (100, 100)), (212, (100, 100)), (200, (96, 100)), (64, (32, 32)), (40, (16, 24))],
)
def test_what_is_read_and_written_fits_together(root: Path, max_model_len: int | None, limits: tuple[int, int]) -> None:
    """Of a shortened context both limits held, and a request within them was refused."""
    folder = answers(root, "bart").folder
    started = begin(folder, block_size=16, max_num_seqs=2, max_model_len=max_model_len)
    longest, own = started.info.max_input, started.info.max_own
    assert (longest, own) == limits
    found = run(started.engine, [ask([5] * longest, [2] * (own - 1), 0, max_tokens=1)])
    assert len(ids(found[0, 0])) == 1


@pytest.mark.parametrize("name", ["umt5", "whisper"])
def test_inputs_come_back_from_disk(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(OffloadTier, "load_seconds", lambda *_: 0.0)
    expected = heard(root, name) if name == "whisper" else answers(root, name)
    length = None if name == "whisper" else 240
    settings = {"block_size": 16, "max_num_seqs": 2, "max_model_len": length, "kv_offload_dir": str(tmp_path)}
    plan = begin(expected.folder, **settings | {"kv_offload_dir": None}).plan
    memory = 17 * plan.kv_cache_bytes // plan.num_blocks
    for _ in range(2):  # the second finds what the first left
        started = begin(expected.folder, kv_cache_memory=memory, **settings)
        for _ in range(2):
            check(started, expected)
            started.tier._writer.submit(lambda: None).result(60)  # type: ignore[union-attr]
        counters = started.engine.scheduler.counters
        assert counters.kv_offload_disk_loads + counters.kv_offload_host_loads > 4
        assert counters.kv_offload_faults == 0
        started.tier.close()  # type: ignore[union-attr]
        del started


@pytest.mark.parametrize(
    ("name", "changes", "fault"),
    [
        ("t5", {"pipeline_parallel_size": 2}, "pipeline_parallel_size 2: stages cannot divide layers that read"),
        ("bart", {"max_loras": 1}, "max_loras is not supported by a model with an encoder and a decoder"),
        ("t5", {"task": "embed"}, "task embed is not supported by a model with an encoder and a decoder"),
        ("marian", {"task": "embed"}, "task embed is not supported by a model with an encoder and a decoder"),
    ],
)
def test_what_is_impossible_is_refused(root: Path, name: str, changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        begin(answers(root, name).folder, **changes)


def test_marian_writes_text(root: Path) -> None:
    """The end of its name, Model, was taken for that of a model without a head."""
    assert begin(answers(root, "marian").folder).info.task == "generate"


@pytest.mark.skipif(library.load() is None, reason="no native kernels on this machine")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", ["t5", "umt5", "bart", "m2m_100", "t5gemma"])
def test_native_kernels_are_close(root: Path, tmp_path: Path, name: str, kv_cache_dtype: str) -> None:
    wide = {} if name == "t5gemma" else {"d_model": 128} | ({"d_kv": 32} if "5" in name else {})
    model = write_model(name, tmp_path, gain=0.4, **wide).bfloat16()
    model.save_pretrained(tmp_path)
    started = begin(tmp_path, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    assert started.info.attention_backend == "native"
    model = model.float()
    expected = answers(root, name)
    adds = [
        ask(input_ids, prompt, number, logprobs=8, max_tokens=3, ignore_eos=True)
        for number, (input_ids, prompt) in enumerate(zip(expected.inputs, expected.prompts, strict=True))
    ]
    found = run(started.engine, adds)
    for number, (input_ids, prompt) in enumerate(zip(expected.inputs, expected.prompts, strict=True)):
        output = found[number, 0]
        assert isinstance(output, TokensOutput) and output.logprobs
        with torch.no_grad():
            written = torch.tensor([prompt + output.token_ids])
            logits = model(input_ids=torch.tensor([input_ids]), decoder_input_ids=written).logits[0]
        rows = torch.log_softmax(logits, -1)[len(prompt) - 1 :]
        for entry, row in zip(output.logprobs, rows, strict=False):
            differences = (torch.tensor(entry.top_logprobs) - row[entry.top_token_ids]).abs()
            assert differences.max() < 0.1


@pytest.mark.skipif(library.load() is None, reason="no native kernels on this machine")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_native_kernels_hear_about_the_same(root: Path, tmp_path: Path, kv_cache_dtype: str) -> None:
    model = write_model("whisper", tmp_path, gain=0.4, d_model=128).bfloat16()
    model.save_pretrained(tmp_path)
    started = begin(tmp_path, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, kv_cache_memory=32 << 20)
    assert started.info.attention_backend == "native"
    expected, model = heard(root, "whisper"), model.float()
    pairs = list(zip(expected.sounds, expected.prompts, strict=True))
    options: dict[str, Any] = {"logprobs": 8, "max_tokens": 3, "ignore_eos": True}
    found = run(started.engine, [hear(expected.shape, *pair, number, **options) for number, pair in enumerate(pairs)])
    for number, (samples, prompt) in enumerate(pairs):
        output = found[number, 0]
        assert isinstance(output, TokensOutput) and output.logprobs
        made = extractor("Whisper")(samples.astype(np.float32) / 32768, sampling_rate=16_000, return_tensors="pt")
        with torch.no_grad():
            logits = model(**made, decoder_input_ids=torch.tensor([prompt + output.token_ids])).logits[0]
        for entry, row in zip(output.logprobs, torch.log_softmax(logits, -1)[len(prompt) - 1 :], strict=False):
            assert (torch.tensor(entry.top_logprobs) - row[entry.top_token_ids]).abs().max() < 0.1


@pytest.mark.parametrize("name", ["whisper", "speech2text", "moonshine"])
def test_a_model_that_hears_starts(root: Path, name: str) -> None:
    """Memory is measured with the longest sound, for which a shorter context has no room."""
    expected = heard(root, name)
    started = begin(expected.folder, block_size=16, max_num_seqs=2, kv_cache_memory=64 << 20)
    assert started.info.audio == expected.shape
    assert started.info.max_input == expected.shape.num_positions(expected.shape.max_samples)
    check(started, expected)
    with pytest.raises(ModelError, match="max_model_len must be at least"):
        begin(expected.folder, block_size=16, max_num_seqs=2, max_model_len=40)
