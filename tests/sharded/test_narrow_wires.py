"""Wires of 8 bits: within their bound, right on average, the same on all ranks and by both routes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import Refusals
from time_limits import limit
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import zerofn as zf
from zerofn.extend import CodedSharding, Group, Leaf

BLOCK = 128


def leaf(path, shape):
    return Leaf(path, torch.Size(shape), torch.float32, True)


def ranges(shape, size):
    """Each rank's rows of a leaf, as a flat range: torch's own chunks."""
    rows, row = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    each = -(-rows // size)
    return [(min(r * each, rows) * row, min((r + 1) * each, rows) * row) for r in range(size)]


def bound(grads, low, high):
    """Of each element of a range: the sum over ranks of a 127th of its block's largest magnitude, over the ranks."""
    found = torch.zeros(high - low, dtype=torch.float64)
    for g in grads:
        for i in range(low, high, BLOCK):
            block = g[i : min(i + BLOCK, high)].double().abs()
            found[i - low : i - low + len(block)] += block.max() / 127
    return found / len(grads)


def reduced(grads, leaves, size):
    """Of each rank and leaf what the wire leaves there; `grads` by rank and leaf, or `None`. All ranks are played."""
    wires = [CodedSharding(Group(rank, size)) for rank in range(size)]
    numels = [x.numel for x in leaves]
    sent = [w.pack(gs, leaves, numels, torch.float32, torch.device("cpu")) for w, gs in zip(wires, grads, strict=True)]
    return [
        w.unpack(torch.stack([message[r] for message in sent]), leaves, numels, [g is not None for g in grads[r]])
        for r, w in enumerate(wires)
    ]


SHAPES = st.sampled_from([(), (1,), (7,), (0, 3), (5, 3), (3, 200), (300,), (2, 128), (9, 64)])


@settings(max_examples=40, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(2, 5), st.integers(0, 2**20), st.integers(-25, 25))
def test_the_sum_of_codes_is_within_its_bound(shapes, size, seed, exponent):
    torch.manual_seed(seed)
    leaves = [leaf(str(i), shape) for i, shape in enumerate(shapes)]
    grads = [
        [
            None if torch.rand(()) < 0.2 else torch.randn(x.numel) * torch.rand(x.numel) ** 4 * 10.0**exponent
            for x in leaves
        ]
        for _ in range(size)
    ]
    found = reduced(grads, leaves, size)
    # A leaf that travels with others is as one that travels alone.
    alone = [reduced([[gs[j]] for gs in grads], [x], size) for j, x in enumerate(leaves)]
    for j, x in enumerate(leaves):
        mine = [gs[j] for gs in grads]
        if all(g is None for g in mine):
            assert all(one[j] is None for one in found)
            continue
        full = [torch.zeros(x.numel) if g is None else g for g in mine]
        mean = torch.stack(full).double().mean(0)
        for rank, (low, high) in enumerate(ranges(x.shape, size)):
            got = found[rank][j]
            assert torch.equal(got, alone[j][rank][0])
            most = bound(full, low, high)
            # Divisions and sums in fp32 add some last bits of the largest number.
            assert ((got.double() - mean[low:high]).abs() <= most * (1 + 1e-3)).all()


def test_codes_are_right_on_average():
    torch.manual_seed(0)
    x, draws, one = torch.randn(2048) * torch.rand(2048) ** 4, 3000, leaf("w", (4, 512))
    # Each rank rounds by random bits of its own.
    found = sum(CodedSharding(Group(rank, 2)).rounded(x, one).double() for rank in range(draws))
    # Hoeffding: of numbers within a step the mean of n is off by t steps with a probability below 2 exp(-2 n t^2).
    t = math.sqrt(math.log(2 * x.numel() / 1e-9) / 2 / draws)
    assert t < 0.07 and ((found / draws - x.double()).abs() <= t * bound([x], 0, x.numel())).all()


