"""States of every form go on from every format of torch's and ours, on any number of ranks: nothing is left out.

Gradients are whole numbers that 1, 2 and 3 divide, so that means over ranks are exact, and one process is the
reference to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_programs import rank_and_size
from time_limits import limit
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from trees import flat

import zerofn as zf
from zerofn.extend import Scope, Transform
from zerofn.storage import saving  # inside: what an older version wrote

FULL = StateDictOptions(full_state_dict=True)
# Leaves have the names of keys in the trees and of a counter, and rows that no number of ranks shares evenly.
SHAPES = {"m": (5, 3), "b": (4,), "w": (7, 2), "n": (3, 2), "one": (1,), "number": ()}


def moments(put: Callable[..., Any], take: Callable[..., Any]) -> Any:
    """Two moments of each leaf, in a tree of the leaf's own."""

    @zf.leafwise(init=lambda p: put(torch.zeros_like(p), torch.zeros_like(p)), needs="element")
    def two(grad, param, state):
        m, v = take(state)
        new = 0.5 * m + grad, 0.25 * v + grad * grad
        return new[0] + 0.125 * new[1], put(*new)

    return two()


def held(needs: str, init: Callable[..., Any], update: Callable[..., Any]) -> Transform:
    """A state that is written by hand."""
    return Transform(
        "held",
        Scope.WHOLE,
        needs=needs,  # type: ignore[arg-type]
        init_fn=lambda p, layout: init(p),
        update_fn=lambda g, s, p, carry, ctx: (g, update(s, g)),
    )


def zeros(leaves: Any) -> dict[str, Tensor]:
    return {path: torch.zeros_like(p) for path, p in leaves.items()}


def added(old: Any, grads: Any, times: int = 1) -> dict[str, Tensor]:
    return {**old, **{path: old[path] + times * g for path, g in grads.items()}}


def dicts_of_dicts(needs: str) -> Transform:
    return held(
        needs,
        lambda p: {"x": {"m": zeros(p), "v": zeros(p)}},
        lambda s, g: {"x": {"m": added(s["x"]["m"], g), "v": added(s["x"]["v"], g, 2)}},
    )


def with_a_counter(needs: str) -> Transform:
    return held(
        needs,
        lambda p: {"x": {"0": torch.zeros(()), "1": zeros(p)}},
        lambda s, g: {"x": {"0": s["x"]["0"] + 1, "1": added(s["x"]["1"], g)}},
    )


def counter_with_a_leafs_name(needs: str) -> Transform:
    return held(
        needs,
        lambda p: {"x": zeros(p), "n": torch.zeros(())},
        lambda s, g: {"x": added(s["x"], g), "n": s["n"] + 1},
    )


def numbers_of_no_leaf(needs: str) -> Transform:
    return held(
        needs,
        lambda p: {"x": zeros(p), "last": torch.zeros(3)},
        lambda s, g: {"x": added(s["x"], g), "last": s["last"] + torch.arange(1.0, 4.0)},
    )


@zf.leafwise(init=lambda p: {"m": torch.zeros_like(p), "norm": torch.zeros(())})
def by_norm(grad, param, state):
    """Momentum over the norm of the whole leaf: its state lives at the owner of the leaf."""
    momentum = 0.5 * state["m"] + grad
    norm = momentum.abs().max()
    return momentum / norm.clamp(min=1), {"m": momentum, "norm": norm}


def muon() -> list[Transform]:
    labels = lambda path: "matrix" if path in ("m", "w", "n") else "rest"  # noqa: E731
    return [zf.partition({"matrix": zf.muon(0.1), "rest": zf.low_precision_adam(1e-2)}, labels)]


SGD = zf.sgd(2**-4)
FORMS: dict[str, Callable[[], list[Any]]] = {
    "tensor": lambda: [zf.shard(), moments(lambda m, v: m, lambda s: (s, s)), SGD],
    "dict": lambda: [
        zf.reduce_scatter(),
        zf.accumulate(2),
        zf.offload(moments(lambda m, v: {"m": m, "v": v}, lambda s: (s["m"], s["v"]))),
        SGD,
    ],
    # The names of parameters.
    "named": lambda: [
        zf.shard(),
        moments(lambda m, v: {"weight": m, "bias": v}, lambda s: (s["weight"], s["bias"])),
        SGD,
    ],
    "nested": lambda: [
        zf.shard(),
        moments(lambda m, v: {"x": {"0": m, "1": {"y": v}}}, lambda s: (s["x"]["0"], s["x"]["1"]["y"])),
        SGD,
    ],
    "of some leaves": lambda: [
        zf.shard(),
        zf.masked(
            zf.chain(moments(lambda m, v: {"m": m, "v": v, "n": torch.zeros(())}, lambda s: (s["m"], s["v"]))),
            lambda path: path != "w",
        ),
        SGD,
    ],
    "dicts of dicts": lambda: [zf.shard(), dicts_of_dicts("element"), SGD],
    "dicts of dicts at owners": lambda: [zf.shard(), dicts_of_dicts("leaf"), SGD],
    "a counter, at owners": lambda: [zf.shard(), with_a_counter("leaf"), SGD],
    "a counter with a leaf's name": lambda: [zf.shard(), counter_with_a_leafs_name("element"), SGD],
    "numbers of no leaf": lambda: [zf.reduce_scatter(), numbers_of_no_leaf("element"), SGD],
    "a norm, at owners": lambda: [zf.reduce_scatter(), by_norm(), SGD, zf.ema(0.5)],
    "an average": lambda: [zf.shard(), zf.adamw(1e-2), zf.ema(0.9)],
    "masters": lambda: [zf.all_reduce(), zf.precision(param_dtype=torch.float16), zf.scale_loss(8.0), zf.adamw(1e-2)],
    "kahan": lambda: [
        zf.shard(),
        zf.precision(store_dtype=torch.bfloat16, grad_dtype=torch.float32),
        zf.low_precision_adam(1e-2, rounding="kahan"),
    ],
    "muon, ZeRO-3": lambda: [zf.shard(), *muon()],
    "muon, ZeRO-1": lambda: [zf.accumulate(1), zf.reduce_scatter(), *muon()],
}


