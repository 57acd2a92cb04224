"""Calls that all ranks make together: before anything is sent, they meet in the job's store.

`if rank == 0: zf.save(...)` is what people write, and in a collective it is half an hour of silence. In the store
a rank that waits can see where the others are, and can give the call up without leaving half a collective behind.
The price is some messages to the store for each such call, and none for a step.

A call is ruled on once: it goes ahead when all have come to it, or is given up by the first who sees that they will
not. A rank that comes to a call which was given up without it goes on to the next, so that ranks that catch
the error understand each other afterwards.

Nobody can tell a rank that is late from one that never comes while it does something of its own. One that is seen to
compute is waited for; one that shows nothing, for `LIMIT` seconds.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from typing import NoReturn

from .._errors import explain
from .open_groups import begun, presence
from .rank_liveness import Presence, Pulse, Waiting

SETTING = "ZEROFN_TOGETHER_TIMEOUT"
LIMIT = 25.0
LOOK = 1.0  # seconds between two looks at those who have not come
LOOKERS = 64  # ranks that look so often; in larger jobs the others look once a minute
GO, NO = "go", "no"


def limit() -> float:
    """Seconds for which a call waits for ranks that show no sign of life.

    Raises:
        ValueError: the environment does not hold a number of seconds.
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
        ranks: of the world; this one among them.
        right: what to write where only some ranks made it.
        seconds: to wait for ranks that show no sign of life; by default `limit()`.

    Raises:
        RuntimeError: on every rank that has come, if another is somewhere else, or gone, or gives no sign of life.
    """
    here = presence()
    if len(ranks) == 1 or here is None:
        return
    seconds = limit() if seconds is None else seconds
    while not _Call(here, call, ranks, right, seconds).meet():
        pass


class _Call:
    """One call of some ranks, by its number among theirs."""

    def __init__(self, here: Presence, call: str, ranks: tuple[int, ...], right: str, seconds: float):
        self.here, self.call, self.ranks, self.right, self.seconds = here, call, ranks, right, seconds
        self.channel = f"calls of {len(ranks)} ranks #{zlib.crc32(repr(ranks).encode()):08x}"
        here.calls[self.channel] += 1
        self.number = here.calls[self.channel]
        self.key = f"{self.channel}/{self.number}"
        self.place = 0
        self.came: dict[int, str] = {}  # by rank, what it calls; as far as this one has read
        self.read = 0

    def meet(self) -> bool:
        """Whether all have come; not, if the call was given up before this rank came to it."""
        try:
            if self.here.read(f"{self.key}/ruling"):
                return False
            self.place = self.here.store.add(f"{self.key}/came", 1)
            self.here.store.set(f"{self.key}/{self.place}", f"{self.here.rank} {self.call}")
            ruling = self._last() if self.place == len(self.ranks) else self._wait()
            if ruling == GO:
                self._tidy()
        except RuntimeError as error:
            why = "the store in which the ranks meet does not answer; the rank that holds it, mostly rank 0, has ended"
            raise RuntimeError(explain(f"{self.call} and not on every rank", why, self.right)) from error
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                self._rule(NO, f"rank {self.here.rank} gave it up: {type(error).__name__}")
            raise
        if ruling != GO:
            self._refuse(ruling)
        return True

    def _last(self) -> str:
        """All have come: for the same?"""
        deadline = time.monotonic() + self.seconds
        while len(self.came) < len(self.ranks) and time.monotonic() < deadline:
            self._read()
        return self._rule(NO, self._differ()) if len(set(self.came.values())) > 1 else self._rule(GO)

    def _wait(self) -> str:
        began = looked = time.monotonic()
        pause, told, pulse = 2e-4, False, Pulse(self.here, self.key)
        every = LOOK if self.place <= LOOKERS else 60 * LOOK
        try:
            while not (ruling := self.here.read(f"{self.key}/ruling")):
                now = time.monotonic()
                if now - looked > every:
                    looked = now
                    self.here.waits(Waiting(self.call, self.channel, self.number, False, begun()))
                    told = True
                    reason = self._hopeless(pulse, now - began)
                    if reason:
                        return self._rule(NO, reason)
                time.sleep(pause)
                pause = min(pause * 1.3, 0.2 if now - began > LOOK else 0.02)
        finally:
            if told:
                self.here.goes_on()
        return ruling

    def _hopeless(self, pulse: Pulse, waited: float) -> str:
        """Why those who have not come will not; nothing while they may."""
        self._read()
        if len(set(self.came.values())) > 1:
            return self._differ()
        missing = [r for r in self.ranks if r not in self.came]
        mine = begun()
        silent = []
        for rank in missing:
            if self.here.gone(rank):
                return f"rank {rank} has finished"
            where = self.here.waiting(rank)
            # It has begun more there than this rank, which begins nothing while it is here.
            if where is not None and mine.get(where.channel, where.number) < where.number:
                return f"rank {rank} is somewhere else: it waits for rank {self.here.rank} in {where.what}"
            if not pulse.beats(rank):
                silent.append(str(rank))
        if not silent or waited < self.seconds:
            return ""
        return (
            f"rank {', '.join(silent)} did not come within {self.seconds:g} s, and is not seen to compute; "
            f"where that is too short, set {SETTING} in the environment"
        )

    def _read(self) -> None:
        """Who has come since the last look, and to what."""
        while self.read < len(self.ranks) and (text := self.here.read(f"{self.key}/{self.read + 1}")):
            rank, _, call = text.partition(" ")
            self.came[int(rank)] = call
            self.read += 1

    def _differ(self) -> str:
        told = ", ".join(f"rank {r} {self.came[r]}" for r in sorted(self.came))
        return f"the ranks make different calls: {told}"

    def _rule(self, word: str, reason: str = "") -> str:
        """Decide, unless somebody has; gives what was decided first."""
        return self.here.store.compare_set(f"{self.key}/ruling", "", f"{word} {reason}".strip()).decode()

    def _refuse(self, ruling: str) -> NoReturn:
        came = ", ".join(map(str, sorted({*self.came, self.here.rank})))
        raise RuntimeError(
            explain(
                f"{self.call} on rank {came} and not on every rank",
                f"all ranks make this call together, and {ruling.removeprefix(NO).strip()}",
                self.right,
            )
        )

    def _tidy(self) -> None:
        """All ranks are here, so none will read of earlier calls."""
        old = self.number - 1 if self.place == 1 else 0
        while old and self.here.store.check([f"{self.channel}/{old}/ruling"]):
            for part in ("ruling", "came", *range(1, len(self.ranks) + 1)):
                self.here.store.delete_key(f"{self.channel}/{old}/{part}")
            old -= 1
