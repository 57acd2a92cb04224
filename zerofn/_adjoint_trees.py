"""Differentiable collectives of many leaves: one call for each dtype, where one per leaf would cost a latency each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ._adjoint import all_gather, check_axis, reduce_scatter, reduced
from ._group import Group

Tree = Mapping[str, Tensor]


def _coalesced(tree: Tree, rows: int, out_rows: int, run: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Runs one flat collective per dtype: each leaf is cut in `rows` rows, rows of all leaves lie side by
    side, and come back as `out_rows`. Two copies, where one call per leaf would cost a latency each."""
    out: dict[str, Tensor] = dict(tree)  # the order of the keys is the caller's
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, leaf in tree.items():
        by_dtype.setdefault(leaf.dtype, []).append(name)
    for names in by_dtype.values():
        widths = [tree[name].numel() // rows for name in names]
        cut = [tree[name].reshape(rows, w) for name, w in zip(names, widths, strict=True)]
        flat = run(torch.cat(cut, dim=1).reshape(-1)).reshape(out_rows, sum(widths))
        for name, part in zip(names, flat.split(widths, dim=1), strict=True):
            first, *rest = tree[name].shape
            out[name] = part.reshape(first * out_rows // rows, *rest)
    return out


def all_gather_tree(
    tree: Tree, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """`all_gather` of every leaf, (n, ...) -> (size * n, ...), in one collective per dtype.

    >>> all_gather_tree({"a": torch.ones(2), "b": torch.zeros(0)}, Group())
    {'a': tensor([1., 1.]), 'b': tensor([])}
    """
    run = lambda x: all_gather(x, group, dtype=dtype, reduce_dtype=reduce_dtype)  # noqa: E731
    if group.size == 1:
        return {name: run(leaf) for name, leaf in tree.items()}
    for leaf in tree.values():
        check_axis(leaf, 1, "all_gather")
    return _coalesced(tree, 1, group.size, run)


def reduce_scatter_tree(
    tree: Tree, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """`reduce_scatter` of every leaf, (size * n, ...) -> (n, ...), in one collective per dtype."""
    run = lambda x: reduce_scatter(x, group, dtype=dtype, reduce_dtype=reduce_dtype)  # noqa: E731
    if group.size == 1:
        return {name: run(leaf) for name, leaf in tree.items()}
    for leaf in tree.values():
        check_axis(leaf, group.size, "reduce_scatter")
    return _coalesced(tree, group.size, 1, run)


class _ReplicateAll(Function):
    """`replicate` of many leaves with one collective in backward and no copy in forward."""

    @staticmethod
    def forward(group: Group, reduce_dtype: torch.dtype | None, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.args = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return (None, None, *_ReduceAll.apply(*ctx.args, *gs))  # type: ignore[misc]

    @staticmethod
    def jvp(ctx: Any, *ts: Any) -> Any:
        return _ReplicateAll.apply(*ctx.args, *ts[2:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, group: Group, reduce_dtype: Any, *xs: Tensor) -> Any:
        return _ReplicateAll.apply(group, reduce_dtype, *xs), in_dims[2:]


class _ReduceAll(Function):
    @staticmethod
    def forward(group: Group, reduce_dtype: torch.dtype | None, *xs: Tensor) -> tuple[Tensor, ...]:
        tree = {str(i): x.reshape(-1) for i, x in enumerate(xs)}
        out = _coalesced(tree, 1, 1, lambda x: reduced(x, group, reduce_dtype))
        return tuple(out[str(i)].view(x.shape) for i, x in enumerate(xs))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.args = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *gs: Tensor) -> Any:
        return (None, None, *_ReplicateAll.apply(*ctx.args, *gs))  # type: ignore[misc]

    @staticmethod
    def jvp(ctx: Any, *ts: Any) -> Any:
        return _ReduceAll.apply(*ctx.args, *ts[2:])

    @staticmethod
    def vmap(info: Any, in_dims: Any, group: Group, reduce_dtype: Any, *xs: Tensor) -> Any:
        return _ReduceAll.apply(group, reduce_dtype, *xs), in_dims[2:]


def replicate_tree(tree: Tree, group: Group, *, reduce_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`replicate` of every leaf, of any shape; one collective per dtype in backward."""
    if group.size == 1 or not tree:
        return dict(tree)
    return dict(zip(tree, _ReplicateAll.apply(group, reduce_dtype, *tree.values()), strict=True))  # type: ignore[arg-type]


def all_reduce_tree(tree: Tree, group: Group, *, reduce_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`all_reduce` of every leaf, of any shape, in one collective per dtype."""
    if group.size == 1 or not tree:
        return dict(tree)
    return dict(zip(tree, _ReduceAll.apply(group, reduce_dtype, *tree.values()), strict=True))  # type: ignore[arg-type]
