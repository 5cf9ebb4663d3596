"""When Python looks for garbage: rarely, and not among what was there before the first request."""

import gc

THRESHOLD = 10_000
"""New objects before a collection: at Python's 700, hundreds of streams, at some 300 objects each in a server process,
bring on a full one every second."""


def collect_rarely() -> None:
    """Spare the streams the garbage collector, which stops them all while it looks at what it knows to stay.

    To be called when everything is loaded. A full collection over what torch alone brings along takes 80 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
