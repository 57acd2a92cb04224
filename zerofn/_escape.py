"""Tensors that get into a scaled model, or out of it, by another door than its arguments and results.

The loss scale multiplies cotangents where they enter through outputs and is divided out where they leave to
parameters and inputs. A tensor of the inside that reaches the loss otherwise would bring a cotangent
without the factor, and gradients would be too small by it, in silence. So what a call leaves in attributes
of modules, and what hooks of the user's are shown, goes out through the boundary too; what is left
(closures, globals) is looked for in the graph.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ._compat import backward_roots, is_wrapped
from ._containers import map_tensors
from ._crossing import Spans, crossing_of
from ._errors import explain

# Attributes that every module has.
ORDINARY = tuple(nn.Module().__dict__)
# What `_replace` looks into.
HOLDERS = frozenset((Tensor, tuple, list, dict))

# Longer lists in attributes are vocabularies rather than losses.
LONGEST = 256

# Nodes of a loss by which it is told from others.
OUTLINED = 32

Fn = Callable[[Tensor], Tensor]


def is_outside(node: Any, owner: Any, start: int) -> bool:
    """Whether a node made since `start` computes with what the model has let out, as a user's hook may."""
    while node is not None:
        crossing = crossing_of(node, owner)
        if crossing is not None:
            return not crossing.inward
        if not start <= node._sequence_nr():
            return False
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return False


class Attributes:
    """Tensors in attributes of modules: outer ones between calls, inner ones during calls."""

    def __init__(self, owner: Any, modules: list[nn.Module]):
        self.owner = owner
        self.modules = modules
        # (container, key, what the user finds there, what the model finds there)
        self.known: list[tuple[Any, Any, Any, Any]] = []

    def hide(self, enter: Fn) -> None:
        """Before a call: the model finds what it left, and what the user put there is let in."""
        self.known = [entry for entry in self.known if _holds(entry[0], entry[1], entry[2])]
        for holder, key, _, inner in self.known:
            holder[key] = inner
        mine = {id(t) for *_, inner in self.known for t in (inner if isinstance(inner, tuple) else (inner,))}
        changed = self._replace(lambda t: enter(t) if t.requires_grad and id(t) not in mine else t)
        self.known += [(holder, key, old, new) for holder, key, old, new in changed]

    def show(self, leave: Fn, start: int) -> None:
        """After a call that began at node number `start`: the user finds tensors that left properly."""
        self.known = [entry for entry in self.known if _holds(entry[0], entry[1], entry[3])]
        for holder, key, outer, _ in self.known:
            holder[key] = outer

        def let_out(t: Tensor) -> Tensor:
            node = t.grad_fn
            if node is None or (node._sequence_nr() < start and crossing_of(node, self.owner) is None):
                return t
            if is_outside(node, self.owner, start):
                return t
            return leave(t)

        changed = self._replace(let_out)
        self.known += [(holder, key, new, old) for holder, key, old, new in changed]

    def _replace(self, fn: Fn) -> list[tuple[Any, Any, Any, Any]]:
        """`fn` on every tensor in attributes, written there: (container, key, old, new) where it changed."""
        changed: list[tuple[Any, Any, Any, Any]] = []
        # The old tensor is kept as well: an id is only unique among living objects.
        done: dict[int, tuple[Any, Any]] = {}

        def visit(holder: Any, key: Any, value: Any) -> None:
            kind = type(value)
            if kind is Tensor:
                if id(value) not in done:
                    done[id(value)] = (value, fn(value))
                new = done[id(value)][1]
            elif kind is tuple and len(value) <= LONGEST:
                parts = list(value)
                mark = len(changed)
                for i, v in enumerate(value):
                    visit(parts, i, v)
                changed[mark:] = [entry for entry in changed[mark:] if entry[0] is not parts]
                new = value if all(p is v for p, v in zip(parts, value, strict=True)) else tuple(parts)
            else:
                if kind in (list, dict) and len(value) <= LONGEST and id(value) not in done:
                    done[id(value)] = (value, value)
                    for k, v in list(value.items() if kind is dict else enumerate(value)):
                        visit(value, k, v)
                return
            if new is not value:
                holder[key] = new
                changed.append((holder, key, value, new))

        for module in self.modules:
            for name, value in _attributes(module):
                visit(module.__dict__, name, value)
            for name, value in list(module._buffers.items()):
                visit(module._buffers, name, value)
        return changed


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """What may hold a tensor, of what a module has beyond every module's own.

    This is run over all modules before and after each call of the model, so it begins where those end.
    """
    attributes = module.__dict__
    rest = islice(attributes.items(), len(ORDINARY) - 1, None)
    last, _ = next(rest, ("", None))
    if last == ORDINARY[-1]:
        return [item for item in rest if type(item[1]) in HOLDERS]
    return [(n, v) for n, v in attributes.items() if n not in ORDINARY and type(v) in HOLDERS]


def _holds(holder: Any, key: Any, value: Any) -> bool:
    if isinstance(holder, list):
        return key < len(holder) and holder[key] is value
    return holder.get(key) is value


