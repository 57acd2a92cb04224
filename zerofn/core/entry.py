"""`Entry`: one tensor of a state, by name, and how it lies over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .tensor_parallel_leaves import Within


@dataclass(frozen=True, eq=False)
class Entry:
    """One tensor of a state, or a plain value in the state of a transform from another library.

    Attributes:
        owner: the transform, `"params"`, or `""` for the counters of the state itself.
        slot: what it is to its owner, for instance `"exp_avg"`.
        path: the leaf it belongs to, or `""`; a tree that is one tensor has a leaf of that path too.
        value: the tensor as this process holds it.
        shape: of the whole tensor over all ranks.
        offset: flat index in the whole of this process's first element; `None` where it holds all of it.
        of_leaf: whether it belongs to a leaf.
        at_owner: whether one rank has all of it, the owner of the leaf.
        elsewhere: whether that is another one than this.
        within: where the model itself has cut the leaf, how; then elements are counted box by box.
        below: in the leaf's own tree, where its state is one: the keys, with slashes between them.
        of_part: whether it is of this rank's part of a leaf, nobody but its transform knows how.
    """

    owner: str
    slot: str
    path: str
    value: Any
    shape: tuple[int, ...]
    offset: int | None = None
    of_leaf: bool = True
    at_owner: bool = False
    elsewhere: bool = False
    within: Within | None = None
    below: str = ""
    of_part: bool = False

    @property
    def key(self) -> str:
        """Its name in a checkpoint.

        >>> Entry("adamw", "exp_avg", "blocks.0.weight", None, ()).key
        'adamw/exp_avg/blocks.0.weight'
        """
        above = [part for part in (self.owner, self.slot) if part]
        keys = [*above, self.path] if self.of_leaf else above
        return "/".join([*keys, self.below] if self.below else keys)

    def part(self, whole: Tensor) -> Tensor:
        """What this process keeps of the whole tensor.

        >>> import torch
        >>> Entry("adamw", "exp_avg", "w", torch.zeros(2), (2, 2), offset=1).part(torch.eye(2))
        tensor([0., 0.])
        """
        if self.offset is None:
            return whole.reshape(self.shape)
        mine, low = whole, self.offset
        if self.within is not None:
            mine, low = self.within.part(whole), low - self.within.before
        return mine.reshape(-1)[low : low + self.value.numel()].reshape(self.value.shape)
