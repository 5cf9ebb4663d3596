"""Collects the metrics for Prometheus: request timings, models and their memory, and counters of the engines.

Names and meanings follow servers for which dashboards exist; only the prefix differs, unless the settings name theirs,
which the endpoint pickers of Kubernetes' gateways and KEDA read. Every server process gives the same answer. Their
timings are shared through files (`share_metrics`), the engine's values come from its status page in shared memory, and
the states of models from what the supervisor publishes. If the folder of the files is gone, a process reports its own
timings only.
"""

import collections
import contextlib
import logging
import os
import pathlib
import struct
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, values
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from weft.engine.wire.messages import FinishReason, TokensOutput
from weft.engine.wire.status_page import PICTURE_BUCKETS, SHOWN, Counters, Status
from weft.server.models.engine_client import EngineClient
from weft.server.models.fleet import Fleet, State
from weft.server.models.other_clients import Outcome, PrefillingClient
from weft.server.models.served_model import ServedModel

FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable in which the client library looks for the folder."""

_RESERVED_BYTES: Final = {"counter": 1 << 14, "histogram": 1 << 17}
"""Size of the file by kind of metric, several times what names and labels need. The library uses existing files."""

_log = logging.getLogger(__name__)


def share_metrics(folder: pathlib.Path) -> None:
    """Share all metrics that this process creates from now on. Call it once, before the first metric is created.

    Disk space is reserved for the files. The client library maps them into memory, and writing to a page without disk
    space kills the process. If there is no space, the process does not share its metrics, and logs a warning.
    """
    files = {folder / f"{kind}_{os.getpid()}.db": size for kind, size in _RESERVED_BYTES.items()}
    try:
        for path, size in files.items():
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        for path in files:
            with contextlib.suppress(OSError):
                path.unlink()
        _log.warning("/metrics has no other server process's numbers: no room in %s (%s)", folder, error.strerror)
        return
    os.environ[FOLDER_VARIABLE] = str(folder)
    values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]


class EngineCollector(Collector):
    """The gauges and counters of each engine, read at each scrape."""

    def __init__(self, engines: Mapping[EngineClient, str], prefix: str) -> None:
        """Collect for each engine, under the model name that is given for it."""
        self._engines = engines
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """One reading of each status page as metrics."""
        statuses = {model_name: client.status() for client, model_name in self._engines.items()}
        for name, shown in SHOWN.items():
            if shown.text:
                kind = CounterMetricFamily if name in Counters.__struct_fields__ else GaugeMetricFamily
                yield self._family(shown.metric or name, kind, shown.text, statuses, attrgetter(name))
        yield self._picture_seconds(statuses)
        yield self._family("kv_cache_usage_perc", GaugeMetricFamily, "Share of the KV cache in use.", statuses, _usage)
        labels = ["model_name", "block_size", "num_gpu_blocks"]
        sizes = GaugeMetricFamily(f"{self._prefix}cache_config_info", "Size of the KV cache.", labels=labels)
        for client, model_name in self._engines.items():
            if (info := client.info) is not None:
                sizes.add_metric([model_name, str(info.block_size), str(info.num_blocks)], 1)
        yield sizes
        labels = ["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        loras = GaugeMetricFamily(
            f"{self._prefix}lora_requests_info", "Adapters in use; the time is now.", labels=labels
        )
        for model_name, status in statuses.items():
            if status.num_lora_slots:
                names = (",".join(each) for each in (status.loras.running, status.loras.waiting))
                loras.add_metric([model_name, str(status.num_lora_slots), *names], time.time())
        yield loras

    def _picture_seconds(self, statuses: Mapping[str, Status]) -> Metric:
        text = "Seconds to encode a picture."
        family = HistogramMetricFamily(f"{self._prefix}picture_encode_seconds", text, labels=["model_name"])
        for model_name, status in statuses.items():
            counts = [(bound, getattr(status, name)) for bound, name in PICTURE_BUCKETS.items()]
            family.add_metric([model_name], counts, status.picture_seconds)
        return family

    def _family(
        self,
        name: str,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        text: str,
        statuses: Mapping[str, Status],
        value_of: Callable[[Status], float],
    ) -> Metric:
        family = kind(self._prefix + name, text, labels=["model_name"])
        for model_name, status in statuses.items():
            family.add_metric([model_name], value_of(status))
        return family


def _usage(status: Status) -> float:
    return status.num_used_blocks / status.num_blocks if status.num_blocks else 0.0


class FleetCollector(Collector):
    """State, memory and adapters of each model, and how often it left or could not be loaded; read at each scrape."""

    def __init__(self, fleet: Fleet, prefix: str) -> None:
        """Collect what the fleet reads; names begin with the prefix."""
        self._fleet = fleet
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """One reading as metrics."""
        prefix, label = self._prefix, ["model_name"]
        states = GaugeMetricFamily(f"{prefix}model_state", "1 for the state it is in.", labels=[*label, "state"])
        memory = GaugeMetricFamily(f"{prefix}model_memory_bytes", "Planned memory of loaded models.", labels=label)
        unloaded = CounterMetricFamily(f"{prefix}model_unloads", "Times that a model was unloaded.", labels=label)
        failures = CounterMetricFamily(f"{prefix}model_load_failures", "Loads that failed.", labels=label)
        loras = GaugeMetricFamily(f"{prefix}lora_adapters", "LoRA adapters that are served.", labels=label)
        fleet = self._fleet.read()
        num_adapters = collections.Counter(served.model for served in fleet.adapters.values())
        for name, model in fleet.models.items():
            loras.add_metric([name], num_adapters[name])
            for state in get_args(State):
                states.add_metric([name, state], state == model.state)
            if model.memory_bytes is not None:
                memory.add_metric([name], 0 if model.state in ("unloaded", "failed") else model.memory_bytes)
            unloaded.add_metric([name], model.num_unloaded)
            failures.add_metric([name], model.num_failures)
        yield from (states, memory, unloaded, failures, loras)


FLUSH_S = 1.0
"""Longest delay before an inter-token latency is counted, while tokens arrive."""

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)


class BatchHistogram(Histogram):
    """A histogram that observes many amounts in one call. `observe` is too slow for events of every token."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Observe each amount."""
        self._sum.inc(sum(amounts))
        for index, count in collections.Counter(bisect_left(self._upper_bounds, a) for a in amounts).items():
            self._buckets[index].inc(count)


