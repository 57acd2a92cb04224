"""Gradients that no kernel can read are refused by path, dtype and device, wherever gradients come in."""

import copy
import re

import pytest
import torch
from compilers import needs_compiler
from refusals import Kept, Refusals
from torch import nn

import zerofn as zf
from zerofn._compat.tensors import shape_only  # inside: what torch makes of shapes without numbers
from zerofn.kernels import native as _native  # inside: how kernels are built, loaded and kept
from zerofn.kernels.norms import squared_norm  # inside: a kernel by itself
from zerofn.kernels.plans import Plans  # inside: as above
from zerofn.kernels.program import printed_by  # inside: which kernel is taken
from zerofn.testing import assert_trees_equal, clone

BF16 = torch.bfloat16

TRANSFORMS = {
    "adamw": lambda: zf.adamw(0.1),
    "adam, clip": lambda: zf.chain(zf.clip_by_global_norm(1.0), zf.adam(0.1)),
    "sgd": lambda: zf.sgd(0.1),
    "momentum": lambda: zf.sgd(0.1, momentum=0.9),
    "accumulate": lambda: zf.chain(zf.accumulate(2), zf.adamw(0.1)),
    "scale": lambda: zf.chain(zf.scale_loss("dynamic"), zf.adamw(0.1)),
    "kahan": lambda: zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(0.1, rounding="kahan")),
    "stochastic": lambda: zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(0.1)),
    "offload": lambda: zf.chain(zf.offload(zf.adamw(0.1))),
    "group": lambda: zf.chain(zf.masked(zf.clip_by_value(0.1), lambda path: path == "b"), zf.sgd(0.1)),
}


