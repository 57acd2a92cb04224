"""Law 3: from outside, an attached model is a differentiable function with true gradients, whatever is inside.

Scales are powers of two and exact, so fp32 and bf16 are compared with the plain module (under a cast by hand)
to the last bit. Products with a power of two are exact in fp16 only above its subnormals, so fp16 is compared with
float64.
"""

import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_programs import BF16, F16, F32, kinds, module, seeds

import zerofn as zf
from zerofn.testing import assert_trees_close, assert_trees_equal, random_like

scales = st.sampled_from([zf.scale_loss(2.0**7), zf.scale_loss(init_scale=2.0**12), zf.scale_loss(2.0**-3), None])


def attached(net, scale, dtype=None):
    """A pipeline around a copy of `net`; outputs come out in fp32."""
    model = copy.deepcopy(net)
    parts = [zf.precision(param_dtype=dtype, output_dtype=F32)] if dtype else []
    opt = zf.attach(model, zf.chain(*parts, *([scale] if scale else []), zf.sgd(0.1)))
    return model, opt


def by_hand(net, dtype):
    """The plain module with its parameters and inputs cast inside of the graph."""

    def fn(x, shift=None):
        # A tied parameter has one name here, so that its cast is one too.
        params = {n: p.to(dtype) for n, p in net.named_parameters()}
        shift = None if shift is None else {"by": shift["by"].to(dtype)}
        first, second = torch.func.functional_call(net, params, (x.to(dtype), shift))
        return first.to(F32), {**second, "hidden": second["hidden"].to(F32)}

    return fn


def inputs(seed, dtype=F32):
    x, by = random_like([torch.zeros(5, 3, dtype=dtype), torch.zeros(4, dtype=dtype)], seed)
    return x.requires_grad_(), by.requires_grad_()


def scalar(out, seed=0):
    weights = random_like([torch.zeros_like(out[0]), torch.zeros_like(out[1]["hidden"])], seed)
    return (out[0] * weights[0]).sum() + (out[1]["hidden"] * weights[1]).sum()


def trainable(net):
    return [p for p in net.parameters() if p.requires_grad]


def names(net):
    return [n for n, p in net.named_parameters() if p.requires_grad]


@given(kinds, scales, st.sampled_from([None, BF16]), seeds)
def test_every_backward_has_the_bits_of_the_plain_module(kind, scale, dtype, seed):
    net = module(kind, seed)
    model, _ = attached(net, scale, dtype)
    plain = by_hand(net, dtype) if dtype else net
    results = []
    for fn, owner in ((model, model), (plain, net)):
        x, by = inputs(seed)
        out = fn(x, shift={"by": by})
        assert out[1]["text"] == "kept"
        found = [out[0].detach(), out[1]["hidden"].detach()]
        # autograd.grad of one output, then of several with cotangents, then backward twice into .grad.
        found += torch.autograd.grad(scalar(out, seed), [*trainable(owner), x, by], retain_graph=True)
        cotangents = random_like([out[0].detach(), out[1]["hidden"].detach()], seed + 1)
        found += torch.autograd.grad([out[0], out[1]["hidden"]], [x, by], cotangents, retain_graph=True)
        out[0].backward(cotangents[0], retain_graph=True)
        torch.autograd.backward([out[0].sum(), out[1]["hidden"].sum()])
        found += [x.grad, by.grad, *(p.grad for p in trainable(owner))]
        results.append(found)
    assert all((g != 0).any() for g in results[1])
    assert_trees_equal(*results)


def second_order(fn, owner, x, by):
    """A gradient penalty on inputs and on parameters; gradients of it with respect to all."""
    params = trainable(owner)
    first = torch.autograd.grad(scalar(fn(x, shift={"by": by})), [*params, x, by], create_graph=True)
    penalty = sum((g**2).sum() for g in first)
    return list(torch.autograd.grad(penalty, [*params, x, by], allow_unused=True, materialize_grads=True))


