"""`opt.state_dict()` and `opt.load_state_dict()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .._compat.tensors import memories
from .._errors import bad_leaves, explain
from ..core.facts import COUNT
from ..core.layout import cut_by_rows, rows_between
from ..core.pipeline import Pipeline, init_transforms
from ..core.state import LeafTensors, State
from ..core.state_entries import (
    Entry,
    before,
    check_torch_cuts,
    cut_as_by_torch,
    entries,
    has_unknown_leaf,
    of_rank,
    over_ranks,
    rebuild,
)
from ..core.transform import Transform
from ..core.tree import flatten, tree_keys, unflatten
from ..core.wrapper_names import unwrapped_names, warn_of_other_names
from ..kernels.rounding import FIRST_FORMAT, FORMAT_ENTRY
from ..ranks.backend import gather_objects, world
from ..ranks.collectives import all_reduce_
from ..ranks.dtensor import (
    as_dtensors,
    as_local,
    as_part_of,
    coordinate_of,
    in_full,
    is_distributed,
    mesh_of,
    placed_like,
    ranks_of,
)
from ..ranks.group import Group
from ..ranks.process_groups import together
from .param_groups import HYPERPARAMETERS, OWN, ParamGroups, packed, plain_values, same_value
from .resident_params import ResidentParams

# ----------------------------------------------------------------------------------------------------------------------
# These functions show a state as `torch.distributed` places tensors: full on each rank, or a DTensor sharded by rows.
#
# A shard that is whole rows in torch's own chunks is shown on its own memory. Others (a leaf of fewer rows than ranks,
# a whole leaf at its owner) are gathered, leaf by leaf, and each rank keeps the rows that torch would give it. All
# ranks must ask for those together.


def placed(state: State, cutting: Sequence[Group]) -> list[Any]:
    """What each entry of a state is in a state dict, in the order of `entries`.

    Sums of gradients that are each rank's own are zeros, with the shape of the leaf: those of an open window have an
    entry of their own. Where leaves are cut, all ranks call it together.

    Args:
        state: over several ranks, or of one process.
        cutting: the ranks that leaves are cut over, one axis after the other.
    """
    found = entries(state)
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
    return not e.at_owner and e.within is None and cut_by_rows(e.shape, size)


def _rows(whole: Tensor, group: Group | None) -> Tensor:
    """The rows of a whole tensor that torch would give this rank, of a number all, in memory of their own."""
    if group is None or not whole.ndim:
        return whole.clone()
    low, high = (min(i * -(-whole.shape[0] // group.size), whole.shape[0]) for i in (group.rank, group.rank + 1))
    mine = whole[low:high].clone(memory_format=torch.contiguous_format)
    return as_dtensors({0: (mine, tuple(mine.shape), tuple(whole.shape))}, group)[0]


def _gathered(e: Entry, cutting: Sequence[Group]) -> Tensor:
    # A sum, of bytes, in which all ranks but one have zeros: twice what a gather sends, and it asks nobody how
    # a leaf is cut, or who its owner is.
    whole = e.value.new_zeros(torch.Size(e.shape).numel())
    assert e.offset is not None
    whole[e.offset : e.offset + e.value.numel()] = e.value.reshape(-1)
    for group in cutting:
        all_reduce_(whole.view(torch.uint8), group)
    return whole.view(e.shape)


# ----------------------------------------------------------------------------------------------------------------------
# State of a transform that is no tensor, such as a count in Python, cannot be written in place: it is put where it
# was.


@dataclass(frozen=True)
class NoTensor:
    """Stands for something in the state of a transform that is no tensor.

    Attributes:
        at: the transform, and where it is among what that has.
        value: what is there.
    """

    at: tuple[str, int]
    value: Any


def with_marks(state: State) -> State:
    """The same state with a `NoTensor` for all that is no tensor."""
    found = {}
    for name, own in state.transforms.items():
        values, spec = flatten(own)
        if not all([isinstance(x, Tensor) for x in values]):
            own = unflatten(
                spec, [x if isinstance(x, Tensor) else NoTensor((name, i), x) for i, x in enumerate(values)]
            )
        found[name] = own
    return replace(state, transforms=found)


def with_numbers(state: State, numbers: Mapping[tuple[str, int], Any]) -> State:
    """The same state with these in the places that they are keyed by."""
    found = dict(state.transforms)
    for name in dict.fromkeys(name for name, _ in numbers):
        values, spec = flatten(found[name])
        found[name] = unflatten(spec, [numbers.get((name, i), x) for i, x in enumerate(values)])
    return replace(state, transforms=found) if numbers else state


# ----------------------------------------------------------------------------------------------------------------------
# `as_dict` shows a state as nested dicts of tensors, for `torch.save` and DCP. A loaded one is checked here.


# Parts were flat ranges of one length in dicts of the first format, and are rows in those of the second.
FLAT_CUTS, FORMAT_OF_DICTS = 1, 2


def as_dict(pipe: Pipeline, state: State, groups: list[dict[str, Any]], parts: bool = False) -> dict[str, Any]:
    """The older form of a state dict, by transform and path, which is still read.

    With `parts` it has this rank's shards alone, whatever they are cut by.
    """
    if pipe.groups:
        first = pipe.groups[0]
        state = over_ranks(state, pipe.road.cutting or (first,), first.ranks[first.rank], parts)
    return {
        "format": FORMAT_OF_DICTS,
        "params": dict(state.leaves),
        "transforms": {k: dict(v) if isinstance(v, dict) else v for k, v in state.transforms.items()},
        "step": state.step,
        "micro_step": state.micro_step,
        "param_groups": [packed(g) for g in groups],
    }


def pairs(own: dict[str, Any], given: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Each entry of `own` with the one that is to replace it, but for what schedulers have put into groups.

    Raises:
        ValueError: every missing, unexpected or misshapen entry is named.
    """
    mine = _flat(_required(own))
    theirs = _under_names_of(mine, _flat(_required(given)), of_rank(world()[0]))
    # Those of before names were those of the plain model have what wrappers of modules add.
    renamed = unwrapped_names(theirs, mine)
    theirs = {
        **{k: x for k, x in theirs.items() if k not in renamed.values()},
        **{k: theirs[x] for k, x in renamed.items()},
    }
    if isinstance(given, dict) and given.get("format") == FLAT_CUTS:
        theirs = {k: placed_like(x, mine[k]) if _cut_flat(mine.get(k), x) else x for k, x in theirs.items()}
    for k, x in mine.items():
        if k not in theirs and _is_format(k, mine):
            # A state dict of before there were formats.
            theirs[k] = torch.full_like(x, FIRST_FORMAT)
    bad = [(k, "missing") for k in mine if k not in theirs] + [(k, "unexpected") for k in theirs if k not in mine]
    for k in mine.keys() & theirs.keys():
        a, b = mine[k], theirs[k]
        if isinstance(a, Tensor) and (not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype):
            bad.append((k, f"{_form_of(b)} instead of {_form_of(a)}"))
        elif isinstance(a, NoTensor) and isinstance(b, Tensor):
            bad.append((k, f"{_form_of(b)} instead of {_form_of(a.value)}"))
        elif isinstance(a, Tensor) and _cut_otherwise(a, b):
            # A whole and a part of a leaf with one dimension have one shape; copying would broadcast, or stop half way.
            bad.append((k, f"{_cut(b)} instead of {_cut(a)}"))
        elif _elsewhere(a, b):
            bad.append((k, f"the part of rank {coordinate_of(b)} instead of that of rank {coordinate_of(a)}"))
    if bad:
        right = "the state_dict of this pipeline on this model"
        if any(_cut_otherwise(a, theirs.get(k)) for k, a in mine.items()):
            right += (
                ", on as many ranks. Between whole leaves and parts of them:\n"
                "         zf.save(directory, opt) and opt.load_state(zf.load(directory, like=opt.state));\n"
                "         of parameters alone, model.load_state_dict(full) and with opt.gathered(): model.state_dict()"
            )
        if any(_elsewhere(a, theirs.get(k)) for k, a in mine.items()):
            right = (
                "on each rank what that rank has saved, torch.save(opt.state_dict(), f'{rank}.pt');\n"
                "         zf.save(directory, opt) on every rank, which is one checkpoint for any number of ranks"
            )
        if any(isinstance(a, Tensor) and a.dtype != getattr(theirs.get(k), "dtype", a.dtype) for k, a in mine.items()):
            right += (
                "; dtypes are never changed silently. To go on in others, with the moments begun anew:\n"
                "         old = zf.attach(model, old_tx); old.load_state_dict(d); old.detach()\n"
                "         opt = zf.attach(model, tx)"
            )
        raise ValueError(bad_leaves("load_state_dict: this is not the state of this pipeline", sorted(bad), right))
    warn_of_other_names("opt.load_state_dict(d)", renamed)
    return [(a, theirs[k]) for k, a in mine.items()]


