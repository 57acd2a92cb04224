"""When units are unsharded, resharded and reduced: at most two are unsharded at a time, the one in use and the next.

A model mostly needs the same units in the same order as the last time, so ranks promise each other that order
(`ranks.ordered_collectives`), and the next unit is prefetched while the last one computes.
"""

from __future__ import annotations

import threading
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat.autograd import (
    NO_BACKWARD,
    after_this_node,
    at_end_of_backward,
    current_node,
    graph_task,
    in_backward,
)
from .._compat.functorch import uncompiled
from .._compat.tensors import memory, storage_number, writes
from .._interrupts import interrupts_held
from ..core.layout import Leaf
from ..ranks.backend import collectives_but_on
from ..ranks.group import Group
from ..ranks.ordered_collectives import AGAIN, BACKWARD, CALL, STEP, Asked, Rounds
from .forward_writes import ForwardWrites
from .unit import Unit, outside_inference_mode

# Units that have full parameters at the same time: the one that is used, and the next.
ALIVE = 2
# Kinds of collective: all-gathers of parameters, reduce-scatters of gradients, and all-gathers of cotangents of
# gradients (second derivatives).
PARAMETERS, GRADIENTS, TANGENTS = 1, 2, 3
# Kinds of pass: one that begins in backward, and others by whether a graph is recorded.
UNRECORDED, RECORDED, IN_BACKWARD = 0, 1, 2
# Ranks send their number of reduce-scatters modulo this when they meet.
COUNTED = 1 << 20
# In the place of a backward that has ended meanwhile: a call of it returns `None`, as that of a dead reference does.
ENDED = type(None)
KEPT = "how much of their gradients has come since they were last cleared"

# A storage has one Python object as long as a tensor on it exists, so a weak reference shows whether it was freed.
StorageRef = weakref.ref[torch.UntypedStorage]


def gathers_first(promise: Iterable[Asked]) -> list[Asked]:
    """Each all-gather of parameters before the reduce-scatters right in front of it: it runs while backward computes.

    >>> gathers_first([(PARAMETERS, 3), (GRADIENTS, 3), (PARAMETERS, 2), (GRADIENTS, 2), (PARAMETERS, 1)])
    [(1, 3), (1, 2), (2, 3), (1, 1), (2, 2)]
    """
    found: list[Asked] = []
    sums: list[Asked] = []
    for asked in promise:
        if asked[0] == GRADIENTS:
            sums.append(asked)
            continue
        found += [asked, *sums] if asked[0] == PARAMETERS else [*sums, asked]
        sums = []
    return found + sums


def gathers(units: int) -> list[int]:
    """How often each of so many units is gathered, by a forward that uses them in order, and its backward.

    The units that forward has used last are still unsharded when backward begins.

    >>> gathers(4)
    [2, 2, 1, 1]
    """
    return [2] * (units - ALIVE) + [1] * min(units, ALIVE)


class Flight(NamedTuple):
    """A reduce-scatter under way that backward does not wait for.

    Attributes:
        unit: whose gradients it reduces.
        wait: waits for it, and returns the gradients of this rank's shards.
        wanted: for each leaf, whether this backward adds its gradient to `p.grad`.
    """

    unit: Unit
    wait: Callable[[], list[Tensor | None]]
    wanted: list[bool]


