"""A head of the checkpoint drafts what it should, and changes the number of steps and nothing else."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM

from tests import quantized_checkpoints
from tests.checkpoints import Checkpoint, write_checkpoint, write_config
from tests.engine.drafting import change_config, make_engine, recorded, requests, texts
from tests.engine.recording import RecordedCapture, StaticBackend
from tests.engine.runs import ids, run
from weft.engine.cache.specs import group_layers, paged_groups
from weft.engine.describe.config import load_model_config
from weft.engine.kernels.torch.caches import Caches
from weft.engine.models.draft_head import head_spec
from weft.engine.runner.cuda_graphs import StepGraphs
from weft.engine.runner.model_runner import ModelRunner
from weft.engine.start import report
from weft.engine.start.startup import start
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions

_EXPERTS: dict[str, object] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
}
MODELS = {
    "deepseek_v3": Checkpoint("deepseek_v3", _EXPERTS | _LATENT),
    "glm4_moe": Checkpoint("glm4_moe", _EXPERTS | {"head_dim": 16, "use_qk_norm": True}),
    "glm4_moe_lite": Checkpoint("glm4_moe_lite", _EXPERTS | _LATENT),
}
DENSE = "dense"
"""Experts on a CPU launch what their tokens choose, so no step of them can be recorded."""
_ALL = MODELS | {DENSE: Checkpoint("glm4_moe", _EXPERTS | {"head_dim": 16, "first_k_dense_replace": 3})}
NUM_LAYERS = 2
"""The third layer that transformers makes becomes the head's."""


pytestmark = pytest.mark.usefixtures("cheap_small_steps")


