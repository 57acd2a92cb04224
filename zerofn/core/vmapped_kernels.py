"""Kernels under torch.func.vmap: called on a list of the leaves of all members of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._compat.functorch import as_batch, beneath_functorch, only_vmap, stacked
from .layout import Leaves
from .leaf_arguments import Given, LeafList
from .transform import TransformState

Kernel = Callable[[LeafList], None]


class Members:
    """The members of a batch under vmap.

    Args:
        level: of the vmap.
        tensors: some of them batched; from these its size is known.
    """

    def __init__(self, level: int, tensors: list[Any]):
        self.level = level
        with beneath_functorch():
            found = [batch for x in tensors if isinstance(x, Tensor) and (batch := stacked(x)) is not None]
        self.size = len(found[0]) if found else 0
        # Of a batched tensor torch.func does not say whether autograd follows it.
        inner = [*found, *(x for x in tensors if isinstance(x, Tensor))]
        self.plain = self.size > 0 and not (torch.is_grad_enabled() and any(x.requires_grad for x in inner))

    def each(self, x: Any) -> list[Any]:
        """What each member has of `x`: its own, or all the same."""
        batch = stacked(x) if isinstance(x, Tensor) else None
        return [x] * self.size if batch is None else list(batch.unbind())

    def own(self, x: Tensor, donate: bool) -> Tensor:
        """One member behind the other, to be written: in the memory of `x` where that may be, else in new one."""
        batch = stacked(x)
        if batch is None:
            batch = x.expand(self.size, *x.shape)
        elif donate and batch.is_contiguous():
            return batch
        return batch.clone(memory_format=torch.contiguous_format)


def kernel_on_members(kernel: Kernel, given: Given) -> tuple[Leaves, TransformState] | None:
    """New parameters and slots by a kernel on lists of the leaves of all members; `None` where it cannot be taken.

    It can be taken in one vmap, with nothing inside or outside of it that differentiates. Members with one rate and one
    number of updates share a list, as leaves do. Their new values have memory of their own where it is chosen
    afterwards which members skip the step.
    """
    level = only_vmap()
    grads, params, slots, counts, lr, numbers, common, ctx = given
    if level is None or not grads:
        return None
    listed = [x for p in grads for x in (grads[p], params[p], counts[p], *(old[p] for old in slots.values()))]
    members = Members(level, [*listed, lr, *numbers.values(), *common.values()])
    if not members.plain:
        return None
    with beneath_functorch(), torch.no_grad():
        if ctx.donate_to_kernels:
            ctx.written.add(ctx.prefix)
        new = {p: members.own(params[p], ctx.donate_to_kernels) for p in grads}
        own = {slot: {p: members.own(old[p], ctx.donate_to_kernels) for p in grads} for slot, old in slots.items()}
        for group in _lists(members, given._replace(params=new, slots=own)):
            kernel(group)
        back = {slot: {p: as_batch(x, level) for p, x in of_leaf.items()} for slot, of_leaf in own.items()}
        return {p: as_batch(x, level) for p, x in new.items()}, back


def _lists(members: Members, given: Given) -> list[LeafList]:
    """Lists of leaves of members, each with one count, one rate, and one value of each hyperparameter."""
    grads, params, slots, counts, lr, numbers, common, ctx = given
    alike = not any(isinstance(x, Tensor) and stacked(x) is not None for x in (lr, *numbers.values(), *common.values()))
    rates, rest = members.each(lr), [{k: members.each(x) for k, x in named.items()} for named in (numbers, common)]
    found: dict[tuple[int, int], LeafList] = {}
    for p, g in grads.items():
        states = [x[p].unbind() for x in slots.values()]
        columns = members.each(g), params[p].unbind(), members.each(counts[p]), *states
        for i, (grad, param, count, *own) in enumerate(zip(*columns, strict=True)):
            key = int(count), 0 if alike else i
            if key not in found:
                theirs: Any = [{k: x[i] for k, x in named.items()} for named in rest]
                found[key] = LeafList([], [], {slot: [] for slot in slots}, key[0], rates[i], [], [], *theirs)
            group = found[key]
            group.params.append(param)
            group.grads.append(grad)
            group.paths.append(p)
            group.offsets.append(ctx.offsets.get(p, 0))
            for slot, x in zip(slots, own, strict=True):
                group.slots[slot].append(x)
    return list(found.values())
