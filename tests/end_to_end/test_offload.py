"""`kv_offload_dir` as an operator sets it."""

import pathlib
import time

import httpx

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, Serve

SMALL = "--max-model-len", "1024", "--kv-cache-memory", "4MB", "--max-num-seqs", "2"


def wait_for_blocks_on_disk(server: LiveServer) -> float:
    deadline = time.monotonic() + TIMEOUT_S
    while not (num_blocks := server.metric("weft:kv_offload_disk_blocks")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return num_blocks


def test_a_restart_finds_what_is_on_disk(serve: Serve, tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path / "kv")
    first = serve(*SMALL, WEFT_KV_OFFLOAD_DIR=folder)
    for number in range(8):
        body = {"prompt": [number + 5] * 700, "max_tokens": 2}
        answer = httpx.post(f"{first.base_url}/v1/completions", json=body, timeout=TIMEOUT_S)
        assert answer.status_code == 200, answer.text
    assert first.metric("weft:kv_offload_kept_blocks_total") > 0
    wait_for_blocks_on_disk(first)
    assert first.stop() == 0
    num_files = len(list(tmp_path.rglob("*.kv")))
    assert num_files > 0
    assert wait_for_blocks_on_disk(serve(*SMALL, WEFT_KV_OFFLOAD_DIR=folder)) == num_files
