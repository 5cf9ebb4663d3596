"""`truncate_prompt_tokens`: the end of a prompt that is too long, for callers who ask for it."""

from engine.protocol import EngineInfo
from server.validation import check_range


def truncated(token_ids: list[int], num_kept: int | None, max_tokens: int | None, info: EngineInfo) -> list[int]:
    """Return the last `num_kept` ids; -1 keeps as many as leave room for the output, None keeps all.

    Raises:
        InvalidRequestError: num_kept is neither -1 nor a length that the context holds.
    """
    if num_kept is None:
        return token_ids
    name = "truncate_prompt_tokens"
    if num_kept != -1:
        return token_ids[-check_range(f"{name}, when it is not -1,", num_kept, 1, info.max_model_len, param=name) :]
    room = info.max_model_len - (1 if max_tokens is None else max_tokens)
    return token_ids[-room:] if room > 0 else token_ids