def _under_names_of(mine: dict[str, Any], theirs: dict[str, Any], rank: str) -> dict[str, Any]:
    """What is given, under the names of ours: older dicts have other states of transforms under the names of ranks."""
    found = {}
    for key, x in theirs.items():
        name = key
        if key not in mine and key.startswith("transforms/"):
            _, owner, below = [*key.split("/", 2), ""][:3]
            other = [f"transforms/{owner}/{below.removeprefix(f'{rank}/')}", f"transforms/{owner}/{rank}/{below}"]
            name = next((k for k in other if k in mine), key)
        found[name] = x if name == key else as_part_of(mine[name], x)
    return found


def _cut_flat(mine: Any, theirs: Any) -> bool:
    both = isinstance(mine, Tensor) and isinstance(theirs, Tensor) and None not in (mesh_of(mine), mesh_of(theirs))
    return both and mine.ndim > 1 and theirs.shape == (mine.numel(),)


def _is_format(key: str, entries: dict[str, Any]) -> bool:
    """Whether an entry is the format of random bits, beside a counter of steps; a leaf may have its name."""
    above, _, last = key.rpartition("/")
    return last == FORMAT_ENTRY and f"{above}/step" in entries


def _required(d: Any) -> Any:
    """Without what a group may have or not."""
    groups = d.get("param_groups") if isinstance(d, dict) else None
    if not isinstance(groups, list | tuple):
        return d
    return {**d, "param_groups": [{k: g[k] for k in OWN if k in g} if isinstance(g, dict) else g for g in groups]}


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Entries by dotted key; a malformed tree gives keys that do not match."""
    if isinstance(tree, dict):
        return {k: v for name, sub in tree.items() for k, v in _flat(sub, f"{prefix}{name}/").items()}
    if isinstance(tree, list | tuple) and not isinstance(tree, Tensor):
        return {k: v for i, sub in enumerate(tree) for k, v in _flat(sub, f"{prefix}{i}/").items()}
    values = [] if isinstance(tree, Tensor) else flatten(tree)[0]
    if not values or values[0] is tree:
        return {prefix.rstrip("/"): tree}
    # A class that is registered as a node.
    return {prefix + "/".join(keys): x for keys, x in zip(tree_keys(tree), values, strict=True)}


def _cut_otherwise(a: Any, b: Any) -> bool:
    """Whether they are as long, and one is whole where the other is a part."""
    both = isinstance(a, Tensor) and isinstance(b, Tensor) and a.numel() == b.numel()
    return both and as_local(a).shape != as_local(b).shape


def _elsewhere(a: Any, b: Any) -> bool:
    """Whether it is the part of another rank: what one rank has saved for all, as a Hugging Face Trainer does."""
    both = isinstance(a, Tensor) and isinstance(b, Tensor) and as_local(a).numel() > 0
    return both and None not in (coordinate_of(a), coordinate_of(b)) and coordinate_of(a) != coordinate_of(b)


def _cut(x: Tensor) -> str:
    part = as_local(x)
    return f"{_form_of(x)} {'in full' if part is x else f'of which this rank has {tuple(part.shape)}'}"


def _form_of(x: Any) -> str:
    """Shape and dtype of a tensor or of an entry's tensor, for a message; anything else as it prints."""
    if isinstance(x, Entry):
        return f"{tuple(x.shape)} {x.value.dtype}" if isinstance(x.value, Tensor) else repr(x.value)
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)


