"""`torch.compile(step, fullgraph=True)` over several ranks: one graph with its collectives in it, and the same numbers.

By `aot_eager`, which traces all and generates no code. Ranks are real ones, and each runs several pipelines, since to
begin ranks costs more than to compile a step.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.time_limits import limit
from torch.utils._pytree import tree_leaves

import zerofn as zf
from zerofn._compat.functorch import COMPILES_STATES  # inside: whether this torch makes one graph of a step

BF16 = torch.bfloat16
pytestmark = [
    # Said by torch of its own tracing of a Function, which instantiates one.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.skipif(not COMPILES_STATES, reason="before torch 2.13 a step runs uncompiled inside of torch.compile"),
]
STEPS = 10
# Filled with another number before each step.
RATE = torch.tensor(0.1)


def decayed(step):
    return 0.1 * 0.9**step


def sgd(rate=0.1):
    return zf.sgd(rate, momentum=0.9, weight_decay=0.1)


def clipped():
    return zf.chain(zf.clip_by_global_norm(0.5), zf.adamw(decayed))


def cast():
    return zf.precision(param_dtype=BF16)


def scaled():
    return zf.scale_loss(init_scale=8.0, growth_interval=3)


def stored_low():
    return zf.precision(store_dtype=BF16)


def whole_at_owners():
    return zf.partition({"x": zf.muon(0.1), "y": sgd()}, lambda path: "x" if path == "w" else "y")


@zf.leafwise(init=torch.zeros_like, needs="row")
def momentum_of_rows(grad, param, momentum):
    momentum = 0.5 * momentum + grad
    return momentum * (1.0 if grad.ndim == 0 else 1 + grad.square().mean(-1, keepdim=True)), momentum


PIPELINES = {
    "replicas": lambda: zf.chain(zf.all_reduce(), zf.accumulate(2), sgd()),
    "replicas, late": lambda: zf.chain(zf.accumulate(2), zf.all_reduce(), clipped()),
    "replicas, scaled": lambda: zf.chain(cast(), zf.all_reduce(), scaled(), sgd()),
    "1": lambda: zf.chain(zf.accumulate(2), zf.reduce_scatter(), clipped()),
    "1, scaled": lambda: zf.chain(cast(), scaled(), zf.accumulate(2), zf.reduce_scatter(), sgd()),
    "2": lambda: zf.chain(zf.reduce_scatter(), zf.accumulate(2), sgd(RATE)),
    "2, low": lambda: zf.chain(zf.reduce_scatter(), stored_low(), zf.accumulate(2), zf.low_precision_adam(0.1)),
    "2, scaled": lambda: zf.chain(cast(), zf.reduce_scatter(), scaled(), clipped()),
    "3, scaled": lambda: zf.chain(zf.shard(), cast(), scaled(), zf.accumulate(2), sgd()),
    "3": lambda: zf.chain(zf.shard(), zf.accumulate(2), clipped()),
    "3, low": lambda: zf.chain(zf.shard(), stored_low(), zf.low_precision_adam(RATE)),
    "weights": lambda: zf.chain(zf.shard(), zf.accumulate(2, weighted=True), sgd()),
    "weights, late": lambda: zf.chain(zf.accumulate(2, weighted=True), zf.reduce_scatter(), sgd()),
    "owners": lambda: zf.chain(zf.shard(), whole_at_owners()),
    "rows": lambda: zf.chain(zf.shard(), momentum_of_rows(), sgd()),
}
# Of a norm that is added up in another order, and of formulas beside kernels of torch's: of numbers near 1, for each
# update. Where neither is, bits are the same.
BOUNDS = {"replicas, late": 3e-7, "1": 3e-7, "2, scaled": 3e-7, "3": 3e-7, "owners": 1e-6}


def loss(p, x):
    h = torch.tanh(x.to(p["w"].dtype) @ p["w"]) * p["scale"] + p["b"]
    wide = torch.promote_types(h.dtype, torch.float32)
    return h.to(wide).square().mean() + p["row"].to(wide).square().sum()


def params(dtype):
    """Uneven rows, fewer rows than ranks, a number."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (5, 3), "b": (3,), "scale": (), "row": (1, 2)}
    return {p: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for p, s in shapes.items()}


def batches(size, dtype):
    """By step and rank."""
    generator = torch.Generator().manual_seed(9)
    return torch.randn(STEPS, size, 4, 5, generator=generator, dtype=torch.float64).to(dtype)


def compiled(fn, backend="aot_eager"):
    return torch.compile(fn, fullgraph=True, backend=backend)


