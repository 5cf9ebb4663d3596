"""Loads transformers' module of a checkpoint and makes it a `Model` that attends to Weft's paged caches.

Transformers names, merges and ties tensors, and Weft's reader reads them: transformers gets every tensor as a promise
to read it. The module attends by Weft's implementation of transformers' AttentionInterface.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.utils import logging as untyped_logging
from transformers.utils.generic import ModelOutput
from typing_extensions import override

from weft.engine.cache.specs import CacheSpec
from weft.engine.fallback.attention_calls import RecordedCalls
from weft.engine.fallback.config import FallbackConfig
from weft.engine.fallback.request_model import RequestModel
from weft.engine.layers.block import AttentionStep, Layer, Linear, Model, StepCaches
from weft.engine.layers.kernels import LayerKernels
from weft.engine.models.loading import LoadFormat
from weft.engine.weights.reader import ExpertsRef, Progress, TensorRef, WeightReader, WeightRef
from weft.engine.weights.tensor_files import CheckpointSource, RandomSource, refuse_unexpected
from weft.engine.wire.errors import ModelError

transformers_logging: Any = untyped_logging

PAGED = "weft"
"""Name of this attention, for `attn_implementation`. No mask is registered for it, so transformers makes none."""


class CurrentStep:
    """The attention of the step that a model computes now; shared by its layers, changed by the model alone."""

    attention: AttentionStep | None = None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Which cache of the step a module uses, and the dtype of the model.

    Every attention module carries one, since the interface hands over nothing but the module.
    """

    current: CurrentStep
    layer: int
    dtype: torch.dtype

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend in the current step.

        Args:
            queries: (1, num_heads, num_tokens, head_dim).
            keys: (1, num_kv_heads, num_tokens, head_dim).
            values: (1, num_kv_heads, num_tokens, value_dim); smaller ones are kept with zeros at the end.
            sinks: (num_heads,), see `AttentionStep.attend`; None without sinks.

        Returns:
            (1, num_tokens, num_heads, value_dim) in the dtype of queries.
        """
        assert self.current.attention is not None, "a module attends outside of a step"
        value_dim = values.shape[-1]
        padded = functional.pad(values, (0, keys.shape[-1] - value_dim)) if value_dim < keys.shape[-1] else values
        q, k, v = (heads[0].transpose(0, 1).to(self.dtype).contiguous() for heads in (queries, keys, padded))
        sunk = None if sinks is None else sinks.float()
        attended = self.current.attention.attend(self.layer, (q, k, v), sunk)  # (num_tokens, num_heads, head_dim)
        return attended[..., :value_dim].unsqueeze(0).to(queries.dtype)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    cache = module.weft_cache
    assert isinstance(cache, LayerCache)
    return cache.attend(query, key, value, s_aux), None


AttentionInterface.register(PAGED, _attend)


class _Body(torch.nn.Module):
    """Stands in the place of the body: runs it, or returns the hidden states that it was given.

    The rest of a module knows how its architecture scales, caps and adds biases to logits. So logits are made by the
    whole module, with a body that returns given hidden states.
    """

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.body = body
        self.given: ModelOutput | None = None

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The body's output."""
        return self.body(*args, **kwargs) if self.given is None else self.given

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("body"), name)


