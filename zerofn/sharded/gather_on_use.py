"""At most two units unsharded; notes in place of saved tensors."""

from __future__ import annotations

import contextlib
import threading
import weakref
import zlib
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from .._compat.autograd import (
    NO_BACKWARD,
    after_this_node,
    at_end_of_backward,
    graph_task,
    has_hooks,
    in_backward,
    next_sequence_nr,
    reaches,
    saved_by,
    saved_tensors_hooks,
    sequence_nr,
)
from .._compat.functorch import beneath_functorch, functorch_active, innermost, is_batch, uncompiled
from .._compat.tensors import all_plain, memory, version, writes
from .._errors import explain
from .._interrupts import interrupts_held
from ..core.layout import Leaf, Leaves
from ..core.pipeline import Pipeline
from ..core.returned_values import check_dense
from ..core.view import untracked
from ..ranks.backend import collectives_begun
from ..ranks.group import Group
from ..ranks.ordered_collectives import AGAIN, BACKWARD, CALL, STEP, Asked, Rounds
from .forward_writes import ForwardWrites, StorageRef, WriteBack
from .lazy_tensor import Lazy
from .units import UnitCollectives, UnitPlans

# ----------------------------------------------------------------------------------------------------------------------
# `GatheredUnits` knows which units have full parameters now, at most two, and how often each parameter has changed.


# Units that have full parameters at the same time: the one that is used, and the next.
ALIVE = 2


class GatheredUnits:
    """Full parameters of units: those kept here, one whose all-gather is under way, and those that user code kept.

    Args:
        units: leaves that are gathered together.
        blocks: how many of them the model sees; the others are single leaves.
        params: this rank's shards by path.
        forward_writes: notices what forward writes into full parameters.

    Attributes:
        live: full parameters by unit, the last used one at the end.
        coming: by unit whose all-gather was prefetched, a function that waits and returns full parameters.
        seen: by unit, the tensors that the model was given in the current call.
        updates: how often all parameters were updated.
    """

    def __init__(self, units: list[list[Leaf]], blocks: int, params: Leaves, forward_writes: ForwardWrites):
        self.units, self.blocks, self.forward_writes = units, blocks, forward_writes
        # This rank's shards, by unit.
        self.parts = [[params[leaf.path] for leaf in unit] for unit in units]
        self.live: OrderedDict[int, list[Tensor]] = OrderedDict()
        self.coming: dict[int, Callable[[], list[Tensor]]] = {}
        self.seen: dict[int, tuple[Tensor, ...]] = {}
        # By number of a memory: the memory, and of which unit and place in it the full parameter is that has it.
        self.known: dict[int, tuple[StorageRef, int, int]] = {}
        self.updates = 0
        # By unit and place in it: how often user code wrote into the shard, and the count of writes that was last seen.
        self.writes = [[0] * len(unit) for unit in units]
        self.counts = [writes(parts) for parts in self.parts]

    def __contains__(self, i: int) -> bool:
        return i in self.live or i in self.coming

    def origin(self, t: Tensor) -> tuple[int, int] | None:
        """The full parameter that a tensor is a view of, by unit and place in it; `None` if it is a view of none."""
        entry = self.known.get(memory(t))
        # A new storage may have the number of one that was freed.
        return None if entry is None or entry[0]() is None else entry[1:]

    def get(self, i: int) -> list[Tensor] | None:
        """The unit's full parameters, if they are here and up to date."""
        if writes(self.parts[i]) != self.counts[i]:
            # User code has written into a shard between two calls.
            for j in range(len(self.units[i])):
                self.age(i, j)
        if i in self.coming:
            self.put(i, self.coming.pop(i)())
        elif i in self.live:
            self.live.move_to_end(i)
        return self.live.get(i)

    def put(self, i: int, fulls: list[Tensor]) -> None:
        """Keep a unit's full parameters."""
        self.live[i] = fulls
        for j, full in enumerate(fulls):
            storage = full.untyped_storage()
            if storage.nbytes():
                self.known[memory(full)] = (weakref.ref(storage), i, j)
        self.known = {k: entry for k, entry in self.known.items() if entry[0]() is not None}

    def drop(self, keep: int = 0) -> None:
        """Free the least recently used units until `keep` are left, counting those that are being prefetched."""
        if self.forward_writes.freed:
            self.forward_writes.look_again()
        if not keep and not self.forward_writes.given:
            # Forward has been given none of them, so nothing was written.
            self.live.clear()
            self.seen.clear()
        while len(self.live) > max(0, keep - len(self.coming)):
            self.free_unit(next(iter(self.live)))
        if self.coming and not keep:
            self.finish_prefetched()

    def finish_prefetched(self) -> None:
        """Wait for prefetched all-gathers, and drop their results."""
        for i in list(self.coming):
            self.coming.pop(i)()

    def free_unit(self, i: int, stored: bool = False) -> None:
        """Free a unit's full parameters. Unless `stored`, store first what forward has written into them."""
        if i in self.coming:
            self.coming.pop(i)()
        if i not in self.live:
            return
        left = []
        if i in self.forward_writes.given:
            if not stored:
                self.store_writes(i)
            left = self.forward_writes.leave(i)
        del self.live[i]
        self.seen.pop(i, None)
        if left:
            self.forward_writes.hold(i, left)

    def store_writes(self, i: int) -> None:
        """Store what forward has written into a unit's full parameters so far."""
        given = self.forward_writes.given
        if i in self.live and i in given and self.forward_writes.store_writes(i, self.live[i]):
            self.counts[i] = writes(self.parts[i])

    def store_all_writes(self) -> None:
        """At the end of a call or a backward: store what forward has written. Later writes are lost."""
        for i in list(self.forward_writes.given):
            self.store_writes(i)
        self.look_again()
        self.forward_writes.forget()

    def look_again(self) -> None:
        """Refuse writes into full parameters that were freed before them: they would be lost."""
        if self.forward_writes.freed:
            self.forward_writes.look_again()

    def renew(self) -> None:
        """Mark all gathered parameters as out of date, after an update."""
        self.forward_writes.forget()
        self.live.clear()
        self.seen.clear()
        if self.coming:
            self.finish_prefetched()
        self.updates += 1

    def age(self, i: int, j: int) -> int:
        """How often a parameter has changed: by updates, by user code, by the model in forward."""
        (count,) = writes([self.parts[i][j]])
        if count != self.counts[i][j]:
            # That `.data` was asked for frees the copy too, but is no reason to refuse a graph: it may have been read.
            self.writes[i][j] += count[0] != self.counts[i][j][0]
            self.counts[i][j] = count
            self.forward_writes.leave(i)
            self.free_unit(i)
        return self.updates + self.writes[i][j] + (self.forward_writes.version(i, j) if i < self.blocks else 0)


