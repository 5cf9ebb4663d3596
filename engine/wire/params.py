"""What a request may ask of an engine, and why its output ended: sampling, its place behind others, and vectors.

Sampling parameters are checked once, at construction (also when a message is decoded), so nothing behind this point
checks again. Knows no text: stop strings live in the server, and words arrive here as token ids. Imports neither torch
nor the server.
"""

import enum

import msgspec

from weft.engine.wire.times import TimestampRule as TimestampRule


class FinishReason(enum.IntEnum):
    """Why an output ended. Only the server turns it into OpenAI's words."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    TIMEOUT = 4
    DEAD_END = 5


BACKGROUND = 1 << 36
"""From this priority on, a request is a background request, such as a line of a batch. It computes only in steps in
which no other request wants to."""


def is_background(priority: int) -> bool:
    """Whether a request of this priority comes after all others, however long it waits."""
    return priority >= BACKGROUND


MAX_LOGPROBS = 64
"""Most alternatives per token that the engine returns."""

MAX_BEAMS = MAX_LOGPROBS // 2
"""Most beams of a search, which looks at twice as many continuations of each."""

MAX_LOGPROB_TOKEN_IDS = 1024
"""Most ids whose log-probability is reported at every position."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request samples. Every field is honoured by the engine.

    Attributes:
        max_tokens: Most output tokens (>= 0); None means as many as the context holds. 0 scores the prompt only.
        min_tokens: End-of-sequence and stop ids cannot be sampled before this many output tokens.
        temperature: 0 is greedy; otherwise the logits are divided by it.
        top_k: Keep the k most probable ids; 0 keeps all.
        top_p: Keep the smallest set of ids whose probability reaches this, after top_k.
        min_p: Keep ids at least this times as probable as the most probable one.
        presence_penalty: Subtracted once from the logit of every id in the output so far.
        frequency_penalty: Subtracted once for each time an id is in the output so far.
        repetition_penalty: Divides (positive) or multiplies (negative) the logits of ids in prompt or output.
        seed: Key of the counter-based random numbers, 64 bits unsigned.
        stop_token_ids: Ids that end the output, besides the model's own end-of-sequence ids.
        ignore_eos: The model's end-of-sequence ids do not end the output.
        logit_bias: Added to the logits, by token id.
        bad_words_token_ids: Token id sequences that must not be completed; each has at least one id.
        begin_bans: Ids that the output cannot begin with.
        no_repeat_ngram_size: No so many tokens in a row occur twice in prompt and output; 0 bans nothing. The input of
            an encoder does not count.
        encoder_no_repeat_ngram_size: No so many in a row of the encoder's input, or of the prompt without an encoder,
            end with a token of the output; 0 bans nothing.
        forced_end_id: The last of max_tokens, whatever was sampled; None for none.
        renormalizes: Whether log-probabilities that a beam search compares sum to 1 again once logits are edited.
        timestamps: None for outputs that are not divided by times.
        allowed_token_ids: Only these ids can be sampled; None means all.
        logprobs: Alternatives to report per output token; 0 reports the sampled id alone; None reports nothing.
        logprob_token_ids: Ids to report behind these alternatives, whatever their rank; needs logprobs.
        prompt_logprobs: As logprobs, for each prompt token; such a request does not read the prefix cache.

    Raises:
        ValueError: A value is out of range; the message names field, bound and value.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    begin_bans: tuple[int, ...] = ()
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    forced_end_id: int | None = None
    renormalizes: bool = False
    timestamps: TimestampRule | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every range."""
        if self.max_tokens is not None:
            _check("max_tokens", self.max_tokens, 0, None)
        _check("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check("temperature", self.temperature, 0.0, 2.0)
        _check("top_k", self.top_k, 0, None)
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not 0.0 < (penalty := self.repetition_penalty) <= 100.0:
            raise ValueError(f"repetition_penalty must be greater than 0 and at most 100, got {penalty}")
        _check("seed", self.seed, 0, 2**64 - 1)
        for bias in self.logit_bias.values():
            _check("logit_bias", bias, -100.0, 100.0)
        _check("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, 1024)
        _check("encoder_no_repeat_ngram_size", self.encoder_no_repeat_ngram_size, 0, 1024)
        if any(not word for word in self.bad_words_token_ids):
            raise ValueError("bad_words must not hold an empty word")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must hold at least one id, got none")
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        elif self.logprob_token_ids:
            raise ValueError("logprob_token_ids is only allowed with logprobs")
        if (count := len(self.logprob_token_ids)) > MAX_LOGPROB_TOKEN_IDS:
            raise ValueError(f"logprob_token_ids must hold at most {MAX_LOGPROB_TOKEN_IDS} ids, got {count}")
        if self.prompt_logprobs is not None:
            _check("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)


def _check(name: str, value: float, low: float, high: float | None) -> None:
    if high is None:
        if not value >= low:  # "not >=" refuses NaN as well
            raise ValueError(f"{name} must be at least {low}, got {value}")
    elif not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high}, got {value}")


class VectorInfo(msgspec.Struct, frozen=True):
    """What the vectors of a model are.

    Attributes:
        size: Values of a vector; of a classifier one for each label.
        hidden_size: Values of a token's hidden state.
        labels: Of a classifier; empty for embeddings.
        is_normalized: Whether vectors have length 1 unless a request asks otherwise.
        dimensions: Numbers of leading values that are vectors too; empty for any number if is_matryoshka.
        is_matryoshka: Whether such vectors may be asked for.
    """

    size: int
    hidden_size: int
    labels: tuple[str, ...] = ()
    is_normalized: bool = False
    dimensions: tuple[int, ...] = ()
    is_matryoshka: bool = False


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Asks for a vector of the prompt in place of output; answered by one `PooledOutput`.

    Attributes:
        is_per_token: The final hidden states of all tokens, as they are, in place of the model's own vector.
        aligned: When tokens are spoken, in place of a vector (see `sampling.alignment`): how many tokens the decoder
            begins with, and how many positions of the sound count. None for a vector.
        dimensions: Keep this many leading values; None keeps all.
        is_finished: Whether the last step follows: length 1 of an embedding, the probabilities of a classifier. None:
            as the checkpoint says.
    """

    is_per_token: bool = False
    dimensions: int | None = None
    is_finished: bool | None = None
    aligned: tuple[int, int] | None = None


class PooledOutput(msgspec.Struct, array_like=True, tag=1):
    """The only output of a request with `pooling`, unless it fails: then a `TokensOutput` says so.

    Attributes:
        values: float32, little endian, row by row.
        num_rows: One, or one for each token of the prompt, or of its text if that is aligned.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        queue_time_s: Seconds from arrival to the first step.
    """

    request_id: int
    index: int
    values: bytes
    num_rows: int
    finish_reason: FinishReason | None
    num_cached_tokens: int | None = None
    queue_time_s: float | None = None

    def merge(self, later: object) -> None:
        """Never called: nothing comes after the only output."""
        raise AssertionError("a vector comes whole")
