"""Metrics of the update: the same numbers as plain torch's, by every route, at every stage, on any number of ranks."""

from __future__ import annotations

import pytest
import torch
from pairs import cover
from routes import mean_square, micro_steps
from stages import around
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.extend import Facts, Scope, Transform, squared_norm, transform
from zerofn.kernels import fused_adam, lists  # inside: kernels for small leaves
from zerofn.testing import check_transform

STEPS = 3
ROUTES = ("pure", "eager", "in backward")


def sums(old, new):
    return {"update": (new - old).square().sum(), "weight": old.square().sum()}


def root_of_quotient(update, weight):
    return {"ratio": (update / weight).sqrt()}


def first_part(path):
    return path.split(".")[0]


def model():
    torch.manual_seed(0)
    # A bias of three elements and a leaf of one: on two ranks pieces are uneven, and some empty.
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 5, generator=generator) for _ in range(STEPS)]


def ratios(before, after, paths):
    moved = sum((after[p].double() - before[p].double()).square().sum() for p in paths)
    return float((moved / sum(before[p].double().square().sum() for p in paths)).sqrt())


def by_hand(make):
    """The ratios of all leaves and of each group, of plain torch."""
    net = model()
    opt, found = make(net.parameters()), []
    for x in batches():
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        opt.zero_grad()
        mean_square(net(x)).backward()
        opt.step()
        after = {n: p.detach() for n, p in net.named_parameters()}
        groups = {group: [n for n in before if first_part(n) == group] for group in ("0", "2")}
        rows = {f"watch_2.{group}.ratio": ratios(before, after, paths) for group, paths in groups.items()}
        found.append({"watch.ratio": ratios(before, after, list(before)), **rows})
    return found


OPTIMIZERS = {
    "sgd": (lambda: zf.sgd(0.1), lambda params: torch.optim.SGD(params, lr=0.1)),
    "adamw": (
        lambda: zf.adamw(0.1, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    ),
    "offloaded": (
        lambda: zf.offload(zf.adamw(0.1, weight_decay=0.1), device="cpu"),
        lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1),
    ),
    "by group": (
        lambda: zf.partition({True: zf.sgd(0.1), False: zf.sgd(0.1)}, lambda path: path.endswith("bias")),
        lambda params: torch.optim.SGD(params, lr=0.1),
    ),
}


def watched(optimizer, route, stage, by):
    """The metrics of `watch` in each step, over this rank's share of each batch."""
    with pytest.MonkeyPatch.context() as patch:
        if by == "kernels":
            kernels_for_all(patch)
        return _watched(optimizer, route, stage)


def kernels_for_all(patch):
    """Kernels for small leaves too: sums ride on the pass of the optimizer."""
    patch.setattr(lists, "LARGE", 1)
    patch.setattr(fused_adam, "LARGE", 1)


def _watched(optimizer, route, stage):
    group = zf.collectives.world_group()
    tx = zf.chain(
        *around(stage, window=zf.accumulate(1)),
        OPTIMIZERS[optimizer][0](),
        zf.watch(sums, root_of_quotient),
        zf.watch(sums, root_of_quotient, labels=first_part),
    )
    here = [x.chunk(group.size)[group.rank] for x in batches()]
    if route == "donated":
        net = model()
        state = zf.init(tx, {n: p.detach() for n, p in net.named_parameters()})
        step = zf.make_step(lambda p, x: mean_square(torch.func.functional_call(net, p, (x,))), tx, donate=True)
        found = []
        for x in here:
            state, metrics = step(state, x)
            found.append(metrics)
    else:
        found = [metrics for _, metrics in micro_steps(route, model(), tx, here, mean_square)]
    return [{k: float(v) for k, v in metrics.items() if k.startswith("watch")} for metrics in found]


def everywhere(cases):
    return [watched(*case) for case in cases]


CASES = [
    (optimizer, route, stage, by)
    for optimizer in OPTIMIZERS
    for route in ("pure", "donated", "eager", "in backward")
    for stage in (0, 1, 2, 3)
    for by in ("torch", "kernels")
]


