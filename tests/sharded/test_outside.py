"""Sharded parameters outside of the model's calls: the full ones to whatever computes, parts to whatever looks."""

import copy
import itertools
import pickle
import re

import pytest
import rank_programs as P
import torch
import torch.nn.functional as F
from time_limits import limit
from torch import nn
from units_alive import UnitsAlive

import zerofn as zf


class Model(nn.Module):
    """Two blocks, a tied head, a scalar, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Linear(5, 7, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.linspace(0.5, 1, 7), requires_grad=False)

    def forward(self, x):
        h = self.tokens(x) * self.gain * self.frozen
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return h


def make(dtype=torch.float64):
    torch.manual_seed(0)
    return Model().to(dtype)


def rows(step, rank, dtype=torch.float64):
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 5, generator=g).to(dtype)


# -- losses, of which each uses parameters outside of the call ----------------------------------------------


def norm(model, x):
    return model(x).square().mean() + model.blocks[0].weight.norm()


def squares(model, x):
    return model(x).square().mean() + sum(p.square().sum() for p in model.parameters() if p.requires_grad)


def norm_of_norms(model, x):
    return model(x).square().mean() * torch.stack([p.norm() for p in model.parameters() if p.requires_grad]).norm()


def tied_head(model, x):
    return F.linear(model(x), model.head.weight.T).logsumexp(-1).mean()


def vector(model, x):
    return model(x).exp().mean() + nn.utils.parameters_to_vector(model.blocks.parameters()).logsumexp(0)


def rows_of_it(model, x):
    w = model.blocks[1].weight
    return model(x).square().mean() + (w[0] @ w[1]) + w[:, 2:4].prod(1).sum() + model.gain * w.trace()


def frozen_too(model, x):
    return (model(x) @ (model.frozen * model.blocks[0].bias)).square().mean() + torch.outer(model.frozen, x[0]).mean()


def without_a_call(model, x):
    return (x @ model.tokens.weight.T).square().mean() + model(x).mean()


def force_penalty(model, x):
    x.requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum() * model.blocks[0].weight.norm(), x, create_graph=True)
    return g.square().mean()


def captured(model, x):
    """A function that the model calls has the parameter in its closure."""
    w = model.blocks[0].weight
    handle = model.blocks[1].register_forward_hook(lambda module, args, out: out + F.linear(out, w))
    try:
        return model(x).square().mean()
    finally:
        handle.remove()


def by_an_operator(model, x):
    return model(x).mean() + torch.ops.aten.mul.Tensor(model.blocks[0].bias, 3.0).exp().sum()


def compiled(model, x):
    @torch.compile(backend="eager")
    def penalty(w):
        return (w * 2).norm() / w.numel() + w.trace() * len(w.shape)

    @torch.compile(backend="eager")
    def tripled(norm):
        return norm * 3

    w = model.blocks[0].weight
    return model(x).square().mean() + penalty(w) * tripled(w.data.norm()).item()


LOSSES = [norm, squares, norm_of_norms, tied_head, vector, rows_of_it, frozen_too, without_a_call]
LOSSES += [force_penalty, by_an_operator, compiled]


def trained(make_tx, losses, steps=2):
    """Losses and the change of every parameter, by name of the loss."""
    rank, _ = P.rank_and_size()
    found = {}
    for loss in losses:
        torch._dynamo.reset()
        model = make()
        before = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}
        w = model.blocks[0].weight
        opt = zf.attach(model, make_tx())
        # As fully_shard does: a DTensor has no memory, and a parameter that has some cannot become one.
        assert (model.blocks[0].weight is w) == (P.rank_and_size()[1] == 1)
        values = []
        for step in range(steps):
            value = loss(model, rows(step, rank))
            value.backward()
            values.append(value.item())
            opt.step()
            opt.zero_grad()
        found[loss.__name__] = values, {n: p - before[n] for n, p in zf.full_params(opt.tx, opt.state).items()}
    return found


def reference(losses, ranks, steps=2):
    """Plain torch on the mean over ranks."""
    found = {}
    for loss in losses:
        torch._dynamo.reset()
        model = make()
        before = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}
        opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        values = []
        for step in range(steps):
            parts = [loss(model, rows(step, r)) for r in range(ranks)]
            (sum(parts) / ranks).backward()
            values.append([p.item() for p in parts])
            opt.step()
            opt.zero_grad()
        found[loss.__name__] = (
            values,
            {n: p.detach() - before[n] for n, p in model.named_parameters(remove_duplicate=False)},
        )
    return found


PIPES = {
    "shard": lambda: zf.chain(zf.shard(), zf.sgd(lr=0.05)),
    "scaled": lambda: zf.chain(zf.shard(), zf.scale_loss(1024.0), zf.sgd(lr=0.05)),
    "accumulated": lambda: zf.chain(zf.shard(), zf.scale_loss("dynamic"), zf.accumulate(1), zf.sgd(lr=0.05)),
}


def trained_by_all(losses):
    return {pipe: trained(PIPES[pipe], losses[pipe]) for pipe in losses}


ALL = dict.fromkeys(PIPES, LOSSES)
# A scale and a window are of the pipeline, whatever the loss is.
EACH = {pipe: LOSSES[i :: len(PIPES)] for i, pipe in enumerate(PIPES)}


@pytest.mark.parametrize(
    ("ranks", "losses"), [(2, EACH), *[pytest.param(n, x, marks=pytest.mark.slow) for n, x in ((1, EACH), (3, ALL))]]
)
def test_losses_that_use_parameters_outside_of_a_call(ranks, losses):
    want = reference(LOSSES, ranks)
    everywhere = zf.launch(trained_by_all, ranks, losses, timeout=limit())
    for rank, by_pipe in enumerate(everywhere):
        for pipe, name in ((p, loss.__name__) for p in losses for loss in losses[p]):
            values, changes = by_pipe[pipe][name]
            assert values == pytest.approx([v[rank] for v in want[name][0]], rel=1e-12), (pipe, name)
            for path, change in changes.items():
                expected = want[name][1][path]
                assert path == "frozen" or expected.abs().max() > 0, (name, path)
                # float64, sums in another order.
                torch.testing.assert_close(change, expected, rtol=1e-10, atol=1e-13, msg=f"{pipe} {name} {path}")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_function_that_the_model_calls_may_hold_a_parameter(ranks):
    want = reference([captured], ranks)["captured"][1]
    for got in zf.launch(trained, ranks, PIPES["shard"], [captured], timeout=limit()):
        for path, change in got["captured"][1].items():
            torch.testing.assert_close(change, want[path], rtol=1e-10, atol=1e-13)
    with pytest.raises(RuntimeError, match=r"uses its parameter blocks.0.weight from elsewhere than its module"):
        zf.launch(trained, ranks, PIPES["scaled"], [captured], timeout=limit())


# -- dtypes -------------------------------------------------------------------------------------------------


def seen_dtypes():
    model = make(torch.float32)
    tx = zf.chain(zf.shard(), zf.precision(param_dtype=torch.bfloat16), zf.sgd(lr=0.1))
    opt = zf.attach(model, tx)
    w = model.blocks[0].weight
    inside = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: inside.append(module.weight.dtype))
    model(rows(0, 0, torch.float32))
    full = zf.full_params(opt.tx, opt.state)["blocks.0.weight"]
    return inside, (w * 1).dtype, torch.equal(w * 1, full), torch.equal(w.float(), full), w.float() is w


def test_outside_a_parameter_has_the_dtype_it_is_stored_in():
    for result in zf.launch(seen_dtypes, 2, timeout=limit()):
        assert result == ([torch.bfloat16], torch.float32, True, True, True)


# -- who asks -----------------------------------------------------------------------------------------------


def asked_by_some():
    """One rank logs a norm, another has a penalty of its own, with and without autograd."""
    rank, _ = P.rank_and_size()
    model = make()
    opt = zf.attach(model, PIPES["scaled"]())
    logged = []
    for step in range(2):
        loss = model(rows(step, rank)).square().mean()
        if rank == step:
            loss = loss + model.blocks[rank].weight.norm()
            with torch.no_grad():
                logged.append(model.tokens.weight.norm().item())
        loss.backward()
        if rank == 0:
            logged.append(model.gain.item())
        opt.step()
        opt.zero_grad()
    return logged, zf.full_params(opt.tx, opt.state)


def test_ranks_may_ask_for_different_parameters():
    model = make()
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    want = [[], []]
    for step in range(2):
        losses = [model(rows(step, r)).square().mean() for r in range(2)]
        losses[step] = losses[step] + model.blocks[step].weight.norm()
        want[step].append(model.tokens.weight.norm().item())
        want[0].append(model.gain.item())
        (sum(losses) / 2).backward()
        opt.step()
        opt.zero_grad()
    for rank, (logged, params) in enumerate(zf.launch(asked_by_some, 2, timeout=limit())):
        assert logged == pytest.approx(want[rank], rel=1e-12)
        for path, p in model.named_parameters(remove_duplicate=False):
            torch.testing.assert_close(params[path], p.detach(), rtol=1e-11, atol=1e-13)


# -- what looks, writes and copies --------------------------------------------------------------------------


def looks():
    rank, size = P.rank_and_size()
    model = make()
    plain = make()
    opt = zf.attach(model, PIPES["shard"]())
    w, full = model.blocks[0].weight, plain.blocks[0].weight.detach()
    part = full.chunk(size)[rank]
    assert (
        w.shape == w.size() == full.shape and w.numel() == full.numel() and len(w) == 7 and w.dim() == 2 and w.is_leaf
    )
    assert torch.equal(w.detach(), full) and torch.equal(w.data, full) and torch.zeros_like(w).shape == full.shape
    assert torch.equal(w.to_local(), part) and torch.equal(w.full_tensor(), full)
    assert "Parameter" in repr(w) and isinstance(w, nn.Parameter) and w.new_ones(2).shape == (2,)
    assert model.to("cpu") is model and model.double().blocks[0].weight is w and torch.equal(w.to_local(), part)
    average = torch.zeros_like(w)
    with torch.no_grad():
        average.lerp_(w.detach(), 0.5)
        w.mul_(2)
    assert torch.equal(average, 0.5 * full) and torch.equal(average.to_local(), 0.5 * part)
    assert torch.equal(w * 1, 2 * full) and w.tolist() == (2 * full).tolist() and w[0, 0].item() == 2 * full[0, 0]
    with opt.gathered():
        assert w.shape == full.shape and torch.equal(w * 1, 2 * full)
        copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for other in (copied, loaded):
            v = other.blocks[0].weight
            assert type(v) is nn.Parameter and torch.equal(v, 2 * full) and v.data_ptr() != w.data_ptr()
    assert torch.equal(copied(rows(0, 0)), loaded(rows(0, 0))) and w.to_local().shape == part.shape
    loss = model(rows(0, rank)).mean()
    with opt.gathered():
        w.norm().item()
    # Nothing was written, so that the graph is as good as before.
    loss.backward()
    # Frameworks move models whose gradients are there.
    before = w.grad.clone()
    assert model.cpu() is model and model.to("cpu") is model and torch.equal(w.grad, before) and w.grad.dim() == 2
    assert w.grad.shape == full.shape and w.grad.to_local().shape == part.shape
    opt.step()
    opt.detach()
    v = model.blocks[0].weight
    assert type(v) is nn.Parameter and v.shape == full.shape and not vars(v)
    return True


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_looks_or_writes_finds_the_part(ranks):
    assert zf.launch(looks, ranks, timeout=limit()) == [True] * ranks


# -- mistakes ------------------------------------------------------------------------------


def replaced(model, opt, x):
    for p in model.parameters():
        p.data = torch.full(p.shape, 0.1, dtype=p.dtype)


def updated(model, opt, x):
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()


def stale():
    """What is said of each graph from before a step, or from before parameters got other data."""
    said = []
    losses = (
        lambda model, x: model(x).square().mean(),
        lambda model, x: model.blocks[0].weight.square().sum(),
        lambda model, x: model.blocks[0].weight[0],
    )
    for make_loss, change in itertools.product(losses, (updated, replaced)):
        model, x = make(), rows(0, 0)
        opt = zf.attach(model, PIPES["shard"]())
        loss = make_loss(model, x)
        change(model, opt, x)
        with pytest.raises(RuntimeError) as error:
            (loss * loss).sum().backward()
        said.append(str(error.value))
        opt.detach()
    return said


def test_a_graph_from_before_parameters_changed():
    for said in zf.launch(stale, 2, timeout=limit()):
        for text in said:
            assert re.search(r"a graph from before the parameters were updated(.|\n)*before opt.step", text), text


def mistakes():
    """What is said to each, and that nothing has changed."""
    said = {}

    def after_detach(model, opt):
        loss = model(rows(0, 0)).square().mean()
        opt.detach()
        loss.backward()

    cases = {
        "half": lambda model, opt: model.half(),
        "deepcopy": lambda model, opt: copy.deepcopy(model),
        "after detach": after_detach,
    }
    for name, mistake in cases.items():
        model = make()
        opt = zf.attach(model, PIPES["shard"]())
        before = {n: (p.detach().clone(), p.dtype) for n, p in model.named_parameters()}
        try:
            mistake(model, opt)
        except RuntimeError as error:
            said[name] = str(error)
        if name != "after detach":
            now = {n: (p.detach(), p.dtype) for n, p in model.named_parameters()}
            assert all(torch.equal(now[n][0], x) and now[n][1] == dtype for n, (x, dtype) in before.items())
            model(rows(0, 0)).square().mean().backward()
            opt.step()
    return said


def test_mistakes_are_told_and_change_nothing():
    moved = r"other data for the values of the sharded parameter(.|\n)*rank's rows(.|\n)*opt.detach\(\) before model.to"
    wanted = {
        "half": moved,
        "deepcopy": r"copy.deepcopy\(model\) of an attached sharded model(.|\n)*with opt.gathered\(\): copy.deepcopy",
        "after detach": r"a graph from before opt.detach\(\)(.|\n)*the forward again after it",
    }
    for said in zf.launch(mistakes, 2, timeout=limit()):
        assert said.keys() == wanted.keys()
        for name, pattern in wanted.items():
            assert re.search(pattern, said[name]), f"{name}: {said[name]}"


def second_parameters():
    said = []
    for pipe in (zf.shard, zf.reduce_scatter, zf.all_reduce):
        model = make()
        opt = zf.attach(model, zf.chain(pipe(), zf.sgd(0.1)))
        block = model.blocks[1]
        for make_one, given in ((nn.Parameter, block.weight), (nn.utils.parametrizations.weight_norm, block)):
            with pytest.raises(RuntimeError) as caught:
                make_one(given)
            said.append(str(caught.value))
        assert nn.Parameter(model.gain.detach().clone()).is_leaf
        assert type(nn.Parameter(opt.detach().gain)) is nn.Parameter
    return said


def test_torch_refuses_a_second_parameter_over_one():
    # It would be a second parameter over memory in which a pipeline keeps the first.
    pattern = r"Creating a Parameter from an instance of type (Sharded|Guarded)Parameter"
    for said in zf.launch(second_parameters, 2, timeout=limit()):
        assert len(said) == 6 and all(re.match(pattern, x) for x in said), said


# -- memory -------------------------------------------------------------------------------------------------


def alive_in_a_penalty():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    alive = UnitsAlive(zf.attach(model, PIPES["scaled"]()))
    x = torch.randn(3, 16)
    (model(x).square().mean() + sum(p.square().sum() for p in model.parameters())).backward()
    return alive.most


def test_a_penalty_holds_two_parameters_at_most():
    assert all(1 <= alive <= 2 for alive in zf.launch(alive_in_a_penalty, 2, timeout=limit()))
