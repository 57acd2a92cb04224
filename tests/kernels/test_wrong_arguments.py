"""What kernels are given that they cannot compute with: refused by name, with what they take."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from refusals import Refusals

import zerofn as zf
from zerofn.core.state import counter  # inside: a count as states have it
from zerofn.extend import fused_update
from zerofn.kernels.rounding import stochastic_round  # inside: rounding by itself

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
WRONG = Refusals()

# ---- the number of an update ----


def lists(dtypes=(F32,) * 4) -> list[list[torch.Tensor]]:
    return [[torch.ones(3).to(dtype)] for dtype in dtypes]


KERNELS = {
    "fused_update": lambda step: fused_update(*lists(), step=step, decoupled=True, **NUMBERS),
}
STEPS: dict[str, tuple[Any, type[Exception], str]] = {
    "zero": (0, ValueError, "counted from 1"),
    "a tensor of zero": (torch.tensor(0), ValueError, "counted from 1"),
    "below": (torch.tensor(-1), ValueError, "counted from 1"),
    "NaN": (float("nan"), ValueError, "counted from 1"),
    "no whole number": (1.5, ValueError, "whole numbers"),
    "no whole tensor": (torch.tensor(1.5), ValueError, "whole numbers"),
    "several": (torch.tensor([1, 1]), ValueError, "the same number of updates"),
    "a bool": (True, TypeError, "is a bool"),
    "a str": ("1", TypeError, "is a str"),
}
for _name, (_what, (_step, _error, _why)) in itertools.product(KERNELS, STEPS.items()):
    _words = rf"{_name}\(step=.*\n  why:   .*{_why}.*\n  write: {_name}\(step=count \+ 1\)"
    WRONG.rows(_error, (lambda run=KERNELS[_name], step=_step: run(step), re.compile(_words)))

# ---- rounding ----

BITS = torch.zeros(1, dtype=torch.int32)
WRONG.rows(
    ValueError,
    (lambda: stochastic_round(torch.ones(1, dtype=F64), BF16, bits=BITS), re.compile(r"(?s)float64.*x\.float\(\)")),
    (lambda: stochastic_round(torch.ones(1), F32, bits=BITS), re.compile(r"(?s)float32.*write: x\.to")),
)


@WRONG(ValueError, re.compile(r"(?s)rounding_format 3.*\(1, 2\).*update of zerofn"))
def a_format_of_the_future():
    tx = zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(0.01))
    state = zf.init(tx, {"w": torch.linspace(-1, 1, 30)})
    own = {**state.transforms["low_precision_adam"], "rounding_format": counter(3)}
    state = replace(state, transforms={**state.transforms, "low_precision_adam": own})
    yield
    zf.update(tx, {"w": torch.ones(30)}, state)


@pytest.mark.parametrize("row", WRONG)
def test_refused(row):
    row.check()
