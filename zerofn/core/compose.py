"""`chain` and the transforms that hold other transforms: `masked`, `partition`, and guests from other libraries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch

from .._errors import bad_leaves, explain
from .arguments import check_needs
from .executor import finish, run
from .leafwise import transform
from .order import check_order, effect
from .transform import Context, Facts, Prepared, Scope, Transform, TransformState, most
from .tree import Layout, Leaves, Tree, apart, prefix_values
from .views import no_view


@runtime_checkable
class GradientTransformation(Protocol):
    """The shape of torchopt's transformations, which a chain accepts as they are."""

    init: Callable[..., Any]
    update: Callable[..., Any]


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
    return Transform(
        "chain",
        # Its state is one level deeper than that of its members, which only its own run can read.
        Scope.WHOLE,
        most(p.needs for p in parts),
        init_fn=_ChainInit(tuple(parts)),
        update_fn=_ChainUpdate(tuple(parts)),
        parts=tuple(parts),
        in_turn=True,
        factory=chain,
    )


chain.__rebuild__ = lambda config, parts: chain(*parts)  # type: ignore[attr-defined]


class _ChainInit:
    def __init__(self, parts: tuple[Transform, ...]):
        self.parts = parts

    def __call__(self, leaves: Leaves, layout: Layout) -> TransformState:
        return {p.name: p.init_fn(leaves, layout) for p in self.parts}


class _ChainUpdate:
    def __init__(self, parts: tuple[Transform, ...]):
        self.parts = parts

    def __call__(self, grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context) -> Any:
        signal, new, emitted = run(self.parts, grads, state, params, ctx)
        if signal is not None and emitted is not True:
            signal = finish(signal, params, emitted)
        return signal, new


def as_transform(t: Any) -> Transform:
    """`t` itself, or a guest wrapped; a `TypeError` for anything else."""
    if isinstance(t, Transform):
        return t
    _check_guest(t, "chain(..., {}, ...)", "a transform such as zf.adamw(lr=1e-3), or an object")
    return guest(t)


