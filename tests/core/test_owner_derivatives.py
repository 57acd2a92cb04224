"""Derivatives through updates of whole leaves at their owners: those of one process, of all ranks and to second order.

One process is held against differences in float64. With one leaf to update all ranks but one own nothing.
"""

import pytest
import torch
from stages import around
from time_limits import limit
from torch.func import grad, jacfwd, jvp

import zerofn as zf

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
START = {
    "matrix": torch.eye(4, 3, dtype=F64) + torch.randn(4, 3, dtype=F64, generator=GENERATOR) / 5,
    "row": torch.randn(1, 3, dtype=F64, generator=GENERATOR),
    "other": torch.randn(3, 4, dtype=F64, generator=GENERATOR),
}
X = torch.randn(5, 4, dtype=F64, generator=GENERATOR)
RATE = torch.tensor(0.07, dtype=F64)


@zf.leafwise(init=lambda p: {"m": torch.zeros_like(p), "t": torch.zeros((), dtype=p.dtype)}, optimizer=True)
def lamb(grad, param, state, *, lr, b1=0.9):
    t = state["t"] + 1
    m = b1 * state["m"] + (1 - b1) * grad
    u = m / (1 - b1**t) + 0.01 * param
    return param - lr * param.norm() / u.norm() * u, {"m": m, "t": t}


@zf.leafwise(init=lambda p: p * 2)
def away_from_the_start(grad, param, state, *, by):
    return grad + by * (param - state) * grad.mean(), state * 0.9 + grad


@zf.leafwise
def linear(grad, param, *, by):
    return by * grad.flip(0)


def of_one(*inner):
    return [zf.partition({"matrix": zf.chain(*inner), "rest": zf.sgd(0.1)}, lambda p: p if p == "matrix" else "rest")]


CASES = {
    "muon": lambda r: [zf.muon(lr=r, weight_decay=r)],
    "muon of one leaf": lambda r: of_one(zf.muon(lr=lambda step: r * 0.9**step)),
    "lamb": lambda r: [lamb(lr=r)],
    "lamb of one leaf": lambda r: of_one(lamb(lr=r, b1=1 - r)),
    "centralize": lambda r: [zf.centralize(), zf.sgd(lr=r, momentum=0.5)],
    "first states": lambda r: [zf.clip_by_global_norm(0.5), away_from_the_start(by=r), zf.adamw(0.01, eps=1e-2)],
    "linear": lambda r: [linear(by=r), zf.sgd(0.1)],
    "linear of one leaf": lambda r: of_one(linear(by=r), zf.sgd(0.1)),
}


def loss(p, x):
    return torch.tanh(x @ p["matrix"] + p["row"] + (p["other"] @ x.mT).mean()).square().mean()


def after(case, stage, rate, start, x, create_graph=False):
    """What is linear in the last parameters, and a sum of what this rank has of states."""
    tx = zf.chain(*stage(), *CASES[case](rate))
    state = zf.init(tx, {**START, "matrix": start}, create_graph=create_graph)
    step = zf.make_step(loss, tx, create_graph=create_graph or None)
    for _ in range(2):
        state, _ = step(state, x)
    kept = sum(x.sum() for x in torch.utils._pytree.tree_leaves(state.transforms) if x.is_floating_point())
    return sum((i + 1) * x.sum() for i, x in enumerate(zf.full_params(tx, state).values())), kept


def derivatives(case, stage):
    at = RATE, START["matrix"], X
    fn = lambda *a: after(case, stage, *a)[0]  # noqa: E731
    first = grad(fn, (0, 1, 2))(*at)
    by_rate = lambda r: grad(fn)(r, *at[1:])  # noqa: E731
    second = grad(by_rate)(RATE), grad(lambda w: grad(fn)(RATE, w, X))(at[1]), jacfwd(by_rate)(RATE)
    squares = grad(lambda *a: sum(g.square().sum() for g in grad(fn, (0, 1, 2))(*a)), (0, 1, 2))(*at)
    _, tangent = jvp(fn, at, tuple(map(torch.ones_like, at)))
    leaves = [x.clone().requires_grad_() for x in at]
    by_autograd = torch.autograd.grad(after(case, stage, *leaves, create_graph=True)[0], leaves)
    of_states = grad(lambda r: after(case, stage, r, *at[1:])[1])(RATE)
    return *first, *second, *squares, tangent, *by_autograd, of_states


