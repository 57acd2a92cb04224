"""Takes gradients as they arrive, and keeps them until a step takes them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .._compat.autograd import NO_BACKWARD, gradient_hooks, graph_task, has_hooks, hooks_after
from .._compat.functorch import uncompiled
from .._compat.tensors import read_grad, write_grad
from .._errors import explain
from .._interrupts import interrupts_held
from ..core.bucketed_views import Like
from ..core.layout import Leaf, Leaves, as_complex
from ..core.pipeline import Pipeline
from ..core.returned_values import check_readable
from ..core.view import pull
from ..ranks.collectives import gather_numbers
from ..sharded.gather_on_use import Units
from ..sharded.reducer import Stream, UnclearedGradients
from .channels import Channels, reduction
from .in_backward import InBackward
from .resident_params import OwnGradients
from .step_agreement import MARKS, StepAgreement

if TYPE_CHECKING:
    from ..module.complex_parameters import ComplexParameters
    from ..module.sharded_parameter import ModelFaces
from .stored_parameters import StoredParameters

# ----------------------------------------------------------------------------------------------------------------------
# Hooks take each gradient as it arrives: they reduce it, update its leaf at once, or leave it in `p.grad`.
#
# Under `reduce_scatter` and `all_reduce` gradients are reduced during backward. With `in_backward=True` each leaf is
# updated at once. Otherwise gradients stay in `p.grad`.


# Every step reads these of every gradient, so they are C functions.
_DTYPE, _NDIM = attrgetter("dtype"), attrgetter("ndim")


@uncompiled
def _hand_over(arrivals: weakref.ref[GradientHooks], path: str, p: Tensor) -> None:
    """Call `hand_over`, if the hooks are still alive."""
    to = arrivals()
    if to is not None:
        to.hand_over(path, p)


class GradientHooks:
    """Hooks on the parameters of one attached model, and where its gradients are until a step.

    Args:
        pipe: its pipeline.
        params: its parameters by path, in their resident form.
        shown: by path, the parameters that the model has, whose gradients these are.
        faces: converts gradients of parameters that are DTensors, or complex.
        channels: its process groups.
        in_backward: updates leaves as their gradients arrive, if the model was attached so.
        store_writes: stores writes by hand into a parameter, before its update.
        undo: gets the functions that remove the hooks.

    Attributes:
        reduced: reduced gradients by path.
        taken: the gradients that a step was given; empty once it has used them. A step that raises may be repeated.
        held: gradients, by path, to which other ranks' backward may still add.
        units: gathers sharded parameters on use; set once it is made.
        stream: reduces gradients as they arrive; `None` where they stay, or are used, without a reduction.
        forms: dtype and shape of reduced gradients by path.
        flat: for each bucket of the stream, the numbers of elements of its reduced gradients if all are flat, as shards
            are, and of one dtype; else `None`.
    """

    def __init__(
        self,
        pipe: Pipeline,
        params: Leaves,
        shown: Leaves,
        faces: ModelFaces | ComplexParameters | None,
        channels: Channels,
        in_backward: InBackward | None,
        store_writes: Callable[[str], object],
        undo: list[Callable[[], object]],
    ):
        self.shown, self.faces = shown, faces
        self.pipe, self.params, self.in_backward, self.store_writes = pipe, params, in_backward, store_writes
        self.reduced: Leaves = {}
        self.taken: Leaves = {}
        self.held: Leaves = {}
        self.units: Units | None = None
        self.stream = self._stream(channels)
        kept = () if self.stream is None else pipe.layout.trainable
        self.forms = {leaf.path: (pipe.dtypes.gradient(leaf), pipe.road.stored_shape(leaf)) for leaf in kept}
        self.flat = [self._lengths(paths) for paths in (() if self.stream is None else self.stream.paths)]
        if self.stream is None and self.in_backward is None:
            return
        # torch does not show these hooks to the garbage collector: a strong reference would keep a dropped model alive.
        mine: weakref.ref[GradientHooks] = weakref.ref(self)
        # Gradients of plain parameters go to the stream as they are.
        straight = self.stream if faces is None else None
        for leaf in pipe.layout.trainable:
            hook = functools.partial(_hand_over, mine, leaf.path) if straight is None else straight.hook(leaf.path)
            with torch.DisableTorchFunctionSubclass():
                undo.append(shown[leaf.path].register_post_accumulate_grad_hook(hook).remove)

    def _stream(self, channels: Channels) -> Stream | None:
        """The stream that reduces gradients in buckets, if the first update half is a reduction."""
        pipe = self.pipe
        view = reduction(pipe)
        if view is None or view.wire is None or channels.more is None:
            return None
        wire, group = view.wire, channels.groups[pipe.groups.index(view.wire.group)]
        # The order is reversed, since backward first reaches the parameters that forward used last.
        leaves = pipe.layout.trainable[::-1]
        like = {
            leaf.path: Like(p.numel(), tuple(p.shape), pipe.dtypes.summed(leaf), p.device)
            for leaf in leaves
            for p in [self.params[leaf.path]]
        }
        on = wire.on(group, wire.reduce_dtype)
        check = functools.partial(check_readable, stored=self.params)
        return Stream(on, channels.more, leaves, like, check, self._take, MARKS, view.name)

    def _lengths(self, paths: Sequence[str]) -> list[int] | None:
        forms = [self.forms[path] for path in paths]
        alike = len({dtype for dtype, _ in forms}) == 1 and all([len(shape) == 1 for _, shape in forms])
        return [shape[0] for _, shape in forms] if alike else None

    def left(self) -> bool:
        """Whether gradients of this micro-step have been taken out of `p.grad` to be reduced."""
        return self.stream is not None and (bool(self.reduced or self.taken) or not self.stream.idle)

    def gone(self) -> bool:
        """Whether gradients of this micro-step have been taken out of `p.grad`, to be reduced or used."""
        return self.left() or (self.in_backward is not None and self.in_backward.under_way is not None)

    def local(self, path: str, g: Tensor) -> Tensor:
        """This rank's part of a gradient, flat if it is sharded."""
        return g if self.faces is None else self.faces.mine(path, g)

    def hand_over(self, path: str, p: Tensor) -> None:
        """Take the gradient that autograd has added to `p.grad`. Ctrl-C waits until it is where it goes."""
        if self.stream is None and self.units is None:
            # It is used at once, by an update that holds signals as long as it writes.
            self._hand_over(path, p)
            return
        with interrupts_held():
            try:
                self._hand_over(path, p)
            except (KeyboardInterrupt, SystemExit):
                # A second Ctrl-C is not held.
                if self.stream is not None:
                    self.stream.broken = True
                raise

    def _hand_over(self, path: str, p: Tensor) -> None:
        grad = read_grad(p)
        if grad is None:
            # No rank has used this leaf of a gathered unit.
            return
        write_grad(p, None)
        grad = self.local(path, grad).detach()
        if self.in_backward is not None and self.units is not None and path in self.units.schedule.partial:
            self._hold(path, grad)
        else:
            self._pass_on(path, grad)

    def accept(self, leaf: Leaf, g: Tensor, hooks: bool) -> None:
        """Take the gradient of a shard that autograd does not bring to it.

        Args:
            leaf: of the parameter.
            g: of this rank's shard.
            hooks: whether to run hooks on the parameter, as autograd does on the ranks whose backward has reduced it.
        """
        p = self.shown[leaf.path]
        if self.faces is not None:
            g = self.faces.gradient(leaf, g)  # type: ignore[assignment]
        if self.in_backward is not None and self.units is not None:
            self.units.schedule.partial.add(leaf.path)
        _add(p, g, hooks and has_hooks(p))

    def release(self) -> None:
        """Release the held gradients: all ranks are at a step, so they are complete."""
        for leaf in self.pipe.layout.leaves if self.held else ():
            if leaf.path in self.held:
                self._pass_on(leaf.path, self.held.pop(leaf.path))
        if self.units is not None:
            self.units.schedule.partial.clear()

    def forget(self) -> None:
        """Drop gradients that are here. The stream drops those that are being reduced."""
        if self.units is not None:
            self.units.schedule.partial.clear()
            self.units.schedule.drop()
            self.units.unfrozen.clear()
        self.held.clear()
        self.reduced.clear()
        self.taken = {}

    def _pass_on(self, path: str, grad: Tensor) -> None:
        if self.stream is not None:
            self.stream.arrived(*self.stream.home[path], grad)
        elif self.in_backward is not None:
            self._use(self.in_backward, path, grad)

    def _use(self, to: InBackward, path: str, grad: Tensor) -> None:
        check_readable({path: grad}, self.params)
        self.store_writes(path)
        to.arrived(path, grad)

    def _hold(self, path: str, grad: Tensor) -> None:
        """Keep a gradient until all ranks are at a step, because nothing can be added to one that was used.

        The end of this backward would be too early: a rank that evaluates alone runs its backward after the others'.
        """
        old = self.held.get(path)
        self.held[path] = grad if old is None else old.add_(grad)

    def _take(self, i: int, grads: Sequence[Tensor | None]) -> None:
        """Take the reduced gradients of a bucket from the stream; those of several backwards add up."""
        assert self.stream is not None
        road, reduced, leaves, paths = self.pipe.road, self.reduced, self.stream.buckets[i].leaves, self.stream.paths[i]
        lengths = self.flat[i] if self.in_backward is None else None
        if lengths is not None and NoneType not in set(map(type, grads)) and reduced.keys().isdisjoint(paths):
            # If no gradient needs a cast or another shape, C functions take all of them.
            given = cast("Sequence[Tensor]", grads)
            uncast = road.behind_reduction or set(map(_DTYPE, given)) == {self.forms[paths[0]][0]}
            if uncast and set(map(_NDIM, given)) == {1} and list(map(Tensor.numel, given)) == lengths:
                reduced.update(zip(paths, given, strict=True))
                return
        for leaf, g in zip(leaves, grads, strict=True):
            if g is None:
                continue
            dtype, shape = self.forms[leaf.path]
            if not road.behind_reduction and g.dtype != dtype:
                # As in the pure route, a gradient keeps the dtype of the reduction until a view has pulled it.
                g = g.to(dtype)
            if g.shape != shape:
                g = g.reshape(shape)
            if self.in_backward is not None:
                self._use(self.in_backward, leaf.path, pull(road.behind_reduction, g, leaf).to(dtype))
                continue
            reduced[leaf.path] = reduced[leaf.path].add_(g) if leaf.path in reduced else g


