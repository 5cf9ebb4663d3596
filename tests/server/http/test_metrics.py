import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from weft.engine.wire.messages import TokensOutput
from weft.engine.wire.options import AdapterUse
from weft.engine.wire.status_page import Status
from weft.server.http import metrics as metrics_module
from weft.server.http.metrics import FLUSH_S, BatchHistogram, RequestTimer


def values(text: str) -> dict[str, float]:
    """By name and labels; the model's name, which all have, is left out."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all('model_name="org/fake model"' in line for line in lines if line.startswith("weft:"))
    cleaned = [line.replace('model_name="org/fake model"', "").replace(",}", "}").replace("{}", "") for line in lines]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in cleaned)}


def test_the_engines_numbers_come_from_its_status_page(site: Any) -> None:
    site.engine.page = Status(
        num_requests_running=3,
        num_requests_waiting=4,
        num_blocks=100,
        num_used_blocks=25,
        num_cached_blocks=10,
        prompt_tokens=5,
        generation_tokens=6,
        prefix_cache_queries=7,
        prefix_cache_hits=8,
        num_preemptions=9,
        num_steps=11,
        step_seconds=2.5,
        num_drafts=12,
        num_draft_tokens=13,
        num_accepted_tokens=14,
        prefill_tokens=15,
        decode_tokens=16,
        picture_hits=17,
        picture_seconds=4.5,
        pictures_within_1_s=18,
        pictures_encoded=19,
    )
    shown = values(site.call("GET", "/metrics").text)
    assert {name.removeprefix("weft:"): value for name, value in shown.items() if "_bucket" not in name}.items() >= {
        "num_requests_running": 3,
        "num_requests_waiting": 4,
        "kv_cache_usage_perc": 0.25,
        "prompt_tokens_total": 5,
        "generation_tokens_total": 6,
        "prefix_cache_queries_total": 7,
        "prefix_cache_hits_total": 8,
        "num_preemptions_total": 9,
        "kv_cache_indexed_blocks": 10,
        "engine_steps_total": 11,
        "engine_step_seconds_total": 2.5,
        "spec_decode_num_drafts_total": 12,
        "spec_decode_num_draft_tokens_total": 13,
        "spec_decode_num_accepted_tokens_total": 14,
        "engine_prefill_tokens_total": 15,
        "engine_decode_tokens_total": 16,
        "picture_cache_hits_total": 17,
        "picture_encode_seconds_sum": 4.5,
        "picture_encode_seconds_count": 19,
    }.items()
    buckets = {bound: shown[f'weft:picture_encode_seconds_bucket{{le="{bound}"}}'] for bound in ("0.3", "1.0", "+Inf")}
    assert buckets == {"0.3": 0, "1.0": 18, "+Inf": 19}


GOLDEN = {
    "gauge": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    "counter": (
        *("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    ),
    "histogram": (
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
    ),
}
"""What Weft and vLLM both have, as Prometheus parses it (a counter's name without _total)."""


@pytest.mark.parametrize("prefix", ["weft", "vllm"])
def test_families_have_the_type_and_labels_of_vllms(make_site: Any, prefix: str) -> None:
    site = make_site(metrics_prefix=prefix)
    site.chat()
    families = text_string_to_metric_families(site.call("GET", "/metrics").text)
    found = {family.name: (family.type, {name for s in family.samples for name in s.labels}) for family in families}
    own = {name: (kind, {"model_name"}) for kind, names in GOLDEN.items() for name in names}
    own |= {name: ("histogram", {"model_name", "le"}) for name in GOLDEN["histogram"]}
    own |= {
        "request_success": ("counter", {"model_name", "finished_reason"}),
        "cache_config_info": ("gauge", {"model_name", "block_size", "num_gpu_blocks"}),
    }
    assert {name: found.get(f"{prefix}:{name}") for name in own} == own


@pytest.mark.parametrize("prefix", ["weft", "vllm"])
def test_names_that_endpoint_pickers_read(make_site: Any, prefix: str) -> None:
    site = make_site(metrics_prefix=prefix)
    names = AdapterUse(("a", "b"), ("c",), ("a", "b")).pack(300)
    slots = {"num_lora_slots": 2, "lora_names": names}
    site.engine.page = Status(
        num_requests_running=3, num_requests_waiting=4, num_blocks=100, num_used_blocks=25, **slots
    )
    site.chat()
    families = list(text_string_to_metric_families(site.call("GET", "/metrics").text))
    samples = {sample.name: sample for family in families for sample in family.samples}
    assert all(name.startswith(f"{prefix}:") for name in samples)
    for name, value in (("num_requests_running", 3), ("num_requests_waiting", 4), ("kv_cache_usage_perc", 0.25)):
        assert samples[f"{prefix}:{name}"].value == value
    assert samples[f"{prefix}:time_to_first_token_seconds_count"].value == 1
    info = site.engine.info
    sizes = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
    assert samples[f"{prefix}:cache_config_info"].labels == {"model_name": "org/fake model", **sizes}
    assert samples[f"{prefix}:cache_config_info"].value == 1
    used = {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert samples[f"{prefix}:lora_requests_info"].labels == {"model_name": "org/fake model", **used}
    assert abs(samples[f"{prefix}:lora_requests_info"].value - time.time()) < 60


def test_before_any_engine_has_written(site: Any) -> None:
    site.engine.page = Status()
    assert values(site.call("GET", "/metrics").text)["weft:kv_cache_usage_perc"] == 0


def test_requests_are_timed(site: Any) -> None:
    site.chat(n=2, stream=True)
    site.complete(max_tokens=3, prompt=["a", "b"])
    site.chat(temperature=9)
    shown = values(site.call("GET", "/metrics").text)
    counts = {name: value for name, value in shown.items() if name.endswith("_count")}
    assert counts == {
        "weft:time_to_first_token_seconds_count": 4,
        "weft:inter_token_latency_seconds_count": 2 * 15 + 2 * 2,
        "weft:e2e_request_latency_seconds_count": 2,
        "weft:request_queue_time_seconds_count": 4,
        "weft:request_prefill_time_seconds_count": 4,
        "weft:request_decode_time_seconds_count": 4,
        "weft:request_prompt_tokens_count": 3,
        "weft:request_generation_tokens_count": 4,
        "weft:picture_encode_seconds_count": 0,
    }
    assert shown["weft:request_generation_tokens_sum"] == 2 * 16 + 2 * 3
    assert shown['weft:request_success_total{finished_reason="stop"}'] == 2
    assert shown['weft:request_success_total{finished_reason="length"}'] == 2
    assert shown['weft:request_success_total{finished_reason="error"}'] == 0


def test_buckets(site: Any) -> None:
    text = site.call("GET", "/metrics").text
    bounds = [
        line.split('le="')[1].split('"')[0] for line in text.splitlines() if "inter_token_latency_seconds_bu" in line
    ]
    assert bounds[:5] == ["0.01", "0.025", "0.05", "0.075", "0.1"]
    assert bounds[-2:] == ["80.0", "+Inf"]


def test_many_amounts_at_once_are_counted_as_one_by_one() -> None:
    amounts = [0.0, 0.5, 1.0, 1.0, 1.5, 2.0, 7.0]
    registries = [CollectorRegistry(), CollectorRegistry()]
    one_by_one, at_once = (BatchHistogram("h", "h", buckets=(1, 2), registry=registry) for registry in registries)
    for amount in amounts:
        one_by_one.observe(amount)
    at_once.observe_all(amounts[:3])
    at_once.observe_all([])
    at_once.observe_all(amounts[3:])
    counted = [
        {(s.name, *s.labels.values()): s.value for m in r.collect() for s in m.samples if s.name != "h_created"}
        for r in registries
    ]
    assert counted[1] == counted[0]
    assert counted[1]["h_bucket", "1.0"] == 4


def test_latencies_of_a_long_stream_are_counted_while_it_runs(site: Any) -> None:
    """Other processes see nothing of this one but what it has counted."""
    metrics = site.app.state.context.metrics.of("org/fake model")
    timer = RequestTimer(metrics, 0.0, 1)

    def num_counted() -> float:
        return sum(bucket.get() for bucket in metrics._inter_token._buckets)

    for now in (10.0, 10.1, 10.2, 10.3):
        timer.note_output(0, TokensOutput(0, 0, [97]), now)
    assert num_counted() < 3
    timer.note_output(0, TokensOutput(0, 0, [97]), 10.3 + FLUSH_S)
    assert num_counted() == 4
    timer.note_output(0, TokensOutput(0, 0, [97]), 10.4 + FLUSH_S)
    assert num_counted() == 4
    assert values(site.call("GET", "/metrics").text)["weft:inter_token_latency_seconds_count"] == 5


CHILD = """
import asyncio, importlib.util, sys
spec = importlib.util.spec_from_file_location("fakes", sys.argv[1])
fakes = importlib.util.module_from_spec(spec)
sys.modules["fakes"] = fakes
spec.loader.exec_module(fakes)
site = fakes.Site()
site.chat()
print(site.call("GET", "/metrics").text)
"""


def test_server_processes_answer_as_one(tmp_path: pathlib.Path) -> None:
    conftest = pathlib.Path(__file__).parents[1] / "conftest.py"
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-c", CHILD, str(conftest)]
    outputs = [
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout for _ in range(2)
    ]
    counts = [values(output)["weft:e2e_request_latency_seconds_count"] for output in outputs]
    assert counts == [1, 2]
    assert values(outputs[1])["weft:num_requests_running"] == 0


def test_a_process_that_just_made_its_file_spoils_no_answer(
    site: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "counter_1.db"

    class WhileItStarts(MultiProcessCollector):
        def collect(self) -> Any:
            if file.exists():
                file.unlink()
            else:
                file.touch()
            return super().collect()  # type: ignore[no-untyped-call]

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(metrics_module, "MultiProcessCollector", WhileItStarts)
    assert values(site.call("GET", "/metrics").text)["weft:num_requests_running"] == 0
    assert not file.exists()
