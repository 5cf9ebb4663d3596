"""A cluster of Ray on this machine: a head without cores and two nodes with one each, in processes of their own."""

import asyncio
import contextlib
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, reserved_port
from weft.server.ray import deploy as environment

MODEL = "weft-demo"


def eventually(claim: Callable[[], bool], what: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not claim():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


@dataclass
class Answer:
    """What a client saw of one streamed chat."""

    begin_time: float
    status: int = 0  # 0: no connection
    text: str = ""
    error: str = ""  # an error event, or how the connection ended
    num_cached: int = 0
    num_prompt: int = 0
    num_tries: int = 1

    @property
    def is_lost(self) -> bool:
        return self.status != 200 or bool(self.error)


@dataclass
class Cluster:
    """The cluster, and where its application is reached."""

    cluster: Any
    nodes: list[Any]
    port: int
    folder: pathlib.Path
    answers: list[Answer] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def deploy(self, *arguments: str) -> None:
        """`weft ray deploy`; returns once the replicas serve."""
        address = ["--address", self.cluster.address, "--port", str(self.port)]
        command = [sys.executable, "-P", "-m", "weft.server", "ray", "deploy", *address, "--kv-cache-memory", "64MB"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr
        self.wait_replicas()

    def status(self) -> Any:
        from ray import serve

        return serve.status().applications["weft"]

    def wait_replicas(self, number: int | None = None) -> None:
        """Wait until the application is settled, with so many replicas."""

        def is_settled() -> bool:
            status = self.status()
            replicas = status.deployments["Weft"].replica_states
            is_whole = set(replicas) == {"RUNNING"} and number in (None, replicas["RUNNING"])
            return bool(status.status == "RUNNING" and is_whole)

        eventually(is_settled, self.status)

    def processes(self, text: str) -> list[int]:
        """Ids of the cluster's processes with the text in their command line, the oldest first."""
        mark = f"XDG_RUNTIME_DIR={self.folder}\0".encode()
        found = []
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                has_it = text.encode() in (process / "cmdline").read_bytes().replace(b"\0", b" ")
                if has_it and mark in (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:  # it ended, or is another user's
                continue
        return sorted(found)

    def replica_ports(self) -> list[int]:
        """Where the replicas listen, HAProxy left aside."""
        found = []
        with httpx.Client(timeout=TIMEOUT_S) as client:
            for port in range(30000, 30200):
                with contextlib.suppress(httpx.TransportError):
                    if "openai-model" in client.get(f"http://127.0.0.1:{port}/ready").headers:
                        found.append(port)
        return found

    async def ask(self, client: httpx.AsyncClient, content: str, port: int | None = None, **body: Any) -> Answer:
        """One streamed chat; tried again, as clients do, if refused or if HAProxy knows no replica yet."""
        answer = Answer(time.monotonic())
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0} | body
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        url = f"http://127.0.0.1:{port or self.port}/v1/chat/completions"
        while True:
            try:
                async with client.stream("POST", url, json=body) as reply:
                    if reply.status_code == 404 and "openai-model" not in reply.headers:
                        raise httpx.ConnectError("HAProxy has just been started")
                    answer.status = reply.status_code
                    lines = [line async for line in reply.aiter_lines() if line]
            except (httpx.ConnectError, httpx.ReadError) as error:
                if answer.status:
                    answer.error = f"cut: {error!r}"
                    return answer
                answer.num_tries += 1
                assert time.monotonic() < answer.begin_time + TIMEOUT_S, "never connected"
                await asyncio.sleep(0.1)
                continue
            except httpx.TransportError as error:
                answer.error = f"cut: {error!r}"
                return answer
            _read(answer, lines)
            return answer

    async def load(self, until: Callable[[list[Answer]], bool], num_clients: int = 4, **body: Any) -> list[Answer]:
        """Clients that ask again and again until the claim holds of all answers so far."""
        answers: list[Answer] = []

        async def ask_again(number: int) -> None:
            async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
                while not until(answers):
                    answers.append(await self.ask(client, f"Story {number} {len(answers)}", **body))

        await asyncio.gather(*(ask_again(number) for number in range(num_clients)))
        return answers


def _read(answer: Answer, lines: list[str]) -> None:
    """Note what the lines of a stream, or of an error, tell."""
    if answer.status != 200:
        answer.error = " ".join(lines)[:300]
        return
    for line in lines:
        if line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
        if "error" in event:
            answer.error = f"event: {event['error']['message']}"
        for choice in event.get("choices", ()):
            answer.text += choice["delta"].get("content") or ""
        if usage := event.get("usage"):
            answer.num_prompt = usage["prompt_tokens"]
            answer.num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    answer.error = answer.error or "cut: no [DONE]"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two replicas, deployed. At the end nothing of it may be left."""
    folder = tmp_path_factory.mktemp("run")
    token = folder.parent / "token"
    token.write_text("0" * 64)
    nodes_have = environment.RAY | {"RAY_AUTH_TOKEN_PATH": str(token), "XDG_RUNTIME_DIR": str(folder)}
    with pytest.MonkeyPatch.context() as patch, reserved_port() as port:
        for name, value in nodes_have.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster as RayCluster

        inner = RayCluster(initialize_head=True, connect=False, head_node_args={"num_cpus": 0})
        try:
            nodes = [inner.add_node(num_cpus=1) for _ in range(2)]
            for name, value in environment.SERVE.items():  # the nodes get them from who deploys
                patch.setenv(name, value)
            from ray import serve

            ray.init(inner.address, namespace="serve", log_to_driver=False)
            found = Cluster(inner, nodes, port, folder)
            found.deploy("--replicas", "2")
            yield found
            serve.shutdown()
        finally:
            ray.shutdown()
            inner.shutdown()
        eventually(lambda: not found.processes(""), lambda: found.processes(""))
        assert list(folder.iterdir()) == []
