"""Whatever happens in whatever order: no block is lost, shared wrongly or freed twice, and every output is right."""

import itertools
import logging
import os
from collections.abc import Sequence

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.engine.cache.host_tier import HostTier
from tests.engine.cache.test_events import Router
from tests.engine.fake_runner import VOCAB_SIZE, FakeEngine, make_engine, next_id, next_logprobs
from tests.engine.plain_beam_search import plain_beam_search
from weft.engine.request import Request, RequestKey
from weft.engine.sampling.sampler import uniforms
from weft.engine.wire.inputs import TokensInput
from weft.engine.wire.messages import (
    TIER_WIDTH,
    USUAL_CACHING,
    AddRequest,
    BeamOptions,
    CachePolicy,
    FinishReason,
    Pin,
    TokenLogprobs,
)
from weft.engine.wire.params import SamplingParams


class ForcedRuns:
    """Stands in for a grammar: some sampled ids have to be followed by a run of others."""

    def __init__(self, run: Sequence[int] = ()) -> None:
        self._run = list(run)

    is_stopped = False

    @staticmethod
    def run_behind(token_id: int) -> list[int]:
        return [1, 2, 3, 4, 5, 6, 7, 8, 9][: token_id // 4] if token_id % 3 == 0 else []

    def copy(self) -> "ForcedRuns":
        return ForcedRuns(self._run)

    def accept(self, token_id: int) -> str | None:
        if self._run:
            assert self._run.pop(0) == token_id
        else:
            self._run = self.run_behind(token_id)
        return None

    def forced_token_ids(self, most: int) -> list[int]:
        return self._run[:most]


def expected_ids(
    fake: FakeEngine, add: AddRequest, index: int, eos: tuple[int, ...], max_model_len: int, is_guided: bool
) -> list[int]:
    """Plain decoding, one token at a time, over the whole context."""
    params = add.sampling_params
    context = list(add.input.token_ids)
    longest = None if None in fake.windows else max(w for w in fake.windows if w is not None)
    most = max_model_len - len(context) if params.max_tokens is None else params.max_tokens
    if add.beams is not None:
        stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else eos))
        num_ids = add.num_choices + max(add.num_choices, len(stop_ids))
        return plain_beam_search(
            lambda context: next_logprobs(context if longest is None else context[-longest:], num_ids),
            context,
            add.num_choices,
            most,
            stop_ids,
            add.beams,
        )[index]
    output: list[int] = []
    while len(output) < min(most, max_model_len - len(add.input.token_ids)):
        uniform = uniforms(np.array([params.seed], np.uint64), np.array([len(context)]), np.array([index]))[0]
        seen = context if longest is None else context[-longest:]
        token_id = next_id(seen, float(uniform), params.temperature)
        context.append(token_id)
        output.append(token_id)
        if token_id in eos and not params.ignore_eos:
            break
        run = ForcedRuns.run_behind(token_id)[: most - len(output)] if is_guided else []
        context += run
        output += run
    return output


POLICIES = (
    USUAL_CACHING,
    USUAL_CACHING,
    CachePolicy(is_used=False),
    CachePolicy(pins=(Pin(12, 60.0),)),
    CachePolicy(pins=(Pin(3, 60.0), Pin(16, 1e-3))),
)


BEAMS = (None, None, None, BeamOptions(), BeamOptions(2.0, "never"), BeamOptions(-1.0, early_stopping=True))


