"""More than 300 architectures of ten libraries, tiny: each is trained in three of eight ways, with torch's numbers.

Two ranks; one process trains with torch's AdamW on the data of both, in float64. What is not installed is skipped:
pip install '.[test,integrations]'.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import zoo
import zoo_ways
from time_limits import limit

import zerofn as zf

pytestmark = [pytest.mark.slow, pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

# In one launch: to start ranks and to import the libraries takes seconds.
TOGETHER, SECONDS = 24, 400


@functools.cache
def trained(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """What each rank says of these architectures, by way."""
    cells = {name: ways_of(name) for name in names}
    return zf.launch(zoo_ways.on_a_rank, zoo_ways.RANKS, cells, timeout=limit(SECONDS))


def ways_of(name: str) -> list[str]:
    """Under ZeRO-3, in which modules are taken apart, and in two of the others in turn; `zoo_table.py` has them all."""
    others = [way for way in zoo_ways.WAYS if way != "ZeRO-3"]
    i = list(zoo.ROWS).index(name)
    return ["ZeRO-3", others[i % 7], others[(i + 1 + i // 7 % 6) % 7]]


@functools.cache
def installed(name: str) -> str:
    """Why an architecture cannot be built here; "" if it can."""
    try:
        zoo.built(name)
    except ImportError as error:
        return str(error)
    return ""


def those_beside(name: str, session: pytest.Session) -> tuple[str, ...]:
    """The architectures that this session tests in the launch of `name`."""
    names = [x.callspec.params["name"] for x in session.items if getattr(x, "originalname", "") == WITH_ALL]
    part = names.index(name) // TOGETHER * TOGETHER
    return tuple(n for n in names[part : part + TOGETHER] if not installed(n))


WITH_ALL = "test_changes_are_those_of_torch"


@pytest.mark.timeout(limit(SECONDS + 60))
@pytest.mark.parametrize("name", zoo.ROWS)
def test_changes_are_those_of_torch(name: str, request: pytest.FixtureRequest):
    if why := installed(name):
        pytest.skip(f"pip install '.[test,integrations]': {why}")
    refused = zoo.REFUSED.get(name, {})
    for rank in trained(those_beside(name, request.session)):
        for way, answer in rank[name].items():
            if zoo_ways.WAYS[way].bf16 and name in zoo.NO_BF16:
                continue
            told = way in refused and isinstance(answer, str) and refused[way] in answer
            assert told or zoo_ways.right(name, way, answer), (way, answer)


def test_the_zoo_is_large():
    assert len(zoo.ROWS) >= 300 and len(set(zoo.LIBRARY.values())) >= 10
    assert {*zoo.NO_BF16, *zoo.REFUSED} <= zoo.ROWS.keys()
    assert all(set(ways) <= zoo_ways.WAYS.keys() for ways in zoo.REFUSED.values())
