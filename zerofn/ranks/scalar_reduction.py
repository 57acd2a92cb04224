"""Sums, maxima and means of scalars over ranks: norms, overflows, weights.

Where autograd or torch.func records them they are differentiable collectives. The derivative depends on the scalar:

* a scalar that a rank uses with its own shard, a norm or a rate, is `replicate`d: the cotangents of all shards add up;
* a metric is one number, made `alike` from such scalars: its cotangent is divided equally among ranks;
* the cotangent of a mean of scalars, one per rank, is a mean too: a rank's loss counts as one of many.
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
from .differentiable import alike, all_reduce, nothing_of, replicate
from .group import Group


@dataclass(frozen=True)
class RankReduction:
    """Reductions of scalars: sums over ranks with different shards, maxima and means over all.

    Attributes:
        shards: the groups over which leaves are sharded, one for each axis of a mesh.
        groups: all groups over which gradients are reduced.
        model: the groups over which the model itself is sharded, as by tensor parallelism.
        elsewhere: paths of leaves that all ranks of `model` have in full, and that another of them counts in sums.
        shared: whether any rank has such leaves.
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
                    "parameters that all ranks have in full would be counted on each of them",
                    "ctx.total(squared_norm, grads): of what, and how a number is made of it",
                )
            )
        return _reduced_by(_for_parts, (*self.shards, *self.model), x)

    def total(self, number: Callable[[dict[str, Tensor]], Any], leaves: dict[str, Tensor]) -> Tensor:
        if self.elsewhere:
            leaves = {path: _zero(x) if path in self.elsewhere else x for path, x in leaves.items()}
        found = number(leaves)
        found = found if isinstance(found, Tensor) else _as_tensor(found, leaves)
        return _reduced_by(_for_parts, (*self.shards, *self.model), found)

    def mean(self, x: Tensor) -> Tensor:
        return mean_over((*self.groups, *self.model), x)

    def max(self, x: Tensor) -> Tensor:
        # Some backends lose a NaN in a maximum, but no infinity.
        x = torch.where(torch.isnan(x), torch.full_like(x, torch.inf), x)
        alone = numbers_alone((x,))
        for group in (*self.groups, *self.model):
            x = _reduced(x, group, "max") if alone else _Maximum.apply(x.detach(), group)  # type: ignore[assignment]
        return x

    def replicate(self, x: Tensor) -> Tensor:
        return self._on_parts(x, replicate)

    def alike(self, x: Tensor) -> Tensor:
        return self._on_parts(x, alike)

    def _on_parts(self, x: Tensor, collective: Any) -> Tensor:
        """A collective that communicates only in backward, over the ranks that have shards of leaves."""
        for group in () if numbers_alone((x,)) else (*self.shards, *self.model):
            x = _on_group_device(group, x, collective)
        return x


def _zero(x: Any) -> Any:
    """A zero in the dtype of the sum, for a rank that adds nothing."""
    if not isinstance(x, Tensor):
        return 0.0
    return x[:0] if x.ndim else nothing_of(x).sum()


def _as_tensor(number: Any, leaves: dict[str, Tensor]) -> Tensor:
    """A Python number, such as the 0 that `sum` returns for no leaves at all, as a tensor that can be sent.

    A rank without elements may have such a number where others have a sum. So it gets the dtype of a sum, and depends
    on the leaves: otherwise that rank would not join when the others exchange derivatives.
    """
    none: Any = torch.zeros((), dtype=torch.float32)
    if leaves:
        none = sum(nothing_of(x).abs().sum() for x in leaves.values())
    return none.to(torch.promote_types(none.dtype, torch.float32)) + number


class _Maximum(Function):
    """A maximum over ranks without derivative, with the rules that torch.func asks for."""

    @staticmethod
    def forward(x: Tensor, group: Group) -> Tensor:
        return _reduced(x, group, "max")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, group: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, group: Group) -> tuple[Tensor, int]:  # type: ignore[override]
        return _Maximum.apply(x, group), in_dims[0]  # type: ignore[return-value]


def _for_parts(x: Tensor, group: Group) -> Tensor:
    return replicate(all_reduce(x, group), group)


def _reduced_by(collective: Callable[[Tensor, Group], Tensor], groups: Sequence[Group], x: Tensor) -> Tensor:
    """The sum over the ranks of all groups, by this collective where autograd records it."""
    alone = numbers_alone((x,))
    for group in groups:
        x = _reduced(x, group, "sum") if alone else _on_group_device(group, x, collective)
    return x


def _on_group_device(group: Group, x: Tensor, collective: Any) -> Tensor:
    return collective(x.to(group.device), group).to(x.device)


def _reduced(x: Tensor, group: Group, op: str) -> Tensor:
    out = x.to(group.device, copy=True)
    all_reduce_(out, group, op, numbers=True)
    return out.to(x.device)


def mean_over(groups: Sequence[Group], x: Tensor) -> Tensor:
    """The mean of a scalar over the ranks of all axes."""
    for group in groups:
        x = x if numbers_alone((x,)) else _on_group_device(group, x, replicate)
        x = _reduced_by(all_reduce, (group,), x) / group.size
    return x
