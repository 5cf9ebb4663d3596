from weft.engine.sampling.edits import TokenCounts


def test_ids_of_the_prompt_count_when_they_are_in_the_output() -> None:
    counts = TokenCounts([7, 3, 7])
    for token_id in (5, 3, 5):
        counts.add(token_id)
    ids, numbers = counts.behind(())
    assert (ids.tolist(), numbers.tolist()) == ([7, 3, 5], [0, 1, 2])


def test_drafts_count_for_the_row_behind_them_alone() -> None:
    counts = TokenCounts([])
    counts.add(4)
    ids, numbers = counts.behind((9, 4, 9))
    assert (ids.tolist(), numbers.tolist()) == ([4, 9], [2, 2])
    counts.add(4)
    ids, numbers = counts.behind((8,))
    assert (ids.tolist(), numbers.tolist()) == ([4, 8], [2, 1])
