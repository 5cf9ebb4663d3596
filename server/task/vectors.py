"""Bodies, answers and inputs of the endpoints for vectors: embeddings, scores, reranking, classes, hidden states.

Inputs are texts, token ids and pairs of texts; long ones are encoded in a thread. A cut text loses its end, but never
the special tokens that the tokenizer puts there: vectors may be made of them.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from pydantic import Discriminator, Field, Tag

from weft.engine.wire.inputs import TokensInput
from weft.server.errors import ContextLengthError, InvalidRequestError
from weft.server.http.limits import LONG_SIZE, Workers
from weft.server.models.served_model import ServedModel
from weft.server.task.bodies import MAX_PROMPTS, Prompt
from weft.server.task.schema import Int, Text, TextOrTexts, WireModel
from weft.server.task.validation import check_range, check_token_ids
from weft.server.text.chat_template import ChatTemplateError, TemplateOptions
from weft.server.text.text_tokenizer import TextTooLongError, TokenRoom


class VectorBody(WireModel):
    """Fields that all of them have. `normalize` and `use_activation`: whether the model's last step follows."""

    model: Text | None = None
    truncate_prompt_tokens: Int | None = None
    cache_salt: Text | None = None

    # accepted, not honoured
    user: Text | None = None


class EmbeddingBody(VectorBody):
    """The body of POST /v1/embeddings. The fields from `normalize` on are extensions."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    normalize: bool | None = None
    prompt_name: Text | None = None
    input_type: Text | None = None


class PoolingBody(VectorBody):
    """The body of POST /pooling. `token_embed` asks for the hidden states of all tokens."""

    input: Prompt
    task: Literal["token_embed", "embed", "classify"] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None


class ClassifyBody(VectorBody):
    """The body of POST /v1/classify."""

    input: Prompt
    use_activation: bool | None = None


class ScoreBody(VectorBody):
    """The body of POST /v1/score: one text with each of others, or as many texts with as many others."""

    text_1: TextOrTexts
    text_2: TextOrTexts
    instruction: Text | None = None
    use_activation: bool | None = None


class Document(WireModel):
    """A document as an object."""

    text: Text


AnyDocument = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Document, Tag("object")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "object"),
]


class RerankBody(VectorBody):
    """The body of POST /v1/rerank, in Cohere's and Jina's shapes."""

    query: Text
    documents: Annotated[list[AnyDocument], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    top_n: Int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Int | None = None
    instruction: Text | None = None
    use_activation: bool | None = None


class VectorUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct):
    """A vector: numbers, or the base64 of float32 in little-endian order."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class Hidden(msgspec.Struct):
    """The hidden states of all tokens as rows of JSON, or one vector; base64 as in `Embedding`, row after row."""

    index: int
    data: msgspec.Raw | list[float] | str
    object: str = "pooling"


class Score(msgspec.Struct):
    """The score of one pair."""

    index: int
    score: float
    object: str = "score"


class Class(msgspec.Struct):
    """The most probable label, and the probabilities of all."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class VectorList(msgspec.Struct):
    """The answer, but for reranking."""

    id: str
    created: int
    model: str
    data: list[Embedding] | list[Hidden] | list[Score] | list[Class]
    usage: VectorUsage
    object: str = "list"


class Ranked(msgspec.Struct, omit_defaults=True):
    """One document: its place in the request, and how relevant it is."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class Ranking(msgspec.Struct):
    """The answer of POST /v1/rerank, the most relevant document first. `meta` is Cohere's, `usage` Jina's."""

    id: str
    model: str
    results: list[Ranked]
    usage: VectorUsage
    meta: dict[str, dict[str, str | int]]


MAX_INPUTS = 8192
"""Most inputs, or pairs, of one call."""

_CHARS_PER_TOKEN = 16
"""A text that is to be cut is first encoded as far as that; all of it only if the tokens are too few."""

_PROMPT_ALIASES = {"search_query": "query", "search_document": "document"}
"""Cohere's input types, by the names that checkpoints use."""

Input = str | list[int] | tuple[str, str]


def as_list(given: str | list[str] | list[int] | list[list[int]]) -> list[Input]:
    """One input or many, as a list.

    Raises:
        InvalidRequestError: There are too many, or none.
    """
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    inputs: list[Input] = [given] if is_one else list(given)  # type: ignore[arg-type, list-item]  # the schema's check
    check_range("the number of inputs", len(inputs), 1, MAX_INPUTS, param="input")
    return inputs


def prompted(inputs: list[Input], model: ServedModel, prompt_name: str | None, input_type: str | None) -> list[Input]:
    """Put a prompt of the checkpoint before each text.

    Raises:
        InvalidRequestError: The checkpoint has no prompt of this name, or an input is token ids.
    """
    param, name = ("prompt_name", prompt_name) if prompt_name is not None else ("input_type", input_type)
    known = model.prompts.texts
    if name is None:
        text = known[model.prompts.default] if model.prompts.default is not None else ""
        return [text + item if isinstance(item, str) else item for item in inputs]
    own = name if name in known else _PROMPT_ALIASES.get(name, name)
    if own not in known:
        listed = ", ".join(known) or "none"
        raise InvalidRequestError(f"{param} must be a prompt of this model ({listed}), got {name[:80]!r}", param=param)
    if not all(isinstance(item, str) for item in inputs):
        raise InvalidRequestError(f"{param} is for texts, and the input is token ids", param=param)
    return [f"{known[own]}{item}" for item in inputs]


