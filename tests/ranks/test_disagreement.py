"""What does not fit is named on every rank, and nobody waits for ever."""

import os
import signal
import time

import pytest
import rank_programs as P
import torch
from stages import around
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofn as zf
from zerofn.ranks import process_groups as open_groups  # inside: what a process says at its end


def said(fn):
    """The message of the error that `fn` raises; on every rank it must."""
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error")


def disagreements():
    """Each on a model or tree of its own."""
    rank, _ = P.rank_and_size()
    out = {}

    def both(name, make_tx, make_params):
        out[name, "eager"] = said(lambda: zf.attach(make_params(), make_tx()))
        out[name, "pure"] = said(lambda: zf.init(make_tx(), dict(make_params().named_parameters())))

    def linear(n=3, bias=True):
        torch.manual_seed(0)
        return nn.Linear(n, 2, bias=bias)

    for first in (zf.all_reduce, zf.reduce_scatter, zf.shard):
        name = first.__name__
        both(f"{name}: lr", lambda f=first: zf.chain(f(), zf.sgd(0.1 + rank)), linear)
        clip = (zf.clip_by_value(1.0),) if rank else ()
        both(f"{name}: transforms", lambda f=first, c=clip: zf.chain(f(), *c, zf.sgd(0.1)), linear)
        both(f"{name}: shapes", lambda f=first: zf.chain(f(), zf.sgd(0.1)), lambda: linear(3 + rank))
        both(f"{name}: leaves", lambda f=first: zf.chain(f(), zf.sgd(0.1)), lambda: linear(3, bias=rank == 0))

        def values():
            model = linear()
            with torch.no_grad():
                model.bias += rank
            return model

        both(f"{name}: values", lambda f=first: zf.chain(f(), zf.sgd(0.1)), values)
        both(
            f"{name}: dtype",
            lambda f=first: zf.chain(f(), zf.sgd(0.1)),
            lambda: linear().to([torch.float32, torch.float64][rank]),
        )
        # After all these errors the ranks still understand each other.
        model = linear()
        opt = zf.attach(model, zf.chain(first(), zf.sgd(0.1)))
        model(torch.ones(1, 3) * (rank + 1)).sum().backward()
        opt.step()
        opt.detach()
    return out


def test_ranks_that_disagree_at_the_start_are_told_on_every_rank():
    ranks = zf.launch(disagreements, 2, timeout=limit())
    for results in ranks:
        for (name, route), message in results.items():
            what = {"lr": "pipeline", "transforms": "pipeline", "values": "bias"}.get(
                name.split(": ")[1], "tree of parameters"
            )
            assert what in message and "rank" in message.lower(), (name, route, message)
    assert ranks[0].keys() == ranks[1].keys()


def steps_differ(first, how):
    """Ranks whose loops differ."""
    rank, _ = P.rank_and_size()
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    parts = (zf.accumulate(2), first()) if how == "window" else (first(), zf.accumulate(2))
    opt = zf.attach(model, zf.chain(*parts, zf.sgd(0.1)))

    def one(drop=False):
        model(torch.ones(1, 3)).sum().backward()
        opt.zero_grad() if drop else opt.step()

    def loop():
        if how == "window":
            opt.set_boundary(rank == 0)
        one()
        one(drop=how == "dropped" and rank == 1)
        one()
        one()

    return said(loop)


@pytest.mark.parametrize(
    "first, how, what",
    [
        (zf.reduce_scatter, "window", "window"),
        (zf.all_reduce, "window", "window"),
        (zf.all_reduce, "dropped", "step"),
        (zf.reduce_scatter, "dropped", "step"),
    ],
)
def test_loops_that_differ_are_told_on_every_rank(first, how, what):
    for message in zf.launch(steps_differ, 2, first, how, timeout=limit()):
        assert "ranks disagree" in message and what in message and "rank 1" in message, message


def fewer_batches(route, first):
    rank, _ = P.rank_and_size()
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    tx = zf.chain(first(), zf.sgd(0.1))
    opt = zf.attach(model, tx) if route == "eager" else None
    state = None if opt else zf.init(tx, dict(model.named_parameters()))
    step = zf.make_step(lambda p, x: (x @ p["weight"].T + p["bias"]).sum(), tx)
    for _ in range(3 + rank):
        if opt:
            model(torch.ones(1, 3)).sum().backward()
            opt.step()
            opt.zero_grad()
        else:
            state, _ = step(state, torch.ones(1, 3))


@pytest.mark.parametrize(
    "route, first",
    [
        ("eager", zf.shard),
        ("pure", zf.all_reduce),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("eager", zf.reduce_scatter), ("pure", zf.shard))),
    ],
)
def test_a_rank_with_more_batches_ends_in_an_error(route, first):
    with pytest.raises(
        zf.RankError, match=r"waits in .* for rank 0, which has finished.*same number of steps"
    ) as caught:
        zf.launch(fewer_batches, 2, route, first, timeout=limit())
    assert caught.value.rank == 1


