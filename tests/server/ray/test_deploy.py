"""What becomes of settings and flags before a cluster is asked, and what a router makes of a body."""

import asyncio
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weft.server.model_entry import ModelEntry
from weft.server.ray.deploy import (
    _check_cluster,
    _check_listener,
    _divided,
    _placed,
    _proxy_location,
    deploy,
    parse_replicas,
)
from weft.server.settings import Settings, StartError

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)


@pytest.mark.parametrize(("text", "bounds"), [("1", (1, 1)), ("3", (3, 3)), ("1:4", (1, 4)), ("2:2", (2, 2))])
def test_replicas(text: str, bounds: tuple[int, int]) -> None:
    assert parse_replicas(text) == bounds


@pytest.mark.parametrize("text", ["0", "4:1", "1:", ":2", "-1", "one", "1:2:3", ""])
def test_replicas_that_make_no_sense(text: str) -> None:
    with pytest.raises(StartError, match=f"--replicas: .* got {text}"):
        parse_replicas(text)


@pytest.mark.parametrize(
    ("settings", "cpus", "fault"),
    [
        (Settings(), -1.0, "--cpus: must be greater than 0, got -1"),
        (Settings(port=0), 1.0, "port: must be greater than 0 with Ray, got 0"),
        (Settings(server_processes=2), 1.0, "server_processes: a replica serves by itself, got 2"),
        (Settings(models={"m": ModelEntry()}), 1.0, "models: a replica serves one model"),
        (Settings(ssl_certfile="a", ssl_keyfile="b"), 1.0, "ssl_certfile: replicas speak HTTP"),
        (Settings(nodes_token="0" * 16), 1.0, "node_rank, master_addr, nodes_token: with Ray a replica finds"),
        (Settings(admin_key=("k",)), 1.0, "admin_key: the model of a replica cannot be managed"),
    ],
)
def test_what_ray_cannot_do(settings: Settings, cpus: float, fault: str) -> None:
    with pytest.raises(StartError, match=fault):
        deploy(settings, "1", cpus, "local")


def test_replicas_for_prefill_need_a_folder_and_are_reached_on_the_same_machine() -> None:
    with pytest.raises(StartError, match="--prefill-replicas: needs kv_offload_dir"):
        deploy(Settings(), "1", 1.0, "local", num_prefill=1)
    prefill, decode = _divided(Settings(host="0.0.0.0", port=9000, kv_offload_dir="/kv"))
    assert (prefill.kv_role, prefill.prefill_urls) == ("prefill", ())
    assert (decode.kv_role, decode.prefill_urls) == ("decode", ("http://127.0.0.1:9000/prefill",))


def test_paths_are_those_of_the_folder_in_which_it_was_deployed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only that of a model's folder was; a file, an adapter or a draft model was then missing in every replica."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("draft", "adapter", "ngram"):
        (tmp_path / name).mkdir()
    (tmp_path / "model.gguf").touch()
    lora = {"a": "~/adapter", "b": "org/adapter"}
    placed = _placed(
        Settings(model="model.gguf", speculative="./draft", lora=lora, kv_offload_dir="kv", data_dir="~/d")
    )
    found = [placed.model, placed.speculative, placed.lora["a"], placed.kv_offload_dir, placed.data_dir]
    assert found == [f"{tmp_path}/{name}" for name in ("model.gguf", "draft", "adapter", "kv", "d")]
    assert placed.lora["b"] == "org/adapter"
    hub = Settings(model="Qwen/Qwen3-0.6B", speculative="ngram")
    assert _placed(hub) == hub


def test_an_address_that_is_taken_is_named() -> None:
    client = SimpleNamespace(http_config=SimpleNamespace(host="0.0.0.0", port=9000))
    serve = SimpleNamespace(context=SimpleNamespace(_get_global_client=lambda: client))
    _check_listener(serve, Settings(host="0.0.0.0", port=9000))
    with pytest.raises(StartError, match=r"port: Ray Serve listens on 0\.0\.0\.0 port 9000 already"):
        _check_listener(serve, Settings(host="0.0.0.0", port=8000))


def test_a_cluster_that_is_open_or_cannot_reach_its_replicas() -> None:
    def cluster(*addresses: str, wants_token: bool) -> Any:
        nodes = [{"Alive": True, "NodeManagerAddress": address} for address in addresses]
        remote = SimpleNamespace(remote=lambda: wants_token)
        return SimpleNamespace(nodes=lambda: nodes, get=lambda it: it, remote=lambda **_: lambda _: remote)

    assert _proxy_location(cluster("10.0.0.1", "10.0.0.2", wants_token=True)) == "EveryNode"
    assert _proxy_location(cluster("10.0.0.1", "10.0.0.1", wants_token=True)) == "HeadOnly"  # they would share the port
    _check_cluster(cluster("10.0.0.1", "10.0.0.2", wants_token=True), Settings(host="0.0.0.0"))
    _check_cluster(cluster("10.0.0.1", wants_token=True), Settings())
    with pytest.raises(
        StartError, match=r"host: the 2 machines reach no replica at 127\.0\.0\.1: set --host 0\.0\.0\.0"
    ):
        _check_cluster(cluster("10.0.0.1", "10.0.0.2", wants_token=True), Settings())
    with pytest.raises(StartError, match="the cluster wants no token"):
        _check_cluster(cluster("10.0.0.1", wants_token=False), Settings())


