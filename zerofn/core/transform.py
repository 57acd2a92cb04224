"""The one abstraction: a `Transform` with a view half and an update half, and what both are handed.

Vocabulary used everywhere. *stored*: as the state keeps a parameter (a shard, a master copy).
*seen*: as the model gets it. A *leaf* is one distinct parameter, named by its path. A *step* is an
optimizer step (an update that was applied); a *micro-step* is one call of `update`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from .._errors import bad_leaves
from ..kernels.recording import readable, recorded
from .gradients import READABLE, misshapen, split_grads, unreadable
from .pictures import road
from .spec import Through
from .tree import Layout, Leaves, Tree, flatten, make_layout, unflatten
from .views import ViewOf, no_view

# A transform's state: shared 0-d tensors by name, and per-leaf tensors by name and path.
TransformState = dict[str, Any]
Schedule = Callable[[Any], Any]
ScalarOrSchedule = float | Tensor | Schedule


@dataclass(frozen=True)
class Facts:
    """What others may know of a transform without knowing which it is. What holds others declares it for all of them.

    Attributes:
        optimizes: what leaves it is new parameters.
        watches: it looks at new parameters.
        window: micro-steps that it adds up before one goes on; 1 where it holds none back.
        weighted: whether those are weighted.
        adds: what leaves it is added to the parameters where nothing else makes new ones.
        directs: what leaves it is the direction of a step, which is no gradient any more.
        rate: the learning rate that `opt.param_groups` shows and sets; `None` where there is none.
        settable: hyperparameters that `opt.param_groups` shows and sets besides, each with its value.
        reports: metrics of the whole gradient that it shows, which the pipeline then need not; and counts of its own.
            In a step that does not reach it each is 0, or what its state has under that name.
    """

    optimizes: bool = False
    watches: bool = False
    window: int = 1
    weighted: bool = False
    adds: bool = False
    directs: bool = False
    rate: Any = None
    settable: tuple[tuple[str, Any], ...] = ()
    reports: frozenset[str] = frozenset()

    @property
    def holds(self) -> bool:
        """Whether it keeps gradients for a later micro-step."""
        return self.window > 1 or self.weighted


class Scope(Enum):
    """How much of the tree an update half must see at once."""

    LEAF = "each leaf alone"
    TREE = "one look at the whole tree, then each leaf alone"
    WHOLE = "the whole tree"


# How much an update must see to be right, from least to most: an element; an element and a number of the whole tree
# that is reduced over ranks (a norm, an overflow); a row of the first dimension; a leaf; the tree. `Scope` says how
# much the executor hands over at once on one rank, and this what of it a rank must have whole.
NEEDS = ("element", "number", "row", "leaf", "tree")

# What is right where leaves are cut over ranks, flat, in ranges that may begin anywhere.
OF_PIECES = ("element", "number")

# What is right at the owner of a leaf; the first of them where a rank has whole rows, too.
OF_LEAVES = ("row", "leaf")


def most(needs: Iterable[str]) -> str:
    """What a transform needs that holds others with these needs.

    >>> most(["element", "leaf", "number"]), most([])
    ('leaf', 'element')
    """
    return max(needs, key=NEEDS.index, default="element")


class Reduction(Protocol):
    """Scalars over every rank that holds a part of the gradient."""

    def sum(self, x: Tensor) -> Tensor:
        """Sum over shards; replicas count once. Where the model itself is cut only `total` knows what counts."""
        ...

    def total(self, number: Callable[[Leaves], Tensor], leaves: Leaves) -> Tensor:
        """The sum of a number of leaves, itself a sum over elements, in which every element of every rank is once."""
        ...

    def mean(self, x: Tensor) -> Tensor:
        """Mean over all ranks."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Maximum over all ranks."""
        ...

    def replicate(self, x: Tensor) -> Tensor:
        """`x`, which is the same on all ranks, for use with a shard: its derivative adds up over shards."""
        ...


