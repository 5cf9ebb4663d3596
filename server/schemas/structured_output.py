"""Wire types of structured output: OpenAI's response_format, vLLM's structured_outputs."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from weft.server.schemas.common import TEXT_OR_OTHER, GenerationBody, Items, Text, WireModel

ObjectOrText = Annotated[Annotated[Text, Tag("text")] | Annotated[dict[str, Any], Tag("other")], TEXT_OR_OTHER]
"""A JSON object, or its JSON text."""

MAX_STRUCTURES = 1024
"""Most tagged structures, and most triggers."""


class JsonSchema(WireModel):
    """A schema inside OpenAI's wrapper, which gives it a name."""

    name: Annotated[Text, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TaggedStructure(WireModel):
    """JSON that follows the schema, between `begin` and `end`."""

    begin: Text
    schema_: dict[str, Any] = Field(alias="schema")
    end: Text


class ResponseFormat(WireModel):
    """The format of the answer. `structures` and `triggers` belong to structural_tag, an extension."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Annotated[Items[TaggedStructure], Field(max_length=MAX_STRUCTURES)] | None = None
    triggers: Annotated[Items[Text], Field(max_length=MAX_STRUCTURES)] | None = None


class StructuralTag(WireModel):
    """The structural tag inside structured_outputs, where it is JSON text or an object."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[Items[TaggedStructure], Field(max_length=MAX_STRUCTURES)]
    triggers: Annotated[Items[Text], Field(max_length=MAX_STRUCTURES)]


class StructuredOutputs(WireModel):
    """vLLM's structured_outputs. Exactly one member is given."""

    json_: ObjectOrText | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Items[Text] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: ObjectOrText | None = None


class GuidedBody(GenerationBody):
    """Fields of both endpoints that constrain the answer. The `guided_...` names are vLLM's older ones."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: ObjectOrText | None = None
    guided_regex: Text | None = None
    guided_choice: Items[Text] | None = None
    guided_grammar: Text | None = None
