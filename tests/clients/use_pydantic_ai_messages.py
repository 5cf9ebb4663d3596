"""pydantic-ai over Anthropic's API against a live server: python use_pydantic_ai_messages.py BASE_URL MODEL."""

import asyncio
import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent, ToolOutput
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


model = AnthropicModel(sys.argv[2], provider=AnthropicProvider(base_url=sys.argv[1], api_key="none"))
settings = {"max_tokens": 200}

person = Agent(model, output_type=ToolOutput(Person), model_settings=settings).run_sync("Somebody")
assert isinstance(person.output, Person), person

# The call and what became of it go back as blocks, and the agent goes on from there.
history = person.all_messages()
assert any(isinstance(part, ToolReturnPart) for message in history for part in message.parts)
assert Agent(model, model_settings=settings).run_sync("And now?", message_history=history).output


async def stream() -> str:
    async with Agent(model, model_settings=settings).run_stream("Hello") as run:
        return "".join([text async for text in run.stream_text(delta=True)])


assert asyncio.run(stream())
print("good")
