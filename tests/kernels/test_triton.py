"""The Triton kernel, without a GPU: the bits of eager torch under its interpreter, and what it is compiled to."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product

import interpreted
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import by_the_compiler
from time_limits import limit

from zerofn.kernels.rounding import known_formats  # inside: rounding by itself, and its formats

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROUNDINGS = ("nearest", "stochastic", "kahan")
DTYPES = [(p, g, m, v) for p, g in product((BF16, F16, F32), repeat=2) for m, v in ((BF16, BF16), (F32, BF16))]


@pytest.mark.parametrize("examples", [2, pytest.param(15, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_bits_are_those_of_eager_torch_for_any_leaves(apart, rounding, examples):
    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def holds(data):
        # Sizes around a line of 16 bytes and a block of 1024.
        sizes = data.draw(st.lists(st.sampled_from([0, 1, 2, 7, 31, 100, 1023, 1024, 1025]), min_size=1, max_size=5))
        leaves = [
            (n, data.draw(st.sampled_from(DTYPES[:2] if i else DTYPES)), data.draw(st.integers(0, 99)), shift)
            for i, n in enumerate(sizes)
            for shift in [data.draw(st.integers(0, 3))]
        ]
        how = dict(
            lr=data.draw(st.floats(1e-6, 1.0)),
            weight_decay=data.draw(st.floats(0.0, 0.5)),
            eps=data.draw(st.sampled_from([1e-8, 1e-3])),
            beta1=data.draw(st.sampled_from([0.9, 0.99])),
            seed=data.draw(st.integers(-(2**63), 2**64 - 1)),
            form=data.draw(st.sampled_from(known_formats())),
            offsets=[data.draw(st.sampled_from([0, 7, 2**31 - 3, 2**32 - 40, 2**35 - 1])) for _ in sizes],
        )
        steps = [data.draw(st.integers(1, 2**40)) for _ in range(2)]
        found = apart.submit(interpreted.compare, leaves, steps, rounding=rounding, **how)
        assert found.result(timeout=limit()) == []

    holds()


@pytest.mark.parametrize(
    ("param", "rounding"),
    [
        pytest.param(param, rounding, marks=() if (param, rounding) == (BF16, "kahan") else pytest.mark.slow)
        for param in (BF16, F16, F32)
        for rounding in ROUNDINGS
    ],
)
def test_full_chunks_have_the_same_bits_as_ends(apart, rounding, param):
    """Two chunks of 16384 elements with 16-byte accesses, and an end."""
    leaves = [(2 * 16384 + 5, (param, BF16, BF16, BF16), 1, 0), (3, (param, BF16, BF16, BF16), 2, 1)]
    how = dict(lr=0.1, weight_decay=0.1, beta1=0.99, rounding=rounding, offsets=[2**32 - 9, 0])
    assert apart.submit(interpreted.compare, leaves, [2], **how).result(timeout=limit()) == []


@pytest.mark.parametrize("rounding", [ROUNDINGS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in ROUNDINGS[1:])])
def test_where_a_leaf_is_cut_changes_no_bit(apart, rounding):
    assert apart.submit(interpreted.compare_shards, rounding).result(timeout=limit()) == []


def test_numbers_of_a_step_are_read_on_the_device(apart):
    assert apart.submit(interpreted.compare_numbers).result(timeout=limit()) == []


FORMS = [("bf16", 1), ("fp16", 1), ("fp32 norm", 2)]
TRAINED = [(rounding, *form) for rounding in ROUNDINGS for form in FORMS]
ONCE = [(rounding, *form) for rounding, form in zip(ROUNDINGS, FORMS, strict=True)]


@pytest.mark.parametrize(
    ("rounding", "form", "launches"),
    [pytest.param(*row, marks=() if row in ONCE[1:] else pytest.mark.slow) for row in TRAINED],
)
def test_an_attached_model_trains_alike_in_one_launch(apart, rounding, form, launches):
    """One launch for each combination of dtypes: of a tree with float32 norms two."""
    ours, norms, counted = apart.submit(interpreted.train, rounding, True, form).result(timeout=limit())
    theirs, other_norms, none = apart.submit(interpreted.train, rounding, False, form).result(timeout=limit())
    assert ours.keys() == theirs.keys() and len(ours) > 16
    assert [p for p in ours if not torch.equal(ours[p], theirs[p])] == []
    assert norms == pytest.approx(other_norms, rel=1e-5)
    # The first step also checks the kernel on a sample, once for each combination of dtypes and rounding.
    assert counted[1:] == [launches] * 2 and none == [0] * 3


@pytest.mark.parametrize("broken", [False, True])
def test_a_kernel_with_other_bits_is_not_used_and_told_of(apart, broken):
    said, rows = apart.submit(interpreted.told_of_other_bits, broken).result(timeout=limit())
    assert rows == ""
    assert [("gives other bits" in x and "torch's operations" in x) for x in said] == [True] * broken


# The numbers of 16-byte accesses: 8 elements are one in 16 bits.
@pytest.mark.parametrize(
    ("dtypes", "rounding", "loads", "stores"),
    [
        ((BF16, BF16, BF16, BF16), "stochastic", 4, 3),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [
                ((BF16, BF16, BF16, BF16), "kahan", 5, 4),
                ((BF16, F32, BF16, BF16), "nearest", 5, 3),
                ((F16, F16, F32, BF16), "stochastic", 5, 4),
                ((F16, F16, BF16, BF16), "kahan", 5, 4),
                ((F32, BF16, BF16, BF16), "stochastic", 5, 4),
            ]
        ),
    ],
)
def test_compiled_for_an_h100_it_fuses_no_product_with_a_sum(dtypes, rounding, loads, stores):
    """And rounds quotients and roots exactly, flushes nothing to zero, and moves 16 bytes at once."""
    found = by_the_compiler(interpreted.instructions, dtypes, rounding)
    floats = {name for name in found if ".f32" in name}
    assert not [name for name in floats if name.startswith(("fma", "mad")) or "ftz" in name or "approx" in name]
    # Explicitly rounded: the assembler does not fuse these.
    assert {name for name in floats if not name.startswith("cvt")} == {
        f"{op}.rn.f32" for op in ("mul", "add", "sub", "div", "sqrt")
    }
    assert found["ld.global.v4.b32"] == loads and found["st.global.v4.b32"] == stores
