"""benchmarks/router: what the router brings on a small scale; all is counted, and nothing depends on the machine."""

from benchmarks.router import Case, Result, Simulation, table


def run(policy: str, **options: float) -> Result:
    simulation = Simulation(Case(20, policy, 15.0, **options))
    for _ in simulation.run():
        pass
    return simulation.result()


def test_more_is_cached_than_by_any_other_choice_and_nobody_is_swamped() -> None:
    prefix, busy, anyone = (run(policy) for policy in ("prefix", "least busy", "random"))
    assert prefix.num_requests > 500 and prefix.picks_of_dead < prefix.num_requests / 50
    assert max(busy.hit_rate, anyone.hit_rate) + 0.1 < prefix.hit_rate < prefix.ideal_hit_rate
    assert prefix.max_to_mean < 2.5 and prefix.waited_p99_s < 1.5
    assert [column.header for column in table([prefix, busy]).columns][:2] == ["replicas", "policy"]


def test_statistics_that_are_old_and_replicas_that_go_cost_hits_but_no_service() -> None:
    calm, wild = run("prefix", churn=0.0), run("prefix", churn=0.05, stats_s=5.0)
    assert calm.picks_of_dead == 0
    assert wild.hit_rate < calm.hit_rate and wild.picks_of_dead < wild.num_requests / 10