class Model(torch.nn.Module):
    """Leaves of more and of fewer elements than a block, that ranks cannot halve."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(40, 133), torch.nn.Linear(133, 7)])
        self.gain = torch.nn.Parameter(torch.tensor(0.8))

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x))) * self.gain


def data(step, rank):
    torch.manual_seed(100 * step + rank)
    return torch.randn(8, 40), torch.randn(8, 7)


def loss_of(model, x, y):
    return (model(x.to(model.gain.dtype)).float() - y).square().mean()


BF16 = torch.bfloat16
SMALL = 1 << 10
STAGES = {
    "ZeRO-1": lambda mesh: [zf.accumulate(2), zf.reduce_scatter(wire="int8")],
    "ZeRO-2": lambda mesh: [zf.reduce_scatter(wire="int8"), zf.accumulate(2)],
    "ZeRO-2 in bf16": lambda mesh: [zf.reduce_scatter(wire="int8"), zf.precision(param_dtype=BF16), zf.accumulate(2)],
    "ZeRO-3": lambda mesh: [zf.shard(reduce_wire="int8"), zf.accumulate(2)],
    "ZeRO-3 in bf16": lambda mesh: [zf.shard(reduce_wire="int8"), zf.precision(param_dtype=BF16), zf.accumulate(2)],
    "two axes": lambda mesh: [zf.shard(mesh["in"]), zf.accumulate(2), zf.reduce_scatter(mesh["out"], wire="int8")],
}


def exact_gradients(size, dtype):
    """Of each rank the mean gradient over two micro-steps, by torch alone."""
    found = []
    for rank in range(size):
        model = Model().to(dtype)
        for step in range(2):
            (loss_of(model, *data(step, rank)) / 2).backward()
        found.append({k: p.grad.float() for k, p in model.named_parameters()})
    return found


def updated(tx, route):
    """Parameters after one window."""
    rank, model = torch.distributed.get_rank(), Model()
    if route == "eager":
        opt = zf.attach(model, tx)
        for step in range(2):
            loss_of(model, *data(step, rank)).backward()
            opt.step()
            opt.zero_grad()
        return {k: p.detach().clone() for k, p in opt.detach().named_parameters()}
    state = zf.init(tx, dict(model.named_parameters()))

    def loss(p, x, y):
        return (functional_call(model, p, (x.to(p["gain"].dtype),)).float() - y).square().mean()

    step = zf.make_step(loss, tx)
    for i in range(2):
        state, _ = step(state, *data(i, rank))
    return {k: x.clone() for k, x in zf.full_params(tx, state).items()}


def one_window(stages):
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("out", "in")) if "two axes" in stages else None
    return {
        (stage, route): updated(zf.chain(*STAGES[stage](mesh), zf.sgd(1.0)), route)
        for stage in stages
        for route in ("eager", "pure")
    }


@pytest.mark.parametrize(
    ("size", "stages"),
    [
        (2, ["ZeRO-1", "ZeRO-2 in bf16", "ZeRO-3"]),
        pytest.param(4, list(STAGES), marks=pytest.mark.slow),
    ],
)
def test_placement_changes_gradients_within_the_bound(size, stages):
    ranks = zf.launch(one_window, size, stages, timeout=limit())
    start = {k: p.detach() for k, p in Model().named_parameters()}
    for stage in stages:
        low_precision = stage.endswith("bf16")
        grads = exact_gradients(size, BF16 if low_precision else torch.float32)
        mean = {k: torch.stack([g[k] for g in grads]).double().mean(0) for k in start}
        for k, p in start.items():
            got = ranks[0][stage, "eager"][k]
            for other in ranks:
                assert torch.equal(got, other[stage, "eager"][k]) and torch.equal(got, other[stage, "pure"][k]), (
                    stage,
                    k,
                )
            # A block's largest magnitude is at most the leaf's; of two micro-steps each was rounded.
            most = 2 * sum(float(g[k].abs().max()) for g in grads) / size / 127 + (
                2e-2 * float(mean[k].abs().max()) if low_precision else 1e-6
            )
            off = (p.double() - got.double() - mean[k]).abs().max()
            assert off <= most, (stage, k, off, most)
            # And rounded it was.
            assert low_precision or p.numel() < SMALL or off > 1e-6


def seen_weights(wire):
    """The weight that each route's model computes with, what is stored of it, and both after a step with rate 0."""
    torch.manual_seed(0)
    rank, found, x = torch.distributed.get_rank(), {}, torch.eye(150)
    layer = torch.nn.Sequential(torch.nn.Linear(150, 33, bias=False))
    tx = zf.chain(zf.shard(wire=wire), zf.sgd(0.0))
    params = {k: p.detach().clone() for k, p in layer.named_parameters()}
    state = zf.init(tx, params)
    found["pure"] = zf.bind(lambda p: x @ p["0.weight"].T, tx, state)(state.params).T
    _, metrics = zf.make_step(lambda p: (x @ p["0.weight"].T).sum(), tx)(state)
    found["loss"] = metrics["loss"]
    batch = torch.func.vmap(zf.bind(lambda p: p["0.weight"], tx, state))
    found["batch"] = batch({"0.weight": torch.stack([state.params["0.weight"]] * 2)})[1]
    opt = zf.attach(layer, tx)
    y = layer(x)
    found["eager"] = y.detach().T
    y.sum().backward()
    found["gradient"] = layer[0].weight.grad.full_tensor()
    opt.step()
    if rank == 0:
        with torch.no_grad():
            found["alone"] = layer(x).T
    opt.zero_grad()
    outside = {"face": layer[0].weight.detach() * 1.0, "state dict": layer.state_dict()["0.weight"]}
    found |= {k: x.full_tensor() for k, x in outside.items()}
    with opt.gathered():
        found["gathered"] = layer[0].weight.detach().clone()
    found["params"] = zf.full_params(tx, state)["0.weight"]
    return {k: x.detach().clone() for k, x in found.items()}, params["0.weight"]


