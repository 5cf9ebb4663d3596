"""Pictures are fetched from allowed hosts alone, at public addresses, within bounds of time, bytes and redirects."""

import asyncio
import contextlib
import datetime
import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from weft.server.errors import ApiError
from weft.server.pictures import fetch as fetching
from weft.server.pictures.calls import MAX_FILE_BYTES

Answer = Callable[[asyncio.StreamWriter, str], Awaitable[None]]
NAME = "pictures.example"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture
def ask(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    """Fetches from a host that answers so. The loopback address counts as public, unless `addresses` are given."""
    trusted = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(fetching, "ssl_context", lambda: trusted)

    def run(answer: Answer, path: str = "/x.png", *, addresses: list[str] | None = None) -> bytes:
        return asyncio.run(talk(answer, path, addresses))

    async def talk(answer: Answer, path: str, addresses: list[str] | None) -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await answer(writer, head)
            writer.close()

        async def resolve(name: str, port: int) -> list[str]:
            return addresses or ["127.0.0.1"]

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setattr(fetching, "resolve", resolve)
        if addresses is None:
            monkeypatch.setattr(fetching, "is_public", lambda address: True)
        async with server:
            return await fetching.fetch(f"https://{NAME}:{port}{path}", [f"{NAME}:{port}"], "messages[0]")

    return run


def says(head: str, content: bytes = b"") -> Answer:
    async def answer(writer: asyncio.StreamWriter, asked: str) -> None:
        writer.write(f"HTTP/1.1 {head}\r\n\r\n".encode() + content)
        await writer.drain()

    return answer


def test_a_picture_is_fetched(ask: Callable[..., bytes]) -> None:
    heads = []

    async def answer(writer: asyncio.StreamWriter, asked: str) -> None:
        heads.append(asked)
        await says("200 OK\r\nContent-Length: 3", b"pic")(writer, asked)

    assert ask(answer, "/a/b?c=d") == b"pic"
    assert heads[0].startswith("GET /a/b?c=d HTTP/1.0\r\n") and f"Host: {NAME}:" in heads[0]
    assert ask(says("200 OK", b"to its end")) == b"to its end"


def test_a_redirect_is_followed(ask: Callable[..., bytes]) -> None:
    async def answer(writer: asyncio.StreamWriter, asked: str) -> None:
        there = "200 OK" if asked.startswith("GET /there ") else "302 Found\r\nLocation: /there"
        await says(there, b"pic")(writer, asked)

    assert ask(answer) == b"pic"


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (says("404 Not Found"), "its host answers with status 404"),
        (says("302 Found\r\nLocation: /x.png"), "its host redirects more than 3 times"),
        (says("302 Found\r\nLocation: http://169.254.169.254/latest"), "from the hosts in image_hosts alone"),
        (says("302 Found\r\nLocation: https://169.254.169.254/latest"), "from the hosts in image_hosts alone"),
        (says(f"200 OK\r\nContent-Length: {MAX_FILE_BYTES + 1}"), f"at most {MAX_FILE_BYTES} bytes, got 20971521"),
        (says("200 OK", bytes(MAX_FILE_BYTES + 1)), f"at most {MAX_FILE_BYTES} bytes, got more"),
        (says("200 OK\r\nContent-Length: 9", b"short"), "its host says 9 bytes, and sends 5"),
        (says("200 OK\r\nX: " + "a" * 70_000), "its host's answer is no HTTP"),
        (says("OK"), "its host's answer is no HTTP"),
    ],
)
def test_what_a_host_does_wrong_is_told(ask: Callable[..., bytes], answer: Answer, fault: str) -> None:
    with pytest.raises(ApiError) as caught:
        ask(answer)
    assert caught.value.message.startswith("messages[0]: ") and fault in caught.value.message
    assert caught.value.param == "messages[0]"


@pytest.mark.parametrize("starts", ["", "HTTP/1.1 200 OK\r\n\r\n"], ids=["head", "content"])
def test_a_host_that_trickles_is_left(ask: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch, starts: str) -> None:
    monkeypatch.setattr(fetching, "FETCH_S", 0.5)

    async def answer(writer: asyncio.StreamWriter, asked: str) -> None:
        writer.write(starts.encode())
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    with pytest.raises(ApiError, match=r"its host takes more than 0.5 s"):
        ask(answer)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
        *("224.0.0.1", "255.255.255.255", "::1", "fe80::1", "fe80::1%eth0", "fd00::1", "ff02::1", "::"),
        *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "2002:7f00:1::", "64:ff9b::7f00:1"),
        *("64:ff9b:1::7f00:1", "64:ff9b:1:abcd::808:808", "fec0::1", "::7f00:1", "::8.8.8.8"),
    ],
)
def test_an_address_that_is_not_public_is_never_asked(ask: Callable[..., bytes], address: str) -> None:
    async def answer(writer: asyncio.StreamWriter, asked: str) -> None:
        raise AssertionError("it was asked")

    with pytest.raises(ApiError, match="has an address that is not public"):
        ask(answer, addresses=["8.8.8.8", address])


def test_public_addresses_are_public() -> None:
    assert all(fetching.is_public(address) for address in ("8.8.8.8", "1.1.1.1", "2606:4700::1111"))
    assert ipaddress.ip_address("2606:4700::1111").is_global


def test_a_name_is_resolved_once(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that means another address a moment later was the way around such checks."""
    asked: list[Any] = []

    async def resolve(name: str, port: int) -> list[str]:
        return ["8.8.8.8"]

    async def connect(*address: Any, **options: Any) -> Coroutine[Any, Any, Any]:
        asked.append((address, options["server_hostname"]))
        raise ConnectionRefusedError

    monkeypatch.setattr(fetching, "resolve", resolve)
    monkeypatch.setattr(asyncio, "open_connection", connect)
    with pytest.raises(ApiError, match="its host cannot be asked"):
        asyncio.run(fetching.fetch(f"https://{NAME}/x", [NAME], "x"))
    assert asked == [(("8.8.8.8", 443), NAME)]


@pytest.mark.parametrize("url", ["https://other.example/x", f"https://{NAME}:8443/x", f"https://{NAME}.evil.example/x"])
def test_a_host_that_is_not_listed_is_not_resolved(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    async def resolve(name: str, port: int) -> list[str]:
        raise AssertionError("it was resolved")

    monkeypatch.setattr(fetching, "resolve", resolve)
    with pytest.raises(ApiError, match="from the hosts in image_hosts alone"):
        asyncio.run(fetching.fetch(url, [NAME], "x"))
