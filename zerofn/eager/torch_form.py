"""State dicts in the form of `torch.optim`, for `get_optimizer_state_dict` and for old checkpoints.

    {"state": {0: {"step": ..., "exp_avg": ..., "exp_avg_sq": ...}}, "param_groups": [{"params": [0], "lr": ...}]}

Parameters are numbers, or names where torch has put those in their place. Counters of whole transforms, of which
`torch.optim` has none, stand under `NUMBERS` in the first group. Stored parameters are in the model's own state dict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves, explain
from ..core.leaf_tensors import LeafTensors
from ..ranks.backend import as_local
from .param_groups import HYPERPARAMETERS, ParamGroups, packed

NUMBERS = "zerofn"
# What `torch.optim` calls the count of a leaf's updates.
COUNT, STEP = "count", "step"
# Who wants this form, and no other. To give it to everybody would change what files of `torch.save` hold.
ASKS = "torch.distributed.checkpoint.state_dict"
# Hyperparameters that torch keeps in groups beside the rate. Here they are the chain's.
BESIDE = ("amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize")


def is_torch_form(d: Any) -> bool:
    """Whether a state dict is in the form of `torch.optim`."""
    return isinstance(d, Mapping) and "state" in d and "param_groups" in d and "transforms" not in d


def in_torch_form(own: dict[str, Any], groups: ParamGroups, paths: Mapping[int, str]) -> dict[str, Any]:
    """A state dict of ours in the form of `torch.optim`; tensors are the same ones, but for counts.

    Args:
        own: as `eager.state_dict.as_dict` gives it.
        groups: of the optimizer.
        paths: `id(parameter)` to path.
    """
    state: dict[int, dict[str, Any]] = {}
    listed: list[dict[str, Any]] = []
    for group, (t, _) in zip(groups.groups, groups.optimizers.values(), strict=True):
        numbers = range(len(state), len(state) + len(group["params"]))
        for number, p in zip(numbers, group["params"], strict=True):
            kept = LeafTensors(own["transforms"], paths[id(p)])
            state[number] = {_theirs(name, kept): x.float() if name == COUNT else x for name, x in kept.items()}
        told = {k: v for k, v in t.config.items() if isinstance(v, int | float | tuple)}
        listed.append({**told, **packed(group), "params": list(numbers)})
    listed[0][NUMBERS] = {key: x.clone() for key, x in _counters(own, set(paths.values()))}
    return {"state": state, "param_groups": listed}


def pairs_of(
    own: dict[str, Any], groups: ParamGroups, paths: Mapping[int, str], given: Mapping[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Each tensor of ours with the one that is to replace it.

    Raises:
        ValueError: groups of other lengths; every missing, unexpected or misshapen tensor is named.
    """
    lengths = [len(g["params"]) for g in groups.groups], [len(g["params"]) for g in given["param_groups"]]
    if lengths[0] != lengths[1]:
        wrong = f"load_state_dict of groups of {lengths[1]} parameters into groups of {lengths[0]}"
        why = "parameters are told by their place in the groups, and the groups are those of zf.partition"
        raise ValueError(explain(wrong, why, "the chain of that checkpoint, with the groups of that checkpoint"))
    found: list[tuple[Tensor, Tensor]] = []
    bad: list[tuple[str, str]] = []
    counts = [0.0]
    for mine, theirs in zip(groups.groups, given["param_groups"], strict=True):
        for p, key in zip(mine["params"], theirs["params"], strict=True):
            kept, there = LeafTensors(own["transforms"], paths[id(p)]), given["state"].get(key, {})
            names = {_theirs(name, kept): name for name in kept}
            label = f"{paths[id(p)]} ({key})" if isinstance(key, int) else str(key)
            bad += [(f"{label}: {name}", "missing") for name in names if name not in there]
            bad += [(f"{label}: {name}", "unexpected") for name in there if name not in names]
            for name in names.keys() & there.keys():
                x = kept[names[name]]
                new = torch.as_tensor(there[name])
                count = names[name] == COUNT
                if count:
                    counts.append(float(new))
                elif as_local(new).shape != as_local(x).shape or new.dtype != x.dtype:
                    bad.append((f"{label}: {name}", f"{_what(new)} instead of {_what(x)}"))
                found.append((as_local(x), as_local(new)))
    if bad:
        right = "a checkpoint of the same optimizer, on as many ranks; zf.save(directory, opt) for any number of them"
        raise ValueError(bad_leaves("load_state_dict: this is not the state of this pipeline", sorted(bad), right))
    numbers = given["param_groups"][0].get(NUMBERS) or {}
    for key, x in _counters(own, set(paths.values())):
        if key in numbers:
            found.append((x, torch.as_tensor(numbers[key])))
        elif key.rpartition("/")[2] in (STEP, "micro_step"):
            # Of `torch.optim` itself: it counts by leaf alone.
            found.append((x, torch.tensor(max(counts))))
    return found


def groups_of(groups: ParamGroups, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each group the rate, and what schedulers have put there: hyperparameters are the chain's."""
    left_out = {NUMBERS, "params", *BESIDE, *HYPERPARAMETERS}
    return [
        {"lr": g["lr"], **{k: v for k, v in g.items() if k not in left_out and k not in t.config}}
        for g, (t, _) in zip(given, groups.optimizers.values(), strict=True)
    ]


def _theirs(name: str, kept: LeafTensors) -> str:
    return STEP if name == COUNT and STEP not in kept else name


def _counters(own: dict[str, Any], paths: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Numbers that belong to no leaf, by dotted key."""
    yield from ((name, own[name]) for name in (STEP, "micro_step"))
    yield from _numbers(own["transforms"], "transforms", paths)


def _numbers(tree: Any, above: str, paths: set[str]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield above, tree
    elif isinstance(tree, Mapping) and not paths & set(tree):
        for key, x in tree.items():
            yield from _numbers(x, f"{above}/{key}", paths)


def _what(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"
