"""Scalars over ranks: norms, overflows, weights.

Where they are recorded they are differentiable collectives. A number's derivative follows from what it is. One that all
ranks hold and compute alike, such as a norm, has one cotangent, which passes to each rank's part. One that a rank uses
with its own shard is `replicate`d first, and the cotangents of all shards add up. A mean of numbers that are each
rank's own has the mean of their cotangents, since a rank's loss counts as one of many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._errors import explain
from ..kernels.recording import numbers_alone
from .collectives import all_reduce_
from .differentiable import all_reduce, replicate
from .group import Group


@dataclass(frozen=True)
class OverRanks:
    """Scalars over ranks: sums over those that hold different shards, maxima over all.

    Attributes:
        shards: the groups that leaves are cut over, one for each axis of a mesh.
        groups: all groups that gradients are reduced over.
        model: those over which the model itself is cut.
        elsewhere: the leaves that another rank of these counts in sums, by path.
        shared: whether there is any such leaf, on some rank.
    """

    shards: tuple[Group, ...]
    groups: tuple[Group, ...]
    model: tuple[Group, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    shared: bool = False

    def sum(self, x: Tensor) -> Tensor:
        if self.shared:
            raise ValueError(
                explain(
                    "ctx.reduction.sum(x) of a model that is itself cut over ranks",
                    "parameters that are whole on all of those would be counted on each, and a number does not tell",
                    "ctx.total(squared_norm, grads): of what, and how a number is made of it",
                )
            )
        return _summed(x, *self.shards, *self.model)

    def total(self, number: Callable[[dict[str, Tensor]], Tensor], leaves: dict[str, Tensor]) -> Tensor:
        if self.elsewhere:
            leaves = {path: _nothing(x) if path in self.elsewhere else x for path, x in leaves.items()}
        return _summed(number(leaves), *self.shards, *self.model)

    def mean(self, x: Tensor) -> Tensor:
        return mean_over(self.groups, x)

    def max(self, x: Tensor) -> Tensor:
        # NaN compares as nothing, so some backends lose it in a maximum; infinity they do not.
        x = torch.where(torch.isnan(x), torch.full_like(x, torch.inf), x)
        alone = numbers_alone((x,))
        for group in (*self.groups, *self.model):
            x = _over(x, group, "max") if alone else _Maximum.apply(x.detach(), group)  # type: ignore[assignment]
        return x

    def replicate(self, x: Tensor) -> Tensor:
        for group in () if numbers_alone((x,)) else (*self.shards, *self.model):
            x = _at(group, x, replicate)
        return x


def _nothing(x: Tensor) -> Tensor:
    """A zero in the dtype that the sum is made in, for a rank that adds nothing."""
    return x.new_zeros((0,) if x.ndim else ())


class _Maximum(Function):
    """A maximum over ranks, which has no derivative, as torch.func wants it."""

    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return _over(x, group, "max")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, group: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, group: Group) -> tuple[Tensor, int]:  # type: ignore[override]
        return _Maximum.apply(x, group), in_dims[0]  # type: ignore[return-value]


def _summed(x: Tensor, *groups: Group) -> Tensor:
    alone = numbers_alone((x,))
    for group in groups:
        x = _over(x, group, "sum") if alone else _at(group, x, all_reduce)
    return x


def _at(group: Group, x: Tensor, collective: Any) -> Tensor:
    return collective(x.to(group.device), group).to(x.device)


def _over(x: Tensor, group: Group, op: str) -> Tensor:
    out = x.to(group.device, copy=True)
    all_reduce_(out, group, op)
    return out.to(x.device)


def mean_over(groups: Sequence[Group], x: Tensor) -> Tensor:
    """The mean of a scalar over the ranks of all axes."""
    for group in groups:
        x = x if numbers_alone((x,)) else _at(group, x, replicate)
        x = _summed(x, group) / group.size
    return x
