from weft.engine.schedule.step_cost import FIRST_TRIAL, TokenBudget


def num_steps_until_it_grows(budget: TokenBudget, num_tokens: int) -> int:
    before = budget.max_num_tokens
    for number in range(1, 100_000):
        budget.observe(num_tokens)
        if budget.max_num_tokens > before:
            return number
    return 0


def test_it_grows_to_what_is_configured_and_not_beyond() -> None:
    budget = TokenBudget(1000, least=100)
    budget.halve()
    budget.halve()
    assert budget.max_num_tokens == 250
    num_steps = num_steps_until_it_grows(budget, 250)
    assert (num_steps, budget.max_num_tokens) == (2 * FIRST_TRIAL, 500)
    assert num_steps_until_it_grows(budget, 300) == num_steps
    assert budget.max_num_tokens == 1000
    assert num_steps_until_it_grows(budget, 1000) == 0


def test_only_steps_that_need_it_count() -> None:
    budget = TokenBudget(1000, least=100)
    budget.halve()
    assert num_steps_until_it_grows(budget, 250) == 0
    assert num_steps_until_it_grows(budget, 251) == FIRST_TRIAL


def test_each_failure_makes_the_next_trial_longer_up_to_a_bound() -> None:
    budget = TokenBudget(1000, least=100)
    trials = []
    for _ in range(9):
        budget.halve()
        trials.append(num_steps_until_it_grows(budget, 500))
    assert trials == [256, 512, 1024, 2048, 4096, 8192, 16384, 16384, 16384]


def test_failures_are_forgotten_after_as_many_good_steps() -> None:
    """Failures days apart made every trial as long as those in a row."""
    budget = TokenBudget(1000, least=100)
    for _ in range(3):
        budget.halve()
        num_steps_until_it_grows(budget, 500)
    for _ in range(1024 + 512):
        budget.observe(501)
    budget.halve()
    assert num_steps_until_it_grows(budget, 500) == 512


def test_it_never_falls_below_the_least_nor_rises_when_less_is_configured() -> None:
    budget = TokenBudget(1000, least=300)
    budget.halve()
    budget.halve()
    assert budget.max_num_tokens == 300
    small = TokenBudget(3, least=300)
    small.halve()
    assert small.max_num_tokens == 3
