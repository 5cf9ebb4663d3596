from typing import Any

import pytest

from server.service_tier import engine_priority


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
def test_answers_and_streams_say_the_tier_used(site: Any, tier: str | None, used: str) -> None:
    for reply in (site.chat(service_tier=tier), site.complete(service_tier=tier)):
        assert reply.json["service_tier"] == used
    for reply in (site.chat(service_tier=tier, stream=True), site.complete(service_tier=tier, stream=True)):
        assert {event["service_tier"] for event in reply.events} == {used}


def test_tiers_come_first_and_priority_orders_within_one() -> None:
    extreme = 2**31 - 1
    ordered = [
        engine_priority("fast", extreme),
        engine_priority(None, -extreme),
        engine_priority("auto", 0),
        engine_priority("default", extreme),
        engine_priority("flex", -extreme),
    ]
    assert ordered == sorted(ordered)
    assert len(set(ordered)) == 5


def test_the_engine_is_told(site: Any) -> None:
    site.chat(service_tier="flex", priority=-3)
    assert site.engine.asked[0].priority == engine_priority("flex", -3)


def test_an_unknown_tier_is_refused(site: Any) -> None:
    assert site.chat(service_tier="gold").error["param"] == "service_tier"
