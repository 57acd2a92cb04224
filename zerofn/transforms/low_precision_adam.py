"""`low_precision_adam`: AdamW with parameters and moments in 16 bits, without losing small updates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, explain
from ..extend import (
    FORMAT,
    FORMAT_ENTRY,
    Context,
    Layout,
    LeafList,
    LeafStep,
    Leaves,
    Prepared,
    ScalarOrSchedule,
    Shadow,
    Transform,
    TransformState,
    adam_,
    adam_on_device,
    adam_operator,
    adam_update,
    check_dtype,
    check_format,
    check_seed,
    counter,
    format_of,
    has_kernel,
    leaf_key,
    like,
    optimizer,
    transform,
    with_kernel,
)
from .adam import check_adam

ROUNDINGS = ("stochastic", "nearest", "kahan")


@transform
def low_precision_adam(
    lr: ScalarOrSchedule = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    state_dtype: torch.dtype = torch.bfloat16,
    rounding: str = "stochastic",
    seed: int = 0,
) -> Transform:
    """AdamW on 16-bit states: fp32 arithmetic, and one rounding for each stored number.

    The formula is that of `adamw`. A bf16 number has 8 significant bits, so rounding to nearest loses an update that is
    below half a unit in the last place. Late in training most updates are. With `betas[1] = 0.999` a bf16 second moment
    would never fall, because its decay by a thousandth is below half a unit. So by default parameters and second
    moments are rounded *stochastically*: up or down, with the probabilities that make the mean right.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient, multiplied by `lr`.
        state_dtype: dtype of both moments, bf16 or fp32.
        rounding: of 16-bit parameters: `"stochastic"`; `"kahan"`, which keeps the lost low bits in a buffer of the
            parameter's dtype (Kahan, 1965; 2 more bytes per parameter); or `"nearest"`.
        seed: of the stochastic rounding, an int of 64 bits.

    Raises:
        ValueError: an argument is out of range; or `state_dtype` is fp16, whose smallest positive number, 6e-8, is far
            above squared gradients; or `rounding` is unknown; or (when the state is made) a parameter is in float64, or
            `rounding` has no effect, because every stored number is fp32.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.precision(store_dtype=torch.bfloat16), zf.low_precision_adam(lr=0.1))
        >>> state = zf.init(tx, {"w": torch.zeros(2)})
        >>> state, _ = zf.update(tx, {"w": torch.ones(2)}, state)
        >>> state.params["w"].dtype
        torch.bfloat16

    Notes:
        Random bits depend on seed, update, path and global element index, not on sharding, buckets or resuming. The
        state's entry `rounding_format` is the format of the draws: a run goes on, bit for bit, as it began.

        Inside of torch.func and under autograd values have the same bits. Derivatives pass straight through each
        rounding, as through the identity (Bengio et al., 2013); cotangents of 16-bit states have 16 bits. Under
        `"kahan"` what rounding loses has the derivative zero.
    """
    check_adam("low_precision_adam", lr, betas, eps, weight_decay)
    _check_arguments(state_dtype, rounding, seed)
    how = _Rounded(rounding, seed, state_dtype)
    slots = {"exp_avg": how.moment, "exp_avg_sq": how.moment}
    if rounding == "kahan":
        slots["compensation"] = like
    numbers = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
    shared = {FORMAT_ENTRY: lambda: counter(FORMAT)}
    settable = {"betas": tuple(betas), "weight_decay": weight_decay}
    built = optimizer(
        "low_precision_adam",
        lr,
        slots,
        how.formula,
        numbers,
        shared,
        settable,
        counterpart=torch.optim.AdamW,
    )
    built = with_kernel(built, how.run, how.takes)
    if rounding == "kahan":
        built = replace(built, facts=replace(built.facts, shadows=(Shadow("compensation", residual=True),)))
    return _checked(built, how)


@dataclass(frozen=True)
class _Rounded:
    """The kernel on lists of leaves and the formula on one; both round parameters and moments when they store them."""

    rounding: str
    seed: int
    state_dtype: torch.dtype

    def moment(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=self.state_dtype)

    def run(self, group: LeafList) -> None:
        kernels = {"graph": self.graph_kernel, "device": self.device_kernel}
        kernels.get(group.where, self.kernel)(group)

    def takes(self, group: LeafList) -> list[bool]:
        if group.where == "graph":
            found = has_kernel(group.params, group.grads, group.slots["exp_avg"], self.rounding)
            return [found] * len(group.params)
        return [True] * len(group.params)

    def kernel(self, group: LeafList) -> None:
        numbers = {key: float(x) for key, x in group.numbers.items()}
        lists = group.params, group.grads, *group.slots.values()
        adam_(*lists, step=group.count, lr=group.lr, norms=group.norms, **numbers, **self.draws(group))

    def device_kernel(self, group: LeafList) -> None:
        numbers: Any = dict(group.numbers)
        lists = group.params, group.grads, *group.slots.values()
        how: Any = dict(steps=group.count, lr=group.lr, comes=group.comes, norms=group.norms)
        adam_on_device(*lists, **how, **numbers, **self.draws(group))

    def graph_kernel(self, group: LeafList) -> None:
        lists = group.params, group.grads, *group.slots.values()
        adam_operator(*lists, step=group.count, lr=group.lr, **group.numbers, **self.draws(group))

    def draws(self, group: LeafList) -> dict[str, Any]:
        """The arguments that determine the random bits of these leaves."""
        keys, form = [leaf_key(path) for path in group.paths], format_of(group.shared)
        return dict(rounding=self.rounding, seed=self.seed, form=form, offsets=group.offsets, keys=keys)

    def formula(self, p: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        several = not isinstance(p, Tensor)
        key, offset = (list(map(leaf_key, at.paths)), at.offsets) if several else (leaf_key(at.path), at.offset)
        where: Any = dict(key=key, offset=offset, form=format_of(at.shared))
        how: Any = dict(rounding=self.rounding, seed=self.seed, **where)
        x, *made = adam_update(p, g, *slots.values(), step=at.count, lr=at.lr, **at.numbers, **how)
        return x, dict(zip(slots, made, strict=True))


def _checked(built: Transform, how: _Rounded) -> Transform:
    """`built`, which refuses leaves that cannot be rounded, and states with an unknown format of random bits."""

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        _check_leaves(leaves, how.rounding, how.state_dtype)
        return built.init_fn(leaves, layout)

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        check_format("low_precision_adam", state, ctx)
        return built.prepare_fn(state, grads, params, ctx)

    return replace(built, init_fn=init, prepare_fn=prepare)


def _check_arguments(state_dtype: torch.dtype, rounding: str, seed: int) -> None:
    if state_dtype is torch.float16:
        raise ValueError(
            explain(
                "low_precision_adam(state_dtype=torch.float16)",
                "squared gradients fall below fp16's smallest number, 6e-8, so the second moment would be zero",
                "low_precision_adam(state_dtype=torch.bfloat16)",
            )
        )
    check_dtype("low_precision_adam", "state_dtype", state_dtype, (torch.bfloat16, torch.float32))
    if rounding not in ROUNDINGS:
        known = ", ".join(map(repr, ROUNDINGS))
        raise ValueError(
            explain(
                f"low_precision_adam(rounding={rounding!r})", f"rounding is one of {known}", "rounding='stochastic'"
            )
        )
    check_seed("low_precision_adam", seed)


def _check_leaves(leaves: Leaves, rounding: str, state_dtype: torch.dtype) -> None:
    """Refuse float64, and a rounding without effect because all stored numbers are fp32."""
    wide = [(p, f"stored in {x.dtype}; it computes in float32") for p, x in leaves.items() if x.dtype == torch.float64]
    if wide:
        right = "zf.precision(store_dtype=torch.bfloat16) before it, or zf.adamw(...)"
        raise ValueError(bad_leaves("low_precision_adam: too wide to be kept in 16 bits", wide, right))
    low = [p for p, x in leaves.items() if x.dtype in (torch.bfloat16, torch.float16)]
    useless = (rounding == "kahan" and not low) or (
        rounding == "stochastic" and not low and state_dtype == torch.float32
    )
    if useless and leaves:
        rows = [(p, f"stored in {x.dtype}") for p, x in leaves.items()]
        raise ValueError(
            bad_leaves(
                f"low_precision_adam(rounding={rounding!r}, state_dtype={state_dtype}) has nothing to round",
                rows,
                "zf.precision(store_dtype=torch.bfloat16) before it, or zf.adamw(...)",
            )
        )
