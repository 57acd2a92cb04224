"""`guest`: an optimizer of another library as a transform, whose state is any tree."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from types import FunctionType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from .._errors import bad_leaves, explain, kind_of
from .arguments import check_needs
from .context import Context
from .facts import Facts, Scope
from .layout import Layout, Leaves
from .leafwise import transform
from .returned_values import check_returned
from .transform import Transform, TransformState
from .tree import flatten, tree_keys, tree_map, under_keys, unflatten


@runtime_checkable
class GradientTransformation(Protocol):
    """A transformation of torchopt, which a chain accepts as it is."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def check_guest(t: Any, where: str, right: str) -> None:
    """Raise a `TypeError` unless `t` is a transformation of another library; `where` has a `{}` for what it is."""
    if isinstance(t, torch.optim.Optimizer):
        raise TypeError(
            explain(
                where.format(f"{type(t).__name__}(...)"),
                "a torch.optim optimizer owns its parameters and updates them in place; a chain takes functions",
                "chain(..., zf.adamw(lr=1e-3)) or chain(..., zf.from_torch(torch.optim.NAdam, lr=1e-3)), and\n"
                "zf.attach(model, tx) for something that looks like an optimizer",
            )
        )
    if isinstance(t, type) or not isinstance(t, GradientTransformation):
        hint = f"; call it: {t.__name__}(...)" if callable(t) and hasattr(t, "__name__") else ""
        raise TypeError(
            explain(
                where.format(repr(t)),
                f"{type(t).__name__} is no transform{hint}",
                f"{right} with init(params) and update(updates, state, params)",
            )
        )


@transform
def guest(transformation: GradientTransformation, needs: str = "tree") -> Transform:
    """A transformation of another library, such as torchopt's. A chain takes one without this call too.

    The transformation gets the tree as a dict from path to tensor. If it ends a chain that has no optimizer, its result
    is added to the parameters. If the transformation keeps the state of shards in lists, as torchopt does, each rank
    has its own lists. `opt.state_dict()` keeps such lists, for the same number of ranks. `zf.save` refuses them,
    because a checkpoint is for any number of ranks.

    Args:
        transformation: an object with `init(params)` and `update(updates, state, params)`.
        needs: how much of the tree an update must see to be right. `"element"`: element i of the result depends only on
            element i of gradient, parameter and state, as in Adam. Then under `shard` and `reduce_scatter` it gets flat
            shards of leaves, some of them empty. With another `needs` (`"row"`, `"leaf"`, `"tree"`: a norm, a trust
            ratio, a matrix product) zerofn refuses the transformation under `shard` and `reduce_scatter` on several
            ranks. It works on one rank, and under `all_reduce` on any number of ranks.

    Raises:
        TypeError: no such object, or its `update` takes other arguments. Its state has tensors in an object that is no
            node of a tree, such as a dataclass that is not registered with optree.
        ValueError: `needs` is another word. At an update: a leaf has no gradient, or its update is left out, is no real
            tensor, or has another shape or device; every such leaf is named.

    Examples:
        >>> import torch, zerofn as zf
        >>> class Descent:
        ...     def init(self, params):
        ...         return ()
        ...     def update(self, updates, state, params=None):
        ...         return {path: -0.5 * g for path, g in updates.items()}, state
        >>> tx = zf.chain(zf.shard(), zf.guest(Descent(), needs="element"))
        >>> state, _ = zf.update(tx, {"w": torch.ones(1)}, zf.init(tx, {"w": torch.zeros(1)}))
        >>> state.params
        {'w': tensor([-0.5000])}
    """
    if isinstance(transformation, Transform):
        why, right = "it is a transform of this library already", f"chain(..., {transformation.name}(...), ...)"
        raise TypeError(explain(f"guest({transformation.name}(...))", why, right))
    check_guest(transformation, "guest({})", "an object")
    alone = "a number of the whole tree that it takes itself is one of this rank's pieces"
    check_needs("guest", needs, ("element", "row", "leaf", "tree"), alone)

    name, known = type(transformation).__name__, _arguments_of_update(transformation)
    door = _Door(name, transformation)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        return {"inner": door.first(leaves)}

    extra, facts = {"inplace": False} if "inplace" in known else {}, Facts(adds=True)

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        missing = [(p, "no gradient in this step") for p in params if p not in grads]
        if missing:
            right = "zf.masked(transformation, mask) over the leaves that always have one"
            raise ValueError(bad_leaves("a transformation of another library needs every gradient", missing, right))
        held, form = door.outside(state["inner"], params)
        if "params" in known:
            returned = transformation.update(dict(grads), held, params=dict(params), **extra)
        else:
            returned = transformation.update(dict(grads), held, dict(params), **extra)
        # Checked before they are added to parameters: `+` would cast another dtype, and broadcast another shape.
        out, inner = check_returned(name, facts, returned, grads, params, held=held)
        return dict(out or {}), {"inner": door.inside(inner, form)}

    return Transform(name, Scope.WHOLE, needs, facts, init_fn=init, update_fn=update)


def _arguments_of_update(t: GradientTransformation) -> Mapping[str, inspect.Parameter]:
    """The arguments of its `update` by name; a `TypeError` where that takes no parameters, or needs more."""
    signature = inspect.signature(t.update)
    named = {"params": None} if "params" in signature.parameters else {}
    try:
        signature.bind(*(None,) * (2 if named else 3), **named)
    except TypeError as error:
        wrong = f"guest({type(t).__name__}(...)) whose update takes {signature}"
        why = f"it is called as update(updates, state, params): {error}"
        raise TypeError(explain(wrong, why, "def update(self, updates, state, params=None): ...")) from None
    return signature.parameters


