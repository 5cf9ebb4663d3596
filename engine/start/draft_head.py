"""Drafts with a head: of the served checkpoint (`--speculative mtp`), or EAGLE-3 (`--speculative PATH`).

A head is a draft model (`engine/start/draft_model.py`) with a second input. At a position it reads hidden states of the
model there and the next token, and predicts the token behind that. So it follows every batch of the model, one token
ahead: the next token is in the batch, or was sampled by it, or is the next one of the prompt. What it made of the
sampled rows is kept by cache slot until the step after next. From there the first draft needs no step of the head; for
every further one it reads its own hidden states and the token that it drafted last.

The last position of a block that is found by prefix was computed with the next token of the request that wrote it. If
another one follows, that one position is not what it should be. Only drafts depend on it.
"""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from weft.engine import config as engine_config
from weft.engine.batch import Batch, Ints, RowMasks
from weft.engine.cache.manager import KVCacheManager
from weft.engine.cache.specs import group_layers
from weft.engine.config import EngineConfig
from weft.engine.describe.config import ModelConfig, ModelFacts
from weft.engine.describe.specs import DecoderSpec
from weft.engine.device import to_device
from weft.engine.families.registry import is_eagle
from weft.engine.fields import Fields
from weft.engine.kernels.choice import check_cache, choose_kernels
from weft.engine.kernels.torch.caches import Caches
from weft.engine.layers.block import Decoder, LoadedModel
from weft.engine.layers.kernels import LayerKernels
from weft.engine.memory_plan import estimate_activations_bytes, num_positions
from weft.engine.models.draft_head import BEFORE, beside, check_head, head_spec, load_head
from weft.engine.models.eagle_head import EagleHead, eagle_depths, load_eagle, read_eagle
from weft.engine.runner.cuda_graphs import ComputedStep
from weft.engine.runner.model_runner import LaunchedStep, ModelRunner
from weft.engine.sampling.sampler import SamplingKernels
from weft.engine.start.draft_model import DraftCheckpoint, SmallSteps, find_draft_checkpoint, match_groups
from weft.engine.start.model_choice import ModelPlan, read_model
from weft.engine.vision.checkpoint import as_served
from weft.engine.weights.reader import Progress
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions


def find_draft(
    config: EngineConfig,
    model: ModelFacts,
    served: ModelPlan,
    tune: Callable[[ModelFacts, EngineConfig], EngineConfig] = lambda model, config: config,
) -> DraftCheckpoint | None:
    """A head, or `find_draft_checkpoint`; None if nothing of these drafts.

    Raises:
        ModelError: It cannot be read, or cannot draft for the served model.
    """
    if config.options.speculative == "mtp":
        return _find_own_head(config, model, served)
    if config.draft_model and is_eagle(config.draft_model):
        return _find_eagle(config, config.draft_model, model, served, tune)
    return find_draft_checkpoint(config, model.vocab_size, served, tune)


def read_served(options: EngineOptions, max_num_tokens: int | None) -> ModelFacts:
    """`read_model` of the served model, for pictures, and with taps where an EAGLE-3 head will read its hidden states.

    Raises:
        ModelError: See `read_model`; or the head is for another model.
    """
    model = as_served(read_model(Path(options.model), options.model_impl, max_num_tokens), options)
    speculative = options.speculative
    if speculative is None or not isinstance(model, ModelConfig) or not is_eagle(folder := Path(speculative)):
        return model
    if model.switches.extension or model.encoder:
        raise ModelError(f"an EAGLE-3 head for {model.architecture} is not supported, whose layers have other inputs")
    return replace(model, tapped=eagle_depths(Fields.read(folder / "config.json"), model.num_layers))


def _check_model(name: str, config: EngineConfig, model: ModelFacts, served: ModelPlan) -> None:
    """Refuse a model that cannot verify the drafts of a head, or share with it."""
    options = config.options
    if not all(group.spec.can_rewind for group in served.groups):
        raise ModelError(f"{name}: {model.architecture} keeps states, which cannot go back behind a refused draft")
    if not isinstance(model, ModelConfig):
        raise ModelError(f"{name} needs a native family, and transformers' module computes {model.architecture}")
    if options.num_ranks > 1:
        raise ModelError(f"{name} is for one rank, got {engine_config.settings_of_ranks(options)}")
    if options.max_loras:  # which change the embedding that the head shares, row by row
        raise ModelError(f"{name} does not go together with adapters, got max_loras {options.max_loras}")


