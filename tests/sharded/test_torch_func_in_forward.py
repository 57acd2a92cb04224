"""Under `shard`, `torch.func` inside of forward and lookups that write: as in plain torch, or refused by name."""

import re

import pytest
import rank_programs as P
import torch
from small_parts import WIDTH, rows, said
from time_limits import limit
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import zerofn as zf

# -- torch.func ---------------------------------------------------------------------------------------------------


class Functional(nn.Module):
    """Forward gives a function of its parameters to a transform of torch.func."""

    def __init__(self, fn):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fn = fn

    def forward(self, x):
        return self.fn(self, self.a(x))


def layer(m, x):
    return torch.tanh(x @ m.b.weight.T + m.b.bias)


RIGHT = {
    "vmap": lambda m, x: vmap(lambda row: torch.tanh(m.b(row)))(x),
    "vmap twice": lambda m, x: vmap(vmap(lambda e: e * m.b.weight.sum()))(x),
    "vmap without grad": lambda m, x: torch.no_grad()(vmap(lambda row: layer(m, row)))(x) + m.b(x),
    "jvp": lambda m, x: jvp(lambda t: layer(m, t), (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda m, x: vmap(jacfwd(lambda t: layer(m, t)))(x).sum(-1),
    "around": lambda m, x: torch.tanh(m.b(x)),
    "grad": lambda m, x: grad(lambda t: layer(m, t).sum())(x),
    "vjp": lambda m, x: vjp(lambda t: layer(m, t), x)[1](torch.ones_like(x))[0],
    "jacrev": lambda m, x: vmap(jacrev(lambda t: layer(m, t)))(x).sum(-1),
    "hessian": lambda m, x: vmap(hessian(lambda t: layer(m, t).sum()))(x).sum(-1),
}


def functional(name, fn, make_opt, data):
    torch.manual_seed(0)
    model = Functional(fn).double()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt = make_opt(model)
    for step in range(2):
        # "around": the call itself is given to vmap.
        (vmap(model) if name == "around" else model)(data(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    getattr(opt, "detach", lambda: None)()
    return {n: p.detach() - before[n] for n, p in model.named_parameters()}


def functional_everywhere(every):
    rank, size = P.rank_and_size()
    scale = zf.scale_loss(64.0)
    data = (lambda step: rows(step, rank)) if size > 1 else all_rows
    return {
        (name, scaled): said(
            lambda n=name, f=fn, middle=middle: functional(
                n, f, lambda m: zf.attach(m, zf.chain(zf.shard(), *middle, zf.sgd(0.1))), data
            )
        )
        for i, (name, fn) in enumerate(RIGHT.items())
        for scaled, middle in ((False, ()), (True, (scale,)))
        if every or scaled == bool(i % 2)
    }


def all_rows(step):
    return torch.cat([rows(step, 0), rows(step, 1)])


@pytest.mark.parametrize(
    ("ranks", "every"), [(2, False), *[pytest.param(n, True, marks=pytest.mark.slow) for n in (1, 2)]]
)
def test_transforms_of_torch_func_inside_of_forward(ranks, every):
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    want = {name: functional(name, fn, sgd, all_rows) for name, fn in RIGHT.items()}
    for found in zf.launch(functional_everywhere, ranks, every, timeout=limit()):
        for (name, scaled), got in found.items():
            assert not isinstance(got, str), f"{name} {scaled}: {got}"
            for n, x in want[name].items():
                torch.testing.assert_close(got[n], x, rtol=1e-10, atol=1e-14, msg=f"{name} {n} {scaled}")


# -- rows that a lookup makes shorter -------------------------------------------------------------------------------


class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(6, WIDTH, max_norm=0.5), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.out(self.words(x))


WORDS = ((0, 1, 2, 5), (3, 4, 5, 2), (0, 2, 3, 1))


def looked_up(make_opt, words):
    """The change of three steps of `nn.Embedding(max_norm)`, which writes into the rows that a batch looks up."""
    torch.manual_seed(0)
    model = Looked().double()
    before = [p.detach().clone() for p in model.parameters()]
    opt = make_opt(model)
    for step in range(3):
        model(words(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    getattr(opt, "detach", lambda: None)()
    return [p.detach() - q for p, q in zip(model.parameters(), before, strict=True)]


def looked_up_on_ranks(same, middle):
    rank, _ = P.rank_and_size()
    pick = lambda step: torch.tensor(WORDS[(step + (0 if same else rank)) % 3])  # noqa: E731
    return said(lambda: looked_up(lambda m: zf.attach(m, zf.chain(zf.shard(), *middle, zf.sgd(0.5))), pick))


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_a_lookup_makes_shorter(ranks):
    want = looked_up(lambda m: torch.optim.SGD(m.parameters(), lr=0.5), lambda step: torch.tensor(WORDS[step]))
    assert want[0].abs().max() > 0.1
    for got in zf.launch(looked_up_on_ranks, ranks, True, (), timeout=limit()):
        assert not isinstance(got, str), got
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-14)


def test_rows_that_cannot_be_made_shorter_are_told():
    """Ranks that look up other words shorten other rows."""
    for got in zf.launch(looked_up_on_ranks, 2, False, (), timeout=limit()):
        said = r"ranks disagree on what the model wrote in forward into its parameters words.weight"
        assert re.search(said, str(got)), got
