"""What an answer says of its prompt: its text, where each token begins in that, log-probabilities of its tokens."""

from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from engine.protocol import TokenLogprobs
from server.generate.events import PromptReport
from server.render import MIN_LOGPROB, RenderOptions
from server.request.task import Prompt
from server.schemas.common import PromptLogprob, PromptLogprobs
from server.text.text_tokenizer import TextTokenizer


def prompt_text(token_ids: list[int], options: RenderOptions, tokenizer: TextTokenizer) -> str | UnsetType:
    """The whole prompt, control tokens included, if the caller wants to see it."""
    return tokenizer.decode(token_ids, skip_special_tokens=False) if options.prompt_text else UNSET


def prompt_logprobs(
    report: PromptReport, options: RenderOptions, tokenizer: TextTokenizer
) -> PromptLogprobs | UnsetType:
    """By position, each alternative and the token itself."""
    count = options.prompt_logprobs
    if count is None:
        return UNSET
    pairs = zip(report.prompt.token_ids[1:], report.logprobs or (), strict=True)
    return [None, *(_position(token_id, entry, count, tokenizer) for token_id, entry in pairs)]


def _position(token_id: int, entry: TokenLogprobs, count: int, tokenizer: TextTokenizer) -> dict[int, PromptLogprob]:
    ranks = {other_id: rank for rank, other_id in enumerate(entry.top_token_ids, 1)}
    logprobs = {token_id: entry.logprob, **dict(zip(entry.top_token_ids[:count], entry.top_logprobs, strict=False))}
    return {
        i: PromptLogprob(max(logprob, MIN_LOGPROB), ranks.get(i), tokenizer.token_text(i))
        for i, logprob in logprobs.items()
    }


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """What the caller wrote, or what its token ids say; and by token, where its text begins."""

    text: str
    starts: list[int]


def echo_prompt(prompt: Prompt, tokenizer: TextTokenizer, *, skip_special_tokens: bool) -> PromptEcho:
    """The prompt for `echo`, and for the text offsets of legacy logprobs. O(tokens)."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens and prompt.text is None)
    starts: list[int] = []
    pieces: list[str] = []
    num_chars = 0
    for token_id in prompt.token_ids:
        starts.append(num_chars)
        pieces.append(detokenizer.feed(token_id))
        num_chars += len(pieces[-1])
    text = "".join(pieces) + detokenizer.finish()
    if prompt.text is None:
        return PromptEcho(text, starts)
    # A beginning-of-text token that was put in front is not in what the caller wrote.
    num_added = len(text) - len(prompt.text) if text.endswith(prompt.text) else 0
    return PromptEcho(prompt.text, [min(max(0, start - num_added), len(prompt.text)) for start in starts])
