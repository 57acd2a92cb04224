"""Runs update halves over all leaves at once, in buckets, or one leaf at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter, is_not, or_
from typing import Any, overload

import torch
from torch import Tensor

from .._compat.tensors import profiler_runs
from .._profiler_ranges import UPDATE, heard, listener, ranged, ranges_wanted
from ..kernels.joined import LOOKING, Passes
from ..kernels.lists import enough
from ..kernels.norms import added, leaf_squares, squared_norm_unrecorded, sum_of_squares
from ..kernels.program import looked_at, stands_for
from ..kernels.recording import root
from .context import Context, Prepared, WithinBucket, check_prepared
from .elementwise import Elementwise
from .facts import Facts, Scope
from .halves import Joining, joins, stored_fn_of
from .layout import Leaves
from .returned_values import CheckedUpdate, in_order
from .transform import OfTensors, Transform, TransformState, gives_parameters, nothing_to_prepare, pass_through
from .tree import Places, flatten, moved, of_leaves, overlaid, places, select

# ----------------------------------------------------------------------------------------------------------------------
# These functions group update halves into stretches, which run bucket by bucket.


@dataclass(frozen=True)
class Stretch:
    """Neighbouring transforms that run together: the first may need the whole tree, the others treat leaves alone.

    Attributes:
        parts: the transforms.
        scheduled: optimizers whose learning rates are computed before an earlier stretch writes, since that may fail.
        copies: for each of `parts`, whether it or one before it makes temporary tensors.
        keeps_old: whether a transform in it compares new parameters with old ones that another one in it overwrites.
        keeps_old_for_later: whether a transform of a later stretch does.
        joins: whether its transforms make several passes over memory, which may be joined.
        apart: each tells of a parameter whether a transform of the stretch updates that leaf without a program
            (`Joining.apart`).
    """

    parts: tuple[Transform, ...]
    scheduled: tuple[Transform, ...] = ()
    copies: tuple[bool, ...] = ()
    keeps_old: bool = False
    keeps_old_for_later: bool = False
    joins: bool = False
    apart: tuple[Callable[[Tensor], bool], ...] = ()


def stretch(parts: Iterable[Transform]) -> Stretch:
    """The stretch of these transforms."""
    parts = tuple(parts)
    writes = next((i for i, part in enumerate(parts) if gives_parameters(part)), len(parts))
    scheduled = tuple(filter(rates_alone, parts))
    copies = tuple(accumulate([part.facts.copies for part in parts], or_))
    compares = any([part.facts.compares for part in parts[writes:]])
    # The norm that metrics show rides on the pass of another.
    joining = [part for part in parts if part is not GRAD_NORM and joins(part.update_fn)]
    several = len(joining) > 1 or any([stored_fn_of(part.update_fn) is None for part in joining])
    halves = [half for part in joining if (half := joins(part.update_fn)) is not None]
    apart = tuple([half.apart for half in halves if half.apart is not None]) if several else ()
    return Stretch(parts, scheduled, copies, compares, joins=several, apart=apart)


def rates_alone(part: Transform) -> bool:
    """Whether an optimizer's `prepare_fn` can be called without gradients, for its rate."""
    leafwise = part.scope is Scope.LEAF or (part.scope is Scope.WHOLE and part.facts.rate is not None)
    return part.facts.optimizes and leafwise


def stretches(parts: Sequence[Transform]) -> tuple[Stretch, ...]:
    """The stretches of a chain: one begins where a transform must see the whole tree (a norm, an overflow)."""
    found = []
    i = 0
    while i < len(parts):
        j = i + 1
        while j < len(parts) and parts[i].scope is not Scope.WHOLE and parts[j].scope is Scope.LEAF:
            j += 1
        current = stretch(parts[i:j])
        if any(map(gives_parameters, current.parts)) and any([part.facts.compares for part in parts[j:]]):
            current = replace(current, keeps_old_for_later=True)
        found.append(current)
        i = j
    return tuple(found)


# ----------------------------------------------------------------------------------------------------------------------
# A transform that a held or skipped step does not reach still reports metrics, under the same names as in any other
# step.


