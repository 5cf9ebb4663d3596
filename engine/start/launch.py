"""Runs a module as a child of the supervisor: `python -m weft.engine.start.launch MODULE ARGUMENT...`.

A failure for lack of memory, files or threads, even while the module is imported, gives one line on stderr and exit
code 2 in place of a traceback; the supervisor gives up if that happens at the first start. Everything else is as with
`python -m MODULE`.
"""

import os
import runpy
import sys

from weft.engine.wire import errors as limits

EXIT_LIMIT = 2


def main() -> None:
    """Run the module with its own name and arguments."""
    del sys.argv[0]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except Exception as error:
        fault = limits.explain(error)
        if fault is None:
            raise
        print(f"weft: error: {sys.argv[0]}: {fault}", file=sys.stderr, flush=True)
        os._exit(EXIT_LIMIT)  # at once: half-built objects would print more while they are torn down


if __name__ == "__main__":
    main()
