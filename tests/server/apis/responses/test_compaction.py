"""POST /v1/responses/compact through OpenAI's own client and by hand, over a fake engine."""

from typing import Any

import httpx
import openai
from openai.types.responses import CompactedResponse

from tests.server.apis.responses.test_stored_responses import ANSWER, error
from weft.server.apis.responses.input import SUMMARY_INTRO
from weft.server.apis.responses.stored_routes import INSTRUCTION, MAX_SUMMARY_TOKENS

SAID = [
    {"role": "user", "content": "Name?"},
    {"role": "assistant", "content": "Weft."},
    {"role": "user", "content": [{"type": "input_text", "text": "Why?"}]},
]


def test_the_sdk_continues_from_a_compacted_conversation(site: Any) -> None:
    with site.live() as base_url, openai.OpenAI(base_url=f"{base_url}/v1", api_key="k", max_retries=0) as sdk:
        made = sdk.responses.compact(model="alias", input=SAID, instructions="Be kind.")  # type: ignore[arg-type]
        rendered = [(message["role"], message["content"]) for message in site.tokenizer.rendered]
        assert rendered == [
            ("system", "Be kind."),
            ("user", "Name?"),
            ("assistant", "Weft."),
            ("user", "Why?"),
            ("user", INSTRUCTION),
        ]
        assert site.engine.asked[0].params.max_tokens == min(MAX_SUMMARY_TOKENS, 1000 - made.usage.input_tokens)
        assert [item.type for item in made.output] == ["message", "message", "compaction"]
        assert made.usage.output_tokens == len(ANSWER.encode()) + 1
        output = [item.model_dump(exclude_none=True, warnings=False) for item in made.output]
        answer = sdk.responses.create(model="alias", input=[*output, {"role": "user", "content": "And?"}])
        said = [(message["role"], message["content"]) for message in site.tokenizer.rendered]
        assert said == [
            ("user", "Name?"),
            ("user", "Why?"),
            ("assistant", SUMMARY_INTRO + ANSWER),
            ("user", "And?"),
        ]
        again = sdk.responses.compact(model="alias", previous_response_id=answer.id)
        assert [item.type for item in again.output] == ["message", "message", "message", "compaction"]


def test_a_summary_is_sealed_for_its_key_and_its_kind(make_site: Any) -> None:
    site = make_site(api_key=("a", "b"))
    keys = [{"Authorization": f"Bearer {key}"} for key in "ab"]
    with site.live() as base_url, httpx.Client(base_url=f"{base_url}/v1", timeout=60) as client:
        made = client.post("responses/compact", json={"input": SAID}, headers=keys[0])
        CompactedResponse.model_construct(**made.json())
        item = made.json()["output"][-1]
        assert "wörld" not in item["encrypted_content"]
        replies = [client.post("responses", json={"input": [*SAID, item]}, headers=key) for key in keys]
        assert replies[0].status_code == 200
        assert error(replies[1]) == (400, "invalid_value", "input[3].encrypted_content")
        thought = {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
        reply = client.post("responses", json={"input": [*SAID, thought]}, headers=keys[0])
        assert (reply.status_code, reply.headers["x-ignored-params"]) == (200, "input[3].encrypted_content")
        cut = {**item, "encrypted_content": item["encrypted_content"][:-8] + "AAAAAAA="}
        reply = client.post("conversations", json={"items": [cut]}, headers=keys[0])
        assert error(reply) == (400, "invalid_value", "items[0].encrypted_content")


def test_mistakes_are_named(site: Any) -> None:
    def ask(**body: Any) -> Any:
        reply = site.call("POST", "/v1/responses/compact", json=body)
        return reply.status, reply.error["code"], reply.error["param"]

    assert ask(input=[]) == (400, "invalid_value", "input")
    assert ask(input="x" * 2000) == (400, "context_length_exceeded", "input")
    assert ask(input=SAID, stream=True) == (400, "unsupported_parameter", "stream")
    assert ask(input=SAID, conversation="conv_x") == (400, "unsupported_parameter", "conversation")
    assert ask(previous_response_id="resp_x")[:2] == (404, "not_found")
    reply = site.call("POST", "/v1/responses/compact", json={"input": SAID, "tools": []})
    assert (reply.status, reply.headers["x-ignored-params"]) == (200, "tools")


def test_a_model_without_a_summary_is_told(site: Any) -> None:
    site.engine.answers = [" "]
    reply = site.call("POST", "/v1/responses/compact", json={"input": SAID})
    assert (reply.status, reply.error["message"]) == (500, "the model wrote no summary of the input")
