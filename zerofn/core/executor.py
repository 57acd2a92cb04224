"""The update halves of a chain, run over a tree: segments, buckets, holding.

A chain is cut into stretches. One begins where a transform must see the whole tree (a norm, a
search for overflow); everything up to the next such place treats leaves alone and is run bucket by
bucket, so its temporaries are one bucket large however big the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._ranges import UPDATE, listener, ranged, told
from .facts import Scope
from .held_metrics import report_held, standing
from .layout import Leaves
from .segments import Stretch
from .transform import Transform, TransformState
from .tree import flatten, select
from .update_context import Context, Prepared

# Bytes of parameters in one bucket: large enough that Python's cost per bucket vanishes, small enough
# that a clipped copy of it does not show beside the states.
BUCKET_BYTES = 1 << 22
# Of buckets without temporaries, which could be of all leaves: but gradients are held until their bucket is done.
WITHOUT_COPIES = 8
WIDEST = 8  # bytes of a float64


def run(
    parts: Sequence[Stretch], grads: Leaves, states: dict[str, TransformState], params: Leaves, ctx: Context
) -> tuple[Leaves | None, dict[str, TransformState], bool | Tensor]:
    """One micro-step through the update halves.

    Returns what leaves the chain (new parameters once an optimizer has run, `None` when held), the
    new states, and whether something was emitted: a 0-d bool tensor where Python may not branch.
    """
    signal: Leaves = grads
    emitted: bool | Tensor = True
    if ctx.donate and len(parts) > 1:
        # A schedule that fails must do so before the first write, so that a state is whole after an error. The first
        # stretch is prepared as a whole before any of it is run.
        for part in (part for later in parts[1:] for part in later.given):
            if part.facts.optimizes and part.scope is Scope.LEAF:
                part.prepare_fn(states[part.name], None, params, replace(ctx, metrics={}))
    for i, here in enumerate(parts):
        segment = Segment(here, states, params, ctx, signal, emitted)
        ctx = segment.ctx
        signal = segment.feed(signal, params)
        segment.close()
        states, emitted = segment.states(emitted)
        if segment.held:
            report_held(segment.behind, states, params, ctx)
            for later in parts[i + 1 :]:
                report_held(later.given, states, params, ctx)
            return None, states, False
    return signal, states, emitted


class Segment:
    """One run of a stretch.

    Its transforms decide once, when it is made. Then it is fed: with all leaves, which go through in buckets, with
    some, or with one as backward brings it. Each leaf once, in any order; its new state is laid over the old one.

    Args:
        parts: the stretch.
        states: of these transforms and others, by name.
        params: stored parameters of all leaves that it may be fed with.
        ctx: of the step.
        grads: what the first looks at.
        emitted: whether something has come, where only a tensor knows.

    Attributes:
        held: whether nothing goes on to the right.
    """

    def __init__(
        self,
        parts: Stretch,
        states: dict[str, TransformState],
        params: Leaves,
        ctx: Context,
        grads: Leaves | None = None,
        emitted: bool | Tensor = True,
    ):
        self.given, self.ctx, self.leaves, self.stretch = states, ctx, len(params), parts
        self.emitted = emitted
        first, self.old = parts.parts[0], parts.states(states) if parts.joined else states
        self.whole = first.scope is Scope.WHOLE
        if grads is not None and first.facts.watches:
            grads = {**params, **grads}
        # Asked once: to enter a range that nobody is told of takes longer than much of what is in it.
        self.told = told()
        self.prepared: list[Prepared] = []
        self.held = False
        # To a member of a group comes what comes to the group.
        self.comes = comes = ctx.comes if emitted is True else emitted
        for part in parts.parts:
            look = grads if part is first and part.scope is not Scope.LEAF else None
            # What keeps no state, such as the norm among the metrics, may have no entry.
            given = self.old.get(part.name, {}), look, params, ctx if comes is True else self._told_of(part, comes)
            self.prepared.append(_ranged(part, ctx, part.prepare_fn, *given) if self.told else part.prepare_fn(*given))
            if ctx.donate_to_kernels and not isinstance(self.prepared[-1].emit, bool):
                # What follows is chosen between old and new for each member.
                self.ctx = ctx = replace(ctx, donate_to_kernels=False)
            self.held = self.prepared[-1].emit is False
            if self.held:
                break
            if self.prepared[-1].emit is not True:
                comes = both(comes, self.prepared[-1].emit)
        self.parts = parts.parts[: len(self.prepared)]
        self.changed: dict[str, TransformState] = {}

    @property
    def behind(self) -> list[Transform]:
        """Those that a hold keeps from being run."""
        later = self.stretch.parts[len(self.prepared) :]
        return [p for part in later for p in self.stretch.joined.get(part.name, (part,))]

    def feed(self, signal: Leaves, params: Leaves) -> Leaves:
        """What leaves the last one for these leaves; nothing where it holds.

        Args:
            signal: gradients; a leaf may have none.
            params: stored parameters of the leaves.
        """
        found = [list(params)] if self.whole or len(params) == 1 else buckets(params, self._room(signal, params))
        if len(found) == 1 and len(params) == self.leaves:
            return self._bucket(signal, params, every=True)
        out: Leaves = {}
        for paths in found:
            out.update(self._bucket({p: signal[p] for p in paths if p in signal}, {p: params[p] for p in paths}))
        return out

    def _room(self, signal: Leaves, params: Leaves) -> int:
        """Bytes of parameters that go through at once: more where no temporaries come of it."""
        if self.ctx.recorded or any(part.facts.copies for part in self.parts):
            return BUCKET_BYTES
        # A kernel of one dtype makes gradients of another its own.
        alike = all(g.dtype is params[path].dtype for path, g in signal.items())
        return BUCKET_BYTES * WITHOUT_COPIES if alike else BUCKET_BYTES

    def _bucket(self, signal: Leaves, params: Leaves, every: bool = False) -> Leaves:
        emitted, comes = self.emitted, self.comes
        for part, p in zip(self.parts, self.prepared, strict=True):
            if part.facts.watches:
                # A leaf without a gradient in this step has kept its value, and that is watched too.
                signal = {**params, **signal}
            old = self.old.get(part.name, {})
            state = old if every or self.whole else {k: slice_entry(v, params) for k, v in old.items()}
            ctx = self.ctx if comes is True else self._told_of(part, comes)
            given = part, signal, state, params, p.carry, ctx
            out, own = updated(*given) if self.told else part.update_fn(*given[1:])
            if own is not state:
                _merge(self.changed.setdefault(part.name, {}), own, old)
            if p.emit is False or out is None:
                return {}
            signal = out
            if not isinstance(p.emit, bool):
                # A window that closes in a step which is skipped has the sum of the steps before.
                emitted, comes = p.emit if emitted is True else emitted & p.emit, both(comes, p.emit)
                signal = passed(emitted, out)
        return signal

    def _told_of(self, part: Transform, comes: bool | Tensor) -> Context:
        """What a transform is told where only a tensor knows whether anything comes to it."""
        return replace(self.ctx, comes=comes, standing=standing(part, self.old.get(part.name, {})))

    def close(self) -> None:
        """All leaves have been fed."""
        for p in self.prepared:
            if p.close is not None:
                p.close()

    def states(self, emitted: bool | Tensor = True) -> tuple[dict[str, TransformState], bool | Tensor]:
        """All states that it was given, with the new ones of its transforms, and whether something goes on.

        Args:
            emitted: whether something has come. What lies to the right of a hold that only a tensor knows of is
                computed and then chosen.
        """
        new = dict(self.old)
        for part, p in zip(self.parts, self.prepared, strict=True):
            if changed := {**self.changed.get(part.name, {}), **p.state}:
                old = new[part.name]
                merged = {**old, **changed}
                new[part.name] = select(emitted, merged, old) if emitted is not True else merged
            emitted = emitted if p.emit is True else both(emitted, p.emit)
        return self.stretch.spread(new, self.given) if self.stretch.joined else new, emitted


def _ranged(part: Transform, ctx: Context, fn: Callable[..., Any], *given: Any) -> Any:
    with ranged(UPDATE, ctx.prefix + part.name):
        return fn(*given)


def updated(
    part: Transform, grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context
) -> tuple[Leaves | None, TransformState]:
    """What a transform's update half gives, run under its name; who listens is told what it moves."""
    with ranged(UPDATE, ctx.prefix + part.name):
        out, own = part.update_fn(grads, state, params, carry, ctx)
        if (heard := listener()) is not None:
            read, written = {"": _of(state, grads, params)}, {"": _of(own, grads, params)}
            if part.facts.optimizes and out:
                read["params"], written["params"] = [params[p] for p in out], list(out.values())
            heard.moved(ctx.prefix + part.name, read, written)
    return out, own


