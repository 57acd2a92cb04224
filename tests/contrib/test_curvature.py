"""`zf.curvature` against dense Hessians in float64, quadratics whose spectrum is known, and one process."""

from __future__ import annotations

import weakref

import pytest
import torch
from time_limits import limit
from torch.distributed.device_mesh import init_device_mesh

import zerofn as zf
from zerofn import curvature
from zerofn.contrib.curvature import Hessian  # inside: its draws are replaced

DTYPE = torch.float64
TX = zf.sgd(0.1)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


PARAMS = {
    "in": {"w": draw(4, 3, seed=1), "b": draw(4, seed=2)},
    "out": {"w": draw(1, 4, seed=3)},
    "in2": draw(2, seed=4),
}
X, Y = draw(8, 3, seed=5), draw(8, 1, seed=6)


def net(params, x, y):
    hidden = torch.tanh(x @ params["in"]["w"].T + params["in"]["b"])
    return (hidden @ params["out"]["w"].T * params["in2"].exp().sum() - y).square().mean()


def dense(names=("in.w", "in.b", "out.w", "in2")):
    """The Hessian of `net` as a matrix, of the leaves with these names."""
    leaves = {"in.w": PARAMS["in"]["w"], "in.b": PARAMS["in"]["b"], "out.w": PARAMS["out"]["w"], "in2": PARAMS["in2"]}
    numels = [leaves[n].numel() for n in names]

    def flat(v):
        new = dict(leaves)
        for n, part in zip(names, v.split(numels), strict=True):
            new[n] = part.view(leaves[n].shape)
        return net({"in": {"w": new["in.w"], "b": new["in.b"]}, "out": {"w": new["out.w"]}, "in2": new["in2"]}, X, Y)

    return torch.func.hessian(flat)(torch.cat([leaves[n].flatten() for n in names]))


def largest(matrix):
    values = torch.linalg.eigvalsh(matrix)
    return values[values.abs().argmax()]


BLOCKS = {"": ("in.w", "in.b", "out.w", "in2"), "in": ("in.w", "in.b"), "out.w": ("out.w",), "in2": ("in2",)}


def test_of_a_small_net_against_its_dense_hessian():
    state = zf.init(TX, PARAMS)
    names = list(BLOCKS)
    found = curvature.max_eigenvalue(net, TX, state, X, Y, blocks=names, tol=1e-12, max_iter=2000)
    spectra = curvature.spectrum(net, TX, state, X, Y, blocks=names, steps=100)
    traces = curvature.trace(net, TX, state, X, Y, blocks=names, samples=400)
    for name, leaves in BLOCKS.items():
        matrix = dense(leaves)
        values = torch.linalg.eigvalsh(matrix)
        # Of a Rayleigh quotient the error is the square of the vector's.
        torch.testing.assert_close(found[name], largest(matrix), rtol=1e-6, atol=0)
        # As many steps as parameters: all of them, and bounds of the size of rounding.
        torch.testing.assert_close(spectra[name].values, values, rtol=1e-9, atol=1e-9)
        assert spectra[name].errors.max() < 1e-8 and float(spectra[name].weights.sum()) == pytest.approx(1)
        # Five standard errors: one in a million draws is further off, and these are always the same.
        assert abs(float(traces[name].value - matrix.trace())) <= 5 * float(traces[name].error)
        assert float(traces[name].error) < 0.2 * float(matrix.norm())


def test_a_quadratic_of_known_spectrum():
    values = torch.linspace(-3.0, 10.0, 50, dtype=DTYPE)
    basis, _ = torch.linalg.qr(draw(50, 50))
    matrix = basis @ torch.diag(values) @ basis.T
    state = zf.init(TX, {"w": draw(50)})

    def loss(params):
        return params["w"] @ matrix @ params["w"] / 2, {"aux": 1}

    found = curvature.max_eigenvalue(loss, TX, state, tol=1e-10, max_iter=1000)[""]
    torch.testing.assert_close(found, torch.tensor(10.0, dtype=DTYPE), rtol=1e-7, atol=0)
    few = curvature.spectrum(loss, TX, state, steps=20)[""]
    assert len(few.values) == 20
    # Each Ritz value has an eigenvalue within its error, and the ends are found first.
    nearest = (few.values[:, None] - values).abs().min(1).values
    assert (nearest <= few.errors + 1e-10).all() and few.errors[-1] < 1e-2 < few.errors.max()
    torch.testing.assert_close(few.values[[0, -1]], values[[0, -1]], rtol=1e-4, atol=0)
    # The quadrature is exact for polynomials of degree 2 m - 1 in the start vector's density.
    assert few.weights.min() >= 0


def over_ranks():
    rank, found = torch.distributed.get_rank(), {}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    roads = {
        "shard": zf.chain(zf.shard(), TX),
        "zero 1": zf.chain(zf.accumulate(2), zf.reduce_scatter(), TX),
        "data parallel": zf.chain(zf.all_reduce(), TX),
        "hybrid": zf.chain(zf.shard(mesh["shard"]), zf.all_reduce(mesh["replicate"]), TX),
    }
    for name, tx in roads.items():
        state = zf.init(tx, PARAMS)
        args = (net, tx, state, X[4 * rank : 4 * rank + 4], Y[4 * rank : 4 * rank + 4])
        eigen = curvature.max_eigenvalue(*args, blocks=["in", "out"], tol=1e-3)
        trace = curvature.trace(*args, samples=3)[""]
        found[name] = [*eigen.values(), *trace, *curvature.spectrum(*args, steps=5)[""]]
    return found


def test_over_ranks_it_is_one_process():
    state = zf.init(TX, PARAMS)
    args = (net, TX, state, X, Y)
    eigen = curvature.max_eigenvalue(*args, blocks=["in", "out"], tol=1e-3)
    want = [*eigen.values(), *curvature.trace(*args, samples=3)[""], *curvature.spectrum(*args, steps=5)[""]]
    for found in zf.launch(over_ranks, 2, timeout=limit()):
        for road, got in found.items():
            # Draws are those of one process. Sums over ranks are made in another order.
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda text, road=road: f"{road}: {text}")


def test_in_half_precision_storage_and_under_a_scale():
    tx = zf.chain(zf.precision(param_dtype=torch.bfloat16), zf.scale_loss(1024.0), TX)
    state = zf.init(tx, {"w": torch.ones(3)})

    def loss(params):
        return (params["w"].float().square() * torch.tensor([1.0, 2.0, 4.0])).sum()

    # The second derivative is a number of bf16; powers of two are exact.
    assert float(curvature.max_eigenvalue(loss, tx, state)[""]) == pytest.approx(8.0, rel=1e-2)


def test_one_that_is_not_converged_is_told():
    state = zf.init(TX, {"w": draw(3)})

    def loss(params):
        return (params["w"] ** 2 * torch.tensor([1.0, 0.99, 0.98])).sum()

    with pytest.warns(RuntimeWarning, match=r"not within tol=0\.0 after 2 products"):
        curvature.max_eigenvalue(loss, TX, state, tol=0.0, max_iter=2)


def test_a_trace_has_one_random_vector_in_memory_at_a_time(monkeypatch):
    alive, most = [], []
    draw_one = Hessian.draw

    def counted(*args, **keywords):
        v = draw_one(*args, **keywords)
        alive.append(weakref.ref(v["in2"]))
        most.append(sum(ref() is not None for ref in alive))
        return v

    monkeypatch.setattr(Hessian, "draw", counted)
    curvature.trace(net, TX, zf.init(TX, PARAMS), X, Y, samples=8)
    assert len(alive) == 8 and max(most) <= 2
