import pytest

from weft.engine.cache.block_pool import BlockPool


def test_hands_out_ascending_ids_and_never_the_null_block() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [1, 2, 3]
    assert (pool.num_free, pool.num_used) == (0, 3)
    assert pool.allocate(1) is None
    pool.check_integrity()


def test_too_large_an_allocation_changes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(4) is None
    assert pool.allocate(0) == []
    assert pool.num_free == 3
    assert pool.allocate(3) == [1, 2, 3]


def test_blocks_without_content_are_reused_first_then_the_least_recently_freed() -> None:
    pool = BlockPool(7)
    assert pool.allocate(5) == [1, 2, 3, 4, 5]
    assert pool.index(2, b"two")
    assert pool.index(3, b"three")
    for block in (3, 2, 4, 5, 1):
        pool.free(block)
    assert pool.allocate(6) == [1, 5, 4, 6, 3, 2]
    assert pool.num_indexed == 0


def test_a_free_block_is_found_until_it_is_handed_out_again() -> None:
    pool = BlockPool(3)
    assert pool.allocate(1) == [1]
    pool.index(1, b"one")
    pool.free(1)
    assert pool.lookup(b"one") == 1
    assert pool.allocate(1) == [2]
    assert pool.lookup(b"one") == 1
    assert pool.allocate(1) == [1]
    assert pool.lookup(b"one") is None


def test_acquire_takes_a_free_block_out_of_the_middle_of_the_list() -> None:
    pool = BlockPool(5)
    pool.allocate(3)
    for block in (1, 2, 3):
        pool.index(block, bytes([block]))
        pool.free(block)
    pool.acquire(2)
    pool.acquire(2)
    assert (pool.references(2), pool.num_used) == (2, 1)
    pool.check_integrity()
    assert pool.allocate(3) == [4, 1, 3]
    pool.free(2)
    assert pool.num_free == 0
    pool.free(2)
    assert pool.allocate(1) == [2]
    pool.check_integrity()


def test_one_hash_names_one_block_and_one_block_has_one_hash() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    assert pool.index(1, b"a")
    assert not pool.index(2, b"a")
    assert not pool.index(1, b"b")
    assert (pool.lookup(b"a"), pool.lookup(b"b")) == (1, None)
    pool.unindex(2)
    pool.unindex(1)
    assert pool.lookup(b"a") is None
    assert pool.index(2, b"a")
    pool.check_integrity()


def test_pinned_content_is_handed_out_last_of_all_until_it_is_unpinned() -> None:
    pool = BlockPool(6)
    pool.allocate(4)
    pool.pin(b"1")  # before there is a block with this content
    for block in (1, 2, 3):
        pool.index(block, b"%d" % block)
    for block in (1, 2, 3, 4):
        pool.free(block)
    pool.pin(b"3")  # when its block is free already
    pool.check_integrity()
    assert pool.allocate(3) == [4, 5, 2]
    pool.unpin(b"1")
    pool.unpin(b"never pinned")
    pool.check_integrity()
    assert pool.allocate(1) == [1]
    assert pool.lookup(b"3") == 3
    assert pool.allocate(1) == [3]
    assert pool.lookup(b"3") is None
    pool.check_integrity()


def test_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ValueError, match="at least 2, got 1"):
        BlockPool(1)
