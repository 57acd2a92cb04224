"""Tensors that cross the boundary of a scaled model in attributes of modules, and in outputs given to hooks.

The loss scale multiplies cotangents where they enter through outputs, and is divided out where they leave to
parameters and inputs. A tensor of the inside that reaches the loss otherwise brings a cotangent without the factor, and
gradients are too small by it, in silence. So tensors that a call leaves in attributes of modules, and outputs that
hooks of the user's are given, cross the boundary too. Other ways (closures, globals) are searched for in the graph
(`backward_graph_search`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from torch import Tensor, nn

from .._compat.autograd import sequence_nr
from .._compat.modules import registered
from .._compat.tensors import version
from .crossing import crossing_of
from .nested_tensors import map_tensors

# Attributes that every module has.
ORDINARY = tuple(nn.Module().__dict__)
# Classes that `_replace` looks into.
HOLDERS = frozenset((Tensor, tuple, list, dict))

# Longer lists in attributes are vocabularies rather than losses.
LONGEST = 256

Fn = Callable[[Tensor], Tensor]


def is_outside(node: Any, owner: Any, start: int) -> bool:
    """Whether a node made since `start` computes with an output of the model, as a user's hook may."""
    seen, queue = {id(node): node}, [node]
    while queue:
        node = queue.pop()
        crossing = crossing_of(node, owner)
        if crossing is not None:
            return not crossing.inward
        for other, _ in node.next_functions if start <= sequence_nr(node) else ():
            if other is not None and id(other) not in seen:
                seen[id(other)] = other
                queue.append(other)
    return False


class AttributeTensors:
    """Tensors in attributes of modules: outer tensors between calls, inner ones during calls."""

    def __init__(self, owner: Any, modules: list[nn.Module]):
        self.owner = owner
        self.modules = modules
        # (container, key, what the user finds there, what the model finds there)
        self.known: list[tuple[Any, Any, Any, Any]] = []

    def hide(self, enter: Fn) -> None:
        """Before a call: the model finds the inner tensors that it left; those that the user put there enter."""
        self.known = [entry for entry in self.known if _holds(entry[0], entry[1], entry[2])]
        for holder, key, _, inner in self.known:
            holder[key] = inner
        mine = {id(t) for *_, inner in self.known for t in _flat(inner)}
        changed = self._replace(lambda t: enter(t) if t.requires_grad and id(t) not in mine else t)
        self.known += [(holder, key, old, new) for holder, key, old, new in changed]

    def put_back(self) -> None:
        """After a call that has ended without its hooks: tensors that were hidden from the user are outer again."""
        for holder, key, outer, inner in self.known:
            if _holds(holder, key, inner):
                holder[key] = outer

    def known_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Of what the model left in earlier calls: the inner tensor and the outer one."""
        pairs = []
        for _, _, outer, inner in self.known:
            for i, o in zip(_flat(inner), _flat(outer), strict=True):
                crossing = crossing_of(getattr(i, "grad_fn", None), self.owner)
                # What came from the user is on the path of the gradient already.
                if isinstance(i, Tensor) and i.requires_grad and i is not o and not (crossing and crossing.inward):
                    pairs.append((i, o))
        return pairs

    def inner(self, start: int) -> list[Tensor]:
        """After a call that began at node number `start`: tensors that are to leave; earlier ones are outer again."""
        self.known = [e for e in self.known if _holds(e[0], e[1], e[3]) or _holds(e[0], e[1], e[2])]
        for holder, key, outer, _ in self.known:
            holder[key] = outer
        found: list[Tensor] = []

        def look(t: Tensor) -> Tensor:
            node = t.grad_fn
            made_in_it = node is not None and (sequence_nr(node) >= start or crossing_of(node, self.owner) is not None)
            if made_in_it and not is_outside(node, self.owner, start):
                found.append(t)
            return t

        self._replace(look)
        return found

    def show(self, outer: dict[int, Tensor]) -> None:
        """Put outer tensors into attributes, by the id of the inner one that the model left."""
        changed = self._replace(lambda t: outer.get(id(t), t))
        self.known += [(holder, key, new, old) for holder, key, old, new in changed]

    def _replace(self, fn: Fn) -> list[tuple[Any, Any, Any, Any]]:
        """Put `fn(t)` in the place of every tensor in attributes; (container, key, old, new) of each that changed."""
        changed: list[tuple[Any, Any, Any, Any]] = []
        # The old tensor is kept alive, for another object might be given its id.
        done: dict[int, tuple[Any, Any]] = {}

        def mapped(value: Any) -> Any:
            kind = type(value)
            if kind is Tensor:
                if id(value) not in done:
                    done[id(value)] = (value, fn(value))
                return done[id(value)][1]
            if kind is tuple and len(value) <= LONGEST:
                parts = tuple([mapped(v) for v in value])
                return value if all(p is v for p, v in zip(parts, value, strict=True)) else parts
            if kind in (list, dict) and len(value) <= LONGEST and id(value) not in done:
                done[id(value)] = (value, value)
                replace(value, list(value.items() if kind is dict else enumerate(value)))
            return value

        def replace(holder: Any, items: list[tuple[Any, Any]]) -> None:
            for key, value in items:
                new = mapped(value)
                if new is not value:
                    holder[key] = new
                    changed.append((holder, key, value, new))

        for module in self.modules:
            if attributes := _attributes(module):
                replace(module.__dict__, attributes)
            if buffers := registered(module)[2]:
                replace(buffers, list(buffers.items()))
        return changed


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """A module's own attributes that may hold a tensor: none of those that every module has.

    It runs over all modules before and after each call of the model, so it skips those at the front of the dict.
    """
    attributes = module.__dict__
    rest = islice(attributes.items(), len(ORDINARY) - 1, None)
    last, _ = next(rest, ("", None))
    if last != ORDINARY[-1]:
        return [(n, v) for n, v in attributes.items() if n not in ORDINARY and type(v) in HOLDERS]
    found: list[tuple[str, Any]] = []
    # No comprehension, which is a call in Python 3.11.
    for item in rest:
        if type(item[1]) in HOLDERS:
            found.append(item)
    return found


def _flat(value: Any) -> list[Any]:
    """The elements of a tuple and of tuples in it; anything else is one element."""
    return [x for v in value for x in _flat(v)] if isinstance(value, tuple) else [value]


def _holds(holder: Any, key: Any, value: Any) -> bool:
    if isinstance(holder, list):
        return key < len(holder) and holder[key] is value
    return holder.get(key) is value


class HookedOutput:
    """An output as hooks of the user's are given it, and with what the model goes on after them."""

    def __init__(self, inner: Any, leave: Callable[[Any], Any]):
        self.inner, self.outer = inner, leave(inner)
        self.items = _items(self.outer)
        self.versions: list[tuple[Tensor, int]] = []
        if self.outer is not inner:
            map_tensors(lambda t: self.versions.append((t, version(t))) or t, self.outer, "an output")

    def result(self, output: Any, enter: Fn) -> Any:
        """The inner output, where hooks have not changed it; else what they returned, taken in again."""
        looked = output is self.outer and _items(output) == self.items
        if looked and all(version(t) == count for t, count in self.versions):
            return self.inner
        return map_tensors(enter, output, "what a forward hook returned")


def _items(value: Any) -> list[int]:
    if isinstance(value, Mapping):
        return [id(v) for v in value.values()]
    return [id(v) for v in value] if isinstance(value, list) else []
