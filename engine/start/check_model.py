"""Checks that a model can be served, from its configuration alone: arguments are its folder and `model_impl`.

Run by `weft serve` before it downloads the weights of a model without a native family. Exit code 2: it cannot be
served, and one line on stderr says why.
"""

import pathlib
import sys

from weft.engine.start.model_choice import read_model
from weft.engine.wire.errors import ModelError


def main() -> int:
    """Read the model that the command line names."""
    folder, model_impl = sys.argv[1:]
    try:
        read_model(pathlib.Path(folder), model_impl)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
