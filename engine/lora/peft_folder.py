"""Reads the folder of an adapter as PEFT writes it: what adapter_config.json says. Imports no torch.

A low-rank adapter (Hu et al., 2021) adds `scale * B(A x)` to what a matrix makes of x. A setting that changes anything
else, or the sum in another way, is refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path

from weft.engine.fields import Fields
from weft.engine.wire.errors import ModelError
from weft.engine.wire.options import MAX_CONFIG_BYTES

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"

_MAX_PATTERN, _MAX_REPEATS = 200, 3
"""Length of a pattern and repetitions in it: with these bounds, and without groups, matching a name is quick."""
_MAX_PATTERNS = 64
"""Most patterns that are no plain name, each of which is held against every module."""
_PLAIN = re.compile(r"\^?[\w.-]+")

_REFUSED = {
    "trainable_token_indices": "rows of the embedding are not replaced",
    "layer_replication": "the model's layers are not repeated",
    "alora_invocation_tokens": "an adapter is used for all tokens of a request",
    "lora_bias": "biases of adapters are not added",
    "megatron_config": "modules of Megatron are not read",
    "arrow_config": "adapters are not routed by token",
    "kasa_config": "it changes the model's own weights",
    **dict.fromkeys(("monteclora_config", "velora_config"), "only plain LoRA and rank-stabilised LoRA are"),
}
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
"""Ways to initialise A and B that leave the model's own weights as they are; true and false are, too."""


@dataclass(frozen=True, slots=True)
class Patterns:
    """Numbers by a pattern for the end of a module's name, or with ^ for all of it; the first that matches counts.

    There may be a plain name for every module, so these are looked up. Both have their place in the order.
    """

    plain: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    others: Sequence[tuple[int, re.Pattern[str], float]] = ()

    @classmethod
    def of(cls, values: Mapping[str, float]) -> "Patterns":
        """Take patterns that were checked, in their order."""
        numbered = [(place, key, value) for place, (key, value) in enumerate(values.items())]
        others = [each for each in numbered if not _PLAIN.fullmatch(each[1])]
        return cls(
            {key: (place, value) for place, key, value in numbered if _PLAIN.fullmatch(key)},
            [(place, re.compile(rf"(.*\.)?({key})$"), value) for place, key, value in others],
        )

    @property
    def largest(self) -> float:
        """The largest number; 0 if there is none."""
        return max((value for _, value in (*self.plain.values(), *(each[1:] for each in self.others))), default=0)

    def find(self, module: str, default: float) -> float:
        """The number of a module. O(parts of its name, and patterns that are no plain names)."""
        parts = module.split(".")
        ends = [f"^{module}", *(".".join(parts[i:]) for i in range(len(parts)))]
        found = [self.plain[end] for end in ends if end in self.plain]
        found += [(place, value) for place, pattern, value in self.others if pattern.match(module)]
        return min(found, default=(0, default))[1]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What the sums of an adapter are scaled with.

    Attributes:
        rank, alpha: Of every module that no pattern names.
        is_rank_stabilised: Whether sums are divided by the root of the rank (Kalajdzievski, 2023), not by the rank.
        ranks, alphas: Of the modules that a pattern names.
        modules_to_save: Ends of the names of modules that the adapter has in place of the model's.
        ensures_tying: Whether a replaced embedding is also the output head, if these are tied.
    """

    rank: int
    alpha: float
    is_rank_stabilised: bool = False
    ranks: Patterns = Patterns()
    alphas: Patterns = Patterns()
    modules_to_save: tuple[str, ...] = ()
    ensures_tying: bool = False

    def rank_of(self, module: str) -> int:
        """Rank of a module, by its name in the model."""
        return int(self.ranks.find(module, self.rank))

    def scale_of(self, module: str) -> float:
        """Factor on B(A x)."""
        rank = self.rank_of(module)
        return self.alphas.find(module, self.alpha) / (sqrt(rank) if self.is_rank_stabilised else rank)


def read_adapter_config(folder: Path, max_rank: int | None = None) -> AdapterConfig:
    """Read and check the configuration of an adapter.

    Args:
        max_rank: Largest rank that there is room for; None for any.

    Raises:
        ModelError: The folder is no adapter that can be served; one line fit for the user.
    """
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    if path.exists() and path.stat().st_size > MAX_CONFIG_BYTES:
        raise ModelError(f"{path} must have at most {MAX_CONFIG_BYTES:,} bytes, got {path.stat().st_size:,}")
    fields = Fields.read(path)
    if not (folder / TENSORS_FILE).exists():
        raise ModelError(f"{folder}: no {TENSORS_FILE}; other files of weights are not read")
    if fields.raw("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type must be LORA, got {fields.raw('peft_type')}")
    _refuse_variants(fields, path)
    config = AdapterConfig(
        fields.size("r", 8),
        fields.number("lora_alpha", 8),
        fields.flag("use_rslora", False),
        _patterns(fields, "rank_pattern", path),
        _patterns(fields, "alpha_pattern", path),
        fields.texts("modules_to_save"),
        fields.flag("ensure_weight_tying", False),
    )
    largest = max(config.rank, int(config.ranks.largest))
    if max_rank is not None and largest > max_rank:
        raise ModelError(f"{path}: the rank must be at most {max_rank} (max_lora_rank), got {largest}")
    return config


def _refuse_variants(fields: Fields, path: Path) -> None:
    """Refuse what asks for another computation, known here or not."""
    for name, reason in _REFUSED.items():
        if fields.raw(name):
            raise ModelError(f"{path}: {name} is not served: {reason}")
    for name in fields.names():
        if name.startswith("use_") and name != "use_rslora" and fields.raw(name):
            raise ModelError(f"{path}: {name} is not served: only plain LoRA and rank-stabilised LoRA are")
    if fields.raw("bias") not in (None, "none"):
        raise ModelError(f"{path}: bias {fields.raw('bias')} is not served: trained biases are not added, only none is")
    start = fields.raw("init_lora_weights")
    if not (start is None or isinstance(start, bool) or start in _PLAIN_STARTS):
        raise ModelError(
            f"{path}: init_lora_weights {start} is not served: it changes the model's own weights. Save the adapter "
            "with path_initial_model_for_weight_conversion, which makes a plain one of it"
        )


def _patterns(fields: Fields, name: str, path: Path) -> Patterns:
    values = fields.section(name)
    keys = [key for key in values.names() if not _PLAIN.fullmatch(key)]
    if len(keys) > _MAX_PATTERNS:
        raise ModelError(f"{path}: {name} must have at most {_MAX_PATTERNS} patterns beside names, got {len(keys)}")
    for key in keys:
        if len(key) > _MAX_PATTERN or "(" in key or sum(map(key.count, "*+{?")) > _MAX_REPEATS:
            raise ModelError(
                f"{path}: {name}: {key[:_MAX_PATTERN]} must have at most {_MAX_PATTERN} characters and {_MAX_REPEATS} "
                "repetitions, and no groups"
            )
        try:
            re.compile(key)
        except re.error as error:
            raise ModelError(f"{path}: {name}: {key} is no pattern ({error})") from None
    is_rank = name == "rank_pattern"
    return Patterns.of({key: values.size(key) if is_rank else values.number(key) for key in values.names()})
