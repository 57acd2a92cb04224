"""`chain`, `masked` and `partition`: transforms made of transforms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from .._errors import bad_leaves, explain
from .arguments import made_outside_of_graphs
from .context import Context, Prepared
from .executor import Segment, finish, run, stretch, stretches
from .facts import Facts, Scope, most
from .guest import GradientTransformation, check_guest, complete, guest
from .layout import Layout, Leaves, prefix_values
from .leafwise import transform
from .survey import check_order, effect
from .transform import Transform, TransformState, gives_parameters, nothing_to_prepare
from .view import no_view


@made_outside_of_graphs
def chain(*transforms: Transform | GradientTransformation) -> Transform:
    """Compose transforms, in the order in which a gradient passes from the model to storage.

    A chain inside a chain is equal to its members in its place. `chain` refuses an order that has no meaning. Members
    of equal names get a number, so that each has a state of its own. Members of inner chains are numbered again, and
    names given by `named` stay.

    Args:
        transforms: results of `zf` functions, chains, or objects with `init(params)` and `update(updates, state,
            params)` such as torchopt's.

    Raises:
        TypeError: an argument is not a transform.
        ValueError: the order has no meaning. The error names both transforms, the reason and a right order.

    Examples:
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
        return {p.name: p.init_fn(leaves, layout) for p in parts}

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
        Facts(capturable=_capturable(parts), rounds=_round(parts), constant=_constant({p.name: p for p in parts})),
        init_fn=init,
        prepare_fn=prepare if alone else nothing_to_prepare,
        update_fn=update,
        parts=parts,
        in_turn=True,
        factory=chain,
    )


def as_transform(t: Any) -> Transform:
    """Return a `Transform` as it is, or a `guest` of another library's transformation; otherwise raise a TypeError."""
    if isinstance(t, Transform):
        return t
    check_guest(t, "chain(..., {}, ...)", "a transform such as zf.adamw(lr=1e-3), or an object")
    return guest(t)


# ----------------------------------------------------------------------------------------------------------------------
# `masked` and `partition` send different leaves to different transforms.


@transform
def masked(transform: Transform, mask: Any) -> Transform:
    """Apply a transform to some leaves only; gradients of the others pass unchanged.

    A masked optimizer does not change the other parameters.

    Args:
        transform: any transform of gradients, or a chain of them.
        mask: a function `path -> bool`, or a tree of bools that may stop above the leaves.

    Raises:
        TypeError: the mask returns something other than a bool.
        ValueError: the transform cannot be applied to some leaves only, such as `shard`.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.masked(zf.clip_by_value(1.0), lambda path: path != "b"), zf.sgd(1.0))
        >>> state = zf.init(tx, {"w": torch.zeros(1), "b": torch.zeros(1)})
        >>> state, _ = zf.update(tx, {"w": torch.full((1,), 5.0), "b": torch.full((1,), 5.0)}, state)
        >>> state.params
        {'w': tensor([-1.]), 'b': tensor([-5.])}
    """
    inner = _member(as_transform(transform), "masked")

    def labels(layout: Layout, paths: Set[str]) -> dict[str, str | None]:
        flags = values_by_path(mask, layout, "mask", bool, paths)
        return {path: "on" if on else None for path, on in flags.items()}

    return _by_label("masked", labels, {"on": inner}, partial(_check_names, mask, "mask"))