@contextmanager
def updating(gathered: GatheredUnits, places: Collection[tuple[int, int]]) -> Iterator[None]:
    """Inside, one leaf is updated alone, in backward. Its gathered copies, at these places, become out of date.

    Writes of forward into such a copy are stored first: once the shard has changed, a write cannot be told from the
    update. Later writes into the copy are not stored, since they would undo the update.
    """
    for i, _ in places:
        gathered.look_again()
        gathered.store_writes(i)
    yield
    for i, j in places:
        gathered.writes[i][j] += 1
        gathered.counts[i] = writes(gathered.parts[i])
        gathered.free_unit(i, stored=True)
        gathered.forward_writes.forget_leaf(i, j)


# ----------------------------------------------------------------------------------------------------------------------
# `UnitRounds` runs the collectives of units in an order that all ranks agree on, and prefetches the next unit.
#
# A model mostly needs the same units in the same order as the last time, so ranks promise each other that order
# (`ranks.ordered_collectives`), and the next unit is gathered while the last one computes (prefetch).


# Kinds of collective: all-gathers of parameters, reduce-scatters of gradients, and all-gathers of cotangents of
# gradients (second derivatives).
PARAMETERS, GRADIENTS, TANGENTS = 1, 2, 3
# Kinds of pass: one that begins in backward, and others by whether a graph is recorded.
UNRECORDED, RECORDED, IN_BACKWARD = 0, 1, 2
# Up to which number of reduce-scatters ranks tell each other where they meet.
COUNTED = 1 << 20


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


class Flight(NamedTuple):
    """A reduce-scatter under way that backward does not wait for.

    Attributes:
        unit: whose gradients it reduces.
        wait: waits for it, and returns the gradients of this rank's shards.
        wanted: for each leaf, whether this backward adds its gradient to `p.grad`.
    """

    unit: int
    wait: Callable[[], list[Tensor | None]]
    wanted: list[bool]