class Families:
    """The metrics of the server process's own requests, which all models share. Each model has a label in them."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        def histogram(name: str, buckets: tuple[float, ...], *labels: str) -> BatchHistogram:
            text = name.replace("_", " ").capitalize() + "."
            return BatchHistogram(prefix + name, text, ["model_name", *labels], buckets=buckets, registry=registry)

        self.first_token = histogram("time_to_first_token_seconds", _FIRST_TOKEN_BUCKETS)
        self.inter_token = histogram("inter_token_latency_seconds", _INTER_TOKEN_BUCKETS)
        self.request = histogram("e2e_request_latency_seconds", _REQUEST_BUCKETS)
        self.queue = histogram("request_queue_time_seconds", _REQUEST_BUCKETS)
        self.prefill = histogram("request_prefill_time_seconds", _REQUEST_BUCKETS)
        self.decode = histogram("request_decode_time_seconds", _REQUEST_BUCKETS)
        self.prompt_tokens = histogram("request_prompt_tokens", _TOKEN_BUCKETS)
        self.generation_tokens = histogram("request_generation_tokens", _TOKEN_BUCKETS)
        self.remote_prefill = histogram("remote_prefill_time_seconds", _REQUEST_BUCKETS, "outcome")
        self.success = Counter(
            f"{prefix}request_success", "Choices that ended.", ["model_name", "finished_reason"], registry=registry
        )
        self.retries = Counter(
            f"{prefix}request_retries", "Requests that a client sent again.", ["model_name", "retry"], registry=registry
        )


class ModelMetrics:
    """The metrics of one model's requests."""

    def __init__(self, families: Families, model_name: str) -> None:
        self._model_name = model_name
        self.first_token = families.first_token.labels(model_name)
        self._inter_token = families.inter_token.labels(model_name)
        self._inter_token_latencies: list[float] = []  # not yet observed
        self._flush_time = 0.0
        self.request = families.request.labels(model_name)
        self.queue = families.queue.labels(model_name)
        self.prefill = families.prefill.labels(model_name)
        self.decode = families.decode.labels(model_name)
        self.prompt_tokens = families.prompt_tokens.labels(model_name)
        self.generation_tokens = families.generation_tokens.labels(model_name)
        self.success = {reason: families.success.labels(model_name, reason.name.lower()) for reason in FinishReason}
        self._retries = families.retries

    def note_retry(self, retry_count: str) -> None:
        """Count the retries that a client reports for this request. Malformed values are ignored."""
        if retry_count.isascii() and retry_count.isdigit() and int(retry_count[:9]) > 0:
            self._retries.labels(self._model_name, retry_count if retry_count in ("1", "2") else "3+").inc()

    def observe_inter_token(self, latency_s: float, now: float) -> None:
        """Record the time between two tokens. `flush` counts it, within FLUSH_S while tokens arrive."""
        self._inter_token_latencies.append(latency_s)
        if now >= self._flush_time:
            self._flush_time = now + FLUSH_S
            self.flush()

    def flush(self) -> None:
        """Count the recorded latencies, so that other processes see them."""
        self._inter_token.observe_all(self._inter_token_latencies)
        self._inter_token_latencies.clear()


