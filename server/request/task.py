"""A task: what any API's body asks for, in no API's words. The way from a body to the engine passes through it.

Everything in it has been checked, except what is known only when the prompt has been encoded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.engine.shared.messages import BeamOptions
from weft.engine.shared.sampling_params import SamplingParams
from weft.server.model.served_model import ServedModel
from weft.server.request.cache_options import Breakpoint
from weft.server.request.fim import FillIn
from weft.server.request.service_tier import Service
from weft.server.request.structured_output import Structure
from weft.server.request.thinking import Thinking
from weft.server.request.tool_use import ToolUse
from weft.server.text.chat_template import TemplateOptions


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `text` is what the caller wrote, None when it came as token ids or as messages."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the chat template; the prompt up to a breakpoint stays in the prefix cache."""

    messages: list[dict[str, Any]]
    options: TemplateOptions
    breakpoints: Sequence[Breakpoint] = ()


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts as texts or token ids, each with its place in the body.

    Attributes:
        items: None is the beginning-of-text token, or what stands for it.
        filling: How to ask for what stands before the suffix; None when there is none.
    """

    items: Sequence[tuple[str, str | list[int]]] | None
    add_special_tokens: bool = True
    suffix: str = ""
    filling: FillIn | None = None


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the output of a request becomes text.

    Attributes:
        stops: Stop strings; content alone is searched.
        stop_token_ids: The caller's own stop ids; only these are reported as the stop reason.
        include_stop: The text keeps the stop string or the stop token that ended it.
        min_tokens: Text of the first so many tokens is not searched for stop strings.
        tracks_tokens: Text comes with the tokens that it is made of.
        tells_ids: All token ids are told.
    """

    stops: Sequence[str] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    tracks_tokens: bool = False
    tells_ids: bool = False


@dataclass(frozen=True, slots=True)
class OutputWishes:
    """What the output is to hold; `prediction` is what it probably will."""

    use: ToolUse | None = None
    structure: Structure | None = None
    thinking: Thinking = field(default_factory=Thinking)
    prediction: str = ""

    @property
    def variables(self) -> dict[str, object]:
        """What a chat template has to know of it."""
        return {**self.thinking.template_kwargs, **({"tools": self.use.shown} if self.use else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is asked for.

    Attributes:
        size: Of the body in bytes, which tells where work on it is done.
        name: What the model is called in the answer.
        sampling: Of every prompt.
        has_seed: The caller has chosen the seed; else each prompt of a list gets another one.
        num_choices: Answers to each prompt.
        num_made: Choices that the engine makes for each prompt; the best are answered.
        truncate_to: Keep the last so many tokens of a prompt; -1: as many as fit; None: all.
        deadline: On the clock of `time.monotonic`; None: no limit.
        uses_cache: The prefix cache is used also without breakpoints.
    """

    size: int
    model: ServedModel
    name: str
    input: Chat | Texts
    sampling: SamplingParams
    has_seed: bool = True
    num_choices: int = 1
    num_made: int = 1
    beams: BeamOptions | None = None
    text: TextOptions = TextOptions()
    wishes: OutputWishes = OutputWishes()
    truncate_to: int | None = None
    service: Service
    tenant: str = ""
    deadline: float | None = None
    cache_salt: str = ""
    uses_cache: bool = True
    is_stream: bool = False
    ignored: Sequence[str] = ()

    @property
    def continues_prompt(self) -> bool:
        """Whether the output's text goes on where the prompt's ends."""
        return isinstance(self.input, Texts) or self.input.options.continue_final_message
