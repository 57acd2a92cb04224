"""State dicts that do not fit: everything that is wrong is named at once, on every rank, and nothing is changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stages import FIRST
from time_limits import limit
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import zerofn as zf

FULL = StateDictOptions(full_state_dict=True)
ADAM = ("exp_avg", "exp_avg_sq")


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


def run(stage: str | None = None, steps: int = 2) -> tuple[Any, Any]:
    model = net()
    named = model.named_parameters()
    opt: Any = (
        torch.optim.AdamW(named, 0.1) if stage is None else zf.attach(model, zf.chain(FIRST[stage](), zf.adamw(0.1)))
    )
    for i in range(steps):
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def whole(model: Any, opt: Any) -> dict[str, Any]:
    states = get_optimizer_state_dict(model, opt, options=FULL)["state"]
    return {f"{path}: {k}": x.clone() for path, own in states.items() for k, x in own.items()}


# What is done to a state dict of torch.optim, and which rows then stand in the error. All of them are done at once.
AT_ONCE: list[tuple[str, Any]] = [
    (
        "0.weight (0): exp_avg: (7,) torch.float32 instead of (6, 3)",
        lambda d: d["state"][0].update(exp_avg=torch.ones(7)),
    ),
    (
        "0.weight (0): exp_avg_sq: (6, 3) torch.float64",
        lambda d: d["state"][0].update(exp_avg_sq=torch.ones(6, 3).double()),
    ),
    ("0.bias (1): exp_avg_sq: missing", lambda d: d["state"][1].pop("exp_avg_sq")),
    ("0.bias (1): foo: unexpected", lambda d: d["state"][1].update(foo=torch.ones(1))),
    ("2.weight (2): exp_avg: 'text' instead of", lambda d: d["state"][2].update(exp_avg="text")),
    ("2.bias: missing", lambda d: d["param_groups"][0]["param_names"].__setitem__(3, "other.bias")),
    ("other.bias: unexpected", lambda d: None),
    ("9: unexpected: no group has it", lambda d: d["state"].update({9: {}})),
    ("extra: unexpected", lambda d: d.update(extra=1)),
]
MALFORMED: list[tuple[str, Any]] = [
    ("opt.load_state_dict of a dict of ['model', 'optimizer']", {"model": {}, "optimizer": {}}),
    ("opt.load_state_dict of a NoneType", None),
    ("state: a list instead of a dict", {"state": [], "param_groups": []}),
    ("param_groups: a dict instead of a list", {"state": {}, "param_groups": {}}),
    ("state/0: an int instead of a dict", {"state": {0: 3}, "param_groups": [{"lr": 1.0, "params": [0]}]}),
    ("param_groups/0: an int instead of a dict", {"state": {}, "param_groups": [3]}),
    ("param_groups/0/lr: missing", {"state": {}, "param_groups": [{"params": [0]}]}),
]


def of_torch(make: Any, like: Any = None) -> dict[str, Any]:
    """The state dict of one of torch's optimizers behind a step."""
    model = net() if like is None else like
    optimizer = make(model)
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
    return optimizer.state_dict()


# What another optimizer, other groups and another model have; all rows stand in the one error.
OTHERS: list[tuple[tuple[str, ...], Any]] = [
    (
        ("0.weight (0): exp_avg: missing", "0.weight (0): momentum_buffer: unexpected"),
        lambda: of_torch(lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)),
    ),
    (
        ("groups of [1, 1, 1, 1] parameters into groups of [4]",),
        lambda: of_torch(lambda m: torch.optim.AdamW([{"params": [p]} for p in m.parameters()], 0.1)),
    ),
    (
        ("1.bias: unexpected", "2.bias: missing"),
        lambda: of_torch(
            lambda m: torch.optim.AdamW(m.named_parameters(), 0.1), nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2))
        ),
    ),
    (("maximize",), lambda: of_torch(lambda m: torch.optim.AdamW(m.named_parameters(), 0.1, maximize=True))),
]


def told(opt: Any, given: Any) -> str:
    try:
        opt.load_state_dict(given)
    except ValueError as error:
        return str(error)
    return "loaded"


def doubled(given: dict[str, Any], name: str, number: int) -> dict[str, Any]:
    given = copy.deepcopy(given)
    given["param_groups"][0]["param_names"][3] = name
    given["param_groups"][0]["params"][3] = number
    return given