@transform
def partition(transforms: Mapping[str, Transform | None], labels: Any) -> Transform:
    """Give each leaf to the transform of its label.

    Args:
        transforms: a dict from label to a transform or a chain. If the others are optimizers, `None` freezes the leaves
            of its label. If the others are transforms of gradients, `None` leaves the gradients of these leaves
            unchanged.
        labels: a function `path -> label`, or a tree of labels that may stop above the leaves. A label is hashable: a
            str, a number, a member of an Enum, a tuple of these, or `None`. Names of metrics and states contain
            `str(label)`.

    Raises:
        ValueError: a label has no transform (every such leaf is named), optimizers are mixed with others, or two labels
            have the same text.
        TypeError: a label cannot be hashed, or `str(label)` contains the label's address in memory, which differs
            between processes.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.partition({"fast": zf.sgd(1.0), "slow": zf.sgd(0.1)}, lambda p: "slow" if p == "b" else "fast")
        >>> state = zf.init(tx, {"w": torch.zeros(1), "b": torch.zeros(1)})
        >>> state, _ = zf.update(tx, {"w": torch.ones(1), "b": torch.ones(1)}, state)
        >>> state.params
        {'w': tensor([-1.]), 'b': tensor([-0.1000])}
    """
    if not isinstance(transforms, Mapping) or not transforms:
        why = "it takes a dict from label to transform, with one label at least"
        right = "partition({'matrices': muon(), 'rest': adamw()}, labels)"
        raise TypeError(explain(f"partition({transforms!r}, labels)", why, right))
    inner = {k: None if t is None else _member(as_transform(t), "partition") for k, t in transforms.items()}
    outcomes = {k: _outcome(t) for k, t in inner.items() if t is not None}
    if len(set(outcomes.values())) > 1:
        kinds = ", ".join(f"{k!r}: {kind}" for k, (kind, _) in outcomes.items())
        raise ValueError(
            explain(
                f"partition({{{kinds}}}, labels)",
                "either every label has an optimizer, or none has",
                "an optimizer for every label, or for none",
            )
        )
    texts = texts_of_labels(inner, "partition")

    def own(layout: Layout, paths: Set[str]) -> dict[str, str | None]:
        given = labels_by_path(labels, layout, inner.keys(), paths)
        _check_labels(given, inner)
        return {path: texts[label] for path, label in given.items()}

    members = {texts[label]: t for label, t in inner.items()}
    return _by_label("partition", own, members, partial(_check_names, labels, "labels"))


def of_members(group: Transform, fn: Callable[[Transform], Transform]) -> Transform:
    """Return a `masked`, `partition` or group of your own with `fn(member)` in place of each member.

    Its members are the transforms among its arguments, by themselves or in a dict.
    """
    assert group.factory is not None

    def over(value: Any) -> Any:
        if isinstance(value, Transform | GradientTransformation):
            return fn(as_transform(value))
        return {k: over(x) for k, x in value.items()} if isinstance(value, Mapping) else value

    config = {name: over(value) for name, value in group.config.items()}
    return group.factory(**config).renamed(group.name, group.base)


def wrapped_optimizer(
    wrapper: str, transform: Transform, wrap: Callable[[Transform], Transform], rated: str = ""
) -> Transform:
    """Call `wrap` on an optimizer, or on each member of a `partition` of optimizers.

    Args:
        wrapper: the name of the function that wraps, for messages.
        transform: what the user has passed to it.
        wrap: returns the wrapper around one optimizer, made by `wrapped`.
        rated: the reason why the optimizer must have a learning rate (`rate_of`), for the message; by default it need
            not have one.

    Raises:
        ValueError: the transform is no optimizer, or has no learning rate and must have one.
    """
    inner = as_transform(transform)
    if inner.members_fn is not None:
        return of_members(inner, lambda member: wrapped_optimizer(wrapper, member, wrap, rated))
    if not inner.facts.optimizes:
        why = "it wraps an optimizer, which makes new parameters"
        right = f"chain(clip_by_global_norm(1.0), {wrapper}(adamw(1e-3)))"
        raise ValueError(explain(f"{wrapper}({inner.name}(...))", why, right))
    if rated and inner.facts.rate is None:
        why, right = f"{rated}, and {inner.name} has none", f"{wrapper}(sgd(0.1))"
        raise ValueError(explain(f"{wrapper}({inner.name}(...))", why, right))
    return wrap(inner)


def wrapped(
    inner: Transform,
    init: Callable[[Leaves, Layout], TransformState],
    update: Callable[..., tuple[Leaves, TransformState]],
    prepare: Callable[..., Prepared] | None = None,
    **facts: Any,
) -> Transform:
    """A transform around another one: the inner one's name, place in a chain and facts, and the wrapper's functions.

    State: the entries of both, side by side. `update` and `prepare` get them all. They call `inner.update_fn` and
    `inner.prepare_fn`, and add entries of their own to what these return.

    Args:
        inner: the transform.
        init: the first values of the wrapper's own entries.
        update: as in `Transform`.
        prepare: as in `Transform`; by default that of `inner`.
        facts: the facts that the wrapper changes. The wrapper has no counterpart in torch.

    Raises:
        ValueError: when a state is made, if the wrapper and the transform have entries of the same name.

    Examples:
        >>> import torch, zerofn as zf
        >>> def twice(inner):  # each update is made two times
        ...     def update(grads, state, params, carry, ctx):
        ...         new, after = inner.update_fn(grads, state, params, carry, ctx)
        ...         return inner.update_fn(grads, {**state, **after}, new, carry, ctx)
        ...     return wrapped(inner, lambda leaves, layout: {}, update)
        >>> tx = twice(zf.sgd(1.0))
        >>> zf.update(tx, {"w": torch.ones(1)}, zf.init(tx, {"w": torch.zeros(1)}))[0].params["w"]
        tensor([-2.])
    """

    def init_both(leaves: Leaves, layout: Layout) -> TransformState:
        state, own = inner.init_fn(leaves, layout), init(leaves, layout)
        if twice := sorted(state.keys() & own.keys()):
            what = ", ".join(map(repr, twice))
            why = f"the wrapper and {inner.name} have state entries of the same name, and one would be lost: {what}"
            raise ValueError(explain(f"a wrapper around {inner.name}(...)", why, "other names in the wrapper's init"))
        return {**state, **own}

    return replace(
        inner,
        facts=replace(inner.facts, counterpart=None, torch_names=(), **facts),
        init_fn=init_both,
        prepare_fn=prepare or inner.prepare_fn,
        update_fn=update,
        parts=(inner,),
    )


