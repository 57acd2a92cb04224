"""Where the other ranks are, for a wait that has become long: what they say in the job's store, and what /proc says.

A collective tells nothing of those who have not come to it. So a rank that waits for more than a moment writes into the
store what it waits in, and one that waits for it can read that it will never come. Nothing of this is done in
a wait that is short, and no rank has a thread for it: a thread would have to end before the interpreter does.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

PROC = Path("/proc")  # of Linux; elsewhere a process says nothing of itself but what is in the store
# A rank computes if in so many seconds it has used this share of them: one that waits uses a thousandth, one that
# computes on a machine under load 20 still several hundredths.
WINDOW, BUSY = 10.0, 0.02


class Waiting(NamedTuple):
    """What a rank says of a long wait.

    Attributes:
        what: the collective, or the call.
        channel: where.
        number: which one on that channel, counted from 1.
        bound: whether it cannot give the wait up: half of a collective is under way.
        begun: by channel, how many this rank has begun.
    """

    what: str
    channel: str
    number: int
    bound: bool
    begun: Mapping[str, int]


class Presence:
    """The ranks of a job, as one of them sees them.

    Args:
        store: of torch.distributed, with a prefix that no other job and no earlier one has had.
        rank: this one's, of all.
    """

    def __init__(self, store: Any, rank: int):
        self.store, self.rank = store, rank
        # By name of those who make them: how many calls of `ranks.together` this rank has made.
        self.calls: Counter[str] = Counter()
        self.machine, self.pid, self.started = _this_process()
        store.set(f"process/{rank}", json.dumps([self.machine, self.pid, self.started]))

    def read(self, key: str) -> str:
        """What stands there; nothing if nothing does. `get` alone would wait for it."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def waits(self, where: Waiting) -> None:
        """This rank waits."""
        self.store.set(f"waits/{self.rank}", json.dumps(where))

    def goes_on(self) -> None:
        """It waits no more."""
        self.store.set(f"waits/{self.rank}", "")

    def finished(self) -> None:
        """This rank takes part in nothing any more."""
        self.store.set(f"finished/{self.rank}", "1")

    def waiting(self, rank: int) -> Waiting | None:
        """What a rank waits in, if it has waited for some time."""
        text = self.read(f"waits/{rank}")
        return Waiting(*json.loads(text)) if text else None

    def gone(self, rank: int) -> bool:
        """Whether a rank has said that it has finished, or its process is seen to have ended."""
        if self.store.check([f"finished/{rank}"]):
            return True
        process = self._process(rank)
        return process is not None and _stat(*process) is None

    def seconds(self, rank: int) -> float | None:
        """How long a rank of this machine has computed since it began; None for one of another machine."""
        process = self._process(rank)
        return None if process is None else _stat(*process)

    def _process(self, rank: int) -> tuple[int, int] | None:
        """The number of a rank's process and when it began; None for one of another machine."""
        text = self.read(f"process/{rank}")
        machine, pid, started = json.loads(text) if text else ("", 0, 0)
        return (pid, started) if machine and machine == self.machine else None


class Pulse:
    """Whether ranks compute, as far as that can be seen: on this machine here, elsewhere by ranks that wait there.

    Args:
        presence: of the job.
        key: under which the ranks that wait tell each other.
    """

    def __init__(self, presence: Presence, key: str):
        self.presence, self.key = presence, key
        self.past: dict[int, deque[tuple[float, float]]] = {}
        self.told: dict[int, tuple[str, float]] = {}

    def beats(self, rank: int) -> bool:
        """Whether ranks have computed in the last `WINDOW` seconds; asked about once a second."""
        now = time.monotonic()
        seconds = self.presence.seconds(rank)
        if seconds is None:
            return self._heard(rank, now)
        past = self.past.setdefault(rank, deque())
        past.append((now, seconds))
        while now - past[0][0] > WINDOW:
            past.popleft()
        busy = seconds - past[0][1] > BUSY * WINDOW
        if busy:
            self.presence.store.add(f"{self.key}/beats/{rank}", 1)
        return busy

    def _heard(self, rank: int, now: float) -> bool:
        count = self.presence.read(f"{self.key}/beats/{rank}")
        if count and count != self.told.get(rank, ("", 0.0))[0]:
            self.told[rank] = count, now
        return now - self.told.get(rank, ("", -WINDOW))[1] < WINDOW


def _this_process() -> tuple[str, int, int]:
    """The machine, with its process numbers' namespace; the process number; and when it began, since numbers recur."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        machine = f"{(PROC / 'sys/kernel/random/boot_id').read_text().strip()}/{os.stat(PROC / 'self/ns/pid').st_ino}"
        return machine, os.getpid(), int(_fields(os.getpid())[19])
    return "", os.getpid(), 0


def _stat(pid: int, started: int) -> float | None:
    """Seconds that a process has computed; None if it has ended."""
    try:
        fields = _fields(pid)
    except (OSError, ValueError):
        return None
    if fields[0] in "ZX" or int(fields[19]) != started:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _fields(pid: int) -> list[str]:
    # The name of the program comes before and may hold anything.
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
