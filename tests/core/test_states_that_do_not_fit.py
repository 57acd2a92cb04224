"""A state whose tensors have other shapes, dtypes or devices than those that its chain makes is refused, with each of
them by path, at every function that takes a state; nothing is written."""

import io
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transforms_table import LAYERS, ROWS, row_params
from trees import flat

import zerofn as zf

N = 70
START = {"0.weight": torch.zeros(N, 6), "0.bias": torch.zeros(N), "2.weight": torch.zeros(3, N)}
# What is done to the tensors of leaves.
WRONG = {
    "shorter": lambda x: x.reshape(-1)[: x.numel() // 2].clone(),
    "longer": lambda x: torch.cat([x, x]),
    "flat": lambda x: x.reshape(-1, 1),
    "of one element": lambda x: x.reshape(-1)[:1].clone(),
    "float64": lambda x: x.double() if x.dtype != torch.float64 else x.float(),
    "int32": lambda x: x.int(),
    "meta": lambda x: x.to("meta"),
}


def loss(params, x):
    return sum((p.float() ** 2).sum() for p in params.values()) + x


def changed(own, wrong, names, keys=()):
    """The same entries, with those of leaves changed, whose names are added to `names`."""
    if isinstance(own, dict):
        return {key: changed(x, wrong, names, (*keys, key)) for key, x in own.items()}
    path = next((key for key in keys if key in START), None)
    if path is None or own.ndim == 0:
        return own
    new = wrong(own)
    if (new.shape, new.dtype, new.device) != (own.shape, own.dtype, own.device):
        names.append((path, "/".join(keys[: keys.index(path)])))
    return new


def loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()))


def functions(tx, row):
    grads = {p: torch.ones_like(x) for p, x in START.items()}
    more = {"loss": torch.tensor(1.0)} if row.loss else {}
    weight = {"weight": 1.0} if row.weighted else {}
    one = torch.tensor(1.0)
    found = {
        "make_step": lambda s: zf.make_step(loss, tx)(s, one, **weight),
        "donate": lambda s: zf.make_step(loss, tx, donate=True)(s, one, **weight),
        "bind": lambda s: zf.bind(loss, tx, s),
        "vjp": lambda s: zf.vjp(loss, tx, s, one),
        "full_params": lambda s: zf.full_params(tx, s),
        "gather": lambda s: zf.gather(tx, s, s.params),
        "global_norm": lambda s: zf.global_norm(s.params, tx, s),
        "update": lambda s: zf.update(tx, grads, s, **weight, **more),
    }
    return found


def tampered(state, wrong, leaves=False):
    names: list[tuple[str, str]] = []
    own = {name: changed(x, wrong, names, (name,)) for name, x in state.transforms.items()}
    new = {p: changed(x, wrong, names, ("params", p)) for p, x in state.leaves.items()} if leaves else state.leaves
    return replace(state, transforms=own, leaves=new), names


# Each row by a third of the wrongs: entries are compared with those of a first state, whatever the row.
@pytest.mark.parametrize("name", row_params("laws", ROWS, 0, of=3))
def test_every_function_refuses_it(name):
    row, place = ROWS[name], list(ROWS).index(name)
    tx = row.trained(LAYERS)
    state = zf.init(tx, START)
    for i, (kind, wrong) in enumerate(WRONG.items()):
        if (i + place) % 3:
            continue
        bad, names = tampered(state, wrong, leaves=kind not in ("float64", "meta") and i % 2 == 0)
        if not names:
            continue
        bad = bad if kind == "meta" else (loaded(bad) if i % 2 else bad)
        for call, run in functions(tx, row).items():
            before = {k: x.clone() for k, x in flat(bad.transforms).items() if isinstance(x, Tensor)}
            with pytest.raises(ValueError) as caught:
                run(bad)
            message = str(caught.value)
            missing = [(path, slot) for path, slot in names if f"{path}: {slot}" not in message]
            assert not missing, f"{kind}, {call}: {missing} not in\n{message}"
            after = {k: x for k, x in flat(bad.transforms).items() if isinstance(x, Tensor)}
            assert all(x.is_meta or torch.equal(x, before[k]) for k, x in after.items())


@pytest.mark.parametrize("name", row_params("laws", ROWS, 1, of=3))
def test_a_transform_alone_refuses_it(name):
    row = ROWS[name]
    tx = row.make(LAYERS)
    if not isinstance(tx, zf.Transform) or tx.in_turn:
        return
    state = tx.init(START)
    grads = {p: torch.ones_like(x) for p, x in START.items()}
    for wrong in (WRONG["shorter"], WRONG["float64"], WRONG["meta"]):
        names: list[tuple[str, str]] = []
        bad = changed(state, wrong, names)
        if not names:
            continue
        with pytest.raises(ValueError) as caught:
            tx.update(grads, bad, START)
        assert not [n for n in names if f"{n[0]}: {tx.name}/{n[1]}" not in str(caught.value)]


