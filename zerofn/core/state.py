"""`State`: parameters, the transforms' states and the step, as one pytree; and what was donated or half written."""

from __future__ import annotations

from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    MutableMapping,
    ValuesView,
)
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from .._compat.functorch import innermost, innermost_transform, is_wrapped, register_pytree_node
from .._compat.saved_states import state_from
from .._errors import bad_leaves, explain, kind_of
from .._interrupts import Writing
from ..kernels.recording import recorded
from .facts import AVERAGE
from .layout import Layout, Leaf, Leaves, as_plain, from_plain
from .transform import TransformState
from .tree import Tree, named, nested, register_global

# ----------------------------------------------------------------------------------------------------------------------
# A mark says what has happened to the memory of a state: donated to the next one, or half written by a step that
# raised.
#
# The mark is an attribute of the counter `micro_step`. Each state has a counter of its own; the states of a batch, and
# those that a step under `vmap` is given, share one.


class Fate(Enum):
    """What has happened to the memory of a state: donated, or half written."""

    NONE = auto()
    DONATED = auto()  # the next state is in it
    TORN = auto()  # the step, or the load, that wrote into it has raised


def mark(micro_step: Tensor, fate: Fate) -> None:
    """Mark the memory of the state that has this counter."""
    mine: Any = innermost(micro_step)
    mine._zerofn_fate = fate.name  # text, which torch.load accepts by default


def check_usable(micro_step: Tensor, where: str) -> None:
    """Raise a RuntimeError if the memory of the state that has this counter was donated, or is half written."""
    mine = micro_step if innermost_transform() is None else innermost(micro_step)
    fate = getattr(mine, "_zerofn_fate", Fate.NONE.name)
    if fate == Fate.DONATED.name:
        raise RuntimeError(
            explain(
                f"{where} of a state that was donated",
                "a step with donate=True has written the next state into its memory",
                "state, metrics = step(state, *batch), and no use of the old one;\n"
                "zf.make_step(loss_fn, tx), without donate, to keep both",
            )
        )
    if fate == Fate.TORN.name:
        raise RuntimeError(
            explain(
                f"{where} of a state into which a step or a load was writing when it raised",
                "some leaves or sums have their new values, the others and the counters their old ones",
                "zf.load(directory, like=...) to go back to a checkpoint;\n"
                "zf.make_step(loss_fn, tx), without donate, where a step may raise: it leaves its state alone",
            )
        )


# ----------------------------------------------------------------------------------------------------------------------
# `LeafTensors` shows the tensors that transforms keep for one leaf under the names of `torch.optim`:
# `opt.state[p]["exp_avg"]`.


