"""A search of the graph of a backward for tensors that got past the boundary of a model under `scale_loss`.

The loss scale multiplies cotangents where they enter a model through its outputs, and is divided out where they leave
to parameters and inputs. So every path from the loss to a leaf crosses the boundary outward and inward by turns. On a
path that does not, through a closure, a cache or a list, the factor is missing or counts twice.

Every backward is searched. That takes about 2 us for a node, and autograd takes 10 and more to run it. To search now
and then would miss what a program does in its thousandth step alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from .._compat.autograd import sequence_nr
from .._compat.functorch import is_wrapped
from .._errors import explain
from ..core.linear_map import LeafView
from ..core.parameter_checks import parameters_of
from .crossing import Crossing
from .leaked_tensors import is_outside

# Kinds of nodes.
OTHER, CROSSING, LEAF, GATHER, SCATTER = range(5)

# An edge of the graph: the node it comes from (`None` above the loss), the node it leads to, whether that is inside.
Step = tuple[Any, Any, bool]


def check_closed(owner: Any, roots: list[Any]) -> None:
    """Search the whole graph of the backward under way.

    Args:
        owner: the boundary, a `ModelBoundary`.
        roots: the nodes at which the backward began.

    Raises:
        RuntimeError: a tensor of the inside is used outside, or one of the outside inside.
    """
    reached_by: dict[int, Step] = {}
    leak = _find_leak(owner, roots, reached_by)
    if leak is None:
        return
    _, other, inside = leak
    owner.check_unchanged()
    if reached_by[id(other)] is not leak:
        # Reached from both sides.
        inside = sequence_nr(other) not in owner.node_ranges or is_outside(other, owner, 0)
    if inside:
        _refuse_input(owner, leak, reached_by)
    _refuse_escape(owner, leak, reached_by)


def _find_leak(owner: Any, roots: list[Any], reached_by: dict[int, Step]) -> Step | None:
    """The first step past the boundary without a crossing; known once the whole graph has been searched.

    Args:
        owner: the boundary.
        roots: the nodes of the losses.
        reached_by: filled with the step by which each node was reached first, by the node's id. It keeps the node
            alive, for another node might be given its id.
    """
    leak: Step | None = None
    # A class has one kind, and a program has few classes of nodes.
    node_kinds: dict[type, int] = owner.node_kinds
    steps: list[Step] = [(None, root, False) for root in roots]
    while steps:
        step = steps.pop()
        other, inside = step[1], step[2]
        before = reached_by.setdefault(id(other), step)
        if before is not step:
            if before[2] != inside:
                leak = leak or step
            continue
        kind = node_kinds.get(type(other))
        if kind is None:
            kind = node_kinds[type(other)] = _kind(other)
        if kind == CROSSING and type(crossing := other.forth.__self__) is Crossing and crossing.owner is owner:
            if other.forth.__func__ is Crossing.back:
                # A node of a second derivative, which belongs to neither side.
                return None
            if crossing.inward != inside:
                leak = leak or step
            if type(crossing.edge) is LeafView:
                # It leads to the parameter.
                continue
            inside = not crossing.inward
            # Its other edges lead to tensors that left upstream of it (`output_graph`).
            node = other.next_functions[0][0]
            if node is not None:
                steps.append((other, node, inside))
            continue
        elif kind == LEAF:
            leaf = other.variable
            if is_wrapped(leaf):
                # torch.func records other nodes for a crossing, and arguments would be taken for leaks.
                return None
            if inside and (isinstance(leaf, nn.Parameter) or _held(other)):
                leak = leak or step
            continue
        elif kind in (GATHER, SCATTER) and other.units is owner.units:
            if kind == SCATTER:
                return None
            # A gather divides by the scale as well, but for a parameter that is used outside of the model.
            if (other.i < owner.units.blocks) != inside:
                leak = leak or step
            continue
        for node, _ in other.next_functions:
            if node is not None:
                steps.append((other, node, inside))
    return leak


def _kind(node: Any) -> int:
    if getattr(node, "forth", None) is not None:
        return CROSSING
    if getattr(node, "variable", None) is not None:
        return LEAF
    if getattr(node, "units", None) is None:
        return OTHER
    return GATHER if node.name() == "GatherUnitBackward" else SCATTER


def _held(node: Any) -> bool:
    """Whether anybody but the graph holds the leaf of a node. A leaf that nobody holds was made, and is used, inside.

    By a comparison with the references to a leaf that nobody holds. The node is the argument, for a leaf as argument
    may count twice: once `torch.compile` was used in a process, Python copies arguments that it would else move.
    """
    with torch.enable_grad():
        product = torch.ones((), requires_grad=True) * 1.0
    free: Any = product.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    # One more for the caller's variable.
    return sys.getrefcount(node.variable) > sys.getrefcount(free.variable) + 1


def _refuse_input(owner: Any, leak: Step, reached_by: dict[int, Step]) -> NoReturn:
    """The model uses a tensor of the outside that is no argument."""
    node, other, _ = leak
    strangers = _path_up(node, reached_by, lambda n: sequence_nr(n) not in owner.node_ranges)
    leaf = getattr(other, "variable", None)
    if strangers:
        _refuse_stranger(f"a tensor computed outside (by {strangers[-1].name()})")
    if leaf is not None:
        for path, p in parameters_of(owner.model()).items():
            if p is leaf:
                _refuse_other_place(path)
        kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
        _refuse_stranger(f"a {kind} of shape {tuple(leaf.shape)}")
    if _kind(other) == GATHER:
        _refuse_other_place(owner.units.units[other.i][0].path)
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


def _refuse_escape(owner: Any, leak: Step, reached_by: dict[int, Step]) -> NoReturn:
    """The loss uses a tensor of the inside that did not leave through the boundary."""
    node, other, _ = leak
    inner = _path_up(node, reached_by, lambda n: sequence_nr(n) in owner.node_ranges)
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


def _path_up(node: Any, reached_by: dict[int, Step], belongs: Callable[[Any], bool]) -> list[Any]:
    """From `node` towards the loss, as they were reached: nodes that `belongs` accepts, and not past a crossing."""
    found = []
    while node is not None and _kind(node) == OTHER and belongs(node):
        found.append(node)
        node = reached_by[id(node)][0]
    return found


def _refuse_other_place(path: str) -> NoReturn:
    what = f"the attached model uses its parameter {path} from elsewhere than its module: from a list, or a closure"
    right = f"self.{path.rpartition('.')[2]} in forward, or an nn.ParameterList instead of the list"
    raise RuntimeError(explain(what, "its gradient would come out multiplied by the loss scale", right))


def _refuse_stranger(what: str) -> NoReturn:
    what = f"the attached model uses {what} that is neither its parameter nor an argument"
    right = "pass it to the model as an argument, or register it before zf.attach: self.x = nn.Parameter(x)"
    raise RuntimeError(explain(what, "its gradient would come out multiplied by the loss scale", right))
