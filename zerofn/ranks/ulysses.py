"""Sequence parallelism: each rank has a part of every sequence, and attention a part of the heads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from .all_to_all import all_to_all, balanced, exchange
from .collective_checks import Split
from .collectives import gather_numbers
from .differentiable import all_gather
from .group import Group
from .process_groups import group_for

Attention = Callable[..., Any]


def around(attention: Attention, group: Group, heads: int, sequence: int) -> Attention:
    """`attention` over whole sequences, as a function of this rank's part of them.

    Args:
        attention: a function of queries, keys and values, of a mask as fourth argument or `attn_mask`, and of
            anything else. group: the ranks that share a sequence. heads: the dimension of heads. sequence: the
            dimension of positions.
    """

    @functools.wraps(attention)
    def parallel(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if group.size == 1:
            return attention(query, key, value, *args, **kwargs)
        if args and isinstance(args[0], Tensor):
            kwargs, args = {"attn_mask": args[0], **kwargs}, args[1:]
            if args:
                raise TypeError("arguments of attention that follow the mask are given by keyword: is_causal=True")
        of_heads = query.dim() + heads if heads < 0 else heads
        of_positions = query.dim() + sequence if sequence < 0 else sequence
        key, value = (_repeated(x, query, group.size, of_heads) for x in (key, value))
        splits = [Split(), Split(), Split()]
        q, k, v = (
            exchange(x, group, of_heads, of_positions, None, split)
            for x, split in zip((query, key, value), splits, strict=True)
        )
        mask = kwargs.get("attn_mask")
        if isinstance(mask, Tensor):
            own = query.shape[of_positions], key.shape[of_positions]
            whole = q.shape[of_positions], k.shape[of_positions]
            kwargs["attn_mask"] = _of_my_heads(_whole(mask, own, whole, group), query.shape[of_heads], group)
        out = attention(q, k, v, *args, **kwargs)
        if out.dim() != q.dim() or any(out.shape[d] != q.shape[d] for d in (of_heads, of_positions)):
            raise ValueError(
                explain(
                    f"an attention that makes {tuple(out.shape)} of queries {tuple(q.shape)}",
                    f"what it returns goes back to the ranks by its heads, dimension {of_heads}, and positions, "
                    f"dimension {of_positions}",
                    "sequence_parallel(attention, mesh, heads=2, sequence=1) for (batch, sequence, heads, features)",
                )
            )
        return all_to_all(out, group, of_positions, of_heads, splits=splits[0].rows)

    return parallel


def _repeated(x: Tensor, query: Tensor, size: int, heads: int) -> Tensor:
    """Keys or values of fewer heads than queries: repeated, where a cut by heads would take them from their queries."""
    many, few = query.shape[heads], x.shape[heads]
    if many == few or (many % size == 0 and few % size == 0) or not few or many % few:
        return x
    return x.repeat_interleave(many // few, dim=heads)


def _whole(mask: Tensor, own: tuple[int, int], whole: tuple[int, int], group: Group) -> Tensor:
    """A mask (..., queries, keys) of whole sequences: as given, or gathered if each rank has that of its part."""
    shape = (1, 1, *mask.shape)[-2:]
    rows, dims = gather_numbers([*shape, *own, *whole], group, "match"), mask.dim()

    def is_on_all(i: int) -> set[str]:
        ways = {"one": lambda row: 1, "own": lambda row: row[2 + i], "whole": lambda row: row[4 + i]}
        return {way for way, length in ways.items() if all(row[i] == length(row) for row in rows)}

    queries, keys = is_on_all(0), is_on_all(1)
    if queries & {"one", "whole"} and keys & {"one", "whole"}:
        return mask
    if "own" in keys and "one" in queries:
        return all_gather(mask.movedim(-1, 0), group).movedim(0, -1)
    if "own" in queries and keys & {"one", "whole"}:
        return all_gather(mask.movedim(dims - 2, 0), group).movedim(0, dims - 2)
    raise ValueError(
        explain(
            f"attn_mask of {tuple(mask.shape)} for parts of {own[0]} queries and {own[1]} keys",
            f"attention sees whole sequences, {whole[0]} queries and {whole[1]} keys, and the mask is of other ones",
            f"a mask of (..., {whole[0]}, {whole[1]}) for all; of (..., {own[0]}, {whole[1]}) for this rank's "
            "queries and all keys;\n"
            f"of (..., 1, {own[1]}) for this rank's keys, as padding is told; or is_causal=True",
        )
    )


def _of_my_heads(mask: Tensor, heads: int, group: Group) -> Tensor:
    if mask.dim() < 3 or mask.shape[-3] == 1 or mask.shape[-3] != heads:
        return mask
    return mask.split(balanced(heads, group.size), dim=-3)[group.rank]


def sequence_mean(losses: Tensor, mesh: Any = None, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The mean loss over the tokens of whole sequences of which each rank has a part, and the number of tokens.

    Under sequence parallelism each rank's gradient has parts of all ranks' losses in it. So a mean over this rank's
    tokens, weighted afterwards, is wrong where ranks have unequal numbers of them. This mean is one number on all
    ranks of `mesh`, and its gradients, averaged over ranks as transforms do it, are those of one process. If other
    ranks have other sequences, the number of tokens is the weight: `zf.accumulate(k, weighted=True)` and
    `opt.step(weight=tokens)`.

    Args:
        losses: one for each of this rank's tokens, of any shape.
        mesh: the ranks that share a sequence: a one-dimensional `DeviceMesh`, or `None` for all.
        weights: of `losses`' shape, 0 or False where a token does not count; by default all count alike.

    Returns:
        The mean, in the dtype of `losses`, and the sum of the weights over ranks in float64. Without any weight both
        are 0.

    Raises:
        ValueError: `weights` has another shape.

    >>> import torch, zerofn as zf
    >>> zf.sequence_mean(torch.tensor([1.0, 2.0, 9.0]), weights=torch.tensor([True, True, False]))
    (tensor(1.5000), tensor(2., dtype=torch.float64))
    """
    group = group_for("sequence_mean", mesh)
    if weights is not None and weights.shape != losses.shape:
        raise ValueError(
            f"weights of shape {tuple(weights.shape)} for losses of shape {tuple(losses.shape)}: one for each"
        )
    counts = torch.ones_like(losses, dtype=torch.float64) if weights is None else weights.double()
    wide = losses.double()
    # A loss that does not count may be NaN.
    total = torch.where(counts == 0, torch.zeros_like(wide), wide * counts).sum()
    # The backward of the gather adds up N equal cotangents, since the mean is the same number on N ranks; the mean of
    # gradients over ranks divides by N again. In float64, so that counts above 2**24 are exact.
    sums = all_gather(torch.stack((total, counts.sum())).view(1, 2), group).sum(0)
    tokens = sums[1].detach()
    return (sums[0] / torch.where(tokens == 0, torch.ones_like(tokens), tokens)).to(losses.dtype), tokens
