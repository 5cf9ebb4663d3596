"""`weft plan` with several models."""

import pathlib
import subprocess
import sys

import msgspec
import pytest

from tests.checkpoints import CHECKPOINTS, write_config
from tests.server.cli.test_cli import TIMEOUT_S, weft
from tests.server.supervise.test_memory_shares import CHAT, GB, model
from weft.engine.wire.machine import MAX_CPU_CACHE_BYTES
from weft.server.cli.reports import describe_plan
from weft.server.supervise.memory_shares import divide


@pytest.fixture(scope="module")
def models_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("chat", "embed", "small"):
        write_config(CHECKPOINTS["qwen3"], folder / name)
    (folder / "broken").mkdir()
    (folder / "broken/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "weft.yaml").write_text(
        f"""
device: cpu
max_num_seqs: 4
models:
  chat: {{model: {folder}/chat, kv_cache_memory: 8MB, max_model_len: 256}}
  embed: {{model: {folder}/embed, load: on-demand, task: embed}}
  small: {{model: {folder}/small, load: on-demand, kv_cache_memory: 64kB}}
  broken: {{model: {folder}/broken, load: on-demand}}
"""
    )
    return folder / "weft.yaml"


def test_a_plan_of_several_models_is_a_table(models_file: pathlib.Path) -> None:
    done = weft("plan", "--config", str(models_file))
    assert done.returncode == 0, done.stderr
    table, _, rest = done.stdout.partition("\n\n")
    head, *rows = table.splitlines()
    assert head.split("  ")[0] == "model" and head.endswith("requests at once")
    assert [row.split()[:3] for row in rows] == [
        ["chat", "always", "cpu"],
        ["embed", "on-demand", "cpu"],
        ["small", "on-demand", "cpu"],
    ]
    assert " 8 MB " in rows[0] and rows[0].endswith("  4 of 256 tokens")
    assert " 64 kB " in rows[2]
    assert rest.startswith("free memory  ") and rest.endswith("together     chat, embed, small\n")
    assert done.stderr.startswith("weft: note: models: broken cannot be loaded: ") and done.stderr.count("\n") == 1


def test_engines_are_started_with_their_shares(models_file: pathlib.Path) -> None:
    """Each took its part of all that was free."""
    code = (
        "import os, pathlib, sys\n"
        "from weft.server.supervise import supervisor\n"
        "from weft.server.resolve import resolve\n"
        "def show(settings, *_):\n"
        "    print(*(settings.for_model(name).kv_cache_memory for name in settings.models), flush=True)\n"
        "    os._exit(0)\n"
        "supervisor.Supervisor = show\n"
        "supervisor.run(resolve({'port': '0'}, {}, pathlib.Path(sys.argv[1])).settings)\n"
    )
    command = [sys.executable, "-c", code, str(models_file)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout.split()
    assert (told[0], told[2], told[3]) == ("8000000", "64000", "None")
    assert 0 < int(told[1]) <= MAX_CPU_CACHE_BYTES


def test_what_cannot_be_planned_or_does_not_fit_is_refused_by_name(models_file: pathlib.Path) -> None:
    text, other = models_file.read_text(), models_file.with_name("other.yaml")
    other.write_text(text.replace("broken, load: on-demand", "broken"))
    done = weft("plan", "--config", str(other))
    assert done.returncode == 2 and done.stderr.startswith("weft: error: models: broken: ")
    other.write_text(text.replace("8MB", "8000000GB"))
    for command in ("plan", "serve"):
        done = weft(command, "--config", str(other), "--port", "0")
        assert done.returncode == 2
        assert "weft: error: models: chat needs 8,000,000" in done.stderr
        assert done.stderr.endswith(" are free; set quantization or kv_cache_memory\n")


def test_models_that_may_be_loaded_at_the_same_time_are_listed() -> None:
    memories = {
        "chat": CHAT,
        "big": model(weights_bytes=14 * GB),
        "a": model(weights_bytes=GB, kv_bytes=GB),
        "b": model(weights_bytes=2 * GB, kv_bytes=GB),
        "slow": model(device="cpu", free_bytes=32 * GB),
    }
    shares = divide(memories, ["chat", "slow"])
    served = {name: msgspec.structs.replace(m, max_model_len=4096, num_requests=7) for name, m in memories.items()}
    table, on_cuda, on_cpu = describe_plan(shares, ["chat", "slow"], served).split("\n\n")
    assert table.splitlines()[3] == (
        "a      on-demand  cuda    1.00 GB   1.00 GB      1.00 GB   4.00 GB   7 of 4,096 tokens"
    )
    assert on_cuda.splitlines()[1] == "together     chat, a, b; or chat, big"
    assert on_cpu.splitlines()[1] == "together     slow"
    assert on_cpu.splitlines()[0].startswith("free memory  32.00 GB (cpu), of which models take up to ")


def test_what_models_take_of_the_host_is_told() -> None:
    memories = {"chat": CHAT, "mixture": model(weights_bytes=20 * GB, host_bytes=70 * GB)}
    told = describe_plan(divide(memories, ["chat"]), ["chat"], memories)
    assert told.endswith("\n\nhost memory  for experts that do not fit the device: mixture 70.00 GB")


def test_experts_in_host_memory_need_another_device(models_file: pathlib.Path) -> None:
    done = weft("plan", str(models_file.parent / "chat"), "--device", "cpu", WEFT_HOST_EXPERT_LAYERS="2")
    assert done.returncode == 2
    fault = "host_expert_layers 2 needs device cuda, got cpu, where all experts are in host memory"
    assert done.stderr == f"weft: error: {fault}\n"
