"""What every law of `check_transform` is given: a transform, the pipeline it is checked in, and parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.chain import chain
from ..core.chain_order import effect
from ..core.layout import Leaves
from ..core.state import State
from ..core.transform import Transform
from ..core.tree import Tree, flatten
from ..pure.api import update
from ..transforms.sgd import sgd
from .trees import random_like


@dataclass(frozen=True)
class Case:
    """A transform, the pipeline it stands in, and parameters."""

    tx: Transform
    pipe: Transform
    params: Tree

    @property
    def steps(self) -> int:
        """So many micro-steps that the accumulation window closes twice and another one is open."""
        return 2 * math.prod(t.facts.window for t in self.pipe.members) + 1

    @property
    def weight(self) -> dict[str, Any]:
        return {"weight": 2.0} if any(t.facts.weighted for t in self.pipe.members) else {}

    @property
    def has_guests(self) -> bool:
        """Whether a transformation of another library is among them."""
        return any(t.facts.adds for t in innermost(self.pipe))

    @property
    def scaling(self) -> set[str]:
        """The names of transforms that unscale gradients: they count skipped steps."""
        return {t.name for t in self.pipe.members if effect(t).unscaled_by}

    def grads(self, state: State, seed: int) -> Tree:
        """One for each leaf; of a tied one at its first place alone."""
        return state.layout.join_once(random_like(state.leaves, seed=100 + seed))

    def run(self, state: State, grads: Callable[[State, int], Tree] | None = None, steps: int = 0) -> State:
        for i in range(steps or self.steps):
            state, _ = update(self.pipe, (grads or self.grads)(state, i), state, **self.weight)
        return state

    def broken(self, law: str) -> str:
        """The message of an error: this transform, and the law that it breaks."""
        return f"{self.tx!r}: {law}"


def inner(t: Transform) -> list[Transform]:
    """The transform and everything nested in it."""
    return [t, *(x for part in t.parts for x in inner(part))]


def innermost(t: Transform) -> list[Transform]:
    """Those of `inner` in which nothing is nested."""
    return [x for x in inner(t) if not x.parts]


def loss(params: Tree, data: Tree) -> Tensor:
    """A loss whose gradient depends on data and on parameters, and is not zero in any leaf."""
    pairs = zip(flatten(params)[0], flatten(data)[0], strict=True)
    terms = [(p.float() * d.float() + 0.1 * p.float() ** 2).sum() for p, d in pairs if p is not None]
    return torch.stack(terms).sum()


class AsModel(nn.Module):
    """A model whose parameters have these paths; its output is `loss` of them and of data by path."""

    def __init__(self, leaves: Leaves):
        super().__init__()
        self.paths = list(leaves)
        for path, x in leaves.items():
            *above, name = path.split(".")
            module: nn.Module = self
            for key in above:
                if key not in module._modules:
                    module.add_module(key, nn.Module())
                module = module.get_submodule(key)
            module.register_parameter(name, nn.Parameter(x.detach().clone()))

    def forward(self, data: Leaves) -> Tensor:
        return loss({path: self.get_parameter(path) for path in self.paths}, {path: data[path] for path in self.paths})


def completed(tx: Transform) -> Transform:
    """The pipeline with an optimizer: where it has none, `sgd` at its end, or before what watches parameters."""
    parts = tx.members
    if any(t.facts.optimizes for t in parts):
        return tx
    at = next((i for i, t in enumerate(parts) if t.facts.watches), len(parts))
    return chain(*parts[:at], sgd(0.1), *parts[at:])
