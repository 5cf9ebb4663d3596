"""What an mmproj file makes of the folder of a GGUF model that it lies beside: the folder of a model that sees.

Its tensors stay in the file. config.json says where they lie, as it does of the text half, under the names of
transformers' module, and what of a tensor lies in several places. Nothing of the file is left out without a word.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from weft.engine.gguf.file import GgufError, GgufModel, GgufTensor
from weft.engine.gguf.projector import Json, Projector, number
from weft.engine.gguf.projectors import projector_of

_KIND = re.compile(r"(?:^|-)(b?f16|f32|(?:ud-)?[it]?q\d[a-z0-9-]*|mxfp4[a-z0-9-]*)$")
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_KINDS = ("f16", "bf16", "q8-0", "f32")
"""Types in the order in which a file is taken."""
_LAYER = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


def is_mmproj(name: str) -> bool:
    """Whether the name of a file says that it is for what sees."""
    return name.lower().endswith(".gguf") and "mmproj" in _words(name)


def choose_mmproj(names: Iterable[str], model: str) -> str | None:
    """Of the files of a folder or repository the one whose name says that it goes with a model; None: there is none.

    A name that says nothing goes with the model beside it if there is one model, of however many types. Of several
    types one in 16 bits is taken.

    Args:
        model: The name of the model's file.
    """
    names, own, found = list(names), _model_of(model), []
    is_only = all(_model_of(name) == own for name in names if _is_model(name))
    for name in filter(is_mmproj, names):
        kind = match[1] if (match := _KIND.search(base := _words(name))) else ""
        told = re.sub(r"(^|-)model$", "", _words(_KIND.sub("", base).replace("mmproj", "-")))
        whole = rf"(^|-){re.escape(told)}(?!-\d(-|$))(-|$)"  # phi-3 is not phi-3.5
        if re.search(whole, own) if told else is_only:
            found.append((-len(told), _KINDS.index(kind) if kind in _KINDS else len(_KINDS), name))
    return min(found)[-1] if found else None


def _is_model(name: str) -> bool:
    return name.lower().endswith(".gguf") and not is_mmproj(name) and "imatrix" not in name.lower()


def _model_of(name: str) -> str:
    """The name of a model's file without its type and its part."""
    return _KIND.sub("", _PART.sub("", _words(name)))


def _words(name: str) -> str:
    """A file's own name in small letters, with single dashes between words."""
    base = name.rpartition("/")[2].lower().removesuffix(".gguf")
    return re.sub(r"[-._ ]+", "-", base).strip("-")


def mmproj_beside(file: Path) -> Path | None:
    """The mmproj file in the folder of a model's file, or of its repository in the hub's cache; None: there is none."""
    is_in_cache = len(file.parents) > 2 and file.parents[2].name == "snapshots"
    for folder in file.parents[: 1 + is_in_cache]:
        if name := choose_mmproj((each.name for each in folder.glob("*.gguf")), file.name):
            return folder / name
    return None


def add_mmproj(contents: dict[str, Json], model: GgufModel, mmproj: GgufModel) -> None:
    """Make the files of a model that sees of those of its text half.

    Args:
        contents: By the names of files; config.json is that of `describe`, with the versions of all files.

    Raises:
        GgufError: The file is damaged, of a type that is not supported, or does not go with the model.
    """
    projector, text = projector_of(mmproj), contents["config.json"]
    family, size = model.value("general.architecture", str), text["hidden_size"]
    unfit = f"{mmproj.files[0].name} does not go with {model.files[0].name}"
    if family not in projector.texts:
        raise GgufError(f"{unfit}: it is for models of architecture {' or '.join(projector.texts)}, not {family}")
    output = mmproj.tensors.get(projector.output)
    if output is None:
        raise GgufError(f"{mmproj.files[0].name} lacks tensor {projector.output}")
    if (found := output.shape[-1 if projector.output_is_last else 0]) != size:
        raise GgufError(
            f"{unfit}: a feature of a picture has {found:,} values, and the model's embeddings have {size:,}"
        )
    ids, (placeholder, *others) = _control_tokens(model), _tokens(projector, model)
    if lacking := [token for token in (placeholder, *others) if token not in ids]:
        raise GgufError(f"{unfit}: the model has no control token {', '.join(lacking)}, which pictures need")
    quantization = text.pop("quantization_config")
    assert isinstance(quantization, dict)
    seeing = _tensors(projector, mmproj, len(quantization["files"]))
    files = [*quantization["files"], *map(str, mmproj.files)]
    pictures, processor = projector.processor(mmproj)
    if placeholder != projector.tokens[0]:
        processor["image_token"] = placeholder
    contents["config.json"] = {
        "architectures": [projector.architecture],
        "model_type": projector.model_type,
        "text_config": {**text, "model_type": projector.texts[family], **_rope(model, text["rope_scaling"])},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": ids[placeholder],
        **{name: ids[token] for name, token in projector.ids.items() if token in ids},
        **projector.config(mmproj),
        "quantization_config": {**quantization, "files": files, "seeing": seeing},
    }
    contents["preprocessor_config.json"], contents["processor_config.json"] = pictures, processor
    contents["tokenizer_config.json"] |= projector.roles
    added = contents["tokenizer.json"]["added_tokens"]
    assert isinstance(added, list)
    for token in added:  # some files say that these are not special
        token["special"] |= token["content"] in (placeholder, *others)


