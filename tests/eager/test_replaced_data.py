"""`p.data = x` of the same shape and dtype is a write, as in torch, at every stage and whoever looks next."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from one_launch import one_launch
from pairs import cover
from stages import around
from torch import nn
from torch.nn.utils import vector_to_parameters

import zerofn as zf

RATE = 0.1


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False)).double()


def data(rank, i):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * i + rank), dtype=torch.float64)


def vector(model):
    return torch.arange(21, dtype=model[0].bias.dtype).sin()


def values(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def by_vector(model, old):
    vector_to_parameters(vector(model), model.parameters())


def by_hand(model, old):
    for p, x in zip(model.parameters(), torch.split(vector(model), [12, 3, 6]), strict=True):
        p.data = x.view(p.shape).t().contiguous().t() if p.ndim == 2 else x


def one_leaf(model, old):
    """Only one changes, and the user keeps the tensor."""
    old.append(torch.full((3, 4), 0.25, dtype=model[0].bias.dtype))
    model[0].weight.data = old[-1]


def other_strides(model, old):
    """A tensor with gaps, and one made of the parameter's own memory."""
    model[0].bias.data = torch.ones(6, dtype=model[0].bias.dtype)[::2]
    model[2].weight.data = model[2].weight.data * 2


def there_and_back(model, old, look=lambda: None):
    """Other values are put in for an evaluation; the parameters come back in their memory."""
    kept = [p.data for p in model.parameters()]
    by_vector(model, old)
    with torch.no_grad():
        model(data(0, 0))
    look()
    for p, x in zip(model.parameters(), kept, strict=True):
        p.data = x


HOW = {f.__name__: f for f in (by_vector, by_hand, one_leaf, other_strides, there_and_back)}
ADAMW = lambda: zf.adamw(RATE, eps=1e-3)  # noqa: E731
# What stands before a late reduction, and after it.
CHAINS = {
    "sgd": ((), lambda: (zf.sgd(RATE, momentum=0.9),)),
    "adamw": ((), lambda: (ADAMW(),)),
    "average": ((), lambda: (ADAMW(), zf.ema(0.5))),
    "offload": ((), lambda: (zf.offload(ADAMW()),)),
    "copies": ((zf.precision(torch.float32, store_dtype=torch.float64),), lambda: (ADAMW(),)),
}
STAGES = ("one process", "data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
# What happens between the write and the next step.
NEXT = ("a step", "an update in backward", "a state dict", "gathered", "a load before", "detach")
ROWS = [
    (how, chain, stage, after)
    for how in HOW
    for chain in CHAINS
    for stage in STAGES
    for after in NEXT
    if (stage, after) != ("ZeRO-1", "an update in backward")
]


def expected(how, chain, size, after):
    """Four steps of torch.optim on the batch of all ranks; the write comes after the second."""
    model = net()
    sgd = chain == "sgd"
    opt = (torch.optim.SGD if sgd else torch.optim.AdamW)(
        model.parameters(), RATE, **({"momentum": 0.9} if sgd else {"eps": 1e-3})
    )
    for i in range(4):
        if i == 2:
            if after == "a load before":
                by_vector(model, [])
            HOW[how](model, [])
            if after == "detach":
                break
        model(torch.cat([data(rank, i) for rank in range(size)])).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return values(model)


def written(how, chain, stage, after):
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, old = net(), []
    middle, rest = CHAINS[chain]
    front = around(stage, *middle, window=zf.accumulate(1))
    opt = zf.attach(model, zf.chain(*front, *rest()), in_backward=after == "an update in backward")
    for i in range(4):
        if i == 2:
            if after == "a load before":
                before = opt.state_dict()
                by_vector(model, [])
                opt.load_state_dict(before)
                by_vector(model, [])
            look = {"look": opt.state_dict} if how == "there_and_back" and after == "a state dict" else {}
            HOW[how](model, old, **look)
            given = [x.clone() for x in old]
            if after == "a state dict":
                opt.load_state_dict(opt.state_dict())
            if after == "gathered":
                with opt.gathered():
                    assert all(p.isfinite().all() for p in model.parameters())
            if after == "detach":
                break
        model(data(rank, i)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(old, given, strict=True)), "the user's tensor was written"
    opt.detach()
    return values(model)


def check(row, got, size):
    how, chain, _, after = row
    want, near = expected(how, chain, size, after), 1e-4 if chain == "copies" else 1e-9
    torch.testing.assert_close(got.double(), want, rtol=near, atol=near, msg=lambda m: f"{row}: {m}")


@pytest.mark.parametrize("rows", [cover(ROWS), pytest.param(ROWS, marks=pytest.mark.slow)], ids=["pairs", "all"])
def test_one_process_takes_other_data(rows):
    for row in rows:
        check(row, written(*row), 1)


@pytest.mark.parametrize("rows", [cover(ROWS), pytest.param(ROWS, marks=pytest.mark.slow)], ids=["pairs", "all"])
def test_ranks_take_other_data(rows):
    rows = [row for row in rows if row[2] != "one process"]
    for row, ranks in one_launch(2, written, rows, 300.0).items():
        for got in ranks:
            check(row, got, 2)
