"""Finds out how a module of transformers attends, by running it once on the meta device, where nothing is computed.

Every call of the attention interface is recorded with its shapes, its scale and the function of its mask. So windows
and heads are those that the module really uses, not those that a field of config.json promises. What Weft's attention
cannot express is refused with a `ModelError`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from weft.engine.cache.specs import PagedKV
from weft.engine.wire.errors import ModelError

RECORDING = "weft_recording"
"""Name of the attention that records, for `attn_implementation`."""

MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]
"""(batch index, head, query positions, key positions) -> whether each query sees each key."""

_NUM_TOKENS = 5

_HARMLESS = frozenset(
    {"dropout", "position_ids", "sliding_window", "use_cache", "cache_position", "logits_to_keep", "s_aux"}
)
"""Arguments that say nothing more of the result: dropout is off, the window is read from the mask, sinks are kept."""

Reach = tuple[int | None, int | None]
"""Sliding window and span, as in `PagedKV`."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention module: its path in the model, its query heads, what it keeps."""

    name: str
    num_heads: int
    cache: PagedKV


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """How a module attends, in the order of its layers; body is the path of the submodule that holds them all.

    The rest of the module makes logits of the body's hidden states.
    """

    body: str
    layers: tuple[AttentionLayer, ...]


class _Recorder:
    """Collects what happens in one run of a module."""

    def __init__(self, module: PreTrainedModel, longest_context: int) -> None:
        self.names = {id(part): name for name, part in module.named_modules()}
        self.longest_context = longest_context
        self.entered: list[str] = []
        self.layers: list[AttentionLayer] = []
        self.masks: dict[int, tuple[Tensor, MaskFunction]] = {}
        self.reaches: dict[int, Reach | None] = {}

    def enter(self, part: torch.nn.Module, inputs: object) -> None:
        """Note that a submodule runs."""
        self.entered.append(self.names.get(id(part), ""))

    def mask(self, mask_function: MaskFunction, shape: tuple[int, ...]) -> Tensor:
        """A tensor that stands for this mask."""
        tensor = torch.empty(shape, dtype=torch.bool, device="meta")
        self.masks[id(tensor)] = tensor, mask_function
        return tensor

    def attend(
        self,
        part: torch.nn.Module,
        heads: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | None,
        scaling: float | None,
        others: dict[str, object],
    ) -> None:
        """Note a call; refuses what cannot be expressed."""
        queries, keys, values = heads
        name = self.names[id(part)]
        if any(layer.name == name for layer in self.layers):
            raise ModelError(f"{name} attends more than once in a layer")
        if keys.shape[2] != queries.shape[2]:
            raise ModelError(f"{name} attends to other tokens than those of its request")
        if values.shape[-1] > keys.shape[-1]:
            raise ModelError(f"{name} has values of {values.shape[-1]}, which are larger than its keys")
        soft_cap = others.pop("softcap", None)
        if others.pop("is_causal", None) is False:
            raise ModelError(f"{name} attends to later tokens")
        unknown = sorted(
            key for key, value in others.items() if value is not None and value is not False and key not in _HARMLESS
        )
        if unknown:
            raise ModelError(f"{name} attends with {', '.join(unknown)}")
        window, span = self._reach(part, name, mask)
        cache = PagedKV(
            num_kv_heads=keys.shape[1],
            head_dim=keys.shape[-1],
            sliding_window=window,
            scale=scaling,
            soft_cap=soft_cap if isinstance(soft_cap, float) else None,
            span=span,
            has_sinks=others.get("s_aux") is not None,
            num_heads=queries.shape[1],
        )
        self.layers.append(AttentionLayer(name, queries.shape[1], cache))

    def _reach(self, part: torch.nn.Module, name: str, mask: Tensor | None) -> Reach:
        if mask is None:
            if getattr(part, "is_causal", True):
                return None, None
            raise ModelError(f"{name} attends to later tokens")
        base = (
            mask if mask._base is None or mask._base.shape != mask.shape else mask._base
        )  # a slice may hold all of it
        if id(base) not in self.masks:
            raise ModelError(f"{name} changes its attention mask")
        if id(base) not in self.reaches:  # layers share masks
            self.reaches[id(base)] = read_reach(self.masks[id(base)][1], self.longest_context)
        reach = self.reaches[id(base)]
        if reach is None:
            raise ModelError(f"{name} has an attention mask that is neither causal nor a sliding window nor in chunks")
        return reach


