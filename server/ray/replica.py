"""A replica of Ray Serve: Weft's own front end over an engine of its own.

Ray calls what has a name of Ray's. While the engine is restarted, requests are held instead of refused: a replica that
refuses at once has the shortest queue, and would draw all requests to it. They count as running meanwhile, so that
routers look elsewhere. Imports no Ray, unless an engine needs several machines.
"""

import asyncio
import pathlib
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from weft.server.app.app import create_app
from weft.server.http.middleware import METRICS_PATH, OPEN_PATHS
from weft.server.models.fleet import Fleet
from weft.server.models.other_clients import with_prefill
from weft.server.models.served_model import LiveModels, served_model
from weft.server.ray.engine_owner import EngineOwner
from weft.server.resolve import check_adapters
from weft.server.settings import Settings, StartError
from weft.server.supervise import checkpoint
from weft.server.text.tokenizer import Tokenizer

_LOOKING = OPEN_PATHS | {METRICS_PATH, "/stats"}


def check_settings(settings: Settings) -> None:
    """Refuse what a replica cannot do. Raises StartError."""
    if settings.models:
        raise StartError("models: a replica serves one model: deploy one, named as MODEL")
    if settings.admin_key:
        raise StartError("admin_key: the model of a replica cannot be managed: deploy again instead")
    if settings.ssl_certfile is not None:
        raise StartError("ssl_certfile: replicas speak HTTP: end TLS in front of Ray")
    if (number := settings.server_processes) > 1:
        raise StartError(f"server_processes: a replica serves by itself, got {number}: take more replicas instead")
    if settings.node_rank or settings.master_addr or settings.nodes_token:
        raise StartError("node_rank, master_addr, nodes_token: with Ray a replica finds its machines itself")


def num_ranks(settings: Settings) -> int:
    """Processes that compute the model of a replica, each with a GPU of its own where there are any."""
    return settings.tensor_parallel_size * settings.pipeline_parallel_size


class WeftReplica:
    """Becomes a deployment class by `serve.ingress()`."""

    def __init__(self, settings: dict[str, object]) -> None:
        """Start nothing; `settings` as `Settings` dumps them."""
        self._settings = Settings.model_validate(settings)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """The ASGI app that Ray serves. Finds the model on this machine, or fetches it, and starts its engine.

        Raises:
            StartError: The model is missing here.
            EngineError: The engine cannot start.
        """
        names = self._settings.served_model_name or (checkpoint.served_name(self._settings.model),)
        if self._settings.nnodes > 1:
            from weft.server.ray.followers import Followers  # imports Ray

            self._followers = Followers(self._settings)
            self._settings = self._followers.settings
        found = self._settings.model_copy(update=await asyncio.to_thread(checkpoint.find, self._settings))
        found = found.model_copy(update={"served_model_name": names, "api_pulls": bool(found.api_pulls)})
        check_adapters(found)
        self._owner = EngineOwner(found)
        starting = asyncio.create_task(self._owner.start())
        tokenizer = await asyncio.to_thread(Tokenizer.load, pathlib.Path(found.model or ""))
        self._client, data_dir = await starting
        found = found.model_copy(update={"data_dir": data_dir})
        fleet = Fleet(self._owner.runtime_dir, found)
        client = with_prefill(names[0], self._client, found)
        self._models = LiveModels({names[0]: served_model(client, tokenizer, found)}, fleet)
        return HoldMiddleware(create_app(self._models, found, fleet), self._owner)

    async def check_health(self) -> None:
        """Raise EngineError once the replica must be replaced. A restart of its engine is no reason."""
        self._owner.check()

    async def record_routing_stats(self) -> dict[str, Any]:
        """What routers know of the replica."""
        status = self._client.status()
        return {
            "models": list(self._models),
            "loras": list(status.loras.resident),
            "alive": float(self._owner.is_alive),
            "running": status.num_requests_running,
            "waiting": status.num_requests_waiting,
            "kv_usage": status.num_used_blocks / max(status.num_blocks, 1),
        }

    async def record_autoscaling_stats(self) -> dict[str, Any]:
        """What policies of autoscaling know of the replica, besides the requests that Ray counts."""
        stats = await self.record_routing_stats()
        return {name: stats[name] for name in ("running", "waiting", "kv_usage")}

    async def __del__(self) -> None:
        """Ray awaits it after the last request."""
        if hasattr(self, "_owner"):
            await self._owner.stop()
        if hasattr(self, "_followers"):
            await self._followers.stop()


class HoldMiddleware:
    """Holds requests while the engine is away, as long as a restart takes; then the app refuses them."""

    def __init__(self, app: ASGIApp, owner: EngineOwner) -> None:
        self._app = app
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope["path"] not in _LOOKING and not self._owner.is_alive:
            await self._owner.wait_alive(self._owner.patience_s)
        await self._app(scope, receive, send)