class UnitRounds:
    """The collectives of one model's units.

    Args:
        control: a group on which ranks tell each other what they want.
        collectives: of each unit.
        gathered: which units have full parameters here.
        accept: takes a shard's gradient from a reduce-scatter that only other ranks wanted.
        prefetch: whether the unit that is expected next is gathered before it is used.
        sums_by_themselves: whether ranks agree on each reduce-scatter alone. A leaf that is updated within backward
            must know whether other ranks contribute to its gradient later.

    Attributes:
        partial: paths of leaves to whose gradient of this step other ranks may still add.
        kept: how many reduce-scatters there were since gradients were last cleared. Where ranks have different
            numbers, one rank has cleared its shard of a sum and the others have not.
        unfinished: backwards since the last step that have not ended: by autograd's number, what is alive until one has
            ended or has raised.
        lock: held by the thread that sends, or that changes which units are gathered. With several threads,
            collectives come in the order in which threads ask, and ranks agree on it.
        recorded: whether the model's last use of a parameter was recorded.
        current: the unit that was used last.
        gathering: whether a gather is under way whose result is not among the gathered units.
    """

    def __init__(
        self,
        control: Group,
        collectives: UnitCollectives,
        gathered: GatheredUnits,
        accept: Callable[[Leaf, Tensor], None],
        prefetch: bool,
        sums_by_themselves: bool,
    ):
        self.collectives, self.gathered, self.accept, self.prefetch = collectives, gathered, accept, prefetch
        self.units = collectives.plans.units
        # Weak: a cycle would keep the shards of a dropped state until the garbage collector runs.
        this = weakref.ref(self)
        # Of a group that is closed the process group is gone.
        gathers = collectives.wire.group
        self.protocol = Rounds(
            control,
            lambda kind, i: this()._join(kind, i),  # type: ignore[union-attr]
            lambda kind, i: this()._begin_early(kind, i),  # type: ignore[union-attr]
            gathers_first,
            (GRADIENTS,) if sums_by_themselves else (),
            lambda: this()._kind_of_pass(),  # type: ignore[union-attr]
            lambda: collectives_begun(control.pg, gathers.pg),
        )
        self.partial: set[str] = set()
        self.kept = 0
        self.lock = threading.RLock()
        self.unfinished: dict[int, Callable[[], Any]] = {}
        self.flying: deque[Flight] = deque()
        # Gradients that are taken once no other backward is under way here: in its thread it may add to the same ones.
        self.late: list[tuple[Leaf, Tensor]] = []
        self.recorded = self.gathering = False
        self.current = -1

    def perform(self, kind: int, i: int, tensors: tuple[Tensor | None, ...] = ()) -> list[Any]:
        """Run a collective of a unit, and those that other ranks want before it.

        Args:
            kind: of collective.
            i: the unit.
            tensors: for each leaf, for `GRADIENTS` the full gradient, for `TANGENTS` the tensor to gather.

        Returns:
            For each leaf the full tensor; for `GRADIENTS` the true gradient of this rank's shard, averaged over ranks
            and unscaled, `None` where no rank has one.
        """
        begin = partial(self.collectives.begin_scatter if kind == GRADIENTS else self._gather, i, tensors)
        return self._perform(kind, i, begin)

    def reduce_later(self, i: int, fulls: tuple[Tensor | None, ...], wanted: list[bool]) -> None:
        """Reduce-scatter a unit's gradients while backward goes on.

        They are added to `p.grad` when the next reduce-scatter begins, and at the end of backward: one is under way,
        whose buffers are the price.

        Args:
            i: the unit.
            fulls: the full gradient of each leaf.
            wanted: for each leaf, whether this backward adds its gradient to `p.grad`.
        """

        def begin() -> Callable[[], None]:
            self.flying.append(Flight(i, self.collectives.begin_scatter(i, fulls), wanted))
            return lambda: None

        self._perform(GRADIENTS, i, begin)

    def land(self) -> None:
        """Wait for the reduce-scatters under way, and take their gradients."""
        with interrupts_held(), self.lock:
            while self.flying:
                flight = self.flying.popleft()
                with outside_inference_mode(), torch.no_grad():
                    shards = flight.wait()
                self._take(flight.unit, [g if it else None for g, it in zip(shards, flight.wanted, strict=True)])

    def alone(self) -> bool:
        """Whether no other backward than this thread's is running here."""
        mine = graph_task()
        return all(task == mine or alive() is None for task, alive in self.unfinished.items())

    def _perform(self, kind: int, i: int, begin: Callable[[], Callable[[], Any]]) -> Any:
        # Ctrl-C waits: one between two lines of the protocol would leave this rank at another place of it.
        with interrupts_held(), self.lock:
            if kind == PARAMETERS:
                self.current, self.gathering = i, True
                # One that was prefetched and passed over is not expected any more.
                self.gathered.finish_prefetched()
            elif kind == GRADIENTS:
                self.land()
            try:
                found = self.protocol.perform(kind, i, begin)
            finally:
                self.gathering = False
            if kind == GRADIENTS:
                self.kept += 1
                if not self.protocol.together:
                    self.partial.update(leaf.path for leaf in self.units[i])
            return found

    def go_on(self, i: int, prefetched: bool = False) -> None:
        """Tell that a unit is used that was prefetched, or that is here; the next one may be prefetched then."""
        if i == self.current and not prefetched:
            return
        self.current = i
        if self.prefetch:
            with interrupts_held(), self.lock:
                self.protocol.go_on((PARAMETERS if prefetched else AGAIN, i))

    def _kind_of_pass(self) -> tuple[int, ...]:
        """Where a pass begins, and which units need no collective then."""
        mode = IN_BACKWARD if in_backward() else RECORDED if self.recorded else UNRECORDED
        return mode, *self.gathered.live

    def rest(self, place: int = CALL, told: Callable[[], Sequence[int]] = tuple, ends: bool = True) -> list[list[int]]:
        """This rank has nothing more to send: join others' collectives until every rank waits here (`Rounds.rest`)."""
        with interrupts_held(), self.lock:
            self.current = -1
            return self.protocol.rest(place, told, ends)

    def meet(self, what: str) -> str:
        """Wait until all ranks have come to the same line; see `Rounds.meet`."""
        number = zlib.crc32(what.encode())
        # Ranks in different backwards have not: their gradients differ.
        with interrupts_held(), self.lock:
            return self.protocol.meet(lambda: number * COUNTED + self.kept % COUNTED)

    def _begin_early(self, kind: int, i: int) -> bool:
        """Begin an all-gather of parameters before they are used. Return whether it was begun."""
        if not self.prefetch or kind != PARAMETERS or i in self.gathered or self.gathered.coming:
            return False
        self._prefetch(i)
        return True

    def _prefetch(self, i: int) -> None:
        # At most two units are full: the one that comes, and one gathered now. What computes has its own tensors.
        self.gathered.drop(ALIVE - 1 - self.gathering)
        with outside_inference_mode(), torch.no_grad():
            self.gathered.coming[i] = self._gather(i)

    def _join(self, kind: int, i: int) -> Callable[[], object]:
        """Begin a collective that only other ranks want. Return a function that waits for it."""
        nothing: tuple = (None,) * len(self.units[i])
        with outside_inference_mode(), torch.no_grad():
            if kind == GRADIENTS:
                return partial(self._accept, i, self.collectives.begin_scatter(i, nothing))
            if kind == PARAMETERS:
                if self._begin_early(kind, i):
                    # What others use now this rank mostly uses soon.
                    return lambda: None
                self.gathered.drop(ALIVE - 1)
            return self._gather(i, nothing if kind == TANGENTS else ())

    def _accept(self, i: int, end: Callable[[], list[Tensor | None]]) -> None:
        """Wait for a reduce-scatter that only other ranks wanted, and keep this rank's shards of the gradients."""
        with outside_inference_mode(), torch.no_grad():
            self.land()
            self.kept += 1
            self._take(i, end())

    def _take(self, i: int, shards: list[Tensor | None]) -> None:
        """Take gradients of this rank's shards that autograd does not bring to `p.grad`."""
        with outside_inference_mode(), torch.no_grad():
            self.late += [(leaf, g) for leaf, g in zip(self.units[i], shards, strict=True) if g is not None]
            if self.late and self.alone():
                self.accept_late()

    def accept_late(self) -> None:
        """Take the gradients that waited until no other backward was running here."""
        with interrupts_held(), self.lock:
            late, self.late = self.late, []
            for leaf, g in late:
                self.accept(leaf, g)

    def _gather(self, i: int, tensors: tuple[Tensor | None, ...] = ()) -> Callable[[], list[Tensor]]:
        """Begin an all-gather of a unit: of its parameters, or of `tensors`, with zeros for `None`."""
        parts = self.gathered.parts[i]
        if tensors:
            mine = [torch.zeros_like(part) if x is None else x for part, x in zip(parts, tensors, strict=True)]
        else:
            self.gathered.store_writes(i)
            with torch.DisableTorchFunctionSubclass():
                mine = list(map(Tensor.detach, parts))
        return self.collectives.begin_gather(i, mine)


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Leaves `torch.inference_mode`, for tensors that outlive the call: training cannot use inference tensors.

    Training may next use a unit that an evaluation has gathered, and a rank that waits between two calls gets
    gradients in whatever mode it is.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


