"""Hooks on gradients as they arrive: on to be reduced, into the update, or left in `p.grad`.

Under `reduce_scatter` and `all_reduce` they are reduced during backward; with `in_backward=True` each leaf is updated
at once. Otherwise they stay in `p.grad`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from .._compat.autograd import gradient_hooks, hooks_after
from .._compat.compiler import uncompiled
from ..core.coalesced_views import Like
from ..core.composed_view import pull
from ..core.gradient_checks import check_readable
from ..core.layout import Leaf, Leaves
from ..core.pipeline import Pipeline
from ..sharded.gather_on_use import Units
from ..sharded.guarded_parameter import read, write
from ..sharded.reducer import Stream
from .channels import Channels, reduction
from .in_backward import InBackward
from .step_agreement import MARKS


@uncompiled
def _hand_over(arrivals: weakref.ref[GradientHooks], path: str, p: Tensor) -> None:
    """A gradient has been added up in `p.grad`."""
    to = arrivals()
    if to is not None:
        to.hand_over(path, p)


class GradientHooks:
    """Hooks on the parameters of one attached model, and where its gradients are until a step.

    Args:
        pipe: its pipeline.
        params: its parameters by path, in their resident form.
        channels: its process groups.
        in_backward: uses gradients as they arrive, if they are to be.
        carry: stores what was written by hand into a parameter that is a copy.
        undo: is given what takes the hooks off.

    Attributes:
        reduced: reduced gradients by path.
        taken: those that a step was given; empty once it has used them, so that a step which raises may be made again.
        held: gradients, by path, to which other ranks' backward may still add.
        units: gathers sharded parameters on use; set once it is made.
        stream: reduces gradients as they arrive; `None` where they stay, or are used, as they are.
        forms: dtype and shape of reduced gradients by path.
    """

    def __init__(
        self,
        pipe: Pipeline,
        params: Leaves,
        channels: Channels,
        in_backward: InBackward | None,
        carry: Callable[[Leaf], object],
        undo: list[Callable[[], object]],
    ):
        self.pipe, self.params, self.in_backward, self.carry = pipe, params, in_backward, carry
        self.reduced: Leaves = {}
        self.taken: Leaves = {}
        self.held: Leaves = {}
        self.units: Units | None = None
        self.stream = self._stream(channels)
        kept = () if self.stream is None else pipe.layout.trainable
        self.forms = {leaf.path: (pipe.dtypes.gradient(leaf), pipe.road.stored_shape(leaf)) for leaf in kept}
        if self.stream is None and self.in_backward is None:
            return
        # torch does not show these hooks to the garbage collector: a model that is dropped would stay for ever.
        mine: weakref.ref[GradientHooks] = weakref.ref(self)
        for leaf in pipe.layout.trainable:
            hook = functools.partial(_hand_over, mine, leaf.path)
            undo.append(params[leaf.path].register_post_accumulate_grad_hook(hook).remove)

    def _stream(self, channels: Channels) -> Stream | None:
        """What puts gradients into buckets and reduces them, where the first update half is a reduction."""
        pipe = self.pipe
        view = reduction(pipe)
        if view is None or view.wire is None or channels.more is None:
            return None
        wire, group = view.wire, channels.groups[pipe.groups.index(view.wire.group)]
        # Backward reaches the parameters that forward used last, first.
        leaves = pipe.layout.trainable[::-1]
        like = {
            leaf.path: Like(p.numel(), tuple(p.shape), pipe.dtypes.summed(leaf), p.device)
            for leaf in leaves
            for p in [self.params[leaf.path]]
        }
        on = wire.on(group, wire.reduce_dtype)
        return Stream(on, channels.more, leaves, like, self._take, MARKS, view.name)

    def left(self) -> bool:
        """Whether gradients of this micro-step have been taken out of `p.grad` to be reduced."""
        return self.stream is not None and (bool(self.reduced or self.taken) or not self.stream.idle)

    def gone(self) -> bool:
        """Whether gradients of this micro-step have been taken out of `p.grad`, to be reduced or used."""
        return self.left() or (self.in_backward is not None and self.in_backward.under_way is not None)

    def hand_over(self, path: str, p: Tensor) -> None:
        """A gradient has been added up in `p.grad`."""
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

    def accept(self, leaf: Leaf, g: Tensor) -> None:
        """Take the gradient of a shard from a reduce-scatter that another rank's backward has begun.

        Hooks on the parameter are run as autograd runs them: the other ranks' are, on their rows of this gradient.
        """
        p = self.params[leaf.path]
        if self.in_backward is not None and self.units is not None:
            self.units.rounds.partial.add(leaf.path)
        _with_hooks(p, g)

    def release(self) -> None:
        """All ranks are at a step: gradients that were held are complete."""
        for leaf in self.pipe.layout.leaves if self.held else ():
            if leaf.path in self.held:
                self._pass_on(leaf.path, self.held.pop(leaf.path))
        if self.units is not None:
            self.units.rounds.partial.clear()

    def forget(self) -> None:
        """Drop gradients that are here; reductions under way are the stream's."""
        if self.units is not None:
            self.units.rounds.partial.clear()
            self.units.rounds.late.clear()
        self.held.clear()
        self.reduced.clear()
        self.taken = {}

    def _pass_on(self, path: str, grad: Tensor) -> None:
        if self.stream is not None:
            self.stream.arrived(path, grad)
        elif self.in_backward is not None:
            self._use(self.in_backward, path, grad)

    def _use(self, to: InBackward, path: str, grad: Tensor) -> None:
        """Update a leaf; what is gathered of it, by an evaluation before the step too, is of before."""
        with nullcontext() if self.units is None else self.units.updating(path):
            to.arrived(path, grad)

    def _hold(self, path: str, grad: Tensor) -> None:
        """Keep a gradient until all ranks are at a step: one that has been used cannot be added to.

        Not until the end of this backward: where one rank alone evaluates, its backward follows those of the others.
        """
        old = self.held.get(path)
        self.held[path] = grad if old is None else old.add_(grad)

    def _take(self, leaf: Leaf, g: Tensor) -> None:
        """Take a reduced gradient from the stream; those of several backwards add up."""
        dtype, shape = self.forms[leaf.path]
        if not self.pipe.road.behind_reduction:
            # What is yet to be pulled through a view keeps the dtype of the reduction until then, as in the pure route.
            g = g.to(dtype)
        g = g.reshape(shape)
        if self.in_backward is not None:
            self.carry(leaf)
            self._use(self.in_backward, leaf.path, pull(self.pipe.road.behind_reduction, g, leaf).to(dtype))
            return
        old = self.reduced.get(leaf.path)
        self.reduced[leaf.path] = g if old is None else old.add_(g)


@torch.no_grad()
def _with_hooks(p: Tensor, g: Tensor) -> None:
    """Add a gradient to `p.grad` with the hooks that autograd would run."""
    for hook in list(gradient_hooks(p).values()):
        given = hook(g)
        g = g if given is None else given
    # Alone, since hooks have been run on what is there.
    before = read(p)
    write(p, g)
    for hook in list(hooks_after(p).values()):
        hook(p)
    after = read(p)
    if before is not None:
        write(p, before if after is None else before.add_(after))