def bad_ones(stages: list[str]) -> list[str]:
    """What is not as it must be."""
    wrong, good = [], run()[1].state_dict()
    for stage in stages:
        model, opt = run(stage, 1)
        before = whole(model, opt)
        given = copy.deepcopy(good)
        for _, change in AT_ONCE:
            change(given)
        error = told(opt, given)
        wrong += [f"{stage}: {row}\n{error}" for row, _ in AT_ONCE if row not in error]
        wrong += [f"{stage}: {row}\n{error}" for row, x in MALFORMED if row not in (error := told(opt, x))]
        for row, x in (
            ("2.weight: doubled: two parameters have this name", doubled(good, "2.weight", 3)),
            ("2: doubled: it stands in param_groups more than once", doubled(good, "2.bias", 2)),
        ):
            x["state"][0]["exp_avg"] = torch.ones(7)
            error = told(opt, x)
            wrong += [f"{stage}: {r}\n{error}" for r in (row, "0.weight (0): exp_avg: (7,)") if r not in error]
        for rows, make in OTHERS:
            error = told(opt, make())
            wrong += [f"{stage}: {row}\n{error}" for row in rows if row not in error]
        after = whole(model, opt)
        wrong += [f"{stage}: {k} has changed" for k, x in before.items() if not torch.equal(x, after[k])]
        opt.detach()
    return wrong


def test_all_is_named_at_once_on_one_process():
    assert bad_ones(["all_reduce"]) == []


def prefixed(given: dict[str, Any], prefix: str) -> dict[str, Any]:
    given = copy.deepcopy(given)
    given["param_groups"][0]["param_names"] = [prefix + name for name in given["param_groups"][0]["param_names"]]
    return given


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_fsdp_wrapped_module.", "module._orig_mod."])
def test_names_of_wrappers(prefix):
    _, theirs = run()
    _, opt = run("all_reduce", 0)
    with pytest.raises(ValueError, match=r"(?s)0.weight: missing.*names of the plain model"):
        opt.load_state_dict(prefixed(theirs.state_dict(), prefix))
    with pytest.raises(ValueError, match=r"(?s)0.weight: missing.*net.0.weight: unexpected") as error:
        opt.load_state_dict(prefixed(theirs.state_dict(), "net."))
    assert "names of the plain model" not in str(error.value)


PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate(), "partial": Partial()}


def placed(x: torch.Tensor, mesh: DeviceMesh, how: str) -> torch.Tensor:
    if x.ndim < 2:
        return x
    first = PLACEMENTS[how]
    if how == "partial":
        return DTensor.from_local(x / mesh.size(), mesh, [first] * mesh.ndim, run_check=False)
    return distribute_tensor(x, mesh, [first, *[Replicate()] * (mesh.ndim - 1)])


def of_meshes(stages: list[str]) -> list[str]:
    """Moments as DTensors of any placement on any mesh of all ranks are read; of others they are refused."""
    wrong = []
    model, theirs = run()
    good = get_optimizer_state_dict(model, theirs, options=FULL)
    want, size = whole(model, theirs), dist.get_world_size()
    meshes = {
        "all": init_device_mesh("cpu", (size,)),
        "of two axes": init_device_mesh("cpu", (1, size)),
        "of two axes, the other one": init_device_mesh("cpu", (size, 1)),
        "of one rank": DeviceMesh("cpu", [0]),
        "in another order": DeviceMesh("cpu", [1, 0, *range(2, size)]),
    }
    for stage in stages:
        for i, (name, mesh) in enumerate(meshes.items()):
            # Each placement on the mesh of all ranks, and two on each other one, unless all stages are asked for.
            for how in list(PLACEMENTS) if not i or len(stages) > 1 else list(PLACEMENTS)[i % 2 :: 2]:
                given = copy.deepcopy(good)
                for own in given["state"].values():
                    own |= {k: placed(own[k], mesh, how) for k in ADAM}
                other, opt = run(stage, 0)
                error = told(opt, given)
                if name == "of one rank" or (name == "in another order" and how != "replicated"):
                    rows = [f"{k}.weight: {m}: a shard over the ranks" for k in (0, 2) for m in ADAM]
                    wrong += [f"{stage}, {name}, {how}: {error}"] if any(row not in error for row in rows) else []
                else:
                    found = whole(other, opt)
                    bad = [k for k, x in want.items() if not torch.allclose(x, found[k])]
                    wrong += [f"{stage}, {name}, {how}: {error}, {bad}"] if bad or error != "loaded" else []
                opt.detach()
    return wrong


def on_ranks(stages: list[str]) -> list[str]:
    return bad_ones(stages) + of_meshes(stages)


@pytest.mark.filterwarnings("ignore:.*torch.distributed")
@pytest.mark.parametrize(
    ("ranks", "stages"), [(2, ["shard"]), pytest.param(3, list(FIRST), marks=pytest.mark.slow)], ids=["2", "3"]
)
def test_all_is_named_at_once_on_ranks(ranks, stages):
    assert zf.launch(on_ranks, ranks, stages, timeout=limit(120)) == [[]] * ranks