def trained(name, backend=None, dtype=torch.float32):
    """After each step of a rank, its state and metrics. In the sixth the last rank's scaled gradient is NaN."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tx = PIPELINES[name]()
    step, state, found = zf.make_step(loss, tx), zf.init(tx, params(dtype)), []
    if backend:
        torch._dynamo.reset()
        step = compiled(step, backend)
    for i, x in enumerate(batches(size if size > 1 else 3, dtype)):
        RATE.fill_(0.1 / (i + 1))
        x = x[rank] if size > 1 else x.flatten(0, 1)
        x = x * torch.nan if "scaled" in name and i == 5 and rank == size - 1 else x
        given = {"weight": torch.tensor(1.0 + (i + rank) % 3)} if "weights" in name else {}
        state, metrics = step(state, x, **given)
        found.append((state, metrics))
        if backend:
            # A graph that is made anew is an error from here on.
            torch.compiler.set_stance("fail_on_recompile")
    torch.compiler.set_stance("default")
    return tx, found


def alike(names, backend="aot_eager"):
    for name in names:
        (_, want), (_, got) = trained(name), trained(name, backend)
        bound = BOUNDS.get(name, 0.0) if backend == "aot_eager" else 1e-6
        for i, ((state, metrics), (other, shown)) in enumerate(zip(want, got, strict=True)):
            for a, b in zip(tree_leaves(other), tree_leaves(state), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=(i + 1) * bound)
            assert shown.keys() == metrics.keys()
            for key in metrics:
                # A norm is added up in another order.
                torch.testing.assert_close(
                    shown[key], metrics[key], rtol=1e-6, atol=1e-7, equal_nan=True, check_dtype=False
                )
            assert shown["skipped"] == ("scaled" in name and i == 5)
    return True


SOON = ("3, scaled",)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        pytest.param(2, SOON, id="2"),
        *(pytest.param(3, (name,), id=f"3-{name}", marks=pytest.mark.slow) for name in PIPELINES),
    ],
)
def test_a_compiled_step_over_ranks_gives_the_numbers_of_the_step(ranks, names):
    assert all(zf.launch(alike, ranks, names, timeout=limit(120)))


@pytest.mark.slow
def test_generated_code_has_the_collectives_too():
    assert all(zf.launch(alike, 2, ("3",), "inductor", timeout=limit(300)))


def in_full(name):
    tx, found = trained(name, "aot_eager", torch.float64)
    return zf.full_params(tx, found[-1][0])


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("replicas, late", "3")])
def test_a_compiled_step_over_ranks_is_that_of_one_process(name):
    tx, plain = trained(name, dtype=torch.float64)
    want = zf.full_params(tx, plain[-1][0])
    for got in zf.launch(in_full, 3, name, timeout=limit(120)):
        # Of sums in another order; in a graph a schedule is computed in fp32, as the count of updates is there.
        torch.testing.assert_close(got, want, rtol=0, atol=STEPS * BOUNDS.get(name, 1e-13))
        assert (got["w"] - params(torch.float64)["w"]).abs().max() > 0.01


def refused():
    rank = dist.get_rank()
    x = batches(2, torch.float32)[0, rank]
    tx = zf.chain(zf.shard(), sgd())
    step, state = zf.make_step(loss, tx, create_graph=True), zf.init(tx, params(torch.float32))
    with pytest.raises(Exception, match="A differentiated step over several ranks cannot be one graph"):
        compiled(step)(state, x)
    got, want = torch.compile(step, backend="aot_eager")(state, x)[0], step(state, x)[0]
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True))
    shard = zf.shard()
    own = replace(shard, view_fn=lambda layout, ranks: replace(shard.view_fn(layout, ranks), traceable=False))
    tx = zf.chain(own, sgd())
    step = zf.make_step(loss, tx)
    with pytest.raises(Exception, match="with a wire that is not marked traceable"):
        compiled(step)(zf.init(tx, params(torch.float32)), x)
    return True


def test_a_step_that_is_no_graph_is_refused_by_name_and_runs_uncompiled():
    assert all(zf.launch(refused, 2, timeout=limit(120)))


def donated_at_owners():
    """Of a matrix that the other rank owns this one has no momentum, which nothing can be written into."""
    tx = zf.chain(zf.reduce_scatter(), zf.accumulate(2), zf.muon(0.05))
    given = {"a": torch.eye(4, 3), "b": torch.ones(3, 4)}
    x = torch.arange(8.0).view(2, 4) * (1 + dist.get_rank())
    step = zf.make_step(lambda p, x: ((x @ p["a"]) @ p["b"]).square().mean(), tx)
    donating = compiled(zf.make_step(lambda p, x: ((x @ p["a"]) @ p["b"]).square().mean(), tx, donate=True))
    state, other = zf.init(tx, given), zf.init(tx, given)
    for _ in range(4):
        (state, _), (other, _) = step(state, x), donating(other, x)
    (found, got) = (zf.full_params(tx, s) for s in (state, other))
    for path, start in given.items():
        assert (found[path] - start).abs().max() > 0.01
        # As at owners above.
        torch.testing.assert_close(got[path], found[path], rtol=0, atol=4e-6)
    return True


@pytest.mark.slow
def test_a_donated_state_at_owners_is_written_where_there_is_memory():
    assert all(zf.launch(donated_at_owners, 2, timeout=limit(120)))


def rate_that_requires_grad():
    rate = torch.tensor(0.1, requires_grad=True)
    tx = zf.chain(zf.shard(), zf.sgd(rate))
    x = batches(2, torch.float32)[0, dist.get_rank()].requires_grad_()
    new, metrics = compiled(zf.make_step(loss, tx, create_graph=False))(zf.init(tx, params(torch.float32)), x)
    assert not new.leaves["w"].requires_grad and not metrics["loss"].requires_grad
    return True


@pytest.mark.slow
def test_a_rate_and_a_batch_that_require_grad_keep_no_graph_of_collectives():
    assert all(zf.launch(rate_that_requires_grad, 2, timeout=limit(120)))
