"""Gradients over the loss scale: the same numbers, nobody else's memory written, nothing kept alive."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zerofn as zf
from zerofn.core.view import divided  # inside: the arithmetic of views on numbers of any kind

S = 2.0**7
WIDE = 96


class LookedAt(nn.Module):
    """One weight that a test may look at inside of the model."""

    def __init__(self, wide: int = WIDE):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, wide)
        self.middle = nn.Linear(wide, 2 * wide)
        self.last = nn.Linear(2 * wide, 3)
        self.seen: list[torch.Tensor] = []
        self.look = lambda w: w

    def forward(self, x):
        h = torch.tanh(self.first(x))
        h = torch.tanh(nn.functional.linear(h, self.look(self.middle.weight), self.middle.bias))
        return self.last(h)


def pair(scale=S):
    plain = LookedAt()
    model = copy.deepcopy(plain)
    return plain, model, zf.attach(model, zf.chain(zf.scale_loss(scale), zf.sgd(0.1)))


def data(seed=0):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def equal(plain, model):
    for (n, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), n


def keep(into):
    def look(w):
        w.register_hook(into.append)
        return w

    return look


def detached(into):
    def look(w):
        w.register_hook(lambda g: into.append(g.detach()))
        return w

    return look


def retained(into):
    def look(w):
        w.retain_grad()
        into.append(w)
        return w

    return look


def arrays(into):
    def look(w):
        def replaced(g):
            into.append(g.numpy().copy())
            return torch.from_numpy(into[-1])

        w.register_hook(replaced)
        return w

    return look


def added(into):
    """What reaches the weight reaches another tensor too, in one piece."""

    def look(w):
        other = torch.zeros_like(w).requires_grad_() * 1.0
        other.register_hook(into.append)
        return w + other

    return look


@pytest.mark.parametrize("look", [keep, detached, retained, arrays, added])
def test_a_gradient_that_somebody_holds_is_not_written(look):
    plain, model, _ = pair()
    held, expected = [], []
    model.look, plain.look = look(held), look(expected)
    for net in (plain, model):
        net(data()).square().mean().backward()
    equal(plain, model)
    for a, b in zip(held, expected, strict=True):
        a, b = (x if isinstance(x, np.ndarray) else x.grad if x.requires_grad else x for x in (a, b))
        # Inside of the model cotangents are multiplied by the scale.
        assert np.array_equal(np.asarray(a), np.asarray(b) * S)


def test_a_leaf_that_is_made_in_forward_is_known_beside_compiled_code():
    """There Python counts an argument of a function twice."""
    plain, model, _ = pair()
    model.look, plain.look = added([]), added([])
    for net in (plain, model):
        torch._dynamo.run(lambda net=net: net(data()).square().mean().backward())()
    equal(plain, model)


def test_what_backward_is_given_is_not_written():
    model = nn.Linear(WIDE, WIDE, bias=False)
    zf.attach(model, zf.chain(zf.scale_loss(S), zf.sgd(0.1)))
    g = torch.randn(WIDE, WIDE)
    before = g.clone()
    model(torch.eye(WIDE)).backward(g)
    assert torch.equal(g, before) and torch.equal(model.weight.grad, g.t())


def test_several_calls_and_a_kept_graph():
    plain, model, _ = pair()
    for net in (plain, model):
        loss = (net(data()) + net(data(1))).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        net(data(2)).square().mean().backward()
    equal(plain, model)


def test_steps_follow_the_parameters():
    plain, model, opt = pair("dynamic")
    other = torch.optim.SGD(plain.parameters(), 0.1)
    for i in range(4):
        for net, o in ((plain, other), (model, opt)):
            net(data(i)).square().mean().backward()
            o.step()
            o.zero_grad()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_other_data_under_a_parameter_are_seen():
    plain, model, _ = pair()
    model(data())
    for net in (plain, model):
        net.last.bias.data = torch.ones(3)
    assert torch.equal(plain(data()), model(data()))


def test_a_model_is_collected():
    _, model, opt = pair()
    model(data()).square().mean().backward()
    gone = weakref.ref(model.last.bias)
    opt.detach()
    del model, opt
    gc.collect()
    assert gone() is None
    _, model, opt = pair()
    model(data()).square().mean().backward()
    gone = weakref.ref(model)
    del model, opt
    gc.collect()
    assert gone() is None


def test_a_graph_outlives_its_model():
    plain, model, opt = pair()
    loss, bias = model(data()).square().mean(), model.last.bias
    del model, opt
    gc.collect()
    loss.backward()
    plain(data()).square().mean().backward()
    assert torch.equal(bias.grad, plain.last.bias.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [2.0**16, 2.0**-20, 3.3, 1e5])
def test_a_narrow_gradient_over_the_scale_is_rounded_once(dtype, scale):
    """Every 16-bit number there is, against float64; where fp32 ends before float64 does, against fp32."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    factor = torch.tensor(scale)
    expected = (x.double() / factor.double()).float().to(dtype)
    assert torch.equal(divided(x, factor, dtype).nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    in_members = torch.func.vmap(lambda s: divided(x, s, dtype))(factor[None])[0]
    assert torch.equal(in_members.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


class Results(TorchDispatchMode):
    """Dtypes and sizes of all that torch makes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.seen.append((out.dtype, out.numel()))
        return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_gradients_are_divided_without_a_wide_copy(dtype):
    """A copy of the largest leaf in fp32 would show in the peak of memory."""
    model = LookedAt().to(dtype)
    zf.attach(model, zf.chain(zf.precision(param_dtype=dtype, grad_dtype=dtype), zf.scale_loss(S), zf.sgd(0.1)))
    loss = model(data().to(dtype)).square().sum()
    with Results() as results:
        loss.backward()
    largest = max(p.numel() for p in model.parameters())
    assert (dtype, largest) in results.seen
    assert not [size for kind, size in results.seen if kind is torch.float32 and size >= largest]
