"""Differentiable collectives of many leaves: one call per dtype, where one per leaf costs a latency each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .collective_checks import Split, check_match
from .differentiable import all_gather, check_axis, gather, reduce_scatter, reduced, scatter
from .group import Group

Tree = Mapping[str, Tensor]


def _split_of(tree: Tree) -> Split:
    return Split(tuple((name, tuple(leaf.shape), str(leaf.dtype)) for name, leaf in tree.items()))


def _flattened(tree: Tree, rows: int, out_rows: int, run: Callable[[Tensor, Split], Tensor]) -> dict[str, Tensor]:
    """Run one collective per dtype on leaves flattened side by side: two copies, where a call per leaf costs a latency.

    Args:
        tree: each leaf is cut in `rows` rows; row i of the flat tensor has row i of every leaf.
        rows: of the flat tensor that is sent.
        out_rows: of the flat tensor that comes back.
        run: the collective on the flat tensor.
    """
    out: dict[str, Tensor] = dict(tree)  # the order of the keys is the caller's
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, leaf in tree.items():
        by_dtype.setdefault(leaf.dtype, []).append(name)
    for names in by_dtype.values():
        widths = [tree[name].numel() // rows for name in names]
        blocks = [tree[name].reshape(rows, w) for name, w in zip(names, widths, strict=True)]
        split = _split_of(tree)
        flat = run(torch.cat(blocks, dim=1).reshape(-1), split)
        if len(set(split.leaves_by_rank)) > 1:
            out.update(_unflatten_uneven(flat, split, names))
            continue
        flat = flat.reshape(out_rows, sum(widths))
        for name, part in zip(names, flat.split(widths, dim=1), strict=True):
            first, *rest = tree[name].shape
            out[name] = part.reshape(first * out_rows // rows, *rest)
    return out


def _unflatten_uneven(flat: Tensor, split: Split, names: list[str]) -> dict[str, Tensor]:
    """The leaves of a gathered flat tensor, where lengths differ between ranks."""
    pieces: dict[str, list[Tensor]] = {name: [] for name in names}
    for part, leaves in zip(flat.split(split.rows), split.leaves_by_rank, strict=True):
        shapes = {name: torch.Size(shape) for name, shape, _ in leaves if name in pieces}
        for piece, name in zip(part.split([s.numel() for s in shapes.values()]), shapes, strict=True):
            pieces[name].append(piece.reshape(shapes[name]))
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def all_gather_tree(
    tree: Tree, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """`all_gather` of every leaf, (n, ...) -> (sum of n, ...), in one collective per dtype.

    `all_gather_tree(state.params, group)` of a sharded state has every leaf whole, and flat.

    >>> all_gather_tree({"a": torch.ones(2), "b": torch.zeros(0)}, Group())
    {'a': tensor([1., 1.]), 'b': tensor([])}
    """
    if group.size == 1:
        return {name: all_gather(leaf, group, dtype=dtype, reduce_dtype=reduce_dtype) for name, leaf in tree.items()}
    _check_rows(tree, 1, "all_gather", group)
    return _flattened(tree, 1, group.size, lambda x, split: gather(x, group, dtype, reduce_dtype, split))


def reduce_scatter_tree(
    tree: Tree, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """`reduce_scatter` of every leaf, (size * n, ...) -> (n, ...), in one collective per dtype."""
    if group.size == 1:
        return {
            name: reduce_scatter(leaf, group, dtype=dtype, reduce_dtype=reduce_dtype) for name, leaf in tree.items()
        }
    _check_rows(tree, group.size, "reduce_scatter", group)
    return _flattened(tree, group.size, 1, lambda x, split: scatter(x, group, dtype, reduce_dtype, split))


def _check_rows(tree: Tree, size: int, op: str, group: Group) -> None:
    """Raise on every rank where a leaf here cannot be cut in `size` parts, or where only other ranks have leaves."""
    bad = [leaf for leaf in tree.values() if leaf.dim() == 0 or leaf.shape[0] % size]
    if bad or not tree:
        check_match(op, torch.zeros((), device=group.device), group, _split_of(tree))
    if bad:
        check_axis(bad[0], size, op)


class _TreeCollective(Function):
    """The `jvp` and `vmap` rules of a collective of many leaves; each leaf keeps its batch axis."""

    def __init_subclass__(cls) -> None:
        def tangent(ctx: Any, *ts: Any) -> Any:
            return cls.apply(*ctx.args, *ts[3:])

        def batched(info: Any, in_dims: Any, *given: Any) -> Any:
            return cls.apply(*given), in_dims[3:]

        cls.jvp, cls.vmap = staticmethod(tangent), staticmethod(batched)  # type: ignore[assignment]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.args = inputs[:3]


class _ReplicateTree(_TreeCollective):
    """`replicate` of many leaves with one collective in backward and no copy in forward."""

    @staticmethod
    def forward(group: Group, reduce_dtype: torch.dtype | None, split: Split, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return (None, None, None, *_ReduceTree.apply(*ctx.args, *gs))  # type: ignore[misc]


class _ReduceTree(_TreeCollective):
    @staticmethod
    def forward(group: Group, reduce_dtype: torch.dtype | None, split: Split, *xs: Tensor) -> tuple[Tensor, ...]:
        tree = {str(i): x.reshape(-1) for i, x in enumerate(xs)}
        out = _flattened(tree, 1, 1, lambda x, _: reduced(x, group, reduce_dtype, Split(split.leaves)))
        return tuple(out[str(i)].view(x.shape) for i, x in enumerate(xs))

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return (None, None, None, *_ReplicateTree.apply(*ctx.args, *gs))  # type: ignore[misc]


def replicate_tree(tree: Tree, group: Group, *, reduce_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`replicate` of every leaf, of any shape; one collective per dtype in backward."""
    if group.size == 1 or not tree:
        return dict(tree)
    return dict(zip(tree, _ReplicateTree.apply(group, reduce_dtype, _split_of(tree), *tree.values()), strict=True))  # type: ignore[arg-type]


def all_reduce_tree(tree: Tree, group: Group, *, reduce_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`all_reduce` of every leaf, of any shape, in one collective per dtype."""
    if group.size == 1:
        return dict(tree)
    if not tree:
        _check_rows(tree, 1, "all_reduce", group)
        return {}
    return dict(zip(tree, _ReduceTree.apply(group, reduce_dtype, _split_of(tree), *tree.values()), strict=True))  # type: ignore[arg-type]
