import numpy as np
import numpy.typing as npt
import pytest

from weft.engine.sampling.sampler import philox4x32, uniforms


def _draw(seeds: object, positions: object, choices: object) -> npt.NDArray[np.float32]:
    seed_array, position_array, choice_array = np.broadcast_arrays(
        np.asarray(seeds, np.uint64), np.asarray(positions, np.int64), np.asarray(choices, np.int64)
    )
    return uniforms(seed_array, position_array, choice_array)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    words = philox4x32(
        tuple(np.array([word], np.uint64) for word in counter),  # type: ignore[arg-type]
        tuple(np.array([word], np.uint64) for word in key),  # type: ignore[arg-type]
    )
    assert tuple(int(word[0]) for word in words) == expected


def test_the_map_never_changes() -> None:
    drawn = _draw([0, 0, 0, 1, 2**64 - 1, 42], [0, 1, 0, 0, 2**40, 100], [0, 0, 1, 0, 3, 2])
    assert (drawn * 2**24).astype(int).tolist() == LITERALS


LITERALS = [6694888, 16311500, 8668437, 14936070, 524731, 13443942]


def test_numbers_are_float32_in_the_half_open_unit_interval() -> None:
    drawn = _draw(7, np.arange(1 << 20), 0)
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0
    assert drawn.max() < 1


def test_a_number_does_not_depend_on_the_batch() -> None:
    together = _draw(np.arange(50), np.arange(50) * 3, np.arange(50) % 4)
    alone = [_draw([i], [i * 3], [i % 4])[0] for i in range(50)]
    assert together.tolist() == alone


AXES = {
    "positions": (5, np.arange(1 << 16), 0),
    "seeds": (np.arange(1 << 16), 5, 0),
    "choices": (5, 5, np.arange(1 << 16)),
    "seeds far apart": (np.arange(1 << 16).astype(np.uint64) << np.uint64(40), 5, 0),
}


@pytest.mark.parametrize("axis", AXES)
def test_uniform_along_every_axis(axis: str) -> None:
    drawn = _draw(*AXES[axis])
    counts = np.bincount((drawn * 256).astype(int), minlength=256)
    chi_square = float(((counts - 256.0) ** 2 / 256.0).sum())
    assert 160 < chi_square < 360  # 255 degrees of freedom: mean 255, standard deviation 22.6


@pytest.mark.parametrize("axis", AXES)
def test_neighbours_are_independent(axis: str) -> None:
    drawn = _draw(*AXES[axis])
    cells = (drawn[:-1] * 16).astype(int) * 16 + (drawn[1:] * 16).astype(int)
    counts = np.bincount(cells, minlength=256)
    expected = len(cells) / 256
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 160 < chi_square < 360
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4 / np.sqrt(len(drawn))


def test_seed_position_and_choice_do_not_stand_in_for_each_other() -> None:
    values = np.arange(1, 200)
    streams = [_draw(values, 0, 0), _draw(0, values, 0), _draw(0, 0, values)]
    assert len(np.unique(np.concatenate(streams))) == 3 * len(values)
