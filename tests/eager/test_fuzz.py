"""Random training programs in one process, plain against attached. `ZEROFN_FUZZ=5000` runs more of them.

A failing program is named by its seed: `ZEROFN_FUZZ_SEED=17 pytest tests/eager/test_fuzz.py` runs it alone.
"""

import os
import traceback

import pytest
from fuzzing import attached_is_plain
from parity import PIPES
from random_events import events_of
from random_programs import NET, Program, draw

COUNT = int(os.environ.get("ZEROFN_FUZZ", "50"))
ONLY = os.environ.get("ZEROFN_FUZZ_SEED")
SHARES = 5  # one test each, so that the workers of pytest-xdist divide them
# A fifth of them in every run; all where their number is given.
LATER = () if "ZEROFN_FUZZ" in os.environ else pytest.mark.slow


@pytest.mark.timeout(120 + COUNT)
@pytest.mark.parametrize("share", [0, *(pytest.param(i, marks=LATER) for i in range(1, 1 if ONLY else SHARES))])
def test_an_attached_model_is_the_plain_one(share):
    failed = []
    seeds = [int(ONLY)] if ONLY else range(share, COUNT, SHARES)
    for seed in seeds:
        try:
            attached_is_plain(draw("everyday", seed))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {str(error)[:300]} ({where.filename}:{where.lineno})"
            failed.append(f"{draw('everyday', seed)}\n    {said}")
    assert not failed, f"{len(failed)} of {len(seeds)} programs failed:\n" + "\n".join(failed)


# Each event in half of the pipelines at once, and in a window of four in one of the others.
EVENTS = []
for i, name in enumerate(events_of("everyday")):
    half, others = list(PIPES)[i % 2 :: 2], list(PIPES)[1 - i % 2 :: 2]
    EVENTS += [(name, pipe, 1) for pipe in half]
    EVENTS += [pytest.param(name, others[i // 2 % len(others)], 4, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "pipe", "every"), EVENTS)
def test_each_event(name, pipe, every):
    # Each derivative of a rounded function loses about a bit.
    attached_is_plain(Program("everyday", 0, ((name,),) * every, (NET,), pipe=pipe, every=every), 6 * PIPES[pipe].tol)
