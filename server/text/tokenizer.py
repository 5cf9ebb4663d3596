"""Turns text and messages into token ids, and ids into text, with the files of a checkpoint.

Owns the loaded vocabulary, the special tokens and the chat templates. Invariant: ids equal those of `transformers` for
the same files, except that the text of a control token inside a message stays text (see `shield`). Several threads may
call everything here at once; texts are encoded without holding the interpreter lock. A checkpoint without
tokenizer.json gets one from `tokenizer_files`.
"""

import os
import secrets
from collections.abc import Mapping, Sequence, Set
from functools import partial
from pathlib import Path

import tokenizers

from weft.engine.wire.machine import return_free_memory
from weft.engine.wire.tokenizer_files import TokenizerFilesError, special_tokens, tokenizer_folder
from weft.server.text.chat_template import RESERVED_NAMES, ChatTemplateError, ChatTemplates, TemplateOptions
from weft.server.text.detokenizer import BytesDetokenizer, WindowDetokenizer, read_token_table
from weft.server.text.shield import Shield
from weft.server.text.template_files import TemplateFileError, read_object
from weft.server.text.template_process import processes
from weft.server.text.text_tokenizer import Detokenizer, TokenRoom, fitted

# The library's thread pool is for batches. Here each text has a thread already, and the engine needs the cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TokenizerError(Exception):
    """The checkpoint's tokenizer cannot be used; one line that names the file and the fault."""