def no_data(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def fake(x):
    with shape_only() as make:
        return make(x)


BAD = {
    "meta": (lambda x: x.to("meta"), "on meta, stored parameter of {dtype} on cpu"),
    "fake": (fake, "on cpu without memory: a FakeTensor"),
    "empty": (no_data, "on cpu without memory"),
}


def refuses(kind, paths, dtype):
    reason = BAD[kind][1].format(dtype=dtype)
    rows = "".join(f"(?=.*{re.escape(f'{path}: gradient of {dtype} {reason}')})" for path in paths)
    return pytest.raises(ValueError, match=rf"(?s)gradients do not fit the parameters{rows}.*g\.to\(p\.device\)")


def params():
    return {"b": torch.zeros(2), "w": torch.ones(2, 2)}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_updates_refuse_them_and_the_state_is_as_it_was(name, kind):
    tx = TRANSFORMS[name]()
    state = zf.init(tx, params())
    dtype = state.leaves["w"].dtype
    before = clone(state)
    good = {path: torch.ones_like(x) for path, x in state.leaves.items()}
    with refuses(kind, ["w"], dtype):
        zf.update(tx, {**good, "w": BAD[kind][0](good["w"])}, state)
    with refuses(kind, ["b", "w"], dtype):
        zf.update(tx, {path: BAD[kind][0](g) for path, g in good.items()}, state)
    assert_trees_equal(state, before)
    after, _ = zf.update(tx, good, state)
    assert name == "accumulate" or not after.leaves["w"].equal(before.leaves["w"])


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", ["adamw", "momentum", "group"])
def test_a_transform_of_its_own_does_so_too(name, kind):
    tx = TRANSFORMS[name]()
    with refuses(kind, ["b", "w"], torch.float32):
        tx.update({path: BAD[kind][0](torch.ones_like(x)) for path, x in params().items()}, tx.init(params()), params())


@pytest.mark.parametrize("kind", ["fake", "empty"])
@pytest.mark.parametrize("name", ["adamw", "stochastic", "accumulate"])
def test_a_step_refuses_what_it_finds_in_the_parameters(name, kind):
    """A meta gradient torch refuses itself."""
    model = nn.ParameterDict(params())
    opt = zf.attach(model, TRANSFORMS[name]())
    before = copy.deepcopy(model.state_dict())
    for p in model.values():
        p.grad = BAD[kind][0](torch.ones_like(p.detach()))
    with refuses(kind, ["b", "w"], model["w"].dtype):
        opt.step()
    assert_trees_equal(dict(model.state_dict()), dict(before))
    assert int(opt.state.micro_step) == 0


def test_an_update_within_backward_refuses_them():
    model = nn.ParameterDict(params())
    opt = zf.attach(model, zf.adamw(0.1), in_backward=True)
    model["w"].register_hook(fake)
    with refuses("fake", ["w"], torch.float32):
        (model["w"].sum() + model["b"].sum()).backward()
    assert int(opt.state.step) == 0 and model["w"].equal(torch.ones(2, 2))


def test_what_has_no_memory_of_its_own_is_right():
    """Views, scalars that are expanded, batches of torch.func, leaves without elements, tensors of zeros."""
    tx = TRANSFORMS["stochastic"]()
    state = zf.init(tx, {"w": torch.ones(2, 3), "none": torch.ones(0, 3)})
    expanded = {"w": torch.ones((), dtype=BF16).expand(2, 3), "none": torch.ones(0, 3, dtype=BF16)}
    plain = {path: g.clone() for path, g in expanded.items()}
    want = zf.update(tx, plain, state)[0]
    assert_trees_equal(zf.update(tx, expanded, state)[0], want)
    batch = {path: torch.stack([g, g]) for path, g in plain.items()}
    got = torch.func.vmap(lambda g: zf.update(tx, g, state)[0].leaves["w"])(batch)
    assert got[0].equal(want.leaves["w"]) and got[1].equal(want.leaves["w"])


def test_plans_are_made_without_memory():
    tx = zf.chain(zf.precision(store_dtype=BF16), zf.accumulate(2), zf.offload(zf.low_precision_adam(0.1)))
    assert zf.plan(tx, params()).bytes == zf.describe(zf.init(tx, params())).bytes


# ---- the last look before C ----


@needs_compiler
def test_sums_of_squares_are_not_taken_of_nothing():
    with pytest.raises(ValueError, match="without memory"):
        squared_norm({"w": no_data(torch.ones(3, dtype=BF16))})
    with pytest.raises(ValueError, match="on meta"):
        _native.squares(torch.ones(3, dtype=BF16, device="meta"))
    assert _native.squares(torch.ones(0, dtype=BF16)) == 0.0


# ---- refused ----

ROWS = Refusals()


PARTS = [(kind, first) for kind in BAD for first in (True, False)]


@ROWS(ValueError, re.compile(r"(?s)do not fit the parameters.*gradient of torch.float32.*\bon\b"), over=PARTS)
def parts_of_the_gradient_of_a_tied_parameter(row):
    """They are added up before anything else looks at them."""
    kind, first = row
    w = torch.ones(3)
    state = zf.init(zf.sgd(0.1), {"a": w, "b": w})
    grads = [torch.ones(3), BAD[kind][0](torch.ones(3))]
    yield
    zf.update(zf.sgd(0.1), dict(zip("ab", grads if first else grads[::-1], strict=True)), state)


SUM = Plans(lambda lists, numbers, about: ([sum(lists[1:], lists[0])], []))


def updated(lists):
    with printed_by("native", torch.device("cpu")):
        SUM.run(lists, {}, [0])


for _place in range(5) if _native.compiler() is not None else ():

    @ROWS(ValueError, "entry 1 of a list, a torch.bfloat16 tensor of shape (5,)", over=["meta", "empty"])
    def an_address_that_a_kernel_cannot_read(kind, place=_place):
        lists = [[torch.ones(3, dtype=BF16), torch.ones(5, dtype=BF16)] for _ in range(5)]
        good, lists[place][1] = lists[place][1], BAD[kind][0](lists[place][1])

        def without_elements():
            for others in lists:
                others[1] = good[:0]
            updated(lists)

        yield Kept(lambda: {}, without_elements)
        updated(lists)


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    row.check()