def _find_own_head(config: EngineConfig, model: ModelFacts, served: ModelPlan) -> DraftCheckpoint:
    _check_model("speculative mtp", config, model, served)
    assert isinstance(model, ModelConfig) and served.kernels is not None
    load_format, kernels, dtype = config.options.load_format, served.kernels, config.dtype
    check_head(config.model, model, load_format)
    spec = head_spec(model)
    load = partial(load_head, config=model, kernels=kernels, device=config.device, dtype=dtype, load_format=load_format)
    return _checkpoint(
        "the model's own head", model, config, kernels, spec, spec.weights_bytes(kernels, dtype), load, served
    )


def _find_eagle(
    config: EngineConfig,
    folder: Path,
    model: ModelFacts,
    served: ModelPlan,
    tune: Callable[[ModelFacts, EngineConfig], EngineConfig],
) -> DraftCheckpoint:
    _check_model("an EAGLE-3 head", config, model, served)
    options = config.options
    head = read_eagle(folder, model, options.load_format)
    config, dtype, spec = tune(head.layer, replace(config, kernels=options.kernels)), config.dtype, head.spec
    try:
        kernels = choose_kernels(head.layer, config)
        check_cache(group_layers(spec.caches), config)
    except ModelError as error:
        raise ModelError(f"the EAGLE-3 head cannot be used: {error}") from None
    load = partial(
        load_eagle,
        config=head,
        kernels=kernels,
        device=config.device,
        dtype=dtype,
        num_positions=num_positions(config, spec.caches),
        load_format=options.load_format,
    )
    name = f"EAGLE-3 head {folder.name}"
    return _checkpoint(name, head.layer, config, kernels, spec, head.weights_bytes(kernels, dtype), load, served)


def _checkpoint(
    name: str,
    model: ModelConfig,
    config: EngineConfig,
    kernels: LayerKernels,
    spec: DecoderSpec,
    weights_bytes: int,
    load: Callable[[Path, Progress], LoadedModel],
    served: ModelPlan,
) -> DraftCheckpoint:
    groups = group_layers(spec.caches)
    return DraftCheckpoint(
        name=name,
        config=model,
        engine_config=config,
        plan=ModelPlan(kernels.name, kernels, spec.caches, weights_bytes, load, groups, groups),
        groups=groups,
        group_indices=match_groups(groups, served.groups),
        activations_bytes=estimate_activations_bytes(model, config, spec.caches),
        is_head=True,
    )


def make_head(
    draft: DraftCheckpoint,
    models: tuple[LoadedModel, LoadedModel],
    caches: Caches,
    sampling: SamplingKernels,
    kv: KVCacheManager,
    *,
    shares_tables: bool,
) -> "DraftHead":
    """A runner around a loaded head and the model that it reads, in this order; shares_tables as in `SmallSteps`."""
    head, model = models
    assert isinstance(head, Decoder) and isinstance(model, Decoder)
    runner = HeadRunner(beside(head, model), caches, draft.engine_config.device, sampling, kv.block_size)
    eagle = head if isinstance(head, EagleHead) else None
    limit = draft.engine_config.max_num_batched_tokens
    return DraftHead(runner, kv, draft.group_indices, limit, eagle, shares_tables=shares_tables)


