"""`StateViews`: shards of a state as `opt.state[p]` shows them, as DTensors of the shape of the full tensor.

So a second moment lies like `p.grad`, at every stage. A shard that lies otherwise, for instance along two axes of a
mesh, is opaque: elementwise functions run on it, and all else is refused. What an owner keeps whole is shown on that
rank as it is; on other ranks it is opaque too, and elementwise functions have no effect.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from ..core.layout import COMPLEX, Layout, Leaf, as_complex, complex_form, span
from ..core.pipeline import Pipeline
from ..core.state import State
from ..core.state_entries import entries, held_by_owners
from ..module.fully_sharded import FullySharded
from ..ranks.group import Group
from ..ranks.process_groups import together
from ..sharded.opaque import OF_STATES, opaque

if TYPE_CHECKING:
    from ..sharded.gathering import Gathering, Origin

T = TypeVar("T")
ON_EVERY_RANK = "the same line on every rank, and what is done with its result on one"


def gathering_of_states(pipe: Pipeline, control: Group | None, left: Callable[[], bool]) -> Gathering | None:
    """Gathers shards of a state where parameters are full; `None` where nothing is sharded.

    Args:
        pipe: the pipeline.
        control: the ranks that step together.
        left: whether the model is detached.
    """
    wire = pipe.sharding
    if wire is None or control is None:
        return None
    from ..sharded.gathering import Gathering

    def meet(asked: str) -> str:
        together(asked, control.ranks, ON_EVERY_RANK)
        return ""

    return Gathering(wire, meet, left)


class StateViews(Generic[T]):
    """Shows tensors of a state otherwise than they are stored, on the same memory.

    Args:
        find: returns, by id of a state's tensor, what `show` needs to know of it. Tensors that it leaves out are shown
            as they are.
        show: returns the tensor as it is shown.
    """

    def __init__(self, find: Callable[[State], dict[int, T]], show: Callable[[Tensor, T], Tensor]):
        self.find, self.show = find, show
        # Programs read one parameter after the other while the state stays, so the result of `find` is kept.
        self._state: Callable[[], State | None] = lambda: None
        self._known: dict[int, T] = {}

    def shown(self, state: State, x: Any) -> Any:
        """A tensor of the state as it is shown."""
        if self._state() is not state:
            self._state, self._known = weakref.ref(state), self.find(state)
        of = self._known.get(id(x))
        return x if of is None else self.show(x, of)


def as_shards(gathering: Gathering) -> StateViews[Origin | Leaf | tuple[str, torch.Size]]:
    """Shows tensors that are sharded like their parameters as DTensors."""
    return StateViews(lambda state: _origins(state, gathering), _as_shard)


def as_complex_numbers(layout: Layout) -> StateViews[Leaf] | None:
    """Shows tensors of complex parameters as complex ones, as torch's optimizers have them; `None` without any."""
    leaves = {leaf.path: leaf for leaf in layout.complexes}
    if not leaves:
        return None
    return StateViews(
        lambda state: {id(e.value): leaves[e.path] for e in entries(state) if e.path in leaves and e.owner != "params"},
        as_complex,
    )


def as_dtensors(model: FullySharded) -> StateViews[str]:
    """Shows tensors that are sharded like their parameters as DTensors, as torch's optimizers have them under FSDP2."""
    return StateViews(
        lambda state: {id(e.value): e.path for e in entries(state) if model.is_alike(e)}, model.as_dtensor
    )


def _as_shard(x: Tensor, of: Origin | Leaf | tuple[str, torch.Size]) -> Tensor:
    if isinstance(of, Leaf):
        return as_complex(x, of)
    # A rank that is not the owner has one expanded number, into which nothing could be written. It is shown as zeros.
    x = x if x.is_contiguous() else torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    from ..sharded.face import wrap
    from ..sharded.gathering import Origin

    if not isinstance(of, Origin):
        return opaque(x, *of, OF_STATES)
    return wrap(torch.view_as_complex(x.view(-1, 2)) if of.leaf.dtype.is_complex else x, of)


def _origins(state: State, by: Gathering) -> dict[int, Origin | Leaf | tuple[str, torch.Size]]:
    """id(state tensor) -> what it is of, for state that is sharded; a name and a shape, where it lies otherwise.

    A tensor of a complex parameter that is not sharded has its leaf.
    """
    from ..sharded.gathering import Origin

    leaves: dict[str, Leaf] = {leaf.path: leaf for leaf in state.layout.leaves if leaf.within is None}
    group = by.wire.group
    found: dict[int, Origin | Leaf | tuple[str, torch.Size]] = {}
    for e in entries(state):
        leaf = leaves.get(e.path)
        if leaf is None or e.owner == "params" or e.at_owner or not isinstance(e.value, Tensor):
            continue
        if e.offset is None and not e.of_part:
            found.update({id(e.value): leaf} if leaf.complex is not None else {})
            continue
        how = f"opt.state[p][{e.slot!r}]"
        chunk = span(leaf.shape, group.rank, group.size)
        mine = None if e.offset is None else (e.offset, e.offset + e.value.numel())
        if mine == by.wire.span(leaf) == chunk:
            found[id(e.value)] = Origin(how, complex_form(leaf) if e.value.dtype in COMPLEX else leaf, by)
        else:
            found[id(e.value)] = f"{how} of the sharded parameter {e.path}", torch.Size(e.shape)
    for slot, path, x, rank in held_by_owners(state):
        how = f"opt.state[p][{slot!r}], which rank {rank} of those that share the leaf keeps,"
        found[id(x)] = f"{how} of the sharded parameter {path}", x.shape
    return found