def replace_innermost(t: Transform, fn: Callable[[Transform, Set[str], str], Transform], layout: Layout) -> Transform:
    """The same transform, with each innermost transform replaced by the result of `fn`.

    A transform is innermost if it does more than pass leaves to members. `fn` gets the transform, the paths of its
    leaves, and the place of its state in the state of `t`: `""`, or keys that each end in a slash.
    """

    def over(t: Transform, paths: Set[str], where: str) -> Transform:
        if t.in_turn:
            return _running(t, in_turn(tuple(over(x, paths, f"{where}{x.name}/") for x in t.parts)))
        if t.members_fn is None or t.update_fn is not t.hands_out:
            return fn(t, paths, where)
        found = t.members_by_key(layout.only(paths))
        labels = {path: k for k, (_, own) in found.items() for path in own}
        inner = {k: over(member, own & paths, f"{where}{k}/") for k, (member, own) in found.items()}
        return _running(t, _by_label(t.name, lambda *_: {p: labels.get(p) for p in paths}, inner))

    return over(t, layout.every, "")


def _running(t: Transform, new: Transform) -> Transform:
    """`t` with the members of `new`: the fields with which a transform runs, and its own name and config."""
    names = ("scope", "needs", "init_fn", "prepare_fn", "update_fn", "parts", "members_fn", "hands_out", "named_fn")
    fields: Any = {name: getattr(new, name) for name in names}
    # The states of other members may have other entries.
    return replace(t, facts=replace(t.facts, constant=new.facts.constant), **fields)


def labels_by_path(
    given: Any, layout: Layout, known: Collection[Hashable] = (), only: Set[str] | None = None
) -> dict[str, Any]:
    """Return the label of each leaf by path, given by a function of paths or by a tree that may stop above the leaves.

    Args:
        given: the function, or the tree. A tuple in it that is among `known` is a label, not a node.
        layout: the layout of the parameters.
        known: all labels, if they are known.
        only: the paths for which labels are returned; by default all.

    Raises:
        TypeError: a label cannot be the key of a dict; every such leaf is named.
        ValueError: a tied tensor has different labels at its places.
    """
    return values_by_path(given, layout, "labels", None, only, known)


def text_of_label(label: Hashable) -> str:
    """A label as it stands in names of metrics, states and checkpoints: `str(label)`.

    Raises:
        TypeError: its text is its address, another one in each process, or it is not equal to itself.

    >>> text_of_label("decay"), text_of_label(0), text_of_label(("block", 1)), text_of_label(None)
    ('decay', '0', "('block', 1)", 'None')
    """
    plain = type(label)
    why = None
    if isinstance(label, Tensor):
        why = "a tensor is equal to another by its numbers, and found in a dict by its address"
    elif label != label:
        why = "it is not equal to itself, so no leaf has it"
    elif (plain.__repr__ is object.__repr__ and plain.__str__ is object.__str__) or callable(label):
        why = "its text has its address, so a checkpoint of one process would not be read by another"
    if why:
        right = "labels that are a str, a number, a member of an Enum or a tuple of these"
        raise TypeError(explain(f"a label {label!r}", why, right))
    return str(label)


