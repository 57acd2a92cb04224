"""Each row of the table of transforms goes on from a checkpoint, and from a state dict, with the bits of a run that was
never interrupted."""

import io

import pytest
import torch
from torch import nn
from transforms_table import LAYERS, ROWS
from trees import flat

import zerofn as zf

X = torch.randn(4, 4, 5, generator=torch.Generator().manual_seed(1))
# Three steps are in the middle of a window of two, and behind updates of its own of each transform.
BEFORE = 3


def attached(name, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, zf.attach(model, ROWS[name].trained(LAYERS))


def train(name, model, opt, xs):
    row = ROWS[name]
    for i, x in enumerate(xs):
        loss = model(x.to(next(model.parameters()).dtype)).float().square().mean()
        opt.backward(loss) if row.loss else loss.backward()
        opt.step(**({"weight": 2.0 + i} if row.weighted else {}))
        opt.zero_grad()


def values(opt):
    state = opt.state
    found = flat({"params": state.leaves, **state.transforms, "step": state.step, "micro_step": state.micro_step})
    return {key: x.detach().clone() for key, x in found.items() if isinstance(x, torch.Tensor)}


def by_checkpoint(directory, first, second):
    zf.save(directory, first[1])
    zf.load(directory, like=second[1])


def by_state(directory, first, second):
    zf.save(directory, first[1].state)
    second[1].load_state(zf.load(directory, like=second[1].state))


def by_state_dict(directory, first, second):
    file = io.BytesIO()
    torch.save([x.state_dict() for x in first], file)
    for x, kept in zip(second, torch.load(io.BytesIO(file.getvalue())), strict=True):
        x.load_state_dict(kept)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if row.often else pytest.mark.slow) for x, row in ROWS.items()]
)
def test_it_goes_on_with_the_same_bits(name, tmp_path):
    ways = (by_checkpoint, by_state)[[*ROWS].index(name) % 2], by_state_dict
    first, others = attached(name), [(way, attached(name, seed=1)) for way in ways]
    start = values(first[1])
    train(name, *first, X[:BEFORE])
    for way, second in others:
        way(tmp_path / "saved", first, second)
    reached = values(first[1])
    train(name, *first, X[BEFORE:])
    last = values(first[1])
    # Of a run that does not move nothing would be seen.
    assert any(not torch.equal(x, start[key]) for key, x in last.items() if key.startswith("/params"))
    for way, second in others:
        for when, want in (("loaded", reached), ("trained", last)):
            found = values(second[1])
            assert found.keys() == want.keys()
            wrong = [key for key, x in want.items() if not torch.equal(found[key], x)]
            assert not wrong, f"{way.__name__}, {when}: {wrong}"
            if when == "loaded":
                train(name, *second, X[BEFORE:])
