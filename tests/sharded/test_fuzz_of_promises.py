"""Random programs on three ranks that mostly do the same in each step, and now and then something else.

Ranks promise each other what they did the last time. So here a program has a usual order of blocks, which all ranks
keep for some steps. Then blocks are skipped, used twice or in another order, on some ranks or on all; one rank
evaluates alone; an exception stops forward or backward on some ranks; threads run several at once. Numbers are those of
one process in float64. `ZEROFN_PROMISES=2000` runs so many programs, `ZEROFN_PROMISES_FIRST=500` begins at that seed.
"""

import contextlib
import os
import random
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import rank_programs as P
import torch
from time_limits import limit
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofn as zf
from zerofn.ranks.ordered_collectives import (  # inside: when ranks trust each other, and what they exchange
    TRUSTED,
    Rounds,
)
from zerofn.sharded.schedule import ALIVE  # inside: how many units may be full

COUNT = int(os.environ.get("ZEROFN_PROMISES", "2"))
FIRST = int(os.environ.get("ZEROFN_PROMISES_FIRST", "0"))
RANKS, STEPS, D = 3, 9, 4
SGD = {"lr": 0.2, "momentum": 0.7}
CALM = 0.55


class Stopped(Exception):
    """What a program raises in the middle of forward or backward, and catches."""


class StopsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise Stopped


class Chosen(nn.Module):
    """Blocks in the order that a call names; a negative number is a place where forward or backward is stopped."""

    def __init__(self, seed):
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(rng.randint(2, 5))]
        self.stem = nn.Linear(D, D)
        self.blocks = nn.ModuleList(blocks)
        # Behind the blocks, in a unit of its own: a backward that is stopped has its gradients, as in torch.
        self.head = nn.Linear(D, D)
        self.tied = rng.random() < 0.3
        if self.tied:
            self.head.weight = self.stem.weight
        if rng.random() < 0.2:
            blocks[0].requires_grad_(False)
        self.kinds = [rng.choice(("plain", "plain", "saved", "reentrant")) for _ in blocks]

    def forward(self, x, order, stop=None, reentrant=True):
        h = self.stem(x)
        for at, i in enumerate(order):
            if stop == ("forward", at):
                raise Stopped
            if stop == ("backward", at):
                h = StopsBackward.apply(h)
            kind = self.kinds[i]
            if kind == "plain" or (kind == "reentrant" and not reentrant):
                h = self.blocks[i](h)
            else:
                h = checkpoint(self.blocks[i], h, use_reentrant=kind == "reentrant")
        return torch.tanh(self.head(h))


WAYS = ("usual", "other on all", "other on some", "more on one", "two calls")
# Here ranks call the model in different numbers, or in the order in which threads come: with a collective of the user's
# after each call that hangs by itself.
QUIET_WAYS = ("evaluate on one", "stopped in forward", "stopped in backward", "threads", "no batch on one")


def program_of(seed, model):
    blocks, tied = len(model.blocks), model.tied
    rng = random.Random(f"{seed} program")
    usual = [i for i in range(blocks) if rng.random() < 0.8] or [0]
    backwards = rng.choice([1, 1, 2])
    # A collective of the user's after each forward is there from the first step on.
    talks = rng.random() < 0.3
    # torch adds up both uses of a tied leaf first, so a stopped backward leaves it nothing; here one use has its sum.
    ways = WAYS if talks else [way for way in WAYS + QUIET_WAYS if not (tied and way == "stopped in backward")]
    # Programs that only do the usual tell how many messages that takes.
    calm = rng.random() < 0.15

    def program(model, rank, step, talk):
        shared = random.Random(f"{seed} {step}")
        own = random.Random(f"{seed} {step} {rank}")
        data = torch.Generator().manual_seed((seed * 1009 + step) * 31 + rank)

        def draw():
            return torch.randn(3, D, generator=data, dtype=torch.float64)

        def loss_of(x, order, **options):
            return ((model(x, order, **options) - 0.3) ** 2).mean()

        def trained(order, **options):
            loss = loss_of(draw(), order, **options)
            if talks:
                talk()
            loss.backward()

        def other(rng):
            return [rng.randrange(blocks) for _ in range(rng.randint(0, blocks + 1))]

        way = "usual" if calm or step <= TRUSTED or shared.random() < CALM else shared.choice(ways)
        some = shared.sample(range(RANKS), shared.randint(1, RANKS))
        for again in range(backwards):
            first, here = not again, rank in some
            if way == "other on all":
                trained(other(shared))
            elif way == "other on some" and here:
                trained(other(own))
            elif way == "more on one" and rank == some[0]:
                trained([*usual, *range(blocks)])
            elif way == "evaluate on one" and first:
                if rank == some[0]:
                    with torch.no_grad():
                        model(draw(), other(own), reentrant=False)
                trained(usual)
            elif way.startswith("stopped") and first and here:
                place = way.removeprefix("stopped in ")
                with contextlib.suppress(Stopped):
                    trained(usual, stop=(place, own.randrange(len(usual))), reentrant=place == "forward")
                trained(usual)
            elif way == "threads" and first:
                program.threads = True
                xs = [draw() for _ in range(3)]
                with ThreadPoolExecutor(3) as pool:
                    list(pool.map(lambda x: loss_of(x, usual, reentrant=False).backward(), xs))
            elif way == "two calls":
                (loss_of(draw(), usual) + loss_of(draw(), other(shared))).backward()
            elif way == "no batch on one" and rank == some[0]:
                # It loses a batch, and may go through the model all the same.
                if own.random() < 0.5:
                    model(draw(), usual)
            else:
                trained(usual)

    # Ranks that use the model in different numbers of calls have no collective of the user's in common.
    program.quiet = not talks
    program.calm, program.threads = calm, False
    program.messages = 1 + (3 if talks else 1) * backwards
    return program


