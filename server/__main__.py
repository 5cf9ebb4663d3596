"""The way into the `weft` command; imports nothing slow before it has done what cannot wait.

From the first moment on a stop signal ends the process in one way: 0 for `weft serve`, which serves nothing yet, and
what shells give to the others. The supervisor takes signals over. Keys on the command line are hidden at once.
"""

import os
import signal
import sys

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    """Run the command that the arguments name."""
    is_serving = sys.argv[1:2] == ["serve"]
    # Process 1 of a container never sees a signal without a handler, and an exception would wait for the threads of a
    # download. What is ignored on purpose, as nohup does with SIGHUP, stays so.
    before = {signum: signal.getsignal(signum) for signum in _STOP if signal.getsignal(signum) != signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, lambda signum, _: os._exit(0 if is_serving else 128 + signum))
    if is_serving:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the supervisor waits for it
    if any(argument.startswith("--api-key") for argument in sys.argv):
        from weft.server.run.hidden_arguments import hide_values

        hide_values("--api-key")
    from weft.server.terminal.cli import app

    if not is_serving:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    app()


if __name__ == "__main__":
    main()
