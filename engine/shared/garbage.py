"""Makes Python's garbage collector run rarely, and skip start-up objects."""

import gc

THRESHOLD = 10_000
"""New objects before a collection. At Python's 700, hundreds of streams (about 300 objects each in a server process)
cause a full collection every second."""


def collect_rarely() -> None:
    """Freeze start-up objects; collect rarely. Call it once everything is loaded.

    A collection stops all streams. A full one over the objects of torch alone takes 80 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
