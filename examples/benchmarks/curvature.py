"""Products of a Hessian with vectors in a second: `zf.curvature` beside a double backward written by hand.

    python examples/benchmarks/curvature.py                       # a transformer of 3.3 M parameters: two minutes
    python examples/benchmarks/curvature.py --model mlp --width 256

Both look for the largest eigenvalue by power iteration from the gradient recorded once, with as many products, in
turns in one process. The ratio of products per second is the median over rounds of the ratio within a round, in
brackets its quartiles. Seconds are the processor's own, of one thread, which other work on the machine disturbs less.
Beside it the product alone, without norms and inner products. The eigenvalues, and the norms of a product, must be the
same.
"""

from __future__ import annotations

import argparse
import gc
import time
import warnings
from collections.abc import Callable

import torch
from functional_models import MODELS, problem
from overhead import quartiles
from torch import Tensor
from update_kernel import machine

import zerofn as zf
from zerofn.contrib.curvature import Hessian

Loss = Callable[[dict[str, Tensor]], Tensor]
Tensors = dict[str, Tensor]


TX = zf.sgd(0.1)


def first_vector(loss: Loss, state: zf.State) -> list[Tensor]:
    """The one that zerofn begins with, so that both make the same products."""
    hessian = Hessian(loss, TX, state, (), "max_eigenvalue")
    return list(hessian.unit(hessian.draw(state.params, 0, 0, signs=False)).values())


def by_hand(loss: Loss, state: zf.State, v: list[Tensor], products: int) -> float:
    """Power iteration as one writes it: one backward through the recorded gradient for each product."""
    leaves = [x.detach().requires_grad_() for x in state.params.values()]
    grads = torch.autograd.grad(loss(dict(zip(state.params, leaves, strict=True))), leaves, create_graph=True)
    value = 0.0
    for _ in range(products):
        w = torch.autograd.grad(grads, leaves, v, retain_graph=True)
        value = float(sum((a * b).sum() for a, b in zip(v, w, strict=True)))
        norm = float(sum((x * x).sum() for x in w)) ** 0.5
        v = [x / norm for x in w]
    return value


def by_zerofn(loss: Loss, state: zf.State, v: list[Tensor], products: int) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # not converged: as many products as by hand are to be made
        found = zf.curvature.max_eigenvalue(loss, TX, state, tol=1e-30, max_iter=products)
    return float(found[""])


def only_by_hand(loss: Loss, state: zf.State, v: list[Tensor], products: int) -> float:
    leaves = [x.detach().requires_grad_() for x in state.params.values()]
    grads = torch.autograd.grad(loss(dict(zip(state.params, leaves, strict=True))), leaves, create_graph=True)
    for _ in range(products):
        w = torch.autograd.grad(grads, leaves, v, retain_graph=True)
    return float(torch.cat([x.flatten() for x in w]).norm())


def only_by_zerofn(loss: Loss, state: zf.State, v: list[Tensor], products: int) -> float:
    hessian = Hessian(loss, TX, state, (), "max_eigenvalue")
    given = dict(zip(state.params, v, strict=True))
    for _ in range(products):
        w = hessian.product(given)
    return float(torch.cat([x.flatten() for x in w.values()]).norm())


PAIRS = {"power iteration": (by_hand, by_zerofn), "products alone": (only_by_hand, only_by_zerofn)}


def compare(options: argparse.Namespace) -> None:
    given, x, y = problem(options.model, options.width, options.layers, options.batch)
    params = {k: torch.from_numpy(a) for k, a in given.items()}
    inputs, targets, model = torch.from_numpy(x), torch.from_numpy(y), MODELS[options.model]
    count = sum(p.numel() for p in params.values())
    print(machine())
    print(f"{options.model}, {count:,} parameters, {len(params)} leaves, {options.products} products a round\n")

    def loss(p: Tensors) -> Tensor:
        return model(p, inputs, targets)

    state = zf.init(TX, params)
    v = first_vector(loss, state)
    for name, contestants in PAIRS.items():
        ratios, best, values = [], [0.0, 0.0], [0.0, 0.0]
        for round_ in range(options.rounds + 1):
            rates = [0.0, 0.0]
            # The one that comes first in a round comes second in the next.
            for k in (0, 1) if round_ % 2 else (1, 0):
                gc.collect()
                begin = time.process_time()
                values[k] = contestants[k](loss, state, v, options.products)
                rates[k] = options.products / (time.process_time() - begin)
            if round_:  # the first is for warming up
                ratios.append(rates[1] / rates[0])
                best = [max(b, r) for b, r in zip(best, rates, strict=True)]
        low, middle, high = quartiles(ratios)
        told = f"zerofn {best[1]:.2f} products/s, by hand {best[0]:.2f} (best rounds)"
        print(f"{name}: {told}; {values[1]:.6g}, {values[0]:.6g}")
        print(f"  ratio {middle:.3f} [{low:.3f}, {high:.3f}]   >= 0.95 {'met' if middle >= 0.95 else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--products", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    compare(options)


if __name__ == "__main__":
    main()
