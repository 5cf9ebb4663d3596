"""HTTPS as an operator sets it up, with a certificate that is made here."""

import contextlib
import datetime
import ipaddress
import json
import pathlib
import signal
import socket
import ssl
import time
from collections.abc import Iterator

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, Serve, serving

ENDLESS = {"prompt": "Once", "max_tokens": 90_000, "ignore_eos": True, "stream": True}


class Files:
    """A certificate and its key, made anew by `make`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.certfile, self.keyfile = folder / "tls.crt", folder / "tls.key"
        self.make()

    def make(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "weft")])
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        signed = builder.add_extension(address, critical=False).sign(key, hashes.SHA256())
        self.certfile.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        kind, none = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        self.keyfile.write_bytes(key.private_bytes(serialization.Encoding.PEM, kind, none))
        self.trust = ssl.create_default_context(cadata=self.certfile.read_text())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, files: Files, long_model: str) -> Iterator[LiveServer]:
    environment = {"WEFT_SSL_CERTFILE": str(files.certfile), "WEFT_SSL_KEYFILE": str(files.keyfile)}
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(
        log, long_model, ready=False, WEFT_HEADER_TIMEOUT_S="2", WEFT_DRAIN_TIMEOUT_S="1", **environment
    ) as server:
        deadline = time.monotonic() + TIMEOUT_S
        while "Serving" not in log.read_text():
            assert server.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield server


def url(server: LiveServer, path: str = "") -> str:
    return f"https://127.0.0.1:{server.port}{path}"


def test_answers_come_over_tls_and_bounds_hold(server: LiveServer, files: Files) -> None:
    assert f"chat at {url(server)}/, API at {url(server)}/v1" in server.log.read_text()
    with httpx.Client(verify=files.trust, timeout=TIMEOUT_S) as client:
        assert client.get(url(server, "/ready")).status_code == 200
        body = {"prompt": "Once", "max_tokens": 3, "stream": True}
        with client.stream("POST", url(server, "/v1/completions"), json=body) as reply:
            assert [*reply.iter_lines()][-2] == "data: [DONE]"
        assert client.get(url(server, "/health"), headers={"X-Long": "x" * 70_000}).status_code == 431
        with contextlib.closing(connect(server, files)) as slow:  # not even a request line
            assert slow.recv(1) == b""
        with contextlib.closing(connect(server, files)) as slow:
            slow.sendall(b"GET / HTTP/1.1\r\nX: ")
            assert slow.recv(65536).startswith(b"HTTP/1.1 408 ")
        with socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as silent:  # no handshake
            assert silent.recv(1) == b""
        with pytest.raises(httpx.TransportError):
            httpx.get(server.base_url)
    assert "Traceback" not in server.log.read_text()


def connect(server: LiveServer, files: Files) -> ssl.SSLSocket:
    connection = socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)
    return files.trust.wrap_socket(connection, server_hostname="127.0.0.1")


def test_a_client_that_leaves_is_noticed(server: LiveServer, files: Files) -> None:
    with httpx.Client(verify=files.trust, timeout=TIMEOUT_S) as client:
        with client.stream("POST", url(server, "/v1/completions"), json=ENDLESS) as reply:
            next(reply.iter_lines())
        deadline = time.monotonic() + TIMEOUT_S
        while "weft:num_requests_running{" not in (text := client.get(url(server, "/metrics")).text) or not any(
            line.startswith("weft:num_requests_running{") and line.endswith(" 0.0") for line in text.splitlines()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_renewed_certificate_is_used_from_the_next_connection_on(server: LiveServer, files: Files) -> None:
    """As cert-manager and KServe renew it. One without its key is not taken."""
    old = files.trust
    files.keyfile.write_bytes(b"half a k")
    assert httpx.get(url(server, "/ready"), verify=old, timeout=TIMEOUT_S).status_code == 200
    assert "The certificate stays as it was: ssl_certfile, ssl_keyfile: " in server.log.read_text()
    files.make()
    assert httpx.get(url(server, "/ready"), verify=files.trust, timeout=TIMEOUT_S).status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(url(server, "/ready"), verify=old)


def test_a_drain_ends_streams_over_tls(server: LiveServer, files: Files) -> None:
    """The last that the server does."""
    with (
        httpx.Client(verify=files.trust, timeout=TIMEOUT_S) as client,
        client.stream("POST", url(server, "/v1/completions"), json=ENDLESS) as reply,
    ):
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert server.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "ssl_keyfile: {keyfile} cannot be read: no such file or directory"),
        ("another", "ssl_certfile, ssl_keyfile: {certfile} and {keyfile} are no certificate with its key: "),
        ("alone", "WEFT_SSL_CERTFILE: ssl_certfile needs ssl_keyfile"),
    ],
)
def test_files_that_cannot_serve_are_named(serve: Serve, tmp_path: pathlib.Path, fault: str, message: str) -> None:
    files = Files(tmp_path)
    environment = {"WEFT_SSL_CERTFILE": str(files.certfile), "WEFT_SSL_KEYFILE": str(files.keyfile)}
    if fault == "missing":
        files.keyfile.unlink()
    elif fault == "another":
        files.keyfile.write_text("no key")
    else:
        del environment["WEFT_SSL_KEYFILE"]
    server = serve(ready=False, **environment)
    assert server.process.wait(TIMEOUT_S) == 2
    assert f"weft: error: {message.format(certfile=files.certfile, keyfile=files.keyfile)}" in server.log.read_text()
