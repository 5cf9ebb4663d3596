"""Beam search as one would write it down: every beam is its whole context, and the model is a function of it."""

from collections.abc import Callable, Sequence

from weft.engine.wire.messages import BeamOptions, TokenLogprobs


def plain_beam_search(
    model: Callable[[list[int]], TokenLogprobs],
    prompt: list[int],
    width: int,
    max_tokens: int,
    stop_ids: Sequence[int],
    options: BeamOptions,
) -> list[list[int]]:
    """Output ids, best first.

    Args:
        model: Says the most probable next ids behind a context: width of them, and one for each stop id, or more.
    """

    def score(ids: list[int], total: float, length: int | None = None) -> float:
        return total / (len(ids) if length is None else length) ** options.length_penalty

    live: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    while live:
        longer = []
        for ids, total in live:
            row = model(prompt + ids)
            for token_id, logprob in zip(row.top_token_ids, row.top_logprobs, strict=True):
                longer.append(([*ids, token_id], total + logprob))
        longer.sort(key=lambda beam: -beam[1])
        ends = [ids[-1] in stop_ids or len(ids) == max_tokens for ids, _ in longer]
        finished += [beam for beam, is_end in zip(longer[:width], ends, strict=False) if is_end]
        finished = sorted(finished, key=lambda beam: -score(*beam))[:width]
        live = [beam for beam, is_end in zip(longer, ends, strict=True) if not is_end][:width]
        if live and len(finished) == width:
            reaches_end = options.early_stopping == "never" and options.length_penalty > 0
            best = score(*live[0], length=max_tokens if reaches_end else None)
            if options.early_stopping is True or best <= score(*finished[-1]):
                break
    return [ids for ids, _ in finished]
