"""No write is lost in silence: whoever writes a parameter, however and whenever, training is that of plain torch.

Or it is refused by name, on every rank.

A row is who writes (the user, or the model in its forward), how, when, and the stage. The reference is the same
program on the plain module, in float64.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_launch import one_launch
from refusals import check_form
from stages import STAGES, around
from torch import Tensor, nn

import zerofn as zf

STEPS, CALLS = 2, 2
X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


class Pair(nn.Module):
    """A teacher that is frozen and follows its student, if it is written; in the calls that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(4, 5), nn.Linear(4, 5).requires_grad_(False)
        self.write: Callable[[Pair], None] = nothing

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        return (self.student(x) - torch.tanh(self.teacher(x))).square().mean()


def nothing(m: Pair) -> None:
    """In most calls."""


@torch.no_grad()
def in_place(m: Pair) -> None:
    m.teacher.weight.mul_(0.5)


@torch.no_grad()
def follow(m: Pair) -> None:
    m.teacher.weight.lerp_(m.student.weight, 0.25)


@torch.no_grad()
def one_row(m: Pair) -> None:
    m.teacher.bias[1] += 1.0
    m.teacher.weight[-1] = 0.25


@torch.no_grad()
def foreach(m: Pair) -> None:
    torch._foreach_mul_(list(m.teacher.parameters()), 0.5)


def data(m: Pair) -> None:
    m.teacher.weight.data.mul_(0.5).add_(m.student.weight.data, alpha=0.5)


def detached(m: Pair) -> None:
    m.teacher.weight.detach().add_(0.25)


def by_state_dict(m: Pair) -> None:
    m.state_dict()["teacher.weight"].add_(0.25)


def kept_and_listed(m: Pair) -> None:
    kept = [p.detach() for p in m.teacher.parameters()]
    torch._foreach_mul_(kept, 0.5)
    kept[0][:] = kept[0] + 0.125


@torch.no_grad()
def trained(m: Pair) -> None:
    m.student.weight.clamp_(-0.1, 0.1)


def trained_data(m: Pair) -> None:
    m.student.bias.data.fill_(0.125)


@torch.no_grad()
def filled(m: Pair) -> None:
    m.teacher.weight.fill_(0.125)
    m.student.bias.fill_(0.25)


def snapshot(m: Pair) -> None:
    """What was taken before is put back, after other numbers were seen. A state dict has what is written later."""
    kept = {n: p.detach().clone() for n, p in m.named_parameters()}
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(2)
        m(X.to(m.student.weight.dtype))
        for n, p in m.named_parameters():
            p.copy_(kept[n] * 0.5)


def checkpoint(m: Pair) -> None:
    m.load_state_dict({k: torch.linspace(-1, 1, t.numel()).view(t.shape) for k, t in m.state_dict().items()})


HOW = (
    by_state_dict,
    kept_and_listed,
    in_place,
    follow,
    one_row,
    foreach,
    data,
    detached,
    trained,
    trained_data,
    filled,
    snapshot,
    checkpoint,
)
# A forward that writes what it trains is an error of torch's own; it writes the teacher.
BY_FORWARD = (in_place, follow, one_row, foreach, data, detached)
# Of the user: behind a backward, in front of a step, behind it. Of forward: in which call of a step, or in one without
# gradients between two; or for the first time in the last step.
WHEN = {"user": ("between calls", "before the step", "after the step"), "forward": (0, 1, "without gradients", "late")}
ROWS = [
    (who, how.__name__, when)
    for who, whens in WHEN.items()
    for how in (HOW if who == "user" else BY_FORWARD)
    for when in whens
]
CASTS: dict[str, Callable[[], list[zf.Transform]]] = {
    "as stored": lambda: [],
    # What the model sees is a copy, of masters in fp32.
    "cast": lambda: [zf.precision(param_dtype=torch.float64)],
    "bf16": lambda: [zf.precision(param_dtype=torch.bfloat16, output_dtype=torch.float32)],
}
PLACES = [*itertools.product(STAGES, CASTS), ("ZeRO-2", "cast in front")]


