"""Embeddings with `max_norm` write into the rows that they look up: the same on all ranks, or the step says so."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import few_and_all
from one_launch import one_launch
from pairs import cover
from stages import PLACES, around
from torch import Tensor, nn

import zerofn as zf

LIMIT = 0.7
STAGES = [stage for stage in PLACES if stage != "one process"]


class Bounded(nn.Module):
    def __init__(self, kind: str, max_norm: float | None = LIMIT):
        super().__init__()
        torch.manual_seed(0)
        self.words = (
            nn.Embedding(7, 4, max_norm=max_norm) if kind == "rows" else nn.EmbeddingBag(7, 4, max_norm=max_norm)
        )
        self.head = nn.Linear(4, 2)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x)).square()


SAME = torch.tensor([[0, 1, 2], [3, 1, 5]])


def attached(stage: str, kind: str, max_norm: float | None = LIMIT) -> tuple[Any, Any]:
    model = Bounded(kind, max_norm)
    return model, zf.attach(model, zf.chain(*around(stage, window=zf.accumulate(1)), zf.sgd(0.5, momentum=0.9)))


def check(opt: Any, model: nn.Module, theirs: nn.Module, kind: str) -> None:
    first = dict(Bounded(kind).named_parameters())
    with opt.gathered():
        for name, p in theirs.named_parameters():
            q = model.get_parameter(name)
            found = (q.full_tensor() if hasattr(q, "full_tensor") else q).detach()
            torch.testing.assert_close(found - first[name], p.detach() - first[name], rtol=1e-9, atol=1e-12)


def the_same_rows(stage: str, kind: str) -> None:
    model, opt = attached(stage, kind)
    theirs = Bounded(kind)
    o = torch.optim.SGD(theirs.parameters(), 0.5, momentum=0.9)
    for k in range(3):
        for m, q in ((model, opt), (theirs, o)):
            m((SAME + k) % 7).mean().backward()
            q.step()
            q.zero_grad()
    check(opt, model, theirs, kind)
    opt.detach()


def other_rows(stage: str, kind: str) -> None:
    model, opt = attached(stage, kind)
    model(SAME + dist.get_rank()).mean().backward()
    with pytest.raises(RuntimeError, match=r"words.weight.*(?s:.)*with torch.no_grad\(\), opt.gathered\(\)"):
        opt.step()


def what_to_write(stage: str, kind: str) -> None:
    """As the message says, on ranks that look up other rows."""
    model, opt = attached(stage, kind, None)
    theirs = Bounded(kind, None)
    o = torch.optim.SGD(theirs.parameters(), 0.5, momentum=0.9)
    for k in range(3):
        rows = [(SAME + k + rank) % 7 for rank in range(2)]
        model(rows[dist.get_rank()]).mean().backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad(), opt.gathered():
            model.words.weight.renorm_(2, 0, LIMIT)
        theirs(torch.cat(rows)).mean().backward()
        o.step()
        o.zero_grad()
        with torch.no_grad():
            theirs.words.weight.renorm_(2, 0, LIMIT)
    check(opt, model, theirs, kind)
    opt.detach()


def run(program: Callable[[str, str], None], stage: str, kind: str) -> None:
    program(stage, kind)


PROGRAMS = (the_same_rows, other_rows, what_to_write)
ROWS = list(itertools.product(PROGRAMS, STAGES, ("rows", "bags")))


@pytest.mark.parametrize("rows", few_and_all(cover(ROWS), ROWS))
def test_rows_with_a_norm_limit(rows):
    one_launch(2, run, rows)
