"""Vectors of decoders equal those of sentence-transformers, however their prompts are computed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from tests.vector_checkpoints import TEXTS, write_classifier, write_embedder, write_model, write_reranker
from weft.engine.loop.pending import RejectedError
from weft.engine.start.startup import Started, start
from weft.engine.start.vector_model import find_task
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, EngineOptions, FinishReason
from weft.engine.wire.params import PooledOutput, Pooling, SamplingParams

NO_OUTPUT = SamplingParams(max_tokens=0)


def started(folder: Path, **options: Any) -> Started:
    settings = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "block_size": 8, "kv_cache_memory": 4 << 20}
    return start(EngineOptions(model=str(folder), **(settings | options)), "epoch")


def run(engine: Any, adds: list[AddRequest]) -> dict[int, Any]:
    outputs = {}
    for add in adds:
        engine.add(0, add)
    while engine.has_work:
        for _, output in engine.step():
            outputs[output.request_id] = output
        engine.scheduler.check_integrity()
    return outputs


def vectors(engine: Any, prompts: list[list[int]], **pooling: Any) -> list[Any]:
    adds = [AddRequest(TokensInput(ids), NO_OUTPUT, pooling=Pooling(**pooling)) for ids in prompts]
    outputs = run(engine, adds)
    for output in outputs.values():
        assert isinstance(output, PooledOutput) and output.finish_reason is FinishReason.STOP
    found = [outputs[add.request_id] for add in adds]
    return [np.frombuffer(output.values, "<f4").reshape(output.num_rows, -1) for output in found]


def ids_of(model: Any, texts: list[str] = TEXTS) -> list[list[int]]:
    return [model.tokenizer(text)["input_ids"] for text in texts]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def find(model_type: str, mode: str, is_deep: bool = False) -> tuple[Path, Any]:
        name = f"{model_type}-{mode}-{is_deep}"
        if name not in made:
            folder = tmp_path_factory.mktemp("vectors") / name
            made[name] = folder, write_embedder(folder, model_type, mode, is_deep=is_deep)
        return made[name]

    return find


@pytest.mark.parametrize(
    ("model_type", "mode", "is_deep"),
    [("qwen3", "lasttoken", True), ("llama", "mean", False), ("mistral", "cls", False)],
)
@pytest.mark.parametrize("chunk", [16, 2048])
def test_vectors_are_those_of_sentence_transformers(
    embedder: Any, model_type: str, mode: str, is_deep: bool, chunk: int
) -> None:
    """In one step or in chunks; a second time with what the prefix cache has; beside requests that generate."""
    folder, reference = embedder(model_type, mode, is_deep)
    engine = started(folder, max_num_batched_tokens=chunk).engine
    expected = reference.encode(TEXTS)
    for _ in range(2):
        found = vectors(engine, ids_of(reference))
        assert_allclose(np.concatenate(found), expected, rtol=0, atol=1e-4)
    assert engine.scheduler.kv.prefix_caching


@pytest.mark.parametrize("mode", ["max", "mean_sqrt_len_tokens", "weightedmean"])
@pytest.mark.parametrize("chunk", [16, 2048])
def test_other_ways_to_pool(embedder: Any, mode: str, chunk: int) -> None:
    """They were refused."""
    folder, reference = embedder("llama", mode)
    found = vectors(started(folder, max_num_batched_tokens=chunk).engine, ids_of(reference))
    assert_allclose(np.concatenate(found), reference.encode(TEXTS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta"])
def test_a_limit_on_texts_is_no_size_of_a_table(embedder: Any, model_type: str) -> None:
    """Where a checkpoint's texts end at 200 tokens its embeddings of positions were expected to be 200, not 258."""
    folder, reference = embedder(model_type, "mean")
    ready = started(folder)
    assert ready.info.max_model_len == 200
    found = vectors(ready.engine, ids_of(reference))
    assert_allclose(np.concatenate(found), reference.encode(TEXTS), rtol=0, atol=1e-4)


