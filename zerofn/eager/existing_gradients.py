"""Gradients that parameters had before they were attached and cut: their mean over ranks, cut as parameters are."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..core.layout import Leaves
from ..core.pipeline import Pipeline
from ..sharded.guarded_parameter import read, write
from .resident_form import cut


class Earlier:
    """Those of one model. Left in place they would be whole beside parts, which a fused kernel reads without a word.

    At the other stages whole gradients are in their place, and are reduced with what is added to them.

    Attributes:
        grads: by path, taken out of the parameters.
    """

    def __init__(self, pipe: Pipeline, params: Mapping[str, Tensor]):
        self.pipe, self.params = pipe, params
        self.grads: Leaves = {}
        if cut(pipe):
            self.grads = {path: g.detach() for path, p in params.items() if (g := read(p)) is not None}
            for path in self.grads:
                write(params[path], None)

    def cut(self, stored: Leaves) -> None:
        """Each rank has its part of their mean. A call of every rank, of those that have none too."""
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
