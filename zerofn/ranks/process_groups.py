"""Opens and closes process groups, lets ranks meet, and finds out which rank is missing."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import math
import os
import sys
import threading
import time
import uuid
import zlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from .._errors import explain
from . import backend as raw
from .backend import world
from .group import Group

# ----------------------------------------------------------------------------------------------------------------------
# A rank that has waited long finds out where the other ranks are, from the job's store and from /proc.
#
# A collective does not tell which ranks have not come to it. So a rank that waits for more than a moment writes into
# the store which call it waits in, and a rank that waits for that one can read that it will never come. A short wait
# does nothing of this. No rank has a thread for it: a thread would have to end before the interpreter does.


PROC = Path("/proc")  # of Linux; elsewhere only what is in the store is known
# A rank computes if in so many seconds it has used this share of them as CPU time: one that waits uses a thousandth,
# one that computes on a machine under load 20 several hundredths.
WINDOW, BUSY = 10.0, 0.02
# How a rank ends: it has said that it joins no more collectives, or its process has died.
FINISHED, FAILED = "has finished", "has failed"


class Waiting(NamedTuple):
    """The entry that a rank in a long wait writes into the store.

    Attributes:
        what: the collective, or the call.
        channel: the name of the process group, or of the calls of some ranks.
        number: the number of the collective or call on that channel, counted from 1.
        bound: whether the wait cannot be given up, since a collective is running.
        begun: by channel, how many collectives or calls this rank has begun.
    """

    what: str
    channel: str
    number: int
    bound: bool
    begun: Mapping[str, int]


class Presence:
    """The messages that the ranks of a job leave for each other in its store.

    Args:
        store: of torch.distributed, with a prefix of this job alone.
        rank: this one, of all ranks.
    """

    def __init__(self, store: Any, rank: int):
        self.store, self.rank = store, rank
        # By channel, how many calls of `together` this rank has made.
        self.calls: Counter[str] = Counter()
        # By channel, the last of these calls that all ranks have joined.
        self.met: Counter[str] = Counter()
        # How many calls this rank has made without the others since the last one of all ranks, and which one that was.
        self.alone = (0, 0)
        self.machine, self.pid, self.started = _this_process()
        store.set(f"process/{rank}", json.dumps([self.machine, self.pid, self.started]))

    def read(self, key: str) -> str:
        """The value of a key; empty if it has none. `get` alone would wait for it."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def set_waiting(self, where: Waiting) -> None:
        """Write the collective or call in which this rank waits."""
        self.store.set(f"waits/{self.rank}", json.dumps(where))

    def clear_waiting(self) -> None:
        """Write that this rank does not wait."""
        self.store.set(f"waits/{self.rank}", "")

    def set_finished(self, failed: bool = False) -> None:
        """Write that this rank joins no more collectives, because of an error if it has failed."""
        self.store.set(f"finished/{self.rank}", FAILED if failed else FINISHED)

    def set_alone(self, call: str, channel: str) -> None:
        """Write that this rank has made a call that opens no group, where other ranks may open one."""
        last, count = self.met[channel], self.alone[1] if self.alone[0] == self.met[channel] else 0
        self.alone = last, count + 1
        self.store.set(f"alone/{self.rank}", json.dumps([*self.alone, call]))

    def went_alone(self, rank: int, channel: str) -> str:
        """The call by which a rank has made more of `set_alone` than this one, since both met; empty if it has not."""
        text = self.read(f"alone/{rank}")
        last, count, call = json.loads(text) if text else (-1, 0, "")
        mine = self.alone[1] if self.alone[0] == self.met[channel] else 0
        return call if last == self.met[channel] and count > mine else ""

    def clear(self) -> None:
        """Delete what this rank has written about itself."""
        for key in ("process", "waits", "finished", "alone"):
            self.store.delete_key(f"{key}/{self.rank}")

    def waiting(self, rank: int) -> Waiting | None:
        """The collective or call in which a rank has written that it waits; None if it does not."""
        text = self.read(f"waits/{rank}")
        return Waiting(*json.loads(text)) if text else None

    def how_ended(self, rank: int) -> str:
        """How a rank has ended that joins no more collectives; empty while it may."""
        if how := self.read(f"finished/{rank}"):
            return how
        process = self._process(rank)
        # A rank that finishes writes so before its process ends. So a process that ended without has failed.
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
    """Finds out whether ranks compute: on this machine from /proc, on others from waiting ranks there.

    Args:
        presence: of the job.
        key: the prefix of the entries that waiting ranks write into the store.
    """

    def __init__(self, presence: Presence, key: str):
        self.presence, self.key = presence, key
        self.samples: dict[int, deque[tuple[float, float]]] = {}
        self.reports: dict[int, tuple[str, float]] = {}

    def computes(self, rank: int) -> bool:
        """Whether a rank has computed in the last `WINDOW` seconds. Call it about once a second."""
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


