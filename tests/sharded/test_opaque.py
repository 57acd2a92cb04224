"""Parameters under `shard` that lie as no DTensor can say: sizes are those of the whole, and to compute is refused."""

import copy
import io

import torch
from rank_programs import rank_and_size
from small_parts import said
from time_limits import limit
from torch import nn
from torch.nn.utils import clip_grad_norm_

import zerofn as zf
from zerofn.extend import Transform, View, as_it_is, transform


@transform
def factor(by):
    """The model sees other numbers than those that are stored."""
    view = View(view=lambda x, leaf: x * by, pull=lambda g, leaf: g * by, store=lambda x, leaf: x / by)
    return Transform("factor", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is)


REFUSED = {
    "norm": lambda m, p: p.norm(),
    "in a list": lambda m, p: torch._foreach_mul_([p], 2.0),
    "a copy into it": lambda m, p: p.copy_(torch.zeros(5, 3)),
    "the gradient": lambda m, p: p.grad.norm(),
    "data": lambda m, p: p.data.sum(),
    "clipping": lambda m, p: clip_grad_norm_(m.parameters(), 1.0),
    "another dtype": lambda m, p: m.half(),
    "saved": lambda m, p: torch.save(p.data, io.BytesIO()),
    "copied": lambda m, p: copy.deepcopy(p.data),
    "full_tensor": lambda m, p: p.data.full_tensor(),
    "state dict": lambda m, p: m.state_dict(),
}


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def rows(rank):
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def on_ranks():
    model, rank, seen = model_of(), rank_and_size()[0], []
    opt = zf.attach(model, zf.chain(zf.shard(), factor(2.0), zf.sgd(0.1)))
    p = model[0].weight
    handle = p.register_hook(lambda g: seen.append((tuple(g.shape), g.to_local().numel())))
    model(rows(rank)).square().mean().backward()
    handle.remove()
    for x in (p, p.grad, p.data, p.detach()):
        assert x.shape == (5, 3) and x.numel() == 15 and len(x) == 5 and "of which this rank has" in repr(x)
        assert x.to_local().numel() in (9, 6)
    assert seen == [((5, 3), p.to_local().numel())] and p.grad.to_local().any()
    before, told = p.to_local().clone(), {}
    with torch.no_grad():
        for name, use in REFUSED.items():
            told[name] = str(said(lambda use=use: use(model, p)))
        model.to("cpu")
        assert torch.equal(p.to_local(), before)
        for x in (p, p.data, p.detach()):
            assert x.mul_(2) is x and torch.equal((x * 0.5).to_local(), before) and (x * 2).shape == (5, 3)
            x.mul_(0.5)
        assert torch.equal(p.to_local(), before)
    told["recorded"] = str(said(lambda: (p * 2).to_local().sum().backward()))
    (g,) = torch.autograd.grad(model(rows(rank)).sum(), [p])
    assert g.shape == (5, 3) and g.to_local().shape == before.shape
    opt.step()
    opt.zero_grad()
    with opt.gathered():
        assert p.norm() > 0 and model.state_dict()["0.weight"].shape == (5, 3)
    opt.detach()
    return told, {name: x.detach() for name, x in model.named_parameters()}


def test_it_is_looked_at_and_not_computed_with():
    plain = model_of()
    torch.stack([plain(rows(rank)).square().mean() for rank in range(2)]).mean().backward()
    want = {name: (p - 0.4 * p.grad).detach() for name, p in plain.named_parameters()}
    for told, found in zf.launch(on_ranks, 2, timeout=limit()):
        for name, message in told.items():
            assert "opt.gathered()" in message and "write:" in message, (name, message)
        for name, x in want.items():
            # The view's transpose doubles a gradient, and its step is seen twice as large.
            torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-13)
        assert not torch.equal(want["0.weight"], model_of()[0].weight)


def test_one_process_has_plain_parameters():
    model = model_of()
    zf.attach(model, zf.chain(zf.shard(), factor(2.0), zf.sgd(0.1)))
    assert model[0].weight.norm() > 0
