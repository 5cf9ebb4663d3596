import numpy as np
import pytest
import torch

from weft.engine.batch import NO_TOKEN_ID, RowMasks


@pytest.mark.parametrize("vocab_size", [32, 33, 70, 96])
def test_bits_become_what_is_added(vocab_size: int) -> None:
    allowed = np.random.default_rng(vocab_size).random((3, vocab_size)) < 0.5
    padded = np.zeros((3, -(-vocab_size // 32) * 32), bool)
    padded[:, :vocab_size] = allowed
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    biases = torch.zeros(3, vocab_size)
    RowMasks(np.arange(3), bits).apply(biases)
    assert torch.equal(biases == 0, torch.from_numpy(allowed))
    assert biases[~torch.from_numpy(allowed)].eq(-torch.inf).all()


@pytest.mark.parametrize("rows", [[0, 1, 2], [1], [0, 2]])
def test_only_the_rows_of_the_mask_change(rows: list[int]) -> None:
    logits = torch.randn(3, 40)
    masked = logits.clone()
    allowed = np.random.default_rng(0).random((len(rows), 64)) < 0.5
    biases = torch.where(torch.from_numpy(allowed[:, :40]), 0.0, -torch.inf)
    RowMasks(np.array(rows), np.packbits(allowed, axis=1, bitorder="little").view(np.int32)).apply(masked)
    for row in range(3):
        if row in rows:
            assert torch.equal(masked[row], logits[row] + biases[rows.index(row)])
        else:
            assert torch.equal(masked[row], logits[row])


def test_rows_with_nothing_left_yield_no_token() -> None:
    logits = torch.full((3, 8), -torch.inf)
    logits[1, 3] = 1.0
    masks = RowMasks(np.array([1, 2]), np.zeros((2, 1), np.int32))
    token_ids = torch.tensor([0, 3, 0])
    masks.withdraw(token_ids, masks.are_empty(logits))
    assert token_ids.tolist() == [0, 3, NO_TOKEN_ID]
