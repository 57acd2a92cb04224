"""A state as nested dicts by transform and path: what `opt.load_state` compares, and how older state dicts are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.pipeline import Pipeline
from ..core.state import State
from ..core.state_entries import of_rank, over_ranks
from ..core.tree import flatten, tree_keys
from ..core.wrapper_names import unwrapped_names, warn_of_other_names
from ..kernels.rounding import FIRST_FORMAT, FORMAT_ENTRY
from ..ranks.backend import world
from ..ranks.dtensor import as_local, as_part_of, is_distributed, mesh_of, of_this_rank, placed_like
from ..ranks.group import Group
from .loading import ON_EACH_RANK, Misfit, NoTensor, form_of, on_all_ranks
from .param_groups import OWN, packed

# Shards were flat ranges of one length in dicts of the first format, and are rows in those of the second.
FLAT_CUTS, FORMAT_OF_DICTS = 1, 2


def by_path(pipe: Pipeline, state: State, groups: list[dict[str, Any]], parts: bool = False) -> dict[str, Any]:
    """A state as nested dicts of tensors, by transform and path.

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


def is_path_form(d: Any) -> bool:
    """Whether a state dict is by transform and path."""
    return isinstance(d, dict) and "transforms" in d


def pairs(
    own: dict[str, Any], given: dict[str, Any], groups: Sequence[Group], control: Group | None
) -> list[tuple[Any, Any]]:
    """Each entry of `own` with the one that is to replace it, but for what schedulers have put into groups.

    Args:
        own: what `by_path` makes of the state of now.
        given: the state dict.
        groups: over which a DTensor of the same ranks can be gathered.
        control: the ranks that load a state dict together; `None` where one rank may be alone.

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
    read = {k: of_this_rank(x, groups) for k, x in theirs.items() if is_distributed(x)}
    theirs |= read

    def check_ranks() -> None:
        if bad := [(k, x) for k, x in read.items() if isinstance(x, str)]:
            raise Misfit(bad, ON_EACH_RANK)

    on_all_ranks(check_ranks, control)
    if isinstance(given, dict) and given.get("format") == FLAT_CUTS:
        theirs = {k: placed_like(x, mine[k]) if _cut_flat(mine.get(k), x) else x for k, x in theirs.items()}
    # What ranks have had of leaves of few rows was flat; in one file of all ranks it is so still.
    theirs = {k: x.view(mine[k].shape) if _flat_whole(mine.get(k), x) else x for k, x in theirs.items()}
    for k, x in mine.items():
        if k not in theirs and _is_format(k, mine):
            # A state dict of before there were formats.
            theirs[k] = torch.full_like(x, FIRST_FORMAT)
    on_all_ranks(lambda: _check(mine, theirs), control)
    warn_of_other_names("opt.load_state_dict(d)", renamed)
    return [(a, theirs[k]) for k, a in mine.items()]


def _check(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Refuse entries that do not fit."""
    bad = [(k, "missing") for k in mine if k not in theirs] + [(k, "unexpected") for k in theirs if k not in mine]
    for k in mine.keys() & theirs.keys():
        a, b = mine[k], theirs[k]
        if isinstance(a, Tensor) and (not isinstance(b, Tensor) or a.shape != b.shape or a.dtype != b.dtype):
            bad.append((k, f"{form_of(b)} instead of {form_of(a)}"))
        elif isinstance(a, NoTensor) and isinstance(b, Tensor):
            bad.append((k, f"{form_of(b)} instead of {form_of(a.value)}"))
        elif isinstance(a, Tensor) and _cut_otherwise(a, b):
            # A whole and a part of a leaf with one dimension have one shape; copying would broadcast, or stop half way.
            bad.append((k, f"{_cut(b)} instead of {_cut(a)}"))
    if not bad:
        return
    right = "the state_dict of this pipeline on this model"
    if any(_cut_otherwise(a, theirs.get(k)) for k, a in mine.items()):
        right += (
            ", on as many ranks. Between whole leaves and parts of them:\n"
            "         zf.save(directory, opt) and opt.load_state(zf.load(directory, like=opt.state));\n"
            "         of parameters alone, model.load_state_dict(full) and with opt.gathered(): model.state_dict()"
        )
    if any(isinstance(a, Tensor) and a.dtype != getattr(theirs.get(k), "dtype", a.dtype) for k, a in mine.items()):
        right += (
            "; dtypes are never changed silently. To go on in others, with the moments begun anew:\n"
            "         old = zf.attach(model, old_tx); old.load_state_dict(d); old.detach()\n"
            "         opt = zf.attach(model, tx)"
        )
    raise Misfit(bad, right)


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


def _flat_whole(mine: Any, theirs: Any) -> bool:
    both = isinstance(mine, Tensor) and isinstance(theirs, Tensor)
    return (
        both
        and not is_distributed(mine)
        and mine.ndim > 1
        and theirs.shape == (mine.numel(),)
        and not is_distributed(theirs)
    )


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


def _cut(x: Tensor) -> str:
    part = as_local(x)
    return f"{form_of(x)} {'in full' if part is x else f'of which this rank has {tuple(part.shape)}'}"
