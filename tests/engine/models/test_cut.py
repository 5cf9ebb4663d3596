"""Ranks' parts of a decoder, read from a checkpoint, are together the whole; what cannot be divided is refused."""

from pathlib import Path

import pytest
import torch

from tests.architectures.checkpoints import write
from weft.engine.describe.config import load_model_config
from weft.engine.describe.specs import AttentionSpec, DecoderSpec, PreNormSpec
from weft.engine.models.cut import shard, whole_parts
from weft.engine.parts.decoder import decoder_spec
from weft.engine.parts.experts import ExpertsSpec
from weft.engine.weights.reader import DenseReader, ExpertsRef, Run, TensorRef, WeightRef
from weft.engine.weights.tensor_files import CheckpointSource, RandomSource

CPU = torch.device("cpu")
MODELS = (
    *("llama", "gpt2", "phi3", "bloom", "cohere", "gpt_oss", "mixtral", "olmo2", "deepseek_v2", "deepseek_v3"),
    *(
        "minicpm3",
        "qwen3_next",
        "qwen3_5_text",
        "lfm2",
        "recurrent_gemma",
        "mamba",
        "mamba2",
        "falcon_h1",
        "gemma4_text",
    ),
)
"""Separate, stacked and fused projections, transposed ones, heads in another order and with norms of their own, biases,
sinks, experts of both layouts, gate and up in turn; latents, recurrent layers, layers that share K/V."""


def read(
    folder: Path | None, ref: WeightRef | ExpertsRef | TensorRef
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """From a checkpoint; without one, random values."""
    source = CheckpointSource(folder, CPU) if folder else RandomSource(0, torch.float32, CPU, 1.0)
    reader = DenseReader(source, CPU, torch.float32, 1)
    if isinstance(ref, TensorRef):
        return [(reader.tensor(ref), None)]
    return list(reader.experts(ref)) if isinstance(ref, ExpertsRef) else [reader.dense(ref)]


def put(ref: WeightRef | ExpertsRef | TensorRef, part: torch.Tensor, whole: torch.Tensor) -> None:
    """Write a rank's part of a tensor, or of the bias of a matrix, to its place."""
    if isinstance(ref, ExpertsRef):
        ref = ref.matrix
    runs = ref.runs if isinstance(ref, TensorRef) else ref.share.runs if ref.share else ()
    rows = torch.cat([torch.arange(first, first + size) for first, size in runs or (Run(0, len(whole)),)])
    if isinstance(ref, TensorRef) or ref.share is None or part.dim() == 1:
        whole[rows] = part
    else:
        whole[rows, ref.share.first_input : ref.share.first_input + ref.in_features] = part


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_are_together_the_whole(tmp_path: Path, name: str) -> None:
    folder = write(name, tmp_path, {"use_qk_norm": True} if name == "cohere" else None)
    whole = decoder_spec(load_model_config(folder))
    parts = [shard(whole, rank, 2) for rank in range(2)]
    assert not whole_parts(whole, parts[0])
    check_parts(folder, whole, parts)
    check_parts(None, whole, parts)


def check_parts(folder: Path | None, whole: DecoderSpec, parts: list[DecoderSpec]) -> None:
    for ref, *of_ranks in zip(whole.weights, *(part.weights for part in parts), strict=True):
        read_parts = [read(folder, part) for part in of_ranks]
        for expected, *found in zip(read(folder, ref), *read_parts, strict=True):
            for kind, values in enumerate(expected):  # weight, bias
                if values is None:
                    continue
                joined = torch.full_like(values, torch.nan)
                for part, of_rank in zip(of_ranks, found, strict=True):
                    if (own := of_rank[kind]) is not None:  # divided by inputs, the first rank alone has the bias
                        put(part, own, joined)
                assert torch.equal(joined, values)


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
    ("name", "num_ranks", "kinds"),
    [
        ("llama", 3, {"Attention": 2}),  # 4 heads, 96 inner values
        ("mamba2", 16, {"Mamba2": 2}),
        ("qwen2_moe", 5, {"Attention": 2, "Experts": 2}),
    ],
)
def test_what_cannot_be_divided_is_whole_on_every_rank(
    tmp_path: Path, name: str, num_ranks: int, kinds: dict[str, int]
) -> None:
    spec = decoder_spec(load_model_config(write(name, tmp_path)))
    part = shard(spec, 1, num_ranks)
    assert whole_parts(spec, part) == kinds
    assert part.embedding.out_features < spec.embedding.out_features
