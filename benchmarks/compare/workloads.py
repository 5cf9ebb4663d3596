"""The workloads, as data, and the requests that make them up.

Invariant: the prompts follow from seed, workload and run alone, so every server gets the same ones; no two runs or
workloads share a prompt, so a prefix cache finds only what a workload means it to find.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

WARM_UP_TOKENS = 256
"""Most tokens of a warm-up prompt beside the shared prefix: enough for every kernel to have run once."""

NUM_ODD_IDS = 300
"""Ids at both ends of a vocabulary that no prompt has: control tokens and single bytes. A model with random weights
repeats what it read last, and their text is empty or comes in parts."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Greedy requests of one size, so many of them at once. Lengths are in tokens."""

    key: str
    title: str
    model: str
    """Which checkpoint it wants: "main" or "tiny"."""
    concurrency: int
    num_requests: int
    input_tokens: int
    output_tokens: int
    prefix_tokens: int = 0
    """How many tokens all prompts have in common, before `input_tokens` of their own."""

    @property
    def mean_context(self) -> float:
        """Tokens whose keys and values a decode step reads for one request, averaged over the request's life."""
        return self.prefix_tokens + self.input_tokens + self.output_tokens / 2

    def describe(self) -> str:
        """Lengths and number in words; what runs at once is in the title."""
        shared = f"{self.prefix_tokens:,} common tokens + " if self.prefix_tokens else ""
        requests = "one request" if self.num_requests == 1 else f"{self.num_requests} requests"
        return f"{shared}{self.input_tokens:,} tokens in, {self.output_tokens} out, {requests}"


WORKLOADS = (
    Workload("A", "one stream", "main", 1, 4, 128, 64),
    Workload("B", "16 at once", "main", 16, 32, 256, 128),
    Workload("C", "shared prefix, 8 at once", "main", 8, 24, 64, 32, prefix_tokens=1024),
    Workload("L", "long context", "main", 1, 1, 8000, 64),
    Workload("D", "tiny model, 64 at once", "tiny", 64, 256, 64, 128),
)


@dataclass(frozen=True, slots=True)
class Bodies:
    """JSON bodies for POST /v1/completions."""

    warm_up: list[bytes]
    """Two, like the measured ones, but for the tokens that are a prompt's own."""
    measured: list[bytes]


def bodies(workload: Workload, model: str, vocab_size: int, seed: int, run: int) -> Bodies:
    """Make the requests of one run.

    Args:
        workload: How many and how long.
        model: The name under which the server knows its model.
        vocab_size: Prompts are random ids below this, but for NUM_ODD_IDS at both ends.
        seed: Of the whole measurement.
        run: Its repetitions have prompts of their own.
    """
    generator = random.Random(f"{seed}/{workload.key}/{run}")

    def ids(number: int) -> list[int]:
        return [generator.randrange(NUM_ODD_IDS, vocab_size - NUM_ODD_IDS) for _ in range(number)]

    def body(prompt: list[int]) -> bytes:
        fields: Mapping[str, object] = {
            "model": model,
            "prompt": prompt,
            "max_tokens": workload.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(fields).encode()

    prefix = ids(workload.prefix_tokens)
    warm_up = [body(prefix + ids(min(workload.input_tokens, WARM_UP_TOKENS))) for _ in range(2)]
    return Bodies(warm_up, [body(prefix + ids(workload.input_tokens)) for _ in range(workload.num_requests)])
