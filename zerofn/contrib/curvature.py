"""Curvature of a loss: Hessian-vector products, eigenvalues and traces."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerofn import State, Transform, bind
from zerofn.extend import (
    Leaves,
    check_count,
    check_number,
    context_of,
    explain,
    kept_out_of_graphs,
    kind_of,
    leaf_key,
    random_bits,
    squared_norm,
)

# ----------------------------------------------------------------------------------------------------------------------
# `Hessian`: products of the Hessian of a loss with vectors, over parameters that may be sharded.
#
# The Hessian itself is never computed. The gradient is recorded once, and each product is one backward through that
# graph (Pearlmutter, 1994), which is what is kept in memory. Sharded parameters stay sharded, and so do the vectors:
# inner products are summed over ranks. Random vectors depend on seed, path and index in the leaf, so they are the same
# on any number of ranks.


# A stream of the counter-based generator that stochastic rounding does not use.
_STREAM = 77


class Hessian:
    """Products of the Hessian of a loss with vectors that are sharded as the stored parameters are.

    Attributes:
        leaves: the parameters, by path.
        paths: the paths of trained parameters.
        grads: the gradients that depend on the parameters, by path, recorded by autograd.
        dtype: of results, at least float32.
        epsilon: the largest rounding error of a parameter's dtype.
    """

    def __init__(self, loss_fn: Callable[..., Any], tx: Transform, state: State, batch: tuple, where: str):
        self.ranks = context_of(tx, state, f"zf.curvature.{where}")
        trainable = set(state.layout.trained)
        self.leaves = {p: x.detach().requires_grad_(p in trainable) for p, x in state.leaves.items()}
        self.paths = tuple(p for p in self.leaves if p in trainable)
        with torch.enable_grad():
            out = bind(loss_fn, tx, state)(state.layout.join(self.leaves), *batch)
            loss = out[0] if isinstance(out, tuple) and len(out) == 2 else out
            if not isinstance(loss, Tensor) or loss.ndim:
                kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else kind_of(loss)
                wrong = f"zf.curvature.{where} of a loss_fn that returns {kind}"
                why = "a Hessian is the second derivative of a single number"
                raise ValueError(explain(wrong, why, "return loss.mean(), or (loss, aux)"))
            wanted = [self.leaves[p] for p in self.paths]
            recorded = loss.requires_grad
            grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True) if recorded else ()
        self.grads = {p: g for p, g in zip(self.paths, grads, strict=False) if g is not None and g.requires_grad}
        if not self.grads:
            wrong = f"zf.curvature.{where} of a loss whose gradient does not depend on the parameters"
            why = "its second derivative is zero (a linear loss), or detach() or once_differentiable hides it"
            right = "a loss_fn that computes the loss from params without detach()"
            raise ValueError(explain(wrong, why, right))
        if not_differentiable(self.grads.values()):
            wrong = f"zf.curvature.{where} of a loss without a second derivative"
            why = "an operation has a first derivative only: a fused attention, or one marked once_differentiable"
            right = "an operation with a second derivative; for attention, in loss_fn: "
            right += "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): ..."
            raise RuntimeError(explain(wrong, why, right))
        dtypes = [torch.promote_types(x.dtype, torch.float32) for x in wanted]
        self.dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
        self.epsilon = max(torch.finfo(x.dtype).eps for x in wanted)

    def blocks(self, names: Iterable[str] | None) -> dict[str, tuple[str, ...]]:
        """The paths of each block, by its name."""
        if names is None:
            return {"": self.paths}
        names = [names] if isinstance(names, str) else list(names)
        found = {n: tuple(p for p in self.paths if n in ("", p) or p.startswith(f"{n}.")) for n in names}
        if bad := [n for n, paths in found.items() if not paths]:
            why = f"{', '.join(map(repr, bad))} match{'es' * (len(bad) == 1)} no trainable parameter"
            right = f"beginnings of these paths: {', '.join(self.paths[:8])}{', ...' * (len(self.paths) > 8)}"
            raise ValueError(explain(f"blocks={names}", why, right))
        return found

    def draw(self, paths: Iterable[str], seed: int, step: int, signs: bool) -> Leaves:
        """A random vector, by path: of signs, or uniform in (-1, 1)."""
        found = {}
        for p in paths:
            x = self.leaves[p]
            where = {"offset": self.ranks.offsets.get(p, 0), "stream": _STREAM, "device": x.device}
            bits = random_bits(x.numel(), seed=seed, step=step, key=leaf_key(p), **where).view(x.shape)
            found[p] = (bits & 1).to(x.dtype) * 2 - 1 if signs else (bits.double() / 2.0**31).to(x.dtype)
        return found

    def product(self, v: Leaves) -> Leaves:
        """`H v`, for the block of the Hessian whose paths are in `v`."""
        paths = [p for p in v if p in self.grads]
        inputs = [self.leaves[p] for p in v]
        outs, vectors = [self.grads[p] for p in paths], [v[p] for p in paths]
        got = torch.autograd.grad(outs, inputs, vectors, retain_graph=True, allow_unused=True) if outs else ()
        products = dict(zip(v, got, strict=False))
        return {p: x if (x := products.get(p)) is not None else torch.zeros_like(v[p]) for p in v}

    def inner(self, u: Leaves, v: Leaves) -> float:
        """The inner product over all ranks."""
        # A leaf is summed in fp32: torch adds pairwise, which loses no more than rounding the products does. Leaves and
        # ranks are summed in float64. To do all of it in float64 would cost a tenth of a step.
        own = sum((_wide(u[p]) * _wide(v[p])).sum().double() for p in u)
        return float(self.ranks.reduction.sum(torch.as_tensor(own)))

    def norm(self, v: Leaves) -> float:
        """The norm over all ranks, in one pass over memory."""
        # `squared_norm` is called for each leaf, since it would sum all leaves in fp32.
        own = sum(squared_norm({p: x.contiguous()}).double() for p, x in v.items())
        return math.sqrt(float(self.ranks.reduction.sum(torch.as_tensor(own))))

    def unit(self, v: Leaves) -> Leaves:
        norm = math.sqrt(self.inner(v, v))
        return {p: x / norm for p, x in v.items()}

    def as_tensor(self, x: Any) -> Tensor:
        return torch.as_tensor(x).to(self.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def not_differentiable(tensors: Iterable[Tensor]) -> bool:
    """Whether the graph of `tensors` contains a node for a missing derivative.

    Torch would not always raise at a product. It raises where such a node runs, but it does not run the nodes of
    `once_differentiable`, behind which it sees no parameter: what they hide would count as zero.
    """
    todo, seen = [x.grad_fn for x in tensors], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node.name() in ("torch::autograd::Error", "torch::autograd::NotImplemented"):
            return True
        seen.add(node)
        todo += [below for below, _ in node.next_functions]
    return False


# ----------------------------------------------------------------------------------------------------------------------
# Curvature of a loss: largest eigenvalues, spectra and traces of its Hessian, by products with vectors.


_WHY = "it decides in Python how many products to take"
_RIGHT = "zf.curvature.{}(loss_fn, tx, state, *batch), outside of what is compiled"


class Spectrum(NamedTuple):
    """Eigenvalues of a Hessian by Lanczos' iteration, from the smallest to the largest.

    Attributes:
        values: (m,) Ritz values. The outer ones converge to eigenvalues first; those inside approximate the density.
        weights: (m,) their shares of the start vector, which add up to 1.
        errors: (m,) bounds: an eigenvalue lies within this distance of the value. It is the norm of `H x - value * x`
            for a unit vector `x`.
    """

    values: Tensor
    weights: Tensor
    errors: Tensor


class Trace(NamedTuple):
    """An estimate of a trace, and its standard error, as 0-d tensors."""

    value: Tensor
    error: Tensor


@kept_out_of_graphs(_WHY, _RIGHT.format("max_eigenvalue"), "zf.curvature.max_eigenvalue")
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
    """The eigenvalue of the Hessian that is largest in absolute value, with its sign.

    Power iteration `v <- H v / |H v|`, until the Rayleigh quotient `v . H v` changes by less than `tol` of itself. Each
    iteration takes one product. It converges slowly if a second eigenvalue has nearly the same size: then use
    `spectrum`.

    Args:
        loss_fn: `loss_fn(params, *batch)` -> 0-d loss, or `(loss, aux)`, as for `zf.make_step`. It must have a second
            derivative. On several ranks the Hessian is that of the mean loss over ranks.
        tx: the pipeline.
        state: its state, from `zf.init` or `opt.state`.
        batch: the arguments of `loss_fn`.
        blocks: prefixes of paths, such as `"blocks.0"` for all of `blocks.0.*`. For each block the Hessian with respect
            to its own parameters is used.
        tol: relative change at which to stop.
        max_iter: the most products for each block.
        seed: of the start vector.

    Returns:
        A dict from block to 0-d tensor, in float32 or wider, equal on all ranks; the key is `""` without `blocks`.

    Raises:
        ValueError: a block matches no parameter; the gradient does not depend on the parameters.
        RuntimeError: an operation in the loss has no second derivative.

    Warns:
        RuntimeWarning: a block has not converged after `max_iter` products; its last value is returned.

    Examples:
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
    found, not_converged = {}, []
    for name, paths in hessian.blocks(blocks).items():
        value, converged = _power_iteration(hessian, hessian.draw(paths, seed, 0, signs=False), tol, max_iter)
        not_converged += [] if converged else [f"{name!r}: {value:g}"]
        found[name] = hessian.as_tensor(value)
    if not_converged:
        warnings.warn(
            f"max_eigenvalue: not within tol={tol} after {max_iter} products: {', '.join(not_converged)}. "
            "Write a larger max_iter, or use zf.curvature.spectrum, which tells close eigenvalues apart.",
            RuntimeWarning,
            stacklevel=2,
        )
    return found


