"""What every route needs, in one frozen object that the app owns: there are no globals."""

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

from starlette.requests import Request

from weft.engine.shared.messages import EngineInfo
from weft.server.errors import EngineRestartingError, InvalidRequestError, ModelNotFoundError
from weft.server.formats.detection import OutputFormats
from weft.server.generate.choice_stream import Detokenizer
from weft.server.generate.engine_client import EngineClient
from weft.server.http.lifecycle import Lifecycle
from weft.server.http.metrics import Metrics
from weft.server.http.workers import Workers
from weft.server.request.generation_defaults import GenerationDefaults
from weft.server.request.validation import shown
from weft.server.settings import Settings
from weft.server.text.long_text import Room

VERSION = version("weft")
MAX_NAME_CHARS = 256
"""Of a model name that is not one of ours: every chunk of a stream repeats it."""


class TextTokenizer(Protocol):
    """The tokenizer as the routes see it; `weft.server.text.tokenizer.Tokenizer` is the real one."""

    @property
    def bos_token_id(self) -> int | None:
        """The beginning-of-text id; None when the vocabulary has none."""

    @property
    def vocab_size(self) -> int:
        """Ids that have a text are below this."""

    def encode(self, text: str, add_special_tokens: bool = True, room: Room | None = None) -> list[int]:
        """Plain text to ids; raises TextTooLongError when there is no room, as the next two do."""

    def encode_continuation(self, text: str, room: Room | None = None) -> list[int]:
        """Text that follows other text to ids."""

    @property
    def template_variables(self) -> frozenset[str]:
        """What the chat template names besides what it defines."""

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] = ...,
        room: Room | None = None,
    ) -> list[int]:
        """Messages to ids through the chat template."""

    def template_source(self, has_tools: bool) -> str:
        """The chat template; empty when there is none."""

    def token_id(self, text: str) -> int | None:
        """The id of a token by its text; None when the vocabulary has none."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids to text, all at once."""

    def token_text(self, token_id: int) -> str:
        r"""One id as text; bytes that are no whole character read \xe4."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for."""

    def added_id(self, text: str) -> int | None:
        """The id of a control token, or of another added one, by its text."""

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this id out."""

    def detokenizer(self, skip_special_tokens: bool = True, kept: Set[int] = ...) -> Detokenizer:
        """Start the text of one output; `kept` ids are in it, whatever they are."""

    def bad_word_ids(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Every id sequence that writes the word."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Everything that routes use.

    Attributes:
        model_names: What clients may call the model; the first is its name, the others are aliases.
        created: Seconds since 1970, said of the model.
    """

    engine_client: EngineClient
    tokenizer: TextTokenizer
    settings: Settings
    lifecycle: Lifecycle
    metrics: Metrics
    defaults: GenerationDefaults
    formats: OutputFormats
    workers: Workers
    model_names: tuple[str, ...]
    created: int

    @property
    def engine_info(self) -> EngineInfo:
        """What the engine is.

        Raises:
            EngineRestartingError: No engine is connected.
        """
        info = self.engine_client.info
        if info is None:
            raise EngineRestartingError("the engine is loading or restarting; try again in a moment")
        return info

    def check_model(self, name: str | None) -> str:
        """Return the name to answer under; a request without one gets the model there is.

        Raises:
            InvalidRequestError: The name is too long to be repeated in every chunk.
            ModelNotFoundError: The model is not served here.
        """
        if name is None:
            return self.model_names[0]
        if name in self.model_names:
            return name
        if self.settings.any_model_name:
            if len(name) > MAX_NAME_CHARS:
                message = f"model must have at most {MAX_NAME_CHARS} characters, got {len(name)}"
                raise InvalidRequestError(message, param="model")
            return name
        served = ", ".join(self.model_names)
        raise ModelNotFoundError(f"the model {shown(name)} does not exist; served here: {served}", param="model")


def system_fingerprint(info: EngineInfo) -> str:
    """Changes when the same request might be answered in other words: version, model, arithmetic."""
    parts = (VERSION, info.architecture, str(info.vocab_size), info.device, info.dtype, info.attention_backend)
    return "fp_" + hashlib.blake2s("|".join(parts).encode(), digest_size=5).hexdigest()


async def get_context(request: Request) -> ServerContext:
    """The context of the app that serves this request, once it has met an engine that is ready.

    For Depends, which calls plain functions in a thread.
    """
    context: ServerContext = request.app.state.context
    await context.engine_client.meet()
    return context
