"""Where leaves are cut over ranks: transforms that must see the whole tree are refused, and all others are right.

The reference is plain torch in float64 and one process, on the data of all ranks.
"""

import functools
import re

import pytest
import rank_programs as P
import torch
import torchopt
from refusals import Refusals
from time_limits import limit
from torch import nn
from torch.func import functional_call

import zerofn as zf
from zerofn.extend import Transform

SIZE = 2
STEPS = 4
F64 = torch.float64
FRONTS = {
    "none": lambda: (),
    "all_reduce": lambda: (zf.all_reduce(),),
    "accumulate, all_reduce": lambda: (zf.accumulate(2), zf.all_reduce()),
    "reduce_scatter": lambda: (zf.reduce_scatter(),),
    "reduce_scatter, accumulate": lambda: (zf.reduce_scatter(), zf.accumulate(2)),
    "accumulate, reduce_scatter": lambda: (zf.accumulate(2), zf.reduce_scatter()),
    "shard": lambda: (zf.shard(),),
    "shard, accumulate": lambda: (zf.shard(), zf.accumulate(2)),
}
CUT = [name for name in FRONTS if "shard" in name or "scatter" in name]


# ---- transforms, each with its formula on whole tensors ----


def lion_formula(grad, param, state):
    return (0.9 * state + 0.1 * grad).sign() * 0.01 + 0.05 * param, 0.99 * state + 0.01 * grad


def muon_formula(grad, param, state):
    state = 0.9 * state + grad
    if grad.ndim != 2:
        return 0.1 * state, state
    x = state / (state.norm() + 1e-7)
    x = 1.5 * x - 0.5 * (x @ x.mT @ x)
    return 0.1 * x, state


def lars_formula(grad, param, state):
    return 0.1 * grad * param.norm() / (grad.norm() + 1e-6), state


lion = zf.leafwise(lion_formula, init=torch.zeros_like, needs="element")
muon = zf.leafwise(muon_formula, init=torch.zeros_like)
lars = zf.leafwise(lars_formula, init=torch.zeros_like)


@zf.leafwise(optimizer=True, needs="element")
def descent(grad, param, *, lr):
    return param - lr * grad


def row_formula(grad, param, state):
    """Each row by its own norms, of the momentum and of the parameter."""
    state = 0.9 * state + grad
    behind = tuple(range(1, grad.ndim))
    by_row = [x.square().sum(behind, keepdim=True).sqrt() if behind else x.abs() for x in (param, state)]
    return 0.1 * state * by_row[0] / (by_row[1] + 1e-6), state


def tree_formula(grad, param, state):
    update, m = row_formula(grad, param, state["m"])
    return update, {"m": m}


def statistic(param):
    return param.new_zeros(param.shape[:1])


def statistic_formula(grad, param, state):
    """Second moments by row."""
    mean = grad.square().mean(tuple(range(1, grad.ndim))) if grad.ndim > 1 else grad.square()
    state = 0.9 * state + 0.1 * mean
    return 0.1 * grad / (state.reshape(mean.shape + (1,) * (grad.ndim - mean.ndim)).sqrt() + 1e-3), state


def every_step(formula, init=torch.zeros_like):
    """Plain torch: a step on whole tensors by path."""

    def step(params, grads, states):
        for path, p in params.items():
            update, states[path] = formula(grads[path], p, states.get(path, init(p)))
            p -= update

    return step


def by_torchopt(transformation):
    def step(params, grads, states):
        kept = {k: p.clone() for k, p in params.items()}
        if not states:
            # Its momentum remembers in the object itself whether it has been called.
            states["of"] = transformation()
            states["all"] = states["of"].init(kept)
        updates, states["all"] = states["of"].update(grads, states["all"], params=kept, inplace=False)
        for path, p in params.items():
            p += updates[path]

    return step


def adam():
    return torchopt.adam(0.05)


def clipped():
    return torchopt.chain(torchopt.clip.clip_grad_norm(0.1), torchopt.sgd(0.5, momentum=0.9))


