"""Complex parameters of an attached model: the model has them, and the pipeline has their real and imaginary parts.

Both are on the same memory, as `torch.view_as_real` gives it, so that a write into one is a write into the other. Under
`shard` they are DTensors (`sharded_parameter`), of which the pipeline has the rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..core.layout import Layout, Leaf, Leaves, as_complex, as_real

# The attribute of the parts under which they have the parameter.
WHOLE = "_zerofn_complex"


def parts_of(layout: Layout, params: Leaves, named: Mapping[str, nn.Parameter]) -> tuple[Leaves, Leaves]:
    """Parameters by path in real numbers, as the pipeline takes them, and as the model has them.

    Args:
        layout: the layout of the parameters.
        params: by path, from `make_layout`.
        named: the parameters of the model.
    """
    parts, shown = dict(params), dict(params)
    for leaf in layout.complexes:
        p = named[leaf.path]
        made = nn.Parameter(as_real(p.detach(), leaf), requires_grad=p.requires_grad)
        if vars(p):
            vars(made).update(vars(p))
        setattr(made, WHOLE, (p, leaf))
        parts[leaf.path], shown[leaf.path] = made, p
    return parts, shown


def whole_of(part: Tensor) -> Tensor:
    """The parameter that the model had before it was attached: a complex one of its parts, any other one itself."""
    found = vars(part).get(WHOLE)
    return part if found is None else found[0]


def follow(part: Tensor) -> None:
    """Give a complex parameter the memory of its parts, which have new memory; none where they are a flat shard."""
    found = vars(part).get(WHOLE)
    if found is None:
        return
    p, leaf = found
    with torch.DisableTorchFunctionSubclass():
        x = part.detach()
        now = as_complex(x, leaf) if x.shape == leaf.shape else p.detach().new_empty(0)
        Tensor.data.__set__(p, now)  # type: ignore[attr-defined]


class ComplexParameters:
    """Converts gradients of complex parameters that every rank has in full.

    Args:
        layout: the layout of the parameters.
        shown: by path, the parameters that the model has.
    """

    def __init__(self, layout: Layout, shown: Leaves):
        self.leaves: dict[str, Leaf] = {leaf.path: leaf for leaf in layout.complexes}
        self.shown = shown

    def mine(self, path: str, g: Tensor) -> Tensor:
        """The real and imaginary parts of a gradient."""
        leaf = self.leaves.get(path)
        return g if leaf is None else as_real(g, leaf)

    def mine_of(self, grads: Leaves) -> Leaves:
        """`mine` of each of these gradients, by path."""
        with torch.no_grad():
            return {path: self.mine(path, g) for path, g in grads.items()}

    def gradient(self, leaf: Leaf, g: Tensor | None) -> Tensor | None:
        """The reverse."""
        return g if g is None else as_complex(g, leaf)
