"""First states at `attach`, on all ranks or none; gradients from before become shards of their mean."""

from __future__ import annotations

from ..core import rank_agreement
from ..core.layout import Leaves
from ..core.pipeline import Pipeline
from ..core.transform import TransformState
from ..ranks.collectives import gather_numbers
from ..ranks.group import Group
from ..sharded.guarded_parameter import read, write


class ExistingGradients:
    """Gradients that parameters had before they were attached and cut into shards.

    Left in place they would be whole beside shards, and a fused kernel reads them without an error. At the other stages
    whole gradients stay in `p.grad`, and are reduced with what is added to them.

    Attributes:
        grads: by path, taken out of the parameters.
    """

    def __init__(self, pipe: Pipeline, params: Leaves):
        self.pipe, self.params = pipe, params
        self.grads: Leaves = {}

    def take(self) -> None:
        """Take them out."""
        pipe, params = self.pipe, self.params
        if pipe.gathering is not None:
            self.grads = {path: g.detach() for path, p in params.items() if (g := read(p)) is not None}
            for path in self.grads:
                write(params[path], None)

    def shard(self, stored: Leaves) -> None:
        """Give each parameter this rank's part of the mean. All ranks call it, those without gradients too."""
        road = self.pipe.road
        mine = {leaf.path: self.grads[leaf.path] for leaf in self.pipe.layout.trainable if leaf.path in self.grads}
        parts = road.pull(road.at_use, mine, stored)
        for leaf in self.pipe.layout.trainable:
            if leaf.path in parts:
                write(self.params[leaf.path], parts[leaf.path].to(road.resident_grad_dtype(leaf)))

    def put_back(self) -> None:
        """As they were: the model was not attached."""
        for path, g in self.grads.items():
            write(self.params[path], g)


def first_states(
    pipe: Pipeline, stored: Leaves, control: Group | None, existing: ExistingGradients
) -> dict[str, TransformState]:
    """The first states of all transforms, by name. Existing gradients are cut once all ranks have them.

    Ranks exchange one message, so that after an error on one rank no other rank keeps an attached model.

    Raises:
        Exception: what a transform raised on this rank.
        RuntimeError: on the others.
    """
    any_grads = False

    def tell(failed: bool) -> list[int]:
        nonlocal any_grads
        if control is None:
            return []
        rows = gather_numbers([int(failed), int(bool(existing.grads))], control)
        any_grads = any(grads for _, grads in rows)
        return [rank for rank, (other, _) in zip(control.ranks, rows, strict=True) if other]

    states = rank_agreement.first_states(pipe, stored, tell, "zf.attach(model, tx)")
    if any_grads:
        existing.shard(stored)
    return states
