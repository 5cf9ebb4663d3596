"""Weft on a cluster of Ray: the same answers, few losses, and load where caches and room are."""

import asyncio
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster import stamps
from tests.cluster.conftest import MODEL, Answer, Cluster, eventually
from tests.end_to_end.conftest import TIMEOUT_S, reserved_port, serving
from weft.server.settings import Settings

pytestmark = [pytest.mark.cluster, pytest.mark.filterwarnings("ignore")]

NUM_CLIENTS = 4


def gather(cluster: Cluster, contents: list[str], **body: Any) -> list[Answer]:
    """All at once."""

    async def run() -> list[Answer]:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            return await asyncio.gather(*(cluster.ask(client, content, **body) for content in contents))

    return asyncio.run(run())


def test_answers_equal_those_of_weft_serve(cluster: Cluster, tmp_path: pathlib.Path) -> None:
    contents = ["Hi", "What is the capital of France?", "Count to five."]
    answers = gather(cluster, contents, max_tokens=48)
    with serving(tmp_path / "log", "--kv-cache-memory", "64MB") as server:
        alone = Cluster(None, [], server.port, tmp_path)
        assert [answer.text for answer in gather(alone, contents, max_tokens=48)] == [one.text for one in answers]
    assert all(answer.text for answer in answers)


def under_load(cluster: Cluster, happen: Callable[[], None], **body: Any) -> tuple[list[Answer], float]:
    """Answers while something happens, and when it did; load ends once clients have been answered again."""
    event_time = 0.0

    async def run() -> list[Answer]:
        nonlocal event_time
        is_over = asyncio.Event()

        async def go() -> None:
            nonlocal event_time
            await asyncio.sleep(2)
            event_time = time.monotonic()
            try:
                await asyncio.to_thread(happen)
            finally:
                is_over.set()

        def is_enough(answers: list[Answer]) -> bool:
            after = [answer for answer in answers if answer.begin_time > event_time]
            return is_over.is_set() and len(after) >= 3 * NUM_CLIENTS

        going = asyncio.create_task(go())
        answers = await cluster.load(is_enough, NUM_CLIENTS, max_tokens=96, ignore_eos=True, **body)
        await going
        return answers

    return asyncio.run(run()), event_time