def case(seed):
    """Model, program and pipeline of a seed, and after how many steps there is an update."""
    rng = random.Random(f"{seed} pipe")
    model = Chosen(seed).double()
    every = rng.choice([1, 1, 2])
    more = [zf.accumulate(every)] if every > 1 else []
    program = program_of(seed, model)
    return model, program, zf.chain(zf.shard(), *more, zf.clip_by_global_norm(0.5), zf.sgd(**SGD)), every


def runs(seeds):
    counts = {"messages": 0, "collectives": 0}
    exchange, run_next = Rounds._exchange, Rounds._run_next

    def exchanged(self, *args):
        counts["messages"] += 1
        return exchange(self, *args)

    def ran_next(self, *args, **options):
        counts["collectives"] += 1
        return run_next(self, *args, **options)

    Rounds._exchange, Rounds._run_next = exchanged, ran_next
    out = {}
    for seed in seeds:
        model, program, tx, _ = case(seed)
        before, steps = dict(counts), []

        def prepare(model, step, steps=steps):
            steps.append(counts["messages"])

        program.prepare = prepare
        # What hangs says where; the seed is what is asked for first.
        print(f"seed {seed}", flush=True)
        try:
            out[seed] = P.eager(tx, program, STEPS, model)
        except Exception as error:
            raise RuntimeError(f"seed {seed}: {error}") from error
        out[seed]["counts"] = {k: n - before[k] for k, n in counts.items()}
        out[seed]["last"] = steps[-1] - steps[-2]
        # Each thread may have two full units.
        out[seed]["most"] *= not program.threads
    return out


def check(seeds, seconds):
    ranks = zf.launch(runs, RANKS, list(seeds), timeout=limit(seconds))
    bad, messages, collectives = [], 0, 0
    for seed in seeds:
        model, program, _, every = case(seed)
        want = P.reference(RANKS, lambda ps: torch.optim.SGD(ps, **SGD), program, STEPS, model, every, clip=0.5)
        messages += ranks[0][seed]["counts"]["messages"]
        collectives += ranks[0][seed]["counts"]["collectives"]
        for rank in range(RANKS):
            found = ranks[rank][seed]
            try:
                worst, where = P.differences(found, want)
            except AssertionError:
                bad.append(f"seed {seed}: {traceback.format_exc(limit=1)}")
                break
            # Float64 sums in another order, through clipped steps.
            if not worst < 1e-10:
                bad.append(f"seed {seed}, rank {rank}: {where} is off by {worst:.1e} of the change")
            if program.calm and found["last"] != program.messages:
                bad.append(f"seed {seed}, rank {rank}: {found['last']} messages in a step, not {program.messages}")
            if found["most"] > ALIVE + 1:
                bad.append(f"seed {seed}, rank {rank}: {found['most']} units were full")
    print(f"{len(seeds)} programs, {messages} messages, {collectives} collectives")
    assert not bad, "\n".join(bad)


@pytest.mark.timeout(400)
def test_random_programs():
    check([*range(FIRST, FIRST + COUNT), 10_099], 60 + COUNT / 2)


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("part", range(8))
def test_many_random_programs(part):
    check(range(10_000 + 250 * part, 10_000 + 250 * (part + 1)), 300)
