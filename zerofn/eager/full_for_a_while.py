"""Full parameters in an attached model for a while, and what is written into them stored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..core.pipeline import Pipeline
from ..core.tree import Leaves


@contextmanager
def full_for_a_while(pipe: Pipeline, params: Leaves, stored: Callable[[], Leaves]) -> Iterator[set[str]]:
    """Full parameters in the places of `params` inside; stored where they are other ones at the end.

    Args:
        pipe: the pipeline of the model.
        params: its parameters by path.
        stored: what is stored of each now, by path.

    Yields:
        What paths were stored, once it has ended.
    """
    parts = {path: p.data for path, p in params.items()}
    fulls = pipe.road.whole(stored())
    # Views that lose something have no way back, so what nobody wrote into is left as it is stored.
    before = None if pipe.road.exact else {path: full.clone() for path, full in fulls.items()}
    for path, full in fulls.items():
        params[path].data = full
    written: set[str] = set()
    try:
        yield written
        written |= _store(pipe, params, stored(), before)
    finally:
        for path, p in params.items():
            p.data = parts[path]


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
