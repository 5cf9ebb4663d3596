"""The engine's unit of work: one prompt, one continuation.

A request's tokens are `token_ids`, which the host knows, followed by `num_placeholders` ids. A launched step samples
those, and the host has not seen them yet. Scheduling has one rule: `num_computed_tokens` moves towards `num_tokens`.
Only the engine's thread changes a request, and each part has its owner. The KV cache manager changes the blocks. The
scheduler and admission change status and counters. The collector or the continuation changes the output. The speculator
changes the drafts.
"""

import enum
from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from weft.engine.batch import StepResult
from weft.engine.drafts import Drafting, TokenHistory
from weft.engine.guidance.matcher import GrammarMatcher, ReasoningProgress
from weft.engine.sampling.edits import LogitEdits, TokenCounts, make_edits, repeating_ids
from weft.engine.sampling.pooling import Pooler
from weft.engine.wire import messages as wire
from weft.engine.wire.inputs import TokenSpan
from weft.engine.wire.options import Adapter
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.pictures import Picture

Outputs = list[tuple[int, wire.RequestOutput]]
"""Outputs, each with the connection that it goes to."""


class RequestStatus(enum.Enum):
    """Where a request is. LOADING means that it waits until a part of its prefix is loaded back into the cache."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class RequestKey(NamedTuple):
    """Names a request across connections. A tuple, because it is hashed several times per step."""

    connection: int
    request_id: int
    choice: int


class Continuation(Protocol):
    """What decides how several requests go on together, in place of the ids that are sampled for each of them."""

    def take(self, request: "Request", first_row: int, num_rows: int, result: StepResult) -> Outputs:
        """Take the rows of a step's result for one of the requests; returns what there is to send by now."""

    def give_way(self, keys: Container[RequestKey]) -> None:
        """Make room if none of the requests can go on; keys are those of the step that was just scheduled."""

    def end(self, reason: wire.FinishReason, message: str | None) -> Outputs:
        """End all of the requests from the engine's side, with this reason for every choice."""


