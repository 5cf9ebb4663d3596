"""Rows over HTTP: a server with two server processes, and clients in processes of their own; vLLM beside it.

How busy the clients were is among the details. The engine's idle share is the part of the load's time in which the
device was not at work on a step, by its own clock.
"""

from collections.abc import Sequence

from benchmarks.compare import servers
from benchmarks.compare.figures import figures
from benchmarks.compare.servers import Server
from benchmarks.compare.workloads import Workload
from benchmarks.gpu.clients import Clients
from benchmarks.gpu.job import Job, Reporter, UnavailableError
from benchmarks.gpu.models import model_folder
from weft.engine.describe.config import load_model_config
from weft.server.supervise.spawn import python_command

START_TIMEOUT_S = 150.0
NUM_ROUNDS = 2
"""Requests that each of those at a time sends, one after the other."""


def server(job: Job, model: str, *flags: str) -> Server:
    """How to start Weft for a model, from these very sources."""
    command = (*python_command("weft.server", "serve", "{model}", "--port", "{port}", "--device", job.device), *flags)
    folder = model_folder(job.scratch, model)
    return Server("Weft", command, {"main": folder}, "/ready")


def run(job: Job, reporter: Reporter) -> None:
    """Measure the rows of one stream and of many with one server.

    Raises:
        UnavailableError: vLLM is wanted and not installed.
    """
    sizes = job.sizes
    one = Workload("one", "one stream", "main", 1, 1, sizes.input_tokens // 2, sizes.output_tokens)
    many = Workload(
        "many", "at once", "main", sizes.at_once, NUM_ROUNDS * sizes.at_once, sizes.input_tokens, sizes.output_tokens
    )
    length = 2 * (sizes.input_tokens + sizes.output_tokens)
    flags = ("--load-format", "dummy", "--max-model-len", str(length), "--max-num-seqs", str(sizes.at_once))
    is_peer = job.group == "vllm"
    if is_peer:
        wanted, row_of_one, row_of_many = _vllm(job, flags), "vllm-1", "vllm-256"
    else:
        wanted = server(job, sizes.small, *flags, "--server-processes", "2")
        row_of_one, row_of_many = "http-1", "http-256"
    reporter.progress("starting a server")
    vocab_size = load_model_config(model_folder(job.scratch, sizes.small)).vocab_size
    with (
        Clients(vocab_size, sizes.num_clients) as clients,
        servers.running(wanted, [many], job.scratch / f"{job.group}.server.log", START_TIMEOUT_S) as running,
    ):
        clients.connect(running.url)
        if row_of_one in job.rows:
            reporter.progress("one stream")
            clients.send(one, 0, 1)  # what is made on first use
            found = figures(clients.send(one, 1, 1)[0], sizes.output_tokens)
            times = {"ttft_ms": found.ttft_ms, "itl_p50_ms": found.itl_p50_ms, "itl_p99_ms": found.itl_p99_ms}
            reporter.measured(row_of_one, found.tpot_ms, **times)
        if row_of_many in job.rows:
            reporter.progress(f"{sizes.at_once} streams, warm-up")
            clients.send(many, 0)
            reporter.progress(f"{sizes.at_once} streams")
            _measure_many(clients, many, reporter, row_of_many, has_stats=not is_peer)


def _vllm(job: Job, flags: Sequence[str]) -> Server:
    wanted = servers.vllm({"main": model_folder(job.scratch, job.sizes.small)}, flags)
    if wanted is None:
        raise UnavailableError("vLLM is not in $PEERS/vllm")
    return wanted


def _measure_many(clients: Clients, workload: Workload, reporter: Reporter, row: str, *, has_stats: bool) -> None:
    before = clients.engine_stats() if has_stats else {}
    streams, busy = clients.send(workload, 1)
    found = figures(streams, workload.output_tokens)
    engine: dict[str, float] = {}
    if has_stats:
        after = clients.engine_stats()
        step_s = after["step_seconds"] - before["step_seconds"]
        num_steps = after["num_steps"] - before["num_steps"]
        engine = {
            "engine_idle_share": max(0.0, 1 - step_s / found.duration_s),
            "mean_step_ms": step_s / num_steps * 1e3,
            "tokens_per_step": found.num_output_tokens / num_steps,
        }
    reporter.measured(
        row,
        found.output_tokens_per_s,
        **engine,
        busiest_client_share=busy,
        ttft_ms=found.ttft_ms,
        tpot_ms=found.tpot_ms,
        itl_p99_ms=found.itl_p99_ms,
        duration_s=found.duration_s,
    )
