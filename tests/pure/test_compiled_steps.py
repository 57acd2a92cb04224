"""`torch.compile(step, fullgraph=True)`: one graph for a whole step, and the same one however its numbers change.

By `aot_eager`, which traces all and generates no code: that takes a minute for each pipeline.
"""

import optree
import pytest
import torch
from compilers import needs_compiler
from models import Dot
from torch.utils._pytree import tree_leaves, tree_map

import zerofn as zf
from zerofn._compat.functorch import COMPILES_STATES  # inside: whether this torch makes one graph of a step
from zerofn.kernels import fused_adam as _fused_adam  # inside: how many leaves are many

BF16 = torch.bfloat16
pytestmark = [
    # Said by torch of its own tracing of a Function, which instantiates one.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.skipif(not COMPILES_STATES, reason="before torch 2.13 a step runs uncompiled inside of torch.compile"),
]


def loss(p, x):
    return torch.tanh(x.to(p["w"].dtype) @ p["w"]).float().square().mean() + p["b"].float().square().sum()


def params(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(4, 3, generator=generator), "b": torch.randn(3, generator=generator)}


def batches(n):
    return torch.randn(n, 5, 4, generator=torch.Generator().manual_seed(9))


def compiled(fn):
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


@pytest.fixture(autouse=True)
def no_graph_twice():
    """A step that is compiled anew fails. What other files have compiled is forgotten before: torch's own `vmap` is one
    function of the process, and a second function under it would compile it anew."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


PIPELINES = {
    "sgd": lambda: zf.sgd(0.1, momentum=0.9, weight_decay=0.1),
    "window": lambda: zf.chain(
        zf.accumulate(2), zf.clip_by_global_norm(0.5), zf.adamw(lambda step: 0.1 * 0.9**step), zf.ema(0.9)
    ),
    "scaled": lambda: zf.chain(zf.precision(param_dtype=BF16), zf.scale_loss(growth_interval=1), zf.adam(0.1)),
    "stochastic": lambda: zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(0.1)),
    "kahan": lambda: zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(0.1, rounding="kahan")),
    "masters": lambda: zf.chain(zf.precision(store_dtype="bf16+8"), zf.lion(0.1)),
    "offload": lambda: zf.offload(zf.adamw(0.1)),
    "codes": lambda: zf.quantize(zf.lion(0.1)),
    "groups": lambda: zf.partition({"x": zf.muon(0.1), "y": zf.sgd(0.1)}, lambda path: "x" if path == "w" else "y"),
}
# What the formula and a kernel of torch's differ by, and the norm in another order: of numbers near 1, per update.
BOUNDS = {"window": 3e-7, "scaled": 3e-7, "offload": 3e-7, "groups": 1e-6}


# Each compiles for a second or two; "stochastic" is that of the kernel below.
SOON = ("window",)


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in SOON else pytest.mark.slow) for x in PIPELINES])
def test_a_compiled_step_gives_the_numbers_of_the_step(name):
    tx = PIPELINES[name]()
    step = zf.make_step(loss, tx)
    fast, state = compiled(step), zf.init(tx, params())
    other = state
    for i, x in enumerate(batches(4)):
        state, metrics = step(state, x)
        other, shown = fast(other, x)
        for a, b in zip(tree_leaves(other), tree_leaves(state), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=(i + 1) * BOUNDS.get(name, 0.0))
        torch.testing.assert_close(shown["loss"], metrics["loss"])
        assert shown["updated"] == metrics["updated"] and shown["step"] == metrics["step"]


def test_rates_and_states_that_change_make_no_further_graph():
    rate = torch.tensor(0.1)
    tx = zf.adamw(rate)
    step = zf.make_step(loss, tx)
    fast, state = compiled(step), zf.init(tx, params())
    for value in (0.1, 0.3, 0.0):
        rate.fill_(value)
        (got, metrics), (want, _) = fast(state, batches(1)[0]), step(state, batches(1)[0])
        assert metrics["lr"] == rate
        torch.testing.assert_close(got.params, want.params, rtol=0, atol=3e-7)
    fast(zf.init(zf.adamw(rate), params(seed=1)), batches(1)[0])


@zf.leafwise(init=torch.zeros_like, optimizer=True, needs="element")
def lagging(grad, param, before, *, lr, step, path):
    """Steps from where the parameter was before; keeps the parameter itself."""
    rate = lr * (1 + step) if path == "w" else lr
    return param + 0.1 * (param - before) - rate * grad, param


@zf.leafwise(needs="row")
def rows(grad, param):
    return grad / grad.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("donate", [pytest.param(False, marks=pytest.mark.slow), True])
def test_functions_of_leaves_are_in_the_graph(donate):
    # Rates that are exact in fp32, in which a graph computes them.
    tx = zf.chain(rows(), lagging(lr=lambda step: 0.125 * 0.5**step))
    step = zf.make_step(loss, tx)
    # Of a donated state the memory is written at the end of the graph, that of what a function has kept too.
    fast, state = compiled(zf.make_step(loss, tx, donate=donate)), zf.init(tx, params())
    other = zf.init(tx, params())
    for x in batches(4):
        state, other = step(state, x)[0], fast(other, x)[0]
        assert same_bits(other, state)
    kept = state.transforms["lagging"]["value"]
    assert not torch.equal(kept["w"], state.params["w"]) and kept["w"].abs().sum() > 0


class Looking:
    """A backend that keeps the code of the graphs it is given, and how many tensors of leaves each copies."""

    def __init__(self):
        self.seen, self.copies = [], []

    def __call__(self, graph, inputs):
        self.seen.append(graph.code)
        copies = [node for node in graph.graph.nodes if node.target == "clone"]
        self.copies.append(sum(node.meta["example_value"].ndim > 0 for node in copies))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def calls(self, operator="zerofn.update_"):
        """How often the last graph calls the operator."""
        return self.seen[-1].count(operator)


def low_precision(rate=0.1, rounding="stochastic", **numbers):
    return zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(rate, rounding=rounding, **numbers))


def same_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True))


@needs_compiler
@pytest.mark.parametrize(
    "rounding", ["stochastic", *(pytest.param(x, marks=pytest.mark.slow) for x in ("kahan", "nearest"))]
)
def test_the_kernel_stands_in_the_graph_as_an_operator_with_its_own_bits(rounding):
    rate, look = torch.tensor(0.1), Looking()
    tx = low_precision(rate, rounding, betas=(0.99, 0.999), weight_decay=0.1)
    step = zf.make_step(loss, tx)
    fast = torch.compile(step, fullgraph=True, backend=look)
    # One leaf has had an update more than the other: both are in the one call.
    start, _ = zf.update(tx, {"w": torch.ones(4, 3, dtype=BF16), "b": None}, zf.init(tx, params()))
    state = other = start
    before = [x.clone() for x in tree_leaves(start)]
    for i, x in enumerate(batches(3)):
        rate.fill_(0.1 / (i + 1))
        state, other = step(state, x)[0], fast(other, x)[0]
        assert same_bits(other, state)
    assert look.calls() == 1
    assert same_bits(tree_leaves(start), before)


@needs_compiler
def test_a_donated_state_is_written_by_the_operator_only_where_it_is_not_held():
    rate = lambda step: 0.1 * 0.9**step  # noqa: E731
    tx = zf.chain(zf.precision(store_dtype=BF16), zf.accumulate(2), zf.low_precision_adam(rate))
    look, step = Looking(), zf.make_step(loss, tx)
    fast = torch.compile(zf.make_step(loss, tx, donate=True), fullgraph=True, backend=look)
    want, state = zf.init(tx, params()), zf.init(tx, params())
    memory = {p: x.data_ptr() for p, x in state.leaves.items()}
    for x in batches(5):
        want, state = step(want, x)[0], fast(state, x)[0]
        assert same_bits(state, want)
    assert memory == {p: x.data_ptr() for p, x in state.leaves.items()}
    assert look.calls() == 1


@pytest.fixture
def ten_are_many(monkeypatch):
    """Steps of fewer leaves compile sooner."""
    monkeypatch.setattr(_fused_adam, "MANY", 10)


def many(dtype=torch.float32):
    return {f"{i:02}": torch.full((4, i % 4), 0.1 * i, dtype=dtype) for i in range(10)}


def loss_of_many(p, x):
    return sum((x @ w - 1).square().sum() for w in p.values())


# Parameters and both moments; of a hold the sums as well, and they are written at the end of the graph. Where the state
# is written the loss too, which may be an element of it.
COPIES = {(True, False): 0, (False, False): 30, (False, True): 30, (True, True): 30}


@pytest.mark.slow
@pytest.mark.parametrize("donate, holds", COPIES)
def test_in_a_graph_the_kernel_writes_a_donated_state_where_nothing_is_chosen_after_it(ten_are_many, donate, holds):
    look, tx = Looking(), zf.chain(*[zf.accumulate(2)] * holds, zf.adamw(0.1))
    fast = torch.compile(zf.make_step(loss_of_many, tx, donate=donate), fullgraph=True, backend=look)
    fast(zf.init(tx, many()), batches(1)[0])
    assert look.copies[-1] == COPIES[donate, holds]


@pytest.mark.parametrize("holds", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "make", [zf.adamw, pytest.param(zf.adam, marks=pytest.mark.slow)], ids=lambda make: make.__name__
)
def test_many_leaves_are_updated_by_the_fused_kernel_with_its_own_bits(ten_are_many, make, holds):
    rate, look = torch.tensor(0.1), Looking()
    tx = zf.chain(*[zf.accumulate(2)] * holds, make(rate, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.1))
    step = zf.make_step(loss_of_many, tx)
    fast = torch.compile(zf.make_step(loss_of_many, tx, donate=True), fullgraph=True, backend=look)
    # Half of the leaves have had an update more than the others: all are in the one call.
    grads = {p: torch.ones_like(x) if int(p) % 2 else None for p, x in many().items()}
    want = zf.init(tx, many())
    for _ in range(2):
        want, _ = zf.update(tx, grads, want)
    state = tree_map(torch.clone, want)
    memory = {p: x.data_ptr() for p, x in state.leaves.items()}
    for i, x in enumerate(batches(4)):
        rate.fill_(0.1 / (i + 1))
        want, state = step(want, x)[0], fast(state, x)[0]
        assert same_bits(state, want)
    assert look.calls("zerofn.fused_adam_") == 1
    assert look.copies[-1] == COPIES[True, holds]
    assert memory == {p: x.data_ptr() for p, x in state.leaves.items()}


@pytest.mark.slow
@needs_compiler
def test_gradients_that_are_parameters_are_read_before_they_are_written_in_a_graph():
    names = [f"{i:02}" for i in range(32)]

    def loss(p, x):
        return sum(Dot.apply(p[a], p[b]) for a, b in zip(names[::2], names[1::2], strict=True))

    tx = zf.adamw(0.1)
    step, fast = zf.make_step(loss, tx), compiled(zf.make_step(loss, tx, donate=True))
    want, state = (zf.init(tx, {name: torch.arange(1.0, 5.0) * int(name) for name in names}) for _ in range(2))
    for _ in range(3):
        want, state = step(want, torch.ones(1))[0], fast(state, torch.ones(1))[0]
        assert same_bits(state, want)


def test_the_operator_of_many_leaves_keeps_the_rules_of_torch():
    tensors = [[torch.rand(3, i) + 1 for i in (2, 3)] for _ in range(4)]
    steps, numbers = torch.tensor([1, 4]), torch.tensor([0.1, 0.9, 0.99, 1e-8, 0.1], dtype=torch.float64)
    operator = torch.ops.zerofn.fused_adam_.default
    torch.library.opcheck(operator, (*tensors, steps, numbers, True), test_utils=("test_schema", "test_faketensor"))
    # A backward that has saved one of them must notice.
    before = [x._version for xs in tensors for x in xs]
    operator(*tensors, steps, numbers, True)
    written = [x._version > old for x, old in zip((x for xs in tensors for x in xs), before, strict=True)]
    assert written == [True, True, False, False, True, True, True, True]


@pytest.mark.slow
def test_many_leaves_have_the_formula_where_derivatives_are_recorded(ten_are_many):
    look, step = Looking(), zf.make_step(loss_of_many, zf.adamw(0.1, eps=1e-3))
    (x,) = batches(1).double()
    state = zf.init(zf.adamw(0.1, eps=1e-3), many(torch.float64))

    def slope(state, x):
        return torch.func.grad(lambda x: step(state, x)[0].leaves["09"].square().sum())(x)

    found = torch.compile(slope, fullgraph=True, backend=look)(state, x)
    assert look.calls("zerofn.fused_adam_") == 0
    # The derivative of the formula, and by hand: the same terms in another order.
    torch.testing.assert_close(found, slope(state, x), rtol=1e-12, atol=1e-12)


RECORDED = {
    "grad": lambda step, state, x: torch.func.grad(lambda x: total(step(state, x)))(x),
    "state": lambda step, state, x: total(step(state, x)),
}


def total(out):
    return out[0].leaves["w"].float().square().sum()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("how", ["state", pytest.param("grad", marks=pytest.mark.slow)])
def test_where_derivatives_are_recorded_the_graph_has_the_formula(how):
    # Of a first step of Adam's the derivative by the batch is that of its sign, but for `eps`.
    tx, look = low_precision(eps=1e-2), Looking()
    step, state, (x,) = zf.make_step(loss, tx), zf.init(tx, params()), batches(1)
    if how == "state":
        state.leaves["w"].requires_grad_()
    fn = RECORDED[how]
    anew = torch._dynamo.config.patch(error_on_recompile=False)  # of torch.func.grad, for another function
    with anew:
        got = torch.compile(lambda x: fn(step, state, x), fullgraph=True, backend=look)(x)
    want = fn(step, state, x)
    assert look.calls() == 0 and (how == "state" or want.abs().max() > 0.1)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    if how == "state":
        for out in (got, want):
            (found,) = torch.autograd.grad(out, state.leaves["w"])
            assert found.abs().max() > 0.1


@pytest.mark.slow
def test_without_a_compiler_for_c_the_graph_has_the_formula(monkeypatch, fresh_kernels):
    monkeypatch.setenv("ZEROFN_NATIVE", "0")
    # Of the second rate that it meets at a place in the code, the compiler makes an argument of the graph.
    for rate in (0.1, 0.3):
        tx, look = low_precision(rate), Looking()
        step, state = zf.make_step(loss, tx), zf.init(tx, params())
        got, _ = torch.compile(step, fullgraph=True, backend=look)(state, batches(1)[0])
        assert look.calls() == 0
        assert same_bits(got, step(state, batches(1)[0])[0])


@pytest.mark.slow
def test_leaves_that_have_had_other_numbers_of_updates_have_corrections_of_their_own():
    for tx in (zf.adamw(torch.tensor(0.1)), zf.chain(zf.scale_by_adam(), zf.clip_by_value(2.0), zf.scale_by_lr(0.1))):
        step, state = zf.make_step(loss, tx), zf.init(tx, params())
        for _ in range(2):
            state, _ = zf.update(tx, {"w": torch.ones(4, 3), "b": None}, state)
        want, got = (fn(state, batches(1)[0])[0] for fn in (step, compiled(step)))
        torch.testing.assert_close(got.params, want.params, rtol=0, atol=3e-7)
        # With the corrections of the other leaf, by what the first update is larger than the third.
        assert (want.leaves["b"] - state.leaves["b"]).abs().max() > 0.09


@pytest.mark.slow
def test_a_rate_and_a_batch_that_require_grad_keep_no_graph_where_none_is_asked_for():
    """As uncompiled: the state of each step would hold all the steps before it."""
    rate, x = torch.tensor(0.1, requires_grad=True), torch.ones(3, requires_grad=True)
    for tx in (zf.sgd(rate), zf.adamw(rate)):
        for create_graph in (False, True):
            step = zf.make_step(lambda p, x: (p["w"] * x).square().sum(), tx, create_graph=create_graph)
            new, metrics = torch.compile(step, fullgraph=True, backend="aot_eager")(
                zf.init(tx, {"w": torch.ones(3)}), x
            )
            kept = bool(create_graph)
            assert (new.params["w"].requires_grad, metrics["loss"].requires_grad) == (kept, kept)


@pytest.mark.slow
def test_a_donated_state_keeps_its_memory():
    tx = zf.chain(zf.accumulate(2), zf.clip_by_global_norm(0.5), zf.adamw(0.1))
    step, fast = zf.make_step(loss, tx), compiled(zf.make_step(loss, tx, donate=True))
    want, state = zf.init(tx, params()), zf.init(tx, params())
    memory = {p: x.data_ptr() for p, x in state.leaves.items()}
    for x in batches(4):
        want, _ = step(want, x)
        state, _ = fast(state, x)
        torch.testing.assert_close(state.params, want.params, rtol=0, atol=2 * 3e-7)
    assert memory == {p: x.data_ptr() for p, x in state.leaves.items()}


@pytest.mark.slow
def test_transforms_of_torch_func_inside_of_a_graph():
    tx = zf.chain(zf.clip_by_global_norm(0.5), zf.sgd(0.1))
    step, state, (x,) = zf.make_step(loss, tx), zf.init(tx, params()), batches(1)
    after = torch.func.grad(lambda x: step(state, x)[0].leaves["w"].square().sum())
    torch.testing.assert_close(compiled(after)(x), after(x))
    assert after(x).abs().max() > 1e-4
    many = tree_map(lambda *leaves: torch.stack(leaves), *(zf.init(tx, params(seed=s)) for s in range(3)))
    together = torch.vmap(step, (0, None))
    torch.testing.assert_close(compiled(together)(many, x)[0].params, together(many, x)[0].params)
    donated = zf.make_step(loss, tx, donate=True)
    anew = torch._dynamo.config.patch(error_on_recompile=False)  # of torch.func.grad, for another function
    with anew, pytest.raises(Exception, match="a step that writes into its state"):
        compiled(torch.func.grad(lambda x: donated(state, x)[0].leaves["w"].sum()))(x)


@optree.dataclasses.dataclass(namespace="zerofn")
class Weights:
    w: torch.Tensor


@optree.dataclasses.dataclass(namespace="zerofn")
class Registered(Weights):
    """Registered with torch as well."""


torch.utils._pytree.register_dataclass(Registered)


@pytest.mark.parametrize(
    "kind, whole", [(Weights, False), pytest.param(Registered, False, marks=pytest.mark.slow), (Registered, True)]
)
def test_a_step_of_parameters_in_a_dataclass_keeps_no_graph_from_step_to_step(kind, whole):
    """It kept those of all steps before where the compiler gave it up: a function of it was compiled by itself."""
    tx = zf.adamw(0.1)
    step = zf.make_step(lambda p: (p.w**2).sum(), tx)
    compiled = torch.compile(step, backend="eager", fullgraph=whole)
    ours = theirs = zf.init(tx, kind(torch.arange(1.0, 4.0)))
    for _ in range(4):
        ours, metrics = compiled(ours)
        theirs, expected = step(theirs)
        assert not ours.params.w.requires_grad and not metrics["loss"].requires_grad
        torch.testing.assert_close(ours.params.w, theirs.params.w, rtol=1e-6, atol=0)
        torch.testing.assert_close(metrics["loss"], expected["loss"], rtol=1e-6, atol=0)


def test_a_container_that_the_compiler_cannot_read_is_refused_in_one_graph():
    tx = zf.sgd(0.1)
    step = torch.compile(zf.make_step(lambda p: (p.w**2).sum(), tx), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"register_dataclass\(Weights\)"):
        step(zf.init(tx, Weights(torch.ones(2))))
