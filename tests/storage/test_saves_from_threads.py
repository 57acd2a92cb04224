"""A save made in a thread of one's own while a step is made: refused on all ranks, and the one before it stays.

Events and no chance decide what comes first. The reference is what the state was when the first save was made.
"""

import threading

import pytest
import torch
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
    return told, middle, old


@pytest.mark.parametrize(("stage", "size"), [(None, 1), (zf.all_reduce, 2), (zf.reduce_scatter, 2), (zf.shard, 2)])
def test_a_save_beside_a_step_is_refused_on_all_ranks(tmp_path, stage, size):
    for told, middle, old in zf.launch(work, size, stage, tmp_path, True, False, timeout=limit(60)):
        assert SAID in told[0] and told[1:] == ["saved"] and old
        # Begun and ended within one step.
        assert stage or (SAID in middle[0] and len(middle) == 1)


def test_one_that_is_copied_first_is_refused_for_what_was_written_while_it_copied(tmp_path):
    ((told, middle, old),) = zf.launch(work, 1, None, tmp_path, False, False, timeout=limit(60))
    # A step after the copies is no harm.
    assert told == ["saved", "saved"] and SAID in middle[0] and old


def test_updates_in_backward_are_writes_too(tmp_path):
    for told, _, old in zf.launch(work, 2, zf.shard, tmp_path, True, True, timeout=limit(60)):
        assert SAID in told[0] and told[1:] == ["saved"] and old


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
    return told, same


@pytest.mark.parametrize(("stage", "size"), [(None, 1), (zf.shard, 2)])
@pytest.mark.parametrize("wait", [True, False])
def test_no_save_of_half_a_step_within_backward(tmp_path, stage, size, wait):
    for told, same in zf.launch(within_a_backward, size, stage, tmp_path, wait, timeout=limit(60)):
        first, *half, last = told
        assert first == last == "saved" and same
        assert len(half) == (1 if stage else 2) and all(HALF in said for said in half), half
