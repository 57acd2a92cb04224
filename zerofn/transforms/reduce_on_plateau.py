"""`reduce_on_plateau`: an optimizer whose learning rate falls when the loss no longer does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..extend import (
    Context,
    Layout,
    Leaves,
    Prepared,
    Transform,
    TransformState,
    check_count,
    check_number,
    rate_of,
    transform,
    wrapped,
    wrapped_optimizer,
)

NUMBERS = ("scale", "best", "waited", "cooling", "mean", "losses")


@transform
def reduce_on_plateau(
    transform: Transform,
    factor: float = 0.1,
    patience: int = 10,
    rtol: float = 1e-4,
    atol: float = 0.0,
    cooldown: int = 0,
    accumulation_size: int = 1,
    min_scale: float = 0.0,
) -> Transform:
    """Wrap an optimizer whose learning rate is multiplied by `factor` when the loss stays on a plateau.

    The loss of an update is the mean over ranks and over the window of `accumulate`. The losses of every
    `accumulation_size` updates are averaged. An average is better if it is below `(1 - rtol) * best - atol`, and then
    becomes `best`. After `patience` averages in a row that are not better, the scale of the learning rate is multiplied
    by `factor`. Decoupled weight decay is scaled too, since it is multiplied by the learning rate. optax's
    `reduce_on_plateau` is a member of a chain: it scales the updates of the transforms before it.

    A step of `zf.make_step` passes its own loss; pass another one, such as a validation loss, by `loss=`. Otherwise
    write `opt.backward(loss)`, `opt.step(loss=loss)` or `zf.update(tx, grads, state, loss=loss)`.

    Args:
        transform: an optimizer with a learning rate, or a `partition` of such optimizers.
        factor: what the scale is multiplied by, in (0, 1).
        patience: how many averages in a row are not better before the scale changes.
        rtol: the relative part of the least improvement, in [0, 1]. An average is better if it is below
            `(1 - rtol) * best - atol`.
        atol: the absolute part of the least improvement. An average is better if it is below
            `(1 - rtol) * best - atol`.
        cooldown: how many averages after a change of the scale do not count towards `patience`.
        accumulation_size: how many losses are averaged.
        min_scale: the least scale.

    Raises:
        ValueError: an argument is out of range, or `transform` is no optimizer, or has no learning rate; or a step is
            not given the loss.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.reduce_on_plateau(zf.sgd(1.0), factor=0.5, patience=2)
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> for loss in (3.0, 3.0, 3.0, 1.0):
        ...     state, metrics = zf.update(tx, {"w": torch.ones(1)}, state, loss=loss)
        ...     print(float(metrics["lr"]))
        1.0
        1.0
        0.5
        0.5
    """
    check_number("reduce_on_plateau", "factor", factor, high=1.0)
    check_count("reduce_on_plateau", "patience", patience, "averages")
    check_number("reduce_on_plateau", "rtol", rtol, high=1.0 + 1e-12)
    check_number("reduce_on_plateau", "atol", atol)
    check_number("reduce_on_plateau", "cooldown", cooldown)
    check_count("reduce_on_plateau", "accumulation_size", accumulation_size, "losses")
    check_number("reduce_on_plateau", "min_scale", min_scale)

    def after(s: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
        """The numbers after a loss."""
        losses = s["losses"] + 1
        mean = s["mean"] + (loss.detach() - s["mean"]) / losses
        due, better = losses == accumulation_size, mean < (1 - rtol) * s["best"] - atol
        waited = torch.where(better, 0.0, s["waited"] + 1)
        falls, cools = (waited >= patience) & (s["cooling"] <= 0), s["cooling"] > 0
        new = {
            "scale": torch.where(falls, (s["scale"] * factor).clamp(min=min_scale), s["scale"]),
            "best": torch.where(better, mean, s["best"]),
            "waited": torch.where(falls | cools, 0.0, waited),
            "cooling": torch.where(falls, float(cooldown), (s["cooling"] - 1).clamp(min=0)),
            "mean": torch.zeros_like(mean),
            "losses": torch.zeros_like(losses),
        }
        going = {**s, "mean": mean, "losses": losses}
        return {name: torch.where(due, x, going[name]) for name, x in new.items()}

    def wrap(inner: Transform) -> Transform:
        def init(leaves: Leaves, layout: Layout) -> TransformState:
            like: Any = next(iter(leaves.values())) if leaves else torch.zeros(())
            none = like.new_zeros((), dtype=torch.promote_types(like.dtype, torch.float32))
            first = {"scale": none + 1, "best": none + torch.inf}
            return {f"plateau_{name}": first.get(name, none).clone() for name in NUMBERS}

        def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
            s = {name: state[f"plateau_{name}"] for name in NUMBERS}
            if ctx.given:
                s = after(s, ctx.loss)
            scale = ctx.number(s["scale"]) if s["scale"].is_cpu else s["scale"]
            rates = {**ctx.lr, ctx.prefix: rate_of(inner, state, ctx) * scale}
            made = inner.prepare_fn(state, grads, params, replace(ctx, lr=rates))
            return replace(made, state={**made.state, **{f"plateau_{name}": x for name, x in s.items()}})

        return wrapped(inner, init, inner.update_fn, prepare, wants=("loss",))

    return wrapped_optimizer("reduce_on_plateau", transform, wrap, "its learning rate is what falls")
