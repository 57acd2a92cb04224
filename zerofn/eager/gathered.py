"""`opt.gathered()`: full parameters in an attached model, and what is written into them stored at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from .._errors import explain
from ..core.layout import Leaves
from ..core.pipeline import Pipeline
from ..sharded.guarded_parameter import read, write
from .current_state import CurrentState
from .resident_form import cut, put


@contextmanager
def full_for_a_while(pipe: Pipeline, params: Leaves, current: CurrentState) -> Iterator[set[str]]:
    """Full parameters in the places of `params` inside; stored where they are other ones at the end.

    Args:
        pipe: the pipeline of the model.
        params: its parameters by path.
        current: the state in force.

    Yields:
        What paths were stored, once it has ended.
    """
    parts = {path: p.data for path, p in params.items()}
    fulls = pipe.road.whole(current.state.leaves)
    # Views that lose something have no way back, so what nobody wrote into is left as it is stored.
    before = None if pipe.road.exact else {path: full.clone() for path, full in fulls.items()}
    grads = {path: read(p) for path, p in params.items()}
    for path, full in fulls.items():
        put(pipe, params[path], full, None)
    written: set[str] = set()
    try:
        yield written
        written |= _store(pipe, params, current.state.leaves, before)
    finally:
        for path, p in params.items():
            put(pipe, p, parts[path], "the end of opt.gathered()")
        if cut(pipe):
            _check_gradients(params, grads)


def _check_gradients(params: Leaves, before: Mapping[str, Tensor | None]) -> None:
    """Refuse gradients from inside, which are whole and of this rank alone."""
    made = [path for path, p in params.items() if (g := read(p)) is not None and g is not before[path]]
    for path in made:
        write(params[path], None)
    if made:
        raise RuntimeError(
            explain(
                f"with opt.gathered(): ... .backward(), which gave {made[0]} a gradient",
                "inside parameters are whole, and a step takes each rank's part of the mean over ranks",
                "the backward outside of it; torch.autograd.grad(loss, parameters) inside; opt.zero_grad() at its end",
            )
        )


@torch.no_grad()
def _store(pipe: Pipeline, params: Leaves, stored: Leaves, before: Leaves | None) -> set[str]:
    """Store what full parameters hold, where it is not what it was; of which of them it is something new."""
    written = set()
    for leaf in pipe.layout.leaves:
        if before is not None and torch.equal(before[leaf.path], params[leaf.path]):
            continue
        mine, home = pipe.road.store(params[leaf.path].detach(), leaf), stored[leaf.path]
        if not torch.equal(mine, home):
            written.add(leaf.path)
        home.copy_(mine)
    return written
