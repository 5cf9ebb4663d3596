"""The messages between server and engine, and the frames in which they cross the process boundary.

Both talk over a Unix stream socket. A frame is four bytes of length (little endian), then one message in MessagePack.
The engine speaks first, with `EngineInfo`. End of file means that the peer is dead. Imports neither torch nor the
server.
"""

import enum
import itertools
import socket
import struct
import time
from typing import Literal

import msgspec

from weft.engine.wire.inputs import AudioShape, RequestInput
from weft.engine.wire.options import Adapter
from weft.engine.wire.options import EngineOptions as EngineOptions
from weft.engine.wire.params import FinishReason as FinishReason
from weft.engine.wire.params import PooledOutput, Pooling, SamplingParams, VectorInfo

MAX_FRAME_BYTES = 256 << 20
"""A longer frame means that the two ends are out of sync. The reader closes the connection."""

_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 20


def frame(body: bytes) -> bytes:
    """One frame, length included."""
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frame bodies. Owns the bytes of the frame that is not yet whole."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes as they arrive; return the bodies that are now whole, in order.

        Raises:
            ValueError: A frame says that it is longer than MAX_FRAME_BYTES.
        """
        buffer = self._buffer
        buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes, at most {MAX_FRAME_BYTES} allowed")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return bodies


def receive(peer: socket.socket, max_bytes: int = MAX_FRAME_BYTES, deadline: float | None = None) -> bytes:
    """Wait for one frame on a blocking socket and return its body.

    Args:
        deadline: `time.monotonic` by which it must be whole; None: whenever it comes.

    Raises:
        EOFError: The stream ends.
        OSError: The peer is gone, or the frame is late.
        ValueError: The frame says that it is longer than max_bytes.
    """
    (length,) = _LENGTH.unpack(receive_exactly(peer, _LENGTH.size, deadline))
    if length > max_bytes:
        raise ValueError(f"frame of {length} bytes, at most {max_bytes} allowed")
    return receive_exactly(peer, length, deadline)


def receive_exactly(peer: socket.socket, num_bytes: int, deadline: float | None = None) -> bytes:
    """As `receive`, without a length before the bytes. Takes no more memory than what has come."""
    data = bytearray()
    while len(data) < num_bytes:
        if deadline is not None:
            peer.settimeout(max(deadline - time.monotonic(), 1e-3))
        if not (chunk := peer.recv(min(num_bytes - len(data), _CHUNK_BYTES))):
            raise EOFError
        data += chunk
    return bytes(data)


SOCKET_NAME = "engine.sock"
STATUS_NAME = "status"
STEP_NAME = "step"
SUSPECTS_NAME = "suspects"
FAULT_NAME = "fault"
"""File names in the runtime directory, which the supervisor makes and both sides are given."""

TIER_WIDTH = 1 << 32
"""Amount that each service tier adds to `AddRequest.priority`. Waiting long enough takes it off again."""


class RejectReason(enum.IntEnum):
    """Why a request was not accepted."""

    INVALID = 0
    CONTEXT_LENGTH = 1
    QUEUE_FULL = 2
    POISON = 3
    GRAMMAR = 4
    ADAPTER = 5


class EngineInfo(msgspec.Struct, tag="info", frozen=True):
    """The handshake: what the engine behind this connection is. A new epoch means a new engine process.

    Attributes:
        max_input: Most tokens that its encoder reads; 0 for a model without one.
        max_own: Most tokens of the decoder of such a model, whatever the encoder reads.
        audio: What the encoder reads where that is sound; None for tokens.
        picture_token: The token that pictures stand at; None if it sees none.
        aligns: Whether it tells when a text is spoken (`Pooling.aligned`).
    """

    epoch: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    attention_backend: str
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    task: str = "generate"
    vectors: VectorInfo | None = None
    kv_role: str = "none"
    max_input: int = 0
    max_own: int = 0
    audio: AudioShape | None = None
    picture_token: int | None = None
    aligns: bool = False

    @property
    def max_prompt(self) -> int:
        """Most tokens of a prompt."""
        return self.max_input or self.max_model_len

    def room(self, num_prompt_tokens: int, num_begun: int = 0) -> int:
        """Tokens that an output can have behind a prompt, or behind what a decoder begins with."""
        return self.max_own - num_begun if self.max_input else self.max_model_len - num_prompt_tokens


class ReasoningBudget(msgspec.Struct, frozen=True):
    """Force end_token_id after max_tokens tokens of reasoning, unless it came before.

    Reasoning begins with the output. If there is a begin_token_id, it begins behind that id at the output's beginning.
    """

    max_tokens: int
    end_token_id: int
    begin_token_id: int | None = None


MAX_GRAMMAR_BYTES = 128 << 10
"""Longest grammar. The time and memory to compile it and to compute masks grow with its length."""


class Guidance(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an output must look like, and what it is expected to look like.

    Attributes:
        grammar: The text of the output follows this grammar: Lark or JSON, as `llguidance` reads them. In JSON, an
            entry may have its grammar as `gbnf`. None allows any text.
        prediction_token_ids: Ids that the output will probably hold. They make it faster, never different.
        reasoning_budget: Bound on reasoning; None for no bound.
    """

    grammar: str | None = None
    prediction_token_ids: tuple[int, ...] = ()
    reasoning_budget: ReasoningBudget | None = None


