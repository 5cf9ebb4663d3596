"""The rows of the table: what is measured, how far it may be from its limit, and whether it is.

A row's limit follows from what it must move and compute at least, and from the ceilings of the machine that it ran on:
the longest of these times counts. Or the row stands beside another one. A row that could not be measured says why.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Ceiling = Literal["memory_bytes_per_s", "matrix_flops_per_s", "host_to_device_bytes_per_s"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. Lengths are in tokens.

    Attributes:
        large, small: The models, keys of `benchmarks.gpu.models.SHAPES`.
        batches: Of the decode rows, three of them.
        context: What each request of the second and third batch has before it, on average.
        num_steps: Decode steps that a figure is the median of.
        prefill: Requests, and tokens of each.
        at_once: Requests over HTTP at a time; twice as many are sent.
        input_tokens, output_tokens: Of each of them.
        num_clients: Processes that send them.
        ceiling_bytes: Of the buffers that the ceilings are measured with.
        matrix_rows: Tokens of a step whose matrix products are the matrix ceiling.
    """

    large: str = "qwen3-8b"
    small: str = "qwen3-0.6b"
    batches: tuple[int, int, int] = (1, 64, 256)
    context: int = 1_000
    num_steps: int = 64
    prefill: tuple[int, int] = (8, 2_048)
    at_once: int = 256
    input_tokens: int = 256
    output_tokens: int = 256
    num_clients: int = 4
    ceiling_bytes: int = 4 << 30
    matrix_rows: int = 8_192


FULL = Sizes()
QUICK = Sizes(
    large="tiny",
    small="tiny",
    batches=(1, 3, 6),
    context=40,
    num_steps=6,
    prefill=(2, 48),
    at_once=4,
    input_tokens=12,
    output_tokens=256,
    num_clients=2,
    ceiling_bytes=1 << 22,
    matrix_rows=64,
)