def report_held(parts: Sequence[Transform], states: dict[str, Any], params: Leaves, ctx: Context) -> None:
    """Report the metrics of transforms that a held step does not reach.

    An optimizer's rate is that of the next update, if it depends on no gradient. A counter has its value in the
    transform's state, under the name of the metric; any other metric is 0. In a graph or a batch every step computes
    everything and chooses afterwards: there `Context.report` replaces values computed from zero gradients by these.

    Args:
        parts: the transforms after the one that holds.
        states: theirs, by name; not changed.
        params: their parameters, by path.
        ctx: takes the reports.
    """
    for part in parts:
        for name, value in standing(part, states.get(part.name, {}), params, ctx).items():
            ctx.report(name, value)
        if part.members_fn is not None:
            whole = len(params) == len(ctx.layout.trained)
            sublayout = ctx.layout if whole else ctx.layout.only(params.keys())
            for key, (member, paths) in part.members_by_key(sublayout).items():
                inner = {member.name: states[part.name][key]}
                own = {path: x for path, x in params.items() if path in paths}
                report_held([member], inner, own, ctx.inside(f"{part.name}.{key}"))
        elif part.in_turn:
            report_held(part.parts, states[part.name], params, ctx)
        elif rates_alone(part):
            # There are no gradients here, so an optimizer that looks at them does not run.
            part.prepare_fn(states[part.name], None, params, ctx)


def standing(part: Transform, state: TransformState, params: Leaves, ctx: Context) -> dict[str, Any]:
    """The metrics of a transform that a step does not reach: by name the counter in its state, else 0."""
    return {name: state.get(name, 0.0) for name in part.facts.reported(ctx.layout, params.keys())}


# ----------------------------------------------------------------------------------------------------------------------
# `run` applies the update halves of a chain to a tree, stretch by stretch, and each stretch bucket by bucket.
#
# A stretch begins where a transform must see the whole tree (a norm, a search for overflow). All transforms up to the
# next such place treat each leaf alone, so they run bucket by bucket. Their temporaries are then as large as one
# bucket, however big the model is.


# Bytes of parameters in one bucket: large enough that Python's cost per bucket vanishes, small enough
# that a clipped copy of it does not show beside the states.
BUCKET_BYTES = 1 << 22
# On a GPU Python takes longer for a bucket of 4 MiB than the device does. A bucket of a large tree is an eighth of it,
# so that the number of launches does not grow with the size of the model.
DEVICE_BUCKET_BYTES = 1 << 28
WIDEST = 8  # bytes of a float64
NOTHING = Prepared()
COPIED = Elementwise(torch.clone)
# Every step reads the dtype of every leaf. attrgetter does it in C, which is faster than a lambda.
_DTYPE, _IS_CPU = attrgetter("dtype"), attrgetter("is_cpu")


def run(
    parts: Sequence[Stretch], grads: Leaves, states: dict[str, TransformState], params: Leaves, ctx: Context
) -> tuple[Leaves | None, dict[str, TransformState], bool | Tensor]:
    """One micro-step through the update halves.

    Returns the result of the chain (new parameters if an optimizer has run, `None` if the step is held), the
    new states, and whether there is a result: a 0-d bool tensor where Python may not branch.
    """
    signal: Leaves = grads
    old: Leaves | None = None
    emitted: bool | Tensor = True
    waiting: list[Callable[[], None]] = []
    if ctx.donate and len(parts) > 1:
        # A schedule that fails must do so before the first write, so that the state is whole after an error. All of the
        # first stretch is prepared before any of it is run. A rate that is a number was checked when it was given.
        fixed = not (ctx.lr or ctx.numbers)
        for later in parts[1:]:
            for part in later.scheduled:
                if fixed and (type(part.facts.rate) is float or (ctx.late and isinstance(part.facts.rate, OfTensors))):
                    continue
                part.prepare_fn(states[part.name], None, params, replace(ctx, metrics={}, given={}, unread=ctx.late))
    for i, current in enumerate(parts):
        if current.keeps_old_for_later and old is None and (ctx.donate or ctx.donate_to_kernels):
            old = {path: x.clone() for path, x in params.items()}
        segment = Segment(current, states, params, ctx, signal, emitted, old)
        ctx = segment.ctx
        # These metrics are computed before this stretch writes, since a schedule among them may raise an error.
        held = _held_metrics(segment.behind, parts[i + 1 :], states, params, ctx) if segment.held else {}
        signal = segment.feed(signal, params)
        closing, waiting = [*waiting, *segment.closing], []
        if segment.closing and not segment.held and _rides_on(parts[i + 1 :], segment.prepared):
            closing, waiting = waiting, closing
        if LOOKING:
            LOOKING[-1].prepares(GRAD_NORM.name)
        for close in closing:
            close()
        states, emitted = segment.states(emitted)
        if segment.held:
            for name, x in held.items():
                ctx.metrics.setdefault(name, x)
            return None, states, False
    return signal, states, emitted