class GuessingDrafter:
    """Right for a few tokens, then wrong, so that every length of accepted prefix occurs."""

    def __init__(self) -> None:
        self.windows: list[int | None] = [None]

    def propose(self, request: Request) -> list[int]:
        if request.grammar is not None:
            return []  # a mask would hold the rows behind drafts to what is forced; the fake runner knows none
        if request.params.temperature or None not in self.windows:
            return [7, 8]
        context = list(request.token_ids)
        for _ in range(len(context) % 4):
            context.append(next_id(context, 0.0, 0.0))
        return [*context[len(request.token_ids) :], 3][: len(context) % 5]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 24),
        block_size=st.sampled_from([1, 2, 4]),
        windows=st.sampled_from([(None,), (6,), (None, 5), (3, 8)]),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([1, 3, 8, 64]),
        prefix_caching=st.booleans(),
        max_num_pinned_blocks=st.integers(0, 6),
        overlap=st.booleans(),
        drafts=st.booleans(),
        offloads=st.booleans(),
        num_kept_states=st.sampled_from([None, None, 0, 1, 4]),
    )
    def start(self, drafts: bool, offloads: bool, **options: object) -> None:
        offloads = (
            offloads and options["num_kept_states"] is None
        )  # the tier of these tests moves blocks of tokens only
        self.tier = HostTier()
        drafter = GuessingDrafter()
        self.eos = (11,)
        self.fake = make_engine(
            **options,  # type: ignore[arg-type]
            drafter=drafter if drafts else None,
            tier=self.tier if offloads else None,
            eos_token_ids=self.eos,
        )
        drafter.windows = self.fake.windows
        self.router, self.salted = Router(), set[bytes]()
        kv = self.fake.engine.scheduler.kv
        extend, seed = kv.hashes.extend, kv.hashes.seed("", None)

        def note_salted(request: Request, num_blocks: int) -> None:
            extend(request, num_blocks)
            if request.cache_seed != seed:
                self.salted.update(request.block_hashes)

        kv.hashes.extend = note_salted  # type: ignore[method-assign]
        self.max_model_len = self.fake.engine._max_model_len
        self.adds: dict[int, AddRequest] = {}
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.scores: dict[tuple[int, int], list[TokenLogprobs]] = {}
        self.open: set[tuple[int, int]] = set()
        self.failed: set[tuple[int, int]] = set()
        self.guided: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        shared=st.integers(0, 16),
        max_tokens=st.integers(0, 12),
        num_choices=st.integers(1, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        priority=st.sampled_from([0, 1, 2, -TIER_WIDTH]),
        salt=st.sampled_from(["", "", "", "other"]),
        caching=st.sampled_from(POLICIES),
        ignore_eos=st.booleans(),
        scored=st.booleans(),
        beams=st.sampled_from(BEAMS),
        guided=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        shared: int,
        max_tokens: int,
        num_choices: int,
        temperature: float,
        priority: int,
        salt: str,
        caching: CachePolicy,
        ignore_eos: bool,
        scored: bool,
        beams: BeamOptions | None,
        guided: bool,
    ) -> None:
        if beams is not None:
            max_tokens, scored, guided = max(max_tokens, 1), False, False
        prompt = ([5] * shared + prompt)[: max(1, self.max_model_len - max_tokens)]
        if len(prompt) + max_tokens > self.max_model_len:
            return
        add = AddRequest(
            request_id=len(self.adds),
            input=TokensInput(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                seed=len(self.adds),
                ignore_eos=ignore_eos,
                prompt_logprobs=0 if scored else None,
                stop_token_ids=tuple(range(20, 24)) if beams else (),
            ),
            num_choices=num_choices,
            priority=priority,
            cache_salt=salt,
            caching=caching,
            beams=beams,
        )
        self.adds[add.request_id] = add
        self.fake.engine.add(0, add)
        if guided:
            grammar: object = ForcedRuns()
            self.fake.engine.scheduler.requests[RequestKey(0, add.request_id, 0)].grammar = grammar  # type: ignore
            self.guided.add(add.request_id)
        for index in range(num_choices):
            self.outputs[add.request_id, index] = []
            self.scores[add.request_id, index] = []
            self.open.add((add.request_id, index))

    @rule()
    def step(self) -> None:
        self.run_step(may_fail=False)

    def run_step(self, *, may_fail: bool) -> None:
        for connection, output in self.fake.step():
            key = (output.request_id, output.index)
            assert connection == 0
            assert key in self.open
            self.outputs[key] += output.token_ids
            self.scores[key] += output.prompt_logprobs or []
            if output.finish_reason is not None:
                self.open.remove(key)
            if output.finish_reason is FinishReason.ERROR:
                assert may_fail, output.message
                self.failed.add(key)
            elif output.finish_reason is not None:
                add = self.adds[output.request_id]
                self.check_scores(add, output.index)
                is_guided = add.request_id in self.guided
                expected = expected_ids(self.fake, add, output.index, self.eos, self.max_model_len, is_guided)
                assert self.outputs[key] == expected

    def check_scores(self, add: AddRequest, index: int) -> None:
        scores = [(s.top_token_ids[0], s.logprob) for s in self.scores[add.request_id, index]]
        is_scored = add.sampling_params.prompt_logprobs is not None
        if index == 0 or not is_scored:  # if choice 0 is aborted, which choice has them depends on when
            assert scores == (list(itertools.pairwise(add.input.token_ids)) if is_scored else [])

    @rule(at_launch=st.booleans())
    def failing_step(self, at_launch: bool) -> None:
        if self.fake.engine.has_work:
            self.fake.runner.fails_at_launch = at_launch
            self.fake.runner.fails_at_collect = not at_launch
        self.run_step(may_fail=True)
        self.fake.runner.fails_at_launch = self.fake.runner.fails_at_collect = False

    @rule(loses_all=st.booleans())
    def bring_back(self, loses_all: bool) -> None:
        """What is to be loaded arrives only here, or is lost."""
        if loses_all:
            self.tier.break_down()
        else:
            self.tier.work()

    @rule(data=st.data(), whole=st.booleans())
    def abort(self, data: st.DataObject, whole: bool) -> None:
        if not self.open:
            return
        request_id, index = data.draw(st.sampled_from(sorted(self.open)))
        whole = whole or self.adds[request_id].beams is not None
        self.fake.engine.scheduler.abort(0, request_id, None if whole else index)
        self.open = {key for key in self.open if key[0] != request_id or (not whole and key[1] != index)}

    @invariant()
    def is_consistent(self) -> None:
        if hasattr(self, "fake"):
            self.fake.engine.scheduler.check_integrity()
            self.router.check(self.fake.engine.scheduler.kv, self.salted, is_late=bool(self.tier.num_loaded))

    def teardown(self) -> None:
        if not hasattr(self, "fake"):
            return
        self.fake.runner.fails_at_launch = self.fake.runner.fails_at_collect = False
        for _ in range(5000):
            if not self.fake.engine.has_work:
                break
            self.step()
            self.tier.work()
            self.is_consistent()
        self.tier.work()
        self.fake.engine.scheduler.kv.finish_loads()
        assert not self.fake.engine.has_work, "requests wait for ever"
        assert not self.open
        for pool in self.fake.engine.scheduler.kv.pools:
            assert pool.num_used == 0
        assert not self.fake.engine.scheduler.kv._leaders
        assert max(self.eos) < VOCAB_SIZE


logging.getLogger("weft.engine.loop.engine").setLevel(logging.CRITICAL)  # the failing steps fail on purpose

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=int(os.environ.get("WEFT_TEST_EXAMPLES", "80")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
