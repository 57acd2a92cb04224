"""Writes that nobody counts, `p.detach().numpy()[...] = x`, into parameters that are copies of what is stored."""

import torch
from time_limits import limit
from torch import nn

import zerofn as zf

CHAINS = {
    "ZeRO-0": lambda: (zf.all_reduce(), zf.precision(param_dtype=torch.float64)),
    "ZeRO-2": lambda: (zf.reduce_scatter(), zf.precision(param_dtype=torch.float64)),
    "cast last": lambda: (zf.precision(param_dtype=torch.float64), zf.reduce_scatter()),
}
STEPS = 6


class Teacher(nn.Module):
    """The teacher follows the student by NumPy, in calls from `first` on."""

    def __init__(self, first: int):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.first, self.calls = first, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > self.first:
            mine, its = self.student.weight.detach().numpy(), self.teacher.weight.detach().numpy()
            its[...] = 0.75 * its + 0.25 * mine
        return self.student(x) + torch.tanh(self.teacher(x))


def train(model, opt):
    for _ in range(STEPS):
        model(torch.ones(2, 3, dtype=torch.float64)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def attached(first):
    found = {}
    for name, views in CHAINS.items():
        model = Teacher(first)
        opt = zf.attach(model, zf.chain(*views(), zf.sgd(0.1)))
        try:
            train(model, opt)
            opt.detach()
            found[name] = model.teacher.weight.detach()
        except RuntimeError as error:
            found[name] = str(error), int(opt.state.step)
    return found


def test_stored_where_every_step_writes():
    plain = Teacher(0).double()
    before = plain.teacher.weight.detach().clone()
    train(plain, torch.optim.SGD(plain.parameters(), 0.1))
    for found in zf.launch(attached, 2, 0, timeout=limit()):
        for name, after in found.items():
            moved = plain.teacher.weight.detach() - before
            # Masters are kept in fp32.
            torch.testing.assert_close(after.double() - before, moved, rtol=0, atol=2e-7 * STEPS, msg=name)


def test_refused_where_the_first_does_not():
    """Steps 1 and 2 are compared, then 4: at step 4 what step 3 wrote is lost already."""
    for found in zf.launch(attached, 2, 2, timeout=limit()):
        for name in ("ZeRO-0", "ZeRO-2"):
            text, step = found[name]
            assert step == 3 and "teacher.weight" in text and "NumPy" in text and "p.copy_(new)" in text, text
