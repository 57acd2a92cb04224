"""torch.compile of a loop that holds a step: the numbers of the plain loop, and told once that the loop is unrolled."""

from __future__ import annotations

import warnings

import pytest
import torch

import zerofn as zf
from zerofn._compat.functorch import COMPILES_STATES  # inside

pytestmark = pytest.mark.skipif(not COMPILES_STATES, reason="before torch 2.13 a step runs uncompiled in torch.compile")
TOLD = r"(?s)torch.compile of a function that makes 8 steps.*unrolls.*write: step = torch.compile\(zf.make_step"


def test_an_unrolled_loop_is_told_once():
    torch._dynamo.reset()
    tx = zf.sgd(0.1, momentum=0.9)
    step = zf.make_step(lambda p, x: (p["w"] * x).square().sum(), tx)
    state = zf.init(tx, {"w": torch.ones(2)})

    def train(state: zf.State, xs: list[torch.Tensor]) -> zf.State:
        for x in xs:
            state, _ = step(state, x)
        return state

    graphs = []
    compiled = torch.compile(train, backend=lambda graph, _: graphs.append(graph) or graph)
    xs = [torch.full((2,), 1.0 + 0.1 * i) for i in range(8)]
    # A few steps are meant to be in one graph, and the warning would be an error here.
    compiled(state, xs[:2])
    with pytest.warns(UserWarning, match=TOLD) as told:
        found = compiled(state, xs)
    assert len(told) == 1 and told[0].filename == __file__
    before = len(graphs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = compiled(state, xs)
    # What counts steps while a graph is made is no part of it.
    assert len(graphs) == before
    expected = train(state, xs)
    for got in (found, again):
        torch.testing.assert_close(got.params["w"], expected.params["w"])
    assert not torch.equal(expected.params["w"], state.params["w"])
