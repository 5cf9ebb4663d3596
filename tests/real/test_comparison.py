"""The comparison itself, on numbers that can be checked by hand."""

import math

import pytest
import torch

from tests.real.decoders import NUM_PROMPT_TOKENS, NUM_PROMPTS, closeness, prompts

PLAIN = torch.tensor([[0.5, 0.25, 0.25]]).log()
OTHER = torch.tensor([[0.25, 0.5, 0.25]]).log()


def test_a_model_is_close_to_itself() -> None:
    found = closeness(iter([([2, 0], PLAIN, PLAIN), ([2, 1], PLAIN, PLAIN)]))

    assert (found.num_tokens, found.divergence, found.difference, found.growth, found.same_top) == (2, 0, 0, 0, 1)
    assert found.perplexity == pytest.approx(math.sqrt(2 * 4))


def test_differences_are_means_over_all_tokens() -> None:
    found = closeness(iter([([2, 0], PLAIN, OTHER), ([2, 0, 0], PLAIN.repeat(2, 1), PLAIN.repeat(2, 1))]))

    assert found.num_tokens == 3
    assert found.divergence == pytest.approx(math.log(2) / 4 / 3)  # 0.5 ln 2 - 0.25 ln 2 of one token
    assert found.difference == pytest.approx(math.log(2) / 3)
    assert found.growth == pytest.approx(2 ** (1 / 3) - 1)
    assert found.same_top == pytest.approx(2 / 3)


@pytest.mark.parametrize(("first", "starts"), [(lambda text: 7, {7}), (lambda text: 100 + text, {100, 101})])
def test_prompts_begin_as_all_passages_do(first, starts: set[int]) -> None:  # type: ignore[no-untyped-def]
    texts = [[first(text), *range(1_000 * (text + 1), 1_000 * (text + 1) + 499)] for text in range(2)]

    found = prompts(texts)

    assert (len(found), {len(prompt) for prompt in found}) == (NUM_PROMPTS, {NUM_PROMPT_TOKENS})
    assert ({prompt[0] for prompt in found} == {7}) == (starts == {7})
    assert len({tuple(prompt) for prompt in found}) == NUM_PROMPTS
