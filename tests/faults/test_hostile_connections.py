"""Clients that send too much, too slowly or for somebody else. One server with small settings hears them all."""

import contextlib
import json
import pathlib
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, serving

MAX_CONNECTIONS = 40
BODY = json.dumps({"prompt": "Once", "max_tokens": 2}).encode()
ENDLESS = json.dumps({"prompt": "Once", "max_tokens": 90_000, "ignore_eos": True}).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, long_model: str) -> Iterator[LiveServer]:
    settings = {
        "WEFT_HEADER_TIMEOUT_S": "2",
        "WEFT_BODY_PAUSE_TIMEOUT_S": "2",
        "WEFT_BODY_TIMEOUT_S": "3",
        "WEFT_MAX_CONNECTIONS": str(MAX_CONNECTIONS),
    }
    with serving(tmp_path_factory.mktemp("hostile") / "server.log", long_model, **settings) as server:
        yield server


def post(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def connect(server: LiveServer, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S)
    connection.sendall(data)
    return connection


def read_answer(connection: socket.socket) -> tuple[int, str]:
    """Status and error code of an answer after which the connection ends."""
    data = b""
    with contextlib.suppress(ConnectionResetError), connection:
        while part := connection.recv(65536):
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def test_headers_without_end_are_cut(server: LiveServer, is_long: bool) -> None:
    """One connection cost 20 s of CPU time on the event loop."""
    for _ in range(50 if is_long else 2):
        connection = connect(server, b"GET / HTTP/1.1\r\nX: ")
        num_bytes = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while num_bytes < 200 << 20:
                num_bytes += connection.send(b"x" * 65536)
        assert num_bytes < 100 << 20  # what was read and dropped while the answer was on its way, and sockets' buffers
        connection.close()
    connection = connect(server, b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000)
    assert read_answer(connection) == (431, "headers_too_large")


def test_what_does_not_arrive_is_answered_and_closed(server: LiveServer) -> None:
    """Connections that sent half a header, or a body without its end, were held for ever."""
    halves = [connect(server, post(BODY)[:cut]) for cut in (20, len(post(BODY)) - 5)]
    silent = [connect(server) for _ in range(5)]
    with connect(server, post(b"x" * 1000)[:-1000]) as trickle, contextlib.suppress(ConnectionError):
        trickle.settimeout(0.1)
        answer = b""
        while not answer:
            trickle.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                answer = trickle.recv(12)
        assert answer == b"HTTP/1.1 408"
    assert [read_answer(half) for half in halves] == [(408, "receive_timeout")] * 2
    assert [connection.recv(1) for connection in silent] == [b""] * 5
    for connection in silent:
        connection.close()


def test_a_full_server_answers_probes_and_refuses_the_rest(server: LiveServer, is_long: bool) -> None:
    """Connections beyond the file limit made the server deaf, also to probes."""
    with contextlib.ExitStack() as stack:
        num_held = 0
        while num_held < MAX_CONNECTIONS:  # some may still be those of the tests before
            connection = stack.enter_context(connect(server, b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"))
            num_held += connection.recv(12) == b"HTTP/1.1 200"
        for _ in range(20 if is_long else 1):
            with contextlib.ExitStack() as flood:
                for _ in range(250):
                    flood.enter_context(connect(server))
                refused = httpx.post(f"{server.base_url}/v1/completions", json={"prompt": "a"}, timeout=TIMEOUT_S)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_connections")
                assert refused.headers["retry-after"]
                assert [server.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3
    while (reply := httpx.get(f"{server.base_url}/v1/models", timeout=TIMEOUT_S)).status_code == 503:
        pass
    assert reply.status_code == 200


def test_the_file_limit_is_raised(server: LiveServer) -> None:
    (pid,) = server.children("weft.server.app.process")
    limits = pathlib.Path(f"/proc/{pid}/limits").read_text().splitlines()
    soft, hard = next(line for line in limits if line.startswith("Max open files")).split()[3:5]
    assert soft == hard


def test_a_pipelined_request_hides_no_disconnect(server: LiveServer) -> None:
    """The first answer, which nobody waited for any more, was generated to its end."""
    with connect(server, post(ENDLESS)) as connection:
        server.wait_for_metric("weft:num_requests_running", 1)
        connection.sendall(post(BODY))
    server.wait_for_metric("weft:num_requests_running", 0)


def test_a_page_under_a_foreign_name_is_refused(server: LiveServer) -> None:
    for headers in ({"Host": "rebound.example"}, {"Origin": "https://foreign.example"}):
        reply = httpx.post(f"{server.base_url}/v1/completions", content=BODY, headers=headers, timeout=TIMEOUT_S)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "origin_not_allowed")


JAVA = """
import java.net.URI;
import java.net.http.*;
public class Ask {
    public static void main(String[] a) throws Exception {
        var request = HttpRequest.newBuilder(URI.create(a[0])).header("Content-Type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(a[1])).build();
        System.out.print(HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString()).body());
    }
}
"""


def ask_with_java(url: str, body: str, folder: pathlib.Path) -> list[str]:
    (folder / "Ask.java").write_text(JAVA)
    return ["java", "-XX:TieredStopAtLevel=1", str(folder / "Ask.java"), url, body]


def ask_with_curl(url: str, body: str, folder: pathlib.Path) -> list[str]:
    return ["curl", "--silent", "--http2", url, "--header", "Content-Type: application/json", "--data", body]


@pytest.mark.parametrize(("program", "command"), [("javac", ask_with_java), ("curl", ask_with_curl)])
def test_a_client_that_would_rather_speak_http_2_is_heard(
    server: LiveServer, tmp_path: pathlib.Path, program: str, command: Callable[[str, str, pathlib.Path], list[str]]
) -> None:
    """Its offer to upgrade cost the request its body: 400, "the body is empty"."""
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on this machine")
    arguments = command(f"{server.base_url}/v1/completions", BODY.decode(), tmp_path)
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 2
