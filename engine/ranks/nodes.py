"""Brings the ranks of several machines together: a socket for each rank of the others, on which both ends are proven.

The first machine listens only until all others have joined. A joiner is sent a nonce. It answers with one of its own
and what it runs, under a key that never crosses the wire (HMAC-SHA256 of both nonces and the rest), and gets an answer
proven in the same way: empty, or why it is refused. Who cannot prove the key learns nothing, and costs a thread for a
few seconds and less than a page of memory. What follows on the socket, and what the ranks exchange, is neither
encrypted nor signed: it is for a network of these machines' own. Imports no torch.
"""

import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from weft.engine.wire.errors import ModelError
from weft.engine.wire.machine import package_version
from weft.engine.wire.messages import EngineOptions, frame, receive, receive_exactly
from weft.engine.wire.options import find_adapter
from weft.engine.wire.tokenizer_files import describe

HANDSHAKE_S = 5.0
"""Longest time that a joiner may take to prove itself, or the first machine to answer."""
_MAX_BYTES = 16 << 10
_MAX_STRANGERS = 64
"""Connections at once that have not proven themselves."""
_NONCE_BYTES = 32
_MAC_BYTES = 32
_POLL_S = 0.05
_RETRY_S = 1.0
_MAX_TOLD = 100
_OWN = ("model", "node_rank", "master_addr", "nodes_token", "log_format", "kv_events_topic", "speculative")
"""Options in which machines may differ: names and folders of their own, and what the first alone uses."""
_SAMPLES = 16
_SAMPLE_BYTES = 4096
_SIOCGIFADDR = 0x8915

logger = logging.getLogger(__name__)


class RefusedError(Exception):
    """A machine may not join; the message says why."""


class Ended(NamedTuple):
    """A rank of another machine has ended by itself: its exit code, or minus the signal that killed it."""

    code: int

    def encode(self) -> bytes:
        """As `links.encode`, which needs torch."""
        return frame(b"\0" + msgspec.msgpack.encode(self))


class _Hello(msgspec.Struct, frozen=True):
    """What a joiner runs, for one of its ranks."""

    rank: int
    facts: dict[str, str]


def facts(options: EngineOptions) -> dict[str, str]:
    """What must be the same on all machines, by name. Reads a little of every file of the weights."""
    asked = {name: str(value) for name, value in msgspec.structs.asdict(options).items() if name not in _OWN}
    versions = {name: package_version(name) or "" for name in ("weft", "torch")}
    adapters = {f"adapter {name}": find_adapter(name, Path(folder)).content for name, folder in options.lora.items()}
    return {**versions, "model": _fingerprint(Path(options.model)), **adapters, **asked}


