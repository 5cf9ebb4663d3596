"""`weft ray deploy`: brings a model onto a cluster, or onto a Ray of its own on this machine.

On a cluster it returns once the replicas serve, and the application stays until `serve shutdown`; run again, it
replaces the replicas one after the other. A Ray of its own ends with it, at the first stop signal. This module imports
no Ray when it is imported: Ray reads the variables in `SERVE` and `RAY` when it is imported, so they are set before.
"""

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from weft.server.ray.replica import check_settings, num_ranks
from weft.server.settings import Settings, StartError
from weft.server.supervise.listening import page_url

SERVE: Final = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    # A replica that died before it answered, or whose engine is away for too long, loses no request: another takes it.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response 503",
    # Any change of the replicas replaces HAProxy's processes; old ones end with their last stream, or after this.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
    # One event loop for Ray and Weft. Chunks handed from thread to thread are twice as late after uvicorn's.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
"""For Ray Serve's processes, which inherit it from the controller."""

RAY: Final = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
"""For every process of Ray. Whoever reaches a cluster without a token runs code on it."""


NAME, PREFILL_NAME = "weft", "weft-prefill"
"""Of the applications in Ray."""
PREFILL_PATH = "/prefill"
"""Under which HAProxy reaches the replicas that compute prompts for the others."""
LOCAL = "local"
"""Ray's address for one of its own."""

_LOOPBACK = ("127.", "localhost", "::1")


class _StoppedError(BaseException):
    """A stop signal came."""


def parse_replicas(text: str) -> tuple[int, int]:
    """2 -> (2, 2) and 1:4 -> (1, 4). Raises StartError."""
    low, colon, high = text.partition(":")
    if low.isdecimal() and (high.isdecimal() or not colon) and 1 <= int(low) <= int(high or low):
        return int(low), int(high or low)
    raise StartError(f"--replicas: must be a number from 1, or a range such as 1:4, got {text}")


def deploy(settings: Settings, replicas: str, cpus: float, address: str, num_prefill: int = 0) -> int:
    """Deploy, and return the exit code.

    Args:
        settings: A local folder as `model` must be there on every machine.
        replicas: See `parse_replicas`.
        cpus: Cores that a replica reserves.
        address: Of the cluster, as in `ray.init`, or LOCAL.
        num_prefill: Replicas beside them that compute long prompts for them, over the shared `kv_offload_dir`.

    Raises:
        StartError: Ray is missing or refuses, or the replicas cannot start.
    """
    low, high = parse_replicas(replicas)
    if settings.port == 0:
        raise StartError("port: must be greater than 0 with Ray, got 0")
    check_settings(settings)
    if num_prefill and not settings.kv_offload_dir:
        raise StartError("--prefill-replicas: needs kv_offload_dir, a folder that all machines share")
    if cpus <= 0:
        raise StartError(f"--cpus: must be greater than 0, got {cpus:g}")
    for variable, value in {**RAY, **SERVE}.items():
        os.environ.setdefault(variable, value)
    try:
        import ray
        from ray import serve
    except ImportError:
        raise StartError("Ray is missing (pip install 'weft[ray]')") from None
    from weft.server.ray.app import build_app

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    settings = _placed(settings)
    try:
        with _connected(ray, address):
            if address != LOCAL:
                _check_cluster(ray, settings)
            has_gpus = settings.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
            gpus = num_ranks(settings) if has_gpus else None
            build = partial(build_app, cpus=cpus, gpus=gpus)
            prefill, decode = _divided(settings) if num_prefill else (None, settings)
            app = build(decode, min_replicas=low, max_replicas=high)
            prefill_app = build(prefill, min_replicas=num_prefill) if prefill else None
            serve.start(
                proxy_location=_proxy_location(ray),
                http_options={"host": settings.host, "port": settings.port},
                controller_options={"runtime_env": {"env_vars": {name: os.environ[name] for name in SERVE}}},
            )
            _check_listener(serve, settings)
            _run(serve, app, prefill_app)
            url = page_url(settings.host, settings.port)
            print(f"Serving with {replicas} replicas: chat at {url}, API at {url}v1", flush=True)
            if address == LOCAL:
                signal.pause()
    except _StoppedError:
        pass
    return 0


