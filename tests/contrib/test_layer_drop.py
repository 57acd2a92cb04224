"""Progressive layer drop: the published formula, its distribution, and steps that leave blocks out."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from time_limits import limit
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofn as zf

KEEP = zf.schedules.layer_keep(0.4, 0.05)


def test_the_published_formula():
    for step in (0, 1, 7, 500):
        theta = (1 - 0.4) * math.exp(-0.05 * step) + 0.4
        for i in range(1, 7):
            want = 1 - i / 6 * (1 - theta)
            assert KEEP(step, i / 6) == pytest.approx(want, rel=1e-14)
            assert float(KEEP(torch.tensor(step), i / 6)) == pytest.approx(want, rel=1e-14)


@pytest.mark.slow
def test_draws_are_as_likely_as_the_schedule_says_and_independent():
    blocks, steps = 4, 4000
    marks = [lambda x, i=i: x + torch.nn.functional.one_hot(torch.tensor(i), blocks) for i in range(blocks)]
    run = zf.layer_drop(marks, lambda step, depth: 1 - depth * 0.6, seed=3)
    p = torch.tensor([1 - (i + 1) / blocks * 0.6 for i in range(blocks)])
    kept = torch.stack([run(torch.zeros(blocks), step=t) * p for t in range(steps)]).round()
    # Each is there with probability p, counted five standard deviations about it.
    assert (kept.mean(0) - p).abs().le(5 * (p * (1 - p) / steps).sqrt()).all()
    # Scaled by 1 / p: the mean over steps is that without drops.
    assert ((kept / p).mean(0) - 1).abs().max() < 5 * ((1 - p) / p / steps).sqrt().max()
    # Uncorrelated between blocks and from one step to the next.
    centred = (kept - kept.mean(0)) / kept.std(0)
    together = centred.T @ torch.cat([centred, centred.roll(1, 0)], 1) / steps
    together[torch.arange(blocks), torch.arange(blocks)] = 0
    assert together.abs().max() < 5 / steps**0.5
    other = zf.layer_drop(marks, lambda step, depth: 1 - depth * 0.6, seed=4)
    assert any(not torch.equal(run(torch.zeros(blocks), step=t), other(torch.zeros(blocks), step=t)) for t in range(20))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, repeats=False):
        torch.manual_seed(0)
        super().__init__()
        self.repeats, self.blocks, self.head = repeats, nn.ModuleList(Block() for _ in range(3)), nn.Linear(3, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.repeats else block(x)
        return self.head(x)


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
HALF = zf.schedules.layer_keep(0.3, 10.0)


def by_hand(steps, start=None, first=0):
    """Plain torch: which blocks are kept is asked of the draws, what is made of them is written out."""
    model = Model()
    if start:
        model.load_state_dict(start)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(first, steps):
        x = X
        for i, block in enumerate(model.blocks):
            p = HALF(step, (i + 1) / 3)
            # A function alone draws for its place; the block of another list at the same place draws alike.
            kept = zf.layer_drop([lambda x: x] * i + [lambda x: x + 1] + [lambda x: x] * (2 - i), HALF)
            if float(kept(torch.zeros(()), step=step)):
                x = x + torch.tanh(block.linear(x)) / p
        model.head(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return model.state_dict()


def train(directory=None, stage=(), repeats=False, steps=6):
    model = Model(repeats)
    opt = zf.attach(model, zf.chain(*stage, zf.sgd(0.1, momentum=0.9)))
    zf.layer_drop(model, HALF, step=lambda: opt.state.step)
    for _ in range(steps):
        model(X).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if directory and int(opt.state.step) == 3:
            zf.save(directory, opt)
    return {k: p.detach().clone() for k, p in opt.detach().named_parameters()}


@pytest.mark.parametrize("repeats", [False, True])
def test_an_attached_model_trains_as_by_hand_and_resumes(tmp_path, repeats):
    want, start = by_hand(6), {k: p.detach() for k, p in Model().named_parameters()}
    got = train(tmp_path / "save", repeats=repeats)
    for k in want:
        # `x + (y - x) / p` rounds y - x once more than the sum by hand.
        torch.testing.assert_close(got[k] - start[k], want[k] - start[k], rtol=1e-4, atol=1e-6)
    model = Model(repeats)
    opt = zf.attach(model, zf.sgd(0.1, momentum=0.9))
    zf.layer_drop(model, HALF, step=lambda: opt.state.step)
    zf.load(tmp_path / "save", like=opt)
    for _ in range(3):
        model(X).square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert all(torch.equal(p.detach(), got[k]) for k, p in model.named_parameters())


def gathers():
    """Numbers gathered in forward with all blocks and without any, and parameters after six steps."""
    from zerofn.ranks.group import Traffic  # inside: counts what is sent

    sizes, plain = [], Traffic.sent

    def counted(self, op, sent):
        # On two ranks each sends half of what both have.
        sizes.append(2 * sent // 4 if op == "all_gather" else 0)
        return plain(self, op, sent)

    Traffic.sent = counted
    model = Model()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1, momentum=0.9)))
    found = []
    for never in (1.0, 1e-9):
        with zf.layer_drop(model, lambda step, depth, p=never: p, step=lambda: opt.state.step), torch.no_grad():
            sizes.clear()
            model(X)
            found.append(sum(sizes))
    opt.detach()
    return found, train(stage=[zf.shard()])


def test_under_shard_what_is_left_out_is_not_gathered():
    want = train()
    for (everything, nothing), got in zf.launch(gathers, 2, timeout=limit()):
        blocks, head = 3 * 12, 4
        assert everything >= blocks + head and nothing <= everything - blocks, (everything, nothing)
        for k in want:
            torch.testing.assert_close(got[k], want[k], rtol=1e-5, atol=1e-6)


def test_evaluation_keeps_all_and_a_handle_is_let_go_of():
    model, plain = Model(), Model()
    handle = zf.layer_drop(model, lambda step, depth: 0.001, step=lambda: 5)
    assert not torch.equal(model(X), plain(X))
    assert not torch.equal(copy.deepcopy(model)(X), plain(X))
    model.eval()
    assert torch.equal(model(X), plain(X))
    model.train()
    handle.remove()
    assert torch.equal(model(X), plain(X))
    with zf.layer_drop(model.blocks, lambda step, depth: 1.0, step=lambda: 5):
        assert torch.equal(model(X), plain(X))
        with pytest.raises(ValueError, match=r"blocks \[0, 1, 2\] have a forward of their own already"):
            zf.layer_drop(model, KEEP, step=lambda: 0)
