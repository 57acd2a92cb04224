"""What `zf.plan` says of two ranks, before there is one, against what they hold and send."""

import functools

import pytest
import torch
from one_launch import one_launch
from torch import nn

import zerofn as zf

BF16 = torch.bfloat16
WINDOW = 3


def label(path):
    return "matrix" if path.endswith("weight") else "rest"


CHAINS = {
    "all_reduce": lambda: [zf.all_reduce(), zf.adamw(1e-3)],
    "ZeRO-1": lambda: [zf.accumulate(WINDOW), zf.reduce_scatter(), zf.adamw(1e-3)],
    "ZeRO-2": lambda: [zf.reduce_scatter(), zf.accumulate(WINDOW), zf.sgd(0.1)],
    "ZeRO-2 in bf16": lambda: [
        zf.reduce_scatter(),
        zf.precision(param_dtype=BF16, reduce_dtype=torch.float32),
        zf.sgd(0.1, momentum=0.9),
    ],
    "ZeRO-3 in bf16": lambda: [zf.shard(), zf.precision(param_dtype=BF16), zf.accumulate(WINDOW), zf.adamw(1e-3)],
    "ZeRO-1 in int8": lambda: [
        zf.accumulate(WINDOW),
        zf.reduce_scatter(wire="int8", error_feedback=True),
        zf.adamw(1e-3),
    ],
    "ZeRO-3 in int8": lambda: [zf.shard(wire="fp8", reduce_wire="int8"), zf.accumulate(WINDOW), zf.adamw(1e-3)],
    "owners": lambda: [zf.shard(), zf.partition({"matrix": zf.muon(lr=0.1), "rest": zf.adamw(1e-3)}, label)],
    "owners of gradients": lambda: [
        zf.reduce_scatter(),
        zf.masked(zf.leafwise(unit)(), is_matrix),
        zf.sgd(0.1),
    ],
}
# By hand, for 1608 parameters and no leaf that is padded: the stage; bytes of gradients; and what one of two ranks
# sends in a window: half of a buffer for a scatter or a gather, all of it for an all-reduce. With gradients goes a flag
# for each of the four leaves, to the other rank. Both layers are still unsharded when backward begins.
WHOLE, HALF = 4 * 1608, 4 * 804
FLAGS = 4 * 4
# In codes the halves of 64 x 16, 64, 8 x 64 and 8, each in whole blocks of 128 with a scale of four bytes.
CODED = (4 + 1 + 2 + 1) * (128 + 4)
# The owner of 64 x 16 sends the other half of it, and its own half of 8 x 64 twice, as gradient and as parameter.
OWNED = 4 * 512 + 2 * 4 * 256
EXPECTED = {
    "all_reduce": (0, WHOLE, {"all_reduce": WHOLE + FLAGS}),
    "ZeRO-1": (1, WHOLE, {"reduce_scatter": HALF + FLAGS, "all_gather": HALF}),
    "ZeRO-2": (2, HALF, {"reduce_scatter": WINDOW * (HALF + FLAGS), "all_gather": HALF}),
    "ZeRO-2 in bf16": (2, HALF, {"reduce_scatter": HALF + FLAGS, "all_gather": HALF // 2}),
    "ZeRO-3 in bf16": (
        3,
        HALF,
        {"reduce_scatter": WINDOW * (HALF + FLAGS) // 2, "all_gather": WINDOW * HALF // 2},
    ),
    "ZeRO-1 in int8": (1, WHOLE, {"reduce_scatter": CODED + 4, "all_gather": HALF}),
    "ZeRO-3 in int8": (3, HALF, {"reduce_scatter": WINDOW * (CODED + 4), "all_gather": WINDOW * CODED}),
    "owners": (3, HALF, {"reduce_scatter": HALF + FLAGS, "all_gather": HALF, "all_to_all": OWNED}),
    "owners of gradients": (2, HALF, {"reduce_scatter": HALF + FLAGS, "all_gather": HALF, "all_to_all": OWNED}),
}


def unit(grad, param):
    return grad / grad.norm()


def is_matrix(path):
    return label(path) == "matrix"


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8))


def held_and_sent(name):
    rank = torch.distributed.get_rank()
    tx = zf.chain(*CHAINS[name]())
    table = zf.plan(tx, model(), world_size=2, rank=rank)
    params = dict(model().named_parameters())
    x = torch.ones(4, 16)
    state = zf.init(tx, params)

    def loss(p, x):
        return torch.func.functional_call(model(), p, (x.to(p["0.weight"].dtype),)).float().square().mean()

    out, pullback = zf.vjp(loss, tx, state, x)
    grads, *_ = pullback(torch.ones_like(out))
    net = model()
    opt = zf.attach(net, tx)
    window = 1 if tx.members[0].facts.window * tx.members[-2].facts.window == 1 else WINDOW
    for _ in range(2):
        before = zf.collectives.bytes_sent()
        for _ in range(window):
            net(x).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
    after = zf.collectives.bytes_sent()
    tensors = [t for t in torch.utils._pytree.tree_leaves(opt.state) if isinstance(t, torch.Tensor)]
    own = table.road
    opt.detach()
    return {
        "plan": (own.zero, own.gradients, dict(own.sent)),
        "planned": table.bytes,
        # What is expanded is of leaves that another rank has: one element in memory.
        "state": sum(t.element_size() * (1 if 0 in t.stride() else t.numel()) for t in tensors),
        "gradients": sum(g.numel() * g.element_size() for g in grads.values()),
        "sent": {op: after[op] - before.get(op, 0) for op in after if after[op] != before.get(op, 0)},
    }


@functools.cache
def all_results():
    return one_launch(2, held_and_sent, [(name,) for name in CHAINS])


def results(name):
    return all_results()[name,]


@pytest.mark.parametrize("name", CHAINS)
def test_what_is_planned_is_held_and_sent(name):
    first, second = results(name)
    assert first["plan"] == EXPECTED[name]
    for found in (first, second):
        _, gradients, planned = found["plan"]
        assert found["gradients"] == gradients
        # Muon's count and momentum of the matrix that is not this rank's: one element of each.
        assert found["state"] == found["planned"] + (8 + 4 if name == "owners" else 0)
        assert found["sent"] == planned


def test_the_other_rank_owns_the_smaller_matrix():
    """It sends its half of 64 x 16 twice, and the other half of 8 x 64."""
    assert results("owners")[1]["plan"][2]["all_to_all"] == 2 * 4 * 512 + 4 * 256
