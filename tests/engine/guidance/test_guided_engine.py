"""Outputs of a real model under grammars, through the whole engine."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator

import jsonschema
import pytest

from tests.engine.guidance.demo import PROMPT, TOKENIZER, VOCAB_SIZE, Answers, guided, json_grammar, run
from tests.engine.requests_for_tests import add_request
from tests.json_schemas import JSON_SCHEMAS
from weft.engine.drafts import MAX_NUM_DRAFTS
from weft.engine.guidance.matcher import GrammarMatcher
from weft.engine.loop.engine import Engine
from weft.engine.schedule.speculator import Speculator
from weft.engine.wire.messages import AddRequest, FinishReason, ReasoningBudget

PERSON = json_grammar(JSON_SCHEMAS["person"])


def ask(grammar: str | None, request_id: int = 0, *, prompt: list[int] = PROMPT, **options: object) -> AddRequest:
    options.setdefault("max_tokens", 600)
    return guided(add_request(prompt, request_id, seed=request_id, **options), grammar)  # type: ignore[arg-type]


def test_two_hundred_schemas_sampled_at_temperature_1_give_valid_answers(demo_engine: Engine) -> None:
    schemas = list(JSON_SCHEMAS.values())
    answers = run(demo_engine, *(ask(json_grammar(schema), i) for i, schema in enumerate(schemas)))
    assert answers.faults == {}
    ended = [i for i in range(len(schemas)) if answers.reason(i) is FinishReason.STOP]
    assert len(ended) >= 0.9 * len(schemas)  # some forms have no longest one, and it is the model that chooses
    for i in ended:
        answer = answers.text(i).replace('"0000-', '"0004-')  # a year that RFC 3339 knows and Python does not
        jsonschema.validate(json.loads(answer), schemas[i], format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("pattern", ["[a-z]{3}-[0-9]{2,4}", "(yes|no)", "#[0-9A-F]{6}", "([a-c]x){1,5}"])
def test_a_regular_expression_is_matched(demo_engine: Engine, pattern: str) -> None:
    answers = run(demo_engine, *(ask(f"start: /{pattern}/", i) for i in range(4)))
    assert all(re.fullmatch(pattern, answers.text(i)) for i in range(4)), answers


def test_a_lark_grammar_is_followed(demo_engine: Engine) -> None:
    grammar = 'start: sum\nsum: NUMBER ("+" NUMBER){1,3}\nNUMBER: /[1-9][0-9]?/'
    answers = run(demo_engine, *(ask(grammar, i) for i in range(4)))
    assert all(re.fullmatch(r"[1-9][0-9]?(\+[1-9][0-9]?){1,3}", answers.text(i)) for i in range(4)), answers


def test_greedy_and_extreme_settings_keep_to_the_grammar(demo_engine: Engine) -> None:
    settings: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 2.0, "top_k": 3},
        {"top_p": 0.1, "min_p": 0.5},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 3.0},
        {"logit_bias": {i: 100.0 for i in range(5, 60)}},
    ]
    answers = run(demo_engine, *(ask(PERSON, i, **options) for i, options in enumerate(settings)))
    for i in range(len(settings)):
        jsonschema.validate(json.loads(answers.text(i)), JSON_SCHEMAS["person"])


# --- where an output ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"ignore_eos": True}, {"min_tokens": 50}])
def test_an_output_ends_where_nothing_can_follow(demo_engine: Engine, options: dict[str, object]) -> None:
    answers = run(demo_engine, ask('start: "yes" | "no"', **options))
    assert answers.text() in ("yes", "no")
    assert (answers.reason(), answers.ends[0, 0].stop_token_id) == (FinishReason.STOP, None)


def test_the_end_of_sequence_comes_only_where_the_grammar_accepts(demo_engine: Engine) -> None:
    eos = {0: 100.0}
    early, late = run(demo_engine, ask("start: /a{0,9}/", logit_bias=eos)), ask("start: /a{5,9}/", logit_bias=eos)
    assert (early.text(), early.reason(), early.ends[0, 0].stop_token_id) == ("", FinishReason.STOP, 0)
    assert run(demo_engine, late).text() == "aaaaa"


def test_min_tokens_keeps_an_output_going_while_the_grammar_can(demo_engine: Engine) -> None:
    answers = run(demo_engine, ask("start: /a{0,90}/", logit_bias={0: 100.0}, min_tokens=6))
    assert len(answers.token_ids[0, 0]) == 7
    assert answers.ends[0, 0].stop_token_id == 0


def test_max_tokens_cuts_an_output(demo_engine: Engine) -> None:
    answers = run(demo_engine, ask("start: /[a-z]{100}/", max_tokens=5))
    assert (answers.reason(), len(answers.token_ids[0, 0])) == (FinishReason.LENGTH, 5)


def test_max_tokens_0_scores_the_prompt(demo_engine: Engine) -> None:
    assert run(demo_engine, ask(PERSON, max_tokens=0)).token_ids == {(0, 0): []}


def test_nothing_left_to_sample_is_an_error_and_not_text_against_the_grammar(demo_engine: Engine) -> None:
    yes = TOKENIZER.encode("yes").ids
    answers = run(
        demo_engine,
        ask("start: /[0-9]{3}/", 0, allowed_token_ids=tuple(yes), temperature=0.0),
        ask("start: /[0-9]{3}/", 1, allowed_token_ids=tuple(yes), logprobs=1),
        ask(
            'start: "!!"', 2, bad_words_token_ids=tuple((i,) for i in range(VOCAB_SIZE) if "!" in TOKENIZER.decode([i]))
        ),
        ask(None, 3, max_tokens=4, ignore_eos=True),
    )
    for i in range(3):
        assert answers.reason(i) is FinishReason.DEAD_END
        assert "no token is left that both the grammar and the other parameters" in (answers.ends[i, 0].message or "")
        assert answers.text(i) == ""
    assert answers.reason(3) is FinishReason.LENGTH


def test_logprobs_are_those_of_the_model(demo_engine: Engine) -> None:
    plain = run(demo_engine, ask(None, max_tokens=1, temperature=0.0, logprobs=5))
    masked = run(demo_engine, ask('start: "zq"', max_tokens=1, temperature=0.0, logprobs=5))
    assert plain.ends[0, 0].logprobs is not None
    assert masked.ends[0, 0].logprobs is not None
    assert plain.ends[0, 0].logprobs[0].top_token_ids == masked.ends[0, 0].logprobs[0].top_token_ids
    assert masked.ends[0, 0].logprobs[0].logprob < plain.ends[0, 0].logprobs[0].logprob


# --- drafts, choices, neighbours ----------------------------------------------------------------------------------


def mixed(num: int) -> list[AddRequest]:
    """Requests with and without a grammar, greedy and sampled, some with several choices; prompts share a prefix."""
    names = ["person", "nested persons", "long names", "array of objects", "names to escape", "forty members"]
    adds = []
    for i in range(num):
        grammar = json_grammar(JSON_SCHEMAS[names[i % len(names)]]) if i % 4 else None
        add = add_request(
            PROMPT * 8 + [40 + i], i, seed=i, max_tokens=60, temperature=float(i % 3 > 0), num_choices=1 + (i % 5 == 1)
        )
        adds.append(guided(add, grammar))
    return adds


@contextlib.contextmanager
def one_by_one() -> Iterator[None]:
    """Every id is sampled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarMatcher, "forced_token_ids", lambda matcher, most: [])
        yield


