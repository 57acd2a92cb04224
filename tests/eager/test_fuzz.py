"""Random training programs on random modules, plain against attached. `ZEROFN_FUZZ=5000` runs more of them.

A failing program is named by its seed: `ZEROFN_FUZZ_SEED=17 pytest tests/eager/test_fuzz.py` runs it alone.
"""

from __future__ import annotations

import os
import traceback
import warnings

import programs
import pytest
import torch
from parity import PIPES, TWINS, compare

COUNT = int(os.environ.get("ZEROFN_FUZZ", "200"))
ONLY = os.environ.get("ZEROFN_FUZZ_SEED")
SHARES = 20  # one test each, so that the workers of pytest-xdist divide them
# A tenth of them in every run; all where their number is given.
LATER = () if "ZEROFN_FUZZ" in os.environ else pytest.mark.slow


def run(seed: int) -> None:
    """One program."""
    nets, steps, every, pipe = programs.draw(seed)
    makes = [lambda s=s: _made(s) for s in nets]
    unused = tuple(n for s in nets for n, _ in _made(s).named_parameters())
    # In 16 bits a random program may subtract nearly equal numbers, so that is told by a twin with more bits;
    # what is left to find there is a lost scale (64 and more), and what only 16 bits run into.
    for kind, tol in ((TWINS[pipe], 1e-4), (PIPES[pipe], 20.0)) if pipe in TWINS else ((PIPES[pipe], 1e-4),):
        with warnings.catch_warnings():
            # Reentrant checkpointing says so where no input needs a gradient.
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            compare(
                programs.program_of(steps),
                makes,
                kind,
                every,
                windows=2,
                unused=unused,
                tol=tol,
                may_overflow="fp16" in pipe,
                may_be_dead=True,
            )


def _made(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return programs.RandomPieces(seed)


@pytest.mark.timeout(120 + COUNT)
@pytest.mark.parametrize("share", [0, *(pytest.param(i, marks=LATER) for i in range(1, 1 if ONLY else SHARES))])
def test_random_programs(share):
    failed = []
    seeds = [int(ONLY)] if ONLY else range(share, COUNT, SHARES)
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            nets, steps, every, pipe = programs.draw(seed)
            where = traceback.extract_tb(error.__traceback__)[-1]
            failed.append(
                f"seed {seed}: {pipe}, {len(nets)} models, every={every}, {[s.actions for s in steps]}\n"
                f"    {type(error).__name__}: {str(error)[:300]} ({where.filename}:{where.lineno})"
            )
    assert not failed, f"{len(failed)} of {len(seeds)} programs failed:\n" + "\n".join(failed)
