"""A save made in a thread of one's own while a step is made: refused on all ranks, and the one before it stays.

Events and no chance decide what comes first. The reference is what the state was when the first save was made.
"""

import threading

import pytest
import torch
from one_launch import one_launch
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.storage import pieces as writing  # inside: a save is stopped while it writes

SAID = "zf.save(directory, opt) in another thread while opt makes a step"
HALF = "with in_backward=True, where backward is the step"


def save(opt, directory, wait, told):
    """Adds to `told` whether it has saved, or what the error says."""
    try:
        saving = zf.save(directory, opt, wait=wait)
        if saving is not None:
            saving.wait(limit())
        told.append("saved")
    except RuntimeError as error:
        told.append(str(error))


def work(stage, directory, wait, early):
    """What saves told beside a step, within one and beside nothing; and whether the first one is what was on disk."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    middle: list[str] = []

    @zf.leafwise(needs="element")
    def looks(grad, param, *, path):
        if stage is None and path == "0.weight" and opt.global_steps == 1:
            in_thread(middle)
        return grad

    opt = zf.attach(model, zf.chain(*([stage()] if stage else []), looks(), zf.sgd(0.1)), in_backward=early)
    began, may, write = threading.Event(), threading.Event(), writing._Writer.write_data

    def held(writer, name, pieces):
        began.set()
        assert may.wait(limit())
        return write(writer, name, pieces)

    def step():
        model(torch.ones(3, 4)).square().mean().backward()
        opt.step()
        opt.zero_grad()

    def in_thread(told):
        thread = threading.Thread(target=save, args=(opt, directory, wait, told))
        thread.start()
        thread.join(limit())

    told: list[str] = []
    zf.save(directory, opt)
    first = {k: x.clone() for k, x in zf.full_params(opt.tx, opt.state).items()}
    writing._Writer.write_data = held
    thread = threading.Thread(target=save, args=(opt, directory, wait, told))
    thread.start()
    assert began.wait(limit())
    step()
    may.set()
    thread.join(limit())
    step()
    again = zf.load(directory, like=zf.init(opt.tx, {k: torch.zeros_like(x) for k, x in first.items()}))
    there = zf.full_params(opt.tx, again)
    old = all(torch.equal(x, first[k]) for k, x in there.items())
    in_thread(told)
    writing._Writer.write_data = write
    opt.detach()
    return told, middle, old


def test_a_save_beside_a_step_is_refused_on_all_ranks(tmp_path):
    """Updates in backward are writes too."""
    stages = [(zf.all_reduce, False), (zf.reduce_scatter, False), (zf.shard, False), (zf.shard, True)]
    rows = [(stage, tmp_path / str(i), True, early) for i, (stage, early) in enumerate(stages)]
    for row, ranks in one_launch(2, work, rows).items():
        for told, _, old in ranks:
            assert SAID in told[0] and told[1:] == ["saved"] and old, row


def test_on_one_process_also_where_it_is_begun_and_ended_within_one_step(tmp_path):
    rows = [(None, tmp_path / str(wait), wait, False) for wait in (True, False)]
    for row, ((told, middle, old),) in one_launch(1, work, rows).items():
        assert SAID in middle[0] and len(middle) == 1 and told[1:] == ["saved"] and old
        # A step after the copies is no harm to one that is copied first.
        assert (SAID in told[0]) if row[2] else told[0] == "saved"


def within_a_backward(stage, directory, wait):
    """What saves tell before a backward that is the step, within it, after it, and after `opt.step()`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    told: list[str] = []

    @zf.leafwise(needs="element")
    def looks(grad, param, *, path):
        # Gradients of the last module have come before.
        if stage is None and path == "0.weight" and opt.global_steps == 1:
            thread = threading.Thread(target=save, args=(opt, directory, wait, told))
            thread.start()
            thread.join(limit())
        return grad

    opt = zf.attach(model, zf.chain(*([stage()] if stage else []), looks(), zf.adamw(0.1)), in_backward=True)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    model(x).square().mean().backward()
    opt.step()
    save(opt, directory, wait, told)
    kept = {k: p.clone() for k, p in zf.full_params(opt.tx, opt.state).items()}
    model(x).square().mean().backward()
    save(opt, directory, wait, told)
    with pytest.raises(RuntimeError, match=r"opt.state_dict\(\) between a backward and opt.step\(\)"):
        opt.state_dict()
    again = zf.load(directory, like=zf.init(opt.tx, {k: torch.zeros_like(p) for k, p in kept.items()}))
    same = all(torch.equal(p, kept[k]) for k, p in zf.full_params(opt.tx, again).items())
    opt.step()
    save(opt, directory, wait, told)
    opt.state_dict()
    opt.detach()
    return told, same


@pytest.mark.parametrize(("stage", "size"), [(None, 1), (zf.shard, 2)])
def test_no_save_of_half_a_step_within_backward(tmp_path, stage, size):
    rows = [(stage, tmp_path / str(wait), wait) for wait in (True, False)]
    for row, ranks in one_launch(size, within_a_backward, rows).items():
        for told, same in ranks:
            first, *half, last = told
            assert first == last == "saved" and same, row
            assert len(half) == (1 if stage else 2) and all(HALF in said for said in half), half
