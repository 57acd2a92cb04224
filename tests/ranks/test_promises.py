"""Collectives that ranks promise each other: the same numbers whatever follows, and few messages."""

import pytest
import torch
import torch.distributed as dist
from rank_programs import rank_and_size
from time_limits import limit
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofn as zf
from zerofn.ranks.ordered_collectives import (  # inside: when ranks trust each other, and what they exchange
    LONGEST,
    MOST_PASSES,
    TRUSTED,
    Habits,
)
from zerofn.sharded.schedule import ALIVE  # inside: how many units may be full

LAYERS = 10


class Chosen(nn.Module):
    """A chain of blocks, of which each call uses some."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(LAYERS)])

    def forward(self, x, use):
        for i in use:
            x = x + torch.tanh(self.blocks[i](x))
        return x


def blocks_of(rank, step):
    """Equal calls that make promises, then others: shorter, on one rank only, reversed, twice the same, none."""
    every = list(range(LAYERS))
    if step in (4, 9):
        return every[:3]
    if step in (5, 10) and rank == 1:
        return every[::-1]
    if step == 6:
        return [2, 2, 5, 2] if rank == 0 else []
    if step == 7:
        return every[rank::2]
    return every


STEPS = 13


def rows(rank, step):
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 3, generator=g, dtype=torch.float64)


def make():
    torch.manual_seed(0)
    return Chosen().double()


class Counted:
    """Counts what an attached model sends from now on: messages, all-gathers, and those that were begun early."""

    def __init__(self, opt):
        schedule = opt._own.home.units.schedule
        self.rounds = schedule.protocol
        self.messages = self.gathers = self.early = self.most = 0
        exchange, early = self.rounds._exchange, self.rounds.early

        def exchanged(*args):
            self.messages += 1
            return exchange(*args)

        def began_early(kind, unit):
            begun = early(kind, unit)
            self.early += begun
            return begun

        def count(gather):
            def gathered(*args):
                self.gathers += 1
                self.most = max(self.most, len(schedule.live) + (schedule.coming is not None) + 1)
                return gather(*args)

            return gathered

        self.rounds._exchange, self.rounds.early = exchanged, began_early
        for unit in schedule.units:
            unit.gather = count(unit.gather)

    def since(self):
        """What there was since the last call: messages, all-gathers, and those of them that were begun early."""
        found = self.messages, self.gathers, self.early
        self.messages = self.gathers = self.early = 0
        return found


def trained(in_backward=False):
    rank, _ = rank_and_size()
    model = make()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1, momentum=0.9)), in_backward=in_backward)
    counted, counts = Counted(opt), []
    for step in range(STEPS):
        model(rows(rank, step), blocks_of(rank, step)).square().mean().backward() if blocks_of(rank, step) else None
        if step == 8 and rank == 0:
            # One rank alone asks for something that nobody expects.
            model.blocks[4].weight.norm().item()
        opt.step()
        opt.zero_grad()
        counts.append(counted.since()[0])
    opt.detach()
    assert not counted.rounds.promised
    return [p.detach() for p in model.parameters()], counts


def reference(ranks):
    model = make()
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        used = [r for r in range(ranks) if blocks_of(r, step)]
        sum(model(rows(r, step), blocks_of(r, step)).square().mean() / ranks for r in used).backward()
        opt.step()
        opt.zero_grad()
    return [p.detach() for p in model.parameters()]


def test_calls_that_differ_from_what_was_promised_give_the_same_numbers():
    want = reference(2)
    before = [p.detach() for p in make().parameters()]
    for in_backward in (False, True):
        for params, _ in zf.launch(trained, 2, in_backward, timeout=limit()):
            for old, got, expected in zip(before, params, want, strict=True):
                # float64; sums in another order.
                torch.testing.assert_close(got - old, expected - old, rtol=1e-10, atol=1e-12)


def test_what_was_promised_is_not_asked_for():
    (_, counts), _ = zf.launch(trained, 2, timeout=limit())
    # Nearly 30 collectives and three rests, all of which are asked for at first. Then the first one and the rests, and
    # once the ranks trust what they did in three steps, the first one and the step.
    assert counts[0] > 25 and counts[1:4] == [4, 4, 2], counts


def test_updates_within_backward_agree_on_each_sum():
    (_, counts), _ = zf.launch(trained, 2, True, timeout=limit())
    # One in front of each of ten sums; the rests of forward and backward are promised once ranks trust each other.
    assert counts[0] > 25 and counts[1:4] == [14, 14, 12], counts


class Deep(nn.Module):
    """Equal blocks between two leaves, which may be one; with a checkpoint around each block, of either kind."""

    def __init__(self, depth, saved=None, tied=False):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(depth)])
        self.saved = saved
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.saved is None else checkpoint(block, x, use_reentrant=self.saved == "reentrant")
        return self.last(x)


# Each with the arguments of the model, what the chain has besides, and how many backwards a micro-step has.
FORMS = {
    "plain": ({}, lambda: [], 1),
    "bf16": ({}, lambda: [zf.precision(param_dtype=torch.bfloat16)], 1),
    "accumulation": ({}, lambda: [zf.accumulate(3)], 1),
    "checkpoints": ({"saved": "not reentrant"}, lambda: [], 1),
    "reentrant checkpoints": ({"saved": "reentrant"}, lambda: [], 1),
    "tied": ({"tied": True}, lambda: [], 1),
    "sums by hand": ({}, lambda: [], 2),
    # All are still full when the second forward begins.
    "two units": ({}, lambda: [], 2),
}


def messages_of(depth, form, steps=TRUSTED + 5):
    options, more, backwards = FORMS[form]
    torch.manual_seed(0)
    model = Deep(depth, **options)
    opt = zf.attach(model, zf.chain(zf.shard(), *more(), zf.adamw(1e-3)))
    counted, found = Counted(opt), []
    for step in range(steps):
        for _ in range(backwards):
            model(torch.full((2, 4), 0.1 * (step + dist.get_rank()))).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
        found.append(counted.since())
    opt.detach()
    return found, counted.most


def all_messages():
    """By form and depth."""
    table = {form: (4,) for form in FORMS} | {"plain": (3, 24), "two units": (1,)}
    return {(form, depth): messages_of(depth, form) for form, depths in table.items() for depth in depths}


def test_a_micro_step_has_two_messages_at_any_depth():
    for rank in zf.launch(all_messages, 2, timeout=limit(60)):
        for (form, depth), (found, most) in rank.items():
            trusted = found[TRUSTED + 1 :]
            # One at the start of each forward, and one at the step.
            assert [messages for messages, *_ in trusted] == [1 + FORMS[form][2]] * 4, (form, depth, found)
            # Each all-gather but the first of a forward is begun while the unit before it computes.
            forwards = 1 if form == "two units" else FORMS[form][2]
            assert [gathers - early for _, gathers, early in trusted] == [forwards] * 4, (form, depth, found)
            assert most == ALIVE, (form, depth)


def evaluated_on_one():
    """One rank alone evaluates between steps; all have trusted each other by then."""
    rank, _ = rank_and_size()
    model = make()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    counted, counts = Counted(opt), []
    for step in range(12):
        model(rows(rank, step), range(LAYERS)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if step == 6 and rank == 0:
            with torch.no_grad():
                model(rows(5, step), range(LAYERS))
        counts.append(counted.since()[0])
    return counts


def test_promises_come_again_after_an_evaluation_on_one_rank():
    for counts in zf.launch(evaluated_on_one, 2, timeout=limit()):
        assert counts[5] == 2 and counts[-1] == 2 and max(counts[6:9]) > 10, counts


def talking(after, steps=TRUSTED + 6):
    """Ranks that trust each other, a collective of the user's, and at the end a rank that uses more than the others."""
    rank, _ = rank_and_size()
    model = make()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    counted, counts = Counted(opt), []
    for step in range(steps):
        last = step == steps - 1
        loss = model(rows(rank, step), range(LAYERS if last and rank else LAYERS - 3)).square().mean()
        if "forward" in after:
            dist.all_reduce(torch.ones(1))
        loss.backward()
        if "backward" in after:
            dist.all_reduce(torch.ones(1))
        opt.step()
        opt.zero_grad()
        counts.append(counted.since()[0])
    opt.detach()
    return counts, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    "after",
    [("forward", "backward"), *(pytest.param((x,), marks=pytest.mark.slow) for x in ("forward", "backward"))],
)
def test_ranks_wait_for_each_other_where_the_user_communicates(after):
    """A rest in front of a collective of the user's stays a message: a rank joins there what another one needs more."""
    found = zf.launch(talking, 2, after, timeout=limit())
    for counts, params in found:
        assert counts[TRUSTED + 1 : -1] == [2 + len(after)] * 4, counts
        assert all(map(torch.equal, params, found[0][1]))


def test_what_is_remembered_is_bounded():
    habits = Habits((), lambda: None)
    for unit in range(3 * MOST_PASSES):
        habits.note((1, unit))
        for i in range(3 * LONGEST if unit % 2 else 5):
            habits.note((1, i))
        assert len(habits.done) <= LONGEST + 1
        habits.end()
    assert len(habits.known) <= MOST_PASSES
    assert all(len(known.followed) == 5 for known in habits.known.values())
