"""A draft model changes the number of steps and nothing else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoints import CHECKPOINTS, VOCAB_SIZE, Checkpoint, write_checkpoint
from tests.engine.drafting import make_engine, requests
from tests.engine.recording import RecordedCapture, StaticBackend
from tests.engine.runs import Outputs, ids, run
from weft import server
from weft.engine import drafts as pace
from weft.engine.cache.specs import CacheGroup, PagedKV, StateSpec, group_layers, paged_groups
from weft.engine.config import resolve
from weft.engine.kernels.cpu import library
from weft.engine.kernels.torch.caches import Caches
from weft.engine.loop.engine import Engine
from weft.engine.runner.cuda_graphs import StepGraphs
from weft.engine.runner.model_runner import ModelRunner
from weft.engine.start import draft_model
from weft.engine.start.draft_model import DraftModel, SmallSteps, find_draft_checkpoint, match_groups
from weft.engine.start.model_choice import plan_model, read_model
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions

DEMO = Path(server.__file__).parent / "demo_model"
CPU = torch.device("cpu")
MAX_NUM_TOKENS = 64


real_price = SmallSteps.price


pytestmark = pytest.mark.usefixtures("cheap_small_steps")


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the vocabulary of the other checkpoints."""
    folder = tmp_path_factory.mktemp("draft") / "model"
    changes = {**CHECKPOINTS["qwen3"].changes, "num_hidden_layers": 1, "hidden_size": 32}
    write_checkpoint(Checkpoint("qwen3", changes, seed=1), folder)
    return folder


def check_equal(outputs: Outputs, plain: Outputs, *, is_exact: bool) -> None:
    assert ids(outputs) == ids(plain)
    if is_exact:
        assert all(outputs[key].logprobs == plain[key].logprobs for key in plain)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_ids_are_those_of_plain_decoding(
    checkpoint_folder: Callable[[str], Path], one_layer: Path, name: str, temperature: float, overlap: bool
) -> None:
    adds = requests(temperature, 30)
    plain = run(make_engine(checkpoint_folder(name), None), adds)
    engine = make_engine(checkpoint_folder(name), one_layer, overlap=overlap)
    check_equal(run(engine, adds), plain, is_exact=False)
    assert engine.scheduler.counters.num_draft_tokens > 0
    assert engine._speculator is not None