def write(name: str, folder: Path) -> Path:
    """A checkpoint whose last layer is that of a head, as published ones have it."""
    write_checkpoint(_ALL[name], folder)
    (path,) = folder.glob("*.safetensors")
    tensors, layer, torch_state = load_file(path), f"model.layers.{NUM_LAYERS}", torch.manual_seed(7)
    hidden = tensors["model.norm.weight"].numel()
    tensors |= {f"{layer}.{name}.weight": torch.rand(hidden) + 0.5 for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{layer}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=torch_state) * 0.2
    tensors[f"{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    change_config(folder, num_hidden_layers=NUM_LAYERS, num_nextn_predict_layers=1)
    return folder


@pytest.fixture(scope="session")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("heads")
    return lambda name: root / name if (root / name).exists() else write(name, root / name)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_ids_are_those_of_plain_decoding(
    with_head: Callable[[str], Path], name: str, temperature: float, overlap: bool
) -> None:
    adds = requests(temperature, 30)
    plain = run(make_engine(with_head(name), None), adds)
    engine = make_engine(with_head(name), "mtp", overlap=overlap)
    assert ids(run(engine, adds)) == ids(plain)
    assert engine.scheduler.counters.num_draft_tokens > 0


class Reference:
    """The head by transformers' modules: all pairs of the text at once, then one pair more for each draft."""

    def __init__(self, folder: Path) -> None:
        whole = AutoModelForCausalLM.from_pretrained(folder, num_hidden_layers=NUM_LAYERS + 1, dtype=torch.float32)
        self._layer, self._model, self._output = whole.model.layers[NUM_LAYERS], whole.model, whole.lm_head
        whole.model.layers = whole.model.layers[:NUM_LAYERS]
        stored = load_file(next(folder.glob("*.safetensors")))
        begin = f"model.layers.{NUM_LAYERS}."
        self._own = {name.removeprefix(begin): tensor for name, tensor in stored.items() if name.startswith(begin)}

    @torch.no_grad()
    def drafts(self, token_ids: list[int], num_drafts: int) -> list[int]:
        """Behind token_ids, greedily."""
        following = list(token_ids[1:])
        hidden = self._model(torch.tensor([token_ids[:-1]])).last_hidden_state[0]
        while len(following) < len(token_ids) - 1 + num_drafts:
            embedded = self._model.embed_tokens(torch.tensor(following))
            pairs = torch.cat((self._norm(embedded, "enorm"), self._norm(hidden, "hnorm")), 1)
            made = self._decode(pairs @ self._own["eh_proj.weight"].T)
            hidden = torch.cat((hidden, made[-1:]))
            following.append(int(self._output(made[-1]).argmax()))
        return following[len(token_ids) - 1 :]

    def _norm(self, values: Tensor, name: str) -> Tensor:
        return rms_norm(values, values.shape[-1:], self._own[f"{name}.weight"], self._model.config.rms_norm_eps)

    def _decode(self, inputs: Tensor) -> Tensor:
        positions = torch.arange(len(inputs))[None]
        mask = torch.full((1, 1, len(inputs), len(inputs)), float("-inf")).triu(1)
        rotation = self._model.rotary_emb(inputs[None], positions)
        outputs = self._layer(inputs[None], attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        return self._norm(outputs[0], "shared_head.norm")


@pytest.mark.parametrize(
    ("overlap", "max_num_batched_tokens"), [(False, 512), (False, 48), (True, 48)], ids=["whole", "chunks", "ahead"]
)
@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_what_the_head_predicts(
    with_head: Callable[[str], Path],
    name: str,
    overlap: bool,
    max_num_batched_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(with_head(name), "mtp", overlap=overlap, max_num_batched_tokens=max_num_batched_tokens)
    seen, reference = recorded(engine, monkeypatch), Reference(with_head(name))
    adds = texts(5, 33, 110)
    run(engine, adds)
    run(engine, adds)  # whose prefixes are found in both caches
    assert engine.scheduler.counters.prefix_cache_hits >= 32 + 96
    assert sum(len(draft) == 3 for _, draft in seen) > 40
    assert [text for text, draft in seen if reference.drafts(text, len(draft)) != draft] == []


def test_a_quantized_head_is_read_as_the_model_is(
    with_head: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    plain = quantized_checkpoints.write(
        with_head("deepseek_v3"), tmp_path, config, quantized_checkpoints.fp8_blocks(16, 16)
    )
    engine = make_engine(tmp_path, "mtp")
    seen, reference = recorded(engine, monkeypatch), Reference(plain)
    run(engine, texts(5, 33))
    assert len(seen) > 10
    assert [text for text, draft in seen if reference.drafts(text, len(draft)) != draft] == []


def test_a_step_of_the_model_that_is_a_graph_gives_the_head_the_same(
    with_head: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_head(DENSE)
    engine = make_engine(folder, "mtp", max_num_batched_tokens=64)
    runner, kv = engine._executor, engine.scheduler.kv
    assert isinstance(runner, ModelRunner)
    groups = paged_groups(group_layers(runner._model.cache_specs))  # type: ignore[attr-defined]
    caches = Caches(StaticBackend(groups, kv.num_blocks, kv.block_size, 64))
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "samples": False}
    graphs = StepGraphs(runner._model, caches, torch.device("cpu"), kv.specs, **limits, make_capture=RecordedCapture)
    runner._caches, runner._graphs = caches, graphs
    while graphs.record_next():
        pass
    monkeypatch.setattr(runner, "forward", lambda *arguments: pytest.fail("a step is not a graph"))
    seen, reference = recorded(engine, monkeypatch), Reference(folder)
    run(engine, texts(5, 33, 110))
    assert len(seen) > 20
    assert [text for text, draft in seen if reference.drafts(text, len(draft)) != draft] == []


@pytest.mark.parametrize("name", MODELS)
def test_a_small_cache_preempts_and_changes_nothing(with_head: Callable[[str], Path], name: str) -> None:
    adds = requests(1.0, 60)
    plain = run(make_engine(with_head(name), None), adds)
    engine = make_engine(with_head(name), "mtp", kv_cache_memory=400_000 if name == "glm4_moe" else 150_000)
    engine.scheduler._expected_growth = lambda request: 0  # type: ignore[method-assign]
    assert ids(run(engine, adds)) == ids(plain)
    counters = engine.scheduler.counters
    assert counters.num_preemptions > 0
    assert counters.num_draft_tokens > 0


@pytest.fixture(scope="session")
def always_right(with_head: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No layer adds anything, so the next token hangs on the last one alone, which the head reads."""
    folder = tmp_path_factory.mktemp("right") / "model"
    shutil.copytree(with_head("glm4_moe"), folder)
    (path,) = folder.glob("*.safetensors")
    tensors, begin = load_file(path), f"model.layers.{NUM_LAYERS}"
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
            tensor.zero_()
    hidden = len(tensors["model.norm.weight"])
    tensors[f"{begin}.eh_proj.weight"] = torch.eye(hidden, 2 * hidden)
    tensors[f"{begin}.enorm.weight"] = torch.ones(hidden)
    tensors[f"{begin}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_that_is_always_right_saves_steps(always_right: Path, temperature: float, overlap: bool) -> None:
    """Sampled, too: it draws its drafts with the numbers that the verification draws with."""
    adds = requests(temperature, 50)
    plain_engine = make_engine(always_right, None)
    plain = run(plain_engine, adds)
    engine = make_engine(always_right, "mtp", overlap=overlap)
    assert ids(run(engine, adds)) == ids(plain)
    counters = engine.scheduler.counters
    assert counters.num_accepted_tokens > 0.98 * counters.num_draft_tokens > 200
    assert counters.num_steps < plain_engine.scheduler.counters.num_steps / 2


def test_its_weights_and_its_cache_count(with_head: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    options = EngineOptions(model=str(with_head("glm4_moe")), device="cpu", dtype="float32", kv_cache_memory=1_000_000)
    drafting = msgspec.structs.replace(options, speculative="mtp")
    plain, planned = report._read(options), report._read(drafting)
    head = head_spec(load_model_config(with_head("glm4_moe")))
    assert planned.weights_bytes - plain.weights_bytes == 4 * head.num_parameters
    assert [len(group.layers) for group in planned.groups] == [NUM_LAYERS, 1]
    assert start(drafting, "epoch").plan.weights_bytes == planned.weights_bytes
    report._print(drafting)
    assert "draft model  the model's own head\n" in capsys.readouterr().out


def test_native_kernels_and_random_weights_have_a_head_too(with_head: Callable[[str], Path]) -> None:
    options = EngineOptions(
        model=str(with_head("glm4_moe")), device="cpu", dtype="bfloat16", max_model_len=256, load_format="dummy"
    )
    engine = start(msgspec.structs.replace(options, speculative="mtp"), "epoch").engine
    run(engine, requests(1.0, 20))
    assert engine.scheduler.counters.num_draft_tokens > 0


def refused(folder: Path, **options: object) -> str:
    with pytest.raises(ModelError) as caught:
        start(EngineOptions(model=str(folder), device="cpu", speculative="mtp", **options), "epoch")  # type: ignore[arg-type]
    return str(caught.value)


def test_what_has_no_head_is_refused_before_weights_are_read(with_head: Callable[[str], Path], tmp_path: Path) -> None:
    without = tmp_path / "without"
    shutil.copytree(with_head("glm4_moe"), without)
    (path,) = without.glob("*.safetensors")
    save_file({name: tensor for name, tensor in load_file(path).items() if "layers.2" not in name}, path)
    assert (
        refused(without)
        == "speculative mtp: config.json names a head, but the checkpoint has no model.layers.2.eh_proj"
    )
    change_config(without, num_nextn_predict_layers=0)
    assert "config.json has none (num_nextn_predict_layers)" in refused(without)
    qwen3 = write_config(Checkpoint("qwen3", {"head_dim": 16}), tmp_path / "qwen3")
    change_config(qwen3, num_nextn_predict_layers=1)
    assert refused(qwen3) == "speculative mtp: the heads of Qwen3ForCausalLM are not supported"


def test_what_cannot_verify_drafts_or_share_with_a_head_is_refused(
    with_head: Callable[[str], Path], tmp_path: Path
) -> None:
    states = write_config(Checkpoint("qwen3_next", {"num_hidden_layers": 4}), tmp_path / "states")
    assert refused(states) == (
        "speculative mtp: Qwen3NextForCausalLM keeps states, which cannot go back behind a refused draft"
    )
    folder = with_head("glm4_moe")
    assert refused(folder, tensor_parallel_size=2) == "speculative mtp is for one rank, got tensor_parallel_size 2"
    assert refused(folder, max_loras=1) == "speculative mtp does not go together with adapters, got max_loras 1"
    assert "transformers' module computes Glm4MoeForCausalLM" in refused(folder, model_impl="transformers")
