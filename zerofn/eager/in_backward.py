"""The update in backward: each leaf is updated as soon as its gradient has arrived, and the gradient is freed.

On a GPU, where the host needs longer for a leaf's launches than the device, leaves wait for each other until their
gradients have `TOGETHER` bytes, or backward ends; under `shard` until the next all-gather, which has the updates of all
gradients before it on all ranks; and those whose reduction ends after backward, until the step ends.

Every update half must treat leaves alone. The user asks for it by an argument, and no pipeline implies it: an
exception half-way through backward leaves some leaves updated and others not, and `p.grad` is never seen. Ctrl-C
comes between two leaves.

After such an exception and `zero_grad()` training can go on. Leaves that were updated keep their new values, their
moments and their own counts of updates, which correct the moments; the others are unchanged. Counters that all leaves
share, of steps and so of schedules, do not count the step, so the next step has the same learning rate. No
accumulation window is half applied, since no transform that accumulates is allowed here. A gradient that had arrived
on any rank is used on all. If only some ranks fail under `shard`, shards of one leaf may differ by that update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from .._compat.autograd import at_end_of_backward, in_backward
from .._errors import explain
from .._interrupts import Writing
from ..core.context import Context
from ..core.executor import GRAD_NORM, Segment, stretch
from ..core.facts import Scope
from ..core.pipeline import Pipeline
from ..core.state import State, StateUnderWay
from ..core.survey import effect
from ..core.transform import Transform
from ..core.update import refuse_capture
from .current_state import CurrentState

_BYTES = attrgetter("nbytes")
# Gradients on a GPU wait for each other until they have this many bytes, by which the peak may be higher.
TOGETHER = 1 << 25


def leafwise_updates(pipe: Pipeline) -> tuple[Transform, ...]:
    """The update halves of a pipeline, checked to run leaf by leaf within backward.

    Raises:
        ValueError: one cannot; it is named, with the reason.
    """
    parts = tuple(p for p in pipe.updates if p is not GRAD_NORM)
    if sum(view.resident for view in pipe.stages) > 1:
        why = "within backward a gradient is reduced once, and this chain reduces it twice"
        right = "attach(model, chain(shard(...), all_reduce(...), ...), in_backward=True)"
        raise ValueError(explain("attach(in_backward=True) with reduce_scatter and all_reduce", why, right))
    owned = {name for name, _, _ in pipe.layout.placement.owners}
    for part in parts:
        for where, inner in _members(part, part.name):
            if reason := _reason(inner, part.name in owned):
                raise ValueError(
                    explain(
                        f"attach(model, chain(..., {where}, ...), in_backward=True)",
                        f"{inner.name} {reason}, but in backward each leaf is updated and its gradient freed at once",
                        f"attach without in_backward, or a pipeline without {inner.name}; clip_by_value treats "
                        "leaves alone",
                    )
                )
    return parts


def _members(part: Transform, where: str) -> Iterator[tuple[str, Transform]]:
    """The transforms that may update a leaf in `part`, each with its place in words."""
    if part.in_turn or part.members_fn is not None:
        for inner in part.parts:
            yield from _members(inner, where if inner.in_turn else f"{where}({inner.name})")
    else:
        yield where, part


def _reason(part: Transform, owned: bool) -> str | None:
    if names := (*part.facts.wants, *dict(part.facts.wants_largest)):
        return f"computes with the {names[0]} of the step, which opt.step() is given"
    if part.facts.holds:
        return "keeps gradients for a later step"
    if part.scope is Scope.TREE and effect(part).unscaled_by:
        return "must look at every gradient for overflow before anything is updated"
    if part.scope is Scope.TREE:
        return "needs a number of the whole gradient"
    if part.scope is Scope.WHOLE:
        return "needs whole leaves, which travel to their owners together" if owned else "treats the tree as a whole"
    return None


class InBackward:
    """Updates each leaf of one attached model in backward; a step then closes what backward began.

    Args:
        pipe: a pipeline of leafwise updates.
        current: the current state.
        context: returns the context of a step; called once per step.

    Attributes:
        updating: entered around the update of these leaves. Their gathered copies become out of date.
        updated: called with the paths of leaves that were updated.
    """

    def __init__(self, pipe: Pipeline, current: CurrentState, context: Callable[[], Context]):
        self.pipe, self.parts = pipe, stretch(leafwise_updates(pipe))
        self.current, self.context = current, context
        self.ctx: Context | None = None
        self.under_way: Segment | None = None
        # The pending copies into the state from before the step.
        self.copies: tuple[Any, ...] = ()
        self.done: set[str] = set()
        # Gradients of leaves that are updated together.
        self.waiting: dict[str, Tensor] = {}
        self.updating: Callable[[Iterable[str]], AbstractContextManager[None]] = lambda paths: nullcontext()
        self.updated: Callable[[Iterable[str]], object] = lambda paths: None
        # Whether the step is being given up: a second gradient of a leaf that still arrives is then dropped.
        self.closing = False

    def arrived(self, path: str, grad: Tensor) -> None:
        """Update one leaf, or let it wait for others. Ctrl-C comes between two leaves.

        Raises:
            RuntimeError: it has been updated since the last `step`.
        """
        with torch.no_grad():
            self._begin(path, grad)
            if path in self.done or path in self.waiting:
                return
            self.waiting[path] = grad
            if not grad.is_cuda or sum(map(_BYTES, self.waiting.values())) >= TOGETHER:
                self._update()
            elif len(self.waiting) == 1 and in_backward():
                # A gradient that arrives outside of backward, as from the last reductions, waits for the step's end.
                at_end_of_backward(self.update)

    def _begin(self, path: str, grad: Tensor) -> None:
        """Begin the step with its first gradient; refuse a second gradient of a leaf."""
        if path in self.done or path in self.waiting:
            if self.closing:
                return
            raise RuntimeError(
                explain(
                    f"a second gradient of {path} before opt.step(), with in_backward=True",
                    "the first gradient has been used and freed, so the second cannot be added to it",
                    "one backward for each step (add the losses), or attach without in_backward;\n"
                    "opt.zero_grad() after a backward that was interrupted: leaves that it has updated stay so",
                )
            )
        state = self.current.state
        if self.under_way is None:
            self.current.check("loss.backward() with in_backward=True")
            if grad.is_cuda:
                refuse_capture()
            self.ctx = self.context()
            leaves = {path: state.leaves[path] for path in state.layout.trained}
            self.copies = state.copies_on_device()
            with torch.set_grad_enabled(self.ctx.looks):
                self.under_way = Segment(self.parts, state.arriving, leaves, self.ctx)

    def update(self) -> None:
        """Update the leaves that wait."""
        if self.waiting:
            with torch.no_grad():
                self._update()

    def _update(self) -> None:
        """Update leaves; with autograd in a step that checks whether users' functions take tensors from elsewhere."""
        grads, self.waiting = self.waiting, {}
        if not grads or self.under_way is None:
            return
        stored, ctx = {path: self.current.state.leaves[path] for path in grads}, self.under_way.ctx
        written = ctx.written
        assert isinstance(written, Writing)
        with written:
            try:
                with self.updating(grads):
                    with torch.set_grad_enabled(ctx.looks):
                        new = self.under_way.feed(grads, stored)
                    for path, x in new.items():
                        if x is not stored[path]:
                            written.add("")
                            stored[path].copy_(x)
            except BaseException:
                if written:
                    self.current.tear()
                raise
            self.done.update(grads)
            self.updated(grads)

    def wait_for_copies(self) -> None:
        """Wait for the copies into the state that updates so far have begun."""
        if self.ctx is not None:
            self.ctx.wait_for_copies()

    def finish(self) -> dict[str, Tensor]:
        """Close the step: write the counters and the leaves' state entries. Return its metrics."""
        self.update()
        state = self.current.state
        if self.ctx is None or self.under_way is None:
            raise ValueError(
                explain(
                    "a step in which no parameter has a gradient",
                    "no backward ran since the last step",
                    "loss.backward() before opt.step()",
                )
            )
        try:
            with torch.no_grad():
                for leaf in state.layout.trainable:
                    if leaf.path not in self.done:
                        self.under_way.feed({}, {leaf.path: state.leaves[leaf.path]})
                self.under_way.close()
            copies = self.ctx.begun_copies(self.copies)
        except BaseException:
            # Leaves have new values and counters old ones.
            self.current.tear()
            raise
        transforms, _ = self.under_way.states()
        if self.ctx.looks:
            self.pipe.looked()
        step = state.step + 1
        made = StateUnderWay if copies else State
        self.current.state = made(state.leaves, transforms, step, state.micro_step + 1, state.layout, copies)
        metrics = {
            "updated": torch.tensor(True),
            "step": step.clone(),
            "skipped": torch.tensor(False),
            **self.ctx.metrics,
        }
        self.forget()
        return metrics

    def give_up(self) -> None:
        """Close the step without counting it. A leaf that was updated keeps its update, its moments and its count."""
        if self.under_way is None:
            return
        # Other ranks may have updated the waiting leaves, so this rank does so too.
        self.update()
        state = self.current.state
        self.wait_for_copies()
        found, _ = self.under_way.states()
        old = state.transforms
        kept = {n: {slot: _by_leaf(old[n][slot], x, self.done) for slot, x in own.items()} for n, own in found.items()}
        self.forget()
        self.current.state = replace(state, transforms=kept)

    def forget(self) -> None:
        """Drop the step that has begun."""
        self.ctx = self.under_way = None
        self.done.clear()
        self.waiting.clear()


def _by_leaf(old: Any, new: Any, paths: set[str]) -> Any:
    """A state entry with the new tensors of these leaves. Shared tensors are those of before the step."""
    if not isinstance(new, dict):
        return old
    return {key: x if key in paths else _by_leaf(old[key], x, paths) for key, x in new.items()}
