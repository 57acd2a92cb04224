"""State dicts in the form of `torch.optim`, for `get_optimizer_state_dict` and for old checkpoints.

    {"state": {0: {"step": ..., "exp_avg": ..., "exp_avg_sq": ...}}, "param_groups": [{"params": [0], "lr": ...}]}

Parameters are numbers, or names where torch has put those in their place. Counters of whole transforms, of which
`torch.optim` has none, stand under `NUMBERS` in the first group. Stored parameters are in the model's own state dict.
What is loaded may be whole tensors or distributed ones, cut in any way: each rank takes its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .._compat.modules import LOAD_FUNCTION
from .._errors import bad_leaves, explain
from ..core.facts import COUNT
from ..core.row_sharding import cut_by_rows
from ..core.state import State
from ..core.state_by_parameter import LeafTensors
from ..core.state_entries import Entry, of_rank, rebuild
from ..core.tree import flatten, tree_keys
from ..kernels.rounding import FORMAT_ENTRY
from ..ranks.dtensor_shards import as_local, in_full, mesh_of
from ..ranks.group import Group
from .param_groups import HYPERPARAMETERS, ParamGroups, packed

NUMBERS = "zerofn"
# A counter that what is loaded does not have.
UNSET = -1
# What `torch.optim` calls the count of a leaf's updates.
STEP = "step"
# Counts of a whole transform, or of the state, that those of leaves tell where nobody else does.
COUNTED = (STEP, "micro_step")
# The module of torch that needs this form. To give it to every caller would change what files of `torch.save` hold.
ASKS = "torch.distributed.checkpoint.state_dict"
# Hyperparameters that torch keeps in groups beside the rate. Here they are the chain's.
BESIDE = ("amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize")


def is_torch_form(d: Any) -> bool:
    """Whether a state dict is in the form of `torch.optim`."""
    return isinstance(d, Mapping) and "state" in d and "param_groups" in d and "transforms" not in d


class Purpose(Enum):
    """What torch wants a state dict for."""

    PARTS = "each rank has its parts"
    FULL = "all of it"
    TO_LOAD = "torch puts into it what it loads, which may be full, and hands it back"


def purpose_of(frame: FrameType) -> Purpose | None:
    """What the function of torch wants that calls `opt.state_dict()`; `None` for all other callers."""
    if frame.f_globals.get("__name__") != ASKS:
        return None
    if getattr(frame.f_locals.get("info"), "full_state_dict", False):
        return Purpose.FULL
    above: FrameType | None = frame
    while above is not None and (above.f_code.co_name, above.f_globals.get("__name__")) != (LOAD_FUNCTION, ASKS):
        above = above.f_back
    return Purpose.PARTS if above is None else Purpose.TO_LOAD


def in_torch_form(
    own: Mapping[str, Any], groups: ParamGroups, paths: Mapping[int, str], purpose: Purpose = Purpose.PARTS
) -> dict[str, Any]:
    """A state dict of ours in the form of `torch.optim`; tensors are the same ones, but for counts.

    Args:
        own: `transforms`, `step` and `micro_step`, as `eager.state_dict.as_dict` gives them.
        groups: of the optimizer.
        paths: `id(parameter)` to path.
        purpose: what it is for.
    """
    held = {path: LeafTensors(own["transforms"], path, set(paths.values())) for path in paths.values()}
    state: dict[int, dict[str, Any]] = {}
    listed: list[dict[str, Any]] = []
    for group, optimizer in zip(groups.groups, groups.optimizers, strict=True):
        numbers = range(len(state), len(state) + len(group["params"]))
        for number, p in zip(numbers, group["params"], strict=True):
            kept = held[paths[id(p)]]
            state[number] = {_theirs(name, kept): x.float() if name == COUNT else x for name, x in kept.items()}
        told = {k: v for k, v in optimizer.transform.config.items() if isinstance(v, int | float | tuple)}
        listed.append({**told, **packed(group), "params": list(numbers)})
    numbers = _counters(own, held)
    if purpose is Purpose.TO_LOAD:
        # Of what other ranks alone are given, torch loads no key that is not here.
        listed = [{**dict.fromkeys(BESIDE), **group} for group in listed]
        numbers = {key: torch.full_like(x, UNSET) for key, x in numbers.items()}
    if purpose is Purpose.FULL:
        # Of full ones it loads none that its own optimizers do not have.
        listed = [{k: x for k, x in group.items() if k != "name"} for group in listed]
        most = max((int(x) for kept in state.values() for k, x in kept.items() if k == STEP), default=0)
        numbers = {k: x for k, x in numbers.items() if k.rpartition("/")[2] not in COUNTED or int(x) != most}
    if numbers:
        listed[0][NUMBERS] = {key: x.clone() for key, x in numbers.items()}
    return {"state": state, "param_groups": listed}


def pairs_of(
    state: State, groups: ParamGroups, paths: Mapping[int, str], given: Mapping[str, Any], cutting: Sequence[Group]
) -> list[tuple[Tensor, Tensor]]:
    """Each tensor of ours with the one that is to replace it; all ranks call it where `given` is distributed.

    Args:
        state: ours.
        groups: of the optimizer.
        paths: `id(parameter)` to path.
        given: in the form of `torch.optim`, with whole tensors, or distributed ones.
        cutting: the ranks that leaves are cut over, one axis after the other.

    Raises:
        ValueError: groups of other lengths; every missing, unexpected or misshapen tensor is named.
    """
    lengths = [len(g["params"]) for g in groups.groups], [len(g["params"]) for g in given["param_groups"]]
    if lengths[0] != lengths[1]:
        wrong = f"load_state_dict of groups of {lengths[1]} parameters into groups of {lengths[0]}"
        why = "parameters are told by their place in the groups, and the groups are those of zf.partition"
        raise ValueError(explain(wrong, why, "the chain of that checkpoint, with the groups of that checkpoint"))
    places, where, every = rebuild(state, lambda e: e).transforms, state.layout.placement, set(paths.values())
    alike = cutting[0].ranks if len(cutting) == 1 and not where.ranges else None
    found: list[tuple[Tensor, Tensor]] = []
    bad: list[tuple[str, str]] = []
    counts = [0.0]
    for mine, theirs in zip(groups.groups, given["param_groups"], strict=True):
        own = [paths[id(p)] for p in mine["params"]]
        # Names may stand in another order.
        keys = own if set(own) == set(theirs["params"]) else theirs["params"]
        for path, key in zip(own, keys, strict=True):
            kept, there = LeafTensors(places, path, every), given["state"].get(key, {})
            names = {_theirs(name, kept): name for name in kept}
            label = path if key == path else f"{path} ({key})"
            # Of a leaf that another rank owns there may be nothing, or the same as on all ranks.
            here = [name for name in names if isinstance(kept[names[name]], Entry)]
            bad += [(f"{label}: {name}", "missing") for name in here if name not in there]
            bad += [(f"{label}: {name}", "unexpected") for name in there if name not in names]
            for name in (name for name in names if name in there):
                place, new = kept[names[name]], torch.as_tensor(there[name])
                if names[name] == COUNT:
                    counts.append(float(new))
                    found += [(place.value, new)] if isinstance(place, Entry) else []
                elif (pair := _fit(place, new, alike)) is None:
                    bad.append((f"{label}: {name}", f"{_what(new)} instead of {_what(place)}"))
                else:
                    found += pair
    more = _numbers_of(state, given, every, max(counts), bad)
    if bad:
        right = "a checkpoint of the same optimizer; zf.load(directory, like, strict=False) of one by zf.save"
        raise ValueError(bad_leaves("load_state_dict: this is not the state of this pipeline", sorted(bad), right))
    return found + more


def _fit(place: Any, new: Tensor, alike: tuple[int, ...] | None) -> list[tuple[Tensor, Tensor]] | None:
    """What is to be written where; `None` where it is not of this leaf. The same answer on all ranks.

    Args:
        place: an `Entry`, or where another rank has the leaf a tensor of its shape.
        new: whole, or distributed.
        alike: the ranks that parts like ours lie over, so that they need not be sent.
    """
    shape, dtype = _kind(place)
    if new.dtype != dtype:
        return None
    ranks, flat = mesh_of(new), torch.Size([shape.numel()])
    cut_alike = isinstance(place, Entry) and place.offset is not None and not place.at_owner and ranks == alike
    if cut_alike and ranks is not None and new.shape == (shape if cut_by_rows(shape, len(ranks)) else flat):
        return [(place.value, as_local(new).reshape(-1))]
    # Parts were flat ranges once.
    if new.shape != shape and (ranks is None or new.shape != flat):
        return None
    whole = in_full(new)
    if not isinstance(place, Entry):
        return []
    # Of what was gathered for this, no more than the part is kept.
    return [(place.value, place.part(whole) if whole is new else place.part(whole).clone())]


def _kind(x: Any) -> tuple[torch.Size, torch.dtype]:
    return (torch.Size(x.shape), x.value.dtype) if isinstance(x, Entry) else (x.shape, x.dtype)


def _numbers_of(
    state: State, given: Mapping[str, Any], paths: set[str], most: float, bad: list[tuple[str, str]]
) -> list[tuple[Tensor, Tensor]]:
    """Counters of whole transforms with those given, or with the most updates that a leaf has had.

    What is missing or misshapen is put into `bad`.
    """
    of_mine = f"/{of_rank(state.layout.placement.rank)}/"
    told = given["param_groups"][0].get(NUMBERS)
    numbers = {key.replace(of_mine, "/"): torch.as_tensor(x) for key, x in (told or {}).items()}
    own = {"transforms": state.transforms, STEP: state.step, "micro_step": state.micro_step}
    found = []
    for key, x in _counters(own, {path: LeafTensors(state.transforms, path, paths) for path in paths}).items():
        new, last = numbers.get(key), key.rpartition("/")[2]
        if new is not None and (new.shape != x.shape or mesh_of(new) is not None):
            bad.append((key, f"{_what(new)} instead of {_what(x)}"))
        elif new is not None and (not _unset(new) or torch.equal(new.to(x), x)):
            found.append((x, new))
        elif last in COUNTED and not x.ndim:
            # Of `torch.optim` itself: it counts by leaf alone.
            found.append((x, torch.tensor(most)))
        elif told and last != FORMAT_ENTRY:
            bad.append((key, "missing"))
    return found


def _unset(x: Tensor) -> bool:
    return x.numel() > 0 and bool((x == UNSET).all())


def groups_of(groups: ParamGroups, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each group the rate, and what schedulers have put there: hyperparameters are the chain's."""
    left_out = {NUMBERS, "params", *BESIDE, *HYPERPARAMETERS}
    return [
        {"lr": g.get("lr"), **{k: v for k, v in g.items() if k not in left_out and k not in optimizer.transform.config}}
        for g, optimizer in zip(given, groups.optimizers, strict=True)
    ]