def test_a_missing_ray_is_named() -> None:
    code = (
        "import sys; sys.modules['ray'] = None; sys.argv[1:] = ['ray', 'deploy']; from weft.server import __main__ as m"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}; m.main()"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "weft: error: Ray is missing (pip install 'weft[ray]')\n")


def test_a_cluster_without_its_token_is_refused(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-P", "-m", "weft.server", "ray", "deploy", "--address", "127.0.0.1:1"]
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "weft: error: --address: 127.0.0.1:1: Token authentication is enabled"
    )


def deployment(settings: Settings, **options: Any) -> Any:
    """The deployment of the replicas."""
    from weft.server.ray.app import build_app

    return build_app(settings, **options)._bound_deployment


def test_a_number_of_replicas_and_a_range() -> None:
    fixed = deployment(Settings(drain_timeout_s=7), min_replicas=3)
    assert fixed._deployment_config.num_replicas == 3
    assert fixed._deployment_config.graceful_shutdown_timeout_s > 7
    scaled = deployment(Settings(), min_replicas=1, max_replicas=3, target_requests=5)._deployment_config
    bounds = scaled.autoscaling_config
    assert (bounds.min_replicas, bounds.max_replicas, bounds.target_ongoing_requests) == (1, 3, 5)


def test_ranks_get_their_gpus_on_one_machine() -> None:
    one = deployment(Settings(device="cuda"))._replica_config
    assert (one.resource_dict["GPU"], one.placement_group_bundles) == (1, None)
    ranks = deployment(Settings(device="cuda", tensor_parallel_size=4), cpus=8)._replica_config
    assert ranks.placement_group_bundles == [{"CPU": 8, "GPU": 4}]
    assert ranks.placement_group_strategy == "STRICT_PACK"
    assert ranks.resource_dict["GPU"] == 4
    stages = Settings(device="cuda", tensor_parallel_size=2, pipeline_parallel_size=2)
    assert deployment(stages)._replica_config.placement_group_bundles == [{"CPU": 1, "GPU": 4}]
    nodes = deployment(stages.model_copy(update={"nnodes": 2}), cpus=8)._replica_config
    assert nodes.placement_group_bundles == [{"CPU": 8, "GPU": 2}] * 2
    assert (nodes.placement_group_strategy, nodes.resource_dict["GPU"]) == ("STRICT_SPREAD", 2)


def test_bounds_of_replicas_are_checked() -> None:
    with pytest.raises(StartError, match="replicas: must be at least 1 and in order, got 2 to 1"):
        deployment(Settings(), min_replicas=2, max_replicas=1)
    with pytest.raises(StartError, match="gpus: must be a multiple of nnodes, 2, got 3"):  # of which one was left out
        deployment(Settings(nnodes=2, tensor_parallel_size=2), gpus=3)


def test_prompts_that_begin_alike_have_text_that_begins_alike() -> None:
    from weft.server.ray.router import prompt_text

    first = b'{"temperature": 1, "model": "m", "messages": [{"role": "user", "content": "Hi"}]}'
    second = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant"}], "model": "m", "max_tokens": 9}'
    assert prompt_text(first)[:-1] == b'"m"[{"role": "user", "content": "Hi"}'
    assert prompt_text(second).startswith(prompt_text(first)[:-1])
    assert prompt_text(first.replace(b'"m"', b'"other"'))[:8] != prompt_text(first)[:8]
    assert prompt_text(b'{"messages": [{"ro') == b'{"messages": [{"ro'
    assert prompt_text(b"[]") == b"[]"
    assert prompt_text(b"") == b""


def test_the_model_is_found_in_a_body_that_is_cut() -> None:
    from weft.server.ray.router import model_name

    assert model_name(b'{"messages": [{"content": "\\"model\\": \\"x\\""}], "model" : "a\\u00e9", "n') == "a\u00e9"
    for nothing in (b"", b"[]", b'{"model": 1}', b'{"model": "cu', b'{"model": "\xff"}'):
        assert model_name(nothing) is None


def running(name: str, **stats: object) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def test_a_router_goes_by_what_replicas_tell() -> None:
    from weft.server.ray.router import PrefixRequestRouter

    router = PrefixRequestRouter.__new__(PrefixRequestRouter)
    router.initialize_state()

    def choose(replicas: list[Any], *args: object) -> Any:
        (ranked,) = asyncio.run(router.choose_replicas(replicas, cast(Any, SimpleNamespace(args=args)))) or ([],)
        return [replica.replica_id.unique_id for replica in ranked]

    assert choose([]) == []
    assert choose([running("a", running=50), running("b")], b"Hi", None) == ["b"]
    assert choose([running("a", running=50), running("b", alive=0.0)], b"Hi", None) == ["a"]
    serves = {"models": ["m", "lora"]}
    loaded = running("a", running=1, loras=["lora"], **serves)
    assert choose([loaded, running("b", **serves), running("c")], b"Hi", "lora") == ["a"]
    assert choose([loaded, running("b", models=["m"]), running("c")], b"Hi", "lora") == ["a"]
    assert choose([running("a"), running("b", waiting=9)], object()) == ["a"]  # a request of Ray's own proxy