def complete(parts: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """Make a guest that ends a chain without optimizer the optimizer: its result is added to the parameters."""
    gradient = [i for i, p in enumerate(parts) if not p.facts.watches]
    if any([p.facts.optimizes for p in parts]) or not gradient or not parts[gradient[-1]].facts.adds:
        return parts
    last = parts[gradient[-1]]

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        out, state = last.update_fn(grads, state, params, carry, ctx)
        return {p: (params[p] + u).to(params[p].dtype) for p, u in out.items()}, state

    adding = replace(last, facts=replace(last.facts, optimizes=True), update_fn=update)
    return (*parts[: gradient[-1]], adding, *parts[gradient[-1] + 1 :])


# ----------------------------------------------------------------------------------------------------------------------
# Inside the library a state is nested dicts of tensors.


# The state of another library may have values of these types beside tensors. They are part of its form, and may not
# change from step to step.
PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, type, torch.dtype, torch.device, FunctionType)


# The keys on the way to a tensor.
Keys = tuple[str, ...]


class _Form(NamedTuple):
    """The containers of a state: for each leaf the keys of its tensor, or what stands there in every step."""

    names: tuple[Keys | None, ...]
    plain: tuple[Any, ...]
    spec: Any
    numbered: Any  # the tree with the number of each leaf in its place


class _Door:
    """Converts the state of another library, which is any tree, to nested dicts of tensors and back.

    The nested dicts do not have the containers of the tree. The door remembers those of the states that it has
    converted. For a state from a file or from another process, it asks the library for a new first state.
    """

    def __init__(self, name: str, transformation: GradientTransformation):
        self.name, self.transformation = name, transformation
        self.forms: dict[tuple[Keys, ...], _Form] = {}

    def first(self, leaves: Leaves) -> Any:
        """The first state, as nested dicts."""
        tree = self.transformation.init(dict(leaves))
        form = self._form_of(tree)
        if not torch.compiler.is_compiling():
            self.forms[_in_order(form.names)] = form
        return _nested(tree, form)

    def outside(self, state: Any, params: Leaves) -> tuple[Any, _Form]:
        """The tree that the library expects, with the tensors of a state in it, and the form of the tree."""
        found = dict(_entries(state))
        names = _in_order(found)
        if (form := self.forms.get(names)) is None:
            form = self._form_of(self.transformation.init(dict(params)))
            if _in_order(form.names) != names:
                mine, theirs = (", ".join(map("/".join, x)) or "nothing" for x in (_in_order(form.names), names))
                wrong, why = f"{self.name} with a state that has {theirs}", f"a state that its init makes has {mine}"
                raise ValueError(explain(wrong, why, "a state of the same transformation with the same arguments"))
        values = [x if name is None else found[name] for name, x in zip(form.names, form.plain, strict=True)]
        return tree_map(lambda i: values[i], form.numbered), form

    def inside(self, tree: Any, before: _Form) -> Any:
        """The tree that an update has returned, as nested dicts. `before` is the form of the tree that it got."""
        form = self._form_of(tree, before)
        if form.names == before.names and form.plain != before.plain:
            both = zip(tree_keys(tree), before.plain, form.plain, strict=True)
            bad = [(".".join(keys), f"{new!r} after {old!r}") for keys, old, new in both if old != new]
            right = "torch.tensor(0) in place of a number of Python: files and graphs have tensors"
            raise ValueError(bad_leaves(f"{self.name}: a value that is no tensor changes in its state", bad, right))
        if form is not before and not torch.compiler.is_compiling():
            self.forms[_in_order(form.names)] = form
        return _nested(tree, form)

    def _form_of(self, tree: Any, before: _Form | None = None) -> _Form:
        values, spec = flatten(tree)
        plain = tuple([None if isinstance(x, Tensor) else x for x in values])
        # The compiler cannot compare the structures of trees.
        known = before is not None and not torch.compiler.is_compiling() and spec == before.spec
        if before is not None and known and plain == before.plain:
            return before
        keys = tree_keys(tree)
        bad = [(at, x) for at, x in zip(keys, values, strict=True) if not isinstance(x, (Tensor, *PLAIN))]
        if bad:
            kind = type(bad[0][1]).__name__
            right = "a dict, a list, a tuple or a NamedTuple of tensors; or once, before:\n"
            right += f"         optree.register_pytree_node({kind}, to_parts, from_parts, namespace='zerofn')"
            what = f"{self.name}: a state in classes that are no nodes of a tree, in which tensors would not be found"
            raise TypeError(bad_leaves(what, [(".".join(at) or "its root", kind_of(x)) for at, x in bad], right))
        names = [at if isinstance(x, Tensor) else None for at, x in zip(keys, values, strict=True)]
        twice = [".".join(at) for at, n in Counter(names).items() if at is not None and n > 1]
        if twice:
            what = f"{self.name}: two tensors of a state under the keys {twice[0]!r}"
            raise ValueError(explain(what, "they are saved and loaded by their keys", "keys of different texts"))
        return _Form(tuple(names), plain, spec, unflatten(spec, list(range(len(values)))))


def _in_order(names: Iterable[Keys | None]) -> tuple[Keys, ...]:
    return tuple(sorted([name for name in names if name is not None]))


def _nested(tree: Any, form: _Form) -> Any:
    both = zip(form.names, flatten(tree)[0], strict=True)
    return under_keys([(name, x) for name, x in both if name is not None])


def _entries(x: Any, above: Keys = ()) -> list[tuple[Keys, Any]]:
    """The tensors of nested dicts, each with the keys on the way to it."""
    return (
        [entry for key, y in x.items() for entry in _entries(y, (*above, key))] if isinstance(x, dict) else [(above, x)]
    )
