"""What `weft simulate` and its engine process tell each other: one JSON object per line, over pipes."""

import msgspec

from weft.engine.shared.options import EngineOptions


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What steps cost with certain options on a certain machine, and what else a simulated engine has to know.

    Attributes:
        seconds: Of a step, and of one token, KV token and pair of query and context more in it (`StepCostModel`).
        median_error: Of the prediction, relative to the measured steps.
        windows: Sliding window of each cache group of blocks; None for one that sees all.
        num_state_groups: Cache groups of states.
    """

    options: EngineOptions
    device: str
    seconds: list[float]
    median_error: float
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    num_states: int
    windows: list[int | None]
    num_state_groups: int
    itl_target_s: float | None
    overlap: bool


class Begin(msgspec.Struct, tag="begin", frozen=True):
    """Forget what ran, and begin at zero seconds with so many empty replicas; no answer."""

    num_replicas: int


class Arrive(msgspec.Struct, tag="arrive", frozen=True):
    """A request reaches a replica, not before any other that was told; no answer.

    Attributes:
        hash_ids: Equal ids at the beginning of two prompts are equal blocks of `hash_tokens` tokens.
    """

    replica: int
    time: float
    num_tokens: int
    output_tokens: int
    hash_ids: list[int]
    hash_tokens: int


class Look(msgspec.Struct, tag="look", frozen=True):
    """Ask how all replicas are at a time; answered by a list of `Load`."""

    time: float


class Finish(msgspec.Struct, tag="finish", frozen=True):
    """Let all requests end; answered by `Finished`."""


ToSimulation = Begin | Arrive | Look | Finish


class Load(msgspec.Struct, array_like=True, frozen=True):
    """How a replica is."""

    running: int
    waiting: int
    kv_usage: float


class Finished(msgspec.Struct, frozen=True):
    """What became of all requests that arrived.

    Attributes:
        first_token_s: Seconds from arrival to the first token, of each that was answered, in the order of arrival.
        gaps_s: Seconds from one token of a request to its next, of all.
        prompt_tokens: Of those that were answered.
        cached_tokens: Those of them that were found in the cache.
        busy_s: Seconds that the replicas computed, in all.
        end_s: When the last token came.
        refused: Faults, with how many requests were refused for each.
    """

    first_token_s: list[float]
    gaps_s: list[float]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    busy_s: float
    end_s: float
    refused: dict[str, int]
