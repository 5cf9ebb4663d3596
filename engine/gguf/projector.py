"""The record of a type of projector, and what all of them read of the metadata of an mmproj file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from weft.engine.gguf.file import GgufError, GgufModel

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Projector:
    """What models with one type of projector are in transformers.

    Attributes:
        architecture: Of the whole model in config.json; `model_type` is that, too.
        texts: The model_type of a text half, by the architecture of its file.
        tokens: Texts of control tokens that the model must have; the first stands for features.
        layer: Beginning of the names of a layer's tensors, with {} for its number.
        leaves: Names of a layer's tensors by those in a file, without `.weight` and `.bias` or with the one ending that
            differs. Several with one name are one tensor, along its outputs in this order.
        others: The same for all other tensors; several with one name are slices of time.
        output: The tensor in the file whose outputs are values of the text half's embeddings.
        config: Further fields of config.json.
        processor: Contents of preprocessor_config.json and processor_config.json.
        ids: Fields of config.json for ids of tokens, by text.
        roles: Fields of tokenizer_config.json for texts of tokens.
        output_is_last: Whether the outputs are the last dimension of that tensor.
        has_halves: Whether the halves of each head of queries and keys lie in turn in the file.
        less: What was added to the weights of a tensor in the file.
        batched: Tensors of the module that have a dimension for pictures before others.
        unused: Tensors that the module has, nothing uses, and the file has not: which others take their place.
        left_out: Tensors in the file that are of no use.
        spare_token: Whether the unknown token may stand for features: no text becomes it.
    """

    architecture: str
    model_type: str
    texts: Mapping[str, str]
    tokens: tuple[str, ...]
    layer: str
    leaves: Mapping[str, str]
    others: Mapping[str, str]
    output: str
    config: Callable[[GgufModel], Json]
    processor: Callable[[GgufModel], tuple[Json, Json]]
    ids: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    output_is_last: bool = False
    has_halves: bool = False
    less: Mapping[str, float] = field(default_factory=dict)
    batched: tuple[str, ...] = ()
    unused: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    spare_token: bool = False


def number(file: GgufModel, name: str, default: int | None = None) -> int:
    """A number above 0 of the encoder's metadata."""
    key = f"clip.vision.{name}"
    value = file.optional(key, int)
    value = default if value is None else value
    if value is None or value < 1:
        raise GgufError(f"{file.files[0].name}: {key} must be a number above 0, got {value}")
    return value


def sizes(file: GgufModel, **more: object) -> Json:
    """Fields that most of the encoders' configurations have."""
    return {
        "hidden_size": number(file, "embedding_length"),
        "intermediate_size": number(file, "feed_forward_length"),
        "num_hidden_layers": number(file, "block_count"),
        "num_attention_heads": number(file, "attention.head_count"),
        "image_size": number(file, "image_size"),
        "patch_size": number(file, "patch_size"),
        "layer_norm_eps": file.value("clip.vision.attention.layer_norm_epsilon", float),
    } | more


def shown(file: GgufModel, kind: str, size: Mapping[str, object], **more: object) -> Json:
    """Settings of an image processor."""
    found = {name: file.values(f"clip.vision.{name}", float) for name in ("image_mean", "image_std")}
    for name, values in found.items():
        if len(values) != 3:
            raise GgufError(f"{file.files[0].name}: clip.vision.{name} must have 3 numbers, got {len(values)}")
    return {"image_processor_type": kind, "size": size, **found, **more}


def square(file: GgufModel) -> Json:
    """The size of a picture as the encoder reads it."""
    size = number(file, "image_size")
    return {"height": size, "width": size}


def side(file: GgufModel, default: int | None = None) -> int:
    """Features in a row of a picture."""
    patches = number(file, "image_size") // number(file, "patch_size")
    return patches // number(file, "projector.scale_factor", default)


def flag(file: GgufModel, name: str) -> bool:
    """Whether something is said to be so."""
    return bool(file.optional(f"clip.{name}", bool))
