"""Complex inputs and outputs have true gradients, as floating-point ones have. Parameters are real.

Scales are powers of two, so numbers are those of plain torch to the last bit.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map

import zerofn as zf
from zerofn.core.view import divided, multiplied  # inside: the arithmetic of views on numbers of any kind
from zerofn.testing import assert_trees_close, assert_trees_equal

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128
SGD = zf.sgd(0.5)
SCALED = zf.chain(zf.scale_loss(2.0**10), SGD)
PIPES = {
    "plain": SGD,
    "scaled": SCALED,
    "small": zf.chain(zf.scale_loss(2.0**-3), SGD),
    "dynamic": zf.chain(zf.scale_loss("dynamic"), SGD),
    "sharded": zf.chain(zf.shard(), zf.scale_loss(2.0**10), SGD),
}
scales = st.sampled_from([2.0**10, 2.0**-3, 2.0**20])
seeds = st.integers(0, 2**16)


def randoms(seed: int, *likes: Tensor) -> list[Tensor]:
    """Random tensors of given shapes and dtypes."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, dtype=x.dtype, generator=g) for x in likes]


def data(dtype: torch.dtype = C128, seed: int = 0) -> list[Tensor]:
    """A real parameter and a complex input."""
    return randoms(seed, torch.empty(4, dtype=dtype.to_real()), torch.empty(4, dtype=dtype))