def _power_iteration(hessian: Hessian, start: Leaves, tol: float, max_iter: int) -> tuple[float, bool]:
    """The Rayleigh quotient after the last product, and whether it has converged."""
    v, value, converged = hessian.unit(start), 0.0, False
    for i in range(max_iter):
        w = hessian.product(v)
        before, value = value, hessian.inner(v, w)
        norm = hessian.norm(w)
        converged = norm == 0.0 or (i > 0 and abs(value - before) <= tol * abs(value))
        if converged or not math.isfinite(norm):
            break
        v = {p: x / norm for p, x in w.items()}
    return value, converged


@kept_out_of_graphs(_WHY, _RIGHT.format("spectrum"), "zf.curvature.spectrum")
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

    `steps` products with orthogonal vectors give a tridiagonal matrix, whose eigenvalues are returned. Each vector is
    orthogonalized two times against all earlier vectors; otherwise eigenvalues would appear several times. `weights`
    and `values` are a quadrature of the density of eigenvalues as the start vector sees it (Golub and Meurant, 1994).

    Args:
        loss_fn, tx, state, batch, blocks: as in `max_eigenvalue`.
        steps: products, at most one per parameter. As many vectors of the parameters' size are kept in memory.
        seed: of the start vector.

    Returns:
        A dict from block to `Spectrum`.

    Raises:
        ValueError, RuntimeError: as `max_eigenvalue`.

    Examples:
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
        # A residual this small is rounding error: the vectors span the whole Krylov space of the start vector.
        if len(diagonal) >= most or beside[-1] <= 10 * hessian.epsilon * size:
            return diagonal, beside
        vectors.append({p: x / beside[-1] for p, x in w.items()})


