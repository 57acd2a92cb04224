"""Differentiable collectives of many leaves: one call for each dtype, where one per leaf would cost a latency each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .collective_checks import Cut, match
from .differentiable import all_gather, check_axis, gather, reduce_scatter, reduced, scatter
from .group import Group

Tree = Mapping[str, Tensor]


def _about(tree: Tree) -> Cut:
    return Cut(tuple((name, tuple(leaf.shape), str(leaf.dtype)) for name, leaf in tree.items()))


def _coalesced(tree: Tree, rows: int, out_rows: int, run: Callable[[Tensor, Cut], Tensor]) -> dict[str, Tensor]:
    """Runs one flat collective per dtype: each leaf is cut in `rows` rows, rows of all leaves lie side by
    side, and come back as `out_rows`. Two copies, where one call per leaf would cost a latency each."""
    out: dict[str, Tensor] = dict(tree)  # the order of the keys is the caller's
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, leaf in tree.items():
        by_dtype.setdefault(leaf.dtype, []).append(name)
    for names in by_dtype.values():
        widths = [tree[name].numel() // rows for name in names]
        cut = [tree[name].reshape(rows, w) for name, w in zip(names, widths, strict=True)]
        about = _about(tree)
        flat = run(torch.cat(cut, dim=1).reshape(-1), about)
        if len(set(about.every)) > 1:
            out.update(_uneven(flat, about, names))
            continue
        flat = flat.reshape(out_rows, sum(widths))
        for name, part in zip(names, flat.split(widths, dim=1), strict=True):
            first, *rest = tree[name].shape
            out[name] = part.reshape(first * out_rows // rows, *rest)
    return out


def _uneven(flat: Tensor, about: Cut, names: list[str]) -> dict[str, Tensor]:
    """Leaves from the parts of all ranks, one after the other, in which each has leaves of its own lengths."""
    pieces: dict[str, list[Tensor]] = {name: [] for name in names}
    for part, leaves in zip(flat.split(about.rows), about.every, strict=True):
        shapes = {name: torch.Size(shape) for name, shape, _ in leaves if name in pieces}
        for piece, name in zip(part.split([s.numel() for s in shapes.values()]), shapes, strict=True):
            pieces[name].append(piece.reshape(shapes[name]))
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def all_gather_tree(
    tree: Tree, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """`all_gather` of every leaf, (n, ...) -> (sum of n, ...), in one collective per dtype.

    Of a sharded state too: `all_gather_tree(state.params, group)` has every leaf whole, and flat.

    >>> all_gather_tree({"a": torch.ones(2), "b": torch.zeros(0)}, Group())
    {'a': tensor([1., 1.]), 'b': tensor([])}
    """
    if group.size == 1:
        return {name: all_gather(leaf, group, dtype=dtype, reduce_dtype=reduce_dtype) for name, leaf in tree.items()}
    _check_rows(tree, 1, "all_gather", group)
    return _coalesced(tree, 1, group.size, lambda x, cut: gather(x, group, dtype, reduce_dtype, cut))


def reduce_scatter_tree(
    tree: Tree, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """`reduce_scatter` of every leaf, (size * n, ...) -> (n, ...), in one collective per dtype."""
    if group.size == 1:
        return {
            name: reduce_scatter(leaf, group, dtype=dtype, reduce_dtype=reduce_dtype) for name, leaf in tree.items()
        }
    _check_rows(tree, group.size, "reduce_scatter", group)
    return _coalesced(tree, group.size, 1, lambda x, cut: scatter(x, group, dtype, reduce_dtype, cut))


def _check_rows(tree: Tree, size: int, op: str, group: Group) -> None:
    """Raise on every rank where a leaf here cannot be cut in `size` parts, or where only other ranks have leaves."""
    bad = [leaf for leaf in tree.values() if leaf.dim() == 0 or leaf.shape[0] % size]
    if bad or not tree:
        match(op, torch.zeros((), device=group.device), group, _about(tree))
    if bad:
        check_axis(bad[0], size, op)


class _OfAll(Function):
    """What the two below share; under `vmap` each leaf has the batch axis."""

    def __init_subclass__(cls) -> None:
        def tangent(ctx: Any, *ts: Any) -> Any:
            return cls.apply(*ctx.args, *ts[3:])

        def batched(info: Any, in_dims: Any, *given: Any) -> Any:
            return cls.apply(*given), in_dims[3:]

        cls.jvp, cls.vmap = staticmethod(tangent), staticmethod(batched)  # type: ignore[assignment]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.args = inputs[:3]


class _ReplicateAll(_OfAll):
    """`replicate` of many leaves with one collective in backward and no copy in forward."""

    @staticmethod
    def forward(group: Group, reduce_dtype: torch.dtype | None, cut: Cut, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return (None, None, None, *_ReduceAll.apply(*ctx.args, *gs))  # type: ignore[misc]


class _ReduceAll(_OfAll):
    @staticmethod
    def forward(group: Group, reduce_dtype: torch.dtype | None, cut: Cut, *xs: Tensor) -> tuple[Tensor, ...]:
        tree = {str(i): x.reshape(-1) for i, x in enumerate(xs)}
        out = _coalesced(tree, 1, 1, lambda x, _: reduced(x, group, reduce_dtype, Cut(cut.leaves)))
        return tuple(out[str(i)].view(x.shape) for i, x in enumerate(xs))

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return (None, None, None, *_ReplicateAll.apply(*ctx.args, *gs))  # type: ignore[misc]


def replicate_tree(tree: Tree, group: Group, *, reduce_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`replicate` of every leaf, of any shape; one collective per dtype in backward."""
    if group.size == 1 or not tree:
        return dict(tree)
    return dict(zip(tree, _ReplicateAll.apply(group, reduce_dtype, _about(tree), *tree.values()), strict=True))  # type: ignore[arg-type]


def all_reduce_tree(tree: Tree, group: Group, *, reduce_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`all_reduce` of every leaf, of any shape, in one collective per dtype."""
    if group.size == 1:
        return dict(tree)
    if not tree:
        _check_rows(tree, 1, "all_reduce", group)
        return {}
    return dict(zip(tree, _ReduceAll.apply(group, reduce_dtype, _about(tree), *tree.values()), strict=True))  # type: ignore[arg-type]
