"""Pictures whose tokens have rows and columns as positions: greedy ids are those of transformers for all of Qwen's."""

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from PIL import Image

from tests.engine.recording import RecordedCapture, StaticBackend
from tests.engine.requests_for_tests import add_request
from tests.engine.runs import run
from tests.picture_checkpoints import encoded, expected, picture
from tests.qwen_picture_checkpoints import SIGN, WRITERS
from weft.engine.cache.manager import KVCacheManager
from weft.engine.cache.specs import group_layers, paged_groups
from weft.engine.describe.config import ModelConfig, load_model_config
from weft.engine.fallback.vision import load_encoder
from weft.engine.kernels.torch.caches import Caches
from weft.engine.kernels.torch.layer_kernels import TorchKernels
from weft.engine.layers.block import Decoder
from weft.engine.loop.engine import Engine
from weft.engine.loop.sight import Sight
from weft.engine.models.loading import load_weights
from weft.engine.request import make_request
from weft.engine.runner.cuda_graphs import StepGraphs
from weft.engine.runner.model_runner import ModelRunner
from weft.engine.schedule.pooled_requests import table_rows
from weft.engine.schedule.scheduler import ScheduledRequest, Scheduler
from weft.engine.schedule.step_cost import StepCostModel
from weft.engine.start.draft_head import read_served
from weft.engine.start.startup import Started, start
from weft.engine.vision.checkpoint import with_vision
from weft.engine.vision.eyes import KEPT_BYTES, Eyes
from weft.engine.wire.errors import ModelError
from weft.engine.wire.inputs import InputLimits, TokensInput, TokenSpan
from weft.engine.wire.messages import AddRequest, EngineOptions, Guidance
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.pictures import Picture, Vision
from weft.server.pictures.child import PictureReader

