"""Where requests go, and what the choice may cost; the clock is whatever the test says."""

from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.server.ray.policy import PrefixPolicy, ReplicaView


def replicas_of(number: int, **fields: object) -> tuple[ReplicaView, ...]:
    return tuple(ReplicaView(f"r{i}", **fields) for i in range(number))  # type: ignore[arg-type]


def text(name: object, blocks: int = 3) -> str:
    return "".join(f"{name}/{i}".ljust(256, ".") for i in range(blocks))


def chosen(policy: PrefixPolicy, replicas: tuple[ReplicaView, ...], prompt: str, now: float = 0.0) -> str:
    choice = policy.choose(replicas, prompt, now)
    assert choice is not None
    return choice.id


def test_nobody_is_chosen_of_none() -> None:
    assert PrefixPolicy().choose((), "hello", 0.0) is None


def test_a_conversation_stays_where_it_began() -> None:
    policy, replicas = PrefixPolicy(), replicas_of(10)
    for name in range(20):
        first = chosen(policy, replicas, text(name), name)
        assert chosen(policy, replicas, text(name) + text("more"), name + 0.5) == first


def test_the_longest_known_prefix_decides() -> None:
    policy, system = PrefixPolicy(), text("system", 1)
    alone = replicas_of(1)
    policy.choose(alone, system + text("a"), 0.0)
    elsewhere = (ReplicaView("r1"),)
    policy.choose(elsewhere, system + text("b"), 0.0)
    both = alone + elsewhere
    assert [chosen(policy, both, system + text(name), 5.0) for name in "abab"] == ["r0", "r1", "r0", "r1"]


def test_routers_that_share_nothing_agree_and_few_prefixes_move() -> None:
    replicas, times = replicas_of(20), count(0, 10)
    one, other, fewer = PrefixPolicy(), PrefixPolicy(), PrefixPolicy()
    homes = {name: chosen(one, replicas, text(name), next(times)) for name in range(200)}
    assert homes == {name: chosen(other, replicas, text(name), next(times)) for name in homes}
    assert max(Counter(homes.values()).values()) < 30
    left = replicas[1:]
    moved = [name for name in homes if chosen(fewer, left, text(name), next(times)) != homes[name]]
    assert {homes[name] for name in moved} == {"r0"}


def test_an_adapter_is_asked_for_where_it_is_loaded_unless_that_is_busy() -> None:
    policy, names = PrefixPolicy(), ("base", "lora")
    replicas = (*replicas_of(6, models=names), ReplicaView("has", models=names, loras=("lora",)), ReplicaView("other"))
    times = count(0, 10)

    def picks(replicas: tuple[ReplicaView, ...], model: str) -> set[str]:
        found = [policy.choose(replicas, text((model, number)), next(times), model) for number in range(60)]
        return {replica.id for replica in found if replica is not None}

    assert picks(replicas, "lora") == {"has"}
    assert len(picks(replicas, "base")) == 7
    busy = tuple(replace(replica, running=9) if replica.id == "has" else replica for replica in replicas)
    assert picks(busy, "lora") == {f"r{i}" for i in range(6)}


def test_a_busy_home_is_left() -> None:
    policy, replicas = PrefixPolicy(slack=4), replicas_of(3)
    home = chosen(policy, replicas, text("a"))
    for running in (6, 7):
        now = tuple(replace(r, running=running) if r.id == home else r for r in replicas)
        assert (chosen(policy, now, text("a"), 5.0 * running) == home) == (running == 6)


def test_a_prompt_that_all_share_uses_every_replica_evenly() -> None:
    policy, replicas = PrefixPolicy(slack=4), replicas_of(100)
    load = Counter(chosen(policy, replicas, text("system") + text(name)) for name in range(1000))
    assert set(load) == {r.id for r in replicas}
    assert max(load.values()) <= 10 + 4


@pytest.mark.parametrize(("running", "now", "stays"), [(None, 0.5, False), ((5, 1), 0.5, True), (None, 1.5, True)])
def test_picks_count_until_statistics_show_them_or_a_second_has_passed(
    running: tuple[int, int] | None, now: float, stays: bool
) -> None:
    policy, replicas = PrefixPolicy(slack=2), replicas_of(2)
    homes = [chosen(policy, replicas, text("a"), 0.1 * i) for i in range(5)]
    assert len(set(homes)) == 1
    if running:
        replicas = tuple(replace(r, running=running[r.id != homes[0]]) for r in replicas)
    assert (chosen(policy, replicas, text("a"), now) == homes[0]) == stays


