"""`State`: everything a run consists of, as one tree of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._compat import register_pytree_node
from .pictures import bars
from .transform import TransformState
from .tree import Layout, Leaves, Tree, flatten, register_global


@dataclass(frozen=True, eq=False)
class State:
    """Stored parameters, the state of every transform, and counters: a node for optree and for torch.func.

    Its structure, dtypes and shapes depend on the parameters and the transforms alone, so states
    stack: `torch.func.vmap(step)` over a stacked state trains an ensemble.

    Attributes:
        leaves: stored parameters by path, tied ones once.
        transforms: the state of each transform by its name.
        step: optimizer steps applied, 0-d int64.
        micro_step: calls of `update`, 0-d int64.
        layout: the structure the parameters were given in; not a part of the tree.
    """

    leaves: Leaves
    transforms: dict[str, TransformState]
    step: Tensor
    micro_step: Tensor
    layout: Layout

    @property
    def params(self) -> Tree:
        """The stored parameters in the structure they were given in; under sharding, this rank's part."""
        return self.layout.join(self.leaves)

    def __repr__(self) -> str:
        count = sum(leaf.numel for leaf in self.layout.leaves)
        return (
            f"State({len(self.leaves)} leaves, {count} parameters, step={self.step.tolist()}, "
            f"transforms={list(self.transforms)})"
        )

    def _repr_html_(self) -> str:
        kept = {"params": self.leaves, **self.transforms}
        sizes = {name: sum(x.nbytes for x in flatten(tree)[0] if isinstance(x, Tensor)) for name, tree in kept.items()}
        return bars([(name, f"{size:,} B", size) for name, size in sizes.items()], repr(self))


def _flatten(state: State) -> tuple[tuple[Any, ...], Layout]:
    return (state.leaves, state.transforms, state.step, state.micro_step), state.layout


def _unflatten_optree(layout: Layout, children: Any) -> State:
    leaves, transforms, step, micro_step = children
    return State(leaves, transforms, step, micro_step, layout)


def _unflatten_torch(children: Any, layout: Layout) -> State:
    return _unflatten_optree(layout, children)


register_global(State, _flatten, _unflatten_optree)
register_pytree_node(State, lambda s: (list(_flatten(s)[0]), s.layout), _unflatten_torch)
