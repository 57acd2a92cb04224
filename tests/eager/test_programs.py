"""Whatever a user does between two steps gives the gradients of plain torch, at every stage."""

import contextlib
import functools
import traceback

import pytest
import rank_programs as P
import torch
from stages import STAGES, around
from time_limits import limit
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofn as zf
import zerofn.sharded.reducer  # inside: its patience and its buckets are made small

SGD = {"lr": 0.3, "momentum": 0.8}
# ZeRO-1 whose gradients do not wait for the end of a window.
NOTHING_HELD = "ZeRO-1, nothing held"


def tx_of(stage):
    first = around("ZeRO-1", zf.accumulate(1)) if stage == NOTHING_HELD else around(stage, window=P.hold())
    return zf.chain(*first, zf.clip_by_global_norm(0.5), zf.sgd(**SGD))


def mse(out, y):
    return ((out - y) ** 2).mean()


def two_forwards_one_backward(model, rank, step, talk):
    x, y = P.batch(rank, step)
    (mse(model(x, "a"), y) + 0.5 * mse(model(x.flip(0), "b"), y)).backward()


def two_losses_two_backwards(model, rank, step, talk):
    x, y = P.batch(rank, step)
    first, second = mse(model(x), y), mse(model(x.flip(0), "b"), y)
    talk()
    second.backward()
    talk()
    first.backward()


def forward_backward_twice(model, rank, step, talk):
    for part in range(2):
        x, y = P.batch(rank, 10 * step + part)
        mse(model(x, "ab"[(rank + part) % 2]), y).backward()
        talk()


def more_on_some_ranks(model, rank, step, talk):
    """No collective of the user's stands before the step, so ranks may differ in how often they use the model."""
    for part in range(1 + rank):
        x, y = P.batch(rank, 10 * step + part)
        mse(model(x, "ab"[(rank + part) % 2]), y).backward()


more_on_some_ranks.quiet = True


def kept_graph(model, rank, step, talk):
    x, y = P.batch(rank, step)
    out = model(x, "a")
    out.square().mean().backward(retain_graph=True)
    talk()
    mse(out, y).backward()


def cotangent_by_hand(model, rank, step, talk):
    x, y = P.batch(rank, step)
    out = model(x)
    out.backward(2 * (out.detach() - y) / out.numel())


def penalty_outside(model, rank, step, talk):
    x, y = P.batch(rank, step)
    penalty = sum((p**2).sum() for p in model.parameters() if p.requires_grad)
    (mse(model(x), y) + 0.01 * penalty).backward()


def input_gradient_penalty(model, rank, step, talk):
    x, y = P.batch(rank, step)
    x.requires_grad_()
    out = model(x, P.branch_of("diff", rank, step))
    (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (mse(out, y) + 0.1 * g.square().mean()).backward()


def nested_loss(model, rank, step, talk):
    """The gradient of one forward is data of the next."""
    x, y = P.batch(rank, step)
    x.requires_grad_()
    (g,) = torch.autograd.grad(model(x).square().sum(), x)
    mse(model(x.detach() - 0.1 * g, "b"), y).backward()


def evaluation_between(model, rank, step, talk):
    x, y = P.batch(rank, step)
    loss = mse(model(x, "a"), y)
    with torch.no_grad():
        seen = model(x, "a")
    with torch.inference_mode():
        again = model(x, "a")
    assert torch.equal(seen, again) and torch.allclose(mse(seen, y), loss.detach(), rtol=1e-12)
    loss.backward()


def checkpoint_around(reentrant, model, rank, step, talk):
    x, y = P.batch(rank, step)
    x.requires_grad_(reentrant)
    out = checkpoint(model, x, P.branch_of("diff", rank, step), use_reentrant=reentrant)
    mse(out, y).backward()


class Checkpointed(P.AwkwardLeaves):
    reentrant = False

    def forward(self, x, which=None):
        h = self.inp(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        h = checkpoint(
            lambda z: self.blocks[1](self.again(z)) + z @ self.blocks[2].up.weight[:6], h, use_reentrant=self.reentrant
        )
        if which:
            h = h + checkpoint(self.branch[which], h, use_reentrant=self.reentrant)
        return torch.tanh((h * self.scalar + self.one + self.frozen + self.empty.sum()) @ self.tied.weight)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class Compiled(P.AwkwardLeaves):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


class Recurrent(nn.Module):
    """Modules of torch with fast paths of their own."""

    def __init__(self):
        super().__init__()
        self.inp = nn.GRU(5, 6, batch_first=True)
        self.blocks = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
                nn.MultiheadAttention(6, 3, batch_first=True),
            ]
        )
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))

    def forward(self, x, which=None):
        h = self.inp(x.unsqueeze(0))[0]
        h = self.blocks[0](h)
        h = h + self.blocks[1](h, h, h, need_weights=False)[0]
        return torch.tanh(self.out(h)).squeeze(0)