def _check_guest(t: Any, where: str, right: str) -> None:
    """A `TypeError` where it cannot be one; `where` has a place for it."""
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
    """A transformation of another library, such as torchopt's. A chain takes one as it is too, as `guest(it)`.

    It is handed the tree as a dict from path to tensor. Where it ends a chain that has no optimizer, what it returns
    is added to the parameters. What it keeps of pieces in lists of its own, as torchopt does, is each rank's own in
    `opt.state_dict()`, for the same number of ranks; `zf.save`, which is for any number, refuses it.

    Args:
        transformation: an object with `init(params)` and `update(updates, state, params)`.
        needs: how much of the tree an update must see to be right. `"element"`: each element of what it returns
            comes from the same element of gradient, parameter and state alone, as in Adam. Then under `shard` and
            `reduce_scatter` it is handed flat pieces of leaves, some of them empty. Else (`"row"`, `"leaf"`, `"tree"`:
            a norm, a trust ratio, a matrix product) it is refused there, where leaves are really cut: on more
            than one rank. On one rank, and under `all_reduce` on any number, it is right.

    Raises:
        TypeError: no such object.
        ValueError: `needs` is no such word. At an update, a leaf has no gradient, or an update not its shape.

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
        return {"inner": apart(transformation.init(dict(leaves)), leaves.values())}

    known = inspect.signature(transformation.update).parameters
    extra = {"inplace": False} if "inplace" in known else {}

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        missing = [(p, "no gradient in this step") for p in params if p not in grads]
        if missing:
            right = "zf.masked(transformation, mask) over the leaves that always have one"
            raise ValueError(bad_leaves("a transformation of another library needs every gradient", missing, right))
        if "params" in known:
            out, inner = transformation.update(dict(grads), state["inner"], params=dict(params), **extra)
        else:
            out, inner = transformation.update(dict(grads), state["inner"], dict(params), **extra)
        name = type(transformation).__name__
        wrong = [(p, f"of shape {tuple(u.shape)}") for p, u in out.items() if u.shape != params[p].shape]
        if wrong:
            raise ValueError(bad_leaves(f"updates of {name} do not fit", wrong, "updates of the parameters' shapes"))
        # It may keep what it was given, and that is written in place.
        return dict(out), {"inner": apart(inner, (*params.values(), *grads.values()))}

    name, facts = type(transformation).__name__, Facts(adds=True)
    return Transform(name, Scope.WHOLE, needs, facts, init_fn=init, update_fn=update)


def complete(parts: tuple[Transform, ...]) -> tuple[Transform, ...]:
    """Let a guest that ends a chain without optimizer be the optimizer: what it returns is added."""
    gradient = [i for i, p in enumerate(parts) if not p.facts.watches]
    if any(p.facts.optimizes for p in parts) or not gradient or not parts[gradient[-1]].facts.adds:
        return parts
    last = parts[gradient[-1]]

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context):
        out, state = last.update_fn(grads, state, params, carry, ctx)
        return {p: (params[p] + u).to(params[p].dtype) for p, u in out.items()}, state

    adding = replace(last, facts=replace(last.facts, optimizes=True), update_fn=update)
    return (*parts[: gradient[-1]], adding, *parts[gradient[-1] + 1 :])


Mask = Callable[[str], bool] | Tree


@transform
def masked(transform: Transform, mask: Any) -> Transform:
    """Apply a transform to some leaves only; the others pass by unchanged.

    A masked optimizer leaves the other parameters as they are.

    Args:
        transform: any transform of gradients, or a chain of them.
        mask: a function `path -> bool`, or a tree of bools that may stop above the leaves.

    >>> import torch, zerofn as zf
    >>> tx = zf.chain(zf.masked(zf.clip_by_value(1.0), lambda path: path != "b"), zf.sgd(1.0))
    >>> state = zf.init(tx, {"w": torch.zeros(1), "b": torch.zeros(1)})
    >>> state, _ = zf.update(tx, {"w": torch.full((1,), 5.0), "b": torch.full((1,), 5.0)}, state)
    >>> state.params
    {'w': tensor([-1.]), 'b': tensor([-5.])}
    """
    inner = _inside(as_transform(transform), "masked")

    def chosen(layout: Layout) -> dict[str, bool]:
        return {path: bool(v) for path, v in values_by_path(mask, layout, "mask", bool).items()}

    return _grouped(
        "masked", lambda layout: {p: "on" if on else None for p, on in chosen(layout).items()}, {"on": inner}
    )


@transform
def partition(transforms: Mapping[str, Transform | None], labels: Any) -> Transform:
    """Give each leaf to the transform of its label.

    Args:
        transforms: label to transform, or chain. `None` leaves the leaves of that label alone: among
            optimizers it freezes them; among transforms of gradients their gradients pass by unchanged, to
            an optimizer that trains them.
        labels: a function `path -> label`, or a tree of labels that may stop above the leaves.

    Raises:
        ValueError: a label has no transform (every such leaf is named), or optimizers are mixed with others.

    >>> import torch, zerofn as zf
    >>> tx = zf.partition({"fast": zf.sgd(1.0), "slow": zf.sgd(0.1)}, lambda p: "slow" if p == "b" else "fast")
    >>> state = zf.init(tx, {"w": torch.zeros(1), "b": torch.zeros(1)})
    >>> state, _ = zf.update(tx, {"w": torch.ones(1), "b": torch.ones(1)}, state)
    >>> state.params
    {'w': tensor([-1.]), 'b': tensor([-0.1000])}
    """
    if not isinstance(transforms, Mapping) or not transforms:
        raise TypeError(f"partition({transforms!r}, labels): give a dict from label to transform.")
    inner = {k: None if t is None else _inside(as_transform(t), "partition") for k, t in transforms.items()}
    outcomes = {k: _outcome(t) for k, t in inner.items() if t is not None}
    if len(set(outcomes.values())) > 1:
        kinds = ", ".join(f"{k!r}: {told}" for k, (told, _) in outcomes.items())
        raise ValueError(
            explain(
                f"partition({{{kinds}}}, labels)",
                "every label must turn gradients into the same thing",
                "an optimizer for every label, or for none",
            )
        )
    return _grouped("partition", lambda layout: values_by_path(labels, layout, "labels", str), inner)


def of_members(group: Transform, fn: Callable[[Transform], Transform]) -> Transform:
    """The same `masked` or `partition` over `fn` of each of its members."""
    assert group.factory is not None
    config = dict(group.config)
    if "transforms" in config:
        config["transforms"] = {k: None if t is None else fn(t) for k, t in config["transforms"].items()}
    else:
        config["transform"] = fn(config["transform"])
    return group.factory(**config).renamed(group.name, group.base)


def values_by_path(given: Any, layout: Layout, what: str, kind: type) -> dict[str, Any]:
    """What a function of paths, or a tree that may stop above the leaves, gives each leaf.

    Raises:
        TypeError: of another kind; every such leaf is named.
    """
    if callable(given):
        values = {leaf.path: given(leaf.path) for leaf in layout.leaves}
    else:
        values = prefix_values(given, layout, f"this {what} does not fit the parameters")
    wrong = [(p, f"{v!r} is no {kind.__name__}") for p, v in values.items() if not isinstance(v, kind)]
    if wrong:
        raise TypeError(
            bad_leaves(f"wrong {what}", wrong, f"a function path -> {kind.__name__}, or a tree of {kind.__name__}")
        )
    return values


def _inside(t: Transform, where: str) -> Transform:
    """What may be nested: no view, and nothing that holds a part of the tree back."""
    for part in t.parts or (t,):
        why, does = None, effect(part)
        if part.facts.scales or part.facts.holds or does.over_ranks or does.cast_by:
            why = "concerns the whole tree; on a part of it the step has no meaning"
        elif part.view_fn is not no_view:
            why = "has a view half, between what is stored and what the model sees; of a part of the tree none is made"
        if why:
            wrong, right = f"{where}({part.name}(...), ...)", f"chain({part.name}(...), {where}(...))"
            raise ValueError(explain(wrong, f"{part.name} {why}", right))
    return chain(*complete(t.parts)) if t.in_turn else t


def _outcome(t: Transform) -> tuple[str, Facts]:
    """What a member turns gradients into: in words, and as facts."""
    facts = [p.facts for p in t.parts or (t,)]
    if any(f.optimizes for f in facts):
        return "gradient to new parameter", Facts(optimizes=True)
    if all(f.watches for f in facts):
        return "watches new parameters", Facts(watches=True)
    return "gradient to gradient", Facts(directs=any(f.directs for f in facts))


def _grouped(name: str, labels: Callable[[Layout], dict[str, Any]], inner: Mapping[str, Transform | None]) -> Transform:
    """One transform that hands each leaf to the member its label names; `None` and unlabelled leaves stay."""
    members = {k: t for k, t in inner.items() if t is not None}
    facts = _outcome(next(iter(members.values())))[1] if members else Facts(optimizes=True)

    def groups(layout: Layout) -> dict[str, set[str]]:
        given = labels(layout)
        wrong = [(p, f"label {v!r} has no transform") for p, v in given.items() if v is not None and v not in inner]
        if wrong:
            raise ValueError(bad_leaves("partition: unknown labels", wrong, f"one of {', '.join(map(repr, inner))}"))
        return {k: {p for p, v in given.items() if v == k} for k in members}

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        return {
            k: members[k].init_fn({p: x for p, x in leaves.items() if p in paths}, layout)
            for k, paths in groups(layout).items()
        }

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        return Prepared(carry=groups(ctx.layout))

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: dict[str, set[str]], ctx: Context):
        out = {} if facts.optimizes else dict(grads)
        new: TransformState = {}
        for k, paths in carry.items():
            mine = {p: g for p, g in grads.items() if p in paths}
            own = {p: x for p, x in params.items() if p in paths}
            signal, states, _ = run([members[k]], mine, {members[k].name: state[k]}, own, ctx.inside(f"{name}.{k}"))
            new[k] = states[members[k].name]
            out.update(signal or {})
        return out, new

    return Transform(
        name,
        # A member that looks at its whole group cannot be run bucket by bucket; nor can the state of
        # a nested transform be cut by path, which only the member knows how to read.
        Scope.WHOLE,
        most(t.needs for t in members.values()),
        facts,
        init_fn=init,
        prepare_fn=prepare,
        update_fn=update,
        parts=tuple(members.values()),
        members_fn=lambda layout: {f"{name}.{k}.": (members[k], paths) for k, paths in groups(layout).items()},
        named_fn=lambda other: _grouped(other, labels, inner),
    )
