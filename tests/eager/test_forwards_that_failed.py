"""A forward that raises on one rank: a step that all ranks leave out, as `docs/how-to/interrupts.md` writes it.

The reference is the same run without that step, to the bit.
"""

import torch
from one_launch import one_launch
from torch import nn

import zerofn as zf


class Raises(nn.Module):
    """In the middle: one of its blocks has been used."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.bad = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x):
        x = self.first(x)
        if self.bad:
            raise ArithmeticError
        return self.last(x)


def work(stage, steps):
    torch.manual_seed(0)
    model = Raises()
    opt = zf.attach(model, zf.chain(stage(), zf.sgd(0.01, momentum=0.9)))
    for i in steps:
        model.bad = i == 2 and torch.distributed.get_rank() == 1
        failed, loss = torch.zeros(()), torch.zeros(())
        try:
            loss = model(torch.full((2, 4), i + 1.0)).square().mean()
        except ArithmeticError:
            failed += 1
        torch.distributed.all_reduce(failed)
        if failed:
            opt.zero_grad()
            continue
        loss.backward()
        opt.step()
        opt.zero_grad()
    found = opt.global_steps, [x.clone() for x in zf.full_params(opt.tx, opt.state).values()]
    opt.detach()
    return found


STAGES = [zf.all_reduce, zf.reduce_scatter, zf.shard]


def test_ranks_that_tell_each_other_leave_the_step_out():
    rows = [(stage, steps) for stage in STAGES for steps in ((0, 1, 2, 3, 4), (0, 1, 3, 4))]
    found = one_launch(2, work, rows)
    for stage in STAGES:
        for (count, params), (same, others) in zip(*(found[stage, steps] for _, steps in rows[:2]), strict=True):
            assert count == same == 4, stage
            assert all(torch.equal(x, y) for x, y in zip(params, others, strict=True)), stage