class RequestTimer:
    """The timings of one HTTP request, observed as they become known. Only its answer mutates it."""

    def __init__(self, metrics: ModelMetrics, arrival_time: float, num_choices: int) -> None:
        """Start at `arrival_time`, on the clock of `time.monotonic`. `num_choices` is the sum over all prompts."""
        self._metrics = metrics
        self._arrival_time = self._accept_time = arrival_time
        self._first_times: list[float | None] = [None] * num_choices
        self._last_times = [0.0] * num_choices
        self._num_open = num_choices

    def accept(self, num_prompt_tokens: Sequence[int]) -> None:
        """Record that the engine has now accepted every prompt."""
        self._accept_time = time.monotonic()
        for num_tokens in num_prompt_tokens:
            self._metrics.prompt_tokens.observe(num_tokens)

    def note_output(self, index: int, output: TokensOutput, now: float) -> None:
        """Record an output of choice `index`."""
        metrics = self._metrics
        if output.queue_time_s is not None:
            metrics.queue.observe(output.queue_time_s)
        if not output.token_ids:
            return
        if self._first_times[index] is None:
            self._first_times[index] = now
            metrics.first_token.observe(now - self._arrival_time)
            if output.queue_time_s is not None:
                metrics.prefill.observe(max(0.0, now - self._accept_time - output.queue_time_s))
        else:
            metrics.observe_inter_token(now - self._last_times[index], now)
        self._last_times[index] = now

    def finish_choice(self, index: int, reason: FinishReason, num_output_tokens: int) -> None:
        """Record the end of choice `index`."""
        metrics = self._metrics
        metrics.flush()
        metrics.success[reason].inc()
        metrics.generation_tokens.observe(num_output_tokens)
        first_time = self._first_times[index]
        if first_time is not None:
            metrics.decode.observe(self._last_times[index] - first_time)
        self._num_open -= 1
        if self._num_open == 0:
            metrics.request.observe(time.monotonic() - self._arrival_time)


_NUM_TRIES: Final = 3
"""Attempts to read the files. A new process creates its file empty, which is unreadable for some microseconds."""


class Metrics:
    """The metrics of one app. It owns its registry, so that several apps can exist in one process."""

    def __init__(self, models: Collection[ServedModel], fleet: Fleet, prefix: str) -> None:
        """Make the metrics of these models. Engines that several of them share count under the first one's name."""
        engines: dict[EngineClient, str] = {}
        for model in models:
            engines.setdefault(model.engine_client, model.name)
        self._collectors = EngineCollector(engines, f"{prefix}:"), FleetCollector(fleet, f"{prefix}:")
        self._own = CollectorRegistry()
        families = Families(self._own, f"{prefix}:")
        self._models = {name: ModelMetrics(families, name) for name in dict.fromkeys(model.name for model in models)}
        for client, name in engines.items():
            if isinstance(client, PrefillingClient):
                client.observe = partial(_observe, families.remote_prefill, name)

    def of(self, model_name: str) -> ModelMetrics:
        """The metrics of the requests to one model, by the model's own name."""
        return self._models[model_name]

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        for model in self._models.values():
            model.flush()
        for _ in range(_NUM_TRIES - 1):
            with contextlib.suppress(struct.error):
                return self._read()
        return self._read()

    def _read(self) -> bytes:
        registry = CollectorRegistry()
        if os.path.isdir(os.environ.get(FOLDER_VARIABLE, "")):
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # registers itself
            own = b""
        else:
            own = generate_latest(self._own)
        for collector in self._collectors:
            registry.register(collector)
        return own + generate_latest(registry)


def _observe(histogram: Histogram, model_name: str, outcome: Outcome, seconds: float) -> None:
    histogram.labels(model_name, outcome).observe(seconds)


class Stopwatch:
    """Measures an answer as a client could: until its first event, and from there to its end. Times are in seconds.

    It starts when it is made.
    """

    def __init__(self) -> None:
        self._start_time = time.monotonic()
        self._first_time: float | None = None

    def note_event(self) -> None:
        """There are events; the first ones count."""
        if self._first_time is None:
            self._first_time = time.monotonic()

    def read(self) -> tuple[float, float]:
        """The time until the first event, and the time since then."""
        now = time.monotonic()
        first = now if self._first_time is None else self._first_time
        return first - self._start_time, now - first