@dataclass(slots=True, eq=False)
class Request:
    """State of one request; see the module's head for the counters.

    Attributes:
        arrival: Order of arrival over all requests, from 0. Forks share it.
        arrival_time: `time.monotonic` at arrival.
        eos_token_ids: End-of-sequence ids of the model that end this request; empty under ignore_eos.
        max_num_tokens: Prompt and output together never exceed this.
        cache_seed: First parent of the chain of block hashes; equal only for requests that may share blocks.
        table_offset: Added to its positions where the model looks them up, see `RotaryTable`; behind all its pictures.
        adapter: Its adapter; None is the model itself.
        adapter_slot: Where that is loaded; 0 without one, and while the request waits for it (`adapters.py`).
        edits: Logit edits that the parameters ask for on every row.
        num_lifts: Tiers gained by waiting. Changes only while the request waits.
        deadline: Latest `time.monotonic` to leave the waiting queue; None means no limit.
        runs_alone: No other request may run beside it (a suspect of a crash).
        token_types: Of the prompt's tokens; empty if all have type 0.
        samples: Of sound, if that is the input.
        input_length: Tokens of an encoder's input, which the prompt begins with; 0 without an encoder.
        num_input_slots: The same with the padding behind them, which fills the last block. They are computed in one
            step.
        spans: Tokens of the prompt that stand for something else.
        pictures: What that is; empty if it is none.
        token_ids: Prompt and known output ids.
        num_placeholders: Output ids that a launched step samples and that the host does not know yet.
        draft_token_ids: Guesses for the next ids, verified in the next step; never indexed.
        num_computed_tokens: Tokens that are in the caches, or will be once launched steps have run.
        block_tables: Block ids, one array per cache group (64-bit, so that a batch copies them as they are).
        block_hashes: Hash of each full block of known tokens, as far as computed.
        num_indexed_blocks: Leading blocks that need no more indexing.
        num_free_window_blocks: Leading blocks freed under a sliding window, one count per cache group.
        state_stops: Numbers of leading tokens after which its states are kept for others (`state_stops.py`).
        states_before_drafts: States to go back to if drafts are refused, one per group of states; empty without drafts.
        first_new_block: Blocks before this index were there when the request was (re)admitted.
        pending_indices: Choices to be forked from this request once its prompt is computed.
        num_cached_tokens: Prompt tokens found in the prefix cache at first admission; None before.
        num_seen_tokens: Leading tokens whose pictures have been counted.
        num_scored_tokens: Prompt tokens whose log-probability is reported. Counts the first token too, which has none.
        stop_ids: Ids that end the output: end-of-sequence ids and the caller's.
        token_counts: Counts for the penalties. Under a repetition penalty they include the prompt. None without
            penalties.
        reasoning_budget: When the end of reasoning is forced; None means never.
        reasoning: How much of that budget is used up; None without a budget.
        grammar: Matcher that has consumed the known output ids; None when any text is allowed.
        prediction: Text that the caller predicts for the output; None without one. Choices share it.
        drafting: What speculation has learned about this choice.
        awaits_ids: There is a draft. It is made again once the ids being sampled are known, and no step comes before.
        continuation: What decides how it goes on, such as a beam search. None: the sampled ids are next.
        pooler: Makes a vector of its hidden states; None if it generates.
    """

    key: RequestKey
    params: SamplingParams
    prompt_token_ids: list[int]
    arrival: int
    arrival_time: float
    eos_token_ids: frozenset[int]
    max_num_tokens: int
    cache_seed: bytes
    edits: LogitEdits
    table_offset: int = 0
    adapter: Adapter | None = None
    adapter_slot: int = 0
    caching: wire.CachePolicy = wire.USUAL_CACHING
    priority: int = 0
    num_lifts: int = 0
    deadline: float | None = None
    runs_alone: bool = False
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    token_types: list[int] = field(default_factory=list)
    input_length: int = 0
    num_input_slots: int = 0
    samples: bytes = b""
    spans: list[TokenSpan] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_placeholders: int = field(init=False, default=0)
    draft_token_ids: list[int] = field(init=False, default_factory=list)
    num_computed_tokens: int = field(init=False, default=0)
    block_tables: list["array[int]"] = field(init=False, default_factory=list)
    block_hashes: list[bytes] = field(init=False, default_factory=list)
    num_indexed_blocks: int = field(init=False, default=0)
    num_free_window_blocks: list[int] = field(init=False, default_factory=list)
    state_stops: set[int] = field(init=False, default_factory=set)
    states_before_drafts: list[int] = field(init=False, default_factory=list)
    first_new_block: int = 0
    pending_indices: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    queue_time_s: float = 0.0
    num_seen_tokens: int = 0
    num_scored_tokens: int = 1
    num_preemptions: int = 0
    stop_ids: frozenset[int] = frozenset()
    token_counts: TokenCounts | None = None
    reasoning_budget: wire.ReasoningBudget | None = None
    reasoning: ReasoningProgress | None = None
    grammar: GrammarMatcher | None = None
    prediction: TokenHistory | None = None
    drafting: Drafting = field(init=False, default_factory=Drafting)
    awaits_ids: bool = field(init=False, default=False)
    continuation: Continuation | None = None
    pooler: Pooler | None = None

    def __post_init__(self) -> None:
        """Start from the prompt alone."""
        self.token_ids = list(self.prompt_token_ids)
        self.stop_ids = self.eos_token_ids | frozenset(self.params.stop_token_ids)
        self.reasoning = ReasoningProgress(self.reasoning_budget) if self.reasoning_budget is not None else None
        params, self.token_counts = self.params, None
        if params.repetition_penalty != 1.0:
            self.token_counts = TokenCounts(self.prompt_token_ids[self.num_input_slots :])
        elif params.presence_penalty or params.frequency_penalty:
            self.token_counts = TokenCounts(())

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, placeholders included."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_padding_tokens(self) -> int:
        """Tokens of the prompt that stand for none of the caller's."""
        return self.num_input_slots - self.input_length

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, placeholders included."""
        return self.num_tokens - len(self.prompt_token_ids)

    @property
    def num_new_tokens(self) -> int:
        """Tokens not computed yet, drafts not counted."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def has_computed_prompt(self) -> bool:
        """Whether the whole prompt is computed."""
        return self.num_computed_tokens >= len(self.prompt_token_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Output tokens that may still be sampled."""
        return self.max_num_tokens - self.num_tokens

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key, lowest served first: tier and priority, then arrival, then choice."""
        return (self.priority - self.num_lifts * wire.TIER_WIDTH, self.arrival, self.key.choice)

    @property
    def needs_known_ids(self) -> bool:
        """Whether the next id depends on the ids before it, so that none of them may be a placeholder."""
        is_led = self.grammar is not None or self.reasoning_budget is not None or self.continuation is not None
        return is_led or self.edits.ban_repeats or self.params.timestamps is not None

    @property
    def is_run(self) -> bool:
        """Whether it has a run of known output ids to compute, more than the last one."""
        return self.has_computed_prompt and self.num_new_tokens > 1

    @property
    def is_schedulable(self) -> bool:
        """False if nothing is left to compute, or the next input depends on ids not yet on the host.

        It depends on them in three cases. Drafts are being verified, so the number of tokens is unknown. A new draft is
        to be made. A grammar, a reasoning budget or a beam search decides what follows.
        """
        if self.num_placeholders and (self.draft_token_ids or self.awaits_ids or self.needs_known_ids):
            return False
        return self.num_new_tokens > 0 and (self.num_remaining_tokens > 0 or not self.has_computed_prompt)

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED

    def sibling(self, choice: int) -> "Request":
        """A new request for another choice of the same prompt. Nothing of it is computed yet.

        `replace` lets the fields begin anew that are no arguments (`init=False`).
        """
        return replace(
            self,
            key=self.key._replace(choice=choice),
            pending_indices=[],
            num_scored_tokens=self.num_prompt_tokens,
            grammar=self.grammar.copy() if self.grammar is not None else None,
        )

    def last_ids(self, most: int) -> list[int]:
        """The last known ids, without those of an encoder's input."""
        return self.token_ids[max(len(self.token_ids) - most, self.num_input_slots) :]

    def repeating_ids(self, draft_token_ids: Sequence[int] = ()) -> set[int]:
        """Ids that would end a run of ids that may not repeat, behind the known ids and these drafts. O(tokens)."""
        own = [*self.last_ids(len(self.token_ids)), *draft_token_ids]
        return repeating_ids(self.params, own, self.prompt_token_ids[: self.input_length or None])

    def append(self, token_id: int) -> wire.FinishReason | None:
        """Add one sampled id to the output; return why the output ends with it, or None if it goes on."""
        self.token_ids.append(token_id)
        if self.token_counts is not None:
            self.token_counts.add(token_id)
        if self.reasoning is not None:
            self.reasoning.append(token_id)
        if token_id in self.stop_ids and len(self.token_ids) - len(self.prompt_token_ids) > self.params.min_tokens:
            return wire.FinishReason.STOP
        if self.grammar is not None and self.grammar.is_stopped:
            return wire.FinishReason.STOP  # nothing but the end can follow, whatever min_tokens and ignore_eos say
        is_full = len(self.token_ids) >= self.max_num_tokens
        if is_full and self.params.forced_end_id is not None and self.grammar is None:
            self.token_ids[-1] = self.params.forced_end_id
        return wire.FinishReason.LENGTH if is_full else None


def make_request(
    add: wire.AddRequest,
    *,
    connection: int,
    arrival: int,
    arrival_time: float,
    eos_token_ids: frozenset[int],
    max_model_len: int,
    cache_seed: bytes,
    block_size: int,
) -> Request:
    """Turn a checked AddRequest into the request of its first choice; the others wait in `pending_indices`."""
    params, token_ids = add.sampling_params, add.input.slots(block_size)
    max_num_tokens = max_model_len
    if params.max_tokens is not None:
        max_num_tokens = min(max_model_len, len(token_ids) + params.max_tokens)
    eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
    return Request(
        key=RequestKey(connection, add.request_id, 0),
        params=params,
        prompt_token_ids=token_ids,
        token_types=add.input.token_types,
        input_length=add.input.input_length,
        samples=add.input.samples,
        num_input_slots=add.input.num_slots(block_size),
        spans=add.input.spans,
        pictures=add.input.pictures,
        table_offset=sum(picture.position_offset for picture in add.input.pictures),
        arrival=arrival,
        arrival_time=arrival_time,
        eos_token_ids=eos_token_ids,
        max_num_tokens=max_num_tokens,
        cache_seed=cache_seed,
        edits=make_edits(params, eos_token_ids | frozenset(params.stop_token_ids)),
        adapter=add.adapter,
        caching=add.caching,
        priority=add.priority,
        deadline=add.deadline,
        pending_indices=list(range(1, add.num_choices)),
        reasoning_budget=add.guidance.reasoning_budget,
        prediction=TokenHistory(add.guidance.prediction_token_ids) if add.guidance.prediction_token_ids else None,
    )


class LiveRequests(dict[RequestKey, Request]):
    """All unfinished requests by key, and the choices of each, so that an abort finds them at once.

    Only the scheduler adds and removes, item by item.
    """

    def __init__(self) -> None:
        """Start with none."""
        super().__init__()
        self._choices: dict[tuple[int, int], dict[RequestKey, Request]] = {}

    def __setitem__(self, key: RequestKey, request: Request) -> None:
        """Add a request."""
        super().__setitem__(key, request)
        self._choices.setdefault(key[:2], {})[key] = request

    def __delitem__(self, key: RequestKey) -> None:
        """Remove a request."""
        super().__delitem__(key)
        choices = self._choices[key[:2]]
        del choices[key]
        if not choices:
            del self._choices[key[:2]]

    def has(self, connection: int, request_id: int) -> bool:
        """Whether any choice of a request is unfinished."""
        return (connection, request_id) in self._choices

    def choices_of(self, connection: int, request_id: int) -> list[Request]:
        """The unfinished choices of one request; empty if it has ended or never existed."""
        return list(self._choices.get((connection, request_id), {}).values())
