"""Reads how the matrices of a checkpoint are stored, from the quantization_config of its config.json.

`read_quantization` returns a `Quantization`, which knows the `Scheme` of every module. What Weft has no decoder for is
refused with a `ModelError` that says what is read. The decoders are in `engine/weights/methods.py`, and that of GGUF in
`engine/gguf/tensors.py`. Imports no torch.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from pathlib import Path
from typing import NoReturn

from weft.engine.fields import Fields
from weft.engine.weights.module_patterns import EMBEDDINGS, HEAD, ModulePattern, listed_in, pattern_in, target_of
from weft.engine.wire.errors import ModelError


@dataclass(frozen=True, slots=True)
class Scheme:
    """How matrices are stored.

    Attributes:
        bits: Of a value; 16 for matrices that are not quantized.
        group_size: Inputs of an output that share a scale; None if all of them do, or in blocks.
        block: Outputs and inputs that share a scale; None if no two outputs do.
        is_float: Whether values are floating-point numbers.
        activation_bits: What the checkpoint was made for; Weft keeps activations in the model's dtype.
        has_zeros: Whether groups have zero points or offsets, too.
        is_scattered: Whether groups are of any inputs.
        has_table: Whether values are those of a table, which is of integers of 8 bits or is rounded to these.
        label: The format's own name for it, if it has one.
    """

    bits: int
    group_size: int | None = None
    block: tuple[int, int] | None = None
    is_float: bool = False
    activation_bits: int = 16
    has_zeros: bool = False
    is_scattered: bool = False
    has_table: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        """Such as W4A16 or Q4_K."""
        return self.label or f"W{self.bits}A{self.activation_bits}{' in floating point' * self.is_float}"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of a checkpoint are stored.

    Attributes:
        method: Which decoder reads them.
        name: Of the method, for the log.
        rules: Patterns of module names and the schemes of these; the first that fits counts.
        zeros_lack_one: Whether GPTQ's zero points are stored less one.
        plain: Patterns of names of modules that are not quantized, wherever they begin.
        has_kv_scales: Whether scales of K and V, where it has some, are for 8 bits.
    """

    method: str
    name: str
    rules: tuple[tuple[ModulePattern, Scheme], ...]
    zeros_lack_one: bool = False
    plain: tuple[ModulePattern, ...] = ()
    has_kv_scales: bool = True

    def expected(self, module: str) -> Scheme | None:
        """The scheme that config.json gives a module, None for none; what is stored may tell more."""
        if any(pattern.search(module) for pattern in self.plain):
            return None
        return next((scheme for pattern, scheme in self.rules if pattern.match(module)), None)

    def kept_schemes(self, names: Iterable[str], *, in_order: bool) -> list[Scheme]:
        """The schemes of matrices, or of experts, with these names; empty if one of them has to be kept plain.

        Args:
            in_order: Whether groups must be of neighbours: for a part of the inputs, and for experts, which all get the
                same ones.
        """
        found = [self.expected(name.format(0)) for name in names]
        schemes = [scheme for scheme in found if scheme and not (in_order and scheme.is_scattered)]
        return schemes if len(schemes) == len(found) else []

    def scheme(self, module: str) -> Scheme:
        """That of a module, which the checkpoint has quantized."""
        found = next((scheme for pattern, scheme in self.rules if pattern.match(module)), None)
        if found is None:
            raise ModelError(f"quantization_config: no group has {module} as a target, and its weight is quantized")
        return found

    @property
    def has_integers(self) -> bool:
        """Whether some matrices are stored as integers, or as floats of 4 bits, which are kept as integers."""
        return any(scheme.bits < (8 if scheme.is_float else 16) for _, scheme in self.rules)

    @property
    def rounds_tables(self) -> bool:
        """Whether matrices have values of a table that is not of integers."""
        return self.method == "bitsandbytes" and any(scheme.has_table for _, scheme in self.rules)

    @property
    def has_groups(self) -> bool:
        """Whether some matrices are stored in groups."""
        return any(scheme.bits < 16 for _, scheme in self.rules)

    @property
    def has_fp8_activations(self) -> bool:
        """Whether the checkpoint was made for products of fp8 matrices and activations in fp8."""
        return any(s.is_float and s.bits == s.activation_bits == 8 and s.group_size is None for _, s in self.rules)

    def __str__(self) -> str:
        return self.described("activations are not quantized")

    def described(self, activations: str) -> str:
        """For the log; activations is said of a checkpoint that was made for fewer bits of these."""
        schemes = [scheme for _, scheme in self.rules if scheme.bits < 16]
        are_made_for_fewer = any(scheme.activation_bits < 16 for scheme in schemes)
        names = " and ".join(dict.fromkeys(scheme.name for scheme in schemes)) or "plain values"
        return f"{names} ({self.name}{f'; {activations}' * are_made_for_fewer})"


