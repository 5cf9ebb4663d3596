import numpy as np
import pytest

from weft.engine.kernels.torch.caches import Context, ContextBackend


def claim(backend: ContextBackend, *requests: tuple[int, int, list[int]]) -> list[Context]:
    """Claim the contexts of requests (slot, computed tokens, blocks), compute a token of each, and put them back."""
    slots, starts, tables = zip(*requests, strict=True)
    width = max(map(len, tables))
    contexts = backend.claim(slots, starts, np.array([table + [0] * (width - len(table)) for table in tables]))
    for slot, context in zip(slots, contexts, strict=True):
        context.num_tokens += 1
        backend.keep(slot, context)
    return contexts


def test_a_request_finds_its_own_context_again() -> None:
    backend = ContextBackend(10)
    first, second = claim(backend, (1, 0, [1]), (2, 0, [2]))
    assert claim(backend, (2, 1, [2]), (1, 1, [1, 3])) == [second, first]
    assert claim(backend, (1, 2, [1, 3]))[0] is first


def test_a_slot_that_begins_anew_has_a_new_context() -> None:
    backend = ContextBackend(10)
    (old,) = claim(backend, (1, 0, [1, 2]))
    (new,) = claim(backend, (1, 0, [1, 2]))
    assert new is not old and new.num_tokens == 1 and len(backend._contexts) == 1


def test_a_context_goes_away_when_another_request_gets_one_of_its_blocks() -> None:
    """So the blocks count the tokens of all contexts, those of requests that have ended included."""
    backend = ContextBackend(10)
    claim(backend, (1, 0, [1, 2]), (2, 0, [3, 4]))
    claim(backend, (3, 0, [5, 4]))
    assert len(backend._contexts) == 2  # slot 2 has lost block 4
    claim(backend, (2, 0, [6]))
    claim(backend, (3, 1, [5, 4, 3]))  # block 3 was of the request before in slot 2
    assert len(backend._contexts) == 3


def test_a_context_that_does_not_hold_what_was_computed_is_an_error() -> None:
    backend = ContextBackend(10)
    claim(backend, (1, 0, [1]))
    with pytest.raises(RuntimeError, match="slot 1 holds 1 tokens, its request has computed 5"):
        claim(backend, (1, 5, [1]))
