"""Rows over HTTP: a server with two server processes, and clients in processes of their own.

How busy the clients were is among the details. The engine's idle share is the part of the load's time in which the
device was not at work on a step, by its own clock.
"""

from benchmarks.compare import servers
from benchmarks.compare.figures import figures
from benchmarks.compare.servers import Server
from benchmarks.compare.workloads import Workload
from benchmarks.gpu.clients import Clients
from benchmarks.gpu.job import Job, Reporter
from benchmarks.gpu.models import model_folder
from weft.engine.models.config import load_model_config
from weft.server.run.child import python_command

START_TIMEOUT_S = 60.0
NUM_ROUNDS = 2
"""Requests that each of those at a time sends, one after the other."""


def server(job: Job, model: str, *flags: str) -> Server:
    """How to start Weft for a model, from these very sources."""
    command = (*python_command("weft.server", "serve", "{model}", "--port", "{port}", "--device", job.device), *flags)
    folder = model_folder(job.scratch, model)
    return Server("Weft", command, {"main": folder}, "/ready")


def run(job: Job, reporter: Reporter) -> None:
    """Measure both rows with one server."""
    sizes = job.sizes
    one = Workload("one", "one stream", "main", 1, 1, sizes.input_tokens // 2, sizes.output_tokens)
    many = Workload(
        "many", "at once", "main", sizes.at_once, NUM_ROUNDS * sizes.at_once, sizes.input_tokens, sizes.output_tokens
    )
    length = 2 * (sizes.input_tokens + sizes.output_tokens)
    flags = ("--load-format", "dummy", "--server-processes", "2", "--max-model-len", str(length))
    reporter.progress("starting a server")
    wanted = server(job, sizes.small, *flags, "--max-num-seqs", str(sizes.at_once))
    vocab_size = load_model_config(model_folder(job.scratch, sizes.small)).vocab_size
    with (
        Clients(vocab_size, sizes.num_clients) as clients,
        servers.running(wanted, [many], job.scratch / "server.log", START_TIMEOUT_S) as running,
    ):
        clients.connect(running.url)
        if "http-1" in job.rows:
            reporter.progress("one stream")
            clients.send(one, 0, 1)  # what is made on first use
            found = figures(clients.send(one, 1, 1)[0], sizes.output_tokens)
            reporter.measured(
                "http-1", found.tpot_ms, ttft_ms=found.ttft_ms, itl_p50_ms=found.itl_p50_ms, itl_p99_ms=found.itl_p99_ms
            )
        if "http-256" in job.rows:
            reporter.progress(f"{sizes.at_once} streams, warm-up")
            clients.send(many, 0)
            reporter.progress(f"{sizes.at_once} streams")
            _measure_many(clients, many, reporter)


def _measure_many(clients: Clients, workload: Workload, reporter: Reporter) -> None:
    before = clients.engine_stats()
    streams, busy = clients.send(workload, 1)
    after = clients.engine_stats()
    found = figures(streams, workload.output_tokens)
    step_s = after["step_seconds"] - before["step_seconds"]
    num_steps = after["num_steps"] - before["num_steps"]
    reporter.measured(
        "http-256",
        found.output_tokens_per_s,
        engine_idle_share=max(0.0, 1 - step_s / found.duration_s),
        mean_step_ms=step_s / num_steps * 1e3,
        tokens_per_step=found.num_output_tokens / num_steps,
        busiest_client_share=busy,
        ttft_ms=found.ttft_ms,
        tpot_ms=found.tpot_ms,
        itl_p99_ms=found.itl_p99_ms,
        duration_s=found.duration_s,
    )
