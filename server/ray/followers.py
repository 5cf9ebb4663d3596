"""The other machines of a replica whose engine needs several: an actor for each of the other bundles of its group.

A follower runs what `weft serve` runs on a machine behind the first. Ray starts one that has died again, on another
machine if its own is gone; the engine waits for it meanwhile. All end with the replica.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import threading

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from weft.server.settings import Settings
from weft.server.supervise import checkpoint
from weft.server.supervise.spawn import python_command

_STOP_S = 5.0


class Followers:
    """The followers of a replica.

    Attributes:
        settings: Those of the replica's own machine, which the followers join.
    """

    def __init__(self, settings: Settings) -> None:
        """Start them; must be called in the replica. Each resolves `model` on its own machine."""
        host = ray.util.get_node_ip_address()
        self._port = socket.socket()  # kept for the engine, which alone listens there
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind((host, 0))
        port = self._port.getsockname()[1]
        meeting = {"master_addr": host, "master_port": port, "nodes_token": secrets.token_hex(32)}
        self.settings = settings.model_copy(update=meeting)
        group = ray.util.get_current_placement_group()
        self._actors = []
        for rank in range(1, settings.nnodes):
            bundle = group.bundle_specs[rank]
            actor = ray.remote(Follower).options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            told = self.settings.model_copy(update={"node_rank": rank})
            self._actors.append(actor.remote(told.model_dump(mode="json")))

    async def stop(self) -> None:
        """End them, and wait until their folders are removed; the engine must have ended."""
        for actor in self._actors:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # its machine is gone
                await asyncio.wait_for(actor.stop.remote(), _STOP_S)


class Follower:
    """A machine behind the first, as an actor."""

    def __init__(self, settings: dict[str, object]) -> None:
        """Find the model on this machine, or fetch it, and follow; `settings` as `Settings` dumps them."""
        asked = Settings.model_validate(settings)
        names = asked.served_model_name or (checkpoint.served_name(asked.model),)
        found = asked.model_copy(update=checkpoint.find(asked)).model_copy(update={"served_model_name": names})
        command = [*python_command("weft.server.ray.engine_owner"), str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(found.model_dump_json().encode())
        self._is_stopped = False
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        self._process.wait()
        if not self._is_stopped:
            os._exit(1)  # so that Ray starts another one

    def stop(self) -> None:
        """End, and wait until the folder is removed."""
        self._is_stopped = True
        self._process.terminate()
        self._process.wait()
