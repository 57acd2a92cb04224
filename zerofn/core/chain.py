"""`chain`, and `guest`: transformations of other libraries in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch

from .._errors import bad_leaves, explain
from .arguments import check_needs, made_outside_of_graphs
from .chain_order import check_order
from .executor import Segment, finish, run
from .facts import Facts, Scope, most
from .layout import Layout, Leaves
from .leafwise import transform
from .opaque_states import open_state
from .returned_updates import check_returned
from .segments import stretch, stretches
from .transform import Transform, TransformState, nothing_to_prepare
from .update_context import Context, Prepared


@runtime_checkable
class GradientTransformation(Protocol):
    """A transformation of torchopt, which a chain accepts as it is."""

    init: Callable[..., Any]
    update: Callable[..., Any]


@made_outside_of_graphs
def chain(*transforms: Transform | GradientTransformation) -> Transform:
    """Compose transforms; left to right is the road of a gradient from the model to storage.

    Associative: a chain inside a chain is the same as its members. An order without meaning is
    refused here. Members of one name get a number, so that each has its own state: those of a chain
    inside are numbered anew, and names given by `named` stay.

    Args:
        transforms: what `zf` functions return, chains, or objects with `init(params)` and
            `update(updates, state, params)` such as those of torchopt.

    Raises:
        TypeError: an argument is no transform.
        ValueError: the order has no meaning; both transforms, the reason and a right order are named.

    >>> import zerofn as zf
    >>> zf.chain(zf.clip_by_value(1.0), zf.chain(zf.sgd(0.1))) == zf.chain(zf.clip_by_value(1.0), zf.sgd(0.1))
    True
    """
    flat: list[Transform] = []
    for t in transforms:
        t = as_transform(t)
        flat.extend(t.members)
    taken = {t.base or t.name for t in flat}
    seen: dict[str, int] = {}
    parts = []
    for t in flat:
        base = t.base or t.name
        seen[base] = seen.get(base, 0) + 1
        name = base if seen[base] == 1 else f"{base}_{seen[base]}"
        while seen[base] > 1 and name in taken:
            seen[base] += 1
            name = f"{base}_{seen[base]}"
        parts.append(t if t.name == name else t.renamed(name, None if name == base else base))
    check_order(parts)
    return in_turn(tuple(parts))


chain.__rebuild__ = lambda config, parts: chain(*parts)  # type: ignore[attr-defined]


def in_turn(parts: tuple[Transform, ...]) -> Transform:
    """A chain of these transforms, with the names they have."""
    alone = bool(parts) and all(p.scope is Scope.LEAF for p in parts)
    at_once, in_order = stretch(parts), stretches(parts)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        states = {p.name: p.init_fn(leaves, layout) for p in parts}
        return at_once.spread(at_once.states(states), states)

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        segment = Segment(at_once, state, params, ctx)
        return Prepared(segment, close=segment.close, emit=not segment.held, carries_state=True)

    def update(grads: Leaves, state: TransformState, params: Leaves, segment: Segment | None, ctx: Context) -> Any:
        signal: Leaves | None
        if segment is None:
            signal, new, emitted = run(in_order, grads, state, params, ctx)
        else:
            signal = segment.feed(grads, params)
            new, emitted = segment.states()
        if signal is not None and emitted is not True:
            signal = finish(signal, params, emitted)
        return signal, new

    return Transform(
        "chain",
        Scope.LEAF if alone else Scope.WHOLE,
        most(p.needs for p in parts),
        init_fn=init,
        prepare_fn=prepare if alone else nothing_to_prepare,
        update_fn=update,
        parts=parts,
        in_turn=True,
        factory=chain,
    )


def as_transform(t: Any) -> Transform:
    """`t` itself, or a `guest` of a transformation of another library; a `TypeError` for anything else."""
    if isinstance(t, Transform):
        return t
    _check_guest(t, "chain(..., {}, ...)", "a transform such as zf.adamw(lr=1e-3), or an object")
    return guest(t)


def _check_guest(t: Any, where: str, right: str) -> None:
    """Raise a `TypeError` unless `t` is a transformation of another library; `where` has a `{}` for what it is."""
    if isinstance(t, torch.optim.Optimizer):
        raise TypeError(
            explain(
                where.format(f"{type(t).__name__}(...)"),
                "a torch.optim optimizer owns its parameters and updates them in place; it is no function of gradients",
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

    It is handed the tree as a dict from path to tensor. Where it ends a chain that has no optimizer, what it returns is
    added to the parameters. Lists in which it keeps state of pieces, as torchopt does, are each rank's own:
    `opt.state_dict()` keeps them for the same number of ranks, and `zf.save`, which is for any number, refuses them.

    Args:
        transformation: an object with `init(params)` and `update(updates, state, params)`.
        needs: how much of the tree an update must see to be right. `"element"`: each element of what it returns
            comes from the same element of gradient, parameter and state alone, as in Adam. Then under `shard` and
            `reduce_scatter` it is handed flat pieces of leaves, some of them empty. Else (`"row"`, `"leaf"`, `"tree"`:
            a norm, a trust ratio, a matrix product) it is refused there, where leaves are really cut: on more
            than one rank. On one rank, and under `all_reduce` on any number, it is right.

    Raises:
        TypeError: no such object, or its `update` takes other arguments. Its state has tensors in an object that is no
            node of a tree, such as a dataclass that is not registered with optree.
        ValueError: `needs` is another word. At an update: a leaf has no gradient, or its update is left out, is no real
            tensor, or has another shape or device; every such leaf is named.

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
    _check_guest(transformation, "guest({})", "an object")
    alone = "a number of the whole tree that it takes itself is one of this rank's pieces"
    check_needs("guest", needs, ("element", "row", "leaf", "tree"), alone)

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        return {"inner": open_state(name, transformation.init(dict(leaves)))}

    name, known = type(transformation).__name__, _arguments_of_update(transformation)
    extra, facts = {"inplace": False} if "inplace" in known else {}, Facts(adds=True)

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        missing = [(p, "no gradient in this step") for p in params if p not in grads]
        if missing:
            right = "zf.masked(transformation, mask) over the leaves that always have one"
            raise ValueError(bad_leaves("a transformation of another library needs every gradient", missing, right))
        if "params" in known:
            returned = transformation.update(dict(grads), state["inner"], params=dict(params), **extra)
        else:
            returned = transformation.update(dict(grads), state["inner"], dict(params), **extra)
        # Here and not once they are added to parameters, which would cast them and spread them over leaves.
        out, inner = check_returned(name, facts, returned, grads, params, held=state["inner"])
        return dict(out or {}), {"inner": open_state(name, inner)}

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
    """Make a guest that ends a chain without optimizer the optimizer: what it returns is added to parameters."""
    gradient = [i for i, p in enumerate(parts) if not p.facts.watches]
    if any([p.facts.optimizes for p in parts]) or not gradient or not parts[gradient[-1]].facts.adds:
        return parts
    last = parts[gradient[-1]]

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        out, state = last.update_fn(grads, state, params, carry, ctx)
        return {p: (params[p] + u).to(params[p].dtype) for p, u in out.items()}, state

    adding = replace(last, facts=replace(last.facts, optimizes=True), update_fn=update)
    return (*parts[: gradient[-1]], adding, *parts[gradient[-1] + 1 :])
