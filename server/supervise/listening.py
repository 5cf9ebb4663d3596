"""The address that servers listen on: binds it, and says who has it and which port is free if that fails."""

import errno
import os
import socket
from pathlib import Path

from weft.server.settings import StartError

_LISTENS = "0A"
"""The state in /proc/net/tcp of a socket that listens."""

_NUM_TRIED = 100
"""Ports after one that is taken, of which one is probably free."""


def listen(host: str, port: int) -> socket.socket:
    """Bind the socket on which the servers accept connections.

    Raises:
        StartError: The port is taken, or the address is not one of this machine.
    """
    try:
        return _bind(host, port)
    except OSError as error:
        number = error.errno or 0  # negative if the name does not resolve
        fault = (os.strerror(number) if number > 0 else error.strerror or str(error)).lower()
        if number == errno.EADDRINUSE:
            fault += f" by {owner}" if (owner := port_owner(port)) else ""
            fault += f"; port {free} is free" if (free := _free_port(host, port)) else ""
        raise StartError(f"cannot listen on {host} port {port}: {fault} (--host, --port)") from None


def _bind(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server((str(address[0]), port), family=family, backlog=2048)


def _free_port(host: str, taken: int) -> int | None:
    """The next port that is free at this moment."""
    for port in range(taken + 1, min(taken + _NUM_TRIED, 1 << 16)):
        try:
            _bind(host, port).close()
        except OSError:
            continue
        return port
    return None


def port_owner(port: int, proc: Path = Path("/proc")) -> str | None:
    """Who listens on a TCP port, such as "weft (process 7)"; None if nobody, or a process of another user."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        path = proc / "net" / table
        rows = [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
        sockets |= {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTENS and row[1].endswith(f":{port:04X}")}
    owners = []
    for process in proc.glob("[0-9]*"):
        try:
            if any(os.readlink(file) in sockets for file in (process / "fd").iterdir()):
                # After the name, which may hold anything, field 22 (proc_pid_stat(5)): the start, in clock ticks.
                started = int((process / "stat").read_text().rpartition(")")[2].split()[19])
                owners.append((started, int(process.name), (process / "comm").read_text().strip()))
        except OSError:  # the process has ended, or is another user's
            continue
    if not owners:
        return None
    # The oldest: the supervisor has started before its children. Ids begin again at their limit.
    _, pid, name = min(owners)
    return f"{name} (process {pid})"


def page_url(host: str, port: int, scheme: str = "http") -> str:
    """The chat page's address for a browser on this machine; "all interfaces" becomes the loopback address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}/" if ":" in host else f"{scheme}://{host}:{port}/"
