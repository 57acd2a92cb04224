"""`zf.bind` on several ranks: derivatives are in the stored layout, wherever in the chain the reduction stands."""

from __future__ import annotations

import functools

import pytest
import torch
from one_launch import one_launch
from stages import around
from time_limits import limit
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import zerofn as zf

PARAMS = {"w": torch.arange(1.0, 6.0), "b": torch.tensor([2.0, 3.0, -1.0])}
PIPELINES = {
    stage: lambda stage=stage: zf.chain(*around(stage, zf.accumulate(2)), zf.sgd(1.0))
    for stage in ("ZeRO-1", "ZeRO-2", "ZeRO-3", "data parallel, late")
}


def loss(params, x):
    return ((params["w"] * x) ** 2).sum() + (params["b"] ** 3).sum()


def on_rank(name: str):
    tx = PIPELINES[name]()
    state = zf.init(tx, PARAMS)
    rank = torch.distributed.get_rank()
    fn = zf.bind(loss, tx, state)
    x = torch.full((5,), 1.0 + rank)
    grads = torch.func.grad(fn)(state.params, x)
    shapes = {k: (g.shape, state.params[k].shape) for k, g in grads.items()}
    return float(fn(state.params, x)), grads, shapes


@functools.cache
def all_stages():
    return one_launch(2, on_rank, [(name,) for name in PIPELINES])


@pytest.mark.parametrize("name", list(PIPELINES))
def test_bind_sees_full_parameters_and_gives_stored_gradients(name):
    ranks = all_stages()[name,]
    # x is 1 on one rank and 2 on the other: 55 x^2 + 34, and the mean of 2 w x^2 is 5 w.
    assert [value for value, _, _ in ranks] == [55.0 + 34.0, 220.0 + 34.0]
    for _, _, shapes in ranks:
        assert all(g == p for g, p in shapes.values())
    for leaf, whole in {"w": 5 * PARAMS["w"], "b": 3 * PARAMS["b"] ** 2}.items():
        parts = [grads[leaf].flatten() for _, grads, _ in ranks]
        got = parts[0] if name == "data parallel, late" else torch.cat(parts)
        assert torch.equal(got[: whole.numel()], whole)


WEIGHTED = {
    "all_reduce": lambda: zf.chain(zf.accumulate(2, weighted=True), zf.all_reduce(), zf.sgd(1.0)),
    "reduce_scatter": lambda: zf.chain(zf.accumulate(2, weighted=True), zf.reduce_scatter(), zf.sgd(1.0)),
}


def _message(fn, *args) -> str:
    try:
        fn(*args)
    except ValueError as error:
        return str(error)
    return "no error"


def late(name: str):
    rank, tx = torch.distributed.get_rank(), WEIGHTED[name]()
    state, fn = (start := zf.init(tx, PARAMS)), zf.bind(loss, tx, start)
    x = torch.full((5,), 1.0 + rank)
    by_hand = {k: v.clone().requires_grad_() for k, v in state.params.items()}
    refused = [
        _message(torch.func.grad(fn), state.params, x),
        _message(torch.func.vmap(torch.func.grad(fn), (None, 0)), state.params, x[None]),
        _message(lambda: torch.func.grad(lambda p: torch.func.vmap(fn, (None, 0))(p, x[None]).sum())(state.params)),
        _message(lambda: fn(by_hand, x).backward()),
    ]
    value = float(fn(state.params, x)), float(torch.func.vmap(fn, (None, 0))(state.params, x[None]))
    of_input = torch.func.grad(fn, argnums=1)(state.params, x)
    for _ in range(2):
        _, pullback = zf.vjp(loss, tx, state, x)
        state, _ = zf.update(tx, pullback(torch.ones(()))[0], state, weight=1 + 2 * rank)
    return refused, value, of_input, zf.full_params(tx, state)


@functools.cache
def all_late():
    return one_launch(2, late, [(name,) for name in WEIGHTED])


@pytest.mark.parametrize("name", list(WEIGHTED))
def test_a_late_weighted_pipeline_is_evaluated_but_not_differentiated_through_bind(name):
    for rank, (refused, value, of_input, params) in enumerate(all_late()[name,]):
        for message in refused:
            assert "accumulate(weighted=True) comes before the reduction" in message and "zf.vjp(fn" in message
        assert value == ((89.0, 89.0), (254.0, 254.0))[rank]
        assert torch.equal(of_input, 2 * PARAMS["w"] ** 2 * (1.0 + rank))
        # Weights 1 and 3 of gradients 2 w and 8 w.
        assert torch.equal(params["w"], PARAMS["w"] - 6.5 * PARAMS["w"])


def shards_to_update():
    tx = PIPELINES["ZeRO-1"]()
    state = zf.init(tx, PARAMS)
    grads = torch.func.grad(zf.bind(loss, tx, state))(state.params, torch.ones(5))
    return _message(zf.update, tx, grads, state)


def test_reduced_gradients_for_a_late_reduction_name_the_remedy():
    for message in zf.launch(shards_to_update, 2):
        assert "shape" in message and "write: gradients from zf.vjp" in message and "torch.func" not in message


# -- Jacobians and Hessians: right where parameters are whole, refused where a basis is one of parts ------------


HESSIAN = torch.tensor([[10.0, 20, 1, 5], [20, 30, 2, 6], [1, 2, 40, 7], [5, 6, 7, 50]])
LEAVES = {"w": torch.tensor([1.0, 2.0, -1.0, 0.5]), "b": torch.tensor([2.0, 3.0])}


