"""Short ways to make requests, and a cost model to read, so that tests say only what matters to them."""

import time
from collections.abc import Sequence

from weft.engine.cache.manager import KVCacheManager
from weft.engine.request import Request, make_request
from weft.engine.schedule.step_cost import StepCostModel, StepLoad
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import AddRequest, Guidance, ReasoningBudget
from weft.engine.wire.params import SamplingParams


def add_request(
    prompt: Sequence[int],
    request_id: int = 0,
    *,
    max_tokens: int | None = 16,
    num_choices: int = 1,
    priority: int = 0,
    deadline: float | None = None,
    reasoning_budget: ReasoningBudget | None = None,
    **params: object,
) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        input=TokensInput(list(prompt)),
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        num_choices=num_choices,
        priority=priority,
        deadline=deadline,
        guidance=Guidance(reasoning_budget=reasoning_budget),
    )


def request(
    prompt: Sequence[int],
    request_id: int = 0,
    *,
    cache_seed: bytes = b"seed",
    eos_token_ids: tuple[int, ...] = (),
    max_model_len: int = 1000,
    **options: object,
) -> Request:
    return make_request(
        add_request(prompt, request_id, **options),  # type: ignore[arg-type]
        connection=0,
        arrival=request_id,
        arrival_time=time.monotonic(),
        eos_token_ids=frozenset(eos_token_ids),
        max_model_len=max_model_len,
        cache_seed=cache_seed,
        block_size=16,
    )


def find_prefix(kv: KVCacheManager, r: Request) -> int:
    """Tokens that are cached of a request whose blocks are all hashed."""
    kv.hash_blocks(r)
    return kv.find_prefix(r)


class PerToken(StepCostModel):
    """Every token takes a millisecond, whatever its context, and steps are never late."""

    def __init__(self) -> None:
        super().__init__()
        self.tail_ratio = 1.0

    def predict(self, load: StepLoad) -> float:
        return load.num_tokens * 1e-3

    def num_tokens_within(self, load: StepLoad, context: int, seconds: float) -> int:
        return max(0, round(seconds * 1e3) - load.num_tokens)