def nothing():
    return []


def hybrid(inner):
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))
    return lambda: [zf.shard(mesh["node"]), inner(mesh["nodes"])]


def everywhere(stages, cases=tuple(CASES)):
    where = {name: (lambda name=name: around(name)) for name in stages if name.startswith("ZeRO")}
    where |= {name: hybrid(getattr(zf, name)) for name in stages if name not in where}
    return {(case, name): derivatives(case, stage) for case in cases for name, stage in where.items()}


@pytest.mark.parametrize("case", CASES)
def test_one_process_has_the_derivatives_of_differences(case):
    h, at = 1e-6, (RATE, START["matrix"], X)
    along = tuple(map(torch.ones_like, at))
    ahead, behind = (after(case, nothing, *(x + s * v for x, v in zip(at, along, strict=True))) for s in (h, -h))
    found = derivatives(case, nothing)
    first, tangent = sum(g.sum() for g in found[:3]), found[9]
    torch.testing.assert_close(first, (ahead[0] - behind[0]) / (2 * h), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(tangent, first)


@pytest.mark.parametrize(
    ("size", "stages", "cases"),
    [
        # An update at owners is the same at each stage; by ZeRO-1 gradients wait, and parameters stay whole.
        (2, ["ZeRO-3"], ["muon of one leaf", "first states"]),
        pytest.param(2, ["ZeRO-1"], ["linear of one leaf"], marks=pytest.mark.slow),
        pytest.param(2, ["ZeRO-1", "ZeRO-2", "ZeRO-3"], list(CASES), marks=pytest.mark.slow),
        pytest.param(3, ["ZeRO-1", "ZeRO-2", "ZeRO-3"], list(CASES), marks=pytest.mark.slow),
        pytest.param(4, ["all_reduce", "reduce_scatter"], list(CASES), marks=pytest.mark.slow),
    ],
)
def test_derivatives_are_those_of_one_process(size, stages, cases):
    """All ranks have the same batch: by it each has the derivative of its own loss, of which all have a mean."""
    want = {case: derivatives(case, nothing) for case in cases}
    for found in zf.launch(everywhere, size, stages, cases, timeout=limit(120)):
        for (case, stage), got in found.items():
            where = lambda m, at=(case, stage): f"{at}: {m}"  # noqa: E731
            torch.testing.assert_close(got, want[case], rtol=1e-8, atol=1e-8, msg=where)


@zf.leafwise
def picky(grad, param, *, by):
    if by > 1:
        raise ArithmeticError("too large")
    return by * grad


def failing_and_not():
    """What a derivative says whose owner raises; and what the next one is."""

    def run(rate):
        tx = zf.chain(zf.shard(), zf.masked(picky(by=rate), lambda path: path == "matrix"), zf.sgd(0.1))
        state, _ = zf.make_step(loss, tx)(zf.init(tx, START), X)
        return zf.full_params(tx, state)["matrix"].sum()

    said = []
    for derivative in (grad(run), lambda r: jvp(run, (r,), (torch.ones_like(r),))[1]):
        for rate in (2.0, 0.5):
            try:
                said.append(float(derivative(torch.tensor(rate, dtype=F64))))
            except (ArithmeticError, RuntimeError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def test_an_owner_that_raises_leaves_no_rank_in_a_derivative():
    (_, want, _, _) = failing_and_not()
    for found in zf.launch(failing_and_not, 2, timeout=limit(60)):
        for failed, right in (found[:2], found[2:]):
            assert "too large" in failed
            assert right == pytest.approx(want)


def unrolled(case, stage):
    def final(rate):
        tx = lambda: zf.chain(*stage(), *CASES[case](rate))  # noqa: E731
        state = zf.init(tx(), START)
        step_at = lambda state, x, r: zf.make_step(loss, zf.chain(*stage(), *CASES[case](r)))(state, x)  # noqa: E731
        _, losses = zf.unroll(step_at, state, [(X,)] * 4, rate, every=2)
        return losses[-1]

    return grad(final)(RATE)


def all_unrolled():
    return {case: unrolled(case, lambda: [zf.shard()]) for case in ("muon", "lamb of one leaf")}


def test_many_steps_at_owners():
    for found in zf.launch(all_unrolled, 2, timeout=limit(60)):
        for case, got in found.items():
            torch.testing.assert_close(got, unrolled(case, nothing), rtol=1e-9, atol=1e-9)
