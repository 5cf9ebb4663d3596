import itertools
import random
import time

import pytest

from weft.engine.drafts import Lookup, TokenHistory


def follow(text: list[int], output: list[int], most: int = 4) -> list[list[int]]:
    """What is proposed before each id of the output, behind a prompt of one id."""
    lookup = Lookup(TokenHistory(text), 1, 0)
    return [lookup.propose([0, *output[:n]], most) for n in range(len(output) + 1)]


def test_the_pointer_moves_with_the_output() -> None:
    assert follow([1, 2, 3], [1, 2, 3], most=2) == [[1, 2], [2, 3], [3], []]


def test_behind_a_difference_it_goes_on_where_two_ids_agree() -> None:
    text = [1, 2, 3, 4, 5, 6, 7]
    assert follow(text, [1, 2, 9, 4, 5], most=2) == [[1, 2], [2, 3], [3, 4], [], [], [6, 7]]


def test_the_longest_match_behind_the_pointer_wins_over_one_before_it() -> None:
    text = [7, 5, 6, 1, 2, 8, 5, 6, 3, 7, 5, 6, 4]
    proposals = follow(text, [7, 5, 6, 1, 9, 7, 5, 6], most=1)
    assert proposals[-1] == [4]  # 7 5 6 behind the pointer; 5 6 alone goes on with 3, and before it with 1


def test_the_nearest_of_equal_matches_wins() -> None:
    text = [1, 2, 5, 6, 3, 9, 5, 6, 4]
    assert follow(text, [8, 5, 6], most=1)[-1] == [3]


def test_what_lies_only_before_the_pointer_is_found_too() -> None:
    assert follow([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 0, 1, 2], most=2)[-1] == [3, 4]


@pytest.mark.parametrize("end", [(5, 6), (9, 1)])
def test_nothing_is_proposed_without_a_match(end: tuple[int, int]) -> None:
    """The pair at the very end of a text has nothing behind it."""
    assert follow([1, 2, 3, 5, 6], [8, *end])[-1] == []


def test_a_text_that_is_the_output_itself_goes_on_in_its_loop() -> None:
    ids = [9, 1, 2, 3, 1, 2]
    lookup = Lookup(TokenHistory(ids), len(ids), None)
    assert lookup.propose(ids, 7) == [3, 1, 2, 3, 1, 2, 3]
    ids += [3, 1]
    assert lookup.propose(ids, 4) == [2, 3, 1, 2]


def test_the_index_is_that_of_a_search_however_the_text_grows() -> None:
    generator = random.Random(1)
    ids: list[int] = []
    text = TokenHistory(ids)
    for _ in range(60):
        ids += [generator.randrange(3) for _ in range(generator.randrange(4))]
        for pair in itertools.product(range(3), repeat=2):
            assert text.ends(*pair) == [end for end in range(2, len(ids)) if tuple(ids[end - 2 : end]) == pair]


def test_a_long_monotonous_text_costs_a_step_little() -> None:
    """20,000 equal ids, lost and found again at every step: 400 steps took minutes when all matches were compared."""
    lookup = Lookup(TokenHistory([1] * 20_000), 1, 0)
    output = [0]
    began = time.process_time()
    for _ in range(100):
        output += [1, 1, 2]
        lookup.propose(output, 32)
        output.append(1)
        lookup.propose(output, 32)
        output.append(1)
        assert lookup.propose(output, 32) == [1] * 32
    assert time.process_time() - began < 20.0