# ----------------------------------------------------------------------------------------------------------------------
# The registry has the groups that are open in this process, the models that use each, and the last collective begun on
# each.


class _Registry:
    """The open groups of this process by (mesh, purpose).

    Every rank opens a group at once, so the key must be the same on every rank: it is the whole mesh, not this rank's
    row of it. `functools.lru_cache` cannot list the groups to close, nor notice that the user destroyed the default
    group and with it every group made on top of it.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[Any, Hashable], Group | None] = {}  # None on ranks outside of it
        # By key, the users of a group: the leases of attached models, or None for one without an end, as a pure state.
        self.holders: dict[tuple[Any, Hashable], set[Any]] = {}
        self.holder: Any = None  # the user for whom groups are opened at the moment
        self.opened = 0  # how many channels were opened so far
        self.met = 0  # how often all ranks came to open groups of rows; a number of the job, not of this rank alone
        self.default: Any = None  # the default group that these were made on
        self.ours = False  # whether the library made that default group
        self.made = 0  # how many default groups the library has made so far
        self.presence: Presence | None = None  # of the ranks of the default group; before that one, of the launcher
        self.named = False  # whether its prefix is that of this default group alone

    def current(self) -> dict[tuple[Any, Hashable], Group | None]:
        """The open groups; none after the user has destroyed or replaced the default group."""
        default = raw.default_group()
        if default is not self.default:
            self.groups.clear()
            self.holders.clear()
            self.default, self.ours, self.presence, self.named = default, False, None, False
        return self.groups

    def get(self, key: Any, purpose: Hashable, make: Callable[[], Group | None]) -> Group | None:
        groups = self.current()
        self.holders.setdefault((key, purpose), set()).add(self.holder)
        if (key, purpose) not in groups:
            groups[key, purpose] = make()
        return groups[key, purpose]


registry = _Registry()


@contextmanager
def held_by(holder: Any) -> Iterator[None]:
    """Inside, groups that are asked for belong to `holder`, until `let_go(holder)`."""
    before, registry.holder = registry.holder, holder
    try:
        yield
    finally:
        registry.holder = before


def held_alone(holder: Any) -> list[Any]:
    """The keys of groups that only `holder` uses, in the order in which they were opened."""
    return [key for key in registry.current() if registry.holders[key] == {holder}]


def let_go(holder: Any, close: bool) -> None:
    """End the use of groups by `holder`. Every rank of the world must call it, when nothing is sent there any more.

    Args:
        holder: as given to `held_by`.
        close: whether to close groups that nobody else uses; otherwise they stay open for the next holder.
    """
    for key in held_alone(holder) if close else ():
        _close(key)
    for holders in registry.holders.values():
        if holder in holders:
            holders.remove(holder)
            holders.update(() if holders else {None})


def _close(key: Any) -> None:
    group = registry.groups.pop(key)
    del registry.holders[key]
    if group is not None and group.pg is not None:
        raw.destroy(group.pg)
        # Not None, which torch takes for the default group.
        object.__setattr__(group, "pg", Closed())


class Closed:
    """Replaces the process group of a closed group: any use of it raises."""

    def __getattr__(self, name: str) -> Any:
        wrong = "a channel between ranks was used after opt.detach()"
        raise RuntimeError(explain(wrong, "detach closes the channels of its model", "opt = zf.attach(model, tx)"))


def close_all() -> None:
    """Close every group that the library opened, the default group too if the library made it."""
    for group in list(registry.groups.values()):
        if group and group.pg is not None:
            raw.destroy(group.pg)
    registry.groups.clear()
    registry.holders.clear()
    if registry.ours:
        raw.destroy(None)
    registry.current()


def presence() -> Presence | None:
    """The `Presence` of this job; None before any group was opened."""
    registry.current()
    return registry.presence


def finished(failed: bool = False) -> None:
    """Tell the other ranks that this one joins no more collectives, because of an error if it has failed."""
    if registry.presence is not None:
        # If the store does not answer, nobody is waiting.
        with contextlib.suppress(RuntimeError):
            registry.presence.set_finished(failed)


def opened() -> list[Group]:
    """The groups of several ranks that are open in this process; `group.traffic` counts what was sent over each.

    Examples:
        >>> from zerofn import collectives
        >>> {group.size: group.traffic for group in collectives.opened()}  # one process opens no group
        {}
    """
    return [g for g in registry.current().values() if g is not None and g.pg is not None]


def bytes_sent() -> dict[str, int]:
    """The bytes of parameters and gradients that this rank has sent since its groups were opened, by collective.

    The difference over an optimizer step is `zf.plan(tx, model, world_size).road.sent`. Nothing is computed in a step
    for it. As there, scalars (norms, losses) and numbers by which ranks agree are not counted. What a compiled graph
    sends is not counted either.

    Examples:
        >>> from zerofn import collectives
        >>> collectives.bytes_sent()  # one process sends nothing
        {}
    """
    found: Counter[str] = Counter()
    for group in opened():
        found.update(group.traffic.by_op)
        found.subtract(group.traffic.of_numbers)
    return {op: sent for op, sent in found.items() if sent}


def begun() -> dict[str, int]:
    """By channel, the number of the last collective or common call that this process has begun.

    Channels on which another thread of this process began the last one are left out: it may begin more.
    """
    here, me = presence(), threading.get_ident()
    counts = {g.pg.group_name: g.traffic.begun for g in opened() if g.traffic.thread in (0, me)}
    return {**counts, **(here.calls if here is not None else {})}


# ----------------------------------------------------------------------------------------------------------------------
# Ranks meet in the job's store before they send anything, in calls that all of them must make together.
#
# People write `if rank == 0: zf.save(...)`, and a collective would then wait for half an hour without a word. In the
# store a waiting rank can see where the others are, and can give the call up without leaving half a collective behind.
# Each such call costs a few messages to the store, and no step costs any.
#
# Each call is decided once, in the store: it goes ahead when all ranks have come to it, or the first rank that sees
# that they will not gives it up. A rank that comes to a call which was given up goes on to the next one of these
# ranks, so that ranks which catch the error meet again afterwards.
#
# A rank that is late and one that never comes look alike while they compute. Others wait for a rank that is seen to
# compute; for one that is not, they wait `LIMIT` seconds.


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


def together(
    call: str,
    ranks: tuple[int, ...],
    right: str,
    seconds: float | None = None,
    opens: bool = False,
    state: str = "",
) -> None:
    """Return when all of `ranks` have come to this call.

    Args:
        call: the call as the user writes it.
        ranks: of the world; this one is among them.
        right: the right code, for the error.
        seconds: to wait for ranks that are not seen to compute; by default `limit()`.
        opens: whether ranks come to this call with a chain that reduces gradients. A rank that has called
            `reduces_nothing` in its place is waited for only `limit()` seconds, also while it computes.
        state: follows the call in what ranks compare: text that must be equal on all ranks.

    Raises:
        RuntimeError: on every rank that has come, if another waits elsewhere, has ended, or did not come in time.
    """
    here = presence()
    if len(ranks) == 1 or here is None:
        return
    seconds = limit() if seconds is None else seconds
    while not _Call(here, call, ranks, right, seconds, opens, state).meet():
        pass


def reduces_nothing(call: str) -> None:
    """Tell ranks that wait for this one to open a group that it has made a call which opens none."""
    # If the store does not answer, nobody is waiting.
    with contextlib.suppress(RuntimeError):
        here = _presence_before_groups()
        if here is not None:
            here.set_alone(call, _channel(_every_rank()))


def _channel(ranks: tuple[int, ...]) -> str:
    """The name of the calls of some ranks."""
    return f"calls of {len(ranks)} ranks #{zlib.crc32(repr(ranks).encode()):08x}"


class _Call:
    """One call of some ranks, found in the store by its number among the calls of these ranks."""

    def __init__(
        self, here: Presence, call: str, ranks: tuple[int, ...], right: str, seconds: float, opens: bool, state: str
    ):
        self.here, self.call, self.ranks, self.right, self.seconds = here, call, ranks, right, seconds
        self.opens, self.state, self.channel = opens, state, _channel(ranks)
        here.calls[self.channel] += 1
        self.number = here.calls[self.channel]
        self.key = f"{self.channel}/{self.number}"
        self.place = 0
        self.came: dict[int, str] = {}  # by rank, the call it has come to, as far as this one has read
        self.read = 0

    def meet(self) -> bool:
        """Wait, and return whether all ranks have come; False if the call was given up before this one came."""
        try:
            if self.here.read(f"{self.key}/decision"):
                return False
            self.place = self.here.store.add(f"{self.key}/came", 1)
            self.here.store.set(f"{self.key}/{self.place}", f"{self.here.rank} {self.call}{self.state}")
            decision = self._decide_last() if self.place == len(self.ranks) else self._wait()
            if decision == GO:
                self.here.met[self.channel] = self.number
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
        """Decide, as the last rank that came, whether all make the same call."""
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
        """Why ranks that have not come never will; empty while they may."""
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
            # That rank waits for a collective or call which this rank has not begun, and will not begin while it waits.
            if where is not None and mine.get(where.channel, where.number) < where.number:
                return f"rank {rank} makes another call: it waits for rank {self.here.rank} in {where.what}"
            if self.opens and waited >= limit() and (call := self.here.went_alone(rank, self.channel)):
                return (
                    f"rank {rank} has made {call} with a chain that reduces gradients over no ranks, and did not come\n"
                    f"within {limit():g} s; zf.chain(zf.local(), ...) says that this is meant, and is waited for"
                )
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
        """Decide, unless another rank has decided. Return the decision that counts."""
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
            _delete(self.here, self.ranks, old)
            old -= 1


def _delete(here: Presence, ranks: tuple[int, ...], number: int) -> None:
    """Delete a call of some ranks, which all of them have left."""
    for part in ("decision", "came", *range(1, len(ranks) + 1)):
        here.store.delete_key(f"{_channel(ranks)}/{number}/{part}")


# ----------------------------------------------------------------------------------------------------------------------
# A `Lease` holds the groups of an attached model. They are closed when it is detached, and when `attach` fails.
#
# A group that one rank closes breaks what another rank still sends to it. So all ranks of the job meet first, when
# each has sent all that it will. If they do not meet, groups stay open.


# Seconds for which a rank on which attach has failed waits for the others to fail as well.
BRIEFLY = 2.0


class Lease:
    """The groups of one attached model."""

    def close(self, ranks: tuple[int, ...], seconds: float | None = None) -> None:
        """Close the groups that nobody else uses, on every rank.

        Args:
            ranks: the ranks that call this. All ranks of the job open and close groups together: if only some detach
                their model, its groups stay open, and the next model with equal groups gets them.
            seconds: to wait for the others; by default as any other call.
        """
        close, alone = ranks == tuple(range(world()[1])), len(held_alone(self))
        if close and alone:
            try:
                together(f"the end of a model with {alone} channels", ranks, "the same calls on every rank", seconds)
            except RuntimeError:
                close = False
        let_go(self, close)


@contextmanager
def lease() -> Iterator[Lease]:
    """Groups that are opened inside belong to one model. They are closed if every rank raises an error inside."""
    opened = Lease()
    try:
        with held_by(opened):
            yield opened
    except BaseException:
        opened.close(tuple(range(world()[1])), BRIEFLY)
        raise


# ----------------------------------------------------------------------------------------------------------------------
# `Background` is a thread for work beside training, such as an asynchronous save. The interpreter waits for it at
# exit.


class Background(threading.Thread):
    """A function that runs in a thread from now on.

    Args:
        name: of the thread, for the traceback that is printed if it fails.
        work: the function, called once.

    Attributes:
        error: the error that it raised. It is printed as well, since the caller may not ask for it.
    """

    def __init__(self, name: str, work: Callable[[], None]):
        super().__init__(name=name, daemon=False)
        self.work: Callable[[], None] | None = work
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        assert self.work is not None
        try:
            self.work()
        except BaseException as error:
            self.error = error
            raise
        finally:
            # `work` may hold the last reference to a copy of all parameters. Without it their memory is freed.
            self.work = None


def join_background_threads() -> None:
    """Wait for all background threads of this process, before the same channels are used or the process ends."""
    for thread in threading.enumerate():
        if isinstance(thread, Background) and thread is not threading.current_thread():
            thread.join()


# ----------------------------------------------------------------------------------------------------------------------
# The library has process groups of its own, opened once for each mesh and purpose, and closed in order.
#
# Every rank must open them in the same order, which `torch.distributed.new_group` demands. Groups of different
# purposes are different channels, whose collectives do not wait for each other.


_ARRIVAL = timedelta(minutes=5)  # how long a rank waits for the others while groups are made


def initialize(backend: str | None = None, file: str | None = None) -> None:
    """Initialise the default group from the environment, as torchrun sets it.

    Ranks meet at MASTER_ADDR and MASTER_PORT, or in `file`, on one machine.
    """
    if file is None:
        _meet_first()
    raw.make_default(backend, file, f"zerofn/{registry.made}")
    registry.made += 1


def world_size() -> int:
    """The number of ranks: of the default group, or before there is one as the launcher of this process says."""
    return raw.world()[1] if raw.default_group() is not None else _launched()


def _launched() -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def _ensure_default() -> bool:
    """Whether the world has several ranks. Makes the default group if this process was launched as a rank."""
    if _launched() > 1 and raw.default_group() is None:
        initialize()
        registry.current()
        registry.ours = True
        atexit.register(_leave)
    return raw.world()[1] > 1


def world_group(purpose: Hashable = "") -> Group:
    """All ranks of this job: a group of one if nothing was launched, else with a process group of our own.

    Under torchrun (RANK, WORLD_SIZE, ... in the environment) the first call initialises the default group; an import
    never does. A default group that the user initialised is only used to make new groups. Every rank must call this in
    the same order, as `dist.new_group`.

    Args:
        purpose: calls with equal purposes share a group. A pipeline passes its own, so that the order of its
            collectives depends on nothing outside of it.

    Examples:
        >>> world_group().size
        1
    """

    def make() -> Group | None:
        if not several:
            return Group(purpose=purpose)
        # torch names the group by this number: where it differs, ranks would wait for each other for ever.
        state = f" after {raw.groups_made()} groups of torch.distributed"
        if registry.named:
            _meet(math.inf, state)
        else:
            _meet_first(state)
        return _open(_every_rank(), raw.device_of(), purpose)

    several = _ensure_default()
    group = registry.get("world", purpose, make)
    assert group is not None
    if several and not registry.named:
        # A store may outlive the group, and hold what ranks have told each other in an earlier one.
        name = raw.gather_objects(uuid.uuid4().hex, group)[0]
        group.traffic.reset()
        _leave_first()
        store = raw.job_store(f"zerofn/{name}")
        registry.presence = None if store is None else Presence(store, raw.world()[0])
        registry.named = True
    return group


def _meet(seconds: float, state: str = "") -> None:
    """Raise before a group is opened if other ranks wait elsewhere, for instance because an error was caught here."""
    right = "the same calls of zerofn and of dist.new_group on every rank"
    together("the opening of a group", _every_rank(), right, seconds, opens=True, state=state)


def _every_rank() -> tuple[int, ...]:
    """All ranks, also before there is a default group."""
    return tuple(range(world_size()))


# Before the first group of a job torch's own wait, in `new_group` or `init_process_group`, cannot be given up. So ranks
# meet in the store before it too. The prefix is the same for every default group in this store: a first group that all
# ranks have opened leaves nothing there.
FIRST = "zerofn/first"
# Seconds to wait for ranks of which nothing is known: as long as torch waits.
PATIENCE = 1800.0


def _presence_before_groups() -> Presence | None:
    """The presence of this job, also before a group was opened. None if ranks meet in no store, or in one that waits.

    Before there is a default group it is in the store of torchrun.
    """
    if presence() is None and not registry.named:
        several, rank = raw.default_group() is not None, raw.world()[0]
        store = raw.job_store(FIRST) if several else raw.launcher_store(f"zerofn/{registry.made}/{FIRST}")
        rank = rank if several else int(os.environ["RANK"])
        registry.presence = None if store is None else Presence(store, rank)
    return registry.presence


def _meet_first(state: str = "") -> None:
    """Wait in the store, as long as torch would, until all ranks have come to open their first group."""
    if _presence_before_groups() is not None:
        _meet(max(PATIENCE, limit()), state)


def _leave_first() -> None:
    """Delete what ranks wrote before their first group, which all of them have opened."""
    first = registry.presence
    if first is not None:
        first.clear()
        if first.rank == 0:
            _delete(first, _every_rank(), first.calls[_channel(_every_rank())])


def _open(ranks: tuple[int, ...], device: torch.device, purpose: Hashable, name: str = "") -> Group | None:
    pg = raw.make_group(ranks, device, name)
    if pg is None:
        return None
    return Group(ranks.index(raw.world()[0]), len(ranks), ranks, device, purpose, pg)


def group_for(function: str, mesh: Any) -> Group:
    """The group of a mesh, or of all ranks for `None`; a `TypeError` that names the function if it is no mesh."""
    if mesh is None:
        return world_group()
    if type(mesh).__name__ != "DeviceMesh":
        raise TypeError(
            explain(
                f"{function}({mesh!r})",
                "mesh is a one-dimensional DeviceMesh, or None for all ranks",
                f"{function}(init_device_mesh('cpu', (2, 2), mesh_dim_names=('replicate', 'shard'))['shard'])",
            )
        )
    return mesh_group(mesh)


def mesh_group(mesh: Any, axis: str | None = None, purpose: Hashable = "") -> Group:
    """The ranks along a one-dimensional mesh: a `DeviceMesh`, `mesh["shard"]`, or `mesh` with an `axis`.

    This makes a process group of our own, since the mesh's belongs to the user. Every rank of the world must call this
    in the same order, also for a mesh of fewer ranks.

    Args:
        mesh: the mesh.
        axis: the name of its axis, if it has several.
        purpose: calls with equal purposes share a group.

    Raises:
        TypeError: it is not a mesh.
        ValueError: the mesh is not one-dimensional, has no such axis, or has ranks that the world does not have.
    """
    mesh = raw.mesh_axis(mesh, axis)
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    me = raw.world()[0]

    def make() -> Group | None:
        if len(ranks) > 1:
            # Every rank takes part in opening all rows. A sub-mesh has no public attribute for the mesh that it was cut
            # from, so the ranks tell each other their rows.
            return _open_all(_rows(_of_all_ranks(ranks)), raw.device_of(mesh.device_type), purpose)
        # A mesh has as many ranks in each row. So all ranks are here with rows of one rank, and open no group.
        return Group(0, 1, ranks, raw.device_of(mesh.device_type), purpose) if me in ranks else None

    group = registry.get(mesh, purpose, make)
    if group is None:
        raise ValueError(f"rank {me} is not in the mesh of ranks {list(ranks)}; pass it a mesh that it is in")
    return group


def channels(joining: Sequence[Sequence[Group]], numbers: int = 0) -> list[Group]:
    """A new group for each sequence of groups: of all ranks that these connect, directly or through one another.

    The last `numbers` of them send numbers of the host, also where the others send tensors of a GPU: the host could not
    read an answer on a GPU without waiting for all that was launched before.

    Nobody else uses it, so the order of its collectives does not depend on those of the old groups. Several groups are
    the axes of a mesh. Every rank of the world must call this; they wait for each other once.

    >>> [group.size for group in channels([[Group()], [Group(), Group()]])]
    [1, 1]
    """
    wanted = [_joined(groups) for groups in joining]
    if not any(size > 1 for size in map(len, wanted)):
        return [groups[0] for groups in joining]
    every = _of_all_ranks(wanted)
    opened: list[Group] = []
    for n, (groups, ranks) in enumerate(zip(joining, wanted, strict=True)):
        group: Group | None = groups[0]
        if len(ranks) > 1:
            rows = _rows([each[n] for each in every])
            of_host = n >= len(joining) - numbers
            device = torch.device("cpu") if of_host else raw.device_of(groups[0].device.type)
            registry.opened += 1
            group = registry.get(registry.opened, "channel", functools.partial(_open_all, rows, device, "channel", n))
        assert group is not None
        opened.append(group)
    return opened


def _joined(groups: Sequence[Group]) -> tuple[int, ...]:
    """All ranks that these groups connect. Ranks know those along the first axis, and exchange those along others."""
    joined = {r for g in groups for r in g.ranks}
    for group in [g for g in groups if g.size > 1][1:]:
        for found in raw.gather_objects(sorted(joined), group):
            joined.update(found)
    return tuple(sorted(joined))


def connected(axes: Sequence[tuple[int, ...]]) -> Group:
    """The ranks that axes of a mesh connect, directly or through one another. Every rank of the world must call it.

    Args:
        axes: the ranks along each axis of the mesh at this rank.
    """
    parts: list[set[int]] = []
    for row in itertools.chain.from_iterable(_of_all_ranks(tuple(axes))):
        joined = set(row).union(*(part for part in parts if part & set(row)))
        parts = [part for part in parts if not part & joined] + [joined]
    rows = tuple(sorted(tuple(sorted(part)) for part in parts))

    group = registry.get(rows, "checkpoint", lambda: _open_all(rows, raw.device_of(), "checkpoint"))
    assert group is not None
    return group


def _rows(of_all: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The different rows of a mesh, from the row of each rank."""
    rows = sorted(set(of_all))
    members = Counter(itertools.chain.from_iterable(rows))
    shared = sorted(rank for rank, n in members.items() if n > 1)
    if shared:
        raise ValueError(
            f"the ranks disagree on the mesh: {[list(row) for row in rows]} overlap in ranks {shared}; "
            "build the same mesh on every rank and cut it along the same axis"
        )
    return rows


