"""Calls that every rank must make, made by some: an error there that says so, soon, and no rank waits for ever."""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import rank_programs as P
import torch
import torch.distributed as dist
from stages import FIRST
from time_limits import limit
from torch import nn

import zerofn as zf
import zerofn.ranks.collectives  # inside: collectives on tensors that are given, and works under way
import zerofn.ranks.process_groups  # inside: which groups are open, and what a process tells the others
from zerofn.ranks import process_groups as _presence  # inside: what a process tells the others
from zerofn.ranks.collectives import Work  # inside: collectives on tensors that are given, and works under way
from zerofn.ranks.group import Group  # inside: a group of its own
from zerofn.ranks.process_groups import (  # inside: which groups are open, and what a process tells the others
    Activity,
    Presence,
)


def pipeline(stage):
    return zf.chain(FIRST[stage](), zf.adamw(lr=0.1))


def quick(monkey):
    """Looks at the other ranks that come soon: a wait is long after a fifth of a second."""
    monkey.setattr(zerofn.ranks.collectives, "_LOOK", timedelta(seconds=0.2))
    monkey.setattr(zerofn.ranks.process_groups, "LOOK", 0.1)


def attached(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, zf.attach(model, pipeline(stage))


def train(model, opt, step):
    rank, _ = P.rank_and_size()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return float(loss)


def calls(opt, directory):
    """What people write under `if rank == 0:`."""

    def gathered():
        with opt.gathered() as full:
            return {k: v.clone() for k, v in full.state_dict().items()}

    found = {
        "zf.save": lambda: zf.save(directory, opt),
        "zf.load": lambda: zf.load(directory, like=opt),
        "zf.export_safetensors": lambda: zf.export_safetensors(f"{directory}/model.safetensors", opt),
        "opt.detach": opt.detach,
        "opt.gathered": gathered,
    }
    if opt._own.home.units is None:
        # Full parameters are there: it sends nothing.
        del found["opt.gathered"]
    return found


def said(fn):
    start = time.monotonic()
    try:
        fn()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("no error")


def one_alone_while_others_train(stage, directory, monkey):
    """Rank 0 makes each call alone, catches the error, and comes to the step in which the others wait for it."""
    rank, _ = P.rank_and_size()
    quick(monkey)
    model, opt = attached(stage)
    told, losses = {}, []
    for step, (name, call) in enumerate(calls(opt, directory).items()):
        if rank == 0:
            told[name] = said(call)
        losses.append(train(model, opt, step))
    zf.save(directory, opt)
    params = zf.full_params(opt.tx, opt.state)
    return told, losses, params, said(lambda: zf.save(directory, opt))[0] if rank == 0 else None


class Monkey:
    setattr = staticmethod(setattr)


# Where parameters are whole, and where they are cut; the third sends what both do.
@pytest.mark.parametrize("stage", ["all_reduce", pytest.param("reduce_scatter", marks=pytest.mark.slow), "shard"])
def test_a_call_on_one_rank_alone_is_refused_there_and_training_goes_on(stage, tmp_path):
    ranks = zf.launch(one_alone_while_others_train, 2, stage, tmp_path, Monkey, timeout=limit(60))
    told, losses, params, last = ranks[0]
    assert "rank 1 has finished" in last
    assert len(told) == 5 if stage == "shard" else 4
    for name, (message, seconds) in told.items():
        assert name in message and "on every rank" in message and "rank 1 makes another call" in message, message
        assert seconds < limit(8), (name, seconds)
    assert not ranks[1][0]

    def undisturbed():
        model, opt = attached(stage)
        return [train(model, opt, step) for step in range(len(losses))], zf.full_params(opt.tx, opt.state)

    for (_, got, params, _), (want, exact) in zip(ranks, zf.launch(undisturbed, 2, timeout=limit(60)), strict=True):
        assert got == want and all(torch.equal(params[k], exact[k]) for k in exact)
    # What was saved afterwards, together, is whole.
    one = zf.load(tmp_path, like=zf.init(pipeline(stage), {k: torch.zeros_like(v) for k, v in params.items()}))
    assert all(torch.equal(one.params[k], params[k]) for k in params)


# -- what the other rank does meanwhile ----------------------------------------------------------------------


def other_calls(directory, monkey, plain):
    """With a default group of the user's own, as under a launcher of theirs, or the one of `zf.launch`."""
    if plain:
        dist.init_process_group("gloo")
    rank, _ = P.rank_and_size()
    quick(monkey)
    model, opt = attached("shard")
    out = {}
    # Another call: both are told.
    mine = [lambda: zf.save(directory, opt), lambda: calls(opt, directory)["opt.gathered"]()]
    out["another call"] = said(mine[rank])
    tx = pipeline("all_reduce")
    state = zf.init(tx, {"w": torch.ones(3)})
    monkey.setattr(zerofn.ranks.process_groups, "LIMIT", 1.5)
    if rank == 1:
        out["while others wait in a barrier"] = said(lambda: zf.save(directory, state))
    dist.barrier()
    # Late: longer than the limit, but at work, if as little as other processes leave to it.
    monkey.setattr(zerofn.ranks.process_groups, "LIMIT", 2.5)
    monkey.setattr(_presence, "BUSY", 0.001)
    if rank == 0:
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            torch.ones(100).sum()
    zf.save(directory, state)
    # A rank that waits in a collective which the other has left out, and the other in one of its own.
    tx = pipeline("shard")
    sharded = zf.init(tx, {"w": torch.arange(4.0)})
    out["both in collectives"] = said(lambda: zf.full_params(tx, sharded) if rank else train(model, opt, 0))
    return out


@pytest.mark.parametrize(
    "plain", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["launched", "a group of the user's"]
)
def test_what_the_others_do_is_named(plain, tmp_path):
    first, second = zf.launch(other_calls, 2, tmp_path, Monkey, plain, init=not plain, timeout=limit(60))
    for out in (first, second):
        message, seconds = out["another call"]
        assert "rank 0 zf.save" in message and "rank 1 opt.gathered()" in message and "on every rank" in message
        assert seconds < limit(5)
    message, seconds = second["while others wait in a barrier"]
    assert "rank 0 did not come within 1.5 s" in message and "ZEROFN_TOGETHER_TIMEOUT" in message
    assert "zf.save(directory, state) on every rank" in message
    # The first who sees it is told; the other when that one does not come either.
    told = [out["both in collectives"][0] for out in (first, second)]
    assert any("rank 1, and rank 1 in all_gather for this one" in message for message in told[:1]) or any(
        "rank 0, and rank 0 in all_gather for this one" in message for message in told[1:]
    ), told


# -- who is alive, and who computes ----------------------------------------------------------------------------

WORKS = "import time\nprint(flush=True)\nwhile True: pass"
IDLES = "import time\nprint(flush=True)\ntime.sleep(10000)"


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks at processes in /proc")
def test_a_process_that_computes_one_that_waits_and_one_that_has_ended(monkeypatch):
    monkeypatch.setattr(_presence, "WINDOW", 1.0)
    store = dist.HashStore()
    here = Presence(store, 0)
    children = [
        subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) for code in (WORKS, IDLES, IDLES)
    ]
    try:
        for rank, child in enumerate(children, 1):
            child.stdout.readline()
            started = int(_presence._stat_fields(child.pid)[19])
            store.set(f"process/{rank}", json.dumps([here.machine, child.pid, started]))
        store.set("process/4", json.dumps(["another machine", children[0].pid, 0]))
        # As when a number has been given to another process.
        store.set("process/5", json.dumps([here.machine, children[0].pid, 1]))
        children[2].kill()
        children[2].wait()
        assert [here.how_ended(rank) for rank in range(7)] == ["", "", "", "has failed", "", "has failed", ""]
        Presence(store, 6).set_finished()
        Presence(store, 4).set_finished(failed=True)
        assert [here.how_ended(rank) for rank in (4, 6)] == ["has failed", "has finished"]
        activity = Activity(here, "call")
        until = time.monotonic() + limit(3)
        assert not activity.computes(1)
        while not activity.computes(1) and time.monotonic() < until:
            time.sleep(0.05)
        assert activity.computes(1) and not activity.computes(2) and not activity.computes(4)
        # Of another machine a rank that waits there tells.
        far = Presence(store, 6)
        far.machine = "a third machine"
        elsewhere = Activity(far, "call")
        assert elsewhere.computes(1) and not elsewhere.computes(2)
        time.sleep(1.1)
        assert not elsewhere.computes(1)
    finally:
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()