@pytest.mark.parametrize(
    ("size", "cases"), [(2, cover(CASES)), *[pytest.param(n, CASES, marks=pytest.mark.slow) for n in (1, 2)]]
)
def test_a_ratio_is_that_of_plain_torch_by_every_route_at_every_stage(size, cases):
    found = zf.launch(everywhere, size, cases, timeout=limit(120))
    want = {name: by_hand(make) for name, (_, make) in OPTIMIZERS.items()}
    assert all(value > 1e-3 for rows in want.values() for row in rows for value in row.values())
    for rank in found:
        for case, steps in zip(cases, rank, strict=True):
            for got, expected in zip(steps, want[case[0]], strict=True):
                assert got.keys() == expected.keys(), case
                for name, value in expected.items():
                    assert got[name] == pytest.approx(value, rel=1e-5), (case, name)


@transform
def looks(scope="LEAF", keeps=True):
    """What it is handed, leaf by leaf, as numbers in its state: a watcher of one's own."""

    def init(leaves, layout):
        return {"old": {p: torch.zeros_like(x) for p, x in leaves.items()}} | {
            "new": {p: torch.zeros_like(x) for p, x in leaves.items()}
        }

    def update(new, state, old, carry, ctx):
        copy = (lambda x: x) if keeps else torch.clone
        return new, {"old": {p: copy(old[p]) for p in new}, "new": {p: copy(x) for p, x in new.items()}}

    facts = Facts(watches=True, keeps=keeps)
    return Transform("looks", Scope[scope], needs="element", facts=facts, init_fn=init, update_fn=update)


FORMS = {
    "behind sgd": lambda look: [zf.sgd(0.1), look],
    "behind adamw": lambda look: [zf.adamw(0.1), look],
    "behind an average": lambda look: [zf.adamw(0.1), zf.ema(0.9), look],
    "behind bf16 states": lambda look: [zf.low_precision_adam(0.1), look],
    "behind whole leaves": lambda look: [
        zf.partition({2: zf.muon(0.1), 1: zf.sgd(0.1)}, lambda path: 1 + path.endswith("weight")),
        look,
    ],
    "behind a clip": lambda look: [zf.clip_by_global_norm(0.1), zf.adamw(0.1), look],
    "within a partition": lambda look: [
        zf.partition({0: zf.chain(zf.adamw(0.1), look), 1: zf.sgd(0.1)}, lambda path: int("bias" in path))
    ],
    "masked": lambda look: [zf.adamw(0.1), zf.masked(look, lambda path: "bias" not in path)],
    "offloaded": lambda look: [zf.offload(zf.adamw(0.1)), zf.offload(look)],
    "behind groups that see whole trees": lambda look: [
        zf.partition({0: zf.chain(zf.clip_by_global_norm(0.1), zf.adamw(0.1)), 1: zf.sgd(0.1)}, lambda path: 0),
        look,
    ],
}


def entries_of(transforms, key):
    if "old" in transforms and "new" in transforms:
        return dict(transforms[key])
    return {p: x for own in transforms.values() if isinstance(own, dict) for p, x in entries_of(own, key).items()}


def wrongly_handed(form, scope, keeps, route):
    """The leaves of which a watcher was handed something else than the parameters before and after the step."""
    tx, net, bad = zf.chain(*FORMS[form](looks(scope, keeps))), model(), []
    steps = 0
    if route in ("pure", "donated"):
        state = zf.init(tx, {n: p.detach() for n, p in net.named_parameters()})
        step = zf.make_step(
            lambda p, x: mean_square(torch.func.functional_call(net, p, (x,))), tx, donate=route == "donated"
        )
        was = zf.testing.clone(state.leaves)
        for x in batches():
            state, _ = step(state, x)
            bad += compared(state, was)
            was, steps = zf.testing.clone(state.leaves), steps + 1
    else:
        opt = zf.attach(net, tx, in_backward=route == "in backward")
        for x in batches():
            was = zf.testing.clone(opt.state.leaves)
            mean_square(net(x)).backward()
            opt.step()
            opt.zero_grad()
            bad += compared(opt.state, was)
            steps += 1
    assert steps == STEPS
    return bad