def spectrum(w: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """A complex output that is lazily conjugated, and a real one."""
    s = torch.fft.fft(w * z * w)
    return s.conj(), (s * z).real


def fn(p: dict[str, Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    return spectrum(p["w"], z)


def energy(tree) -> Tensor:
    return sum(x.abs().square().sum() for x in tree_leaves(tree))


def close(got, expected) -> None:
    """For sums in another order, of terms below 64."""
    assert_trees_close(got, expected, ulps=16, floor=64.0)


class OfOneWeight(nn.Module):
    def __init__(self, dtype: torch.dtype = C128, forward=spectrum, seed: int = 0):
        super().__init__()
        self.w = nn.Parameter(data(dtype, seed)[0])
        self.compute = forward

    def forward(self, z):
        return self.compute(self.w, z)


def attached(net: nn.Module, tx: zf.Transform = SCALED) -> nn.Module:
    model = copy.deepcopy(net)
    model.opt = zf.attach(model, tx)
    return model


# ---- an attached model ----


@given(scales, st.sampled_from([C64, C128]), seeds)
def test_attached_to_second_order(scale, dtype, seed):
    net = OfOneWeight(dtype, seed=seed)
    model = attached(net, zf.chain(zf.scale_loss(scale), SGD))
    results = []
    for m in (model, net):
        z = data(dtype, seed)[1].requires_grad_()
        out = m(z)
        cotangents = randoms(seed + 1, *out)
        first = torch.autograd.grad(out, [m.w, z], cotangents, create_graph=True)
        second = torch.autograd.grad(energy(first), [m.w, z], retain_graph=True)
        energy(out).backward()
        results.append([*out, *first, *second, m.w.grad, z.grad])
    assert_trees_equal(*tree_map(Tensor.detach, results))


def test_attached_with_precision_keeps_complex_dtypes():
    """The dtypes of `precision` are real ones: a cast to them would drop the imaginary part."""
    tx = zf.chain(zf.precision(param_dtype=F32, output_dtype=F64), zf.scale_loss(2.0**10), SGD)
    model, net = attached(OfOneWeight(), tx), OfOneWeight()
    for z in (data()[1], data()[1].to(C64)):
        results = []
        for w, call in ((model.w, model), (net.w, lambda z: spectrum(net.w.to(F32), z))):
            z = z.detach().requires_grad_()
            first, second = call(z)
            results.append([first, second.to(F64), *torch.autograd.grad(energy((first, second.to(F64))), [w, z])])
        assert_trees_equal(*tree_map(Tensor.detach, results))
        assert [x.dtype for x in model(z)] == [z.dtype, F64]


def views(w: Tensor, x: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """Complex views of a real tensor; views of a complex one: a part, its conjugate, and real ones."""
    h = torch.view_as_complex((w * x.real).view(2, 2))
    z = w * x
    return {"of real": (h, h[1:]), "of complex": (z, z[1:], z.conj()), "parts": (z.real, z.conj().imag)}


def test_views_that_leave_a_model():
    """Strides of a view count elements of its own dtype, and its conjugation is not in them."""
    results = []
    for m in (attached(OfOneWeight(forward=views)), OfOneWeight(forward=views)):
        z = data()[1].requires_grad_()
        out = m(z)
        results.append([*tree_leaves(out), *torch.autograd.grad(energy(out), [m.w, z])])
    close(*tree_map(Tensor.detach, results))


def test_views_of_a_complex_output_stay_views():
    results = []
    for m in (attached(OfOneWeight(forward=views)), OfOneWeight(forward=views)):
        z, part, conj = m(data()[1])["of complex"]
        z.mul_(2)
        part.mul_(3j)
        results.append([z, part, conj, torch.autograd.grad(energy([z, conj]), m.w)[0]])
    assert_trees_equal(*tree_map(lambda t: t.detach().resolve_conj(), results))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:Torchinductor does not support code")
def test_attached_and_compiled():
    results = []
    for m in (attached(OfOneWeight()), OfOneWeight()):
        z = data()[1].requires_grad_()
        energy(torch.compile(m, backend="aot_eager")(z)).backward()
        results.append([m.w.grad, z.grad])
    torch._dynamo.reset()
    close(*results)


# ---- functions of a state ----


@given(st.sampled_from(sorted(PIPES)), st.sampled_from([C64, C128]), seeds)
def test_vjp(name, dtype, seed):
    w, z = data(dtype, seed)
    state = zf.init(PIPES[name], {"w": w})
    out, pullback = zf.vjp(lambda p, given: fn(p, given["z"]), PIPES[name], state, {"n": torch.arange(3), "z": z})
    expected, plain = vjp(spectrum, w, z)
    assert_trees_equal(out, expected)
    for i in range(2):
        cotangents = randoms(seed + i, *out)
        grads, given = pullback(tuple(cotangents))
        assert given["n"] is None
        assert_trees_equal((grads["w"], given["z"]), plain(tuple(cotangents)))


@pytest.mark.parametrize("tx", PIPES.values(), ids=PIPES)
def test_cotangents_of_vjp(tx: zf.Transform):
    """A real cotangent of a complex output is a complex one; the other way round a part of it would be lost."""
    w, z = data()
    out, pullback = zf.vjp(fn, tx, zf.init(tx, {"w": w}), z)
    grads, _ = pullback((out[0].real, out[1]))
    assert torch.equal(grads["w"], vjp(spectrum, w, z)[1]((out[0].real + 0j, out[1]))[0])
    with pytest.raises(ValueError, match="complex128, output of shape"):
        pullback((out[0], out[1] + 0j))


@pytest.mark.parametrize("name", [n for n in PIPES if n != "plain"])
def test_bind_to_second_order(name: str):
    tx = PIPES[name]
    w, z = data()
    state = zf.init(tx, {"w": w})
    bound = zf.bind(fn, tx, state)
    first = lambda f: grad(lambda p, z: energy(f(p, z)), argnums=(0, 1))  # noqa: E731
    second = lambda f: grad(lambda p, z: energy(first(f)(p, z)), argnums=(0, 1))  # noqa: E731
    for order in (first, second):
        assert_trees_equal(order(bound)(state.params, z), order(fn)({"w": w}, z))
    cotangents = tuple(randoms(1, *fn({"w": w}, z)))
    assert_trees_equal(vjp(bound, state.params, z)[1](cotangents), vjp(fn, {"w": w}, z)[1](cotangents))


def test_bind_by_plain_autograd_forward_mode_and_vmap():
    w, z = data()
    state = zf.init(SCALED, {"w": w})
    bound = zf.bind(fn, SCALED, state)
    first = lambda f: grad(lambda p, z: energy(f(p, z)), argnums=(0, 1))  # noqa: E731
    tangents = ({"w": data(seed=1)[0]}, data(seed=1)[1])
    rows = torch.stack([z, z.conj() * 2, z + 1])

    def everything(f, p):
        forward = jvp(f, (p, z), tangents)
        product = jvp(first(f), (p, z), tangents)[1]
        leaf, x = p["w"].clone().requires_grad_(), z.clone().requires_grad_()
        once = torch.autograd.grad(energy(f({"w": leaf}, x)), [leaf, x], create_graph=True)
        twice = torch.autograd.grad(energy(once), [leaf, x])
        return forward, product, tree_map(Tensor.detach, (once, twice)), vmap(first(f), (None, 0))(p, rows)

    assert_trees_equal(everything(bound, state.params), everything(fn, {"w": w}))


def test_ensemble_with_scales_of_its_own():
    """Under `vmap` a loss scale is a batch of them, beside tensors of any number of dimensions."""
    weights = torch.stack([data(seed=s)[0] for s in range(3)])
    z = data()[1]
    tx = zf.chain(zf.scale_loss("dynamic"), SGD)
    members = [
        zf.init(zf.chain(zf.scale_loss(init_scale=2.0**k), SGD), {"w": w})
        for w, k in zip(weights, (3, 9, 12), strict=True)
    ]
    together = tree_map(lambda *leaves: torch.stack(leaves), *members)
    f = lambda p, z: (fn(p, z), (p["w"] * z).sum())  # noqa: E731

    def pulled(state):
        out, pullback = zf.vjp(f, tx, state, z)
        return pullback(out)

    def plain(w):
        out, pullback = vjp(f, {"w": w}, z)
        return pullback(out)

    grads, given = vmap(pulled)(together)
    expected = vmap(plain)(weights)
    close((grads["w"], given), (expected[0]["w"], expected[1]))


def test_make_step_takes_complex_batches():
    """Right before inputs crossed: kept because the step takes the same edges and leaves inputs without a gradient."""
    w, z = data()

    def loss(p, z):
        out = fn(p, z)
        return energy(out), {"spectrum": out[0]}

    state, metrics = zf.make_step(loss, SCALED)(zf.init(SCALED, {"w": w}), z)
    expected, aux = grad(loss, has_aux=True)({"w": w}, z)
    assert torch.equal(state.params["w"], w - 0.5 * expected["w"])
    assert torch.equal(metrics["aux"]["spectrum"], aux["spectrum"])


def test_outputs_of_precision_stay_complex():
    """What is cast to the compute dtype, and back, is real."""
    tx = zf.chain(zf.precision(param_dtype=F32, output_dtype=F64), zf.scale_loss(2.0**10), SGD)
    w, z = data(C64)
    state = zf.init(tx, {"w": w.to(F64)})
    out, pullback = zf.vjp(fn, tx, state, z)
    assert [x.dtype for x in out] == [C64, F64]
    assert [x.dtype for x in zf.bind(fn, tx, state)(state.params, z)] == [C64, F64]
    expected = vjp(spectrum, w, z)[1]((out[0], out[1].to(F32)))
    assert_trees_equal(pullback(out)[0]["w"], expected[0].to(F64))


# ---- a scale and a complex number ----


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex32, C64, C128])
@pytest.mark.parametrize("scale", [torch.tensor(1024.0), torch.full((3, 1), 1024.0)], ids=["number", "batch"])
def test_scaling_does_not_mix_the_parts(dtype, scale):
    """As `s + 0i` a scale would make NaN of the part beside an infinite one."""
    real, imag = torch.tensor([[torch.inf, 3.0], [2.0, -torch.inf], [-0.0, 5.0]]), torch.arange(6.0).view(3, 2)
    for fn, factor in ((multiplied, 1024.0), (divided, 1 / 1024.0)):
        z = torch.complex(real, imag).to(dtype)
        got = torch.view_as_real(fn(z.conj(), scale, dtype))
        expected = torch.stack([real * factor, -imag * factor], -1).to(dtype.to_real())
        assert_trees_equal(got, expected)
        assert torch.equal(got.signbit(), expected.signbit())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_scaled_in_fp32_and_rounded_once():
    x = torch.tensor([1.0], dtype=torch.float16)
    third, scale = torch.tensor(1 / 3), torch.tensor(3.0)
    assert torch.equal(divided(torch.complex(x, -x), scale, C64), torch.complex(third, -third)[None])
    large = torch.complex(x * 2.0**15, x)
    assert torch.equal(multiplied(large, scale, C64), torch.tensor([3 * 2.0**15 + 3j]))


AS_TORCH = {
    "sgd": (torch.optim.SGD, zf.sgd, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, zf.adam, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, zf.adamw, {"lr": 0.1, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, zf.rmsprop, {"lr": 0.01}),
}


@pytest.mark.parametrize("name", AS_TORCH)
def test_pairs_of_numbers_are_trained_as_torch_trains_a_complex_parameter(name):
    """And a complex parameter itself is trained in the same way."""
    theirs, ours, numbers = AS_TORCH[name]
    start = torch.tensor([1 + 2j, -0.5 + 0.25j, 0.1 - 1j], dtype=C128)
    by = torch.tensor([1 + 1j, 2 - 1j, 0.5j], dtype=C128)
    loss = lambda w: ((w * by).sum() - 1).abs().square() + 0.1 * (w.abs() ** 4).sum()  # noqa: E731
    w = nn.Parameter(start.clone())
    opt = theirs([w], **numbers)
    tx = ours(**numbers)
    state, step = (
        zf.init(tx, {"w": torch.view_as_real(start)}),
        zf.make_step(lambda p: loss(torch.view_as_complex(p["w"])), tx),
    )
    for _ in range(4):
        opt.zero_grad()
        loss(w).backward()
        opt.step()
        state, _ = step(state)
    torch.testing.assert_close(torch.view_as_complex(state.params["w"]), w.detach(), rtol=1e-12, atol=1e-14)
    itself, step = zf.init(tx, {"w": start}), zf.make_step(lambda p: loss(p["w"]), tx)
    for _ in range(4):
        itself, _ = step(itself)
    assert torch.equal(itself.params["w"], torch.view_as_complex(state.params["w"]))
