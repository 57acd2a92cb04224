"""Sharpness-aware minimisation in both routes: the gradient is taken where the loss is worst near by.

python examples/sam.py
"""

import argparse

import torch
from digits import read_digits
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import zerofn as zf

RHO, BATCH = 0.1, 64


def data():
    """Digits, of which a third of those to train on has a wrong label."""
    images, labels = read_digits()
    g = torch.Generator().manual_seed(0)
    wrong = (torch.rand(1400, generator=g) < 1 / 3) * torch.randint(1, 10, (1400,), generator=g)
    return (images[:1400], (labels[:1400] + wrong) % 10), (images[1400:], labels[1400:])


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10))


def batches(train, steps):
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        rows = torch.randint(len(train[0]), (BATCH,), generator=g)
        yield train[0][rows], train[1][rows]


def chain(rho):
    optimizer = zf.adamw(lr=2e-3)
    return zf.chain(zf.shard(), zf.sam(rho), optimizer) if rho else zf.chain(zf.shard(), optimizer)


def by_backward(net, tx, train, steps):
    opt = zf.attach(net, tx)
    for x, y in batches(train, steps):

        def closure(x=x, y=y):
            loss = cross_entropy(net(x), y)
            loss.backward()
            return loss

        opt.step(closure)
        opt.zero_grad()
    opt.detach()  # full parameters again
    return {name: p.detach() for name, p in net.named_parameters()}


def by_functions(net, tx, train, steps):
    step = zf.make_step(lambda params, x, y: cross_entropy(functional_call(net, params, (x,)), y), tx)
    state = zf.init(tx, {name: p.detach() for name, p in net.named_parameters()})
    for x, y in batches(train, steps):
        state, _ = step(state, x, y)
    return zf.full_params(tx, state)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    o = parser.parse_args(argv)
    train, (images, labels) = data()
    found = {}
    for route in (by_backward, by_functions):
        for rho in (0.0, RHO):
            params = route(model(), chain(rho), train, o.steps)
            right = (functional_call(model(), params, (images,)).argmax(1) == labels).float().mean().item()
            found[route.__name__, rho] = params, right
            print(f"{route.__name__:13} {'SAM  ' if rho else 'AdamW'} {right:.1%} of held-out digits right")
    return found


if __name__ == "__main__":
    main()
