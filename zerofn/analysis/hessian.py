"""`Hessian`: products of the Hessian of a loss with vectors, over parameters that may be sharded.

The Hessian itself is never computed. The gradient is recorded once, and each product is one backward through it
(Pearlmutter, 1994); memory is that of one such graph. Sharded parameters stay sharded, and so do the vectors: inner
products are summed over ranks. Random vectors are drawn by seed, path and place in the leaf, so that they are the same
for any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._errors import explain, kind_of
from ..core.layout import Leaves
from ..core.state import State
from ..core.transform import Transform
from ..kernels.norms import leaf_norms
from ..kernels.rounding import leaf_key, random_bits
from ..pure.api import bind
from ..pure.states import pipe_of

# A stream of the counter generator that stochastic rounding does not use.
_STREAM = 77


class Hessian:
    """Products of the Hessian of a loss with vectors, which are sharded as the stored parameters are.

    Attributes:
        leaves: the parameters, by path.
        paths: of those that are trained.
        grads: the gradients whose graph leads to parameters, by path.
        dtype: of what is returned, at least float32.
        epsilon: the largest rounding error of a parameter's dtype.
    """

    def __init__(self, loss_fn: Callable[..., Any], tx: Transform, state: State, batch: tuple, where: str):
        self.pipe = pipe_of(tx, state, f"zf.curvature.{where}")
        trainable = set(state.layout.trained)
        self.leaves = {p: x.detach().requires_grad_(p in trainable) for p, x in state.leaves.items()}
        self.paths = tuple(p for p in self.leaves if p in trainable)
        with torch.enable_grad():
            out = bind(loss_fn, tx, state)(state.layout.join(self.leaves), *batch)
            loss = out[0] if isinstance(out, tuple) and len(out) == 2 else out
            if not isinstance(loss, Tensor) or loss.ndim:
                kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else kind_of(loss)
                wrong = f"zf.curvature.{where} of a loss_fn that returns {kind}"
                raise ValueError(explain(wrong, "a Hessian is one of a number", "return loss.mean(), or (loss, aux)"))
            wanted = [self.leaves[p] for p in self.paths]
            recorded = loss.requires_grad
            grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True) if recorded else ()
        self.grads = {p: g for p, g in zip(self.paths, grads, strict=False) if g is not None and g.requires_grad}
        if not self.grads:
            wrong = f"zf.curvature.{where} of a loss whose gradient does not depend on the parameters"
            why = "its second derivative is zero, or not recorded: a linear loss, detach(), once_differentiable"
            right = "the loss that is trained, with all that is between it and the parameters recorded"
            raise ValueError(explain(wrong, why, right))
        if not_differentiable(self.grads.values()):
            wrong = f"zf.curvature.{where} of a loss without a second derivative"
            why = "an operation of the model has a first derivative only: a fused attention, or a function that is "
            right = "another form of it; of attention, in loss_fn: "
            right += "with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): ..."
            raise RuntimeError(explain(wrong, f"{why}marked once_differentiable", right))
        dtypes = [torch.promote_types(x.dtype, torch.float32) for x in wanted]
        self.dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
        self.epsilon = max(torch.finfo(x.dtype).eps for x in wanted)

    def blocks(self, names: Iterable[str] | None) -> dict[str, tuple[str, ...]]:
        """The paths of each block."""
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
        """A random vector: of signs, or uniform in (-1, 1)."""
        found = {}
        for p in paths:
            x = self.leaves[p]
            where = {"offset": self.pipe.road.offsets.get(p, 0), "stream": _STREAM, "device": x.device}
            bits = random_bits(x.numel(), seed=seed, step=step, key=leaf_key(p), **where).view(x.shape)
            found[p] = (bits & 1).to(x.dtype) * 2 - 1 if signs else (bits.double() / 2.0**31).to(x.dtype)
        return found

    def product(self, v: Leaves) -> Leaves:
        """`H v`, of the block of the Hessian for the paths in `v`."""
        paths = [p for p in v if p in self.grads]
        inputs = [self.leaves[p] for p in v]
        outs, vectors = [self.grads[p] for p in paths], [v[p] for p in paths]
        got = torch.autograd.grad(outs, inputs, vectors, retain_graph=True, allow_unused=True) if outs else ()
        products = dict(zip(v, got, strict=False))
        return {p: x if (x := products.get(p)) is not None else torch.zeros_like(v[p]) for p in v}

    def inner(self, u: Leaves, v: Leaves) -> float:
        """The inner product over all ranks."""
        # In fp32 torch adds up in a tree, which loses no more than rounding the products does; leaves and ranks are
        # added in float64. Wholly in float64 the two inner products of a step would take a tenth of its time.
        own = sum((_wide(u[p]) * _wide(v[p])).sum().double() for p in u)
        return float(self.pipe.reduction.sum(torch.as_tensor(own)))

    def norm(self, v: Leaves) -> float:
        """The norm over all ranks, in one pass over memory."""
        own = sum(n.double().square() for n in leaf_norms({p: x.contiguous() for p, x in v.items()}).values())
        return math.sqrt(float(self.pipe.reduction.sum(torch.as_tensor(own))))

    def unit(self, v: Leaves) -> Leaves:
        norm = math.sqrt(self.inner(v, v))
        return {p: x / norm for p, x in v.items()}

    def as_tensor(self, x: Any) -> Tensor:
        return torch.as_tensor(x).to(self.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def not_differentiable(tensors: Iterable[Tensor]) -> bool:
    """Whether the graph of `tensors` has a node that stands for a missing derivative.

    Products would not always raise: torch raises where such a node runs, but does not run those of
    `once_differentiable`, since no parameter is behind them, and what they hide would count as zero.
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
