"""Writes a GGUF file again with its matrices in another type: the same model, larger in bfloat16 or smaller in 4 bits.

No package carries a real model in bfloat16, or two sizes of one family. So a real model of a few bits is widened, and
rounded once more for a drafter that is nearly its twin.
"""

from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, Keys
from gguf.quants import dequantize, quantize

from tests.real.fetch import default_folder

_SMOLLM2, _GEMMA = "SmolLM2-135M-Instruct", "gemma-3-270m"
_WIDE, _NARROW = GGMLQuantizationType.BF16, GGMLQuantizationType.Q4_0
MADE: Final = {
    f"{_SMOLLM2}.BF16": (f"{_SMOLLM2}.Q4_1", _WIDE),
    f"{_SMOLLM2}.Q4_0": (f"{_SMOLLM2}.Q4_1", _NARROW),
    f"{_GEMMA}.BF16": (f"{_GEMMA}-q4_k_m", _WIDE),
    f"{_GEMMA}.Q4_0": (f"{_GEMMA}-q4_k_m", _NARROW),
}
"""What the file of a name is made of, without `.gguf`, and the type of its matrices."""
DRAFTERS: Final = {f"{name}.BF16": f"{name}.Q4_0" for name in (_SMOLLM2, _GEMMA)}
"""Which of these drafts for which."""

_GROUP: Final = 32
"""Inputs that share a scale in the types of 4 bits that can be written."""


def gguf_file(name: str) -> Path:
    """The file of a name, which is made if it is one of these and not there yet."""
    folder = default_folder()
    if name not in MADE:
        return folder / f"{name}.gguf"
    source, kind = MADE[name]
    return written(folder / f"{source}.gguf", folder / "made" / f"{name}.gguf", kind)


def written(source: Path, target: Path, kind: GGMLQuantizationType) -> Path:
    """The target, which is made if it is not there; vectors stay as they are.

    Args:
        kind: Of matrices; those whose rows do not divide into its groups become bfloat16.
    """
    if target.exists():
        return target
    reader = GGUFReader(source)
    part = target.with_suffix(".part")
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(part, str(reader.fields[Keys.General.ARCHITECTURE].contents()))
    for field in reader.fields.values():
        if field.name != Keys.General.ARCHITECTURE and not field.name.startswith("GGUF."):
            inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values.astype(np.float32))
            continue
        own = kind if values.shape[-1] % _GROUP == 0 else GGMLQuantizationType.BF16
        writer.add_tensor(tensor.name, quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)
    return target