UNGUIDED = Guidance()


class Pin(msgspec.Struct, array_like=True, frozen=True):
    """Keep the blocks of the first num_tokens tokens findable for ttl_s seconds from admission, if there is room."""

    num_tokens: int
    ttl_s: float


class CachePolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a request uses the prefix cache. Without `is_used` it neither reads nor writes it.

    With `is_stored` the prompt's blocks are written to the folder that engines share before the first output comes.
    """

    is_used: bool = True
    is_stored: bool = False
    pins: tuple[Pin, ...] = ()


USUAL_CACHING = CachePolicy()


class BeamOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the finished beams of a search are compared, and when it ends.

    Attributes:
        length_penalty: Above 0 prefers longer outputs, below 0 shorter ones.
        early_stopping: True ends the search once as many beams are finished as it is wide. False ends it when the best
            live beam, at its present length, scores no better than the worst of these. "never" ends it when no live
            beam of any length can score better.
        width: How many beams go on, at least as many as there are choices; 0 for just as many.
        num_begun_tokens: Last tokens of the prompt that count towards the length of an output, as a first one that the
            model is forced to write.
    """

    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    width: int = 0
    num_begun_tokens: int = 0


_request_ids = itertools.count(1)


class AddRequest(msgspec.Struct, tag="add", frozen=True):
    """Ask for one prompt to be continued, `num_choices` times; answered by `Accepted` or `Rejected`.

    Attributes:
        input: The prompt to be continued, or what an encoder reads and how the decoder begins.
        sampling_params: How to sample; choice i draws from (seed, position, i).
        num_choices: Independent continuations; they share the blocks of the prompt.
        tenant: Who asks; empty when unknown. Meant for fairness and accounting later; no effect yet.
        priority: Lower is served earlier. The sum of `TIER_WIDTH` for each tier and the caller's own priority, which
            stays within half of that.
        deadline: On the clock of `time.monotonic`. A request that still waits then ends with TIMEOUT. None for no
            limit.
        cache_salt: Only requests with the same salt share blocks.
        adapter: LoRA adapter, which is loaded if it is in no slot; None is the base model.
        beams: Asks for a beam search. The choices are its best outputs and come whole, best first. Penalties, biases
            and bans change log-probabilities, reported ones too, which are not normalised again. Parameters that make
            sampling less random have no effect. None: each choice is sampled.
        pooling: Asks for a vector. Then max_tokens is 0, and there is one choice. None: the prompt is continued.
        request_id: Unique on its connection. Counted in each process, so a request is sent once.
    """

    input: RequestInput
    sampling_params: SamplingParams
    num_choices: int = 1
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    cache_salt: str = ""
    adapter: Adapter | None = None
    guidance: Guidance = UNGUIDED
    caching: CachePolicy = USUAL_CACHING
    beams: BeamOptions | None = None
    pooling: Pooling | None = None
    request_id: int = msgspec.field(default_factory=_request_ids.__next__)

    def again(self, guidance: Guidance) -> "AddRequest":
        """A new request that differs in its guidance."""
        return msgspec.structs.replace(self, guidance=guidance, request_id=next(_request_ids))

    def probe(self, grammar: str) -> "AddRequest":
        """A request for one token, which is accepted if this one would be with that grammar."""
        return AddRequest(
            self.input.least,
            SamplingParams(max_tokens=1),
            priority=self.priority,
            deadline=self.deadline,
            guidance=Guidance(grammar),
            caching=CachePolicy(is_used=False),
        )