def _rides_on(later: Sequence[Stretch], prepared: Sequence[Prepared]) -> bool:
    """Whether an optimizer comes next, on whose pass norms of the gradients ride that are wanted before it."""
    return bool(later) and later[0].parts[0].facts.optimizes and not any([x.carries_state for x in prepared])


def _held_metrics(
    behind: Sequence[Transform],
    later: Sequence[Stretch],
    states: dict[str, TransformState],
    params: Leaves,
    ctx: Context,
) -> dict[str, Tensor]:
    """The metrics of transforms that a held step does not reach."""
    ctx = replace(ctx, metrics={}, given={}, unread=ctx.late)
    for parts in (behind, *[stretch.parts for stretch in later]):
        report_held(parts, states, params, ctx)
    return ctx.metrics


class Segment:
    """One run of a stretch.

    Its transforms are prepared once, when it is made. Then it is fed with all leaves, which it updates in buckets, or
    with some, or with one leaf when backward brings its gradient. Each leaf is fed once, in any order.

    Args:
        parts: the stretch.
        states: of these transforms and others, by name.
        params: stored parameters of all leaves that it may be fed with.
        ctx: the step's context.
        grads: the gradients that the first transform gets.
        emitted: whether updates reach the stretch; a tensor in a graph or a batch.
        before: copies of the parameters from before the step, if an earlier stretch may have overwritten them.

    Attributes:
        held: whether a transform of the stretch has held the step.
        closing: what its transforms call after all leaves were fed.
    """

    def __init__(
        self,
        parts: Stretch,
        states: dict[str, TransformState],
        params: Leaves,
        ctx: Context,
        grads: Leaves | None = None,
        emitted: bool | Tensor = True,
        before: Leaves | None = None,
    ):
        self.before = before
        # An update in place would overwrite the old parameters, which a transform behind it compares with.
        self.copies_old = parts.keeps_old and before is None and (ctx.donate or ctx.donate_to_kernels)
        self.ctx, self.params, self.stretch = ctx, params, parts
        self.emitted = emitted
        self.bucket_ctx: Context | None = None
        first, self.old = parts.parts[0], states
        self.whole = first.scope is Scope.WHOLE
        if grads is not None and first.facts.watches:
            grads = {**params, **grads}
        # Entering a profiler range that nobody records can take longer than the update in it.
        self.listened = ranges_wanted() if ctx.recorded else heard() is not None or profiler_runs()
        self.prepared: list[Prepared] = []
        self.closing: list[Callable[[], None]] = []
        self.held = False
        # An update that reaches a `partition` reaches its members.
        self.comes = comes = ctx.comes if emitted is True else emitted
        for part in parts.parts:
            if part.prepare_fn is nothing_to_prepare:
                self.prepared.append(NOTHING)
                continue
            look = grads if part is first and part.scope is not Scope.LEAF else None
            # A transform without state, such as the norm among the metrics, may have no entry.
            leaves = before if before is not None and part.facts.compares else params
            args = self.old.get(part.name, {}), look, leaves, ctx if comes is True else self._context_of(part, comes)
            if LOOKING:
                LOOKING[-1].prepares(ctx.prefix + part.name)
            made = _ranged(part, ctx, part.prepare_fn, *args) if self.listened else part.prepare_fn(*args)
            if not isinstance(made, Prepared) or not isinstance(made.emit, bool):
                check_prepared(part.name, made)
                if ctx.donate_to_kernels:
                    # A torch.where behind this one chooses, for each member of the batch, between old and new values.
                    self.ctx = ctx = replace(ctx, donate_to_kernels=False)
            self.prepared.append(made)
            if made.given:
                self.ctx = ctx = replace(ctx, given={**ctx.given, **made.given})
            if made.close is not None:
                self.closing.append(made.close)
            if made.emit is False:
                self.held = True
                break
            if made.emit is not True:
                comes = both(comes, made.emit)
        self.parts = parts.parts[: len(self.prepared)]
        self.copies_old = self.copies_old and any([part.facts.compares for part in self.parts])
        self.changed: dict[str, TransformState] = {}
        self.places: dict[str, Places] = {}

    @property
    def behind(self) -> list[Transform]:
        """The transforms that are not run, since one before them holds."""
        return list(self.stretch.parts[len(self.prepared) :])

    def feed(self, signal: Leaves, params: Leaves) -> Leaves:
        """The results of the last transform for these leaves; empty if a transform holds the step.

        Args:
            signal: gradients; a leaf may have none.
            params: stored parameters of the leaves.
        """
        most = BUCKET_BYTES // WIDEST
        together = self.whole or self.ctx.layout.elements <= most or sum(map(Tensor.numel, params.values())) <= most
        if LOOKING and looked_at() and not self.whole:
            together = not stands_for(params.values(), most + 1)
        found = [] if together else self._buckets(signal, params)
        if len(found) < 2:
            return self._bucket(signal, params, every=len(params) == len(self.params))
        out: Leaves = {}
        for paths in found:
            out.update(self._bucket({p: signal[p] for p in paths if p in signal}, {p: params[p] for p in paths}))
        return in_order(out, params)

    def _buckets(self, signal: Leaves, params: Leaves) -> list[list[str]]:
        """The paths of leaves that are updated together: those whose programs are joined, and others."""
        alone: Leaves = {}
        if self.stretch.apart:
            alone = {path: x for path, x in params.items() if any([apart(x) for apart in self.stretch.apart])}
        rest = {path: x for path, x in params.items() if path not in alone} if alone else params
        found = buckets(rest) if self._makes_temporaries(signal, params) else [list(rest)] if rest else []
        return [*found, *buckets(alone)] if alone else found

    def _makes_temporaries(self, signal: Leaves, params: Leaves) -> bool:
        """Whether an update makes temporary tensors, so that it runs bucket by bucket.

        An in-place update runs on all leaves at once: a bucket costs half a millisecond if a kernel has emptied the
        caches.
        """
        if self.ctx.recorded or self.copies_old:
            return True
        first = next((i for i, part in enumerate(self.parts) if part.facts.copies), len(self.parts))
        later = [part for part in self.parts[first:] if part.update_fn is not pass_through]
        # What waits becomes memory where one of them looks at it.
        if not all([_by_programs(part, self.params) for part in later]):
            return True
        # A kernel copies gradients of another dtype than the parameters'.
        return any(map(is_not, map(_DTYPE, signal.values()), map(_DTYPE, map(params.__getitem__, signal))))

    def _bucket(self, signal: Leaves, params: Leaves, every: bool = False) -> Leaves:
        emitted, comes, old_params = self.emitted, self.comes, params
        of_step = self.ctx if every or self.whole else self._within_bucket()
        passes = self._passes(params) if self.stretch.joins else None
        looking = LOOKING[-1] if LOOKING else None
        before = "" if looking is None else looking.now
        if self.copies_old:
            if looking is not None:
                looking.updates(".old parameters")
            # A copy that only programs read is never written.
            (old_params,) = COPIED(self.ctx if passes is None else replace(self.ctx, passes=passes), params)
        elif self.before is not None:
            old_params = {path: self.before[path] for path in params}
        for part, p in zip(self.parts, self.prepared, strict=True):
            if part.facts.watches:
                # A leaf without a gradient in this step keeps its value, and that is watched too.
                signal = {**params, **signal}
            seen = params if not part.facts.watches else old_params if part.facts.sees_old else signal
            old = self.old.get(part.name, {})
            whole = every or self.whole or p.carries_state
            state = old if whole else of_leaves(old, _places_in(old, part.name, self.places, self.ctx), params)
            ctx = of_step if comes is True else self._context_of(part, comes)
            update = part.update_fn
            if looking is not None:
                looking.updates(ctx.prefix + part.name)
            if self.listened:
                out, own = listened_update(part, signal, state, seen, p.carry, ctx)
            elif update is pass_through:
                out, own = signal, state
            else:
                trusted = type(update) is CheckedUpdate and update.trusted and not ctx.recorded
                half = update.update_fn if trusted else update
                if passes is not None and (trusted or type(half) is Joining) and joins(half):
                    settled = passes.settled
                    out, own = half(signal, state, seen, p.carry, replace(ctx, passes=passes))
                    left = passes.settled == settled
                    # A bucket may be too small for programs. What all leaves together have shown holds.
                    if trusted and (every or (left and update.by_programs is None)):
                        update.by_programs = left
                else:
                    if passes is not None:
                        passes.run()
                    out, own = half(signal, state, seen, p.carry, ctx)
                if trusted and out is not None and out is not signal and [*out] != [*signal]:
                    out = in_order(out, params)
            if p.carries_state:
                self.changed.setdefault(part.name, {}).update(own)
            elif own is not state:
                _merge(self.changed.setdefault(part.name, {}), own, old)
            if p.emit is False or out is None:
                signal = {}
                break
            signal = out
            if not isinstance(p.emit, bool):
                # `emitted` leaves out ctx.comes: a window that closes in a step which does not reach this transform
                # has the sum of the steps before, and that sum must not be replaced by zeros.
                emitted, comes = both(emitted, p.emit), both(comes, p.emit)
                # A result that is not chosen must be finite only if it is differentiated.
                signal = passed(emitted, out) if self.ctx.recorded else out
        if passes is not None:
            old_params = seen = params
            passes.run()
        if looking is not None:
            looking.updates(before)
        return signal

    def _passes(self, params: Leaves) -> Passes | None:
        """Where programs wait for each other; `None` for a small tree on a CPU, which torch's operations compute."""
        # A compiled step runs this too, and torch.compile traces no attrgetter.
        on_cpu = all([x.is_cpu for x in params.values()])
        return None if on_cpu and not enough(self.ctx.layout.elements, params.values()) else Passes()

    def _within_bucket(self) -> Context:
        """The context of updates that get only some of the leaves."""
        # A cached_property would break a compiled graph by its lock.
        if self.bucket_ctx is None:
            self.bucket_ctx = replace(self.ctx, reduction=WithinBucket(self.ctx.reduction))
        return self.bucket_ctx

    def _context_of(self, part: Transform, comes: bool | Tensor) -> Context:
        """The context of a transform if only a tensor says whether updates reach it."""
        found = standing(part, self.old.get(part.name, {}), self.params, self.ctx)
        unread = self.ctx.unread or not self.ctx.recorded
        return replace(self.ctx, comes=comes, standing=found, unread=unread)

    def close(self) -> None:
        """Close the transforms after all leaves were fed."""
        for close in self.closing:
            close()

    def states(self, emitted: bool | Tensor = True) -> tuple[dict[str, TransformState], bool | Tensor]:
        """All given states, with the new ones of its transforms, and whether updates go on.

        Args:
            emitted: whether updates reached the stretch. If only a tensor says whether a transform holds, later
                transforms are computed, and each result is then chosen between old and new.
        """
        new = dict(self.old)
        for part, p in zip(self.parts, self.prepared, strict=True):
            changed = self.changed.get(part.name, {})
            if changed or p.state:
                old = new[part.name]
                merged = {**old, **changed}
                for key, x in p.state.items():
                    # The update may have written into the same entry: only the prepared tensors in it are replaced.
                    merged[key] = x if isinstance(x, Tensor) else overlaid(merged.get(key), moved(x, old.get(key)))
                if emitted is not True:
                    merged |= select(
                        emitted, *({k: x for k, x in of.items() if k not in p.chosen} for of in (merged, old))
                    )
                new[part.name] = merged
            emitted = emitted if p.emit is True else both(emitted, p.emit)
        return new, emitted


