"""How a tensor lies on the ranks along one axis of a mesh: torch's placements, and two of our own.

`Replicate`, `Shard` and `Partial` are called, made and printed as torch's. They are records of our own, since
`import torch.distributed.tensor` takes as long as half of `import torch`, and a chain is surveyed on one process too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Replicate:
    """Each rank has the same."""


@dataclass(frozen=True)
class Shard:
    """Each rank has a chunk along a dimension, as `torch.chunk` cuts: the last chunks may be shorter, or empty."""

    dim: int

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class Partial:
    """Each rank has a term; the tensor is the mean of the terms, or another reduction of them."""

    op: str = "avg"

    def __repr__(self) -> str:
        return f"Partial({self.op})"


@dataclass(frozen=True)
class Flat:
    """Our own: each rank has a range of the flattened tensor, which may begin within a row."""


@dataclass(frozen=True)
class Owner:
    """Our own: one rank has the whole tensor, the others nothing."""

    rank: int

    def __repr__(self) -> str:
        return f"Owner({self.rank})"


AxisPlacement = Replicate | Shard | Partial | Flat | Owner
