"""Files with the shards of one rank: that rank reads its own in any later job of as many ranks; all others are told.

What `torch.load` makes of a DTensor has the local tensor and the mesh of the rank that has saved it, and the names of
process groups of that process, which in this one are those of others, or of none.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pairs import cover
from stages import FIRST
from time_limits import limit
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import zerofn as zf

FULL = StateDictOptions(full_state_dict=True)
CUT = ["reduce_scatter", "shard"]
# Which rank's file each rank reads.
WHICH = {"own": lambda rank, n: rank % n, "first": lambda rank, n: 0, "other": lambda rank, n: (rank + 1) % n}


def net() -> nn.Module:
    """Leaves of one row among them, which are gathered over a mesh."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


def train(model: nn.Module, opt: Any, steps: int) -> None:
    for i in range(steps):
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        opt.step()
        opt.zero_grad()


def attached(stage: str, steps: int = 0) -> tuple[nn.Module, Any]:
    model = net()
    opt = zf.attach(model, zf.chain(FIRST[stage](), zf.adamw(0.1)))
    train(model, opt, steps)
    return model, opt


def by_torch(steps: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Parameters and moments of plain torch: ranks have equal data."""
    model = net()
    opt = torch.optim.AdamW(model.parameters(), 0.1)
    train(model, opt, steps)
    return model.state_dict(), get_optimizer_state_dict(model, opt)["state"]


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-8)


def write(folder: str) -> None:
    for stage in CUT:
        for steps in (2, 3):
            model, opt = attached(stage, steps)
            there = f"{folder}/{stage}-{steps}-{dist.get_rank()}"
            torch.save(opt.state_dict(), f"{there}-dict.pt")
            torch.save(get_optimizer_state_dict(model, opt), f"{there}-named.pt")
            torch.save(
                get_optimizer_state_dict(model, opt, options=StateDictOptions(cpu_offload=True)), f"{there}-cpu.pt"
            )
            torch.save(get_model_state_dict(model), f"{there}-model.pt")
            opt.detach()


def read(folder: str, cells: list[tuple[str, str, str, str]]) -> dict[Any, str]:
    """What came of each cell on this rank: "right", "wrong", or the error."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for _ in range(20) if size > 1 else ():
        # Groups of the names that groups had in the job that has saved.
        dist.new_group(list(range(size)))
    want, found = by_torch(2), {}
    for source, target, form, which in cells:
        model, opt = attached(target)
        given = torch.load(f"{folder}/{source}-2-{WHICH[which](rank, 2)}-{form}.pt")
        try:
            if form == "model":
                set_model_state_dict(model, given)
            elif form == "dict":
                opt.load_state_dict(given)
            else:
                set_optimizer_state_dict(model, opt, given)
        except (RuntimeError, ValueError) as error:
            found[source, target, form, which] = str(error)
            opt.detach()
            continue
        if form == "model":
            right = all(close(x, want[0][k]) for k, x in get_model_state_dict(model, options=FULL).items())
        else:
            states = get_optimizer_state_dict(model, opt, options=FULL)["state"]
            right = all(close(x, want[1][path][k]) for path, own in states.items() for k, x in own.items())
        found[source, target, form, which] = "right" if right else "wrong"
        opt.detach()
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    zf.launch(write, 2, str(folder), timeout=limit())
    return folder


FEW = [
    *itertools.product(CUT, FIRST, ["dict"], WHICH),
    *itertools.product(["shard"], ["all_reduce", "shard"], ["named"], WHICH),
    ("shard", "shard", "cpu", "own"),
    ("shard", "shard", "cpu", "first"),
    ("shard", "shard", "model", "own"),
]
MANY = [*itertools.product(CUT, FIRST, ["dict", "named", "cpu"], WHICH)]


@pytest.mark.parametrize("cells", [cover(FEW), pytest.param(FEW + MANY, marks=pytest.mark.slow)], ids=["few", "many"])
@pytest.mark.filterwarnings("ignore:.*torch.distributed")
def test_each_rank_reads_its_own_file_in_another_job(files: Path, cells: Any):
    for rank, found in enumerate(zf.launch(read, 2, str(files), cells, timeout=limit(200))):
        for cell, told in found.items():
            if cell[-1] == "own":
                assert told == "right", (rank, cell, told)
            else:
                assert "0.weight" in told and "0.bias" in told and "zf.save(directory, opt)" in told, (rank, cell, told)
                assert f"the shard of rank {0 if cell[-1] == 'first' else 1}, and this is rank" in told, (rank, cell)


@pytest.mark.filterwarnings("ignore:.*torch.distributed")
def test_one_process_is_told(files: Path):
    cells = [*itertools.product(CUT, FIRST, ["dict", "named"], ["own"])]
    for told in read(str(files), cells).values():
        assert "a shard over the ranks (0, 1) of another job: here is one rank" in told
        assert "0.weight" in told and "full_state_dict=True" in told


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.distributed")
def test_three_ranks_are_told(files: Path):
    cells = [*itertools.product(CUT, FIRST, ["dict", "named"], ["own", "first"])]
    for found in zf.launch(read, 3, str(files), cells, timeout=limit(200)):
        for cell, told in found.items():
            assert "a shard over the ranks (0, 1), of which this is none: rank 2" in told, (cell, told)


def _told(call: Any) -> str:
    try:
        with torch.no_grad():
            call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def _values(folder: str, whose: int) -> dict[str, str]:
    """DTensors of a rank's files as values; what each was told, `""` for nothing."""
    model, opt = attached("shard", 1)
    moments = torch.load(f"{folder}/shard-2-{whose}-named.pt")["state"]["0.weight"]["exp_avg"]
    weights = torch.load(f"{folder}/shard-2-{whose}-model.pt")
    told = {
        "parameter": _told(lambda: model[0].weight.data.copy_(weights["0.weight"])),  # type: ignore[index]
        "moment": _told(lambda: opt.state[model[0].weight].update(exp_avg=moments)),  # type: ignore[index]
    }
    if whose == dist.get_rank():
        want = by_torch(2)
        states = get_optimizer_state_dict(model, opt, options=FULL)["state"]
        assert close(states["0.weight"]["exp_avg"], want[1]["0.weight"]["exp_avg"])
        with opt.gathered():
            assert close(dict(model.named_parameters())["0.weight"], want[0]["0.weight"])
    else:
        told["model"] = _told(lambda: model.load_state_dict(weights))
    opt.detach()
    return told


def _others(folder: str) -> dict[str, str]:
    rank = dist.get_rank()
    own, other = (_values(folder, whose) for whose in (rank, 1 - rank))
    told = {f"own {k}": x for k, x in own.items()} | {f"other {k}": x for k, x in other.items()}
    _, opt = attached("shard")
    given = torch.load(f"{folder}/shard-{2 + rank}-{rank}-dict.pt")
    told["two steps"] = _told(lambda: opt.load_state_dict(given))
    if rank == 1:
        del given["param_groups"][0]["lr"]
    told["torn"] = _told(lambda: opt.load_state_dict(given))
    # By transform and path, as of versions before 0.3.
    given = {"transforms": {}, "params": {}} if rank else torch.load(f"{folder}/shard-2-{rank}-dict.pt")
    told["two forms"] = _told(lambda: opt.load_state_dict(given))
    return told


def test_values_models_and_files_of_two_steps(files: Path):
    for rank, told in enumerate(zf.launch(_others, 2, str(files), timeout=limit())):
        assert told["own parameter"] == told["own moment"] == ""
        for kind in ("other parameter", "other moment", "other model"):
            assert f"the shard of rank {1 - rank}, and this is rank {rank}" in told[kind], kind
        assert "0.weight: the shard" in told["other model"] and "with opt.gathered()" in told["other model"]
        assert "ranks have state dicts of other steps" in told["two steps"]
        assert "step: 2.0 on rank 0, 3.0 on rank 1" in told["two steps"]
        assert "of a file of zerofn 0.2 or older" in told["two forms"]
        # What one rank alone refuses is raised on all.
        assert "param_groups/0/lr: missing" in told["torn"]