def _by_programs(part: Transform, params: Leaves) -> bool:
    """Whether a transform's last update left all to programs; on a CPU, where memory without data costs nothing."""
    update = part.update_fn
    # Nobody checks the library's own, which looks at no tensor.
    leaves_all = type(update) is Joining or (type(update) is CheckedUpdate and update.by_programs is True)
    return leaves_all and all(map(_IS_CPU, params.values()))


def _places_in(state: TransformState, name: str, found: dict[str, Places], ctx: Context) -> Places:
    """The places in the state of the transform `name` that belong to leaves, `found` once for all buckets."""
    if name not in found:
        found[name] = places(state, ctx.layout.every)
    return found[name]


def _ranged(part: Transform, ctx: Context, fn: Callable[..., Any], *given: Any) -> Any:
    with ranged(UPDATE, ctx.prefix + part.name):
        return fn(*given)


def listened_update(
    part: Transform, grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context
) -> tuple[Leaves | None, TransformState]:
    """Run a transform's update half in a profiler range of its name. A listener gets what it reads and writes."""
    with ranged(UPDATE, ctx.prefix + part.name):
        out, own = part.update_fn(grads, state, params, carry, ctx)
        if (heard := listener()) is not None:
            read, written = {"": _touched(state, grads, params)}, {"": _touched(own, grads, params)}
            if part.facts.optimizes and out:
                read["params"], written["params"] = [params[p] for p in out], list(out.values())
            heard.moved(ctx.prefix + part.name, read, written)
    return out, own