def test_the_last_token_alone_reads_the_prefix_cache(embedder: Any) -> None:
    for mode, num_cached in (("lasttoken", 8), ("mean", 0)):
        folder, _ = embedder("qwen3" if mode == "lasttoken" else "llama", mode, mode == "lasttoken")
        engine = started(folder).engine
        adds = [AddRequest(TokensInput([5] * 12), NO_OUTPUT, pooling=Pooling()) for _ in range(2)]
        assert run(engine, adds[:1])[adds[0].request_id].num_cached_tokens == 0
        assert run(engine, adds[1:])[adds[1].request_id].num_cached_tokens == num_cached


def test_preempted_requests_pool_no_token_twice(embedder: Any) -> None:
    """Requests that wait for blocks, and are computed again from their beginning, keep what they have pooled."""
    folder, reference = embedder("llama", "mean")
    engine = started(folder, max_num_batched_tokens=16).engine
    prompt = ids_of(reference)[2]
    add = AddRequest(TokensInput(prompt), NO_OUTPUT, pooling=Pooling())
    engine.add(0, add)
    engine.step()
    engine.step()
    request = engine.scheduler.running[0]
    engine.scheduler._preempt(request)
    output = run(engine, [])[add.request_id]
    assert request.num_preemptions == 1
    assert_allclose(np.frombuffer(output.values, "<f4"), reference.encode(TEXTS[2]), rtol=0, atol=1e-4)


def test_all_hidden_states_fewer_dimensions_and_length_one(embedder: Any) -> None:
    folder, reference = embedder("llama", "mean")
    engine, ids = started(folder, max_num_batched_tokens=16).engine, ids_of(reference)[2]
    with torch.no_grad():
        states = reference.encode(TEXTS[2], output_value="token_embeddings").numpy()
    assert_allclose(vectors(engine, [ids], is_per_token=True)[0], states, rtol=0, atol=1e-4)
    plain, short, unit = (vectors(engine, [ids], **p)[0][0] for p in ({}, {"dimensions": 5}, {"is_finished": True}))
    assert_allclose(short, plain[:5])
    assert_allclose(unit, plain / np.linalg.norm(plain), atol=1e-6)