_BITS = (2, 4, 8)
"""Bits of integers."""


def read_quantization(config: Fields, folder: Path | None = None) -> Quantization | None:
    """How the weights are stored; None if nothing says that they are quantized, in the folder's ModelOpt file either.

    Raises:
        ModelError: A field is malformed, or there is no decoder for what it asks for.
    """
    if folder and not config.names() and (path := folder / "hf_quant_config.json").exists():
        config = Fields.read(path).section("quantization").with_defaults({"quant_method": "modelopt"})
    if not config.names():
        return None
    method = config.optional_text("quant_method") or "unnamed"
    if method == "unnamed" and config.has("config_groups"):
        method = "compressed-tensors"
    if method not in _METHODS:
        _refuse(f"quant_method {method}", _METHODS)
    scheme, kind = config.raw("kv_cache_scheme"), config.optional_text("kv_cache_quant_algo") or "FP8"
    kv_bits = scheme.get("num_bits") if isinstance(scheme, dict) else None
    return replace(_METHODS[method](config), has_kv_scales=method != "gguf" and kind == "FP8" and kv_bits in (8, None))


def _refuse(what: str, supported: Mapping[str, object] | set[str] | tuple[object, ...]) -> NoReturn:
    read = ", ".join(sorted(map(str, supported)))
    raise ModelError(
        f"quantized checkpoints are not supported in this form: quantization_config has {what} (supported: {read}). "
        "Convert the checkpoint, or take the one that is not quantized"
    )


def _always(scheme: Scheme) -> tuple[ModulePattern, Scheme]:
    return re.compile(""), scheme


def _fp8(config: Fields) -> Quantization:
    block = config.integers("weight_block_size")
    if block and (len(block) != 2 or min(block) < 1):
        raise config.wrong("weight_block_size", "two positive integers")
    scheme = Scheme(8, block=(block[0], block[1]) if block else None, is_float=True, activation_bits=8)
    name = config.optional_text("quant_method") or "fp8"
    plain = listed_in(config, "modules_to_not_convert", "ignored_layers")
    return Quantization("fp8", name, (_always(scheme),), plain=plain)


def _mxfp4(config: Fields) -> Quantization:
    plain = listed_in(config, "modules_to_not_convert")
    return Quantization("mxfp4", "mxfp4", (_always(Scheme(4, 32, is_float=True)),), plain=plain)


def _bitsandbytes(config: Fields) -> Quantization:
    is_4bit = config.flag("load_in_4bit", config.flag("_load_in_4bit", False))
    kind = (config.optional_text("bnb_4bit_quant_type") or "fp4") if is_4bit else "int8"
    scheme = (
        Scheme(4, 64, is_float=True, has_table=True, label=kind.upper()) if is_4bit else Scheme(8, activation_bits=8)
    )
    plain = *listed_in(config, "llm_int8_skip_modules"), HEAD
    return Quantization("bitsandbytes", f"bitsandbytes {kind}", (_always(scheme),), plain=plain)


