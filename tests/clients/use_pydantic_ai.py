"""pydantic-ai against a live server: python use_pydantic_ai.py BASE_URL MODEL."""

import asyncio
import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


model = OpenAIChatModel(sys.argv[2], provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
settings = {"max_tokens": 200, "temperature": 0.7}

assert Agent(model, model_settings=settings).run_sync("Hello").output
for output_type in (NativeOutput(Person), ToolOutput(Person)):
    person = Agent(model, output_type=output_type, model_settings=settings).run_sync("Somebody").output
    assert isinstance(person, Person), person


async def stream() -> str:
    async with Agent(model, model_settings=settings).run_stream("Hello") as run:
        return "".join([text async for text in run.stream_text(delta=True)])


assert asyncio.run(stream())
print("good")
