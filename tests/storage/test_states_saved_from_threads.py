"""A save of a state made in a thread while something writes into the state: refused, and the one before it stays."""

import threading

import pytest
import torch
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.storage import pieces as writing  # inside: a save is stopped while it writes


@pytest.fixture
def held(monkeypatch):
    """Saves wait between the beginning and the data: set `held.may` once `held.began` is set."""
    held = type("Held", (), {"began": threading.Event(), "may": threading.Event()})
    write = writing._Writer.write_data

    def later(writer, name, pieces):
        held.began.set()
        assert held.may.wait(limit())
        return write(writer, name, pieces)

    def install():
        monkeypatch.setattr(writing._Writer, "write_data", later)

    held.install = staticmethod(install)
    return held


def save_beside(held, directory, state, act):
    """What a save of `state` in a thread tells, beside which `act` is done."""
    told = []

    def save():
        try:
            zf.save(directory, state)
            told.append("saved")
        except RuntimeError as error:
            told.append(str(error))

    held.install()
    thread = threading.Thread(target=save)
    thread.start()
    assert held.began.wait(limit())
    try:
        act()
    finally:
        held.may.set()
    thread.join(limit())
    return told


def pure(donate):
    tx = zf.adamw(0.1)
    state = zf.init(tx, {"w": torch.ones(300)})
    step = zf.make_step(lambda p, x: (p["w"] * x).square().sum(), tx, donate=donate)
    return tx, state, step


def test_a_state_that_a_step_is_given_meanwhile(held, tmp_path):
    tx, state, step = pure(donate=True)
    zf.save(tmp_path, state)
    (said,) = save_beside(held, tmp_path, state, lambda: step(state, torch.ones(300)))
    assert said.startswith("zf.save(directory, state) of a state that was donated")
    assert torch.equal(zf.load(tmp_path, like=zf.init(tx, {"w": torch.zeros(300)})).params["w"], torch.ones(300))


def test_a_state_that_stays_is_saved_as_it_is(held, tmp_path):
    tx, state, step = pure(donate=False)
    assert save_beside(held, tmp_path, state, lambda: step(state, torch.ones(300))) == ["saved"]
    assert torch.equal(zf.load(tmp_path, like=zf.init(tx, {"w": torch.zeros(300)})).params["w"], torch.ones(300))


@pytest.mark.parametrize("by", ["step", "hand"])
def test_the_state_of_an_attached_model(held, tmp_path, by):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    opt = zf.attach(model, zf.sgd(0.1))
    zf.save(tmp_path, opt.state)
    first = model.weight.detach().clone()

    def act():
        if by == "hand":
            with torch.no_grad():
                model.weight.add_(1.0)
        else:
            model(torch.ones(1, 3)).sum().backward()
            opt.step()

    (said,) = save_beside(held, tmp_path, opt.state, act)
    assert said.startswith("zf.save(directory, state) while something writes into the state")
    like = zf.init(opt.tx, dict(nn.Linear(3, 2).named_parameters()))
    assert torch.equal(zf.load(tmp_path, like=like).params["weight"], first)


def test_a_step_that_fails_has_been_given_nothing(tmp_path):
    tx = zf.chain(zf.leafwise(lambda grad, param: grad[:1])(), zf.sgd(0.1))
    state = zf.init(tx, {"w": torch.ones(3)})
    step = zf.make_step(lambda p: p["w"].sum(), tx, donate=True)
    with pytest.raises(ValueError, match="shape"):
        step(state)
    zf.save(tmp_path, state)
    assert torch.equal(zf.load(tmp_path, like=state).params["w"], torch.ones(3))