def _touched(state: TransformState, grads: Leaves, params: Leaves) -> list[Any]:
    """The tensors of a state that are shared, or of leaves that have a gradient."""
    return flatten(of_leaves(state, places(state, params), grads))[0]


@overload
def both(emitted: bool | Tensor, emit: Tensor) -> Tensor: ...


@overload
def both(emitted: bool | Tensor, emit: bool | Tensor) -> bool | Tensor: ...


def both(emitted: bool | Tensor, emit: bool | Tensor) -> bool | Tensor:
    """emitted and emit; either may be a traced bool tensor."""
    return emit if emitted is True else emitted & emit


def passed(emit: Tensor, signal: Leaves) -> Leaves:
    """The updates behind a transform, or zeros if the tensor `emit` is false.

    Later transforms are computed all the same, and their result is dropped afterwards. The derivative of a dropped
    value is zero times its own derivative, which must be finite. If only the result were masked, a step that is skipped
    for a NaN would have a NaN derivative.
    """
    return {p: torch.where(emit.to(x.device), x, torch.zeros_like(x)) for p, x in signal.items()}


def _merge(into: TransformState, own: TransformState, old: TransformState) -> None:
    """Write a bucket's entries into `into`, over the `old` ones of the whole tree."""
    for name, entry in own.items():
        was = old.get(name)
        if entry is was:
            # The update has written the tensors of all leaves in place.
            into[name] = entry
        elif type(entry) is not dict or type(was) is not dict or set(map(type, entry.values())) != {Tensor}:
            into[name] = overlaid(into.get(name, was), entry)
        elif name not in into and list(entry) == list(was):
            into[name] = entry  # it has all leaves, in their order
        else:
            if name not in into:  # one copy for all buckets: backward may bring leaves one by one
                into[name] = dict(was)
            into[name].update(entry)