class HeadRunner(ModelRunner):
    """Owns a head and its cache."""

    def __init__(
        self, head: Decoder, caches: Caches, device: torch.device, sampling: SamplingKernels, block_size: int
    ) -> None:
        """Take over a loaded head and its allocated cache."""
        super().__init__(head, caches, device, sampling=sampling)
        self._block_size = block_size
        self._kept: deque[tuple[Ints, torch.Tensor]] = deque(maxlen=2)  # drafts may be for the step before the last
        self._hidden: torch.Tensor | None = None

    def fill(self, batch: Batch, next_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Compute a batch of the model, and keep what comes of its rows.

        Args:
            next_ids: (num_tokens,) the token behind each.
            hidden: (num_tokens, hidden_size) that the head reads of the model.
        """
        made = self._compute(batch, next_ids, hidden, to_device(batch.row_indices, self._device))
        self._kept.append((batch.groups[0].slot_mapping[batch.row_indices], made))

    @override
    @torch.inference_mode()
    def launch(self, batch: Batch, masks: "Future[RowMasks] | None" = None) -> LaunchedStep:
        """Draft the next token of each request; a step that runs out of memory fails, since it goes on from others."""
        return self.launch_once(batch, masks)

    @override
    def forward(self, token_ids: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, Mapping[int, torch.Tensor]]:
        """(num_rows, hidden_size) from which the token behind each of token_ids is drafted.

        The pair of a token and the hidden states before it is at the position before the token's.
        """
        pairs = _one_before(batch, self._block_size)
        if not len(batch.placeholders.rows):
            self._hidden = self._find(pairs.groups[0].slot_mapping)
        else:
            assert self._hidden is not None
            before = self._hidden[to_device(batch.placeholders.rows, self._device)]
            self._hidden = self._compute(pairs, token_ids, before, None)
        return self._hidden, {}

    def _compute(
        self, batch: Batch, token_ids: torch.Tensor, before: torch.Tensor, rows: torch.Tensor | None
    ) -> torch.Tensor:
        caches = self._caches.begin(batch)
        caches.passed[BEFORE] = (before,)
        return self._model.forward(token_ids, to_device(batch.lookups, self._device), caches, rows)

    def _find(self, slots: Ints) -> torch.Tensor:
        """What was kept of the tokens in these slots; zeros for a token of which nothing was."""
        kept = np.concatenate([slots for slots, _ in self._kept])
        places = {slot: place for place, slot in enumerate(kept.tolist())}  # the last one of equals counts
        made = torch.cat([made for _, made in self._kept])
        made = torch.cat((made, made.new_zeros(1, made.size(1))))
        return made[to_device(np.array([places.get(slot, len(kept)) for slot in slots.tolist()]), self._device)]


def _one_before(batch: Batch, block_size: int) -> Batch:
    """A batch of one token for each request, moved to the position before it."""
    positions = batch.positions - 1
    blocks, offsets = np.divmod(positions, block_size)
    groups = tuple(
        replace(g, slot_mapping=g.block_tables[np.arange(len(blocks)), blocks] * block_size + offsets)
        for g in batch.groups
    )
    table_rows = None if batch.table_rows is None else batch.table_rows - 1
    return replace(batch, positions=positions, seq_lens=batch.seq_lens - 1, groups=groups, table_rows=table_rows)


class DraftHead(SmallSteps):
    """Owner of the head. It follows every step, so its cache never lacks anything."""

    launches = True

    def __init__(
        self,
        runner: HeadRunner,
        kv: KVCacheManager,
        group_indices: list[int],
        max_num_tokens: int,
        eagle: EagleHead | None,
        *,
        shares_tables: bool,
    ) -> None:
        """See `SmallSteps`; eagle is the head if it reads what is tapped, None if it reads the last hidden states."""
        super().__init__(runner, kv, group_indices, max_num_tokens, shares_tables=shares_tables)
        self._head, self._eagle, self.reads_hidden = runner, eagle, eagle is None

    @override
    def follow(self, batch: Batch, computed: ComputedStep, sampled_ids: torch.Tensor | None) -> None:
        device, next_ids = computed.token_ids.device, computed.token_ids.roll(-1)
        if batch.next_ids is not None:
            ends = np.setdiff1d(batch.query_start_locs[1:] - 1, batch.row_indices)
            next_ids[to_device(ends, device)] = to_device(batch.next_ids, device)
        if sampled_ids is not None:
            next_ids[to_device(batch.row_indices, device)] = sampled_ids.clamp(min=0)  # NO_TOKEN_ID ends the request
        hidden = self._eagle.joined(computed.tapped) if self._eagle else computed.hidden_states
        self._head.fill(self._own(batch), next_ids, hidden)