def losses(model: Pair, opt: Any, who: str, how: str, when: Any) -> Tensor:
    """Of each call, with those without gradients: what was written is seen by the next one."""
    write, found = globals()[how], []

    def call(step: int, at: Any) -> Tensor:
        now = at == when or (when == "late" and at == 0 and step == STEPS - 1)
        model.write = write if who == "forward" and now else nothing
        loss = model(X)
        found.append(loss.detach().double())
        return loss

    def by_user(at: str) -> None:
        if who == "user" and at == when:
            write(model)

    for step in range(STEPS):
        for at in range(CALLS):
            call(step, at).backward()
            by_user("between calls" if at == 0 else "before the step")
        opt.step()
        opt.zero_grad()
        by_user("after the step")
        with torch.no_grad():
            call(step, "without gradients")
    return torch.stack(found)


def attached(who: str, how: str, when: Any, stage: str, cast: str) -> Tensor | str:
    model = Pair().double() if cast == "as stored" else Pair()
    if cast == "cast in front":
        chain = [*CASTS["cast"](), *around(stage)]
    else:
        chain = around(stage, *CASTS[cast](), window=zf.accumulate(1))
    opt = zf.attach(model, zf.chain(*chain, zf.sgd(0.1)))
    try:
        return losses(model, opt, who, how, when)
    except RuntimeError as error:
        check_form(error)
        return str(error)
    finally:
        opt.detach()


@functools.cache
def plain(*row: Any) -> Tensor:
    model = Pair().double()
    return losses(model, torch.optim.SGD(model.student.parameters(), 0.1), *row)


def looked_for(who: str, how: str, when: Any, stage: str, cast: str) -> bool:
    """False for `w.data` in forward where `w` may be a copy: it counts no version (docs/how-to/write-forward.md)."""
    return (who, how) != ("forward", "data") or (cast == "as stored" and stage != "ZeRO-3")


MANY = [(*row, *place) for row in ROWS for place in PLACES if looked_for(*row, *place)]
# Ranks begin with half of them, in which everyone who writes, way, moment and stage stands too.
QUICK = MANY[:: len(PLACES) - 1]
FEWER = MANY[:: 3 * len(PLACES) + 1]
# Between calls full parameters of the last one are there still.
FEWER += [
    ("user", how.__name__, "between calls", "ZeRO-3", "as stored")
    for how in (detached, by_state_dict, kept_and_listed, data)
]


@pytest.mark.parametrize(
    ("ranks", "rows"),
    [(1, QUICK), (2, FEWER), *[pytest.param(n, MANY, marks=pytest.mark.slow) for n in (1, 2, 3)]],
    ids=["1", "2", "1, all", "2, all", "3, all"],
)
def test_no_write_is_lost_in_silence(ranks, rows):
    untouched = plain("nobody", "in_place", None)
    for row, everywhere in one_launch(ranks, attached, rows, 120).items():
        *what, stage, cast = row
        want = plain(*what)
        if ranks > 1 and what[:2] == ["user", "one_row"] and stage == "ZeRO-3":
            # Rows of the whole, of which each rank has some.
            assert all("writes into a parameter" in said for said in everywhere), row
            continue
        assert not torch.equal(want, untouched), row
        # The same data on all ranks; masters of fp32 have roundings of their own.
        near = {"as stored": {"rtol": 1e-12, "atol": 1e-13}, "bf16": {"rtol": 2e-2, "atol": 4e-3}}.get(
            cast, {"rtol": 2e-6, "atol": 1e-6}
        )
        if cast == "bf16":
            # Of a copy in 16 bits the write is seen above its rounding.
            assert not torch.allclose(want, untouched, rtol=4e-2, atol=8e-3), row
        for found in everywhere:
            torch.testing.assert_close(found, want, **near, msg=lambda m, at=row: f"{at}: {m}")
