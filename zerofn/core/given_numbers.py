"""Numbers that a step is given beside gradients, such as the loss: their means over ranks and windows."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..kernels.recording import where
from .arguments import plain, weight_of
from .context import Context, Prepared, missing_number
from .layout import Layout, Leaves
from .transform import Transform, TransformState

WEIGHT = "given_weight"


def check_given(names: Set[str], wanted: Mapping[str, str], call: str) -> None:
    """Refuse numbers that no transform wants, and a step without one that a transform wants.

    Args:
        names: of the numbers that the step is given.
        wanted: by name, the transform that wants it.
        call: how a step is given one, for messages, as `opt.step({}=...)`.

    Raises:
        TypeError: no transform wants a number of that name.
        ValueError: one that is wanted is missing.
    """
    for name in sorted(names - wanted.keys()):
        why = f"no transform of this pipeline wants {name}, so it would have no effect"
        right = "a chain with zf.scale_by_polyak(), or no such argument" if name == "loss" else "no such argument"
        raise TypeError(explain(call.format(name), why, right))
    for name in wanted.keys() - names:
        raise missing_number(name, wanted[name])


def means_over_ranks(
    given: Mapping[str, Any], weight: Any, largest: Mapping[str, tuple[int, ...]], leaves: Leaves, ctx: Context
) -> tuple[dict[str, Tensor], Tensor]:
    """The mean of each number over ranks, weighted if the micro-batch has a weight, and the mean of the weights.

    Each is a 0-d tensor where the parameters are, in fp32 or wider. One message carries all of them, and another one
    the tensors of `largest`, by name and shape, of which each element is the largest of all ranks'.
    """
    first = next(iter(leaves.values())) if leaves else torch.zeros(())
    dtype = torch.promote_types(first.dtype, torch.float32)
    numbers = {name: _number(name, x, largest.get(name, ()), ctx).to(first.device, dtype) for name, x in given.items()}
    means = {name: x for name, x in numbers.items() if name not in largest}
    row, own = [*means.values()], torch.ones((), dtype=dtype, device=first.device)
    if weight is not None:
        own = weight_of(weight).to(own)
        # A micro-batch of weight 0 counts for nothing, even if its mean loss is 0 / 0.
        row = [torch.where(own != 0, x, torch.zeros_like(x)) * own for x in row]
    *row, own = ctx.reduction.mean(torch.stack([*row, own])).unbind()
    if weight is not None:
        row = [x / torch.where(own != 0, own, torch.ones_like(own)) for x in row]
    numbers.update(zip(means, row, strict=True))
    if largest:
        most = {name: numbers[name].detach() for name in largest}
        row = ctx.reduction.max(torch.cat([x.reshape(-1) for x in most.values()]))
        parts = row.split([x.numel() for x in most.values()])
        numbers.update({name: part.view(x.shape) for (name, x), part in zip(most.items(), parts, strict=True)})
    return numbers, own


def _number(name: str, value: Any, shape: tuple[int, ...], ctx: Context) -> Tensor:
    x = plain(value)
    if isinstance(x, Tensor):
        good = tuple(x.shape) == shape and not x.is_complex() and x.dtype is not torch.bool
    else:
        good = not shape and isinstance(x, int | float) and not isinstance(x, bool)
    if not good:
        shown = f"tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(value)
        why = f"the {name} of a step is a tensor of shape {shape}" if shape else f"the {name} of a step is one number"
        right = f"{name}=losses.mean()" if name == "loss" else f"{name}={f'torch.zeros({shape})' if shape else 0.5}"
        raise ValueError(explain(f"{name}=<{shown}>", why, right))
    if ctx.unread and not ctx.verdicts and not isinstance(x, Tensor):
        why = "a replay of the captured step would use the Python number of this step"
        raise ValueError(explain(f"{name}={x!r} in a step that can be captured", why, f"{name}=tensor, 0-d"))
    x = x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
    return x if ctx.recorded else x.detach()


def with_sums_of_given(
    names: Set[str], largest: Mapping[str, tuple[int, ...]], t: Transform, paths: Set[str], place: str
) -> Transform:
    """A transform that holds gradients for a window, with the means of given numbers over that window.

    State: the sum of each number since the window began, the sum of their weights, and the largest elements of tensors.
    """
    if not t.facts.holds:
        return t

    def begun(like: Tensor) -> dict[str, Tensor]:
        """The entries where a window begins."""
        sums = {f"{name}_sum": torch.zeros_like(like) for name in sorted(names - largest.keys())}
        most = {f"{name}_largest": like.new_full(shape, -torch.inf) for name, shape in largest.items()}
        return {**sums, **most, WEIGHT: torch.zeros_like(like)}

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        first = next(iter(leaves.values())) if leaves else torch.zeros(())
        like = first.new_zeros((), dtype=torch.promote_types(first.dtype, torch.float32))
        return {**t.init_fn(leaves, layout), **begun(like)}

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        made = t.prepare_fn(state, grads, params, ctx)
        if not ctx.given:
            return made
        weight = ctx.given_weight if t.facts.weighted else 1.0
        new: dict[str, Tensor] = {WEIGHT: state[WEIGHT] + weight}
        # `accumulate` refuses a window without weight. Here its sum is divided by 1, so that no NaN comes first.
        total = new[WEIGHT]
        divisor = torch.where(total != 0, total, torch.ones_like(total)) if ctx.averaged else 1.0
        found = {}
        for name, x in ctx.given.items():
            if name in largest:
                key = f"{name}_largest"
                found[name] = new[key] = torch.maximum(state[key], x)
            else:
                key = f"{name}_sum"
                new[key] = state[key] + weight * x
                found[name] = new[key] / divisor
        first = begun(total)
        new = {key: where(made.emit, first[key], x) for key, x in new.items()}
        return replace(made, state={**made.state, **new}, given=found)

    return replace(t, init_fn=init, prepare_fn=prepare)
