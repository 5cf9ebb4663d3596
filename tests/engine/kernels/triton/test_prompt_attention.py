"""Which part of a step is offered to a library."""

import numpy as np

from tests.engine.paged import PagedRequests
from weft.engine.kernels.triton.prompts import Prompts, find_prompts


def find(*computed_and_scheduled: tuple[int, int]) -> Prompts | None:
    paged = PagedRequests(400, 16, (None,))
    requests = [paged.add(np.zeros(sum(counts), np.int64)) for counts in computed_and_scheduled]
    for request, (computed, _) in zip(requests, computed_and_scheduled, strict=True):
        request.num_computed_tokens = computed
    batch = paged.make_batch([(r, n) for r, (_, n) in zip(requests, computed_and_scheduled, strict=True)])
    return find_prompts(batch, batch.groups[0])


def spans(prompts: Prompts | None) -> tuple[int, int, list[int], int, list[int], bool] | None:
    if prompts is None:
        return None
    at, starts = prompts.tokens, prompts.starts.tolist()
    return at.start, at.stop, starts, prompts.longest, prompts.seq_lens.tolist(), prompts.are_fresh


def test_prompts_that_begin_are_found_from_the_first_to_the_last() -> None:
    assert spans(find((0, 6))) == (0, 6, [0, 6], 6, [6], True)
    found = find((7, 1), (0, 6), (3, 1), (0, 2), (9, 1))
    assert spans(found) == (1, 10, [0, 6, 7, 9], 6, [6, 4, 2], True)


def test_prompts_that_go_on_are_not_fresh_and_have_many_tokens() -> None:
    assert spans(find((0, 6), (16, 128))) == (0, 134, [0, 6, 134], 128, [6, 144], False)
    assert find((0, 6), (16, 127)) is None
    assert find((0, 1), (16, 1)) is None


def test_block_tables_are_those_of_the_prompts() -> None:
    paged = PagedRequests(400, 16, (None,))
    requests = [paged.add(np.zeros(n, np.int64)) for n in (20, 40, 2)]
    requests[0].num_computed_tokens = 19
    batch = paged.make_batch([(requests[0], 1), (requests[1], 40), (requests[2], 1)])
    prompts = find_prompts(batch, batch.groups[0])
    assert prompts
    assert prompts.block_tables.tolist() == [requests[1].tables[0].tolist()]
