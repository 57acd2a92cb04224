"""Views of small parameters that are made once and serve in every call.

A view of a parameter differs from it in nothing but the division by the loss scale in backward. Of a layer with
a few hundred weights, making a new one for each call takes longer than the layer. A node of autograd that saves
nothing may be used by any number of graphs, so it can stay.

Not for large parameters: autograd runs older nodes later, so what arrives at a kept view is divided when
backward has done everything else. Memory that has left the caches by then costs more than a node. Nor where
gradients leave during backward, which is to begin as early as possible.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ._boundary import untracked
from ._crossing import Crossing, Edge, Passage
from ._errors import bad_leaves

# Elements up to which a view is kept.
SMALL = 1 << 14


class KeptCrossing(Crossing):
    """A crossing that its owner keeps, through a node of autograd: a cycle that Python's collector would not see."""

    def __init__(self, owner: Any, edge: Edge):
        self.edge, self.inward, self.used = edge, True, None
        self.weak = weakref.ref(owner)

    @property
    def owner(self) -> Any:  # type: ignore[override]
        return self.weak()

    @property
    def scale(self) -> Any:  # type: ignore[override]
        return self.owner.scale

    @property
    def noticed(self) -> Any:  # type: ignore[override]
        return self.owner.noticed


class KeptPassage(Passage):
    """A passage without a cast, in as little Python as there can be: it is run for every small parameter."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor | None, forth: Any, back: Any) -> Tensor:
        # To autograd no view, for after an update of the parameter it would give a view another node.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        if not untracked():
            return Passage.backward(ctx, g)
        crossing: KeptCrossing = ctx.crossing
        owner: Any = crossing.weak()
        # A graph that can be differentiated holds an output, which holds the owner.
        owner.noticed(crossing)
        return g / owner.scale(), None, None, None


class KeptView:
    """A view of one parameter, and what tells that it is still one.

    Since it is no view to autograd, in-place changes go unnoticed by torch. They are looked for after each call.
    """

    __slots__ = ("address", "node", "stored", "view")

    def __init__(self, owner: Any, edge: Edge, stored: Tensor):
        crossing = KeptCrossing(owner, edge)
        with torch.inference_mode(False), torch.enable_grad():
            self.view = KeptPassage.apply(stored, None, crossing.forth, crossing.back)
        self.stored: Tensor | None = stored
        self.node: Any = self.view.grad_fn
        self.node.crossing = crossing
        self.address = stored.data_ptr()

    def serves(self, stored: Tensor) -> bool:
        """Whether it is the view of this tensor, as it is now."""
        return self.stored is stored and stored.data_ptr() == self.address and stored.requires_grad


def check_kept(kept: dict[str, KeptView]) -> None:
    """After a call: views are what they were.

    Raises:
        RuntimeError: the model has written into a parameter.
    """
    bad = [path for path, k in kept.items() if k.view.grad_fn is not k.node]
    for path in bad:
        # Whoever else has it is not served either.
        kept.pop(path).stored = None
    if bad:
        raise RuntimeError(
            bad_leaves(
                "the model wrote into parameters in its forward",
                [(path, "a leaf of the graph, changed in place") for path in bad],
                "with torch.no_grad(): param.mul_(...)",
            )
        )


def may_keep(stored: Tensor, grad_dtype: torch.dtype) -> bool:
    """Whether a view of this parameter is worth keeping, and loses nothing by it.

    Cotangents of several calls add up before they are divided, which fp16 has no room for.
    """
    wide = stored.dtype in (torch.float32, torch.float64) and stored.dtype == grad_dtype
    return wide and stored.numel() <= SMALL and stored.is_leaf and type(stored) is torch.nn.Parameter
