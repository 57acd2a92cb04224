"""Where an attached model's parameters live: the stored form, the resident form, and the way between them.

On one process the parameters of the model are the stored ones. Under `reduce_scatter` and `all_reduce` the
model keeps full parameters, whose gradients are streamed during backward, and which are gathered
again after an update. Under `shard` its parameters are flat shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._compat import uncompiled
from ..core.agreement import agree_on_start
from ..core.executor import counter
from ..core.gradients import check_readable
from ..core.pipeline import Pipeline
from ..core.state import State
from ..core.transform import Context
from ..core.tree import Leaf, Leaves
from ..core.views import Like, cut
from ..module.boundary import Sight
from ..module.forward_hooks import install, needs_sight
from ..module.guards import label
from ..ranks.group import Group
from ..ranks.process_groups import channel, joint_channel
from ..sharded.agreement_on_rounds import agree_on
from ..sharded.gather_on_use import Units
from ..sharded.guarded_parameter import Asks, read, write
from ..sharded.reducer import Stream
from ..sharded.rests import KEPT
from ..sharded.uncleared_gradients import Uncleared
from ..sharded.units import split
from ..sharded.write_back import WRITTEN
from .in_backward import InBackward
from .master_weights import Copies
from .written_by_hand import Wholes

# What must be equal on all ranks at every step.
MARKS = ("the number of steps", "what closes a window", "step() or zero_grad()", KEPT, WRITTEN)


class Residence:
    """The parameters of one attached model.

    Args:
        model: the model.
        pipe: its pipeline.
        params: its parameters by path, each once.
        context: of a step, where the update is to run within backward.
        unchanged: raises if the model is no longer what was attached.
    """

    def __init__(
        self,
        model: nn.Module,
        pipe: Pipeline,
        params: dict[str, Tensor],
        context: Callable[[], Context] | None,
        unchanged: Callable[[], None],
    ):
        self.model, self.pipe, self.params = model, pipe, params
        agree_on_start(pipe, params)
        self.groups: tuple[Group, ...] = ()
        self.control: Group | None = None
        if pipe.groups:
            self.groups = tuple(channel(g) for g in pipe.groups)
            self.control = joint_channel(pipe.groups)
        # By path: the dtype that gradients were to have, where it was not the parameter's own.
        self.grad_dtypes: dict[str, torch.dtype | None] = {}
        stored = {leaf.path: self._settle_in(leaf, params[leaf.path]) for leaf in pipe.layout.leaves}
        self.state = State(stored, pipe.init_transforms(stored), counter(), counter(), pipe.layout)
        self.reduced: Leaves = {}
        self.uncleared = Uncleared(self._zero)
        self.held: Leaves = {}
        self.undo: list[Callable[[], Any]] = []
        self.in_backward = None if context is None else InBackward(pipe, lambda: self.state, context)
        self.stream = self._stream()
        if self.stream is None and self.in_backward is not None:
            for leaf in pipe.layout.leaves:
                if leaf.trainable:
                    p = params[leaf.path]
                    hook = functools.partial(self._hand_over, leaf.path)
                    self.undo.append(p.register_post_accumulate_grad_hook(hook).remove)
        # Modules whose parameters are gathered.
        self.blocks: list[nn.Module] = []
        self.units = self._units()
        self.sight: Sight | None = None
        if needs_sight(pipe):
            paths = {id(p): path for path, p in params.items()}
            self.sight = Sight(pipe, self.scale, self.units, model, unchanged)
            self.undo.append(install(model, self.sight, paths, self.blocks))
        asks = Asks(self._left, self._gone, self._cleared, self.uncleared.missed)
        self.undo += label(model, pipe, params, self.units, self.in_backward is not None, asks)
        self.copies = Copies(pipe, params, lambda: self.state.leaves)
        self.wholes = Wholes(pipe, params, self.control if context is None else None)
        if not pipe.exact:
            # What the model keeps is what is stored, seen; where that loses something it is not what was attached.
            self.refresh()

    def _left(self) -> bool:
        """Whether gradients of this micro-step have left to be reduced."""
        return self.stream is not None and (bool(self.reduced) or not self.stream.idle)

    def _gone(self) -> bool:
        """Whether gradients of this micro-step are no longer where they were put."""
        return self._left() or (self.in_backward is not None and self.in_backward.under_way is not None)

    def _cleared(self, to_none: bool = True) -> None:
        """The user has cleared gradients by hand, or by `model.zero_grad()`."""
        if self.units is not None:
            self.units.rounds.kept = 0
        self.uncleared.clear(to_none)

    def _zero(self, path: str) -> Tensor:
        leaf = next(leaf for leaf in self.pipe.layout.leaves if leaf.path == path)
        stored = self.state.leaves[path]
        return stored.new_zeros(self.pipe.stored_shape(leaf), dtype=self.pipe.dtypes.gradient(leaf))

    def scale(self) -> Tensor | None:
        """The loss scale in force."""
        return self.pipe.scale_of(self.state.transforms)

    def _settle_in(self, leaf: Leaf, p: Tensor) -> Tensor:
        """Give a parameter its resident form, and return the stored one, over the same memory where it can be."""
        pipe = self.pipe
        full = p.detach()
        wide = full.to(pipe.dtypes.stored(leaf))
        resident, later = pipe.kept(wide, leaf), pipe.stages[pipe.cut :]
        if pipe.sharded_use:
            resident = resident.clone()
        if any(stage.only_dtype for stage in later):
            resident = resident.to(pipe.dtypes.of(leaf).param_dtype or resident.dtype)
        if not dense(resident) or (pipe.cut < len(pipe.stages) and not resident.is_contiguous()):
            resident = resident.contiguous()
        was = p.grad_dtype
        if was != p.dtype:
            self.grad_dtypes[leaf.path] = was
        p.data = resident
        if leaf.trainable:
            wanted = pipe.resident_grad_dtype(leaf)
            keep_grads_in(p, wanted)
        if resident.dtype != wide.dtype or any(stage.wire is None and not stage.only_dtype for stage in later):
            return pipe.store(full, leaf).clone(memory_format=torch.contiguous_format)
        if pipe.sharded_use:
            # A graph gathers shards anew and knows their age otherwise; writes of `p` are to be the user's alone.
            return resident.detach()
        # Of `p` and not of `resident`: what a step writes into the one is counted as written into the other.
        return p.detach() if pipe.sharding is None else pipe.sharding.store(p.detach(), leaf)

    def _stream(self) -> Stream | None:
        """Hooks that hand gradients over as they arrive, where the first update half is a reduction."""
        pipe = self.pipe
        wire = next((s.wire for s in pipe.stages[pipe.cut :] if s.wire is not None), None)
        if pipe.late or wire is None or self.control is None:
            return None
        group = self.groups[pipe.groups.index(wire.group)]
        # Backward reaches the parameters that forward used last, first.
        leaves = [leaf for leaf in reversed(pipe.layout.leaves) if leaf.trainable]
        like = {
            leaf.path: Like(p.numel(), tuple(p.shape), pipe.dtypes.summed(leaf), p.device)
            for leaf in leaves
            for p in [self.params[leaf.path]]
        }
        control = joint_channel(pipe.groups)
        stream = Stream(wire.on(group, wire.reduce_dtype), control, leaves, like, self._take, MARKS)
        for leaf in leaves:
            p = self.params[leaf.path]
            self.undo.append(p.register_post_accumulate_grad_hook(functools.partial(self._hand_over, leaf.path)).remove)
        return stream

    @uncompiled
    def _hand_over(self, path: str, p: Tensor) -> None:
        grad = read(p)
        if grad is None:
            # A leaf of a gathered unit that no rank used.
            return
        write(p, None)
        grad = grad.detach()
        check_readable({path: grad}, {path: p})
        if self.in_backward is not None and self.units is not None and path in self.units.rounds.partial:
            self._hold(path, grad)
        else:
            self._pass_on(path, grad)

    def _pass_on(self, path: str, grad: Tensor) -> None:
        if self.stream is not None:
            self.stream.arrived(path, grad)
        elif self.in_backward is not None:
            self.in_backward.arrived(path, grad)

    def _hold(self, path: str, grad: Tensor) -> None:
        """Keep a part of a gradient until those of the other ranks' have come: what has been used is not added to."""
        old = self.held.get(path)
        self.held[path] = grad if old is None else old.add_(grad)

    def _release(self) -> None:
        """All parts have come, on all ranks."""
        for leaf in self.pipe.layout.leaves if self.held else ():
            if leaf.path in self.held:
                self._pass_on(leaf.path, self.held.pop(leaf.path))
        if self.units is not None:
            self.units.rounds.partial.clear()

    def _take(self, leaf: Leaf, g: Tensor) -> None:
        """A reduced gradient: those of several backwards add up."""
        g = g.to(self.pipe.dtypes.gradient(leaf)).reshape(self.pipe.stored_shape(leaf))
        if self.in_backward is not None:
            self.copies.carry_leaf(leaf)
            self.in_backward.arrived(leaf.path, g)
            return
        old = self.reduced.get(leaf.path)
        self.reduced[leaf.path] = g if old is None else old.add_(g)

    def _units(self) -> Units | None:
        pipe = self.pipe
        if not pipe.sharded_use or self.control is None or pipe.sharding is None:
            return None
        group = self.groups[pipe.groups.index(pipe.sharding.group)]
        units, self.blocks = split(self.model, pipe.layout.leaves, self.params)
        control = channel(pipe.sharding.group)
        return Units(
            units,
            pipe,
            self.params,
            (group, control),
            self.scale,
            self._accept,
            self._release,
            pipe.layout.leaves,
        )

    def _accept(self, leaf: Leaf, g: Tensor) -> None:
        if self.in_backward is not None:
            self._hold(leaf.path, g)
            return
        if self.stream is not None:
            self.stream.arrived(leaf.path, g)
            return
        p = self.params[leaf.path]
        p.grad = g if p.grad is None else p.grad.add_(g)

    def _marks(self, boundary: bool | None, dropped: bool, more: dict[str, int] | None = None) -> dict[str, int]:
        closes = 2 if boundary is None else int(boundary)
        marks = dict(zip(MARKS, (int(self.state.micro_step), closes, int(dropped)), strict=False))
        return marks | (more or {KEPT: 0, WRITTEN: 0})

    def collect(self, boundary: bool | None = None) -> Leaves:
        """The gradients of this micro-step, in the form the update halves take.

        Args:
            boundary: what `set_boundary` says of this step; ranks must say the same.
        """
        self.copies.carry_over()
        more = None if self.units is None else self.units.rests.at_step()
        marks = self._marks(boundary, dropped=False, more=more)
        if self.units is not None:
            self._release()
        if self.stream is not None:
            for path, p in self.params.items():
                if read(p) is not None:
                    # Put there by hand.
                    self._hand_over(path, p)
            if self.stream.settle(marks, self.wholes.noticed()):
                self.wholes.compare()
            grads, self.reduced = self.reduced, {}
            # The first of them is what streams.
            rest = tuple(s for s in self.pipe.stages[self.pipe.cut + 1 :] if not s.only_dtype)
            return self.uncleared.take(self.pipe.pull(rest, grads, self.state.leaves) if rest else grads)
        with torch.DisableTorchFunctionSubclass():
            found = ((path, read(p)) for path, p in self.params.items() if p.requires_grad)
            grads = {path: g for path, g in found if g is not None}
        if self.control is None:
            return grads
        some, noticed = agree_on((len(grads), self.wholes.noticed()), marks, self.control)
        if noticed:
            self.wholes.compare()
        return grads if some else {}

    def clear(self, to_none: bool = True) -> None:
        """Forget the gradients of this micro-step.

        Where they are used as they arrive that is too late: the step is given up half done (`eager.in_backward`).
        """
        self.uncleared.clear(to_none, self.reduced)
        self.give_up_backward()
        self._forget(always=False)

    def give_up_backward(self) -> None:
        """Take no part in a backward of this rank that did not come to its end."""
        if self.units is not None:
            self.units.rests.for_unfinished()
            self.units.rounds.kept = 0

    def _forget(self, always: bool) -> None:
        """Forget the gradients of this micro-step.

        Args:
            always: settle what is on its way also where nothing is here, for something may be elsewhere.
        """
        if self.in_backward is not None:
            self._give_up(self.in_backward, always)
            return
        if self.units is not None:
            self.units.rounds.partial.clear()
        self.held.clear()
        if self.stream is not None and (always or not self.stream.idle):
            self.stream.discard(self._marks(None, dropped=True))
        self.reduced.clear()

    def _give_up(self, step: InBackward, always: bool) -> None:
        """Use what is still on its way, or ranks that had it earlier would differ; and count no step."""
        step.closing = True
        try:
            self._release()
            if self.stream is not None and (always or not self.stream.idle):
                self.copies.carry_over()
                self.stream.settle(self._marks(None, dropped=True))
        finally:
            step.closing = False
        if step.under_way is not None:
            self.state = step.give_up()
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Resident parameters from the stored ones, one bucket at a time."""
        if self.in_backward is not None:
            # Of a step under way when a state was loaded nothing is left in what is stored.
            self.in_backward.forget()
        if self.units is not None:
            self.units.gathered.renew()
        stages = self.pipe.stages[self.pipe.cut :]
        if not stages:
            return
        leaves = self.state.leaves
        for bucket in cut(self.pipe.layout.leaves, {p: x.dtype for p, x in self.params.items()}):
            here = {leaf.path: leaves[leaf.path] for leaf in bucket}
            seen = self.pipe.see(stages, here, bucket, {leaf.path: self.params[leaf.path] for leaf in bucket})
            for path, x in seen.items():
                if x.data_ptr() != self.params[path].data_ptr():
                    self.params[path].copy_(x)
        self.copies.note()
        self.wholes.note()

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Full parameters in the model. What is written to them inside is stored afterwards."""
        if self.units is None and self.pipe.exact:
            yield self.model
            self.copies.carry_over()
            return
        parts = {path: p.data for path, p in self.params.items()}
        self._suspend(True)
        fulls = self.pipe.whole(self.state.leaves)
        # Views that lose something have no way back, so what nobody wrote into is left as it is stored.
        before = None if self.pipe.exact else {path: full.clone() for path, full in fulls.items()}
        for path, full in fulls.items():
            self.params[path].data = full
        changed = False
        try:
            yield self.model
            changed = self._write_back(before)
        finally:
            for path, p in self.params.items():
                p.data = parts[path]
            self._suspend(False)
            if self.units is not None:
                self.units.gathered.drop()
        if changed:
            self.refresh()

    def _suspend(self, on: bool) -> None:
        """Whether the model's parameters are what it sees, for a while."""
        if self.units is not None:
            self.units.suspended = on
        if self.sight is not None:
            self.sight.suspended = on

    @torch.no_grad()
    def _write_back(self, before: Leaves | None) -> bool:
        """Store what the model's full parameters hold, where it is not what it was; whether that is something new."""
        changed = False
        for leaf in self.pipe.layout.leaves:
            if before is not None and torch.equal(before[leaf.path], self.params[leaf.path]):
                continue
            mine = self.pipe.store(self.params[leaf.path].detach(), leaf)
            home = self.state.leaves[leaf.path]
            changed |= not torch.equal(mine, home)
            home.copy_(mine)
        return changed

    def leave(self) -> None:
        """Full parameters and no hooks: a plain model. Nothing of it is on its way between ranks."""
        self.copies.carry_over()
        if self.stream is not None:
            self._forget(always=True)
        if self.units is not None:
            # A gather that was begun for nobody ends before its channel is closed.
            self.units.gathered.drop()
            self.units.suspended = self.units.left = True
        for path, full in self.pipe.whole(self.state.leaves).items() if self.pipe.stages else ():
            if self.units is not None or full.dtype != self.params[path].dtype or not self.pipe.exact:
                self.params[path].data = full.detach().clone()
        for action in reversed(self.undo):
            action()
        self.undo.clear()
        for leaf in self.pipe.layout.leaves:
            p = self.params[leaf.path]
            grad = read(p)
            if grad is not None and grad.shape != p.shape:
                # A part of a gradient, to which nothing can be added any more.
                write(p, None)
            if leaf.trainable:
                keep_grads_in(p, self.grad_dtypes.get(leaf.path, p.dtype))


def keep_grads_in(p: Tensor, dtype: torch.dtype | None) -> None:
    """Let `p.grad` be kept in `dtype`; in any that comes, for `None`. What is there already is cast.

    That a gradient's dtype follows the parameter's ends once another has been set: torch has no way back, and a
    detached model that is cast afterwards (`model.float()`) wants `p.grad_dtype` set as well.
    """
    if p.grad_dtype == dtype:
        return
    grad = read(p)
    if grad is None or dtype in (None, grad.dtype):
        p.grad_dtype = dtype
        return
    # torch refuses another dtype than that of a gradient which is there.
    write(p, None)
    p.grad_dtype = dtype
    write(p, grad.to(dtype))


def dense(x: Tensor) -> bool:
    """Whether elements fill memory without gaps or overlap, in whatever order of dimensions."""
    return torch.empty_like(x, device="meta").stride() == x.stride()
