"""Metrics of which models are loaded, from what the supervisor publishes; read at each scrape."""

from collections import Counter
from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.server.models.fleet import Fleet, State


class FleetCollector(Collector):
    """State, memory and adapters of each model, and how often it left or could not be loaded."""

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
        num_adapters = Counter(served.model for served in fleet.adapters.values())
        for name, model in fleet.models.items():
            loras.add_metric([name], num_adapters[name])
            for state in get_args(State):
                states.add_metric([name, state], state == model.state)
            if model.memory_bytes is not None:
                memory.add_metric([name], 0 if model.state in ("unloaded", "failed") else model.memory_bytes)
            unloaded.add_metric([name], model.num_unloaded)
            failures.add_metric([name], model.num_failures)
        yield from (states, memory, unloaded, failures, loras)
