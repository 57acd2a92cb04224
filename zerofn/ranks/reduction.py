"""Scalars over ranks: norms, overflows, weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .collectives import all_reduce_
from .group import Group


@dataclass(frozen=True)
class OverRanks:
    """Scalars over ranks: sums over those that hold different shards, maxima over all."""

    shards: Group | None
    groups: tuple[Group, ...]

    def sum(self, x: Tensor) -> Tensor:
        return x if self.shards is None else self._all(x, self.shards, "sum")

    def mean(self, x: Tensor) -> Tensor:
        return mean_over(self.groups, x)

    def max(self, x: Tensor) -> Tensor:
        # NaN compares as nothing, so some backends lose it in a maximum; infinity they do not.
        x = torch.where(torch.isnan(x), torch.full_like(x, torch.inf), x)
        for group in self.groups:
            x = self._all(x, group, "max")
        return x

    def _all(self, x: Tensor, group: Group, op: str) -> Tensor:
        return _over(x, group, op)


def _over(x: Tensor, group: Group, op: str) -> Tensor:
    out = x.to(group.device, copy=True)
    all_reduce_(out, group, op)
    return out.to(x.device)


def mean_over(groups: Sequence[Group], x: Tensor) -> Tensor:
    """The mean of a scalar over the ranks of all axes."""
    for group in groups:
        x = _over(x, group, "sum") / group.size
    return x