@dataclass(frozen=True, slots=True)
class Target:
    """What a row should reach; each bound that is not None counts.

    Attributes:
        least_ratio: Of the limit, or to the row that it stands beside.
        least, most: Of the figure itself.
        most_idle: Share of the time in which the engine computes nothing.
    """

    least_ratio: float | None = None
    least: float | None = None
    most: float | None = None
    most_idle: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        group: The process that measures it, see `benchmarks.gpu.worker`.
        is_rate: More is better.
        beside: Another row; the ratio is that one's figure divided by this one's.
    """

    key: str
    group: str
    title: str
    unit: str
    target: Target | None = None
    is_rate: bool = False
    beside: str | None = None


def make_rows(sizes: Sizes) -> tuple[Row, ...]:
    """All rows, those that matter most first; targets are for full sizes."""
    rows = _make_rows(sizes)
    return rows if sizes == FULL else tuple(replace(row, target=None) for row in rows)


def _make_rows(sizes: Sizes) -> tuple[Row, ...]:
    one, some, many = sizes.batches
    num_prompts, prompt_tokens = sizes.prefill
    at = f"at {sizes.context:,} tokens"
    load = f"{sizes.small} over HTTP, {sizes.at_once} at once, {sizes.input_tokens} in, {sizes.output_tokens} out"

    def decode(key: str, batch: int, group: str, beside: str | None, what: str = "", model: str = sizes.large) -> Row:
        where = "" if batch == 1 else f" {at}"
        return Row(key, group, f"{model} decode, batch {batch}{where}{what}", "ms", beside=beside)

    def limited(key: str, batch: int, share: float) -> Row:
        return replace(decode(key, batch, "engine", None), target=Target(least_ratio=share))

    return (
        limited("decode-1", one, 0.85),
        limited("decode-64", some, 0.75),
        limited("decode-256", many, 0.70),
        Row(
            "prefill",
            "engine",
            f"{sizes.large} prefill, {num_prompts} x {prompt_tokens:,} tokens",
            "ms",
            Target(least_ratio=0.65),
        ),
        decode("sampled-256", many, "engine", "decode-256", ", sampled (top-k 50, top-p 0.95)"),
        Row("http-1", "http", f"{sizes.small} over HTTP, one stream, per token", "ms", Target(most=1.3)),
        Row("http-256", "http", load, "tok/s", Target(least=30_000, most_idle=0.10), is_rate=True),
        Row(
            "peer",
            "peer",
            "the same load in transformers' generate_batch, without HTTP",
            "tok/s",
            Target(least_ratio=4.0),
            is_rate=True,
            beside="http-256",
        ),
        Row(
            "ready",
            "ready",
            f"{sizes.large} from the command to the first token, with nothing compiled or chosen before",
            "s",
            Target(most=15.0),
        ),
        Row("ready-again", "ready", "the same once more", "s", Target(most=8.0)),
        Row("vllm-1", "vllm", "one stream of vLLM, per token", "ms", beside="http-1"),
        Row(
            "vllm-256",
            "vllm",
            "the same load in vLLM",
            "tok/s",
            Target(least_ratio=1.0),
            is_rate=True,
            beside="http-256",
        ),
        decode("deterministic-64", some, "deterministic", "decode-64", ", deterministic"),
        Row(
            "attention",
            "attention",
            f"attention of a prefill, one layer, {num_prompts} x {prompt_tokens:,} tokens",
            "ms",
        ),
        Row("attention-torch", "attention", "the same by FlashAttention 2 of torch", "ms", beside="attention"),
        decode("plain-64", some, "engine", "decode-64", ", without overlap"),
        decode("eager-1", one, "engine", "decode-1", ", without CUDA graphs"),
        decode("eager-64", some, "engine", "decode-64", ", without CUDA graphs"),
        decode("small-1", one, "small", None, ", without HTTP", sizes.small),
        decode("small-256", many, "small", None, ", without HTTP", sizes.small),
    )


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a row came to.

    Attributes:
        value: In the row's unit.
        work: Bytes and operations that it takes at least; empty where nothing of the machine limits it.
        details: Anything else worth keeping, in JSON's types.
    """

    row: str
    value: float
    work: Mapping[Ceiling, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """A row with its verdict.

    Attributes:
        limit: In the row's unit, what the machine allows, or the figure of the row that it stands beside.
        ratio: Of the limit that was reached.
        is_met: None where there is no target, or nothing to judge it by.
        fault: Why nothing was measured; None where something was.
    """

    row: Row
    measurement: Measurement | None
    limit: float | None
    ratio: float | None
    is_met: bool | None
    fault: str | None


_IN_UNIT = {"ms": 1e3, "s": 1.0}


def judge(
    rows: tuple[Row, ...],
    measurements: Mapping[str, Measurement],
    ceilings: Mapping[str, float],
    faults: Mapping[str, str],
) -> list[Line]:
    """Put limits, ratios and verdicts to what was measured.

    Args:
        rows: Those that were asked for.
        measurements: By row.
        ceilings: `Ceiling` -> what the machine reached; one that was not measured is left out.
        faults: By row, why nothing was measured.
    """
    lines = []
    for row in rows:
        measurement = measurements.get(row.key)
        limit = ratio = None
        if row.beside is not None and row.beside in measurements:
            limit = measurements[row.beside].value
            ratio = limit / measurement.value if measurement else None
        elif measurement and measurement.work and measurement.work.keys() <= ceilings.keys():
            limit = max(work / ceilings[name] for name, work in measurement.work.items()) * _IN_UNIT[row.unit]
            ratio = limit / measurement.value
        is_met = _is_met(row.target, measurement, ratio) if row.target and measurement else None
        lines.append(Line(row, measurement, limit, ratio, is_met, None if measurement else faults.get(row.key, "")))
    return lines


def _is_met(target: Target, measurement: Measurement, ratio: float | None) -> bool | None:
    """None when the ratio that the target asks for is not known."""
    if target.least_ratio is not None and ratio is None:
        return None
    idle = float(measurement.details.get("engine_idle_share", 0.0))
    return (
        (target.least_ratio is None or ratio is None or ratio >= target.least_ratio)
        and (target.least is None or measurement.value >= target.least)
        and (target.most is None or measurement.value <= target.most)
        and (target.most_idle is None or idle < target.most_idle)
    )