# ----------------------------------------------------------------------------------------------------------------------
# `Rests` is the join: a finished rank keeps joining others' collectives, after a call, after a backward, and at a step
# (cf. torch's Join).


KEPT = "how much of their gradients has come since they were last cleared"


class Rests:
    """Joins other ranks' collectives for one attached model, until every rank has nothing more to send.

    Args:
        rounds: its collectives.
        gathered: its gathered units.
        write_back: stores what forward writes into gathered copies.
    """

    def __init__(self, rounds: UnitRounds, gathered: GatheredUnits, write_back: WriteBack):
        self.rounds, self.gathered, self.write_back = rounds, gathered, write_back

    def after_call(self) -> None:
        """Join after a call of the model: other ranks may still be in theirs."""
        if not in_backward():
            # A backward follows a call that was recorded.
            self.rounds.rest(CALL, ends=not torch.is_grad_enabled())
            self.write_back.check()

    @uncompiled
    def after_backward(self, *_: object) -> None:
        """Join at the end of the running backward, if there is one: other ranks' backwards may take longer."""
        task = graph_task()
        if task == NO_BACKWARD or task in self.rounds.unfinished:
            return

        def rest() -> None:
            self.rounds.unfinished.pop(task, None)
            self.rounds.land()
            # The end of a nested backward is the middle of the outer one.
            if not after_this_node(self.after_backward):
                # A checkpoint repeats forward, and what forward writes.
                self.gathered.store_all_writes()
                self.rounds.rest(BACKWARD, ends=not self.rounds.unfinished)
                if self.rounds.late and not self.rounds.unfinished:
                    self.rounds.accept_late()
                self.write_back.check()

        # The engine drops its functions when a backward has ended, or has raised: then `rest` is not called, and what
        # is under way is taken, as torch leaves in `p.grad` what came before the error.
        self.rounds.unfinished[task] = weakref.ref(rest, lambda _: self.rounds.land())
        at_end_of_backward(rest)

    def marks(self) -> dict[str, int]:
        """The numbers that must be equal on all ranks at a step, by name.

        They find a rank that has cleared gradients in the middle of the others' micro-step: it has dropped its shards
        of sums that the others still have.
        """
        return {KEPT: self.rounds.kept, **self.write_back.marks()}

    def at_step(self, told: Callable[[], Sequence[int]]) -> list[list[int]]:
        """Join until all ranks are at a step. Return the numbers that each rank sends."""
        # What forward has written into a copy is looked for when the copy is freed.
        self.gathered.drop()
        self.rounds.unfinished.clear()
        if self.rounds.flying:
            self.rounds.land()
        if self.rounds.late:
            self.rounds.accept_late()
        rows = self.rounds.rest(STEP, told)
        self.write_back.sums.clear()
        return rows

    def after_failed_backward(self) -> None:
        """Join for a backward that raised on this rank: the others may still be in theirs.

        A backward that ended has joined already; a second join would wait for ranks that never come to it.
        """
        if self.rounds.unfinished:
            self.rounds.unfinished.clear()
            self.rounds.rest(BACKWARD)