def made(form: str) -> tuple[Any, Any]:
    model = nn.ParameterDict({path: torch.ones(shape) for path, shape in SHAPES.items()})
    return model, zf.attach(model, zf.chain(*FORMS[form]()))


def train(model: Any, opt: Any, first: int, last: int) -> None:
    for step in range(first, last):
        data = {path: 6.0 * (1 + (step + torch.arange(p.numel())) % 5).reshape(p.shape) for path, p in model.items()}
        sum((p * data[path]).sum() for path, p in model.items()).backward()
        opt.step()
        opt.zero_grad()


def everything(model: Any, opt: Any) -> dict[str, Tensor]:
    """What transforms keep, whole, and what is stored of parameters."""
    found = flat([get_optimizer_state_dict(model, opt, options=FULL)["state"], zf.full_params(opt.tx, opt.state)])
    return {k: x.clone() for k, x in found.items() if isinstance(x, Tensor)}


def written(way: str, model: Any, opt: Any, at: str) -> None:
    if way == "file":
        torch.save(opt.state_dict(), f"{at}.{rank_and_size()[0]}.pt")
    elif way == "dcp":
        dcp.save({"opt": opt.state_dict()}, checkpoint_id=at)
    elif way == "parts":
        dcp.save({"opt": get_optimizer_state_dict(model, opt)}, checkpoint_id=at)
    elif way == "save":
        zf.save(at, opt)


def read(way: str, model: Any, opt: Any, at: str, source: tuple[Any, Any] | None) -> None:
    if way == "dict":
        assert source is not None
        opt.load_state_dict(copy.deepcopy(source[1].state_dict()))
    elif way == "full":
        assert source is not None
        given = copy.deepcopy(get_optimizer_state_dict(*source, options=FULL))
        set_optimizer_state_dict(model, opt, given, options=FULL)
    elif way == "file":
        opt.load_state_dict(torch.load(f"{at}.{rank_and_size()[0]}.pt", weights_only=False))
    elif way == "save":
        zf.load(at, like=opt)
    else:
        mine = {"opt": opt.state_dict() if way == "dcp" else get_optimizer_state_dict(model, opt)}
        dcp.load(mine, checkpoint_id=at)
        if way == "dcp":
            opt.load_state_dict(mine["opt"])
        else:
            set_optimizer_state_dict(model, opt, mine["opt"])


# In the same job, and from files on other ranks.
WAYS = ("dict", "full", "file", "dcp", "parts", "save")
ON_DISK = ("dcp", "parts", "save")


def differences(found: dict[str, Tensor], truth: dict[str, Tensor], way: str = "", later: bool = False) -> list[str]:
    """Of parameters too, and of their averages after a step, but where names tell states, and parameters stay.

    Kernels of Adam round the ends of parts otherwise, by a last bit.
    """
    keys = found.keys() | truth.keys()
    if way in ("full", "parts"):
        keys = {k for k in keys if k.startswith("/0/") and not (later and k.endswith("/average"))}
    return sorted(k for k in keys if k not in found or k not in truth or not close(found[k], truth[k]))


def close(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=8e-3 if a.dtype is torch.bfloat16 else 1e-6, atol=1e-7)


def run(rows: list[tuple[str, tuple[str, ...]]], folder: str, want: Any, writes: bool) -> Any:
    """What is wrong, by form and way; and how the dict of this rank is cut."""
    wrong, cut = {}, {}
    for form, ways in rows:
        source = None
        if writes:
            source = made(form)
            train(*source, 0, 3)
            wrong[form, "trained"] = differences(everything(*source), want[form][0])
            kept = flat(source[1].state_dict()["state"])
            cut[form] = {k: isinstance(x, DTensor) for k, x in kept.items()}
            for way in ways:
                written(way, *source, f"{folder}/{form}-{way}")
        for way in ways:
            model, opt = made(form)
            train(model, opt, 0, 1)
            read(way, model, opt, f"{folder}/{form}-{way}", source)
            wrong[form, way] = differences(everything(model, opt), want[form][0], way)
            train(model, opt, 3, 5)
            wrong[form, f"{way}, gone on"] = differences(everything(model, opt), want[form][1], way, True)
            opt.detach()
        if source is not None:
            source[1].detach()
    return {key: what for key, what in wrong.items() if what}, cut