class AbortRequest(msgspec.Struct, tag="abort", frozen=True):
    """Stop a request and free its blocks; no output follows. `index` None means all its choices."""

    request_id: int
    index: int | None = None


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """End once nothing runs or waits. What is accepted until then is answered."""


class Accepted(msgspec.Struct, tag="accepted", frozen=True):
    """The request waits or runs."""

    request_id: int


class Rejected(msgspec.Struct, tag="rejected", frozen=True):
    """The request was not accepted. The message is fit for the caller and names field, bound and value."""

    request_id: int
    reason: RejectReason
    message: str


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """One token's log-probability under the model's own distribution, and the most probable alternatives."""

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


class TokensOutput(msgspec.Struct, array_like=True, tag=0):
    """Tokens that one choice gained since the last message; merged when the reader is slow.

    Attributes:
        index: The choice, from 0.
        token_ids: New output ids, in order; the id that stopped the output is the last one.
        finish_reason: None while the choice runs.
        stop_token_id: The stop id or end-of-sequence id behind FinishReason.STOP.
        logprobs: One entry for each new id; None unless asked for.
        prompt_logprobs: For prompt positions 1.., in order, before the first output id; None unless asked for.
        num_cached_tokens: Prompt tokens found in the prefix cache; set on the first message of a choice.
        queue_time_s: Seconds from arrival to the first step; set on the first message of a choice.
        num_accepted_predictions: Ids of the prediction that were tried and are part of token_ids.
        num_rejected_predictions: Ids of the prediction that were tried and refused.
    """

    request_id: int
    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int | None = None
    queue_time_s: float | None = None
    message: str | None = None
    num_accepted_predictions: int = 0
    num_rejected_predictions: int = 0

    def merge(self, later: "RequestOutput") -> None:
        """Append a later output of the same choice, which is of the same kind."""
        assert isinstance(later, TokensOutput)
        self.token_ids = self.token_ids + later.token_ids
        self.finish_reason = later.finish_reason
        self.stop_token_id = later.stop_token_id
        self.message = later.message
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = (self.prompt_logprobs or []) + later.prompt_logprobs
        if self.num_cached_tokens is None:
            self.num_cached_tokens = later.num_cached_tokens
        if self.queue_time_s is None:
            self.queue_time_s = later.queue_time_s
        self.num_accepted_predictions += later.num_accepted_predictions
        self.num_rejected_predictions += later.num_rejected_predictions


RequestOutput = TokensOutput | PooledOutput
"""What a choice may gain: a union of structs, each with an integer as its tag. What carries outputs (`StepOutput`,
`ServerLink`, the client's mailboxes) uses only their `request_id`, `index`, `finish_reason` and `merge`."""


class StepOutput(msgspec.Struct, tag="step"):
    """Everything that one step brought to one connection."""

    outputs: list[RequestOutput]


ToEngine = AddRequest | AbortRequest | Leave
FromEngine = EngineInfo | Accepted | Rejected | StepOutput

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
decode_to_engine, decode_from_engine = _to_engine.decode, _from_engine.decode
"""Decode the body of a frame. A msgspec.DecodeError means that it is no such message or a parameter is out of range."""


def encode(message: ToEngine | FromEngine) -> bytes:
    """One frame, length included."""
    return frame(_encoder.encode(message))
