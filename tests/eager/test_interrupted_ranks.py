"""Ctrl-C on several ranks: the next cell goes on with a whole state, or an error says what to write; nobody hangs.

A terminal's Ctrl-C goes to every rank of a job, and each is at another place. One rank alone is interrupted by
`kill -INT`, and by an error of its own that the user catches. A second one may come while the first is handled.
"""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interrupts import Moment, modes
from time_limits import limit
from torch import Tensor, nn
from trees import flat

import zerofn as zf
from zerofn import _interrupts  # inside: how interrupts are held, of which nothing is public

CHAINS: dict[str, Callable[[], Any]] = {
    "data parallel": lambda: zf.chain(zf.all_reduce(), zf.adamw(1e-2)),
    "ZeRO-1": lambda: zf.chain(zf.accumulate(2), zf.reduce_scatter(), zf.clip_by_global_norm(1.0), zf.adamw(1e-2)),
    "ZeRO-2": lambda: zf.chain(zf.reduce_scatter(), zf.clip_by_global_norm(1.0), zf.adamw(1e-2)),
    "ZeRO-3": lambda: zf.chain(zf.shard(), zf.clip_by_global_norm(1.0), zf.adamw(1e-2)),
}
WITHIN: dict[str, Callable[[], Any]] = {
    "data parallel": lambda: zf.chain(zf.all_reduce(), zf.sgd(0.5)),
    "ZeRO-2": lambda: zf.chain(zf.reduce_scatter(), zf.sgd(0.5)),
    "ZeRO-3": lambda: zf.chain(zf.shard(), zf.sgd(0.5)),
}
X = torch.linspace(-1, 1, 24).view(4, 6)
# Where collectives are handed over: an interrupt there would leave ranks with other numbers of them.
HANDED_OVER = ("reducer.py", "ordered_collectives.py", "gather_on_use.py", "eager/gradients.py", "units.py")
# What a rank that was interrupted alone may meet in its next cell, and the others.
NAMED = (
    "ranks disagree on step\\(\\), zero_grad\\(\\) or p\\.grad\\.clone\\(\\)",
    "ranks disagree on how much of their gradients has come",
    "a second gradient of .* before opt.step\\(\\), with in_backward=True",
)