NUM_IDS, CPU = 10, torch.device("cpu")
LARGE, TALL, ROW = picture(1, 80, 50), picture(2, 20, 64), picture(3, 64, 8)
PROMPTS = {
    "one at the start": (f"{SIGN}what is it?", [LARGE]),
    "one at the end": (f"what is it?{SIGN}", [TALL]),
    "three of several sizes": (f"first {SIGN} then {SIGN}{SIGN} and so on", [LARGE, ROW, TALL]),
    "one row, whose tokens have as many positions": (f"what {SIGN} is it?", [ROW]),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Operations as small as these models' are done before another thread has heard of them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Checkpoint:
    """A checkpoint, its model in transformers, and what reads its pictures."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.model = folder, WRITERS[name](folder)
        self.token_id = self.model.config.image_token_id
        self._memory = os.memfd_create("test")
        self.reader = PictureReader(folder, self.token_id, "float32", self._memory)

    def asked(self, text: str, images: list[Image.Image], number: int = 1, **params: Any) -> AddRequest:
        """A request as the server makes it."""
        pieces, ids = text.split("<|image_pad|>"), list[int]()
        spans, pictures = list[TokenSpan](), list[Picture]()
        tokens = self.reader._processor.tokenizer
        for i, piece in enumerate(pieces):
            if i:
                made = self.reader.read(encoded(images[i - 1]))
                spans.append(TokenSpan(len(ids), made.num_tokens, made.digest))
                data = os.pread(self._memory, made.num_bytes, 0)
                pictures.append(Picture(self.token_id, made.arrays, data, grid=made.grid))
                ids += [self.token_id] * made.num_tokens
            ids += tokens(piece)["input_ids"]
        given = TokensInput(ids, spans=spans, pictures=pictures)
        return AddRequest(given, SamplingParams(temperature=0, max_tokens=NUM_IDS, **params), request_id=number)

    def expected(self, text: str, images: list[Image.Image]) -> tuple[Any, list[int]]:
        """Tokens of the prompt, and how transformers goes on."""
        return expected(self.model, self.folder, text, images, NUM_IDS)


@pytest.fixture(scope="module", params=sorted(WRITERS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def started(folder: Path, **options: Any) -> Started:
    options = {"block_size": 8, "kv_cache_memory": 4 << 20, "pictures": True, **options}
    return start(EngineOptions(model=str(folder), device="cpu", dtype="float32", **options), "test")


def ids_of(built: Started, *adds: AddRequest) -> list[list[int]]:
    outputs = run(built.engine, list(adds))
    return [list(outputs[add.request_id, 0].token_ids) for add in adds]


def test_greedy_ids_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    """Beside each other and beside text in chunks that cut every picture; then one of them alone and whole."""
    prompts = [*PROMPTS.values(), ("only words", [])]
    adds = [checkpoint.asked(*prompt, number) for number, prompt in enumerate(prompts)]
    wanted = [checkpoint.expected(*prompt) for prompt in prompts]
    assert [add.input.token_ids for add in adds] == [made["input_ids"][0].tolist() for made, _ in wanted]
    built = started(checkpoint.folder, max_num_seqs=8, max_num_batched_tokens=24)
    assert ids_of(built, *adds) == [ids for _, ids in wanted]
    add, (made, ids) = checkpoint.asked(*prompts[2], logprobs=0), wanted[2]
    outputs = run(started(checkpoint.folder).engine, [add])[1, 0]
    assert outputs.token_ids == ids and outputs.logprobs is not None
    with torch.inference_mode():
        logits = checkpoint.model(**made).logits[0, -1]
    assert outputs.logprobs[0].logprob == pytest.approx(logits.log_softmax(-1).max().item(), abs=1e-3)


def test_a_second_turn_goes_on_behind_what_was_computed(checkpoint: Checkpoint) -> None:
    built, text = started(checkpoint.folder), f"{SIGN}what is it? " * 2 + "or not? " * 8
    ids_of(built, checkpoint.asked(text, [LARGE, TALL]))
    (second,) = run(built.engine, [checkpoint.asked(text + SIGN + "and now?", [LARGE, TALL, ROW], 2)]).values()
    assert second.token_ids == checkpoint.expected(text + SIGN + "and now?", [LARGE, TALL, ROW])[1]
    if not hasattr(checkpoint.model.config.text_config, "linear_key_head_dim"):  # whose states are kept more rarely
        assert (second.num_cached_tokens or 0) > 40 * 2


@pytest.fixture(scope="module")
def stacking(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl")


def test_a_request_that_was_preempted_goes_on(stacking: Checkpoint) -> None:
    """Once within its pictures, and once behind them."""
    engine = started(stacking.folder, max_num_seqs=1, max_num_batched_tokens=16, prefix_caching=False).engine
    prompt, ids = PROMPTS["three of several sizes"], list[int]()
    engine.add(0, stacking.asked(*prompt))
    for number in range(1000):
        if number in (4, 14):
            engine.scheduler._preempt(engine.scheduler.running[-1])
        ids += [token_id for _, output in engine.step() for token_id in output.token_ids]
        if not engine.has_work:
            break
    assert engine.scheduler.counters.num_preemptions == 2
    assert ids == stacking.expected(*prompt)[1]


@pytest.mark.usefixtures("cheap_drafts")
def test_drafts_behind_pictures_are_verified(stacking: Checkpoint) -> None:
    """Right ones, and one that is wrong."""
    built, prompt = started(stacking.folder), PROMPTS["three of several sizes"]
    _, ids = stacking.expected(*prompt)
    guidance = Guidance(prediction_token_ids=(*ids[:5], ids[0], *ids[6:]))
    assert ids_of(built, replace(stacking.asked(*prompt), guidance=guidance)) == [ids]
    counters = built.engine.scheduler.counters
    assert counters.num_draft_tokens > counters.num_accepted_tokens > 0


def test_steps_behind_pictures_are_graphs(stacking: Checkpoint) -> None:
    options = EngineOptions(model=str(stacking.folder), device="cpu", dtype="float32", pictures=True)
    facts = read_served(options, None)
    assert isinstance(facts, ModelConfig)
    model = load_weights(
        stacking.folder, facts, TorchKernels(), device=CPU, dtype=torch.float32, max_model_len=facts.num_positions
    )
    assert isinstance(model, Decoder)
    groups = paged_groups(group_layers(model.cache_specs))
    specs, limits = [group.spec for group in groups], {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    caches = Caches(StaticBackend(groups, 40, 8, 64))
    graphs = StepGraphs(model, caches, CPU, specs, **limits, make_capture=RecordedCapture)
    seeing = Eyes(model, load_encoder(stacking.folder, CPU, torch.float32), CPU)
    runner, eager = ModelRunner(model, caches, CPU, graphs=graphs, eyes=seeing), []
    while runner.prepare():
        pass
    forward = runner.forward
    runner.forward = lambda ids, batch: (eager.append(batch), forward(ids, batch))[1]  # type: ignore[method-assign]
    scheduler = Scheduler(KVCacheManager(40, 8, specs), StepCostModel(), **limits, itl_target_s=10.0)
    picture_token = InputLimits(picture_token=stacking.token_id)
    vocabulary: dict[str, Any] = {"vocab_size": facts.vocab_size, "max_model_len": 256, "input_limits": picture_token}
    sight, prompt = partial(Sight, features=seeing, room_bytes=KEPT_BYTES), PROMPTS["one at the start"]
    engine = Engine(scheduler, runner, **vocabulary, max_num_waiting=9, sight=sight)
    assert run(engine, [stacking.asked(*prompt)])[1, 0].token_ids == stacking.expected(*prompt)[1]
    assert len(eager) == 1 and eager[0].lookups.shape == (3, eager[0].num_tokens)


def test_positions_are_on_three_axes_in_pictures_alone() -> None:
    """Two tokens of text, a picture of two rows and three columns, one token, a picture of one row, two tokens."""
    spans = [TokenSpan(2, 6, b"a"), TokenSpan(9, 2, b"b")]
    pictures = [Picture(7, {}, grid=grid) for grid in ((2, 3), (1, 2))]
    request = add_request([0] * 13).input
    made = make_request(
        replace(add_request([0]), input=replace(request, spans=spans, pictures=pictures)),
        connection=0,
        arrival=0,
        arrival_time=0.0,
        eos_token_ids=frozenset(),
        max_model_len=99,
        cache_seed=b"",
        block_size=4,
    )
    times = [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 9]
    rows = [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8, 9]
    columns = [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9]
    whole = np.array([times, rows, columns])
    for first, end in itertools.combinations(range(14), 2):
        part = ScheduledRequest(made, first, end - first, 13, (), 0, 0, 0, 0)
        found = table_rows([part], np.arange(first, end), np.array([0, end - first]))
        expected = whole[:, first:end]
        assert found is not None
        assert found.tolist() == (expected if (expected != expected[0]).any() else expected[0]).tolist()
    assert made.table_offset == -3


@pytest.mark.parametrize("grid", [(0, 40), (5, 7), (-5, -8), (1, 41)])
def test_the_engine_refuses_a_grid_of_other_tokens(stacking: Checkpoint, grid: tuple[int, int]) -> None:
    given = stacking.asked(f"{SIGN}a", [LARGE]).input
    assert isinstance(given, TokensInput) and given.pictures[0].grid == (5, 8)
    limits = InputLimits(picture_token=stacking.token_id)
    assert given.fault(1000, limits) is None
    changed = replace(given, pictures=[replace(given.pictures[0], grid=grid)])
    assert f"must have as many rows times columns, got {grid}" in str(changed.fault(1000, limits))


def test_older_files_of_qwen_keep_all_in_one(tmp_path: Path) -> None:
    """As those of Qwen2-VL, with the processor of Qwen3-VL's files."""
    checkpoint = Checkpoint(tmp_path, "qwen2_vl")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    text = fields.pop("text_config")
    rope = text.pop("rope_parameters")
    del text["model_type"], text["layer_types"]
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    fields |= text | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "tie_word_embeddings": False}
    path.write_text(json.dumps(fields))
    path = tmp_path / "preprocessor_config.json"
    named = {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen2VLProcessor"}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    prompt = PROMPTS["three of several sizes"]
    assert ids_of(started(tmp_path), checkpoint.asked(*prompt)) == [checkpoint.expected(*prompt)[1]]


@pytest.mark.parametrize(
    ("sections", "is_interleaved", "axes"),
    [
        ((2, 1, 1), False, (0, 0, 1, 2)),
        ((1, 1, 0, 0, 1, 1), False, (0, 1, 1, 2)),
        ((2, 1, 1), True, (0, 1, 2, 0)),
        ((3, 1, 0), True, (0, 1, 0, 0)),
    ],
)
def test_sections_say_by_which_position_each_frequency_turns(
    stacking: Checkpoint, sections: tuple[int, ...], is_interleaved: bool, axes: tuple[int, ...]
) -> None:
    facts = load_model_config(stacking.folder)
    half = replace_fields(facts, ropes=tuple(replace_fields(rope, rotary_dim=8) for rope in facts.ropes))
    ropes = with_vision(half, Vision(7, 0, sections=sections, is_interleaved=is_interleaved)).ropes
    assert {rope.axes for rope in ropes} == {axes}


def test_sections_that_divide_other_frequencies_are_refused(stacking: Checkpoint) -> None:
    facts = load_model_config(stacking.folder)
    with pytest.raises(ModelError, match=r"mrope_section must divide 8 frequencies by three axes, got \[2, 2, 2\]"):
        with_vision(facts, Vision(7, 0, sections=(2, 2, 2)))