def texts_of_labels(labels: Iterable[Hashable], where: str) -> dict[Any, str]:
    """The text of each label.

    Raises:
        TypeError: a label has none (`text_of_label`).
        ValueError: two labels have the same text, and so would have one state.
    """
    found: dict[Any, str] = {}
    for label in labels:
        text = text_of_label(label)
        if other := [x for x, known in found.items() if known == text]:
            wrong, why = f"{where} with labels {other[0]!r} and {label!r}", f"both are {text!r} in names of states"
            raise ValueError(explain(wrong, why, "labels with different texts"))
        found[label] = text
    return found


def values_by_path(
    given: Any,
    layout: Layout,
    what: str,
    kind: type | None,
    only: Set[str] | None = None,
    known: Collection[Hashable] = (),
) -> dict[str, Any]:
    """Return the value of each leaf by path, given by a function of paths or by a tree that may stop above the leaves.

    Args:
        given: the function, or the tree. A node of it that is among `known` is a value.
        layout: the layout of the parameters.
        what: the values, for messages.
        kind: the type of each value; `None` if any key of a dict may be a value.
        only: the paths for which values are returned; by default all.
        known: all values, if they are known.

    Raises:
        TypeError: a value is of another kind; every such leaf is named.
        ValueError: a tied tensor has different values at its places.
    """
    leaf_at, found = dict(zip(layout.paths, layout.at, strict=True)), {}
    if callable(given):
        if only is None:
            _check_names(given, what, layout, layout.every)
        values = {leaf.path: given(leaf.path) for leaf in layout.leaves if only is None or leaf.path in only}
    else:
        below = (lambda x: _hashes(x) and x in known) if known else None
        values = prefix_values(given, layout, f"this {what} does not fit the parameters", below)
        values = {p: v for p, v in values.items() if only is None or leaf_at[p] in only}
    if kind is None:
        wrong = [(p, f"{v!r} cannot be a key of a dict") for p, v in values.items() if not _hashes(v)]
        right = "a function path -> label, or a tree of labels, each a str, a number, a member of an Enum or a tuple"
    else:
        wrong = [(p, f"{v!r} is no {kind.__name__}") for p, v in values.items() if not isinstance(v, kind)]
        right = f"a function path -> {kind.__name__}, or a tree of {kind.__name__}"
    if wrong:
        raise TypeError(bad_leaves(f"wrong {what}", wrong, right))
    for place, value in values.items():
        path = leaf_at[place]
        if found.setdefault(path, value) != value:
            wrong.append((place, f"{value!r}, and {found[path]!r} at {path}, which is the same tensor"))
    if wrong:
        raise ValueError(bad_leaves(f"wrong {what}", wrong, "one value at all places of a tied tensor"))
    return found


def _check_names(given: Any, what: str, layout: Layout, paths: Set[str]) -> None:
    """Refuse a function of paths that was written for names with the prefixes of module wrappers.

    Such a function distinguishes leaves by these names, and does not by those of the plain model.
    """
    if not layout.wrapped or not callable(given):
        return
    both = [(p, n) for p, n in zip(layout.paths, layout.wrapped, strict=True) if p in paths]

    def answers(names: Sequence[str]) -> list[Any] | None:
        try:
            return [given(name) for name in names]
        except Exception:
            # The function may look names up in a dict, which raises KeyError for others.
            return None

    plain, wrapped = answers([p for p, _ in both]), answers([n for _, n in both])
    if wrapped is None or (plain is not None and (plain == wrapped or any(x != plain[0] for x in plain))):
        return
    if plain is None or any(x != wrapped[0] for x in wrapped):
        path, name = next(((p, n) for p, n in both if n != p), both[0])
        answer = "raises" if plain is None else f"is {plain[0]!r} of every leaf"
        raise ValueError(
            explain(
                f"{what} for names such as {name!r}: of {path!r} it {answer}",
                "torch.compile and other wrappers put a prefix before names of parameters; paths have no such prefix",
                f"{what} of names such as {path!r}: those of named_parameters() before the model is wrapped",
            )
        )