def kill(cluster: Cluster, kind: str) -> None:
    """Kill something, and wait until all is well again."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME

    replicas = "ServeReplica:weft:Weft"
    before = cluster.processes(replicas)
    if kind == "node":
        node = cluster.nodes.pop(0)
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in [*raylet.children(recursive=True), raylet]:  # as a machine ends: all at once
            process.kill()
        cluster.cluster.remove_node(node, allow_graceful=False)
    elif kind == "controller":
        ray.kill(ray.get_actor(SERVE_CONTROLLER_NAME, namespace="serve"), no_restart=False)
    else:
        what = {"engine": "weft.engine.process", "replica": replicas, "proxy": "haproxy -db"}[kind]
        os.kill(cluster.processes(what)[0], signal.SIGKILL)
    if kind in ("replica", "node"):
        eventually(lambda: len(now := cluster.processes(replicas)) == 2 and now != before, lambda: "none is replaced")
    time.sleep(3)  # until the controller has seen it
    cluster.wait_replicas(2)


@pytest.mark.parametrize("kind", ["engine", "replica", "controller", "proxy", "node"])
def test_a_kill_loses_only_streams_in_flight(cluster: Cluster, kind: str) -> None:
    if kind == "node":
        cluster.nodes.append(cluster.cluster.add_node(num_cpus=1))  # a spare one
    answers, event_time = under_load(cluster, lambda: kill(cluster, kind))
    lost = [answer for answer in answers if answer.is_lost]
    print(f"{kind}: {len(answers)} answers, {len(lost)} lost, {sum(one.num_tries > 1 for one in answers)} tried again")
    assert len(lost) <= (0 if kind == "controller" else NUM_CLIENTS), lost
    assert kind == "proxy" or all(answer.num_tries == 1 for answer in answers)
    for answer in lost:
        assert answer.begin_time < event_time, answer
        assert answer.error.startswith(("event: ", "cut: ")), answer


def test_an_upgrade_under_load_loses_nothing(cluster: Cluster) -> None:
    before = cluster.processes("ServeReplica:weft:Weft")
    answers, _ = under_load(cluster, lambda: cluster.deploy("--replicas", "2", "--max-num-seqs", "8"))
    assert not set(before) & set(cluster.processes("ServeReplica:weft:Weft"))
    print(f"upgrade: {len(answers)} answers")
    assert [answer for answer in answers if answer.is_lost] == []


PREFIXES = [
    " ".join(random.Random(group).choices(["boat", "stone", "river", "lamp", "glass"], k=220)) for group in range(16)
]


def share_and_balance(cluster: Cluster, asks: list[tuple[str, int | None]]) -> tuple[float, float, dict[int, int]]:
    """Share of prompt tokens that were cached, most requests of a replica by the mean, and requests by port."""

    async def run() -> list[Answer]:
        todo, answers = iter(asks), []

        async def client() -> None:
            async with httpx.AsyncClient(timeout=TIMEOUT_S) as http:
                for content, port in todo:
                    answers.append(await cluster.ask(http, content, port, max_tokens=8, ignore_eos=True))

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
        return answers

    before = num_requests(cluster)
    answers = asyncio.run(run())
    assert not any(answer.is_lost for answer in answers)
    served = {port: number - before.get(port, 0) for port, number in num_requests(cluster).items()}
    cached = sum(answer.num_cached for answer in answers) / sum(answer.num_prompt for answer in answers)
    return cached, max(served.values()) * len(served) / sum(served.values()), served


def num_requests(cluster: Cluster) -> dict[int, int]:
    """Chats that each replica has served."""
    found = {}
    for port in cluster.replica_ports():
        lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S).text.splitlines()
        found[port] = sum(
            int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith("weft:request_success_total{")
        )
    return found


def test_prefixes_meet_their_cache_and_load_stays_even(cluster: Cluster) -> None:
    ports = cluster.replica_ports()
    chance = random.Random(1)

    def questions(series: str) -> list[str]:
        asks = [f"{series} {prefix} question {k}?" for prefix in PREFIXES for k in range(4)]
        chance.shuffle(asks)
        return asks

    at_random, _, _ = share_and_balance(cluster, [(text, chance.choice(ports)) for text in questions("First")])
    routed, balance, served = share_and_balance(cluster, [(text, None) for text in questions("Second")])
    print(f"cached share: {routed:.1%} routed, {at_random:.1%} at random; max/mean load {balance:.2f} {served}")
    assert routed >= at_random + 0.10
    assert balance <= 1.5


def test_a_prompt_that_all_share_uses_every_replica(cluster: Cluster) -> None:
    before = num_requests(cluster)

    async def run() -> list[Answer]:
        async def ask_again() -> list[Answer]:
            async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
                return [await cluster.ask(client, PREFIXES[0], max_tokens=64, ignore_eos=True) for _ in range(4)]

        series = await asyncio.gather(*(ask_again() for _ in range(16)))
        return [answer for answers in series for answer in answers]

    assert not any(answer.is_lost for answer in asyncio.run(run()))
    served = {port: number - before.get(port, 0) for port, number in num_requests(cluster).items()}
    print(f"one prompt, 16 clients: {served}")
    assert min(served.values()) >= 12  # of 64


def test_chunks_are_hardly_later_than_from_uvicorn_alone(cluster: Cluster) -> None:
    from ray import serve

    options: dict[str, Any] = {"name": "Stamps", "ray_actor_options": {"num_cpus": 0}}
    serve.run(
        serve.deployment(serve.ingress()(stamps.Stamps)).options(**options).bind(),
        name="stamps",
        route_prefix="/stamps",
    )
    with reserved_port() as port:
        alone = subprocess.Popen([sys.executable, stamps.__file__, str(port)])
        try:
            eventually(lambda: can_connect(port), lambda: "uvicorn does not listen")
            places = {"HAProxy": (cluster.port, "/stamps"), "uvicorn": (port, "/")}
            found: dict[str, list[float]] = {name: [] for name in places}
            for _ in range(6):  # in turns, since the machine is not always as quick
                for name, place in places.items():
                    found[name] += asyncio.run(stamps.delays_s(*place))
        finally:
            alone.kill()
            alone.wait()
    serve.delete("stamps")
    medians = {name: statistics.median(delays) * 1e3 for name, delays in found.items()}
    print(f"delay of a chunk in ms, median of {len(found['uvicorn'])}: {medians}")
    assert medians["HAProxy"] <= 3 * medians["uvicorn"]


def test_replicas_come_and_go_with_load_and_nothing_is_lost(cluster: Cluster) -> None:
    from ray import serve

    from weft.server.ray.app import build_app

    cluster.nodes.append(cluster.cluster.add_node(num_cpus=1))
    settings = Settings(kv_cache_memory=64 << 20, port=cluster.port)
    aims = {"min_replicas": 1, "max_replicas": 3, "target_requests": 1.0, "downscale_delay_s": 5.0}
    serve.run(build_app(settings, **aims), name="weft")
    cluster.wait_replicas()

    def has(number: int) -> bool:
        return bool(cluster.status().deployments["Weft"].replica_states == {"RUNNING": number})

    async def run() -> list[Answer]:
        answers = []
        for number, num_clients in ((3, 6), (1, 1)):
            reached = asyncio.Event()

            async def watch(number: int = number, reached: asyncio.Event = reached) -> None:
                while not await asyncio.to_thread(has, number):
                    await asyncio.sleep(0.5)
                reached.set()

            watching = asyncio.create_task(watch())
            answers += await cluster.load(
                lambda _, it=reached: it.is_set(), num_clients, max_tokens=96, ignore_eos=True
            )
            await watching
        return answers

    answers = asyncio.run(run())
    print(f"1 -> 3 -> 1 replicas: {len(answers)} answers")
    assert [answer for answer in answers if answer.is_lost] == []


def test_long_prompts_are_computed_by_replicas_of_their_own(
    cluster: Cluster, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them the others compute: an answer is the same. Whoever deploys again without them, ends them."""
    from ray import serve

    from weft.server.ray.deploy import PREFILL_NAME

    monkeypatch.setenv("WEFT_KV_OFFLOAD_DIR", str(tmp_path / "kv"))
    monkeypatch.setenv("WEFT_PREFILL_MIN_TOKENS", "300")
    cluster.deploy("--replicas", "1", "--prefill-replicas", "1")
    body = {"prompt": [5 + i * i % 80 for i in range(700)], "max_tokens": 16, "temperature": 0}

    def ask() -> str:
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    ready = f"{cluster.url}/prefill/ready"
    eventually(lambda: httpx.get(ready, timeout=TIMEOUT_S).status_code == 200, lambda: "HAProxy was not told")
    text = ask()
    for path, count in (("", "kv_offload_disk_loads_total"), ("/prefill", "kv_offload_kept_blocks_total")):
        metrics = httpx.get(f"{cluster.url}{path}/metrics", timeout=TIMEOUT_S).text
        assert f'weft:{count}{{model_name="{MODEL}"}} {700 // 32}.0' in metrics
    monkeypatch.delenv("WEFT_KV_OFFLOAD_DIR")
    cluster.deploy("--replicas", "1")
    assert PREFILL_NAME not in serve.status().applications
    assert ask() == text


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def use_two_machines(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that are deployed from now on have a stage on each of two nodes; there are two nodes more for them."""
    for _ in range(2):
        cluster.nodes.append(cluster.cluster.add_node(num_cpus=1))
    for name, value in {"NNODES": "2", "PIPELINE_PARALLEL_SIZE": "2", "DTYPE": "float32"}.items():
        monkeypatch.setenv(f"WEFT_{name}", value)


def test_a_replica_on_two_machines_outlives_a_rank_of_the_other(
    cluster: Cluster, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_two_machines(cluster, monkeypatch)
    cluster.deploy("--replicas", "1")
    (answer,) = gather(cluster, ["What is the capital of France?"], max_tokens=48)
    (node,) = cluster.processes("weft.engine.ranks.node_process")
    (rank,), engines = (cluster.processes(f"weft.engine.{name}process") for name in ("start.rank_", ""))
    os.kill(rank, signal.SIGKILL)
    eventually(lambda: cluster.processes("weft.engine.process") not in ([], engines), lambda: engines)
    (again,) = gather(cluster, ["What is the capital of France?"], max_tokens=48)
    assert cluster.processes("weft.engine.ranks.node_process") == [node]
    monkeypatch.setenv("WEFT_NNODES", "1")
    monkeypatch.setenv("WEFT_PIPELINE_PARALLEL_SIZE", "1")
    with serving(tmp_path / "log", "--kv-cache-memory", "64MB") as server:
        (alone,) = gather(Cluster(None, [], server.port, tmp_path), ["What is the capital of France?"], max_tokens=48)
    assert answer.text == again.text == alone.text != ""


def test_an_upgrade_of_replicas_on_two_machines_loses_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_two_machines(cluster, monkeypatch)
    cluster.deploy("--replicas", "2")
    before = cluster.processes("weft.engine.ranks.node_process")
    answers, _ = under_load(cluster, lambda: cluster.deploy("--replicas", "2", "--max-num-seqs", "8"))
    after = cluster.processes("weft.engine.ranks.node_process")
    assert len(before) == len(after) == 2 and not set(before) & set(after)
    print(f"upgrade on two machines: {len(answers)} answers")
    assert [answer for answer in answers if answer.is_lost] == []
