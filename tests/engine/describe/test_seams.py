"""The seams of the model hold: another checkpoint format and another kind of block need no change."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.paged import PagedRequests
from weft.engine.cache.specs import group_layers, paged_groups
from weft.engine.describe.config import load_model_config
from weft.engine.describe.specs import BlockSpec, DecoderSpec, NormSpec
from weft.engine.kernels.torch.caches import Caches
from weft.engine.kernels.torch.layer_kernels import TorchKernels, TorchLinear
from weft.engine.kernels.torch.sdpa import SdpaBackend
from weft.engine.layers.block import Block, BlockStep, Decoder, Layer, Linear
from weft.engine.layers.kernels import LayerKernels
from weft.engine.models.loading import build_decoder, make_rotaries
from weft.engine.parts.decoder import decoder_spec
from weft.engine.weights.reader import DenseReader, TensorRef, WeightReader, WeightRef
from weft.engine.weights.tensor_files import CheckpointSource

CPU, FLOAT = torch.device("cpu"), torch.float32
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 40, 4, 64
PROMPTS = [list(range(3, 20)), list(range(30, 35))]


def build(
    folder: Path, kernels: LayerKernels, reader: WeightReader | None = None, spec: DecoderSpec | None = None
) -> Decoder:
    config = load_model_config(folder)
    rotaries = make_rotaries(config, MAX_MODEL_LEN, FLOAT, CPU)
    reader = reader or DenseReader(CheckpointSource(folder, CPU), CPU, FLOAT, 1)
    return build_decoder(spec or decoder_spec(config), config, kernels, reader, rotaries, FLOAT)


@torch.inference_mode()
def logits(decoder: Decoder, chunks: Sequence[int] = (17, 5)) -> torch.Tensor:
    """Of the last token of each prompt, of which the first goes through in chunks."""
    groups = group_layers(decoder.cache_specs)
    caches = Caches(SdpaBackend(paged_groups(groups), NUM_BLOCKS, BLOCK_SIZE, FLOAT, CPU))
    paged = PagedRequests(NUM_BLOCKS, BLOCK_SIZE, tuple(group.spec.sliding_window for group in groups))
    requests = [paged.add(np.array(prompt)) for prompt in PROMPTS]
    batch = paged.make_batch(list(zip(requests, chunks, strict=True)))
    ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
    rows = torch.from_numpy(batch.query_start_locs[1:] - 1)
    return decoder.compute_logits(decoder.forward(ids, positions, caches.begin(batch), rows))


class Int8Format:
    """A checkpoint format of one byte a value with a scale an output: it keeps weights packed until they are read."""

    def __init__(self, folder: Path, spec: DecoderSpec) -> None:
        plain = DenseReader(CheckpointSource(folder, CPU), CPU, FLOAT, 1)
        self._tensors = {tensor: plain.tensor(tensor) for tensor in spec.weights if isinstance(tensor, TensorRef)}
        self._packed = {}
        for ref in {spec.embedding, *spec.matrices}:
            weight, bias = plain.dense(ref)
            scales = weight.abs().amax(1, keepdim=True) / 127
            self._packed[ref] = (weight / scales).round().to(torch.int8), scales, bias

    def dense(self, ref: WeightRef) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, scales, bias = self._packed[ref]
        return weight * scales, bias

    def tensor(self, ref: TensorRef) -> torch.Tensor:
        return self._tensors[ref]


class PackingKit(TorchKernels):
    """Keeps what the format gives, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_packed = 0

    def linear(self, ref: WeightRef, reader: WeightReader) -> TorchLinear:
        assert isinstance(reader, Int8Format)
        weight, scales, bias = reader._packed[ref]
        self.num_packed += 1

        class Packed(TorchLinear):
            def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
                outputs = inputs @ weight.float().T * scales.T
                return outputs if bias is None else outputs + bias

        return Packed(weight)


def test_a_format_may_be_unpacked_or_kept_packed(checkpoint_folder: Callable[[str], Path]) -> None:
    folder = checkpoint_folder("qwen2")
    spec = decoder_spec(load_model_config(folder))
    reader, packing = Int8Format(folder, spec), PackingKit()
    unpacked = logits(build(folder, TorchKernels(), reader, spec))
    torch.testing.assert_close(logits(build(folder, packing, reader, spec)), unpacked)
    assert packing.num_packed >= 4 * len(spec.blocks)
    assert not torch.equal(unpacked, logits(build(folder, TorchKernels())))


@dataclass(frozen=True)
class ConvolutionSpec(BlockSpec):
    """A block of another kind: a gate over what a projection makes of each token; it caches nothing."""

    norm: NormSpec
    matrix: WeightRef

    def build(self, kernels: LayerKernels, reader: WeightReader, first_cache: int) -> Block:
        return Convolution(self.norm.build(kernels, reader), kernels.linear(self.matrix, reader))


@dataclass(frozen=True)
class Convolution:
    norm: Layer
    linear: Linear

    def forward(self, hidden: torch.Tensor, step: BlockStep) -> torch.Tensor:
        hidden = hidden if step.rows is None else hidden[step.rows]
        return hidden + self.linear(self.norm(hidden)).tanh()


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_block_that_caches_nothing_stands_between_others(
    checkpoint_folder: Callable[[str], Path], place: int
) -> None:
    """The blocks behind it keep their caches, and the rows wanted are those of the last block, whatever its kind."""
    folder = checkpoint_folder("llama2")
    spec = decoder_spec(load_model_config(folder))
    assert len(spec.blocks) == 3
    size = spec.embedding.in_features
    other = ConvolutionSpec(
        NormSpec(TensorRef("model.norm.weight", (size,)), 1e-6),
        WeightRef(("model.layers.0.self_attn.o_proj",), (size,), size),
    )
    mixed = replace(spec, blocks=(*spec.blocks[:place], other, *spec.blocks[place:]))
    assert mixed.caches == spec.caches
    assert mixed.num_parameters == spec.num_parameters + size * size + size
    decoder = build(folder, TorchKernels(), spec=mixed)
    whole = logits(decoder)
    assert whole.shape == (2, load_model_config(folder).vocab_size)
    assert not torch.allclose(whole, logits(build(folder, TorchKernels())))
    torch.testing.assert_close(logits(decoder, (9, 5))[1], whole[1])
