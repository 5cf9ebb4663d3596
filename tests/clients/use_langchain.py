"""LangChain against a live server: python use_langchain.py BASE_URL MODEL."""

import sys
from typing import Annotated

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

Digit = Annotated[int, Field(ge=0, le=9)]


@tool
def add(a: Digit, b: Digit) -> int:
    """Add two numbers."""
    return a + b


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


model = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", model=sys.argv[2], api_key="none", max_tokens=200, temperature=0.7)
answer = model.invoke("Hello")
assert isinstance(answer.content, str) and answer.content
assert answer.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in model.stream("Hello")) != ""

with_tools = model.bind_tools([add], tool_choice="required", parallel_tool_calls=False)
question = HumanMessage("1 + 2?")
call = with_tools.invoke([question])
(made,) = call.tool_calls
assert made["name"] == "add" and set(made["args"]) == {"a", "b"}, made
chunks = list(with_tools.stream([question]))
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk
assert whole.tool_calls[0]["name"] == "add" and set(whole.tool_calls[0]["args"]) == {"a", "b"}
result = ToolMessage(str(add.invoke(made["args"])), tool_call_id=made["id"])
assert model.bind_tools([add]).invoke([question, call, result]) is not None

for method in ("json_schema", "function_calling"):
    person = model.with_structured_output(Person, method=method).invoke("Somebody")
    assert isinstance(person, Person), person
print("good")
