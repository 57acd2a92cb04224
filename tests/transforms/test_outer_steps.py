"""`every`: local updates and outer ones, on the stages of ZeRO inside of each group, against a loop in float64."""

import itertools
import re

import pytest
import torch
from models import Regression, regression_batch
from refusals import Refusals
from time_limits import limit
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call

import zerofn as zf

F64, LR, H = torch.float64, 0.1, 3
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def by_hand(updates, window, groups):
    """By torch.optim alone; `groups` has the ranks of each local group."""
    start, anchor = Regression(), Regression()
    outer = torch.optim.SGD(anchor.parameters(), **OUTER)
    locals_ = [Regression() for _ in groups]
    inner = [torch.optim.Adam(m.parameters(), lr=LR) for m in locals_]
    for t in range(updates):
        for model, opt, ranks in zip(locals_, inner, groups, strict=True):
            opt.zero_grad()
            for i in range(window):
                for r in ranks:
                    x, y = regression_batch(t * window + i, r)
                    ((model(x) - y).square().mean() / len(ranks) / window).backward()
            opt.step()
        if t % H == H - 1:
            for p, *others in zip(anchor.parameters(), *[m.parameters() for m in locals_], strict=True):
                p.grad = sum(p.detach() - x.detach() for x in others) / len(groups)
            outer.step()
            for model in locals_:
                model.load_state_dict(anchor.state_dict())
    assert any((a - b).abs().max() > 0.05 for a, b in zip(anchor.parameters(), start.parameters(), strict=True))
    return [dict(m.state_dict()) for m in locals_]


def pipeline(stage, shape, window=1):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("apart", "together")) if shape != (1, 1) else None
    within = None if mesh is None else mesh["together"]
    front = {
        "local": [],
        "ZeRO-3": [zf.shard(within)],
        "ZeRO-2": [zf.reduce_scatter(within)],
        "data": [zf.all_reduce(within)],
    }
    first = [zf.local()] if stage == "local" else front[stage]
    held = [zf.accumulate(window)] if window > 1 else []
    apart = None if mesh is None else mesh["apart"]
    return zf.chain(*first, *held, zf.adam(LR), zf.every(H, zf.sgd(**OUTER), apart))


def trained(stage, route, shape, window, rank, directory=None):
    model, tx = Regression(), pipeline(stage, shape, window)
    steps = 7 * window
    if route == "eager":
        opt = zf.attach(model, tx)
        for t in range(steps):
            x, y = regression_batch(t, rank)
            (model(x) - y).square().mean().backward()
            opt.step()
            opt.zero_grad()
        return {k: p.detach().clone() for k, p in opt.detach().named_parameters()}
    state = zf.init(tx, {k: p.detach() for k, p in model.named_parameters()})
    donate = route == "donated"
    step = zf.make_step(lambda p, x, y: (functional_call(model, p, (x,)) - y).square().mean(), tx, donate=donate)
    for t in range(steps):
        state, _ = step(state, *regression_batch(t, rank))
        if directory is not None and t == steps // 2:
            # A state for each group, in the middle of a window of local updates.
            where = f"{directory}/{rank // shape[1]}"
            zf.save(where, state)
            state = zf.load(where, like=zf.init(tx, {k: p.detach() for k, p in model.named_parameters()}))
    return {k: x.clone() for k, x in zf.full_params(tx, state).items()}


def on_a_rank(cells, directory):
    rank = torch.distributed.get_rank()
    return [trained(*cell, rank, f"{directory}/{i}" if cell[1] == "pure" else None) for i, cell in enumerate(cells)]


ROUTES = ("pure", "donated", "eager")
ON_TWO = [("local", route, (2, 1), window) for route, window in zip(ROUTES, (1, 1, 2), strict=True)]
ON_FOUR = [(stage, route, (2, 2), 1) for stage in ("ZeRO-3", "ZeRO-2", "data") for route in ROUTES]


