"""Stores what mistral-common makes of the odd lines: run with an interpreter that has it.

PYTHON -m tests.real.mistral_ids        # rewrites mistral_ids.json; needs nothing of Weft
"""

import json
from pathlib import Path

from tests.real.fetch import default_folder
from tests.real.lines import odd_lines
from tests.real.llama_ids import digests

STORED = Path(__file__).with_name("mistral_ids.json")


def main() -> None:
    """Run the command."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    stored = {}
    for file in sorted(default_folder().glob("mistral/tekken*.json")):
        tokenizer = Tekkenizer.from_file(file)
        stored[file.name] = digests([tokenizer.encode(line, bos=False, eos=False) for line in odd_lines()])
    STORED.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