class Bound:
    """A loss and a function of two outputs, bound by one pipeline, beside the mean over ranks in one process."""

    def __init__(self, name: str, params: dict):
        self.params, self.tx = params, PIPELINES[name]()
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.everywhere = [torch.full((2,), 1.0 + r) for r in range(size)]
        self.x = self.everywhere[rank]
        self.state = zf.init(self.tx, params)
        self.stored = self.state.params
        self.fn = zf.bind(self.loss, self.tx, self.state)
        self.vector = zf.bind(self.outputs, self.tx, self.state)
        self.pipe = zf.core.pipeline.pipeline(self.tx, self.state.layout, "test")

    @staticmethod
    def loss(p, x):
        n = len(p["w"])
        return 0.5 * x.sum() * (p["w"] @ HESSIAN[:n, :n] @ p["w"]) + (p["b"] ** 2).sum()

    @staticmethod
    def outputs(p, x):
        return torch.outer(p["w"], x).sin().sum(0) * p["b"][0]

    def mean(self, p):
        return sum(self.loss(p, x) for x in self.everywhere) / len(self.everywhere)

    def mean_outputs(self, p):
        return sum(self.outputs(p, x) for x in self.everywhere) / len(self.everywhere)

    def part(self, path, full):
        """This rank's of a vector in the layout of the parameters."""
        (leaf,) = [leaf for leaf in self.state.layout.leaves if leaf.path == path]
        return self.pipe.road.store(full, leaf)

    def along_w(self, of, v):
        """The product of the Jacobian of a function of the stored parameters with a vector in the layout of `w`."""
        return jvp(lambda w: of({**self.stored, "w": w}, self.x), (self.stored["w"],), (v,))[1]


def bases(at: Bound) -> dict:
    """What is refused where parameters are parts: by program, the message."""
    fn, stored, x = at.fn, at.stored, at.x
    programs = {
        "hessian": lambda: hessian(fn)(stored, x),
        "jacrev of jacrev": lambda: jacrev(jacrev(fn))(stored, x),
        "jacfwd of grad": lambda: jacfwd(grad(fn))(stored, x),
        "jacrev of grad": lambda: jacrev(grad(fn))(stored, x),
        "in chunks": lambda: jacrev(grad(fn), chunk_size=2)(stored, x),
        "scaled": lambda: jacrev(lambda p: {k: 3 * g for k, g in grad(fn)(p, x).items()})(stored),
        "jacfwd": lambda: jacfwd(at.vector)(stored, x),
        "by hand": lambda: vmap(lambda v: at.along_w(at.vector, v))(torch.eye(stored["w"].numel())),
    }
    return {name: _message(run) for name, run in programs.items()}


def check_products(at: Bound) -> None:
    """What is right, and was: Jacobians of outputs and of inputs; products with vectors, alone and several at once."""
    whole, got = jacrev(at.mean_outputs)(at.params), jacrev(at.vector)(at.stored, at.x)
    for path in at.params:
        for i in range(2):
            torch.testing.assert_close(got[path][i], at.part(path, whole[path][i]))
    of_input = jacfwd(grad(at.fn, argnums=1), argnums=1)(at.stored, at.x)
    torch.testing.assert_close(of_input, torch.zeros(2, 2))
    draw = torch.Generator().manual_seed(0)
    vs = [{k: torch.randn(v.shape, generator=draw) for k, v in at.params.items()} for _ in range(2)]
    together = {k: torch.stack([at.part(k, v[k]) for v in vs]) for k in at.params}
    products = vmap(lambda v: jvp(lambda p: grad(at.fn)(p, at.x), (at.stored,), (v,))[1])(together)
    for i, v in enumerate(vs):
        for path, want in jvp(grad(at.mean), (at.params,), (v,))[1].items():
            torch.testing.assert_close(products[path][i], at.part(path, want))
    # All columns of a Hessian, by the basis of the whole, of which each rank has a part.
    exact = hessian(at.mean)(at.params)["w"]["w"]
    rows = torch.stack([at.part("w", e) for e in torch.eye(len(exact))])
    columns = vmap(lambda v: at.along_w(lambda p, x: grad(at.fn)(p, x)["w"], v))(rows)
    for column, want in zip(columns, exact, strict=True):
        torch.testing.assert_close(column, at.part("w", want))
    if at.part("w", exact[0]).shape == exact[0].shape:
        torch.testing.assert_close(hessian(at.fn)(at.stored, at.x)["w"]["w"], exact)


def curvature(uneven: bool):
    found = {}
    for name in PIPELINES:
        at = Bound(name, {"w": LEAVES["w"][:3], "b": LEAVES["b"]} if uneven else LEAVES)
        found.update({(name, program): message for program, message in bases(at).items()})
        check_products(at)
        samples = torch.ones(2 + torch.distributed.get_rank(), 2)
        found[name, "samples"] = _message(vmap(grad(at.fn), (None, 0)), at.stored, samples)
    return found


@pytest.mark.parametrize("uneven", [False, True])
def test_bases_of_parts_are_refused_and_everything_else_is_right(uneven):
    for out in zf.launch(curvature, 2, uneven, timeout=limit()):
        for (name, program), message in out.items():
            if program == "samples":
                assert "batches that differ between ranks" in message and "(3,) on rank 1" in message, message
            elif name == "data parallel, late":
                assert message == "no error", (program, message)
            else:
                named = "of a bound function on several ranks" in message
                # Scaled, and of other lengths on other ranks, it is no basis to look at.
                assert named or (uneven and program == "scaled"), (name, program, message)
                assert "torch.func.hessian, jacfwd" in message
                assert "torch.func.jvp(torch.func.grad(fn_stored), (state.params,)" in message
