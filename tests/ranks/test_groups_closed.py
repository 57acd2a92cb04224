"""What `zf.attach` opens between ranks `opt.detach` closes, and so does an attach that fails."""

import os

import pytest
import rank_programs as P
import torch
import torch.distributed as dist
from stages import front
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofn as zf
import zerofn.eager.over_ranks  # inside: what is opened at attach
from zerofn.collectives import all_gather, world_group


def count():
    return len(dist.distributed_c10d._world.pg_map)


def open_files():
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def step(model, opt=None):
    rank, _ = P.rank_and_size()
    loss = model(torch.full((2, 3), 1.0 + rank)).square().mean()
    loss.backward()
    if opt is not None:
        opt.step()
        opt.zero_grad()
    return float(loss)


STAGES = ("data parallel", "ZeRO-1", "ZeRO-3")


def pipeline(stage):
    return zf.chain(*front(stage), zf.sgd(0.1))


def once(stage, in_backward=False):
    """Attached, trained, left with gradients on their way, and detached."""
    model = net()
    opt = zf.attach(model, pipeline(stage), in_backward=in_backward)
    step(model, opt)
    # A step that is given up: at rank 0 nothing is on its way.
    if P.rank_and_size()[0] or opt._own.home.units is not None:
        step(model)
    opt.detach()
    return model


def attached_often():
    start, counts, files = count(), [], []
    for stage, in_backward in [*((stage, False) for stage in STAGES), ("data parallel", True)]:
        once(stage, in_backward)
        counts.append(count() - start)
    for _ in range(6):
        for stage in STAGES:
            once(stage)
        files.append(open_files())
    return counts, count() - start, files


def test_attach_and_detach_leave_nothing_open():
    for counts, last, files in zf.launch(attached_often, 2, timeout=limit(100)):
        assert counts == [0] * 4 and last == 0
        # The backend's thread closes its sockets a moment later.
        assert min(files[3:]) <= min(files[:3]) + 2, files


def shared():
    """Two models, a pure state and a group of the user's beside one that is detached, and the end of all."""
    rank, _ = P.rank_and_size()
    before = count()
    first, second = net(), net()
    one, two = (zf.attach(model, pipeline("ZeRO-3")) for model in (first, second))
    both = count()
    one.detach()
    less = count()
    losses = [step(second, two) for _ in range(2)]
    three = zf.attach(first, pipeline("data parallel"))
    again = [step(first, three), step(second, two)]
    three.detach()
    two.detach()
    closed = count()
    # What has no end stays: it may still be used.
    tx = pipeline("ZeRO-3")
    state = zf.init(tx, {"w": torch.arange(4.0)})
    opt = zf.attach(net(), tx)
    opt.detach()
    whole = zf.full_params(tx, state)["w"].tolist()
    group = world_group("mine")
    zf.attach(net(), tx).detach()
    gathered = all_gather(torch.tensor([float(rank)]), group).tolist()
    try:
        opt._own.home.units.plans.wire.group.pg.group_name  # noqa: B018
        used = "no error"
    except RuntimeError as error:
        used = str(error)
    assert len(losses) == len(again) == 2
    return (both - before, less - before, closed - before), whole, gathered, used


def test_what_others_use_stays_open():
    for counts, whole, gathered, used in zf.launch(shared, 2, timeout=limit()):
        assert counts == (8, 5, 0)
        assert whole == [0.0, 1.0, 2.0, 3.0] and gathered == [0.0, 1.0] and "was used after opt.detach()" in used


def failing():
    rank, _ = P.rank_and_size()
    before, found = count(), []
    # On all ranks, before and after channels are open; and on one alone, which says so at once.
    with pytest.raises(ValueError, match="disagree"):
        zf.attach(net(), zf.chain(zf.shard(), zf.sgd(0.1 + rank)))
    found.append(count() - before)
    real = zerofn.eager.over_ranks.label

    def fails(*args):
        raise RuntimeError("a bug")

    zerofn.eager.over_ranks.label = fails
    with pytest.raises(RuntimeError, match="a bug"):
        zf.attach(net(), pipeline("ZeRO-1"))
    zerofn.eager.over_ranks.label = real
    found.append(count() - before)
    if rank == 0:
        zerofn.eager.over_ranks.label = fails
        with pytest.raises(RuntimeError, match="a bug"):
            zf.attach(net(), pipeline("ZeRO-3"))
        zerofn.eager.over_ranks.label = real
    else:
        model = net()
        opt = zf.attach(model, pipeline("ZeRO-3"))
        with pytest.raises(RuntimeError, match=r"(?s)opt.detach\(\) on .*the ranks make different calls"):
            opt.detach()
    dist.barrier()
    # Ranks understand each other afterwards.
    model = net()
    opt = zf.attach(model, pipeline("ZeRO-3"))
    found.append(step(model, opt))
    return found


def test_an_attach_that_fails_leaves_nothing_open(monkeypatch):
    monkeypatch.setenv("ZEROFN_TOGETHER_TIMEOUT", "3")
    for first, second, loss in zf.launch(failing, 2, timeout=limit()):
        assert (first, second) == (0, 0) and loss > 0


def parts():
    """Two models, each of one half of the job, which are detached at different times."""
    rank, _ = P.rank_and_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("part", "shard"))["shard"]
    tx = zf.chain(zf.shard(mesh), zf.sgd(0.1))
    model = net()
    opt = zf.attach(model, tx)
    if rank < 2:
        opt.detach()
    else:
        step(model, opt)
    dist.barrier()
    second = net()
    again = zf.attach(second, tx)
    loss = step(second, again)
    again.detach()
    if rank >= 2:
        opt.detach()
    return loss


def test_parts_of_a_job_detach_when_they_like():
    losses = zf.launch(parts, 4, timeout=limit())
    assert all(loss > 0 for loss in losses)
