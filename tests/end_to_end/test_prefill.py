"""Two servers that share a folder: one computes long prompts, the other one loads them and generates."""

import os
import pathlib
import signal
from typing import Any

import httpx

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, Serve

SMALL = "--max-model-len", "1024", "--max-num-seqs", "4", "--api-key", "secret"
NUM_TOKENS = 700
NUM_BLOCKS = NUM_TOKENS // 32


def prompt(number: int) -> list[int]:
    return [5 + (number * 7 + i * i) % 80 for i in range(NUM_TOKENS)]


def post(server: LiveServer, path: str, body: dict[str, object]) -> Any:
    headers = {"authorization": "Bearer secret"}
    answer = httpx.post(f"{server.base_url}{path}", json=body, timeout=TIMEOUT_S, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(server: LiveServer, number: int) -> list[int]:
    body = {"prompt": prompt(number), "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    ids: list[int] = post(server, "/v1/completions", body | {"cache_salt": "somebody"})["choices"][0]["token_ids"]
    return ids


def test_prompts_are_computed_by_one_server_and_continued_by_another(serve: Serve, tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path / "kv")
    prefill = serve(*SMALL, WEFT_KV_OFFLOAD_DIR=folder, WEFT_KV_ROLE="prefill")
    urls = {"WEFT_PREFILL_URLS": prefill.base_url, "WEFT_PREFILL_MIN_TOKENS": "600", "WEFT_PREFILL_TIMEOUT_S": "3"}
    decode = serve(*SMALL, WEFT_KV_OFFLOAD_DIR=folder, WEFT_KV_ROLE="decode", **urls)

    ids = complete(decode, 1)
    assert prefill.metric("weft:prompt_tokens_total") == NUM_TOKENS
    assert decode.metric("weft:kv_offload_disk_loads_total") == NUM_BLOCKS
    assert decode.metric("weft:prefix_cache_hits_total") == NUM_BLOCKS * 32
    assert complete(decode, 1) == ids
    assert prefill.metric("weft:prompt_tokens_total") == NUM_TOKENS, "nothing of the prompt was new"
    assert complete(prefill, 1) == ids, "what one server alone generates"

    chat = {"messages": [{"role": "user", "content": "Count to ten. " * 20}], "temperature": 0, "max_tokens": 16}
    asking: dict[str, object] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
    }
    asked = chat | {"max_tokens": 1, "stream": False, "kv_transfer_params": asking}
    params = post(prefill, "/v1/chat/completions", asked)["kv_transfer_params"]
    assert params == asking | {"do_remote_decode": False, "do_remote_prefill": True}
    before = decode.metric("weft:kv_offload_disk_loads_total")
    continued = post(decode, "/v1/chat/completions", chat | {"kv_transfer_params": params})
    assert decode.metric("weft:kv_offload_disk_loads_total") > before
    assert continued["choices"] == post(prefill, "/v1/chat/completions", chat)["choices"]

    loads = decode.metric("weft:kv_offload_disk_loads_total")
    os.killpg(prefill.process.pid, signal.SIGSTOP)
    hung = complete(decode, 2)
    os.killpg(prefill.process.pid, signal.SIGCONT)
    assert prefill.stop() == 0
    dead = complete(decode, 3)
    assert decode.metric("weft:kv_offload_disk_loads_total") == loads
    assert "is left alone for 10 s" in decode.log.read_text()
    outcomes = "weft:remote_prefill_time_seconds_count"
    assert decode.metric(f'{outcomes}{{model_name="weft-demo",outcome="computed"}}') == 1
    assert decode.metric(f'{outcomes}{{model_name="weft-demo",outcome="failed"}}') == 1
    alone = serve(*SMALL)
    assert [complete(alone, number) for number in (1, 2, 3)] == [ids, hung, dead]