@pytest.mark.parametrize(
    ("cells", "size"), [(ON_TWO, 2), pytest.param(ON_FOUR, 4, marks=pytest.mark.slow)], ids=["2 groups", "2 of 2"]
)
def test_groups_are_the_formula(cells, size, tmp_path):
    found = zf.launch(on_a_rank, size, cells, str(tmp_path), timeout=limit(120))
    wrong = []
    for i, cell in enumerate(cells):
        apart, together = cell[2]
        groups = [list(range(g * together, (g + 1) * together)) for g in range(apart)]
        want = by_hand(7, cell[3], groups)
        worst = [
            max(float((x[i][k] - want[r // together][k]).abs().max()) for k in want[0]) for r, x in enumerate(found)
        ]
        wrong += [(cell, worst)] if not max(worst) < 1e-9 else []
    assert not wrong


@pytest.mark.parametrize("route", ROUTES)
def test_one_process_is_the_formula(route):
    want = by_hand(7, 1, [[0]])[0]
    found = trained("local", route, (1, 1), 1, 0)
    for k, x in found.items():
        torch.testing.assert_close(x, want[k], rtol=0, atol=1e-12)


def test_without_an_outer_step_there_are_local_ones_alone():
    """A run that is shorter than `h`: the same bits, and the copy of the parameters is that of the start."""
    ends = []
    for tx in (zf.adam(LR), zf.chain(zf.adam(LR), zf.every(1000, zf.sgd(0.7)))):
        state = zf.init(tx, {"w": torch.ones(5)})
        for _ in range(3):
            state, _ = zf.update(tx, {"w": torch.arange(5.0)}, state)
        ends.append(state)
    assert torch.equal(ends[0].params["w"], ends[1].params["w"])
    assert torch.equal(ends[1].transforms["every"]["anchor"]["w"], torch.ones(5))


def bytes_sent():
    return sum(group.traffic.bytes for group in zf.collectives.opened())


def bytes_by_wire(wires):
    return [bytes_of_updates(wire) for wire in wires]


def bytes_of_updates(wire):
    """The bytes that this rank has sent in each of six updates, and an element of a parameter."""
    tx = zf.chain(zf.local(), zf.sgd(0.1), zf.every(3, zf.sgd(0.7), wire=wire))
    state = zf.init(tx, {"w": torch.zeros(100), "b": torch.zeros(28)})
    factor, total = 1.0 + torch.distributed.get_rank(), [bytes_sent()]
    for _ in range(6):
        state, _ = zf.update(tx, {"w": torch.full((100,), factor), "b": torch.ones(28)}, state)
        total.append(bytes_sent())
    return [after - before for before, after in itertools.pairwise(total)], float(state.params["w"][0])


def test_bytes_are_sent_in_outer_updates_alone():
    wires = (None, torch.bfloat16, "int8")
    for found in zf.launch(bytes_by_wire, 2, wires, timeout=limit(60)):
        for wire, (sent, w) in zip(wires, found, strict=True):
            # An all-reduce between two ranks sends each number once; each leaf travels in whole blocks of 128 codes.
            each = {None: 128 * 4, torch.bfloat16: 128 * 2, "int8": 2 * (128 + 4)}[wire]
            assert sent == [0, 0, each, 0, 0, each]
            # Of the gradients 1 and 2 the mean goes seven tenths of the way, twice.
            assert w == pytest.approx(-2 * 0.7 * 3 * 0.1 * 1.5, rel=1e-6 if wire is None else 2e-2)


def means_of_codes():
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    moved = {"w": torch.randn(3, 200), "b": torch.randn(5), "none": torch.zeros(0, 4), "half": torch.randn(9).half()}
    tx = zf.chain(zf.local(), zf.sgd(1.0), zf.every(1, zf.sgd(1.0), wire="int8"))
    state = zf.init(tx, {path: torch.zeros_like(x) for path, x in moved.items()})
    return moved, zf.update(tx, moved, state)[0].params


def test_differences_as_codes_are_within_their_bound_and_equal_on_all_ranks():
    (a, first), (b, second) = zf.launch(means_of_codes, 2, timeout=limit(60))
    for path, x in a.items():
        assert torch.equal(first[path], second[path])
        mean = (x.double() + b[path].double()) / 2
        # A 127th of the largest magnitude on each rank, and of their mean once more; fp16 adds a 2048th.
        most = (x.abs().sum() and x.abs().max()) / 2 + (x.abs().sum() and b[path].abs().max()) / 2
        assert ((first[path].double() + mean).abs() <= 2 * float(most) / 127 + (1e-3 if path == "half" else 0)).all()
        assert not x.numel() or not torch.equal(first[path], -mean.to(x.dtype)), path


ROWS = Refusals()
ROWS.rows(
    ValueError,
    (lambda: zf.every(2, zf.clip_by_value(1.0)), re.compile(r"every\(2, clip_by_value\(...\)\)")),
    (lambda: zf.every(2, zf.muon()), re.compile(r"every\(2, muon\(...\)\)")),
    (lambda: zf.every(0, zf.sgd(0.1)), re.compile("updates")),
    (lambda: zf.every(2, zf.sgd(0.1), wire="fp8"), re.compile("wire is one of 'int8', or None")),
    (lambda: zf.chain(zf.every(2, zf.sgd(0.1)), zf.sgd(0.1)), re.compile("every")),
    (
        lambda: zf.attach(Regression(), zf.chain(zf.sgd(0.1), zf.every(2, zf.sgd(0.1))), in_backward=True),
        re.compile("every treats the tree as a whole"),
    ),
    (
        lambda: zf.attach(Regression(), zf.chain(zf.sgd(0.1), zf.every(2, zf.sgd(0.1))), capturable=True),
        re.compile("every"),
    ),
)


@ROWS(ValueError, "a step through every(...) in a graph or a batch")
def a_batch_of_states():
    tx = zf.chain(zf.sgd(0.1), zf.every(2, zf.sgd(0.1)))
    one = zf.init(tx, {"w": torch.ones(1)})
    states = zf.init(tx, {"w": torch.ones(1)})
    yield one
    together = torch.utils._pytree.tree_map(lambda x: torch.stack([x, x]), states)
    torch.vmap(lambda s: zf.update(tx, {"w": torch.ones(1)}, s)[0])(together)


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
