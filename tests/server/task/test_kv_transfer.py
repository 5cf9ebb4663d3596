from typing import Any

import msgspec
import pytest

from weft.engine.wire.messages import CachePolicy

ASKING = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
ASKED = ASKING | {"do_remote_decode": False, "do_remote_prefill": True}


@pytest.fixture
def sharing(site: Any) -> Any:
    site.engine.info = msgspec.structs.replace(site.engine.info, kv_role="both")
    return site


def test_a_prompt_is_computed_for_another_server_and_continued_by_it(sharing: Any) -> None:
    for send in (sharing.chat, sharing.complete):
        reply = send(kv_transfer_params=ASKING, max_tokens=1)
        assert reply.json["kv_transfer_params"] == ASKED and "x-ignored-params" not in reply.headers
        continued = send(kv_transfer_params=reply.json["kv_transfer_params"])
        assert "kv_transfer_params" not in continued.json and "x-ignored-params" not in continued.headers
        assert "kv_transfer_params" not in send(kv_transfer_params=None).json
    policies = [asked.caching for asked in sharing.engine.asked]
    assert policies == [CachePolicy(is_stored=True), CachePolicy(), CachePolicy()] * 2


def test_the_other_server_knows_the_salt(sharing: Any) -> None:
    sharing.complete(cache_salt="a")
    (asked,) = sharing.engine.asked
    sharing.complete(kv_transfer_params={"do_remote_decode": True, "cache_salt": asked.cache_salt})
    assert sharing.engine.asked[1].cache_salt == asked.cache_salt == "a"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"kv_transfer_params": ASKED | {"remote_host": "elsewhere"}}, "kv_transfer_params.remote_host"),
        ({"kv_transfer_params": ASKED | {"remote_block_ids": [[1]]}}, "kv_transfer_params.remote_block_ids"),
        ({"kv_transfer_params": ASKED | {"do_remote_decode": True}}, "kv_transfer_params.do_remote_decode"),
        (
            {"kv_transfer_params": ASKING, "prompt_cache_options": {"mode": "explicit"}},
            "kv_transfer_params.do_remote_decode",
        ),
    ],
)
def test_what_a_folder_cannot_do_is_refused(sharing: Any, body: dict[str, object], param: str) -> None:
    reply = sharing.complete(**body)
    assert reply.status == 400 and reply.json["error"]["param"] == param


@pytest.mark.parametrize("name", ["do_remote_decode", "do_remote_prefill"])
def test_a_server_that_shares_nothing_refuses(site: Any, name: str) -> None:
    reply = site.chat(kv_transfer_params={name: True})
    assert reply.status == 400 and "needs a server with a kv_role" in reply.json["error"]["message"]
    assert site.chat(kv_transfer_params={name: False}).status == 200
