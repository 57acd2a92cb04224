"""Under `shard`: what is written into parameters by hand between two calls of the model is what the next one sees."""

import pytest
import torch
from time_limits import limit
from torch import nn

import zerofn as zf


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.teacher = nn.Linear(4, 8).double(), nn.Linear(4, 8).double()
        self.teacher.requires_grad_(False)

    def forward(self, x):
        return (self.stem(x) - self.teacher(x)).square().mean()


@torch.no_grad()
def write(way, m):
    if way == "clamp":
        m.stem.weight.clamp_(-0.1, 0.1)
    elif way == "data":
        m.teacher.weight.data.mul_(0.5).add_(m.stem.weight.data, alpha=0.5)
    else:
        m.teacher.weight.lerp_(m.stem.weight, 0.5)


def losses(way, make_optimizer):
    m = Pair()
    opt = make_optimizer(m)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = []
    for _ in range(3):
        # Twice before a step: the second call comes upon a copy that the first has gathered.
        for _ in range(2):
            loss = m(x)
            loss.backward()
            found.append(loss.item())
            write(way, m)
        opt.step()
        opt.zero_grad()
    return found


def sharded(way):
    return losses(way, lambda m: zf.attach(m, zf.chain(zf.shard(), zf.sgd(0.1))))


@pytest.mark.parametrize("way", ["clamp", "data", "lerp"])
def test_the_next_call_sees_it(way):
    want = losses(way, lambda m: torch.optim.SGD(m.parameters(), 0.1))
    assert len({round(x, 9) for x in want}) == len(want)
    for found in zf.launch(sharded, 2, way, timeout=limit()):
        # Float64, and the same data on both ranks.
        assert max(abs(a - b) for a, b in zip(found, want, strict=True)) < 1e-12
