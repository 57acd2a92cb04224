"""Random programs of unusual habits, at a drawn stage, on 1 to 3 ranks: each is right, or refused with what to write.

What is silently wrong, a hang, the death of a rank and an error in other words fail. `ZEROFN_FUZZ=2000` runs so
many programs, `ZEROFN_FUZZ_FIRST=500` begins at that seed. Of one, seed 17, tells
`PYTHONPATH=tests/support python tests/eager/test_fuzz_unusual.py 17`.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import rank_programs as P
import torch
import unusual_programs as U

import zerofn as zf
from zerofn.ranks.launch import RankTimeout  # inside: which error a time limit is

COUNT = int(os.environ.get("ZEROFN_FUZZ", "60"))
FIRST = int(os.environ.get("ZEROFN_FUZZ_FIRST", "0"))
SHARES = 6  # a test each, so that the workers of pytest-xdist divide them
LATER = () if "ZEROFN_FUZZ" in os.environ else pytest.mark.slow
BATCH = 20
# A program takes a tenth of a second. A call that other ranks do not join is given up after some seconds.
LIMIT = 240
PATIENCE = {"ZEROFN_TOGETHER_TIMEOUT": "3"}


def ranks_run(seeds: list[int], folder: str) -> None:
    """Runs on every rank: programs one after the other, what became of each into a file, until one is refused."""
    rank, _ = P.rank_and_size()
    warnings.simplefilter("ignore")
    for seed in seeds:
        place = Path(folder) / f"{seed}.{rank}"
        place.with_suffix(f".{rank}.begun").touch()
        try:
            result: Any = U.attached(U.draw(seed), rank, P.talk, folder)
        except Exception as error:
            text = "".join(traceback.format_exception_only(error))
            place.with_suffix(f".{rank}.json").write_text(
                json.dumps({"text": text, "trace": traceback.format_exc(limit=-6)})
            )
            raise
        torch.save(vars(result), place)


def is_refusal(text: str) -> bool:
    """Whether a message is in the library's form: what is wrong, and what to write."""
    return any(words in text for words in ("write:", "on every rank", "Every rank must"))


class Verdict:
    """What became of a program: `right`, `refused`, or what is wrong with it."""

    def __init__(self, kind: str, text: str = ""):
        self.kind, self.text = kind, text


def judge(seed: int, folder: str, hung: bool, died: str) -> Verdict:
    program = U.draw(seed)
    errors = [
        json.loads(f.read_text()) for r in range(program.size) if (f := Path(folder) / f"{seed}.{r}.json").exists()
    ]
    if hung:
        return Verdict("hang", died)
    if errors:
        if any(is_refusal(e["text"]) for e in errors):
            return Verdict("refused", next(e["text"] for e in errors if is_refusal(e["text"])))
        try:
            U.reference(program)
        except Exception as error:
            return Verdict("plain torch refuses too", str(error))
        return Verdict("poor message", errors[0]["text"] + errors[0]["trace"])
    if died:
        return Verdict("death", died)
    try:
        want = U.reference(program)
    except Exception as error:
        # Torch refuses by a count of writes: right is what a backward with the numbers of its own call gives.
        try:
            want = U.reference(program, apart=True)
        except Exception:
            return Verdict("accepted what plain torch refuses", str(error))
    for rank in range(program.size):
        got = U.Result(**torch.load(f"{folder}/{seed}.{rank}"))
        off, where = U.worst(got, want[rank])
        # Float64 in another order; stored in fp32, a change is rounded to 1e-7 of a parameter of ten times its size.
        if not off < (1e-3 if program.cast else 1e-9):
            return Verdict("wrong", f"rank {rank}: {where} is off by {off:.1e}")
    return Verdict("right")


def run(seeds: list[int], limit: float = LIMIT) -> dict[int, Verdict]:
    """Programs for one number of ranks, in as few launches as their refusals allow."""
    found: dict[int, Verdict] = {}
    left = list(seeds)
    while left:
        batch, died, hung = left[:BATCH], "", False
        with tempfile.TemporaryDirectory() as folder:
            try:
                zf.launch(ranks_run, U.draw(batch[0]).size, batch, folder, timeout=limit)
            except RankTimeout as error:
                hung, died = True, str(error)
            except zf.RankError as error:
                died = str(error)
            begun = [s for s in batch if any(Path(folder).glob(f"{s}.*.begun"))]
            last = begun[-1] if begun else batch[0]
            for seed in begun:
                found[seed] = judge(seed, folder, hung and seed == last, died if seed == last else "")
        left = [s for s in left if s not in found and s != last]
        if not begun:
            raise RuntimeError(f"no program was begun: {died}")
    return found


def tell(found: dict[int, Verdict]) -> str:
    """Counts, and each program that is neither right nor refused."""
    counts = collections.Counter(v.kind for v in found.values())
    good = ("right", "refused", "plain torch refuses too")
    rows = [f"{U.draw(s)}\n  {v.kind}: {v.text[:1500]}" for s, v in sorted(found.items()) if v.kind not in good]
    return "\n".join([str(dict(counts)), *rows])


@pytest.mark.timeout(0)
@pytest.mark.parametrize("share", [0, *(pytest.param(i, marks=LATER) for i in range(1, SHARES))])
def test_programs_of_unusual_habits(share, monkeypatch):
    for name, value in PATIENCE.items():
        monkeypatch.setenv(name, value)
    by_size = collections.defaultdict(list)
    for seed in range(FIRST + share, FIRST + COUNT, SHARES):
        by_size[U.draw(seed).size].append(seed)
    found: dict[int, Verdict] = {}
    for size in sorted(by_size):
        found |= run(by_size[size])
    kinds = collections.Counter(v.kind for v in found.values())
    assert kinds["right"] + kinds["refused"] + kinds["plain torch refuses too"] == len(found), tell(found)
    # A fuzz of refusals alone would show nothing.
    assert kinds["right"] > len(found) / 4, tell(found)


if __name__ == "__main__":
    os.environ.update(PATIENCE)
    seeds = [int(a) for a in sys.argv[1:]]
    for size in (1, 2, 3):
        chosen = [s for s in seeds if U.draw(s).size == size]
        for seed, verdict in (run(chosen, 60) if chosen else {}).items():
            print(f"{U.draw(seed)}\n  {verdict.kind} {verdict.text}")
