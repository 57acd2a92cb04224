"""Curvature of a loss: largest eigenvalues, spectra and traces of its Hessian, by products with vectors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._errors import explain
from ..core.arguments import check_count, check_number
from ..core.layout import Leaves
from ..core.state import State
from ..core.transform import Transform
from ..pure.uncompiled import kept_out_of_graphs
from .hessian import Hessian

_WHY = "it takes products until their numbers say that it is enough"
_RIGHT = "zf.curvature.{}(loss_fn, tx, state, *batch), outside of what is compiled"


class Spectrum(NamedTuple):
    """Eigenvalues of a Hessian by Lanczos' iteration, from the smallest to the largest.

    Attributes:
        values: (m,) Ritz values. The outer ones are eigenvalues first; those within are a quadrature of the density.
        weights: (m,) their shares of the start vector, which add up to 1.
        errors: (m,) to within which there is an eigenvalue: the norms of `H x - value * x` for unit vectors `x`.
    """

    values: Tensor
    weights: Tensor
    errors: Tensor


class Trace(NamedTuple):
    """A trace and the standard error of its estimate, 0-d tensors."""

    value: Tensor
    error: Tensor


@kept_out_of_graphs(_WHY, _RIGHT.format("max_eigenvalue"), "curvature.max_eigenvalue")
def max_eigenvalue(
    loss_fn: Callable[..., Any],
    tx: Transform,
    state: State,
    *batch: Any,
    blocks: Iterable[str] | None = None,
    tol: float = 1e-2,
    max_iter: int = 100,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The eigenvalue of the Hessian that is largest in absolute value, with its sign; of all parameters, or by block.

    By power iteration `v <- H v / |H v|`, until the Rayleigh quotient `v . H v` changes by less than `tol` of itself.
    One product each. A second eigenvalue of nearly the same size makes it slow: see `spectrum`.

    Args:
        loss_fn: `loss_fn(params, *batch)` -> 0-d loss, or `(loss, aux)`, as for `zf.make_step`; the mean over ranks
            of their losses is meant. It must have a second derivative.
        tx: the pipeline.
        state: its state, of `zf.init` or `opt.state`.
        batch: what `loss_fn` is given.
        blocks: beginnings of paths, `"blocks.0"` for all of `blocks.0.*`. Each has the Hessian of its own parameters.
        tol: relative change at which to stop.
        max_iter: products at most, for each block.
        seed: of the start vector.

    Returns:
        By block a 0-d tensor, in at least float32; the one name is `""` without `blocks`. Equal on all ranks. A block
        that was not settled after `max_iter` is there too, and warned of.

    Raises:
        ValueError: a block that matches no parameter; a gradient that does not depend on the parameters.
        RuntimeError: an operation in the loss has no second derivative.

    >>> import torch, zerofn as zf
    >>> tx = zf.sgd(0.1)
    >>> state = zf.init(tx, {"w": torch.tensor([1.0, 1.0]), "b": torch.tensor([1.0])})
    >>> loss = lambda p: p["w"][0] ** 2 + 3 * p["w"][1] ** 2 - p["b"].square().sum()
    >>> found = zf.curvature.max_eigenvalue(loss, tx, state, blocks=["w", "b"], tol=1e-4)
    >>> {name: round(float(x), 2) for name, x in found.items()}
    {'w': 6.0, 'b': -2.0}
    """
    check_number("max_eigenvalue", "tol", tol)
    check_count("max_eigenvalue", "max_iter", max_iter, "products")
    hessian = Hessian(loss_fn, tx, state, batch, "max_eigenvalue")
    found, unsettled = {}, []
    for name, paths in hessian.blocks(blocks).items():
        value, settled = _power_iteration(hessian, hessian.draw(paths, seed, 0, signs=False), tol, max_iter)
        unsettled += [] if settled else [f"{name!r}: {value:g}"]
        found[name] = hessian.as_tensor(value)
    if unsettled:
        warnings.warn(
            f"max_eigenvalue: not within tol={tol} after {max_iter} products: {', '.join(unsettled)}. "
            "Give a larger max_iter, or use zf.curvature.spectrum, which tells close eigenvalues apart",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def _power_iteration(hessian: Hessian, start: Leaves, tol: float, max_iter: int) -> tuple[float, bool]:
    """The Rayleigh quotient after the last product, and whether it has converged."""
    v, value, settled = hessian.unit(start), 0.0, False
    for i in range(max_iter):
        w = hessian.product(v)
        before, value = value, hessian.inner(v, w)
        norm = hessian.norm(w)
        settled = norm == 0.0 or (i > 0 and abs(value - before) <= tol * abs(value))
        if settled or not math.isfinite(norm):
            break
        v = {p: x / norm for p, x in w.items()}
    return value, settled


@kept_out_of_graphs(_WHY, _RIGHT.format("spectrum"), "curvature.spectrum")
def spectrum(
    loss_fn: Callable[..., Any],
    tx: Transform,
    state: State,
    *batch: Any,
    blocks: Iterable[str] | None = None,
    steps: int = 20,
    seed: int = 0,
) -> dict[str, Spectrum]:
    """Eigenvalues of the Hessian by Lanczos' iteration, with a bound on the error of each.

    `steps` products with orthogonal vectors make a tridiagonal matrix, whose eigenvalues are taken; every vector is
    made orthogonal to all before it twice, since without it eigenvalues come up again. `weights` and `values` are a
    quadrature of the density of eigenvalues as the start vector sees it (Golub and Meurant, 1994).

    Args:
        loss_fn: as for `max_eigenvalue`, and so `tx`, `state`, `batch` and `blocks`.
        steps: products; as many vectors of the parameters' size are kept. Fewer if there are fewer parameters.
        seed: of the start vector.

    Returns:
        By block a `Spectrum`.

    Raises:
        ValueError, RuntimeError: as `max_eigenvalue`.

    >>> import torch, zerofn as zf
    >>> state = zf.init(zf.sgd(0.1), {"w": torch.tensor([1.0, 1.0, 1.0])})
    >>> loss = lambda p: (torch.tensor([1.0, 2.0, -4.0]) * p["w"] ** 2).sum()
    >>> [round(x, 3) for x in zf.curvature.spectrum(loss, zf.sgd(0.1), state)[""].values.tolist()]
    [-8.0, 2.0, 4.0]
    """
    check_count("spectrum", "steps", steps, "products")
    hessian = Hessian(loss_fn, tx, state, batch, "spectrum")
    found = {}
    for name, paths in hessian.blocks(blocks).items():
        most = min(steps, sum(leaf.numel for leaf in state.layout.leaves if leaf.path in paths))
        diagonal, beside = _lanczos(hessian, hessian.unit(hessian.draw(paths, seed, 0, signs=False)), most)
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        for i, b in enumerate(beside[:-1]):
            matrix[i, i + 1] = matrix[i + 1, i] = b
        values, vectors = torch.linalg.eigh(matrix)
        columns = values, vectors[0] ** 2, beside[-1] * vectors[-1].abs()
        found[name] = Spectrum(*map(hessian.as_tensor, columns))
    return found


def _lanczos(hessian: Hessian, v: Leaves, most: int) -> tuple[list[float], list[float]]:
    """The diagonal of the tridiagonal matrix, and the off-diagonal, whose last number is the norm of the residual."""
    vectors, diagonal, beside = [v], [], []
    while True:
        w = hessian.product(vectors[-1])
        diagonal.append(hessian.inner(vectors[-1], w))
        for _ in range(2):
            for u in vectors:
                part = hessian.inner(u, w)
                w = {p: x - part * u[p] for p, x in w.items()}
        beside.append(math.sqrt(hessian.inner(w, w)))
        size = max(map(abs, diagonal + beside))
        # The residual is rounding: the vectors so far span all that the start vector reaches.
        if len(diagonal) >= most or beside[-1] <= 10 * hessian.epsilon * size:
            return diagonal, beside
        vectors.append({p: x / beside[-1] for p, x in w.items()})


@kept_out_of_graphs(_WHY, _RIGHT.format("trace"), "curvature.trace")
def trace(
    loss_fn: Callable[..., Any],
    tx: Transform,
    state: State,
    *batch: Any,
    blocks: Iterable[str] | None = None,
    samples: int = 32,
    seed: int = 0,
) -> dict[str, Trace]:
    """The trace of the Hessian, as the mean of `v . H v` over random vectors of signs, and its standard error.

    Hutchinson, 1990. Exact, with an error of 0, where the Hessian is diagonal.

    Args:
        loss_fn: as for `max_eigenvalue`, and so `tx`, `state`, `batch` and `blocks`.
        samples: vectors, at least 2, one product each.
        seed: of the vectors.

    Returns:
        By block a `Trace`.

    Raises:
        ValueError, RuntimeError: as `max_eigenvalue`.

    >>> import torch, zerofn as zf
    >>> state = zf.init(zf.sgd(0.1), {"w": torch.tensor([1.0, 1.0])})
    >>> loss = lambda p: (torch.tensor([1.0, 2.0]) * p["w"] ** 2).sum()
    >>> zf.curvature.trace(loss, zf.sgd(0.1), state)
    {'': Trace(value=tensor(6.), error=tensor(0.))}
    """
    check_count("trace", "samples", samples, "vectors")
    if samples < 2:
        raise ValueError(explain(f"trace(samples={samples})", "one number has no spread", "trace(samples=32)"))
    hessian = Hessian(loss_fn, tx, state, batch, "trace")
    found = {}
    for name, paths in hessian.blocks(blocks).items():
        # One vector at a time is in memory.
        draws = (hessian.draw(paths, seed, 1 + i, signs=True) for i in range(samples))
        products = torch.tensor([hessian.inner(v, hessian.product(v)) for v in draws], dtype=torch.float64)
        estimates = products.mean(), products.std() / math.sqrt(samples)
        found[name] = Trace(*map(hessian.as_tensor, estimates))
    return found
