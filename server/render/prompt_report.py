"""Finds the prompt's text for an answer, and the offset of each prompt token in it."""

from dataclasses import dataclass

from weft.server.task.task import Prompt
from weft.server.text.text_tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The caller's text, or the text of its token ids; and the offset of each token in it."""

    text: str
    starts: list[int]


def echo_prompt(prompt: Prompt, tokenizer: TextTokenizer, *, skip_special_tokens: bool) -> PromptEcho:
    """The prompt's text for `echo`, and the text offsets for legacy logprobs. O(tokens)."""
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
    # A beginning-of-text token in front of the prompt is not part of the caller's text.
    num_added = len(text) - len(prompt.text) if text.endswith(prompt.text) else 0
    return PromptEcho(prompt.text, [min(max(0, start - num_added), len(prompt.text)) for start in starts])
