"""Random programs on ranks, of each kind of `random_events`: the numbers are those of one plain process, none hangs.

`ZEROFN_FUZZ=2000` runs so many of each kind, `ZEROFN_FUZZ_FIRST=500` begins at that seed. A failing program is printed
as the Python that makes it; `python -m fuzzing`, in tests/support, runs one alone.
"""

import collections
import os

import pytest
from fuzzing import PATIENCE, good, run, told
from random_programs import draw, each_everyday

COUNT = int(os.environ.get("ZEROFN_FUZZ", "0"))
FIRST = int(os.environ.get("ZEROFN_FUZZ_FIRST", "0"))
# Kind, ranks (as many as a seed says where None), and how many programs in every run.
DEFAULT = {("uses", 2): 2, ("promises", 3): 1, ("unusual", None): 2}
SLOW = {("uses", 1): 4, ("uses", 3): 10, ("uses", 4): 4, ("promises", 3): 40, ("unusual", None): 20}
SLOW |= {("everyday", 2): 20, ("everyday", 3): 20}


def check(programs):
    found = run(programs)
    print(told(found))
    assert all(good(program, verdict) for program, verdict in found.items()), told(found)
    # A fuzz of refusals alone would show nothing.
    assert collections.Counter(v.kind for v in found.values())["right"] > len(found) / 4, told(found)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("kind", "size", "count"),
    [
        *((*which, COUNT or count) for which, count in DEFAULT.items()),
        *(pytest.param(*which, COUNT or count, marks=pytest.mark.slow) for which, count in SLOW.items()),
    ],
)
def test_random_programs(kind, size, count, monkeypatch):
    for name, value in PATIENCE.items():
        monkeypatch.setenv(name, value)
    check([draw(kind, seed, size) for seed in range(FIRST, FIRST + count)])


@pytest.mark.parametrize(
    ("size", "few"),
    [(2, True), pytest.param(1, True, marks=pytest.mark.slow), pytest.param(3, False, marks=pytest.mark.slow)],
)
def test_each_everyday_event(size, few):
    check(each_everyday(size, few))
