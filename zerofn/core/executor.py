"""The update halves of a chain, run over a tree: segments, buckets, holding.

A chain is cut into segments. A segment begins where a transform must see the whole tree (a norm, a
search for overflow); everything up to the next such place treats leaves alone and is run bucket by
bucket, so its temporaries are one bucket large however big the model is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._ranges import UPDATE, listener, ranged
from .held import report_held
from .joined import join, spread
from .transform import Context, Prepared, Scope, Transform, TransformState, select
from .tree import Leaves, flatten

# Bytes of parameters in one bucket: large enough that Python's cost per bucket vanishes, small enough
# that a clipped copy of it does not show beside the states.
BUCKET_BYTES = 1 << 22


def run(
    parts: Sequence[Transform], grads: Leaves, states: dict[str, TransformState], params: Leaves, ctx: Context
) -> tuple[Leaves | None, dict[str, TransformState], bool | Tensor]:
    """One micro-step through the update halves.

    Returns what leaves the chain (new parameters once an optimizer has run, `None` when held), the
    new states, and whether something was emitted: a 0-d bool tensor where Python may not branch.
    """
    signal: Leaves = grads
    given = states
    parts, states, joined = join(parts, states)
    new = dict(states)
    emitted: bool | Tensor = True
    if ctx.donate:
        # A schedule that fails must do so before the first write: a state is whole after an error.
        for part in parts:
            if part.facts.optimizes and part.scope is Scope.LEAF:
                part.prepare_fn(states[part.name], None, params, replace(ctx, metrics={}))
    i = 0
    while i < len(parts):
        head = parts[i]
        j = i + 1
        if head.scope is not Scope.WHOLE:
            while j < len(parts) and parts[j].scope is Scope.LEAF and not parts[j].facts.watches:
                j += 1
        if head.facts.watches:
            # A leaf without a gradient in this step has kept its value, and that is watched too.
            signal = {**params, **signal}
        prepared, stop = _prepare(parts[i:j], signal, new, params, ctx)
        out = segment(parts[i : i + len(prepared)], prepared, signal, new, params, ctx)
        for part, p in zip(parts[i:j], prepared, strict=False):
            merged = {**new[part.name], **out[1].get(part.name, {}), **p.state}
            # What lies to the right of a hold that only a tensor knows of is computed and then chosen.
            new[part.name] = select(emitted, merged, states[part.name]) if emitted is not True else merged
            emitted = p.emit if emitted is True else emitted & p.emit
        if stop or out[0] is None:
            report_held(parts[i + len(prepared) :], new, params, ctx)
            return None, spread(new, joined, given), False
        signal = out[0]
        i = j
    return signal, spread(new, joined, given), emitted


def _prepare(
    segment: Sequence[Transform], grads: Leaves, states: dict[str, TransformState], params: Leaves, ctx: Context
) -> tuple[list[Prepared], bool]:
    """Each member's decision, up to the first that holds. Only the head may look at the gradients."""
    found: list[Prepared] = []
    for k, part in enumerate(segment):
        look = grads if k == 0 and part.scope is not Scope.LEAF else None
        with ranged(UPDATE, ctx.prefix + part.name):
            prepared = part.prepare_fn(states[part.name], look, params, ctx)
        found.append(prepared)
        if prepared.emit is False:
            return found, True
    return found, False


def segment(
    parts: Sequence[Transform],
    prepared: Sequence[Prepared],
    grads: Leaves,
    states: dict[str, TransformState],
    params: Leaves,
    ctx: Context,
) -> tuple[Leaves | None, dict[str, TransformState]]:
    """The updates of a segment over each bucket; per-leaf state entries are merged again."""
    whole = parts[0].scope is Scope.WHOLE
    out: Leaves = {}
    changed: dict[str, TransformState] = {part.name: {} for part in parts}
    for paths in [list(params)] if whole else buckets(params):
        signal = {p: grads[p] for p in paths if p in grads}
        here = {p: params[p] for p in paths}
        for part, p in zip(parts, prepared, strict=True):
            state = states[part.name] if whole else {k: slice_entry(v, paths) for k, v in states[part.name].items()}
            signal, own = updated(part, signal, state, here, p.carry, ctx)
            _merge(changed[part.name], own, states[part.name])
            if not isinstance(p.emit, bool):
                signal = passed(p.emit, signal)
            if p.emit is False or signal is None:
                signal = {}
                break
        out.update(signal)
    for p in prepared:
        if p.close is not None:
            p.close()
    held = any(p.emit is False for p in prepared)
    return (None if held else out), changed


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
        found += flatten(slice_entry(entry, list(grads)) if by_leaf else entry)[0]
    return found


def passed(emit: Tensor, signal: Leaves | None) -> Leaves | None:
    """What goes on to the right of a hold that only a tensor knows of: what is held back counts as zero there.

    It is computed all the same and not chosen. But the derivative of what is not chosen is a zero times its own, so
    that must be finite: with only the output masked, a step that a NaN has skipped has NaN for its derivative.
    """
    if signal is None:
        return None
    return {p: torch.where(emit.to(x.device), x, torch.zeros_like(x)) for p, x in signal.items()}


def slice_entry(entry: Any, paths: list[str]) -> Any:
    """What of a state's entry belongs to some leaves; a shared one as it is."""
    return {p: entry[p] for p in paths if p in entry} if isinstance(entry, dict) else entry


def _merge(into: TransformState, own: TransformState, old: TransformState) -> None:
    """Lay a bucket's entries over those of the whole tree."""
    for name, entry in own.items():
        if isinstance(entry, dict) and isinstance(old.get(name), dict):
            into.setdefault(name, dict(old[name])).update(entry)
        else:
            into[name] = entry


def buckets(leaves: Leaves) -> list[list[str]]:
    """Paths in their order, cut so that a bucket holds about `BUCKET_BYTES`."""
    found: list[list[str]] = []
    size = BUCKET_BYTES
    for path, x in leaves.items():
        if size >= BUCKET_BYTES:
            found.append([])
            size = 0
        found[-1].append(path)
        size += x.numel() * x.element_size()
    return found


def finish(signal: Leaves | None, params: Leaves, emitted: bool | Tensor) -> Leaves:
    """The parameters after the run: the new ones, or the old ones where the step was held."""
    if signal is None:
        return params
    return {
        **params,
        **{p: select(emitted, new, params[p]) if emitted is not True else new for p, new in signal.items()},
    }


def counter(x: int = 0) -> Tensor:
    """A counter of the state. It lives on the CPU, so that reading it never waits for a GPU."""
    return torch.tensor(x, dtype=torch.int64)
