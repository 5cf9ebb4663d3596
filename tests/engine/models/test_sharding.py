"""Ranks' parts of a decoder, read from a checkpoint, are together the whole; what cannot be divided is refused."""

from pathlib import Path

import pytest
import torch

from tests.architectures.checkpoints import write
from weft.engine.models.config import load_model_config
from weft.engine.models.experts import ExpertsSpec
from weft.engine.models.sharding import shard
from weft.engine.models.specs import AttentionSpec, DecoderSpec, PreNormSpec
from weft.engine.models.tensor_names import decoder_spec
from weft.engine.shared.errors import ModelError
from weft.engine.weights.formats import DenseReader
from weft.engine.weights.refs import ExpertsRef, TensorRef, WeightRef
from weft.engine.weights.tensor_files import CheckpointSource

CPU = torch.device("cpu")
MODELS = ("llama", "gpt2", "phi3", "bloom", "cohere", "gpt_oss", "mixtral")
"""Separate, stacked and fused projections, transposed ones, heads in another order and with norms of their own, biases,
sinks, experts of both layouts, gate and up in turn."""


def read(folder: Path, ref: WeightRef | ExpertsRef | TensorRef) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    reader = DenseReader(CheckpointSource(folder, CPU), CPU, torch.float32, 1)
    if isinstance(ref, TensorRef):
        return [(reader.tensor(ref), None)]
    return list(reader.experts(ref)) if isinstance(ref, ExpertsRef) else [reader.dense(ref)]


def join(refs: list[WeightRef], parts: list[torch.Tensor], whole: WeightRef) -> torch.Tensor:
    """The whole of what all ranks have of a matrix or of its bias."""
    if refs[0].in_features < whole.in_features:
        return torch.cat(parts, 1)
    if refs[0].out_features == whole.out_features:
        return parts[-1]
    projections = zip(*(part.split(list(ref.sizes)) for ref, part in zip(refs, parts, strict=True)), strict=True)
    return torch.cat([torch.cat(parts) for parts in projections])


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_are_together_the_whole(tmp_path: Path, name: str) -> None:
    folder = write(name, tmp_path, {"use_qk_norm": True} if name == "cohere" else None)
    whole = decoder_spec(load_model_config(folder))
    parts = [shard(whole, rank, 2) for rank in range(2)]
    num_divided = 0
    for ref, *of_ranks in zip(whole.weights, *(part.weights for part in parts), strict=True):
        read_parts = [read(folder, part) for part in of_ranks]
        for expected, *found in zip(read(folder, ref), *read_parts, strict=True):
            weights = [weight for weight, _ in found]
            if isinstance(ref, TensorRef):
                is_whole = weights[0].shape == expected[0].shape
                assert torch.equal(weights[1] if is_whole else torch.cat(weights), expected[0])
                continue
            matrix = ref.matrix if isinstance(ref, ExpertsRef) else ref
            matrices = [part.matrix if isinstance(part, ExpertsRef) else part for part in of_ranks]
            num_divided += matrices[0] != matrix
            assert torch.equal(join(matrices, weights, matrix), expected[0])
            biases = [bias for _, bias in found if bias is not None]
            assert bool(biases) == (expected[1] is not None)
            if expected[1] is not None:  # of a matrix divided by inputs, the first rank alone has it
                assert torch.equal(join(matrices, biases, matrix) if len(biases) > 1 else biases[0], expected[1])
    assert num_divided >= 4 * len(whole.blocks)


def attention(spec: DecoderSpec) -> AttentionSpec:
    block = spec.blocks[0]
    assert isinstance(block, PreNormSpec) and isinstance(block.mixer, AttentionSpec)
    return block.mixer


def test_ranks_share_heads_of_keys_and_values_where_there_are_fewer(tmp_path: Path) -> None:
    folder = write("llama", tmp_path, {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8})
    whole = decoder_spec(load_model_config(folder))
    parts = [attention(shard(whole, rank, 4)) for rank in range(4)]
    assert [(part.num_heads, part.cache.num_kv_heads) for part in parts] == [(2, 1)] * 4
    queries, keys, _ = read(folder, attention(whole).qkv)[0][0].split([64, 16, 16])
    for rank, part in enumerate(parts):
        own_queries, own_keys, _ = read(folder, part.qkv)[0][0].split([16, 8, 8])
        assert torch.equal(own_queries, queries[16 * rank :][:16])
        assert torch.equal(own_keys, keys[8 * (rank // 2) :][:8])


def test_the_experts_of_all_ranks_and_the_shared_one_are_summed_once(tmp_path: Path) -> None:
    spec = shard(decoder_spec(load_model_config(write("qwen2_moe", tmp_path))), 1, 2)
    (block, *_) = spec.blocks
    assert isinstance(block, PreNormSpec) and isinstance(block.feed_forward, ExpertsSpec)
    assert block.feed_forward.is_partial
    assert not block.feed_forward.shared.output.is_partial  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "num_ranks", "reason"),
    [
        ("deepseek_v3", 2, "layers of the kind LatentAttention"),
        ("mamba2", 2, "layers of the kind Mamba2"),
        ("qwen3_next", 2, "layers of the kind GatedDelta"),
        ("olmo2", 2, "norms over all heads"),
        ("llama", 3, "4 heads over 2 K/V heads"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(tmp_path: Path, name: str, num_ranks: int, reason: str) -> None:
    spec = decoder_spec(load_model_config(write(name, tmp_path)))
    with pytest.raises(ModelError, match=f"^tensor_parallel_size {num_ranks}: ranks cannot divide {reason} of this"):
        shard(spec, 0, num_ranks)
