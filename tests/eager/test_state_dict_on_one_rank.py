"""`opt.state_dict()` on one rank alone, as a Trainer calls it: told where that rank has a part of the state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_launch import one_launch
from time_limits import limit
from torch import nn

import zerofn as zf

CHAINS: dict[str, Any] = {
    "all_reduce": lambda: [zf.all_reduce()],
    "reduce_scatter": lambda: [zf.reduce_scatter()],
    "shard": lambda: [zf.shard()],
    "an open window, cut": lambda: [zf.accumulate(2), zf.reduce_scatter()],
    "an open window, whole": lambda: [zf.accumulate(2), zf.all_reduce()],
    "a closed window, whole": lambda: [zf.accumulate(1), zf.all_reduce()],
}


def alone(kind: str, then: str, rank_of_call: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    opt = zf.attach(model, zf.chain(*CHAINS[kind](), zf.adamw(0.1)))

    def step() -> None:
        model(torch.ones(2, 4)).square().mean().backward()
        opt.step()
        opt.zero_grad()

    step()
    try:
        if dist.get_rank() == rank_of_call:
            opt.state_dict()
        elif then == "trains":
            step()
            step()
    except RuntimeError as error:
        return str(error)
    finally:
        if kind in BY_ITSELF:
            opt.detach()
    return ""


# Of these the dict is each rank's own, or is refused on each rank for itself: the other one waits for nobody.
BY_ITSELF = ("all_reduce", "an open window, cut", "an open window, whole", "a closed window, whole")
# The others end a launch: a rank that asks alone is told once the other one trains on, or has ended.
ALONE = [("shard", "trains", 0), ("reduce_scatter", "ends", 1)]
MORE = [(kind, then, rank) for kind in ("shard", "reduce_scatter") for then in ("trains", "ends") for rank in (0, 1)]


@pytest.mark.parametrize(
    "kind, then, rank", [pytest.param(*c, marks=() if c in ALONE else pytest.mark.slow) for c in MORE]
)
@pytest.mark.filterwarnings("ignore:module forward hook")
def test_the_dict_of_one_rank_alone(kind: str, then: str, rank: int):
    told = zf.launch(alone, 2, kind, then, rank, timeout=limit())[rank]
    assert told.startswith(f"opt.state_dict() on rank {rank} and not on every rank\n")
    assert "zf.save(directory, opt)" in told and "TrainerMixin" in told and "full_state_dict=True" in told


@pytest.mark.filterwarnings("ignore:module forward hook")
def test_a_dict_of_ones_own_is_given_or_refused_without_the_other_rank():
    rows = [(kind, "ends", rank) for kind in BY_ITSELF for rank in (0, 1)]
    for (kind, _, rank), found in one_launch(2, alone, rows).items():
        if "open window" in kind:
            assert found[rank].startswith(
                "opt.state_dict() with sums, or errors, of gradients that are each rank's own\n"
            )
            assert all(x in found[rank] for x in ("accumulate", "opt.is_boundary", "zf.save(directory, opt)"))
        else:
            assert found[rank] == "", kind


def whole_into_parts(given: dict[str, Any]) -> str:
    torch.manual_seed(0)
    opt = zf.attach(nn.Linear(4, 2), zf.chain(zf.accumulate(2), zf.all_reduce(), zf.adamw(0.1)))
    try:
        opt.load_state_dict(given)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:module forward hook")
def test_an_open_window_of_one_process_is_refused_where_ranks_have_sums_of_their_own():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    opt = zf.attach(model, zf.chain(zf.accumulate(2), zf.adamw(0.1)))
    for told in ("accumulate/count: 1: in the middle of a window", ""):
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        for found in zf.launch(whole_into_parts, 2, opt.state_dict(), timeout=limit()):
            assert told in found and bool(told) == bool(found), found