@given(kinds, scales, seeds)
def test_double_backward_has_the_bits_of_the_plain_module(kind, scale, seed):
    net = module(kind, seed)
    model, _ = attached(net, scale)
    got, expected = second_order(model, model, *inputs(seed)), second_order(net, net, *inputs(seed))
    assert all((g != 0).any() for g in expected[:1])
    # Power of two, yet cotangents of two uses may be added before or after they are scaled: exact all the same.
    assert_trees_equal(got, expected)


@settings(max_examples=15)
@given(kinds, scales, seeds)
def test_double_backward_through_bf16_has_the_bits_of_a_cast_by_hand(kind, scale, seed):
    net = module(kind, seed)
    model, _ = attached(net, scale, BF16)
    got, expected = second_order(model, model, *inputs(seed)), second_order(by_hand(net, BF16), net, *inputs(seed))
    # Where a graph adds two bf16 cotangents it may do so before or after the cast to fp32: one bf16 rounding,
    # of terms that are larger than their sum.
    for n, g, e in zip([*names(net), "x", "by"], got, expected, strict=True):
        assert (g - e).norm() <= 2**-6 * e.norm() + 1e-6, n


@settings(max_examples=15)
@given(kinds, scales, seeds)
def test_third_order(kind, scale, seed):
    net = module(kind, seed)
    model, _ = attached(net, scale)

    def third(fn):
        x, _ = inputs(seed)
        g = scalar(fn(x))
        for _ in range(2):
            g = torch.autograd.grad(g, x, create_graph=True)[0].pow(2).sum()
        return torch.autograd.grad(g, x)[0]

    assert_trees_equal(third(model), third(net))


@given(kinds, st.sampled_from([zf.scale_loss(2.0**7), zf.scale_loss(init_scale=2.0**10)]), seeds)
@example(0, zf.scale_loss(2.0**10), 1)
def test_fp16_is_near_float64(kind, scale, seed):
    """A tiny loss: unscaled, its cotangents are below fp16's smallest number and would all be zero."""
    net = module(kind, seed)
    model, _ = attached(net, scale, F16)
    tiny = 2.0**-20
    x, by = inputs(seed)
    got = torch.autograd.grad(scalar(model(x, shift={"by": by})) * tiny, [*trainable(model), x, by])
    wide = copy.deepcopy(net).double()
    x64, by64 = x.detach().double().requires_grad_(), by.detach().double().requires_grad_()
    expected = torch.autograd.grad(scalar(wide(x64, shift={"by": by64})) * tiny, [*trainable(wide), x64, by64])
    largest = max(e.norm() for e in expected)
    for n, g, e in zip([*names(net), "x", "by"], got, expected, strict=True):
        # About ten fp16 operations of 2**-11 each; sums of terms of both signs magnify them, up to nothing that is left
        # of terms as large as those of other leaves. Scaled cotangents of 2**-10 have subnormals at 2**-24.
        bound = 0.05 * e.norm() + 2.0**-9 * largest + 2.0**-24 * tiny * 2**10 * g.numel()
        assert (g.double() - e).norm() <= bound, (n, g, e, largest)
        assert (g != 0).any(), n


