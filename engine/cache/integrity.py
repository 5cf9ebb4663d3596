"""Checks that block tables and pools agree, for tests and for an engine that is idle."""

from collections import Counter
from collections.abc import Iterable, Sequence

from weft.engine.cache.block_pool import NULL_BLOCK, BlockPool
from weft.engine.request import Request


def check_references(
    pool: BlockPool, group: int, requests: Sequence[Request], state_index: int | None, others: Iterable[int]
) -> None:
    """Assert that requests and others hold exactly the references that the pool of a group counts.

    Args:
        state_index: Place of the group among those of states; None for a group of tokens.
        others: Blocks that a tier holds.
    """
    pool.check_integrity()
    counts = Counter(others)
    for request in requests:
        counts.update(request.block_tables[group] if request.block_tables else ())
        if state_index is not None and request.states_before_drafts:
            counts[request.states_before_drafts[state_index]] += 1
    counts.pop(NULL_BLOCK, None)
    held = {block: pool.references(block) for block in range(1, pool.num_blocks) if pool.references(block)}
    assert counts == held, f"group {group}: tables hold {counts}, pool says {held}"