class InputEncoder:
    """Encodes the inputs of one body."""

    most_per_document: int | None = None
    """Most tokens of a document's own text; None: no bound but those of the whole."""

    def __init__(
        self, model: ServedModel, body: VectorBody, param: str, instruction: str | None = None, num_queries: int = 0
    ) -> None:
        """Take what the body says of all its inputs.

        Args:
            param: The field of the inputs, for errors.
            instruction: What a reranker is asked to look for; None for its own instruction.
            num_queries: How many of the inputs, which come first, are no documents.
        """
        longest, kept = model.engine_info.max_model_len, body.truncate_prompt_tokens
        if kept is not None and kept != -1:
            check_range("truncate_prompt_tokens, when it is not -1,", kept, 1, longest, param="truncate_prompt_tokens")
        self._model, self._param, self._instruction, self._num_queries = model, param, instruction, num_queries
        self._longest = longest
        self._kept = longest if kept == -1 else kept
        self._first: str | None = None  # of the last pair
        template = model.tokenizer.template_source(False)
        self._has_pair_template = "query" in template and "document" in template
        if instruction is not None and not self._has_pair_template:
            raise InvalidRequestError("instruction needs a chat template for pairs, which this model lacks")

    async def encode(self, inputs: Sequence[Input], workers: Workers) -> list[TokensInput]:
        """The tokens of all inputs.

        Raises:
            ContextLengthError: One is too long, and the body does not ask to cut it.
            InvalidRequestError: A token id is not in the vocabulary, or an input has no tokens.
        """
        size = sum(len(item) if not isinstance(item, tuple) else len(item[0]) + len(item[1]) for item in inputs)
        # One call for all: thousands of short texts would else be as many tasks of a thread.
        size = min(size, LONG_SIZE - 1) if len(inputs) == 1 else size
        if self._has_pair_template:
            return await workers.run_template(self._model.tokenizer, size, self._encode_all, inputs)
        return await workers.run(size, self._encode_all, inputs)

    def _encode_all(self, inputs: Sequence[Input]) -> list[TokensInput]:
        return [self._encode(item, index) for index, item in enumerate(inputs)]

    def _encode(self, item: Input, index: int) -> TokensInput:
        types: list[int] = []
        try:
            if isinstance(item, tuple) and item[0] != self._first:
                # It is encoded anew with each second text, and never cut.
                self._encode_text(item[0], TokenRoom(self._longest))
                self._first = item[0]
            if isinstance(item, list):
                check_token_ids(item, self._model.engine_info.vocab_size, f"{self._param}[{index}]")
                token_ids = item if self._kept is None else item[: self._kept]
            elif isinstance(item, str):
                token_ids = self._cut(item, self._encode_text, is_document=index >= self._num_queries)
            elif self._has_pair_template:
                token_ids = self._cut(item[1], lambda text, room: self._encode_rendered(item[0], text, room))
            else:
                token_ids = self._cut(item[1], lambda text, room: self._encode_pair(item[0], text, room, types))
        except TextTooLongError as exc:
            raise self._too_long(index, exc.num_tokens, "at least ") from None
        if len(token_ids) > self._longest:
            raise self._too_long(index, len(token_ids), "")
        if not token_ids:
            message = f"{self._param}[{index}] must hold at least one token, got none"
            raise InvalidRequestError(message, param=self._param)
        return TokensInput(token_ids, types[: len(token_ids)] if any(types) else [])

    def _cut(
        self, text: str, encode: Callable[[str, TokenRoom | None], list[int]], *, is_document: bool = True
    ) -> list[int]:
        """Encode a text with what comes around it, and cut its own end if it is too long and may be cut."""
        kept = self._kept
        if is_document and self.most_per_document is not None:
            kept = min(self._longest if kept is None else kept, self.most_per_document + len(encode("", None)))
        if kept is None:
            return encode(text, TokenRoom(self._longest))
        num_chars = _CHARS_PER_TOKEN * kept
        while True:
            token_ids = encode(text[:num_chars], None)
            if num_chars >= len(text) or len(token_ids) > kept + _CHARS_PER_TOKEN:
                break
            num_chars *= 4
        if len(token_ids) <= kept:
            return token_ids
        one, none = encode("a", None), encode("", None)
        num_behind = next((i for i, (a, b) in enumerate(zip(one[::-1], none[::-1], strict=False)) if a != b), len(none))
        num_behind = min(num_behind, kept)
        return token_ids[: kept - num_behind] + token_ids[len(token_ids) - num_behind :]

    def _encode_text(self, text: str, room: TokenRoom | None) -> list[int]:
        return self._model.tokenizer.encode(text, True, room)

    def _encode_pair(self, first: str, second: str, room: TokenRoom | None, types: list[int]) -> list[int]:
        """Keep the types of the longest encoding: those of the prompt, before its end is cut."""
        token_ids, of_tokens = self._model.tokenizer.encode_pair(first, second, room)
        if len(of_tokens) > len(types):
            types[:] = of_tokens
        return token_ids

    def _encode_rendered(self, query: str, document: str, room: TokenRoom | None) -> list[int]:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if self._instruction is not None:
            messages.insert(0, {"role": "system", "content": self._instruction})
        try:
            pieces = self._model.tokenizer.render_chat(messages, TemplateOptions(repairs=False))
        except ChatTemplateError as exc:
            raise InvalidRequestError(str(exc), param=self._param) from exc
        return self._model.tokenizer.encode_rendered(pieces, room)

    def _too_long(self, index: int, num_tokens: int, at_least: str) -> ContextLengthError:
        message = (
            f"the context holds at most {self._longest} tokens, but {self._param}[{index}] has {at_least}{num_tokens}; "
            "truncate_prompt_tokens cuts it"
        )
        return ContextLengthError(message, param=self._param)
