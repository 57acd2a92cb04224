"""Limits of tests come from one place, and hold on a busy machine."""

import os
import re
from pathlib import Path

import pytest
import time_limits
from time_limits import limit

TESTS = Path(__file__).parent
# A wait for a number or a constant of the module, and a time that must be below one.
FIXED = re.compile(
    r"timeout=(?:[1-9][\d.]*|[A-Z_]+)\b|\.(?:wait|join|result)\([1-9][\d.]*\)|\(\) - \w+ < [\d.]+(?=$|,| )",
)


def test_limits_grow_with_the_load_and_are_bounded(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    for load, factor in ((0.0, 5), (5.0, 5), (10.0, 10), (20.0, 20), (1000.0, 30)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert limit(3.0) == 3.0 * factor and limit() == 60 * factor


@pytest.mark.timeout(7)
def test_limits_of_whole_tests_are_scaled(request, monkeypatch):
    seen = []
    monkeypatch.setattr("pytest_timeout.pytest_timeout_set_timer", lambda item, settings: seen.append(settings.timeout))
    conftest = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    from pytest_timeout import _get_item_settings

    conftest.pytest_timeout_set_timer(request.node, _get_item_settings(request.node))
    assert seen[0] >= 7 * time_limits.ROOM


def test_no_test_has_a_limit_of_its_own():
    lines = [(p, n, x) for p in sorted(TESTS.rglob("*.py")) for n, x in enumerate(p.read_text().splitlines(), 1)]
    found = [f"{p.relative_to(TESTS)}:{n}: {hit[0]}" for p, n, x in lines for hit in FIXED.finditer(x)]
    assert len(lines) > 10_000 and not found, "write limit(seconds), from time_limits:\n" + "\n".join(found)
