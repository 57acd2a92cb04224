"""Makes the result of `opt.state_dict()`: the form of `torch.optim`, with this library's own keys beside torch's.

    {
        "state": {0: {"exp_avg": ..., "exp_avg_sq": ..., "step": ...}},
        "param_groups": [{"lr": ..., "betas": ..., "amsgrad": ..., "params": [0]}],
        "zerofn": {"format": 3, "params": {...}, "step": ..., "micro_step": ..., "param_names": [[...]], ...},
    }

What belongs to no leaf (a loss scale, the count of a window) stands among the entries of the first parameter, under
names that begin with `zerofn/`: torch's functions of optimizers' state dicts carry these and drop every key beside
`state` and `param_groups`. A chain that has nothing but what `torch.optim` has too, has no such entries, so that its
checkpoints and those of torch have the same keys: its counters are the counts of its leaves.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.facts import COUNT
from ..core.layout import rows_between
from ..core.pipeline import Pipeline
from ..core.state import LeafTensors, State
from ..core.state_entries import (
    Entry,
    cut_as_by_torch,
    entries,
    has_unknown_leaf,
    in_given_form,
    of_rank,
    rebuild,
)
from ..core.transform import Transform
from ..core.tree import flatten, tree_keys
from ..ranks.collectives import all_reduce_
from ..ranks.dtensor import as_dtensors
from ..ranks.group import Group
from .param_groups import ParamGroups, packed, plain_values

# The key beside `state` and `param_groups`.
OWN_KEY = "zerofn"
# Entries that belong to no parameter stand with the first parameter, under names that begin with this.
OWN_ENTRY = "zerofn/"
# Format 1 had flat shards by transform and path, format 2 rows.
FORMAT = 3
# The name of a leaf's count of updates in `torch.optim`.
STEP = "step"
# Counts of a whole transform and of the state. If a file has none, they are computed from the counts of leaves.
COUNTED = (STEP, "micro_step")
# The largest count of updates of a leaf. If the leaves have another one, another library has trained on from there.
UPDATES = OWN_ENTRY + "updates"
# Hyperparameters that torch keeps in groups beside the rate. Here the chain sets them.
BESIDE = ("amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize")


def is_torch_form(d: Any) -> bool:
    """Whether a state dict is in the form of `torch.optim`, as ours are."""
    return isinstance(d, Mapping) and "state" in d and "param_groups" in d


@dataclass(eq=False)
class NamedEntry:
    """An entry of a state, and what is known of its place in a state dict.

    Attributes:
        entry: the entry.
        value: what the state dict has.
        of_rank: whether it is this rank's own, and in the dicts of other ranks there is something else.
    """

    entry: Entry
    value: Any = None
    of_rank: bool = False


@dataclass
class Names:
    """Everything of a state but parameters, by the names of a state dict.

    Args:
        pipe: the pipeline.
        state: of it.
        groups: of the optimizer.
        paths: `id(parameter)` to path.
        values: by entry, what a state dict has of it; not needed to load one.

    Attributes:
        leaves: by path and name.
        counts: by path, the name of the count of the leaf's updates; without leaves whose optimizer keeps none.
        numbers: what belongs to no leaf, by name.
        plain: whether counts of leaves tell all that belongs to none, as in `torch.optim`.
        apart: transforms with sums that are each rank's own.
    """

    pipe: Pipeline
    state: State
    groups: ParamGroups
    paths: Mapping[int, str]
    values: Sequence[Any] | None = None
    leaves: dict[str, dict[str, NamedEntry]] = field(init=False)
    counts: dict[str, str] = field(init=False, default_factory=dict)
    numbers: dict[str, NamedEntry] = field(init=False)

    def __post_init__(self) -> None:
        placement, every = self.state.layout.placement, set(self.paths.values())
        found = entries(self.state)
        self.apart = placement.apart
        own = {e.owner for e in found if placement.size > 1 and e.owner not in self.apart and has_unknown_leaf(e)}
        self.rank = of_rank(self.pipe.groups[0].ranks[self.pipe.groups[0].rank]) if self.pipe.groups else of_rank(0)
        values = iter([None] * len(found) if self.values is None else self.values)
        leaves = {leaf.path: leaf for leaf in self.state.layout.complexes}
        name = lambda e: NamedEntry(in_given_form(e, leaves), next(values), e.owner in own)  # noqa: E731
        made = rebuild(self.state, name, elsewhere=True)
        self.leaves = {}
        for optimizer, group in zip(self.groups.optimizers, self.groups.groups, strict=True):
            for p in group["params"]:
                path = self.paths[id(p)]
                kept = LeafTensors(made.transforms, path, every)
                names = torch_names(kept, optimizer.transform)
                self.leaves[path] = {_of(self.rank, kept[x], name): kept[x] for name, x in names.items()}
                if count := _count_of_updates(names, optimizer.prefix, optimizer.transform):
                    self.counts[path] = count
        of_leaves = {id(x) for own in self.leaves.values() for x in own.values()}
        self.params: dict[str, Any] = dict(made.leaves)
        self.numbers = {OWN_ENTRY + STEP: made.step, OWN_ENTRY + "micro_step": made.micro_step}  # type: ignore[dict-item]
        for owner, tree in made.transforms.items():
            for keys, x in zip(tree_keys(tree), flatten(tree)[0], strict=True):
                if id(x) not in of_leaves:
                    self.numbers[OWN_ENTRY + "/".join(_of_owner(self.rank, x, owner, keys))] = x
        rates = any(callable(o.transform.facts.rate) for o in self.groups.optimizers)
        holds = any(part.facts.holds for part in self.pipe.parts)
        counted = all(is_counted(name, x) for name, x in self.numbers.items())
        kept = [x for of in self.leaves.values() for x in of.values()]
        self.plain = counted and not rates and not holds and not any(x.of_rank for x in kept)

    def state_of(self) -> dict[str, dict[str, Any]]:
        """By path, what a state dict has of each leaf."""
        with_values = {path: {name: x for name, x in own.items() if has_value(x)} for path, own in self.leaves.items()}
        out = {path: {name: _shown(name, x) for name, x in own.items()} for path, own in with_values.items()}
        most = max([float(x) for path, own in out.items() if (x := self.updates(path, own)) is not None], default=0.0)
        if not self.plain and out:
            more = {name: _copy(x.value) for name, x in self.numbers.items()}
            out[next(iter(out))] |= more | {UPDATES: torch.tensor(int(most))}
        return out

    def updates(self, path: str, own: Mapping[str, Any]) -> Any:
        """The count of a leaf's updates among what a state dict has of it; `None` if it has none."""
        return own.get(self.counts.get(path, STEP))

    def listed(self, path: str, kept: LeafTensors) -> LeafTensors:
        """The entries of `opt.state[p]` under the names of a state dict, since torch's functions look for those."""
        own = self.leaves[path]
        names = {name: x for (name, _), x in zip(own.items(), _in_order(kept, self.optimizer_of(path)), strict=True)}
        first = not self.plain and path == next(iter(self.leaves))
        more = {name: x.entry.value for name, x in self.numbers.items()} if first else {}
        return kept.renamed(names, more | ({UPDATES: 0} if first else {}))

    def optimizer_of(self, path: str) -> Transform:
        """The transform that makes a parameter from a gradient of this leaf."""
        both = zip(self.groups.optimizers, self.groups.groups, strict=True)
        return next(o.transform for o, g in both if any(self.paths[id(p)] == path for p in g["params"]))


