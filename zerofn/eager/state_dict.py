"""A state as nested dicts of tensors, for `torch.save` and DCP, and the check of one that is loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._errors import bad_leaves
from ..core.pipeline import Pipeline
from ..core.state import State
from ..core.state_entries import of_rank, over_ranks
from ..core.tree import flatten, tree_keys
from ..core.wrapper_names import unwrapped_names, warn_of_other_names
from ..kernels.rounding import FIRST_FORMAT, FORMAT_ENTRY
from ..ranks.backend import world
from ..ranks.dtensor_shards import as_local, as_part_of, coordinate_of, mesh_of, placed_like
from .param_groups import OWN, packed
from .state_numbers import NoTensor

# Parts were flat ranges of one length in dicts of the first format, and are rows in those of the second.
FLAT_CUTS, FORMAT_OF_DICTS = 1, 2


def as_dict(pipe: Pipeline, state: State, groups: list[dict[str, Any]], parts: bool = False) -> dict[str, Any]:
    """What `Optimizer.state_dict` returns; with `parts`, of this rank's parts alone, whatever they are cut by."""
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
            bad.append((k, f"{_what(b)} instead of {_what(a)}"))
        elif isinstance(a, NoTensor) and isinstance(b, Tensor):
            bad.append((k, f"{_what(b)} instead of {_what(a.value)}"))
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
    return f"{_what(x)} {'in full' if part is x else f'of which this rank has {tuple(part.shape)}'}"


def _what(x: Any) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)