def trained_alone(form: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, opt = made(form)
    train(model, opt, 0, 3)
    before = everything(model, opt)
    train(model, opt, 3, 5)
    return before, everything(model, opt)


# Over ranks torch's checkpoints have no form for it: each rank's own numbers may be of shards that nobody names.
ALONE = {"numbers of no leaf": WAYS}
ALL = [form for form in FORMS if form not in ALONE]
# Each form in one way of the same job and one from files.
MORE = {form: (WAYS[i % 3], WAYS[3 + i // 3 % 3]) for i, form in enumerate(ALL)}
# Each form in one way, each way of two forms.
SOME = {form: (WAYS[i % len(WAYS)],) for i, form in enumerate(ALL)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [SOME, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def test_any_number_of_ranks_goes_on_from_what_two_have_written(rows, tmp_path):
    want = {form: trained_alone(form) for form in rows}
    for form, (before, after) in want.items():
        assert sum(bool(x.any()) for x in before.values()) >= 4 and differences(before, after), form
    two = zf.launch(run, 2, list(rows.items()), str(tmp_path), want, True, timeout=limit(120))
    on_disk = [(form, tuple(way for way in ways if way in ON_DISK)) for form, ways in rows.items()]
    on_three = on_disk if rows is MORE else [row for row in on_disk if row[1]][1::3]
    three = zf.launch(run, 3, on_three, str(tmp_path), want, False, timeout=limit(120))
    for wrong, _ in (*two, *three, run(on_disk, str(tmp_path), want, False)):
        assert not wrong, wrong
    # Nothing is in the dict of one rank alone.
    assert two[0][1] == two[1][1] and all(any(cut.values()) == (form != "masters") for form, cut in two[0][1].items())


@pytest.mark.filterwarnings("ignore:.*torch.distributed")
def test_one_process_goes_on_from_what_it_has_written(tmp_path):
    wrong, _ = run(list(ALONE.items()), str(tmp_path), {form: trained_alone(form) for form in ALONE}, True)
    assert not wrong, wrong


def saved_alone(rows: list[str], folder: str, want: Any) -> dict[str, list[str]]:
    wrong = {}
    for form in rows:
        model, opt = made(form)
        zf.load(f"{folder}/{form}", like=opt)
        train(model, opt, 3, 5)
        wrong[form] = differences(everything(model, opt), want[form])
        opt.detach()
    return wrong


def test_ranks_go_on_from_what_one_process_has_saved(tmp_path):
    rows, want = ["nested", "dicts of dicts at owners", "a counter with a leaf's name"], {}
    for form in rows:
        model, opt = made(form)
        train(model, opt, 0, 3)
        zf.save(tmp_path / form, opt)
        train(model, opt, 3, 5)
        want[form] = everything(model, opt)
    for wrong in zf.launch(saved_alone, 2, rows, str(tmp_path), want, timeout=limit()):
        assert not any(wrong.values()), wrong


def test_a_missing_counter_is_named():
    (model, opt), (other, into) = made("a counter, at owners"), made("a counter, at owners")
    train(model, opt, 0, 2)
    given = get_optimizer_state_dict(model, opt)
    before = everything(other, into)
    del next(iter(given["state"].values()))["zerofn/held/x/0"]
    with pytest.raises(ValueError, match="zerofn/held/x/0: missing"):
        set_optimizer_state_dict(other, into, given)
    assert not differences(everything(other, into), before)


def counting(counts: bool) -> Transform:
    """It keeps a sum, and the number of its updates where `counts`."""

    def init(leaves, layout):
        kept = {"sum": zeros(leaves)}
        return {**kept, "n": torch.tensor(0)} if counts else kept

    def update(grads, state, params, carry, ctx):
        own = {"sum": added(state["sum"], grads)}
        return grads, {**own, "n": state["n"] + 1} if counts else own

    return zf.chain(Transform("mine", needs="element", init_fn=init, update_fn=update), zf.sgd(0.5))


def test_numbers_of_python_in_older_checkpoints_are_read(tmp_path, monkeypatch):
    """There a count was a value of the manifest, and so was what is no tensor in a state of another library."""
    header = saving._header
    values = {"mine/n": 7, "mine/word": "text", "mine/nothing": None}
    monkeypatch.setattr(saving, "_header", lambda *given: {**header(*given), "values": values})
    tx, params = counting(False), {"w": torch.ones(2)}
    zf.save(tmp_path / "c", zf.update(tx, params, zf.init(tx, params))[0])
    found = zf.load(tmp_path / "c", like=zf.init(counting(True), params)).transforms["mine"]
    assert found["n"].dtype == torch.int64 and int(found["n"]) == 7 and found["sum"]["w"].tolist() == [1.0, 1.0]
