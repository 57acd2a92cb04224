"""`soap`: Adam in the basis in which Shampoo's preconditioners are diagonal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..extend import (
    LeafStep,
    Plans,
    ScalarOrSchedule,
    Transform,
    by_shape,
    check_count,
    moment_root,
    optimizer,
    plus,
    plus_product,
    transform,
    where,
    with_lists,
)
from .adam import check_adam, unbiased
from .shampoo import SIDES, apart, as_matrix, gram, refuse_derivative, sides_of, spectrum, square, wide, written

# Numbers that differ by less than so many roundings of the largest one are not told apart.
NOISE = 32


@transform
def soap(
    lr: ScalarOrSchedule = 3e-3,
    betas: tuple[float, float] = (0.95, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    precondition_frequency: int = 10,
    max_precond_dim: int = 10000,
) -> Transform:
    """SOAP (Vyas et al., 2024, algorithm 3), for matrices; other leaves have Adam's update.

    `L` and `R` are averages of `g g^T` and `g^T g` by `b2`, and `Q`, `P` their eigenvectors. The first update makes
    them and nothing else. Then `m = b1 m + (1 - b1) g`; `v = b2 v + (1 - b2) (Q^T g P)^2`; `u = Q ((Q^T m P / (1 -
    b1^s)) / (sqrt(v / (1 - b2^s)) + eps)) P^T` with `s = t - 1`; `p -= lr * u`; `p *= 1 - lr * weight_decay`; and then
    `L` and `R`. Every `precondition_frequency` updates one step of a power iteration follows, `Q = qr(L Q)`.

    A side of more than `max_precond_dim` rows or columns has no basis. A leaf of more than two dimensions is reshaped
    to a matrix with the rows of its first dimension. States are in fp32 or wider. It needs whole leaves
    (`needs="leaf"`): a sharded leaf is gathered on one rank, its owner, which has its state and computes its bases.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        betas: decay of the two moments, each in [0, 1). The second number is the decay of `L` and `R` too.
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient, multiplied by `lr`.
        precondition_frequency: updates from one step of the power iteration to the next.
        max_precond_dim: the largest side with a basis.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: a step is differentiated.
        FloatingPointError: the first gradient of a leaf was NaN or infinite.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.soap(lr=0.1, weight_decay=0.0)
        >>> state = zf.init(tx, {"w": torch.zeros(2, 2)})
        >>> for _ in range(2):  # the first one makes the bases
        ...     state, _ = zf.update(tx, {"w": torch.tensor([[3.0, 0.0], [0.0, -5.0]])}, state)
        >>> state.params["w"].diagonal()
        tensor([-0.1000,  0.1000])

    Notes:
        If the rows, or the columns, of a leaf's first gradient are linearly dependent, `L` or `R` has an eigenvalue
        zero several times, and any basis of that space is one of eigenvectors. Here, and wherever singular values of
        the gradient are equal up to 32 roundings of the largest, the eigenvectors are those of `L + t D` for `t` to 0,
        with 0, the root of 1, the root of 2, ... in the diagonal of `D`. In a power iteration a column of `L Q` that
        the columns before it span, up to 32 roundings, is replaced by the old column of `Q`.

        In a direction in which every gradient is zero but for rounding the update is as large as the rounding divided
        by `eps`, as in Adam.
    """
    check_adam("soap", lr, betas, eps, weight_decay)
    check_count("soap", "precondition_frequency", precondition_frequency, "updates")
    check_count("soap", "max_precond_dim", max_precond_dim, "numbers")

    def corrections(count: Any, rate: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
        # The first update moves nothing, so corrections count from the second one. At the first any number does.
        return unbiased(where(count > 1, lambda: count - 1, lambda: count), rate, numbers)

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2, small, decay, rate = *at.numbers.values(), at.lr
        size, spread = at.derived.values()
        new = dict(slots)
        sides, first = sides_of(x, max_precond_dim), at.count == 1
        due = (at.count - 1) % precondition_frequency == 0
        refuse_derivative("soap", sides, x, g, *slots.values(), at.lr, *at.numbers.values())
        bases = {side: slots[f"{side}_basis"] for side in sides}

        m = _average(slots["exp_avg"], g, beta1)
        v, u = _adam(slots["exp_avg_sq"], _turned(g, bases), _turned(m, bases), beta2, small, size, spread)
        moved = _moved(x, _turned_back(u, bases), rate, decay)
        if sides:
            moved, m, v = (
                where(first, old, now) for old, now in ((x, moved), (slots["exp_avg"], m), (slots["exp_avg_sq"], v))
            )
        new |= {"exp_avg": m, "exp_avg_sq": v}
        for side in sides:
            new[side] = total = _average(slots[side], gram(as_matrix(g), side), beta2)
            turn = partial(where, due, partial(_iterated, total, bases[side]), bases[side])
            new[f"{side}_basis"] = where(first, partial(_eigenvectors, as_matrix(g), side, [at.path]), turn)
        return moved, new

    def of_leaves(lists: list[Any], numbers: Mapping[str, Any], about: Any) -> Any:
        p, g, m, v = lists
        g, n = g.to(torch.float32), numbers
        m = _average(m, g, n["beta1"])
        v, u = _adam(v, g, m, n["beta2"], n["eps"], n["size"], n["spread"])
        return [_moved(p.to(torch.float32), u, n["rate"], n["weight_decay"]).to(p.dtype), m, v], []

    def of_momenta(lists: list[Any], numbers: Mapping[str, Any], about: Any) -> Any:
        m, g = lists
        return [_average(m, g.to(torch.float32), numbers["beta1"])], []

    def of_turned(lists: list[Any], numbers: Mapping[str, Any], about: Any) -> Any:
        v, g, m = lists
        v, u = _adam(v, g, m, numbers["beta2"], numbers["eps"], numbers["size"], numbers["spread"])
        return [u, v], []

    def of_updates(lists: list[Any], numbers: Mapping[str, Any], about: Any) -> Any:
        p, u = lists
        return [_moved(p.to(torch.float32), u, numbers["rate"], numbers["weight_decay"]).to(p.dtype)], []

    leaves, momenta, adams, updates = Plans(of_leaves), Plans(of_momenta), Plans(of_turned), Plans(of_updates)

    def on_lists(params: list[Tensor], grads: list[Tensor], slots: Any, at: LeafStep) -> list[int]:
        left, alone, by_sides = apart(params, grads, max_precond_dim)
        numbers = {**at.numbers, **at.derived, "rate": at.lr}
        first, due = at.count == 1, (at.count - 1) % precondition_frequency == 0
        if alone:
            columns = [[x[i] for i in alone] for x in (params, grads, slots["exp_avg"], slots["exp_avg_sq"])]
            leaves.run(columns, numbers, into=[0, 2, 3])
        for sides, places in by_sides.items():
            p, g, m, v = ([x[i] for i in places] for x in (params, grads, slots["exp_avg"], slots["exp_avg_sq"]))
            matrices = [as_matrix(x.to(torch.float32)) for x in g]
            olds = {name: [slots[name][i] for i in places] for side in sides for name in (side, f"{side}_basis")}
            bases = [olds[f"{side}_basis"] for side in sides]
            news: dict[str, list[Tensor]] = {}
            for side in sides:
                step = partial(_totals, side, at.numbers["beta2"])
                (news[side],) = by_shape(step, matrices, olds[side])
                if first:
                    step = partial(_first, side, [at.paths[i] for i in places])
                    (news[f"{side}_basis"],) = by_shape(step, matrices)
            if due and not first:
                # Rows and columns of all shapes together: there are fewer lengths than shapes.
                every = [x for side in sides for x in news[side]], [x for of in bases for x in of]
                (turned,) = by_shape(lambda _, x, basis: [_iterated(x, basis)], *every)
                news |= {f"{side}_basis": turned[k * len(p) : (k + 1) * len(p)] for k, side in enumerate(sides)}
            if not first:
                momenta.run([m, g], numbers, into=[0])
                both = by_shape(partial(_both_turned, sides), matrices, list(map(as_matrix, m)), *bases)
                of_g, of_m = ([x.view(y.shape) for x, y in zip(of, p, strict=True)] for of in both)
                (u, _), _ = adams.run([v, of_g, of_m], numbers, into=[None, 0])
                (u,) = by_shape(partial(_one_turned_back, sides), list(map(as_matrix, u)), *bases)
                updates.run([p, [x.view(y.shape) for x, y in zip(u, p, strict=True)]], numbers, into=[0])
            written([x for name in news for x in olds[name]], [x for of in news.values() for x in of])
        return left

    slots: dict[str, Any] = {"exp_avg": wide, "exp_avg_sq": wide}
    for side in SIDES:
        slots[side] = square(side, max_precond_dim, 0.0)
        slots[f"{side}_basis"] = square(side, max_precond_dim, 1.0)
    numbers = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": weight_decay}
    more: Any = dict(settable={"betas": tuple(betas), "weight_decay": weight_decay}, derived=corrections, in_fp32=True)
    built = with_lists(optimizer("soap", lr, slots, formula, numbers=numbers, **more), on_lists)
    # `torch.linalg.eigh` needs the host, which a captured graph does not have.
    return replace(built, needs="leaf", facts=replace(built.facts, capturable=False))


# These functions are of tensors of one leaf, and of lists.


def _average(old: Any, new: Any, beta: Any) -> Any:
    return plus(old, 1 - beta, new - old)


def _adam(v: Any, g: Any, m: Any, beta: Any, small: Any, size: Any, spread: Any) -> tuple[Any, Any]:
    """The second moment and the direction."""
    v = plus_product(v * beta, 1 - beta, g, g)
    return v, size * m / (moment_root(v) / spread + small)


def _moved(x: Any, u: Any, rate: Any, decay: Any) -> Any:
    return (x - rate * u) * (1 - rate * decay)


# These functions are of stacks of leaves of one shape.


def _totals(side: str, beta: Any, _: list[int], g: Tensor, old: Tensor) -> list[Tensor]:
    return [_average(old, gram(g, side), beta)]


def _first(side: str, paths: Sequence[str], places: list[int], g: Tensor) -> list[Tensor]:
    return [_eigenvectors(g, side, [paths[i] for i in places])]


def _both_turned(sides: Sequence[str], _: list[int], g: Tensor, m: Tensor, *bases: Tensor) -> list[Tensor]:
    of = dict(zip(sides, bases, strict=True))
    return [_in_bases(g, of).contiguous(), _in_bases(m, of).contiguous()]


def _one_turned_back(sides: Sequence[str], _: list[int], u: Tensor, *bases: Tensor) -> list[Tensor]:
    return [_in_bases(u, {side: x.mT for side, x in zip(sides, bases, strict=True)}).contiguous()]


def _in_bases(y: Tensor, bases: Mapping[str, Tensor]) -> Tensor:
    y = bases["rows"].mT @ y if "rows" in bases else y
    return y @ bases["columns"] if "columns" in bases else y


def _turned(x: Tensor, bases: Mapping[str, Tensor]) -> Tensor:
    """A leaf in these bases of its rows and columns; a side without a basis stays."""
    return _in_bases(as_matrix(x), bases).reshape(x.shape)


def _turned_back(x: Tensor, bases: Mapping[str, Tensor]) -> Tensor:
    return _turned(x, {side: basis.mT for side, basis in bases.items()})


def _eigenvectors(x: Tensor, side: str, paths: Sequence[str]) -> Tensor:
    """Eigenvectors of the products of a gradient, in columns, that of the largest eigenvalue first.

    Those of equal eigenvalues are eigenvectors of `D`, as the page of `soap` says, or a rounding would choose them.
    """
    total = gram(x.double(), side)
    values, basis = spectrum("soap", paths, total)
    values, n = values.clamp(min=0), total.shape[-1]
    # What a rounding of the gradient moves an eigenvalue by, and one of the products: eigenvalues are squares of
    # singular values, of which each moves as much as the largest.
    largest = values[..., -1:]
    noise = NOISE * torch.finfo(x.dtype).eps * (values * largest).sqrt() + n * torch.finfo(values.dtype).eps * largest
    apart = (values[..., 1:] - values[..., :-1] > noise[..., 1:]) & (values[..., 1:] > noise[..., 1:])
    group = torch.nn.functional.pad(apart.cumsum(-1), (1, 0))
    order = torch.arange(n, dtype=values.dtype, device=values.device).sqrt() / n**0.5
    within = (basis.mT @ (order.unsqueeze(-1) * basis)).where(group.unsqueeze(-1) == group.unsqueeze(-2), 0)
    # Of numbers in [0, 1): groups stay in their order.
    basis = basis @ spectrum("soap", paths, within + 2 * torch.diag_embed(group)).eigenvectors
    basis = basis.where(((1 + order) @ basis >= 0).unsqueeze(-2), -basis)
    return _by_rows(basis.flip(-1).to(x.dtype))


def _iterated(x: Tensor, basis: Tensor) -> Tensor:
    q, r = torch.linalg.qr(x @ basis)
    sizes = r.diagonal(dim1=-2, dim2=-1).abs()
    noise = NOISE * torch.finfo(x.dtype).eps * sizes.amax(-1, keepdim=True)
    # A column that those before it span but for rounding goes on as it was, or rounding would choose its direction.
    return _by_rows(torch.linalg.qr(q.where((sizes > noise).unsqueeze(-2), basis)).Q)


def _by_rows(x: Tensor) -> Tensor:
    """The tensor in contiguous memory, as in a state: products of another layout would have other bits."""
    return x.contiguous()