# ----------------------------------------------------------------------------------------------------------------------
# Parameters are gathered when they are used, freed when the next ones are, and gathered again in backward.
#
# A *unit* is the parameters that are gathered together (`units.split`). Two units have full parameters at a time: the
# one in use, and the next.
#
# What an operation saves of a full parameter for backward is a note, from which backward gathers the unit again. So no
# full parameter outlives its use and nothing is computed twice. No storage is resized to free a tensor that user code
# may hold: a later use would read memory that is gone.


class Faces(Protocol):
    """Converts gradients of an attached model between flat shards and the tensors that user code has of them."""

    def gradient(self, leaf: Leaf, g: Tensor | None) -> Tensor | None: ...
    def shard(self, leaf: Leaf, x: Tensor | None) -> Tensor | None: ...
    def local(self, p: Tensor) -> Tensor: ...


class Units:
    """The sharded parameters of one attached model, or of one evaluation of a function, and what gathers them.

    Args:
        plans: which leaves are gathered together, and how.
        pipe: a pipeline with a `shard`.
        params: this rank's shards by path.
        control: a group on which ranks tell each other what they want.
        scale: the current loss scale.
        accept: takes a shard's gradient from a reduce-scatter that only other ranks wanted.
        prefetch: whether the unit that is expected next is gathered before it is used.
        sums_by_themselves: whether ranks agree on each reduce-scatter alone.
        shown: by path, the tensors that the graph of a gather leads to: the shards themselves, or what a model has in
            their place.
        faces: converts gradients between shards and what leads to them; `None` where those are the shards.

    Attributes:
        suspended: inside `opt.gathered()`: the model's parameters are full ones and are used as they are.
        left: the model is detached.
    """

    def __init__(
        self,
        plans: UnitPlans,
        pipe: Pipeline,
        params: Leaves,
        control: Group,
        scale: Callable[[], Tensor | None],
        accept: Callable[[Leaf, Tensor], None],
        prefetch: bool = True,
        sums_by_themselves: bool = False,
        shown: Leaves | None = None,
        faces: Faces | None = None,
    ):
        self.plans, self.units, self.blocks = plans, plans.units, plans.blocks
        self.shown, self.faces = params if shown is None else shown, faces
        self.inputs = [[self.shown[leaf.path] for leaf in unit] for unit in plans.units]
        self.collectives = UnitCollectives(plans, params, scale)
        self.pipe, self.params = pipe, params
        write_back = WriteBack(params, plans.wire.span, pipe.road.exact)
        self.forward_writes = ForwardWrites(self.units, write_back)
        self.gathered = GatheredUnits(self.units, self.blocks, params, self.forward_writes)
        # By unit and place in it: how often a parameter has changed.
        self.age = self.gathered.age
        self.rounds = UnitRounds(control, self.collectives, self.gathered, accept, prefetch, sums_by_themselves)
        self.rests = Rests(self.rounds, self.gathered, write_back)
        self.suspended = self.left = False

    def look(self, path: str, keep: bool) -> Tensor:
        """A full parameter, differentiable; with `keep`, each call returns the same tensor until its unit is freed."""
        i, j = self.plans.place[path]
        if self.suspended:
            whole = self.shown[path]
            with torch.DisableTorchFunctionSubclass():
                stored = whole.view_as(whole) if self.faces is None else self.faces.local(whole)
            return stored.to(self.pipe.dtypes.of(self.units[i][j]).param_dtype or stored.dtype)
        if functorch_active():
            # A transform of torch.func in forward takes it for a constant, as it does a plain parameter.
            with beneath_functorch():
                return self.look(path, keep)
        gathered = self.gathered
        with self.rounds.lock:
            self.rounds.recorded = torch.is_grad_enabled()
            found = gathered.seen.get(i) if keep else None
            if found is None:
                # The same tensor in every mode, as a parameter is.
                with outside_inference_mode(), torch.enable_grad():
                    found = GatherUnit.apply(self, i, PARAMETERS, *self.inputs[i])
                self.forward_writes.give(i, found)
                if keep:
                    gathered.seen[i] = found
            elif i in gathered.live:
                gathered.live.move_to_end(i)
                self.rounds.go_on(i)
            return found[j]

    def gather_alone(self, path: str) -> Tensor:
        """A full parameter in the stored dtype, for code outside of the model; differentiable."""
        return GatherUnit.apply(self, self.plans.alone[path], PARAMETERS, self.shown[path])[0]

    def parameters(self, i: int) -> list[Tensor]:
        """The unit's full parameters in the compute dtype, gathered now if they are not here."""
        with self.rounds.lock:
            prefetched = i in self.gathered.coming
            found = self.gathered.get(i)
            if found is None:
                self.gathered.drop(ALIVE - 1)
                with self._sending():
                    found = self.rounds.perform(PARAMETERS, i)
                self.gathered.put(i, found)
            else:
                self.rounds.go_on(i, prefetched)
            return found

    def parameter(self, i: int, j: int, age: int) -> Tensor:
        """One full parameter, for a graph that was recorded when the parameter had changed `age` times.

        Raises:
            RuntimeError: it has changed since. Autograd has no version to compare here.
        """
        with self.rounds.lock:
            if age != self.age(i, j):
                raise RuntimeError(
                    explain(
                        "backward through a graph from before the parameters were updated",
                        "under shard they are gathered again, and are no longer those of forward",
                        "all backwards of a graph before opt.step() or a change by hand, or the forward again after it",
                    )
                )
            if i not in self.gathered.live:
                return self.parameters(i)[j]
            # Its age told of writes into this one; writes into its neighbours are found where those are used.
            self.gathered.live.move_to_end(i)
            found = self.gathered.live[i][j]
            self.rounds.go_on(i)
            return found

    def lazies(self, i: int) -> list[Lazy]:
        """The unit's full parameters as tensors that are gathered when something is computed with them."""
        dtypes = self.plans.plan(i).dtypes
        metas = (torch.empty(leaf.shape, dtype=dtypes[leaf.path], device="meta") for leaf in self.units[i])
        return [Lazy(self, (i, j), meta) for j, meta in enumerate(metas)]

    def tangents(self, i: int, shards: tuple[Tensor | None, ...]) -> list[Tensor]:
        """Full tensors, gathered from shards that are laid out like the unit's parameters."""
        if self.faces is not None:
            shards = tuple(map(self.faces.shard, self.units[i], shards))
        with self._sending():
            return self.rounds.perform(TANGENTS, i, shards)

    def gradients(self, i: int, fulls: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """True gradients of this rank's shards, averaged over ranks and unscaled, from full ones."""
        with self._sending():
            found = self.rounds.perform(GRADIENTS, i, fulls)
        return found if self.faces is None else list(map(self.faces.gradient, self.units[i], found))

    def reduced_later(self, node: Any, fulls: tuple[Tensor | None, ...]) -> bool:
        """Reduce the gradients of a node's unit while backward goes on, if nothing needs them before its end.

        Autograd needs them now where it returns them (`torch.autograd.grad`), and where a leaf has hooks. A leaf that
        is updated in backward has a hook of ours.
        """
        shown = self.inputs[node.i]
        if any(map(has_hooks, shown)):
            return False
        # A leaf that was frozen here alone has no node: others' gradients of it are taken all the same.
        wanted = reaches(leads_to for leads_to, _ in node.next_functions)
        if wanted is None:
            return False
        with self._sending():
            if not self.rounds.alone():
                # What another backward adds to the same `p.grad` would come in between.
                return False
            self.rounds.reduce_later(node.i, fulls, wanted)
        return True

    def _sending(self) -> AbstractContextManager[Any]:
        """The context of each collective."""
        if self.left:
            raise RuntimeError(
                explain(
                    "backward through a graph from before opt.detach()",
                    "under shard parameters are gathered again, and this rank has no parts of them any more",
                    "all backwards of a graph before opt.detach(), or the forward again after it",
                )
            )
        self.rests.after_backward()
        return outside_inference_mode()

    @contextmanager
    def updating(self, path: str) -> Iterator[None]:
        """Inside, one leaf is updated alone, in backward."""
        with self.rounds.lock, updating(self.gathered, {self.plans.place[path], (self.plans.alone[path], 0)}):
            yield

    def end_of_call(self) -> None:
        """Forget the tensors that a call of the model was given: from its end on they belong to its graph alone."""
        with self.rounds.lock:
            self.gathered.store_all_writes()
            self.gathered.seen.clear()
        if not self.suspended:
            self.rests.after_call()


BATCHED = explain(
    "torch.autograd.grad(..., is_grads_batched=True), or vectorize=True, by parameters under shard",
    "gradients are averaged over ranks in backward, for which torch.distributed has no batching rule",
    "[torch.autograd.grad(y, params, v, retain_graph=True) for v in vectors]; by inputs alone it works",
)


class GatherUnit(Function):
    """Gathers shards to full parameters, as the model sees them; its derivative is `ScatterUnit`."""

    @staticmethod
    def forward(units: Units, i: int, kind: int, *shards: Tensor | None) -> tuple[Tensor, ...]:
        if kind == PARAMETERS and i >= units.blocks:
            return tuple(units.lazies(i))
        fulls = units.parameters(i) if kind == PARAMETERS else units.tangents(i, shards)
        # Not views: torch refuses to use one of several views after a write into another.
        return tuple([full.data for full in fulls])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.units, ctx.i, ctx.kind = inputs[:3]
        ctx.set_materialize_grads(False)
        if ctx.kind == PARAMETERS:
            # A leaf that is frozen for this call is marked too, since its neighbours in the unit need gradients: its
            # gradient would be dropped here, and taken by the ranks that only join this backward.
            trained = ctx.needs_input_grad[3:]
            ctx.mark_non_differentiable(*(x for x, needed in zip(output, trained, strict=True) if not needed))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> Any:  # type: ignore[override]
        # Parameters have no dimension for vmap: torch asks only whether there is a rule.
        raise RuntimeError(BATCHED)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gs: Tensor | None) -> tuple:  # type: ignore[override]
        check_alone(ctx.units.units[ctx.i], gs)
        units: Units = ctx.units
        # Without a node where nobody would differentiate it.
        plain = untracked()
        if plain and ctx.kind == PARAMETERS and units.reduced_later(ctx, gs):
            return (None,) * (3 + len(gs))
        found = units.gradients(ctx.i, gs) if plain else ScatterUnit.apply(units, ctx.i, *gs)
        # What other ranks have of a leaf that was frozen here alone: autograd drops it.
        for leaf, g, needed in zip(units.units[ctx.i], found, ctx.needs_input_grad[3:], strict=True):
            if g is not None and not needed:
                late = g if units.faces is None else units.faces.shard(leaf, g)
                assert late is not None
                units.rounds.late.append((leaf, late.detach()))
        return None, None, None, *found


