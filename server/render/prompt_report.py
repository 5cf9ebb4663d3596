"""What an answer says of its prompt's text: what the caller wrote, and where each token begins in that."""

from dataclasses import dataclass

from weft.server.request.task import Prompt
from weft.server.text.text_tokenizer import TextTokenizer


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
