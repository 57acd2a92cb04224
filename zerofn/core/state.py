"""`State`: everything a run consists of, as one tree of tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._compat.compiler import register_pytree_node
from .._compat.functorch import is_wrapped
from .._compat.saved_states import state_from
from .._errors import bad_leaves, explain, kind_of
from ..kernels.recording import recorded
from .html import bars
from .layout import Layout, Leaf, Leaves
from .plain_layouts import as_plain, from_plain
from .state_by_parameter import LeafTensors, assign, entries_stay
from .state_fate import Fate, check_usable, mark
from .transform import TransformState
from .tree import Tree, flatten, register_global


def counter(x: int = 0) -> Tensor:
    """A counter of the state. It lives on the CPU, so that reading it never waits for a GPU."""
    return torch.tensor(x, dtype=torch.int64)


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
        layout: the structure the parameters were given in; not a part of the tree.
    """

    leaves: Leaves
    transforms: dict[str, TransformState]
    step: Tensor
    micro_step: Tensor
    layout: Layout
    _parameters: Leaves | None = None
    _shown: Callable[[Any], Any] | None = None
    _named: Callable[[str, LeafTensors], LeafTensors] | None = None

    @contextmanager
    def given_away(self, written: Collection[str]) -> Iterator[None]:
        """Mark that the memory of this state belongs to the next one, unless the body raises before it writes.

        Args:
            written: what the body has begun to write (`Context.written`).
        """
        mark(self.micro_step, Fate.DONATED)
        try:
            yield
        except BaseException:
            mark(self.micro_step, Fate.TORN if written else Fate.NONE)
            raise

    def become(self, new: State) -> None:
        """Take what is in `new`, which was made in the memory of this one and which nobody will be given.

        The one exception to frozen fields: whoever was interrupted has this object, and else had lost the run.
        """
        vars(self).update(leaves=new.leaves, transforms=new.transforms, step=new.step, micro_step=new.micro_step)

    def check_usable(self, where: str) -> None:
        """Raise a RuntimeError if its memory was given away or half written. Not to be traced by the compiler.

        Args:
            where: the use, for the message.
        """
        check_usable(self.micro_step, where)

    def check_data(self, where: str) -> None:
        """Raise a ValueError for meta tensors: a step would count on and change nothing."""
        if any([x.is_meta for x in self.leaves.values()]):
            bad = [(p, f"{tuple(x.shape)} {x.dtype} without data") for p, x in self.leaves.items() if x.is_meta]
            right = "state = zf.init(tx, params) with parameters on a device; zf.plan(tx, params) for the sizes alone"
            raise ValueError(bad_leaves(f"{where} of a state on the meta device", bad, right))

    @property
    def params(self) -> Tree:
        """The stored parameters in the structure they were given in; under sharding, this rank's part, laid out flat.

        A new tree at each call, of the tensors of the state: `state.params["w"].copy_(w)` under `torch.no_grad()`
        writes into the state, `state.params["w"] = w` into a dict that nobody keeps.
        """
        return self.layout.join(self.leaves)

    def keyed_by(
        self,
        parameters: Leaves,
        shown: Callable[[Any], Any] | None = None,
        named: Callable[[str, LeafTensors], LeafTensors] | None = None,
    ) -> State:
        """The same state as a mapping from these tensors, of a model whose parameters are not the stored ones.

        Args:
            parameters: by path.
            shown: how a tensor of the state is seen there, over the same memory.
            named: gives what is kept of the leaf with a path the names that it has there.
        """
        return replace(self, _parameters=parameters, _shown=shown, _named=named)

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
        raise entries_stay("del opt.state[parameter]")

    def clear(self) -> None:
        """Refused, as is `pop`: torch.optim makes removed entries anew at the next step, and a pipeline does not."""
        raise entries_stay("opt.state.clear()")

    def pop(self, *args: Any) -> None:
        """Refused, as is `clear`."""
        raise entries_stay("opt.state.pop(parameter)")

    def get(self, parameter: object, default: Any = None) -> Any:
        """As of any mapping."""
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
            params: *stored* parameters, as `state.params` has them: of its structure, shapes, dtypes and devices. They
                are copied.
            create_graph: let autograd have the state as a function of `params`; inside of torch.func it is one anyway.

        Raises:
            ValueError: they do not fit; every such leaf is named. So are whole parameters for a state that has shards.

        >>> import torch, zerofn as zf
        >>> tx = zf.sgd(0.1, momentum=0.9)
        >>> state, _ = zf.update(tx, {"w": torch.ones(2)}, zf.init(tx, {"w": torch.zeros(2)}))
        >>> state = state.replace(params={"w": torch.full((2,), 5.0)})
        >>> state.params, int(state.step), state.transforms["sgd"]["momentum"]
        ({'w': tensor([5., 5.])}, 1, {'w': tensor([1., 1.])})
        """
        self.check_usable("state.replace")
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
        return replace(self, leaves={path: copies[path] for path in self.leaves})

    def __reduce__(self) -> Any:
        # Of plain containers, which torch.load takes by default. A copy or a pickle is of no model: its keys are its
        # own leaves, as in the pure route.
        plain = as_plain(self.layout)
        return state_from, (FORM, self.leaves, self.transforms, self.step, self.micro_step, plain)

    def __repr__(self) -> str:
        count = sum(leaf.numel for leaf in self.layout.leaves)
        return (
            f"State({len(self.leaves)} leaves, {count} parameters, step={self.step.tolist()}, "
            f"transforms={list(self.transforms)})"
        )

    def _repr_html_(self) -> str:
        kept = {"params": self.leaves, **self.transforms}
        sizes = {name: sum(x.nbytes for x in flatten(tree)[0] if isinstance(x, Tensor)) for name, tree in kept.items()}
        return bars([(name, f"{size:,} B", size) for name, size in sizes.items()], repr(self))


# Of what `State.__reduce__` writes. `restored` reads this form, and those before it.
FORM = 1


def restored(form: int, *parts: Any) -> State:
    """The state of the parts that `State.__reduce__` wrote.

    Raises:
        ValueError: a later version wrote them.
    """
    if form != FORM:
        wrong, why = f"a state saved in form {form}", f"this version of zerofn reads form {FORM}"
        raise ValueError(explain(wrong, why, "the version of zerofn that saved it, or a later one"))
    leaves, transforms, step, micro_step, layout = parts
    return State(leaves, transforms, step, micro_step, from_plain(layout))


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


register_global(State, _flatten, _unflatten)
register_pytree_node(State, lambda s: (list(_flatten(s)[0]), s.layout), lambda children, s: _unflatten(s, children))