class TransformersModel(Model):
    """A loaded module: its body computes hidden states, the rest of it makes logits of some of them.

    Runs one step at a time. A step's tokens reach the module as one row, and its masks are none: the caches of the step
    know which token belongs to which request.

    Attributes:
        cache_specs: What each cache keeps, one for each attention module.
        weights_bytes: Memory that parameters and buffers take; shared ones count once.
    """

    def __init__(self, module: PreTrainedModel, calls: RecordedCalls, dtype: torch.dtype) -> None:
        """Take over a module that was loaded with the attention `PAGED`."""
        self.cache_specs: tuple[CacheSpec, ...] = tuple(layer.cache for layer in calls.layers)
        tensors = {tensor.data_ptr(): tensor for tensor in (*module.parameters(), *module.buffers())}
        self.weights_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._current = CurrentStep()
        for index, layer in enumerate(calls.layers):
            part = module.get_submodule(layer.name)
            part.weft_cache = LayerCache(self._current, index, dtype)  # type: ignore[assignment]
        self._module = module
        self._output_type: type[ModelOutput] = ModelOutput
        self._body = _Body(module.get_submodule(calls.body))
        module.set_submodule(calls.body, self._body)

    @override
    def forward(self, token_ids: Tensor, positions: Tensor, caches: StepCaches, rows: Tensor | None = None) -> Tensor:
        self._current.attention = caches.attention
        output = self._body.body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        self._current.attention = None
        self._output_type = type(output)
        hidden: Tensor = output[0][0]
        return hidden if rows is None else hidden[rows]

    @override
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        self._body.given = self._output_type(last_hidden_state=hidden_states[None])
        try:
            unread = torch.zeros(1, len(hidden_states), dtype=torch.int64, device=hidden_states.device)
            logits: Tensor = self._module(input_ids=unread, use_cache=False).logits[0]
        finally:
            self._body.given = None
        return logits.float()

    def plain_logits(self, token_ids: Tensor) -> Tensor:
        """Float32 logits of whole prompts (num_prompts, num_tokens), by the module alone with its own attention."""
        with self._eager_attention():
            logits: Tensor = self._module(input_ids=token_ids, use_cache=False).logits
        return logits.float()  # (num_prompts, num_tokens, vocab_size)

    @contextmanager
    def _eager_attention(self) -> Iterator[None]:
        config = self._module.config
        config._attn_implementation = "eager"
        try:
            yield
        finally:
            config._attn_implementation = PAGED


_EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
"""The name of a tensor that one expert has: its layer, its number, what it is."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A tensor that is read when transformers asks for all of it, as of a slice of safetensors."""

    read: Callable[[str], Tensor]
    name: str

    def __getitem__(self, everything: object) -> Tensor:
        return self.read(self.name)


def load_fallback(
    folder: Path,
    config: FallbackConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernels: LayerKernels | None = None,
    load_format: LoadFormat = "auto",
    progress: Progress = lambda done, total: None,
) -> TransformersModel | RequestModel:
    """Build the module with the weights in folder.

    Beside the weights, one tensor exists at a time, or those that are merged into one, such as the experts of a layer.

    Args:
        folder: Model folder in Hugging Face layout; its weights are not read if load_format is "dummy".
        kernels: Makes the linear layers; None leaves them as they are.
        load_format: "dummy" makes random weights.
        progress: Called after every tensor.

    Raises:
        ModelError: The checkpoint does not hold exactly the tensors that the module needs.
    """
    total, done = config.num_values * dtype.itemsize, 0
    names, read = _random(config, dtype) if load_format == "dummy" else _stored(folder, config.is_half)
    _check_experts(names)
    shapes: dict[str, torch.Size] = {}

    def counted(name: str) -> Tensor:
        nonlocal done
        tensor = read(name)
        shape = shapes.setdefault(_EXPERT.sub(r"\1*\3", name), tensor.shape)  # experts that are stacked are alike
        if shape != tensor.shape:
            raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, others of its kind {list(shape)}")
        done = min(done + tensor.numel() * dtype.itemsize, total)  # a tied matrix may be stored twice
        progress(done, total)
        return tensor

    module = _load(config, {name: Promise(counted, name) for name in names}, dtype)
    torch.nn.Module.to(module, device)
    progress(total, total)
    if config.calls is None:
        return RequestModel(module)
    model = TransformersModel(module, config.calls, dtype)
    if kernels is not None:
        pack(module, kernels, dtype)
    return model


def _check_experts(names: Iterable[str]) -> None:
    """Name the tensor of an expert that is missing; transformers only says that it cannot stack them."""
    stored, sizes = set(names), dict[tuple[str, str], int]()
    for match in filter(None, map(_EXPERT.fullmatch, stored)):
        experts, number, kind = match.groups()
        sizes[experts, kind] = max(sizes.get((experts, kind), 0), int(number) + 1)
    for (experts, kind), size in sorted(sizes.items()):
        for number in range(size):
            if f"{experts}{number}{kind}" not in stored:
                raise ModelError(f"tensor {experts}{number}{kind} is missing from the checkpoint")


def _stored(folder: Path, is_half: bool) -> tuple[Iterable[str], Callable[[str], Tensor]]:
    source = CheckpointSource(folder, torch.device("cpu"), is_half=is_half)
    return source.names, source.read


