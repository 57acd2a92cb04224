"""The kernels of a step, as people read them, and why a function is none."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from compilers import needs_compiler

import zerofn as zf
from zerofn.kernels import program  # inside: whether kernels are printed
from zerofn.testing import kernel_source

pytestmark = needs_compiler


@zf.leafwise(init=torch.zeros_like, needs="element")
def momentum(grad, param, state, *, beta=0.9):
    state = beta * state + grad
    return state, state


@zf.leafwise(needs="element")
def squashed(grad, param):
    return grad.tanh()


@zf.leafwise(optimizer=True, needs="element")
def descent(grad, param, *, lr):
    return param - lr * grad.tanh()


def test_a_kernel_reads_each_tensor_once_and_writes_it_once():
    (text,) = kernel_source(zf.chain(momentum(), zf.sgd(lr=0.1))).split("INLINE void ")[1:]
    assert text.count("a = p") == 3 and text.count("[i + 0] = ") == 2, text
    assert kernel_source(zf.chain(momentum(), zf.sgd(lr=0.5))) == kernel_source(zf.chain(momentum(), zf.sgd(lr=0.1)))


def test_dtypes_are_those_of_the_parameters():
    text = kernel_source(zf.lion(lr=0.1), {"w": torch.ones(3, dtype=torch.bfloat16), "v": torch.ones(2)})
    assert text.count("uint16_t *restrict p0") == text.count("float *restrict p0") == 1


# Bytes that are read and written, of each kernel, for each number of 4 bytes: by hand.
MOVED = {
    "sgd": (lambda: zf.sgd(0.1), [(8, 4)]),
    "its own momentum": (lambda: zf.sgd(0.1, momentum=0.9), [(12, 8)]),
    "momentum, sgd": (lambda: zf.chain(momentum(), zf.sgd(0.1)), [(12, 8)]),
    "adamw": (lambda: zf.adamw(0.1), [(16, 12)]),
    "clip, adamw, ema": (lambda: zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(0.1), zf.ema(0.9)), [(20, 16)]),
    "a function that is none": (lambda: zf.chain(momentum(), squashed(), zf.sgd(0.1)), [(8, 4), (8, 4)]),
    "lamb": (lambda: zf.lamb(0.1), [(16, 0), (16, 12)]),
}


@pytest.mark.parametrize("name", MOVED)
def test_the_bytes_that_each_kernel_moves(name):
    make, want = MOVED[name]
    heads = [line for line in kernel_source(make()).splitlines() if line.startswith("// Kernel")]
    assert heads == [
        f"// Kernel {i} of {len(want)} reads {read} and writes {written} bytes for each number."
        for i, (read, written) in enumerate(want, 1)
    ]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_triton_has_the_same_operations():
    text = kernel_source(zf.chain(momentum(), zf.sgd(lr=0.1)), target="triton")
    assert text.count("def formula_kernel(") == 1 and "x3 = x0 * n0\n" in text


def test_what_is_no_kernel_is_named_with_its_line():
    tx = zf.chain(squashed(), zf.sgd(lr=0.1))
    reason, *_ = kernel_source(tx).splitlines()
    assert reason.startswith("// Not one kernel: tanh, in squashed, line ") and reason.endswith("return grad.tanh()")
    with pytest.raises(ValueError, match=r"kernel_source of chain(.|\n)*tanh, in descent, line"):
        kernel_source(zf.chain(descent(lr=0.1)))


def test_arguments_that_are_refused():
    with pytest.raises(ValueError, match="target='ptx'"):
        kernel_source(zf.sgd(lr=0.1), target="ptx")


def test_nothing_stays_behind():
    x = torch.ones(4, requires_grad=True)
    before = [x.detach().clone(), program.printer_for(x.device)]
    with pytest.raises(ValueError):
        kernel_source(descent(lr=0.1), {"w": x})
    assert torch.equal(x, before[0]) and x.grad is None and program.printer_for(x.device) is before[1]


def test_check_transform_tells_why_a_function_is_no_kernel():
    (reason,) = zf.testing.check_transform(squashed())
    assert reason.startswith("tanh, in squashed, line ") and reason.endswith("return grad.tanh()")


@pytest.mark.parametrize("made", [momentum, lambda: zf.adafactor(0.1), lambda: zf.centralize(), lambda: zf.lamb(0.1)])
def test_check_transform_says_nothing_of_kernels_and_of_the_librarys_own(made):
    assert zf.testing.check_transform(made()) == []