def _integers(config: Fields, default: Scheme | None = None) -> Scheme:
    """Bits and group size in the fields of GPTQ, AWQ and AutoRound."""
    bits = config.integer("bits", default.bits if default else None)
    given = config.integer("group_size", (default.group_size or -1) if default else 128)
    if bits not in _BITS and bits < 16:
        _refuse(f"bits {bits}", _BITS)
    if given < 1 and given != -1:
        raise config.wrong("group_size", "a positive integer, or -1")
    has_zeros = not config.flag("sym", not config.flag("zero_point", bool(default and default.has_zeros)))
    is_scattered = given != -1 and config.flag("desc_act", bool(default and default.is_scattered))
    return Scheme(bits, None if given == -1 else given, has_zeros=has_zeros, is_scattered=is_scattered)


def _gptq(config: Fields) -> Quantization:
    layout = config.optional_text("checkpoint_format") or config.optional_text("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        _refuse(f"checkpoint_format {layout}", ("gptq", "gptq_v2"))
    scheme, dynamic = _integers(config), config.section("dynamic")
    rules = [
        (pattern_in(config, "dynamic", name.lstrip("+:").removeprefix("-:")), _integers(dynamic.section(name), scheme))
        for name in dynamic.names()
        if not name.startswith("-:")  # not quantized, as the stored tensors say, too
    ]
    left_out = [pattern_in(config, "dynamic", name[2:]) for name in dynamic.names() if name.startswith("-:")]
    plain = [*left_out, EMBEDDINGS]
    if not config.flag("lm_head", False):
        plain.append(HEAD)
    return Quantization("gptq", "GPTQ", (*rules, _always(scheme)), layout == "gptq", tuple(plain))


def _awq(config: Fields) -> Quantization:
    layout = (config.optional_text("version") or config.optional_text("format") or "gemm").lower()
    if layout != "gemm":
        _refuse(f"version {layout} of awq", ("gemm",))
    if (bits := config.integer("bits", config.integer("w_bit", 4))) != 4:
        _refuse(f"bits {bits} of awq", (4,))
    scheme = _integers(config, Scheme(4, config.integer("q_group_size", 128), has_zeros=True))
    return Quantization("awq", "AWQ", (_always(scheme),), plain=(*listed_in(config, "modules_to_not_convert"), HEAD))


def _is_plain(name: str) -> bool:
    """Whether a name of AutoRound is that of a module, and no pattern, which fits anywhere in one."""
    return not set(name) & set("*+?^$()[]{}|\\")


def _auto_round(config: Fields) -> Quantization:
    layout = (config.optional_text("packing_format") or "auto_round:auto_gptq").removeprefix("auto_round:")
    method = layout.removeprefix("auto_")
    data_type = config.optional_text("data_type") or "int"
    if method not in ("gptq", "awq") or data_type != "int":
        _refuse(f"packing_format {layout}, data_type {data_type}", ("auto_gptq and int", "auto_awq and int"))
    scheme, extra = _integers(config), config.section("extra_config")
    names = sorted(extra.names(), key=lambda name: not _is_plain(name))  # whole names count before patterns
    patterns = [re.escape(name) + "$" if _is_plain(name) else f".*?(?:{name})" for name in names]
    rules = [
        (pattern_in(config, "extra_config", pattern), _integers(extra.section(name), scheme))
        for name, pattern in zip(names, patterns, strict=True)
    ]
    return Quantization(method, f"AutoRound as {method}", (*rules, _always(scheme)), True, (HEAD, EMBEDDINGS))


_MODELOPT = {
    "FP8": Scheme(8, is_float=True, activation_bits=8),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme(8, is_float=True, activation_bits=8),
    "NVFP4": Scheme(4, 16, is_float=True, activation_bits=4),
}


def _modelopt(config: Fields) -> Quantization:
    kind = config.optional_text("quant_algo") or "unnamed"
    if kind == "unnamed" and config.has("kv_cache_quant_algo"):
        return Quantization("modelopt", "ModelOpt", ())
    if kind not in _MODELOPT:
        _refuse(f"quant_algo {kind} of modelopt", _MODELOPT)
    names = (*config.texts("ignore"), *config.texts("exclude_modules"))
    plain = tuple(re.compile(translate(name)) for name in names)
    return Quantization("modelopt", f"ModelOpt {kind}", (_always(_MODELOPT[kind]),), plain=(*plain, EMBEDDINGS))


_TORCHAO = {
    "Int8WeightOnlyConfig": Scheme(8),
    "Int8DynamicActivationInt8WeightConfig": Scheme(8, activation_bits=8),
    "IntxWeightOnlyConfig": Scheme(8),
    "Int8DynamicActivationIntxWeightConfig": Scheme(8, 32, activation_bits=8),
    "Int4WeightOnlyConfig": Scheme(4, 128, has_zeros=True, label="Int4Tensor"),
    "Float8WeightOnlyConfig": Scheme(8, is_float=True),
    "Float8DynamicActivationFloat8WeightConfig": Scheme(8, is_float=True, activation_bits=8),
}


def _torchao(config: Fields) -> Quantization:
    """By the configuration that torchao itself writes; only its second version is stored in safetensors."""
    if isinstance(config.raw("quant_type"), str):  # of transformers 4, whose checkpoints are pickled
        _refuse(f"quant_type {config.optional_text('quant_type')} of torchao", _TORCHAO)
    default = config.section("quant_type").section("default")
    kind, data = default.optional_text("_type") or "unnamed", default.section("_data")
    if kind not in _TORCHAO:
        _refuse(f"quant_type {kind} of torchao", _TORCHAO)
    if (version := default.integer("_version", 1)) != 2:
        _refuse(f"_version {version} of {kind}", (2,))
    scheme = _TORCHAO[kind]
    stored = data.section("weight_dtype").optional_text("_data")
    supported = ("float8_e4m3fn",) if scheme.is_float else tuple(f"int{bits}" for bits in range(1, 9))
    if stored and stored not in supported:
        _refuse(f"weight_dtype {stored} of {kind}", supported)
    if scheme.label:
        layout = data.section("int4_packing_format").optional_text("_data")
        if layout != "PLAIN":
            _refuse(f"int4_packing_format {layout} of {kind}", ("PLAIN",))
        scheme = replace(scheme, group_size=data.size("group_size", 128))
    elif not scheme.is_float:
        granularity = data.section("weight_granularity" if data.has("weight_granularity") else "granularity")
        size = granularity.section("_data").optional_integer("group_size")
        size = size if granularity.names() else scheme.group_size
        mapping = data.section("weight_mapping_type" if data.has("weight_mapping_type") else "mapping_type")
        has_zeros = mapping.optional_text("_data") == "ASYMMETRIC"
        bits = int(stored.removeprefix("int")) if stored else 8
        scheme = replace(scheme, bits=bits, group_size=size, has_zeros=has_zeros)
    plain = listed_in(config, "modules_to_not_convert")
    return Quantization("torchao", f"torchao {kind}", (_always(scheme),), plain=(*plain, HEAD))


_LAYOUTS = {
    *("naive-quantized", "int-quantized", "float-quantized", "pack-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
}
"""Formats of compressed-tensors."""


def _compressed_tensors(config: Fields) -> Quantization:
    if config.section("transform_config").section("config_groups").names():
        _refuse("a transform_config", ("none",))
    sparsity = config.section("sparsity_config").optional_text("format") or "dense"
    if sparsity != "dense":
        _refuse(f"sparsity_config with format {sparsity}", ("dense",))
    groups = config.section("config_groups")
    rules: list[tuple[int, ModulePattern, Scheme]] = []
    for name in groups.names():
        group = groups.section(name)
        layout = group.optional_text("format") or config.optional_text("format") or "int-quantized"
        if layout not in _LAYOUTS:
            _refuse(f"format {layout} of compressed-tensors", _LAYOUTS)
        if group.has("weights"):
            scheme = _compressed_scheme(group, layout)
            rules += [(*target_of(group, target), scheme) for target in group.texts("targets")]
    rules.sort(key=lambda rule: rule[0])
    if not rules and not config.has("kv_cache_scheme"):
        _refuse("no config_groups with weights", ("config_groups with targets and weights",))
    named = [target_of(config, name, "ignore") for name in config.texts("ignore")]
    ignored = [pattern for closeness, pattern in named if closeness < 3]  # other classes than Linear have no matrices
    plain = (*ignored, EMBEDDINGS)
    return Quantization("compressed-tensors", "compressed-tensors", tuple(rule[1:] for rule in rules), plain=plain)


def _compressed_scheme(group: Fields, layout: str) -> Scheme:
    weights, activations = group.section("weights"), group.section("input_activations")
    bits, kind = weights.integer("num_bits", 8), weights.optional_text("type") or "int"
    block = weights.integers("block_structure")
    group_size = weights.optional_integer("group_size")
    strategy = weights.optional_text("strategy") or ("group" if group_size and group_size > 0 else "tensor")
    if strategy not in ("tensor", "channel", "group", "tensor_group", "block"):
        _refuse(f"strategy {strategy}", ("tensor", "channel", "group", "tensor_group", "block"))
    if bits not in {"int": _BITS, "float": (4, 8)}.get(kind, ()):
        _refuse(f"num_bits {bits} of type {kind}", ("float 4", "float 8", *(f"int {bits}" for bits in _BITS)))
    if strategy == "block" and (len(block) != 2 or min(block) < 1):
        raise weights.wrong("block_structure", "two positive integers")
    is_grouped = "group" in strategy
    if is_grouped and (not group_size or group_size < 1):
        raise weights.wrong("group_size", "a positive integer")
    scheme = Scheme(
        bits,
        is_float=kind == "float",
        activation_bits=activations.integer("num_bits", 16),
        has_zeros=not weights.flag("symmetric", True),
        is_scattered=is_grouped and weights.raw("actorder") in ("group", True),
    )
    if layout == "nvfp4-pack-quantized" or layout == "mxfp4-pack-quantized":
        is_grouped, group_size = True, group_size or (16 if layout.startswith("nv") else 32)
    if strategy == "block":
        return replace(scheme, block=(block[0], block[1]))
    return replace(scheme, group_size=group_size if is_grouped else None)


_GGUF = {
    "Q4_0": Scheme(4, 32),
    "Q4_1": Scheme(4, 32, has_zeros=True),
    "Q8_0": Scheme(8, 32),
    "Q5_0": Scheme(5, 32),
    "Q5_1": Scheme(5, 32, has_zeros=True),
    "Q2_K": Scheme(2, 16, has_zeros=True),
    "Q3_K": Scheme(3, 16),
    "Q4_K": Scheme(4, 32, has_zeros=True),
    "Q5_K": Scheme(5, 32, has_zeros=True),
    "Q6_K": Scheme(6, 16),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), Scheme(4, 32, is_float=True, has_table=True)),
    "MXFP4": Scheme(4, 32, is_float=True),
}
"""By type of a tensor; the values of the last three are those of tables of small integers."""


def _gguf(config: Fields) -> Quantization:
    """Of a folder that `engine/gguf/folder.py` has made; tensors of other types are plain."""
    tensors, modules = config.section("tensors"), dict[str, list[str]]()
    for name in tensors.names():
        kind = tensors.section(name).optional_text("type") or ""
        modules.setdefault(kind, []).append(re.escape(name.removesuffix(".weight")).replace(r"\{\}", r"\d+"))
    rules = [
        (re.compile(f"(?:{'|'.join(names)})$"), replace(_GGUF[kind], label=kind))
        for kind, names in modules.items()
        if kind in _GGUF
    ]
    return Quantization("gguf", "GGUF", tuple(rules))


_METHODS: dict[str, Callable[[Fields], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
    "modelopt": _modelopt,
    "gguf": _gguf,
}
