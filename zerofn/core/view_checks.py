"""Refusals of views: what a chain cannot do with them, and what they would need more of than a rank has."""

from __future__ import annotations

from collections.abc import Sequence

from .._errors import bad_leaves, explain
from .chain_order import WHOLE, check_order
from .facts import OF_LEAVES
from .layout import Layout
from .spec import Spec, Station
from .transform import Transform
from .views import View


def check_views(parts: Sequence[Transform], views: Sequence[View | None], layout: Layout) -> None:
    """Raise a `ValueError` where views contradict each other, or a wire stands behind what changes gradients.

    Args:
        parts: the chain.
        views: of each of them, those of one rank too: what is refused on several ranks is refused on one.
        layout: of the parameters.
    """
    there = [view for view in views if view is not None]
    _check_dtypes([view.name for view in there if view.dtypes is not None])
    check_order(parts, talking={view.name for view in there if view.wire is not None})
    for view in there:
        if view.wire is not None and view.wire.group.size > 1:
            _check_all_touched(view, layout)


def _check_dtypes(names: Sequence[str]) -> None:
    if len(names) < 2:
        return
    wrong = f"chain({', '.join(f'..., {name}' for name in names)}, ...), each with View(dtypes=...)"
    why = f"parameters have one set of dtypes; those of {names[0]} would be taken, and those of {names[1]} ignored"
    raise ValueError(
        explain(wrong, why, "one of them, with all dtypes: zf.precision(param_dtype=..., store_dtype=...)")
    )


def _check_all_touched(view: View, layout: Layout) -> None:
    left = [(leaf.path, "`changes` leaves it out") for leaf in layout.leaves if not view.changes(leaf)]
    if left:
        what = f"{view.name}: a view with a wire carries all leaves over ranks"
        raise ValueError(bad_leaves(what, left, "over_ranks(wire, resident=...), without View(changes=...)"))


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
        if view.wire is None and part.needs in OF_LEAVES:
            touched = [(leaf.path, station.handed[leaf.path]) for leaf in layout.leaves if view.changes(leaf)]
            why = f"{part.name} needs {WHOLE[part.needs]} (needs={part.needs!r}), and has a flat piece of it"
            if bad := [(path, why) for path, spec in touched if _has_too_little(part.needs, spec)]:
                what = f"chain(..., {cut}, ..., {part.name}, ...): a view behind what cuts leaves over ranks"
                right = f"chain({part.name}, {cut}, ...), where it has whole leaves"
                right += '; needs="element", if each element of what it gives comes from the same element'
                raise ValueError(bad_leaves(what, bad, right))
        cut = cut or (part.name if view.wire is not None and view.wire.cuts else "")


def _has_too_little(needs: str, spec: Spec) -> bool:
    """Whether a rank has less of a leaf than a view needs. A row of one dimension is an element."""
    return spec.in_parts and not (needs == "row" and spec.shape is not None and len(spec.shape) == 1)
