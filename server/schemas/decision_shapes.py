"""Wire types of decisions in the shapes of SGLang and of System One."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, RootModel, Tag

from weft.server.schemas.common import Text, WireModel
from weft.server.schemas.decisions import MAX_CHOICES, MAX_QUESTIONS, DecisionBody

MAX_DIGITS = 10
MAX_LETTERS = 26
JsonText = Text | dict[str, Any] | list[Any]
"""A text, or data that is shown to the model as compact JSON."""


class Exact(BaseModel):
    """A JSON object that may have no other members: a misspelled one would change the question."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class SglangOption(Exact):
    """One of the options to choose from."""

    name: Text
    description: JsonText | None = None


class SglangQuestion(Exact):
    """One question in SGLang's shape."""

    id: Text
    type: Literal["choice", "score", "yes_no"]
    question: JsonText
    options: Annotated[list[SglangOption], Field(min_length=2, max_length=MAX_LETTERS)] | None = None
    levels: Annotated[list[JsonText], Field(min_length=2, max_length=MAX_DIGITS)] | None = None
    yes: JsonText | None = None
    no: JsonText | None = None


class SglangBody(WireModel):
    """The body of POST /v1/decisions in SGLang's shape."""

    model: Text | None = None
    input: JsonText
    questions: Annotated[list[SglangQuestion], Field(min_length=1, max_length=MAX_QUESTIONS, fail_fast=True)]
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_format_version: int | None = None


class SystemOneQuestion(Exact):
    """One question in System One's shape."""

    type: Literal["noul", "choice", "score"]
    instructions: JsonText | None = None
    criteria: (
        Annotated[dict[Text, JsonText | None], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[JsonText], Field(min_length=1, max_length=MAX_DIGITS)]
        | None
    ) = None


class SystemOneBody(WireModel):
    """The body of POST /v1/systemone."""

    model: Text | None = None
    state: JsonText
    questions: Annotated[dict[Text, SystemOneQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]
    chat_template_kwargs: dict[str, Any] | None = None


def _shape(value: Any) -> str:
    if isinstance(value, dict):
        questions = value.get("questions")
        if "state" in value or isinstance(questions, dict):
            return "systemone"
        first = questions[0] if isinstance(questions, list) and questions else None
        return "sglang" if isinstance(first, dict) and {"id", "question"} <= first.keys() else "openai"
    return "openai"


class AnyDecisionBody(
    RootModel[
        Annotated[
            Annotated[DecisionBody, Tag("openai")]
            | Annotated[SglangBody, Tag("sglang")]
            | Annotated[SystemOneBody, Tag("systemone")],
            Discriminator(_shape),
        ]
    ]
):
    """The body of POST /v1/decisions in any of its shapes; the questions tell which."""