class Wrong(Exception):
    pass


def failing(where, model, rank, step, talk):
    """A step that fails half way, is given up, and done again."""
    x, y = P.batch(rank, step)
    opt = getattr(model, "opt_for_test", None)

    def fail(*_):
        raise Wrong

    out = model(x + 1.0, "a")
    if opt is not None and step % 2 == 0:
        if where == "forward":
            handle = model.blocks[1].register_forward_pre_hook(fail)
            try:
                model(x)
            except Wrong:
                handle.remove()
        else:
            middle = {}
            handle = model.blocks[1].register_forward_hook(lambda m, a, o: middle.update(out=o))
            again = model(x - 1.0)
            handle.remove()
            middle["out"].register_hook(fail)
            with contextlib.suppress(Wrong):
                mse(again, y).backward()
        opt.zero_grad()
    del out
    mse(model(x, P.branch_of("diff", rank, step)), y).backward()


SIMPLE = P.simple("diff")
CASES = {
    "two forwards, one backward": (P.AwkwardLeaves, two_forwards_one_backward),
    "two losses, two backwards": (P.AwkwardLeaves, two_losses_two_backwards),
    "forward and backward twice": (P.AwkwardLeaves, forward_backward_twice),
    "more on some ranks": (P.AwkwardLeaves, more_on_some_ranks),
    "kept graph": (P.AwkwardLeaves, kept_graph),
    "cotangent by hand": (P.AwkwardLeaves, cotangent_by_hand),
    "penalty outside": (P.AwkwardLeaves, penalty_outside),
    "input gradient penalty": (P.AwkwardLeaves, input_gradient_penalty),
    "nested loss": (P.AwkwardLeaves, nested_loss),
    "evaluation between": (P.AwkwardLeaves, evaluation_between),
    "checkpoint around": (P.AwkwardLeaves, functools.partial(checkpoint_around, False)),
    "reentrant checkpoint around": (P.AwkwardLeaves, functools.partial(checkpoint_around, True)),
    "checkpoint inside": (Checkpointed, SIMPLE),
    "reentrant checkpoint inside": (CheckpointedReentrant, SIMPLE),
    "compiled blocks": (Compiled, SIMPLE),
    "recurrent and attention": (Recurrent, SIMPLE),
    "exception in forward": (P.AwkwardLeaves, functools.partial(failing, "forward")),
    "exception in backward": (P.AwkwardLeaves, functools.partial(failing, "backward")),
}


# A graph of the backward itself saves what it used; a checkpointed region of three units uses all three at once.
ALIVE = {"input gradient penalty": 99, "checkpoint inside": 3, "reentrant checkpoint inside": 3}


# Those in which ranks differ, or fall out of step, in more ways the more ranks there are.
UNEVEN = (
    "two losses, two backwards",
    "forward and backward twice",
    "more on some ranks",
    "reentrant checkpoint inside",
    "exception in backward",
)


def small_buckets():
    """Many buckets even of a small model."""
    zerofn.sharded.reducer.into_buckets = functools.partial(zf.core.bucketed_views.into_buckets, limit=400)


def everything(names):
    small_buckets()
    out = {}
    for stage in (*STAGES, NOTHING_HELD):
        for name in names:
            cls, program = CASES[name]
            try:
                out[stage, name] = P.eager(tx_of(stage), program, 3, P.make(cls=cls))
            except Exception:
                out[stage, name] = traceback.format_exc()
            torch._dynamo.reset() if name.startswith("compiled") else None
    return out


@functools.cache
def wanted(size, name):
    cls, program = CASES[name]
    cls = P.AwkwardLeaves if cls is Compiled else cls
    return P.reference(size, lambda ps: torch.optim.SGD(ps, **SGD), program, 3, P.make(cls=cls), clip=0.5)


def check(size, names):
    ranks = zf.launch(everything, size, names, timeout=limit())
    bad = []
    for rank, results in enumerate(ranks):
        for (stage, name), got in results.items():
            if isinstance(got, str):
                bad.append(f"rank {rank} {stage}, {name}:\n{got}")
                continue
            worst, where = P.differences(got, wanted(size, name))
            # Float64 sums in another order.
            if not worst <= 1e-11:
                bad.append(f"rank {rank} {stage}, {name}: {where} off by {worst:.1e} of the change")
            if got["most"] > ALIVE.get(name, 2):
                bad.append(f"rank {rank} {stage}, {name}: {got['most']} units alive at once")
    assert not bad, "\n".join(bad)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_programs_give_the_gradients_of_plain_torch(size):
    check(size, list(CASES) if size == 2 else [n for n in CASES if n in UNEVEN])
