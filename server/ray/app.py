"""The application of Ray Serve: replicas that serve HTTP themselves, and the routers that HAProxy asks for one.

Needs `weft[ray]`, and `ENVIRONMENT` in the process that builds it and in Ray's own: `weft ray deploy` sees to both.
Config files of Ray Serve, such as in KubeRay's RayService, name `weft.server.ray.app:build`; there every node needs
`environment.SERVE` and `environment.RAY` in its environment.
"""

import inspect
import os
from typing import Any

from ray import serve
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY
from ray.serve.config import RequestRouterConfig

from weft.server.ray.replica import WeftReplica, check_settings, num_ranks
from weft.server.ray.router import PrefixRequestRouter, RouterApp
from weft.server.resolve import resolve
from weft.server.settings import Settings, StartError

DRAIN_MARGIN_S = 10.0
"""Ray kills a replica that drains this much longer than drain_timeout_s."""
MAX_REQUESTS = 100_000
"""Of a replica and a router. Weft itself refuses what is too much (max_num_waiting), and says so in the API's words."""
STATS_PERIOD_S = 0.5
"""How often a router hears of a replica."""
UPSCALE_DELAY_S = 5.0
HEALTH_PERIOD_S = 1.0
HEALTH_TIMEOUT_S = 30.0


def build_app(
    settings: Settings,
    *,
    min_replicas: int = 1,
    max_replicas: int | None = None,
    cpus: float = 1.0,
    gpus: int | None = None,
    target_requests: float = 16.0,
    downscale_delay_s: float = 120.0,
) -> serve.Application:
    """An application for `serve.run` that serves one model.

    Args:
        settings: Each replica resolves `model` on its own machine. host and port belong to Ray's HTTP options.
        min_replicas: The number of replicas, or its lower bound.
        max_replicas: With more than min_replicas, Ray chooses the number by load; None: as many as min_replicas.
        cpus: Cores that a replica reserves on each of its machines. Ranks run on them, if there are no GPUs.
        gpus: GPUs that a replica reserves on all of them; None: with device cuda one for each rank, else none.
        target_requests: With a range of replicas: requests per replica that Ray aims at.
        downscale_delay_s: How long there must be less to do before a replica goes.

    Raises:
        StartError: A number is out of bounds, Ray runs without HAProxy, or as `check_settings` raises it.
    """
    max_replicas = min_replicas if max_replicas is None else max_replicas
    if not 1 <= min_replicas <= max_replicas:
        raise StartError(f"replicas: must be at least 1 and in order, got {min_replicas} to {max_replicas}")
    if not RAY_SERVE_ENABLE_HA_PROXY:
        raise StartError("RAY_SERVE_ENABLE_HA_PROXY must be 1 before Ray is imported: see server/ray/deploy.py")
    check_settings(settings)
    if gpus is None:
        gpus = num_ranks(settings) if settings.device == "cuda" else 0
    if gpus % settings.nnodes:
        raise StartError(f"gpus: must be a multiple of nnodes, {settings.nnodes}, got {gpus}")
    gpus //= settings.nnodes
    replicas: dict[str, Any] = {"num_replicas": min_replicas}
    if max_replicas > min_replicas:
        bounds = {"min_replicas": min_replicas, "max_replicas": max_replicas}
        aims = {"target_ongoing_requests": target_requests, "downscale_delay_s": downscale_delay_s}
        replicas = {
            "autoscaling_config": bounds | aims | {"upscale_delay_s": UPSCALE_DELAY_S, "metrics_interval_s": 1.0}
        }
    if num_ranks(settings) > 1:  # those of a machine are children of one process
        bundle = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
        strategy = "STRICT_PACK" if settings.nnodes == 1 else "STRICT_SPREAD"
        replicas |= {"placement_group_bundles": [bundle] * settings.nnodes, "placement_group_strategy": strategy}
    weft = serve.deployment(serve.ingress()(WeftReplica)).options(
        name="Weft",
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        max_ongoing_requests=MAX_REQUESTS,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=settings.drain_timeout_s + DRAIN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.2,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRequestRouter, request_routing_stats_period_s=STATS_PERIOD_S
        ),
        **replicas,
    )
    app = weft.bind(settings.model_dump(mode="json"))
    router = serve.deployment(serve.ingress()(RouterApp)).options(
        name="Router", max_ongoing_requests=MAX_REQUESTS, ray_actor_options={"num_cpus": 0}
    )
    return app._with_ingress_request_router(router.bind(app))


_OF_RAY = inspect.signature(build_app).parameters.keys() - {"settings"}


def build(args: dict[str, Any]) -> serve.Application:
    """The application with the file's `args`: what `build_app` takes, and settings, which beat the environment's.

    Raises:
        StartError: A name is unknown, or as `resolve` and `build_app` raise it.
    """
    if unknown := args.keys() - _OF_RAY - Settings.model_fields.keys():
        raise StartError(f"args: no such setting: {min(unknown)}")
    if "port" in args:
        raise StartError(f"args: port: Ray listens, at the port of http_options, got {args['port']}")
    settings = {name: value for name, value in args.items() if name not in _OF_RAY}
    of_ray = {name: value for name, value in args.items() if name in _OF_RAY}
    return build_app(resolve(settings, os.environ).settings, **of_ray)