def _placed(settings: Settings) -> Settings:
    """The settings with absolute paths, since a replica runs in another folder. What is not there is a hub id."""

    def place(path: str | None, *, is_new: bool = False) -> str | None:
        found = None if path is None or path in ("ngram", "mtp") else os.path.abspath(os.path.expanduser(path))
        return found if found and (is_new or os.path.exists(found)) else path

    paths: dict[str, object] = {name: place(getattr(settings, name)) for name in ("model", "speculative", "mmproj")}
    paths |= {name: place(getattr(settings, name), is_new=True) for name in ("kv_offload_dir", "data_dir")}
    adapters = {name: place(folder) for name, folder in settings.lora.items()}
    return settings.model_copy(update=paths | {"lora": adapters})


def _run(serve: Any, app: Any, prefill_app: Any | None) -> None:
    """Run the application, and the one that computes prompts for it; without one (None), end that of before."""
    try:
        if prefill_app is None and PREFILL_NAME in serve.status().applications:
            serve.delete(PREFILL_NAME)
        serve.run(app, name=NAME)  # first: it computes prompts itself as long as the other is not there
        if prefill_app is not None:
            serve.run(prefill_app, name=PREFILL_NAME, route_prefix=PREFILL_PATH)
    except RuntimeError as error:
        raise StartError(str(error)) from None


def _divided(settings: Settings) -> tuple[Settings, Settings]:
    """The settings of replicas that compute prompts, and of those that continue them."""
    url = page_url(settings.host, settings.port).rstrip("/") + PREFILL_PATH  # HAProxy on the machine that asks
    return (
        settings.model_copy(update={"kv_role": "prefill", "prefill_urls": ()}),
        settings.model_copy(update={"kv_role": "decode", "prefill_urls": (url,)}),
    )


@contextlib.contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    """Be connected to the cluster. A Ray of its own ends afterwards, with all replicas."""
    is_own = address == LOCAL
    own = {"include_dashboard": False} if is_own else {}
    try:
        ray.init(address, namespace="serve", log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise StartError(f"--address: {address}: {' '.join(str(error).split())}") from None

    def stop(*_: object) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
        raise _StoppedError

    if is_own:  # after Ray has set handlers of its own
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, stop)
    try:
        yield
    finally:
        if is_own:
            from ray import serve

            with contextlib.suppress(serve.exceptions.RayServeException):  # not even started
                for name in (NAME, PREFILL_NAME):
                    serve.delete(name)
        ray.shutdown()


def _check_cluster(ray: Any, settings: Settings) -> None:
    """Refuse a cluster that is open to everybody, and a host at which its machines cannot reach each other."""
    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if len(nodes) > 1 and settings.host.startswith(_LOOPBACK):
        raise StartError(f"host: the {len(nodes)} machines reach no replica at {settings.host}: set --host 0.0.0.0")
    if os.environ["RAY_AUTH_MODE"] == "token" and not ray.get(ray.remote(num_cpus=0)(_wants_token).remote()):
        raise StartError(
            "the cluster wants no token: whoever reaches it runs code on it. Start every node with "
            "RAY_AUTH_MODE=token, or set RAY_AUTH_MODE=disabled here if only you can reach it"
        )


def _proxy_location(ray: Any) -> str:
    """HAProxy on every machine with a replica; on the head alone if nodes share a machine, and so the port."""
    addresses = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    return "EveryNode" if len(set(addresses)) == len(addresses) else "HeadOnly"


def _check_listener(serve: Any, settings: Settings) -> None:
    """Refuse another address than that of a Ray Serve that was there before: it would stay."""
    there = serve.context._get_global_client().http_config
    if (there.host, there.port) != (settings.host, settings.port):
        raise StartError(
            f"port: Ray Serve listens on {there.host} port {there.port} already: give these as --host and --port, or "
            "end it with serve shutdown"
        )


def _wants_token() -> bool:
    """Whether the process of Ray that runs this wants a token."""
    import ray

    return bool(ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.TOKEN)
