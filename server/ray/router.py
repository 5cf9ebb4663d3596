"""Chooses a replica for each request, over `PrefixPolicy`, inside Ray Serve.

HAProxy sends the head of a body to a `RouterApp` and gets the name of a replica, to which it then sends the request. A
`RouterApp` asks Ray for it, and Ray the `PrefixRequestRouter` in the same process, which knows the running replicas and
what they last told. Neither sees an answer.
"""

import re
import time
from typing import Any

import msgspec
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.server.ray.policy import PrefixPolicy, ReplicaView

_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.){0,1000}")')
"""The first member of that name with a text as its value. A body may be cut, so that it cannot be parsed, and a wrong
guess only makes a worse choice."""


class _Body(msgspec.Struct):
    """What of a body decides how its prompt begins, as it was sent."""

    model: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


def prompt_text(body: bytes) -> bytes:
    """What prompts that begin alike have in common; of a body that is cut or no JSON object, the body."""
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except msgspec.DecodeError:
        return body
    return b"".join(getattr(fields, name) for name in _Body.__struct_fields__)


def model_name(body: bytes) -> str | None:
    """The model that a body asks for; None if it names none, or is cut before it does."""
    found = _MODEL.search(body)
    try:
        return msgspec.json.decode(found[1], type=str) if found is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]  # mypy does not read Ray
    """Ray's interface to the policy. Lives in the process of a `RouterApp`."""

    def initialize_state(self, **_: Any) -> None:
        """Start with a policy that knows no prefix."""
        self._policy = PrefixPolicy()
        self._views: tuple[ReplicaView, ...] = ()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The one replica that should serve the request, whose text is its first argument."""
        args = pending_request.args if pending_request else []
        text, model = args if len(args) == 2 and isinstance(args[0], bytes) else (b"", None)  # from Ray's own proxy
        views = tuple(_view(replica) for replica in candidate_replicas)
        if views != self._views:  # the policy is quick as long as it gets the same tuple
            self._views = views
        chosen = self._policy.choose(self._views, text, time.monotonic(), model)
        return [[replica] for replica in candidate_replicas if chosen and replica.replica_id.unique_id == chosen.id]


def _view(replica: RunningReplica) -> ReplicaView:
    """What `WeftReplica.record_routing_stats` told; nothing yet of a new replica."""
    stats = replica.routing_stats or {}
    return ReplicaView(
        replica.replica_id.unique_id,
        running=int(stats.get("running", 0)),
        waiting=int(stats.get("waiting", 0)),
        kv_usage=float(stats.get("kv_usage", 0.0)),
        alive=bool(stats.get("alive", True)),
        models=tuple(stats.get("models", ())),
        loras=tuple(stats.get("loras", ())),
    )


class RouterApp:
    """Becomes the deployment class of routers by `serve.ingress()`: `POST /internal/route`, as HAProxy asks it."""

    def __init__(self, weft: DeploymentHandle[Any]) -> None:
        """Take the deployment whose replicas to choose from."""
        self._handle = weft

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """The ASGI app that Ray serves. Starts to learn of the replicas."""
        self._handle._init()
        return Starlette(routes=[Route("/internal/route", self._choose, methods=["POST"])])

    async def _choose(self, request: Request) -> Response:
        """Where the request with this body is to go; 503 if there is no replica."""
        body = await request.body()
        try:
            # Without a reservation: HAProxy, not Ray, sends the request.
            async with self._handle.choose_replica(prompt_text(body), model_name(body), _reserve=False) as selection:
                return JSONResponse({"replica_id": selection._replica.replica_id.to_full_id_str()})
        except (RuntimeError, DeploymentUnavailableError) as error:
            return JSONResponse({"detail": str(error)}, 503)
