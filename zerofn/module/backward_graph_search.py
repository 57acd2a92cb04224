"""A search of the graph of a backward for tensors that passed the boundary of a scaled model by another door.

The loss scale multiplies cotangents where they enter a model through its outputs and is divided out where they leave
to parameters and inputs. So every way from the loss to a leaf crosses the boundary outward and inward by turns; on one
that does not, through a closure, a cache or a list, the factor is missing or counts twice.

Every backward is searched. That takes about 2 us for a node, and autograd 10 and more to run one; a search now and
then would let a program that does wrong in its thousandth step do it in silence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from .._compat.autograd import number_of
from .._compat.functorch import is_wrapped
from .._errors import explain
from ..core.linear_map import LeafView
from .crossing import Crossing
from .leaked_tensors import is_outside
from .node_ranges import Spans

# Kinds of nodes.
OTHER, CROSSING, LEAF, GATHER, SCATTER = range(5)

# A step down the graph: from a node, or from nothing to that of the loss, to another one, on the inside or not.
Step = tuple[Any, Any, bool]


def check_closed(owner: Any, roots: list[Any], spans: Spans) -> None:
    """Look at the whole graph of the backward under way.

    Args:
        owner: the `Sight` whose boundary it is.
        roots: the nodes at which it began.
        spans: what was made during its calls.

    Raises:
        RuntimeError: a tensor of the inside is used outside, or one of the outside inside.
    """
    taken: dict[int, Step] = {}
    door = _find_door(owner, roots, taken)
    if door is None:
        return
    _, other, inside = door
    owner.unchanged()
    if taken[id(other)] is not door:
        # Met from both sides.
        inside = not (number_of(other) in spans and not is_outside(other, owner, 0))
    if inside:
        _refuse_input(owner, door, taken, spans)
    _refuse_escape(owner, door, taken, spans)


def _find_door(owner: Any, roots: list[Any], taken: dict[int, Step]) -> Step | None:
    """The first step that passes the boundary where it should not; known once the whole graph has been seen.

    Args:
        owner: whose boundary.
        roots: the nodes of the losses.
        taken: filled with the step by which each node was reached first. That keeps the node alive, for an id is
            only unique among the living.
    """
    door: Step | None = None
    # A node's kind is that of its class, of which a program has few.
    kinds: dict[type, int] = owner.kinds
    steps: list[Step] = [(None, root, False) for root in roots]
    while steps:
        step = steps.pop()
        other, inside = step[1], step[2]
        before = taken.setdefault(id(other), step)
        if before is not step:
            if before[2] != inside:
                door = door or step
            continue
        kind = kinds.get(type(other))
        if kind is None:
            kind = kinds[type(other)] = _kind(other)
        if kind == CROSSING and type(crossing := other.forth.__self__) is Crossing and crossing.owner is owner:
            if other.forth == crossing.back:
                # Nodes of a second derivative belong to neither side.
                return None
            if crossing.inward != inside:
                door = door or step
            if type(crossing.edge) is LeafView:
                # Behind it is the parameter.
                continue
            inside = not crossing.inward
            # What else it has edges to are the tensors that left upstream (`module.upstream`).
            node = other.next_functions[0][0]
            if node is not None:
                steps.append((other, node, inside))
            continue
        elif kind == LEAF:
            leaf = other.variable
            if is_wrapped(leaf):
                # torch.func records nodes of its own for a boundary, so that an argument would look like a stranger.
                return None
            if inside and (isinstance(leaf, nn.Parameter) or _held(other)):
                door = door or step
            continue
        elif kind in (GATHER, SCATTER) and other.units is owner.units:
            if kind == SCATTER:
                return None
            # Gathering unscales as well; but not what is gathered for the world outside.
            if (other.i < owner.units.blocks) != inside:
                door = door or step
            continue
        for node, _ in other.next_functions:
            if node is not None:
                steps.append((other, node, inside))
    return door


def _kind(node: Any) -> int:
    if getattr(node, "forth", None) is not None:
        return CROSSING
    if getattr(node, "variable", None) is not None:
        return LEAF
    if getattr(node, "units", None) is None:
        return OTHER
    return GATHER if node.name() == "GatherUnitBackward" else SCATTER


def _held(node: Any) -> bool:
    """Whether anybody but graph and caller holds the leaf of a node; one that nobody holds is counted beside it.

    One that nobody holds was made, and is used, inside. Of the node, since an argument of a function may count twice:
    once `torch.compile` was used in a process, Python copies arguments where it would else move them.
    """
    with torch.enable_grad():
        product = torch.ones((), requires_grad=True) * 1.0
    free: Any = product.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    # One for the caller, who holds the other leaf.
    return sys.getrefcount(node.variable) > sys.getrefcount(free.variable) + 1


def _refuse_input(owner: Any, door: Step, taken: dict[int, Step], spans: Spans) -> NoReturn:
    """The model uses a tensor of the outside that it was not given."""
    node, other, _ = door
    strangers = _way_up(node, taken, lambda n: number_of(n) not in spans)
    leaf = getattr(other, "variable", None)
    if strangers:
        _refuse_stranger(f"a tensor computed outside (by {strangers[-1].name()})")
    if leaf is not None:
        for path, p in owner.model().named_parameters():
            if p is leaf:
                _refuse_elsewhere(path)
        kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
        _refuse_stranger(f"a {kind} of shape {tuple(leaf.shape)}")
    if _kind(other) == GATHER:
        _refuse_elsewhere(owner.units.units[other.i][0].path)
    if _kind(other) == OTHER:
        _refuse_stranger(f"a tensor computed outside (by {other.name()})")
    raise RuntimeError(
        explain(
            "the attached model uses an output of one of its calls that did not come in as an argument",
            "its gradient would come out multiplied by the loss scale: it is used in a closure, or found in a cache, "
            "such as that of torch.nn.utils.parametrize.cached() where a weight is read outside of the model first",
            "model(x, kept) with the output as an argument; parametrize.cached() around calls of the model alone;\n"
            "or no scale_loss: bf16 needs none",
        )
    )


def _refuse_escape(owner: Any, door: Step, taken: dict[int, Step], spans: Spans) -> NoReturn:
    """The loss uses a tensor of the inside that was not let out."""
    node, other, _ = door
    inner = _way_up(node, taken, lambda n: number_of(n) in spans)
    if inner:
        what = f"a tensor from inside the attached model (by {inner[-1].name()})"
    elif _kind(other) == OTHER:
        what = f"a tensor from inside the attached model (by {other.name()})"
    elif _kind(other) == GATHER:
        what = f"the attached model's parameter {owner.units.units[other.i][0].path} as forward sees it,"
    elif isinstance(edge := other.forth.__self__.edge, LeafView):
        what = f"the attached model's parameter {edge.leaf.path} as forward sees it,"
    else:
        what = "an argument of the attached model as forward sees it,"
    raise RuntimeError(
        explain(
            f"the loss uses {what} that did not come out of it",
            "its cotangent does not pass the boundary where the loss scale acts, so gradients would be wrong",
            "return it from forward, or keep it in an attribute of a module: both pass the boundary;\n"
            "or no scale_loss: bf16 needs none",
        )
    )


def _way_up(node: Any, taken: dict[int, Step], belongs: Callable[[Any], bool]) -> list[Any]:
    """Nodes that `belongs` from `node` up, as they were reached, and not past a crossing."""
    found = []
    while node is not None and _kind(node) == OTHER and belongs(node):
        found.append(node)
        node = taken[id(node)][0]
    return found


def _refuse_elsewhere(path: str) -> NoReturn:
    raise RuntimeError(
        explain(
            f"the attached model uses its parameter {path} from elsewhere than its module: from a list, or a closure",
            "its gradient would come out multiplied by the loss scale",
            f"self.{path.rpartition('.')[2]} in forward, or an nn.ParameterList instead of the list",
        )
    )


def _refuse_stranger(what: str) -> NoReturn:
    raise RuntimeError(
        explain(
            f"the attached model uses {what} that is neither its parameter nor an argument",
            "its gradient would come out multiplied by the loss scale",
            "pass it to the model as an argument, or register it before zf.attach: self.x = nn.Parameter(x)",
        )
    )
