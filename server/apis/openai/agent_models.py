"""The catalogue of models that Codex reads beside the list: it needs a model's context to compact in time.

Codex asks for it where its provider has a command for the key. All members that its parser requires are there.
"""

from collections.abc import Mapping

import msgspec

from weft.server.models.served_model import ServedModel

INSTRUCTIONS = """\
You are a coding agent on the user's machine. Work on the task with the tools you have until it is done.
- Look before you change: read the files that matter, and follow the conventions and instructions found there.
- Make the smallest change that solves the task, and check it: run what is there to run it.
- Never discard work that is not yours. Ask before what cannot be undone.
- If a command fails, read why, and try another way.
- At the end say briefly what you did and what is left."""
"""Codex takes its instructions from the catalogue, and none if there are none."""
_EFFORTS = {"low": "thinks briefly", "medium": "thinks as long as is usual", "high": "thinks longest"}


class Effort(msgspec.Struct):
    """One effort of reasoning."""

    effort: str
    description: str


class Truncation(msgspec.Struct):
    """How much of a tool's output the client keeps."""

    limit: int
    mode: str = "tokens"


class AgentModel(msgspec.Struct, kw_only=True):
    """One model in Codex's words. `context_window` is null while the engine loads."""

    slug: str
    display_name: str
    description: str
    priority: int
    context_window: int | None
    truncation_policy: Truncation
    supported_reasoning_levels: list[Effort]
    default_reasoning_level: str | None
    apply_patch_tool_type: str | None
    supports_parallel_tool_calls: bool
    base_instructions: str = INSTRUCTIONS
    shell_type: str = "unified_exec"
    visibility: str = "list"
    supported_in_api: bool = True
    upgrade: None = None
    support_verbosity: bool = False
    supports_reasoning_summaries: bool = False
    default_verbosity: None = None
    input_modalities: tuple[str, ...] = ("text",)
    experimental_supported_tools: tuple[str, ...] = ()


def agent_models(models: Mapping[str, ServedModel]) -> list[AgentModel]:
    """Every model that may chat, under each of its names, in the order of the list."""
    chatting = (name for name, model in models.items() if model.may_chat)
    return [_described(name, models[name], i) for i, name in enumerate(chatting)]


def _described(name: str, model: ServedModel, priority: int) -> AgentModel:
    info, has_tools = model.engine_client.info, model.formats.tools is not None
    thinks = model.formats.reasoning is not None or model.formats.reasoning_ids is not None
    length = info.max_model_len if info else None
    return AgentModel(
        slug=name,
        display_name=name,
        description=f"{model.name}, served by Weft",
        priority=priority,
        context_window=length,
        truncation_policy=Truncation(2500 if length is None else max(256, min(2500, length // 8))),
        supported_reasoning_levels=[Effort(*each) for each in _EFFORTS.items()] if thinks else [],
        default_reasoning_level="medium" if thinks else None,
        apply_patch_tool_type="freeform" if has_tools else None,
        supports_parallel_tool_calls=has_tools,
        input_modalities=model.input_modalities or ("text",),
    )
