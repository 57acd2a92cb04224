"""`Transform`: a view half (how the model sees parameters) and an update half (how gradients become updates).

Words used everywhere: a *stored* parameter is the one in the state (a shard, a master copy), a *seen* one is the one in
the model. A *leaf* is one distinct parameter, named by its path. A *step* is an optimizer step (an update that was
applied), a *micro-step* one call of `update`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from textwrap import indent
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, explain
from ..kernels.recording import recorded
from .context import Context, Prepared
from .facts import NEEDS, Facts, Scope
from .forms import Form, elsewhere
from .layout import Layout, Leaves, check_own_memory, make_layout
from .number_graphs import RECORDED
from .returned_values import (
    READABLE,
    check_returned,
    misshapen,
    own_prepared,
    own_start,
    own_update,
    split_grads,
    unreadable,
)
from .spec import Through
from .tree import Tree, flatten, tree_paths
from .view import ViewOf, no_view

# A transform's state: shared 0-d tensors by name, and tensors of leaves by name and path.
TransformState = dict[str, Any]
Schedule = Callable[[Any], Any]
ScalarOrSchedule = float | Tensor | Schedule


class OfTensors:
    """The base class of schedules that compute with a step that is a 0-d tensor, and do not ask for its number."""


def no_state(leaves: Leaves, layout: Layout) -> TransformState:
    """The `init` of a transform without state."""
    return {}


def nothing_to_prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
    """The `prepare` of a transform that treats each leaf alone, and has no state that leaves share."""
    return Prepared()


def pass_through(
    grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context
) -> tuple[Leaves, TransformState]:
    """The `update` of a transform that only has a view, or only watches."""
    return grads, state


@dataclass(frozen=True, eq=False, repr=False)
class Transform:
    """A pair of pure functions: how the model sees parameters, and how their gradients become updates.

    Functions such as `zf.adamw` build one; build your own by `zf.leafwise`. zerofn compares, prints and pickles a
    transform by the function that built it and the arguments of this function.

    Attributes:
        name: unique in a chain; the key of its state.
        facts: its static properties.
        scope: how much of the tree the executor passes to it at once.
        needs: how much an update must see to be right: `"element"`, `"number"`, `"row"`, `"leaf"` or `"tree"` (the
            default). A transform gets flat shards of leaves only with `"element"` or `"number"`.
        view_fn: a function that makes the view half; by default the transform has no view half.
        through: maps the `Spec` of a gradient to the next one, or raises if the transform cannot stand at its place in
            the chain. By default it follows from `facts`.
        parts: the transforms of a chain or a partition, or the transform that is wrapped.
        in_turn: whether the transform is a chain: its update runs the updates of its parts, one after the other.
        members_fn: for a transform with members (such as a `partition`): a function that returns a dict. Its keys are
            the prefixes of the members' metrics, and its values are pairs of a member and the paths of its leaves.
        hands_out: for a transform with members (`members_fn`): an update half that only passes leaves to members. If
            `update_fn` is `hands_out`, zerofn runs each member by itself, and sends only the leaves of members that
            need whole leaves to owners. Any other `update_fn` runs as it is, and gets whole leaves if a member needs
            whole leaves.
        named_fn: for a transform whose metrics contain its name: a function that returns the same transform under
            another name.
        base: the transform's name before a chain gave it a number; `None` if no chain did.
    """

    name: str
    scope: Scope = Scope.LEAF
    needs: str = "tree"
    facts: Facts = field(default_factory=Facts)
    init_fn: Callable[[Leaves, Layout], TransformState] = no_state
    prepare_fn: Callable[..., Prepared] = nothing_to_prepare
    update_fn: Callable[..., tuple[Leaves, TransformState]] = pass_through
    view_fn: ViewOf = no_view
    through: Through | None = None
    parts: tuple[Transform, ...] = ()
    in_turn: bool = False
    members_fn: Callable[[Layout], dict[str, tuple[Transform, set[str]]]] | None = None
    hands_out: Callable[..., tuple[Leaves, TransformState]] | None = None
    named_fn: Callable[[str], Transform] | None = None
    factory: Callable[..., Transform] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    _forms: dict[Layout, Form] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        # Every transform that is made or renamed is checked, so the message is made only after a check has failed.
        if self.needs not in NEEDS or type(self.scope) is not Scope or type(self.name) is not str or not self.name:
            raise ValueError(_misnamed(self.name, self.scope, self.needs))

    def named(self, name: str) -> Transform:
        """The same transform under another name, which is the key of its state and its metrics."""
        if not isinstance(name, str) or not name or "." in name:
            why = "a name is a non-empty str without dots, since dots separate paths"
            raise ValueError(explain(f"{self.name}(...).named({name!r})", why, f'{self.name}(...).named("first")'))
        return self.renamed(name, None)

    def renamed(self, name: str, base: str | None) -> Transform:
        """As `named`; `base` is its name before a chain gave it a number."""
        if self.named_fn is None or name == self.name:
            return replace(self, name=name, base=base)
        other = self.named_fn(name)
        named = {key: getattr(other, key) for key in ("facts", "prepare_fn", "members_fn")}
        return replace(self, name=name, base=base, **named)

    @property
    def members(self) -> tuple[Transform, ...]:
        """The transforms of a chain; any other transform alone."""
        return self.parts if self.in_turn else (self,)

    def members_by_key(self, layout: Layout) -> dict[str, tuple[Transform, set[str]]]:
        """The result of `members_fn` by the keys of the members' states; empty if leaves are not passed to members.

        The prefix of a member's metrics is a name, a dot, the key and a dot.
        """
        found = {} if self.members_fn is None else self.members_fn(layout)
        return {prefix.partition(".")[2].removesuffix("."): member for prefix, member in found.items()}

    @property
    def idle(self) -> bool:
        """Whether its update half has nothing to do."""
        return self.update_fn is pass_through and self.prepare_fn is nothing_to_prepare

    def init(self, params: Tree) -> TransformState:
        """The transform's own state for a tree of parameters; `zf.init` does it for a pipeline."""
        layout, leaves = make_layout(params)
        check_own_memory(f"{self.name}.init(params)", leaves)
        made = [self.init_fn(leaves, layout)]
        return own_start(made) if self.facts.keeps else made[0]

    def update(self, grads: Tree, state: TransformState, params: Tree) -> tuple[Tree, TransformState]:
        """One micro-step of this transform alone: `(grads, state, params) -> (grads | None, state)`.

        `None` means *held*: nothing to apply yet. The result of an optimizer must be *added* to the
        parameters, as in optax and torchopt. It writes none of its arguments. It can be differentiated inside of
        torch.func, and by plain autograd if gradients, the state or its arguments require grad.
        """
        layout, leaves = make_layout(params)
        self._check_fits(state, layout, leaves)
        entries = split_grads(layout, grads)
        numbers = [x for _, x in number_tensors(self)]
        record = recorded((*entries.values(), *flatten(state)[0], *numbers))
        if not record:
            # Parameters of a model require grad. Without them a result requires grad only if a user's function takes a
            # tensor from elsewhere.
            leaves = {path: x.detach() for path, x in leaves.items()}
        unrecorded = RECORDED if not record and torch.is_grad_enabled() else ""
        ctx = Context(layout, recorded=record, unrecorded=unrecorded)
        wrong = [(p, r) for p, g in entries.items() if (r := misshapen(g, leaves[p].shape) or unreadable(g, leaves[p]))]
        if wrong:
            raise ValueError(bad_leaves("gradients do not fit the parameters", wrong, READABLE))
        prepared = own_prepared(self.prepare_fn(state, entries, leaves, ctx), state, entries, leaves, ctx)
        returned = self.update_fn(entries, state, leaves, prepared.carry, ctx)
        # A transform with members returns what they return, or holds if one of them does. Its own facts do not tell.
        if not self.parts:
            returned = check_returned(self.name, self.facts, returned, entries, leaves, held=state)
        out, own = own_update(self.facts.optimizes, returned, state, entries, leaves, prepared.carry)
        ctx.wait_for_copies()
        state = {**state, **own, **prepared.state}
        if out is None or (isinstance(prepared.emit, bool) and not prepared.emit):
            return None, state
        if gives_parameters(self):
            out = {path: new - leaves[path] for path, new in out.items()}
        return layout.join(out), state

    def _check_fits(self, state: TransformState, layout: Layout, leaves: Leaves) -> None:
        """Refuse a state of this transform alone that has other shapes, dtypes or devices than `init` makes."""
        if torch.compiler.is_compiling():
            return
        if layout not in self._forms:
            empty = {path: torch.empty_like(x, device="meta", requires_grad=False) for path, x in leaves.items()}
            self._forms[layout] = Form.of({self.name: lambda: self.init_fn(empty, layout)})
        found = {self.name: state}
        rows = self._forms[layout].misfits(found, layout.every, grows=lambda owner: self.facts.adds)
        if rows := rows or elsewhere(found, leaves):
            right = "a state of transform.init(params), or of update, of these parameters"
            raise ValueError(bad_leaves(f"{self.name}.update: the state does not fit", rows, right))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transform) or self._identity() != other._identity():
            return False
        (mine, form), (theirs, other_form) = flatten(dict(self.config)), flatten(dict(other.config))
        return form == other_form and all(map(_equal, mine, theirs))

    def __hash__(self) -> int:
        return hash((self.name, self.factory, self.parts))

    def _identity(self) -> tuple:
        # The names of numbered members in a longer chain depend on the names they had before.
        return self.name, self.base, self.factory, self.parts

    def __repr__(self) -> str:
        if self.in_turn:
            inner = ",\n".join(map(repr, self.parts))
            return "chain(\n    " + inner.replace("\n", "\n    ") + ",\n)"
        given = {k: (_show(v), _has_transforms(v)) for k, v in self._given().items()}
        if any([lines for _, lines in given.values()]):
            rows = "".join([f"{k}={shown},\n" for k, (shown, _) in given.items()])
            arguments = "\n" + indent(rows, "    ")
        else:
            arguments = ", ".join([f"{k}={shown}" for k, (shown, _) in given.items()])
        function = getattr(self.factory, "__name__", self.name)
        name = self.base or self.name
        suffix = "" if name in (function, *[p.base or p.name for p in self.parts]) else f".named({name!r})"
        return f"{function}({arguments}){suffix}"

    def _given(self) -> dict[str, Any]:
        """The arguments that differ from the defaults."""
        known = {} if self.factory is None else inspect.signature(self.factory).parameters
        given = dict(self.config)
        for name, value in self.config.items():
            default = known[name].default if name in known else inspect.Parameter.empty
            # Types are compared too: `True == 1`, but they are written differently.
            if value is default or (type(value) is type(default) and _equal(value, default)):
                del given[name]
        return given

    def _repr_html_(self) -> str:
        # Only notebooks need this module.
        from .html import card, road

        # Each box shows the arguments, which are the text between the brackets of `adamw(lr=0.1)`.
        parts = [(part.name, repr(part).partition("(")[2].rpartition(")")[0]) for part in self.members]
        return card("a chain", road([("model", ""), *parts, ("state", "")]), text=repr(self))

    def __reduce__(self):
        return _rebuild, (self.factory, dict(self.config), self.name, self.parts, self.base)


