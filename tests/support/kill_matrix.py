"""Cut off saves at many moments and count what is on disk then: the old state, the new one, or neither.

    python tests/support/kill_matrix.py --moments 1000 --seed 0

Each moment is a save in processes of its own, which are killed, interrupted, or whose disk fails; another process
then reads what is there. It must be, to the bit, what was there or what was to be; after a save that returned it must
be the new; what an error says of it must be true; and who was interrupted must be able to read at once. The tests
run a few of each kind.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kill_moments as at
import torch
from kill_moments import Child, attempt
from time_limits import limit

import zerofn as zf


class Bench:
    """A directory in which numbers are saved one after the other, and what came of each.

    Attributes:
        counts: by kind, of `old`, `new` and `lost`, and of what else is wrong.
        faults: in words.
    """

    def __init__(self, root: Path, seed: int):
        self.root, self.chance = root, random.Random(seed)
        self.counts: dict[str, Counter[str]] = {}
        self.faults: list[str] = []
        self.n = 1
        self.durations: dict[str, float] = {}
        self.positions: dict[tuple[str, bool], int] = {}
        self.calls: dict[str, int] = {}

    def judge(self, kind: str, new: int, found: int | str, told: list[dict[str, Any]]) -> None:
        """Count one moment.

        Args:
            kind: of it.
            new: what was to be saved; `self.n` was there.
            found: what another process has read.
            told: by each process that saved.
        """
        result = {self.n: "old", new: "new"}.get(found, "lost")  # type: ignore[arg-type]
        count = self.counts.setdefault(kind, Counter())
        text = "\n".join(word.get("text", "") for word in told)
        wrong = []
        if result == "lost":
            wrong.append(f"lost: {found}")
        if all("done" in word for word in told) and result == "old":
            wrong.append("a save that returned is not there")
        said = {result for words, result in at.SAID if words in text and at.UNSURE not in text}
        if said - {result}:
            wrong.append(f"untrue, it is the {result} one: {text}")
        for word in told:
            if "read" in word and (word["read"] != found or word["waited"] > at.PATIENCE):
                wrong.append(f"read in the same process: {word['read']} after {word['waited']:.1f} s, {found} later")
        count["moments"] += 1
        count[result] += 1
        count["wrong"] += bool(wrong)
        self.faults += [f"{kind}: {w}" for w in wrong]
        if result == "new":
            self.n = new
        if result == "lost":
            self.start()

    def start(self) -> None:
        """Begin anew, with something that is whole."""
        raise NotImplementedError


class Checkpoints(Bench):
    """`zf.save` by one process, or by two ranks."""

    what = "save"

    def start(self) -> None:
        shutil.rmtree(self.root / "checkpoint", ignore_errors=True)
        self.write(self.n)

    def write(self, n: int) -> None:
        zf.save(self.root / "checkpoint", at.state(n))

    def read(self) -> int | str:
        return at.saved(self.root / "checkpoint")

    def files(self) -> list[str]:
        return sorted(os.listdir(self.root / "checkpoint"))

    @property
    def clean(self) -> int:
        return 2


class Exports(Checkpoints):
    """`zf.export_safetensors`."""

    what = "export"

    def start(self) -> None:
        shutil.rmtree(self.root / "export", ignore_errors=True)
        (self.root / "export").mkdir()
        self.write(self.n)

    def write(self, n: int) -> None:
        zf.export_safetensors(self.root / "export" / "x.safetensors", at.state(n))

    def read(self) -> int | str:
        return at.exported(self.root / "export" / "x.safetensors")

    def files(self) -> list[str]:
        # A killed process leaves the hidden file that it was writing.
        return sorted(name for name in os.listdir(self.root / "export") if not name.startswith("."))

    @property
    def clean(self) -> int:
        return 1


# ------------------------------------------------------------------------------------- one process


def alone(bench: Checkpoints, before: Callable[[], Any] | None = None) -> Child:
    """A process that saves the next number, once `before` has been called in it."""

    def work(tell: Callable[..., None]) -> None:
        def save() -> None:
            if before is not None:
                before()
            bench.write(bench.n + 1)
            sys.settrace(None)

        attempt(tell, save, bench.read)

    return Child(work)


def duration(bench: Checkpoints) -> float:
    """Seconds that a save takes in a process of its own, at this load."""
    if bench.what not in bench.durations:
        times = []
        for _ in range(3):
            child = alone(bench)
            child.listen(limit(), until="begin")
            start = time.monotonic()
            child.listen(limit(), until="done")
            times.append(time.monotonic() - start)
            child.end()
            bench.n = int(bench.read())
        bench.durations[bench.what] = sorted(times)[1]
    return bench.durations[bench.what]


def at_a_time(bench: Checkpoints, number: int) -> Child:
    """A signal at a random time of a save."""
    seconds = duration(bench)
    child = alone(bench)
    child.listen(limit(), until="begin")
    at.sleep_part(seconds, bench.chance)
    child.signal(number)
    return child


def at_an_instruction(bench: Checkpoints, act: Callable[[], None], only_after_calls: bool) -> Child:
    """A kill or an interrupt before one of the instructions of a save."""
    key = (bench.what, only_after_calls)
    if key not in bench.positions:
        path = bench.root / "positions"

        def look(tell: Callable[..., None]) -> None:
            seen = at.stop_at(-1, int, only_after_calls)
            bench.write(bench.n + 1)
            sys.settrace(None)
            path.write_text(str(len(seen)))

        Child(look).end()
        bench.n = int(bench.read())
        bench.positions[key] = int(path.read_text())
    number = instruction(bench, bench.positions[key])
    return alone(bench, partial(at.stop_at, number, act, only_after_calls))


def instruction(bench: Checkpoints, count: int) -> int:
    """One of so many; half of them late, where one state takes the place of the other."""
    return bench.chance.randint(bench.chance.choice([1, count * 4 // 5]), count)


def a_call_fails(bench: Checkpoints) -> Child:
    """One of the calls to the system fails, as on a failing disk."""
    if bench.what not in bench.calls:
        path = bench.root / "calls"

        def look(tell: Callable[..., None]) -> None:
            calls = at.fail_at(-1, bench.root)
            bench.write(bench.n + 1)
            path.write_text(str(len(calls)))

        Child(look).end()
        bench.n = int(bench.read())
        bench.calls[bench.what] = int(path.read_text())
    return alone(bench, partial(at.fail_at, bench.chance.randint(1, bench.calls[bench.what]), bench.root))


def small_files(bench: Checkpoints) -> Child:
    """A limit on the size of files, in the place where a full disk would be."""
    files = [p for p in bench.root.rglob("*") if p.is_file()]
    most = max(p.stat().st_size for p in files)
    size = bench.chance.choice([bench.chance.randint(0, most + 100), bench.chance.randint(0, most // 5)])
    return alone(bench, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)))


def stuck_files(bench: Checkpoints) -> Child:
    """Files that are there cannot be removed: all of them, or one."""
    there = bench.files()
    stuck = set(there if bench.chance.random() < 0.3 else bench.chance.sample(there, 1))

    def before() -> None:
        real = os.unlink

        def unlink(path: Any, *args: Any, **kwargs: Any) -> None:
            if Path(path).name in stuck:
                raise PermissionError(1, "Operation not permitted", os.fspath(path))
            real(path, *args, **kwargs)

        os.unlink = os.remove = unlink
        warnings.simplefilter("ignore")

    return alone(bench, before)


def read_only(bench: Checkpoints) -> Child:
    """The directory is made read-only at a random time of a save, by a user who has no right to write there then."""
    seconds = duration(bench)
    directory = next(p for p in bench.root.iterdir() if p.is_dir())
    user = 65534 if os.getuid() == 0 else os.getuid()
    for path in (bench.root, directory, *directory.rglob("*")):
        os.chown(path, user, -1)

    def before() -> None:
        if os.getuid() == 0:
            os.setuid(user)

    child = alone(bench, before)
    child.listen(limit(), until="begin")
    at.sleep_part(seconds, bench.chance, 1.0)
    directory.chmod(0o555)
    child.listen(limit())
    directory.chmod(0o755)
    return child


def three_at_once(bench: Exports) -> None:
    """Three processes write one file; all succeed."""
    children = [alone(bench) for _ in range(3)]
    told = [child.end() for child in children]
    if not all("done" in word for word in told):
        bench.faults.append(f"three at once: {told}")
    bench.judge("export: three at once", bench.n + 1, bench.read(), told)


# --------------------------------------------------------------------------------------- two ranks


def pair(bench: Checkpoints, cuts: dict[int, Callable[[], Any]]) -> list[Child]:
    """Two ranks that begin to save the next number now."""
    store = bench.root / f"store{bench.chance.random()}"
    directory = bench.root / "checkpoint"
    children = at.two_ranks(lambda new: zf.save(directory, new), bench.n + 1, store, cuts)
    for child in children:
        child.listen(limit(), until="begin")
    return children


def measure(bench: Checkpoints, cut: Callable[[], Any] | None = None) -> tuple[float, list[int]]:
    """Seconds that two ranks take, and the instructions that each has come by: the first alone has a table."""
    children, start = pair(bench, {0: cut, 1: cut} if cut else {}), time.monotonic()
    told = [child.end() for child in children]
    seconds = time.monotonic() - start
    bench.judge("two ranks: nothing happens", bench.n + 1, bench.read(), told)
    return seconds, [word["instructions"] for word in told]


def ranks(bench: Checkpoints, kind: str, number: int, victims: list[int], act: Callable[[], None] | None) -> None:
    """A signal, or an instruction before which `act` runs, on one of two ranks or both."""
    if act is None:
        if "ranks" not in bench.durations:
            bench.durations["ranks"], _ = measure(bench)
        children = pair(bench, {})
        at.sleep_part(bench.durations["ranks"], bench.chance, 1.0)
        for v in victims:
            children[v].signal(number)
    else:
        only = act is at.interrupt
        if ("rank 0", only) not in bench.positions:
            _, steps = measure(bench, partial(at.stop_at, -1, int, only))
            bench.positions["rank 0", only], bench.positions["rank 1", only] = steps
        at_step = {v: instruction(bench, bench.positions[f"rank {v}", only]) for v in victims}
        children = pair(bench, {v: partial(at.stop_at, step, act, only) for v, step in at_step.items()})
    # Who waits for a rank that is gone is killed as well: that is a moment like any other.
    told = [child.end(limit(0.6)) for child in children]
    bench.judge(kind, bench.n + 1, bench.read(), told)


def caller(bench: Checkpoints, kind: str) -> None:
    """`zf.launch` is killed while its ranks save one number after the other."""
    diary = Path(tempfile.mkdtemp(dir=bench.root))
    directory, first = bench.root / "checkpoint", bench.n + 1
    child = Child(lambda tell: zf.launch(at.save_for_ever, 2, str(directory), first, str(diary)))
    try:
        at.wait_for(lambda: (diary / "saved0").exists() and (diary / "saved1").exists(), limit())
        at.sleep_part(0.5, bench.chance)
    finally:
        child.signal(signal.SIGKILL)
        child.end()
    pids = [int((diary / f"pid{r}").read_text()) for r in (0, 1)]
    at.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), limit())
    bench.n = max(int((diary / f"saved{r}").read_text().split()[-1]) for r in (0, 1))
    bench.judge(kind, bench.n + 1, bench.read(), [{}])


# -------------------------------------------------------------------------------------- the matrix


def kinds(saves: Checkpoints, exports: Exports) -> Iterator[tuple[str, int, Callable[[str], None]]]:
    """Each kind of moment, how many of a thousand are of it, and how one is made."""

    def one(bench: Checkpoints, make: Callable[..., Child], *args: Any) -> Callable[[str], None]:
        def moment(kind: str) -> None:
            child = make(bench, *args)
            told = child.end()
            bench.judge(kind, bench.n + 1, bench.read(), [told])

        return moment

    def two(number: int, victims: list[list[int]], act: Callable[[], None] | None = None) -> Callable[[str], None]:
        return lambda kind: ranks(saves, kind, number, saves.chance.choice(victims), act)

    kill, ctrl_c = signal.SIGKILL, signal.SIGINT
    for bench, weight in ((saves, 3), (exports, 1)):
        name = f"{bench.what}: "
        yield name + "kill -9, any time", 50 * weight, one(bench, at_a_time, kill)
        yield name + "kill -9, any instruction", 40 * weight, one(bench, at_an_instruction, at.kill_self, False)
        yield name + "Ctrl-C, any time", 20 * weight, one(bench, at_a_time, ctrl_c)
        yield name + "Ctrl-C, any instruction", 30 * weight, one(bench, at_an_instruction, at.interrupt, True)
        yield name + "a call to the system fails", 20 * weight, one(bench, a_call_fails)
        yield name + "file-size limit", 20 * weight, one(bench, small_files)
        yield name + "read-only directory", 10 * weight, one(bench, read_only)
    yield "save: files that cannot be removed", 20, one(saves, stuck_files)
    yield "export: three at once", 10, lambda kind: three_at_once(exports)
    yield "two ranks: kill -9 of rank 0", 40, two(kill, [[0]])
    yield "two ranks: kill -9 of rank 1", 40, two(kill, [[1]])
    yield "two ranks: kill -9 of both", 20, two(kill, [[0, 1]])
    yield "two ranks: kill -9, any instruction", 40, two(kill, [[0], [1]], at.kill_self)
    yield "two ranks: Ctrl-C of one or both", 20, two(ctrl_c, [[0], [1], [0, 1]])
    yield "two ranks: Ctrl-C, any instruction", 20, two(ctrl_c, [[0], [1]], at.interrupt)
    yield "two ranks: kill -9 of the caller", 20, lambda kind: caller(saves, kind)


def run(root: Path, moments: int, seed: int, only: str = "", told: Callable[[str], None] = lambda text: None):
    """The counts by kind, and what was wrong in words."""
    torch.set_num_threads(1)
    at.impatient()
    saves, exports = Checkpoints(root / "saves", seed), Exports(root / "exports", seed)
    chosen = [k for k in kinds(saves, exports) if re.search(only, k[0])]
    total = sum(share for _, share, _ in chosen)
    for bench in (saves, exports):
        bench.root.mkdir()
        bench.start()
    for kind, share, moment in chosen:
        start = time.monotonic()
        for _ in range(max(1, round(moments * share / total))):
            moment(kind)
        bench = exports if kind.startswith("export") else saves
        told(row(kind, bench.counts[kind]) + f" {time.monotonic() - start:8.0f} s")
    for bench in (saves, exports):
        bench.write(bench.n)
        if len(bench.files()) != bench.clean:
            bench.faults.append(f"{bench.what}: left behind: {bench.files()}")
    counts = {**saves.counts, **exports.counts}
    return counts, saves.faults + exports.faults


def row(kind: str, count: Counter[str]) -> str:
    return f"{kind:40}" + "".join(f"{count[c]:9}" for c in ("moments", "old", "new", "lost", "wrong"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose names match this regular expression")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, seed {args.seed}")
    print(f"{'':40}" + "".join(f"{c:>9}" for c in ("moments", "old", "new", "lost", "wrong")))
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        counts, faults = run(Path(root), args.moments, args.seed, args.only, lambda text: print(text, flush=True))
    print(row("all", sum(counts.values(), Counter())))
    for text, times in Counter(faults).most_common(20):
        print(f"{times} x {text}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