class Shown:
    """An output as hooks of the user's see it, and what the model goes on with afterwards."""

    def __init__(self, inner: Any, leave: Callable[[Any], Any]):
        self.inner = inner
        self.outer = leave(inner)
        self.items = _items(self.outer)
        self.tensors: list[tuple[Tensor, int]] = []
        if self.outer is not inner:
            map_tensors(self._note, self.outer, "an output")

    def _note(self, t: Tensor) -> Tensor:
        self.tensors.append((t, t._version))
        return t

    def result(self, output: Any, enter: Fn) -> Any:
        """The inner output where hooks only looked; what they made of it, let in again, otherwise."""
        looked = output is self.outer and _items(output) == self.items
        if looked and all(t._version == version for t, version in self.tensors):
            return self.inner
        return map_tensors(enter, output, "what a forward hook returned")


def _items(value: Any) -> list[int]:
    if isinstance(value, Mapping):
        return [id(v) for v in value.values()]
    return [id(v) for v in value] if isinstance(value, list) else []


def check_closed(owner: Any, spans: Spans) -> None:
    """Look at the whole graph of the backward under way for an edge that passes the boundary by another door.

    Raises:
        RuntimeError: there is one.
    """
    roots = backward_roots()
    nodes = reachable(roots)
    if any(is_wrapped(getattr(node, "variable", None)) for node in nodes):
        # torch.func records nodes of its own for a boundary, so that an argument would look like a stranger.
        return
    crossings = {id(n): c for n in nodes if (c := crossing_of(n, owner)) is not None}
    if any(n.forth == c.back for n in nodes if (c := crossings.get(id(n))) is not None):
        # Nodes of a second derivative belong to neither side.
        return
    for node in roots:
        if id(node) not in crossings and node._sequence_nr() in spans and not is_outside(node, owner, 0):
            _refuse_escape(node)
    for node in nodes:
        if id(node) in crossings or node.name() == "torch::autograd::AccumulateGrad":
            continue
        if owner.units is not None and getattr(node, "units", None) is owner.units:
            # Gathering unscales as well.
            continue
        inside = node._sequence_nr() in spans and not is_outside(node, owner, 0)
        for other, _ in node.next_functions:
            if other is None or crossing_of(other, owner) is not None:
                continue
            if owner.units is not None and getattr(other, "units", None) is owner.units:
                if inside and other.i >= owner.units.blocks:
                    _refuse_elsewhere(owner.units.units[other.i][0].path)
                continue
            leaf = getattr(other, "variable", None)
            if leaf is not None:
                # A leaf that nobody holds was made, and is used, inside.
                if inside and (isinstance(leaf, nn.Parameter) or _held(leaf)):
                    for path, p in owner.model().named_parameters():
                        if p is leaf:
                            _refuse_elsewhere(path)
                    _refuse_input(
                        f"a {'parameter' if isinstance(leaf, nn.Parameter) else 'tensor'} of shape {tuple(leaf.shape)}"
                    )
            elif inside and other._sequence_nr() not in spans:
                _refuse_input(f"a tensor computed outside (by {other.name()})")
            elif not inside and other._sequence_nr() in spans and not is_outside(other, owner, 0):
                _refuse_escape(other)


def _held(leaf: Tensor) -> bool:
    """Whether anybody but the graph holds a leaf; what a leaf that nobody holds counts is found out on one."""
    with torch.enable_grad():
        product = torch.ones((), requires_grad=True) * 1.0
    free = product.grad_fn.next_functions[0][0].variable  # type: ignore[union-attr]
    # One for the caller, who holds the other leaf.
    return sys.getrefcount(leaf) > sys.getrefcount(free) + 1


def outline(roots: list[Any], owner: Any) -> tuple[str, ...]:
    """What a loss is made of, outside of the model: the names of its first nodes."""
    names, queue = [], deque(roots)
    while queue and len(names) < OUTLINED:
        node = queue.popleft()
        names.append(node.name())
        if crossing_of(node, owner) is None:
            queue.extend(other for other, _ in node.next_functions if other is not None)
    return tuple(names)


def reachable(roots: list[Any]) -> list[Any]:
    """All nodes of a graph."""
    found = {id(n): n for n in roots}
    queue = list(found.values())
    while queue:
        for node, _ in queue.pop().next_functions:
            if node is not None and id(node) not in found:
                found[id(node)] = node
                queue.append(node)
    return list(found.values())


def _refuse_escape(node: Any) -> None:
    raise RuntimeError(
        explain(
            f"the loss uses a tensor from inside the attached model (by {node.name()}) that did not come out of it",
            "its cotangent does not pass the boundary where the loss scale acts, so gradients would be wrong",
            "return it from forward, or keep it in an attribute of a module: both pass the boundary",
        )
    )


def _refuse_elsewhere(path: str) -> None:
    raise RuntimeError(
        explain(
            f"the attached model uses its parameter {path} from elsewhere than its module: from a list, or a closure",
            "its gradient would come out multiplied by the loss scale",
            f"self.{path.rpartition('.')[2]} in forward, or an nn.ParameterList instead of the list",
        )
    )


def _refuse_input(what: str) -> None:
    raise RuntimeError(
        explain(
            f"the attached model uses {what} that is neither its parameter nor an argument",
            "its gradient would come out multiplied by the loss scale",
            "pass it to the model as an argument, or register it before zf.attach: self.x = nn.Parameter(x)",
        )
    )
