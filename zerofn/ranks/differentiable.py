"""Collectives with derivatives and batching rules."""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._errors import explain
from ..kernels.recording import numbers_alone
from .backend import gather_objects
from .collectives import all_gather_into, all_reduce_, exchange_into, gather_numbers, reduce_scatter_into
from .group import Group

# ----------------------------------------------------------------------------------------------------------------------
# Ranks compare shapes and dtypes before a collective of the user's, because backends end the process on a mismatch.
#
# Each rank sends one message of two numbers. Collectives of a pipeline need none: its ranks agreed on all shapes when
# it was made.


class Rows(list[int]):
    """By rank, how many rows a tensor has. Its first collective fills this in.

    It has a class of its own: torch.func copies arguments that are plain lists.
    """


def check_match(op: str, x: Tensor, group: Group, rows: Rows | None = None, free: int | None = None) -> None:
    """Compare the tensors that ranks are about to send. Every rank of the group calls it.

    Args:
        op: the name of the collective.
        x: the tensor that this rank sends.
        group: the ranks.
        rows: filled, if it is empty, with the length of dimension `free` (or the first one) on each rank.
        free: the dimension whose length may differ between ranks.

    Raises:
        ValueError: on every rank, if anything else differs. The message says what each rank has.
    """
    length = x.shape[free or 0] if x.dim() else -1
    fixed = (op, x.dim(), tuple(n for i, n in enumerate(x.shape) if i != free), str(x.dtype))
    kinds, counts = zip(*gather_numbers([_digest(fixed), length], group, "match"), strict=True)
    if len(set(kinds)) > 1:
        raise ValueError(_differences(op, f"{op} of shape {tuple(x.shape)}, {x.dtype}", group))
    if rows is not None and not rows:
        rows[:] = counts


def _digest(x: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(x).encode(), digest_size=8).digest(), "big", signed=True)


def _differences(op: str, mine: str, group: Group) -> str:
    """The text of the error: what each rank sends, with equal ranks on one line."""
    holders: dict[str, list[int]] = {}
    for rank, what in zip(group.ranks, gather_objects(mine, group), strict=True):
        holders.setdefault(what, []).append(rank)
    lines = "\n".join(f"rank {', '.join(map(str, ranks))}: {what}" for what, ranks in holders.items())
    right = (
        "the same call on every rank, with one dtype and one shape; all_gather takes any number of rows from each, "
        "all_to_all any length of concat_dim"
    )
    return explain(f"{op} of what differs between ranks", lines, right)


# ----------------------------------------------------------------------------------------------------------------------
# Differentiable collectives are pairs of Functions, each the backward of the other, with `jvp` and `vmap` rules.
#
# Nothing simpler is right. A raw collective inside `backward` has no derivative of its own: a Hessian-vector product
# through it is silently wrong. `generate_vmap_rule` and torch's functional collectives fail or return garbage under
# `torch.func`.


def _gathered(x: Tensor, group: Group, dtype: torch.dtype, rows: Rows, name: str) -> Tensor:
    # A cast is elementwise and commutes with the gather, so the narrower of the two dtypes is sent.
    sent = (x.to(dtype) if dtype.itemsize < x.dtype.itemsize else x).contiguous()
    check_match(f"all_gather{name}", sent, group, rows, free=0)
    width, even = max(rows), len(set(rows)) == 1
    if not even:
        sent = torch.cat([sent, sent.new_zeros((width - len(sent), *sent.shape[1:]))])
    out = sent.new_empty((group.size * width, *sent.shape[1:]))
    all_gather_into(out, sent, group)
    if not even:
        out = torch.cat([part[:n] for part, n in zip(out.split(width), rows, strict=True)])
    return out.to(dtype)