class LeafTensors(MutableMapping[str, Any]):
    """The tensors that belong to one leaf, by name. Assigning one copies it into the state.

    A name is that of the slot, `"exp_avg"`. If several transforms have a slot of that name, the transform's name comes
    first: `"adamw.average"`, `"ema.average"`. Counters of a whole transform, such as `step`, belong to no leaf.

    Args:
        transforms: the states of all transforms, by name.
        path: the path of the leaf.
        paths: the paths of all leaves.
        shown: a function that returns the form in which a tensor is shown; by default the tensor itself.
    """

    def __init__(
        self,
        transforms: Mapping[str, Any],
        path: str,
        paths: AbstractSet[str],
        shown: Callable[[Any], Any] | None = None,
    ):
        self._path, self._shown = path, shown
        found = [
            ((name, *at.slot.split("/"), *filter(None, at.below.split("/"))), x)
            for name, own in transforms.items()
            for at, x in named(own, paths)
            if at.path == path
        ]
        times = Counter(keys[-1] for keys, _ in found)
        self._tensors = {keys[-1] if times[keys[-1]] == 1 else ".".join(keys): x for keys, x in found}
        self._own: Mapping[str, str] = {}

    def renamed(self, names: Mapping[str, str], more: Mapping[str, Any]) -> LeafTensors:
        """The same tensors under other names, which are added to those that they have.

        Args:
            names: from the names that are listed to those of now, in the order in which they are listed.
            more: what is listed besides.
        """
        self._own = {own: name for name, own in names.items()}
        self._tensors = {**{name: self._tensors[own] for name, own in names.items()}, **more}
        return self

    def __getitem__(self, name: str) -> Any:
        x = self._tensors[self._own.get(name, name)]
        return x if self._shown is None else self._shown(x)

    def __setitem__(self, name: str, value: Any) -> None:
        self.check(name, value)
        mine = self[name]
        if mine is not value:
            with torch.no_grad():
                mine.copy_(value)

    def check(self, name: str, value: Any) -> None:
        """Raise a `ValueError` if a value cannot be assigned."""
        mine = self.get(name)
        if mine is value and mine is not None:
            return
        if not isinstance(mine, Tensor) or not isinstance(value, Tensor) or mine.shape != value.shape:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
            held = {k: tuple(x.shape) if isinstance(x, Tensor) else kind_of(x) for k, x in self.items()}
            why = f"the pipeline keeps {held or 'nothing'} for {self._path}, and their shapes cannot change"
            wrong = f"opt.state[{self._path}][{name!r}] = {what}"
            raise ValueError(explain(wrong, why, "a tensor of that shape, under one of these names"))

    def __delitem__(self, name: str) -> None:
        wrong, why = f"del opt.state[{self._path}][{name!r}]", "a state has the entries that its transforms have made"
        raise TypeError(explain(wrong, why, f"opt.state[{self._path}][{name!r}].zero_()"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return repr(dict(self))


def entries_stay(wrong: str) -> TypeError:
    """The error for taking an entry out of a state."""
    why = "a state has, for every parameter, the entries that its transforms have made"
    right = "opt.state of an attached model, whose entries begin anew; here zf.init(tx, state.params)"
    return TypeError(explain(wrong, why, right))


def assign(mine: LeafTensors, given: Any) -> None:
    """Copy all values of another mapping with the same names. On an error nothing is changed."""
    if not isinstance(given, Mapping) or set(given) != set(mine):
        what = f"{sorted(map(str, given))}" if isinstance(given, Mapping) else kind_of(given)
        why = f"the pipeline keeps {sorted(mine)} for this parameter"
        raise ValueError(explain(f"opt.state[parameter] = {what}", why, "a dict with these names, each a tensor"))
    for name, x in given.items():
        mine.check(name, x)
    for name, x in given.items():
        mine[name] = x


# ----------------------------------------------------------------------------------------------------------------------
# A `State` is everything a run consists of, as one tree of tensors.


def counter(x: int = 0) -> Tensor:
    """A counter of the state. It lives on the CPU, so that reading it never waits for a GPU."""
    return torch.tensor(x, dtype=torch.int64)


def check_replaced(tx: Any) -> None:
    """Refuse new parameters of a state whose chain starts an update from a copy of them: that copy would win.

    A model that is attached notices what is written into it. A state does not.

    Raises:
        ValueError: the transform and its slot are named.
    """
    for part in tx.parts:
        check_replaced(part)
    slots = [x.slot for x in tx.facts.shadows if not x.residual and x.due is None]
    if tx.facts.optimizes and slots:
        # A wrapper has the name of what it wraps.
        name = tx.name if tx.factory is None else tx.factory.__name__
        why = f"{name} starts the next update from a copy of them ({slots[0]!r}), so the new ones would be lost"
        right = "zf.init(tx, params) for a state that begins with them; or zf.attach(model, tx), where a write into a\n"
        right += "parameter is followed"
        raise ValueError(explain(f"state.replace(params=...) of a state of {name}", why, right))


@dataclass(frozen=True, eq=False)
class State:
    """Stored parameters, the state of every transform, and counters: a node for optree and for torch.func.

    Its structure, dtypes and shapes depend on the parameters and the transforms alone, so states
    stack: `torch.func.vmap(step)` over a stacked state trains an ensemble.

    It is also a mapping, as `opt.state` is in `torch.optim`: from each parameter to a dict of the tensors that
    transforms keep for it, `opt.state[model.weight]["exp_avg"]`. Assigning one copies it into the state.

    Attributes:
        leaves: stored parameters by path, tied ones once.
        transforms: the state of each transform by its name.
        step: optimizer steps applied, 0-d int64.
        micro_step: calls of `update`, 0-d int64.
        layout: the structure in which the parameters were given; not a node of the tree.
    """

    leaves: Leaves
    transforms: dict[str, TransformState]
    step: Tensor
    micro_step: Tensor
    layout: Layout
    # The pending copies into `transforms` of a `StateUnderWay`, the last one of each queue.
    _copies: tuple[Any, ...] = ()
    _parameters: Leaves | None = None
    _shown: Callable[[Any], Any] | None = None
    _named: Callable[[str, LeafTensors], LeafTensors] | None = None
    _restart: Callable[[list[str]], None] | None = None
    # The chain whose `init` or step has made this state, or for which its form was checked (`fitting`). A state that is
    # made otherwise has none: by `dataclasses.replace`, a copy, a pickle, a map over trees.
    _fits: Any = field(default=None, init=False, repr=False)
    # Whether parameters were replaced, of a state without such a chain: the next function that has a chain looks.
    _replaced: bool = field(default=False, init=False, repr=False)

    def fitting(self, tx: Any) -> State:
        """This state, marked as one that has the form which this chain makes. The compiler must not trace this."""
        object.__setattr__(self, "_fits", tx)
        return self

    @property
    def arriving(self) -> dict[str, TransformState]:
        """As `transforms`, but without waiting on the host for copies into the states of transforms.

        A copy may not have ended, so only a step may use these tensors. The step makes the device wait for the copies.
        """
        return self.transforms

    @contextmanager
    def given_away(self, written: Collection[str] | Writing) -> Iterator[None]:
        """Mark that the memory of this state belongs to the next one, unless the `with` block raises before it writes.

        Args:
            written: `Context.written` of the step in the `with` block. It is empty until the step begins to write.
        """
        try:
            mark(self.micro_step, Fate.DONATED)
            yield
        except BaseException:
            mark(self.micro_step, Fate.TORN if written else Fate.NONE)
            raise

    def become(self, new: State) -> None:
        """Replace the contents of this state by those of `new`, a state that a step made in this state's memory.

        A step calls `become` if Ctrl-C keeps it from returning `new`. The user then has only this object, and would
        otherwise lose the run. No other function replaces the frozen fields of a state.
        """
        object.__setattr__(self, "__class__", type(new))
        vars(self).update(vars(new))

    def check_usable(self, where: str) -> None:
        """Raise a RuntimeError if the state's memory was donated or is half written. The compiler must not trace this.

        Args:
            where: the use, for the message.
        """
        check_usable(self.micro_step, where)

    def check_data(self, where: str) -> None:
        """Raise a ValueError if parameters are meta tensors: a step would raise the counters and train nothing.

        Args:
            where: the use, for the message.
        """
        if any([x.is_meta for x in self.leaves.values()]):
            bad = [(p, f"{tuple(x.shape)} {x.dtype} without data") for p, x in self.leaves.items() if x.is_meta]
            right = "state = zf.init(tx, params) with parameters on a device; zf.plan(tx, params) for the sizes alone"
            raise ValueError(bad_leaves(f"{where} of a state on the meta device", bad, right))

    @property
    def params(self) -> Tree:
        """The stored parameters in the structure of the given ones; if they are sharded, this rank's flat shards.

        Each call returns a new tree with the tensors of the state: `state.params["w"].copy_(w)` under
        `torch.no_grad()` writes into the state, `state.params["w"] = w` into a dict that nobody keeps.
        """
        return self.layout.join(self.leaves)

    def keyed_by(
        self,
        parameters: Leaves,
        shown: Callable[[Any], Any] | None = None,
        named: Callable[[str, LeafTensors], LeafTensors] | None = None,
        restart: Callable[[list[str]], None] | None = None,
    ) -> State:
        """The same state as a mapping from these tensors, for a model whose parameters are not the stored ones.

        Args:
            parameters: the tensors that are the keys of the mapping, by path.
            shown: a function that gets a tensor of the state and returns the form in which the mapping shows it, on the
                same memory.
            named: a function that gets the path and the tensors of a leaf, and returns the tensors under other names.
            restart: a function that gets paths, and writes first values over the optimizers' entries of these leaves.
        """
        return replace(self, _parameters=parameters, _shown=shown, _named=named, _restart=restart)

    def _paths(self) -> dict[Tensor, str]:
        """The path of each trainable parameter."""
        keys = self.leaves if self._parameters is None else self._parameters
        return {keys[x.path]: x.path for x in self.layout.trainable}

    def _by_parameter(self) -> dict[Tensor, LeafTensors]:
        return {p: self._of(path) for p, path in self._paths().items()}

    def _of(self, path: str) -> LeafTensors:
        found = LeafTensors(self.transforms, path, self.layout.every, self._shown)
        return found if self._named is None else self._named(path, found)

    def __getitem__(self, parameter: Tensor) -> LeafTensors:
        return self._of(self._paths()[parameter])

    def __setitem__(self, parameter: Tensor, tensors: Mapping[str, Any]) -> None:
        assign(self[parameter], tensors)

    def __delitem__(self, parameter: Tensor) -> None:
        self._begin_anew("del opt.state[parameter]", [self._paths()[parameter]])

    def reset(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Let the chain begin anew for these parameters: moments, counts of updates, and all else of past gradients.

        `del opt.state[p]`, `opt.state.pop(p)` and `opt.state.clear()` do the same, as in torch.optim, whose entries are
        made anew at the next gradient. Here first values are written at once, so `p in opt.state` stays true. These
        stay: what follows from parameters (masters, the iterate of `schedule_free`, slow weights of `lookahead`,
        averages), sums of `accumulate`, numbers that belong to no leaf (scales), and `state.step`, from which schedules
        go on. If leaves are sharded, every rank must make the call.

        Args:
            parameters: of the attached model; by default all that are trained.

        Raises:
            KeyError: one is no trained parameter of the model.
            TypeError: the state is not that of an attached model.
            ValueError: the chain has `scale_by_momo`, whose averages are of all parameters together.

        Examples:
            >>> import torch, zerofn as zf
            >>> model = torch.nn.Linear(2, 2)
            >>> opt = zf.attach(model, zf.adamw(0.1))
            >>> model(torch.ones(2)).sum().backward()
            >>> opt.step()
            >>> opt.state.reset([model.weight])
            >>> [int(opt.state[p]["step"]) for p in (model.weight, model.bias)]
            [0, 1]
        """
        paths = self._paths()
        chosen = list(paths.values()) if parameters is None else [paths[p] for p in parameters]
        self._begin_anew("state.reset(parameters)", chosen)

    def _begin_anew(self, call: str, paths: list[str]) -> None:
        if self._restart is None:
            raise entries_stay(call)
        self._restart(paths)

    def clear(self) -> None:
        """As `reset` of all parameters."""
        self._begin_anew("opt.state.clear()", list(self._paths().values()))

    def pop(self, parameter: Tensor, *default: Any) -> Any:
        """As `reset` of one parameter. Returns copies of what its entries were."""
        if parameter not in self and default:
            return default[0]
        own = {name: x.detach().clone() if isinstance(x, Tensor) else x for name, x in self[parameter].items()}
        self._begin_anew("opt.state.pop(parameter)", [self._paths()[parameter]])
        return own

    def get(self, parameter: object, default: Any = None) -> Any:
        """As in any mapping."""
        return self[parameter] if isinstance(parameter, Tensor) and parameter in self else default

    def __contains__(self, parameter: object) -> bool:
        return isinstance(parameter, Tensor) and parameter in self._paths()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._paths())

    def __len__(self) -> int:
        return len(self.layout.trainable)

    def keys(self) -> KeysView[Tensor]:
        return self._paths().keys()

    def values(self) -> ValuesView[LeafTensors]:
        return self._by_parameter().values()

    def items(self) -> ItemsView[Tensor, LeafTensors]:
        return self._by_parameter().items()

    def replace(self, *, params: Tree, create_graph: bool = False) -> State:
        """The same state with other parameters: moments, counters and averages stay.

        Args:
            params: *stored* parameters, with the structure, shapes, dtypes and devices of `state.params`. They are
                copied.
            create_graph: whether autograd records the state as a function of `params`; torch.func does anyway.

        Raises:
            ValueError: they do not fit, for instance full parameters for a state with shards. Every such leaf is named.
                Or the chain has `schedule_free` or `lookahead`, which keep copies that the next update starts from.

        Examples:
            >>> import torch, zerofn as zf
            >>> tx = zf.sgd(0.1, momentum=0.9)
            >>> state, _ = zf.update(tx, {"w": torch.ones(2)}, zf.init(tx, {"w": torch.zeros(2)}))
            >>> state = state.replace(params={"w": torch.full((2,), 5.0)})
            >>> state.params, int(state.step), state.transforms["sgd"]["momentum"]
            ({'w': tensor([5., 5.])}, 1, {'w': tensor([1., 1.])})
        """
        self.check_usable("state.replace")
        if self._fits is not None:
            check_replaced(self._fits)
        matched = self.layout.match(params, "these are not the parameters of this state", "a tree like state.params")
        given: Leaves = {}
        wrong: list[tuple[str, str]] = []
        for i, path, x in matched:
            leaf = self.layout.leaves[i]
            if reason := _no_replacement(x, self.leaves[leaf.path], leaf, self.layout.placement.size):
                wrong.append((path, reason))
            elif given.setdefault(leaf.path, x) is not x and not _equal(given[leaf.path], x):
                wrong.append((path, f"other numbers than at {leaf.path}, which is the same parameter"))
        if wrong:
            right = "state.replace(params=...) of tensors like those of state.params: x.to(old.dtype)"
            if self.layout.placement.size > 1:
                right += "; of whole leaves\n         state.replace(params=zf.init(tx, whole).params), on every rank"
            raise ValueError(bad_leaves("state.replace: these parameters do not fit the state", wrong, right))
        keep = create_graph or recorded()
        copies = {p: (x if keep else x.detach()).clone(memory_format=torch.contiguous_format) for p, x in given.items()}
        made = replace(self, leaves={path: copies[path] for path in self.leaves}).fitting(self._fits)
        object.__setattr__(made, "_replaced", self._fits is None)
        return made

    def __reduce__(self) -> Any:
        # torch.load accepts plain containers by default. `_parameters` is left out: a copy or a pickle belongs to no
        # model, so its keys are its own leaves.
        plain = as_plain(self.layout)
        return state_from, (FORM, self.leaves, self.transforms, self.step, self.micro_step, plain)

    def __repr__(self) -> str:
        count = sum(leaf.numel for leaf in self.layout.leaves)
        return (
            f"State({len(self.leaves)} leaves, {count} parameters, step={self.step.tolist()}, "
            f"transforms={list(self.transforms)})"
        )

    def _repr_html_(self) -> str:
        # Only notebooks need this module.
        from .html import card, kept

        at = self.layout.placement
        sizes = {leaf.path: leaf.numel for leaf in self.layout.leaves}
        tensors = []
        for owner, own in {"params": {"": self.leaves}, **self.transforms}.items():
            for name, x in named(own, self.layout.every):
                if isinstance(x, Tensor):
                    # Stacked states have more elements than their leaves.
                    place = "shard" if at.size > 1 and name.path and x.numel() < sizes[name.path] else "whole"
                    tensors.append((owner, [str(x.dtype).removeprefix("torch."), place, str(x.device)], x.nbytes))
        where = f", shard {at.rank} of {at.size}" if at.size > 1 else ""
        return card(
            f"State, step {self.step.tolist()}{where}", kept(tensors, ["dtype", "place", "device"]), text=repr(self)
        )

    def copies_on_device(self) -> tuple[Any, ...]:
        """The copies into this state. The device waits for them before all that is launched from here on."""
        for copy in self._copies:
            copy.wait_on_device()
        return self._copies


class StateUnderWay(State):
    """A state with copies into its `transforms` that are under way (`offload`): who reads them waits for the copies."""

    @property
    def transforms(self) -> dict[str, TransformState]:  # type: ignore[override]
        """The states of transforms, once all copies into them have ended."""
        for copy in self._copies:
            copy.wait_on_host()
        vars(self)["_copies"] = ()
        return self.arriving

    @transforms.setter
    def transforms(self, transforms: dict[str, TransformState]) -> None:
        vars(self)["transforms"] = transforms

    @property
    def arriving(self) -> dict[str, TransformState]:  # type: ignore[override]
        return vars(self)["transforms"]


# The version of the format that `State.__reduce__` writes.
FORM = 1


def restored(form: int, *parts: Any) -> State:
    """The state from the fields that `State.__reduce__` wrote.

    Raises:
        ValueError: a later version wrote them.
    """
    if form != FORM:
        wrong, why = f"a state saved in form {form}", f"this version of zerofn reads form {FORM}"
        raise ValueError(explain(wrong, why, "the version of zerofn that saved it, or a later one"))
    leaves, transforms, step, micro_step, layout = parts
    return State(leaves, {k: _in_dicts(own) for k, own in transforms.items()}, step, micro_step, from_plain(layout))


def _in_dicts(own: Any) -> Any:
    """A transform's state in dicts, the empty ones too. Older versions wrote other containers."""
    return {key: _in_dicts(x) for key, x in own.items()} if type(own) is dict else nested(own)


def _no_replacement(x: Any, old: Tensor, leaf: Leaf, ranks: int) -> str | None:
    """Why `x` cannot stand in the place of the stored parameter `old`."""
    if not isinstance(x, Tensor):
        return f"{kind_of(x)} instead of a tensor"
    if x.shape != old.shape:
        whole = " (the whole leaf, of which this rank has a shard)" if ranks > 1 and x.shape == leaf.shape else ""
        return f"of shape {tuple(x.shape)}{whole} instead of {tuple(old.shape)}"
    if x.dtype != old.dtype:
        return f"{x.dtype} instead of {old.dtype}"
    return f"on {x.device} instead of {old.device}" if x.device != old.device else None


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and (is_wrapped(a) or is_wrapped(b) or torch.equal(a, b))


def _flatten(state: State) -> tuple[tuple[Any, ...], Layout]:
    return (state.leaves, state.transforms, state.step, state.micro_step), state.layout


def _unflatten(layout: Layout, children: Any) -> State:
    leaves, transforms, step, micro_step = children
    return State(leaves, transforms, step, micro_step, layout)


for _kind in State, StateUnderWay:
    register_global(_kind, _flatten, _unflatten)
    register_pytree_node(_kind, lambda s: (list(_flatten(s)[0]), s.layout), lambda children, s: _unflatten(s, children))


# ----------------------------------------------------------------------------------------------------------------------
# `averages_of` finds averages of parameters, as `ema` keeps them, in the states of transforms, by the transform's
# name.


def averages_of(state: State, of: str | None, where: str) -> Leaves:
    """The averages by path, sharded like the stored parameters. Leaves that are not averaged are left out.

    Args:
        state: the state that has them.
        of: the name of an `ema`, or of the `masked` or `partition` that holds one; `None` for the only one.
        where: the call that asks, for messages.

    Raises:
        ValueError: there is none of that name, or several and no name.
    """
    names = [name for name, own in state.transforms.items() if _averages(own, state.leaves)]
    name = names[0] if of is None and len(names) == 1 else of
    if name not in names:
        why = f"this state has averages of {', '.join(map(repr, names))}" if names else "this state has no averages"
        right = where.format(repr(names[0])) if names else "zf.chain(..., zf.adamw(1e-3), zf.ema(0.999))"
        raise ValueError(explain(where.format(repr(of)), why, right))
    return _averages(state.transforms[name], state.leaves)


def _averages(entries: dict[str, Any], leaves: Leaves) -> Leaves:
    """The averages in a transform's state; those of a grouped one lie with its members, with labels of any text."""
    found: Leaves = {}
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            continue
        # The state of a member has slots. A slot has tensors by path.
        if not all(isinstance(x, Tensor) and p in leaves for p, x in entry.items()):
            found.update(_averages(entry, leaves))
        elif name == AVERAGE:
            found.update(entry)
    return found
