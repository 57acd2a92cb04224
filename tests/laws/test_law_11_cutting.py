"""Law of cutting: what says that it needs an element gives on flat pieces of leaves, cut anywhere, what it gives on
whole ones; and `check_transform` finds those that say so and do not."""

import dataclasses
import functools
import itertools
import re

import pytest
import torch
import torchopt
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import BF16, F32, F64, pipelines, seeds, trees
from refusals import Refusals
from transforms_table import ROWS, SAMPLE, row_params

import zerofn as zf
from zerofn.extend import Prepared, Scope, Transform
from zerofn.testing import check_transform, random_like, sample_params
from zerofn.testing import cutting as _cutting
from zerofn.testing.cutting import Case, completed  # inside: the search that check_transform makes is itself tested
from zerofn.testing.laws import _cut_anywhere  # inside: the search that check_transform makes is itself tested
from zerofn.testing.trees import difference  # inside: the search that check_transform makes is itself tested

element = functools.partial(zf.leafwise, needs="element")


# ---- liars ----


@element
def normed(grad, param):
    return grad / (grad.norm() + 1e-6)


@element
def centred(grad, param):
    return grad - grad.mean() if grad.numel() else grad.clone()


@element
def trust_ratio(grad, param):
    return grad * (param.norm() / (grad.norm() + 1e-3))


@element
def ranked(grad, param):
    return grad.flatten().sort().values.view(grad.shape)


@element
def summed_up(grad, param):
    return grad.flatten().cumsum(0).view(grad.shape)


@element
def flipped(grad, param):
    return grad.flatten().flip(0).view(grad.shape)


@element
def rolled(grad, param):
    return grad.flatten().roll(1).view(grad.shape)


@element
def orthogonal(grad, param):
    """One step of Newton and Schulz, as in Muon."""
    if grad.ndim != 2:
        return grad.clone()
    x = grad / (grad.norm() + 1e-6)
    return 1.5 * x - 0.5 * (x @ x.mT @ x)


@element
def softmax(grad, param):
    return grad.softmax(-1) if grad.ndim else grad.clone()


@element
def softmax_of_columns(grad, param):
    return grad.softmax(1) if grad.ndim == 2 else grad.clone()


@element
def decays_matrices(grad, param):
    """Elementwise for each leaf; but a piece of a matrix is no matrix."""
    return grad + 0.1 * param if param.ndim > 1 else grad.clone()


@element
def fan_in(grad, param):
    return grad / max(param.shape[-1], 1) ** 0.5 if param.ndim else grad.clone()


@element
def kernels_only(grad, param):
    return grad - grad.mean((1, 2, 3), keepdim=True) if grad.ndim == 4 else grad.clone()


@element
def by_place(grad, param):
    """Wants to know where in the leaf an element stands, and takes it for the place in the piece."""
    return grad * (1 + torch.arange(grad.numel()).view(grad.shape) % 3)


@element
def largest(grad, param):
    return grad / grad.abs().max() if grad.numel() else grad.clone()


@element
def clipped_to_length_ten(grad, param):
    """Does nothing to small gradients."""
    return grad * min(1.0, 10.0 / (float(grad.norm()) + 1e-6))


@element(init=lambda p: torch.zeros_like(p))
def at_the_second_step(grad, param, state):
    """Right at first; what it keeps is the mean, which is used afterwards."""
    return grad - state, torch.zeros_like(state) + (grad.mean() if grad.numel() else 0.0)


@element(init=lambda p: torch.zeros(()))
def one_number_a_leaf(grad, param, state):
    state = 0.9 * state + 0.1 * (grad * grad).sum()
    return grad / (state.sqrt() + 1e-3), state


@element(init=lambda p: p.new_zeros(p.shape[:1]))
def rows(grad, param, state):
    """As Adafactor keeps them."""
    state = state + (grad * grad).flatten(1).mean(1) if grad.ndim > 1 else state
    return grad.clone(), state


@element(init=lambda p: p / (p.norm() + 1e-6))
def in_its_first_state(grad, param, state):
    return grad + state, state


@element(optimizer=True)
def normed_descent(grad, param):
    return param - 0.1 * grad / (grad.norm() + 1e-6)


class OtherLibrary:
    """As another library might write it: a tree in, a tree out."""

    def __init__(self, of):
        self.of = of

    def init(self, params):
        return ()

    def update(self, updates, state, params=None):
        return {path: -0.1 * self.of(g) for path, g in updates.items()}, state


