"""Counter-based random numbers: one per (seed, position, choice), whatever the load.

This map must never change: the same request with the same seed gives the same ids in every release. Holds no state and
imports no torch.
"""

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_NUM_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

_Words = npt.NDArray[np.uint64]


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], choices: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """One uniform number in [0, 1) for each (seed, position, choice), in steps of 2**-24.

    The seed is the key of Philox4x32-10, position and choice are the two halves of its counter, so different
    triples give independent numbers. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.

    Args:
        seeds: (n,) uint64, one per request.
        positions: (n,) int64 >= 0, position of the token that is drawn.
        choices: (n,) int64 >= 0, which of the request's choices draws.

    Returns:
        (n,) float32.
    """
    word = philox4x32(_halves(positions) + _halves(choices), _halves(seeds))[0]
    return ((word >> np.uint64(8)).astype(np.float32)) * np.float32(2.0**-24)


def philox4x32(
    counter: tuple[_Words, _Words, _Words, _Words], key: tuple[_Words, _Words]
) -> tuple[_Words, _Words, _Words, _Words]:
    """Philox4x32-10 on arrays: each word is an (n,) uint64 array of values below 2**32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _LOW
        k1 = (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _halves(values: npt.NDArray[np.int64] | npt.NDArray[np.uint64]) -> tuple[_Words, _Words]:
    """Low and high 32 bits of 64-bit values."""
    words = values.astype(np.uint64)
    return words & _LOW, words >> _HALF