@given(kinds, kinds, seeds, st.sampled_from([None, BF16]))
def test_two_models_with_different_scales_compose(kind, other, seed, dtype):
    class Join(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lift = torch.nn.Linear(2, 3)

        def forward(self, h):
            return self.lift(h)

    torch.manual_seed(seed)
    nets = module(kind, seed), module(other, seed + 1)
    lift = Join()
    first, _ = attached(nets[0], zf.scale_loss(2.0**9), dtype)
    second, _ = attached(nets[1], zf.scale_loss(init_scale=2.0**4), dtype)
    plain = [by_hand(n, dtype) if dtype else n for n in nets]
    results = []
    for f, g, owners in ((first, second, (first, second)), (*plain, nets)):
        x, by = inputs(seed)
        middle = lift(f(x, shift={"by": by})[0])
        out = scalar(g(middle, shift={"by": by})) + middle.square().sum()
        found = torch.autograd.grad(out, [x, by, *trainable(owners[0]), *trainable(owners[1])], create_graph=not dtype)
        if not dtype:
            penalty = sum((t**2).sum() for t in found)
            found = [
                *found,
                *torch.autograd.grad(penalty, [x, *trainable(owners[0])], allow_unused=True, materialize_grads=True),
            ]
        results.append([t.detach() for t in found])
    # Both models use `by`; what is used inside a model is added up there first: another order of a sum.
    norms = [max(float(t.norm()), 1.0) for t in results[1]]
    for got, expected, norm in zip(*results, norms, strict=True):
        assert_trees_close(got, expected, ulps=2**7 if dtype else 2**5, floor=norm)


@given(kinds, scales, seeds)
def test_parameters_used_outside_of_the_model_are_not_scaled(kind, scale, seed):
    """A weight penalty in the loss, beside a use inside."""
    net = module(kind, seed)
    model, _ = attached(net, scale)
    results = []
    for m in (model, net):
        x, by = inputs(seed)
        loss = scalar(m(x, shift={"by": by})) + sum((p**2).sum() for p in m.parameters())
        results.append([*torch.autograd.grad(loss, trainable(m)), loss.detach()])
    # Uses inside of the model are added up before the one outside: another order of a sum.
    assert_trees_close(*results, ulps=8, floor=8.0)


@given(kinds, scales, seeds)
def test_torch_func_around_an_attached_model(kind, scale, seed):
    """vmap, and derivatives of it, with respect to inputs."""
    net = module(kind, seed)
    model, _ = attached(net, scale)
    x = random_like(torch.zeros(5, 3), seed)
    rows = [torch.func.vmap(torch.func.grad(lambda r, m=m: m(r)[0].sum()))(x) for m in (model, net)]
    assert_trees_equal(*rows)
    total = [torch.func.grad(lambda x, m=m: torch.func.vmap(lambda r: m(r)[0].sum())(x).sum())(x) for m in (model, net)]
    assert_trees_equal(*total)
    found = []
    for m in (model, net):
        torch.func.vmap(lambda r, m=m: m(r)[0])(x).square().sum().backward()
        found.append([p.grad for p in trainable(m)])
    # Under vmap a sum over rows is another kernel for a broadcast parameter than for a plain one.
    assert_trees_close(*found, ulps=64, floor=1.0)


@given(kinds, seeds)
def test_changing_the_scale_between_forward_and_backward(kind, seed):
    """A skipped step moves the scale while the graph of another loss waits."""
    net = module(kind, seed)
    model, opt = attached(net, zf.scale_loss(init_scale=2.0**10))
    x, by = inputs(seed)
    loss = scalar(model(x, shift={"by": by}))
    for p in trainable(model):
        p.grad = torch.full_like(p, torch.inf)
    opt.step()
    assert float(opt.state.transforms["scale_loss"]["scale"]) == 2.0**9
    got = torch.autograd.grad(loss, [x, by])
    x, by = inputs(seed)
    assert_trees_equal(list(got), list(torch.autograd.grad(scalar(net(x, shift={"by": by})), [x, by])))


def test_law_tests_fail_where_the_boundary_is_open(monkeypatch):
    """With an exit that does not multiply, gradients are off by the scale, and the tests above see it."""
    import zerofn.module.scaled_checks as leaving  # inside: counts how often what leaves is looked at

    monkeypatch.setattr(leaving, "multiplied", lambda g, scale, dtype: g.clone())
    net = module(1, 0)
    model, _ = attached(net, zf.scale_loss(2.0**7))
    x, by = inputs(0)
    got = torch.autograd.grad(scalar(model(x, shift={"by": by})), trainable(model))
    expected = torch.autograd.grad(scalar(net(x, shift={"by": by})), trainable(net))
    with pytest.raises(AssertionError):
        assert_trees_equal(list(got), list(expected))
    assert_trees_equal([g * 2.0**7 for g in got], list(expected))
