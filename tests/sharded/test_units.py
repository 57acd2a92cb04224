"""Which parameters travel together under `shard`, and that many small blocks which do are trained as one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from one_launch import one_launch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofn as zf
from zerofn.core.layout import make_layout  # inside: what is split into units
from zerofn.sharded.units import SHARES, SMALL, split  # inside: the units themselves are asked for


def linears(count, width=4):
    return nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))


class Between(nn.Module):
    """Blocks between two modules that are none."""

    def __init__(self, before, blocks, after):
        super().__init__()
        self.before, self.blocks, self.after = before, blocks, after


def linear():
    return nn.Linear(4, 4)


# Sizes of units, in blocks or in modules that are none.
with torch.device("meta"):
    UNITS = {
        "a block each where there are few": (linears(SHARES), [1] * SHARES),
        "small ones together": (linears(4 * SHARES), [4] * SHARES),
        "as many as there is room for": (linears(2 * SHARES + 3), [2] * (SHARES + 1) + [1]),
        "large ones alone": (linears(2 * SHARES, 600), [1] * 2 * SHARES),
        "not with what is no block": (Between(linear(), linears(2 * SHARES), linear()), [1, *[2] * SHARES, 1]),
        "neighbours that are none": (Between(linear(), linear(), linear()), [3]),
    }


@pytest.mark.parametrize("name", UNITS)
def test_small_neighbours_travel_together_and_each_leaf_once(name):
    model, sizes = UNITS[name]
    params = dict(model.named_parameters())
    leaves = make_layout(params)[0].leaves
    units, modules = split(model, leaves, params)
    assert [leaf.path for unit in units for leaf in unit] == list(params)
    assert [len({leaf.path.rpartition(".")[0] for leaf in unit}) for unit in units] == sizes
    assert len(modules) == sum(sizes)
    for unit in units:
        together = len({leaf.path.rpartition(".")[0] for leaf in unit}) > 1
        assert not together or sum(leaf.numel for leaf in unit) <= SMALL


class Deep(nn.Module):
    """Many small blocks, of which a unit has several."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3 * SHARES))

    def forward(self, x, skipped=()):
        for i, block in enumerate(self.blocks):
            if i not in skipped:
                run = lambda x, block=block: torch.tanh(block(x)) + x / 2  # noqa: E731
                again = self.kind in ("checkpoint", "reentrant")
                x = checkpoint(run, x, use_reentrant=self.kind == "reentrant") if again else run(x)
        return x


KINDS = ["plain", "checkpoint", "reentrant", "skipped here", "skipped everywhere", "frozen", "in backward", "second"]


def skipped_by(kind, rank):
    return (4, 5) if kind == "skipped everywhere" or (kind == "skipped here" and rank) else ()


def data(step, rank):
    return torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(7 * step + rank))


def loss_of(model, kind, x, rank):
    x = x.requires_grad_()
    loss = model(x, skipped_by(kind, rank)).square().mean()
    if kind == "second":
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + g.square().sum()
    return loss


def trained(kind):
    torch.manual_seed(0)
    model = Deep(kind).double()
    alone = copy.deepcopy(model)
    for each in (model, alone):
        each.blocks[4].requires_grad_(kind != "frozen")
    opt = zf.attach(model, zf.chain(zf.shard(), zf.adamw(1e-2)), in_backward=kind == "in backward")
    reference = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], 1e-2)
    world = dist.get_world_size()
    for step in range(3):
        loss_of(model, kind, data(step, dist.get_rank()), dist.get_rank()).backward()
        opt.step()
        opt.zero_grad()
        for rank in range(world):
            (loss_of(alone, kind, data(step, rank), rank) / world).backward()
        reference.step()
        reference.zero_grad()
    found = {path: p.full_tensor().detach() for path, p in model.named_parameters()}
    for path, p in alone.named_parameters():
        torch.testing.assert_close(found[path], p.detach(), rtol=1e-10, atol=1e-12, msg=f"{kind}: {path}")
    shares = len(opt._own.home.units.plans.units) - len(found)
    opt.detach()
    return shares


def test_units_of_several_blocks_train_as_one_process_does():
    # Behind the units of blocks is one for each leaf alone.
    for row, found in one_launch(2, trained, [(kind,) for kind in KINDS]).items():
        assert found == [SHARES] * 2, row
