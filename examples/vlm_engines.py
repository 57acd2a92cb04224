"""Groups of workers as ranks of `zf.launch`, and what this engine and that of Ray have alike. The workers know neither.

An engine starts groups, each a world of ranks of its own, calls methods on all workers of a group at once, and waits
for several calls at a time, so that the death of one worker ends the run by its name and not in a wait of the others.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import tempfile
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import zerofn as zf

# Seconds to wait for the cause after a first error, which may be of a worker whose partner has died.
GRACE = 5.0
START = 120.0


class WorkerLost(RuntimeError):
    """A worker died or raised; its name, and why."""


def explained(failed: list[tuple[str, bool, str]]) -> WorkerLost:
    """Of several errors, deaths first: what the others raise follows from them."""
    name, died, why = min(failed, key=lambda entry: not entry[1])
    return WorkerLost(f"{name} {'died' if died else 'raised'}: {why}")


class Sums:
    """Numbers of several groups, added up by tag once each group's is there."""

    def __init__(self, groups: int):
        self.groups = groups
        self.found: dict[Any, dict[str, float]] = {}

    def add(self, tag: Any, group: str, value: float) -> float | None:
        """The sum, if all groups' are there. Every rank of a group adds the same."""
        here = self.found.setdefault(tag, {})
        here[group] = value
        # Of older steps nobody asks any more.
        for old in [t for t in self.found if t < tag - 1]:
            del self.found[old]
        return sum(here.values()) if len(here) == self.groups else None


class Line:
    """What a rank of `zf.launch` has of the driver: a line, over which it is called and asks for sums."""

    def __init__(self, connection: Connection):
        self.connection = connection

    def put(self, parcel: Any) -> bytes:
        return pickle.dumps(parcel, protocol=5)

    def get(self, handles: list[bytes]) -> list[Any]:
        return [pickle.loads(handle) for handle in handles]

    def meet(self, tag: Any, group: str, value: float) -> float:
        self.connection.send(("meet", (tag, group, value)))
        return self.connection.recv()


def serve(path: str, name: str, kind: Any, size: int, o: Namespace) -> None:
    """The life of a rank: calls come in one after the other."""
    rank = int(os.environ["RANK"])
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)
    connection = Connection(line.detach())
    connection.send((name, rank))
    worker = kind(name, rank, size, o, Line(connection))
    while (call := connection.recv()) is not None:
        method, args = call
        try:
            connection.send(("done", getattr(worker, method)(*args)))
        except Exception:
            connection.send(("raised", traceback.format_exc()))


class LaunchEngine:
    """Groups of local ranks, each of a `zf.launch` in a thread of this process."""

    def __init__(self, groups: int):
        self.place = tempfile.mkdtemp()
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(f"{self.place}/line")
        self.server.listen()
        self.server.settimeout(0.2)
        self.lines: dict[tuple[str, int], Connection] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.ended: dict[str, BaseException] = {}
        self.sums, self.asking = Sums(groups), {}

    def start(self, name: str, kind: Any, size: int, o: Namespace) -> list[tuple[str, int]]:
        def run() -> None:
            try:
                zf.launch(serve, size, f"{self.place}/line", name, kind, size, o)
            except BaseException as error:
                self.ended[name] = error

        self.threads[name] = threading.Thread(target=run, daemon=True)
        self.threads[name].start()
        deadline = time.monotonic() + START
        while sum(group == name for group, _ in self.lines) < size:
            try:
                connection = Connection(self.server.accept()[0].detach())
                self.lines[connection.recv()] = connection
            except TimeoutError:
                if name in self.ended or time.monotonic() > deadline:
                    raise WorkerLost(f"{name} did not start") from self.ended.get(name)
        return [(name, rank) for rank in range(size)]

    def call(self, workers: Sequence[tuple[str, int]], method: str, *args: Any) -> list[tuple[str, int]]:
        for worker in workers:
            self.lines[worker].send((method, args))
        return list(workers)

    def results(self, calls: Sequence[tuple[str, int]]) -> list[Any]:
        """What the calls return, in their order; the first error ends all."""
        found: dict[tuple[str, int], Any] = {}
        failed: list[tuple[str, bool, str]] = []
        names = {id(self.lines[worker]): worker for worker in calls}
        until = float("inf")
        while (open_ := [self.lines[w] for w in calls if w not in found]) and time.monotonic() < until:
            for line in wait(open_, timeout=0.2):
                worker = names[id(line)]
                try:
                    what, value = line.recv()
                except (EOFError, OSError):
                    what, value = "died", ""
                if what == "meet":
                    self._meet(line, *value)
                    continue
                found[worker] = value
                if what != "done":
                    failed.append((f"{worker[0]}[{worker[1]}]", what == "died", value or self._why(worker[0])))
                    until = min(until, time.monotonic() + GRACE)
            if any(died for _, died, _ in failed):
                break
        if failed:
            raise explained(failed)
        return [found[worker] for worker in calls]

    def _meet(self, line: Connection, tag: Any, group: str, value: float) -> None:
        self.asking.setdefault(tag, []).append(line)
        total = self.sums.add(tag, group, value)
        for waiting in self.asking.pop(tag) if total is not None else ():
            waiting.send(total)

    def _why(self, name: str) -> str:
        self.threads[name].join(GRACE)
        return f"{self.ended.get(name, 'its line was closed')}"

    def close(self) -> None:
        for line in self.lines.values():
            with contextlib.suppress(OSError):
                line.send(None)
            line.close()
        for thread in self.threads.values():
            thread.join(30)
        self.server.close()
        shutil.rmtree(self.place, ignore_errors=True)
