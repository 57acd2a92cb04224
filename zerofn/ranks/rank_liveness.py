"""Where the other ranks are, asked in a wait that has become long: from the job's store, and from /proc.

A collective does not tell which ranks have not come to it. So a rank that waits for more than a moment writes into the
store what it waits in, and a rank that waits for that one can read that it will never come. A short wait does nothing
of this. No rank has a thread for it: a thread would have to end before the interpreter does.
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

PROC = Path("/proc")  # of Linux; elsewhere only what is in the store is known
# A rank computes if in so many seconds it has used this share of them as CPU time: one that waits uses a thousandth,
# one that computes on a machine under load 20 several hundredths.
WINDOW, BUSY = 10.0, 0.02
# What becomes of a rank: it has said that it makes no more collectives, or its process is gone without a word.
FINISHED, FAILED = "has finished", "has failed"


class Waiting(NamedTuple):
    """What a rank in a long wait writes into the store.

    Attributes:
        what: the collective, or the call.
        channel: the name of the process group, or of the calls of some ranks.
        number: which one on that channel, counted from 1.
        bound: whether the wait cannot be given up, since a collective is under way.
        begun: by channel, how many collectives or calls this rank has begun.
    """

    what: str
    channel: str
    number: int
    bound: bool
    begun: Mapping[str, int]


class Presence:
    """What the ranks of a job tell each other in its store.

    Args:
        store: of torch.distributed, with a prefix of this job alone.
        rank: this one, of all ranks.
    """

    def __init__(self, store: Any, rank: int):
        self.store, self.rank = store, rank
        # By channel: how many calls of `rendezvous.together` this rank has made.
        self.calls: Counter[str] = Counter()
        self.machine, self.pid, self.started = _this_process()
        store.set(f"process/{rank}", json.dumps([self.machine, self.pid, self.started]))

    def read(self, key: str) -> str:
        """The value of a key; empty if it has none. `get` alone would wait for it."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def set_waiting(self, where: Waiting) -> None:
        """Say what this rank waits in."""
        self.store.set(f"waits/{self.rank}", json.dumps(where))

    def clear_waiting(self) -> None:
        """Say that this rank does not wait."""
        self.store.set(f"waits/{self.rank}", "")

    def set_finished(self, failed: bool = False) -> None:
        """Say that this rank takes part in no more collectives; after an error if it has failed."""
        self.store.set(f"finished/{self.rank}", FAILED if failed else FINISHED)

    def waiting(self, rank: int) -> Waiting | None:
        """What a rank says that it waits in; None if it says nothing."""
        text = self.read(f"waits/{rank}")
        return Waiting(*json.loads(text)) if text else None

    def how_ended(self, rank: int) -> str:
        """What has become of a rank that takes part in no more collectives; empty while it may."""
        if said := self.read(f"finished/{rank}"):
            return said
        process = self._process(rank)
        # Whoever finishes says so first.
        return FAILED if process is not None and _cpu_seconds(*process) is None else ""

    def cpu_seconds(self, rank: int) -> float | None:
        """The CPU time of a rank on this machine; None for one of another machine."""
        process = self._process(rank)
        return None if process is None else _cpu_seconds(*process)

    def _process(self, rank: int) -> tuple[int, int] | None:
        """The number of a rank's process and its start time; None for one of another machine."""
        text = self.read(f"process/{rank}")
        machine, pid, started = json.loads(text) if text else ("", 0, 0)
        return (pid, started) if machine and machine == self.machine else None


class Activity:
    """Whether ranks compute: those of this machine as /proc says, others as ranks that wait on their machine say.

    Args:
        presence: of the job.
        key: the prefix of what ranks that wait tell each other in the store.
    """

    def __init__(self, presence: Presence, key: str):
        self.presence, self.key = presence, key
        self.samples: dict[int, deque[tuple[float, float]]] = {}
        self.reports: dict[int, tuple[str, float]] = {}

    def computes(self, rank: int) -> bool:
        """Whether a rank has computed in the last `WINDOW` seconds; to be asked about once a second."""
        now = time.monotonic()
        seconds = self.presence.cpu_seconds(rank)
        if seconds is None:
            return self._reported(rank, now)
        samples = self.samples.setdefault(rank, deque())
        samples.append((now, seconds))
        while now - samples[0][0] > WINDOW:
            samples.popleft()
        busy = seconds - samples[0][1] > BUSY * WINDOW
        if busy:
            self.presence.store.add(f"{self.key}/computes/{rank}", 1)
        return busy

    def _reported(self, rank: int, now: float) -> bool:
        count = self.presence.read(f"{self.key}/computes/{rank}")
        if count and count != self.reports.get(rank, ("", 0.0))[0]:
            self.reports[rank] = count, now
        return now - self.reports.get(rank, ("", -WINDOW))[1] < WINDOW


def _this_process() -> tuple[str, int, int]:
    """The machine and its namespace of process numbers; the process number; its start time, since numbers recur."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        machine = f"{(PROC / 'sys/kernel/random/boot_id').read_text().strip()}/{os.stat(PROC / 'self/ns/pid').st_ino}"
        return machine, os.getpid(), int(_stat_fields(os.getpid())[19])
    return "", os.getpid(), 0


def _cpu_seconds(pid: int, started: int) -> float | None:
    """The CPU time of a process in seconds; None if it has ended."""
    try:
        fields = _stat_fields(pid)
    except (OSError, ValueError):
        return None
    if fields[0] in "ZX" or int(fields[19]) != started:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int) -> list[str]:
    # The name of the program comes first, and may hold spaces and parentheses.
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