ELEMENTWISE = {
    "leafwise": (lambda: (lion(), zf.sgd(1.0)), every_step(lion_formula)),
    "leafwise optimizer": (lambda: (descent(lr=0.3),), every_step(lambda g, p, s: (0.3 * g, s))),
    "in offload": (lambda: (zf.offload(lion()), zf.sgd(1.0)), every_step(lion_formula)),
    "in masked": (lambda: (zf.masked(lion(), lambda path: True), zf.sgd(1.0)), every_step(lion_formula)),
    "guest": (lambda: (zf.guest(adam(), needs="element"),), by_torchopt(adam)),
    "guest in offload": (lambda: (zf.offload(zf.guest(adam(), needs="element")),), by_torchopt(adam)),
}
OF_LEAVES = {
    "muon": (lambda: (muon(), zf.sgd(1.0)), every_step(muon_formula)),
    "lars": (lambda: (lars(), zf.sgd(1.0)), every_step(lars_formula)),
    "muon in offload": (lambda: (zf.offload(muon()), zf.sgd(1.0)), every_step(muon_formula)),
    "lars in masked": (lambda: (zf.masked(lars(), lambda path: True), zf.sgd(1.0)), every_step(lars_formula)),
    "rows": (
        lambda: (zf.leafwise(row_formula, init=torch.zeros_like, needs="row")(), zf.sgd(1.0)),
        every_step(row_formula),
    ),
    "trees of rows": (
        lambda: (zf.leafwise(tree_formula, init=lambda p: {"m": torch.zeros_like(p)}, needs="row")(), zf.sgd(1.0)),
        every_step(row_formula),
    ),
    # A number for each row: at owners.
    "statistics of rows": (
        lambda: (zf.leafwise(statistic_formula, init=statistic)(), zf.sgd(1.0)),
        every_step(statistic_formula, statistic),
    ),
}
OF_TREES = {"guest": (lambda: (clipped(),), by_torchopt(clipped))}
# Nested; what is named in the message.
NESTED = {
    "offload of masked": (
        lambda: (zf.offload(zf.masked(clipped(), lambda path: True)), zf.sgd(1.0)),
        "ChainedGradientTransformation in masked needs the whole tree (needs='tree')",
    ),
    "two": (
        lambda: (muon(), zf.guest(clipped(), needs="leaf"), Transform("by_hand"), zf.sgd(1.0)),
        "needs whole leaves (needs='leaf'), by_hand needs the whole tree",
    ),
    "built by hand": (
        lambda: (Transform("by_hand"), zf.sgd(1.0)),
        "by_hand needs the whole tree (needs='tree')",
    ),
}


# ---- a model whose leaves are cut unevenly, and some not at all ----


class UnevenLeaves(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3)])
        self.gain = nn.Parameter(torch.tensor(0.8))
        self.to(F64)

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x))) * self.gain


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 5, generator=generator, dtype=F64), torch.randn(6, 3, generator=generator, dtype=F64)


def loss_of(model, params, rank, step):
    x, y = batch(rank, step)
    return ((functional_call(model, params, (x,)) - y) ** 2).mean()


def train(front, parts, route, ranks=None, steps=STEPS):
    """The parameters after some micro-steps. `ranks` are those whose data this process has; by default its own."""
    model, tx = UnevenLeaves(), zf.chain(*FRONTS[front](), *parts())
    ranks = [P.rank_and_size()[0]] if ranks is None else ranks
    if route != "pure":
        opt = zf.attach(model, tx, in_backward=route == "in backward")
        for step in range(steps):
            loss = sum(((model(x) - y) ** 2).mean() for x, y in (batch(r, step) for r in ranks)) / len(ranks)
            loss.backward()
            opt.step()
            opt.zero_grad()
        return {n: p.detach().clone() for n, p in opt.detach().named_parameters()}
    params = {n: p.detach() for n, p in model.named_parameters()}
    state = zf.init(tx, params)
    step_fn = zf.make_step(lambda p, step: sum(loss_of(model, p, r, int(step)) for r in ranks) / len(ranks), tx)
    for step in range(steps):
        state, _ = step_fn(state, torch.tensor(step))
    return {n: x.clone() for n, x in zf.full_params(tx, state).items()}


@functools.cache
def reference(kind, name, every):
    """Plain torch: whole leaves, the mean over all ranks and micro-steps of a window."""
    model, step_on = UnevenLeaves(), kind[name][1]
    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    start, states, window = {n: p.clone() for n, p in params.items()}, {}, []
    for step in range(STEPS):
        leaves = {n: p.clone().requires_grad_() for n, p in params.items()}
        loss = sum(loss_of(model, leaves, rank, step) for rank in range(SIZE)) / SIZE
        window.append(dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)))
        if len(window) == every:
            step_on(params, {n: sum(g[n] for g in window) / every for n in params}, states)
            window = []
    assert all((params[n] - start[n]).abs().max() > 1e-3 for n in params), "the reference did not train"
    return params


class Table(dict):
    """Hashable, for the cache."""

    __hash__ = object.__hash__  # type: ignore[assignment]


ELEMENTWISE, OF_LEAVES, OF_TREES = Table(ELEMENTWISE), Table(OF_LEAVES), Table(OF_TREES)


