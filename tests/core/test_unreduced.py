"""Chains that reduce nothing on several ranks, and gradients that nothing has reduced: told, refused, or meant."""

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zerofn as zf

SGD = zf.sgd(0.1)
CLIPPED = (zf.clip_by_global_norm(1.0), zf.adamw(1e-2))


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def told(make):
    """The messages of warnings, and what was made."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        made = make()
    return [str(w.message) for w in found], made


# What a warning says to write, where no transform reduces gradients, and where none names the axis "b" of a mesh.
NOTHING = "2 ranks, and no transform", "zf.all_reduce()", "zf.local()"
AXIS = "the mesh has an axis 'b' of 2 ranks", "zf.all_reduce(mesh['b'])", "zf.local(mesh['b'])"
# By name: the chain, and what it is warned of.
CHAINS = {
    "an optimizer alone": (lambda mesh: (zf.sgd(0.1),), NOTHING),
    "with what is no reduction": (lambda mesh: CLIPPED, NOTHING),
    "with an accumulation": (lambda mesh: (zf.accumulate(2), zf.sgd(0.1)), NOTHING),
    "with casts and a scale": (lambda mesh: (zf.precision(), zf.scale_loss(8.0), zf.sgd(0.1)), NOTHING),
    "groups": (
        lambda mesh: (zf.partition({"a": zf.sgd(0.1), "b": zf.adamw(0.1)}, lambda p: "ab"["bias" in p]),),
        NOTHING,
    ),
    "meant": (lambda mesh: (zf.local(), *CLIPPED), ()),
    "meant, behind a clip": (lambda mesh: (zf.clip_by_global_norm(1.0), zf.local(), zf.sgd(0.1)), ()),
    "data parallel": (lambda mesh: (zf.all_reduce(), *CLIPPED), ()),
    "data parallel, late": (lambda mesh: (zf.accumulate(2), zf.all_reduce(), *CLIPPED), ()),
    "ZeRO-2": (lambda mesh: (zf.reduce_scatter(), *CLIPPED), ()),
    "ZeRO-3": (lambda mesh: (zf.shard(), *CLIPPED), ()),
    "along one axis of a mesh": (lambda mesh: (zf.all_reduce(mesh["b"]), *CLIPPED), ()),
    "along an axis of one rank": (lambda mesh: (zf.shard(mesh["a"]), *CLIPPED), AXIS),
    "along an axis of one rank, meant": (lambda mesh: (zf.shard(mesh["a"]), zf.local(mesh["b"]), *CLIPPED), ()),
    "meant along both axes": (lambda mesh: (zf.local(mesh["b"]), zf.shard(mesh["a"]), zf.local(mesh["a"]), SGD), ()),
    "along an axis of one rank, and outer steps": (
        lambda mesh: (zf.shard(mesh["a"]), SGD, zf.every(3, zf.sgd(0.5), mesh["b"])),
        (),
    ),
    "along both axes": (lambda mesh: (zf.shard(mesh["a"]), zf.all_reduce(mesh["b"]), *CLIPPED), ()),
}


def warned():
    """By chain and call: what was told, and the weights after three steps of the attached model."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    rank, found, weights = int(os.environ["RANK"]), {}, {}
    for name, (make, _) in CHAINS.items():
        tx, model = zf.chain(*make(mesh)), linear()
        found[name, "init"], _ = told(lambda tx=tx: zf.init(tx, dict(linear().named_parameters())))
        found[name, "attach"], opt = told(lambda tx=tx, m=model: zf.attach(m, tx))
        torch.manual_seed(rank)
        for _ in range(3):
            model(torch.randn(8, 4)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        with opt.gathered():
            weights[name] = model.weight.tolist()
        opt.detach()
    ddp = DistributedDataParallel(linear())
    found["averaged by DDP", "attach"], _ = told(lambda: zf.attach(ddp, zf.sgd(0.1)))
    return found, weights


def test_a_chain_that_reduces_nothing_is_told_on_every_rank():
    """By the ranks and what to write; and what is told is so: ranks have other weights, or the same."""
    (first, a), (second, b) = zf.launch(warned, 2, timeout=limit(120))
    assert first == second
    for name, (_, warns) in CHAINS.items():
        for call in ("init", "attach"):
            messages = first.pop((name, call))
            assert len(messages) == bool(warns), (name, call, messages)
            for text in messages:
                assert f"zf.{call}(" in text and all(words in text for words in warns), text
        apart = bool(warns) or "meant" in name
        assert (a[name] != b[name]) == apart, name
    assert first == {("averaged by DDP", "attach"): []}


def on_one_rank_alone():
    """A reduction in the chain of the first rank; before it, a call of both opens their channels."""
    rank = int(os.environ["RANK"])
    zf.attach(linear(), zf.chain(zf.all_reduce(), zf.sgd(0.1))).detach()
    tx = zf.chain(zf.all_reduce(), zf.sgd(0.1)) if rank == 0 else zf.sgd(0.1)
    try:
        return told(lambda: zf.init(tx, {"w": torch.ones(2)}))[0]
    except RuntimeError as error:
        return str(error)


def test_a_reduction_on_one_rank_alone_is_told_on_both():
    error, messages = zf.launch(on_one_rank_alone, 2, timeout=limit())
    assert "on rank 0 and not on every rank" in error and "rank 1 has finished" in error
    assert len(messages) == 1 and "a rank whose chain does reduce" in messages[0]


def until(path):
    """Wait for a file that another rank writes."""
    while not path.exists():
        time.sleep(0.01)


def said_by(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return None


TX = {True: lambda: zf.chain(zf.all_reduce(), zf.sgd(0.1)), False: lambda: zf.sgd(0.1)}
CALLS = {
    "attach": lambda reduces: zf.attach(linear(), TX[reduces]()),
    "init": lambda reduces: zf.init(TX[reduces](), {"w": torch.ones(2)}),
}


def first_calls(folder, call, before, users):
    """Chains of which the first rank's alone reduces, in the first call of the job, or after one where none does.

    The second rank stays until the first one has been told. Then both make the call with a reduction.
    """
    if users:
        torch.distributed.init_process_group("gloo")
    rank, told = int(os.environ["RANK"]), folder / "told"
    warnings.simplefilter("ignore")
    if before:
        CALLS["init"](False)
    if rank == 0:
        said = said_by(lambda: CALLS[call](True))
        told.touch()
    else:
        CALLS[call](False)
        said = until(told)
    opt = zf.attach(linear(), zf.chain(zf.all_reduce(), zf.sgd(0.5)))
    opt._own.model(torch.full((1, 4), 1.0 + rank)).sum().backward()
    opt.step()
    with opt.gathered() as model:
        return said, (linear().weight - model.weight).tolist()


@pytest.mark.parametrize(
    "call, before, users",
    [
        ("attach", False, True),
        pytest.param("init", False, False, marks=pytest.mark.slow),
        pytest.param("init", True, False, marks=pytest.mark.slow),
    ],
)
def test_a_reduction_on_one_rank_alone_is_told_there_in_the_first_call(call, before, users, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROFN_TOGETHER_TIMEOUT", "1")
    args = (tmp_path, call, before, users)
    (said, change), other = zf.launch(first_calls, 2, *args, init=not users, timeout=limit())
    assert "the opening of a group on rank 0 and not on every rank" in said and "zf.local()" in said
    assert f"rank 1 has made zf.{call}(" in said and "reduces gradients over no ranks" in said
    # Both meet again: the mean of 1 and 2, of a rate of a half.
    assert change == other[1]
    torch.testing.assert_close(torch.tensor(change), torch.full((1, 4), 0.75))


def late(folder):
    """Both make a call that reduces nothing; the second rank comes late to the one that does."""
    warnings.simplefilter("ignore")
    CALLS["init"](False)
    if int(os.environ["RANK"]):
        time.sleep(3)
    return said_by(lambda: CALLS["attach"](True))


def local_first(folder):
    """One rank trains a model of its own first, and says so."""
    if int(os.environ["RANK"]):
        zf.init(zf.chain(zf.local(), zf.sgd(0.1)), {"w": torch.ones(2)})
        time.sleep(3)
    return said_by(lambda: CALLS["attach"](True))


@pytest.mark.slow
@pytest.mark.parametrize("program", [late, local_first])
def test_a_rank_that_comes_late_to_the_first_group_is_waited_for(program, tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROFN_TOGETHER_TIMEOUT", "1")
    assert zf.launch(program, 2, tmp_path, timeout=limit()) == [None, None]


# Nobody has made a default group: torchrun's store is there before it.
SCRIPT = """
import os, pathlib, sys, time, warnings
import torch, zerofn as zf
warnings.simplefilter("ignore")
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
tx = zf.sgd(0.1) if rank else zf.chain(zf.shard(), zf.sgd(0.1))
try:
    zf.init(tx, {"w": torch.ones(2)})
except RuntimeError as error:
    (folder / "said").write_text(str(error))
while not (folder / "said").exists():
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_reduction_on_one_rank_alone_is_told_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    where = str(Path(zf.__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": where, "ZEROFN_TOGETHER_TIMEOUT": "1"}
    subprocess.run([*command, str(tmp_path)], env=env, check=True, timeout=limit())
    assert "rank 1 has made zf.init(tx, params) with a chain" in (tmp_path / "said").read_text()


def test_one_process_is_told_nothing():
    for make in (lambda: zf.attach(linear(), zf.sgd(0.1)), lambda: zf.init(zf.sgd(0.1), {"w": torch.ones(2)})):
        assert told(make)[0] == []


def test_local_changes_no_number():
    tx, g = zf.chain(zf.local(), *CLIPPED), {"w": torch.tensor([1.0, -2.0, 0.5])}
    got, want = (zf.update(t, g, zf.init(t, {"w": torch.ones(3)}))[0] for t in (tx, zf.chain(*CLIPPED)))
    assert torch.equal(got.params["w"], want.params["w"])
    assert repr(tx).startswith("chain(\n    local(),")


def test_a_plan_tells_it():
    model = linear()
    plan = lambda *parts, n=4: str(zf.plan(zf.chain(*parts), model, world_size=n))  # noqa: E731
    alone = plan(*CLIPPED)
    assert "each of 4 ranks trains a model of its own" in alone and "zf.all_reduce()" in alone and "zf.local()" in alone
    assert "one process" not in alone
    meant = plan(zf.local(), *CLIPPED)
    assert "each of 4 ranks trains a model of its own" in meant and "zf.all_reduce()" not in meant
    assert "one process" in plan(*CLIPPED, n=1)
    assert "a model of its own" not in plan(zf.all_reduce(), *CLIPPED)


# -- gradients made by hand -----------------------------------------------------------------------------------

START = {"w": torch.tensor([[0.5, -1.0], [2.0, 0.25], [-0.5, 1.0], [0.75, 0.5]]), "unused": torch.ones(2)}
FRONTS = {
    "data parallel": lambda: (zf.all_reduce(),),
    "data parallel, summed up": lambda: (zf.all_reduce(), zf.accumulate(2)),
    "data parallel, late": lambda: (zf.accumulate(2), zf.all_reduce()),
    "local": lambda: (zf.local(),),
}
REFUSED = ("data parallel", "data parallel, summed up")


def loss(p, x):
    return ((x @ p["w"]).sum(-1) - 1).square().mean()


def by_hand(tx, state, x):
    return torch.func.grad(loss)(state.params, x)


def by_vjp(tx, state, x):
    out, pull = zf.vjp(loss, tx, state, x)
    return pull(torch.ones_like(out))[0]


def averaged_by_hand(tx, state, x):
    grads = by_hand(tx, state, x)
    for g in grads.values():
        torch.distributed.all_reduce(g)
    return {path: g / 2 for path, g in grads.items()}


def without_a_leaf(tx, state, x):
    """A gradient on one rank only."""
    return {"w": by_vjp(tx, state, x)["w"], "unused": torch.zeros(2) if int(os.environ["RANK"]) else None}


WAYS = (by_hand, by_vjp, averaged_by_hand, without_a_leaf)


def made_by_hand():
    torch.manual_seed(int(os.environ["RANK"]))
    x, out = torch.randn(6, 4), {}
    for name, front in FRONTS.items():
        for way in WAYS:
            tx = zf.chain(*front(), zf.sgd(0.1))
            state = zf.init(tx, START)
            try:
                for _ in range(2):
                    state, _ = zf.update(tx, way(tx, state, x), state)
                out[name, way.__name__] = state.leaves["w"].tolist()
            except ValueError as error:
                out[name, way.__name__] = str(error)
    hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    tx = zf.chain(zf.shard(hybrid["b"]), zf.all_reduce(hybrid["a"]), zf.sgd(0.1))
    try:
        zf.update(tx, by_hand(tx, state := zf.init(tx, START), x), state)
    except ValueError as error:
        out["hybrid"] = str(error)
    return x, out


def test_gradients_that_nothing_has_averaged_are_refused_in_the_first_update():
    """What is averaged is taken, whoever did it; the reference is one process on the rows of both ranks."""
    (x, a), (y, b) = zf.launch(made_by_hand, 2, timeout=limit(120))
    state, step = zf.init(zf.sgd(0.1), START), zf.make_step(loss, zf.sgd(0.1))
    every = [state]
    for _ in range(2):
        every.append(step(every[-1], torch.cat([x, y]))[0])
    once, twice = (s.params["w"] for s in every[1:])
    for name in FRONTS:
        for way in WAYS:
            got, other = a[name, way.__name__], b[name, way.__name__]
            if name in REFUSED and way in (by_hand, without_a_leaf):
                path = "w" if way is by_hand else "unused"
                assert got == other and f"{path}: rank 1 has another one than rank 0" in got and "zf.vjp" in got
            elif name == "local" and way is not averaged_by_hand:
                assert got != other
            elif way is not without_a_leaf:
                want = once if "accumulate" in repr(FRONTS[name]()) else twice
                torch.testing.assert_close(torch.tensor(got), want)
                assert got == other
    assert "w: rank 1 has another one than rank 0" in a["hybrid"] == b["hybrid"]
