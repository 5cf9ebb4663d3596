"""Wire types of tools: the declarations in a request, and the choice of tools that may be called."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from weft.server.schemas.common import TEXT_OR_OTHER, Items, Text, WireModel

ToolName = Annotated[Text, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionDefinition(WireModel):
    """A function. If `parameters` is absent, it takes none."""

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GrammarDefinition(WireModel):
    """The grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: Text


class CustomFormat(WireModel):
    """The format of a custom tool's input: free text, or text that follows a grammar."""

    type: Literal["text", "grammar"]
    grammar: GrammarDefinition | None = None


class CustomDefinition(WireModel):
    """A tool whose input is text."""

    name: ToolName
    description: Text | None = None
    format: CustomFormat | None = None


class ToolDefinition(WireModel):
    """One entry of `tools`."""

    type: Literal["function", "custom"]
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None


class NamedTool(WireModel):
    """The name of a tool."""

    name: Text


class ToolReference(WireModel):
    """A reference to a tool by kind and name."""

    type: Literal["function", "custom"]
    function: NamedTool | None = None
    custom: NamedTool | None = None


class AllowedTools(WireModel):
    """A subset of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Items[ToolReference]


class ToolChoiceObject(WireModel):
    """One tool that must be called, or the tools that may be called."""

    type: Literal["function", "custom", "allowed_tools"]
    function: NamedTool | None = None
    custom: NamedTool | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")] | Annotated[ToolChoiceObject, Tag("other")],
    TEXT_OR_OTHER,
]

FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("text")] | Annotated[NamedTool, Tag("other")], TEXT_OR_OTHER
]
"""The deprecated `function_call`."""
