"""A small model that torch's tensor parallelism cuts, and one process with plain parameters beside it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zerofn as zf

ROWS, WIDTH, OUT = 8, 6, 3
BEFORE = torch.float64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, OUT)
        # Three elements over two ranks are two and one.
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, OUT))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        gain = self.gain.full_tensor() if isinstance(self.gain, DTensor) else self.gain
        return self.head(x) * gain


def plain(dtype=BEFORE):
    torch.manual_seed(0)
    return Model().to(dtype)


def axes(dp, tp):
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    return mesh["dp"], mesh["tp"]


def cut(tp, dtype=BEFORE):
    """Columns and rows are cut, a gain unevenly; the bias of rows is a replicated DTensor, norms and head are plain."""
    plan = {}
    for i in range(2):
        plan |= {f"blocks.{i}.up": ColwiseParallel(), f"blocks.{i}.down": RowwiseParallel()}
    model = parallelize_module(plain(dtype), tp, plan)
    model.gain = nn.Parameter(distribute_tensor(model.gain.data, tp, [Shard(0)]))
    return model


def batch(step, rank=0, size=1, dtype=BEFORE):
    """A rank's rows of a step's batch."""
    g = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, n, generator=g, dtype=BEFORE).to(dtype) for n in (WIDTH, OUT))
    n = ROWS // size
    return x[rank * n : (rank + 1) * n], y[rank * n : (rank + 1) * n]


def train(model, opt, steps, dp=None, dtype=BEFORE, start=0):
    """Norms of the gradients of each step."""
    rank, size = (0, 1) if dp is None else (dp.get_local_rank(), dp.size())
    norms = []
    for step in range(start, start + steps):
        x, y = batch(step, rank, size, dtype)
        ((model(x) - y) ** 2).mean().backward()
        opt.step()
        opt.zero_grad()
        norms.append(float(opt.metrics["grad_norm"]) if "grad_norm" in opt.metrics else 0.0)
    return norms


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def leaves(model):
    """Parameters that require gradients, with their names."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def wholes(model):
    """Parameters of a model that is not attached, each whole."""
    return {name: whole(p) for name, p in model.named_parameters()}


def alone(tx, steps, dtype=BEFORE):
    """Parameters, and norms, of one process with plain parameters."""
    model = plain(dtype)
    norms = train(model, opt := zf.attach(model, tx), steps, dtype=dtype)
    opt.detach()
    return wholes(model), norms


def difference(got, want, dtype=BEFORE):
    """The largest difference over the largest change since the start, over leaves."""
    start = wholes(plain(dtype))
    return max(float((got[p] - x).abs().max() / (x - start[p]).abs().max()) for p, x in want.items())