LIARS = {
    t.__name__: t()
    for t in (
        *(normed, centred, trust_ratio, ranked, summed_up, flipped, rolled, orthogonal, softmax),
        *(softmax_of_columns, decays_matrices, fan_in, kernels_only, by_place, largest, clipped_to_length_ten),
        *(at_the_second_step, one_number_a_leaf, rows, in_its_first_state, normed_descent),
    )
} | {
    "guest": zf.guest(OtherLibrary(lambda g: g / (g.norm() + 1e-6)), needs="element"),
    "guest's clip": zf.guest(torchopt.clip.clip_grad_norm(0.5), needs="element"),
    "offload": zf.offload(at_the_second_step()),
    "masked": zf.masked(normed(), {"block": False, "kernel": True, "gain": False, "empty": False, "one": False}),
    "in a group": zf.partition({"a": zf.chain(normed(), zf.sgd(0.1)), "b": zf.adamw(0.1)}, lambda p: "ab"["b" in p]),
    "beside a leaf": zf.chain(zf.leafwise(lambda grad, param: grad * 2)(), normed(), zf.sgd(0.1)),
    "inside of a leaf": zf.partition(
        {"a": zf.chain(zf.leafwise(lambda g, p: g * 2)(), normed(), zf.sgd(0.1)), "b": zf.sgd(0.1)},
        lambda p: "ab"["g" in p],
    ),
    "stored in bf16": zf.chain(zf.precision(store_dtype=BF16), summed_up(), zf.sgd(0.1)),
    "everything": zf.chain(
        *(zf.accumulate(2), zf.clip_by_global_norm(1.0), normed(), zf.adamw(0.1), zf.ema(0.5)),
    ),
}


def law(tx):
    """That law alone: others find some of these for other reasons."""
    tx = zf.chain(tx).parts[0] if not isinstance(tx, zf.Transform) else tx
    return functools.partial(_cut_anywhere, Case(tx, completed(tx), sample_params()))


@pytest.mark.parametrize("name", LIARS)
def test_a_transform_that_says_too_little_is_found(name):
    with pytest.raises(AssertionError, match="flat pieces of leaves are updated as whole leaves are") as caught:
        law(LIARS[name])()
    message = str(caught.value)
    assert "says needs='element'" in message.splitlines()[0] or name in ("guest", "guest's clip")
    if "raised" not in message:
        assert '\n  write: needs="leaf"' in message and "After micro-step" in message


def test_the_one_that_lies_is_named():
    with pytest.raises(AssertionError) as caught:
        law(LIARS["everything"])()
    assert str(caught.value).startswith("normed() says needs='element'")


@pytest.mark.parametrize("name", ["normed", "at_the_second_step", "kernels_only", "by_place", "decays_matrices"])
def test_the_same_transform_is_no_liar_that_says_leaf(name):
    """Nothing asks it for pieces, and so nothing hands it any."""
    law(dataclasses.replace(LIARS[name], needs="leaf"))()


@pytest.mark.parametrize("name", ["softmax_of_columns", "kernels_only", "decays_matrices"])
def test_one_that_needs_rows_says_so(name):
    law(dataclasses.replace(LIARS[name], needs="row"))()
    law(zf.centralize())()


# ---- those that tell the truth ----


@element(init=torch.zeros_like)
def lion(grad, param, state, *, beta=0.9):
    return (beta * state + (1 - beta) * grad).sign(), 0.99 * state + 0.01 * grad


@element
def squashed(grad, param):
    """Kernels of torch's that round the last elements of a tensor otherwise than those before."""
    return grad.sigmoid() + torch.atan2(grad, param) + (grad.abs() + 1e-3) ** 0.75


@element(init=lambda p: torch.zeros((), dtype=torch.int64))
def counted(grad, param, state):
    """A number for each leaf, but none of its elements."""
    return grad / (state + 1), state + 1


HONEST = {
    "lion": lion(beta=0.8),
    "squashed": squashed(),
    "counted": counted(),
    "torchopt": zf.guest(torchopt.adam(0.1), needs="element"),
    "torchopt sgd": zf.guest(torchopt.sgd(0.1, momentum=0.9), needs="element"),
    "offload": zf.offload(zf.chain(zf.accumulate(2), lion())),
}


@pytest.mark.parametrize("name", HONEST)
def test_elementwise_transforms_pass(name):
    law(HONEST[name])()


# Others are cut in `test_conformance` of tests/transforms, to the last bit too.
ALONE = [x for x, row in ROWS.items() if row.cut and not (row.laws and "laws" in row.often.split())]


@pytest.mark.parametrize("name", row_params("pieces", ALONE))
def test_what_is_built_in_has_the_same_bits(name):
    law(ROWS[name].make(SAMPLE))(ulps=0)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("optimizer", [zf.adam, zf.adamw])
