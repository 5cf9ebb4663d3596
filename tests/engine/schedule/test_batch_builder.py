"""Steps come from a real scheduler over blocks of 4 tokens; arrays are compared with literal lists."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tests.engine.paged import paged_specs
from tests.engine.requests_for_tests import request
from weft.engine.batch import Batch, ScoreBatch, StepResult
from weft.engine.cache.manager import KVCacheManager
from weft.engine.cache.specs import PagedKV
from weft.engine.loop.output_collector import collect
from weft.engine.request import Request
from weft.engine.sampling.sampler import uniforms
from weft.engine.schedule.batch_builder import build_batch
from weft.engine.schedule.scheduler import ScheduledStep, Scheduler
from weft.engine.schedule.step_cost import StepCostModel
from weft.engine.wire.messages import ReasoningBudget, TokenLogprobs
from weft.engine.wire.params import SamplingParams

INF = float("inf")


class Steps:
    """Schedules, builds and collects; keeps the last step that is not collected."""

    def __init__(
        self,
        *requests: Request,
        windows: tuple[int | None, ...] = (None,),
        kinds: tuple[PagedKV, ...] = (),
        max_num_tokens: int = 100,
    ) -> None:
        kv = KVCacheManager(50, 4, kinds or paged_specs(*windows))
        self.scheduler = Scheduler(
            kv, StepCostModel(), max_num_seqs=8, max_num_batched_tokens=max_num_tokens, itl_target_s=10.0
        )
        self.launched: ScheduledStep | None = None
        for r in requests:
            self.scheduler.add(r)

    def launch(self) -> Batch:
        step = self.scheduler.schedule()
        assert step is not None
        batch = build_batch(step, self.launched, 4, self.scheduler.kv.specs)
        self.launched, self.before = step, self.launched
        return batch

    def collect(self, *token_ids: int) -> None:
        step = self.before or self.launched
        assert step is not None
        scores = [TokenLogprobs(0.0, [], [])] * 100
        collect(self.scheduler, step, StepResult(list(token_ids), {}, scores))
        if step is self.launched:
            self.launched = None


def lists(*arrays: npt.NDArray[np.generic]) -> list[list[object]]:
    return [array.tolist() for array in arrays]


def steps_after(steps: Steps) -> ScoreBatch | None:
    """What the next step scores, once the launched one is collected."""
    steps.collect(50)
    return steps.launch().scores


def bias(batch: Batch) -> list[tuple[int, int, float]]:
    s = batch.sampling
    return list(zip(*lists(s.bias_rows, s.bias_ids, s.bias_values), strict=True))  # type: ignore[arg-type]


def test_prefill_and_decode_lie_one_after_another() -> None:
    first = request([10, 11, 12, 13, 14], 0)
    steps = Steps(first)
    steps.launch()
    steps.collect(20)
    steps.scheduler.add(request([30, 31, 32], 1))
    batch = steps.launch()
    assert lists(batch.token_ids, batch.positions) == [[20, 30, 31, 32], [5, 0, 1, 2]]
    assert lists(batch.query_start_locs, batch.seq_lens, batch.row_indices) == [[0, 1, 4], [6, 3], [0, 3]]
    (group,) = batch.groups
    assert group.block_tables.tolist() == [[1, 2], [3, 0]]
    assert group.slot_mapping.tolist() == [2 * 4 + 1, 3 * 4, 3 * 4 + 1, 3 * 4 + 2]
    assert group.block_copies.shape == (0, 2)
    assert (batch.num_tokens, batch.num_requests, batch.scores) == (4, 2, None)
    assert {a.dtype for a in (batch.token_ids, batch.positions, group.slot_mapping, group.block_tables)} == {
        np.dtype(np.int64)
    }


def test_a_chunk_that_does_not_reach_the_end_has_no_row() -> None:
    steps = Steps(request(range(10), 0), max_num_tokens=6)
    batch = steps.launch()
    assert lists(batch.token_ids, batch.row_indices) == [[0, 1, 2, 3, 4, 5], []]
    assert len(batch.sampling.temperatures) == 0
    steps.collect()
    batch = steps.launch()
    assert lists(batch.token_ids, batch.positions, batch.row_indices) == [[6, 7, 8, 9], [6, 7, 8, 9], [3]]


def test_texts_of_an_encoder_are_computed_whole_with_their_types() -> None:
    requests = [request([7] * n, n, max_tokens=0) for n in (60, 30, 50)]
    requests[1].token_types = [0] * 20 + [1] * 10
    steps = Steps(*requests, kinds=tuple(replace(spec, is_bidirectional=True) for spec in paged_specs(None)))
    batch = steps.launch()
    assert batch.query_start_locs.tolist() == [0, 30, 80]  # the longest text does not fit into the 100 tokens
    assert batch.token_types is not None and batch.token_types.tolist() == [0] * 20 + [1] * 10 + [0] * 50


def test_every_group_has_its_tables() -> None:
    steps = Steps(request(range(8), 0), windows=(None, 4))
    steps.launch()
    steps.collect(1)
    full, window = steps.launch().groups
    assert lists(full.block_tables[0], window.block_tables[0]) == [[1, 2, 3], [0, 2, 3]]
    assert lists(full.slot_mapping, window.slot_mapping) == [[12], [12]]


def test_ids_on_the_device_are_placeholders() -> None:
    steps = Steps(request([10, 11], 0), request([20, 21, 22], 1))
    steps.launch()
    batch = steps.launch()
    assert lists(batch.token_ids, batch.positions) == [[0, 0], [2, 3]]
    assert lists(batch.placeholders.targets, batch.placeholders.rows) == [[0, 1], [0, 1]]
    steps.collect(50, 60)
    steps.scheduler.abort(0, 0)
    batch = steps.launch()  # the row in the step before stays that of request 1
    assert lists(batch.placeholders.targets, batch.placeholders.rows) == [[0], [1]]


def test_a_forked_choice_copies_its_partial_block() -> None:
    steps = Steps(request([10, 11], 0, num_choices=2, seed=5, temperature=1.0))
    steps.launch()
    steps.collect(50)
    batch = steps.launch()
    assert lists(batch.token_ids, batch.positions) == [[50, 11], [2, 1]]
    assert batch.groups[0].block_copies.tolist() == [[1, 2]]
    assert batch.groups[0].block_tables.tolist() == [[1], [2]]
    expected = uniforms(np.array([5, 5], np.uint64), np.array([3, 2]), np.array([0, 1]))
    assert batch.sampling.uniforms.tolist() == expected.tolist()


def test_drafts_are_computed_and_every_one_has_a_row() -> None:
    r = request([10, 11, 12], 0, seed=3, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, logprobs=2)
    steps = Steps(r)
    steps.launch()
    steps.collect(50)
    r.draft_token_ids = [60, 61]
    batch = steps.launch()
    assert lists(batch.token_ids, batch.positions, batch.row_indices) == [[50, 60, 61], [3, 4, 5], [0, 1, 2]]
    assert lists(batch.query_start_locs, batch.seq_lens) == [[0, 3], [6]]
    s = batch.sampling
    assert lists(s.temperatures, s.top_ks, s.num_logprobs) == [[0.5] * 3, [7] * 3, [2] * 3]
    assert s.top_ps.tolist() == [np.float32(0.9)] * 3
    assert s.min_ps.tolist() == [np.float32(0.1)] * 3
    expected = uniforms(np.full(3, 3, np.uint64), np.array([4, 5, 6]), np.zeros(3, np.int64))
    assert s.uniforms.tolist() == expected.tolist()


def test_rows_get_random_numbers_if_one_of_them_draws() -> None:
    def greedy() -> Request:
        return request([10, 11], 0, seed=3, temperature=0.0)

    assert Steps(greedy()).launch().sampling.uniforms.tolist() == [0]
    expected = uniforms(np.array([3, 4], np.uint64), np.array([2, 2]), np.array([0, 0]))
    both = Steps(greedy(), request([12, 13], 1, seed=4, temperature=1.0))
    assert both.launch().sampling.uniforms.tolist() == expected.tolist()


def test_logit_bias_and_allowed_ids_name_their_rows() -> None:
    steps = Steps(
        request([1], 0),
        request([2], 1, logit_bias={5: 1.5, 6: -2.0}),
        request([3], 2, allowed_token_ids=(8, 9)),
        request([4], 3, allowed_token_ids=(7,)),
    )
    batch = steps.launch()
    assert bias(batch) == [(1, 5, 1.5), (1, 6, -2.0)]
    s = batch.sampling
    assert lists(s.allowed_rows, s.allowed_entries, s.allowed_ids) == [[2, 3], [0, 0, 1], [8, 9, 7]]
    assert (s.penalties, s.conditional_bans) == (None, None)
    assert s.num_logprobs.tolist() == [-1] * 4


def test_lists_of_ids_become_arrays_once_and_each_id_once() -> None:
    """Millions of duplicates were made into Python lists in every step."""
    r = request([1], allowed_token_ids=(9, 8) * 1000, logit_bias={5: 1.5}, min_tokens=9, stop_token_ids=(6,) * 1000)
    steps = Steps(r)
    r.params = SamplingParams(min_tokens=9)  # whatever is asked of these lists is asked of the arrays
    for _ in range(2):
        batch = steps.launch()
        assert batch.sampling.allowed_ids.tolist() == [8, 9]
        assert bias(batch) == [(0, 5, 1.5), (0, 6, -INF)]
        steps.collect(8)


def test_stop_ids_are_banned_before_min_tokens() -> None:
    r = request([1], 0, min_tokens=2, stop_token_ids=(8,), eos_token_ids=(9,))
    steps = Steps(r)
    assert sorted(bias(steps.launch())) == [(0, 8, -INF), (0, 9, -INF)]
    steps.collect(4)
    r.draft_token_ids = [5, 6]  # output 1 may not stop yet, outputs 2 and 3 may
    assert sorted(bias(steps.launch())) == [(0, 8, -INF), (0, 9, -INF)]
    steps.collect(5, 3)
    assert bias(steps.launch()) == []


class Copied(list[int]):
    """Counts the ids that slices copy."""

    num_copied = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        found = super().__getitem__(key)
        self.num_copied += len(found) if isinstance(key, slice) else 0
        return found


def test_a_step_does_not_copy_the_output_for_a_reasoning_budget() -> None:
    """It did, for every row, so that the time of an output grew with its square."""
    r = request([1], 0, max_tokens=190, reasoning_budget=ReasoningBudget(100, 9))
    steps = Steps(r)
    steps.launch()
    steps.collect(3)
    for _ in range(98):
        r.append(3)
    r.num_computed_tokens = 99  # as if that had been computed
    r.draft_token_ids = [4, 4]
    step = steps.scheduler.schedule()
    assert step is not None
    r.token_ids = copied = Copied(r.token_ids)
    batch = build_batch(step, None, 4, steps.scheduler.kv.specs)
    assert copied.num_copied < 5
    assert lists(batch.sampling.allowed_rows, batch.sampling.allowed_ids) == [[1, 2], [9, 9]]


def test_the_end_of_a_bad_word_is_banned_behind_its_beginning() -> None:
    r = request([1, 2], 0, bad_words_token_ids=((30,), (2, 40), (1, 2, 41), (3, 42)))
    steps = Steps(r)
    assert bias(steps.launch()) == [(0, 30, -INF), (0, 40, -INF), (0, 41, -INF)]
    steps.collect(7)
    r.draft_token_ids = [1, 2]
    assert bias(steps.launch()) == [(0, 30, -INF), (1, 30, -INF), (2, 30, -INF), (2, 40, -INF), (2, 41, -INF)]


def test_a_bad_word_longer_than_the_context_bans_nothing() -> None:
    steps = Steps(request([2], 0, bad_words_token_ids=((1, 2, 41), (2, 2, 42))))
    assert bias(steps.launch()) == []


def test_behind_a_placeholder_a_bad_word_is_banned_on_condition() -> None:
    steps = Steps(request([9], 0), request([1, 2], 1, bad_words_token_ids=((30,), (2, 40), (2, 5, 41), (3, 5, 42))))
    steps.launch()
    batch = steps.launch()
    assert bias(batch) == [(1, 30, -INF)]
    bans = batch.sampling.conditional_bans
    assert bans is not None
    assert lists(bans.rows, bans.ids, bans.source_rows, bans.required_ids) == [[1, 1], [40, 41], [1, 1], [2, 5]]


def test_penalties_count_drafts_before_the_row() -> None:
    plain = request([9, 9], 0)
    r = request([1, 2, 1], 1, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
    steps = Steps(plain, r)
    steps.launch()
    steps.collect(3, 4)
    r.draft_token_ids = [5, 2]
    penalties = steps.launch().sampling.penalties
    assert penalties is not None
    assert penalties.rows.tolist() == [1, 2, 3]
    assert lists(penalties.presence, penalties.frequency, penalties.repetition) == [[0.5] * 3, [0.25] * 3, [1.5] * 3]
    assert penalties.starts.tolist() == [0, 3, 7, 11]
    assert penalties.ids.tolist() == [1, 2, 4] + [1, 2, 4, 5] * 2
    assert penalties.counts.tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1]
    assert penalties.placeholders.targets.tolist() == []


def test_penalties_count_the_placeholder() -> None:
    steps = Steps(request([9], 0), request([1, 2], 1, presence_penalty=1.0))
    steps.launch()
    penalties = steps.launch().sampling.penalties
    assert penalties is not None
    assert lists(penalties.rows, penalties.starts, penalties.ids, penalties.counts) == [[1], [0, 0], [], []]
    assert lists(penalties.placeholders.targets, penalties.placeholders.rows) == [[0], [1]]


def test_a_prompt_is_scored_once_over_its_chunks() -> None:
    steps = Steps(request([10, 11, 12, 13, 14], 0, prompt_logprobs=3), max_num_tokens=2)
    first, second, third = steps.launch().scores, steps_after(steps), steps_after(steps)
    assert first is not None and second is not None
    assert lists(first.token_indices, first.target_ids, first.num_logprobs) == [[0, 1], [11, 12], [3, 3]]
    assert lists(second.token_indices, second.target_ids) == [[0, 1], [13, 14]]
    assert third is None  # the last token predicts no prompt token


def test_scores_name_tokens_of_the_flat_batch() -> None:
    steps = Steps(request([10, 11, 12], 0), request([20, 21, 22], 1, prompt_logprobs=0))
    scores = steps.launch().scores
    assert scores is not None
    assert lists(scores.token_indices, scores.target_ids, scores.num_logprobs) == [[3, 4], [21, 22], [0, 0]]
    steps.collect(50, 51)
    assert steps.launch().scores is None


def test_asked_logprobs_name_their_rows() -> None:
    steps = Steps(request([1, 2]), request([3, 4], 1, logprobs=0, logprob_token_ids=(9, 7)))
    asked = steps.launch().sampling.asked_logprobs
    assert asked is not None
    assert lists(asked.rows, asked.ids) == [[1, 1], [9, 7]]
    assert Steps(request([1, 2], logprobs=3)).launch().sampling.asked_logprobs is None
