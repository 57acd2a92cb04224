"""Views that cast are refused where they are called; those that take a number of a piece, at the start."""

import re

import pytest
import torch
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn._compat.functorch import COMPILES_STATES  # inside: whether this torch makes one graph of a step
from zerofn.extend import Transform, View, as_it_is
from zerofn.testing import check_transform

BF16 = torch.bfloat16


def of(needs="element", functions=None, **view):
    made = View(**view)
    return Transform("mine", needs=needs, view_fn=lambda layout, ranks: made, through=as_it_is, **(functions or {}))


def same(x, leaf):
    return x


def to(dtype):
    return lambda x, leaf: x.to(dtype)


ORDERS = {
    "one process": lambda t: (t,),
    "shard behind": lambda t: (t, zf.shard()),
    "shard in front": lambda t: (zf.shard(), t),
    "reduce_scatter behind": lambda t: (t, zf.reduce_scatter()),
    "reduce_scatter in front": lambda t: (zf.reduce_scatter(), t),
}


def told(tx):
    """By route, what the error of a first step says."""
    params = {"weight": torch.ones(3, 2), "bias": torch.ones(3)}
    loss = lambda p: sum(x.float().sum() for x in p.values())  # noqa: E731

    def attached():
        model = nn.Linear(2, 3)
        opt = zf.attach(model, tx)
        model(torch.ones(1, 2).to(model.weight.dtype)).sum().backward()
        opt.step()

    found = []
    for run in (lambda: zf.make_step(loss, tx)(zf.init(tx, params)), attached):
        try:
            run()
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def casting():
    """What is told of each function that casts, in each order."""
    return {
        (name, order): told(zf.chain(*parts(of(**{"view": same, "pull": same, "store": same, name: to(dtype)}))))
        for name, dtype in (("view", BF16), ("view", torch.int32), ("pull", BF16), ("store", torch.float64))
        for order, parts in ((key, lambda t, make=make: (*make(t), zf.sgd(0.1))) for key, make in ORDERS.items())
    }


def assert_refused(found):
    for (name, order), messages in found.items():
        for said in messages:
            assert said.startswith("mine: its view does not fit its leaves\n"), (name, order, said)
            assert re.search(rf"\n  (weight|bias): `{name}` gives torch\..* of a tensor of torch\.float32", said)
            assert "zf.precision(param_dtype=...), which casts" in said


def test_a_view_that_casts_is_refused_by_leaf_on_one_process_too():
    """On ranks it failed in the user's matrix product, or gave the model weights that were rounded to integers."""
    assert_refused(casting())


def test_a_view_that_casts_is_refused_on_ranks():
    for found in zf.launch(casting, 2, timeout=limit(60)):
        assert_refused(found)


def test_the_dtype_is_that_of_the_place_in_the_chain():
    """In front of what casts it is given what the model sees, behind it what is stored."""
    casts = zf.precision(param_dtype=BF16)
    for parts in (
        (of(view=to(BF16), pull=to(BF16)), casts),
        (casts, of(view=to(torch.float32), pull=to(torch.float32))),
    ):
        assert told(zf.chain(*parts, zf.sgd(0.1))) == ["", ""]
    for parts in ((of(view=to(torch.float32)), casts), (casts, of(view=to(BF16)))):
        assert all("`view` gives torch." in said for said in told(zf.chain(*parts, zf.sgd(0.1))))


def test_a_state_in_another_dtype_does_not_widen_what_is_seen():
    """A product of bf16 with a number in fp32 is bf16; with a tensor in fp32 it is fp32, and is refused."""

    def tx(form):
        kept = {"init_fn": lambda leaves, layout: {"by": {path: form(x) for path, x in leaves.items()}}}
        by = lambda x, leaf, state: x * state["by"][leaf.path]  # noqa: E731
        return zf.chain(zf.precision(store_dtype=BF16), of(view=by, pull=by, reads=True, functions=kept), zf.sgd(0.1))

    assert told(tx(lambda x: torch.tensor(2.0))) == ["", ""]
    for said in told(tx(lambda x: torch.ones_like(x, dtype=torch.float32))):
        assert ": `view` gives torch.float32 of a tensor of torch.bfloat16" in said