class Sums(nn.Module):
    """Its gradients are ones: what a parameter has lost is half of the number of its updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3, bias=False), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return sum(m(torch.ones(1, m.in_features)).sum() for m in (self.first, self.second)) + 0.0 * x.sum()


def attached(stage: str, in_backward: bool) -> tuple[nn.Module, zf.Optimizer]:
    torch.manual_seed(0)
    if in_backward:
        model = Sums()
        for p in model.parameters():
            nn.init.zeros_(p)
        return model, zf.attach(model, WITHIN[stage](), in_backward=True)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.Tanh()), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, zf.attach(model, CHAINS[stage]())


def iteration(model: nn.Module, opt: zf.Optimizer) -> None:
    """Of numbers that differ from step to step, and from rank to rank."""
    opt.zero_grad()
    y = model(X * (1 + opt.micro_steps % 7) + dist.get_rank())
    (y if y.ndim == 0 else y.square().mean()).backward()
    opt.step()


def values(opt: zf.Optimizer) -> list[Tensor]:
    state = opt.state
    tensors = [x for x in flat(state.transforms).values() if isinstance(x, Tensor)]
    return [x.detach().clone() for x in (*tensors, *state.leaves.values(), state.step)]


def whole(opt: zf.Optimizer) -> list[Tensor]:
    with opt.gathered() as model:
        return [p.detach().clone() for p in model.parameters()]


def check_updates(opt: zf.Optimizer, stage: str) -> None:
    """Each leaf was updated as often as steps were made, or once more for each that was given up."""
    for full in whole(opt):
        made = -2 * full
        assert torch.equal(made, made.round()) and made.min() >= opt.global_steps
        if stage != "ZeRO-3":
            # Under `shard` parts of one leaf may differ by an update.
            assert made.min() == made.max()


def program(
    stage: str, in_backward: bool, who: str, places: list[float], files: tuple[str, ...], twice: bool
) -> dict[str, int]:
    """Interrupts at places, which are fractions of an iteration; how many came on this rank."""
    model, opt = attached(stage, in_backward)
    _, reference = attached(stage, in_backward)
    known = {0: values(reference)}
    for _ in range(3 + 3 * len(places)):
        iteration(reference._own.model, reference)
        known[reference.micro_steps] = values(reference)
    for _ in range(2):
        iteration(model, opt)
    with Moment(0, files) as count:
        iteration(model, opt)
    before, found = modes(), Counter[str]()
    for i, place in enumerate(places):
        target = opt.micro_steps + 3
        n = 1 + int(place * count.seen) if who == "all" or dist.get_rank() == 1 else 0
        moment = Moment(n, files, then=random.Random(place).choice([1, 2, 3, 5, 8, 13, 21]) if twice else 0)
        try:
            try:
                with moment:
                    iteration(model, opt)
            except KeyboardInterrupt:
                found["came"] += 1
                found["came again"] += moment.again is not None
            assert modes() == before
            while opt.micro_steps < target:
                iteration(model, opt)
        except RuntimeError as error:
            raise RuntimeError(f"interrupt {i} at {moment.where}: {error}") from error
        if in_backward:
            check_updates(opt, stage)
        else:
            assert all(map(torch.equal, values(opt), known[opt.micro_steps])), moment.where
        found["went on"] += 1
    return dict(found)


def swept(
    stage: str, in_backward: bool, who: str, places: list[float], files: tuple[str, ...] = (), twice: bool = False
) -> Counter[str]:
    """Interrupt programs at all places; how often they went on, and how often an error was raised by name."""
    ends = Counter[str]()
    while places:
        try:
            args = (stage, in_backward, who, places, files, twice)
            ends += Counter(zf.launch(program, 2, *args, timeout=limit(30))[1])
            break
        except zf.RankError as error:
            told = re.search(r"RuntimeError: interrupt (\d+) at", error.traceback)
            if told is None or not any(re.search(name, error.traceback) for name in NAMED):
                raise
            ends["went on"] += int(told[1])
            ends["named"] += 1
            places = places[int(told[1]) + 1 :]
    return ends


ROWS = [(stage, False) for stage in CHAINS] + [(stage, True) for stage in WITHIN]


def drawn(how_many: int, *of: object) -> list[float]:
    draw = random.Random(str(of))
    return sorted(draw.random() for _ in range(how_many))


def test_all_ranks_go_on_where_gradients_are_handed_over():
    assert swept("ZeRO-2", False, "all", drawn(12, "once"), ("eager/gradients.py",))["went on"] == 12


def test_all_ranks_go_on_when_interrupted_twice():
    ends = swept("ZeRO-3", True, "all", drawn(6, True), twice=True)
    assert ends["went on"] == 6 and ends["came again"] > 0


def test_one_rank_goes_on_or_is_told():
    ends = swept("ZeRO-2", False, "one", drawn(2, "one"), HANDED_OVER)
    assert ends["went on"] + ends["named"] == 2


# Each stage on all ranks and on one, and anywhere and where gradients are handed over.
PLACES = [
    (*row, files, who)
    for i, row in enumerate(ROWS)
    for who, files in zip(("all", "one"), ((), HANDED_OVER) if i % 2 else (HANDED_OVER, ()), strict=True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "in_backward", "files", "who"), PLACES)
def test_at_many_places(stage, in_backward, files, who):
    how_many = 16 if who == "all" else 6
    ends = swept(stage, in_backward, who, drawn(how_many, stage, files), files)
    assert ends["went on"] + ends["named"] == how_many
    assert who == "one" or not ends["named"]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "in_backward"), ROWS)
def test_a_second_interrupt_while_the_first_is_handled(stage, in_backward):
    ends = swept(stage, in_backward, "all", drawn(12, stage), twice=True)
    assert ends["went on"] == 12 and not ends["named"] and ends["came again"] > 1


def interrupted_in_a_wait(stage: str, folder: Path) -> None:
    """The first rank waits in its step for the second, which comes when the first has been interrupted twice."""
    _interrupts.PATIENCE = 0.2
    model, opt = attached(stage, False)
    iteration(model, opt)
    opt.zero_grad()
    model(X).square().mean().backward()
    if dist.get_rank():
        while not (folder / "came").exists():
            time.sleep(0.01)
        iteration(model, opt)
        return
    main, caught = threading.get_ident(), threading.Event()

    def press() -> None:
        # Python calls a handler once for all signals that come within one wait of the backend.
        while not caught.wait(0.5):
            signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=press).start()
    try:
        opt.step()
    except KeyboardInterrupt:
        caught.set()
    (folder / "came").touch()
    iteration(model, opt)


# The first rank has sent its part of the step, so the second one makes it; or has lost count of what it has sent.
AFTER_A_WAIT = {
    "data parallel": r"ranks disagree on (the number of steps|step\(\), zero_grad\(\) or p\.grad\.clone\(\))",
    "ZeRO-3": "a collective between ranks after Ctrl-C twice",
}


@pytest.mark.parametrize("stage", [pytest.param("data parallel", marks=pytest.mark.slow), "ZeRO-3"])
def test_a_second_interrupt_ends_a_wait_for_another_rank(stage, tmp_path):
    """The first is held until the step has been made, which it never is. The next step is refused by name."""
    with pytest.raises(zf.RankError, match=AFTER_A_WAIT[stage]):
        zf.launch(interrupted_in_a_wait, 2, stage, tmp_path, timeout=limit())
    assert (tmp_path / "came").exists()