def test_the_dead_get_nothing_unless_all_are() -> None:
    policy = PrefixPolicy()
    replicas = (ReplicaView("dead", alive=False), ReplicaView("busy", running=100))
    assert chosen(policy, replicas, text("a")) == "busy"
    assert chosen(policy, replicas_of(2, alive=False), text("a")) in {"r0", "r1"}


def test_who_has_the_model_comes_first() -> None:
    policy = PrefixPolicy()
    replicas = (ReplicaView("a", models=("one",)), ReplicaView("b", running=50, models=frozenset({"one", "two"})))
    for prompt in ("", "hello", text("x")):
        assert getattr(policy.choose(replicas, prompt, 0.0, "two"), "id", "") == "b"
        assert policy.choose(replicas, prompt, 0.0, "three") is not None


def test_a_prefix_of_one_model_is_none_of_another() -> None:
    policy, replicas, times = PrefixPolicy(), replicas_of(50), count(0, 10)
    homes = {getattr(policy.choose(replicas, text("a"), next(times), f"m{i}"), "id", "") for i in range(10)}
    assert len(homes) > 1


def test_the_emptier_cache_breaks_ties() -> None:
    policy = PrefixPolicy()
    for name in ("full", "empty"):
        policy.choose((ReplicaView(name),), text("a"), 0.0)
    both = (ReplicaView("full", kv_usage=0.9), ReplicaView("empty", kv_usage=0.1))
    assert chosen(policy, both, text("a"), 5.0) == chosen(policy, both, "", 10.0) == "empty"


def test_memory_is_bounded() -> None:
    policy, replicas = PrefixPolicy(max_prefixes=100), replicas_of(3)
    for name in range(1000):
        policy.choose(replicas, text(name, 5), float(name))
    policy.choose(replicas, text("long", 10_000), 2000.0)
    assert len(policy._homes) <= 100
    assert len(policy._picks) == 1 and len(policy._unseen) == 1 and not policy._seen


def test_statistics_are_read_once_while_they_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, replicas, reads = PrefixPolicy(), replicas_of(1000), []
    read = policy._read
    monkeypatch.setattr(policy, "_read", lambda views: (reads.append(1), read(views)))
    for name in range(100):
        policy.choose(replicas, text(name), 0.0)
    assert len(reads) == 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "send", "send", "tell", "leave", "join", "die"]),
            st.integers(0, 9),
            st.floats(0, 0.8),
        ),
        max_size=80,
    )
)
def test_load_stays_bounded_and_counted_whatever_comes(events: list[tuple[str, int, float]]) -> None:
    """The sent count up as true load; statistics tell it late. No home takes more than the slack over the mean."""
    policy, now, slack = PrefixPolicy(slack=4), 0.0, 4
    views = {f"r{i}": ReplicaView(f"r{i}") for i in range(3)}
    true = Counter(dict.fromkeys(views, 0))
    replicas = tuple(views.values())
    for kind, value, after in events:
        now += after
        name = f"r{value}"
        if kind == "tell" and name in views:
            views[name] = replace(views[name], running=true[name])
        elif kind == "leave" and len(views) > 1:
            views.pop(name, None)
        elif kind == "join":
            true[name] = 0
            views[name] = ReplicaView(name)
        elif kind == "die" and name in views:
            views[name] = replace(views[name], alive=False)
        if kind != "send":
            replicas = tuple(views.values())
            continue
        choice = policy.choose(replicas, text(value % 4), now)
        assert choice in replicas
        alive = [r.id for r in replicas if r.alive] or [r.id for r in replicas]
        true[choice.id] += 1
        load = dict(zip(policy._index, policy._load.tolist(), strict=True))
        assert choice.id in alive
        assert load[choice.id] - 1 <= (sum(load[name] for name in alive) - 1) // len(alive) + slack
        assert all(load[r.id] == r.running + policy._unseen[r.id] for r in replicas)
        assert all(number > 0 for number in (policy._unseen + policy._seen).values())
        assert policy._unseen.total() + policy._seen.total() == len(policy._picks)
    policy.choose(replicas, "", now + 100)
    assert policy._unseen.total() == 1 and policy._load.tolist() == [r.running + policy._unseen[r.id] for r in replicas]
