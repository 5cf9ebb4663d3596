"""What a checkpoint with an encoder says of its inputs and answers, and the languages that its tokenizer names.

transformers applies these numbers where a caller says nothing else, and so does Weft. They stand in
generation_config.json, or in config.json where older versions kept them.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from weft.engine.wire.messages import BeamOptions
from weft.engine.wire.params import MAX_BEAMS
from weft.server.errors import InvalidRequestError, shown
from weft.server.text.template_files import TemplateFileError, read_object
from weft.server.text.text_tokenizer import TextTokenizer

_log = logging.getLogger(__name__)

_LANGUAGE = re.compile("[a-z]{3}_[A-Z][a-z]{3}|[a-z]{2}_[A-Z]{2}|__[A-Za-z_]{2,8}__|>>[A-Za-z_]{2,8}<<")
"""Of NLLB (eng_Latn), of mBART (en_XX), of M2M100 (__en__), PLBART (__java__) and Marian (>>fra<<)."""


@dataclass(frozen=True, slots=True)
class Seq2Seq:
    """How a model with an encoder answers.

    Attributes:
        begin: What its decoder begins with.
        max_length, min_length: Of what the decoder begins with and the answer together; None for no bound.
        banned: Sequences of ids that no answer has.
        begin_bans: Ids that no answer begins with.
        forced_end_id: The last id of an answer that would be longer; None for any.
        renormalizes: See `SamplingParams`.
        num_beams: Of a search; 1 for none.
        is_sampled: Whether ids are sampled, rather than the most probable ones taken.
    """

    begin: tuple[int, ...]
    max_length: int | None = None
    min_length: int = 0
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    banned: tuple[tuple[int, ...], ...] = ()
    begin_bans: tuple[int, ...] = ()
    forced_end_id: int | None = None
    renormalizes: bool = False
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    is_sampled: bool = False

    def beams(self, begin: Sequence[int], num_choices: int) -> BeamOptions | None:
        """The search that the checkpoint asks for, as wide as the choices at least; None for none.

        Args:
            begin: What the decoder begins with. What is written under force is output to transformers.
        """
        if self.num_beams == 1 or num_choices > MAX_BEAMS:
            return None
        width = max(self.num_beams, num_choices)
        return BeamOptions(self.length_penalty, self.early_stopping, width, len(begin) - 1)

    def begin_in(self, target: int | None, tokenizer: TextTokenizer) -> tuple[int, ...]:
        """What the decoder begins with, to answer in a language; of mBART's first models this is the language alone."""
        if target is None:
            return self.begin
        return (target,) if _is_language(tokenizer, self.begin[0]) else (self.begin[0], target)


