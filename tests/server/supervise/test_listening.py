import os
import pathlib
import re
import socket

import pytest

from weft.server.settings import StartError
from weft.server.supervise import listening


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("localhost", "http://localhost:80/"),
        ("0.0.0.0", "http://127.0.0.1:80/"),
        ("::", "http://[::1]:80/"),
        ("fe80::1", "http://[fe80::1]:80/"),
    ],
)
def test_the_page_has_an_address_to_go_to(host: str, url: str) -> None:
    assert listening.page_url(host, 80) == url


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_address_that_is_not_ours_is_one_line(host: str) -> None:
    with pytest.raises(StartError, match=rf"^cannot listen on {host} port 0: [a-z ,-]+ \(--host, --port\)$"):
        listening.listen(host, 0)


def test_who_has_a_taken_port_is_named_with_one_that_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError) as caught:
            listening.listen("127.0.0.1", port)
        found = re.fullmatch(
            rf"cannot listen on 127.0.0.1 port {port}: address already in use by .* \(process {os.getpid()}\); "
            r"port (\d+) is free \(--host, --port\)",
            str(caught.value),
        )
        assert found
        listening.listen("127.0.0.1", int(found[1])).close()


def test_the_owner_of_a_port_is_the_oldest_process_that_has_its_socket(tmp_path: pathlib.Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(
        "  sl  local_address rem_address   st ...\n"
        "   0: 0100007F:1F40 0100007F:9999 01 0:0 0:0 0 0 0 11\n"  # a connection to it
        "   1: 0100007F:1F40 00000000:0000 0A 0:0 0:0 0 0 0 22\n"
    )
    # Ids begin again at their limit: the child has a lower one than its parent.
    for pid, inode, name, started in ((7, 11, "curl", 1), (8, 22, "a (child)", 90), (9, 22, "weft", 80)):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "comm").write_text(f"{name}\n")
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S 1{' 0' * 17} {started} 0\n")
        (tmp_path / str(pid) / "fd" / "3").symlink_to(f"socket:[{inode}]")
    assert listening.port_owner(8000, tmp_path) == "weft (process 9)"
    assert listening.port_owner(8001, tmp_path) is None