def _of_all_ranks(obj: Any) -> list[Any]:
    """The object of each rank of the world, once all have come to open a group.

    Raises:
        RuntimeError: ranks have made different numbers of groups. The next one would have different names on them, and
            they would wait for ever.
    """
    control = world_group("mesh")
    _meet(_ARRIVAL.total_seconds())
    raw.await_all(control.pg, _ARRIVAL)
    mine = raw.groups_made(), registry.met, obj
    counts, numbers, found = zip(*raw.gather_objects(mine, control), strict=True)
    registry.met = max(numbers) + 1
    if len(set(counts)) > 1:
        raise RuntimeError(
            explain(
                f"by rank, {list(counts)} process groups have been made, so the next one has a name of its own on each",
                "torch names groups by their number, and dist.new_group was called on some ranks only; with "
                "use_local_synchronization=True torch counts it on its members alone, from 2.14 on",
                "dist.new_group(ranks) on every rank of the job; or zf.attach and meshes first",
            )
        )
    return list(found)


def _open_all(rows: Sequence[tuple[int, ...]], device: torch.device, purpose: Hashable, n: int = 0) -> Group | None:
    """Open the groups of all rows; the one that this rank is in, if any. It is the n-th since `_of_all_ranks`.

    Each row is opened by its members alone: a mesh of a thousand ranks has hundreds of rows. Where NCCL splits the
    group of all ranks, and one of them is in no row, every rank opens all rows in one order.
    """
    rank, size = raw.world()
    if len(rows) == 1 or (raw.splits() and device.type != "cpu" and sum(map(len, rows)) < size):
        opened = [_open(row, device, purpose) for row in rows]
        return next((group for group in opened if group is not None), None)
    mine = next((row for row in rows if rank in row), None)
    return None if mine is None else _open(mine, device, purpose, f"zerofn_{registry.met}_{n}_{mine[0]}")


def shutdown() -> None:
    """Close every group that the library opened, the default group too if the library made it. Every rank must call it.

    The ranks wait for each other first: a rank that destroys a group while another still sends makes that one abort
    ("terminate called without an active exception"). In a world of one it does nothing.
    """
    join_background_threads()
    groups = registry.current()
    if not any(group and group.pg for group in groups.values()) and not registry.ours:
        groups.clear()
        return
    raw.barrier(world_group("mesh"))
    close_all()


def _leave() -> None:
    """Close the library's groups at the end of a process under torchrun.

    After an error it waits for no other rank: they may be anywhere, and the launcher ends them.
    """
    registry.current()
    if not (registry.ours and raw.default_group() is not None):
        return
    failed = getattr(sys, "last_value", None) is not None
    finished(failed)
    try:
        if not failed:
            raw.await_all(None, timedelta(seconds=10))
        close_all()
    except RuntimeError:
        pass  # the other ranks have ended, so there is nothing to close in order
