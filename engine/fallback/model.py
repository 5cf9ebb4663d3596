"""A module of transformers as a `Model`: its body computes hidden states, the rest of it makes logits of some of them.

The rest knows how its architecture scales, caps and adds biases to logits. So it is run as it is, with a body that
returns given hidden states.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput
from typing_extensions import override

from weft.engine.cache.specs import CacheSpec
from weft.engine.fallback.attention import PAGED, CurrentStep, LayerCache
from weft.engine.fallback.attention_calls import RecordedCalls
from weft.engine.layers.step_caches import StepCaches
from weft.engine.models.decoder import Model


class _Body(torch.nn.Module):
    """Stands in the place of the body: runs it, or returns the hidden states that it was given."""

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
    """A loaded module. Runs one step at a time.

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
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, caches: StepCaches, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        self._current.attention = caches.attention
        output = self._body.body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        self._current.attention = None
        self._output_type = type(output)
        hidden: torch.Tensor = output[0][0]
        return hidden if rows is None else hidden[rows]

    @override
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self._body.given = self._output_type(last_hidden_state=hidden_states[None])
        try:
            unread = torch.zeros(1, len(hidden_states), dtype=torch.int64, device=hidden_states.device)
            logits: torch.Tensor = self._module(input_ids=unread, use_cache=False).logits[0]
        finally:
            self._body.given = None
        return logits.float()

    def plain_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Float32 logits of whole prompts (num_prompts, num_tokens), by the module alone with its own attention."""
        with self._eager_attention():
            logits: torch.Tensor = self._module(input_ids=token_ids, use_cache=False).logits
        return logits.float()  # (num_prompts, num_tokens, vocab_size)

    @contextlib.contextmanager
    def _eager_attention(self) -> Iterator[None]:
        config = self._module.config
        config._attn_implementation = "eager"
        try:
            yield
        finally:
            config._attn_implementation = PAGED
