"""Graphs and gradients from when parameters had other sizes: before `zf.attach`, in `opt.gathered()`, after detach.

Numbers are those of plain torch in one process, in float64: the mean over ranks' losses, and the same programs.
"""

import contextlib
import functools

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import zerofn as zf
from tests.support.rank_programs import batch, rank_and_size
from tests.support.stages import around
from tests.support.time_limits import limit


class Side:
    """The programs' side: a rank with an attached model, or plain torch that adds up what all ranks do."""

    def __init__(self, size, stage=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()
        self.size, self.stage = size, stage
        self.ranks = range(size) if stage is None else [rank_and_size()[0]]
        self.opt = None

    def loss(self, step):
        return sum((self.model(x) - y).square().mean() for x, y in self.batches(step)) / len(self.ranks)

    def batches(self, step):
        return [batch(rank, step) for rank in self.ranks]

    def attach(self):
        if self.stage is None:
            self.opt = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.01)
        else:
            self.opt = zf.attach(self.model, zf.chain(*around(self.stage, window=zf.accumulate(1)), zf.adamw(lr=0.1)))

    def detach(self):
        if self.stage is not None:
            self.opt.detach()

    def gathered(self):
        return contextlib.nullcontext() if self.stage is None else self.opt.gathered()

    def train(self, steps):
        loss = None
        for step in range(steps):
            loss = self.loss(step)
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
        return loss

    def whole(self):
        if isinstance(self.opt, zf.Optimizer):
            self.opt.detach()
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def kept_from_before(side):
    """A notebook that tries its model, and keeps what came out."""
    kept = side.model(side.batches(9)[0][0])
    side.attach()
    side.train(5)
    return kept.detach()


def weights_from_hooks(side):
    """`module.weight` is made by a hook of torch, and its graph stays in the module."""
    torch.nn.utils.prune.l1_unstructured(side.model[2], "weight", 0.4)
    side.attach()
    side.train(5)


def kept_over_a_detach(side):
    """The last loss of training is alive when the model is trained on as a plain one."""
    side.attach()
    kept = side.train(3)
    side.detach()
    side.opt = torch.optim.SGD(side.model.parameters(), lr=0.1)
    for step in range(3):
        side.opt.zero_grad()
        x, y = batch(0, step)
        (side.model(x) - y).square().mean().backward()
        side.opt.step()
    return kept.detach()


def kept_from_gathered(side):
    side.attach()
    side.train(2)
    before = side.loss(7)
    with side.gathered():
        kept = sum(p.square().sum() for p in side.model.parameters())
        slopes = torch.autograd.grad(kept, list(side.model.parameters()), retain_graph=True)
    before.backward()
    side.opt.step()
    side.opt.zero_grad()
    side.train(3)
    return kept.detach(), slopes[0]


def gradients_from_before(side):
    """They are added to, as in torch."""
    side.loss(8).backward()
    side.attach()
    side.train(5)


def gradients_of_one_rank_from_before(side):
    """Somebody has tried a backward on the first rank alone; what it has left counts as that rank's."""
    if 0 in side.ranks:
        x, y = batch(0, 8)
        ((side.model(x) - y).square().mean() / len(side.ranks)).backward()
    side.attach()
    side.opt.step()
    side.opt.zero_grad()
    side.train(5)


PROGRAMS = [
    kept_from_before,
    weights_from_hooks,
    kept_over_a_detach,
    kept_from_gathered,
    gradients_from_before,
    gradients_of_one_rank_from_before,
]
# Gradients from before are refused where parameters become shards.
WHOLE = (gradients_from_before, gradients_of_one_rank_from_before)


def stages(program, every):
    """All, or the one that shards and another; of gradients from before two."""
    at = PROGRAMS.index(program)
    if program in WHOLE:
        return range(3) if every else sorted({at % 3, (at + 1) % 3})
    return range(4) if every else (at % 3, 3)


def on_a_rank(every):
    size = rank_and_size()[1]
    found = {}
    for program in PROGRAMS:
        for stage in stages(program, every):
            side = Side(size, stage)
            found[stage, program.__name__] = program(side), side.whole()
    return found


@functools.cache
def on_ranks(size, every):
    return zf.launch(on_a_rank, size, every, timeout=limit())


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize(("size", "every"), [(2, False), pytest.param(3, True, marks=pytest.mark.slow)])
def test_numbers_are_those_of_plain_torch(size, every, program):
    side = Side(size)
    first = {name: p.detach().clone() for name, p in side.model.named_parameters()}
    said, want = program(side), side.whole()
    # Of a pruned module the weight has another name.
    assert any(name in first and (x - first[name]).abs().max() > 0.05 for name, x in want.items())
    for rank in on_ranks(size, every):
        for stage in stages(program, every):
            others, got = rank[stage, program.__name__]
            for name, x in want.items():
                # Sums over ranks are in another order; Adam's division carries that on.
                torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-11)
            if said is not None and program is kept_from_gathered:
                torch.testing.assert_close(others, said, rtol=1e-9, atol=1e-11)


def refused():
    told = []
    old = Side(2, 3)
    # Of the sum no node needs the numbers of a parameter, which are other ones by now.
    graph = sum(p.sum() for p in old.model.parameters())
    old.attach()
    for use in (
        graph.backward,
        lambda: _inside(old, lambda pen: pen.backward()),
        lambda: _inside(old, lambda pen: None).backward(),
    ):
        try:
            use()
        except RuntimeError as error:
            told.append(str(error))
    grads = [p.grad is None for p in old.model.parameters()]
    old.train(1)
    return told, grads


def _inside(side, then):
    with side.opt.gathered() as model:
        penalty = sum(p.sum() for p in model.parameters())
        then(penalty)
    return penalty


def test_whole_gradients_for_parts_are_refused():
    for told, grads in zf.launch(refused, 2, timeout=limit()):
        before, inside, after = told
        assert "from before zf.attach" in before and "0.weight a gradient" in inside
        assert "from before the end of opt.gathered()" in after and "the forward again" in after
        assert all(grads)
