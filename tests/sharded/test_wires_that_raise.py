"""A wire or a view of one's own that raises on one rank in front of a collective: the others get theirs all the same.

The reference is the same training in one process, with the mean of the gradients that the ranks have had.
"""

import functools
from dataclasses import dataclass

import pytest
import torch
from one_launch import one_launch
from page_programs import of_page
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.extend import Transform, View, over_ranks, transform

STEPS, FAILS_IN = 4, 1


def raising(moment, times):
    """A sharding's wire and a factor of 1; on call `times[0]` of `moment` it raises."""

    def count(name, x):
        if name == moment and times[0]:
            times[0] -= 1
            if not times[0]:
                raise ValueError(f"from {name}")
        return x

    @dataclass(frozen=True)
    class Raises(of_page("Even")):
        def pack(self, *given):
            return count("pack", super().pack(*given))

    @transform
    def wired(resident):
        def view(layout, ranks):
            return over_ranks(Raises(ranks("wired", None)), resident)

        def through(spec):
            return spec.after("scattered_by" if resident else "sharded_by")

        return Transform("wired", needs="element", view_fn=view, through=through)

    @transform
    def seen():
        one = View(lambda x, leaf: count("view", x * 1), lambda g, leaf: count("pull", g * 1), lambda x, leaf: x * 1)
        return Transform("seen", needs="element", view_fn=lambda layout, ranks: one)

    return wired, seen


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2))


def loss_of(model, rank, step):
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


def trained(resident, moment, nth, in_backward, gives_up):
    """Parameters after training in which rank 1 fails once, and what was raised here."""
    rank, times, errors = torch.distributed.get_rank(), [0], []
    model = model_of()
    wired, seen = raising(moment, times)
    opt = zf.attach(model, zf.chain(wired(resident), seen(), zf.sgd(0.1)), in_backward=in_backward)
    for step in range(STEPS):
        times[0] = nth if step == FAILS_IN and rank == 1 else 0
        try:
            loss_of(model, rank, step).backward()
        except ValueError as error:
            errors.append(str(error))
            if gives_up:
                opt.zero_grad()
                continue
        times[0] = 0
        try:
            opt.step()
        except RuntimeError as error:
            return {}, [*errors, str(error)]
        opt.zero_grad()
    params = {path: p.detach().clone() for path, p in zf.full_params(opt.tx, opt.state).items()}
    opt.detach()
    return params, errors


def expected(parts):
    """With, in the step that fails, the gradients of `parts` ranks."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for rank in range(parts if step == FAILS_IN else 2):
            (loss_of(model, rank, step) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


FAILS = [
    # Gradients wait on the rank, and go with those of its step.
    (True, "pack", 1, 2),
    # The backward has ended there before any gradient was sent.
    (False, "pack", 1, 1),
    # A forward that raises, at the first leaf, a later one and in the next unit: others get the parameters.
    (False, "view", 1, 1),
    (False, "view", 2, 1),
    (False, "view", 3, 1),
]


@functools.cache
def all_trained():
    return one_launch(2, trained, [(*row, early, False) for *row, _ in FAILS for early in (False, True)])


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("resident, moment, nth, parts", FAILS)
def test_what_raises_in_front_of_a_collective_is_no_mismatch(resident, moment, nth, parts, in_backward):
    found = all_trained()[resident, moment, nth, in_backward, False]
    reference, start = expected(parts), dict(model_of().named_parameters())
    for rank, (params, errors) in enumerate(found):
        assert errors == ([f"from {moment}"] if rank else [])
        for path, p in params.items():
            moved = reference[path] - start[path]
            # Sums of two fp32 gradients in another order than in one process.
            torch.testing.assert_close(p - start[path], moved, rtol=1e-5, atol=1e-6)


def test_a_backward_that_its_rank_gives_up_is_refused_on_all():
    found = zf.launch(trained, 2, False, "pack", 1, False, True, timeout=limit(30))
    assert found[1][1][0] == "from pack" and len(found[1][1]) == 2
    for _, errors in found:
        assert "ranks disagree on how much of their gradients has come" in errors[-1]