class OneProcess:
    """The reduction of a world of one."""

    def sum(self, x: Tensor) -> Tensor:
        return x

    def total(self, number: Callable[[Leaves], Tensor], leaves: Leaves) -> Tensor:
        return number(leaves)

    def mean(self, x: Tensor) -> Tensor:
        return x

    def max(self, x: Tensor) -> Tensor:
        return x

    def replicate(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Context:
    """What every update half is handed besides its own arguments.

    Attributes:
        layout: structure of the parameters.
        donate: whether state and parameters may be written in place. Gradients never are.
        donate_to_kernels: whether kernels may write in place where `donate` is false: in a graph, and in a batch the
            memory of its members. It is donated, and nothing new is still to be chosen from what was and what is.
        recorded: whether torch.func, the compiler or autograd records what is computed. Then nothing is written, no
            kernel is called that they do not know, and numbers may be tensors that Python cannot read.
        weight: weight of this micro-batch, for instance its number of tokens.
        boundary: overrides whether the accumulation window closes now.
        averaged: whether accumulated gradients are divided; if not, the caller has divided the losses.
        lr: learning rates set from outside, by the prefix under which the optimizer stands.
        numbers: other hyperparameters set from outside, by the same prefix and by name.
        offsets: global index of the first stored element of a leaf, where this rank has a shard of it.
        reduction: sums of scalars over ranks.
        micro_step: micro-steps before this one, for messages.
        metrics: filled by `report`.
        comes: whether anything comes to this transform, or the step is held before it: a tensor in a graph or a batch.
        standing: by name, what `report` shows of it in a step that is held before it.
        under_way: filled by `before_the_end`.
        prefix: where a nested transform stands, for instance ``"partition.decay."``.
    """

    layout: Layout
    donate: bool = False
    donate_to_kernels: bool = False
    recorded: bool = False
    weight: Any = None
    boundary: bool | None = None
    averaged: bool = True
    lr: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    reduction: Reduction = field(default_factory=OneProcess)
    micro_step: Any = 0
    metrics: dict[str, Tensor] = field(default_factory=dict)
    comes: bool | Tensor = True
    standing: Mapping[str, Any] = field(default_factory=dict)
    under_way: list[Callable[[], None]] = field(default_factory=list)
    prefix: str = ""

    def own(self, x: Tensor) -> Tensor:
        """A tensor that may be written: `x` itself when donated, else a copy."""
        return x if self.donate else x.clone()

    def owned(self, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors that may be written, as `own`."""
        return tensors if self.donate else [x.clone() for x in tensors]

    def into(self, old: Tensor, new: Tensor) -> Tensor:
        """The value `new` of a tensor that was `old`: in the memory of `old` when donated, else `new` itself."""
        return old.copy_(new) if self.donate else new

    def number(self, x: Tensor) -> Any:
        """The Python number in a 0-d tensor that is computed with; the tensor itself where that is recorded."""
        return x if self.recorded else x.item()

    def read(self, x: Tensor) -> Any:
        """The Python number in a 0-d tensor that nobody differentiates; the tensor where Python cannot read it."""
        return number(x) if self.recorded else x.item()

    def replicated(self, x: Any) -> Any:
        """A number that all ranks hold, a rate or a norm, for use with what each rank has of a leaf.

        A derivative by it then adds up over ranks. Anything but a tensor is as it is.
        """
        return self.reduction.replicate(x) if self.recorded and isinstance(x, Tensor) else x

    def total(self, number: Callable[[Leaves], Tensor], leaves: Leaves) -> Tensor:
        """A number of the whole tree that is a sum over elements: `ctx.total(squared_norm, grads)`.

        Over all ranks, and every element once, whoever has it: also where the model itself is cut over ranks.
        """
        return self.reduction.total(number, leaves)

    def report(self, name: str, value: Any) -> None:
        """Show a number in the step's metrics; of several of one name the first, which is before any clipping."""
        if isinstance(value, float):
            # A rate of 0.001 has other digits in a default dtype of 16 bits.
            value = torch.full((), value, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
        value = torch.as_tensor(value)
        if isinstance(self.comes, Tensor) and name in self.standing:
            held = torch.as_tensor(self.standing[name], dtype=value.dtype, device=value.device)
            value = torch.where(self.comes.to(value.device), value, held)
        self.metrics.setdefault(self.prefix + name, value)

    def before_the_end(self, wait: Callable[[], None]) -> None:
        """Have `wait` called before anyone gets the new state: a copy into it is still under way."""
        self.under_way.append(wait)

    def settle(self) -> None:
        """Wait for all that is under way."""
        while self.under_way:
            self.under_way.pop()()

    def inside(self, name: str) -> Context:
        """The context of a transform nested in `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")


@dataclass(frozen=True)
class Prepared:
    """What a transform decides once per call, before it sees leaves one by one.

    Attributes:
        carry: handed to the update of every leaf.
        state: the shared entries of its state that change.
        emit: whether anything goes on to the right. A 0-d bool tensor under `vmap`.
        close: called once all leaves have been updated, for a number of the whole tree that only metrics show. What
            is looked at bucket by bucket is in the cache for the update that follows.
    """

    carry: Any = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    emit: bool | Tensor = True
    close: Callable[[], None] | None = None


def no_state(leaves: Leaves, layout: Layout) -> TransformState:
    """The `init` of a transform without state."""
    return {}


def nothing_to_prepare(state: TransformState, grads: Leaves | None, params: Leaves, ctx: Context) -> Prepared:
    """The `prepare` of a transform that treats each leaf alone and has no shared state."""
    return Prepared()


def pass_through(
    grads: Leaves, state: TransformState, params: Leaves, carry: Any, ctx: Context
) -> tuple[Leaves, TransformState]:
    """The `update` of a transform that only has a view, or only watches."""
    return grads, state


@dataclass(frozen=True, eq=False, repr=False)
class Transform:
    """A pair of pure functions: how parameters are seen, and what becomes of their gradients.

    Built by functions such as `zf.adamw`; a transform of one's own by `zf.leafwise`. It compares,
    prints and pickles by the function that built it and that function's arguments.

    Attributes:
        name: unique in a chain; the key of its state.
        facts: what others may know of it.
        scope: how much of the tree the update must see at once.
        needs: how much an update must see to be right, one of `NEEDS`. What is not in `OF_PIECES` is refused where
            leaves are cut, so one that says nothing is never handed a piece.
        view_fn: its view half for a layout, `None` where it has none there.
        through: what it does to a gradient's `Spec`, and where it cannot stand; by its facts, if it says nothing.
        parts: the members of a chain, or the one that is wrapped.
        in_turn: whether its update is that of its parts, one after the other: a chain.
        members_fn: of a transform that hands different leaves to different members: prefix of the
            member's metrics to the member and the paths of its leaves.
        named_fn: of a transform whose metrics have its name in them: the same under another one.
        joins: of the transforms that follow it: one that gives what it and the first so many of them give one after
            the other, and how many. Its state has their entries, by their names.
        base: its name before a chain gave it a number; `None` where none did.
    """

    name: str
    scope: Scope = Scope.LEAF
    needs: str = "tree"
    facts: Facts = Facts()
    init_fn: Callable[[Leaves, Layout], TransformState] = no_state
    prepare_fn: Callable[..., Prepared] = nothing_to_prepare
    update_fn: Callable[..., tuple[Leaves, TransformState]] = pass_through
    view_fn: ViewOf = no_view
    through: Through | None = None
    parts: tuple[Transform, ...] = ()
    in_turn: bool = False
    members_fn: Callable[[Layout], dict[str, tuple[Transform, set[str]]]] | None = None
    named_fn: Callable[[str], Transform] | None = None
    joins: Callable[[Sequence[Transform]], tuple[Transform, int] | None] | None = None
    factory: Callable[..., Transform] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None

    def named(self, name: str) -> Transform:
        """The same transform under another name, which is the key of its state and its metrics."""
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"named({name!r}): a name is a non-empty str without dots, since dots separate paths.")
        return self.renamed(name, None)

    def renamed(self, name: str, base: str | None) -> Transform:
        """As `named`; `base` is what it was called before a chain gave it a number."""
        if self.named_fn is None or name == self.name:
            return replace(self, name=name, base=base)
        other = self.named_fn(name)
        return replace(self, name=name, base=base, prepare_fn=other.prepare_fn, members_fn=other.members_fn)

    @property
    def members(self) -> tuple[Transform, ...]:
        """The transforms of a chain; of any other transform itself."""
        return self.parts if self.in_turn else (self,)

    @property
    def idle(self) -> bool:
        """Whether its update half has nothing to do."""
        return self.update_fn is pass_through and self.prepare_fn is nothing_to_prepare

    def init(self, params: Tree) -> TransformState:
        """The transform's own state for a tree of parameters; `zf.init` does it for a pipeline."""
        layout, leaves = make_layout(params)
        return self.init_fn(leaves, layout)

    def update(self, grads: Tree, state: TransformState, params: Tree) -> tuple[Tree, TransformState]:
        """One micro-step of this transform alone: `(grads, state, params) -> (grads | None, state)`.

        `None` means *held*: nothing to apply yet. What an optimizer returns is to be *added* to the
        parameters, as in optax and torchopt. Writes none of its arguments. It can be differentiated inside of
        torch.func, and by plain autograd where gradients or the state require grad.
        """
        layout, leaves = make_layout(params)
        entries = split_grads(layout, grads)
        ctx = Context(layout, recorded=recorded((*entries.values(), *flatten(state)[0])))
        wrong = [(p, r) for p, g in entries.items() if (r := misshapen(g, leaves[p].shape) or unreadable(g, leaves[p]))]
        if wrong:
            raise ValueError(bad_leaves("gradients do not fit the parameters", wrong, READABLE))
        with torch.set_grad_enabled(ctx.recorded and torch.is_grad_enabled()):
            prepared = self.prepare_fn(state, entries, leaves, ctx)
            out, own = self.update_fn(entries, state, leaves, prepared.carry, ctx)
        ctx.settle()
        state = {**state, **own, **prepared.state}
        if out is None or (isinstance(prepared.emit, bool) and not prepared.emit):
            return None, state
        if gives_parameters(self):
            out = {path: new - leaves[path] for path, new in out.items()}
        return layout.join(out), state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transform) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((self.name, self.factory, self.parts))

    def _identity(self) -> tuple:
        # What numbered members are called in a longer chain depends on the name they had before.
        return self.name, self.base, self.factory, dict(self.config), self.parts

    def __repr__(self) -> str:
        if self.in_turn:
            inner = ",\n".join(map(repr, self.parts))
            return "chain(\n    " + inner.replace("\n", "\n    ") + ",\n)"
        arguments = ", ".join([f"{k}={_show(v)}" for k, v in self._given().items()])
        function = getattr(self.factory, "__name__", self.name)
        name = self.base or self.name
        suffix = "" if name in (function, *[p.base or p.name for p in self.parts]) else f".named({name!r})"
        return f"{function}({arguments}){suffix}"

    def _given(self) -> dict[str, Any]:
        """The arguments that are not what they would be if one left them out."""
        known = {} if self.factory is None else inspect.signature(self.factory).parameters
        given = dict(self.config)
        for name, value in self.config.items():
            if name in known and (value is known[name].default or _same(value, known[name].default)):
                del given[name]
        return given

    def _repr_html_(self) -> str:
        parts = self.parts if self.in_turn else (self,)
        return road(
            [("model", "what the model sees"), *((p.name, repr(p)) for p in parts), ("state", "what is stored")]
        )

    def __reduce__(self):
        return _rebuild, (self.factory, dict(self.config), self.name, self.parts, self.base)


def _rebuild(
    factory: Callable, config: dict[str, Any], name: str, parts: tuple[Transform, ...], base: str | None = None
) -> Transform:
    built = factory.__rebuild__(config, parts)  # type: ignore[attr-defined]
    return built.renamed(name, base)


def _same(value: Any, default: Any) -> bool:
    """Whether two arguments are equal; a tensor is never a default."""
    return type(value) is type(default) and not isinstance(value, Tensor) and value == default


def _show(value: Any) -> str:
    if isinstance(value, torch.dtype | Transform):
        return repr(value)
    return getattr(value, "__qualname__", None) or repr(value)


def gives_parameters(t: Transform) -> bool:
    """Whether what leaves the transform is new parameters rather than gradients."""
    return t.facts.optimizes or (t.in_turn and any(map(gives_parameters, t.parts)))


def concrete(x: Any) -> bool:
    """Whether Python may branch on `x`: not where it differs along a batch, or while a graph is made."""
    return readable(x)


def number(x: Tensor) -> Any:
    """The Python number in a 0-d tensor; the tensor itself where Python cannot read it."""
    return x.item() if readable(x) else x


def select(pred: bool | Tensor, new: Any, old: Any) -> Any:
    """`new` where `pred`, else `old`, over two trees of tensors of one structure.

    A choice, never a product with zero: NaN in the branch not taken must not come through.
    """
    if isinstance(pred, bool):
        return new if pred else old
    news, spec = flatten(new)
    olds, _ = flatten(old)
    return unflatten(spec, [torch.where(pred, n, o) for n, o in zip(news, olds, strict=True)])
