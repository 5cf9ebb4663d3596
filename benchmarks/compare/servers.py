"""Servers, as data, and how to run one.

Owns the processes it starts: each server has a session of its own, its output goes to a file, and nothing of its
process group outlives `running`, however that is left.
"""

import contextlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.compare.workloads import Workload

STOP_TIMEOUT_S = 20.0


class ServerError(Exception):
    """A server could not be started or has died; says what its log says."""


@dataclass(frozen=True, slots=True)
class Server:
    """How to start a server."""

    name: str
    command: tuple[str, ...]
    """With {model} (path of a checkpoint), {port}, {num_requests} (at once), {num_tokens} (of these together) in it."""
    models: Mapping[str, pathlib.Path]
    """Workload.model -> what is served for it; workloads of other models are left out."""
    ready_path: str
    environment: Mapping[str, str] = field(default_factory=dict)
    is_sized_for_workload: bool = False
    """It must be told how many requests of which length come, so every workload has a server of its own."""

    def groups(self, workloads: Sequence[Workload]) -> list[list[Workload]]:
        """Split workloads into those that one process serves."""
        groups: dict[str, list[Workload]] = {}
        for workload in workloads:
            if workload.model in self.models:
                groups.setdefault(workload.key if self.is_sized_for_workload else workload.model, []).append(workload)
        return list(groups.values())

    def arguments(self, group: Sequence[Workload], port: int) -> list[str]:
        """The command for workloads that one process serves."""
        tokens = [w.concurrency * (w.prefix_tokens + w.input_tokens + w.output_tokens + 16) for w in group]
        values = {
            "model": self.models[group[0].model],
            "port": port,
            "num_requests": max(w.concurrency for w in group),
            "num_tokens": max(tokens),
        }
        return [part.format(**values) for part in self.command]


@dataclass(frozen=True, slots=True)
class Running:
    """A server that takes requests."""

    url: str
    startup_s: float | None
    """From the command to the first 200 of its ready path; None for a server that ran before."""
    pid: int | None = None
    """Of its first process; None for a server that ran before."""


def weft(models: Mapping[str, pathlib.Path], name: str = "Weft", flags: Sequence[str] = ()) -> Server:
    """Weft, as it is in this environment, with further flags."""
    program = str(pathlib.Path(sys.executable).with_name("weft"))
    return Server(name, (program, "serve", "{model}", "--port", "{port}", *flags), models, "/ready")


def vllm(models: Mapping[str, pathlib.Path], extra_flags: Sequence[str] = ()) -> Server | None:
    """vLLM, if it is in $PEERS/vllm; what its build for CPUs is told, others do not read."""
    folder = pathlib.Path(os.environ.get("PEERS", "~/.cache/weft-peers")).expanduser()
    program = folder / "vllm" / "bin" / "vllm"
    if not program.is_file():
        return None
    sizes = () if "--max-model-len" in extra_flags else ("--max-model-len", "8192")
    flags = ("--port", "{port}", "--host", "127.0.0.1", "--dtype", "bfloat16", *sizes, *extra_flags)
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # by default it leaves one core to its front end
        "HF_HUB_OFFLINE": "1",
    }
    return Server("vLLM", (str(program), "serve", "{model}", *flags), models, "/health", environment)


def llama_cpp(name: str, models: Mapping[str, pathlib.Path], extra_flags: Sequence[str] = ()) -> Server:
    """llama.cpp's server, with further flags: $LLAMA_SERVER, else llama-server on the path.

    Raises:
        ServerError: There is none.
    """
    program = shutil.which(os.environ.get("LLAMA_SERVER", "llama-server"))
    if program is None:
        raise ServerError("llama-server is neither on the path nor named by LLAMA_SERVER")
    sizes = ("-np", "{num_requests}", "-c", "{num_tokens}")
    flags = ("-m", "{model}", "--port", "{port}", "--host", "127.0.0.1", *sizes, *extra_flags)
    return Server(name, (program, *flags), models, "/health", is_sized_for_workload=True)


def get(url: str, path: str) -> tuple[int, bytes]:
    """GET: status and body; status 0 when nobody answers."""
    target = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=10)
    try:
        connection.request("GET", target.path.rstrip("/") + path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def model_name(url: str) -> str:
    """Return the name under which a server knows its model.

    Raises:
        ServerError: It does not say.
    """
    status, body = get(url, "/v1/models")
    if status != 200:
        raise ServerError(f"{url}/v1/models answered {status or 'nothing'}: {body[:200].decode(errors='replace')}")
    return str(json.loads(body)["data"][0]["id"])


def version(url: str) -> str | None:
    """Return the version that a server says it has; None if it says none."""
    for path, key in (("/version", "version"), ("/props", "build_info")):  # llama.cpp has the second
        status, body = get(url, path)
        if status == 200:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return str(json.loads(body)[key])
    return None


@contextlib.contextmanager
def running(server: Server, group: Sequence[Workload], log: pathlib.Path, timeout_s: float) -> Iterator[Running]:
    """Start a server, wait until it is ready, and end it and its children.

    Args:
        server: What to start.
        group: The workloads that it will serve, of one model.
        log: Where its output goes.
        timeout_s: Most seconds until it is ready.

    Raises:
        ServerError: It died or was not ready in time.
    """
    with socket.socket() as holder, log.open("w") as output:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):  # the server may listen there, and nobody else
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        arguments = server.arguments(group, port)
        start = time.perf_counter()
        process = subprocess.Popen(
            arguments,
            env={**os.environ, **server.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while get(url, server.ready_path)[0] != 200:
                if process.poll() is not None:
                    raise ServerError(f"{server.name} ended with exit code {process.returncode}")
                if time.perf_counter() - start > timeout_s:
                    raise ServerError(f"{server.name} was not ready after {timeout_s:g} s")
                time.sleep(0.005)
            yield Running(url, time.perf_counter() - start, process.pid)
        except Exception as error:
            error.add_note(f"$ {' '.join(arguments)}\n{_tail(log)}\n(the whole log: {log})")
            raise
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, then make sure that nothing of its group is left."""
    try:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: pathlib.Path, num_lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