class ScatterUnit(Function):
    """Reduces cotangents of full parameters to true gradients of shards; its derivative is `GatherUnit`."""

    @staticmethod
    def forward(units: Units, i: int, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(units.gradients(i, gs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.units, ctx.i = inputs[0], inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *gs: Tensor | None) -> tuple:  # type: ignore[override]
        if ctx.units.faces is None:
            check_alone(ctx.units.units[ctx.i], gs)
        return None, None, *GatherUnit.apply(ctx.units, ctx.i, TANGENTS, *gs)


def check_alone(unit: list[Leaf], gs: tuple[Tensor | None, ...]) -> None:
    """Refuse cotangents that no collective can send: batches of `vmap`, and sparse tensors."""
    if all_plain(gs):
        return
    there = {leaf.path: g for leaf, g in zip(unit, gs, strict=True) if g is not None}
    if any(map(is_batch, there.values())):
        raise RuntimeError(BATCHED)
    check_dense(there)


# ----------------------------------------------------------------------------------------------------------------------
# Autograd saves a note of where a full parameter came from in place of the full parameter.
#
# So no full parameter outlives its use: backward gathers it again. At the end of a block's call its graph is walked,
# and full parameters among saved tensors are exchanged for notes (`Walks`). Saved-tensor hooks around the call would
# do so at once, but under such hooks torch refuses `torch.func.grad`, `vjp` and `jacrev`. Where the user has such
# hooks around the call, of a checkpoint or of `save_on_cpu`, torch refuses these anyway. Ours are then put inside of
# them (`noting`), or a checkpoint would hold all parameters that it recomputes. torch runs only the hooks that were
# entered last, so ours pass tensors that are no parameters on to the user's.
#
# Saved tensors that no walk reaches stay full parameters, and are freed with the graph: the numbers are right, and
# memory holds them longer. These are tensors of a loss that a block keeps in an attribute, of writes into views of
# activations that multiply by a parameter, and of C++ nodes. Where another module than its own computes with a
# parameter, it is saved until that module's call ends.


# Above every number of an autograd node.
NEVER = 1 << 64
_FIRST = itemgetter(0)


class Note(NamedTuple):
    """What is saved in place of a full parameter or of a view of it: which one, its age, the sizes of the view."""

    source: Units
    age: int
    unit: int
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def note_of(source: Units, t: Tensor) -> Note | None:
    """The note for a saved tensor; `None` if it is not a full parameter."""
    found = None if type(t) is not Tensor else source.gathered.origin(t)
    if found is None:
        return None
    return Note(source, source.age(*found), *found, tuple(t.size()), tuple(t.stride()), int(t.storage_offset()))


@uncompiled
def _unpack(note: Note) -> Tensor:
    with torch.no_grad():
        full = note.source.parameter(note.unit, note.index, note.age)
    return full.as_strided(note.size, note.stride, note.offset)


@uncompiled
def _pack_inside(source: Units, pack: Callable[[Tensor], Any], t: Tensor) -> Any:
    """A saved-tensor hook inside of the user's `pack`, which gets all tensors that are not full parameters."""
    note = note_of(source, t)
    return pack(t) if note is None else note


@uncompiled
def _unpack_inside(source: Units, unpack: Callable[[Any], Tensor], saved: Any) -> Tensor:
    return _unpack(saved) if isinstance(saved, Note) and saved.source is source else unpack(saved)


def noting(source: Units) -> AbstractContextManager:
    """A context in which full parameters of `source` are saved as notes at once, if the user has saved-tensor hooks."""
    outer = saved_tensors_hooks()
    if outer is None:
        return contextlib.nullcontext()
    pack, unpack = partial(_pack_inside, source, outer[0]), partial(_unpack_inside, source, outer[1])
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _Call(NamedTuple):
    """A running call of a block.

    Attributes:
        module: the block.
        start: the number of the first autograd node that may be made in it.
        inner: for each ended call inside of it, in order: the number of its first node, the number behind its last
            one, and the older nodes that its graph leads to.
    """

    module: Any
    start: int
    inner: list[tuple[int, int, list[Any]]]


class Walks:
    """The running calls of blocks in one thread. The graph of each is walked when the call ends.

    Args:
        source: gathers parameters.
    """

    def __init__(self, source: Units):
        self.source = source
        self.open: list[_Call] = []

    def begin(self, module: Any) -> None:
        """Record that a call begins."""
        # Where there are hooks, `noting` has made the notes already.
        self.open.append(_Call(module, next_sequence_nr() if saved_tensors_hooks() is None else NEVER, []))

    def end(self, module: Any, outputs: Iterable[Tensor]) -> None:
        """Walk the graph of a call that has ended. An exception has ended calls inside of it that are still open."""
        while self.open:
            call = self.open.pop()
            if call.module is module:
                break
        else:
            return
        if call.start == NEVER:
            return
        older = self._walk(call, [innermost(t).grad_fn for t in outputs])
        if self.open:
            self.open[-1].inner.append((call.start, next_sequence_nr(), older))

    def _walk(self, call: _Call, nodes: list[Any]) -> list[Any]:
        """Make notes at all nodes of a call, beginning at its outputs. Return the older nodes that they lead to."""
        starts = list(map(_FIRST, call.inner))
        older: list[Any] = []
        # Nodes are kept: the id of one that is gone may be given to another.
        seen: dict[int, Any] = {}
        passed: set[int] = set()
        while nodes:
            node = nodes.pop()
            if node is None or id(node) in seen:
                continue
            seen[id(node)] = node
            number = sequence_nr(node)
            if number < call.start:
                older.append(node)
                continue
            k = bisect_right(starts, number) - 1
            if k >= 0 and number < call.inner[k][1]:
                # Of a call inside, which was walked.
                if k not in passed:
                    passed.add(k)
                    nodes += call.inner[k][2]
                continue
            for saved in saved_by(node):
                self._exchange(saved)
            nodes += map(_FIRST, node.next_functions)
        return older

    def _exchange(self, saved: Any) -> None:
        t = saved.data
        # What hooks have packed is no tensor. One that was written into since is left to torch, which compares
        # versions where there are no hooks, and refuses a backward with other numbers than forward's.
        if not isinstance(t, Tensor) or (note := note_of(self.source, t)) is None or version(t):
            return
        with contextlib.suppress(RuntimeError):
            # Torch refuses it where the user's hooks return what they are given.
            saved.register_hooks(lambda _: note, _unpack)
