"""What every law is given: a transform, the pipeline that it is checked in, and parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.chain import chain
from ..core.chain_order import effect
from ..core.state import State
from ..core.transform import Transform
from ..core.tree import Tree, flatten
from ..pure.api import update
from ..transforms.sgd import sgd
from .trees import random_like


@dataclass(frozen=True)
class Case:
    """What every law is given: the transform, the pipeline it stands in, and parameters."""

    tx: Transform
    pipe: Transform
    params: Tree

    @property
    def steps(self) -> int:
        """Micro-steps that close a window twice."""
        every = 1
        for t in self.pipe.members:
            every *= t.facts.window
        return 2 * every + 1

    @property
    def weight(self) -> dict[str, Any]:
        return {"weight": 2.0} if any(t.facts.weighted for t in self.pipe.members) else {}

    @property
    def guests(self) -> bool:
        return any(t.facts.adds for t in inner(self.pipe))

    @property
    def scaling(self) -> set[str]:
        """The transforms that divide a loss scale out, by name: their counters count what is skipped."""
        return {t.name for t in self.pipe.members if effect(t).unscaled_by}

    def grads(self, state: State, seed: int) -> Tree:
        return random_like(state.params, seed=100 + seed)

    def run(self, state: State, grads: Callable[[State, int], Tree] | None = None, steps: int = 0) -> State:
        for i in range(steps or self.steps):
            state, _ = update(self.pipe, (grads or self.grads)(state, i), state, **self.weight)
        return state


def inner(t: Transform) -> list[Transform]:
    """The transform and everything nested in it."""
    return [t, *(x for part in t.parts for x in inner(part))]


def loss(params: Tree, data: Tree) -> Tensor:
    """Its gradient depends on data and on parameters, and is alive in every leaf."""
    # Under vmap the structure is the same and the tensors are wrapped, so all this is plain arithmetic.
    pairs = zip(flatten(params)[0], flatten(data)[0], strict=True)
    terms = [(p.float() * d.float() + 0.1 * p.float() ** 2).sum() for p, d in pairs if p is not None]
    return torch.stack(terms).sum()


def completed(tx: Transform) -> Transform:
    parts = tx.members
    if any(t.facts.optimizes for t in parts):
        return tx
    return chain(sgd(0.1), tx) if parts and parts[0].facts.watches else chain(tx, sgd(0.1))


def fail(case: Case, law: str) -> str:
    return f"{case.tx!r}: {law}"