def test_torchs_fused_adam_has_the_same_bits_where_no_vector_is_cut(optimizer, dtype):
    """Its kernel rounds the last elements, fewer than a vector has, otherwise than those before."""
    params = random_like({"w": torch.zeros(32, 64, dtype=dtype), "b": torch.zeros(192, dtype=dtype)}, 0)
    layout, _ = _cutting.make_layout({"w": torch.zeros(32), "b": torch.zeros(3)})
    tx, grads = optimizer(0.1, weight_decay=0.1), [random_like(params, i) for i in range(1, 5)]
    for ranks in (2, 3, 5):
        cut = [{p: (64 * i, 64 * j) for p, (i, j) in spans.items()} for spans in _cutting.draw_cut(layout, ranks, 7)]
        _cutting.check_cut(tx, zf.chain(tx), params, grads, {}, cut, functools.partial(difference, bound=None))


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("optimizer", [zf.adam, zf.adamw])
def test_torchs_fused_adam_cut_anywhere(optimizer, dtype):
    """The bound of its docstring: a unit in the last place of a moment in each update."""
    params = random_like({"w": torch.zeros(13, 7, dtype=dtype), "v": torch.zeros(37, dtype=dtype)}, 0)
    layout, _ = _cutting.make_layout(params)
    tx, grads = optimizer(0.01, weight_decay=0.1), [random_like(params, i) for i in range(1, 21)]
    for ranks in (2, 3, 5):
        whole = _cutting.run_pieces(tx, params, grads, {})
        cut, seen = _cutting.draw_cut(layout, ranks, 7), set()
        for rank, spans in enumerate(cut):
            piece = _cutting.run_pieces(tx, params, grads, {}, (rank, cut), whole)
            for i, (mine, theirs) in enumerate(zip(piece.states, whole.states, strict=True), 1):
                for name, a, e in _cutting.compared(theirs, mine, spans):
                    # What is small, after larger terms were added up, has the error of those.
                    floor = 0.0 if "exp_avg_sq" in name else 0.1 if "exp_avg" in name else 0.5
                    assert not difference(a, e, (i if "exp_avg" in name else 2, floor)), (i, name)
                    seen.update(name.split("/"))
        assert {"params", "exp_avg", "exp_avg_sq"} < seen


@settings(max_examples=15)
@given(trees((F32, BF16, F64)), pipelines(casts=False), seeds, st.integers(1, 5))
def test_any_pipeline_over_any_tree(params, parts, seed, ranks):
    """Within the rounding of torch's fused kernels; numbers and all else to the last bit."""
    if any("low_precision_adam" in repr(p) for p in parts):
        parts = [zf.precision(store_dtype=BF16), *parts]
    tx = zf.chain(*parts)
    layout, leaves = _cutting.make_layout(params)
    grads = [random_like(leaves, seed + i) for i in range(4)]
    cut = _cutting.draw_cut(layout, ranks, seed)
    near = functools.partial(difference, bound=(8.0, 4.0))
    for subject, pipe in _cutting.fit_for_pieces(tx):
        _cutting.check_cut(subject, pipe, params, grads, {}, cut, near)


@given(st.integers(0, 40), st.integers(1, 6), seeds)
def test_cuts_cover_every_leaf_once(numel, ranks, seed):
    layout, _ = _cutting.make_layout({"a": torch.zeros(numel), "b": torch.zeros(3)})
    cut = _cutting.draw_cut(layout, ranks, seed)
    for leaf in layout.leaves:
        ends = [spans[leaf.path] for spans in cut]
        assert ends[0][0] == 0 and ends[-1][1] == leaf.numel
        assert all(low <= high for low, high in ends)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))


# ---- found ----

FOUND = Refusals()


@FOUND(
    AssertionError,
    "says needs='row': some rows of a leaf are updated as they are",
    over=["normed", "trust_ratio", "softmax", "by_place", "summed_up", "orthogonal"],
)
def more_than_rows(name):
    yield
    law(dataclasses.replace(LIARS[name], needs="row"))()


FOUND.rows(
    AssertionError,
    (lambda: check_transform(by_place()), re.compile(r"by_place\(\) says needs='element': flat pieces")),
)


def with_a_number(prepare):
    """It says that it needs a number of the tree, of its gradients' squares."""

    def update(grads, state, params, norm, ctx):
        return {p: g / (norm + 1e-6) for p, g in grads.items()}, state

    return Transform("mine", Scope.TREE, "number", prepare_fn=prepare, update_fn=update)


def of_its_own_part(state, grads, params, ctx):
    return Prepared(carry=sum(float((g * g).sum()) for g in grads.values()) ** 0.5)


def summed(state, grads, params, ctx):
    total = sum((g * g).sum() for g in grads.values())
    return Prepared(carry=float(ctx.reduction.sum(torch.as_tensor(total))) ** 0.5)


def maximum(state, grads, params, ctx):
    total = sum((g * g).sum() for g in grads.values())
    return Prepared(carry=float(ctx.reduction.max(torch.as_tensor(total))) ** 0.5)


def test_a_number_of_all_ranks_is_one():
    law(with_a_number(summed))()


FOUND.rows(
    AssertionError,
    (lambda: law(with_a_number(of_its_own_part))(), "flat pieces"),
    (lambda: law(with_a_number(maximum))(), "the max over pieces is that over whole leaves"),
)


@pytest.mark.parametrize("row", FOUND)
def test_found(row):
    row.check()
