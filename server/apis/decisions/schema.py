"""Wire types of POST /v1/decisions and /v1/systemone: the bodies in the shapes of OpenAI, SGLang and System One.

The answer has types in OpenAI's shape only; `weft.server.apis.decisions.route` writes those of the other shapes.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Discriminator, Field, RootModel, Tag

from weft.server.task import schema
from weft.server.task.bodies import MAX_MESSAGES, CacheBreakpoint
from weft.server.task.schema import TEXT_OR_OTHER, Items, Text, WireModel

MAX_QUESTIONS = 400
MAX_CHOICES = 255


class DecisionPart(WireModel):
    """One part of a content; which types are accepted depends on its place."""

    type: Text
    text: Text | None = None
    refusal: Text | None = None
    data: Any = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


DecisionContent = Annotated[Annotated[Text, Tag("text")] | Annotated[Items[DecisionPart], Tag("other")], TEXT_OR_OTHER]


class DecisionItem(WireModel):
    """One item of the input: a message, a call, or the output of a call."""

    type: Literal["message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"] = (
        "message"
    )
    role: Literal["user", "developer", "system", "assistant"] | None = None
    content: DecisionContent | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    input: Text | None = None
    output: DecisionContent | None = None

    # accepted, not honoured
    id: Text | None = None
    namespace: Text | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class DecisionChoice(WireModel):
    """One of the values to choose from. A string and a boolean with the same text are distinct."""

    value: Text | bool
    description: Text | None = None


class DecisionLevel(WireModel):
    """One level of a score."""

    label: Text
    description: Text | None = None


class DecisionQuestion(WireModel):
    """One question about the input."""

    type: Literal["predicate", "choice", "score"]
    instructions: DecisionContent
    name: Text | None = None
    choices: Annotated[list[DecisionChoice], Field(min_length=2, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    levels: Annotated[list[DecisionLevel], Field(min_length=2, max_length=MAX_CHOICES, fail_fast=True)] | None = None


DecisionItems = Annotated[list[DecisionItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class DecisionBody(WireModel):
    """The body of POST /v1/decisions in OpenAI's shape."""

    model: Text | None = None
    input: Annotated[Annotated[Text, Tag("text")] | Annotated[DecisionItems, Tag("other")], TEXT_OR_OTHER]
    questions: Annotated[list[DecisionQuestion], Field(min_length=1, max_length=MAX_QUESTIONS, fail_fast=True)]
    prompt_cache_key: Text | None = None
    prompt_cache_options: schema.PromptCacheOptions | None = None

    # extensions
    service_tier: schema.ServiceTier | None = None
    priority: schema.Int | None = None
    cache_salt: Text | None = None

    # accepted, not honoured
    safety_identifier: Text | None = None


class ValueProbability(msgspec.Struct):
    """The probability of a choice, or of a level, which has its index and its label."""

    value: str | bool | int
    probability: float
    label: str | UnsetType = UNSET


class DecisionAnswer(msgspec.Struct, kw_only=True):
    """The answer to one question; which members it has depends on its type. `x_label_mass` is an extension."""

    type: Literal["predicate", "choice", "score", "refusal"]
    name: str | None
    probability: float | UnsetType = UNSET
    choice: str | bool | UnsetType = UNSET
    score: float | UnsetType = UNSET
    confidence: float | UnsetType = UNSET
    probabilities: list[ValueProbability] | UnsetType = UNSET
    x_label_mass: float


class DecisionOutputTokens(msgspec.Struct, frozen=True):
    """Nothing is generated."""

    reasoning_tokens: int = 0


class DecisionUsage(msgspec.Struct):
    """Token counts: the prompts of all questions, each with the whole input."""

    input_tokens: int
    input_tokens_details: schema.CachedTokens
    total_tokens: int
    output_tokens: int = 0
    output_tokens_details: DecisionOutputTokens = DecisionOutputTokens()


class Decision(msgspec.Struct):
    """The answer: one for each question, in their order."""

    answers: list[DecisionAnswer]
    model: str
    usage: DecisionUsage


MAX_DIGITS = 10
"""Most levels of a question of SGLang or System One: each has a digit as its label."""
MAX_LETTERS = 26
"""Most options of a question of SGLang: each has a letter as its label."""

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
    """The shape of a body that is not parsed."""
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
