"""Random pipelines, trees and modules. Only integers and choices are drawn, so that examples shrink."""

from collections import OrderedDict
from typing import NamedTuple

import optree
import torch
from hypothesis import strategies as st
from torch import nn

import zerofn as zf
from zerofn.testing import random_like

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Pair(NamedTuple):
    first: object
    second: object


seeds = st.integers(0, 9999)
shapes = st.sampled_from([(), (1,), (3,), (4, 2), (0,), (2, 0, 3), (17,), (2, 3, 2)])


def leaves(dtypes):
    return st.tuples(shapes, st.sampled_from(dtypes)).map(lambda d: torch.zeros(d[0], dtype=d[1]))


def _containers(children):
    return st.one_of(
        st.lists(children, min_size=1, max_size=3),
        st.lists(children, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", "weight", "z"]), children, min_size=1, max_size=3),
        st.tuples(children, children).map(lambda p: Pair(*p)),
        st.lists(children, min_size=1, max_size=2).map(lambda xs: OrderedDict(zip(("y", "b"), xs, strict=False))),
    )


@st.composite
def trees(draw, dtypes=(F32,)):
    """A nested tree of live numbers; at least one leaf has elements."""
    skeleton = draw(st.recursive(st.one_of(leaves(dtypes), leaves(dtypes), st.none()), _containers, max_leaves=5))
    return random_like({"tree": skeleton, "live": torch.zeros(3, dtype=dtypes[0])}, draw(seeds))


OPTIMIZERS = [
    zf.sgd(0.1),
    zf.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    zf.adam(0.01, weight_decay=0.1),
    zf.adamw(0.02),
    zf.adamw(zf.schedules.cosine(0.1, 5)),
    zf.low_precision_adam(0.02),
    zf.masked(zf.adamw(0.1), lambda path: "b" not in path),
    zf.partition(
        {"x": zf.chain(zf.clip_by_global_norm(0.5), zf.adam(0.1)), "y": zf.sgd(0.1)}, lambda p: "xy"[len(p) % 2]
    ),
    zf.offload(zf.adamw(0.05)),
    zf.lion(0.01, weight_decay=0.1),
    zf.rmsprop(0.01, momentum=0.5, centered=True),
    zf.scale_by_lr(0.1),
]
GRADIENT = [
    zf.clip_by_value(0.5),
    zf.clip_by_global_norm(0.7),
    zf.masked(zf.clip_by_value(0.1), lambda path: "w" in path),
    zf.scale_by_adam(),
    zf.trace(0.5, nesterov=True),
    zf.add_decayed_weights(0.1),
]
CASTS = [
    zf.precision(param_dtype=BF16),
    zf.precision(param_dtype=BF16, output_dtype=F32),
    zf.precision(store_dtype=F32),
]
SCALES = [zf.scale_loss(1024.0), zf.scale_loss(init_scale=2.0**10, growth_interval=2)]
ACCUMULATES = [zf.accumulate(1), zf.accumulate(2), zf.accumulate(3)]


@st.composite
def pipelines(draw, casts=True, optimizers=OPTIMIZERS):
    """Members in an order with a meaning, each there or not."""
    maybe = lambda options: draw(st.one_of(st.none(), st.sampled_from(options)))  # noqa: E731
    parts = [maybe(CASTS) if casts else None, maybe(SCALES), maybe(ACCUMULATES)]
    parts += draw(st.lists(st.sampled_from(GRADIENT), max_size=2))
    parts += [draw(st.sampled_from(optimizers)), maybe([zf.ema(0.9)])]
    return [p for p in parts if p is not None]


class RandomParts(nn.Module):
    """A small module of smooth parts with whatever a boundary trips over: ties, norms, buffers, several uses."""

    def __init__(self, kind):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4) if kind % 2 else nn.Identity()
        self.second = nn.Linear(4, 4, bias=bool(kind & 2))
        self.head = nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        if kind & 4:
            self.second.weight = nn.Parameter(self.second.weight.detach().clone())
            self.tied = nn.Linear(4, 4, bias=False)
            self.tied.weight = self.second.weight
        self.kind = kind

    def forward(self, x, shift=None):
        h = self.norm(torch.tanh(self.first(x)))
        h = torch.tanh(self.second(h)) * self.gain * self.frozen
        if self.kind & 4:
            h = h + self.tied(h)
        if shift is not None:
            h = h + shift["by"]
        # The same module twice in one call.
        return self.head(h), {"hidden": torch.tanh(self.head(h * 0.5)), "text": "kept"}


def module(kind, seed, dtype=F32):
    net = RandomParts(kind).to(dtype)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=F64) * 0.6)
    return net


kinds = st.integers(0, 7)


def loss(params, data):
    """Alive in every leaf that has elements."""
    pairs = zip(optree.tree_leaves(params), optree.tree_leaves(data), strict=True)
    return sum(((p.float() * d).sum() + 0.3 * (p.float() ** 2 * d.abs()).sum() for p, d in pairs), torch.zeros(()))


def run(tx, params, steps, donate=False, seed=0):
    step, state = zf.make_step(loss, tx, donate=donate), zf.init(tx, params)
    for i in range(steps):
        state, _ = step(state, random_like(params, seed + i))
    return state
