"""benchmarks/other_form: a file written again has the same model in other types."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from benchmarks.other_form import DRAFTERS, MADE, written


def test_matrices_change_their_type_and_all_else_is_kept(tmp_path: Path) -> None:
    made = np.random.default_rng(0).standard_normal((4, 64), np.float32)
    writer = GGUFWriter(tmp_path / "source.gguf", "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("norm", np.arange(64, dtype=np.float32))
    writer.add_tensor("matrix", quantize(made, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("narrow", made[:, :16])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for kind, tolerance in ((GGMLQuantizationType.BF16, 0.02), (GGMLQuantizationType.Q4_0, 0.2)):
        reader = GGUFReader(written(tmp_path / "source.gguf", tmp_path / f"{kind.name}.gguf", kind))
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        assert fields == {
            "general.architecture": "llama",
            "llama.block_count": 2,
            "tokenizer.ggml.tokens": ["a", "b"],
        }
        norm, matrix, narrow = reader.tensors
        assert np.array_equal(norm.data, np.arange(64))
        assert (matrix.tensor_type, narrow.tensor_type) == (kind, GGMLQuantizationType.BF16)
        assert np.abs(dequantize(matrix.data, matrix.tensor_type) - made).max() < tolerance


def test_every_drafter_is_made_of_the_same_file() -> None:
    assert all(MADE[name][0] == MADE[drafter][0] for name, drafter in DRAFTERS.items())