def _random(config: FallbackConfig, dtype: torch.dtype) -> tuple[Iterable[str], Callable[[str], Tensor]]:
    source = RandomSource(0, dtype, torch.device("cpu"), norm_weight=1.0)
    with torch.device("meta"):
        module = config.model_class(config.config)
    stored = module.state_dict()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in stored}
    tensors = dict(module.named_parameters()) | buffers

    def make(name: str) -> Tensor:
        if not tensors[name].is_floating_point():
            return torch.zeros(tensors[name].shape, dtype=tensors[name].dtype)
        tensor = torch.empty(tensors[name].shape, dtype=dtype)
        source.fill(name, tensor)
        return tensor

    return tensors, make


def _load(config: FallbackConfig, promises: Mapping[str, Promise], dtype: torch.dtype) -> PreTrainedModel:
    model_class: Any = config.model_class  # typed as if it returned no report
    try:
        with quiet_and_one_by_one():
            module, report = model_class.from_pretrained(
                None,
                config=config.config,
                state_dict=promises,
                dtype=dtype,
                attn_implementation="eager" if config.calls is None else PAGED,
                ignore_mismatched_sizes=True,  # they are reported, and refused below
                output_loading_info=True,
            )
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"the checkpoint does not fit the model: {' '.join(str(error).split())[:300]}") from None
    except (AttributeError, ImportError, LookupError, TypeError) as error:  # where it wants more of config.json
        fault = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ModelError(
            f"architecture {config.architecture} is not supported: it cannot be loaded ({fault})"
        ) from None
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise ModelError(f"tensor {name} has shape {list(stored)}, config.json asks for {list(expected)}")
    for name in sorted(report["missing_keys"]):
        raise ModelError(f"tensor {name} is missing from the checkpoint")
    refuse_unexpected(report["unexpected_keys"])
    loaded: PreTrainedModel = module.eval()
    return loaded


@contextmanager
def quiet_and_one_by_one() -> Iterator[None]:
    """Transformers' threads would read all tensors ahead of the merging, a second copy; its bars are for terminals."""
    name, level = "HF_DEACTIVATE_ASYNC_LOAD", transformers_logging.get_verbosity()
    before = os.environ.get(name)
    os.environ[name] = "1"
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def pack(module: PreTrainedModel, kernels: LayerKernels, dtype: torch.dtype) -> None:
    """Replace the linear layers of dtype, and an embedding that shares its matrix with the output head.

    Layers made by kernels are as fast as those of native families. The plain weights are freed one after another.
    """
    shared = {part.weight: (name, part) for name, part in module.named_modules() if type(part) is torch.nn.Embedding}
    tables = {part.weight for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    for name, part in list(module.named_modules()):
        if type(part) is not torch.nn.Linear or part.weight.dtype != dtype:
            continue
        weight, bias = part.weight, part.bias
        ref = WeightRef((name,), (part.out_features,), part.in_features, bias is not None)
        if weight in shared and bias is None:
            gather, head = kernels.tied(ref, _Given(weight.data, None))
            module.set_submodule(shared[weight][0], _Gather(gather))
            module.set_submodule(name, _Rows(head))
        elif weight not in tables:  # a packed copy of an embedding that scales its rows would be a second one
            given = _Given(weight.data, None if bias is None else bias.data)
            module.set_submodule(name, _Rows(kernels.linear(ref, given)))


@dataclass(frozen=True, slots=True)
class _Given(WeightReader):
    """Hands out one matrix."""

    weight: Tensor
    bias: Tensor | None

    def dense(self, ref: WeightRef) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias

    def experts(self, ref: ExpertsRef) -> Iterator[tuple[Tensor, Tensor | None]]:
        raise NotImplementedError(ref.matrix.names)

    def tensor(self, ref: TensorRef) -> Tensor:
        raise NotImplementedError(ref.name)


class _Rows(torch.nn.Module):
    """The kernels' layer over the last dimension of any tensor."""

    def __init__(self, layer: Linear | Layer) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self._layer(inputs.reshape(-1, inputs.shape[-1]).contiguous())
        return rows.view(*inputs.shape[:-1], rows.shape[-1])


class _Gather(torch.nn.Module):
    """The kernels' embedding of token ids of any shape."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = layer

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self._layer(token_ids.reshape(-1))
        return rows.view(*token_ids.shape, rows.shape[-1])
