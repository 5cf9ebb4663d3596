"""The examples of the README and of docs/api.md, as they stand there, against a live server."""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Any

import msgspec
import openai
import pytest

from tests.end_to_end.conftest import TIMEOUT_S, LiveServer, Serve
from tests.server.mcp_servers import new_server
from tests.server.mcp_servers import serve as serve_mcp
from weft.server.supervise.checkpoint import DEMO_MODEL

ROOT = pathlib.Path(__file__).parent.parent.parent
ADDRESS = "http://127.0.0.1:8000"
ANSWER = "3 + 4 = 7."

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def example(page: str, language: str, word: str, server: LiveServer) -> str:
    """The one block of a page in that language that contains the word, aimed at the live server."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if word in block)
    assert ADDRESS in block
    return str(block).replace(ADDRESS, server.base_url)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


def message(word: str, server: LiveServer) -> dict[str, Any]:
    """What the model answers to the example of docs/api.md that contains the word."""
    answer = json.loads(run("sh", "-c", example("docs/api.md", "sh", word, server)))
    return dict(answer["choices"][0]["message"])


def test_the_sdk_example_prints_the_answer(live_server: LiveServer) -> None:
    assert run(sys.executable, "-W", "error", "-c", example("README.md", "python", "OpenAI(", live_server)) == ANSWER


@needs_curl
def test_the_curl_line_streams_the_answer(live_server: LiveServer) -> None:
    events = run("sh", "-c", example("README.md", "sh", "curl -N", live_server)).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [msgspec.json.decode(event.removeprefix("data: ")) for event in events[:-1]]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert len(chunks) > 1, "it did not stream"  # how many tokens come with a chunk is a matter of load
    assert "".join(deltas).startswith("3 + 4")


@needs_curl
def test_the_schema_example_is_answered_by_the_schema(live_server: LiveServer) -> None:
    card = json.loads(message("json_schema", live_server)["content"])
    assert card.keys() == {"name", "age"}
    assert isinstance(card["age"], int)


@needs_curl
def test_the_responses_example_is_answered(live_server: LiveServer) -> None:
    answer = json.loads(run("sh", "-c", example("docs/api.md", "sh", 'briefly.", "input"', live_server)))
    assert answer["output"][-1]["content"][0]["text"].strip()


@needs_curl
def test_the_compaction_example_is_answered_with_a_summary(live_server: LiveServer) -> None:
    answer = json.loads(run("sh", "-c", example("docs/api.md", "sh", "/v1/responses/compact", live_server)))
    assert [item["type"] for item in answer["output"]] == ["message", "compaction"]


@needs_curl
def test_the_conversations_example_lists_what_was_said(live_server: LiveServer) -> None:
    items = json.loads(run("sh", "-c", example("docs/api.md", "sh", "/v1/conversations", live_server)))["data"]
    assert [item["role"] for item in items] == ["developer", "user", "assistant"]


@needs_curl
def test_the_tools_example_is_answered_by_a_call(live_server: LiveServer) -> None:
    (call,) = message('"get_weather"', live_server)["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}


@needs_curl
def test_the_decisions_example_has_an_answer_to_each_question(live_server: LiveServer) -> None:
    answers = json.loads(run("sh", "-c", example("docs/api.md", "sh", "/v1/decisions", live_server)))["answers"]
    assert [answer["name"] for answer in answers] == ["refund", "team", "urgency"]
    assert len(answers[2]["probabilities"]) == 3
    answers = json.loads(run("sh", "-c", example("docs/api.md", "sh", "/v1/systemone", live_server)))["answers"]
    assert 0 <= answers["refund"]["noul"] <= 1


@needs_curl
def test_the_reasoning_example_is_answered_with_reasoning(live_server: LiveServer) -> None:
    answer = message("reasoning_effort", live_server)
    assert answer["reasoning_content"]
    assert answer["reasoning"] == answer["reasoning_content"]


@needs_curl
def test_the_example_in_anthropics_shape_is_answered(live_server: LiveServer) -> None:
    answer = json.loads(run("sh", "-c", example("docs/api.md", "sh", "/v1/messages", live_server)))
    assert answer["content"][0]["text"]


@needs_curl
def test_the_example_in_ollamas_shape_is_streamed_in_lines(live_server: LiveServer) -> None:
    lines = run("sh", "-c", example("docs/api.md", "sh", "/api/chat", live_server)).splitlines()
    assert "".join(json.loads(line)["message"]["content"] for line in lines)
    assert [json.loads(line)["done"] for line in lines[-2:]] == [False, True]


@needs_curl
def test_the_example_in_llama_cpps_shape_follows_its_grammar(live_server: LiveServer) -> None:
    answer = json.loads(run("sh", "-c", example("docs/api.md", "sh", "/completion ", live_server)))
    assert answer["content"] in ("yes", "no")


@needs_curl
def test_the_infill_example_is_answered(serve: Serve, tmp_path: pathlib.Path) -> None:
    """By a model with tokens for it: the demo model's, with other names."""
    tokenizer = pathlib.Path(shutil.copytree(DEMO_MODEL, tmp_path / "weft-demo")) / "tokenizer.json"
    text = tokenizer.read_text("utf-8").replace("</think>", "<|fim_suffix|>").replace("<think>", "<|fim_prefix|>")
    tokenizer.write_text(text.replace("<tool_call>", "<|fim_middle|>"), "utf-8")
    answer = json.loads(run("sh", "-c", example("docs/api.md", "sh", "/infill", serve(str(tokenizer.parent)))))
    assert answer["stop"] is True and answer["tokens_predicted"] <= 8