# ----------------------------------------------------------------------------------------------------------------------
# `opt.state_dict()`: the form of `torch.optim`, with this library's own keys beside torch's.
#
#     {
#         "state": {0: {"exp_avg": ..., "exp_avg_sq": ..., "step": ...}},
#         "param_groups": [{"lr": ..., "betas": ..., "amsgrad": ..., "params": [0]}],
#         "zerofn": {"format": 3, "params": {...}, "step": ..., "micro_step": ..., "param_names": [[...]], ...},
#     }
#
# What belongs to no leaf (a loss scale, the count of a window) stands among the entries of the first parameter, under
# names that begin with `zerofn/`: torch's functions of optimizers' state dicts carry these and drop every key beside
# `state` and `param_groups`. A chain that has nothing but what `torch.optim` has too, has no such entries, so that
# its checkpoints and those of torch have the same keys: its counters are the counts of its leaves.
#
# What is loaded may be whole tensors or distributed ones, cut in any way: each rank takes its part. Parameters are
# told by name where the state dict has names, else by their place in the groups.


# The key beside `state` and `param_groups`; older state dicts have counters under it in the first group.
OWN_KEY = "zerofn"
# What an entry of the first parameter begins with that belongs to no parameter.
OWN_ENTRY = "zerofn/"
# Flat parts were format 1, rows under keys of transforms format 2.
FORMAT = 3
# What `torch.optim` calls the count of a leaf's updates.
STEP = "step"
# Counts of a whole transform, or of the state, that those of leaves tell where nobody else does.
COUNTED = (STEP, "micro_step")
# The most updates that a leaf has had: where leaves say another number, another library has gone on from these entries.
UPDATES = OWN_ENTRY + "updates"
# How many ranks have sums of an open window that are not reduced: each its own, under its own name.
APART = OWN_ENTRY + "apart"
# A counter that what is loaded does not have, in older state dicts.
UNSET = -1
# Hyperparameters that torch keeps in groups beside the rate. Here they are the chain's.
BESIDE = ("amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize")


def is_torch_form(d: Any) -> bool:
    """Whether a state dict is in the form of `torch.optim`, as ours are."""
    return isinstance(d, Mapping) and "state" in d and "param_groups" in d and "transforms" not in d


@dataclass(frozen=True)
class LoadedStates:
    """What `opt.load_state_dict` has done.

    Attributes:
        by: how parameters were told: by their `"name"`, or by their `"order"` in the groups.
        made_anew: paths of parameters of which the state dict has no state, as torch has none of one that never had a
            gradient: their moments and counts begin anew.
    """

    by: str
    made_anew: tuple[str, ...] = ()


@dataclass(eq=False)
class _Kept:
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
        numbers: what belongs to no leaf, by name.
        plain: whether counts of leaves tell all that belongs to none, as in `torch.optim`.
        apart: transforms with sums that are each rank's own.
    """

    pipe: Pipeline
    state: State
    groups: ParamGroups
    paths: Mapping[int, str]
    values: Sequence[Any] | None = None
    leaves: dict[str, dict[str, _Kept]] = field(init=False)
    numbers: dict[str, _Kept] = field(init=False)

    def __post_init__(self) -> None:
        placement, every = self.state.layout.placement, set(self.paths.values())
        found = entries(self.state)
        self.apart = placement.apart
        own = {e.owner for e in found if placement.size > 1 and e.owner not in self.apart and has_unknown_leaf(e)}
        self.rank = of_rank(self.pipe.groups[0].ranks[self.pipe.groups[0].rank]) if self.pipe.groups else of_rank(0)
        values = iter([None] * len(found) if self.values is None else self.values)
        made = rebuild(self.state, lambda e: _Kept(e, next(values), e.owner in own), elsewhere=True)
        self.leaves = {}
        for optimizer, group in zip(self.groups.optimizers, self.groups.groups, strict=True):
            for p in group["params"]:
                path = self.paths[id(p)]
                kept = LeafTensors(made.transforms, path, every)
                names = torch_names(kept, optimizer.transform)
                self.leaves[path] = {_of(self.rank, kept[x], name): kept[x] for name, x in names.items()}
        of_leaves = {id(x) for own in self.leaves.values() for x in own.values()}
        self.params: dict[str, Any] = dict(made.leaves)
        self.numbers = {OWN_ENTRY + STEP: made.step, OWN_ENTRY + "micro_step": made.micro_step}  # type: ignore[dict-item]
        for owner, tree in made.transforms.items():
            for keys, x in zip(tree_keys(tree), flatten(tree)[0], strict=True):
                if isinstance(x, _Kept) and id(x) not in of_leaves:
                    self.numbers[OWN_ENTRY + "/".join(_of_owner(self.rank, x, owner, keys))] = x
        rates = any(callable(o.transform.facts.rate) for o in self.groups.optimizers)
        holds = any(part.facts.holds for part in self.pipe.parts)
        told = all(_is_counted(name, x) for name, x in self.numbers.items())
        kept = [x for of in self.leaves.values() for x in of.values()]
        self.plain = told and not rates and not holds and not any(x.of_rank for x in kept)

    def state_of(self) -> dict[str, dict[str, Any]]:
        """By path, what a state dict has of each leaf."""
        out = {path: {name: _shown(name, x) for name, x in own.items() if _has(x)} for path, own in self.leaves.items()}
        most = max([float(x) for own in out.values() for name, x in own.items() if name == STEP], default=0.0)
        if not self.plain and out:
            held = open_windows(self.state)
            ranks = self.state.layout.placement.copies if held else 0
            more = {name: _copy(x.value) for name, x in self.numbers.items()}
            more |= {UPDATES: torch.tensor(int(most)), APART: torch.tensor(ranks)}
            out[next(iter(out))] |= more
            for path, own in self.leaves.items() if held else ():
                mine = {f"{self.rank}.{name}": x.entry.value for name, x in own.items() if x.entry.owner in held}
                out[path] |= mine
        return out

    def listed(self, path: str, kept: LeafTensors) -> LeafTensors:
        """What `opt.state[p]` lists: the names of a state dict, since torch's functions look for those."""
        own = self.leaves[path]
        names = {name: x for (name, _), x in zip(own.items(), _in_order(kept, self.optimizer_of(path)), strict=True)}
        first = not self.plain and path == next(iter(self.leaves))
        more = {name: x.entry.value for name, x in self.numbers.items()} if first else {}
        return kept.renamed(names, more | ({UPDATES: 0, APART: 0} if first else {}))

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
    there = dict(optimizer.facts.torch_names)
    names = {there.get(name, name): name for name in kept if name != COUNT}
    if len(names) < len([name for name in kept if name != COUNT]):
        # Two slots of a leaf would have one name.
        names = {name: name for name in kept if name != COUNT}
    return names | ({STEP if STEP not in names else COUNT: COUNT} if COUNT in kept else {})