class Schedule:
    """Runs the collectives of one model's units in an order that all ranks agree on.

    Args:
        units: the units.
        forward_writes: stores what forward writes into full parameters.
        control: a group on which ranks tell each other what they want.
        data: the group of the collectives.
        accept: takes a shard's gradient that autograd does not bring to it, and whether hooks on it are to be run.
        prefetch: whether the unit that is expected next is unsharded before it is used.
        update: where leaves are updated within backward, updates those whose gradients are here. What is gathered after
            a gradient has come has the update on all ranks. Ranks then agree on each reduce-scatter alone: a leaf must
            know whether other ranks contribute to its gradient later.

    Attributes:
        live: the unsharded units by number, the last used one at the end.
        coming: the unit whose all-gather was prefetched, and a function that waits for it; `None` if there is none.
        known: by number of a memory: the memory, and of which unit and place in it the full parameter is that has it.
        updates: how often all parameters were updated.
        partial: paths of leaves to whose gradient of this step other ranks may still add.
        kept: how many reduce-scatters there were since gradients were last cleared. Where ranks have different
            numbers, one rank has cleared its shard of a sum and the others have not.
        unfinished: backwards since the last step that have not ended: by autograd's number, what is alive until one has
            ended or has raised.
        flying: reduce-scatters under way that backward does not wait for.
        late: gradients that are taken once no other backward is under way here: in its thread it may add to them. With
            each, whether hooks are run on it.
        lock: held by the thread that sends, or that unshards or reshards a unit. With several threads, collectives
            come in the order in which threads ask, and ranks agree on it.
        recorded: whether the model's last use of a parameter was recorded.
        current: the unit that was used last.
        gathering: whether an all-gather is under way whose result is not among `live`.
    """

    def __init__(
        self,
        units: list[Unit],
        forward_writes: ForwardWrites,
        control: Group,
        data: Group,
        accept: Callable[[Leaf, Tensor, bool], None],
        prefetch: bool,
        update: Callable[[], object] | None,
    ):
        self.units, self.forward_writes, self.accept, self.prefetch = units, forward_writes, accept, prefetch
        self.update = update
        self.live: OrderedDict[int, Unit] = OrderedDict()
        self.coming: tuple[int, Callable[[], list[Tensor]]] | None = None
        self.known: dict[int, tuple[StorageRef, int, int]] = {}
        self.updates = self.kept = 0
        self.partial: set[str] = set()
        self.unfinished: dict[int, Callable[[], Any]] = {}
        self.flying: deque[Flight] = deque()
        self.late: list[tuple[Leaf, Tensor, bool]] = []
        self.lock = threading.RLock()
        self.recorded = self.gathering = False
        self.current = -1
        this = weakref.ref(self)
        self.protocol = Rounds(
            control,
            partial(_join, this),
            partial(_prefetch, this),
            gathers_first,
            () if update is None else (GRADIENTS,),
            partial(_kind_of_pass, this),
            collectives_but_on((control, data)),
        )

    # ------------------------------------------------------------------------------------------------------------------
    # Which units are unsharded.

    def full(self, i: int) -> list[Tensor] | None:
        """The full parameters of a unit in the compute dtype, if they are here or on their way, and up to date."""
        if self.update is not None:
            self.update()
        unit = self.units[i]
        if writes(unit.shards) != unit.counts:
            # User code has written into a shard between two calls.
            for j in range(len(unit.leaves)):
                self.age(i, j)
        if self.coming is not None and self.coming[0] == i:
            (_, wait), self.coming = self.coming, None
            self.put(i, wait())
            self.use(i, prefetched=True)
        elif unit.fulls is not None:
            self.use(i)
        return unit.fulls

    def unshard(self, i: int) -> list[Tensor]:
        """Gather the full parameters of a unit."""
        self.reshard(keep=ALIVE - 1)
        fulls = self.perform(PARAMETERS, i)
        self.put(i, fulls)
        return fulls

    def use(self, i: int, prefetched: bool = False) -> None:
        """Tell that a unit is used that is here; the next one may be prefetched then."""
        self.live.move_to_end(i)
        if i == self.current and not prefetched:
            return
        self.current = i
        if self.prefetch:
            with interrupts_held(), self.lock:
                self.protocol.go_on((PARAMETERS if prefetched else AGAIN, i))

    def put(self, i: int, fulls: list[Tensor]) -> None:
        """Keep a unit's full parameters."""
        self.units[i].fulls = fulls
        self.live[i] = self.units[i]
        for j, full in enumerate(fulls):
            storage = full.untyped_storage()
            if storage.nbytes():
                self.known[storage_number(storage)] = (weakref.ref(storage), i, j)
        self.known = {k: entry for k, entry in self.known.items() if entry[0]() is not None}

    def origin(self, t: Tensor) -> tuple[int, int] | None:
        """The full parameter that a tensor is a view of, by unit and place in it; `None` if it is a view of none."""
        entry = self.known.get(memory(t))
        # A new storage may have the number of one that was freed.
        return None if entry is None or entry[0]() is None else entry[1:]

    def reshard(self, keep: int = 0) -> None:
        """Reshard the least recently used units until `keep` are left, counting the one that is being prefetched."""
        if self.forward_writes.freed:
            self.forward_writes.look_again()
        while len(self.live) > max(0, keep - (self.coming is not None)):
            _, unit = self.live.popitem(last=False)
            if unit.given:
                unit.reshard()
            else:
                # Forward got none of its parameters, so nothing was written.
                unit.fulls = unit.seen = None
        if not keep and self.coming is not None:
            self.finish_prefetched()

    def reshard_unit(self, i: int, stored: bool = False) -> None:
        """Reshard one unit. Unless `stored`, store first what forward has written into it."""
        if self.coming is not None and self.coming[0] == i:
            self.finish_prefetched()
        if self.live.pop(i, None) is not None:
            self.units[i].reshard(stored)

    def finish_prefetched(self) -> None:
        """Wait for a prefetched all-gather, and drop its result."""
        if self.coming is not None:
            (_, wait), self.coming = self.coming, None
            wait()

    def age(self, i: int, j: int) -> int:
        """How often a parameter has changed: by updates, by user code, by the model in forward."""
        unit = self.units[i]
        if unit.has_changed(j):
            unit.forget_given()
            self.reshard_unit(i)
        return self.updates + unit.age(j)

    def renew(self) -> None:
        """Mark all full parameters as out of date, after an update."""
        self.forward_writes.freed.clear()
        for unit in self.live.values():
            unit.forget_given()
            unit.reshard()
        self.live.clear()
        if self.coming is not None:
            self.finish_prefetched()
        self.updates += 1

    def recount(self) -> None:
        """Take the shards as they are now: an update has written them."""
        for unit in self.units:
            unit.counts = writes(unit.shards)

    @contextmanager
    def updating(self, places: Collection[tuple[int, int]]) -> Iterator[None]:
        """Inside, leaves are updated, in backward. Full copies, at these places, become out of date.

        Writes of forward into such a copy are stored first: once the shard has changed, a write cannot be told from the
        update. Later writes into the copy are not stored, since they would undo the update.
        """
        with self.lock:
            self.forward_writes.look_again()
            for i, _ in places:
                self.units[i].store_writes()
            yield
            for i, j in places:
                unit = self.units[i]
                unit.changes[j] += 1
                unit.counts = writes(unit.shards)
                self.reshard_unit(i, stored=True)
                freed, leaf = self.forward_writes.freed, unit.leaves[j]
                freed[:] = [of for of in freed if of[0] is not leaf]

    def store_writes(self) -> None:
        """At the end of a call or a backward: store what forward has written. Later writes are lost."""
        # Another thread may unshard and reshard meanwhile.
        with self.lock:
            for unit in self.live.values():
                if unit.given:
                    unit.store_writes()
                    unit.forget_given()
            if self.forward_writes.freed:
                self.forward_writes.look_again()
                self.forward_writes.freed.clear()

    # ------------------------------------------------------------------------------------------------------------------
    # Collectives, in one order on all ranks.

    def perform(self, kind: int, i: int, tensors: tuple[Tensor | None, ...] = ()) -> list[Any]:
        """Run a collective of a unit, and those that other ranks want before it.

        Args:
            kind: of collective.
            i: the unit.
            tensors: for each leaf, for `GRADIENTS` the full gradient, for `TANGENTS` the tensor to gather.

        Returns:
            For each leaf the full tensor; for `GRADIENTS` what `Unit.reduce` returns.
        """
        unit = self.units[i]
        if kind == PARAMETERS:
            return self._perform(kind, i, partial(self._unshard, i))
        return self._perform(kind, i, partial(unit.reduce if kind == GRADIENTS else unit.gather, tensors))

    def reduce_later(self, i: int, grads: tuple[Tensor | None, ...], wanted: list[bool]) -> None:
        """Reduce-scatter a unit's gradients while backward goes on.

        They are added to `p.grad` when the next reduce-scatter begins, and at the end of backward: one is under way,
        whose buffers are the price.

        Args:
            i: the unit.
            grads: the full gradient of each leaf.
            wanted: for each leaf, whether this backward adds its gradient to `p.grad`.
        """

        def begin() -> None:
            self.flying.append(Flight(self.units[i], self.units[i].reduce(grads), wanted))

        self._perform(GRADIENTS, i, begin)

    def land(self) -> None:
        """Wait for the reduce-scatters under way, and take their gradients and those that have waited."""
        with interrupts_held(), self.lock:
            self._land()

    def _land(self) -> None:
        if not self.flying and not self.late:
            return
        with outside_inference_mode(), torch.no_grad():
            while self.flying:
                flight = self.flying.popleft()
                for leaf, g, wanted in zip(flight.unit.leaves, flight.wait(), flight.wanted, strict=True):
                    if g is not None and wanted:
                        # Hooks on parameters do not run: there were none when this reduce-scatter began.
                        self.late.append((leaf, g, False))
            self._accept_late()

    def drop(self) -> None:
        """Drop gradients that are not in `p.grad` yet, as the user clears it."""
        with interrupts_held(), self.lock:
            while self.flying:
                self.flying.popleft().wait()
            self.late.clear()

    def alone(self) -> bool:
        """Whether no other backward than this thread's is running here."""
        others = self.unfinished.keys() - {graph_task()}
        return not others or all(self.unfinished.get(task, ENDED)() is None for task in others)

    def _perform(self, kind: int, i: int, begin: Callable[[], Callable[[], Any] | None]) -> Any:
        # Ctrl-C waits: between two lines of the protocol it would leave this rank at another place than the others.
        with interrupts_held(), self.lock:
            if kind == PARAMETERS:
                self.current, self.gathering = i, True
                # A prefetched unit that was passed over is not expected any more.
                self.finish_prefetched()
            elif kind == GRADIENTS:
                self._land()
            try:
                found = self.protocol.perform(kind, i, begin)
            finally:
                self.gathering = False
            if kind == GRADIENTS:
                self.kept += 1
                if not self.protocol.together:
                    self.partial.update(leaf.path for leaf in self.units[i].leaves)
            return found

    def _unshard(self, i: int) -> Callable[[], list[Tensor]]:
        """Begin the all-gather of a unit's parameters. Return a function that waits for it."""
        if self.update is not None:
            self.update()
        return self.units[i].unshard()

    def _accept(self, unit: Unit, end: Callable[[], list[Tensor | None]]) -> None:
        """Wait for a reduce-scatter that only other ranks wanted, and keep this rank's shards of the gradients."""
        with outside_inference_mode(), torch.no_grad():
            self.land()
            self.kept += 1
            self.late += [(leaf, g, True) for leaf, g in zip(unit.leaves, end(), strict=True) if g is not None]
            self._accept_late()

    def _accept_late(self) -> None:
        """Take gradients that autograd does not bring to `p.grad`, once no other backward is running here."""
        if self.late and self.alone():
            late, self.late = self.late, []
            for leaf, g, hooks in late:
                self.accept(leaf, g, hooks)

    def meet(self, what: str) -> str:
        """Wait until all ranks have come to the same line; see `Rounds.meet`."""
        number = zlib.crc32(what.encode())
        # `kept` is part of the number, since ranks in different backwards have different gradients.
        with interrupts_held(), self.lock:
            return self.protocol.meet(lambda: number * COUNTED + self.kept % COUNTED)

    # ------------------------------------------------------------------------------------------------------------------
    # The join: a rank that has ended a call or a backward, or is at a step, joins others' collectives until every rank
    # has nothing more to send (cf. torch's Join).

    def rest(self, place: int = CALL, ends: bool = True) -> None:
        """This rank has nothing more to send: join others' collectives until every rank waits here (`Rounds.rest`)."""
        with interrupts_held(), self.lock:
            self.current = -1
            self.protocol.rest(place, ends=ends)

    def after_call(self) -> None:
        """Join after a call of the model: other ranks may still be in theirs."""
        if not in_backward():
            # A backward follows a call that was recorded.
            self.rest(CALL, ends=not torch.is_grad_enabled())
            if self.forward_writes.lost:
                self.forward_writes.check()

    @uncompiled
    def after_backward(self, *_: object) -> None:
        """Join at the end of the running backward, if there is one: other ranks' backwards may take longer."""
        task = graph_task()
        if task == NO_BACKWARD or task in self.unfinished:
            return

        def rest() -> None:
            self.unfinished.pop(task, None)
            with interrupts_held(), self.lock:
                self._land()
                # A nested backward ends in the middle of the outer one, at whose end this runs again.
                if current_node() is not None and after_this_node(self.after_backward):
                    return
                # A checkpoint repeats forward in backward, and so writes again.
                self.store_writes()
                self.current = -1
                self.protocol.rest(BACKWARD, ends=not self.unfinished)
            if self.forward_writes.lost:
                self.forward_writes.check()

        # The engine drops its functions when a backward has ended, or has raised: then `rest` is not called, and what
        # is under way is taken, as torch leaves in `p.grad` what came before the error.
        self.unfinished[task] = weakref.ref(rest, lambda _: self.land())
        at_end_of_backward(rest)

    def marks(self) -> dict[str, int]:
        """The numbers that must be equal on all ranks at a step, by name.

        They find a rank that has cleared gradients in the middle of the others' micro-step: it has dropped its shards
        of sums that the others still have.
        """
        return {KEPT: self.kept, **self.forward_writes.marks()}

    def at_step(self, numbers_of: Callable[[], Sequence[int]]) -> list[list[int]]:
        """Join until all ranks are at a step. Return the numbers of each rank; `numbers_of` returns this rank's."""
        # Freeing full parameters finds what forward has written into them.
        self.reshard()
        self.unfinished.clear()
        if self.flying or self.late:
            self.land()
        # `opt.step()` holds Ctrl-C already.
        with self.lock:
            self.current = -1
            rows = self.protocol.rest(STEP, numbers_of)
        self.forward_writes.sums.clear()
        return rows

    def after_failed_backward(self) -> None:
        """Join for a backward that raised on this rank: the others may still be in theirs.

        A backward that ended has joined already; a second join would wait for ranks that never come to it.
        """
        if self.unfinished:
            self.unfinished.clear()
            self.rest(BACKWARD)


