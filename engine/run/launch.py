"""Runs a module as a child of the supervisor: `python -m weft.engine.run.launch MODULE ARGUMENT...`.

What fails for want of memory, files or threads, be it while the module is imported, is one line on stderr and exit code
2: no traceback, and no second try before the first one has served. All else is as without it.
"""

import os
import runpy
import sys

from weft.engine.shared import limits

EXIT_LIMIT = 2


def main() -> None:
    """Run the module, which sees its own name and arguments."""
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except Exception as error:
        fault = limits.explain(error)
        if fault is None:
            raise
        print(f"weft: error: {sys.argv[0]}: {fault}", file=sys.stderr, flush=True)
        os._exit(EXIT_LIMIT)  # at once: what is half made would say more at its end


if __name__ == "__main__":
    main()
