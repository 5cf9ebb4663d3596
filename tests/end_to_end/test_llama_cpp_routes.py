"""llama.cpp's `grammar` in GBNF and `json_schema`, followed by the real engine; and a client that leaves."""

import json
import re
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import LiveServer

ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n"){1,3}
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]{0,3} ws
num   ::= [0-9]{1,4} ws
ws    ::= [ \t]?
"""
"""As in llama.cpp's own examples, with bounds."""


def complete(server: LiveServer, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.base_url}/completion", json={"prompt": "Hello", **body}, timeout=100)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "yes" | "no"', "yes|no"),
        ("root ::= [a-c]{2,4} # a comment", "[a-c]{2,4}"),
        ('root ::= item ("," item)+\nitem ::= [^,\\n"]{1,3}\n', '[^,\n"]{1,3}(,[^,\n"]{1,3})+'),
        ('root ::= "\\"" [\\x41-\\x43]+ "\\"" ( "é" )?', '"[A-C]+"é?'),
        (ARITHMETIC, r"[-+*/a-z0-9_() \t=\n]+"),
    ],
)
def test_a_gbnf_grammar_is_followed(live_server: LiveServer, grammar: str, pattern: str) -> None:
    for seed in range(3):
        answer = complete(live_server, grammar=grammar, seed=seed, temperature=1.5, n_predict=120).json()
        if answer["stop_type"] == "eos":
            assert re.fullmatch(pattern, answer["content"])
        assert answer["stop_type"] in ("eos", "limit")


def test_a_grammar_that_is_wrong_is_refused(live_server: LiveServer) -> None:
    reply = complete(live_server, grammar="root ::= nothing")
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, 400)
    assert "grammar" in reply.json()["error"]["message"]


def test_a_json_schema_is_followed(live_server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    assert set(json.loads(complete(live_server, json_schema=schema).json()["content"])) == {"a"}


def test_a_client_that_leaves_frees_its_blocks(live_server: LiveServer) -> None:
    body = {"prompt": "Hello", "stream": True, "ignore_eos": True, "n_predict": -1}
    with httpx.stream("POST", f"{live_server.base_url}/completion", json=body, timeout=100) as reply:
        assert next(reply.iter_lines()).startswith('data: {"index":0,"content":')
    live_server.wait_for_metric("weft:num_requests_running", 0)
