"""Formulas over lists of leaves in one kernel, without a GPU: torch's bits under Triton's interpreter."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import list_programs
import pytest
from covering import covering, few_and_all
from hypothesis import assume, given, settings
from interpreted import by_the_compiler
from time_limits import limit

from zerofn.kernels.program import Program  # inside: programs by themselves

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


SIZES = (0, 1, 7, 31, 1023, 1025)


@pytest.mark.parametrize("examples", [5, pytest.param(40, marks=pytest.mark.slow)])
def test_bits_are_those_of_torch_for_any_formula(apart, examples):
    @settings(max_examples=examples, deadline=None)
    @given(list_programs.programs(sizes=SIZES, more=True))
    def holds(drawn):
        from zerofn.kernels import print_triton  # inside: what is printed

        assume(print_triton.can(drawn.program))
        assert apart.submit(list_programs.by_triton, drawn).result(timeout=limit()) == [], drawn

    holds()


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_each_operation_has_the_bits_of_torch(apart, kind):
    drawn = list_programs.each_operation(kind, [37])
    assert apart.submit(list_programs.by_triton, drawn).result(timeout=limit()) == []


def test_full_chunks_have_the_same_bits_as_ends(apart):
    """Two chunks of 16384 elements with 16-byte accesses, and an end."""
    steps = (("addcmul", ("x0", "x1", "x1", "n0"), 0), ("sqrt", ("x2",), 0), ("lerp", ("x0", "x3", "n1"), 1))
    program = Program((0, 1), (), (0, 1), steps, ((0, "x3"), (1, "x4")), (0, 1), ())
    drawn = list_programs.Drawn(program, [0.25, 0.125], [0, 2 * 16384 + 5, 3], 0, 1, None)
    assert apart.submit(list_programs.by_triton, drawn).result(timeout=limit()) == []


# Of many leaves by a table, and of numbers without one.
OVER = list(itertools.product(list_programs.FUNCTIONS, list_programs.DTYPES[:4], ((5, 0, 300), (1,))))


# Each function with each of both, and each dtype with each.
@pytest.mark.parametrize("rows", few_and_all(covering(OVER, key=lambda row: (row[::2], row[1:])), OVER))
def test_a_function_of_lists_is_that_of_tensors(apart, rows):
    """Of floats, counts and bools."""
    for name, dtype, sizes in rows:
        found = apart.submit(list_programs.compare_functions, name, dtype, list(sizes)).result(timeout=limit())
        assert found == [], (name, dtype, sizes)


def test_sums_are_exact_to_float32(apart):
    off = apart.submit(list_programs.sums, [3, 0, 1, 40_000, 16_384]).result(timeout=limit())
    assert max(off) < 1e-6 and len(off) == 6


@pytest.mark.parametrize("kind", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_compiled_for_an_h100_it_fuses_what_torch_fuses(kind):
    """And rounds quotients and roots exactly, flushes nothing to zero, and moves 16 bytes at once."""
    plain = [("mul", ("x0", "x1"), kind), ("add", ("x2", "n0"), kind), ("sqrt", ("x3",), kind)]
    plain += [("div", ("x1", "x4"), kind)]
    found = by_the_compiler(list_programs.instructions, [kind, kind], plain)
    fused = by_the_compiler(list_programs.instructions, [kind, kind], [("plus", ("x0", "x1", "n0"), kind)])
    for names in (found, fused):
        assert not [name for name in names if "ftz" in name or "approx" in name]
        # 1024 elements on 128 threads are 8 for each: in 32 bits twice 16 bytes.
        wide = 1 if kind else 2
        assert names["ld.global.v4.b32"] == 2 * wide and names["st.global.v4.b32"] == wide
    assert not [name for name in found if name.startswith(("fma", "mad")) and ".f32" in name]
    # The compiler knows that a product or a sum of two fp16 in fp32, rounded to fp16, is theirs in fp16.
    assert {"sqrt.rn.f32", "div.rn.f32", *(["mul.rn.f32", "add.rn.f32"] if kind != 2 else [])} <= found.keys()
    assert "fma.rn.f32" in fused and not [name for name in fused if name.startswith(("mul", "add")) and ".f32" in name]


def test_functions_of_numbers_and_bools_are_compiled_for_an_h100():
    assert by_the_compiler(list_programs.compiled_functions) == []


CODED = [(kind, bits, code) for kind in (0, 1) for bits in (8, 4) for code in ("companded", "linear")]


@pytest.mark.parametrize(
    ("kind", "bits", "code"),
    [pytest.param(*row, marks=() if row in CODED[1:7:5] else pytest.mark.slow) for row in CODED],
)
def test_codes_of_any_program_have_the_bits_of_torch(apart, kind, bits, code):
    """Of blocks at the ends of rows, and of leaves of whole blocks for one program and more."""
    for block, shapes in ((100, [(3, 130), (2, 7)]), (128, [(65, 256), (1, 128)])):
        found = apart.submit(list_programs.compare_codes, kind, bits, code, block, shapes).result(timeout=limit())
        assert found == [], block


@pytest.mark.parametrize(
    ("kind", "bits", "code"),
    [pytest.param(*row, marks=() if row == CODED[4] else pytest.mark.slow) for row in CODED],
)
def test_codes_are_compiled_for_an_h100(kind, bits, code):
    found = by_the_compiler(list_programs.compiled_codes, kind, bits, code)
    floats = {name for name in found if ".f32" in name and not name.startswith("cvt")}
    assert floats <= {f"{op}.rn.f32" for op in ("mul", "add", "sub", "div", "sqrt")}
    # Codes of two columns in 8 bytes, or in 4.
    wide = "v2.b32" if bits == 8 else "b32"
    assert found[f"ld.global.{wide}"] >= 2 and found[f"st.global.{wide}"] >= 2


def test_wide_numbers_and_integers_are_compiled_for_an_h100():
    found = by_the_compiler(list_programs.compiled_wide)
    assert any(name.startswith("mul") and "f64" in name for name in found)
