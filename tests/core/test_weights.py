"""Weights of micro-batches over ranks: the big batch, or an error on every rank."""

from __future__ import annotations

import os

import pytest
import torch
from stages import STAGES, around
from time_limits import limit

import zerofn as zf

WEIGHTS = [[1.0, 3.0], [5.0, 2.0]]
GRADS = [[1.0, 2.0], [3.0, 4.0]]
# sum(w * g) / sum(w) over both ranks and both micro-steps, by hand: 30 / 11.
MEAN = 30 / 11


def _pipeline(kind: str) -> zf.Transform:
    window = zf.accumulate(2, weighted=True)
    return zf.chain(*around(kind, window), zf.sgd(1.0))


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
    kinds = [*STAGES, "data parallel, late"]
    for found in zf.launch(_all, 2, kinds, timeout=limit()):
        for (kind, route), got in found.items():
            if route == "_eager" and kind in ("ZeRO-2", "ZeRO-3", "data parallel"):
                # Its gradients had been averaged before any weight was known.
                assert isinstance(got, str) and "on average over ranks" in got
                assert "before reduce_scatter or all_reduce" in got
            else:
                assert got == pytest.approx([-MEAN] * 3, rel=1e-12), (kind, route)


def _equal_fractions() -> str:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    opt = zf.attach(model, zf.chain(zf.reduce_scatter(), zf.accumulate(1, weighted=True), zf.sgd(1.0)))
    model(torch.ones(1)).sum().backward()
    opt.step(weight=0.1)
    return "stepped"


def test_equal_weights_whose_mean_is_rounded_are_equal():
    # (0.1 + 0.1 + 0.1) / 3 is another float64 than 0.1.
    assert zf.launch(_equal_fractions, 3, timeout=limit()) == ["stepped"] * 3


BATCHED = {
    **{kind: lambda kind=kind: _pipeline(kind) for kind in (*STAGES, "data parallel, late")},
    "scaled": lambda: zf.chain(zf.all_reduce(), zf.scale_loss(), zf.sgd(1.0)),
    "plain": lambda: zf.chain(zf.all_reduce(), zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.adamw(0.1)),
}


def _batched() -> dict:
    """Steps and updates under vmap, with weights and without: what they raise, or how far they are from a loop."""
    return {(kind, w): _under_vmap(make(), w) for kind, make in BATCHED.items() for w in (None, "one", "each")}


def _under_vmap(tx: zf.Transform, weights: str | None) -> list:
    rank = int(os.environ["RANK"])
    starts = [zf.init(tx, {"w": torch.arange(3.0) + i}) for i in range(2)]
    together = torch.utils._pytree.tree_map(lambda *xs: torch.stack(xs), *starts)
    x, w = torch.tensor(1.0 + rank), torch.tensor([1.0 + rank, 2.0])

    def loss(p, x):
        return (p["w"] * x).square().sum()

    def update(state, weight):
        late = tx.parts[0].name == "accumulate"
        grads = {"w": x.expand(3)} if late else zf.vjp(loss, tx, state, x)[1](torch.ones(()))[0]
        return zf.update(tx, grads, state, weight=weight)

    found: list = []
    for route in (lambda s, weight: zf.make_step(loss, tx)(s, x, weight=weight), update):
        given = {None: (None, None), "one": (1.0 + rank, None), "each": (w, 0)}[weights]
        try:
            got = torch.func.vmap(route, in_dims=(0, given[1]))(together, given[0])[0]
            want = [route(s, None)[0] for s in starts]
        except ValueError as error:
            found.append(str(error))
            continue
        found.append(max(float((got.leaves["w"][i] - s.leaves["w"]).abs().max()) for i, s in enumerate(want)))
    return found


def test_under_vmap_weights_and_exchanges_of_numbers_are_refused_on_every_rank():
    for found in zf.launch(_batched, 2, timeout=limit()):
        for (kind, weights), routes in found.items():
            for got in routes:
                if weights is not None and kind in ("scaled", "plain"):
                    assert "weight=" in got
                elif weights is not None:
                    assert "weight= under torch.func.vmap on 2 ranks" in got and "per member" in got, (kind, weights)
                elif kind == "data parallel":
                    assert "a step without weight=" in got
                elif kind == "plain":
                    assert got < 1e-6
                else:
                    assert "torch.func.vmap over a step through" in got and "no batching rule" in got, kind
