"""Maps tensors inside the arguments and outputs of a model.

The tree libraries take subclasses of dict, such as a transformers `ModelOutput`, for leaves. Tensors inside would cross
the boundary of an attached model unscaled, without an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution, Transform

from .._compat.autograd import sequence_nr
from .._compat.functorch import is_wrapped
from .._compat.tensors import base_of
from .._errors import explain

Fn = Callable[[Tensor], Tensor]


def map_tensors(fn: Fn, value: Any, where: str, done: dict[int, tuple[Tensor, Tensor]] | None = None) -> Any:
    """`value` with `fn(t)` for every tensor in it; objects in which nothing changed stay the same objects.

    It goes through tuples, NamedTuples, lists, mappings, dataclasses and `torch.distributions`, subclasses included. A
    tensor that occurs twice is mapped once: `done` has tensors that are mapped already, by id.

    Raises:
        TypeError: an object of another class holds a tensor that requires grad, which would cross the boundary
            unseen. `where` names the argument or output.

    >>> import torch
    >>> map_tensors(lambda t: t + 1, {"a": (torch.zeros(1), None, "text")}, "the output")
    {'a': (tensor([1.]), None, 'text')}
    """
    done = {} if done is None else done
    if isinstance(value, Tensor):
        if id(value) not in done:
            # The original is kept alive, since another object could otherwise get its id.
            done[id(value)] = (fn(value), value)
        return done[id(value)][0]
    if value is None or isinstance(value, str | bytes | int | float | complex | type | nn.Module):
        return value
    if isinstance(value, Mapping):
        new = {k: map_tensors(fn, v, f"{where}[{k!r}]", done) for k, v in value.items()}
        changed = {k: v for k, v in new.items() if v is not value[k]}
        return _with_items(value, changed, where) if changed else value
    if isinstance(value, tuple | list):
        items = [map_tensors(fn, v, f"{where}[{i}]", done) for i, v in enumerate(value)]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else _sequence(value, items)
    if is_dataclass(value) or isinstance(value, Distribution | Transform):
        held = _attributes(value)
        new = {k: map_tensors(fn, v, f"{where}.{k}", done) for k, v in held.items()}
        changed = {k: v for k, v in new.items() if v is not held[k]}
        out = copy.copy(value) if changed else value
        for k, v in changed.items():
            # A frozen dataclass refuses setattr; the copy is ours.
            object.__setattr__(out, k, v)
        return out
    _refuse_hidden(value, where)
    return value


def map_outputs(fn: Fn, value: Any, where: str, viewed: Callable[[Tensor, Tensor], Any] | None = None) -> Any:
    """`map_tensors` for tensors that a caller may change in place: views of one tensor stay views of one tensor.

    They are mapped in the order in which they were computed. A complex view of a real tensor, and a real view of a
    complex one, are mapped by themselves.

    Args:
        fn: maps a tensor.
        value: holds tensors.
        where: the argument or output that it is, for messages.
        viewed: called with each view, and with the view of a mapped tensor that takes its place.

    Raises:
        TypeError: as `map_tensors`.
    """
    found: list[Tensor] = []
    map_tensors(lambda t: found.append(t) or t, value, where)
    count: dict[int, int] = {}
    for t in found:
        count[id(base_of(t))] = count.get(id(base_of(t)), 0) + 1
    whole: dict[int, Tensor] = {}

    def mapped(t: Tensor) -> Tensor:
        base = base_of(t)
        # A view without others is mapped by itself: its base may be much larger.
        if count[id(base)] == 1 or not t.requires_grad or not base.requires_grad:
            return fn(t)
        # Such a view has other strides than its base, and may be cast when its base is not.
        if t.is_complex() != base.is_complex() or t.is_neg() != base.is_neg():
            return fn(t)
        new = whole[id(base)] if id(base) in whole else whole.setdefault(id(base), fn(base))
        if new is base or new.stride() != base.stride() or new.storage_offset() != base.storage_offset():
            return fn(t)
        if t is base:
            return new
        view = new.as_strided(t.shape, t.stride(), t.storage_offset())
        view = view.conj() if t.is_conj() != base.is_conj() else view
        if viewed is not None:
            viewed(t, view)
        return view

    done = {id(t): mapped(t) for t in sorted(found, key=made)}
    return map_tensors(lambda t: done[id(t)], value, where)


def tensors_in(value: Any, depth: int = 8) -> list[Tensor]:
    """The tensors that require grad in the output of a module; objects of any class are searched."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad or is_wrapped(value) else []
    if value is None or not depth or isinstance(value, str | bytes | int | float | complex | type | nn.Module):
        return []
    if isinstance(value, Mapping):
        held: Any = value.values()
    else:
        held = value if isinstance(value, tuple | list) else list(getattr(value, "__dict__", {}).values())
    return [t for v in held for t in tensors_in(v, depth - 1)]


def made(t: Tensor) -> int:
    """The number of the autograd node that computed a tensor: larger for later ones, -1 without a node."""
    return -1 if t.grad_fn is None else sequence_nr(t.grad_fn)


def _with_items(value: Mapping, changed: dict, where: str) -> Any:
    """A shallow copy with some items replaced, of the same class and with its other attributes."""
    out = copy.copy(value)
    if out is value or not hasattr(out, "__setitem__"):
        raise TypeError(f"{where} is a {type(value).__name__}, which cannot be copied with other items. Return a dict.")
    for k, v in changed.items():
        out[k] = v  # type: ignore[index]
    return out


def _sequence(value: Any, items: list) -> Any:
    if hasattr(value, "_fields"):
        return type(value)(*items)
    if isinstance(value, list) and type(value) is not list:
        out = copy.copy(value)
        out[:] = items
        return out
    return type(value)(items)


def _attributes(value: Any) -> dict[str, Any]:
    """The fields of a dataclass or a distribution, by name."""
    if isinstance(value, Distribution | Transform):
        return dict(vars(value))
    # A field without `init` may be unset.
    return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}


def _refuse_hidden(value: Any, where: str) -> None:
    """Refuse an object of an unknown class that holds a tensor which requires grad."""
    slots = {n: getattr(value, n, None) for cls in type(value).__mro__ for n in getattr(cls, "__slots__", ())}
    for name, held in {**slots, **getattr(value, "__dict__", {})}.items():
        if _needs_gradient(held, 3):
            kind = type(value).__name__
            # The hint to decorate the class does not fit a class of torch.
            theirs = type(value).__module__.startswith("torch.")
            own = "" if theirs else f"; for instance @dataclasses.dataclass on {kind}"
            raise TypeError(
                explain(
                    f"{where} is a {kind} with a tensor in .{name}",
                    "the boundary that scales and casts gradients cannot see inside, so they would silently be wrong",
                    f"a tuple, list, dict or dataclass{own}",
                )
            )


def _needs_gradient(held: Any, depth: int) -> bool:
    if isinstance(held, Tensor):
        return held.requires_grad
    if depth and isinstance(held, Mapping):
        return any(_needs_gradient(v, depth - 1) for v in held.values())
    return depth > 0 and isinstance(held, list | tuple) and any(_needs_gradient(v, depth - 1) for v in held)
