"""Every stage by both routes on 1 to 4 ranks, against plain torch in float64 on all ranks' data."""

import functools

import pytest
import rank_programs as P
import torch
from stages import STAGES, around
from time_limits import limit

import zerofn as zf

SGD = {"lr": 0.3, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01}
ADAM = {"lr": 0.02, "weight_decay": 0.1}
OPTIMIZERS = {
    "sgd": (lambda: zf.sgd(**SGD), lambda ps: torch.optim.SGD(ps, **SGD)),
    "adamw": (lambda: zf.adamw(**ADAM), lambda ps: torch.optim.AdamW(ps, **ADAM)),
}
CLIP = 0.3
# Name: (transforms before the clip, micro-steps in a window).
ORDERS = {
    **{
        stage: (lambda stage=stage: around(stage, zf.accumulate(2)), 2)
        for stage in ("ZeRO-1", "data parallel, late", "ZeRO-2", "ZeRO-3")
    },
    **{
        f"{stage}, no accumulation": (lambda stage=stage: around(stage, window=zf.accumulate(1)), 1) for stage in STAGES
    },
}
MODES = (None, "a", "diff", "some")


def pipe(stage, optimizer, clip=True, middle=()):
    first = ORDERS[stage][0]()
    return zf.chain(*first, *middle, *([zf.clip_by_global_norm(CLIP)] if clip else []), OPTIMIZERS[optimizer][0]())


# Stages, optimizers and modes, in float64, by routes.
CELLS = [
    (stage, optimizer, mode, route)
    for stage in ORDERS
    for optimizer, modes in (("sgd", MODES), ("adamw", ("diff",)))
    for mode in modes
    for route in (("eager", "pure") if mode in ("a", "diff") else ("eager",))
]


# Each stage in one mode, and by both routes. Both pipelines of which bits are compared have one mode.
OFTEN = [
    cell
    for cell in CELLS
    for at in (list(ORDERS).index(cell[0]) + 1,)
    if (cell[1:] == ("sgd", MODES[at // 2 % 4], "eager"))
    or (cell[3] == "pure" and cell[1:3] == (("adamw", "diff"), ("sgd", "a"), ("sgd", "diff"))[at // 2 % 3])
]


def exact(cells):
    out = {}
    for stage, optimizer, mode, route in cells:
        tx = pipe(stage, optimizer, clip=optimizer == "sgd")
        given = (P.make(),)
        out[stage, optimizer, mode, route] = (
            P.eager(tx, P.simple(mode), 4, *given) if route == "eager" else P.pure(tx, mode, 4, *given)
        )
    return out


@functools.cache
def wanted(size, optimizer, mode, every, clip):
    return P.reference(size, OPTIMIZERS[optimizer][1], P.simple(mode), 4, P.make(), every, clip)


@pytest.mark.parametrize(
    ("size", "cells"), [(2, OFTEN), *[pytest.param(n, CELLS, marks=pytest.mark.slow) for n in (1, 2, 3, 4)]]
)
def test_every_stage_trains_as_one_process(size, cells):
    ranks = zf.launch(exact, size, cells, timeout=limit())
    bad = []
    for key in ranks[0]:
        stage, optimizer, mode, _ = key
        clip = CLIP if optimizer == "sgd" else None
        want = wanted(size, optimizer, mode, ORDERS[stage][1], clip)
        for rank, results in enumerate(ranks):
            got = results[key]
            # Sums over ranks in another order, float64. Adam divides by gradients' roots: more noise.
            bound = 1e-11 if optimizer == "sgd" else 1e-8
            worst, where = P.differences(got, want)
            norms = [n for i, n in enumerate(got["norms"]) if (i + 1) % ORDERS[stage][1] == 0]
            off = max(abs(a / b - 1) for a, b in zip(norms, want["norms"], strict=True))
            if not worst <= bound or not off <= 1e-11:
                bad.append((rank, *key, worst, where, off))
            if got.get("most", 0) > 2:
                bad.append((rank, *key, "units alive", got["most"]))
            as_well = ("ZeRO-2, no accumulation", *key[1:])
            if stage == "ZeRO-1, no accumulation" and as_well in results:
                # accumulate(1) is the identity, so gradients leave during backward as under ZeRO-2.
                same = results[as_well]["after"]
                bad += [(rank, *key, path) for path, x in got["after"].items() if not torch.equal(x, same[path])]
    assert not bad, "\n".join(map(str, bad))