def test_base_models_and_models_that_generate_pool_the_last_token(tmp_path: Path) -> None:
    """A base model has no output head, and its tensors no common beginning; a generating one is asked for it."""
    from transformers import AutoModel, AutoModelForCausalLM

    ids = [7, 8, 9, 10]
    for auto, task in ((AutoModel, "auto"), (AutoModelForCausalLM, "embed")):
        folder = write_model(tmp_path / task, "qwen3", auto)
        with torch.no_grad():
            state = AutoModel.from_pretrained(folder)(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
        ready = started(folder, task=task)
        assert (ready.info.task, ready.info.vectors is not None and ready.info.vectors.size) == ("embed", 48)
        assert_allclose(vectors(ready.engine, [ids])[0][0], state / np.linalg.norm(state), rtol=0, atol=1e-4)


def test_requests_of_both_kinds_share_a_step(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path / "both", "qwen3", AutoModelForCausalLM)
    engine, prompt = started(folder, task="embed").engine, list(range(20, 50))

    def generate() -> AddRequest:
        return AddRequest(TokensInput(prompt), SamplingParams(temperature=0, max_tokens=4, logprobs=1))

    def embed() -> AddRequest:
        return AddRequest(TokensInput(prompt[::-1]), NO_OUTPUT, pooling=Pooling(is_per_token=True))

    alone = [next(iter(run(engine, [add]).values())) for add in (generate(), embed())]
    first, second, third = generate(), embed(), generate()
    engine.add(0, first)
    engine.step()
    together = run(engine, [second, third])
    assert together[third.request_id].finish_reason is FinishReason.LENGTH
    assert_allclose(
        np.frombuffer(together[second.request_id].values, "<f4"), np.frombuffer(alone[1].values, "<f4"), atol=1e-5
    )


def test_classifiers_and_rerankers(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder, ids = write_classifier(tmp_path / "three", 3), [9, 8, 7, 6]
    ready = started(folder)
    with torch.no_grad():
        logits = AutoModelForSequenceClassification.from_pretrained(folder)(torch.tensor([ids])).logits[0]
    assert ready.info.task == "classify" and ready.info.vectors is not None
    assert ready.info.vectors.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert_allclose(vectors(ready.engine, [ids])[0][0], torch.softmax(logits, 0).numpy(), atol=1e-4)
    assert_allclose(vectors(ready.engine, [ids], is_finished=False)[0][0], logits.numpy(), atol=1e-4)
    reference = write_reranker(tmp_path / "reranker")
    pairs = [("ring", "kalo miren"), ("ring", "the ring")]
    engine = started(tmp_path / "reranker").engine
    prompts = reference.preprocess(pairs)
    ids_of_pairs = [
        row[mask.bool()].tolist() for row, mask in zip(prompts["input_ids"], prompts["attention_mask"], strict=True)
    ]
    found = [vector[0][0] for vector in vectors(engine, ids_of_pairs)]
    assert_allclose(found, reference.predict(pairs), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling": Pooling(dimensions=49)}, "dimensions must be between 1 and 48, got 49"),
        ({"sampling_params": SamplingParams(max_tokens=1)}, "must have max_tokens 0, one choice"),
        ({"num_choices": 2}, "one choice"),
    ],
)
def test_what_is_wrong_is_rejected(embedder: Any, changes: dict[str, Any], message: str) -> None:
    folder, _ = embedder("llama", "mean")
    fields: dict[str, Any] = {"sampling_params": NO_OUTPUT, "pooling": Pooling()} | changes
    with pytest.raises(RejectedError, match=message):
        started(folder).engine.add(0, AddRequest(TokensInput([3]), **fields))


def test_a_checkpoint_is_for_what_its_files_say(embedder: Any, tmp_path: Path) -> None:
    folder, _ = embedder("llama", "mean")
    task = find_task(folder, "auto")
    assert (task.name, task.max_num_tokens, find_task(folder, "embed").name) == ("embed", 200, "embed")
    with pytest.raises(ModelError, match="task classify needs a classifier's head, and LlamaModel has none"):
        find_task(folder, "classify")
    with pytest.raises(ModelError, match="task generate needs an output head, and LlamaModel has none"):
        find_task(folder, "generate")
    for name in ("config.json", "modules.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.CNN", "path": "1_CNN"}]')
    with pytest.raises(ModelError, match="module CNN is not supported"):
        find_task(tmp_path, "auto")
    (tmp_path / "modules.json").write_text('[{"type": "models.Transformer", "path": ""}]')
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 7, "do_lower_case": true}')
    for normalizer, fault in (('{"type": "Lowercase"}', None), ('{"type": "NFC"}', "do_lower_case is not supported")):
        (tmp_path / "tokenizer.json").write_text(f'{{"normalizer": {normalizer}}}')
        if fault is None:
            assert find_task(tmp_path, "auto").max_num_tokens == 7
        else:
            with pytest.raises(ModelError, match=fault):
                find_task(tmp_path, "auto")
    (tmp_path / "modules.json").write_text('[{"type": "models.Dense", "path": "../other"}]')
    with pytest.raises(ModelError, match="path"):
        find_task(tmp_path, "auto")


def test_the_setting_pooling_decides_over_the_checkpoint(embedder: Any) -> None:
    folder, reference = embedder("llama", "mean")
    ids = ids_of(reference)[0]
    states = reference.encode(TEXTS[0], output_value="token_embeddings").numpy()
    for pooling, expected in (("last", states[-1]), ("cls", states[0]), ("mean", states.mean(0))):
        assert_allclose(vectors(started(folder, pooling=pooling).engine, [ids])[0][0], expected, rtol=0, atol=1e-4)