def _of(state: TransformState, grads: Leaves, params: Leaves) -> list[Any]:
    """What of a state is shared, or of leaves that have a gradient."""
    found: list[Any] = []
    for entry in state.values():
        by_leaf = isinstance(entry, dict) and entry.keys() <= params.keys()
        found += flatten(slice_entry(entry, grads) if by_leaf else entry)[0]
    return found


def both(emitted: bool | Tensor, emit: bool | Tensor) -> bool | Tensor:
    """Whether something goes on behind a transform: something has come to it, and it holds nothing back."""
    return emit if emitted is True else emitted & emit


def passed(emit: Tensor, signal: Leaves) -> Leaves:
    """What goes on to the right of a hold that only a tensor knows of: what is held back counts as zero there.

    It is computed all the same and not chosen. But the derivative of what is not chosen is a zero times its own, so
    that must be finite: with only the output masked, a step that a NaN has skipped has NaN for its derivative.
    """
    return {p: torch.where(emit.to(x.device), x, torch.zeros_like(x)) for p, x in signal.items()}


def slice_entry(entry: Any, paths: Iterable[str]) -> Any:
    """What of a state's entry belongs to some leaves; a shared one as it is."""
    return {p: entry[p] for p in paths if p in entry} if isinstance(entry, dict) else entry


def _merge(into: TransformState, own: TransformState, old: TransformState) -> None:
    """Lay a bucket's entries over those of the whole tree."""
    for name, entry in own.items():
        if isinstance(entry, dict) and isinstance(old.get(name), dict):
            if name not in into and list(entry) == list(old[name]):
                into[name] = entry  # of all leaves at once, in their order
            else:
                into.setdefault(name, dict(old[name])).update(entry)
        else:
            into[name] = entry


def buckets(leaves: Leaves, room: int) -> list[list[str]]:
    """Paths in their order, cut so that a bucket holds about `room` bytes."""
    if sum(map(Tensor.numel, leaves.values())) <= room // WIDEST:
        return [list(leaves)]
    found: list[list[str]] = []
    size = room
    for path, x in leaves.items():
        if size >= room:
            found.append([])
            size = 0
        found[-1].append(path)
        size += x.numel() * x.element_size()  # no `nbytes`: a compiler may take sizes for variables
    return found


def finish(signal: Leaves | None, params: Leaves, emitted: bool | Tensor) -> Leaves:
    """The new parameters after a run: none where it was held; where only a tensor knows, chosen between new and old."""
    return {} if signal is None else {p: select(emitted, new, params[p]) for p, new in signal.items()}
