"""Reads from a checkpoint what it is for, and how its vectors are made.

Embeddings follow the files of sentence-transformers: `modules.json` lists the model, `1_Pooling`, and behind it any
`2_Dense` and `2_Normalize`. A classifier is a `...ForSequenceClassification` with the matrix `score`. The score of a
reranker that answers yes or no is the difference of two logits. `families/registry.py` tells them apart.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import cast

import torch
from torch.nn import functional

from weft.engine.batch import Floats
from weft.engine.describe.config import ModelConfig, ModelFacts
from weft.engine.families.registry import CLASSIFIER, is_headless, own_task
from weft.engine.families.switches import Classifier
from weft.engine.fields import Fields
from weft.engine.layers.norm import LayerNorm
from weft.engine.sampling.alignment import Alignment
from weft.engine.sampling.pooling import PoolingKind, VectorModel, unit_length
from weft.engine.weights.tensor_files import CheckpointSource
from weft.engine.wire.errors import ModelError
from weft.engine.wire.messages import EngineOptions
from weft.engine.wire.params import VectorInfo

_KINDS: dict[str, PoolingKind] = {
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "mean_sqrt_len": "mean_sqrt_len",
    "weightedmean": "weightedmean",
}
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda values: values,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": functional.gelu,
    "Sigmoid": torch.sigmoid,
    "SiLU": functional.silu,
}
_MODULES = {"Transformer", "Pooling", "Dense", "Normalize", "Dropout", "LogitScore"}

Layer = tuple[torch.Tensor, torch.Tensor | None, Callable[[torch.Tensor], torch.Tensor]]
"""Weight (outputs, inputs), bias and activation, in float32 on the CPU."""

Module = tuple[str, Path]
"""The kind of a module, such as Pooling, and its folder."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a checkpoint is for.

    Attributes:
        name: generate, embed or classify.
        architecture: The first of config.json.
        modules: Of sentence-transformers, in their order; empty without them.
        max_num_tokens: Longest text that the vectors are meant for; None if the checkpoint names none.
    """

    name: str
    architecture: str
    modules: Sequence[Module]
    max_num_tokens: int | None


def find_task(folder: Path, wanted: str, ranks: str = "") -> Task:
    """Decide what a model folder is for.

    Args:
        wanted: generate, embed or classify; auto as the checkpoint says.
        ranks: The settings that ask for several ranks, which can only generate; empty for one.

    Raises:
        ModelError: A file is malformed, or the checkpoint lacks what is wanted, or ranks cannot do it.
    """
    fields = Fields.read(folder / "config.json")
    architecture = (*fields.texts("architectures"), "")[0]
    modules = _read_modules(folder)
    own = own_task(folder)
    name = own if wanted == "auto" else wanted
    if name == "generate" and (is_headless(architecture) or architecture.endswith(CLASSIFIER)):
        raise ModelError(f"task generate needs an output head, and {architecture} has none")
    if name == "classify" and own != "classify":
        raise ModelError(f"task classify needs a classifier's head, and {architecture} has none")
    if ranks and name != "generate":
        raise ModelError(f"{ranks} does not go together with task {name}")
    return Task(name, architecture, modules, _longest_text(folder) if name != "generate" and modules else None)


def read_alignment(folder: Path, facts: ModelFacts) -> Alignment | None:
    """What of a whole model follows a sound in time; None for nothing."""
    shape = facts.audio
    if not isinstance(facts, ModelConfig) or not facts.aligned or shape is None:
        return None
    width = Fields.read(folder / "config.json").size("median_filter_width", 7) // 2 * 2 + 1
    return Alignment(len(facts.aligned), shape.num_positions(shape.max_samples), width, facts.hidden_size)


def read_vector_model(folder: Path, task: Task, facts: ModelFacts, options: EngineOptions) -> VectorModel | None:
    """How the vectors of a checkpoint are made; None if it generates.

    Raises:
        ModelError: A file is missing or malformed, or asks for what Weft does not compute.
    """
    if task.name == "generate":
        return None
    if facts.num_input_tokens:
        raise ModelError(f"task {task.name} is not supported by a model with an encoder and a decoder")
    if options.load_format == "dummy" and (task.modules or task.name == "classify"):
        raise ModelError("load_format dummy makes no heads for vectors: task generate is the only one")
    if task.name == "classify":
        return _classifier(folder, task, facts)
    own = _pooling_kind(task.modules, "mean" if facts.is_bidirectional else "last")
    kind = own if options.pooling == "auto" else cast(PoolingKind, options.pooling)
    layers = [_dense(path) for name, path in task.modules if name == "Dense"]
    size = facts.hidden_size
    for weight, _, _ in layers:
        if weight.shape[1] != size:
            raise ModelError(f"a Dense module takes {weight.shape[1]} values, but {size} come to it")
        size = weight.shape[0]
    dimensions, is_matryoshka = _matryoshka(folder)
    is_normalized = not task.modules or any(name == "Normalize" for name, _ in task.modules)
    info = VectorInfo(size, facts.hidden_size, (), is_normalized, dimensions, is_matryoshka)
    return VectorModel(kind, partial(_run, layers), unit_length, is_normalized, info)


def _longest_text(folder: Path) -> int | None:
    """Where sentence-transformers cuts texts: older versions say it in a file of their own.

    Raises:
        ModelError: That file wants texts in lower case, and the tokenizer does not make them so.
    """
    file, tokenizer = folder / "sentence_bert_config.json", folder / "tokenizer.json"
    if file.exists() and Fields.read(file).flag("do_lower_case", False) and tokenizer.exists():
        normalizer = json.dumps(Fields.read(tokenizer).raw("normalizer"))
        if '"lowercase": true' not in normalizer and '"Lowercase"' not in normalizer:
            raise ModelError(f"{file}: do_lower_case is not supported: the tokenizer must make texts lower case")
    for name, field in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        if (folder / name).exists() and (longest := Fields.read(folder / name).optional_number(field)):
            return int(min(longest, 1 << 40))
    return None


def _read_modules(folder: Path) -> list[Module]:
    path = folder / "modules.json"
    if not path.exists():
        return []
    modules: list[Module] = []
    for fields in Fields.read_list(path):
        kind, place = (fields.optional_text("type") or "").rpartition(".")[2], fields.optional_text("path") or ""
        if kind not in _MODULES:
            raise ModelError(f"{path}: module {kind} is not supported (supported: {', '.join(sorted(_MODULES))})")
        if ".." in PurePosixPath(place).parts or PurePosixPath(place).is_absolute():
            raise fields.wrong("path", "a folder within that of the model")
        if kind == "Transformer" and place:
            raise fields.wrong("path", "empty: the model's files must be beside modules.json")
        modules.append((kind, folder / place))
    return modules


def _pooling_kind(modules: Sequence[Module], default: PoolingKind) -> PoolingKind:
    """What the module Pooling says; the default without that."""
    path = next((path for kind, path in modules if kind == "Pooling"), None)
    if path is None:
        return default
    fields = Fields.read(path / "config.json")
    named = fields.raw("pooling_mode")  # since sentence-transformers 5.4, else a flag for each mode
    flags = [name for name in fields.names() if name.startswith("pooling_mode_") and fields.flag(name, False)]
    names = [name.removeprefix("pooling_mode_") for name in flags]
    if named is not None:
        names = [str(mode) for mode in (named if isinstance(named, list) else [named])]
    modes = [name.removesuffix("_token").removesuffix("_tokens") for name in names]
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise ModelError(f"{path}: pooling {', '.join(modes)} is not supported (one of {', '.join(_KINDS)})")
    if not fields.flag("include_prompt", True):
        raise ModelError(f"{path}: include_prompt false is not supported")
    return _KINDS[modes[0]]


def _dense(folder: Path) -> Layer:
    fields = Fields.read(folder / "config.json")
    ends = fields.optional_text("module_input_name"), fields.optional_text("module_output_name")
    if fields.flag("use_residual", False) or any(end not in (None, "sentence_embedding") for end in ends):
        raise ModelError(f"{folder}: a Dense module must map sentence_embedding to itself, without a residual")
    name = (fields.optional_text("activation_function") or "Tanh").rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelError(f"{folder}: activation {name} is not supported (supported: {', '.join(_ACTIVATIONS)})")
    source = CheckpointSource(folder, torch.device("cpu"), is_half=False)
    return read_layer(source, "linear", _ACTIVATIONS[name])


def read_layer(
    source: CheckpointSource, name: str, activation: Callable[[torch.Tensor], torch.Tensor] = _ACTIVATIONS["Identity"]
) -> Layer:
    """A linear layer of a head, in float32, with its bias if it has one."""
    weight, bias = source.read(f"{name}.weight").float(), None
    if source.shape(f"{name}.bias") is not None:
        bias = source.read(f"{name}.bias").float()
    return weight, bias, activation


def _run(layers: Sequence[Layer], values: Floats) -> Floats:
    hidden = torch.from_numpy(values)
    for weight, bias, activation in layers:
        hidden = activation(functional.linear(hidden, weight, bias))
    result: Floats = hidden.numpy()
    return result


def _matryoshka(folder: Path) -> tuple[tuple[int, ...], bool]:
    """Numbers of leading values that are vectors too, and whether there are any such vectors."""
    fields = Fields.read(folder / "config.json")
    dimensions = fields.integers("matryoshka_dimensions")
    return dimensions, bool(dimensions) or fields.flag("is_matryoshka", False)


# --- classifiers --------------------------------------------------------------------------------------------------


def _classifier(folder: Path, task: Task, facts: ModelFacts) -> VectorModel:
    fields = Fields.read(folder / "config.json")
    source = CheckpointSource(folder, torch.device("cpu"))
    head = facts.switches.classifier if isinstance(facts, ModelConfig) else None
    if task.architecture.endswith(CLASSIFIER):
        layers = _head_layers(source, head) if head else [read_layer(source, "score")]
        labels = _labels(fields, layers[-1][0].shape[0])
    else:
        layers, labels = [_yes_or_no(folder, task, facts, fields, source)], ("relevant",)
    finish = _last_step(fields, len(labels))
    info = VectorInfo(len(labels), facts.hidden_size, labels)
    return VectorModel(head.pooling if head else "last", partial(_run, layers), finish, True, info)


def _head_layers(source: CheckpointSource, head: Classifier) -> list[Layer]:
    """The layers of an encoder's head."""
    scores = read_layer(source, head.scores)
    if not head.dense:
        return [scores]
    activation = _ACTIVATIONS[head.activation]
    if head.norm:
        weight, bias, _ = read_layer(source, head.norm)
        norm, before = LayerNorm(weight, bias, head.eps), activation
        activation = lambda values: norm(before(values))  # noqa: E731
    return [read_layer(source, head.dense, activation), scores]