def _misnamed(name: Any, scope: Any, needs: Any) -> str:
    """The fault in the name, the scope or the needs of a new transform; empty if there is none."""
    if type(name) is not str or not name:
        why, right = "a name is a non-empty str: the key of its state and of its metrics", "Transform('mine', ...)"
        return explain(f"Transform({name!r}, ...)", why, right)
    if type(scope) is not Scope:
        why = f"a scope is a member of Scope: {', '.join(f'Scope.{x.name}' for x in Scope)}"
        return explain(f"Transform({name!r}, scope={scope!r})", why, f"Transform({name!r}, Scope.LEAF, ...)")
    close = get_close_matches(str(needs), NEEDS, n=1)
    why = f"it says how much an update must see, and is one of {', '.join(map(repr, NEEDS))}"
    right = f"Transform({name!r}, needs={(close or NEEDS)[0]!r}, ...)"
    return explain(f"Transform({name!r}, needs={needs!r})", why, right)


def _rebuild(
    factory: Callable, config: dict[str, Any], name: str, parts: tuple[Transform, ...], base: str | None = None
) -> Transform:
    built = factory.__rebuild__(config, parts)  # type: ignore[attr-defined]
    return built.renamed(name, base)


def _equal(a: Any, b: Any) -> bool:
    """Whether two arguments are equal; tensors by all of their numbers."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.shape == b.shape and bool((a == b).all()))
    return a is b or bool(a == b)  # `is` comes first: NaN is not equal to itself


def _has_transforms(value: Any) -> bool:
    """Whether `value` is a dict with a transform in it, which prints with one entry per line."""
    return isinstance(value, Mapping) and any([isinstance(x, Transform) for x in value.values()])


def _show(value: Any) -> str:
    if isinstance(value, torch.dtype | Transform):
        return repr(value)
    if _has_transforms(value):
        rows = "".join([f"{label!r}: {_show(x)},\n" for label, x in value.items()])
        return "{\n" + indent(rows, "    ") + "}"
    return getattr(value, "__qualname__", None) or repr(value)


def gives_parameters(t: Transform) -> bool:
    """Whether a transform returns new parameters rather than gradients."""
    return t.facts.optimizes or (t.in_turn and any(map(gives_parameters, t.parts)))


def number_tensors(t: Transform) -> tuple[tuple[str, Tensor], ...]:
    """The tensors among the arguments of a transform and of those inside of it, each with its name in the code."""
    found = [entry for part in t.members for entry in _number_tensors_of(part)]
    return tuple({id(x): (name, x) for name, x in reversed(found)}.values())


def _number_tensors_of(t: Transform) -> Iterator[tuple[str, Tensor]]:
    for name, value in t.config.items():
        if isinstance(value, Tensor):
            yield f"{t.name}({name}=...)", value
        elif isinstance(value, dict | list | tuple):
            for path, x in zip(tree_paths(value), flatten(value)[0], strict=True):
                if isinstance(x, Tensor):
                    yield f"{t.name}({name}=...).{path}", x
    for part in t.parts:
        yield from (entry for one in part.members for entry in _number_tensors_of(one))
