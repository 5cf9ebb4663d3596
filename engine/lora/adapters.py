"""The adapters of a model: slots, loading them from folders, and the layers where they add something.

Slots are numbered from 1. A slot is filled from a thread of its own while steps run, none of which uses it. A folder is
checked as a whole before anything is put in place, so that a refused one changes nothing.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open

from weft.engine.batch import Batch, Ints
from weft.engine.describe.specs import DecoderSpec
from weft.engine.families.experts import Gating
from weft.engine.layers.block import Block, Layer, Linear
from weft.engine.layers.feed_forward import Activated, Experts
from weft.engine.layers.kernels import LayerKernels
from weft.engine.lora import adapted_layers as layers
from weft.engine.lora import targets as lora_targets
from weft.engine.lora.peft_folder import CONFIG_FILE, TENSORS_FILE, AdapterConfig, read_adapter_config
from weft.engine.lora.targets import Targets, projections, saved_bytes
from weft.engine.weights.reader import ExpertsRef, WeightReader, WeightRef
from weft.engine.wire.errors import ModelError
from weft.engine.wire.options import find_adapter

MakeSite = Callable[[WeightRef, int, int], layers.Site]
"""Makes the site of a matrix: the most deltas of an adapter there, and the bytes that all slots will take."""

_TENSOR = re.compile(r"base_model\.model\.(.{1,400}?)\.(lora_(?:embedding_)?[AB]|base_layer|weight)(?:\.weight)?")
_ROWS_AT_ONCE = 4096

_Pair = tuple[torch.Tensor, torch.Tensor]
"""A and B, in float32, B times the scale."""


class Adapters:
    """Owns the adapters of one model on one rank. `load` may be called from any thread, the rest from that of steps."""

    def __init__(
        self,
        targets: Targets,
        max_loras: int,
        max_rank: int,
        kept_rank: int,
        device: torch.device,
        dtype: torch.dtype,
        make: MakeSite,
        saved: layers.SavedLimits | None = None,
    ) -> None:
        """Begin without adapters and without sites, which `AdaptedKernels` asks for as it makes layers.

        Args:
            kept_rank: What sites pad the largest rank to.
            saved: For whole matrices of adapters; None: there may be none.
        """
        self.step = layers.AdapterStep(device)
        self._targets, self._max_loras, self._max_rank, self._kept_rank = targets, max_loras, max_rank, kept_rank
        self._device = torch.empty(0, device=device).device  # with its index: another thread begins with the first GPU
        self._dtype, self._make, self._saved = dtype, make, saved
        self._sites: list[tuple[WeightRef, tuple[str, ...], layers.Site]] = []
        self._num_saved = saved.num_slots if saved else 0
        self._saved_sites: list[tuple[WeightRef, str, layers.SavedSite]] = []
        self._reader = ThreadPoolExecutor(1, "adapters")

    @property
    def num_reserved_bytes(self) -> int:
        """Memory that adapters will take and that is not allocated yet."""
        return sum(site.num_reserved_bytes for _, _, site in self._sites)

    def matrix_site(self, ref: WeightRef) -> layers.Site:
        """A place for adapters of the projections of a matrix."""
        return self._matrix(ref, ref.names)

    def head_site(self, ref: WeightRef) -> layers.Site:
        """The same for an output head that shares the matrix of the embedding."""
        return self._matrix(ref, (self._targets.head,))

    def expert_sites(self, ref: ExpertsRef) -> list[layers.Site]:
        """A place for adapters of each expert; none if the checkpoint does not have experts one by one."""
        if not all("{}" in name for name in ref.matrix.names):
            return []
        named = (tuple(name.format(number) for name in ref.matrix.names) for number in range(ref.num_experts))
        return [self._matrix(replace(ref.matrix, names=names), names) for names in named]

    def embedding_site(self, ref: WeightRef) -> layers.Site:
        """A place for adapters of an embedding, whose a has a column for each id."""
        turned = lora_targets.turned_embedding(ref)
        expander = self._make(replace(turned, in_features=self._max_rank, share=None), 1, 0)
        site = layers.EmbeddingSite(expander, self._max_rank, self._num_bytes(turned))
        return self._keep(turned, ref.names, self._replaceable(ref, ref.names, site))

    def _matrix(self, ref: WeightRef, names: tuple[str, ...]) -> layers.Site:
        num_deltas = sum(len(projection.runs) for projection in projections(ref, names))
        site = self._make(ref, num_deltas, self._num_bytes(ref))
        return self._keep(ref, names, self._replaceable(ref, names, site))

    def _replaceable(self, ref: WeightRef, names: tuple[str, ...], site: layers.Site) -> layers.Site:
        """The site, with room for whole matrices if these may be in place of this one."""
        if self._saved is None or not {*names} <= self._targets.ends:
            return site
        make = layers.table if names == (self._targets.embedding,) else self._saved.make_head
        saved = layers.SavedSite(site, make, self._saved.num_slots * saved_bytes(ref, self._dtype))
        self._saved_sites.append((ref, names[0], saved))
        return saved

    def _keep(self, ref: WeightRef, names: tuple[str, ...], site: layers.Site) -> layers.Site:
        self._sites.append((ref, names, site))
        return site

    def _num_bytes(self, ref: WeightRef) -> int:
        return self._max_loras * self._kept_rank * lora_targets.rank_values(ref) * self._dtype.itemsize

    def planned_bytes(self, spec: DecoderSpec) -> int:
        """Memory of all slots at all matrices of a decoder."""
        ends = [ref for ref in (spec.embedding, spec.head or spec.embedding) if ref]
        num_bytes = self._num_saved * sum(saved_bytes(ref, self._dtype) for ref in ends)
        return num_bytes + self._max_loras * self._kept_rank * lora_targets.rank_bytes(spec, self._dtype)

    def computing(self, batch: Batch) -> AbstractContextManager[None]:
        """Compute the batch in here."""
        return self.step.of(batch)

    def keep_rows(self, indices: Ints) -> None:
        """From now on the output head gets only these tokens of the step."""
        self.step.keep(indices, replaces=True)

    def load(self, slot: int, folder: Path) -> "Future[str]":
        """See `Executor.load_adapter`."""
        assert 1 <= slot <= self._max_loras, f"slots are 1 to {self._max_loras}"
        return self._reader.submit(self._load, slot, folder)

    def _load(self, slot: int, folder: Path) -> str:
        config = read_adapter_config(folder, self._max_rank)
        with torch.inference_mode():
            pairs, saved = self._read(folder / TENSORS_FILE, config)
            if saved and slot > self._num_saved:
                asked = f"lora_modules_to_save must be at least {self._num_saved + 1}, but is {self._num_saved}"
                raise ModelError(f"{folder}: for the adapter's own {' and '.join(saved)}, {asked}")
            for ref, names, site in self._sites:
                site.put(slot, list(self._deltas(ref, names, pairs)))
            for ref, name, each in self._saved_sites:
                for projection in projections(ref, (name,)) if name in saved else ():
                    each.save(slot, saved[name][projection.rows].to(self._device, self._dtype))
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        return find_adapter("", folder).content  # last: if it is what it was before, so was all that was read

    def _read(self, path: Path, config: AdapterConfig) -> tuple[dict[str, _Pair], dict[str, torch.Tensor]]:
        """A and B of every projection that the adapter has, by its name in the model; then its own whole matrices."""
        here = {name for _, names, _ in self._sites for name in names}
        found: dict[str, dict[str, torch.Tensor]] = {}
        modules: dict[str, str] = {}
        stacks: dict[str, dict[str, torch.Tensor]] = {}
        try:
            with safe_open(path, framework="pt") as file:
                for stored in file.keys():  # noqa: SIM118 - no dict
                    match = _TENSOR.fullmatch(stored)
                    target = match and self._targets.find(match[1])
                    if match and target is None and lora_targets.is_stacked(match[1]):
                        stacks.setdefault(match[1], {})[match[2]] = file.get_tensor(stored)
                        continue
                    is_whole = match and match[2] == "weight" and "lora_" not in stored
                    if is_whole and (target is None or target.name not in self._targets.ends):
                        served = "of whole modules only an embedding of tokens and an output head are served"
                        raise ModelError(f"{path}: tensor {stored}: {served}; merge the adapter into its model")
                    if match is None or target is None:
                        raise ModelError(f"{path}: tensor {stored} belongs to no matrix of the model")
                    if target.name not in here and target.is_here:
                        raise ModelError(f"{path}: tensor {stored}: adapters of this matrix are not served")
                    shape = list(file.get_slice(stored).get_shape())
                    expected = target.shape(match[2], config.rank_of(match[1]))
                    if expected is None:
                        raise ModelError(f"{path}: tensor {stored} is not what adapters of this matrix have")
                    if shape != expected:
                        asked = f"this model and {CONFIG_FILE} ask for {expected}"
                        raise ModelError(f"{path}: tensor {stored} has shape {shape}, {asked}")
                    kind = match[2].replace("embedding_", "")
                    found.setdefault(target.name, {})[kind] = file.get_tensor(stored)
                    modules[target.name] = match[1]
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise ModelError(f"{path}: not readable ({str(error).splitlines()[0]})") from None
        for module, parts in stacks.items():
            for name, parameter, part in lora_targets.split(module, parts, self._targets.experts, config):
                target = self._targets.find(name)
                if name in found or (name not in here and target and target.is_here):
                    raise ModelError(f"{path}: {module}: adapters of {name} are not served, or are there twice")
                found[name], modules[name] = part, parameter
        if not found:
            raise ModelError(f"{path}: holds no tensors")
        weights = {modules[name]: parts.pop("weight") for name, parts in found.items() if "weight" in parts}
        for module, weight in weights.items():
            self._check(f"{path}: tensor weight of {module}", weight)
        pairs = {
            name: self._pair(path, modules[name], name, parts, config.scale_of(modules[name]))
            for name, parts in found.items()
            if parts
        }
        return pairs, lora_targets.replaced(path, weights, config, self._targets)

    def _pair(self, path: Path, module: str, name: str, parts: Mapping[str, torch.Tensor], scale: float) -> _Pair:
        base = parts.get("base_layer")
        if base is not None and not self._targets.is_own_weight(name, base):
            raise ModelError(f"{path}: tensor {module}.base_layer.weight is not the model's, and nothing replaces that")
        for kind in ("lora_A", "lora_B"):
            if kind not in parts:
                raise ModelError(f"{path}: tensor {kind} of {module} is missing")
        pair = parts["lora_A"].float(), parts["lora_B"].float() * scale
        for kind, values in zip(("lora_A", "lora_B"), pair, strict=True):
            self._check(f"{path}: tensor {kind} of {module}", values, " after they are scaled by alpha and rank")
        return pair

    def _check(self, tensor: str, values: torch.Tensor, when: str = "") -> None:
        if not all(bool(rows.to(self._dtype).isfinite().all()) for rows in torch.split(values, _ROWS_AT_ONCE)):
            name = str(self._dtype).removeprefix("torch.")
            raise ModelError(f"{tensor} holds values that are not finite numbers, or not in {name}{when}")

    def _deltas(self, ref: WeightRef, names: tuple[str, ...], pairs: Mapping[str, _Pair]) -> Iterator[layers.Delta]:
        """What the adapter adds to the outputs of a matrix: for each projection, one for each run of its outputs."""
        columns = slice(ref.share.first_input, ref.share.first_input + ref.in_features) if ref.share else slice(None)
        scales = torch.repeat_interleave(torch.tensor(ref.scales or (1.0,) * len(ref.sizes)), torch.tensor(ref.sizes))
        for projection in projections(ref, names):
            if projection.name in pairs:
                a, b = pairs[projection.name]
                a = a[:, columns].to(self._device, self._dtype, copy=True)  # the file may be mapped
                b = b[projection.rows] * scales[projection.places].unsqueeze(1)
                for first, run in zip(projection.runs, b.split_with_sizes(projection.run_sizes), strict=True):
                    yield layers.Delta(first, a, run.to(self._device, self._dtype))


class AdaptedKernels:
    """`LayerKernels` whose layers take adapters: it wraps other kernels and the layers that these make.

    What is not here, such as norms, has no adapters and is made by the inner kernels.
    """

    def __init__(self, kernels: LayerKernels, adapters: Adapters) -> None:
        """Take the kernels that make the layers, and what keeps the adapters."""
        self._kernels, self._adapters, self._step = kernels, adapters, adapters.step

    @classmethod
    def around(cls, kernels: LayerKernels, adapters: Adapters) -> LayerKernels:
        """The kernels with adapters."""
        return cast(LayerKernels, cls(kernels, adapters))

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernels, name)

    def linear(self, ref: WeightRef, reader: WeightReader) -> Linear:
        """See `LayerKernels`."""
        return layers.AdaptedLinear(self._kernels.linear(ref, reader), self._adapters.matrix_site(ref), self._step)

    def gated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        """See `LayerKernels`."""
        layer = cast(Activated, self._kernels.gated(ref, reader, activation))
        return layers.AdaptedActivation(layer, self._adapters.matrix_site(ref), self._step)

    def ungated(self, ref: WeightRef, reader: WeightReader, activation: str) -> Layer:
        """See `LayerKernels`."""
        layer = cast(Activated, self._kernels.ungated(ref, reader, activation))
        return layers.AdaptedActivation(layer, self._adapters.matrix_site(ref), self._step)

    def experts(self, gate_up: ExpertsRef, down: ExpertsRef, reader: WeightReader, gating: Gating) -> Experts:
        """See `LayerKernels`."""
        experts = self._kernels.experts(gate_up, down, reader, gating)
        first, second = (self._adapters.expert_sites(ref) for ref in (gate_up, down))
        if not (first and second):
            return experts
        return layers.AdaptedExperts(cast(layers.SeparableExperts, experts), first, second, self._step)

    def embedding(self, ref: WeightRef, reader: WeightReader) -> Layer:
        """See `LayerKernels`."""
        inner = self._kernels.embedding(ref, reader)
        return layers.AdaptedEmbedding(inner, self._adapters.embedding_site(ref), self._step)

    def tied(self, ref: WeightRef, reader: WeightReader) -> tuple[Layer, Linear]:
        """See `LayerKernels`; adapters of the embedding and of the head are different ones."""
        embedding, head = self._kernels.tied(ref, reader)
        return (
            layers.AdaptedEmbedding(embedding, self._adapters.embedding_site(ref), self._step),
            layers.AdaptedLinear(head, self._adapters.head_site(ref), self._step),
        )

    def fuse(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """See `LayerKernels`."""
        plain = self._kernels.fuse([layers.without_adapters(block) for block in blocks])
        return [layers.AdaptedBlocks(plain, self._kernels.fuse(blocks), self._step)] if blocks else blocks
