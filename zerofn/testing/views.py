"""Laws of view halves: law 4, law 11 for views, and that a view without a wire talks to no other rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves
from ..core.chain_order import effect
from ..core.facts import OF_PIECES
from ..core.layout import Layout, Leaf, Leaves, make_layout
from ..core.transform import Transform
from ..core.tree import Tree
from ..core.views import View
from ..ranks.backend import CollectiveBegun, no_collectives
from ..ranks.group import Group
from .cutting import Spans, draw_cut
from .trees import difference, random_like

# Units in the last place between a view after its store and the identity, and of an inner product that has n terms.
ULPS = 16.0


def check_views(tx: Transform, params: Tree) -> None:
    """Raise an `AssertionError` where a view half of a chain breaks a law, or a transform says what no view does.

    Wires are not asked: over one process they do nothing.
    """
    layout, leaves = make_layout(params)
    for part in tx.members:
        view = part.view_fn(layout, _one_process)
        _check_words(part, view)
        if view is None or view.wire is not None or not view.of_leaves:
            continue
        touched = [leaf for leaf in layout.leaves if view.changes(leaf)]
        state = part.init_fn({path: leaves[path] for path in layout.trained}, layout)
        read = view.reading(lambda state=state: state)
        _check_writes(part, read, touched, leaves)
        _check_store(part, read, touched, leaves)
        _check_pull(part, read, touched, leaves)
        _check_silent(part, read, touched, leaves)
        if part.needs in (*OF_PIECES, "row"):
            _check_pieces(part, view, touched, layout, leaves)


def _one_process(function: str, mesh: Any) -> Group:
    return Group()


def _check_words(part: Transform, view: View | None) -> None:
    says = effect(part)
    words = [w for w in ("sharded_by", "scattered_by", "averaged_by") if getattr(says, w)]
    assert not words or (view is not None and view.wire is not None), (
        f"{part!r}: its `through` says {words[0]!r}, and no view of it has a wire that could do it.\n"
        "  write: a `through` without it; or view_fn=lambda layout, ranks: over_ranks(wire, resident=...)"
    )


def _each(part: Transform, law: str, right: str, rows: Iterator[tuple[str, str | None]]) -> None:
    if wrong := [(path, reason) for path, reason in rows if reason]:
        raise AssertionError(bad_leaves(f"{part!r}: {law}", wrong, right))


def _functions(view: View) -> dict[str, Callable[[Tensor, Leaf], Tensor]]:
    return {"view": view.view, "pull": view.pull, "store": view.store}


def _check_writes(part: Transform, view: View, touched: Sequence[Leaf], leaves: Leaves) -> None:
    def rows() -> Iterator[tuple[str, str | None]]:
        for leaf in touched:
            for name, fn in _functions(view).items():
                given = leaves[leaf.path].clone()
                fn(given, leaf)
                yield leaf.path, f"`{name}` wrote it" if not torch.equal(given, leaves[leaf.path]) else None

    _each(
        part, "a view writes into none of its arguments: they are what is stored.", "x * 2, and not x.mul_(2)", rows()
    )


def _check_store(part: Transform, view: View, touched: Sequence[Leaf], leaves: Leaves) -> None:
    def rows() -> Iterator[tuple[str, str | None]]:
        for leaf in touched:
            seen = view.view(view.store(leaves[leaf.path], leaf), leaf)
            yield leaf.path, difference(view.view(view.store(seen, leaf), leaf), seen, (ULPS, 1.0))

    right = "View(view=lambda x, leaf: x * by, pull=lambda g, leaf: g * by, store=lambda x, leaf: x / by)"
    _each(part, "view after store is the identity on what is seen.", right, rows())


def _check_pull(part: Transform, view: View, touched: Sequence[Leaf], leaves: Leaves) -> None:
    """<view(x), g> is <x, pull(g)> where the view is linear; where it is not, `pull` stands for a derivative."""
    cotangents = random_like(leaves, seed=32)

    def rows() -> Iterator[tuple[str, str | None]]:
        for leaf in touched:
            x, seen = leaves[leaf.path], view.view(leaves[leaf.path], leaf)
            if seen.is_complex() or not _linear(view, x, leaf):
                continue
            g = cotangents[leaf.path].to(seen.dtype)
            left, right = _terms(seen, g), _terms(x, view.pull(g, leaf))
            eps = max(torch.finfo(seen.dtype).eps, torch.finfo(x.dtype).eps)
            room = ULPS * eps * float(left.abs().sum() + right.abs().sum())
            one, two = float(left.sum()), float(right.sum())
            yield leaf.path, None if abs(one - two) <= room else f"<view(x), g> = {one:.6g}, <x, pull(g)> = {two:.6g}"

    law = "`pull` of a linear view is its transpose: the vjp of the view."
    right = "the transpose; what is to multiply gradients alone is an update half: zf.leafwise(lambda grad, param: ...)"
    _each(part, law, right, rows())


def _linear(view: View, x: Tensor, leaf: Leaf) -> bool:
    """Whether the view keeps sums and multiples: on a grid no multiple by such a number is."""
    y = random_like({"y": x}, seed=31)["y"]
    pairs = [(view.view(x + y, leaf), view.view(x, leaf) + view.view(y, leaf))]
    pairs += [(view.view(by * x, leaf), by * view.view(x, leaf)) for by in (0.3719, 1000.13)]
    return not any(difference(a, e, (ULPS, 4.0)) for a, e in pairs)


def _terms(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() * y.double()).reshape(-1)


def _check_silent(part: Transform, view: View, touched: Sequence[Leaf], leaves: Leaves) -> None:
    def rows() -> Iterator[tuple[str, str | None]]:
        for leaf in touched:
            for name, fn in _functions(view).items():
                given = leaves[leaf.path].clone()
                try:
                    with no_collectives():
                        fn(given, leaf)
                except CollectiveBegun as error:
                    yield leaf.path, f"`{name}` called {error}"
                except Exception as error:
                    yield leaf.path, f"`{name}` raised where there are several ranks: {error}"

    law = "a view without a wire talks to no other rank: its calls are in no order that ranks have in common."
    _each(part, law, "what travels is packed, sent and unpacked by a wire: over_ranks(wire, resident=...)", rows())


def _check_pieces(part: Transform, view: View, touched: Sequence[Leaf], layout: Layout, leaves: Leaves) -> None:
    """Law 11: a view of a piece, or of some rows, is that piece of the view of the whole leaf."""
    by_rows = part.needs == "row"
    for ranks in (2, 3, 4):
        for spans in draw_cut(layout, ranks, seed=ranks, by_rows=by_rows):
            _check_piece(part, view, touched, layout, leaves, spans)


def _check_piece(
    part: Transform, view: View, touched: Sequence[Leaf], layout: Layout, leaves: Leaves, spans: Spans
) -> None:
    def piece(leaf: Leaf) -> Tensor:
        return _piece(leaves[leaf.path], leaf, spans, part.needs)

    trained = {leaf.path: leaf for leaf in layout.trainable}
    whole = part.init_fn({path: leaves[path] for path in trained}, layout)
    own = part.init_fn({path: piece(leaf) for path, leaf in trained.items()}, layout)
    of_whole, of_piece = (_functions(view.reading(lambda state=state: state)) for state in (whole, own))

    def rows() -> Iterator[tuple[str, str | None]]:
        for leaf in touched:
            low, high = spans[leaf.path]
            for name in of_whole:
                expected = _piece(of_whole[name](leaves[leaf.path], leaf), leaf, spans, part.needs)
                try:
                    reason = difference(of_piece[name](piece(leaf), leaf), expected, (2.0, 1.0))
                except Exception as error:
                    reason = f"it raised {type(error).__name__}: {error}"
                yield f"{leaf.path}[{low}:{high}]", None if reason is None else f"`{name}`: {reason}"

    some = "some rows of a leaf are" if part.needs == "row" else "a flat piece of a leaf is"
    law = f"it says needs={part.needs!r}: {some} seen, pulled back and stored as in the whole leaf."
    _each(part, law, 'needs="leaf", and it stands in front of what cuts leaves: chain(view, shard(), ...)', rows())


def _piece(x: Tensor, leaf: Leaf, spans: Mapping[str, tuple[int, int]], needs: str) -> Tensor:
    low, high = spans[leaf.path]
    flat = x.reshape(-1)[low:high]
    if needs != "row" or not leaf.shape:
        return flat
    row = leaf.shape[1:].numel()
    return flat.reshape((high - low) // row if row else 0, *leaf.shape[1:])
