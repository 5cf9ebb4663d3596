"""llama.cpp's logits and greedy outputs: run with an interpreter that has llama-cpp-python.

    PYTHON benchmarks/llama_logits.py FILE.gguf FOLDER [CACHE_TYPE]

Reads token ids as JSON from standard input, writes FOLDER/llama-N.npy for passage N, and prints the greedy outputs of
the prompts as JSON. CACHE_TYPE, such as q8_0, is how K and V are kept, else f16. Needs nothing of Weft.
"""

import json
import pathlib
import sys
from collections.abc import Sequence

import llama_cpp
import numpy as np


def use_plain_kernels() -> None:
    """Leave out the kernels that repack weights: those for AMX end some builds with an illegal instruction."""
    make = llama_cpp.llama_cpp.llama_model_default_params

    def plain() -> llama_cpp.llama_model_params:
        parameters = make()
        parameters.use_extra_bufts = False
        return parameters

    llama_cpp.llama_cpp.llama_model_default_params = plain


def main(file: str, folder: str, cache_type: str = "f16") -> None:
    """Run the command."""
    use_plain_kernels()
    question, kind = json.load(sys.stdin), getattr(llama_cpp, f"GGML_TYPE_{cache_type.upper()}")
    model = llama_cpp.Llama(
        file, n_ctx=512, logits_all=True, verbose=False, type_k=kind, type_v=kind, flash_attn=cache_type != "f16"
    )

    def read(token_ids: Sequence[int]) -> np.ndarray:
        """(tokens, vocab_size): what follows each; those read before are left out of `token_ids`."""
        before = model.n_tokens
        model.eval(token_ids)
        return model.scores[before : model.n_tokens]

    for index, passage in enumerate(question["passages"]):
        model.reset()
        np.save(pathlib.Path(folder) / f"llama-{index}.npy", read(passage)[:-1])
    outputs = []
    for prompt in question["prompts"]:
        model.reset()
        output = [int(read(prompt)[-1].argmax())]
        while len(output) < question["num_output_tokens"]:
            output.append(int(read(output[-1:])[-1].argmax()))
        outputs.append(output)
    print(json.dumps(outputs))


if __name__ == "__main__":
    main(*sys.argv[1:])