class Tokenizer:
    """A checkpoint's tokenizer. Immutable once loaded.

    Attributes:
        vocab_size: Ids with a text are below this, added tokens included; the model may have more rows.
        bos_token_id: Beginning of a sequence; None when the checkpoint names none.
        eos_token_id: End of a sequence; None when the checkpoint names none.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], templates: ChatTemplates
    ) -> None:
        """Take what `load` has read.

        Args:
            backend: Without truncation and padding.
            special_tokens: Names such as bos_token -> text; templates see the texts under these names.
        """
        self._backend = backend
        self._special_tokens = special_tokens
        self._templates = templates
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._shield = Shield([token.content for token in added.values() if token.special])
        self._table = read_token_table(backend, frozenset(token.content for token in added.values()))
        self.call_texts: Sequence[str] = ()
        self.is_of_encoder = False
        self._newline_ids = self._ids("\n", add_special_tokens=False)
        self.vocab_size = max(backend.get_vocab_size(), 1 + max(added, default=0))
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")

    @classmethod
    def load(cls, folder: Path, template_file: Path | None = None) -> "Tokenizer":
        """Read a checkpoint in Hugging Face layout, as transformers 4 or 5 wrote it.

        Args:
            template_file: A chat template in place of the checkpoint's.

        Raises:
            TokenizerError: There is no tokenizer, or a file other than a chat template cannot be read.
        """
        processes().start()  # beside all that follows
        try:
            made = tokenizer_folder(folder)
        except TokenizerFilesError as error:
            raise TokenizerError(str(error)) from error
        file = made / "tokenizer.json"
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise TokenizerError(f"{file} is not a valid tokenizer: {error}") from error
        return_free_memory()  # the parser's: half of what loading 150,000 entries takes
        backend.no_truncation()
        backend.no_padding()
        try:
            config = read_object(folder / "tokenizer_config.json")
            maps = [read_object(each / "special_tokens_map.json") for each in (made, folder)]
        except TemplateFileError as error:
            raise TokenizerError(str(error)) from error
        declared = {name: text for each in (*maps, config) for name, text in each.items()}
        named, others = special_tokens(declared)
        _declare_special(backend, [*named.values(), *others])
        return cls(backend, named, ChatTemplates.load(folder, config, template_file))

    def encode(self, text: str, add_special_tokens: bool = True, room: TokenRoom | None = None) -> list[int]:
        """Return the ids of a text; the text of a special token in it becomes that token.

        Args:
            add_special_tokens: Add what the checkpoint puts around a prompt, mostly one token at the beginning.
            room: See `long_text`; None is room for everything.

        Raises:
            TextTooLongError: It does not fit.
        """
        return self._ids(fitted(text, room, self._count), add_special_tokens)

    def encode_pair(self, first: str, second: str, room: TokenRoom | None = None) -> tuple[list[int], list[int]]:
        """Return the ids of two texts as one prompt, and the types of its tokens.

        Raises:
            TextTooLongError: There is no room for one of them.
        """
        encoded = self._backend.encode(fitted(first, room, self._count), fitted(second, room, self._count))
        return encoded.ids, encoded.type_ids

    def render_chat(self, messages: Sequence[Mapping[str, object]], options: TemplateOptions) -> list[str]:
        """Render messages with the checkpoint's chat template; `encode_rendered` makes ids of the pieces.

        Control tokens come from the template alone: such text inside messages or variables stays text.

        Args:
            messages: In OpenAI's form, JSON values only.

        Raises:
            ChatTemplateError: There is no template, or it refuses the messages, or a variable's name is taken.
        """
        given = options.variables
        taken = sorted(RESERVED_NAMES & given.keys())
        if taken:
            raise ChatTemplateError(f"chat template variable {taken[0]!r} cannot be set")
        if options.continue_final_message and messages and messages[-1].get("tool_calls"):
            raise ChatTemplateError(
                "the final message has tool calls, which end it, so it cannot be continued: leave out "
                "continue_final_message, or the calls"
            )
        template = self._templates.select(has_tools=bool(given.get("tools")))
        try:
            # The variables' own names are the template's words, their values are the caller's.
            marked = self._shield.mark((list(messages), list(given.values())), template.names)
        except ValueError as error:
            raise ChatTemplateError(str(error)) from error
        marked_messages, values = marked.value
        variables = {**self._special_tokens, **dict(zip(given, values, strict=True))}
        tag = ""
        if options.continue_final_message:
            # Behind the content stands a tag that nobody could have written; the prompt ends where it is found.
            tag = secrets.token_hex(8) + " "
            final = marked_messages[-1]
            marked_messages[-1] = {**final, "content": f"{final.get('content') or ''}{tag}"}
        rendered = template.render(
            marked_messages,
            options.add_generation_prompt,
            variables,
            repairs=options.repairs,
            call_texts=self.call_texts,
        )
        return marked.cut(_before(rendered, tag) if options.continue_final_message else rendered)

    def encode_rendered(self, pieces: list[str], room: TokenRoom | None = None) -> list[int]:
        """Return the ids of a rendered prompt. Raises as `encode` does."""
        return self._encode_pieces(self._fitted_pieces(pieces, room))

    def encode_inserted(self, text: str, end: list[str], room: TokenRoom | None = None) -> list[int]:
        """Return the ids of a caller's text that goes on a rendered prompt, and of the rendered pieces behind it.

        Raises:
            ChatTemplateError: The text uses every private-use character.
            TextTooLongError: It does not fit.
        """
        try:
            marked = self._shield.mark(fitted(text, room, self._count))
        except ValueError as error:
            raise ChatTemplateError(str(error)) from error
        return self._encode_pieces([*marked.cut(marked.value), *end], is_start=False)

    def encode_continuation(self, text: str, room: TokenRoom | None = None) -> list[int]:
        """Return the ids of a text that follows other text; nothing is put in front. Raises as `encode` does."""
        return self._continuation_ids(fitted(text, room, self._count))

    def token_id(self, text: str) -> int | None:
        """Return the id of a token by its text; None when the vocabulary has none."""
        return self._backend.token_to_id(text)

    @property
    def template_variables(self) -> frozenset[str]:
        """The names that the checkpoint's chat template uses and does not define; empty when there is no template."""
        template = self._templates.own(has_tools=False)
        return template.variables if template else frozenset()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids; an id outside the vocabulary has none, invalid UTF-8 becomes U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return "".join([detokenizer.feed(token_id) for token_id in token_ids]) + detokenizer.finish()

    def detokenizer(self, skip_special_tokens: bool = True, kept: Set[int] = frozenset()) -> Detokenizer:
        """Return a decoder for one output, whose joined pieces are what `decode` returns; it never skips `kept`."""
        skipped = self._special_ids - kept if skip_special_tokens else frozenset()
        if self._table is not None:
            return BytesDetokenizer(self._table, skipped)
        return WindowDetokenizer(self._backend, skipped)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, which may be part of a character; b"" outside the vocabulary."""
        if self._table is not None:
            return self._table.bytes_of[token_id]
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def token_text(self, token_id: int) -> str:
        r"""Return one token as OpenAI's logprobs show it: a byte that is not a whole character reads \xe4."""
        return self.token_bytes(token_id).decode("utf-8", "backslashreplace")

    def added_id(self, text: str) -> int | None:
        """Return the id of a control token, or of another token that was added to the vocabulary, by its text."""
        return self._added_ids.get(text)

    def template_source(self, has_tools: bool) -> str:
        """Return the source of the chat template that `render_chat` takes; empty when there is none."""
        template = self._templates.own(has_tools)
        return template.source if template else ""

    def is_special(self, token_id: int) -> bool:
        """Tell whether `skip_special_tokens` leaves this id out."""
        return token_id in self._special_ids

    def bad_word_ids(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Return the ids of a forbidden word in each way to write it: at the start, after a space, after other text.

        Raises:
            ValueError: The word consists of white space.
        """
        word = word.strip()
        if not word:
            raise ValueError("a bad word must not be empty")
        ways = [self._ids(word, False), self._ids(" " + word, False), self._continuation_ids(word)]
        return tuple(dict.fromkeys(tuple(ids) for ids in ways))

    def _fitted_pieces(self, pieces: list[str], room: TokenRoom | None) -> list[str]:
        """Cut from the front what does not fit into the room."""
        num_chars = sum(map(len, pieces))
        num_cut = num_chars - len(fitted("".join(pieces), room, self._count))
        fitting = []
        for piece in pieces:
            if num_cut < len(piece):
                fitting.append(piece[num_cut:])
            num_cut = max(0, num_cut - len(piece))
        return fitting

    def _encode_pieces(self, pieces: list[str], *, is_start: bool = True) -> list[int]:
        """Encode a prompt, or what follows its start, that was cut where text could be part of a control token."""
        encode_first = partial(self._ids, add_special_tokens=False) if is_start else self._continuation_ids
        whole = encode_first("".join(pieces))
        if len(pieces) < 2:
            return whole
        separate = encode_first(pieces[0])
        for piece in pieces[1:]:
            separate += self._continuation_ids(piece)
        # Cuts lead to tokens that are unusual for the model: cut only if a control token would arise else.
        return whole if self._special_only(whole) == self._special_only(separate) else separate

    def _special_only(self, ids: list[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self._special_ids]

    def _continuation_ids(self, text: str) -> list[int]:
        """Encode text that follows other text: at the start of a text, SentencePiece would add a space."""
        ids = self._ids("\n" + text, False)
        num_newline = len(self._newline_ids)
        return ids[num_newline:] if ids[:num_newline] == self._newline_ids else self._ids(text, False)

    def _count(self, text: str) -> int:
        return len(self._ids(text, False))

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch, because the library releases the interpreter lock for batches only.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _named_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def _before(rendered: str, tag: str) -> str:
    """Cut a rendered prompt at the tag in the last message; the tag ends in a space.

    Raises:
        ChatTemplateError: The template does not show the last message.
    """
    position = rendered.rfind(tag.strip())
    if position < 0:
        raise ChatTemplateError("the chat template does not show the final message, so it cannot be continued")
    # A template that trims messages has removed the tag's space; it would also have removed the spaces before the tag.
    is_trimmed = not rendered.startswith(tag, position)
    return rendered[:position].rstrip() if is_trimmed else rendered[:position]


def _declare_special(backend: tokenizers.Tokenizer, texts: list[str]) -> None:
    """Make tokens special that only the configuration declares so, as `transformers` does. Adds no token."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = [text for text in dict.fromkeys(texts) if text not in added and backend.token_to_id(text) is not None]
    if missing:
        backend.add_special_tokens(missing)
