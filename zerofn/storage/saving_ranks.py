"""The ranks that save and load a state together, and checks that what they have fits together."""

from __future__ import annotations

import os
import zlib

import torch
from torch import Tensor

from .._errors import bad_leaves, explain
from ..core.layout import Placement
from ..core.state import State
from ..core.state_entries import entries
from ..ranks.backend import gather_objects, world
from ..ranks.group import Group
from ..ranks.process_groups import connected, world_group
from ..ranks.rendezvous import together

MAX_COMPARED = 4096  # elements of a tensor that is compared between ranks


def row_major(x: Tensor) -> Tensor:
    """The elements in one dimension, in the order in which they are saved."""
    return x.detach().contiguous().view(-1)


def wait_for_all_ranks(call: str, placement: Placement) -> None:
    """Return when all ranks have made this call; raise a RuntimeError if some make another one, or none."""
    if placement.together > 1:
        everybody = tuple(range(world()[1]))
        together(call, everybody, f"{call} on every rank, without `if rank == 0:` around it")


def checkpoint_group(placement: Placement, writes: str | os.PathLike | None = None) -> Group:
    """The ranks that save or load a state together.

    Args:
        placement: how the state lies over ranks.
        writes: the directory, if they save. Parts of a job that train a model each must not share one.
    """
    if placement.together == 1:
        return Group()
    world = world_group("checkpoint")
    if world.size == placement.together:
        return world
    group = connected(placement.axes, "checkpoint")
    if writes is not None:
        _check_apart(writes, group, world)
    return group


def raise_on_all_ranks(failure: BaseException | None, group: Group) -> None:
    """Raise the error of one rank on every rank; of several errors that of the first rank.

    A file may be damaged or missing for some ranks alone, and the others must not go on without them.
    """
    failure = next((x for x in gather_objects(failure, group) if x is not None), None)
    if failure is not None:
        raise failure


def _check_apart(place: str | os.PathLike, group: Group, world: Group) -> None:
    mine = os.path.abspath(place)
    answers = gather_objects((group.ranks, mine), world)
    same = next((ranks for ranks, other in answers if other == mine and ranks != group.ranks), None)
    if same is not None:
        wrong = f"ranks {list(group.ranks)} and {list(same)} save to {os.fspath(place)!r}"
        why = "each of these parts of the job has a state of its own, and one would replace the other"
        right = 'zf.save(f"{directory}/{part}", state), with another part for each'
        raise ValueError(explain(wrong, why, right))


def check_replicas(state: State, group: Group) -> None:
    """Raise if tensors that every rank has whole differ between ranks: each is written once.

    Small ones are compared. Where leaves are cut, so are large ones, which may be of pieces: in lists of another
    library, or of shapes that do not follow the leaf's.
    """
    if group.size == 1:
        return
    placement = state.layout.placement
    compared = {
        e.key: (e.shape, zlib.crc32(row_major(e.value).view(torch.uint8).cpu().numpy().tobytes()))
        for e in entries(state)
        if isinstance(e.value, Tensor) and e.offset is None and e.owner not in placement.apart
        if 0 < e.value.numel() <= MAX_COMPARED or placement.size > 1 or e.of_part
    }
    answers = gather_objects(compared, group)
    # Of the keys of all ranks, so that all of them raise: one that went on would wait for the others.
    keys = dict.fromkeys(key for answer in answers for key in answer)
    bad = [(key, "differs between ranks") for key in keys if len({a.get(key) for a in answers}) > 1]
    if bad:
        right = "state that is per leaf and shaped like it, which is sharded, or equal on all ranks"
        if placement.size > 1:
            right += ';\nneeds="row" or needs="leaf" for a transform whose state is of another shape than its leaf'
            right += ";\nof a guest, which names pieces at will, by torch.distributed.checkpoint of opt.state_dict()"
        raise ValueError(bad_leaves("zf.save: what should be equal on every rank is not", bad, right))