def test_the_limit(monkeypatch):
    monkeypatch.delenv("ZEROFN_TOGETHER_TIMEOUT", raising=False)
    assert zerofn.ranks.process_groups.limit() < 30
    monkeypatch.setenv("ZEROFN_TOGETHER_TIMEOUT", "120")
    assert zerofn.ranks.process_groups.limit() == 120


class EndsLate:
    """Work of gloo that ends between the time limit of a wait and the question whether it has ended."""

    def __init__(self, error=None):
        self.error, self.waits = error, 0

    def wait(self, *limit):
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self):
        return self.waits > 0


def test_work_that_ends_after_its_time_limit_and_before_it_is_asked():
    group = Group(size=2, ranks=(0, 1))
    work = Work("all_reduce", 8, group, lambda **_: EndsLate())
    assert work.wait() and work.is_completed() and work.wait()
    failed = Work("all_reduce", 8, group, lambda **_: EndsLate("Timed out waiting 1800000ms for recv"))
    with pytest.raises(RuntimeError, match="1800000ms"):
        failed.wait()


class Endless(EndsLate):
    """Work of gloo that does not end."""

    def __init__(self):
        super().__init__()
        self.limits = []

    def wait(self, limit):
        self.limits.append(limit.total_seconds())
        time.sleep(self.limits[-1])
        raise RuntimeError("Operation timed out!")

    def is_completed(self):
        return False


def test_a_wait_with_a_limit_sleeps_in_gloo_and_leaves_errors_to_the_wait_without():
    group, endless = Group(size=2, ranks=(0, 1)), Endless()
    assert not Work("all_reduce", 8, group, lambda **_: endless).done_within(0.05)
    # gloo takes a limit below a millisecond for none.
    assert min(endless.limits) >= 1e-3 and len(endless.limits) <= 3
    failed = Work("all_reduce", 8, group, lambda **_: EndsLate("Timed out waiting 1800000ms for recv"))
    assert failed.done_within(60.0)
    with pytest.raises(RuntimeError, match="1800000ms"):
        failed.wait()
