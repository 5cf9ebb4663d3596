"""An EAGLE-3 head drafts what it should, and changes the number of steps and nothing else."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tests.checkpoints import VOCAB_SIZE, Checkpoint, load_reference, write_checkpoint, write_config
from tests.engine.drafting import change_config, make_engine, recorded, requests, texts
from tests.engine.guidance.demo import DEMO_MODEL
from tests.engine.runs import ids, run
from weft.engine.fields import Fields
from weft.engine.models.eagle_head import eagle_depths
from weft.engine.start import report
from weft.engine.start.startup import start
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions

HIDDEN, NUM_DRAFT_IDS = 48, 60
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": 56,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": NUM_DRAFT_IDS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "other layers": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}},
    "residual behind the norm, all ids": {"norm_before_residual": True, "draft_vocab_size": VOCAB_SIZE},
    "narrow, with an embedding": {"hidden_size": 36, "target_hidden_size": HIDDEN},
}
DEPTHS = {"other layers": (2, 4, 7)}
PLAIN_DEPTHS = (2, 4, 5)


pytestmark = pytest.mark.usefixtures("cheap_small_steps")


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle") / "served"
    write_checkpoint(Checkpoint("qwen3", {"head_dim": 16, "num_hidden_layers": 8}), folder)
    return folder


def llama_config(kind: str) -> LlamaConfig:
    return LlamaConfig(**(CONFIG | KINDS[kind]), attn_implementation="eager")


def new_layer(config: LlamaConfig) -> LlamaDecoderLayer:
    """Transformers' layer, whose attention reads twice as much."""
    layer = LlamaDecoderLayer(config, 0).eval()
    for name in ("q_proj", "k_proj", "v_proj"):
        size = getattr(layer.self_attn, name).out_features
        setattr(layer.self_attn, name, nn.Linear(2 * config.hidden_size, size, bias=False))
    return layer


def write_head(folder: Path, kind: str) -> Path:
    torch.manual_seed(5)
    config = llama_config(kind)
    num_ids, hidden = config.draft_vocab_size, config.hidden_size
    tensors = {f"midlayer.{name}": tensor for name, tensor in new_layer(config).state_dict().items()}
    tensors |= {"midlayer.hidden_norm.weight": torch.rand(hidden) + 0.5, "norm.weight": torch.rand(hidden) + 0.5}
    tensors |= {"fc.weight": torch.randn(hidden, 3 * HIDDEN) * 0.1, "lm_head.weight": torch.randn(num_ids, hidden)}
    if num_ids < VOCAB_SIZE:
        chosen = torch.randperm(VOCAB_SIZE)[:num_ids].sort().values
        tensors |= {"d2t": chosen - torch.arange(num_ids), "t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool)}
    if hidden != HIDDEN:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, hidden)
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    values = CONFIG | KINDS[kind] | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("heads")
    return lambda kind: root / kind if (root / kind).exists() else write_head(root / kind, kind)