def every_of(front):
    return 2 if "accumulate" in front else 1


def everything():
    """On a rank: what trains by every layout and route."""
    out = {}
    for front in FRONTS:
        for name, (parts, _) in ELEMENTWISE.items():
            if front == "none" or (" in " in f" {name}" and front not in ("shard", "accumulate, reduce_scatter")):
                continue
            for route in ("eager", "pure", *(["in backward"] if route_in_backward(front, name) else [])):
                out["element", front, name, route] = train(front, parts, route)
        for name, (parts, _) in OF_LEAVES.items() if front != "none" else ():
            for route in ("eager", "pure"):
                out["leaf", front, name, route] = train(front, parts, route)
        for name, (parts, _) in OF_TREES.items() if front != "none" else ():
            for route in ("eager", "pure"):
                if front not in CUT:
                    out["tree", front, name, route] = train(front, parts, route)
    return out


def refusals():
    """On a rank: the messages of what does not train."""
    cases = [(front, name, parts) for front in CUT for name, (parts, _) in OF_TREES.items()]
    nested = ("shard", "accumulate, reduce_scatter")
    cases += [(front, name, parts) for front in nested for name, (parts, _) in NESTED.items()]
    return {
        (front, name, route): message(lambda f=front, p=parts, r=route: train(f, p, r))
        for front, name, parts in cases
        for route in ("eager", "pure")
    }


def route_in_backward(front, name):
    return "accumulate" not in front and name in ("leafwise", "leafwise optimizer", "in masked")


