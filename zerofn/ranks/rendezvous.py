"""Calls that all ranks must make together: before they send anything, they meet in the job's store.

People write `if rank == 0: zf.save(...)`, and a collective would wait for half an hour without a word. In the store a
rank that waits can see where the others are, and can give the call up without leaving half a collective behind. The
price is a few messages to the store for each such call, and none for a step.

Each call is decided once, in the store: it goes ahead when all ranks have come to it, or the first rank that sees that
they will not gives it up. A rank that comes to a call which was given up goes on to the next one of these ranks, so
that ranks which catch the error meet again afterwards.

A rank that is late and one that never comes look alike while they compute. A rank that is seen to compute is waited
for; one that is not, for `LIMIT` seconds.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from typing import NoReturn

from .._errors import explain
from .open_groups import begun, presence
from .rank_liveness import Activity, Presence, Waiting

SETTING = "ZEROFN_TOGETHER_TIMEOUT"
LIMIT = 25.0
LOOK = 1.0  # seconds between two looks at ranks that have not come
LOOKERS = 64  # how many ranks look so often; in larger jobs the others look once a minute
GO, NO = "go", "no"


def limit() -> float:
    """Seconds for which a call waits for ranks that are not seen to compute.

    Raises:
        ValueError: the environment variable is no number of seconds.
    """
    given = os.environ.get(SETTING, "").strip()
    try:
        seconds = float(given) if given else LIMIT
    except ValueError:
        seconds = float("nan")
    if not seconds > 0:
        raise ValueError(explain(f"{SETTING}={given!r}", "it is no number of seconds", f"{SETTING}=25, or inf"))
    return seconds


def together(call: str, ranks: tuple[int, ...], right: str, seconds: float | None = None) -> None:
    """Return when all of `ranks` have come to this call.

    Args:
        call: as the user writes it.
        ranks: of the world; this one is among them.
        right: what to write instead, for the error.
        seconds: to wait for ranks that are not seen to compute; by default `limit()`.

    Raises:
        RuntimeError: on every rank that has come, if another waits elsewhere, has ended, or did not come in time.
    """
    here = presence()
    if len(ranks) == 1 or here is None:
        return
    seconds = limit() if seconds is None else seconds
    while not _Call(here, call, ranks, right, seconds).meet():
        pass


class _Call:
    """One call of some ranks, found in the store by its number among the calls of these ranks."""

    def __init__(self, here: Presence, call: str, ranks: tuple[int, ...], right: str, seconds: float):
        self.here, self.call, self.ranks, self.right, self.seconds = here, call, ranks, right, seconds
        self.channel = f"calls of {len(ranks)} ranks #{zlib.crc32(repr(ranks).encode()):08x}"
        here.calls[self.channel] += 1
        self.number = here.calls[self.channel]
        self.key = f"{self.channel}/{self.number}"
        self.place = 0
        self.came: dict[int, str] = {}  # by rank, the call it has come to, as far as this one has read
        self.read = 0

    def meet(self) -> bool:
        """Whether all ranks have come; False if the call was given up before this one came."""
        try:
            if self.here.read(f"{self.key}/decision"):
                return False
            self.place = self.here.store.add(f"{self.key}/came", 1)
            self.here.store.set(f"{self.key}/{self.place}", f"{self.here.rank} {self.call}")
            decision = self._decide_last() if self.place == len(self.ranks) else self._wait()
            if decision == GO:
                self._delete_earlier()
        except RuntimeError as error:
            why = "the store in which the ranks meet does not answer; the rank that holds it, mostly rank 0, has ended"
            raise RuntimeError(explain(f"{self.call} and not on every rank", why, self.right)) from error
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                self._decide(NO, f"rank {self.here.rank} gave it up: {type(error).__name__}")
            raise
        if decision != GO:
            self._refuse(decision)
        return True

    def _decide_last(self) -> str:
        """Decide as the last rank that came: whether all make the same call."""
        deadline = time.monotonic() + self.seconds
        while len(self.came) < len(self.ranks) and time.monotonic() < deadline:
            self._read()
        return self._decide(NO, self._differences()) if len(set(self.came.values())) > 1 else self._decide(GO)

    def _wait(self) -> str:
        began = looked = time.monotonic()
        pause, announced, activity = 2e-4, False, Activity(self.here, self.key)
        every = LOOK if self.place <= LOOKERS else 60 * LOOK
        try:
            while not (decision := self.here.read(f"{self.key}/decision")):
                now = time.monotonic()
                if now - looked > every:
                    looked = now
                    self.here.set_waiting(Waiting(self.call, self.channel, self.number, False, begun()))
                    announced = True
                    reason = self._why_endless(activity, now - began)
                    if reason:
                        return self._decide(NO, reason)
                time.sleep(pause)
                pause = min(pause * 1.3, 0.2 if now - began > LOOK else 0.02)
        finally:
            if announced:
                self.here.clear_waiting()
        return decision

    def _why_endless(self, activity: Activity, waited: float) -> str:
        """Why ranks that have not come will never; empty while they may."""
        self._read()
        if len(set(self.came.values())) > 1:
            return self._differences()
        missing = [r for r in self.ranks if r not in self.came]
        mine = begun()
        silent = []
        for rank in missing:
            if ended := self.here.how_ended(rank):
                return f"rank {rank} {ended}"
            where = self.here.waiting(rank)
            # It waits for a collective or call that this rank has not begun, and begins none while it waits here.
            if where is not None and mine.get(where.channel, where.number) < where.number:
                return f"rank {rank} is somewhere else: it waits for rank {self.here.rank} in {where.what}"
            if not activity.computes(rank):
                silent.append(str(rank))
        if not silent or waited < self.seconds:
            return ""
        return (
            f"rank {', '.join(silent)} did not come within {self.seconds:g} s, and is not seen to compute; "
            f"where that is too short, set {SETTING} in the environment"
        )

    def _read(self) -> None:
        """Read which ranks have come since the last look, and to which call."""
        while self.read < len(self.ranks) and (text := self.here.read(f"{self.key}/{self.read + 1}")):
            rank, _, call = text.partition(" ")
            self.came[int(rank)] = call
            self.read += 1

    def _differences(self) -> str:
        return "the ranks make different calls: " + ", ".join(f"rank {r} {self.came[r]}" for r in sorted(self.came))

    def _decide(self, word: str, reason: str = "") -> str:
        """Decide, unless another rank has; the decision that holds."""
        return self.here.store.compare_set(f"{self.key}/decision", "", f"{word} {reason}".strip()).decode()

    def _refuse(self, decision: str) -> NoReturn:
        came = ", ".join(map(str, sorted({*self.came, self.here.rank})))
        raise RuntimeError(
            explain(
                f"{self.call} on rank {came} and not on every rank",
                f"all ranks make this call together, and {decision.removeprefix(NO).strip()}",
                self.right,
            )
        )

    def _delete_earlier(self) -> None:
        """Delete earlier calls: all ranks are at this one, so none will read them."""
        old = self.number - 1 if self.place == 1 else 0
        while old and self.here.store.check([f"{self.channel}/{old}/decision"]):
            for part in ("decision", "came", *range(1, len(self.ranks) + 1)):
                self.here.store.delete_key(f"{self.channel}/{old}/{part}")
            old -= 1