@needs_curl
def test_the_uploads_example_makes_a_file(live_server: LiveServer) -> None:
    upload = json.loads(run("sh", "-c", example("docs/api.md", "sh", "/v1/uploads", live_server)))
    assert upload["status"] == "completed"
    assert live_server.get(f"/v1/files/{upload['file']['id']}/content").text == "the ring"


@needs_curl
def test_the_completion_and_tokenize_examples_are_answered(live_server: LiveServer) -> None:
    answer = json.loads(run("sh", "-c", example("docs/api.md", "sh", "/v1/completions", live_server)))
    assert answer["usage"]["completion_tokens"] <= 8 and answer["choices"][0]["text"]
    answer = json.loads(run("sh", "-c", example("docs/api.md", "sh", "/tokenize", live_server)))
    assert answer["count"] == len(answer["tokens"]) > 0


@needs_curl
def test_the_batch_example_is_answered_into_a_file(live_server: LiveServer) -> None:
    batch = json.loads(run("sh", "-c", example("docs/api.md", "sh", "/v1/batches", live_server)))
    with openai.OpenAI(base_url=f"{live_server.base_url}/v1", api_key="k") as client:
        deadline = time.monotonic() + TIMEOUT_S
        while (found := client.batches.retrieve(batch["id"])).status != "completed":
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        assert found.output_file_id
        (line,) = client.files.content(found.output_file_id).text.splitlines()
    assert json.loads(line)["response"]["body"]["choices"][0]["message"]["content"] == ANSWER


@needs_curl
def test_the_mcp_example_calls_a_tool_of_the_listed_server(serve: Serve) -> None:
    """Through the real start-up: the setting reaches the server process."""
    server = new_server("weather")

    @server.tool()
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return f"sunny in {city}"

    with serve_mcp(server.streamable_http_app()) as url:
        live = serve(WEFT_MCP_SERVERS=f"weather={url}")
        answer = json.loads(run("sh", "-c", example("docs/api.md", "sh", '"server_label"', live)))
    calls = [item for item in answer["output"] if item["type"] == "mcp_call"]
    assert [(call["name"], call["output"]) for call in calls[:1]] == [("get_weather", "sunny in Oslo")]
    assert answer["output"][-1]["type"] == "message"
