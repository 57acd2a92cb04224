"""Scalars over ranks: norms, overflows, weights.

Where they are recorded they are differentiable collectives. A number's derivative follows from what it is. One that all
ranks hold and compute alike, such as a norm, has one cotangent, which passes to each rank's part. One that a rank uses
with its own shard is `replicate`d first, and the cotangents of all shards add up. A mean of numbers that are each
rank's own has the mean of their cotangents, since a rank's loss counts as one of many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..kernels.recording import recorded
from .collectives import all_reduce_
from .differentiable import all_reduce, replicate
from .group import Group


@dataclass(frozen=True)
class OverRanks:
    """Scalars over ranks: sums over those that hold different shards, maxima over all.

    Attributes:
        shards: the groups that leaves are cut over, one for each axis of a mesh.
        groups: all groups.
    """

    shards: tuple[Group, ...]
    groups: tuple[Group, ...]

    def sum(self, x: Tensor) -> Tensor:
        for group in self.shards:
            x = _summed(x, group)
        return x

    def mean(self, x: Tensor) -> Tensor:
        return mean_over(self.groups, x)

    def max(self, x: Tensor) -> Tensor:
        # NaN compares as nothing, so some backends lose it in a maximum; infinity they do not.
        x = torch.where(torch.isnan(x), torch.full_like(x, torch.inf), x)
        for group in self.groups:
            x = _Maximum.apply(x.detach(), group) if recorded((x,)) else _over(x, group, "max")  # type: ignore[assignment]
        return x

    def replicate(self, x: Tensor) -> Tensor:
        for group in self.shards:
            x = _at(group, x, replicate)
        return x


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


def _summed(x: Tensor, group: Group) -> Tensor:
    return _at(group, x, all_reduce) if recorded((x,)) else _over(x, group, "sum")


def _at(group: Group, x: Tensor, collective: Any) -> Tensor:
    return collective(x.to(group.device), group).to(x.device)


def _over(x: Tensor, group: Group, op: str) -> Tensor:
    out = x.to(group.device, copy=True)
    all_reduce_(out, group, op)
    return out.to(x.device)


def mean_over(groups: Sequence[Group], x: Tensor) -> Tensor:
    """The mean of a scalar over the ranks of all axes."""
    for group in groups:
        x = _at(group, x, replicate) if recorded((x,)) else x
        x = _summed(x, group) / group.size
    return x
