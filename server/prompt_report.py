"""What an answer says of its prompt: the text that the model saw, and the log-probabilities of its tokens."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from engine.protocol import TokenLogprobs
from server.context import TextTokenizer
from server.errors import InvalidRequestError
from server.params import MAX_LOGPROBS, check_range
from server.render import MIN_LOGPROB, RenderOptions
from server.schemas.common import GenerationBody, PromptLogprob, PromptLogprobs


def num_prompt_logprobs(body: GenerationBody, echoed: int | None = None) -> int | None:
    """Alternatives per prompt token, for the field and for the `echoed` ones; None when nobody asks for any.

    Raises:
        InvalidRequestError: Out of range, or asked of a stream, which has no place for them.
    """
    if body.prompt_logprobs is None:
        return echoed
    if body.stream:
        raise InvalidRequestError("prompt_logprobs cannot be used with stream", param="prompt_logprobs")
    return max(check_range("prompt_logprobs", body.prompt_logprobs, 0, MAX_LOGPROBS), echoed or 0)


def prompt_text(token_ids: list[int], options: RenderOptions, tokenizer: TextTokenizer) -> str | UnsetType:
    """The whole prompt, control tokens included, if the caller wants to see it."""
    return tokenizer.decode(token_ids, skip_special_tokens=False) if options.prompt_text else UNSET


def prompt_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprobs] | None, options: RenderOptions, tokenizer: TextTokenizer
) -> PromptLogprobs | UnsetType:
    """By position, each alternative and the token itself; `entries` are for positions 1 and up."""
    count = options.prompt_logprobs
    if count is None:
        return UNSET
    return [
        None,
        *(_position(i, entry, count, tokenizer) for i, entry in zip(token_ids[1:], entries or (), strict=True)),
    ]


def _position(token_id: int, entry: TokenLogprobs, count: int, tokenizer: TextTokenizer) -> dict[int, PromptLogprob]:
    ranks = {other_id: rank for rank, other_id in enumerate(entry.top_token_ids, 1)}
    logprobs = {token_id: entry.logprob, **dict(zip(entry.top_token_ids[:count], entry.top_logprobs, strict=False))}
    return {
        i: PromptLogprob(max(logprob, MIN_LOGPROB), ranks.get(i), tokenizer.token_text(i))
        for i, logprob in logprobs.items()
    }