def buckets(leaves: Leaves) -> list[list[str]]:
    """Paths in their order, in buckets of about 4 MiB of parameters each.

    On a GPU a bucket has about 256 MiB, or an eighth of all parameters if that is more.
    """
    # Not `nbytes`, which the compiler does not trace with dynamic shapes.
    sizes = {path: x.numel() * x.element_size() for path, x in leaves.items()}
    on_gpu = any(x.is_cuda for x in leaves.values())
    most = max(DEVICE_BUCKET_BYTES, sum(sizes.values()) // 8) if on_gpu else BUCKET_BYTES
    found: list[list[str]] = []
    size = most
    for path, more in sizes.items():
        if size >= most:
            found.append([])
            size = 0
        found[-1].append(path)
        size += more
    return found


def finish(signal: Leaves | None, params: Leaves, emitted: bool | Tensor) -> Leaves:
    """New parameters after a run: none if it was held; chosen between new and old if only a tensor says so."""
    return {} if signal is None else {p: select(emitted, new, params[p]) for p, new in signal.items()}


# ----------------------------------------------------------------------------------------------------------------------
# The metric `grad_norm` is the norm of the gradients that reach the optimizer, before any clipping.


def _prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
    found: Leaves = {}

    def close() -> None:
        if ctx.recorded or ctx.norms is None:
            ctx.report("grad_norm", root(ctx.reduction.total(added, found)))
        elif not ctx.norms.found:
            # The norm of all leaves takes less time, and a GPU fewer launches, than the norm of each.
            ctx.report("grad_norm", ctx.reduction.total(squared_norm_unrecorded, ctx.norms.requests), of=torch.sqrt)
        else:
            ctx.report("grad_norm", ctx.reduction.total(sum_of_squares, ctx.norms.all()), of=torch.sqrt)

    return Prepared(found, close=close)


def _update(grads: Leaves, state: TransformState, params: Leaves, found: Leaves, ctx: Context):
    if ctx.recorded or ctx.norms is None:
        ctx.settle()
        found.update(leaf_squares(grads))
    else:
        # The optimizer of the previous bucket may not have computed its norms.
        if ctx.norms.requests:
            ctx.settle()
            ctx.norms.all()
        ctx.norms.requests = dict(grads)
    return grads, state


# The pipeline puts it before the optimizer if the chain has no clip: a clip reports the norm itself.
# Its name has a dot, which the name of a user's transform cannot have.
GRAD_NORM = Transform(
    ".grad_norm",
    needs="number",
    facts=Facts(reports=frozenset(["grad_norm"]), copies=False, capturable=True),
    prepare_fn=_prepare,
    update_fn=Joining(_update),
)
