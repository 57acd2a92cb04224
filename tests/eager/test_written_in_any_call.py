"""Writes of forward under `torch.no_grad()` into parameters that are copies: stored in every call."""

from typing import Any

import pytest
import torch
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf

CAST = {"param_dtype": torch.float64}
CHAINS = {
    "ZeRO-0": lambda: (zf.all_reduce(), zf.precision(**CAST)),
    "ZeRO-2": lambda: (zf.reduce_scatter(), zf.precision(**CAST)),
    "ZeRO-3": lambda: (zf.shard(), zf.precision(**CAST)),
    "cast first": lambda: (zf.precision(**CAST), zf.reduce_scatter()),
}
STEPS = 9


class Teacher(nn.Module):
    """The teacher follows the student in some calls."""

    def __init__(self, calls: tuple[int, ...]):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)
        self.writes, self.calls = calls, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in self.writes:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight, 0.25)
                self.teacher.bias[1] = self.calls
        return self.student(x) + torch.tanh(self.teacher(x))


def train(model: nn.Module, opt: Any) -> None:
    for _ in range(STEPS):
        model(torch.ones(2, 3, dtype=torch.float64)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def attached(calls: tuple[int, ...], names: list[str]) -> dict[str, list[Tensor]]:
    found = {}
    for name in names:
        model = Teacher(calls)
        views = CHAINS[name]() if name in CHAINS else (zf.precision(**CAST),)
        opt = zf.attach(model, zf.chain(*views, zf.sgd(0.1)))
        train(model, opt)
        opt.detach()
        found[name] = [x.detach() for x in model.teacher.parameters()]
    return found


@pytest.mark.parametrize("calls", [(1, 2, 3), (3, 5, 9), (6, 7)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_stored_in_every_call(calls, ranks):
    plain = Teacher(calls).double()
    before = [x.detach().clone() for x in plain.teacher.parameters()]
    train(plain, torch.optim.SGD(plain.student.parameters(), 0.1))
    names = ["one process"] if ranks == 1 else list(CHAINS)
    everywhere = zf.launch(attached, ranks, calls, names, timeout=limit()) if ranks > 1 else [attached(calls, names)]
    for found in everywhere:
        for name, after in found.items():
            for x, want, start in zip(after, plain.teacher.parameters(), before, strict=True):
                # Masters are kept in fp32.
                torch.testing.assert_close(x.double(), want, rtol=1e-6, atol=2e-7 * STEPS, msg=name)
                assert not torch.equal(want, start)
