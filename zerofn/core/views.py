"""`View`: how the model sees a stored leaf; `Wire`: how leaves travel between ranks.

A `View` is a record of functions on one leaf. The runner never asks which transform a view belongs to. It reads what
the view says of itself: its wire, whether it changes dtypes alone, whether its output stays in the model between steps.
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
    """How leaves are packed, sent to other ranks and unpacked, many in one collective.

    Attributes:
        group: the ranks it talks to.
        reduce_dtype: dtype in which gradients are summed; by default the one they arrive in.
        cuts: whether a rank keeps a shard of each leaf, a range of the flattened leaf, so that `view` all-gathers.
    """

    @property
    def group(self) -> Group: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...

    cuts: ClassVar[bool]

    def on(self, group: Group, reduce_dtype: torch.dtype | None) -> Wire:
        """The same wire over another group of the same ranks, with sums in that dtype."""
        ...

    def span(self, leaf: Leaf) -> tuple[int, int]:
        """This rank's range of the flattened leaf: its first element, and the one behind its last."""
        ...

    def view(self, x: Tensor, leaf: Leaf) -> Tensor:
        """The whole leaf from this rank's shard, with any number of batch dimensions in front."""
        ...

    def pull(self, g: Tensor, leaf: Leaf) -> Tensor:
        """The transpose of `view`, with any number of batch dimensions in front: this rank's shard of the mean."""
        ...

    def store(self, x: Tensor, leaf: Leaf) -> Tensor:
        """This rank's shard of the whole leaf."""
        ...

    def send_parts(self, parts: Sequence[Tensor], leaves: Sequence[Leaf], async_op: bool = False) -> tuple[Any, Tensor]:
        """All-gather shards of one dtype in one collective: (work handle or `None`, what comes)."""
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
        """Flat gradients as one buffer, to be reduced over ranks; `None` where this rank has no gradient."""
        ...

    def send(self, buffer: Tensor, async_op: bool = False) -> tuple[Any, Tensor]:
        """Reduce the buffer over ranks: (work handle, what this rank gets of it)."""
        ...

    def unpack(self, mine: Tensor, leaves: Sequence[Leaf], numels: Sequence[int]) -> list[Tensor | None]:
        """This rank's flat mean gradient of every leaf; `None` where no rank had one."""
        ...


# (tensor, leaf) -> tensor; of a view that reads its transform's state (tensor, leaf, state) -> tensor.
OnLeaf = Callable[..., Tensor]
# (state of a transform) -> the number that cotangents are multiplied by inside of the model.
Factor = Callable[[Mapping[str, Any]], Tensor]


def same_tensor(x: Tensor, leaf: Leaf) -> Tensor:
    """The `view`, `pull` and `store` of a view that does nothing to leaves."""
    return x


@dataclass(frozen=True)
class View:
    """The view half on one leaf. All functions take `(tensor, leaf)` and any number of batch dimensions in front.

    Attributes:
        view: from the stored tensor to what the model sees. Linear, or `pull` stands for its derivative
            (straight-through rounding).
        pull: the transpose of `view`: from a cotangent of what is seen to one of what is stored.
        store: from what the model sees to what is stored; `view` after `store` is the identity.
        changes: whether the view does anything to a leaf; one that it leaves out is seen and stored as it lies. A view
            with a wire is of all leaves.
        wire: how leaves travel between ranks, if they do; the three functions above are then the wire's.
        resident: whether what it gives stays in an attached model between steps, and is made once after an update.
        dtypes: of a view that casts, and changes nothing else.
        name: of its transform, for profilers.
        given: the leaf as it is on the model's side: all of it, or the shard that a view before this one leaves.
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

    view: OnLeaf = same_tensor
    pull: OnLeaf = same_tensor
    store: OnLeaf = same_tensor
    changes: Callable[[Leaf], bool] = lambda leaf: True
    wire: Wire | None = None
    resident: bool = False
    dtypes: Dtypes | None = None
    name: str = ""
    given: Callable[[Leaf], Leaf] = lambda leaf: leaf
    factor: Factor | None = None
    reads: bool = False
    traceable: bool = False

    def reading(self, state: Callable[[], Mapping[str, Any]]) -> View:
        """The same view, whose functions call `state()` for the state whenever they are called."""
        if not self.reads:
            return self
        look, back = self.view, self.pull
        view, pull = (lambda x, leaf: look(x, leaf, state())), (lambda g, leaf: back(g, leaf, state()))
        return replace(self, view=view, pull=pull, reads=False)

    def only_on(self, touched: frozenset[str]) -> View:
        """The same view, whose functions leave alone all leaves but those of these paths."""
        view, pull, store = (_only_on(touched, fn) for fn in (self.view, self.pull, self.store))
        return replace(self, view=view, pull=pull, store=store)

    @property
    def of_leaves(self) -> bool:
        """Whether the view does anything to leaves."""
        return not (self.view is self.pull is self.store is same_tensor)

    @property
    def renumbers(self) -> bool:
        """Whether it changes the numbers of a leaf, beyond a cast or a move between ranks."""
        return self.wire is None and self.dtypes is None


def _only_on(touched: frozenset[str], fn: OnLeaf) -> OnLeaf:
    if fn is same_tensor:
        return fn
    return lambda x, leaf, *state: fn(x, leaf, *state) if leaf.path in touched else x


def summed_in(wire: Wire, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a wire sums gradients of a dtype."""
    return wire.reduce_dtype or summable(dtype)


# What is asked of a wire.
WIRE = ("group", "reduce_dtype", "cuts", "on", "span", "view", "pull", "store")
WIRE += ("send_parts", "join_parts", "pack", "send", "unpack")


class IncompleteWire(TypeError):
    """A wire lacks some of what is asked of it.

    Attributes:
        kind: the name of its class.
        missing: what it lacks.
    """

    def __init__(self, kind: str, missing: list[str]):
        super().__init__(f"{kind} is no Wire, without {', '.join(missing)}; see zerofn.extend.Wire")
        self.kind, self.missing = kind, missing


def over_ranks(wire: Wire, resident: bool, traceable: bool = False) -> View:
    """The view of a wire."""
    known = dir(wire)
    if missing := [name for name in WIRE if name not in known]:
        raise IncompleteWire(type(wire).__name__, missing)

    def pull(g: Tensor, leaf: Leaf) -> Tensor:
        # The wire casts to a dtype that is asked for, in a pass that it makes anyway.
        return wire.pull(g if wire.reduce_dtype is not None else g.to(summable(g.dtype)), leaf)

    return View(wire.view, pull, wire.store, wire=wire, resident=resident, traceable=traceable)


# Opens the group of a mesh, or of all ranks, for the function that is named in messages.
Ranks = Callable[[str, Any], Group]
ViewOf = Callable[[Layout, Ranks], View | None]


def no_view(layout: Layout, ranks: Ranks) -> View | None:
    """The view half of a transform that has none."""
    return None


def cutting_wires(views: Sequence[View]) -> tuple[Wire, ...]:
    """The wires that cut leaves over ranks, one after the other."""
    return tuple([view.wire for view in views if view.wire is not None and view.wire.cuts])
