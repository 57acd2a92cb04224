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
from zerofn.extend import adam_, adam_update, fused_update
from zerofn.kernels.rounding import stochastic_round  # inside: rounding by itself

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
WRONG = Refusals()

# ---- the number of an update ----


def lists(dtypes=(F32,) * 4) -> list[list[torch.Tensor]]:
    return [[torch.ones(3).to(dtype)] for dtype in dtypes]


KERNELS = {
    "adam_": lambda step: adam_(*lists(), step=step, keys=[0], offsets=[0], **NUMBERS),
    "adam_update": lambda step: adam_update(*[xs[0] for xs in lists()], step=step, key=0, offset=0, **NUMBERS),
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

# ---- lists and dtypes ----


def update(given=None, dtypes=(BF16,) * 4, **options):
    given = lists(dtypes) if given is None else given
    count = len(given[0])
    return lambda: adam_(*given, **dict(step=1, lr=0.01, keys=[0] * count, offsets=[0] * count) | options)


WRONG.rows(
    ValueError,
    (update(dtypes=(BF16, BF16, F16, F16)), re.compile(r"(?s)exp_avgs\[0\]: torch.float16.*6e-8.*bfloat16")),
    (update(dtypes=(F64, BF16, BF16, BF16)), re.compile(r"(?s)params\[0\]: torch.float64.*float32")),
    (update(dtypes=(BF16, torch.int32, BF16, BF16)), "grads[0]: torch.int32"),
    (update(rounding="up"), re.compile(r"(?s)rounding='up'.*'stochastic'")),
    (update(rounding="kahan"), re.compile(r"(?s)kahan.*compensations=\[torch.zeros_like")),
    (update(step=0), "counted from 1"),
    (update(keys=[0, 1]), "lengths"),
    (update(form=3), re.compile(r"(?s)form=3.*\(1, 2\)")),
    (update(implementation="fast"), "implementation='fast'"),
    (
        update([[torch.ones(2, dtype=BF16)], *lists((BF16,) * 3)]),
        "entry 0 have shapes [(2,), (3,)",
    ),
    (
        update([*lists((BF16,) * 4), [torch.zeros(3)]], rounding="kahan"),
        re.compile(r"(?s)compensations\[0\]: torch.float32.*zeros_like"),
    ),
)


def test_no_leaves_are_no_mistake():
    update([[], [], [], []])()


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