def leaves_after_an_error():
    model = nn.Linear(3, 2)
    zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    if P.rank_and_size()[0]:
        open_groups.finished(failed=True)  # as a process that torchrun has started says when it ends by an error
        open_groups.presence().set_finished = lambda failed: None
    else:
        model(torch.ones(1, 3))


def test_a_rank_that_has_failed_is_not_said_to_have_made_fewer_steps():
    with pytest.raises(
        zf.RankError, match=r"waits in .* for rank 1, which has failed: its own error says why"
    ) as caught:
        zf.launch(leaves_after_an_error, 2, timeout=limit())
    assert caught.value.rank == 0


def dies(first):
    rank, _ = P.rank_and_size()
    torch.manual_seed(0)
    model = P.make()
    opt = zf.attach(model, zf.chain(first(), zf.sgd(0.1)))
    for step in range(50):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = P.batch(rank, step)
        ((model(x) - y) ** 2).mean().backward()
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("first", [zf.all_reduce, pytest.param(zf.reduce_scatter, marks=pytest.mark.slow), zf.shard])
def test_a_rank_that_dies_ends_the_others(first):
    start = time.monotonic()
    with pytest.raises(zf.RankError) as caught:
        zf.launch(dies, 3, first, timeout=limit())
    assert caught.value.rank == 1 and caught.value.exitcode == -signal.SIGKILL
    assert time.monotonic() - start < limit(15)


def meshes():
    out = {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    model = lambda: nn.Linear(2, 2)  # noqa: E731
    out["axis"] = said(lambda: zf.shard(mesh["replicate"]))
    out["two axes"] = said(lambda: zf.attach(model(), zf.chain(zf.shard(both), zf.sgd(0.1))))
    out["no mesh"] = said(lambda: zf.attach(model(), zf.chain(zf.shard("shard"), zf.sgd(0.1))))
    out["too large"] = said(lambda: init_device_mesh("cpu", (4,)))
    out["both"] = said(lambda: zf.chain(zf.shard(), zf.reduce_scatter(), zf.sgd(0.1)))
    return out


def test_meshes_that_do_not_fit():
    for got in zf.launch(meshes, 2, timeout=limit()):
        assert "replicate" in got["axis"]
        assert "2 axes" in got["two axes"] or "one" in got["two axes"]
        assert "TypeError" in got["no mesh"] and "DeviceMesh" in got["no mesh"]
        assert "4" in got["too large"]
        assert "shard" in got["both"] and "reduce_scatter" in got["both"] and "ZeRO-3" in got["both"]


def misuse():
    """Gradients and uses that have no meaning under shard."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    out = {"no backward": said(opt.step)}
    with opt.gathered() as full:
        penalty = (full.weight**2).sum()
        out["penalty"] = "full" if penalty.shape == () and full.weight.shape == (4, 4) else "shard"
    state = zf.init(zf.chain(zf.shard(), zf.sgd(0.1)), {"w": torch.ones(5)})
    out["full gradient"] = said(lambda: zf.update(zf.chain(zf.shard(), zf.sgd(0.1)), {"w": torch.ones(5)}, state))
    return out


def test_misuse_of_shards():
    for got in zf.launch(misuse, 2, timeout=limit()):
        assert "no parameter has a gradient" in got["no backward"]
        assert "w" in got["full gradient"] and "(5,)" in got["full gradient"]
        assert got["penalty"] == "full"


def gives_up(cleared, stage):
    """A rank whose backward fails half-way goes on with its next batch, as the others with their step."""
    rank, _ = P.rank_and_size()
    model = P.make()
    opt = zf.attach(model, zf.chain(*around(stage), zf.sgd(0.1)))

    def fail(g):
        raise FloatingPointError("a step to be given up")

    def loop():
        step = 0
        while step < 4:
            x, y = P.batch(rank, step)
            step += 1
            loss = ((model(x) - y) ** 2).mean()
            handle = model.inp.weight.register_hook(fail) if rank == 1 and step == 2 else None
            try:
                loss.backward()
            except FloatingPointError:
                handle.remove()
                cleared(model, opt)
                continue
            opt.step()
            opt.zero_grad()

    return said(loop)


def by_opt(model, opt):
    opt.zero_grad()


def by_model(model, opt):
    model.zero_grad()


def by_hand(model, opt):
    for p in model.parameters():
        p.grad = None


@pytest.mark.parametrize(
    "cleared, stage",
    [(by_opt, 2), (by_hand, 3), *(pytest.param(x, 3, marks=pytest.mark.slow) for x in (by_opt, by_model))],
)
def test_a_step_that_one_rank_gives_up_is_told_on_every_rank(cleared, stage):
    for message in zf.launch(gives_up, 2, cleared, stage, timeout=limit()):
        assert "ranks disagree" in message and "rank 0" in message and "zero_grad()" in message, message