def read_reach(mask_function: MaskFunction, longest_context: int) -> Reach | None:
    """What a causal mask lets tokens see; None if the mask is of another kind.

    Args:
        longest_context: Positions are looked at up to this one. A window as long as that is full attention.
    """
    keys = torch.arange(longest_context)

    def seen(position: int) -> Tensor:
        result = torch.as_tensor(mask_function(0, 0, torch.tensor(position), keys))
        return result.expand(longest_context)

    size = int(torch.as_tensor(mask_function(0, 0, keys, torch.tensor(0))).expand(longest_context).sum())
    places = {0, 1, size // 2, size - 1, size, size + 1, size + size // 2, 2 * size - 1, 2 * size, longest_context - 2}
    positions = [*sorted(places & set(range(longest_context))), longest_context - 1]
    reaches: tuple[Reach, ...] = ((size, None), (None, size)) if 0 < size < longest_context else ((None, None),)
    for window, span in reaches:
        spec = PagedKV(1, 1, window, span=span)
        if all(torch.equal(seen(p), (keys <= p) & (keys >= spec.first_seen(p))) for p in positions):
            return window, span
    return None


@contextmanager
def _known_chunks() -> Iterator[None]:
    """Let chunks begin at the first token: transformers counts padding, of which the meta device has no values."""
    make = masking_utils.chunked_causal_mask_function

    def without_padding(chunk_size: int, left_padding: Tensor) -> MaskFunction:
        return make(chunk_size, torch.zeros(len(left_padding), dtype=torch.int64))

    masking_utils.chunked_causal_mask_function = without_padding
    try:
        yield
    finally:
        masking_utils.chunked_causal_mask_function = make


_recorder: _Recorder | None = None
"""Of the run in progress. The interface calls plain functions, which find it here."""


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    assert _recorder is not None
    _recorder.attend(module, (query, key, value), attention_mask, scaling, others)
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _mask(batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, **others: object) -> Tensor:
    assert _recorder is not None
    return _recorder.mask(mask_function, (batch_size, 1, q_length, kv_length))


AttentionInterface.register(RECORDING, _attend)
AttentionMaskInterface.register(RECORDING, _mask)


def record(module: PreTrainedModel, longest_context: int) -> RecordedCalls:
    """Run a module that was built on the meta device with the attention `RECORDING`.

    Args:
        longest_context: Most tokens of a request.

    Raises:
        ModelError: The module cannot run there, or attends in a way that Weft's attention cannot express.
    """
    global _recorder
    recorder = _recorder = _Recorder(module, longest_context)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(recorder.enter)
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), _known_chunks():
            module(input_ids=tokens, position_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    except ModelError:
        raise
    except Exception as error:  # whatever somebody else's module raises on a device without values
        fault = str(error).strip().partition("\n")[0]  # some begin with an empty line
        raise ModelError(f"its module does not run without data ({type(error).__name__}: {fault})") from None
    finally:
        hook.remove()
        _recorder = None
    if not recorder.layers:
        raise ModelError("its attention does not go through transformers' AttentionInterface")
    names = [layer.name for layer in recorder.layers]
    body = next((part for part in recorder.entered if part and all(name.startswith(f"{part}.") for name in names)), "")
    if not body:
        raise ModelError("no part of its module holds all layers")
    return RecordedCalls(body, tuple(recorder.layers))
