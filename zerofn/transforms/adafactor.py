"""`adafactor`: a second moment of a matrix that is kept as that of its rows and that of its columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    at_once,
    check_lr,
    check_number,
    length,
    misfit,
    moment_root,
    numbers_of_leaves,
    optimizer,
    plus,
    squares_of_one,
    squares_of_sides,
    transform,
    where,
    with_lists,
    without_elements,
)


@transform
def adafactor(
    lr: ScalarOrSchedule = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
) -> Transform:
    """Adafactor (Shazeer & Stern, 2018, algorithms 4 and 5), as `torch.optim.Adafactor`.

    `s = t^beta2_decay`. Of a matrix `r += s (mean over columns of g^2 - r)`, `c += s (mean over rows of g^2 - c)`, `v =
    r c / max(mean(r), eps1)`; of a vector or a number `v += s (g^2 - v)`. `u = g / max(sqrt(v), eps1)`; `p *= 1 - lr *
    weight_decay`; `p -= min(lr, 1 / sqrt(t)) * max(rms(p), eps2) * u / max(1, rms(u) / d)`, where `rms(p)` is from
    before the decay. A leaf of more dimensions is a stack of matrices, as in torch.

    A matrix of n rows and m columns has a state of n + m numbers, in fp32 or wider. It needs whole leaves
    (`needs="leaf"`): a sharded leaf is gathered on one rank, its owner, and computed once.

    Args:
        lr: a non-negative number, a 0-d tensor, or a function of the optimizer step (0 before the first update). It is
            the limit of the root mean square of an update divided by that of the leaf.
        beta2_decay: exponent in `s = t^beta2_decay`, the weight of the last gradient in `r`, `c` and `v`; in [-1, 0).
        eps: a pair `(eps1, eps2)`. `eps1` is the least root of a second moment, by default the `eps` of the dtype.
            `eps2` takes the place of `rms(p)` in the update if `rms(p)` is smaller.
        d: the largest root mean square of `u`: a larger `u` is scaled down to it. At least 1.
        weight_decay: decoupled from the gradient, multiplied by `lr`.

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.adafactor(lr=0.1)
        >>> state = zf.init(tx, {"w": torch.ones(2, 3)})
        >>> {name: tuple(x["w"].shape) for name, x in state.transforms["adafactor"].items() if name.endswith("var")}
        {'row_var': (2, 1), 'col_var': (1, 3)}
        >>> zf.update(tx, {"w": torch.ones(2, 3)}, state)[0].params["w"][0]
        tensor([0.9000, 0.9000, 0.9000])
    """
    check_lr("adafactor", lr)
    check_number("adafactor", "beta2_decay", beta2_decay, -1.0, 0.0)
    _check_eps(eps)
    check_number("adafactor", "d", d, low=1.0)
    check_number("adafactor", "weight_decay", weight_decay)

    def sizes(count: Any, rate: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
        most = count**-0.5
        # `where` needs two numbers or two tensors. Adding zero times the other makes both tensors if one is.
        rho = where(rate < most, lambda: rate + 0 * most, lambda: most + 0 * rate)
        return {"share": count ** numbers["beta2_decay"], "rho": rho}

    def formula(x: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        share, rho = at.derived.values()
        decay, most, rate = at.numbers["weight_decay"], at.numbers["d"], at.lr
        new, least = dict(slots), least_of(x.dtype)
        if g.ndim > 1:
            rows, columns = squares_of_one(g)
            new["row_var"] = r = _averaged(slots["row_var"], share, rows.view_as(slots["row_var"]), g.shape[-1])
            new["col_var"] = c = _averaged(slots["col_var"], share, columns.view_as(slots["col_var"]), g.shape[-2])
            mean = _added(r / max(r.shape[-2], 1), -2).clamp(min=least)
        else:
            new["variance"] = c = _averaged(slots["variance"], share, g * g, 1)
            r = mean = 1.0
        u = _scaled(g, r, c, mean, least)
        size = _size(_rms(x), _rms(u), rho, eps[1], most)
        return x * (1 - rate * decay) - size * u, new

    def least_of(dtype: torch.dtype) -> float:
        return torch.finfo(dtype).eps if eps[0] is None else eps[0]

    least = least_of(torch.float32)

    def of_means(lists: list[Any], numbers: Mapping[str, Any], about: Any) -> Any:
        old, sums, n, k = lists
        new = _averaged(old, numbers["share"], sums, n)
        return [new], [new / k]

    def of_norms(lists: list[Any], numbers: Mapping[str, Any], about: Any) -> Any:
        p, g, r, c, mean, root = lists
        x, u = p.to(torch.float32) / root, _scaled(g.to(torch.float32), r, c, mean, least) / root
        return [], [x * x, u * u]

    def of_updates(lists: list[Any], numbers: Mapping[str, Any], about: Any) -> Any:
        p, g, r, c, mean, size = lists
        x = p.to(torch.float32) * (1 - numbers["rate"] * numbers["decay"])
        return [(x - size * _scaled(g.to(torch.float32), r, c, mean, least)).to(p.dtype)], []

    means, norms, updates = Plans(of_means), Plans(of_norms), Plans(of_updates)

    def on_lists(params: list[Tensor], grads: list[Tensor], slots: Any, at: LeafStep) -> list[int]:
        # A vector is a matrix of one row whose mean is 1.
        known = [_listed(p, g) for p, g in zip(params, grads, strict=True)]
        places = [i for i, one in enumerate(known) if one]
        left = [i for i, one in enumerate(known) if not one]
        if not places:
            return left
        p, g = ([x[i] for i in places] for x in (params, grads))
        kinds = [x.ndim > 1 for x in p]
        rows, columns = squares_of_sides(g)
        # Their numbers of rows stay 1: `1 + share * (1 - 1)`.
        ones = iter(numbers_of_leaves((1.0,) * 2 * (len(p) - sum(kinds)), p[0].device).split(1))
        r = [slots["row_var"][i] if matrix else next(ones) for i, matrix in zip(places, kinds, strict=True)]
        c = [slots["col_var" if matrix else "variance"][i] for i, matrix in zip(places, kinds, strict=True)]
        rows = [x.view_as(y) if matrix else next(ones) for x, y, matrix in zip(rows, r, kinds, strict=True)]
        columns = [x.view_as(y) for x, y in zip(columns, c, strict=True)]
        shapes = [tuple(x.shape) if x.ndim > 1 else (1, 1) for x in p]
        host = partial(numbers_of_leaves, device=torch.device("cpu"))
        n = host((*[m for _, m in shapes], *[n for n, _ in shapes]))
        k = host((*[n for n, _ in shapes], *[1] * len(p)))
        share, rho = at.derived["share"], at.derived["rho"]
        mean: Any = means.run([[*r, *c], [*rows, *columns], n, k], {"share": share}, into=[0])[1]
        (mean,) = at_once(lambda x: [x.clamp(min=least)], mean[0, : len(p)].to(torch.float32))
        root = numbers_of_leaves(tuple([x.numel() ** 0.5 for x in p]), p[0].device)
        spread = {2: "rows", 3: "columns"}
        found: Any = norms.run([p, g, r, c, mean, root], {}, roots=True, spread=spread)[1]
        of_p, of_u = found.to(torch.float32)
        (size,) = at_once(lambda x, u: [_size(x, u, rho, eps[1], at.numbers["d"])], of_p, of_u)
        numbers = {"rate": at.lr, "decay": at.numbers["weight_decay"]}
        updates.run([p, g, r, c, mean, size], numbers, into=[0], spread=spread)
        return left

    slots = {"row_var": _of_rows, "col_var": _of_columns, "variance": _of_elements}
    numbers = {"beta2_decay": beta2_decay, "d": d, "weight_decay": weight_decay}
    more: Any = dict(numbers=numbers, settable={"weight_decay": weight_decay}, derived=sizes, in_fp32=True)
    return replace(with_lists(optimizer("adafactor", lr, slots, formula, **more), on_lists), needs="leaf")


# These functions are of tensors of one leaf, and of lists.


def _averaged(old: Any, share: Any, sums: Any, n: Any) -> Any:
    return plus(old, share, sums / (n if not isinstance(n, int) else max(n, 1)) - old)


def _scaled(g: Any, r: Any, c: Any, mean: Any, least: float) -> Any:
    return g / moment_root((r * c / mean).clamp(min=least * least))


def _size(of_leaf: Any, of_update: Any, rho: Any, smallest: float, most: Any) -> Any:
    return of_leaf.clamp(min=smallest) * rho / (of_update / most).clamp(min=1.0)


def _rms(x: Tensor) -> Tensor:
    return _wide_on_host(length, x / max(x.numel(), 1) ** 0.5)


def _added(x: Tensor, dim: int) -> Tensor:
    return _wide_on_host(lambda y: y.sum(dim, keepdim=True), x)


def _wide_on_host(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    # As a program adds up.
    return function(x.double()).to(x.dtype) if x.is_cpu else function(x)


def _listed(p: Tensor, g: Tensor) -> bool:
    """Whether a leaf is updated together with others."""
    plain = p.ndim < 3 and p.numel() > 0 and p.is_contiguous() and g.is_contiguous()
    return plain and {p.dtype, g.dtype} <= {torch.float32, torch.bfloat16, torch.float16}


def _of_rows(x: Tensor) -> Tensor:
    return _zeros(x, (*x.shape[:-1], 1)) if x.ndim > 1 else without_elements(x)


def _of_columns(x: Tensor) -> Tensor:
    return _zeros(x, (*x.shape[:-2], 1, x.shape[-1])) if x.ndim > 1 else without_elements(x)


def _of_elements(x: Tensor) -> Tensor:
    return without_elements(x) if x.ndim > 1 else _zeros(x, x.shape)


def _zeros(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _check_eps(eps: Any) -> None:
    pair = isinstance(eps, tuple | list) and len(eps) == 2
    if not pair or (eps[0] is not None and misfit("eps", eps[0], 0.0, 1.0)) or misfit("eps", eps[1], 0.0, 1.0):
        why = "eps is a pair of numbers in [0, 1), of which the first may be None"
        raise ValueError(explain(f"adafactor(eps={eps!r})", why, "adafactor(eps=(None, 0.001))"))
