"""`scale_by_adam`, `trace`, `add_decayed_weights` and `scale_by_lr`: the steps of optimizers, named as in optax."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..extend import (
    Context,
    Elementwise,
    Facts,
    Joining,
    LeafStep,
    Leaves,
    ScalarOrSchedule,
    Transform,
    TransformState,
    check_flag,
    check_lr,
    check_number,
    direction,
    like,
    moment_root,
    optimizer,
    plus,
    plus_product,
    transform,
)
from .adam import check_adam, unbiased, with_moment_check


@transform
def scale_by_adam(betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> Transform:
    """The direction of Adam's update, without a learning rate (Kingma & Ba, 2015).

    `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g^2`, `u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)`.
    The moments are kept in the stored dtype of the parameters. End the chain with `scale_by_lr`.

    Args:
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment.

    Raises:
        ValueError: an argument is out of range; when the state is made, a parameter is stored in fp16.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.scale_by_adam(), zf.clip_by_value(0.5), zf.scale_by_lr(0.1))
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> zf.update(tx, {"w": torch.ones(1)}, state)[0].params["w"]
        tensor([-0.0500])

    Notes:
        `chain(scale_by_adam(), add_decayed_weights(d), scale_by_lr(lr))` is the formula of `adamw(lr, weight_decay=d)`,
        and without the decay that of `adam`. Each part makes its own pass over the leaves and rounds once more, so an
        update differs by two units in the last place. `adamw` makes one pass, by torch's fused kernel.
    """
    check_adam("scale_by_adam", 0.0, betas, eps, 0.0)

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2, small = at.numbers.values()
        size, spread = at.derived.values()
        m, v = slots["exp_avg"], slots["exp_avg_sq"]
        m = plus(m, 1 - beta1, g - m)
        v = plus_product(v * beta2, 1 - beta2, g, g)
        return size * m / (moment_root(v) / spread + small), {"exp_avg": m, "exp_avg_sq": v}

    numbers = {"beta1": betas[0], "beta2": betas[1], "eps": eps}
    slots, how = {"exp_avg": like, "exp_avg_sq": like}, {"in_fp32": True, "rounds_grads": True}
    built = direction("scale_by_adam", slots, formula, numbers, unbiased, **how)
    return with_moment_check(built)


@transform
def trace(decay: float, nesterov: bool = False) -> Transform:
    """Momentum: `m = decay * m + g`, starting from zeros; with `nesterov`, `g + decay * m` (Sutskever et al., 2013).

    The momentum is kept in the stored dtype of the parameters, to which it is rounded once; the direction is in fp32 at
    least.

    Args:
        decay: in [0, 1).
        nesterov: whether to look ahead by one step.

    Raises:
        ValueError: `decay` is out of range, or `nesterov` is not a bool.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.trace(0.5), zf.scale_by_lr(1.0))
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> for _ in range(2):
        ...     state, _ = zf.update(tx, {"w": torch.ones(1)}, state)
        >>> state.params["w"]
        tensor([-2.5000])

    Notes:
        In fp32 and fp64 `chain(trace(0.9), scale_by_lr(lr))` is `sgd(lr, momentum=0.9)` to the last bit.
    """
    check_number("trace", "decay", decay, high=1.0)
    check_flag("trace", "nesterov", nesterov)

    def formula(p: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        beta = at.numbers["decay"]
        m = slots["momentum"] * beta + g
        return plus(g, beta, m) if nesterov else m, {"momentum": m}

    return direction("trace", {"momentum": like}, formula, {"decay": decay}, in_fp32=True, rounds_grads=True)


@transform
def add_decayed_weights(weight_decay: float) -> Transform:
    """Add `weight_decay * p` to each gradient.

    Between `scale_by_adam` and `scale_by_lr` this is AdamW's decoupled decay (Loshchilov & Hutter, 2019). Before
    `scale_by_adam` it is an L2 penalty, as in Adam. For some leaves only: `zf.masked(zf.add_decayed_weights(0.1),
    mask)`.

    Args:
        weight_decay: not negative.

    Raises:
        ValueError: `weight_decay` is negative or not a number.

    Examples:
        >>> import torch, zerofn as zf
        >>> zf.add_decayed_weights(0.5).update({"w": torch.ones(1)}, {}, {"w": torch.full((1,), 4.0)})[0]
        {'w': tensor([3.])}
    """
    check_number("add_decayed_weights", "weight_decay", weight_decay)

    decayed = Elementwise(lambda g, p, decay: plus(g, decay, p.to(g.dtype)))

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        return decayed(ctx, grads, params, decay=ctx.replicated(weight_decay))[0], state

    facts = Facts(directs=True, keeps=False, capturable=True)
    return Transform("add_decayed_weights", needs="element", facts=facts, update_fn=Joining(update))


@transform
def scale_by_lr(lr: ScalarOrSchedule) -> Transform:
    """End a chain of directions: `p - lr * u`, in fp32 at least, rounded once to the stored dtype.

    It is the chain's optimizer: `opt.param_groups`, torch's schedulers and the metric `lr` show its rate.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).

    Raises:
        ValueError: `lr` is negative or not a number.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.trace(0.9), zf.scale_by_lr(zf.schedules.cosine(0.1, 100)))
        >>> state = zf.init(tx, {"w": torch.zeros(1)})
        >>> zf.update(tx, {"w": torch.ones(1)}, state)[0].params["w"]
        tensor([-0.1000])
    """
    check_lr("scale_by_lr", lr)

    def formula(p: Tensor, u: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        return plus(p, -at.lr, u), {}

    return optimizer("scale_by_lr", lr, {}, formula, in_fp32=True)