# ---- needs="number" ----


def normed(x, leaf):
    return x / x.norm()


def scaled_by_state(x, leaf, state):
    return x * state["by"]


def by_state(needs="number"):
    functions = {"init_fn": lambda leaves, layout: {"by": torch.tensor(2.0)}}
    return of(needs, functions, view=scaled_by_state, pull=scaled_by_state, reads=True)


def clipped():
    """The number is that of its update half, and its view is elementwise."""
    twice = lambda x, leaf: 2 * x  # noqa: E731
    functions = {"update_fn": lambda grads, state, *more: (dict(grads), state)}
    return of("number", functions, view=twice, pull=twice, store=lambda x, leaf: x / 2)


KINDS = {
    "takes it itself": lambda: of("number", view=normed, pull=same),
    "of its state": by_state,
    "of its update half": clipped,
    "factor": lambda: of("number", factor=lambda state: torch.tensor(8.0)),
}


def seen():
    found = {}
    for kind, make in KINDS.items():
        for order, parts in ORDERS.items():
            tx = zf.chain(*parts(make()), zf.sgd(0.1))
            try:
                found[kind, order] = zf.full_params(tx, zf.init(tx, {"w": torch.arange(1.0, 5.0)}))["w"]
            except ValueError as error:
                found[kind, order] = str(error)
    return found


def test_a_view_that_takes_a_number_of_a_piece_is_refused_behind_a_cut():
    """Each rank would have the norm of its piece. One that has the number from its state is right."""
    one = seen()
    for found in zf.launch(seen, 2, timeout=limit(60)):
        for (kind, order), got in found.items():
            if kind == "takes it itself" and order.endswith("in front"):
                assert "\n  w: mine needs a number (needs='number') and reads no state" in got
                assert "\n  write: chain(mine, " in got
            else:
                torch.testing.assert_close(got, one[kind, order], msg=f"{kind}, {order}: {got}")


def test_check_transform_finds_it_on_one_process():
    with pytest.raises(AssertionError, match="it says needs='number': a flat piece of a leaf is seen"):
        check_transform(KINDS["takes it itself"]())


@pytest.mark.parametrize(
    "order", [pytest.param(x, marks=pytest.mark.slow if "reduce_scatter" in x else ()) for x in ORDERS]
)
def test_a_view_with_a_mask_in_another_dtype_is_refused(order):
    mask = torch.ones(3, 2)
    masked = of(view=lambda x, leaf: x * mask, pull=lambda g, leaf: g * mask.to(g.dtype))
    params = {"w": torch.ones(3, 2)}
    plain = zf.chain(*ORDERS[order](masked), zf.sgd(0.5))
    step = zf.make_step(lambda p: p["w"].sum(), plain)
    # Before torch 2.13 a step runs uncompiled inside of torch.compile.
    compiled = [torch.compile(step, backend="eager", fullgraph=COMPILES_STATES)] if order == "one process" else []
    for run in (step, *compiled):
        assert torch.equal(zf.full_params(plain, run(zf.init(plain, params))[0])["w"], torch.full((3, 2), 0.5))
    tx = zf.chain(*ORDERS[order](masked), zf.precision(param_dtype=BF16), zf.sgd(0.5))
    with pytest.raises(ValueError, match=r"mine: .*\n  w: `view` gives torch\.float32 of a tensor of torch\.bfloat16"):
        zf.make_step(lambda p: p["w"].sum(), tx)(zf.init(tx, params))
    model = nn.Linear(2, 3, bias=False)
    with pytest.raises(ValueError, match=r"mine: .*\n  weight: `view` gives torch\.float32"):
        zf.attach(model, tx)
        model(torch.ones(1, 2, dtype=BF16))