def _theirs(name: str, kept: LeafTensors) -> str:
    return STEP if name == COUNT and STEP not in kept else name


def _counters(own: Mapping[str, Any], held: Mapping[str, LeafTensors]) -> dict[str, Tensor]:
    """All that belongs to no leaf, by key.

    Raises:
        ValueError: of a state some tensors would be left out.
    """
    of_leaves = {id(x) for kept in held.values() for x in kept.values()}
    found = {name: own[name] for name in COUNTED}
    rest = [(key, x) for key, x in _numbers(own["transforms"], "transforms") if id(x) not in of_leaves]
    found.update(rest)
    told = of_leaves | {id(x) for x in found.values()}
    keys, every = tree_keys(own["transforms"]), flatten(own["transforms"])[0]
    entries = [("/".join(k), x) for k, x in zip(keys, every, strict=True)]
    lost = [k for k, x in entries if isinstance(x, Tensor) and id(x) not in told]
    counts = [k for k, x in entries if isinstance(x, int | float | complex)]
    if lost or counts:
        wrong = f"get_optimizer_state_dict(model, opt) with a state of {', '.join(lost or counts)}"
        why = "torch's form has states by parameter and counters, and what these belong to has no name there"
        right = "zf.save(directory, opt) and zf.load(directory, like=opt), or opt.state_dict()"
        if not lost:
            why, right = "torch's form has tensors alone, and these are numbers of Python", f"torch.tensor(0); {right}"
        raise ValueError(explain(wrong, why, right))
    return found


def _numbers(tree: Any, above: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield above, tree
    elif isinstance(tree, Mapping | tuple | list):
        for key, x in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _numbers(x, f"{above}/{key}")


def _what(x: Any) -> str:
    shape, dtype = _kind(x)
    return f"{tuple(shape)} {dtype}"
