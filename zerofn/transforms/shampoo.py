"""`shampoo`: a preconditioner for the rows of a matrix and one for its columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._errors import explain
from ..extend import (
    LeafStep,
    Plans,
    ScalarOrSchedule,
    Transform,
    by_shape,
    check_count,
    check_lr,
    check_number,
    eigenvectors,
    given,
    in_batches,
    like,
    moment_root,
    optimizer,
    plus,
    transform,
    where,
    with_lists,
    without_derivative,
    without_elements,
)


@transform
def shampoo(
    lr: ScalarOrSchedule = 0.1,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    eps: float = 1e-4,
    update_freq: int = 1,
    max_precond_dim: int = 1024,
) -> Transform:
    """Shampoo (Gupta et al., 2018, algorithm 1), for matrices; other leaves have the diagonal form, AdaGrad.

    `g += weight_decay * p`; `L += g g^T`, `R += g^T g`, both starting from `eps` times the identity; `u = L^(-1/4) g
    R^(-1/4)`; `m = momentum * m + u`; `p -= lr * m`. A side of more than `max_precond_dim` rows or columns has no
    preconditioner, and the exponent of the other side is then -1/2. A leaf of more than two dimensions is reshaped to a
    matrix with the rows of its first dimension. For a leaf without any preconditioner, `v += g^2` from `eps`, and `u =
    g / sqrt(v)`.

    The state has `L`, `R` and their roots, in fp32 or wider. It needs whole leaves (`needs="leaf"`): a sharded leaf is
    gathered on one rank, its owner, which has its state and computes its roots.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update).
        momentum: decay of the sum of directions, in [0, 1).
        weight_decay: L2 penalty.
        eps: of the first preconditioners; positive.
        update_freq: updates from one computation of the roots to the next.
        max_precond_dim: the largest side with a preconditioner.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: a step is differentiated.
        FloatingPointError: a gradient was NaN or infinite.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.shampoo(lr=1.0, eps=1e-12)
        >>> state = zf.init(tx, {"w": torch.zeros(2, 2)})
        >>> zf.update(tx, {"w": torch.tensor([[3.0, 0.0], [0.0, -5.0]])}, state)[0].params["w"].diagonal()
        tensor([-1.0000,  1.0000])
    """
    check_lr("shampoo", lr)
    check_number("shampoo", "momentum", momentum, high=1.0)
    check_number("shampoo", "weight_decay", weight_decay)
    check_number("shampoo", "eps", eps, low=torch.finfo(torch.float32).tiny)
    check_count("shampoo", "update_freq", update_freq, "updates")
    check_count("shampoo", "max_precond_dim", max_precond_dim, "numbers")

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        beta, decay, rate = *at.numbers.values(), at.lr
        new = dict(slots)
        if given(decay):
            g = plus(g, decay, x)
        u, sides = as_matrix(g), sides_of(g, max_precond_dim)
        refuse_derivative("shampoo", sides, x, g, *slots.values(), at.lr, *at.numbers.values())
        if sides:
            due = (at.count - 1) % update_freq == 0
            for side in sides:
                new[side] = total = slots[side] + gram(u, side)
                root = partial(_inverse_root, total, 2 * len(sides), [at.path])
                new[f"{side}_root"] = where(due, root, slots[f"{side}_root"])
            u = _preconditioned(u, sides, [new[f"{side}_root"] for side in sides]).reshape(g.shape)
        else:
            new["squares"] = slots["squares"] + g * g
            u = g / moment_root(new["squares"])
        if given(momentum):
            new["momentum"] = u = beta * slots["momentum"] + u
        return x - rate * u, new

    def of_diagonals(lists: list[Any], numbers: Mapping[str, Any], about: Any) -> Any:
        p, g, v, *m = lists
        x = p.to(torch.float32)
        g = plus(g.to(torch.float32), numbers["decay"], x) if about else g.to(torch.float32)
        v = v + g * g
        return [*_moved(p, g / moment_root(v), m, numbers), v], []

    def of_gradients(lists: list[Any], numbers: Mapping[str, Any], about: Any) -> Any:
        p, g = lists
        return [plus(g.to(torch.float32), numbers["decay"], p.to(torch.float32))], []

    def of_updates(lists: list[Any], numbers: Mapping[str, Any], about: Any) -> Any:
        p, u, *m = lists
        return _moved(p, u, m, numbers), []

    diagonals, gradients, updates = Plans(of_diagonals), Plans(of_gradients), Plans(of_updates)

    def on_lists(params: list[Tensor], grads: list[Tensor], slots: Any, at: LeafStep) -> list[int]:
        left, alone, by_sides = apart(params, grads, max_precond_dim)
        beta, decay = at.numbers.values()
        numbers, second = {"decay": decay, "beta": beta, "rate": at.lr}, given(momentum)
        if alone:
            m = [[slots["momentum"][i] for i in alone]] if second else []
            columns = [[x[i] for i in alone] for x in (params, grads, slots["squares"])]
            diagonals.run([*columns, *m], numbers, into=[0, *([3] if second else []), 2], about=given(decay))
        for sides, places in by_sides.items():
            p, g = ([x[i] for i in places] for x in (params, grads))
            wide_grads = [x.to(torch.float32) for x in g]
            if given(decay):
                (wide_grads,), _ = gradients.run([p, g], {"decay": decay})
            matrices = list(map(as_matrix, wide_grads))
            olds = {name: [slots[name][i] for i in places] for side in sides for name in (side, f"{side}_root")}
            news: dict[str, list[Tensor]] = {}
            for side in sides:
                (news[side],) = by_shape(lambda _, x, old, side=side: [old + gram(x, side)], matrices, olds[side])
            if (at.count - 1) % update_freq == 0:
                # Rows and columns of all shapes together: there are fewer lengths than shapes.
                every, paths = [x for side in sides for x in news[side]], [at.paths[i] for _ in sides for i in places]
                order = 2 * len(sides)
                (roots,) = by_shape(lambda of, x, n=order, at=paths: [_inverse_root(x, n, [at[i] for i in of])], every)
                news |= {f"{side}_root": roots[k * len(p) : (k + 1) * len(p)] for k, side in enumerate(sides)}
            # Nothing is written if a matrix has no eigenvectors.
            written([x for name in news for x in olds[name]], [x for of in news.values() for x in of])
            factors = [olds[f"{side}_root"] for side in sides]
            (u,) = by_shape(lambda _, x, *of, sides=sides: [_preconditioned(x, sides, of)], matrices, *factors)
            u = [x.view(y.shape) for x, y in zip(map(Tensor.contiguous, u), p, strict=True)]
            m = [[slots["momentum"][i] for i in places]] if second else []
            updates.run([p, u, *m], numbers, into=[0, *([2] if second else [])])
        return left

    slots: dict[str, Any] = {"momentum": like if given(momentum) else without_elements}
    for side in SIDES:
        slots[side] = square(side, max_precond_dim, eps)
        slots[f"{side}_root"] = square(side, max_precond_dim, 0.0)
    slots["squares"] = lambda x: without_elements(x) if sides_of(x, max_precond_dim) else torch.full_like(wide(x), eps)
    numbers = {"momentum": momentum, "weight_decay": weight_decay}
    settable = {"weight_decay": weight_decay, **({"momentum": momentum} if given(momentum) else {})}
    built = optimizer("shampoo", lr, slots, formula, numbers=numbers, settable=settable, in_fp32=True)
    built = with_lists(built, on_lists)
    # `torch.linalg.eigh` needs the host, which a captured graph does not have.
    return replace(built, needs="leaf", facts=replace(built.facts, capturable=False))


def _moved(p: Any, u: Any, moments: list[Any], numbers: Mapping[str, Any]) -> list[Any]:
    """The new parameters and, if there are old ones, moments, as lists."""
    made = []
    for m in moments:
        u = numbers["beta"] * m.to(torch.float32) + u
        made = [u.to(m.dtype)]
    return [(p.to(torch.float32) - numbers["rate"] * u).to(p.dtype), *made]


def _preconditioned(u: Tensor, sides: Sequence[str], factors: Sequence[Tensor]) -> Tensor:
    for side, factor in zip(sides, factors, strict=True):
        u = factor @ u if side == "rows" else u @ factor
    return u


def _inverse_root(x: Tensor, order: int, paths: Sequence[str]) -> Tensor:
    """`x^(-1 / order)` of a symmetric positive matrix, which does not depend on the choice of a basis."""
    values, basis = spectrum("shampoo", paths, x.double())
    # Rounding may make an eigenvalue smaller than the smallest true one, or negative.
    least = torch.finfo(x.dtype).eps * values[..., -1:].clamp(min=0) * 1e-3 + 1e-30
    return ((basis * values.clamp(min=least).pow(-1 / order).unsqueeze(-2)) @ basis.mT).to(x.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# These functions deal with the sides of a leaf (rows and columns), for preconditioners.


def spectrum(name: str, paths: Sequence[str], x: Tensor) -> Any:
    """Eigenvalues and eigenvectors of symmetric matrices, one of each of these leaves."""
    try:
        return eigenvectors(x)
    except RuntimeError as error:  # torch.linalg.LinAlgError
        if len(paths) > 1:
            for path, one in zip(paths, x, strict=True):
                spectrum(name, [path], one)
            raise
        path = paths[0]
        why = f"torch.linalg.eigh failed, as it does after a NaN or infinite gradient: {error}"
        right = f"zf.chain(..., zf.skip_nonfinite(), zf.{name}(...))"
        raise FloatingPointError(explain(f"{name}: the eigenvectors of {path}", why, right)) from error


def refuse_derivative(name: str, sides: tuple[str, ...], *values: Any) -> None:
    """Refuse a derivative through the eigenvectors of a leaf with sides."""
    if sides:
        why = "eigenvectors have no derivative where eigenvalues are equal, as those of a gradient's products often are"
        right = "zf.muon(...) or zf.adamw(...) in a step that is differentiated; or torch.no_grad() around this one"
        without_derivative(values, explain(f"a derivative through {name}(...)", why, right))


SIDES = ("rows", "columns")


def apart(
    params: Sequence[Tensor], grads: Sequence[Tensor], largest: int
) -> tuple[list[int], list[int], dict[tuple[str, ...], list[int]]]:
    """Places of leaves that are updated one by one, of those without sides, and of others by their sides."""
    left: list[int] = []
    alone: list[int] = []
    by_sides: dict[tuple[str, ...], list[int]] = {}
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        narrow = {p.dtype, g.dtype} <= {torch.float32, torch.bfloat16, torch.float16}
        if not (narrow and p.numel() and p.is_contiguous() and g.is_contiguous()):
            left.append(i)
        elif sides := sides_of(p, largest):
            by_sides.setdefault(sides, []).append(i)
        else:
            alone.append(i)
    return left, alone, by_sides


def written(olds: Sequence[Tensor], news: Sequence[Tensor]) -> None:
    for old, new in in_batches(olds, news):
        old.copy_(new)


def as_matrix(x: Tensor) -> Tensor:
    """A leaf of more than two dimensions as a matrix of its first one."""
    return x.reshape(x.shape[0], -1) if x.ndim > 2 and x.numel() else x


def sides_of(x: Tensor, largest: int) -> tuple[str, ...]:
    """The sides of a leaf that have preconditioners: those of matrices, up to a length."""
    if x.ndim < 2 or not x.numel():
        return ()
    return tuple([side for side in SIDES if length_of(x, side) <= largest])


def length_of(x: Tensor, side: str) -> int:
    return as_matrix(x).shape[SIDES.index(side)]


def gram(x: Tensor, side: str) -> Tensor:
    """The products of all pairs of rows of a matrix, or of its columns."""
    return x @ x.mT if side == "rows" else x.mT @ x


def square(side: str, largest: int, value: float) -> Callable[[Tensor], Tensor]:
    """How a slot of a side starts: as a number times the identity; without elements for a leaf without the side."""

    def start(x: Tensor) -> Tensor:
        if side not in sides_of(x, largest):
            return without_elements(x)
        return torch.eye(length_of(x, side), dtype=wide(x).dtype, device=x.device) * value

    return start


def wide(x: Tensor) -> Tensor:
    """A tensor of the shape of `x`, in fp32 or wider."""
    return torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
