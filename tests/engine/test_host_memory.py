import pytest

from weft.engine.host_memory import ALL_ON_DEVICE, HostShare, num_layers_to_move
from weft.engine.wire.errors import ModelError

GB = 10**9
SHARE = HostShare(num_layers=12, num_all=48, num_bytes=30 * GB, kernels="native (avx512)")


@pytest.mark.parametrize(
    ("needed", "free", "experts", "expected"),
    [
        (60, 80, [10, 10, 10], 0),
        (80, 80, [10, 10, 10], 0),
        (81, 80, [10, 10, 10], 1),
        (90, 80, [10, 10, 10], 1),
        (91, 80, [10, 10, 10], 2),
        (91, 80, [2, 10, 10], 2),
        (93, 80, [2, 10, 10], 3),
        (110, 80, [10, 10, 10], 3),
        (200, 80, [10, 10, 10], 3),
        (200, 80, [], 0),
    ],
    ids=[
        *("fits", "fits exactly", "a byte too many", "one layer exactly", "two layers", "layers of two sizes"),
        *("the small layer is the first", "all layers", "not even all", "no experts"),
    ],
)
def test_as_few_layers_move_as_it_takes(needed: int, free: int, experts: list[int], expected: int) -> None:
    assert num_layers_to_move(needed * GB, free * GB, [size * GB for size in experts]) == expected


@pytest.mark.parametrize(("free_bytes", "shown"), [(30 * GB - 1, "30.00 GB"), (8 * GB, "8.00 GB"), (-GB, "0 B")])
def test_too_little_host_memory_is_refused_with_both_numbers(free_bytes: int, shown: str) -> None:
    with pytest.raises(ModelError) as refused:
        SHARE.check(free_bytes)
    assert str(refused.value) == (
        f"the experts of 12 of 48 mixture layers would take 30.00 GB of host memory, of which only {shown} are free"
    )


def test_host_memory_that_suffices_is_taken() -> None:
    SHARE.check(30 * GB)
    ALL_ON_DEVICE.check(-GB)  # kv_offload may have asked for more than is free now


def test_the_share_reads_well() -> None:
    assert SHARE.line == (
        "host memory  30.00 GB for the experts of 12 of 48 mixture layers, computed by the CPU: native (avx512)"
    )
