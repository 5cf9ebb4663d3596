"""LiteLLM against a live server: python use_litellm.py BASE_URL MODEL."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it downloads its list of prices when it is imported

import litellm

litellm.suppress_debug_info = True

WHERE = {"model": f"openai/{sys.argv[2]}", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "max_tokens": 200}
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "note", "description": "Notes.", "parameters": SCHEMA}}]

answer = litellm.completion(messages=HELLO, **WHERE)
assert answer.choices[0].message.content
assert answer.usage.completion_tokens > 0
streamed = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(messages=HELLO, stream=True, **WHERE)]
assert "".join(streamed)

use = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
message = litellm.completion(messages=HELLO, **use, **WHERE).choices[0].message
(call,) = message.tool_calls
assert call.function.name == "note" and set(json.loads(call.function.arguments)) == {"name", "age"}
chunks = list(litellm.completion(messages=HELLO, stream=True, **use, **WHERE))
built = litellm.stream_chunk_builder(chunks, messages=HELLO)
assert set(json.loads(built.choices[0].message.tool_calls[0].function.arguments)) == {"name", "age"}

wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
content = litellm.completion(messages=HELLO, response_format=wanted, **WHERE).choices[0].message.content
assert set(json.loads(content)) == {"name", "age"}
print("good")
