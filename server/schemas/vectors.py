"""Wire types of the endpoints for vectors: embeddings, scores of pairs, reranking, classes, hidden states."""

from typing import Annotated, Literal

import msgspec
from pydantic import Discriminator, Field, Tag

from weft.server.schemas.common import Int, Text, TextOrTexts, WireModel
from weft.server.schemas.completions import MAX_PROMPTS, Prompt


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
