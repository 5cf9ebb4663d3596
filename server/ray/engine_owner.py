"""The engine of a Ray replica: what `weft serve`'s supervisor is to its servers, without the servers.

The supervisor is a process of its own, which this file also is: `python -m weft.server.ray.engine_owner PID`. A replica
has many threads, and may be killed at any time: it can neither fork safely nor tidy up. The supervisor restarts the
engine, keeps the record of crashes, and at the replica's end (SIGTERM from the kernel) ends the engine and removes the
runtime folder. Imports neither torch nor Ray.
"""

import asyncio
import collections
import os
import pathlib
import subprocess
import sys
import threading
import time

from weft.engine.wire import errors as logs
from weft.server.models.engine_client import SocketEngineClient
from weft.server.settings import Settings, StartError
from weft.server.supervise.runtime_folder import engine_folder
from weft.server.supervise.spawn import python_command
from weft.server.supervise.supervisor import EXIT_CANNOT_START, FolderLostError, run_engine

POLL_S = 0.02
MIN_PATIENCE_S = 60.0
"""How long an engine may be away before its replica counts as dead, at the least; else three times its first start."""

_NUM_LINES = 20


class EngineError(Exception):
    """The engine of this replica is gone for good; the message says why."""


class EngineOwner:
    """One engine and the connection to it. Lives on one event loop, whose thread must live as long as the process.

    Attributes:
        runtime_dir: Where it meets the engine's supervisor; set by `start`.
    """

    runtime_dir: pathlib.Path

    def __init__(self, settings: Settings) -> None:
        """Start nothing. `settings.model` is the checkpoint's folder."""
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None  # None: not started
        self._lines: collections.deque[str] = collections.deque(maxlen=_NUM_LINES)
        self._client: SocketEngineClient | None = None  # None: not started
        self._seen_time = 0.0  # when the engine was last seen alive
        self.patience_s = MIN_PATIENCE_S

    async def start(self) -> tuple[SocketEngineClient, str]:
        """Start the engine, wait until it serves, and return the connection and the data folder.

        PR_SET_PDEATHSIG follows the thread that calls this.

        Raises:
            EngineError: It cannot start.
        """
        start_time = time.monotonic()
        command = [*python_command("weft.server.ray.engine_owner"), str(os.getpid())]
        pipe = subprocess.PIPE
        self._process = process = subprocess.Popen(  # whatever locale Ray has, and whatever libraries log
            command, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace"
        )
        assert process.stdin is not None and process.stdout is not None
        self._reader = threading.Thread(target=self._forward, args=(process,), daemon=True)
        self._reader.start()
        process.stdin.write(self._settings.model_dump_json())
        process.stdin.close()
        with process.stdout:
            runtime_dir, data_dir = [await asyncio.to_thread(process.stdout.readline) for _ in range(2)]
        if not data_dir:
            raise self._failure()
        self.runtime_dir = pathlib.Path(runtime_dir.rstrip("\n"))
        self._client = await SocketEngineClient(engine_folder(self.runtime_dir, 0)).__aenter__()
        while not self.is_alive:
            if process.poll() is not None:
                raise self._failure()
            await asyncio.sleep(POLL_S)
        self.patience_s = max(MIN_PATIENCE_S, 3 * (time.monotonic() - start_time))
        return self._client, data_dir.rstrip("\n")

    def _forward(self, process: "subprocess.Popen[str]") -> None:
        """Pass on what the processes log, and keep the end of it."""
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self._lines.append(line)
                sys.stderr.write(line)

    def _failure(self) -> EngineError:
        assert self._process is not None
        code = self._process.wait()
        self._reader.join(1.0)  # the engine of a supervisor that was killed may still write
        said = "".join(self._lines).strip()
        return EngineError(f"the engine has ended (exit code {code}): {said or 'it said nothing'}")

    @property
    def is_alive(self) -> bool:
        """Whether the engine is connected and serves."""
        client = self._client
        is_alive = client is not None and client.info is not None and client.status().is_alive
        if is_alive:
            self._seen_time = time.monotonic()
        return is_alive

    async def wait_alive(self, timeout_s: float) -> None:
        """Return once the engine serves, or after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while not self.is_alive and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    def check(self) -> None:
        """Raise EngineError if the engine has ended for good, or is away for longer than a restart takes."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise self._failure()
        away_s = 0.0 if self.is_alive else time.monotonic() - self._seen_time
        if away_s > self.patience_s:
            raise EngineError(f"the engine has been away for {away_s:.0f} s")

    async def stop(self) -> None:
        """End the engine, and wait until its folder is removed. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)


def main() -> int:
    """Run an engine for the process with the given id, with the settings on standard input."""
    settings = Settings.model_validate_json(sys.stdin.buffer.read())
    logs.configure(settings.log_format, "supervisor")

    def tell(*folders: pathlib.Path) -> None:
        print(*folders, sep="\n", flush=True)
        os.dup2(2, 1)  # what else is printed belongs to the log

    try:
        return run_engine(settings, int(sys.argv[1]), tell)
    except StartError as error:
        print(f"weft: error: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    except FolderLostError:
        return 1


if __name__ == "__main__":
    sys.exit(main())
