"""bf16 over two axes of a mesh: wherever `precision` stands, both routes have the same bits, summed in one dtype."""

import functools

import torch
from time_limits import limit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofn as zf

BF16 = torch.bfloat16


class Product(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(w)

    def forward(self, x):
        return product(self.w, x)


def product(w, x):
    return (x.to(w.dtype) @ w.T).float().square().mean()


def orders():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cut, copies = mesh["shard"], mesh["replicate"]
    half = zf.precision(param_dtype=BF16)
    return {
        "between": [zf.shard(cut), half, zf.all_reduce(copies)],
        "behind": [zf.shard(cut), zf.all_reduce(copies), half],
        "cut twice": [zf.shard(cut), half, zf.reduce_scatter(copies)],
        "a window": [zf.shard(cut), half, zf.accumulate(2), zf.all_reduce(copies)],
        "in fp32": [zf.shard(cut), zf.precision(param_dtype=BF16, reduce_dtype=torch.float32), zf.all_reduce(copies)],
    }


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 5, generator=generator), torch.randn(4, 8, 5, generator=generator)


def by_both_routes():
    w, x = data()
    mine, found = x[torch.distributed.get_rank()], {}
    for name, order in orders().items():
        tx = zf.chain(*order, zf.sgd(1.0))
        model = Product(w.clone())
        opt = zf.attach(model, tx)
        state = zf.init(tx, {"w": w.clone()})
        step = zf.make_step(lambda p, x: product(p["w"], x), tx)
        for _ in range(2 if name == "a window" else 1):
            model(mine).backward()
            opt.step()
            opt.zero_grad()
            state, _ = step(state, mine.to(BF16))
        found[name] = zf.full_params(tx, opt.state)["w"], zf.full_params(tx, state)["w"]
        opt.detach()
    return found


@functools.cache
def gradients():
    """Of each rank alone, in bf16."""
    w, x = data()
    return [torch.func.grad(product)(w.to(BF16), part.to(BF16)) for part in x]


def test_both_routes_add_up_in_the_compute_dtype_or_the_one_that_is_asked_for():
    w, _ = data()
    # Ranks 0 and 1 share a leaf, and 2 and 3: divided before they are added, first within a pair.
    a, b, c, d = (g / 2 for g in gradients())
    in_bf16 = w - (((a + b) / 2) + ((c + d) / 2)).float()
    # Of two gradients alike the mean, in fp32, is each.
    window = w - ((a + b).float() / 2 + (c + d).float() / 2)
    a, b, c, d = (g.float() / 2 for g in gradients())
    in_fp32 = w - (((a + b) / 2) + ((c + d) / 2))
    for found in zf.launch(by_both_routes, 4, timeout=limit()):
        for name, (eager, pure) in found.items():
            assert torch.equal(eager, pure), name
            assert torch.equal(eager, {"in fp32": in_fp32, "a window": window}.get(name, in_bf16)), name
