"""Training by both routes: of an attached model, and by `make_step` on a state of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

import zerofn as zf


def micro_steps(
    route: str, model: nn.Module, tx: zf.Transform, batches: Iterable[Tensor], loss_of: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The state and its metrics after each micro-step, by "pure", "eager" or "in backward"; `loss_of` is of an output.

    What is attached casts inputs itself: by the other route they are to have the dtype the model sees.
    """
    if route == "pure":
        state = zf.init(tx, {n: p.detach() for n, p in model.named_parameters()})
        step = zf.make_step(lambda p, x: loss_of(functional_call(model, p, (x,))), tx)
        for x in batches:
            state, metrics = step(state, x)
            yield state, metrics
        return
    opt = zf.attach(model, tx, in_backward=route == "in backward")
    for x in batches:
        loss_of(model(x)).backward()
        opt.step()
        opt.zero_grad()
        yield opt.state, opt.metrics


def mean_square(out: Tensor) -> Tensor:
    """In fp32, whatever dtype a model computes in."""
    return out.float().square().mean()
