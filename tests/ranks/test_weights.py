"""Weights of micro-batches over ranks: the big batch, or an error on every rank."""

from __future__ import annotations

import os

import pytest
import torch

import zerofn as zf

WEIGHTS = [[1.0, 3.0], [5.0, 2.0]]
GRADS = [[1.0, 2.0], [3.0, 4.0]]
# sum(w * g) / sum(w) over both ranks and both micro-steps, by hand: 30 / 11.
MEAN = 30 / 11


def _pipeline(kind: str) -> zf.Transform:
    window = zf.accumulate(2, weighted=True)
    orders = {
        "zero 1": (window, zf.reduce_scatter()),
        "zero 2": (zf.reduce_scatter(), window),
        "zero 3": (zf.shard(), window),
        "data parallel": (window, zf.all_reduce()),
        "averaged at once": (zf.all_reduce(), window),
    }
    return zf.chain(*orders[kind], zf.sgd(1.0))


def _pure(kind: str) -> list[float]:
    rank, tx = int(os.environ["RANK"]), _pipeline(kind)
    state = zf.init(tx, {"w": torch.zeros(3, dtype=torch.float64)})
    step = zf.make_step(lambda p, g: p["w"].sum() * g, tx)
    for weight, g in zip(WEIGHTS[rank], GRADS[rank], strict=True):
        state, _ = step(state, torch.tensor(g, dtype=torch.float64), weight=weight)
    return zf.full_params(tx, state)["w"].tolist()


def _eager(kind: str) -> list[float] | str:
    rank, tx = int(os.environ["RANK"]), _pipeline(kind)
    model = torch.nn.Linear(1, 3, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    opt = zf.attach(model, tx)
    try:
        for weight, g in zip(WEIGHTS[rank], GRADS[rank], strict=True):
            (model(torch.ones(1, 1, dtype=torch.float64)).sum() * g).backward()
            opt.step(weight=weight)
            opt.zero_grad()
    except ValueError as error:
        return str(error)
    return opt.detach().weight.detach().reshape(-1).tolist()


def _all(kinds: list[str]) -> dict:
    return {(kind, route.__name__): route(kind) for kind in kinds for route in (_pure, _eager)}


def test_unequal_weights_are_the_big_batch_or_refused_on_every_rank():
    kinds = ["zero 1", "zero 2", "zero 3", "data parallel", "averaged at once"]
    for found in zf.launch(_all, 2, kinds, timeout=100):
        for (kind, route), got in found.items():
            if route == "_eager" and kind in ("zero 2", "zero 3", "averaged at once"):
                # Its gradients had been averaged before any weight was known.
                assert isinstance(got, str) and "on average over ranks" in got
                assert "before reduce_scatter or all_reduce" in got
            else:
                assert got == pytest.approx([-MEAN] * 3, rel=1e-12), (kind, route)