def test_a_small_cache_preempts_and_changes_nothing(checkpoint_folder: Callable[[str], Path], one_layer: Path) -> None:
    adds = requests(1.0, 60)
    plain = run(make_engine(checkpoint_folder("qwen3"), None), adds)
    engine = make_engine(checkpoint_folder("qwen3"), one_layer, kv_cache_memory=400_000)
    engine.scheduler._expected_growth = lambda request: 0  # type: ignore[method-assign]
    check_equal(run(engine, adds), plain, is_exact=False)
    counters = engine.scheduler.counters
    assert counters.num_preemptions > 0
    assert counters.num_draft_tokens > 0
    assert engine._speculator is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_that_drafts_for_itself_is_always_right(temperature: float, overlap: bool) -> None:
    """Sampled, too: it draws its drafts with the numbers that the verification draws with."""
    if library.load() is None:
        pytest.skip("torch's layers compute a row differently beside other rows")
    adds = requests(temperature, 50, vocab_size=400)
    plain_engine = make_engine(DEMO, None, dtype="bfloat16", max_num_batched_tokens=128)
    plain = run(plain_engine, adds)
    engine = make_engine(DEMO, DEMO, dtype="bfloat16", overlap=overlap, max_num_batched_tokens=128)
    check_equal(run(engine, adds), plain, is_exact=True)
    counters = engine.scheduler.counters
    assert counters.num_accepted_tokens == counters.num_draft_tokens > 200
    assert engine.scheduler.counters.num_steps < plain_engine.scheduler.counters.num_steps / 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_prompt_is_caught_up_with_in_parts(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    if library.load() is None:
        pytest.skip("torch's layers compute a row differently beside other rows")
    monkeypatch.setattr(draft_model, "_CATCH_UP_TOKENS", 8)
    lengths: list[int] = []
    launch = ModelRunner.launch
    engine = make_engine(DEMO, DEMO, dtype="bfloat16", overlap=overlap, max_num_batched_tokens=128)
    model = draft_model_of(engine)
    monkeypatch.setattr(
        model._runner, "launch", lambda batch: lengths.append(batch.num_tokens) or launch(model._runner, batch)
    )
    run(engine, requests(1.0, 50, vocab_size=400))
    counters = engine.scheduler.counters
    assert counters.num_accepted_tokens == counters.num_draft_tokens > 100
    assert 8 <= max(lengths) <= 8 + len(requests(1.0, 1)) * 2


def test_a_draft_model_that_does_not_draft_computes_nothing(
    checkpoint_folder: Callable[[str], Path], one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(checkpoint_folder("qwen3"), one_layer)
    model = draft_model_of(engine)
    monkeypatch.setattr(model.pace, "num_drafts", lambda price: 0)
    monkeypatch.setattr(model._runner, "forward", lambda *arguments: pytest.fail("it does not draft"))
    run(engine, requests(1.0, 20))


def draft_model_of(engine: Engine) -> DraftModel:
    assert engine._speculator is not None
    model = engine._speculator._draft_model
    assert isinstance(model, DraftModel)
    return model


def use_graphs(runner: ModelRunner, num_blocks: int, block_size: int, monkeypatch: pytest.MonkeyPatch) -> StepGraphs:
    """Let a runner compute all steps as graphs, none eagerly."""
    groups = paged_groups(group_layers(runner._model.cache_specs))  # type: ignore[attr-defined]
    caches = Caches(StaticBackend(groups, num_blocks, block_size, MAX_NUM_TOKENS))
    specs = [group.spec for group in groups]
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": MAX_NUM_TOKENS}
    graphs = StepGraphs(runner._model, caches, CPU, specs, **limits, make_capture=RecordedCapture)
    runner._caches, runner._graphs = caches, graphs
    while graphs.record_next():
        pass
    monkeypatch.setattr(runner, "forward", lambda *arguments: pytest.fail("a step is not a graph"))
    return graphs


def test_all_steps_of_both_models_may_be_graphs(
    checkpoint_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small steps, those that catch up, and those that verify drafts beside prompts."""
    adds, folder = requests(0.0, 40), checkpoint_folder("qwen3")
    limits = {"max_num_batched_tokens": MAX_NUM_TOKENS, "kv_cache_memory": 800_000}
    eager = make_engine(folder, folder, **limits)
    plain = run(eager, adds)
    engine = make_engine(folder, folder, **limits)
    model, runner, kv = draft_model_of(engine), engine._executor, engine.scheduler.kv
    assert isinstance(runner, ModelRunner)
    small = use_graphs(model._runner, kv.num_blocks, kv.block_size, monkeypatch)
    large = use_graphs(runner, kv.num_blocks, kv.block_size, monkeypatch)
    check_equal(run(engine, adds), plain, is_exact=False)
    accepted = engine.scheduler.counters.num_accepted_tokens
    assert accepted == pytest.approx(eager.scheduler.counters.num_accepted_tokens, rel=0.05) and accepted > 0
    runner.give_up_memory()
    assert small.progress[0] == large.progress[0] == 0
    assert runner.prepare() and large.progress[0] == 1, "the served model's come first"


def test_a_draft_model_that_is_never_right_is_left_alone(
    checkpoint_folder: Callable[[str], Path], one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "MAX_NUM_DRAFTS", 4)
    monkeypatch.setattr(SmallSteps, "price", lambda self, step_s: 0.4)
    engine = make_engine(checkpoint_folder("qwen3"), one_layer)
    run(engine, requests(1.0, 100))
    counters = engine.scheduler.counters
    assert counters.num_draft_tokens < counters.generation_tokens / 5


def test_one_slow_draft_does_not_end_drafting_for_ever(
    checkpoint_folder: Callable[[str], Path], one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SmallSteps, "price", real_price)
    engine = make_engine(checkpoint_folder("qwen3"), one_layer)
    model = draft_model_of(engine)
    model._small_step_s = 3.0
    first = model.price(1.0)
    assert first > 2.9
    assert 100 < next(n for n in range(9000) if model.pace.num_drafts(model.price(1.0))) < 6000


def test_another_vocabulary_is_refused(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    write_checkpoint(Checkpoint("qwen3", {"head_dim": 16, "vocab_size": 77}), tmp_path / "other")
    with pytest.raises(ModelError, match=rf"it has 77 token ids, the model {VOCAB_SIZE}$"):
        make_engine(checkpoint_folder("qwen3"), tmp_path / "other")


def test_it_is_said_that_the_draft_model_is_at_fault(checkpoint_folder: Callable[[str], Path]) -> None:
    """`cannot compute this model` was read as said of the served one."""
    asked = {"device": "cpu", "dtype": "bfloat16", "kv_cache_dtype": "int8"}
    options = EngineOptions(model=str(DEMO), speculative=str(checkpoint_folder("qwen3")), **asked)
    model = read_model(DEMO, "auto")
    config = resolve(options, model)
    with pytest.raises(ModelError, match=r"^the draft model cannot be used: kv_cache_dtype int8 needs"):
        find_draft_checkpoint(config, VOCAB_SIZE, plan_model(model, config))  # whose heads have 16 values


def test_groups_use_the_tables_that_reach_farthest() -> None:
    def groups(*windows: int | None) -> list[CacheGroup]:
        return [CacheGroup(PagedKV(1, 8, window), (index,)) for index, window in enumerate(windows)]

    assert match_groups(groups(None, 5), groups(7, None)) == [1, 1]
    assert match_groups(groups(5), groups(5)) == [0]
    with pytest.raises(ModelError, match="attends to 9 tokens, but the model keeps only the last 7"):
        match_groups(groups(9), groups(7, 3))
    with pytest.raises(ModelError, match="attends to all tokens"):
        match_groups(groups(None), groups(7))
    with pytest.raises(ModelError, match="go back behind a refused draft, and a state cannot"):
        match_groups(groups(None), [*groups(None), CacheGroup(StateSpec((8,), torch.float32), (1,))])