def compared(state, was):
    old, new = entries_of(state.transforms, "old"), entries_of(state.transforms, "new")
    assert old and all(not torch.equal(was[p], state.leaves[p]) for p in was)
    return [p for p in old if not torch.equal(old[p], was[p]) or not torch.equal(new[p], state.leaves[p])]


@pytest.mark.parametrize("buckets", ["one bucket", "a bucket a leaf", "kernels"])
@pytest.mark.parametrize("form", FORMS)
def test_a_watcher_is_handed_the_old_and_the_new_parameters(form, buckets, monkeypatch):
    if buckets == "kernels":
        kernels_for_all(monkeypatch)
    if buckets == "a bucket a leaf":
        monkeypatch.setattr("zerofn.core.executor.BUCKET_BYTES", 8)
    whole = "whole" in form or "partition" in form
    for i, scope in enumerate(("LEAF", "TREE", "WHOLE")):
        for j, route in enumerate(("pure", "donated", "eager", "in backward")):
            if route == "in backward" and (scope != "LEAF" or whole or form == "behind a clip"):
                continue
            # Of each scope and route one that keeps what it is handed, and one that does not: the other bucket's.
            keeps = (i + j) % 2 == (buckets == "one bucket")
            assert not wrongly_handed(form, scope, keeps, route), (scope, keeps, route)


def test_a_watcher_of_the_new_parameters_alone_costs_no_copy():
    assert not zf.ema(0.9).facts.compares
    assert zf.masked(zf.ema(0.9), lambda path: True).facts.compares is False
    assert zf.masked(zf.watch(sums), lambda path: True).facts.compares is True


def test_check_transform_passes_it():
    """By itself it is in `test_conformance`."""
    check_transform(zf.chain(zf.accumulate(2), zf.adamw(0.1), zf.watch(sums, root_of_quotient, labels=first_part)))


@pytest.mark.parametrize("held", [zf.accumulate(2), zf.skip_nonfinite()], ids=lambda t: t.name)
def test_a_step_that_updates_nothing_shows_zeros_under_the_same_names(held):
    tx = zf.chain(held, zf.sgd(0.1), zf.watch(sums, root_of_quotient, labels=first_part))
    state = zf.init(tx, {"a": torch.ones(2), "b": torch.ones(3)})
    grads = [torch.full((2,), torch.nan), torch.ones(2)]
    found = []
    for g in grads if held.name != "accumulate" else [torch.ones(2), torch.ones(2)]:
        state, metrics = zf.update(tx, {"a": g, "b": torch.ones(3)}, state)
        found.append({k: float(v) for k, v in metrics.items() if k.startswith("watch")})
    assert found[0] == {"watch.a.ratio": 0.0, "watch.b.ratio": 0.0}
    assert found[1] == {"watch.a.ratio": pytest.approx(0.1), "watch.b.ratio": pytest.approx(0.1)}


def test_names_are_those_of_the_transform_and_of_groups():
    tx = zf.chain(zf.sgd(0.1), zf.watch(sums).named("moved"), zf.watch(sums, labels=lambda path: (path, 1)))
    state = zf.init(tx, {"a": torch.ones(2)})
    _, metrics = zf.update(tx, {"a": torch.ones(2)}, state)
    names = {k for k in metrics if "update" in k and "." in k}
    assert names == {"moved.update", "watch.('a', 1).update"}


def test_it_is_batched_differentiated_and_compiled_with_its_step():
    tx = zf.chain(zf.sgd(0.1), zf.watch(sums, root_of_quotient))
    step = zf.make_step(lambda p, x: (p["w"] * x).square().sum(), tx)
    data = torch.tensor([[1.0, 2.0], [3.0, 0.5]])
    start = {"w": torch.tensor([1.0, -1.0])}
    alone = [step(zf.init(tx, start), x)[1]["watch.ratio"] for x in data]
    state = zf.init(tx, start)
    batched = torch.vmap(lambda x: step(state, x)[1]["watch.ratio"])(data)
    torch.testing.assert_close(batched, torch.stack(alone))
    slope = torch.func.grad(lambda x: step(state, x)[1]["watch.ratio"])(data[0].double().float())
    moved = 1e-3 * torch.tensor([1.0, 0.0])
    up, down = (step(state, data[0] + sign * moved)[1]["watch.ratio"] for sign in (1, -1))
    torch.testing.assert_close(slope[0], (up - down) / 2e-3, rtol=1e-2, atol=1e-4)


