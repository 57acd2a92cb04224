"""`add_noise`: normal noise on gradients, which becomes less with time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..extend import LeafStep, Transform, check_number, check_seed, direction, leaf_key, random_bits, times, transform

# Streams of random bits that stochastic rounding does not use.
RADIUS, ANGLE = 2, 3


@transform
def add_noise(eta: float, gamma: float = 0.55, seed: int = 0) -> Transform:
    """Add normal noise to gradients (Neelakantan et al., 2015), of variance `eta / t^gamma` in update `t` from 1.

    An element's noise is a function of the seed, the update, the leaf's path and the element's place in the whole leaf:
    it is the same on any number of ranks, and after a resume.

    Args:
        eta: variance of the noise in the first update.
        gamma: how fast it falls.
        seed: an int of 64 bits.

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> import torch, zerofn as zf
        >>> tx = zf.chain(zf.add_noise(0.25), zf.sgd(1.0))
        >>> state, _ = zf.update(tx, {"w": torch.zeros(10000)}, zf.init(tx, {"w": torch.zeros(10000)}))
        >>> round(float(state.params["w"].std()), 1)
        0.5
    """
    check_number("add_noise", "eta", eta)
    check_number("add_noise", "gamma", gamma)
    check_seed("add_noise", seed)

    def spread(count: Any, rate: Any, numbers: Mapping[str, Any]) -> dict[str, Any]:
        return {"spread": (numbers["eta"] / count ** numbers["gamma"]) ** 0.5}

    def formula(p: Tensor, g: Tensor, slots: dict[str, Tensor], at: LeafStep) -> tuple[Tensor, dict[str, Tensor]]:
        drawn: Any = dict(seed=seed, step=at.count, key=leaf_key(at.path), offset=at.offset, device=g.device)
        bits = [random_bits(g.numel(), stream=stream, **drawn) for stream in (RADIUS, ANGLE)]
        # Each uniform number has 24 bits, as many as fp32 holds. Adding a half keeps it from being 0 or 1.
        radius, angle = (((x >> 8) & 0xFFFFFF).float().add(0.5).mul(2.0**-24) for x in bits)
        normal = (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()
        wide = g.to(torch.promote_types(g.dtype, torch.float32))
        noise = times(normal.to(wide.dtype), at.derived["spread"])
        return (wide + noise.view(g.shape)).to(g.dtype), {}

    return direction("add_noise", {}, formula, {"eta": eta, "gamma": gamma}, spread)
