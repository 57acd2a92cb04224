"""What a steady step of one process does not do again: look for changes leaf by leaf, check updates."""

import os
import sys

import pytest
import torch
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.extend import Facts, Transform

ROOT = os.path.dirname(zf.__file__) + os.sep


def calls_of(fn):
    """The functions of the package that run, by name."""
    found = []

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.append(f"{frame.f_code.co_filename[len(ROOT) :]}:{frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("layers", [1, 6])
def test_a_steady_step_makes_as_many_calls_for_many_leaves_as_for_few(layers):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    opt = zf.attach(model, zf.adamw(1e-3))
    before = [dict(leaves) for leaves in opt.state.transforms["adamw"].values() if isinstance(leaves, dict)]
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
        made = calls_of(opt.step)
        opt.zero_grad()
    assert len(made) <= 39, made
    # No tensor is made for a leaf: moments and counts are written where they are.
    after = [leaves for leaves in opt.state.transforms["adamw"].values() if isinstance(leaves, dict)]
    assert len(before) == 3 and all(new[p] is x for old, new in zip(before, after, strict=True) for p, x in old.items())
    assert {int(count) for count in opt.state.transforms["adamw"]["count"].values()} == {5}
    assert len({name.partition(":")[0] for name in made}) <= 17, made


def zero_1():
    return zf.chain(zf.accumulate(2), zf.reduce_scatter(), zf.clip_by_global_norm(1.0), zf.adamw(1e-3))


def zero_3():
    return zf.chain(zf.shard(), zf.precision(param_dtype=torch.bfloat16), zf.adamw(1e-3))


def steady_step(chain):
    """The functions of the package that a step runs which updates, at ZeRO-1 the last of a window."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tx = chain()
    opt = zf.attach(model, tx)
    for _ in range(8):
        model(torch.ones(2, 4)).float().sum().backward()
        made = calls_of(opt.step)
        opt.zero_grad()
    assert bool(opt.metrics["updated"])
    return made


@pytest.mark.parametrize(("chain", "calls", "modules"), [(zero_1, 147, 35), (zero_3, 72, 29)])
def test_a_step_over_ranks_stays_as_short_as_it_is(chain, calls, modules):
    for made in zf.launch(steady_step, 2, chain, timeout=limit()):
        assert len(made) <= calls, made
        assert len({name.partition(":")[0] for name in made}) <= modules, made


def calls_of_a_zero_3(blocks):
    """How many functions of the package an attach runs, and the functions of a backward after the first ten."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(blocks)))
    tx = zf.chain(zf.shard(), zf.precision(param_dtype=torch.bfloat16), zf.scale_loss("dynamic"), zf.adamw(1e-3))
    made = []
    attached = calls_of(lambda: made.append(zf.attach(model, tx)))
    for _ in range(12):
        loss = model(torch.ones(2, 4)).float().square().mean()
        backward = calls_of(loss.backward)
        made[0].step()
        made[0].zero_grad()
    return len(attached), backward


def test_an_attach_and_a_backward_of_zero_3_stay_as_short_as_they_are():
    for blocks, attach, calls in ((1, 1600, 73), (4, 2300, 293)):
        for attached, backward in zf.launch(calls_of_a_zero_3, 2, blocks, timeout=limit()):
            assert attached <= attach, attached
            assert len(backward) <= calls, backward
            assert len({name.partition(":")[0] for name in backward}) <= 27, backward


def wrong_from(first, every):
    """Gives `w` a gradient of one row from its step `first` on; the sum that it is added to is spread over rows."""
    seen = []

    def update(grads, state, params, carry, ctx):
        seen.append(len(seen) + 1)
        return {p: g[:1] if len(seen) >= first else g for p, g in grads.items()}, state

    mine = Transform("mine", needs="element", facts=Facts(keeps=False), update_fn=update)
    return zf.chain(zf.accumulate(every), mine, zf.sgd(1.0)) if every > 1 else zf.chain(mine, zf.sgd(1.0))


def trained(first, every, steps, check=False):
    model = nn.ParameterDict({"w": torch.zeros(2, 3)})
    opt = zf.attach(model, wrong_from(first, every), check=check)
    for _ in range(steps * every):
        model["w"].sum().backward()
        opt.step()
        opt.zero_grad()
    return model["w"].detach()


@pytest.mark.parametrize("every", [1, 3])
def test_who_keeps_nothing_is_checked_in_the_first_three_steps_that_come_to_it(every):
    """Held micro-steps are none of them."""
    for first in (1, 3):
        with pytest.raises(ValueError, match="mine: an update that does not fit its leaves"):
            trained(first, every, first)
    # Later its promise is believed: each row has the gradient of the first.
    assert torch.equal(trained(4, every, 5), torch.full((2, 3), -5.0))
    with pytest.raises(ValueError, match="mine: an update that does not fit its leaves"):
        trained(4, every, 5, check=True)


def test_settings_that_come_and_go_between_steps():
    """Rates, numbers, counts, frozen leaves and gradients that are missing, each in the step in which they change."""
    torch.manual_seed(0)
    mine, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(mine.state_dict())
    opt, ref = zf.attach(mine, zf.adamw(1e-2)), torch.optim.AdamW(theirs.parameters(), 1e-2)
    x = torch.randn(4, 3)
    for i in range(12):
        for o in (opt, ref):
            o.param_groups[0]["lr"] = 1e-2 / (1 + i // 3)
            o.param_groups[0]["weight_decay"] = 0.1 if i % 4 else 0.01
            o.zero_grad()
        for model, o in ((mine, opt), (theirs, ref)):
            model.bias.requires_grad_(i % 5 != 3)
            (model(x).square().mean() if i % 3 else model(x * 0 + x).sum()).backward()
            if i % 6 == 5:
                model.weight.grad = None
            if i == 8:
                o.state[model.bias]["step"].zero_()
            o.step()
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("clear", ["opt", "zeros", "model"])
def test_the_first_opt_backward_may_come_after_steps_that_were_cleared(clear):
    """It adds to what has arrived since, and drops nothing."""
    mine, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(mine.state_dict())
    opt, ref = zf.attach(mine, zf.sgd(0.125)), torch.optim.SGD(theirs.parameters(), 0.125)
    x = torch.randn(4, 3)
    for i in range(6):
        for model, o in ((mine, opt), (theirs, ref)):
            if clear != "model":
                model(x).exp().mean().backward()
            loss = model(x).square().mean()
            if i < 3 or o is ref:
                loss.backward()
            else:
                opt.backward(loss)
            o.step()
            if clear == "model":
                model.zero_grad()
            else:
                o.zero_grad(set_to_none=clear == "opt")
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
