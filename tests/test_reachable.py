"""The objects that a user's objects refer to."""

from __future__ import annotations

from amp_engine.ground.reachable import reachable

HELD = object()


def test_a_function_with_an_assert_does_not_lead_to_pytest():
    def users():
        assert HELD

    found = reachable([users])
    assert any(one is HELD for one in found)
    assert len(found) < 20
