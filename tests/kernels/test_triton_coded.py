"""The Triton kernel of Adam on codes, without a GPU: its bits under the interpreter, and what it is compiled to."""

from __future__ import annotations

from importlib.util import find_spec

import interpreted
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import by_the_compiler
from time_limits import limit

from zerofn.extend import Codes
from zerofn.kernels import fused_adam  # inside: whether torch fuses

KINDS = ["fused", "masters", "bf16"]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("examples", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_bits_are_those_of_the_kernel_in_c_and_of_the_formula(apart, examples):
    """Of blocks at the ends of rows, infinities, NaN and subnormal numbers, at any addresses."""
    if not fused_adam.gives_bits(True, True, torch.float32):
        pytest.skip("torch fuses no product with a sum here")

    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def holds(data):
        draw = data.draw
        bits = draw(st.sampled_from([8, 4]))
        how = Codes(
            bits, draw(st.sampled_from([2, 6, 64, 100, 128, 1024])), draw(st.sampled_from(["companded", "linear"]))
        )
        leaves = [
            (
                draw(st.sampled_from([1, 2, 5, 16])),
                draw(st.sampled_from([1, 7, 64, 128, 200, 256])),
                draw(st.integers(0, 99)),
                draw(st.sampled_from([0, 0, 1, 3])),
                draw(st.sampled_from([0, 128, 2**31 - 3, 2**35])),
            )
            for _ in range(draw(st.integers(1, 3)))
        ]
        kind, random, decay = draw(st.sampled_from(KINDS)), draw(st.booleans()), draw(st.booleans())
        beta1 = draw(st.sampled_from([0.9, 0.4]))
        found = apart.submit(interpreted.compare_coded, leaves, how, kind, random, beta1, decay)
        assert found.result(timeout=limit()) == []

    holds()


WHOLE = [(8, "bf16", True), (4, "masters", True), (4, "fused", True), (8, "masters", False), (4, "bf16", False)]


@pytest.mark.parametrize(
    ("bits", "kind", "random"),
    [pytest.param(*row, marks=pytest.mark.slow if i > 1 else ()) for i, row in enumerate(WHOLE)],
)
def test_programs_of_whole_blocks_have_the_same_bits(apart, bits, kind, random):
    """One program that reads 16 bytes at once, and one that masks; and both leaves at an address that is not even."""
    leaves = [(65, 256, 1, 0, 256), (65, 256, 2, 1, 0)]
    found = apart.submit(interpreted.compare_coded, leaves, Codes(bits), kind, random)
    assert found.result(timeout=limit()) == []


def test_where_a_leaf_is_cut_changes_no_bit(apart):
    assert apart.submit(interpreted.compare_coded_shards).result(timeout=limit()) == []


@pytest.mark.parametrize(
    ("kind", "bits", "wide", "codes"),
    [
        ("masters", 8, (2, 1), "v2.b32"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [("fused", 8, (4, 2), "v2.b32"), ("bf16", 8, (2, 1), "v2.b32"), ("bf16", 4, (2, 1), "b32")]
        ),
    ],
)
def test_compiled_for_an_h100_it_fuses_what_torch_fuses(kind, bits, wide, codes):
    """Two products of torch's kernel for each of 8 numbers, in both kinds of programs; without it none."""
    found = by_the_compiler(interpreted.coded_instructions, kind, bits)
    floats = {name for name in found if ".f32" in name and not name.startswith("cvt")}
    assert not [name for name in floats if name.startswith("mad") or "ftz" in name or "approx" in name]
    assert floats <= {f"{op}.rn.f32" for op in ("mul", "add", "sub", "div", "sqrt", "fma")}
    assert found.get("fma.rn.f32", 0) == (2 * 2 * 8 if kind != "bf16" else 0)
    # Of whole blocks parameters and gradients in 16 bytes, codes of two moments in 8 or 4.
    assert (found["ld.global.v4.b32"], found["st.global.v4.b32"]) == wide
    assert found[f"ld.global.{codes}"] >= 2 and found[f"st.global.{codes}"] >= 2