def weights_by_wire():
    return {wire: seen_weights(wire) for wire in ("fp8", "int8")}


def test_the_model_sees_weights_that_are_rounded_once_and_nobody_else_does():
    first, second = zf.launch(weights_by_wire, 2, timeout=limit())
    for wire, (found, exact) in first.items():
        w = found["pure"]
        for name in ("eager", "batch", "alone"):
            assert torch.equal(found[name], w), name
        assert torch.equal(second[wire][0]["eager"], w) and float(found["loss"]) == pytest.approx(
            float(w.sum()), rel=1e-5
        )
        for name in ("face", "state dict", "gathered", "params"):
            assert torch.equal(found[name], exact), name
        assert torch.equal(found["gradient"], torch.ones(33, 150))
        # Of 33 rows ranks have 17 and 16.
        most = torch.cat([bound([exact.reshape(-1)], *span) for span in ranges(exact.shape, 2)]).view(33, 150)
        off = (w - exact).abs()
        assert (
            off <= (most / 2 if wire == "int8" else (exact.abs() / 16).maximum(most * 127 / 450_000)) * 1.0001
        ).all()
        assert off.max() > 1e-4


class Linear(torch.nn.Module):
    """A loss whose gradient is what it is given."""

    def __init__(self):
        super().__init__()
        self.w, self.b = torch.nn.Parameter(torch.zeros(41, 30)), torch.nn.Parameter(torch.zeros(7))

    def forward(self, grads):
        return sum((p * grads[k]).sum() for k, p in self.named_parameters())


WINDOWS = 20


def given_gradients(step, rank):
    torch.manual_seed(50 * step + rank)
    return {k: torch.randn(p.shape) * torch.rand(p.shape) for k, p in Linear().named_parameters()}


def with_errors(feedback, route, axes, directory):
    """Parameters after windows of steps of size 1, of which the third has an infinity; what of the errors is finite."""
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("out", "in")) if axes else {"out": None}
    reduction = zf.reduce_scatter(mesh["out"], wire="int8", error_feedback=feedback)
    first = [zf.shard(mesh["in"])] if axes else []
    tx = zf.chain(*first, zf.accumulate(2), reduction, zf.skip_nonfinite(), zf.sgd(1.0))
    model, opt = Linear(), None
    state = zf.init(tx, dict(model.named_parameters()))
    step = zf.make_step(lambda p, grads: functional_call(model, p, (grads,)), tx)
    if route == "eager":
        opt = zf.attach(model, tx)
    for i in range(2 * WINDOWS):
        grads = given_gradients(i, rank)
        if i == 5:
            grads["w"][3, 3] = torch.inf
        if opt is not None:
            model(grads).backward()
            opt.step()
            opt.zero_grad()
        else:
            state, _ = step(state, grads)
            if i == WINDOWS:
                # In the middle of a window.
                zf.save(directory, state)
                state = zf.load(directory, like=zf.init(tx, dict(model.named_parameters())))
    state = state if opt is None else opt.state
    own = state.transforms["reduce_scatter"]
    finite = not feedback or (int(own["coded"]) == WINDOWS and all(x.isfinite().all() for x in own["error"].values()))
    found = zf.full_params(tx, state) if opt is None else {k: p.detach() for k, p in opt.detach().named_parameters()}
    return finite, {k: x.clone() for k, x in found.items()}


def errors_over_ranks(cells, axes, directory):
    return {cell: with_errors(*cell, axes, f"{directory}/{cell[0]}") for cell in cells}


def elsewhere(directory):
    tx = zf.chain(
        zf.accumulate(2), zf.reduce_scatter(wire="int8", error_feedback=True), zf.skip_nonfinite(), zf.sgd(1.0)
    )
    zf.load(directory, like=zf.init(tx, dict(Linear().named_parameters())))