def _hashes(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _member(t: Transform, where: str) -> Transform:
    """`t` as a member of `masked` or `partition`. It is refused if it has a view, or needs the whole tree."""
    for part in t.parts or (t,):
        why, does = None, effect(part)
        if part.facts.holds or does.over_ranks or does.cast_by or does.unscaled_by:
            why = "concerns the whole tree, and cannot be applied to some leaves only"
        elif part.view_fn is not no_view:
            why = "has a view half, which changes what the model sees; a view is made for the whole tree only"
        if why:
            wrong, right = f"{where}({part.name}(...), ...)", f"chain({part.name}(...), {where}(...))"
            raise ValueError(explain(wrong, f"{part.name} {why}", right))
    return chain(*complete(t.parts)) if t.in_turn else t


def _outcome(t: Transform) -> tuple[str, Facts]:
    """The result of a member's update half: in words, and as facts."""
    facts = [p.facts for p in t.parts or (t,)]
    if any(f.optimizes for f in facts):
        return "gradient to new parameter", Facts(optimizes=True)
    if all(f.watches for f in facts):
        return "watches new parameters", Facts(watches=True, sees_old=any(f.compares for f in facts))
    return "gradient to gradient", Facts(directs=any(f.directs for f in facts))


def _round(parts: Iterable[Transform]) -> bool:
    """Whether all that make new parameters round them as the context says."""
    return all([t.facts.rounds or not gives_parameters(t) for t in parts])


def _capturable(parts: Iterable[Transform]) -> bool:
    return all(part.facts.capturable for part in parts)


def _constant(members: Mapping[str, Transform]) -> tuple[str, ...]:
    """Entries of a state of members that never change."""
    return tuple(f"{key}/{entry}" for key, t in members.items() for entry in t.facts.constant)


def _check_labels(given: Mapping[str, Any], inner: Mapping[str, Any]) -> None:
    wrong = [(p, f"label {v!r} has no transform") for p, v in given.items() if v not in inner]
    if wrong:
        raise ValueError(bad_leaves("partition: unknown labels", wrong, f"one of {', '.join(map(repr, inner))}"))


def _by_label(
    name: str,
    labels: Callable[[Layout, Set[str]], dict[str, Any]],
    inner: Mapping[str, Transform | None],
    check: Callable[[Layout, Set[str]], None] = lambda *_: None,
) -> Transform:
    """One transform that passes each leaf to the member of its label; leaves labelled `None` stay unchanged.

    `check` refuses labels, when the chain is resolved for a layout.
    """
    members = {k: t for k, t in inner.items() if t is not None}
    alone_in = {k: stretch([t]) for k, t in members.items()}
    # A member that looks at its whole group cannot be run bucket by bucket, nor leaf by leaf.
    alone = all(t.scope is Scope.LEAF for t in members.values())
    facts = _outcome(next(iter(members.values())))[1] if members else Facts(optimizes=True)
    folded: Any = dict(capturable=_capturable(members.values()), rounds=_round(members.values()))
    facts = replace(facts, constant=_constant(members), **folded)

    def groups(layout: Layout, paths: Set[str]) -> dict[str, set[str]]:
        given = labels(layout, paths)
        return {k: {p for p, v in given.items() if v == k} for k in members}

    def named_members(layout: Layout) -> dict[str, tuple[Transform, set[str]]]:
        check(layout, layout.every)
        return {f"{name}.{k}.": (members[k], paths) for k, paths in groups(layout, layout.every).items()}

    def init(leaves: Leaves, layout: Layout) -> TransformState:
        return {
            k: members[k].init_fn({p: x for p, x in leaves.items() if p in paths}, layout)
            for k, paths in groups(layout, leaves.keys()).items()
        }

    def prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
        found: dict[str, tuple[set[str], Segment]] = {}
        for k, paths in groups(ctx.layout, params.keys()).items():
            look = None if grads is None else {p: g for p, g in grads.items() if p in paths}
            own = {p: x for p, x in params.items() if p in paths}
            states = {members[k].name: state[k]}
            found[k] = paths, Segment(alone_in[k], states, own, ctx.inside(f"{name}.{k}"), look)

        def close() -> None:
            for _, segment in found.values():
                segment.close()

        return Prepared(found, close=close, carries_state=True)

    def update(grads: Leaves, state: TransformState, params: Leaves, carry: dict[str, Any], ctx: Context):
        out = {} if facts.optimizes else dict(grads)
        new: TransformState = {}
        for k, (paths, segment) in carry.items():
            own = {p: x for p, x in params.items() if p in paths}
            if own or not alone:
                out.update(segment.feed({p: grads[p] for p in own if p in grads}, own))
                new[k] = segment.states()[0][members[k].name]
        return out, new

    return Transform(
        name,
        Scope.LEAF if alone else Scope.WHOLE,
        most(t.needs for t in members.values()),
        facts,
        init_fn=init,
        prepare_fn=prepare,
        update_fn=update,
        parts=tuple(members.values()),
        members_fn=named_members,
        hands_out=update,
        named_fn=lambda other: _by_label(other, labels, inner, check),
    )
