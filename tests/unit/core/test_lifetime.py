"""A lifetime reads in order."""

from splitserve.core.lifetime import Lifetime, LifetimeEvent, LifetimeEventKind


def test_an_event_never_stands_before_its_cause():
    lifetime = Lifetime("r")
    lifetime.add(LifetimeEvent(LifetimeEventKind.PREFILL_END, 100))
    lifetime.add(LifetimeEvent(LifetimeEventKind.MIGRATION_BEGIN, 90, "decode@h:1"))
    assert [event.time_ns for event in lifetime.events] == [100, 100]
    assert lifetime.events[1].node == "decode@h:1"