@dataclass(frozen=True, slots=True)
class Encoded:
    """How the answer to an encoder's input is made.

    Attributes:
        begin: What the decoder begins with; nothing for a model without an encoder.
        source: The language of the input; None for that of the tokenizer.
        stated: What holds of an answer where the caller says nothing.
        beams: The search of the checkpoint; None if it states none, or the caller asks for something else.
    """

    begin: tuple[int, ...] = ()
    source: int | None = None
    stated: Seq2Seq = Seq2Seq(())
    beams: BeamOptions | None = None

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of the answer; None for no bound."""
        longest = self.stated.max_length
        return None if longest is None else max(longest - len(self.begin), 1)

    @property
    def min_tokens(self) -> int:
        """Fewest tokens of the answer."""
        return max(self.stated.min_length - len(self.begin), 0)


NOT_ENCODED = Encoded()

_S = TypeVar("_S", bound=msgspec.Struct)


class _Stated(msgspec.Struct):
    """The fields of both files that count, as transformers names them."""

    decoder_start_token_id: int | None = None
    bos_token_id: int | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None
    min_length: int | None = None
    min_new_tokens: int | None = None
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    bad_words_ids: list[tuple[int, ...]] | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    renormalize_logits: bool | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    do_sample: bool | None = None


def read_seq2seq(checkpoint: Path) -> Seq2Seq | None:
    """Read the files of a checkpoint; None if it has no encoder, or if they cannot be read, which the engine tells."""
    try:
        if (config := read_object(checkpoint / "config.json")).get("is_encoder_decoder") is not True:
            return None
        stated = read_stated(config, read_object(checkpoint / "generation_config.json"), _Stated)
    except TemplateFileError as exc:
        _log.warning("%s: what it says of its answers is not used: %s", checkpoint, exc)
        return None
    begin = [next((i for i in (stated.decoder_start_token_id, stated.bos_token_id) if i is not None), 0)]
    if stated.forced_bos_token_id is not None:
        begin.append(stated.forced_bos_token_id)
    return Seq2Seq(
        tuple(begin),
        max_length=stated.max_new_tokens + 1 if stated.max_new_tokens else stated.max_length,
        min_length=stated.min_new_tokens + 1 if stated.min_new_tokens else stated.min_length or 0,
        no_repeat_ngram_size=stated.no_repeat_ngram_size or 0,
        encoder_no_repeat_ngram_size=stated.encoder_no_repeat_ngram_size or 0,
        banned=(*(stated.bad_words_ids or ()), *((token_id,) for token_id in stated.suppress_tokens or ())),
        begin_bans=tuple(stated.begin_suppress_tokens or ()),
        forced_end_id=stated.forced_eos_token_id,
        renormalizes=bool(stated.renormalize_logits),
        num_beams=1 if stated.do_sample else min(stated.num_beams or 1, MAX_BEAMS),
        length_penalty=1.0 if stated.length_penalty is None else stated.length_penalty,
        early_stopping=stated.early_stopping or False,
        is_sampled=bool(stated.do_sample),
    )


def read_stated(config: Mapping[str, object], own: Mapping[str, object], kind: type[_S]) -> _S:
    """What a checkpoint's config.json and generation_config.json say; a field of another type is left out."""
    fields = {name: value for file in (config, own) for name, value in file.items() if value is not None}
    read: dict[str, Any] = {}
    for each in msgspec.structs.fields(kind):
        try:
            read |= {each.name: msgspec.convert(fields[each.name], each.type)} if each.name in fields else {}
        except msgspec.ValidationError as exc:
            _log.warning("the checkpoint's %s is not used: %s", each.name, exc)
    return kind(**read)


def language_id(tokenizer: TextTokenizer, name: str, param: str) -> int:
    """The id of a language by its code.

    Raises:
        InvalidRequestError: The tokenizer has no language of this code.
    """
    for text in (name, f"__{name}__", f">>{name}<<"):
        if _LANGUAGE.fullmatch(text) and (token_id := tokenizer.added_id(text)) is not None:
            return token_id
    raise InvalidRequestError(f"{param}: the model's tokenizer has no language {shown(name)}", param=param)


def is_of_input(tokenizer: TextTokenizer, language: int) -> bool:
    """Whether the input begins with the language of the answer, as with Marian, rather than the answer."""
    return tokenizer.token_text(language).startswith(">>")


def refuse_to_continue(continues: bool | None) -> None:
    """A message is what a decoder continues, and an encoder reads whole.

    Raises:
        InvalidRequestError: It is to be continued.
    """
    if continues:
        name = "continue_final_message"
        raise InvalidRequestError(f"{name} is only allowed for a model without an encoder", param=name)


def last_text(messages: Sequence[Mapping[str, object]], param: str, *, continues: bool) -> str:
    """The text of the last message of a user, which is what a model with an encoder reads of a chat.

    Raises:
        InvalidRequestError: There is none, or an answer that has begun is to be continued.
    """
    refuse_to_continue(continues)
    for message in reversed(messages):
        if message.get("role") == "user":
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            return "\n".join(str(part.get("text") or "") for part in parts)
    raise InvalidRequestError(f"{param} must hold a message of the user", param=param)


def with_source(tokenizer: TextTokenizer, token_ids: list[int], source: int) -> list[int]:
    """An input with this language in the place of the one that the tokenizer put at its beginning or its end."""
    for at in (0, -1) if token_ids else ():
        if _is_language(tokenizer, token_ids[at]):
            return [*token_ids[:at], source, *token_ids[1:]] if at == 0 else [*token_ids[:-1], source]
    return [source, *token_ids]


def _is_language(tokenizer: TextTokenizer, token_id: int) -> bool:
    text = tokenizer.token_text(token_id)
    return _LANGUAGE.fullmatch(text) is not None and tokenizer.added_id(text) == token_id
