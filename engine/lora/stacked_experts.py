"""Adapters of parameters that hold all experts of a layer, as PEFT's `target_parameters` writes them, by expert.

For a parameter of E experts lora_A is (E * rank, inputs), expert by expert, and lora_B (outputs, rank * E), in which
the expert changes fastest. The gate and up projections are one parameter, gate first. The name of the parameter is not
stored: the shapes tell which one it is.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import torch

from weft.engine.lora.peft_folder import AdapterConfig
from weft.engine.shared.errors import ModelError
from weft.engine.weights.refs import ExpertsRef

_MODULE = re.compile(r"(.*\blayers\.\d+\.).*\bexperts(?:\.base_layer)*")


def is_stacked(module: str) -> bool:
    """Whether a module holds the experts of a layer."""
    return _MODULE.fullmatch(module) is not None


def split(
    module: str, parts: Mapping[str, torch.Tensor], experts: Sequence[ExpertsRef], config: AdapterConfig
) -> Iterator[tuple[str, str, dict[str, torch.Tensor]]]:
    """Split an adapter of all experts.

    Args:
        parts: lora_A and lora_B.
        experts: Of the whole model.

    Returns:
        For each projection of each expert its name in the model, that of the parameter, and its lora_A and lora_B.

    Raises:
        ModelError: The model has no experts of these shapes there, one by one in its checkpoint.
    """
    match = _MODULE.fullmatch(module)
    layer = re.search(r"\blayers\.\d+\.", match[1]) if match else None
    shapes = {kind: list(values.shape) for kind, values in parts.items()}
    for ref in experts:
        matrix, count = ref.matrix, ref.num_experts
        is_there = layer and layer[0] in matrix.names[0] and all("{}" in name for name in matrix.names)
        parameter = f"{module.replace('.base_layer', '')}.{'gate_up_proj' if len(matrix.names) > 1 else 'down_proj'}"
        rank = config.rank_of(parameter)
        expected = {"lora_A": [count * rank, matrix.in_features], "lora_B": [sum(matrix.sizes), rank * count]}
        if is_there and shapes == expected:
            a = parts["lora_A"].view(count, rank, -1)
            b = parts["lora_B"].view(-1, rank, count).permute(2, 0, 1)
            sizes = list(matrix.sizes) if len(matrix.names) > 1 else [sum(matrix.sizes)]
            for number in range(count):
                for name, rows in zip(matrix.names, b[number].split_with_sizes(sizes), strict=True):
                    yield name.format(number), parameter, {"lora_A": a[number], "lora_B": rows}
            return
    raise ModelError(f"tensors of {module} have shapes {shapes}, which no experts of the model have there")