def run_watched(engine: Engine, *adds: AddRequest) -> tuple[Answers, list[tuple[int, int]]]:
    """What became of the requests, and tokens and rows of each step."""
    steps = []
    engine._before_launch = lambda step: steps.append((step.load.num_tokens, step.num_rows))
    return run(engine, *adds), steps


def test_forced_tokens_change_the_number_of_steps_and_nothing_else(make_demo_engine: Callable[..., Engine]) -> None:
    plain, hurried = make_demo_engine(), make_demo_engine()
    with one_by_one():
        expected = run(plain, *mixed(24)).token_ids
        alone, slow_steps = run_watched(plain, mixed(12)[2])
    assert run(hurried, *mixed(24)).token_ids == expected
    at_once, steps = run_watched(hurried, mixed(12)[2])
    assert alone.token_ids == at_once.token_ids
    assert len(slow_steps) > 1.3 * len(steps)  # the tokenizer has its share


LONG_CONST = json_grammar(
    {
        "type": "object",
        "properties": {"a": {"const": "once upon a time " * 60}, "b": {"type": "string", "pattern": "^[a-z]{9}$"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_long_run_of_forced_tokens_is_computed_like_a_prompt(
    make_demo_engine: Callable[..., Engine], overlap: bool
) -> None:
    """It was one draft: a step of 1,684 rows of logits and masks, for which all others waited."""
    engine = make_demo_engine(max_num_batched_tokens=64, max_num_seqs=16)
    engine._overlap = overlap
    adds = [ask(LONG_CONST, 0), ask(LONG_CONST, 1, temperature=0.0), ask(None, 2, max_tokens=60, ignore_eos=True)]
    with one_by_one():
        expected = run(engine, *adds)
    answers, steps = run_watched(engine, *adds)
    assert answers.token_ids == expected.token_ids
    assert answers.reason(0) is FinishReason.STOP
    assert len(answers.token_ids[0, 0]) > 200
    assert max(num_rows for _, num_rows in steps) <= len(adds)
    assert max(num_tokens for num_tokens, _ in steps) <= 64
    assert sum(num_rows for _, num_rows in steps) < 200


def test_forced_tokens_with_logprobs_are_computed_a_few_at_a_time(make_demo_engine: Callable[..., Engine]) -> None:
    engine = make_demo_engine()
    add = ask(LONG_CONST, logprobs=2)
    with one_by_one():
        expected, slow_steps = run_watched(engine, add)
    answers, steps = run_watched(engine, add)
    assert answers.token_ids == expected.token_ids
    assert 8 < max(num_rows for _, num_rows in steps) <= 1 + MAX_NUM_DRAFTS
    assert len(steps) < len(slow_steps) / 4


def test_preemption_and_little_room_change_nothing(make_demo_engine: Callable[..., Engine]) -> None:
    options = {"max_num_seqs": 12, "max_num_batched_tokens": 64, "block_size": 16, "max_model_len": 160}
    roomy = make_demo_engine(**options)
    tight = make_demo_engine(**options, kv_cache_memory=3 << 18)
    tight.scheduler.mean_output_tokens = 0.0  # it expects short outputs and admits too many
    expected, got = run(roomy, *mixed(24)), run(tight, *mixed(24))
    assert tight.scheduler.counters.num_preemptions > 0
    assert got.token_ids == expected.token_ids


def test_neighbours_with_a_grammar_change_no_id(demo_engine: Engine) -> None:
    everybody = run(demo_engine, *mixed(20))
    unguided = [add for add in mixed(20) if add.guidance.grammar is None]
    assert len(unguided) == 5
    alone = run(demo_engine, *unguided)
    assert {key: everybody.token_ids[key] for key in alone.token_ids} == alone.token_ids


def test_each_choice_has_its_own_state(demo_engine: Engine) -> None:
    """At a temperature at which no two choices are alike."""
    add = add_request(PROMPT, num_choices=5, max_tokens=400, seed=3, temperature=2.0)
    answers = run(demo_engine, guided(add, PERSON))
    texts = [answers.text(0, index) for index in range(5)]
    assert len(set(texts)) == 5
    for text in texts:
        jsonschema.validate(json.loads(text), JSON_SCHEMAS["person"])


def test_overlapping_steps_wait_for_the_ids_that_a_grammar_needs(make_demo_engine: Callable[..., Engine]) -> None:
    plain, overlapping = make_demo_engine(), make_demo_engine()
    overlapping._overlap = True
    assert run(plain, *mixed(10)).token_ids == run(overlapping, *mixed(10)).token_ids


# --- reasoning budget ---------------------------------------------------------------------------------------------

(END,) = TOKENIZER.encode("!").ids


def think(budget: int, request_id: int = 0, grammar: str | None = None, **options: object) -> AddRequest:
    options.setdefault("max_tokens", 60)
    add = add_request(PROMPT, request_id, seed=request_id, **options)  # type: ignore[arg-type]
    return guided(add, grammar, reasoning_budget=ReasoningBudget(budget, END))


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_end_of_reasoning_is_forced(
    make_demo_engine: Callable[..., Engine], max_tokens: int, overlap: bool
) -> None:
    engine = make_demo_engine()
    engine._overlap = overlap
    plain = run(engine, guided(add_request(PROMPT, max_tokens=60, seed=0, ignore_eos=True), None))
    ids = run(engine, think(max_tokens, ignore_eos=True)).token_ids[0, 0]
    assert ids[:max_tokens] == plain.token_ids[0, 0][:max_tokens]
    assert ids[max_tokens] == END
    assert len(ids) == 60


class Repeat:
    """Drafts what an earlier run gave, with a fault here and there."""

    def __init__(self, answers: Answers) -> None:
        self._outputs = answers.token_ids

    def propose(self, request: object) -> list[int]:
        output = self._outputs[request.key.request_id, request.key.choice]  # type: ignore[attr-defined]
        start = request.num_output_tokens  # type: ignore[attr-defined]
        drafts = output[start : start + 6]
        return [*drafts[:3], 5, *drafts[4:]] if start % 3 == 0 and len(drafts) > 3 else drafts


def test_drafts_across_the_budget_change_nothing(make_demo_engine: Callable[..., Engine]) -> None:
    schema = {**JSON_SCHEMAS["person"], "x-guidance": {"whitespace_flexible": False}}
    grammar = f"start: THOUGHT answer\nTHOUGHT: /[^!]*!/\nanswer: %json {json.dumps(schema)}"
    adds = [think(3 + 2 * i, i, grammar if i % 2 else None, max_tokens=90, temperature=float(i > 3)) for i in range(8)]
    engine = make_demo_engine()
    engine._speculator = None
    expected = run(engine, *adds)
    num_steps = engine.scheduler.counters.num_steps
    engine._speculator = Speculator(engine.scheduler, (Repeat(expected),), None)
    assert run(engine, *adds).token_ids == expected.token_ids
    assert engine.scheduler.counters.num_steps - num_steps < num_steps
    for i in (1, 3, 5, 7):
        thought, _, answer = expected.text(i).partition("!")
        assert len(TOKENIZER.encode(thought).ids) <= 90
        jsonschema.validate(json.loads(answer), JSON_SCHEMAS["person"])