@pytest.mark.parametrize("name", row_params("laws", ROWS, 2, of=3))
def test_an_attached_model_refuses_it_and_goes_on(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, N), nn.Tanh(), nn.Linear(N, 3, bias=False))
    opt = zf.attach(model, ROWS[name].trained(LAYERS))
    kept = {k: x.clone() for k, x in flat(opt.state.transforms).items() if isinstance(x, Tensor)}
    for kind in ("shorter", "longer", "of one element", "float64"):
        bad, names = tampered(opt.state, WRONG[kind], leaves=True)
        with pytest.raises(ValueError) as caught:
            opt.load_state(bad)
        keys = [f"{slot}/{path}" for path, slot in names]
        assert not [key for key in keys if key not in str(caught.value)], f"{kind}: {caught.value}"
        assert all(torch.equal(x, kept[k]) for k, x in flat(opt.state.transforms).items() if k in kept)


def test_counters_and_entries():
    tx = zf.adamw(0.1)
    state = zf.init(tx, START)
    own = state.transforms["adamw"]
    less = {slot: x for slot, x in own.items() if slot != "exp_avg_sq"}
    rows = {
        "step: is": replace(state, step=torch.zeros(3)),
        "micro_step: is": replace(state, micro_step=torch.tensor(0.0)),
        "0.bias: adamw/exp_avg_sq is missing": replace(state, transforms={"adamw": less}),
        "0.bias: adamw/more is unexpected": replace(state, transforms={"adamw": {**own, "more": own["exp_avg"]}}),
        "0.bias: adamw/exp_avg is a float": replace(
            state, transforms={"adamw": {**own, "exp_avg": {**own["exp_avg"], "0.bias": 1.0}}}
        ),
        "2.weight: params is missing": replace(state, leaves={p: x for p, x in START.items() if p != "2.weight"}),
    }
    for words, bad in rows.items():
        with pytest.raises(ValueError, match=words):
            zf.update(tx, {p: torch.ones_like(x) for p, x in START.items()}, bad)


def test_a_stack_of_states_is_read_and_not_stepped():
    tx = zf.adamw(0.1)
    states = [zf.init(tx, {p: x + i for p, x in START.items()}) for i in range(3)]
    stacked = zf.extend.tree_map(lambda *xs: torch.stack(xs), *states)
    assert zf.full_params(tx, stacked)["0.bias"].shape == (3, N)
    with pytest.raises(ValueError, match="adamw/exp_avg is of shape"):
        zf.update(tx, {p: torch.ones_like(x) for p, x in START.items()}, stacked)


def test_a_state_of_our_own_is_not_compared_again():
    # To know its form, the transform is asked for a first state of meta tensors.
    asked = []

    def first(p):
        asked.append(p.is_meta)
        return torch.zeros_like(p)

    @zf.leafwise(init=first, needs="element")
    def own(grad, param, state):
        return state + grad, state + grad

    tx = zf.chain(own(), zf.sgd(0.1))
    step = zf.make_step(loss, tx)
    state = zf.init(tx, START)
    asked.clear()
    for _ in range(3):
        state, _ = step(state, torch.tensor(1.0))
    assert not asked
    state = loaded(state)
    for _ in range(3):
        state, _ = step(state, torch.tensor(1.0))
    assert asked == [True] * len(START)


def of_ranks():
    found = []
    for tx in (
        zf.chain(zf.shard(), zf.adamw(0.1)),
        zf.chain(zf.accumulate(2), zf.reduce_scatter(), zf.adamw(0.1)),
        zf.chain(zf.reduce_scatter(), zf.accumulate(2), zf.adamw(0.1)),
        zf.chain(zf.all_reduce(), zf.adamw(0.1)),
        zf.chain(zf.shard(), zf.muon(0.1)),
    ):
        params = {p: x for p, x in START.items() if x.ndim == 2} if "muon" in repr(tx) else START
        state = zf.init(tx, params)
        zf.full_params(tx, loaded(state))
        bad, names = tampered(state, WRONG["shorter"])
        for run in (
            lambda s, tx=tx: zf.make_step(loss, tx)(s, torch.tensor(1.0)),
            lambda s, tx=tx: zf.full_params(tx, s),
        ):
            try:
                run(loaded(bad))
            except ValueError as error:
                found.append(all(f"{path}: {slot}" in str(error) for path, slot in names) and len(names) > 0)
            else:
                found.append(False)
        step = zf.make_step(loss, tx)
        (a, _), (b, _) = step(state, torch.tensor(1.0)), step(loaded(state), torch.tensor(1.0))
        found.append(all(torch.equal(x, b.leaves[p]) for p, x in a.leaves.items()))
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_shards(world):
    assert zf.launch(of_ranks, world) == [[True] * 15] * world
