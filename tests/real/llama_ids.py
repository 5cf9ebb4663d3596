"""Stores what llama.cpp makes of the odd lines: run with an interpreter that has llama-cpp-python.

    PYTHON -m tests.real.llama_ids        # rewrites llama_ids.json; needs nothing of Weft

Of each line a few digits of a hash are kept, which say which line differs, not how.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from tests.real.fetch import DECODERS, default_folder
from tests.real.lines import odd_lines

STORED = Path(__file__).with_name("llama_ids.json")


def digests(token_ids: Sequence[Sequence[int]]) -> str:
    """Those of all lines, with spaces between them."""
    return " ".join(hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:4] for ids in token_ids)


def main() -> None:
    """Run the command."""
    import llama_cpp

    stored = {}
    for name in DECODERS:
        model = llama_cpp.Llama(str(default_folder() / name), vocab_only=True, verbose=False)
        stored[name] = digests([model.tokenize(line.encode(), add_bos=True, special=True) for line in odd_lines()])
    STORED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
