"""Runs random programs, and says of each whether it is right, refused in the library's words, or wrong.

A person runs some of them, from this folder: `python -m fuzzing promises --first 20000 --count 250` tells what became
of them and how many messages they took; `--each 50` runs so many at a time, which is told after each. `--show` prints
the programs first, as the Python that makes them. One that was changed by hand is run by `told(run([Program(...)]))`.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import random_programs as R
import torch
from parity import PIPES, TWINS, compare
from random_events import loss_of
from random_models import Stack, tensors
from rank_programs import rank_and_size, talk
from time_limits import limit
from units_alive import UnitsAlive

import zerofn as zf
import zerofn.sharded.reducer  # inside: its patience and its buckets are made small
from zerofn.core.bucketed_views import into_buckets  # inside: how large buckets are
from zerofn.ranks.launch import RankTimeout  # inside: which error a time limit is
from zerofn.ranks.ordered_collectives import Rounds  # inside: what ranks exchange
from zerofn.sharded.schedule import ALIVE  # inside: how many units may be full

# How many programs are in a launch: where one is refused, those behind it are launched anew.
BATCH = {"everyday": 100, "uses": 100, "promises": 100, "unusual": 20}
# A program takes a tenth of a second. A call that other ranks do not join is given up after some seconds.
PATIENCE = {"ZEROFN_TOGETHER_TIMEOUT": "3"}

# ---------------------------------------------------------------- one process: gradients of an attached model


def attached_is_plain(program: R.Program, tol: float = 20.0) -> None:
    """Raises where an attached model has other gradients than a plain one, or another update.

    `tol` is that of 16 bits. There a random program may subtract nearly equal numbers, so it is told by a twin with
    more bits; what is left to find is a lost scale (64 and more), and what only 16 bits run into.
    """
    makes = [functools.partial(Stack, form, program.seed + i) for i, form in enumerate(program.forms)]
    unused, pipe = tuple(n for make in makes for n, _ in make().named_parameters()), program.pipe

    def micro_step(run: Any) -> list[Any]:
        seen = program.run(run.models, run.step, opts=[] if run.opt is None else [run.opt], dtype=torch.float32)
        # Every model gets a gradient in every micro-step.
        last = [net(run.data(3, 4)) for net in run.models]
        sum(map(loss_of, last)).backward()
        if pipe not in ("bf16", "bf16 states"):
            assert {t.dtype for t in tensors(last)} == {torch.float32}, "outputs are to be in fp32"
        return seen

    for kind, most in ((TWINS[pipe], 1e-4), (PIPES[pipe], tol)) if pipe in TWINS else ((PIPES[pipe], 1e-4),):
        with warnings.catch_warnings():
            # Reentrant checkpointing says so where no input needs a gradient.
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            may = {"may_overflow": "fp16" in pipe, "may_be_dead": True}
            compare(
                micro_step,
                makes,
                kind,
                program.every,
                windows=1 + (kind is PIPES[pipe]),
                unused=unused,
                tol=most,
                **may,
            )


# ---------------------------------------------------------------- ranks


def attached(program: R.Program, rank: int, folder: str) -> R.Result:
    """The program on this rank with an attached model."""
    seen = collections.Counter[str]()

    def counted(name: str) -> Any:
        fn = getattr(Rounds, name)

        def call(self: Rounds, *args: Any, **options: Any) -> Any:
            seen[name] += 1
            return fn(self, *args, **options)

        return fn, call

    kept = {name: counted(name) for name in ("_exchange", "_run_next")}
    for name, (_, call) in kept.items():
        setattr(Rounds, name, call)
    buckets = into_buckets if program.bucket is None else functools.partial(into_buckets, limit=program.bucket)
    zerofn.sharded.reducer.into_buckets = buckets
    # A backward that waits for ranks that do not come goes on.
    zerofn.sharded.reducer.PATIENCE = 0.05
    try:
        models = program.make()
        before = R.values(models)
        opts = [zf.attach(model, program.pipeline()) for model in models]
        alive = UnitsAlive(opts[0])
        log: list[Any] = []
        at = [0]
        for step in range(len(program.events)):
            log += program.run(models, step, rank, opts=opts, talk=talk, folder=folder)
            for opt in opts:
                opt.step()
                opt.zero_grad()
            at.append(seen["_exchange"])
        for opt in opts:
            opt.detach()
    finally:
        for name, (fn, _) in kept.items():
            setattr(Rounds, name, fn)
    return R.Result(before, R.values(models), log, (at[-1], at[-1] - at[-2]), seen["_run_next"], alive.most)


def ranks_run(programs: list[R.Program], folder: str) -> None:
    """Programs one after the other, what became of each into a file, until one raises."""
    rank, _ = rank_and_size()
    warnings.simplefilter("ignore")
    for i, program in enumerate(programs):
        place = Path(folder) / f"{i}.{rank}"
        place.with_suffix(f".{rank}.begun").touch()
        try:
            result = attached(program, rank, folder)
        except Exception as error:
            text = "".join(traceback.format_exception_only(error))
            place.with_suffix(f".{rank}.json").write_text(
                json.dumps({"text": text, "trace": traceback.format_exc(limit=-6)})
            )
            raise
        torch.save(vars(result), place)


class Verdict:
    """What became of a program: "right", "refused", or what is wrong with it."""

    def __init__(self, kind: str, text: str = "", result: R.Result | None = None):
        self.kind, self.text, self.result = kind, text, result


def is_refusal(text: str) -> bool:
    """Whether a message is in the library's form: what is wrong, and what to write."""
    return any(words in text for words in ("write:", "on every rank", "Every rank must"))