def open_windows(state: State) -> list[str]:
    """Transforms that hold sums of gradients which are each rank's own."""
    apart = state.layout.placement.apart
    numbers = [(e.owner, e.value) for e in entries(state) if e.owner in apart and not e.of_leaf] if apart else []
    return list(dict.fromkeys(owner for owner, x in numbers if isinstance(x, Tensor) and not x.ndim and bool(x)))


def torch_names(kept: LeafTensors, optimizer: Transform) -> dict[str, str]:
    """From the names of a state dict to those that transforms have given, the count of updates last."""
    torchs = dict(optimizer.facts.torch_names)
    names = {torchs.get(name, name): name for name in kept if name != COUNT}
    if len(names) < len([name for name in kept if name != COUNT]):
        # torch's names would give two slots of a leaf the same name, so our names stay.
        names = {name: name for name in kept if name != COUNT}
    return names | ({STEP if STEP not in names else COUNT: COUNT} if COUNT in kept else {})


def _count_of_updates(names: Mapping[str, str], prefix: str, optimizer: Transform) -> str | None:
    """The name of the optimizer's own count of a leaf, where transforms before it count too."""
    if names.get(STEP) == COUNT:
        return STEP
    return next((name for name in (f"{prefix}{optimizer.name}.{COUNT}", f"{prefix}{COUNT}") if name in names), None)


