import numpy as np
import pytest

from weft.engine.schedule.step_cost import StepCostModel, StepLoad


def load(*requests: tuple[int, int]) -> StepLoad:
    """The load of requests, given as (tokens, context)."""
    total = StepLoad()
    for num_tokens, context in requests:
        total.add(num_tokens, context)
    return total


def seconds(step: StepLoad) -> float:
    """A machine that needs 5 ms, 100 us per token, 1 us per KV token and 20 ns per query x context."""
    return 5e-3 + 1e-4 * step.num_tokens + 1e-6 * step.num_kv_tokens + 2e-8 * step.query_context


def random_load(generator: np.random.Generator) -> StepLoad:
    decodes = [(1, int(c)) for c in generator.integers(1, 4000, generator.integers(0, 30))]
    prefills = [(int(n), int(c)) for n, c in generator.integers(1, 800, (generator.integers(0, 3), 2))]
    return load(*decodes, *prefills)


def fitted(noise: float, num_steps: int = 300) -> StepCostModel:
    generator = np.random.default_rng(1)
    model = StepCostModel()
    for _ in range(num_steps):
        step = random_load(generator)
        model.observe(step, seconds(step) * (1 + noise * generator.standard_normal()))
    return model


def test_load_counts_tokens_context_and_pairs() -> None:
    assert load((1, 9)) == StepLoad(1, 9, 10)
    assert load((3, 10), (1, 0)) == StepLoad(4, 10, 3 * 10 + 6 + 1)


def test_predicts_nothing_before_it_has_seen_a_step() -> None:
    model = StepCostModel()
    assert model.predict(load((100, 100))) == 0.0
    assert model.num_tokens_within(load((1, 50)), 0, 0.1) == 1 << 30


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.01), (0.05, 0.1)])
def test_the_fit_converges(noise: float, tolerance: float) -> None:
    model = fitted(noise)
    for step in (load((1, 500)), load(*[(1, 1000)] * 16), load((512, 0)), load((256, 700), *[(1, 300)] * 8)):
        assert model.predict(step) == pytest.approx(seconds(step), rel=tolerance)


def test_it_is_fitted_at_every_eighth_step_or_when_a_step_surprises() -> None:
    model, step = fitted(0.0), load((1, 500))
    model.fit()
    changes = []
    for factor in (1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 2.0, 1.1):
        before = model.coefficients
        model.observe(step, seconds(step) * factor)
        changes.append(model.coefficients != before)
    assert changes == 7 * [False] + [True, False, True, False]


def test_coefficients_are_never_negative() -> None:
    """Times that fall with the load have no honest fit; a negative cost would grant prefills without end."""
    model = StepCostModel()
    for num_tokens in (10, 100, 1000) * 20:
        model.observe(load((num_tokens, 0)), 1 / num_tokens)
        predictions = [model.predict(load((n, c))) for n, c in ((0, 0), (10, 0), (1000, 0), (1000, 5000))]
        assert predictions == sorted(predictions)
        assert predictions[0] >= 0


@pytest.mark.parametrize("context", [0, 1000, 20_000])
@pytest.mark.parametrize("limit_s", [0.05, 0.3])
def test_num_tokens_within_inverts_predict(context: int, limit_s: float) -> None:
    model = fitted(0.0)
    beside = [(1, 800)] * 8
    num_tokens = model.num_tokens_within(load(*beside), context, limit_s)
    assert num_tokens > 1
    assert model.predict(load(*beside, (num_tokens, context))) <= limit_s + 1e-9
    assert model.predict(load(*beside, (num_tokens + 1, context))) > limit_s


def test_no_tokens_fit_when_the_rest_takes_too_long() -> None:
    assert fitted(0.0).num_tokens_within(load(*[(1, 1000)] * 16), 0, 0.005) == 0


def test_a_long_time_of_decoding_does_not_make_it_forget_prefill() -> None:
    """Steps that are all alike leave the coefficients open; the fit then drifted to where a prefill cost nothing."""
    generator = np.random.default_rng(2)
    model = fitted(0.02)
    for step_number in range(3000):
        step = load(*[(1, 200 + step_number % 200)] * 16)
        model.observe(step, seconds(step) * (1 + 0.02 * generator.standard_normal()))
    prefill = load((500, 0), *[(1, 300)] * 16)
    assert model.predict(prefill) == pytest.approx(seconds(prefill), rel=0.3)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    generator = np.random.default_rng(3)
    model = fitted(0.0)
    for _ in range(200):
        step = random_load(generator)
        model.observe(step, 2 * seconds(step))
    assert model.predict(load((512, 0))) == pytest.approx(2 * seconds(load((512, 0))), rel=0.05)


def test_one_step_in_a_hundred_exceeds_the_tail() -> None:
    generator = np.random.default_rng(2)
    model = StepCostModel()
    exceeded = []
    for _ in range(3000):
        step = random_load(generator)
        actual = seconds(step) * (1 + 0.1 * abs(generator.standard_normal()))
        exceeded.append(actual > model.predict(step) * model.tail_ratio)
        model.observe(step, actual)
    assert 0.002 < np.mean(exceeded[1000:]) < 0.03
    assert 1.0 < model.tail_ratio < 1.5