@pytest.mark.parametrize(("size", "axes"), [(2, False), pytest.param(4, True, marks=pytest.mark.slow)])
def test_with_their_errors_a_sum_of_gradients_is_as_exact_as_one(size, axes, tmp_path):
    cells = [(True, "pure"), (True, "eager"), (False, "pure")]
    ranks = zf.launch(errors_over_ranks, size, cells, axes, str(tmp_path), timeout=limit())
    for k, p in Linear().named_parameters():
        windows = [
            torch.stack([given_gradients(i, r)[k].double() for i in (2 * j, 2 * j + 1) for r in range(size)]).mean(0)
            for j in range(WINDOWS)
        ]
        kept = [j for j in range(WINDOWS) if j != 2]
        want = torch.stack([windows[j] for j in kept]).sum(0)
        got = {cell: ranks[0][cell][1][k] for cell in cells}
        for other in ranks:
            assert all(other[cell][0] and torch.equal(other[cell][1][k], got[cell]) for cell in cells)
        assert torch.equal(got[True, "pure"], got[True, "eager"])
        # Of gradients below 5 the codes are less than 5 / 127 apart. A skipped step loses the errors that it sent.
        off = {feedback: (got[feedback, "pure"].double() + want).abs() for feedback in (True, False)}
        assert off[True].max() <= 2 * 5 / 127, (k, off[True].max())
        assert p.numel() < SMALL or off[True].square().mean() < off[False].square().mean() / 4
    if not axes:
        with pytest.raises(ValueError, match="own sum, or error, of gradients in accumulate, reduce_scatter"):
            elsewhere(f"{tmp_path}/True")


GRAPHS = {
    "gradients": lambda: zf.reduce_scatter(wire="int8"),
    "both": lambda: zf.shard(wire="fp8", reduce_wire="int8"),
}


def in_graphs():
    """By chain, parameters after a step and after one that is one graph; the gradient of a model that is one."""
    rank, found = torch.distributed.get_rank(), {}
    x, y = data(0, rank)
    for name, first in GRAPHS.items():
        tx, model = zf.chain(first(), zf.sgd(1.0)), Model()

        def loss(p, x, y, model=model):
            return (functional_call(model, p, (x,)) - y).square().mean()

        step = zf.make_step(loss, tx)
        params = dict(model.named_parameters())
        for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            found.setdefault(name, []).append(dict(zf.full_params(tx, run(zf.init(tx, params), x, y)[0])))
        opt = zf.attach(model, tx)
        loss_of(torch.compile(model, fullgraph=True, backend="aot_eager"), x, y).backward()
        opt.step()
        found[name].append({k: p.detach().clone() for k, p in opt.detach().named_parameters()})
    return found


@pytest.mark.slow
def test_graphs_send_the_same_codes():
    for found in zf.launch(in_graphs, 2, timeout=limit()):
        for name, runs in found.items():
            for other in runs[1:]:
                assert all(torch.equal(x, other[k]) for k, x in runs[0].items()), name


ROWS = Refusals()
ROWS.rows(
    ValueError,
    (lambda: zf.reduce_scatter(wire="int4"), "wire is one of 'int8', or None: numbers as they are"),
    (lambda: zf.reduce_scatter(wire="fp8"), "wire is one of 'int8', or None: numbers as they are"),
    (lambda: zf.shard(wire=torch.bfloat16), "wire is one of 'fp8', 'int8', or None: numbers as they are"),
    (lambda: zf.reduce_scatter(error_feedback=True), "without a wire nothing is rounded"),
    (
        lambda: zf.init(
            zf.chain(zf.reduce_scatter(wire="int8", error_feedback=True), zf.sgd(0.1)), {"w": torch.ones(2)}
        ),
        "write: chain(accumulate(2), reduce_scatter(wire='int8', error_feedback=True), ...)",
    ),
    (
        lambda: zf.init(
            zf.chain(zf.reduce_scatter(wire="int8", error_feedback=True), zf.accumulate(2), zf.sgd(0.1)),
            {"w": torch.ones(2)},
        ),
        "here backward reduces them",
    ),
    (lambda: zf.shard(reduce_wire="fp8"), "reduce_wire is one of 'int8', or None: numbers as they are"),
    (
        lambda: zf.init(
            zf.chain(zf.reduce_scatter(wire="int8"), zf.precision(reduce_dtype=BF16), zf.sgd(0.1)),
            {"w": torch.ones(2)},
        ),
        "the wire of reduce_scatter sums in torch.float32, so the other dtype would have no effect",
    ),
)


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()


class Clamps(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(-1, 1, 300))

    def forward(self, x):
        with torch.no_grad():
            self.w.clamp_(-0.5, 0.5)
        return x * self.w


def written():
    model = torch.nn.Sequential(Clamps())
    opt = zf.attach(model, zf.chain(zf.shard(wire="int8"), zf.sgd(0.1)))
    try:
        model(torch.ones(300)).sum().backward()
        opt.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_write_of_forward_into_rounded_parameters_is_refused():
    for found in zf.launch(written, 2, timeout=limit()):
        assert "the model wrote into parameters in its forward" in found and "0.w: " in found, found
