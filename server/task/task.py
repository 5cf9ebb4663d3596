"""Defines a task: what a body asks for, independent of the API. Every body becomes one.

All values in it have been checked, except those whose check needs the encoded prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.engine.wire.inputs import TokenSpan
from weft.engine.wire.messages import BeamOptions, Pin
from weft.engine.wire.params import SamplingParams
from weft.engine.wire.pictures import Picture
from weft.server.models.seq2seq import NOT_ENCODED, Encoded
from weft.server.models.served_model import ServedModel
from weft.server.task.fill_in import FillIn
from weft.server.task.parts import Spans
from weft.server.task.request_options import Breakpoint, Service
from weft.server.task.structured_output import Structure
from weft.server.task.template_options import Thinking
from weft.server.task.tool_use import ToolUse
from weft.server.text.chat_template import TemplateOptions


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and what in it stands for something else.

    `text` is the caller's text; None if the prompt came as token ids or messages.
    """

    token_ids: list[int]
    text: str | None = None
    spans: Sequence[TokenSpan] = ()
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages for the chat template, and the field that holds them.

    The prompt up to each breakpoint is kept in the prefix cache. Marks in the messages stand for the spans.
    """

    messages: list[dict[str, Any]]
    options: TemplateOptions
    breakpoints: Sequence[Breakpoint] = ()
    param: str = "messages"
    spans: Spans = field(default_factory=Spans)


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts as texts or token ids, each with its path in the body.

    Attributes:
        items: None: one prompt that holds only the beginning-of-text token, or a stand-in for it.
        filling: How this vocabulary asks for the text before the suffix; None if there is no suffix.
        pins: Beginnings that all of them have, to be kept in the prefix cache.
    """

    items: Sequence[tuple[str, str | list[int]]] | None
    add_special_tokens: bool = True
    suffix: str = ""
    filling: FillIn | None = None
    pins: Sequence[Pin] = ()


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How the output of a request becomes text.

    Attributes:
        stops: Stop strings. Only content is searched for them.
        stop_token_ids: The caller's own stop ids; only these are reported as the stop reason.
        include_stop: The text keeps the stop string or stop token that ended it.
        min_tokens: The text of this many first tokens is not searched for stop strings.
        tracks_tokens: Text events carry the tokens that the text is made of.
        tells_ids: Events report all token ids.
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
    """What the output must contain. `prediction` is text that it will probably contain.

    `left_out` names what was sent and does not reach the model: tools that nobody here hosts, reasoning that cannot be
    read.
    """

    use: ToolUse | None = None
    structure: Structure | None = None
    thinking: Thinking = field(default_factory=Thinking)
    prediction: str = ""
    left_out: Sequence[str] = ()

    @property
    def lost(self) -> list[str]:
        """Paths of what schemas ask for and the grammar does not enforce."""
        return [*(self.use.lost if self.use else ()), *(self.structure.lost if self.structure else ())]

    @property
    def variables(self) -> dict[str, object]:
        """The variables that a chat template needs for it."""
        return {**self.thinking.template_kwargs, **({"tools": self.use.shown} if self.use else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One checked request for generation, which any API can make.

    Attributes:
        size: Size of the body in bytes. Work on a large body is done in a thread.
        name: The model's name in the answer.
        sampling: Sampling parameters of every prompt.
        has_seed: The caller chose the seed. If not, each prompt of a list gets a seed of its own.
        num_choices: Number of choices returned for each prompt.
        num_made: Number of choices that the engine generates for each prompt; the best are returned.
        truncate_to: Keep this many tokens at the end of a prompt; -1: as many as fit; None: all.
        deadline: Time on the clock of `time.monotonic`; None: no limit.
        uses_cache: The prefix cache is used even without breakpoints.
        stores_prompt: The prompt's blocks are stored for another server before the answer begins.
        names: Patterns of paths in the body that was read, and what the caller calls them.
        encoded: How an answer is made to what an encoder reads.
        fits_context: An output that would not fit is bounded by the context; if not, the request is refused.
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
    stores_prompt: bool = False
    encoded: Encoded = NOT_ENCODED
    fits_context: bool = False
    is_stream: bool = False
    ignored: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_reserved(self) -> int | None:
        """Tokens that the context must hold beside the prompt; None: one, and as many more as there is room for."""
        return None if self.fits_context and self.sampling.max_tokens else self.sampling.max_tokens

    @property
    def continues_prompt(self) -> bool:
        """Whether the output continues the text of the prompt."""
        is_begun = isinstance(self.input, Texts) or self.input.options.continue_final_message
        return is_begun and not self.encoded.begin
