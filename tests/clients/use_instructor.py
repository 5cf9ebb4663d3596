"""instructor against a live server: python use_instructor.py BASE_URL MODEL."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none"), mode=mode)
    person = client.chat.completions.create(
        model=sys.argv[2],
        messages=[{"role": "user", "content": "Somebody"}],
        response_model=Person,
        max_tokens=200,
        max_retries=0,
    )
    assert isinstance(person, Person), person
print("good")