@kept_out_of_graphs(_WHY, _RIGHT.format("trace"), "zf.curvature.trace")
def trace(
    loss_fn: Callable[..., Any],
    tx: Transform,
    state: State,
    *batch: Any,
    blocks: Iterable[str] | None = None,
    samples: int = 32,
    seed: int = 0,
) -> dict[str, Trace]:
    """The trace of the Hessian: the mean of `v . H v` over random vectors of signs, and its standard error.

    Hutchinson's estimator (1990). If the Hessian is diagonal it is exact, with an error of 0.

    Args:
        loss_fn, tx, state, batch, blocks: as in `max_eigenvalue`.
        samples: vectors, at least 2; one product each.
        seed: of the vectors.

    Returns:
        A dict from block to `Trace`.

    Raises:
        ValueError, RuntimeError: as `max_eigenvalue`.

    Examples:
        >>> import torch, zerofn as zf
        >>> state = zf.init(zf.sgd(0.1), {"w": torch.tensor([1.0, 1.0])})
        >>> loss = lambda p: (torch.tensor([1.0, 2.0]) * p["w"] ** 2).sum()
        >>> zf.curvature.trace(loss, zf.sgd(0.1), state)
        {'': Trace(value=tensor(6.), error=tensor(0.))}
    """
    check_count("trace", "samples", samples, "vectors")
    if samples < 2:
        why = "a standard error needs at least two samples"
        raise ValueError(explain(f"trace(samples={samples})", why, "trace(samples=32)"))
    hessian = Hessian(loss_fn, tx, state, batch, "trace")
    found = {}
    for name, paths in hessian.blocks(blocks).items():
        # A generator, so that one vector at a time is in memory.
        draws = (hessian.draw(paths, seed, 1 + i, signs=True) for i in range(samples))
        products = torch.tensor([hessian.inner(v, hessian.product(v)) for v in draws], dtype=torch.float64)
        estimates = products.mean(), products.std() / math.sqrt(samples)
        found[name] = Trace(*map(hessian.as_tensor, estimates))
    return found
