"""Random pipelines pass `zerofn.testing.check_transform`, and the data of these tests is alive."""

import warnings

import optree
import pytest
import torch
from hypothesis import given, settings
from random_programs import OPTIMIZERS, loss, pipelines, run

import zerofn as zf
from zerofn.testing import assert_trees_equal, check_transform, random_like


@settings(max_examples=2)
@given(pipelines(optimizers=[o for o in OPTIMIZERS if o.name not in ("masked", "partition")]))
def test_random_pipelines_conform(parts):
    # A lambda in a mask does not pickle; the conformance check says so.
    check_transform(zf.chain(*(p for p in parts if p.name != "masked")))


def test_data_of_these_tests_is_alive():
    params = {"w": torch.ones(3), "b": [torch.ones(2, 2)]}
    grads = torch.func.grad(loss)(params, random_like(params, 0))
    assert all((g != 0).all() for g in optree.tree_leaves(grads))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(AssertionError):
            assert_trees_equal(run(zf.sgd(0.1), params, 1).leaves, zf.init(zf.sgd(0.1), params).leaves)


def test_tied_parameters_stay_tied():
    w = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    check_transform(zf.adamw(lr=0.1), {"embed": w, "head": w, "b": torch.tensor([1.0, 2.0])})


@pytest.mark.parametrize(
    "first", [zf.clip_by_value(1.0), zf.precision(store_dtype=torch.bfloat16)], ids=lambda t: t.name
)
def test_a_pipeline_without_an_optimizer_that_watches_parameters_is_completed(first):
    check_transform(zf.chain(first, zf.ema(0.9)))
