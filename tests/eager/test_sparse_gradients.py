"""Embeddings with `sparse=True`, whose gradients are made dense: they are trained as those without it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import covering
from one_launch import one_launch
from stages import PLACES, around
from torch import Tensor, nn

import zerofn as zf


class Words(nn.Module):
    """An embedding and a bag of embeddings; the weight of the first is used a second time, or tied."""

    def __init__(self, sparse: bool = True, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 4, sparse=sparse)
        self.bags = nn.EmbeddingBag(5, 4, mode="sum", sparse=sparse)
        self.head = nn.Linear(4, 7)
        self.double()
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(x) + self.words(x.flip(1)) + self.bags(x % 5)[:, None]))


def batch(step: int, rank: int, ranks: int) -> Tensor:
    made = torch.Generator().manual_seed(step)
    return torch.randint(0, 7, (4, 3), generator=made).chunk(ranks)[rank]


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "adamw": (lambda: zf.adamw(1e-2), lambda ps: torch.optim.AdamW(ps, 1e-2)),
    "sgd": (lambda: zf.sgd(0.1, momentum=0.9), lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)),
    "clipped": (
        lambda: zf.chain(zf.clip_by_global_norm(0.1), zf.sgd(0.1)),
        lambda ps: torch.optim.SGD(ps, 0.1),
    ),
}


def train(stage: str, optimizer: str, tied: bool, how: str) -> None:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, theirs = Words(tied=tied), Words(sparse=False, tied=tied)
    first = copy.deepcopy(dict(theirs.named_parameters()))
    ours, torchs = OPTIMIZERS[optimizer]
    middle = [zf.scale_loss(2.0**8)] if how == "scaled" else []
    window = zf.accumulate(2 if how == "accumulate" else 1)
    late = "late" in stage or stage == "ZeRO-1"
    held = [] if late or how == "in backward" else [window]
    opt = zf.attach(
        model, zf.chain(*around(stage, *middle, *held, window=window), ours()), in_backward=how == "in backward"
    )
    o = torchs(theirs.parameters())
    for step in range(3):
        for k in range(window.facts.window):
            x = step * 2 + k
            model(batch(x, rank, ranks)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            (theirs(batch(x, 0, 1)).square().mean() / window.facts.window).backward()
        if optimizer == "clipped":
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        o.step()
        o.zero_grad()
    with opt.gathered():
        for name, p in theirs.named_parameters():
            q = model.get_parameter(name)
            found = (q.full_tensor() if hasattr(q, "full_tensor") else q).detach()
            torch.testing.assert_close(found - first[name], p.detach() - first[name], rtol=1e-8, atol=1e-11)
    opt.detach()
    model(batch(0, 0, 1)).sum().backward()
    assert model.words.weight.grad.layout == (torch.strided if tied else torch.sparse_coo)


HOW = ("plain", "accumulate", "scaled", "in backward")
LATE = ("data parallel, late", "ZeRO-1")
ROWS = [
    (stage, optimizer, tied, how)
    for stage in PLACES
    for optimizer in OPTIMIZERS
    for tied in (False, True)
    for how in HOW
    if not (how == "in backward" and (stage in LATE or optimizer == "clipped")) and (optimizer == "adamw" or not tied)
]


@pytest.mark.parametrize(("ranks", "few"), [(1, True), (2, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_sparse_embeddings_are_trained_as_dense_ones(ranks, few):
    rows = [row for row in ROWS if ranks == 1 or row[0] != "one process"]
    # Each stage in each of the ways, and each optimizer tied and not; on one rank each of them alone.
    ways = lambda row: ((row[0], row[3]), row[1:3])  # noqa: E731
    one_launch(ranks, train, covering(rows, key=ways if ranks == 2 else tuple) if few else rows, 120.0)