def _in_order(kept: LeafTensors, optimizer: Transform) -> list[str]:
    return list(torch_names(kept, optimizer).values())


def _of(rank: str, x: Any, name: str) -> str:
    return f"{rank}.{name}" if isinstance(x, NamedEntry) and x.of_rank else name


def _of_owner(rank: str, x: NamedEntry, owner: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    return (owner, rank, *keys) if x.of_rank else (owner, *keys)


def is_counted(name: str, x: NamedEntry) -> bool:
    return name.rpartition("/")[2] in COUNTED and isinstance(x.entry.value, Tensor) and not x.entry.shape


def has_value(x: Any) -> bool:
    """Whether the entry has elements: with a momentum of 0 there is no buffer."""
    return not (isinstance(x.entry.value, Tensor) and x.entry.shape == (0,) and not x.entry.of_part) or x.of_rank


def _shown(name: str, x: NamedEntry) -> Any:
    """The value in a state dict: `torch.optim` counts in float32."""
    return x.value.float() if name == STEP and isinstance(x.value, Tensor) else x.value


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def group_form(transform: Transform) -> dict[str, Any]:
    """The keys of a group of torch's counterpart, with the chain's values; without one, the chain's hyperparameters."""
    plain = {k: v for k, v in transform.config.items() if _is_plain(v)}
    cls = transform.facts.counterpart
    if cls is None:
        return plain
    needed = [k for k, x in inspect.signature(cls).parameters.items() if x.default is x.empty and k in transform.config]
    options = {k: transform.config[k] for k in needed if k not in ("params", "lr")}
    defaults = cls([torch.zeros(1, 1)], lr=1.0, **options).defaults
    return {k: plain.get(k, v) for k, v in defaults.items()}


def _is_plain(x: Any) -> bool:
    """Whether every reader of a file knows it: a number, a text, or a tuple of numbers such as `betas`."""
    return isinstance(x, int | float | str) or (type(x) is tuple and all(isinstance(v, int | float) for v in x))


def as_state_dict(
    pipe: Pipeline,
    state: State,
    groups: ParamGroups,
    paths: Mapping[int, str],
) -> dict[str, Any]:
    """The result of `opt.state_dict()`. All ranks call it together if leaves are sharded.

    Tensors are those of the state if each rank has the rows that torch would give it.

    Args:
        pipe: the pipeline.
        state: of it.
        groups: of the optimizer.
        paths: `id(parameter)` to path.
    """
    names = Names(pipe, state, groups, paths, placed(state, pipe.road.cutting))
    by_path = names.state_of()
    numbers = {path: i for i, path in enumerate(by_path)}
    listed = []
    for group, optimizer in zip(groups.groups, groups.optimizers, strict=True):
        own = {k: v for k, v in packed(group).items() if k != "name"}
        params = [numbers[paths[id(p)]] for p in group["params"]]
        listed.append({**group_form(optimizer.transform), **own, "params": params})
    more = {
        "format": FORMAT,
        "params": {path: x.value for path, x in names.params.items()},
        STEP: state.step.clone(),
        "micro_step": state.micro_step.clone(),
        "param_names": [[paths[id(p)] for p in group["params"]] for group in groups.groups],
        "groups": [optimizer.name for optimizer in groups.optimizers],
        # A value in a group that differs from these was set by the user, and is set again by a load.
        "chain": [plain_values(o.settable) for o in groups.optimizers],
    }
    return {"state": {numbers[path]: own for path, own in by_path.items()}, "param_groups": listed, OWN_KEY: more}


# ----------------------------------------------------------------------------------------------------------------------
# These functions show a state as `torch.distributed` places tensors: full on each rank, or a DTensor sharded by rows.
#
# A shard that is whole rows in torch's own chunks is shown on its own memory. Others (a number, a
# whole leaf at its owner) are gathered, leaf by leaf, and each rank keeps the rows that torch would give it. All
# ranks must ask for those together.


def placed(state: State, cutting: Sequence[Group]) -> list[Any]:
    """The form of each entry of a state in a state dict, in the order of `entries`.

    Sums of gradients that are each rank's own are zeros, with the shape of the leaf: no window is open. Where leaves
    are cut, all ranks call it together.

    Args:
        state: over several ranks, or of one process.
        cutting: the ranks that leaves are cut over, one axis after the other.
    """
    leaves = {leaf.path: leaf for leaf in state.layout.complexes}
    found = [in_given_form(e, leaves) for e in entries(state)]
    single = cutting[0] if len(cutting) == 1 and cut_as_by_torch(state, cutting) else None
    apart = state.layout.placement.apart
    sums = [e.of_leaf and e.owner in apart and isinstance(e.value, Tensor) for e in found]
    alike = [single is not None and e.offset is not None and in_own_rows(e, single.size) for e in found]
    out: list[Any] = []
    for e, of_sum, own_rows in zip(found, sums, alike, strict=True):
        if of_sum:
            out.append(_rows(e.value.new_zeros(()).expand(e.shape), single))
        elif e.offset is None:
            out.append(e.value)
        elif own_rows:
            assert single is not None
            mine = rows_between(e.shape, e.offset, e.offset + e.value.numel())
            assert mine is not None
            out.append(as_dtensors({0: (e.value, mine, e.shape)}, single)[0])
        else:
            out.append(_rows(_gathered(e, cutting), single))
    return out


def in_own_rows(e: Entry, size: int) -> bool:
    """Whether each rank has the rows of a tensor that torch would give it; the same answer on all ranks."""
    return not e.at_owner and e.within is None and len(e.shape) > 0


def _rows(whole: Tensor, group: Group | None) -> Tensor:
    """The rows of a whole tensor that torch would give this rank, in memory of their own; a 0-d tensor in full."""
    if group is None or not whole.ndim:
        return whole.clone()
    low, high = (min(i * -(-whole.shape[0] // group.size), whole.shape[0]) for i in (group.rank, group.rank + 1))
    mine = whole[low:high].clone(memory_format=torch.contiguous_format)
    return as_dtensors({0: (mine, tuple(mine.shape), tuple(whole.shape))}, group)[0]


def _gathered(e: Entry, cutting: Sequence[Group]) -> Tensor:
    # Ranks sum bytes, and for each element all ranks but one have zeros. That sends twice as much as a gather, and
    # needs to know neither how a leaf is sharded nor who its owner is.
    whole = e.value.new_zeros(torch.Size(e.shape).numel())
    assert e.offset is not None
    whole[e.offset : e.offset + e.value.numel()] = e.value.reshape(-1)
    for group in cutting:
        all_reduce_(whole.view(torch.uint8), group)
    return whole.view(e.shape)