REFUSED = {
    "a norm": (lambda old, new: {"x": (new - old).norm()}, None, ValueError, "summed over two and four"),
    "a mean": (lambda old, new: {"x": (new - old).square().mean()}, None, ValueError, "sums over elements"),
    "a maximum": (lambda old, new: {"x": (new - old).abs().amax()}, None, ValueError, "sums over elements"),
    "a tensor": (lambda old, new: (new - old).square().sum(), None, TypeError, "numbers by name"),
    "a vector": (lambda old, new: {"x": new - old}, None, TypeError, "shape \\(6,\\)"),
    "one argument": (lambda new: {"x": new.sum()}, None, ValueError, "called with \\(old, new\\)"),
    "a matrix": (lambda old, new: {"x": (new @ old.mT).sum()}, None, ValueError, "flat shard"),
    "no function": ("norm", None, TypeError, "fn is a function"),
    "another name in then": (sums, lambda moved: {"x": moved}, ValueError, "the sums update, weight"),
    "then without names": (sums, lambda update, weight: update, TypeError, "numbers by name"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_add_up_is_refused_when_it_is_built(kind):
    fn, then, error, text = REFUSED[kind]
    with pytest.raises(error, match=text) as raised:
        zf.watch(fn, then)
    assert "write: zf.watch(" in str(raised.value)


def test_numbers_of_16_bit_parameters_are_added_up_in_fp32():
    tx = zf.chain(zf.precision(store_dtype=torch.bfloat16), zf.sgd(0.5), zf.watch(sums))
    state = zf.init(tx, {"w": torch.ones(1001)})
    _, metrics = zf.update(tx, {"w": torch.ones(1001, dtype=torch.bfloat16)}, state)
    assert float(metrics["watch.weight"]) == 1001.0 and float(metrics["watch.update"]) == 1001 / 4
    assert metrics["watch.weight"].dtype == torch.float32


def test_the_ratio_of_the_whole_tree_may_be_a_transform_of_ones_own():
    @transform
    def ratio():
        def update(new, state, old, carry, ctx):
            moved = ctx.total(squared_norm, {p: new[p] - old[p] for p in new})
            ctx.report("ratio", (moved / ctx.total(squared_norm, old)).sqrt())
            return new, state

        facts = Facts(watches=True, reports=frozenset({"ratio"}))
        return Transform("ratio", Scope.WHOLE, needs="number", update_fn=update, facts=facts)

    tx = zf.chain(zf.adamw(0.1), ratio(), zf.watch(sums, root_of_quotient))
    for route in ("pure", "eager"):
        for _, metrics in micro_steps(route, model(), tx, batches(), mean_square):
            assert float(metrics["ratio"]) == pytest.approx(float(metrics["watch.ratio"]), rel=1e-5)


@pytest.mark.parametrize("scope", ["LEAF", "TREE", "WHOLE"])
def test_a_number_of_the_tree_is_not_that_of_one_bucket(scope, monkeypatch):
    @transform
    def total():
        def update(new, state, old, carry, ctx):
            ctx.report("total", ctx.total(squared_norm, new))
            return new, state

        facts = Facts(watches=True, reports=frozenset({"total"}))
        return Transform("total", Scope[scope], needs="number", update_fn=update, facts=facts)

    tx = zf.chain(zf.sgd(0.0), total())
    params = {"a": torch.full((4,), 2.0), "b": torch.full((4,), 3.0)}
    _, metrics = zf.update(tx, zf.testing.clone(params), zf.init(tx, params))
    assert metrics["total"] == 52.0
    monkeypatch.setattr("zerofn.core.executor.BUCKET_BYTES", 8)
    state = zf.init(tx, params)
    if scope == "WHOLE":
        assert zf.update(tx, zf.testing.clone(params), state)[1]["total"] == 52.0
        return
    with pytest.raises(ValueError, match=r"ctx.total.* in an update_fn that treats leaves alone[\s\S]*prepare_fn"):
        zf.update(tx, zf.testing.clone(params), state)