# ----------------------------------------------------------------------------------------------------------------------
# What `Rounds` calls. The reference is weak: a cycle would keep the shards of a dropped state until they are collected.

ScheduleRef = Callable[[], Schedule | None]


def _kind_of_pass(ref: ScheduleRef) -> tuple[int, ...]:
    """Where a pass begins, and which units need no collective then."""
    schedule = ref()
    assert schedule is not None
    mode = IN_BACKWARD if in_backward() else RECORDED if schedule.recorded else UNRECORDED
    return mode, *schedule.live


def _prefetch(ref: ScheduleRef, kind: int, i: int) -> bool:
    """Begin an all-gather of parameters before they are used. Return whether it was begun."""
    schedule = ref()
    assert schedule is not None
    if not schedule.prefetch or kind != PARAMETERS or i in schedule.live or schedule.coming is not None:
        return False
    # At most two units are full: the prefetched one, and one gathered now. Running operations hold their tensors.
    schedule.reshard(keep=ALIVE - 1 - schedule.gathering)
    with outside_inference_mode(), torch.no_grad():
        schedule.coming = i, schedule._unshard(i)
    return True


def _join(ref: ScheduleRef, kind: int, i: int) -> Callable[[], object]:
    """Begin a collective that only other ranks want. Return a function that waits for it."""
    schedule = ref()
    assert schedule is not None
    unit = schedule.units[i]
    nothing: tuple = (None,) * len(unit.leaves)
    with outside_inference_mode(), torch.no_grad():
        if kind == GRADIENTS:
            return partial(schedule._accept, unit, unit.reduce(nothing))
        if kind == TANGENTS:
            return unit.gather(nothing)
        if _prefetch(ref, kind, i):
            # This rank will mostly use soon what others use now, so the result is kept.
            return lambda: None
        schedule.reshard(keep=ALIVE - 1)
        return schedule._unshard(i)