def _control_tokens(model: GgufModel) -> dict[str, int]:
    """Those that are whole in every text."""
    tokens, types = model.values("tokenizer.ggml.tokens", str), model.values("tokenizer.ggml.token_type", int)
    kinds = (_UNKNOWN, _CONTROL, _USER_DEFINED)
    return {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind in kinds}


def _tokens(projector: Projector, model: GgufModel) -> tuple[str, ...]:
    """What must be in the vocabulary.

    LLaVA's own has no token for pictures where it is that of Llama. Then the unknown one will do: no text becomes it
    where every byte has a token.
    """
    tokens, unknown = model.values("tokenizer.ggml.tokens", str), model.optional("tokenizer.ggml.unknown_token_id", int)
    is_spare = projector.spare_token and projector.tokens[0] not in tokens and "<0x00>" in tokens
    return (tokens[unknown or 0],) if is_spare and 0 <= (unknown or 0) < len(tokens) else projector.tokens


def _rope(model: GgufModel, scaling: object) -> Json:
    """Positions of three dimensions: how many frequencies have each."""
    sections = model.values("[ARCH].rope.dimension_sections", int)
    given = scaling if isinstance(scaling, dict) else {"rope_type": "default"}
    return {"rope_scaling": {**given, "mrope_section": sections[:3]}} if sections else {}


def _tensors(projector: Projector, mmproj: GgufModel, first_file: int) -> dict[str, Json]:
    """The tensors of transformers' module, and where their parts lie."""
    name, num_layers = mmproj.files[0].name, number(mmproj, "block_count")
    if num_layers > len(mmproj.tensors):
        raise GgufError(f"{name}: block_count is {num_layers:,}, and the file has {len(mmproj.tensors):,} tensors")
    leaves = _leaves(projector, mmproj)
    order = {each: i for i, each in enumerate((*leaves, *projector.others))}
    parts: dict[str, list[tuple[int, Json]]] = {}
    for each, tensor in mmproj.tensors.items():
        layer = _LAYER.fullmatch(each)
        if each in projector.left_out:
            continue
        found = _target(leaves, f"{layer[2]}.{layer[3]}") if layer else _target(projector.others, each)
        if found is None or (layer and int(layer[1]) >= num_layers):
            raise GgufError(f"{name}: tensor {each} has no place in a model of type {projector.model_type}")
        target, key = found
        target = projector.layer.format(layer[1]) + target if layer else target
        parts.setdefault(target, []).append((order[key], _place(projector, mmproj, each, tensor, first_file)))
    begins = [projector.layer.format(i) for i in range(num_layers)]
    for target in (*(f"{begin}{leaf}" for begin in begins for leaf in leaves.values()), *projector.others.values()):
        if target not in parts and f"{target}.weight" not in parts:
            raise GgufError(f"{name}: a tensor is missing: what becomes {target}")
    parts |= {target: parts[source] for target, source in projector.unused.items() if source in parts}
    return {
        target: _joined(target, [place for _, place in sorted(each, key=lambda part: part[0])], projector)
        for target, each in parts.items()
    }


def _target(names: Mapping[str, str], name: str) -> tuple[str, str] | None:
    """A tensor's name in transformers' module, and the name in `names` that it comes from; None: there is none."""
    own, _, end = name.rpartition(".")
    if name in names:
        return names[name], name
    return (f"{names[own]}.{end}", own) if own in names else None


def _leaves(projector: Projector, mmproj: GgufModel) -> Mapping[str, str]:
    """Names in layers. Older converters gave the two matrices of the feed-forward each other's name."""
    leaves, down = projector.leaves, mmproj.tensors.get("v.blk.0.ffn_down.weight")
    is_swapped = down is not None and down.shape[-1] == number(mmproj, "embedding_length") != down.shape[0]
    swapped = {"ffn_up": leaves["ffn_down"], "ffn_down": leaves["ffn_up"]}
    return {**leaves, **swapped} if is_swapped and "ffn_gate" not in leaves else leaves


def _place(projector: Projector, mmproj: GgufModel, name: str, tensor: GgufTensor, first_file: int) -> Json:
    """Where a tensor lies and what has to be undone."""
    place: Json = {"type": tensor.kind, "file": first_file + mmproj.files.index(tensor.file), "offset": tensor.offset}
    place |= {"shape": list(tensor.shape), "row_bytes": tensor.row_bytes, "less": projector.less.get(name, 0.0)}
    if projector.has_halves and re.search(r"\.attn_[qk]\.", name):
        place["heads"] = heads = number(mmproj, "attention.head_count")
        if tensor.shape[0] % (2 * heads):
            raise GgufError(f"tensor {name} has {tensor.shape[0]} rows for {heads} heads")
    return place


def _joined(target: str, places: list[Json], projector: Projector) -> Json:
    """One tensor of several: matrices along their outputs, convolutions along time."""
    shapes = [place["shape"] for place in places]
    first = shapes[0]
    assert isinstance(first, list)
    if any(shape != first for shape in shapes):
        raise GgufError(f"the parts of {target} have shapes {', '.join(map(str, shapes))}")
    shape = first
    if len(places) > 1:
        shape = [*first[:2], len(places), *first[2:]] if len(first) == 4 else [len(places) * first[0], *first[1:]]
    if target in projector.batched:
        shape = [1] * (3 - len(shape)) + shape
    parts = {str(i): place for i, place in enumerate(places)}
    return {"file": places[0]["file"], "shape": shape, "parts": parts}
