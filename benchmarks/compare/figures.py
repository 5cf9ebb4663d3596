"""Streams -> figures of one run -> medians over runs."""

import itertools
from dataclasses import dataclass

import numpy as np

from benchmarks.compare.load import LoadError, Stream


@dataclass(frozen=True, slots=True)
class Figures:
    """What one run of a workload came to. Times in milliseconds."""

    output_tokens_per_s: float
    ttft_ms: float
    """Time to first token, mean over requests."""
    tpot_ms: float
    """Time per output token after the first, mean over requests."""
    itl_p50_ms: float
    """Between two events of a stream, as are the next."""
    itl_p99_ms: float
    ttft_p99_ms: float
    duration_s: float
    num_output_tokens: int


def figures(streams: list[Stream], output_tokens: int) -> Figures:
    """Reduce streams to figures.

    Args:
        streams: Finished ones, at least one.
        output_tokens: What each must have made, at least 2.

    Raises:
        LoadError: A stream has another number of tokens, or came in one piece.
    """
    for stream in streams:
        if stream.num_output_tokens != output_tokens:
            raise LoadError(f"a stream made {stream.num_output_tokens} tokens instead of {output_tokens}")
        if len(stream.times) < 2:
            raise LoadError(f"a stream of {output_tokens} tokens came in {len(stream.times)} events")
    first = np.array([stream.times[0] - stream.sent_at for stream in streams]) * 1e3
    rest = np.array([(stream.times[-1] - stream.times[0]) / (output_tokens - 1) for stream in streams]) * 1e3
    gaps = np.array([b - a for stream in streams for a, b in itertools.pairwise(stream.times)]) * 1e3
    duration = max(stream.times[-1] for stream in streams) - min(stream.sent_at for stream in streams)
    number = output_tokens * len(streams)
    return Figures(
        output_tokens_per_s=number / duration,
        ttft_ms=float(first.mean()),
        tpot_ms=float(rest.mean()),
        itl_p50_ms=float(np.percentile(gaps, 50)),
        itl_p99_ms=float(np.percentile(gaps, 99)),
        ttft_p99_ms=float(np.percentile(first, 99)),
        duration_s=duration,
        num_output_tokens=number,
    )