def _fingerprint(model: Path) -> str:
    config, elsewhere = describe(model / "config.json")
    digest = hashlib.blake2b(config, digest_size=8)
    inside = sorted(path for pattern in ("*.safetensors", "*.bin") for path in model.glob(pattern))
    for path in (*inside, *elsewhere):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(index * size // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _sign(options: EngineOptions, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest((options.nodes_token or "").encode(), b"".join((role, *parts)), "sha256")


class Gathering:
    """The first machine while it waits for the others."""

    def __init__(self, options: EngineOptions) -> None:
        """Nobody can join before `wait`."""
        self._options = options
        self._facts = facts(options)
        self._joined: dict[int, socket.socket] = {}
        self._is_complete = False  # and what has joined is the caller's
        self._lock = threading.Lock()
        self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
        self._told: set[str] = set()

    def wait(self, show: Callable[[int], None]) -> tuple[str, list[socket.socket]]:
        """Return this machine's address, and the sockets of all ranks of the others in their order.

        Args:
            show: Called with the number of machines that are missing, when it changes.

        Raises:
            ModelError: The address is not one of this machine, or taken.
        """
        here, size, num_missing = len(self._options.ranks_here), self._options.num_ranks, -1
        with self._listen() as server:
            while num_missing:
                with self._lock:
                    missing = {rank // here for rank in range(here, size) if self._is_missing(rank)}
                    self._is_complete = not missing
                if len(missing) != num_missing:
                    num_missing = len(missing)
                    show(num_missing)
                    logger.info("%d of %d machines are here", self._options.nnodes - num_missing, self._options.nnodes)
                try:
                    peer, address = server.accept()
                except TimeoutError:
                    continue
                if self._strangers.acquire(blocking=False):
                    threading.Thread(target=self._meet, args=(peer, address[0]), daemon=True).start()
                else:
                    peer.close()
            return server.getsockname()[0], [self._joined[rank] for rank in range(here, size)]

    def _listen(self) -> socket.socket:
        host, port = self._options.master_addr or "", self._options.master_port
        while True:
            try:
                family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                server = socket.create_server((str(address[0]), port), family=family, backlog=_MAX_STRANGERS)
            except socket.gaierror as error:  # a cluster may not know this machine's name yet
                self._tell(f"master_addr {host} is not known: {error.strerror}; trying again")
                time.sleep(_RETRY_S)
            except OSError as error:
                fault = os.strerror(error.errno or 0)
                raise ModelError(f"cannot listen on master_addr {host}, master_port {port}: {fault}") from None
            else:
                server.settimeout(_POLL_S)
                return server

    def _meet(self, peer: socket.socket, address: str) -> None:
        try:
            self._admit(peer)
        except (OSError, EOFError, ValueError, RefusedError) as error:
            self._tell(f"{address} cannot join: {error or 'it has left'}")
            peer.close()
        finally:
            self._strangers.release()

    def _is_missing(self, rank: int) -> bool:
        """Whether a rank has not joined, or has left again, while the lock is held."""
        if (peer := self._joined.get(rank)) is None:
            return True
        poll = select.poll()
        poll.register(peer, select.POLLRDHUP)
        if not poll.poll(0):
            return False
        self._joined.pop(rank).close()
        return True

    def _admit(self, peer: socket.socket) -> None:
        """Take the rank behind a socket. Raises RefusedError, OSError, EOFError, or ValueError for anything else."""
        options, deadline = self._options, time.monotonic() + HANDSHAKE_S
        nonce = secrets.token_bytes(_NONCE_BYTES)
        peer.settimeout(HANDSHAKE_S)
        peer.sendall(nonce)
        said = receive(peer, _MAX_BYTES, deadline)
        theirs, mac, body = said[:_NONCE_BYTES], said[_NONCE_BYTES:][:_MAC_BYTES], said[_NONCE_BYTES + _MAC_BYTES :]
        if not hmac.compare_digest(mac, _sign(options, b"join", nonce, theirs, body)):
            raise RefusedError("it has another nodes_token")
        hello = msgspec.msgpack.decode(body, type=_Hello)
        with self._lock:
            fault = _difference(self._facts, hello.facts) or self._fault(hello.rank)
            peer.sendall(frame(_sign(options, b"answer", theirs, nonce, fault.encode()) + fault.encode()))
            if fault:
                raise RefusedError(fault)
            keep_alive(peer)
            self._joined[hello.rank] = peer

    def _fault(self, rank: int) -> str:
        """Why a rank may not join now, while the lock is held."""
        if rank not in range(len(self._options.ranks_here), self._options.num_ranks):
            return f"there is no rank {rank} on another machine"
        if self._is_complete:
            return "all machines have joined"
        if self._is_missing(rank):
            return ""
        return f"rank {rank} has joined from {self._joined[rank].getpeername()[0]}: node_rank must differ"

    def _tell(self, what: str) -> None:
        """Log it once: a machine that is refused tries again."""
        if what not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(what)
            logger.warning("%s", what)


def _difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    return "; ".join(
        f"{name} is {theirs.get(name)} on the joining machine, {ours.get(name)} on the first"
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name)
    )


def join(options: EngineOptions, rank: int, facts: Mapping[str, str]) -> socket.socket:
    """Join the first machine for a rank of this one.

    Raises:
        OSError: It cannot be reached, or does not answer in time.
        RefusedError: It refuses, or cannot prove that it has the same token.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    peer = socket.create_connection((options.master_addr or "", options.master_port), timeout=HANDSHAKE_S)
    try:
        theirs, nonce = receive_exactly(peer, _NONCE_BYTES, deadline), secrets.token_bytes(_NONCE_BYTES)
        body = msgspec.msgpack.encode(_Hello(rank, dict(facts)))
        peer.sendall(frame(nonce + _sign(options, b"join", theirs, nonce, body) + body))
        try:
            answer = receive(peer, _MAX_BYTES, deadline)
        except (EOFError, ValueError):
            raise RefusedError("it has another nodes_token, or is not Weft") from None
        mac, fault = answer[:_MAC_BYTES], answer[_MAC_BYTES:]
        if not hmac.compare_digest(mac, _sign(options, b"answer", nonce, theirs, fault)):
            raise RefusedError("it has another nodes_token, or is not Weft")
        if fault:
            raise RefusedError(fault.decode("utf-8", "replace"))
        keep_alive(peer)
        # The first machine always reads. There, this would cut off a rank that does not read during a long step.
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * HANDSHAKE_S))
    except BaseException:
        peer.close()
        raise
    return peer


def keep_alive(peer: socket.socket) -> None:
    """Send at once, and find within 5 s that the other machine is gone without a word, while it owes no answer to data.

    If it does, TCP alone would try for 15 minutes. On the first machine `Link.recv` finds it then.
    """
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 4)):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)


def start_rank(link: socket.socket, model: str) -> "subprocess.Popen[bytes]":
    """Start the process of a rank, a child that dies with the calling thread; model is its folder."""
    command = [sys.executable, "-P", "-m", "weft.engine.start.launch", "weft.engine.start.rank_process"]
    arguments = [str(link.fileno()), str(os.getpid()), model]
    return subprocess.Popen([*command, *arguments], stdin=subprocess.DEVNULL, pass_fds=[link.fileno()])


def interface(host: str) -> str | None:
    """The network interface by which an address is reached, for gloo and NCCL; None if it has no IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))  # sends nothing
        except OSError:
            return None
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if found[20:24] == own:
                return name
    return None
