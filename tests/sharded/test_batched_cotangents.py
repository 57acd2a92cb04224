"""Several cotangents at once (`is_grads_batched`, `vectorize=True`) of an attached model: right, or refused by name."""

import pytest
import rank_programs as P
import torch
from time_limits import limit
from torch import nn
from torch.autograd.functional import jacobian

import zerofn as zf

SGD = zf.sgd(0.1)
PIPES = {
    "plain": lambda: SGD,
    "scaled": lambda: zf.chain(zf.scale_loss(1024.0), SGD),
    "stage 0": lambda: P.pipe_of(0, SGD),
    "stage 0, scaled": lambda: zf.chain(zf.scale_loss(1024.0), zf.all_reduce(), SGD),
    "stage 1": lambda: P.pipe_of(1, SGD),
    "stage 2": lambda: P.pipe_of(2, SGD),
    "stage 3": lambda: P.pipe_of(3, SGD),
    "stage 3, scaled": lambda: zf.chain(zf.shard(), zf.scale_loss(1024.0), SGD),
}


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def derivatives(model, x, by):
    """By the inputs, by parameters, by both; and what torch's own vectorized Jacobian gives."""
    if by == "jacobian":
        return (jacobian(model, x, vectorize=True),)
    wanted = {"inputs": [x], "parameters": [model[0].weight], "both": [x, model[2].weight]}[by]
    return torch.autograd.grad(model(x), wanted, torch.eye(3, dtype=x.dtype), is_grads_batched=True)


def trained(pipes):
    """What is found, or said; and that a step goes on afterwards."""
    found = {}
    for name in pipes:
        model, plain = make(), make()
        opt = zf.attach(model, PIPES[name]())
        x = torch.linspace(-1, 1, 3, dtype=torch.float64, requires_grad=True)
        for by in ("inputs", "jacobian", "parameters", "both"):
            want = derivatives(plain, x, by)
            try:
                got = derivatives(model, x, by)
            except RuntimeError as error:
                found[name, by] = str(error)
                continue
            assert all(w.abs().max() > 1e-3 for w in want)
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-12)
        model(x).sum().backward()
        opt.step()
        assert opt.global_steps == 1
    return found


# One rank alone sends nothing: of the stages the one that gathers stands for the others.
@pytest.mark.parametrize(
    ("ranks", "pipes"),
    [(1, ["scaled", "stage 3, scaled"]), (2, list(PIPES)), pytest.param(1, list(PIPES), marks=pytest.mark.slow)],
    ids=["1", "2", "1, all"],
)
def test_batches_of_cotangents(ranks, pipes):
    for found in zf.launch(trained, ranks, pipes, timeout=limit()):
        # Over several ranks by sharded parameters each cotangent would be a message.
        refused = {(f"stage 3{s}", by) for s in ("", ", scaled") for by in ("parameters", "both")}
        assert found.keys() == (refused if ranks > 1 else set())
        for said in found.values():
            assert said.startswith("torch.autograd.grad(..., is_grads_batched=True), or vectorize=True, by parameters")
            assert "for v in vectors]" in said


def one_by_one():
    model, plain = make(), make()
    opt = zf.attach(model, PIPES["stage 3"]())
    x = torch.linspace(-1, 1, 3, dtype=torch.float64)
    rank, size = P.rank_and_size()
    y, z = model(x), plain(x)
    for v in torch.eye(3, dtype=torch.float64):
        (got,) = torch.autograd.grad(y, model[0].weight, v, retain_graph=True)
        (want,) = torch.autograd.grad(z, plain[0].weight, v, retain_graph=True)
        torch.testing.assert_close(got.full_tensor(), want)
        torch.testing.assert_close(got.to_local(), want.chunk(size)[rank])
    opt.detach()


def test_one_after_the_other_as_told():
    zf.launch(one_by_one, 2, timeout=limit())