def message(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "not refused"


@pytest.mark.slow
def test_what_may_be_cut_and_what_is_not_cut_is_as_in_plain_torch():
    wrong = []
    for rank, found in enumerate(zf.launch(everything, SIZE, timeout=limit(90))):
        assert found
        for (kind, front, name, route), got in found.items():
            table = {"element": ELEMENTWISE, "leaf": OF_LEAVES, "tree": OF_TREES}[kind]
            want = reference(table, name, every_of(front))
            # Float64; a sum over ranks in another order.
            worst = max(float((got[n] - want[n]).abs().max()) for n in want)
            if not worst < 1e-10:
                wrong.append((rank, kind, front, name, route, worst))
    assert not wrong


def test_what_must_see_more_is_refused_by_name():
    for refused in zf.launch(refusals, SIZE, timeout=limit(60)):
        assert len(refused) == len(CUT) * len(OF_TREES) * 2 + len(NESTED) * 4
        for (front, name, route), text in refused.items():
            assert text.startswith("zf.attach with" if route == "eager" else "zf.init with"), (front, name, route, text)
            assert f"leaves cut over {SIZE} ranks\n  why:   " in text
            if name in NESTED:
                assert NESTED[name][1] in text
            assert 'zf.leafwise(needs="element") or zf.guest(transformation, needs="element")' in text
            cut = "shard" if "shard" in front else "reduce_scatter"
            assert f"under {cut} each rank has a flat shard" in text and f"zf.all_reduce() in place of {cut}" in text


@pytest.mark.parametrize("route", ["eager", "pure"])
@pytest.mark.parametrize("front", list(FRONTS))
@pytest.mark.parametrize("name", [*OF_LEAVES, *OF_TREES])
def test_on_one_process_nothing_is_cut_and_all_is_right(name, front, route):
    table = OF_LEAVES if name in OF_LEAVES else OF_TREES
    got, want = train(front, table[name][0], route, range(SIZE)), reference(table, name, every_of(front))
    for path, x in want.items():
        torch.testing.assert_close(got[path], x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("front", CUT)
@pytest.mark.parametrize("name", ["rows", "trees of rows"])
def test_what_needs_rows_keeps_them_where_they_lie(name, front):
    """Cut by rows as parameters are, also the leaf of fewer rows than ranks."""
    tx = zf.chain(*FRONTS[front](), *OF_LEAVES[name][0]())
    plans = [zf.plan(tx, UnevenLeaves(), world_size=4, rank=rank) for rank in range(4)]
    kept = [{r.path: r.bytes for r in plan.rows if r.transform in ("row_formula", "tree_formula")} for plan in plans]
    # 7 rows of 5 are 2, 2, 2 and 1 of them.
    assert [x["layers.0.weight"] for x in kept] == [80, 80, 80, 40]
    assert [x["layers.0.bias"] for x in kept] == [16, 16, 16, 8]
    assert [x["layers.1.bias"] for x in kept] == [8, 8, 8, 0]
    assert [x["layers.1.weight"] for x in kept] == [56, 56, 56, 0]


@pytest.mark.parametrize("front", CUT)
@pytest.mark.parametrize("name", [name for name in OF_LEAVES if name not in ("rows", "trees of rows")])
def test_a_plan_shows_states_at_their_owners(name, front):
    tx = zf.chain(*FRONTS[front](), *OF_LEAVES[name][0]())
    others = ("params", "state", "sgd", "accumulate")
    rows = [r for r in zf.plan(tx, UnevenLeaves(), world_size=1).rows if r.transform not in others]
    whole = {(r.transform, r.slot, r.path): r.bytes for r in rows}
    found = [zf.plan(tx, UnevenLeaves(), world_size=4, rank=rank) for rank in range(4)]
    assert len(whole) == 5
    for key, size in whole.items():
        here = [next(r.bytes for r in plan.rows if (r.transform, r.slot, r.path) == key) for plan in found]
        assert sorted(here) == [0, 0, 0, size]


# ---- what a guest keeps ----


def guest_of_pieces():
    model = UnevenLeaves()
    return model, zf.attach(model, zf.chain(zf.shard(), zf.guest(adam(), needs="element")))


def kept(directory):
    """Lists, of which nobody can tell whose piece an entry is: each rank's own for torch, refused by `zf.save`."""
    import torch.distributed.checkpoint as dcp

    def go_on(model, opt):
        for step in range(3, 5):
            x, y = batch(P.rank_and_size()[0], step)
            ((model(x) - y) ** 2).mean().backward()
            opt.step()
            opt.zero_grad()
        return [p.detach().clone() for p in opt.detach().parameters()]

    model, opt = guest_of_pieces()
    x, y = batch(P.rank_and_size()[0], 0)
    ((model(x) - y) ** 2).mean().backward()
    opt.step()
    opt.zero_grad()
    text = message(lambda: zf.save(f"{directory}/by_zerofn", opt))
    dcp.save(opt.state_dict(), checkpoint_id=f"{directory}/by_torch")
    other, again = guest_of_pieces()
    read = again.state_dict()
    dcp.load(read, checkpoint_id=f"{directory}/by_torch")
    again.load_state_dict(read)
    # Too long to be compared with other ranks' for any other transform.
    tx, params = zf.chain(zf.shard(), zf.guest(adam(), needs="element")), {"w": torch.ones(100, 100)}
    state = zf.make_step(lambda p, x: (p["w"] * x).sum(), tx)(zf.init(tx, params), torch.randn(100, 100))[0]
    long = message(lambda: zf.save(f"{directory}/long", state))
    return text, long, go_on(model, opt), go_on(other, again)


def test_what_a_guest_keeps_of_pieces_is_not_taken_for_one_and_the_same_on_all_ranks(tmp_path):
    for text, long, went_on, loaded in zf.launch(kept, SIZE, str(tmp_path), timeout=limit(60)):
        for told, where in ((text, 4), (long, 0)):
            assert "zf.save: what should be equal on every rank is not" in told
            assert f"/inner/0/mu/{where}: differs between ranks" in told
            assert "torch.distributed.checkpoint of opt.state_dict()" in told
        assert all(torch.equal(a, b) for a, b in zip(went_on, loaded, strict=True))


# ---- words ----


def test_needs_fold_over_nesting():
    def needs(t):
        return zf.chain(t).needs

    assert needs(zf.adamw(0.1)) == needs(lion()) == needs(zf.offload(lion())) == "element"
    assert (
        needs(zf.clip_by_global_norm(1.0)) == needs(zf.masked(zf.clip_by_global_norm(1.0), lambda p: True)) == "number"
    )
    assert needs(zf.offload(zf.chain(zf.accumulate(2), muon(), zf.adamw(0.1)))) == "leaf"
    assert needs(zf.partition({"a": zf.adamw(0.1), "b": zf.chain(lars(), zf.sgd(0.1))}, str)) == "leaf"
    assert needs(zf.partition({"a": None}, str)) == "element"
    assert needs(zf.masked(adam(), str)) == needs(zf.offload(adam())) == "tree"
    assert needs(zf.chain(zf.shard(), zf.precision(), zf.scale_loss(), zf.ema(0.5))) == "number"


# ---- refused ----

ROWS = Refusals()


@ROWS(ValueError, re.compile(r"zf.plan with .* and leaves cut over 4 ranks"), over=list(CUT))
def a_plan_of_what_ranks_would_refuse(front):
    tx = zf.chain(*FRONTS[front](), *OF_TREES["guest"][0]())
    zf.plan(tx, UnevenLeaves(), world_size=1)
    yield
    zf.plan(tx, UnevenLeaves(), world_size=4)


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
