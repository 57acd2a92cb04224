"""How the ranks along one axis of a mesh have a tensor: in torch's words, and in two of ours.

`Replicate`, `Shard` and `Partial` are called, made and printed as torch's. They are records of our own, since
`import torch.distributed.tensor` takes as long as half of `import torch`, and a chain is surveyed on one process too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Replicate:
    """Each rank has the same."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True)
class Shard:
    """Each rank has some of the slices along a dimension: torch's chunks, of which the last may be short, or empty."""

    dim: int

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True)
class Partial:
    """Each rank has a term of what the tensor is: the mean of those, or another reduction."""

    op: str = "avg"

    def __repr__(self) -> str:
        return f"Partial({self.op})"


@dataclass(frozen=True)
class Flat:
    """Ours: each rank has a range of the tensor laid out flat, which may begin within a row."""

    def __repr__(self) -> str:
        return "Flat()"


@dataclass(frozen=True)
class Owner:
    """Ours: one rank has the whole, the others nothing."""

    rank: int

    def __repr__(self) -> str:
        return f"Owner({self.rank})"


AxisPlacement = Replicate | Shard | Partial | Flat | Owner
