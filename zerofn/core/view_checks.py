"""Refusals of views: what a chain cannot do with them, and what they would need more of than a rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, explain, kind_of
from .chain_order import NEEDED
from .dtypes import Dtypes
from .facts import OF_LEAVES
from .layout import Layout, Leaf
from .spec import Spec, Station
from .transform import Transform, TransformState
from .tree import flatten, tree_keys, tree_map
from .views import Factor, OnLeaf, View, Wire, same_tensor


def check_views(views: Sequence[View | None], layout: Layout) -> None:
    """Raise a `ValueError` where views contradict each other, or a wire does not carry all leaves.

    Args:
        views: of the chain, those of one rank too: what is refused on several ranks is refused on one.
        layout: of the parameters.
    """
    there = [view for view in views if view is not None]
    _check_dtypes([view.name for view in there if view.dtypes is not None])
    for view in there:
        if view.wire is not None and view.wire.group.size > 1:
            _check_all_touched(view, layout)
            _check_spans(view, view.wire, layout)


def _check_dtypes(names: Sequence[str]) -> None:
    if len(names) < 2:
        return
    wrong = f"chain({', '.join(f'..., {name}' for name in names)}, ...), each with View(dtypes=...)"
    why = f"parameters have one set of dtypes; those of {names[0]} would be taken, and those of {names[1]} ignored"
    raise ValueError(explain(wrong, why, "one of them, as zf.precision(param_dtype=..., store_dtype=...)"))


def _check_all_touched(view: View, layout: Layout) -> None:
    left = [(leaf.path, "`changes` leaves it out") for leaf in layout.leaves if not view.changes(leaf)]
    if left:
        what = f"{view.name}: a view with a wire carries all leaves over ranks"
        raise ValueError(bad_leaves(what, left, "over_ranks(wire, resident=...), without View(changes=...)"))


def _check_spans(view: View, wire: Wire, layout: Layout) -> None:
    """Each rank looks at its own; `wire_agreement.py` compares those of all ranks."""
    bad = []
    for leaf in layout.leaves:
        own: Any = wire.span(leaf)
        if not _is_range(own, leaf.numel):
            bad.append((leaf.path, f"{own!r}, and the leaf has elements 0 to {leaf.numel}"))
    if bad:
        right = "a span (low, high) of ints, 0 <= low <= high <= leaf.numel: this rank's flat range of the leaf"
        raise ValueError(bad_leaves(f"{view.name}: the `span` of its wire is no range of the leaf", bad, right))


def _is_range(x: Any, numel: int) -> bool:
    if not isinstance(x, tuple) or len(x) != 2 or not all(isinstance(n, int) for n in x):
        return False
    return 0 <= x[0] <= x[1] <= numel


def check_forms(
    views: Sequence[View | None],
    stations: Sequence[Station],
    layout: Layout,
    dtypes: Dtypes,
    devices: Mapping[str, torch.device],
) -> None:
    """Raise a `ValueError` where a view gives another shape or dtype than it is given.

    Asked once of views that make other numbers, by leaf, on ones that are one element in memory: on tensors without
    memory a mask would have another device, and what a view makes once and keeps would be a meta tensor. A view that
    reads a state is asked by `check_reading`. One that raises is looked at when it is called.
    """
    for i, view in enumerate(views):
        if view is not None and view.renumbers and not view.reads:
            _check_forms(views, i, stations[i + 1], layout, dtypes, devices)


def check_reading(
    parts: Sequence[Transform],
    views: Sequence[View | None],
    stations: Sequence[Station],
    layout: Layout,
    dtypes: Dtypes,
    states: Mapping[str, TransformState],
) -> None:
    """As `check_forms`, of views that read the state of their transform, which may not be there for a leaf.

    Without memory, as the states may be.
    """
    for i, (part, view) in enumerate(zip(parts, views, strict=True)):
        if view is not None and view.renumbers and view.reads:
            _check_read(part, view, stations[i + 1], stations[-1], layout, states[part.name])
            _check_forms(views, i, stations[i + 1], layout, dtypes, {}, tree_map(_without_numbers, states[part.name]))


def _check_forms(
    views: Sequence[View | None],
    i: int,
    station: Station,
    layout: Layout,
    dtypes: Dtypes,
    devices: Mapping[str, torch.device],
    *state: TransformState,
) -> None:
    view, bad = views[i], []
    assert view is not None
    # Parameters have the dtypes of the state up to the view that casts, and those of the model in front of it.
    casts = any([later is not None and later.dtypes is not None for later in views[i + 1 :]])
    for leaf in layout.leaves if view.of_leaves else ():
        if not view.changes(leaf):
            continue
        spec, stored = station.handed[leaf.path], dtypes.seen(leaf) if casts else dtypes.stored(leaf)
        for name, fn, dtype, more in (
            ("view", view.view, stored, state),
            ("pull", view.pull, spec.dtype, state),
            ("store", view.store, leaf.dtype, ()),
        ):
            one = torch.ones((), dtype=dtype, device=devices.get(leaf.path, "meta"))
            if reason := _form_of(fn, one.expand(spec.local_shape), leaf, more):
                bad.append((leaf.path, f"`{name}` {reason}"))
    if bad:
        raise ValueError(_misformed(view.name, bad))


def _form_of(fn: OnLeaf, x: Tensor, leaf: Leaf, state: tuple[TransformState, ...]) -> str | None:
    """What is wrong with the form of what a function of a view gives, or with what it reads."""
    try:
        fn(x, leaf, *state)
    except OtherForm as error:
        return f"gives {error.form}"
    except KeyError as error:
        return f"finds no {error} in the transform's state" if state else None
    except Exception:
        pass
    return None


class OtherForm(ValueError):
    """A function of a view gave another shape or dtype than it was given.

    Attributes:
        form: how it differs.
    """

    form: str = ""


def keeping_form(view: View, name: str) -> View:
    """The same view, whose functions raise where they give another shape or dtype than they are given.

    Whenever they are called: not every function can be asked beforehand.
    """

    def kept(function: str) -> Any:
        fn = getattr(view, function)
        if fn is same_tensor:
            return fn

        def checked(x: Tensor, leaf: Leaf, *state: Any) -> Tensor:
            found = fn(x, leaf, *state)
            if form := _other_form(found, x):
                error = OtherForm(_misformed(name, [(leaf.path, f"`{function}` gives {form}")]))
                error.form = form
                raise error
            return found

        return checked

    return replace(view, view=kept("view"), pull=kept("pull"), store=kept("store")) if view.renumbers else view


def _misformed(name: str, bad: Sequence[tuple[str, str]]) -> str:
    right = "functions that give a tensor of the shape and dtype they are given, as (x * scale).to(x.dtype); "
    right += "zf.precision(param_dtype=...), which casts; View(changes=...) for what has no state"
    return bad_leaves(f"{name}: its view does not fit its leaves", bad, right)


def _other_form(found: Any, x: Tensor) -> str | None:
    """How what a view gives of `x` differs from it in form, if it does."""
    if not isinstance(found, Tensor):
        return f"{kind_of(found)} of a tensor of shape {tuple(x.shape)}"
    if found.shape != x.shape:
        return f"shape {tuple(found.shape)} of a tensor of shape {tuple(x.shape)}"
    return f"{found.dtype} of a tensor of {x.dtype}" if found.dtype != x.dtype else None


def _without_numbers(x: Any) -> Any:
    return x.to("meta") if isinstance(x, Tensor) else x


def _check_read(
    part: Transform, view: View, here: Station, last: Station, layout: Layout, state: TransformState
) -> None:
    """A state of pieces lies behind what cuts leaves, and that of whole leaves at their owner, where a view is not."""
    owned = {path for name, _, ranks in layout.placement.owners if name == part.name for path, _ in ranks}
    bad: dict[str, str] = {}
    kept = list(zip(tree_keys(state), flatten(state)[0], strict=True))
    for leaf in layout.leaves:
        if not view.changes(leaf):
            continue
        mine = [x for keys, x in kept if leaf.path in keys and isinstance(x, Tensor)]
        piece = last.gives[leaf.path]
        if leaf.path in owned and mine:
            bad[leaf.path] = (
                "its state is at one rank alone, the owner of the leaf, since the transform needs all of it"
            )
        elif piece.in_parts and not here.handed[leaf.path].in_parts and _cut(mine, piece.local_shape):
            bad[leaf.path] = f"the view sees the leaf, {tuple(leaf.shape)}, and its state is of a flat piece of it"
    if bad:
        what = f"{part.name}: a view in front of what cuts leaves over ranks, that reads a state which is cut"
        right = f"chain(shard(), {part.name}, ...): behind it view and state have the same piece, if it says "
        right += 'needs="element"; or a state of 0-d tensors, which every rank has'
        raise ValueError(bad_leaves(what, bad.items(), right))


def _cut(kept: Sequence[Tensor], shape: tuple[int, ...]) -> bool:
    return any(tuple(x.shape) == shape for x in kept)


def check_factor(name: str, factor: Factor, state: TransformState) -> None:
    """Raise a `ValueError` where what a view calls a factor is none: one number of its state."""
    right = "factor=lambda state: state['scale'], a 0-d tensor in float32 that the transform's init_fn makes"
    try:
        found: Any = factor(state)
    except KeyError as error:
        why = f"its state has no {error}: it has {', '.join(map(repr, state)) or 'nothing'}"
        raise ValueError(explain(f"{name}: View(factor=...) that reads {error}", why, right)) from error
    if not isinstance(found, Tensor) or found.ndim or not found.is_floating_point():
        what = f"a tensor of shape {tuple(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else repr(found)
        wrong, why = f"{name}: View(factor=...) that gives {what}", "cotangents are multiplied by one number"
        raise ValueError(explain(wrong, why, right))


def check_cut_views(
    parts: Sequence[Transform], views: Sequence[View | None], stations: Sequence[Station], layout: Layout
) -> None:
    """Raise a `ValueError` where a view needs more of a leaf than there is of it behind what cuts leaves over ranks.

    Args:
        parts: the chain, with what each transform says that it needs.
        views: of each of them.
        stations: of the chain, the first at the model.
        layout: of the parameters.
    """
    cut = ""
    for part, view, station in zip(parts, views, stations[1:], strict=True):
        if view is None:
            continue
        if view.wire is None and (why := _reason(part, view)):
            touched = [(leaf.path, station.handed[leaf.path]) for leaf in layout.leaves if view.changes(leaf)]
            if bad := [(path, why) for path, spec in touched if _has_too_little(part.needs, spec)]:
                what = f"chain(..., {cut}, ..., {part.name}, ...): a view behind what cuts leaves over ranks"
                right = f"chain({part.name}, {cut}, ...), where it has whole leaves"
                right += '; needs="element", if each element of what it gives comes from the same element'
                raise ValueError(bad_leaves(what, bad, right))
        cut = cut or (part.name if view.wire is not None and view.wire.cuts else "")


def _reason(part: Transform, view: View) -> str:
    """Why a view cannot have flat pieces of leaves; an empty string where it can.

    A number of the tree is reduced by an update half, which has it in the state. A view that does not read the state of
    its transform, and whose transform has no update half, takes a number of what it has.
    """
    if part.needs in OF_LEAVES:
        return f"{part.name} needs {NEEDED[part.needs]} (needs={part.needs!r}), and has a flat piece of it"
    if part.needs == "number" and view.of_leaves and part.idle and not view.reads:
        return f"{part.name} needs a number (needs='number') and reads none of its state: it takes that of a flat piece"
    return ""


def _has_too_little(needs: str, spec: Spec) -> bool:
    """Whether a rank has less of a leaf than a view needs. A row of one dimension is an element."""
    return spec.in_parts and not (needs == "row" and spec.shape is not None and len(spec.shape) == 1)
