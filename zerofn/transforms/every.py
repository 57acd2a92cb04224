"""`every`: an outer optimizer once in many updates, on the mean over ranks that step apart in between (DiLoCo)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..extend import (
    Codes,
    Context,
    Facts,
    Group,
    Layout,
    Leaves,
    Prepared,
    Ranks,
    Scope,
    Shadow,
    Spec,
    Transform,
    TransformState,
    View,
    as_transform,
    check_count,
    check_dtype,
    codes_of_wire,
    counter,
    mean_over,
    narrow_mean,
    transform,
    watches_parameters,
    wide_copy,
)

COUNT_OF_UPDATES = "every_count"
OUTER = "outer_"
# Elements that one message carries.
TOGETHER = 1 << 23
WIRES = (torch.bfloat16, torch.float16, torch.float32)


@transform
def every(updates: int, outer: Transform, mesh: Any = None, wire: torch.dtype | str | None = None) -> Transform:
    """Run an outer optimizer once in every `updates` updates, on the mean over ranks of the changes since (DiLoCo).

    Put `every` after the optimizer, whose updates are local to each rank, or to each group of ranks along `mesh`. After
    every `updates` updates `d = mean over ranks of (anchor - p)`, `anchor = outer(anchor, d)` and `p = anchor`
    (Douillard et al., 2023, algorithm 1, with `outer=sgd(0.7, momentum=0.9, nesterov=True)`). An outer update does not
    change the state of the optimizer, such as its moments. The anchor starts as the parameters, which are equal on all
    ranks, and is kept in fp32 or wider.

    Weights that are loaded into an attached model before the first update, or right after an outer update, become the
    anchor. What is written between two outer updates counts as a change since the last one.

    Between two outer updates nothing is sent along `mesh`. In an outer update each rank sends its stored parameters (or
    its shards), in one all-reduce for each 32 MiB.

    Args:
        updates: the number of updates of the optimizer for one update of `outer`.
        outer: an optimizer that treats elements alone.
        mesh: a one-dimensional `DeviceMesh` along which gradients are not reduced; by default all ranks.
        wire: the dtype in which differences are sent; by default the anchor's. With `"int8"` differences are sent as
            codes of 8 bits with a scale for each block of 128. Each rank rounds its differences stochastically, and
            sends every other rank the codes for that rank's share of the elements. Each rank averages what it gets,
            rounds the mean once more, and sends the mean to all ranks. See `reduce_scatter`.

    Raises:
        ValueError: `updates` is not positive, or `outer` is no optimizer that treats elements alone; or an update runs
            in a compiled graph or under `torch.func.vmap`, where Python cannot read the count of updates.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.sgd(0.1), zf.every(2, zf.sgd(0.5)))
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> for _ in range(2):  # -0.1, -0.2, of which the outer step keeps a half
        ...     state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
        >>> state.params["w"]
        tensor([-0.1000])

    Notes:
        On several ranks say that nothing else is reduced along `mesh`: `chain(local(), adamw(lr), every(...))`, or
        `chain(shard(mesh["shard"]), adamw(lr), every(..., mesh["replicate"]))`. Each group then has a state of its own:
        save each in a directory of its own. All ranks along `mesh` must make equally many updates, because a rank waits
        for the others in an outer update.
    """
    check_count("every", "updates", updates, "updates")
    codes = codes_of_wire("every", wire) if isinstance(wire, str) else None
    if codes is None:
        check_dtype("every", "wire", wire, WIRES)
    inner = as_transform(outer)
    if not inner.facts.optimizes or inner.needs != "element" or inner.scope is not Scope.LEAF or inner.facts.wants:
        why, right = "the outer optimizer must treat elements alone", "sgd(0.7, 0.9, nesterov=True)"
        raise ValueError(explain(f"every({updates}, {inner.name}(...))", why, f"every({updates}, {right})"))

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        anchor = {path: wide_copy(x) for path, x in leaves.items()}
        own = {OUTER + slot: x for slot, x in inner.init_fn(anchor, layout).items()}
        return {"anchor": anchor, COUNT_OF_UPDATES: counter(), **own}

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        count = state[COUNT_OF_UPDATES] + 1
        now = ctx.read(count)
        if isinstance(now, Tensor):
            why = "ranks exchange differences in some updates only, and the count of updates cannot be read here"
            right = "torch.compile(loss_fn) and the step outside of graphs; a loop in place of torch.func.vmap"
            raise ValueError(explain("a step through every(...) in a graph or a batch", why, right))
        own = {COUNT_OF_UPDATES: count}
        if now % updates:
            return Prepared(state=own)
        made = inner.prepare_fn(_outer(state), None, state["anchor"], _inside(ctx))
        return Prepared(carry=(made.carry,), state={**own, **{OUTER + key: x for key, x in made.state.items()}})

    def update(group: Group | None, new: Leaves, state: TransformState, old: Leaves, carry: Any, ctx: Context):
        if carry is None:
            return new, {}
        anchor = {path: state["anchor"][path] for path in new}
        moved = {path: x - new[path].to(x.dtype) for path, x in anchor.items()}
        out, own = inner.update_fn(_mean(moved, group, codes or wire), _outer(state), anchor, carry[0], _inside(ctx))
        back = {path: ctx.copied(x, out[path]) for path, x in new.items()}
        return back, {"anchor": out, **{OUTER + slot: x for slot, x in own.items()}}

    def view(layout: Layout, ranks: Ranks) -> View:
        return View(update=partial(update, ranks("every", mesh)))

    # Ranks have equal parameters after an outer update. In between what one rank writes is a part of its own steps.
    equal = Shadow("anchor", due=lambda number, step: int(number(COUNT_OF_UPDATES)) % updates == 0)
    facts = Facts(watches=True, sees_old=False, keeps=False, shadows=(equal,))
    halves: Any = dict(
        init_fn=init, prepare_fn=prepare, update_fn=partial(update, None), view_fn=view, through=_through
    )
    return Transform("every", Scope.WHOLE, "element", facts, **halves)


def _through(spec: Spec) -> Spec:
    why = "it changes parameters behind the optimizer, which keeps 8 more bits of the old values"
    spec.refuse("split_by", why, "precision(store_dtype=torch.float32, param_dtype=torch.bfloat16)")
    return watches_parameters(spec)


def _outer(state: TransformState) -> TransformState:
    return {key.removeprefix(OUTER): x for key, x in state.items() if key.startswith(OUTER)}


def _inside(ctx: Context) -> Context:
    """The context of the outer optimizer. Its rate is its own, and no metric shows it."""
    return replace(ctx.inside("every"), metrics={}, norms=None)


def _mean(leaves: Leaves, group: Group | None, wire: Any) -> Leaves:
    """The mean of each leaf over the group; several leaves in one message."""
    if group is None or group.size == 1:
        return leaves
    found: Leaves = {}
    together: list[str] = []
    for i, path in enumerate(leaves, 1):
        together.append(path)
        if i < len(leaves) and sum([leaves[path].numel() for path in together]) < TOGETHER:
            continue
        flat = [leaves[path].reshape(-1) for path in together]
        if isinstance(wire, Codes):
            parts = narrow_mean(flat, group, wire)
        else:
            row = torch.cat([x.to(wire or flat[0].dtype) for x in flat])
            parts = mean_over((group,), row).split([x.numel() for x in flat])
        found |= {p: x.reshape(leaves[p].shape).to(leaves[p].dtype) for p, x in zip(together, parts, strict=True)}
        together = []
    return found
