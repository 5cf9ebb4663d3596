"""benchmarks/gpu: what limits are made of, verdicts, time boxes, and a quick run on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import report, time_split
from benchmarks.gpu.job import Job, Reporter
from benchmarks.gpu.models import model_folder, read_work
from benchmarks.gpu.rows import FULL, QUICK, Measurement, judge, make_rows

ROWS = {row.key: row for row in make_rows(FULL)}
ROOT = Path(__file__).parents[2]


def test_limits_of_the_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.compare.checkpoints.write_tokenizer", lambda folder: None)
    work = read_work(model_folder(tmp_path, "qwen3-8b"))
    layers = 36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12_288)
    assert work.weights_bytes == 2 * (layers + 151_936 * 4096)
    assert work.kv_bytes_per_token == 36 * 2 * 8 * 128 * 2
    assert work.decode_bytes(1000) == work.weights_bytes + 1000 * 147_456
    assert work.decode_flops(3, 1000) == 3 * work.weights_bytes + 1000 * 36 * 4 * 32 * 128
    attention = 36 * 4 * 32 * 128 * (1 + 2 + 3)
    skipped = 2 * 2 * (4096 * 4096 + 3 * 4096 * 12_288)  # two of three rows, behind the attention of the last layer
    assert work.prefill_flops(5, 3) == 5 * (3 * 2 * layers - skipped + attention + 2 * 151_936 * 4096)


def test_verdicts() -> None:
    found = {
        "decode-1": Measurement("decode-1", 4.0, {"memory_bytes_per_s": 16e9}),
        "decode-64": Measurement("decode-64", 8.0, {"memory_bytes_per_s": 24e9, "host_to_device_bytes_per_s": 200e6}),
        "prefill": Measurement("prefill", 500.0, {"matrix_flops_per_s": 240e12}),
        "http-256": Measurement("http-256", 32_000.0, details={"engine_idle_share": 0.12}),
        "peer": Measurement("peer", 6_400.0),
        "deterministic-64": Measurement("deterministic-64", 10.0),
        "ready": Measurement("ready", 15.5, {"host_to_device_bytes_per_s": 16e9}),
    }
    ceilings = {"memory_bytes_per_s": 4e12, "host_to_device_bytes_per_s": 50e9}
    keys = (*found, "http-1")
    lines = judge(tuple(ROWS[key] for key in keys), found, ceilings, {"http-1": "no port"})
    assert [(line.limit, line.ratio, line.is_met, line.fault) for line in lines] == [
        (4.0, 1.0, True, None),
        (6.0, 0.75, True, None),
        (None, None, None, None),  # nobody knows how fast matrices could be
        (None, None, False, None),  # fast enough, but idle for too long
        (32_000.0, 5.0, True, None),
        (8.0, 0.8, None, None),
        (0.32, pytest.approx(0.0206, abs=1e-4), False, None),
        (None, None, None, "no port"),
    ]
    targets = [report.describe_target(ROWS[key].target, ROWS[key].unit) for key in ("decode-1", "peer", "http-256")]
    assert targets == [">= 85%", ">= 4 x", ">= 30,000 tok/s, idle < 10%"]
    console = Console(width=160, record=True)
    report.show(console, lines, {"machine": {"device": "X"}, "memory_bytes_per_s": {"best": 4e12}})
    text = console.export_text()
    assert "32,000 tok/s, idle 12%" in text
    assert "not measured: qwen3-0.6b over HTTP, one stream, per token: no port" in text


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("attend_kernel", "attention"),
        ("pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", "attention"),
        ("nvjet_sm90_tst_64x8_64x16_1x4_h_bz_TNT", "matrices"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "matrices"),
        ("rms_norm", "norms and positions"),
        ("prepare_heads", "norms and positions"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>",
            "sampling",
        ),
        ("draw", "sampling"),
        ("penalise", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<float>>", time_split.TORCH),
        ("something_new", time_split.OTHER),
    ],
)
def test_kernels_belong_to_parts_of_a_step(kernel: str, part: str) -> None:
    assert time_split.part_of(kernel) == part


def test_what_a_worker_found_before_its_time_was_over_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TIME_BOXES_S", {"engine": 0.3})
    monkeypatch.setattr(command, "LEAST_S", 0.0)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(command, "python_command", lambda *arguments: sleeper)
    sitting = command.Sitting(Console(quiet=True), QUICK, "cpu", tmp_path, end_time=float("inf"))
    job = Job("engine", ("decode-1", "prefill"), QUICK, "cpu", tmp_path)
    assert Job.read(job.write()) == job
    reporter = Reporter(job.messages)
    reporter.measured("decode-1", 2.5, {"memory_bytes_per_s": 10}, batch=1)
    reporter.progress("prefill")
    with Progress(disable=True) as progress:
        sitting.measure("engine", [ROWS["decode-1"], ROWS["prefill"]], progress)
        monkeypatch.setattr(command, "LEAST_S", 1.0)
        sitting.measure("engine", [ROWS["decode-64"]], progress)
    assert sitting.findings.measurements == {
        "decode-1": Measurement("decode-1", 2.5, {"memory_bytes_per_s": 10}, {"batch": 1})
    }
    assert sitting.findings.faults == {
        "prefill": "its time box of 0 s was over while at: prefill",
        "decode-64": "no time was left for it",
    }


@pytest.mark.parametrize("flags", [["--rows", "decode-1,decode-2"], ["--minutes", "0"], ["--device", "tpu"]])
def test_bad_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(flags)
    assert "error: " in capsys.readouterr().err


def quick(tmp_path: Path, rows: str) -> tuple[int, dict[str, dict[str, object]], dict[str, object]]:
    """Run the command on the CPU; its exit code, the lines by row, and the notes."""
    out = tmp_path / "gpu.json"
    arguments = ("--device", "cpu", "--quick", "--rows", rows, "--out", str(out), "--minutes", "20")
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu", *arguments], cwd=ROOT, check=False)
    values = json.loads(out.read_text())
    return done.returncode, {line["row"]["key"]: line for line in values["rows"]}, values["notes"]


def value(line: dict[str, object]) -> float:
    measurement = line["measurement"]
    assert isinstance(measurement, dict), line["fault"]
    return float(measurement["value"])


@pytest.mark.timeout(400)
def test_a_quick_run_gives_numbers_without_a_gpu(tmp_path: Path) -> None:
    code, lines, notes = quick(tmp_path, "decode-1,decode-64,prefill,sampled-256,eager-1,http-1,http-256")
    assert code == 1
    assert lines["eager-1"]["fault"] == "the engine has no graphs here"
    assert all(value(line) > 0 for key, line in lines.items() if key != "eager-1")
    assert all(line["ratio"] for key, line in lines.items() if key in ("decode-1", "decode-64", "prefill"))
    split = notes["split of decode-1"]
    assert isinstance(split, dict)
    assert time_split.HOST in split["parts_ms"]  # 0 where the profiled steps were slower than the timed ones


STAND_IN = """#!/bin/sh
# Takes vLLM's flags for its own: "serve MODEL --port N --host H --dtype D" and sizes.
exec {python} -m weft.server serve "$2" --port "$4" --device cpu --load-format dummy --max-model-len 1024
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_vllm_is_measured_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERS", str(tmp_path))
    code, lines, _ = quick(tmp_path, "vllm-1")
    assert code == 1 and lines["vllm-1"]["fault"] == "vLLM is not in $PEERS/vllm"
    program = tmp_path / "vllm" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    code, lines, _ = quick(tmp_path, "vllm-1,vllm-256")
    assert code == 0 and all(value(line) > 0 for line in lines.values())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_other_rows_give_numbers_without_a_gpu(tmp_path: Path) -> None:
    _, lines, _ = quick(tmp_path, "ready,ready-again,peer,small-1")
    assert all(value(line) > 0 for line in lines.values())