def _add(p: Tensor, g: Tensor, hooks: bool) -> None:
    """Add a gradient to `p.grad`, with the hooks that autograd would run if there are `hooks`."""
    if not hooks:
        with torch.DisableTorchFunctionSubclass():
            before = read_grad(p)
            if before is None:
                write_grad(p, g)
                return
        write_grad(p, before.add_(g))
        return
    for hook in list(gradient_hooks(p).values()):
        given = hook(g)
        g = g if given is None else given
    # Hooks run on the new gradient alone: they have run on the one in `p.grad` already.
    before = read_grad(p)
    write_grad(p, g)
    for hook in list(hooks_after(p).values()):
        hook(p)
    after = read_grad(p)
    if before is not None:
        write_grad(p, before if after is None else before.add_(after))


# ----------------------------------------------------------------------------------------------------------------------
# A `MicroStep` ends a micro-step of an attached model: it collects the gradients or drops them, on all ranks.


class MicroStep(OwnGradients):
    """Ends the micro-steps of one attached model.

    Args:
        hooks: bring its gradients.
        agreement: compares numbers of ranks at a step.
        stored_params: the stored form of parameters that are copies.
        refresh: writes the parameters again from the state, after a step that was given up half done.

    Attributes:
        uncleared: what torch would keep in `p.grad` between steps, where gradients are taken out of it.
    """

    def __init__(
        self,
        hooks: GradientHooks,
        agreement: StepAgreement,
        stored_params: StoredParameters,
        refresh: Callable[[], None],
    ):
        super().__init__(hooks.pipe, hooks.shown, stored_params)
        self.hooks, self.agreement, self.faces = hooks, agreement, hooks.faces
        self.current, self.refresh = stored_params.current, refresh
        self.uncleared = UnclearedGradients(self._zero)

    def _zero(self, path: str) -> Tensor:
        dtype, shape = self.hooks.forms[path]
        return self.current.state.leaves[path].new_zeros(shape, dtype=dtype)

    def collect(self, boundary: bool | None, given: str) -> Leaves:
        """The gradients of this micro-step, once ranks have compared what must be equal."""
        if self.stored_params.watched:
            self.stored_params.store_writes()
        agreement, units, stream = self.agreement, self.hooks.units, self.hooks.stream
        if agreement.control is None:
            return self.grads()
        marks_with = functools.partial(
            agreement.marks, int(self.current.state.micro_step), boundary, given, False, self.current.torn
        )
        if units is None:
            marks = marks_with()
        else:
            rows, marks, grads = self._at_rest(units, marks_with)
            if stream is None and units.schedule.protocol.control.ranks == agreement.control.ranks:
                # All ranks that step together were in that exchange.
                return agreement.checked(rows, marks, grads)
            marks = agreement.shared(rows, marks)
        if stream is not None:
            return self._reduced(stream, marks)
        grads = self.grads()
        rows = gather_numbers(agreement.numbers(grads, marks), agreement.control)
        return agreement.checked(rows, marks, grads)

    def _at_rest(
        self, units: Units, marks_with: Callable[..., dict[str, int]]
    ) -> tuple[list[list[int]], dict[str, int], Leaves]:
        """The numbers of all ranks, this one's marks and its gradients, once no rank gathers or reduces any more."""
        grads: Leaves = {}
        marks: dict[str, int] = {}

        def numbers() -> list[int]:
            # The schedule calls this again after each collective that this rank joins, which may bring gradients.
            nonlocal grads, marks
            grads, marks = self.grads(), marks_with(units.schedule.marks())
            return self.agreement.numbers(grads, marks)

        rows = units.schedule.at_step(numbers)
        if self.hooks.held or units.schedule.partial:
            self.hooks.release()
        return rows, marks, grads

    def _reduced(self, stream: Stream, marks: dict[str, int]) -> Leaves:
        """The gradients that the stream has reduced, once it has compared marks with its last message."""
        hooks, agreement = self.hooks, self.agreement
        if set(map(type, map(read_grad, self.trainable.values()))) != {NoneType}:
            for path, p in self.trainable.items():
                if read_grad(p) is not None:
                    # The user has put this gradient there.
                    hooks.hand_over(path, p)
        wholes = agreement.wholes
        # An update within backward is a write too, so there ranks have exchanged it before the first update.
        noticed = stream.finish_reductions(marks, wholes is not None and hooks.in_backward is None and wholes.noticed())
        if wholes is not None and (noticed or wholes.before):
            wholes.compare()
        rest, grads = self.pipe.road.behind_reduction, hooks.reduced
        grads = self.pipe.road.pull(rest, grads, self.current.state.leaves) if rest else grads
        if hooks.taken:
            # A step that took these has raised. Gradients that have arrived since are added, as in torch.
            old = hooks.taken
            grads = {**old, **{path: old[path] + g if path in old else g for path, g in grads.items()}}
        hooks.taken, hooks.reduced = grads, {}
        grads = self.uncleared.take(grads)
        # Gradients came in the order of backward and of buckets, and a transform may pair lists by position.
        return {path: grads[path] for path in self.trainable if path in grads}

    def go_on_from(self, before: OwnGradients) -> None:
        """Take over gradients of this micro-step: the model is hooked anew."""
        assert isinstance(before, MicroStep)
        self.hooks.taken = before.hooks.taken
        self.uncleared, self.uncleared.zero = before.uncleared, self._zero
        if self.hooks.units is not None and before.hooks.units is not None:
            self.hooks.units.unfrozen = before.hooks.units.unfrozen

    def bring_unfrozen(self, paths: Collection[str]) -> None:
        """Bring the gradients of these leaves, which are trained from now on, to `p.grad`. All ranks call it."""
        if self.hooks.units is not None:
            self.hooks.units.reduce_unfrozen(paths)

    def mean(self, path: str) -> Tensor | None:
        """The mean over ranks of a gradient that has left, in full, between backwards; zeros if no rank has one.

        All ranks call it. `None` if it is used already, or is a mean over some of the ranks so far.

        Raises:
            RuntimeError: it is called in the middle of a backward; or ranks read other gradients, or are at a step.
        """
        hooks, stream, road = self.hooks, self.hooks.stream, self.pipe.road
        wires = sum([view.wire is not None for view in self.pipe.stages])
        if stream is None or not hooks.left() or hooks.in_backward is not None or wires > 1 or path not in stream.home:
            return None
        if graph_task() != NO_BACKWARD:
            wrong = f"a copy of p.grad of the parameter {path} in the middle of a backward"
            raise RuntimeError(explain(wrong, "gradients are still arriving", "p.grad.clone() behind loss.backward()"))
        with interrupts_held(), torch.no_grad():
            i, j = stream.home[path]
            read = 2 + sum(stream.sizes[:i]) + j
            stream.settle(self.agreement.marks(int(self.current.state.micro_step), None, dropped=read))
            leaf, own = stream.buckets[i].leaves[j], {**hooks.taken, **hooks.reduced}.get(path)
            dtype, shape = hooks.forms[path]
            mine = self.current.state.leaves[path].new_zeros(shape, dtype=dtype) if own is None else own
            if road.behind_reduction:
                mine = pull(road.behind_reduction, mine, leaf)
            wire = stream.wire
            if wire.cuts:
                _, rows = wire.send_parts([mine.reshape(-1)], [leaf])
                (mine,) = wire.join_parts(rows, [leaf])
            full = mine.reshape(leaf.shape)
            return full.clone() if leaf.complex is None else as_complex(full, leaf).clone()

    def used(self) -> None:
        """A step has used the gradients that it was given, which have left `p.grad`."""
        if self.hooks.taken:
            self.hooks.taken, self.uncleared.used = {}, True

    def gone(self) -> bool:
        """Whether gradients have left `p.grad`, to be reduced or used, and are not cleared yet."""
        return self.hooks.gone() or self.uncleared.used

    def accumulated(self) -> None:
        """The gradients in `p.grad` are cleared: a sum has them, or they were used and are dropped."""
        self.uncleared.clear(to_none=True)

    def clear(self, to_none: bool = True) -> None:
        """Forget the gradients of this micro-step.

        With `in_backward=True` some leaves are updated already: the step is given up half done (`eager.in_backward`).
        """
        self.uncleared.clear(to_none, self.hooks.reduced)
        self.give_up_backward()
        self.forget(always=False)

    def cleared(self, to_none: bool = True) -> None:
        """Record that the user has cleared gradients by hand, or by `model.zero_grad()`."""
        if self.hooks.units is not None:
            self.hooks.units.schedule.kept = 0
        self.uncleared.clear(to_none)

    def give_up_backward(self) -> None:
        """Leave a backward that an exception has stopped on this rank; other ranks may still be in theirs."""
        units = self.hooks.units
        if units is not None:
            units.schedule.after_failed_backward()
            units.schedule.kept = 0

    def forget_all(self) -> None:
        """Forget the gradients of this micro-step, also those that another rank reduces."""
        if self.hooks.stream is not None:
            self.forget(always=True)

    def forget(self, always: bool) -> None:
        """Forget the gradients of this micro-step.

        Args:
            always: wait for reductions even if this rank has begun none, since another rank may have.
        """
        hooks = self.hooks
        if hooks.in_backward is not None:
            self._give_up(hooks.in_backward, always)
            return
        if hooks.stream is not None and (always or not hooks.stream.idle):
            hooks.stream.discard(self._dropped())
        hooks.forget()

    def _dropped(self) -> dict[str, int]:
        """The marks of a micro-step that is given up."""
        return self.agreement.marks(int(self.current.state.micro_step), None, dropped=True)

    def _give_up(self, step: InBackward, always: bool) -> None:
        """End a step in backward without counting it.

        Gradients that are still being reduced are used: other ranks may have used theirs already.
        """
        stream = self.hooks.stream
        step.closing = True
        try:
            self.hooks.release()
            if stream is not None and (always or not stream.idle):
                self.stored_params.store_writes()
                stream.broken = False
                stream.finish_reductions(self._dropped())
        finally:
            step.closing = False
        if step.under_way is not None:
            step.give_up()
            self.refresh()
