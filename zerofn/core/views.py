"""The words of a view half: how one leaf is seen, and what talks to other ranks.

A `View` is a record of functions on one leaf. The runner never asks which transform it belongs to, only what it says
of itself: whether a wire carries it to other ranks, whether it changes nothing but dtypes, whether what it gives stays
in the model between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..ranks.group import Group
from .dtypes import Dtypes, summable
from .layout import Layout, Leaf


class Wire(Protocol):
    """What talks to other ranks: how leaves are packed, sent and unpacked, many in one collective.

    Attributes:
        group: the ranks it talks to.
        reduce_dtype: dtype in which gradients are summed; by default the one they arrive in.
        cuts: whether a rank keeps a part of each leaf, a range of it laid out flat, so that views gather.
    """

    @property
    def group(self) -> Group: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...

    cuts: ClassVar[bool]

    def on(self, group: Group, reduce_dtype: torch.dtype | None) -> Wire:
        """The same over a group of the same ranks, with sums in that dtype."""
        ...

    def span(self, leaf: Leaf) -> tuple[int, int]:
        """This rank's flat range of a leaf."""
        ...

    def view(self, x: Tensor, leaf: Leaf) -> Tensor:
        """This rank's part to the whole, with any number of batch dimensions in front."""
        ...

    def pull(self, g: Tensor, leaf: Leaf) -> Tensor:
        """The transpose of `view`, with any number of batch dimensions in front: the mean over ranks."""
        ...

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        """The whole to this rank's part."""
        ...

    def send_parts(self, parts: Sequence[Tensor], leaves: Sequence[Leaf], async_op: bool = False) -> tuple[Any, Tensor]:
        """Gather parts of one dtype, of many leaves in one collective: (work handle or `None`, what comes)."""
        ...

    def join_parts(self, rows: Tensor, leaves: Sequence[Leaf], into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Whole leaves, flat, from what has come, in memory of their own or written to `into`."""
        ...

    def pack(
        self,
        grads: Sequence[Tensor | None],
        leaves: Sequence[Leaf],
        numels: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Flat gradients as one buffer to be summed over ranks; `None` where this rank has none."""
        ...

    def send(self, buffer: Tensor, async_op: bool = False) -> tuple[Any, Tensor]:
        """Sum the buffer over ranks: (work handle, this rank's share)."""
        ...

    def unpack(self, mine: Tensor, leaves: Sequence[Leaf], numels: Sequence[int]) -> list[Tensor | None]:
        """The mean gradient of every leaf as this rank keeps it, flat; `None` where no rank had one."""
        ...


# (tensor, leaf) -> tensor; of a view that reads its transform's state (tensor, leaf, state) -> tensor.
OnLeaf = Callable[..., Tensor]
# Of a transform's state: the number that cotangents carry inside of the model.
Factor = Callable[[Mapping[str, Any]], Tensor]


def as_it_lies(x: Tensor, leaf: Leaf) -> Tensor:
    """The `view`, `pull` and `store` of a view that does nothing to leaves."""
    return x


def every_leaf(leaf: Leaf) -> bool:
    """The `changes` of a view that touches all leaves."""
    return True


def as_a_whole(leaf: Leaf) -> Leaf:
    """The `given` of a view on whole leaves."""
    return leaf


@dataclass(frozen=True)
class View:
    """The view half on one leaf. All functions take `(tensor, leaf)` and any number of batch dimensions in front.

    Attributes:
        view: storage to model. Linear in the tensor, or its `pull` stands for a derivative (straight-through rounding).
        pull: the transpose: a cotangent of the model's side to one of the stored side.
        store: a seen parameter to what is stored of it; `view` after `store` is the identity.
        changes: whether the leaf is touched at all.
        wire: what carries it to other ranks, if it does; then the three functions above are the wire's.
        resident: whether what it gives stays in an attached model between steps, and is made once after an update.
        dtypes: what it says of dtypes; then it changes nothing else.
        name: of the transform that it is half of, for profilers.
        given: what it has on the model's side of a leaf: the leaf, or a part of it where another view cuts before.
        factor: what cotangents are multiplied by on their way into the model (at its outputs) and divided by on their
            way out (at its inputs and parameters), as a function of the transform's state: a 0-d tensor in fp32 on the
            CPU, neither zero nor infinite. Those of several views are multiplied. A number and no other map: only a
            number passes the derivative of every model, so that gradients outside are true, to any order.
        reads: whether `view` and `pull` take the transform's state as a third argument: what it was before the step.
            `store` does not, since what is stored is there before any state. The state is a constant to derivatives:
            what is to be learned is a parameter.
        traceable: whether a compiler can make a graph of what the wire does: `unpack` then gives a gradient for every
            leaf, since nobody can branch on a number in a graph.
    """

    view: OnLeaf = as_it_lies
    pull: OnLeaf = as_it_lies
    store: OnLeaf = as_it_lies
    changes: Callable[[Leaf], bool] = every_leaf
    wire: Wire | None = None
    resident: bool = False
    dtypes: Dtypes | None = None
    name: str = ""
    given: Callable[[Leaf], Leaf] = as_a_whole
    factor: Factor | None = None
    reads: bool = False
    traceable: bool = False

    def reading(self, state: Callable[[], Mapping[str, Any]]) -> View:
        """The same, whose functions find the state themselves, as it is when they are called."""
        if not self.reads:
            return self
        look, back = self.view, self.pull
        view, pull = (lambda x, leaf: look(x, leaf, state())), (lambda g, leaf: back(g, leaf, state()))
        return replace(self, view=view, pull=pull, reads=False)

    @property
    def of_leaves(self) -> bool:
        """Whether it does anything to leaves."""
        return self.view is not as_it_lies

    @property
    def only_dtype(self) -> bool:
        """Whether it changes nothing but the dtype."""
        return self.dtypes is not None

    @property
    def renumbers(self) -> bool:
        """Whether it makes other numbers of a leaf: it changes more than the place and the dtype."""
        return self.wire is None and self.dtypes is None


def summed_in(wire: Wire, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a wire sums gradients of a dtype."""
    return wire.reduce_dtype or summable(dtype)


def over_ranks(wire: Wire, resident: bool, traceable: bool = False) -> View:
    """The view of a wire."""
    several = wire.group.size > 1

    def pull(g: Tensor, leaf: Leaf) -> Tensor:
        # To a dtype that is asked for the wire casts, in a pass that it makes anyway.
        return wire.pull(g if wire.reduce_dtype is not None else g.to(summable(g.dtype)), leaf)

    return View(wire.view, pull, wire.store, lambda leaf: several, wire, resident, traceable=traceable)


# Opens the group of a mesh, or of all ranks, for the function that is named in messages.
Ranks = Callable[[str, Any], Group]
ViewOf = Callable[[Layout, Ranks], View | None]


def no_view(layout: Layout, ranks: Ranks) -> View | None:
    """The view half of a transform that has none."""
    return None


def cutting_wires(views: Sequence[View]) -> tuple[Wire, ...]:
    """The wires that cut leaves over ranks, one after the other."""
    return tuple([view.wire for view in views if view.wire is not None and view.wire.cuts])


def reducing_in(view: View, dtype: torch.dtype | None) -> View:
    """The same view with sums over ranks in `dtype`."""
    assert view.wire is not None
    other = over_ranks(view.wire.on(view.wire.group, dtype), view.resident, view.traceable)
    return replace(other, name=view.name, given=view.given)
