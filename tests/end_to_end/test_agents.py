"""Agent libraries hold conversations that use tools with the demo model."""

import asyncio
from typing import Literal

import agents
import openai
import pytest
from agents.items import MessageOutputItem, ToolCallItem, ToolCallOutputItem
from agents.result import RunResultBase

from tests.end_to_end.conftest import LiveServer


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_agent_uses_a_tool_over_responses(live_server: LiveServer, is_stream: bool) -> None:
    asked: list[str] = []

    @agents.function_tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return f"It is warm in {city}."

    async def talk() -> RunResultBase:
        async with openai.AsyncOpenAI(base_url=f"{live_server.base_url}/v1", api_key="none", max_retries=0) as client:
            agent = agents.Agent(
                name="guide",
                instructions="Use the tools.",
                tools=[weather],
                model=agents.OpenAIResponsesModel(model="weft-demo", openai_client=client),
                model_settings=agents.ModelSettings(
                    tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=60
                ),
            )
            question = "What is the weather in Oslo?"
            if not is_stream:
                return await agents.Runner.run(agent, question)
            result = agents.Runner.run_streamed(agent, question)
            async for _ in result.stream_events():
                pass
            return result

    agents.set_tracing_disabled(True)
    result = asyncio.run(talk())
    kinds = [type(item) for item in result.new_items]
    assert kinds == [ToolCallItem, ToolCallOutputItem, MessageOutputItem]
    assert asked[0] in ("Oslo", "Rome")
    assert isinstance(result.final_output, str)