def judge(program: R.Program, i: int, folder: str, hung: bool, died: str) -> Verdict:
    files = [Path(folder) / f"{i}.{rank}" for rank in range(program.size)]
    errors = [json.loads(x.read_text()) for f in files if (x := f.with_suffix(f"{f.suffix}.json")).exists()]
    if hung:
        return Verdict("hang", died)
    if errors:
        if any(is_refusal(e["text"]) for e in errors):
            return Verdict("refused", next(e["text"] for e in errors if is_refusal(e["text"])))
        try:
            R.reference(program)
        except Exception as error:
            return Verdict("plain torch refuses too", str(error))
        return Verdict("poor message", errors[0]["text"] + errors[0]["trace"])
    if died:
        return Verdict("death", died)
    try:
        want = R.reference(program)
    except Exception as error:
        # Torch refuses by a count of writes: right is what a backward with the numbers of its own call gives.
        try:
            want = R.reference(program, apart=True)
        except Exception:
            return Verdict("accepted what plain torch refuses", str(error))
    for rank, file in enumerate(files):
        got = R.Result(**torch.load(file))
        try:
            off, where = R.worst(got, want[rank])
        except AssertionError as error:
            # Or it went to infinity.
            return Verdict("dead", str(error))
        # Float64 in another order; stored in fp32, a change is rounded to 1e-7 of a parameter of ten times its size.
        if not off < (1e-3 if program.cast else 1e-9):
            return Verdict("wrong", f"rank {rank}: {where} is off by {off:.1e}")
        if program.messages is not None and got.messages[1] > program.messages:
            return Verdict("messages", f"rank {rank}: {got.messages[1]} in a step, not {program.messages}")
        # Each thread may have two full units, and so may a call in a hook.
        if program.kind == "promises" and got.most > ALIVE + 1 and "threads" not in sum(program.events, ()):
            return Verdict("units", f"rank {rank}: {got.most} were full")
    return Verdict("right", result=got)


def run(programs: Sequence[R.Program]) -> dict[R.Program, Verdict]:
    """What becomes of programs, in as few launches as their numbers of ranks and their refusals allow."""
    found: dict[R.Program, Verdict] = {}
    for size in sorted({p.size for p in programs}):
        left = [p for p in programs if p.size == size]
        while left:
            batch, died, hung = left[: BATCH[left[0].kind]], "", False
            with tempfile.TemporaryDirectory() as folder:
                try:
                    zf.launch(ranks_run, size, batch, folder, timeout=limit(10 + len(batch)))
                except RankTimeout as error:
                    hung, died = True, str(error)
                except zf.RankError as error:
                    died = str(error)
                begun = [i for i in range(len(batch)) if any(Path(folder).glob(f"{i}.*.begun"))]
                if not begun:
                    raise RuntimeError(f"no program was begun: {died}")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    for i in begun:
                        last = i == begun[-1]
                        found[batch[i]] = judge(batch[i], i, folder, hung and last, died if last else "")
            left = left[begun[-1] + 1 :]
    return found


GOOD = ("right", "dead", "refused", "plain torch refuses too")


def good(program: R.Program, verdict: Verdict) -> bool:
    """Whether what became of it is allowed: only programs of unusual habits may be refused by zerofn alone."""
    return verdict.kind in (GOOD if program.kind == "unusual" else ("right", "dead", "plain torch refuses too"))


def told(found: dict[R.Program, Verdict]) -> str:
    """Counts, messages a micro-step of programs that are the same in each step, and each program that is not good."""
    counts = collections.Counter(v.kind for v in found.values())
    calm = [(p, v.result) for p, v in found.items() if v.result is not None and p.messages is not None]
    ran = [(p, v.result) for p, v in found.items() if v.result is not None and p.stage == 3]
    rows = [f"{dict(counts)}; {len(calm)} calm programs"]
    if ran:
        messages = sum(r.messages[0] for _, r in ran)
        steps, collectives = sum(len(p.events) for p, _ in ran), sum(r.collectives for _, r in ran)
        rows[0] += f"; {messages / steps:.2f} messages a micro-step, for {collectives / steps:.2f} collectives"
    return "\n".join([*rows, *(f"{p}\n  {v.kind}: {v.text[:1500]}" for p, v in found.items() if not good(p, v))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("everyday", "uses", "promises", "unusual"))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--each", type=int, default=100)
    parser.add_argument("--size", type=int)
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    os.environ.update(PATIENCE)
    for first in range(given.first, given.first + given.count, given.each):
        seeds = range(first, min(first + given.each, given.first + given.count))
        programs = [R.draw(given.kind, seed, given.size or (2 if given.kind == "everyday" else None)) for seed in seeds]
        if given.show:
            print(*programs, sep="\n")
        began = time.time()
        found = run(programs)
        print(f"{given.kind} {seeds.start}..{seeds.stop - 1}, {time.time() - began:.0f} s: {told(found)}", flush=True)


if __name__ == "__main__":
    main()