def _scattered(
    x: Tensor, group: Group, dtype: torch.dtype, reduce_dtype: torch.dtype | None, rows: Rows, name: str
) -> Tensor:
    sent = x.to(reduce_dtype or x.dtype).contiguous()
    check_match(f"reduce_scatter{name}", sent, group)
    if not rows:
        rows[:] = [len(sent) // group.size] * group.size
    width, mine = max(rows), rows[group.rank]
    if len(set(rows)) > 1:
        padded = sent.new_zeros((group.size, width, *sent.shape[1:]))
        for row, part in zip(padded, sent.split(rows), strict=True):
            row[: len(part)] = part
        sent = padded.flatten(0, 1)
    out = sent.new_empty((width, *sent.shape[1:]))
    reduce_scatter_into(out, sent, group)
    return out[:mine].to(dtype)


def _reduced(x: Tensor, group: Group, reduce_dtype: torch.dtype | None, name: str) -> Tensor:
    sent = x.to(reduce_dtype or x.dtype)
    check_match(f"all_reduce{name}", sent, group)
    sent = sent.clone(memory_format=torch.contiguous_format) if sent is x else sent.contiguous()
    all_reduce_(sent, group)
    return sent.to(x.dtype)


class LinearCollective(Function):
    """The `jvp` and `vmap` rules of a collective: a linear map along axis 0 or elementwise.

    The tangent goes through the map itself, and a batch axis is moved to the end, where the map does not look.
    Autograd and `torch.func` call static methods without the class, so each class gets functions of its own.
    """

    def __init_subclass__(cls) -> None:
        def tangent(ctx: Any, t: Tensor, *_: Any) -> Any:
            return cls.apply(t, *ctx.args)

        def batched(info: Any, in_dims: tuple[Any, ...], x: Tensor, *args: Any) -> tuple[Tensor, int]:
            out = cls.apply(x.movedim(in_dims[0], -1), *args)
            return out, out.dim() - 1  # type: ignore[union-attr]

        cls.jvp, cls.vmap = staticmethod(tangent), staticmethod(batched)  # type: ignore[assignment]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, *args = inputs
        ctx.args, ctx.dtype = args, x.dtype


class _Gather(LinearCollective):
    @staticmethod
    def forward(x: Tensor, group: Group, dtype: Any, reduce_dtype: Any, rows: Rows, name: str) -> Tensor:
        return _gathered(x, group, dtype, rows, name)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        group, _, *rest = ctx.args
        return _Scatter.apply(g, group, ctx.dtype, *rest), None, None, None, None, None


class _Scatter(LinearCollective):
    @staticmethod
    def forward(x: Tensor, group: Group, dtype: Any, reduce_dtype: Any, rows: Rows, name: str) -> Tensor:
        return _scattered(x, group, dtype, reduce_dtype, rows, name)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        group, _, *rest = ctx.args
        return _Gather.apply(g, group, ctx.dtype, *rest), None, None, None, None, None


class _Replicate(LinearCollective):
    @staticmethod
    def forward(x: Tensor, group: Group, reduce_dtype: torch.dtype | None, name: str) -> Tensor:
        return x.view_as(x)  # no copy; autograd refuses to have it changed in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Reduce.apply(g, *ctx.args), None, None, None


class _Reduce(LinearCollective):
    @staticmethod
    def forward(x: Tensor, group: Group, reduce_dtype: torch.dtype | None, name: str) -> Tensor:
        return _reduced(x, group, reduce_dtype, name)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Replicate.apply(g, *ctx.args), None, None, None


class _Alike(LinearCollective):
    """The mean over ranks of a value that is the same on all of them, so nothing is sent."""

    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _Shared.apply(g, *ctx.args), None


class _Shared(LinearCollective):
    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return x / group.size

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (group,) = ctx.args
        return _Reduce.apply(g, group, None, "") / group.size, None  # type: ignore[operator]


def all_gather(
    x: Tensor, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """The shards of all ranks, one after the other: (n, ...) -> (sum of n, ...). Adjoint of `reduce_scatter`.

    Args:
        x: this rank's shard. `n` may differ between ranks and be zero, as in the shards that `zf.shard` makes.
        group: the ranks.
        dtype: of the result; by default that of `x`. An fp32 shard with `dtype=torch.bfloat16` is sent in bf16, and its
            gradient is fp32.
        reduce_dtype: in which cotangents are added; by default their own. They are returned in the dtype of `x`; a
            separate cast before the gather would round them.

    Raises:
        ValueError: on every rank, if dtypes or other dimensions differ between ranks.

    Examples:
        >>> all_gather(torch.arange(3.0), Group())
        tensor([0., 1., 2.])
    """
    return _gather(x, group, dtype, reduce_dtype, "")


def _gather(x: Tensor, group: Group, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, name: str) -> Tensor:
    if group.size == 1:
        return x.to(dtype or x.dtype)
    if x.dim() == 0:
        check_match(f"all_gather{name}", x, group)  # raises on the other ranks too
        _check_axis(x, 1, "all_gather")
    return _Gather.apply(x, group, dtype or x.dtype, reduce_dtype, Rows(), name)  # type: ignore[return-value]


def reduce_scatter(
    x: Tensor, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> Tensor:
    """This rank's rows of the sum over ranks: (size * n, ...) -> (n, ...). Adjoint of `all_gather`.

    Args:
        x: of one shape on all ranks.
        group: the ranks.
        dtype: of the result; by default that of `x`.
        reduce_dtype: in which numbers are added; by default the dtype of `x`.

    Raises:
        ValueError: on every rank, if axis 0 does not divide by the number of ranks, or shapes or dtypes differ.

    Examples:
        >>> reduce_scatter(torch.arange(3.0), Group(), dtype=torch.float64)
        tensor([0., 1., 2.], dtype=torch.float64)

    Notes:
        From three ranks on, the order in which an element is summed depends on its place in the buffer: two layouts of
        the same numbers agree to rounding, not bit for bit.
    """
    return _scatter(x, group, dtype, reduce_dtype, "")


def _scatter(x: Tensor, group: Group, dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, name: str) -> Tensor:
    if group.size == 1:
        return x.to(dtype or x.dtype)
    if x.dim() == 0 or x.shape[0] % group.size:
        check_match(f"reduce_scatter{name}", x, group)
        _check_axis(x, group.size, "reduce_scatter")
    return _Scatter.apply(x, group, dtype or x.dtype, reduce_dtype, Rows(), name)  # type: ignore[return-value]


def replicate(x: Tensor, group: Group, *, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """`x` itself, equal on all ranks; its cotangent is the sum over ranks. Adjoint of `all_reduce`.

    It is for a parameter that every rank has and uses on its own data.

    Args:
        x: of any shape, equal on all ranks.
        group: the ranks.
        reduce_dtype: in which cotangents are added; by default their own.

    Examples:
        >>> replicate(torch.ones(2), Group())
        tensor([1., 1.])
    """
    if group.size == 1:
        return x
    return _Replicate.apply(x, group, reduce_dtype, "")  # type: ignore[return-value]


def all_reduce(x: Tensor, group: Group, *, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """The sum over ranks, on every rank. Adjoint of `replicate`.

    The result is one value that all ranks have, so its cotangent is one value too: every rank must compute the same
    from it, and the cotangent passes through unchanged. (A sum over ranks would count it N times.)

    Args:
        x: of one shape on all ranks.
        group: the ranks.
        reduce_dtype: in which numbers are added; by default the dtype of `x`.

    Examples:
        >>> all_reduce(torch.ones(2), Group())
        tensor([1., 1.])
    """
    if group.size == 1:
        return x
    return _Reduce.apply(x, group, reduce_dtype, "")  # type: ignore[return-value]


def alike(x: Tensor, group: Group) -> Tensor:
    """`x` itself, equal on all ranks and used as one value; the cotangent is divided by the number of ranks.

    It is for a number computed from `replicate`d ones, which would otherwise count its cotangent once per rank.
    Inverse of `replicate`.

    >>> alike(torch.ones(2), Group())
    tensor([1., 1.])
    """
    if group.size == 1:
        return x
    return _Alike.apply(x, group)  # type: ignore[return-value]


def nothing_of(x: Tensor) -> Tensor:
    """A tensor without elements, of shape (0, 1), that is a function of `x`.

    A rank that has nothing for a collective sends this, so that all ranks make the same collectives in backward. Of
    shape (0,) `torch.cat` would leave it out of second derivatives.

    >>> nothing_of(torch.ones(2, 3)).shape
    torch.Size([0, 1])
    """
    return (x if x.dim() else x[None])[:0].reshape(0, 1)


def _check_axis(x: Tensor, size: int, what: str) -> None:
    if x.dim() == 0 or x.shape[0] % size:
        raise ValueError(
            f"{what} needs an axis 0 that divides by {size}, got shape {tuple(x.shape)}; flatten and pad it first"
        )


# ----------------------------------------------------------------------------------------------------------------------
# These functions run a differentiable collective on each leaf of a dict.
#
# Leaves have their names in the messages, so that ranks whose graphs use different leaves are told in backward.


Tree = Mapping[str, Tensor]


def _named(op: str, tree: Tree, group: Group, run: Callable[[Tensor, str], Tensor]) -> dict[str, Tensor]:
    """`run(leaf, name)` of each leaf, once all ranks have the same names."""
    names = gather_numbers([_digest(list(tree))], group, "match") if group.size > 1 else []
    if any(other != names[0] for other in names):
        leaves = ", ".join(f"{name}: {tuple(x.shape)} {x.dtype}" for name, x in tree.items())
        raise ValueError(_differences(op, f"{op} of {{{leaves}}}", group))
    return {name: run(x, f" of {name!r}") for name, x in tree.items()}


def all_gather_tree(
    tree: Tree, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """`all_gather` of every leaf, (n, ...) -> (sum of n, ...).

    `all_gather_tree(state.params, group)` of a sharded state returns every full leaf, flat.

    Args:
        tree: a dict of tensors.
        group: the ranks.
        dtype, reduce_dtype: as in `all_gather`.

    Raises:
        ValueError: on every rank, if leaves do not match between ranks.

    Examples:
        >>> all_gather_tree({"a": torch.ones(2), "b": torch.zeros(0)}, Group())
        {'a': tensor([1., 1.]), 'b': tensor([])}
    """
    return _named("all_gather", tree, group, lambda x, name: _gather(x, group, dtype, reduce_dtype, name))


def reduce_scatter_tree(
    tree: Tree, group: Group, *, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """`reduce_scatter` of every leaf, (size * n, ...) -> (n, ...).

    Args:
        tree: a dict of tensors.
        group: the ranks.
        dtype, reduce_dtype: as in `reduce_scatter`.

    Raises:
        ValueError: on every rank, if leaves do not match between ranks.

    Examples:
        >>> reduce_scatter_tree({"a": torch.ones(2)}, Group())
        {'a': tensor([1., 1.])}
    """
    return _named("reduce_scatter", tree, group, lambda x, name: _scatter(x, group, dtype, reduce_dtype, name))


def replicate_tree(tree: Tree, group: Group, *, reduce_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`replicate` of every leaf, of any shape.

    Args:
        tree: a dict of tensors, equal on all ranks.
        group: the ranks.
        reduce_dtype: as in `replicate`.

    Examples:
        >>> replicate_tree({"a": torch.ones(2)}, Group())
        {'a': tensor([1., 1.])}
    """
    if group.size == 1:
        return dict(tree)
    return {name: _Replicate.apply(x, group, reduce_dtype, f" of {name!r}") for name, x in tree.items()}  # type: ignore[misc]


def all_reduce_tree(tree: Tree, group: Group, *, reduce_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """`all_reduce` of every leaf, of any shape.

    Args:
        tree: a dict of tensors, of the same shapes on all ranks.
        group: the ranks.
        reduce_dtype: as in `all_reduce`.

    Raises:
        ValueError: on every rank, if leaves do not match between ranks.

    Examples:
        >>> all_reduce_tree({"a": torch.ones(2)}, Group())
        {'a': tensor([1., 1.])}
    """
    if group.size == 1:
        return dict(tree)
    return _named("all_reduce", tree, group, lambda x, name: _Reduce.apply(x, group, reduce_dtype, name))  # type: ignore[arg-type, return-value]


# ----------------------------------------------------------------------------------------------------------------------
# `all_to_all` gathers a tensor along the dimension in which it is sharded, and shards it along another.


def balanced(length: int, size: int) -> list[int]:
    """The lengths of the shards of `torch.tensor_split`: the first ones may be longer by one.

    >>> balanced(5, 4), balanced(2, 3)
    ([2, 1, 1, 1], [1, 1, 0])
    """
    return [length // size + (rank < length % size) for rank in range(size)]


def _exchanged(x: Tensor, group: Group, split_dim: int, concat_dim: int, splits: list[int], rows: Rows) -> Tensor:
    check_match(_call(split_dim, concat_dim, splits), x, group, rows, free=concat_dim)
    parts = x.split(splits, dim=split_dim)
    shapes = []
    for length in rows:
        shape = list(x.shape)
        shape[split_dim], shape[concat_dim] = splits[group.rank], length
        shapes.append(torch.Size(shape))
    sent = torch.cat([part.reshape(-1) for part in parts])
    got = sent.new_empty(sum(shape.numel() for shape in shapes))
    widths = [shape.numel() for shape in shapes]
    exchange_into(got, sent, widths, [part.numel() for part in parts], group)
    return torch.cat([p.view(shape) for p, shape in zip(got.split(widths), shapes, strict=True)], dim=concat_dim)


def _call(split_dim: int, concat_dim: int, splits: Sequence[int]) -> str:
    return f"all_to_all(split_dim={split_dim}, concat_dim={concat_dim}, splits={list(splits)})"


class _Exchange(LinearCollective):
    @staticmethod
    def forward(x: Tensor, group: Group, split_dim: int, concat_dim: int, splits: list[int], rows: Rows) -> Tensor:
        return _exchanged(x, group, split_dim, concat_dim, splits, rows)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        group, split_dim, concat_dim, _, rows = ctx.args
        return _Exchange.apply(g, group, concat_dim, split_dim, rows, Rows()), None, None, None, None, None


class _ExchangeRows(LinearCollective):
    @staticmethod
    def forward(x: Tensor, outs: list[int], ins: list[int], group: Group) -> Tensor:
        # Ranks have agreed on the lengths that they send, but a vmap may have added other batch dimensions.
        check_match("an exchange of rows", x, group, free=0)
        return _rows(x, outs, ins, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        outs, ins, group = ctx.args
        return _ExchangeRows.apply(g, ins, outs, group), None, None, None


def _rows(x: Tensor, outs: list[int], ins: list[int], group: Group) -> Tensor:
    got, wide = x.new_empty((sum(outs), *x.shape[1:])), math.prod(x.shape[1:])
    lengths = [n * wide for n in outs], [n * wide for n in ins]
    exchange_into(got.view(-1), x.contiguous().view(-1), *lengths, group)
    return got


def exchange_rows(x: Tensor, outs: list[int], ins: list[int], group: Group) -> Tensor:
    """Send `ins[r]` rows of `x` to each rank r, in turn; `outs[r]` rows of the result come from it.

    Its own adjoint, with the lengths swapped.
    """
    if numbers_alone((x,)):
        return _rows(x, outs, ins, group)
    return _ExchangeRows.apply(x, outs, ins, group)  # type: ignore[return-value]


def all_to_all(
    x: Tensor,
    group: Group,
    split_dim: int,
    concat_dim: int,
    *,
    splits: Sequence[int] | None = None,
    lengths: list[int] | None = None,
) -> Tensor:
    """Gather along `concat_dim` and shard along `split_dim`: chunk `r` of `x` along `split_dim` goes to rank `r`.

    It is its own adjoint, with the dimensions swapped. With `split_dim=1` and `concat_dim=2`, (batch, heads, chunk of
    the sequence, features) becomes (batch, chunk of the heads, sequence, features), the ranks' chunks one after the
    other. Each rank sends all but its own chunk: (N - 1) / N of its bytes.

    Args:
        x: this rank's tensor. Its length along `concat_dim` may differ between ranks; that along `split_dim` need not
            divide by the number of ranks.
        group: the ranks.
        split_dim: the dimension to shard; negative counts from the end.
        concat_dim: the dimension to gather.
        splits: the length along `split_dim` of each rank; by default those of `torch.tensor_split`. The way back needs
            them if ranks had different lengths.
        lengths: a list, which is filled with the length along `concat_dim` of each rank: the `splits` of the way back.

    Raises:
        ValueError: on every rank, if dtypes, arguments or other dimensions differ between ranks, the dimensions are not
            two of `x`, or `splits` does not add up to the length of `split_dim`.

    Examples:
        >>> all_to_all(torch.ones(2, 3), Group(), 0, 1)
        tensor([[1., 1., 1.],
                [1., 1., 1.]])
    """
    rows = Rows()
    out = _exchange(x, group, split_dim, concat_dim, splits, rows)
    if lengths is not None:
        lengths[:] = rows
    return out


def _exchange(
    x: Tensor, group: Group, split_dim: int, concat_dim: int, splits: Sequence[int] | None, rows: Rows
) -> Tensor:
    first, second = (d + x.dim() if d < 0 else d for d in (split_dim, concat_dim))
    wrong = ""
    if not (0 <= first < x.dim() and 0 <= second < x.dim() and first != second):
        wrong = f"needs two dimensions of x, which has {x.dim()}"
    elif splits is not None and (len(splits) != group.size or min(splits) < 0 or sum(splits) != x.shape[first]):
        wrong = f"needs {group.size} lengths that add up to {x.shape[first]}"
    if wrong:
        if group.size > 1:
            # The arguments of another rank may be right. This raises there too.
            check_match(_call(split_dim, concat_dim, splits or []), x, group)
        raise ValueError(f"{_call(split_dim, concat_dim, splits or [])} {wrong}")
    if group.size == 1:
        rows.append(x.shape[second])
        return x
    parts = balanced(x.shape[first], group.size) if splits is None else list(splits)
    return _Exchange.apply(x, group, first, second, parts, rows)  # type: ignore[return-value]


# ----------------------------------------------------------------------------------------------------------------------
# These functions refuse batches of `torch.func.vmap` whose lengths differ over ranks, or that `hessian` or `jacfwd`
# made.
#
# A vector in the layout of a sharded state is sharded like the state. A batch of such vectors is sent member by
# member: member i of every rank together. `jacfwd`, `hessian` and `jacrev` of a gradient make a batch on each rank,
# the basis vectors of this rank's shard. Member i of two ranks would be two basis vectors in one, and the result a sum
# of two columns. Such a batch differs from others in its numbers alone, so these are read: one pass over a batch, and
# one small message.


PRODUCTS = """products with vectors that are laid out as state.params is, alone or under vmap:
torch.func.jvp(torch.func.grad(fn_stored), (state.params,), (vector,))[1]
or what such products tell: zf.curvature.max_eigenvalue, spectrum, trace
or each rank's own Hessian, of full parameters, averaged:
own = torch.func.hessian(fn)(zf.full_params(tx, state), x)
mean = zf.collectives.all_reduce(own["w"]["w"], group) / group.size"""


def check_batch(batch: tuple[int, ...], path: str, group: Group, parts: Tensor | None = None) -> None:
    """Raise on every rank if the batches of `torch.func.vmap` on the ranks do not fit together.

    Every rank of the group must call `check_batch`, because it sends the shape of its batch to the other ranks.

    Args:
        batch: the shape of the batch.
        path: the path of the leaf.
        group: the ranks.
        parts: for a sharded leaf: this rank's shards of the members of the batch, of the shape `(members, elements)`.

    Raises:
        ValueError: the shapes of the batches differ between ranks. Or the members of `parts` are basis vectors of this
            rank's shard, as `hessian` and `jacfwd` make them, and another rank has basis vectors of its shard at the
            same places of the batch.
    """
    low, high = (0, 0) if parts is None else _basis(parts)
    rows = gather_numbers([zlib.crc32(repr(tuple(batch)).encode()), low, high], group, "match")
    bases = sorted((lo, hi, rank) for rank, (_, lo, hi) in zip(group.ranks, rows, strict=True) if lo < hi)
    differ = len({shape for shape, _, _ in rows}) > 1
    if bases and (differ or any(one[1] > two[0] for one, two in itertools.pairwise(bases))):
        raise ValueError(_no_basis(path))
    if differ:
        shapes = gather_objects(tuple(batch), group)
        by_rank = ", ".join(f"{shape} on rank {rank}" for rank, shape in zip(group.ranks, shapes, strict=True))
        raise ValueError(
            explain(
                f"torch.func.vmap over batches that differ between ranks, through {path}: {by_rank}",
                "each member of the batch is sent together with the same member of other ranks",
                "batches of one length on every rank: as many samples, or outputs of a Jacobian"
                + ("" if parts is None else f". Where it was torch.func.hessian, jacfwd or jacrev:\n{PRODUCTS}"),
            )
        )


def _basis(parts: Tensor) -> tuple[int, int]:
    """The range of members of a batch that are basis vectors of this rank's shard, first and end; else (0, 0).

    `chunk_size` may cut a basis anywhere. A single vector counts as a basis vector if its one nonzero is 1.
    """
    members, elements = parts.shape
    count = int(torch.count_nonzero(parts))
    if not 0 < count <= min(members, elements):
        return 0, 0
    i, j = torch.nonzero(parts).unbind(1)
    diagonal = bool((i - i[0] == torch.arange(count, device=i.device)).all()) and bool((j - i == j[0] - i[0]).all())
    if not diagonal or (count == 1 and float(parts[i[0], j[0]]) != 1.0):
        return 0, 0
    return int(i[0]), int(i[-1]) + 1


def _no_basis(path: str) -> str:
    return explain(
        f"torch.func.hessian, jacfwd, or jacrev of a gradient, of a bound function on several ranks ({path})",
        "the stored parameters are spread over ranks, and every rank has put in the basis of its own part at the same "
        "time:\nmember by member these are one vector, so columns would be added up",
        PRODUCTS,
    )