def _in_order(kept: LeafTensors, optimizer: Transform) -> list[str]:
    return list(torch_names(kept, optimizer).values())


def _of(rank: str, x: Any, name: str) -> str:
    return f"{rank}.{name}" if isinstance(x, _Kept) and x.of_rank else name


def _of_owner(rank: str, x: _Kept, owner: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    return (owner, rank, *keys) if x.of_rank else (owner, *keys)


def _is_counted(name: str, x: _Kept) -> bool:
    return name.rpartition("/")[2] in COUNTED and isinstance(x.entry.value, Tensor) and not x.entry.shape


def _has(x: Any) -> bool:
    """Whether there is something: of a momentum of 0 there is no buffer."""
    return not (isinstance(x.entry.value, Tensor) and x.entry.shape == (0,) and not x.entry.of_part) or x.of_rank


def _shown(name: str, x: _Kept) -> Any:
    """The value in a state dict: `torch.optim` counts in float32."""
    value = x.value.value if isinstance(x.value, NoTensor) else x.value
    return value.float() if name == STEP and isinstance(value, Tensor) else value


def _copy(x: Any) -> Any:
    x = x.value if isinstance(x, NoTensor) else x
    return x.clone() if isinstance(x, Tensor) else x


def group_form(transform: Transform) -> dict[str, Any]:
    """The keys that a group of torch's counterpart has, with the chain's values; of others what the chain has."""
    told = {k: v for k, v in transform.config.items() if _is_plain(v)}
    cls = transform.facts.counterpart
    if cls is None:
        return told
    needed = [k for k, x in inspect.signature(cls).parameters.items() if x.default is x.empty and k in transform.config]
    options = {k: transform.config[k] for k in needed if k not in ("params", "lr")}
    defaults = cls([torch.zeros(1, 1)], lr=1.0, **options).defaults
    return {k: told.get(k, v) for k, v in defaults.items()}


def _is_plain(x: Any) -> bool:
    """Whether every reader of a file knows it: a number, or a tuple of numbers such as `betas`."""
    return isinstance(x, int | float) or (type(x) is tuple and all(isinstance(v, int | float) for v in x))


def as_state_dict(
    pipe: Pipeline,
    state: State,
    groups: ParamGroups,
    paths: Mapping[int, str],
) -> dict[str, Any]:
    """What `opt.state_dict()` returns. Tensors are those of the state where ranks have the rows that torch gives them.
    Where leaves are cut, all ranks call it together.

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
        # What a group has otherwise has been set, and is set where it is loaded.
        "chain": [plain_values(o.settable) for o in groups.optimizers],
    }
    return {"state": {numbers[path]: own for path, own in by_path.items()}, "param_groups": listed, OWN_KEY: more}


@dataclass
class ToLoad:
    """What a state dict says, for this rank.

    Attributes:
        pairs: each tensor of ours with the one that is to replace it.
        numbers: what replaces something that is no tensor, by its transform and its place there.
        groups: for each group what it takes.
        told: how parameters were told, and which begin anew.
    """

    pairs: list[tuple[Tensor, Tensor]]
    numbers: dict[tuple[str, int], Any]
    groups: list[dict[str, Any]]
    told: LoadedStates


class Loading:
    """Reads one state dict in the form of `torch.optim`; nothing is written.

    Args:
        names: of our state, whose values that are no tensors are marked.
        given: the state dict.
        control: the ranks that load it together; `None` on one process.

    Raises:
        ValueError: every missing, unexpected, doubled or misshapen entry is named.
    """

    def __init__(self, names: Names, given: Mapping[str, Any], control: Group | None):
        self.names, self.given, self.control = names, given, control
        ours = given.get(OWN_KEY)
        self.own_key: Mapping[str, Any] = ours if isinstance(ours, Mapping) else {}
        self.bad: list[tuple[str, str]] = []
        self.other_dtypes = False
        self.renamed: dict[str, str] = {}
        self.told: dict[str, Any] = {}
        self.fits: list[tuple[Entry, Tensor]] = []
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.values: dict[tuple[str, int], Any] = {}
        self.anew: list[_Kept] = []
        cutting = names.pipe.road.cutting
        placement = names.state.layout.placement
        self.single = cutting[0] if len(cutting) == 1 and not placement.ranges else None

    def run(self) -> ToLoad:
        """What is to be written."""
        there, by, own_groups = self._by_path()
        self.there = there
        counts = [float(x[STEP]) for x in there.values() if isinstance(x.get(STEP), Tensor | int | float)]
        counts += [1.0 for x in there.values() if STEP not in x and _states(x)]
        self.most = max(counts, default=0.0)
        self.told = self._told()
        self.stale = UPDATES in self.told and int(self.told[UPDATES]) not in (UNSET, int(self.most))
        self.absent = self._absent()
        made_anew = [path for path, own in self.names.leaves.items() if own and not _states(there.get(path, {}))]
        for path, own in self.names.leaves.items():
            if path in made_anew:
                self.anew += own.values()
            else:
                self._leaf(path, own, there[path])
        self._numbers()
        self._params()
        if self.control is not None:
            # Before the first message, and before anything is written: a rank that refuses it is alone otherwise.
            self.bad = list(dict.fromkeys(row for bad in gather_objects(self.bad, self.control) for row in bad))
        self._refuse()
        warn_of_other_names("opt.load_state_dict(d)", self.renamed)
        self._fit_all()
        self._make_anew()
        return ToLoad(self.pairs, self.values, self._groups(own_groups), LoadedStates(by, tuple(made_anew)))

    def _refuse(self) -> None:
        if not self.bad:
            return
        right = "a state dict of the same model and optimizer; of another chain zf.save(directory, opt), and\n"
        right += "         zf.load(directory, like=opt, strict=False), which makes anew what is missing"
        if int(self.told.get(APART, 0)):
            right += ";\n         in the middle of a window zf.save(directory, opt) and zf.load(directory, like=opt),\n"
            right += "         or on each rank what that rank has saved, torch.save(opt.state_dict(), f'{rank}.pt');\n"
            right += "         dcp.save, and a full state dict, of what is saved after an update"
        if self.other_dtypes:
            right = "a state dict in these dtypes: dtypes are never changed silently. To go on in others, with the\n"
            right += "  moments begun anew:\n"
            right += "         old = zf.attach(model, old_tx); old.load_state_dict(d); old.detach()\n"
            right += "         opt = zf.attach(model, tx)"
        raise ValueError(
            bad_leaves("load_state_dict: this is not the state of this pipeline", sorted(set(self.bad)), right)
        )

    def _by_path(self) -> tuple[dict[str, dict[str, Any]], str, list[int]]:
        """What is given of each of our leaves, how they were told, and for each group of ours which one it takes."""
        theirs, state = self.given["param_groups"], self.given["state"]
        mine = [[self.names.paths[id(p)] for p in g["params"]] for g in self.names.groups.groups]
        if bad := [
            (f"param_groups/{i}/{k}", "missing") for i, g in enumerate(theirs) for k in ("params", "lr") if k not in g
        ]:
            self.bad += bad
            self._refuse()
        keys = [list(g["params"]) for g in theirs]
        names = _names_given(theirs, self.own_key, keys)
        if names is None:
            lengths = [len(x) for x in mine], [len(x) for x in keys]
            if lengths[0] != lengths[1]:
                wrong = f"load_state_dict of groups of {lengths[1]} parameters into groups of {lengths[0]}"
                why = "this state dict has no names, so parameters are told by their place in the groups,\n"
                why += "and the groups are those of zf.partition"
                right = "the chain of that checkpoint, with the groups of that checkpoint; or names in it:\n"
                right += "torch.optim.AdamW(model.named_parameters()), get_optimizer_state_dict(model, optimizer)"
                raise ValueError(explain(wrong, why, right))
            flat = [key for own in keys for key in own]
            labels = {path: key for path, key in zip([path for own in mine for path in own], flat, strict=True)}
            by, taken = "order", list(range(len(mine)))
        else:
            labels, taken = self._by_name(mine, keys, names)
            by = "name"
            flat = [key for own in keys for key in own]
        if doubled := sorted({key for key in flat if flat.count(key) > 1}, key=str):
            self.bad += [(str(key), "doubled: it stands in param_groups more than once") for key in doubled]
        self.bad += [(key, "unexpected") for key in self.given if key not in ("state", "param_groups", OWN_KEY)]
        self.labels = {path: path if key == path else f"{path} ({key})" for path, key in labels.items()}
        self.bad += [(str(k), "unexpected: no group has it") for k in state if k not in flat]
        return {path: _entries(state.get(key, {})) for path, key in labels.items()}, by, taken

    def _by_name(
        self, mine: list[list[str]], keys: list[list[Any]], names: list[list[str]]
    ) -> tuple[dict[str, Any], list[int]]:
        every = [name for own in names for name in own]
        at = {name: (i, key) for i, own in enumerate(names) for name, key in zip(own, keys[i], strict=True)}
        own = [path for of in mine for path in of]
        self.bad += [(name, "doubled: two parameters have this name") for name in at if every.count(name) > 1]
        at = self._plainly_named(at, own)
        self.bad += [(path, "missing") for path in own if path not in at]
        self.bad += [(name, "unexpected") for name in at if name not in own]
        if self.bad:
            self._refuse()
        taken = []
        for i, of in enumerate(mine):
            groups = list(dict.fromkeys(at[path][0] for path in of))
            rates = {str(self.given["param_groups"][k].get("lr")) for k in groups}
            if len(rates) > 1:
                why = f"parameters of one group here are in groups of other rates there, {sorted(rates)}"
                self.bad.append((f"param_groups/{i}", why))
            taken.append(groups[0] if groups else min(i, len(keys) - 1))
        return {path: at[path][1] for path in own}, taken

    def _plainly_named(self, given: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
        """The same, by the names of the plain model: older files have what wrappers of modules added."""
        renamed = unwrapped_names(given, own)
        self.renamed |= renamed
        others = {name: x for name, x in given.items() if name not in renamed.values()}
        return others | {path: given[name] for path, name in renamed.items()}

    def _told(self) -> dict[str, Any]:
        """What is given of no leaf, by name."""
        found: dict[str, Any] = {}
        for own in self.there.values():
            found |= {name: x for name, x in own.items() if name.startswith(OWN_ENTRY)}
        groups = self.given["param_groups"]
        older = groups[0].get(OWN_KEY) if groups else None
        for key, x in (older or {}).items():
            # The names of older state dicts, and a rank's own under its name.
            name = OWN_ENTRY + key.removeprefix("transforms/").replace(f"/{self.names.rank}/", "/")
            if not (isinstance(x, Tensor) and x.numel() and bool((x == UNSET).all())):
                found.setdefault(name, x)
        for name in COUNTED:
            if name in self.own_key:
                found.setdefault(OWN_ENTRY + name, self.own_key[name])
        return found

    def _absent(self) -> set[str]:
        """Transforms that hold gradients, of which nothing is given: at the end of a window they have nothing."""
        names = {name for own in self.there.values() for name in own}
        found = set()
        for part in self.names.pipe.parts:
            of_leaves = {n for own in self.names.leaves.values() for n, x in own.items() if x.entry.owner == part.name}
            numbers = {name for name, x in self.names.numbers.items() if x.entry.owner == part.name}
            if part.facts.holds and not (of_leaves & names) and not (numbers & self.told.keys()):
                found.add(part.name)
        return found

    def _leaf(self, path: str, own: dict[str, _Kept], there: dict[str, Any]) -> None:
        label, apart = self.labels[path], int(self.told.get(APART, 0))
        mine = {name: x for name, x in own.items() if x.entry.owner in self.names.apart} if apart else {}
        for name in there:
            of_window = apart and name.partition(".")[0].startswith("rank") and name.partition(".")[2] in mine
            if name not in own and not name.startswith(OWN_ENTRY) and not of_window:
                self.bad.append((f"{label}: {name}", "unexpected"))
        optimizer = self.names.optimizer_of(path)
        for _, name in optimizer.facts.torch_names if float(there.get(STEP, 1)) == 0 else ():
            if isinstance(there.get(name), Tensor) and bool(as_local(there[name]).any()):
                why = f"0 beside a {name}: read from a checkpoint without counts? Set this one to 1"
                self.bad.append((f"{label}: {STEP}", why))
        for name, x in own.items():
            place = f"{label}: {name}"
            if name in mine:
                self._of_window(place, x, there.get(f"{self.names.rank}.{name}"), apart)
            elif x.entry.owner in self.names.apart:
                self.pairs += [(x.entry.value, torch.zeros((), dtype=x.entry.value.dtype))]
            elif x.entry.owner in self.absent:
                self.anew.append(x)
            elif name not in there:
                if name == STEP:
                    # torch's SGD keeps no count: there was an update.
                    self._take(place, x, torch.tensor(1))
                elif not x.entry.elsewhere and _has(x):
                    self.bad.append((place, "missing"))
            elif _has(x):
                self._take(place, x, there[name])
        if apart and not mine:
            why = f"missing: it is of {apart} ranks in the middle of a window, each of which has sums of its own"
            self.bad.append((f"{label}: sums of gradients", why))

    def _of_window(self, place: str, x: _Kept, given: Any, apart: int) -> None:
        copies = self.names.state.layout.placement.copies
        if not isinstance(given, Tensor) or apart != copies:
            self.bad.append((place, f"missing: each of {apart} ranks has its own in the middle of a window"))
        else:
            self._take(place, x, given)

    def _take(self, place: str, x: _Kept, given: Any) -> None:
        e = x.entry
        if isinstance(e.value, NoTensor):
            if isinstance(given, Tensor):
                self.bad.append((place, f"{_form_of(given)} instead of {e.value.value!r}"))
            else:
                self.values[e.value.at] = given
            return
        if not isinstance(given, Tensor | int | float | bool):
            self.bad.append((place, f"{given!r} instead of {_form_of(e)}"))
            return
        new = torch.as_tensor(given)
        shape, counted = torch.Size(e.shape), not e.shape and not e.value.is_floating_point()
        flat = torch.Size([shape.numel()])
        # Parts were flat ranges once.
        fits = new.shape == shape or (is_distributed(new) and new.shape == flat)
        if not fits or (new.dtype != e.value.dtype and not counted):
            self.other_dtypes |= new.dtype != e.value.dtype
            self.bad.append((place, f"{_form_of(new)} instead of {_form_of(e)}"))
        elif is_distributed(new) and (why := self._misplaced(new)):
            self.bad.append((place, why))
        else:
            self.fits.append((e, new))

    def _misplaced(self, x: Any) -> str | None:
        """Why a DTensor cannot be read: it has come from a file of another rank, or of other ranks than there are."""
        here, ranks = coordinate_of(x), ranks_of(x)
        own = self.single.ranks if self.single is not None else ()
        if here is None:
            return f"a part over the ranks {ranks}, of which this is none"
        if self.single is not None and ranks == own and here != (self.single.rank,):
            return f"the part of rank {here} instead of that of rank {(self.single.rank,)}"
        return None

    def _numbers(self) -> None:
        known = self.names.numbers.keys() | {UPDATES, APART, OWN_ENTRY + STEP, OWN_ENTRY + "micro_step"}
        groups = self.given["param_groups"]
        older = bool(groups) and OWN_KEY in groups[0]
        if not older:
            self.bad += [(name, "unexpected") for name in self.told if name not in known]
        ours = any(name not in (OWN_ENTRY + STEP, OWN_ENTRY + "micro_step") for name in self.told)
        for name, x in self.names.numbers.items():
            e, given = x.entry, self.told.get(name)
            if _is_counted(name, x) and (given is None or self.stale or _is_coarse(given)):
                self.pairs.append((e.value, torch.tensor(self.most)))
            elif given is not None:
                self._number(name, x, given)
            elif e.owner in self.absent:
                self.anew.append(x)
            elif ours and not isinstance(e.value, NoTensor) and (first := before(e)) is not None:
                self.pairs.append((e.value, torch.full_like(e.value, first)))
            elif ours and not e.elsewhere and not (isinstance(e.value, NoTensor) and e.value.value is None):
                # A `None` of ours is no entry of a file.
                self.bad.append((name, "missing"))

    def _number(self, name: str, x: _Kept, given: Any) -> None:
        e = x.entry
        if isinstance(e.value, NoTensor) or not isinstance(e.value, Tensor):
            self._take(name, x, given)
        elif not isinstance(given, Tensor | int | float) or torch.as_tensor(given).shape != e.shape:
            self.bad.append((name, f"{_form_of(given)} instead of {_form_of(e)}"))
        else:
            # An optimizer of torch may have given it the dtype of its parameter.
            self.fits.append((e, torch.as_tensor(given).to(e.value.dtype)))

    def _params(self) -> None:
        given = self.own_key.get("params")
        if given is None:
            return
        own = self.names.params
        given = self._plainly_named(given, own)
        self.bad += [(f"params/{path}", "missing") for path in own if path not in given]
        self.bad += [(f"params/{path}", "unexpected") for path in given if path not in own]
        for path in own.keys() & given.keys():
            self._take(f"params/{path}", own[path], given[path])
        self.fits.sort(key=lambda fit: fit[0].key)

    def _fit_all(self) -> None:
        """Take this rank's part of each tensor. What is distributed otherwise than here is gathered, on all ranks."""
        sent = [is_distributed(new) and not self._lies_alike(e, new) for e, new in self.fits]
        for (e, new), message in zip(self.fits, sent, strict=True):
            if is_distributed(new) and not message:
                self.pairs.append((e.value, as_local(new).reshape(e.value.shape)))
                continue
            whole = in_full(new)
            if not e.elsewhere:
                mine = e.part(whole)
                # Of what was gathered for this, no more than the part is kept.
                self.pairs.append((e.value, mine.clone() if message else mine))

    def _lies_alike(self, e: Entry, new: Any) -> bool:
        single = self.single
        if single is None or e.offset is None or e.at_owner or mesh_of(new) != single.ranks:
            return False
        return in_own_rows(e, single.size) if new.shape == torch.Size(e.shape) else not in_own_rows(e, single.size)

    def _make_anew(self) -> None:
        anew = {x.entry.key for x in self.anew if not x.entry.elsewhere}
        if not anew:
            return
        state = self.names.state
        made = init_transforms(self.names.pipe, state.leaves)
        fresh = with_marks(State(state.leaves, made, state.step, state.micro_step, state.layout))
        for x, e in zip(entries(state), entries(fresh), strict=True):
            if x.key in anew and isinstance(x.value, NoTensor):
                self.values[x.value.at] = e.value.value
            elif x.key in anew and isinstance(x.value, Tensor):
                self.pairs.append((x.value, e.value))

    def _groups(self, taken: list[int]) -> list[dict[str, Any]]:
        """Of each group the rate, what schedulers have put there, and what was set otherwise than by the chain."""
        chains = self.own_key.get("chain", ())
        found, bad = [], []
        for i, (k, optimizer) in enumerate(zip(taken, self.names.groups.optimizers, strict=True)):
            given, t = self.given["param_groups"][k], optimizer.transform
            form = group_form(t)
            chain = chains[k] if k < len(chains) else {}
            was_set = [key for key, x in chain.items() if key in given and not same_value(given[key], x)]
            out = {*BESIDE, *HYPERPARAMETERS, *form, *t.config, "params", "param_names", "name", OWN_KEY} - set(was_set)
            found.append({"lr": given.get("lr"), **{key: x for key, x in given.items() if key not in {*out, "lr"}}})
            if given.get("maximize") and not form.get("maximize"):
                bad.append((f"param_groups/{i}: maximize", "True, and this optimizer goes down"))
        if bad:
            right = "the negative of the loss; or zf.from_torch(torch.optim.AdamW, maximize=True) in the chain"
            raise ValueError(bad_leaves("load_state_dict: of an optimizer that goes another way", bad, right))
        return found


def _names_given(groups: Sequence[Mapping[str, Any]], own: Mapping[str, Any], keys: list[list[Any]]) -> Any:
    """For each group the names of its parameters; `None` where there are none, or not of all."""
    if all(len(g.get("param_names") or ()) == len(k) for g, k in zip(groups, keys, strict=True)) and any(keys):
        return [list(g["param_names"]) for g in groups]
    if any(keys) and all(isinstance(key, str) for k in keys for key in k):
        return keys
    names = own.get("param_names")
    alike = names is not None and [len(x) for x in names] == [len(k) for k in keys]
    return names if alike else None


def _entries(own: Mapping[str, Any]) -> dict[str, Any]:
    """What is given of a leaf, without what says that there is nothing, as a momentum of 0 in torch."""
    return {
        name: x
        for name, x in own.items()
        if name.startswith(OWN_ENTRY) or (x is not None and not (isinstance(x, Mapping) and not x))
    }


def _states(own: Mapping[str, Any]) -> bool:
    """Whether there is a state of a leaf."""
    return any(not name.startswith(OWN_ENTRY) for name in own)


def _is_coarse(x: Any) -> bool:
    """Whether a count has been through a dtype that cannot hold it: torch gives a state that of its parameter."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype not in (torch.float32, torch.float64)


# ----------------------------------------------------------------------------------------------------------------------
# State dicts of an attached model: made in torch's form, and loaded from it or from the forms of older versions.


class StateDicts:
    """Makes and loads the state dicts of one attached model.

    Args:
        home: where its parameters and its state are.
        groups: what has been set in `opt.param_groups`.
    """

    def __init__(self, home: ResidentParams, groups: ParamGroups):
        self.pipe, self.home, self.groups = home.pipe, home, groups
        self.paths = {id(p): path for path, p in home.params.items()}

    def of(self, state: State, groups: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """A dict to be loaded, of any state of the pipeline, with the rates of now, or of `groups`."""
        parts = not cut_as_by_torch(state, self.pipe.road.cutting)
        return as_dict(self.pipe, state, self.groups.to_save() if groups is None else self._own_groups(groups), parts)

    def _own_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups of a state dict, without what is the chain's, under the names of ours."""
        found = []
        for i, group in enumerate(groups):
            o = self.groups.optimizers[i] if i < len(self.groups.optimizers) else None
            fixed = set() if o is None else group_form(o.transform).keys() - {"lr", *o.settable}
            named = {} if o is None else {"name": o.name}
            found.append({**named, **{k: x for k, x in group.items() if k not in fixed}})
        return found

    def check_complete(self) -> None:
        """Refuse models that are themselves cut over ranks: these formats know the chain's shards only."""
        if any(leaf.within is not None and leaf.within.cut for leaf in self.pipe.layout.leaves):
            why = "its states are of parts, over ranks that this form does not know"
            right = "zf.save(directory, opt) and zf.load(directory, like=opt); model.state_dict() of parameters alone"
            raise ValueError(explain("opt.state_dict() of a model that is itself cut over ranks", why, right))

    def check_loadable(self, given: Any) -> None:
        """Refuse a state dict that could not say of which parts it is."""
        self.check_complete()
        if not is_torch_form(given):
            check_torch_cuts("load_state_dict", self.home.current.state, self.pipe.road.cutting)

    def to_save(self) -> dict[str, Any]:
        """What `opt.state_dict()` returns."""
        state = self.home.settled()
        if self.pipe.road.cutting or open_windows(state):
            # What one rank has is a part: a file of it alone could be loaded by no other.
            right = "zf.save(directory, opt) on every rank. A Trainer does it on every rank by its mixin,\n"
            right += "class Trainer(zf.integrations.TrainerMixin, transformers.Trainer). For one file of\n"
            right += "whole states: get_optimizer_state_dict(model, opt, options=StateDictOptions(\n"
            right += "full_state_dict=True, cpu_offload=True)) on every rank, of which the first one has them"
            self._meet("opt.state_dict()", right)
        return as_state_dict(self.pipe, state, self.groups, self.paths)

    def _meet(self, call: str, right: str) -> None:
        """Wait for the other ranks, which make the same call."""
        if self.home.channels.control is not None:
            together(call, self.home.channels.control.ranks, right)

    def named(self, state: State) -> Callable[[str, LeafTensors], LeafTensors]:
        """Gives what `opt.state[p]` has the names of a state dict."""
        found: list[Names] = []

        def named(path: str, kept: LeafTensors) -> LeafTensors:
            if not found:
                found.append(Names(self.pipe, state, self.groups, self.paths))
            return found[0].listed(path, kept)

        return named

    @torch.no_grad()
    def load(self, given: dict[str, Any], rest: Callable[[], object]) -> LoadedStates:
        """Copy a state dict of any form into the model's own tensors.

        Args:
            given: the state dict.
            rest: what else belongs to the load; called once the model has what is loaded.

        Raises:
            ValueError: every missing, unexpected or misshapen entry is named, or a group, and nothing is changed.
        """
        state, current = self.home.settled(), self.home.current
        found = self._read(state, given)
        self.groups.check(found.groups)
        # Until all of it is done: what is made from the state, and rates, are those of before.
        current.tear()
        for mine, theirs in found.pairs:
            # A dict that torch has loaded in place may have our own memory, seen in another order of dimensions.
            mine.copy_(theirs.clone() if memories([mine]) & memories([theirs]) else theirs)
        current.state = with_numbers(state, found.numbers)
        self.home.refresh()
        self.groups.load(found.groups)
        rest()
        current.mend()
        return found.told

    def _read(self, state: State, given: dict[str, Any]) -> ToLoad:
        if is_torch_form(given):
            self._meet("opt.load_state_dict(...)", "opt.load_state_dict(...) on every rank")
            names = Names(self.pipe, with_marks(state), self.groups, self.paths)
            return Loading(names, given, self.home.channels.control).run()
        both = pairs(self.of(with_marks(state)), given)
        found = [(as_local(x), as_local(y)) for x, y in both if isinstance(x, Tensor)]
        numbers = {x.at: y for x, y in both if isinstance(x, NoTensor)}
        return ToLoad(found, numbers, given["param_groups"], LoadedStates("name"))
