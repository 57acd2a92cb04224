"""`low_precision_adam`: AdamW with parameters and moments in 16 bits, without losing small updates."""

from __future__ import annotations

from collections.abc import Mapping
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
    LeafStep,
    Leaves,
    Prepared,
    ScalarOrSchedule,
    Shadow,
    Transform,
    TransformState,
    at_once,
    check_dtype,
    check_format,
    check_seed,
    counter,
    format_of,
    like,
    moment_root,
    optimizer,
    transform,
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
    more: Any = dict(derived=_of_step, counterpart=torch.optim.AdamW)
    built = optimizer("low_precision_adam", lr, slots, how.formula, numbers, shared, settable, **more)
    if rounding == "kahan":
        built = replace(built, facts=replace(built.facts, shadows=(Shadow("compensation", residual=True),)))
    return _checked(built, how)


# With a larger beta1, a first moment rounded to nearest hardly changes, like a second moment at 0.999.
_NEAREST_MOMENT_BETA = 0.98

_LOW = (torch.bfloat16, torch.float16)


def _of_step(count: Any, lr: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an update, in double: the reordered form of Kingma & Ba (2015), section 2."""
    beta1, beta2, eps, weight_decay = numbers.values()

    def corrected(power1: Any, power2: Any) -> list[Any]:
        spread = (1 - power2) ** 0.5
        return [lr * spread / (1 - power1), eps * spread]

    # On a GPU all of it is one launch.
    rate, small = at_once(corrected, beta1**count, beta2**count)
    decay = lr * weight_decay
    return {
        "beta2": beta2,
        "weight1": 1 - beta1,
        "weight2": 1 - beta2,
        "rate": rate,
        "eps": small,
        "keep": 1 - decay,
        "decay": decay,
    }


@dataclass(frozen=True)
class _Rounded:
    """The formula, which rounds parameters and moments when it stores them.

    First moments are rounded to nearest, which has a third of the error variance, up to a `beta1` of 0.98. The second
    moment is rounded to nearest only if all are. With `beta2 = 0.999` a decay step takes away a thousandth, and
    neighbours in bf16 are 1/256 to 1/128 apart. So, rounded to nearest, a second moment would never fall, and would
    grow only by gradients that are large enough to reach the next number.

    Sources: Kingma and Ba, "Adam", ICLR 2015; Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR
    2019; Kahan, "Further remarks on reducing truncation errors", CACM 1965; Zamirai et al., "Revisiting BFloat16
    Training", 2020.
    """

    rounding: str
    seed: int
    state_dtype: torch.dtype

    def moment(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=self.state_dtype)

    def formula(self, p: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        m, v = slots["exp_avg"], slots["exp_avg_sq"]
        random, kahan = self.rounding != "nearest", self.rounding == "kahan"
        p32, g32, m32, v32 = p.float(), g.float(), m.float(), v.float()
        beta2, weight1, weight2, rate, eps, keep, decay = [at.scalar(x, p32) for x in at.derived.values()]
        m32 = (g32 - m32) * weight1 + m32
        v32 = v32 * beta2 + (g32 * weight2) * g32
        update = (m32 * rate) / (moment_root(v32) + eps)
        own: dict[str, Tensor] = {}
        if kahan:
            lost = slots["compensation"].float()
            # Infinite parameters stay infinite: inf * 0 and inf - inf must not happen, in this step or the next.
            # The decay is subtracted: subtracting zero keeps the sign of a parameter that is -0, adding it would not.
            pull = torch.where(p32.isfinite(), (p32 + lost) * decay, 0.0)
            drop = pull + update - lost
            x = (p32 - drop).to(p.dtype)
            rest = (p32 - x.float()) - drop
            own["compensation"] = torch.where(x.isfinite(), rest, 0.0).to(p.dtype)
        else:
            # Stream 0 is of the parameter, with the lower halves of its words, and of the second moment.
            x = self.stored(p32 * keep - update, p.dtype, random, at, 0)
        by_chance = random and at.numbers["beta1"] > _NEAREST_MOMENT_BETA
        m = self.stored(m32, m.dtype, by_chance, at, 1)
        v = self.stored(v32, v.dtype, random, at, 0, 16)
        return x, {"exp_avg": m, "exp_avg_sq": v, **own}

    def stored(self, x: Tensor, dtype: torch.dtype, by_chance: bool, at: LeafStep, stream: int, shift: int = 0) -> Any:
        """A result in the dtype in which it is stored; fp32 is stored as computed."""
        if not by_chance or dtype not in _LOW:
            return x.to(dtype)
        return at.at_random(x, dtype, self.seed, format_of(at.shared), stream, shift)


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
