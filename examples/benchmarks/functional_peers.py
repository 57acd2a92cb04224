"""The same step, clip and AdamW, by other means than zerofn's: for `functional.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LR, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.999), 1e-8, 1e-2, 1.0
Loss = Callable[..., Any]
Step = Callable[[], float]


def bare(loss: Loss, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Step:
    """Eager torch as everybody writes it: `clip_grad_norm_` and the fused AdamW."""
    p = {k: v.clone().requires_grad_() for k, v in params.items()}
    opt = torch.optim.AdamW(p.values(), LR, BETAS, EPS, DECAY, fused=True)

    def step() -> float:
        opt.zero_grad()
        out = loss(p, x, y)
        out.backward()
        torch.nn.utils.clip_grad_norm_(p.values(), CLIP)
        opt.step()
        return float(out.detach())

    return step


def by_hand(
    loss: Loss, params: dict[str, Tensor], x: Tensor, y: Tensor, members: int = 0, counts: bool = False
) -> Step:
    """A step written for the compiler by hand, its state written in place; of one model, or of some, stacked.

    With a count of updates for all leaves, or one for each, as torch.optim and zerofn keep them.
    """
    p = {k: torch.stack([v] * members) if members else v.clone() for k, v in params.items()}
    m, v = ({k: torch.zeros_like(t) for k, t in p.items()} for _ in range(2))
    count = {k: torch.zeros((), dtype=torch.int64) for k in (p if counts else [""])}
    first = 1 if members else 0

    def differentiated(p: dict[str, Tensor]) -> Any:
        return torch.func.grad_and_value(loss)(p, x, y)

    def step() -> Tensor:
        grads, out = torch.func.vmap(differentiated)(p) if members else differentiated(p)
        squares = [g.square().flatten(first).sum(-1) if g.ndim > first else g.square() for g in grads.values()]
        factor = torch.clamp(CLIP / (torch.stack(squares).sum(0).sqrt() + 1e-6), max=1.0)
        for each in count.values():
            each.add_(1)
        t = torch.stack(list(count.values())).double()
        sizes, roots = (LR / (1 - BETAS[0] ** t)).float(), (1 - BETAS[1] ** t).sqrt().float()
        for i, (k, g) in enumerate(grads.items()):
            size, root = sizes[i if counts else 0], roots[i if counts else 0]
            g = g * factor.view(factor.shape + (1,) * (g.ndim - first))
            m[k].copy_(BETAS[0] * m[k] + (1 - BETAS[0]) * g)
            v[k].copy_(BETAS[1] * v[k] + (1 - BETAS[1]) * g * g)
            p[k].copy_(p[k] * (1 - LR * DECAY) - size * m[k] / (v[k].sqrt() / root + EPS))
        return out[0] if members else out

    compiled = torch.compile(step, fullgraph=True)
    return lambda: float(compiled())


def norm_of(gradients: list[Tensor]) -> float:
    """Of all together, in float64."""
    return float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())


def by_hand_meta(loss: Loss, params: dict[str, Tensor], x: Tensor, y: Tensor, steps: int) -> Step:
    """The meta-gradient through some steps by the first parameters, by `torch.func.grad` of formulas alone."""

    def outer(first: dict[str, Tensor]) -> Tensor:
        p, m, v = dict(first), *({k: torch.zeros_like(t) for k, t in first.items()} for _ in range(2))
        for t in range(1, steps + 1):
            grads = torch.func.grad(loss)(p, x, y)
            norm = torch.stack([(g * g).sum() for g in grads.values()]).sum().sqrt()
            factor = torch.clamp(CLIP / (norm + 1e-6), max=1.0)
            size, root = LR / (1 - BETAS[0] ** t), (1 - BETAS[1] ** t) ** 0.5
            for k, g in grads.items():
                g = g * factor
                m[k] = BETAS[0] * m[k] + (1 - BETAS[0]) * g
                v[k] = BETAS[1] * v[k] + (1 - BETAS[1]) * g * g
                # The root of a zero has no derivative.
                p[k] = p[k] * (1 - LR * DECAY) - size * m[k] / ((v[k] + 1e-30).sqrt() / root + EPS)
        return loss(p, x, y)

    return lambda: norm_of(list(torch.func.grad(outer)(params).values()))


def torchopt_meta(
    loss: Loss, params: dict[str, Tensor], x: Tensor, y: Tensor, steps: int, norm: bool, func: bool = False
) -> Step:
    """The meta-gradient through some steps by the first parameters, by torchopt: plain autograd or `torch.func.grad`.

    To torchopt's clip the norm is a constant, which is less work and another derivative: with `norm` it is clipped by
    hand, and differentiated.
    """
    import torchopt

    def clip(grads: list[Tensor]) -> list[Tensor]:
        total = torch.stack([(g * g).sum() for g in grads]).sum().sqrt()
        factor = (CLIP / (total + 1e-6)).clamp(max=1.0)
        return [g * factor for g in grads]

    tx = torchopt.adamw(LR, BETAS, EPS, DECAY, moment_requires_grad=False)
    if not norm:
        tx = torchopt.chain(torchopt.clip.clip_grad_norm(CLIP), tx)

    def gradients(p: dict[str, Tensor]) -> list[Tensor]:
        if func:
            return list(torch.func.grad(loss)(p, x, y).values())
        return list(torch.autograd.grad(loss(p, x, y), list(p.values()), create_graph=True))

    def outer(first: dict[str, Tensor]) -> Tensor:
        p, state = first, tx.init(first)
        for _ in range(steps):
            grads = clip(gradients(p)) if norm else gradients(p)
            updates, state = tx.update(dict(zip(p, grads, strict=True)), state, params=p, inplace=False)
            p = torchopt.apply_updates(p, updates, inplace=False)
        return loss(p, x, y)

    def step() -> float:
        if func:
            return norm_of(list(torch.func.grad(outer)(params).values()))
        first = {k: v.clone().requires_grad_() for k, v in params.items()}
        return norm_of(list(torch.autograd.grad(outer(first), list(first.values()))))

    return step


class JaxOps:
    """What the models are made of, in JAX."""

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self.jax, self.jnp, self.tanh = jax, jnp, jnp.tanh

    def gelu(self, x: Any) -> Any:
        return self.jax.nn.gelu(x, approximate=True)

    def norm(self, x: Any, weight: Any, bias: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        return (x - mean) / self.jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * weight + bias

    def attention(self, q: Any, k: Any, v: Any) -> Any:
        return self.jax.nn.softmax(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5, -1) @ v

    def heads(self, x: Any) -> Any:
        from functional_models import HEADS

        return x.reshape(*x.shape[:-1], HEADS, -1).swapaxes(-2, -3)

    def joined(self, x: Any) -> Any:
        x = x.swapaxes(-2, -3)
        return x.reshape(*x.shape[:-2], -1)


def jax_steps(loss: Loss, params: dict[str, Any], x: Any, y: Any, members: int) -> dict[str, Step]:
    """JAX and optax under `jit`, of one member and of several; none where they are not installed."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    try:
        import jax
        import optax
    except ImportError:
        return {}
    ops = JaxOps()
    tx = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(LR, *BETAS, eps=EPS, weight_decay=DECAY))

    def step(p: Any, state: Any) -> tuple[Any, Any, Any]:
        out, grads = jax.value_and_grad(lambda p: loss(p, x, y, ops))(p)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state, out

    def runner(fn: Callable, p: Any, state: Any) -> Step:
        kept = [p, state]

        def once() -> float:
            kept[0], kept[1], out = fn(*kept)
            return float(out.ravel()[0])

        return once

    one = {k: jax.numpy.asarray(v) for k, v in params.items()}
    many = {k: jax.numpy.stack([v] * members) for k, v in one.items()}
    return {
        "step": runner(jax.jit(step, donate_argnums=(0, 1)), one, tx.init(one)),
        "vmap": runner(jax.jit(jax.vmap(step), donate_argnums=(0, 1)), many, jax.vmap(tx.init)(many)),
    }
