"""Sharpness-aware minimisation in both routes: the gradient is taken where the loss is worst near by.

python examples/sam.py
"""

import argparse

import torch
from digits import read_digits
from torch.func import functional_call, grad
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


def length(tensors):
    return torch.stack([t.square().sum() for t in tensors]).sum().sqrt()


def by_backward(net, tx, train, steps, rho):
    opt = zf.attach(net, tx)
    params = list(net.parameters())
    for x, y in batches(train, steps):
        if rho:
            cross_entropy(net(x), y).backward()
            norm, kept = length([p.grad for p in params]), [p.detach().clone() for p in params]
            with torch.no_grad():
                for p in params:
                    p.add_(rho * p.grad / norm)
            opt.zero_grad()
        cross_entropy(net(x), y).backward()
        if rho:
            with torch.no_grad():
                for p, k in zip(params, kept, strict=True):
                    p.copy_(k)
        opt.step()
        opt.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}


def by_functions(net, tx, train, steps, rho):
    def loss(params, x, y):
        return cross_entropy(functional_call(net, params, (x,)), y)

    state = zf.init(tx, {name: p.detach() for name, p in net.named_parameters()})
    for x, y in batches(train, steps):
        at = params = state.params
        if rho:
            g = grad(loss)(params, x, y)
            norm = length(g.values())
            at = {name: p + rho * g[name] / norm for name, p in params.items()}
        state, _ = zf.update(tx, grad(loss)(at, x, y), state)
    return state.params


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    o = parser.parse_args(argv)
    train, (images, labels) = data()
    tx, found = zf.chain(zf.adamw(lr=2e-3)), {}
    for route in (by_backward, by_functions):
        for rho in (0.0, RHO):
            params = route(model(), tx, train, o.steps, rho)
            right = (functional_call(model(), params, (images,)).argmax(1) == labels).float().mean().item()
            found[route.__name__, rho] = params, right
            print(f"{route.__name__:13} {'SAM  ' if rho else 'AdamW'} {right:.1%} of held-out digits right")
    return found


if __name__ == "__main__":
    main()
