"""One training program run twice, on a plain module and on an attached one, and everything visible compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import zerofn as zf

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LR = 0.25


@dataclass(frozen=True)
class Pipe:
    """A pipeline and how far its gradients may be from those of the plain fp32 module.

    Attributes:
        build: from the number of micro-batches in a window.
        tol: on the norm of the difference over the norm. fp32 arithmetic is the same but for its order; bf16
            has 8 bits, so sums over a few layers are off by one or two percent; fp16 has 11.
        stored: dtype of the parameters; a 16-bit update is compared by its gradient alone.
    """

    build: Callable[[int], zf.Transform]
    tol: float
    stored: torch.dtype = FP32


def _held(every: int) -> list[zf.Transform]:
    return [zf.accumulate(every)] if every > 1 else []


PIPES: dict[str, Pipe] = {
    "fp32": Pipe(lambda k: zf.chain(*_held(k), zf.sgd(LR)), 1e-5),
    "offload": Pipe(lambda k: zf.chain(*[zf.offload(t) for t in _held(k)], zf.offload(zf.sgd(LR))), 1e-5),
    "scaled": Pipe(lambda k: zf.chain(zf.scale_loss(1024.0), *_held(k), zf.sgd(LR)), 1e-5),
    "bf16": Pipe(lambda k: zf.chain(zf.precision(param_dtype=BF16), *_held(k), zf.sgd(LR)), 5e-2),
    "bf16 scaled": Pipe(
        lambda k: zf.chain(
            zf.precision(param_dtype=BF16, output_dtype=FP32), zf.scale_loss(64.0), *_held(k), zf.sgd(LR)
        ),
        5e-2,
    ),
    "bf16 states": Pipe(
        lambda k: zf.chain(
            zf.precision(store_dtype=BF16, grad_dtype=FP32),
            *_held(k),
            zf.low_precision_adam(1e-3, rounding="stochastic"),
        ),
        5e-2,
        BF16,
    ),
    "fp16 dynamic": Pipe(
        lambda k: zf.chain(
            zf.precision(param_dtype=FP16, output_dtype=FP32),
            # Small enough not to overflow on the data here, and growing at every step.
            zf.scale_loss("dynamic", init_scale=256.0, growth_interval=1),
            *_held(k),
            zf.sgd(LR),
        ),
        1e-2,
    ),
}
F64 = torch.float64


def _wide(*scale: zf.Transform, **dtypes: torch.dtype) -> Pipe:
    return Pipe(lambda k: zf.chain(zf.precision(**dtypes), *scale, *_held(k), zf.sgd(LR)), 1e-4, F64)


# The casts and scales of the 16-bit pipelines in more bits than the plain module has: no rounding hides a mistake.
TWINS: dict[str, Pipe] = {
    "bf16": _wide(param_dtype=F64),
    "bf16 scaled": _wide(zf.scale_loss(64.0), param_dtype=F64, output_dtype=FP32),
    "bf16 states": _wide(store_dtype=F64, grad_dtype=FP32),
    "fp16 dynamic": _wide(
        zf.scale_loss("dynamic", init_scale=256.0, growth_interval=1), param_dtype=F64, output_dtype=FP32
    ),
}
EXACT = ["fp32", "offload", "scaled"]


@dataclass
class Run:
    """What a program is given: models, data, and how to differentiate.

    Attributes:
        models: plain or attached.
        step: which micro-step this is.
        opt: the adapter of the first model; `None` on the plain side.
    """

    models: list[nn.Module]
    step: int
    opt: Any = None

    @property
    def model(self) -> nn.Module:
        return self.models[0]

    def data(self, *shape: int, grad: bool = False, seed: int = 0) -> Tensor:
        """The same numbers on both sides, others at each micro-step."""
        g = torch.Generator().manual_seed(1000 * self.step + seed)
        return torch.randn(*shape, generator=g).requires_grad_(grad)


Program = Callable[[Run], Any]


def difference(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp(min=1e-12))


def compare(
    program: Program,
    make: Callable[[], nn.Module] | list[Callable[[], nn.Module]],
    pipe: str | Pipe = "fp32",
    every: int = 1,
    windows: int = 2,
    unused: tuple[str, ...] = (),
    tol: float | None = None,
    pipes: list[Pipe] | None = None,
    may_overflow: bool = False,
    may_be_dead: bool = False,
) -> list[zf.Optimizer]:
    """Run `program` for some windows and compare gradients, what it returns, and the update of each window.

    The plain side gets the attached one's parameters before each window, so that rounding does not add up.
    """
    makes = make if isinstance(make, list) else [make]
    kinds = pipes or [PIPES[pipe] if isinstance(pipe, str) else pipe] * len(makes)
    torch.manual_seed(0)
    plain = [m() for m in makes]
    models = copy.deepcopy(plain)
    opts = [zf.attach(m, kind.build(every)) for m, kind in zip(models, kinds, strict=True)]
    tol = tol or max(kind.tol for kind in kinds)
    for window in range(windows):
        before = [{n: p.detach().float().clone() for n, p in m.named_parameters()} for m in models]
        for m, start in zip(plain, before, strict=True):
            with torch.no_grad():
                for n, p in m.named_parameters():
                    p.copy_(start[n])
        sums: list[dict[str, Tensor]] = [{} for _ in plain]
        for micro in range(every):
            step = window * every + micro
            results = []
            for side, opt in ((plain, None), (models, opts[0])):
                torch.manual_seed(step)
                results.append(program(Run(side, step, opt)))
            if may_be_dead and not all(
                p.grad.isfinite().all() for m in plain for p in m.parameters() if p.grad is not None
            ):
                return opts  # the plain program diverged
            if may_overflow and _overflowed(opts):
                return opts
            _compare_results(results, tol, lively=not may_be_dead)
            for i, (p, m) in enumerate(zip(plain, models, strict=True)):
                _compare_grads(p, m, tol, unused)
                for n, x in p.named_parameters():
                    if x.grad is not None:
                        sums[i][n] = sums[i].get(n, 0) + x.grad.detach()
                        x.grad = None
            for opt in opts:
                if any(p.grad is not None for p in opt._own.params.values()):
                    opt.step()
                opt.zero_grad()
        for m, kind, start, total in zip(models, kinds, before, sums, strict=True):
            for n, p in m.named_parameters():
                if n in total and kind.stored is FP32:
                    update = -LR * total[n] / every
                    # The stored parameter is rounded once more, at its own size.
                    far = (p.detach() - start[n] - update).norm()
                    assert far < tol * update.norm() + 2e-7 * start[n].norm(), f"update of {n} off by {far:.2e}"
                elif n not in total:
                    assert torch.equal(p.detach().float(), start[n]), f"{n} moved without a gradient"
    return opts


def _overflowed(opts: list[zf.Optimizer]) -> bool:
    """Whether a gradient overflowed, in which case that optimizer's step must change nothing."""
    given = [(o, p.grad) for o in opts for p in o._own.params.values() if p.grad is not None]
    grads = [(o, getattr(g, "to_local", lambda g=g: g)()) for o, g in given]
    bad = [o for o in opts if any(not g.isfinite().all() for other, g in grads if other is o)]
    for opt in bad:
        before = [p.detach().clone() for p in opt._own.params.values()]
        opt.step()
        assert bool(opt.metrics["skipped"]) and not bool(opt.metrics["updated"])
        assert all(torch.equal(p, b) for p, b in zip(opt._own.params.values(), before, strict=True))
    return bool(bad)


def _compare_results(results: list[Any], tol: float, lively: bool) -> None:
    want, got = (r if isinstance(r, list | tuple) else [] if r is None else [r] for r in results)
    assert len(want) == len(got)
    for i, (w, g) in enumerate(zip(want, got, strict=True)):
        assert (w is None) == (g is None), f"result {i}: {g} instead of {w}"
        if w is not None:
            assert w.norm() > 0 or not lively, f"result {i} is dead data"
            assert difference(g, w) < tol, f"result {i} off by {difference(g, w):.2e}"


def _compare_grads(plain: nn.Module, attached: nn.Module, tol: float, unused: tuple[str, ...]) -> None:
    wants, gots = dict(plain.named_parameters()), dict(attached.named_parameters())
    assert wants.keys() == gots.keys()
    for name, p in wants.items():
        want, got = p.grad, gots[name].grad
        assert (want is None) == (got is None), f"{name}: {got} instead of {want}"
        if want is None:
            assert not p.requires_grad or name in unused, f"{name}: dead data"
            continue
        assert want.norm() > 0 or name in unused, f"{name}: dead data"
        assert difference(got, want) < tol, f"gradient of {name} off by {difference(got, want):.2e}"