def _labels(fields: Fields, num_labels: int) -> tuple[str, ...]:
    names = fields.section("id2label")
    return tuple(names.optional_text(str(index)) or f"LABEL_{index}" for index in range(num_labels))


def _last_step(fields: Fields, num_labels: int) -> Callable[[Floats], Floats]:
    """Logits to scores: what the checkpoint names, else by the kind of the problem, else by the number of labels."""
    named = fields.section("sentence_transformers").optional_text("activation_fn")
    named = named or fields.optional_text("sbert_ce_default_activation_function")
    problem = fields.optional_text("problem_type")
    if named or problem == "regression":
        name = (named or "Identity").rpartition(".")[2]
        if name not in _ACTIVATIONS:
            raise ModelError(f"activation {name} is not supported (supported: {', '.join(_ACTIVATIONS)})")
        activation = _ACTIVATIONS[name]
    elif num_labels == 1 or problem == "multi_label_classification":
        activation = torch.sigmoid
    else:
        activation = partial(torch.softmax, dim=-1)
    return lambda values: cast(Floats, activation(torch.from_numpy(values)).numpy())


def _yes_or_no(folder: Path, task: Task, facts: ModelFacts, fields: Fields, source: CheckpointSource) -> Layer:
    """The row of the output head for yes, less that for no: its product is the difference of the two logits."""
    if not isinstance(facts, ModelConfig) or facts.switches.logit_soft_cap is not None or facts.switches.head_bias:
        raise ModelError(f"scores by yes and no are not supported for {task.architecture}")
    module = next((path for kind, path in task.modules if kind == "LogitScore"), None)
    if module is not None:
        config = Fields.read(module / "config.json")
        yes, no = config.integer("true_token_id"), config.optional_integer("false_token_id")
    else:
        no, yes = _ids_of(folder, fields)
    names = facts.switches.names
    has_head = source.shape(f"{names.head}.weight") is not None
    weight = source.read(f"{names.head if has_head else names.embedding}.weight").float() * facts.switches.logit_scale
    if not all(0 <= token_id < len(weight) for token_id in (yes, yes if no is None else no)):
        raise ModelError(f"the ids of yes and no must be from 0 to {len(weight) - 1}, got {yes} and {no}")
    row = weight[yes] if no is None else weight[yes] - weight[no]
    return row[None].clone(), None, _ACTIVATIONS["Identity"]


def _ids_of(folder: Path, fields: Fields) -> list[int]:
    """The ids of the texts for no and yes in `classifier_from_token`."""
    from tokenizers import Tokenizer

    texts = fields.texts("classifier_from_token")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [token_id for text in texts if (token_id := tokenizer.token_to_id(text)) is not None]
    if len(texts) != 2 or len(ids) != 2:
        raise fields.wrong("classifier_from_token", "the texts of two tokens of the vocabulary, no and yes")
    return ids
