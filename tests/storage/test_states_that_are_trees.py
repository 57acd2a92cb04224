"""States in which a leaf has a dict of its own: cut with the leaf, and whole again for any ranks."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from time_limits import limit
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from trees import flat

import zerofn as zf
from zerofn.extend import Transform, entries
from zerofn.storage import saving  # inside: what an older version wrote

# How two moments are put into the state of a leaf, and taken out of it.
FORMS = {
    "tensor": (lambda m, v: m, lambda s: (s, s)),
    "dict": (lambda m, v: {"m": m, "v": v}, lambda s: (s["m"], s["v"])),
    # The names of parameters.
    "named": (lambda m, v: {"weight": m, "bias": v}, lambda s: (s["weight"], s["bias"])),
    "nested": (lambda m, v: {"x": {"0": m, "1": {"y": v}}}, lambda s: (s["x"]["0"], s["x"]["1"]["y"])),
    "number": (lambda m, v: {"m": m, "v": v, "n": torch.zeros(())}, lambda s: (s["m"], s["v"])),
}

# In each run of the tests.
OFTEN = ("named", "nested")


def moments(form):
    put, take = FORMS[form]

    @zf.leafwise(init=lambda p: put(torch.zeros_like(p), torch.zeros_like(p)), needs="element")
    def two(grad, param, state):
        m, v = take(state)
        new = 0.5 * m + grad, 0.25 * v + grad * grad
        return new[0] + 0.125 * new[1], put(*new)

    return two()


CHAINS = {
    "alone": lambda form: [zf.shard(), moments(form)],
    "beside": lambda form: [zf.reduce_scatter(), zf.accumulate(2), zf.offload(moments(form))],
    "of some": lambda form: [zf.shard(), zf.masked(zf.chain(moments(form)), lambda path: path != "w")],
}
# A leaf has the name of a key in the trees.
SHAPES = {"m": (5, 3), "b": (4,), "w": (7, 2), "one": (1,)}


def made(chain, form):
    model = nn.ParameterDict({path: torch.ones(shape) for path, shape in SHAPES.items()})
    return model, zf.attach(model, zf.chain(*CHAINS[chain](form), zf.sgd(2**-4)))


def train(model, opt, first, last):
    """Gradients are whole numbers that 1, 2 and 3 divide, so that means over ranks are exact."""
    for step in range(first, last):
        data = {path: 6.0 * (1 + (step + torch.arange(p.numel())) % 5).reshape(p.shape) for path, p in model.items()}
        sum((p * data[path]).sum() for path, p in model.items()).backward()
        opt.step()
        opt.zero_grad()


def go_on(chain, forms, folder, before, after, first, last):
    """Train on from one checkpoint, or from nothing, to the next."""
    for form in forms:
        model, opt = made(chain, form)
        if before:
            zf.load(f"{folder}/{before}/{form}", like=opt)
        train(model, opt, first, last)
        zf.save(f"{folder}/{after}/{form}", opt)


def whole(folder, name, chain, form):
    """What one process reads."""
    _, opt = made(chain, form)
    zf.load(f"{folder}/{name}/{form}", like=opt)
    return {e.key: e.value for e in entries(opt.state) if isinstance(e.value, torch.Tensor)}


def assert_same(mine, theirs):
    assert mine.keys() == theirs.keys()
    assert [k for k, x in theirs.items() if not torch.equal(mine[k], x)] == []


@pytest.mark.parametrize(
    ("chain", "forms"), [("alone", OFTEN), *[pytest.param(chain, FORMS, marks=pytest.mark.slow) for chain in CHAINS]]
)
def test_any_number_of_ranks_loads_what_two_have_saved(chain, forms, tmp_path):
    folder, forms = str(tmp_path), [*forms]
    go_on(chain, forms, folder, None, "one", 0, 3)
    go_on(chain, forms, folder, "one", "one on", 3, 5)
    zf.launch(go_on, 2, chain, forms, folder, None, "two", 0, 3, timeout=limit())
    zf.launch(go_on, 2, chain, forms, folder, "two", "two on", 3, 5, timeout=limit())
    zf.launch(go_on, 3, chain, forms, folder, "two", "three on", 3, 5, timeout=limit())
    zf.launch(go_on, 2, chain, forms, folder, "one", "from one", 3, 5, timeout=limit())
    go_on(chain, forms, folder, "two", "two alone", 3, 5)
    for form in forms:
        one = whole(folder, "one", chain, form)
        assert sum(bool(x.any()) for k, x in one.items() if "two" in k) >= (3 if form == "tensor" else 6)
        assert_same(whole(folder, "two", chain, form), one)
        for name in ("two on", "three on", "two alone", "from one"):
            assert_same(whole(folder, name, chain, form), whole(folder, "one on", chain, form))


def in_formats_of_torch(folder, forms, saves):
    """By form and format: whether what was saved is what is loaded, and how much of it is not zero."""
    found = {}
    for form in forms:
        model, opt = made("alone", form)
        other, into = made("alone", form)
        train(model, opt, 0, 3)
        truth = everything(model, opt)
        if saves:
            dcp.save({"opt": opt.state_dict()}, checkpoint_id=f"{folder}/dcp/{form}")
            dcp.save({"opt": get_optimizer_state_dict(model, opt)}, checkpoint_id=f"{folder}/parts/{form}")
            into.load_state_dict(opt.state_dict())
            found[form, "dict"] = everything(other, into)
            other, into = made("alone", form)
            set_optimizer_state_dict(other, into, full_state(model, opt), options=FULL)
            found[form, "full"] = everything(other, into)
            other, into = made("alone", form)
        mine = {"opt": into.state_dict()}
        dcp.load(mine, checkpoint_id=f"{folder}/dcp/{form}")
        into.load_state_dict(mine["opt"])
        found[form, "dcp"] = everything(other, into)
        other, into = made("alone", form)
        mine = {"opt": get_optimizer_state_dict(other, into)}
        dcp.load(mine, checkpoint_id=f"{folder}/parts/{form}")
        set_optimizer_state_dict(other, into, mine["opt"])
        found[form, "parts"] = everything(other, into)
        found[form, "truth"] = truth
    return found


FULL = StateDictOptions(full_state_dict=True)


def full_state(model, opt):
    return get_optimizer_state_dict(model, opt, options=FULL)


def everything(model, opt):
    found = flat(full_state(model, opt)["state"])
    return {k: x.clone() for k, x in found.items() if isinstance(x, torch.Tensor)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("forms", [OFTEN, pytest.param(FORMS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_formats_of_torch(forms, tmp_path):
    forms = [*forms]
    two = zf.launch(in_formats_of_torch, 2, str(tmp_path), forms, True, timeout=limit())
    three = zf.launch(in_formats_of_torch, 3, str(tmp_path), forms, False, timeout=limit())
    one = zf.launch(in_formats_of_torch, 1, str(tmp_path), forms, False, timeout=limit())
    for form in forms:
        truth = one[0][form, "truth"]
        assert len([x for x in truth.values() if x.ndim and x.any()]) == len(SHAPES) * (1 if form == "tensor" else 2)
        assert {tuple(x.shape) for x in truth.values() if x.any() and x.ndim} == set(SHAPES.values())
        for rank in (*two, *three, *one):
            for (of, how), found in rank.items():
                if of == form:
                    assert found.keys() == truth.keys(), (form, how)
                    assert [k for k, x in truth.items() if not torch.equal(found[k], x)] == [], (form, how)


def counting(counts):
    """It keeps a sum, and the number of its updates where `counts`."""

    def init(leaves, layout):
        kept = {"sum": {path: torch.zeros_like(x) for path, x in leaves.items()}}
        return {**kept, "n": torch.tensor(0)} if counts else kept

    def update(grads, state, params, carry, ctx):
        own = {"sum": {path: g + state["sum"][path] for path, g in grads.items()}}
        return grads, {**own, "n": state["n"] + 1} if counts else own

    return zf.chain(Transform("mine", needs="element", init_fn=init, update_fn=update), zf.sgd(0.5))


def test_numbers_of_python_in_older_checkpoints_are_read(tmp_path, monkeypatch):
    """There a count was a value of the manifest, and so was what is no tensor in a state of another library."""
    made = saving._header
    values = {"mine/n": 7, "mine/word": "text", "mine/nothing": None}
    monkeypatch.setattr(saving, "_header", lambda *given: {**made(*given), "values": values})
    tx, params = counting(False), {"w": torch.ones(2)}
    zf.save(tmp_path / "c", zf.update(tx, params, zf.init(tx, params))[0])
    found = zf.load(tmp_path / "c", like=zf.init(counting(True), params)).transforms["mine"]
    assert found["n"].dtype == torch.int64 and int(found["n"]) == 7 and found["sum"]["w"].tolist() == [1.0, 1.0]
