from typing import Any

import pytest

from weft.engine.wire.messages import TIER_WIDTH

KEYS: dict[str, Any] = {"api_key": ("usual", "s\u00e9cond"), "priority_keys": ("s\u00e9cond",)}


@pytest.mark.parametrize(
    ("tier", "used"),
    [
        (None, "default"),
        ("auto", "default"),
        ("scale", "default"),
        ("flex", "flex"),
        ("priority", "priority"),
        ("fast", "priority"),
    ],
)
def test_answers_and_streams_say_the_tier_used(make_site: Any, tier: str | None, used: str) -> None:
    site = make_site(priority_keys=("*",))
    for reply in (site.chat(service_tier=tier), site.complete(service_tier=tier)):
        assert reply.json["service_tier"] == used
    for reply in (site.chat(service_tier=tier, stream=True), site.complete(service_tier=tier, stream=True)):
        assert {event["service_tier"] for event in reply.events} == {used}


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(("key", "tier"), [("usual", "default"), ("s\u00e9cond", "priority")])
def test_the_top_tier_is_for_keys_that_may(make_site: Any, path: str, key: str, tier: str) -> None:
    """Four clients that asked for it kept everybody else waiting for ever."""
    site = make_site(**KEYS)
    headers = {"authorization": f"Bearer {key}".encode()}
    content = {"messages": [{"role": "user", "content": "a"}]} if path[0:2] == "ch" else {"prompt": "a"}
    for asked in ("fast", "priority"):
        reply = site.call("POST", f"/v1/{path}", json={**content, "service_tier": asked}, headers=headers)
        assert reply.json["service_tier"] == tier
        assert site.engine.asked[-1].priority == (-TIER_WIDTH if tier == "priority" else 0)
    reply = site.call("POST", f"/v1/{path}", json={**content, "priority": -1}, headers=headers)
    assert reply.status == (200 if tier == "priority" else 400)


def test_without_permission_nobody_goes_before_others(site: Any) -> None:
    assert site.chat(service_tier="fast").json["service_tier"] == "default"
    assert site.chat(service_tier="flex", priority=2**31 - 1).json["service_tier"] == "flex"
    assert [asked.priority for asked in site.engine.asked] == [0, TIER_WIDTH + 2**31 - 1]
    error = site.chat(priority=-3).error
    assert (error["param"], error["message"]) == (
        "priority",
        "priority must be at least 0 unless the API key is among priority_keys, got -3",
    )


def test_tiers_come_first_and_priority_orders_within_one(make_site: Any) -> None:
    site, extreme = make_site(priority_keys=("*",)), 2**31 - 1
    asked = [("fast", extreme), (None, -extreme), ("auto", 0), ("default", extreme), ("flex", -extreme)]
    for tier, priority in asked:
        site.chat(service_tier=tier, priority=priority)
    told = [request.priority for request in site.engine.asked]
    assert told == sorted(told)
    assert len(set(told)) == len(asked)


def test_an_unknown_tier_is_refused(site: Any) -> None:
    assert site.chat(service_tier="gold").error["param"] == "service_tier"