class Reference:
    """The head by transformers' modules: all pairs of the text at once, then one pair more for each draft."""

    def __init__(self, served: Path, folder: Path, kind: str) -> None:
        self._model, self._config = load_reference(served), llama_config(kind)
        self._layer, self._rotary = new_layer(self._config), LlamaRotaryEmbedding(self._config)
        self._own = load_file(folder / "model.safetensors")
        begin = "midlayer."
        own = {name.removeprefix(begin): tensor for name, tensor in self._own.items() if name.startswith(begin)}
        self._hidden_norm = own.pop("hidden_norm.weight")
        self._layer.load_state_dict(own)
        self._is_behind_norm = bool(KINDS[kind].get("norm_before_residual"))
        self._depths = DEPTHS.get(kind, PLAIN_DEPTHS)

    @torch.no_grad()
    def drafts(self, token_ids: list[int], num_drafts: int) -> list[int]:
        """Behind token_ids, greedily."""
        following = list(token_ids[1:])
        states = self._model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        hidden = torch.cat([states[depth][0] for depth in self._depths], 1) @ self._own["fc.weight"].T
        while len(following) < len(token_ids) - 1 + num_drafts:
            made = self._decode(self._embed(torch.tensor(following)), hidden)
            hidden = torch.cat((hidden, made[-1:]))
            draft = int((self._norm(made[-1], self._own["norm.weight"]) @ self._own["lm_head.weight"].T).argmax())
            following.append(draft + int(self._own["d2t"][draft]) if "d2t" in self._own else draft)
        return following[len(token_ids) - 1 :]

    def _embed(self, token_ids: Tensor) -> Tensor:
        table = self._own.get("embed_tokens.weight", self._model.get_input_embeddings().weight)
        return table[token_ids]

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(values, values.shape[-1:], weight, 1e-5)

    def _decode(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        normed = self._norm(hidden, self._hidden_norm)
        stream = normed if self._is_behind_norm else hidden
        inputs = torch.cat((self._layer.input_layernorm(embedded), normed), 1)[None]
        mask = torch.full((1, 1, len(hidden), len(hidden)), float("-inf")).triu(1)
        rotation = self._rotary(inputs, torch.arange(len(hidden))[None])
        stream = stream + self._layer.self_attn(inputs, position_embeddings=rotation, attention_mask=mask)[0][0]
        return stream + self._layer.mlp(self._layer.post_attention_layernorm(stream))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_are_those_of_plain_decoding(
    served: Path, head: Callable[[str], Path], temperature: float, overlap: bool
) -> None:
    adds = requests(temperature, 30)
    plain = run(make_engine(served, None), adds)
    engine = make_engine(served, str(head("plain")), overlap=overlap)
    assert ids(run(engine, adds)) == ids(plain)
    assert engine.scheduler.counters.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("overlap", "max_num_batched_tokens"), [(False, 512), (True, 48)], ids=["whole", "chunks ahead"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_what_the_head_predicts(
    served: Path,
    head: Callable[[str], Path],
    kind: str,
    overlap: bool,
    max_num_batched_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = head(kind)
    engine = make_engine(served, str(folder), overlap=overlap, max_num_batched_tokens=max_num_batched_tokens)
    seen, reference = recorded(engine, monkeypatch), Reference(served, folder, kind)
    run(engine, texts(5, 33, 110))
    assert sum(len(draft) == 3 for _, draft in seen) > 20
    assert [text for text, draft in seen if reference.drafts(text, len(draft)) != draft] == []


def test_a_small_cache_preempts_and_changes_nothing(served: Path, head: Callable[[str], Path]) -> None:
    adds = requests(1.0, 60)
    plain = run(make_engine(served, None), adds)
    engine = make_engine(served, str(head("plain")), kv_cache_memory=1_000_000)
    engine.scheduler._expected_growth = lambda request: 0  # type: ignore[method-assign]
    assert ids(run(engine, adds)) == ids(plain)
    assert engine.scheduler.counters.num_preemptions > 0
    assert engine.scheduler.counters.num_draft_tokens > 0


def test_layers_are_named_in_two_ways() -> None:
    def depths(**values: object) -> tuple[int, ...]:
        return eagle_depths(Fields(values, "config.json"), 36)

    name = "eagle_aux_hidden_state_layer_ids"
    assert depths() == (2, 18, 33)
    assert depths(eagle_config={name: [1, 17, 32]}) == (2, 18, 33)
    assert depths(**{name: [2, 18, 33]}) == (2, 18, 33)
    assert depths(eagle_config={name: [24, 30, 36]}) == (24, 30, 36)
    with pytest.raises(ModelError, match=r"behind layers \(2, 18, 37\) does not fit a model of 36$"):
        depths(**{name: [1, 17, 36]})


def test_its_weights_and_its_cache_count(
    served: Path, head: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = EngineOptions(model=str(served), device="cpu", dtype="float32", kv_cache_memory=1_000_000)
    folder = head("narrow, with an embedding")
    drafting = msgspec.structs.replace(options, speculative=str(folder))
    plain, planned = report._read(options), report._read(drafting)
    stored = load_file(folder / "model.safetensors")
    num_values = sum(tensor.numel() for name, tensor in stored.items() if name not in ("d2t", "t2d"))
    assert planned.weights_bytes - plain.weights_bytes == 4 * num_values
    assert [len(group.layers) for group in planned.groups] == [8, 1]
    assert planned.activations_bytes > plain.activations_bytes, "what is tapped counts"
    assert start(drafting, "epoch").plan.weights_bytes == planned.weights_bytes
    report._print(drafting)
    assert "draft model  EAGLE-3 head narrow, with an embedding\n" in capsys.readouterr().out


def test_native_kernels_and_random_weights_draft_too(served: Path, head: Callable[[str], Path]) -> None:
    """The one call that computes all layers is divided where hidden states are kept."""
    options = EngineOptions(
        model=str(served), device="cpu", dtype="bfloat16", max_model_len=256, speculative=str(head("plain"))
    )
    for load_format in ("auto", "dummy"):
        engine = start(msgspec.structs.replace(options, load_format=load_format), "epoch").engine
        run(engine, requests(1.0, 20))
        assert engine.scheduler.counters.num_draft_tokens > 0


def refused(model: Path, speculative: Path, **options: object) -> str:
    with pytest.raises(ModelError) as caught:
        start(EngineOptions(model=str(model), device="cpu", speculative=str(speculative), **options), "epoch")  # type: ignore[arg-type]
    return str(caught.value)


def test_a_head_that_does_not_fit_is_refused(served: Path, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", "plain")
    states = write_config(Checkpoint("qwen3_next", {"num_hidden_layers": 8}), tmp_path / "states")
    assert "Qwen3NextForCausalLM keeps states, which cannot go back" in refused(states, folder)
    assert "is for one rank, got tensor_parallel_size 2" in refused(served, folder, tensor_parallel_size=2)
    gemma = write_config(
        Checkpoint("gemma4_text", {"num_hidden_layers": 8, "num_kv_shared_layers": 2}), tmp_path / "other"
    )
    assert "Gemma4ForCausalLM is not supported, whose layers have other inputs" in refused(gemma, folder)
    save_file(
        load_file(folder / "model.safetensors") | {"input_norm.weight": torch.ones(3 * HIDDEN)},
        folder / "model.safetensors",
    )
    assert "input_norm.weight" in refused(served, folder)
    change_config(folder, num_hidden_layers=2)
    assert "of several layers" in refused(served, folder)
    of_demo = {"vocab_size": 1280, "target_hidden_size": 192, "hidden_size": 192, "head_dim": 30}
    change_config(folder, num_hidden_layers=1, **of_demo)
    fault = refused(DEMO_MODEL, folder, dtype="bfloat16", kv_cache_dtype="int8")
    assert fault.startswith("the EAGLE-3 head cannot be used: kv_cache_dtype int8 needs")
    change_config(folder, vocab_size=77)
    assert "it expects 77 token ids and hidden states of 192 values, the model has 199 and 48" in refused(
        served, folder
    )
