"""How chains and schedules are shown: as one would write them."""

from __future__ import annotations

import pickle

import public_names
import pytest
import torch
from hypothesis import given, settings
from random_pipelines import pipelines

import zerofn as zf
from zerofn import schedules

NAMES = {**public_names.NAMES, "torch": torch, "schedules": schedules}


@settings(max_examples=40)
@given(pipelines())
def test_a_chain_prints_as_one_would_write_it(parts):
    # A mask that is a function prints as its name.
    parts = [p for p in parts if p.name not in ("masked", "partition")]
    for tx in (zf.chain(*parts), *parts):
        assert eval(repr(tx), dict(NAMES)) == tx


def test_defaults_are_left_out_and_nothing_else():
    assert repr(zf.shard()) == "shard()"
    assert repr(zf.accumulate(4)) == "accumulate(every=4)"
    assert repr(zf.adamw(0.002, betas=(0.9, 0.95))) == "adamw(lr=0.002, betas=(0.9, 0.95))"
    # True is 1 to Python, and is not how one would write it.
    assert repr(zf.scale_loss(hysteresis=2)) == "scale_loss(hysteresis=2)"
    assert repr(zf.sgd(0.1).named("head")) == "sgd(lr=0.1).named('head')"


def test_transforms_with_tensors_among_their_arguments_compare_by_their_numbers():
    @zf.leafwise(needs="element")
    def weighted(grad, param, *, by):
        return grad * by

    assert weighted(by=torch.ones(3)) == weighted(by=torch.ones(3))
    assert weighted(by=torch.ones(3)) != weighted(by=torch.tensor([1.0, 1.0, 2.0]))
    assert weighted(by=torch.ones(3)) != weighted(by=torch.ones(2))
    assert zf.chain(weighted(by={"a": torch.ones(2)}), zf.sgd(1)) == zf.chain(
        weighted(by={"a": torch.ones(2)}), zf.sgd(1.0)
    )


SCHEDULES = {
    "constant": schedules.constant(0.1),
    "linear": schedules.linear(1.0, 0.0, 4),
    "warmup": schedules.warmup(3e-4, 10),
    "warmup of one": schedules.warmup(3e-4, 1),
    "cosine": schedules.cosine(1.0, 10, 0.1),
    "warmup_cosine": schedules.warmup_cosine(3e-4, 10, 100),
    "step": schedules.step(1.0, 10, 0.5),
    "layer_keep": schedules.layer_keep(0.5, 0.01),
    "by hand": schedules.Piecewise(schedules.constant(0.1), 5, schedules.linear(0.1, 0.0, 20)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_print_as_one_would_write_them(name):
    schedule = SCHEDULES[name]
    again = eval(repr(schedule), dict(NAMES))
    assert again == schedule and repr(again) == repr(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert "0000000" not in repr(schedule)
