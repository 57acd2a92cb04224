"""The update during backward on ranks: bit for bit that of the same pipeline after backward, at every stage."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import models as zoo
import pytest
import torch
import torch.distributed as dist
from gone_gradients import has_numbers
from one_launch import one_launch
from stages import around
from time_limits import limit
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from trees import flat

import zerofn as zf
import zerofn.core.bucketed_views  # inside: how large a bucket is

BF16 = torch.bfloat16
STEPS = 5


def along(axis: str) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))[axis]


def stage_around(stage: Any, *middle: zf.Transform) -> list[zf.Transform]:
    if stage == "hybrid":
        return [zf.shard(along("shard")), zf.all_reduce(along("replicate")), *middle]
    # Gradients do not wait for accumulate(1).
    return around(stage, *middle, window=zf.accumulate(1))


def by_shape(path: str) -> str:
    return "vectors" if path.endswith("bias") else "matrices"


LAST: dict[str, Callable[[], list[zf.Transform]]] = {
    "adamw": lambda: [zf.adamw(1e-2, weight_decay=0.1)],
    "bf16, stochastic": lambda: [
        zf.precision(store_dtype=BF16),
        zf.low_precision_adam(1e-2, rounding="stochastic", seed=3),
    ],
    "partition": lambda: [
        zf.partition({"matrices": zf.adamw(1e-2, weight_decay=0.3), "vectors": zf.adamw(3e-2)}, by_shape)
    ],
}


def net() -> zoo.TiedBlocks:
    """Of sizes that no number of ranks divides."""
    torch.manual_seed(0)
    return zoo.TiedBlocks(7, 5)


def train(stage: Any, last: str, in_backward: bool, differing: bool) -> tuple[dict[str, Tensor], Any, list[bool]]:
    """Stored parameters after a few steps, states, and whether any gradient was ever left."""
    model = net()
    *casts, optimizer = LAST[last]()
    tx = zf.chain(*stage_around(stage, *casts), optimizer)
    opt = zf.attach(model, tx, in_backward=in_backward)
    left = []
    for i in range(STEPS):
        # Everybody leaves the last block out in one step, and each rank another in others.
        without = 2 if i == 1 else (i + dist.get_rank()) % 4 if i >= 3 and differing else -1
        x = torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(10 * dist.get_rank() + i))
        loss = nn.functional.cross_entropy(model(x, without).float().flatten(0, 1), x.roll(1).flatten())
        loss.backward()
        left.append(any(map(has_numbers, model.parameters())))
        opt.step()
        opt.zero_grad()
    state = {f"{part}/{k}": v.detach().clone() for part, e in opt.state.transforms.items() for k, v in flat(e).items()}
    stored = {path: x.detach().clone() for path, x in opt.state.leaves.items()}
    opt.detach()
    return stored, state, left


def both(stage: Any, differing: bool, lasts: tuple[str, ...]) -> dict[str, Any]:
    return {last: (train(stage, last, False, differing), train(stage, last, True, differing)) for last in lasts}


@pytest.mark.parametrize(
    ("stage", "ranks", "lasts"),
    [
        (2, 2, ("adamw", "bf16, stochastic")),
        (3, 2, ("bf16, stochastic", "partition")),
        *(
            pytest.param(*x, tuple(LAST), marks=pytest.mark.slow)
            for x in ((0, 2), (1, 2), (2, 2), (3, 3), ("hybrid", 4))
        ),
    ],
)
def test_equals_the_update_after_backward_bit_for_bit(stage: Any, ranks: int, lasts: tuple[str, ...]):
    for rank, found in enumerate(zf.launch(both, ranks, stage, stage not in (3, "hybrid"), lasts, timeout=limit())):
        for last, ((after, states, _), (during, mine, left)) in found.items():
            where = f"rank {rank}, {last}"
            assert not any(left), f"{where}: a gradient was kept"
            assert after.keys() == during.keys() and states.keys() == mine.keys()
            for path, x in after.items():
                assert torch.equal(x, during[path]), f"{where}: {path}"
            for key, x in states.items():
                assert torch.equal(x, mine[key]), f"{where}: state {key}"
            begun = dict(net().named_parameters())
            moved = {path for path, x in during.items() if x.numel() and x.shape == begun[path].shape}
            assert all(not torch.equal(during[p].float(), begun[p]) for p in moved), f"{where}: nothing moved"


def with_other_blocks(stage: Any, in_backward: bool) -> dict[str, Tensor]:
    return train(stage, "adamw", in_backward, True)[0]


@pytest.mark.parametrize(("stage", "ranks"), [(3, 2), pytest.param("hybrid", 4, marks=pytest.mark.slow)])
def test_other_blocks_on_each_rank(stage: Any, ranks: int):
    during, after = (zf.launch(with_other_blocks, ranks, stage, x, timeout=limit()) for x in (True, False))
    for mine, theirs in zip(during, after, strict=True):
        for path, x in mine.items():
            # Ranks promise sums after a backward, and add to them later; and parts are added up before the replicas'
            # are, and not after them. So a gradient has other last bits.
            torch.testing.assert_close(x, theirs[path], rtol=1e-5, atol=1e-6)


def held_at_most(differing: bool) -> tuple[int, int, int]:
    """How many gradients are kept during backward, after it, and after the step."""
    model = net()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.adamw(1e-2)), in_backward=True)
    held: list[int] = []
    x = torch.arange(4)[None]
    loss = model(x, dist.get_rank() if differing else -1).float().square().mean()
    for block in model.blocks:
        block.weight.register_hook(lambda g: held.append(len(opt._own.home.gradients.hooks.held)))
    loss.backward()
    after = len(opt._own.home.gradients.hooks.held)
    opt.step()
    return max(held), after, len(opt._own.home.gradients.hooks.held)


def test_only_gradients_that_come_in_parts_are_kept_and_only_until_the_step():
    """Blocks 0 and 1 are each used by one of two ranks, block 2 and the rest by both."""
    found = one_launch(2, held_at_most, [(False,), (True,)])
    assert found[False,] == [(0, 0, 0), (0, 0, 0)]
    for most, after, end in found[True,]:
        # Weight and bias of the two blocks.
        assert 1 <= most <= 4 and after == 4 and end == 0


def evaluates(when: str, alone: bool, stage: Any, in_backward: bool) -> dict[str, Tensor]:
    """How whole parameters change in four steps with a call of the model by all ranks or one that nobody learns of."""
    model = net()
    opt = zf.attach(model, zf.chain(*stage_around(stage), zf.sgd(0.1)), in_backward=in_backward)
    begun = {path: p.detach().clone() for path, p in net().named_parameters()}

    def look(now: str) -> None:
        if now == when and (dist.get_rank() == 0 or not alone):
            with torch.no_grad():
                model(torch.arange(4)[None])

    if when == "in backward":
        model.blocks[1].register_full_backward_hook(lambda *_: look("in backward"))
    for i in range(4):
        x = torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(10 * dist.get_rank() + i))
        if i:
            look("before forward")
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(1).flatten())
        look("before backward")
        loss.backward()
        look("after backward")
        opt.step()
        opt.zero_grad()
    with opt.gathered():
        moved = {path: p.detach() - begun[path] for path, p in model.named_parameters()}
    opt.detach()
    return moved


WHEN = ["before forward", "before backward", "after backward", "in backward"]


@functools.cache
def evaluated(alone: bool) -> dict:
    return one_launch(2, evaluates, [("never", False, 3, False), *((when, alone, 3, True) for when in WHEN)])


@pytest.mark.parametrize(
    "alone", [pytest.param(False, marks=pytest.mark.slow, id="all"), pytest.param(True, id="one rank alone")]
)
@pytest.mark.parametrize("when", WHEN)
def test_an_evaluation_changes_nothing_wherever_it_stands(when: str, alone: bool):
    """A gathered copy of before the update was taken for a write by forward, which undid it."""
    want = evaluated(alone)["never", False, 3, False]
    for mine, theirs in zip(evaluated(alone)[when, alone, 3, True], want, strict=True):
        assert all(x.abs().max() > 1e-2 for x in theirs.values())
        for path, x in mine.items():
            # Where one rank alone evaluates, its backward follows that of the other, and each brings a part of its own
            # for both uses of the tied weight: four fp32 numbers in another order, and in three steps what comes of it.
            torch.testing.assert_close(x, theirs[path], rtol=0, atol=1e-7 if alone else 0, msg=path)


class Counts(nn.Module):
    """Its forward writes into a frozen parameter of its own, and a checkpoint repeats what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))
        self.calls = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.add_(1)
        return torch.tanh(x @ self.weight)


def counted(in_backward: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Counts(), nn.Linear(6, 1))
    torch.nn.init.ones_(model[1].weight)
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)), in_backward=in_backward)
    for _ in range(3):
        h = checkpoint(model[0], torch.ones(2, 6), use_reentrant=False)
        model[1](h).square().mean().backward()
        with torch.no_grad():
            model(torch.ones(2, 6))
        opt.step()
        opt.zero_grad()
    with opt.gathered():
        return model[0].calls.detach().clone(), model[0].weight.detach().clone()


def test_what_forward_writes_beside_updates_in_backward_is_stored():
    """In each step a forward, the one that the checkpoint repeats in backward, and an evaluation: nine."""
    found = one_launch(2, counted, [(True,), (False,)])
    for (calls, weight), (after_calls, after_weight) in zip(found[True,], found[False,], strict=True):
        assert torch.equal(calls, torch.full((3,), 9.0)) and torch.equal(after_calls, calls)
        assert torch.equal(weight, after_weight) and not torch.equal(weight, torch.eye(6))


def half_way() -> bool:
    """A backward that is given up leaves nothing for the next one, on any rank."""
    model = net()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(1e-2)), in_backward=True)
    x = torch.arange(4)[None]

    def fail(g: Tensor) -> None:
        raise ZeroDivisionError

    handle = model.embed.weight.register_hook(fail)
    try:
        model(x, dist.get_rank()).float().square().mean().backward()
    except ZeroDivisionError:
        opt.zero_grad()
    handle.remove()
    return not opt._own.home.gradients.hooks.held and not opt._own.home.units.schedule.partial


def test_a_backward_that_is_given_up_leaves_no_parts():
    assert zf.launch(half_way, 2, timeout=limit()) == [True, True]


def goes_on(stage: int, failing: tuple[int, ...], buckets: bool) -> list[Any]:
    """Whether ranks agree, whole parameters after a failed backward and after steps that follow, and the counters."""
    sizes = zerofn.core.bucketed_views
    least = sizes.LEAST_BYTES, sizes.MOST_BYTES
    if buckets:
        # One leaf in each, so that some have been reduced when backward fails.
        sizes.LEAST_BYTES = sizes.MOST_BYTES = 1
    model = net()
    casts = [zf.precision(param_dtype=BF16)] if stage != 3 and buckets else []
    opt = zf.attach(model, zf.chain(*around(stage, *casts), zf.adamw(1e-2)), in_backward=True)
    rank = dist.get_rank()
    x = torch.randint(0, 7, (4, 3), generator=torch.Generator().manual_seed(rank))

    def fail(*_: Any) -> None:
        raise MemoryError

    def whole() -> dict[str, Tensor]:
        with opt.gathered():
            return {n: p.detach().float().clone() for n, p in model.named_parameters()}

    found = [whole()]
    handle = model.blocks[1].register_full_backward_hook(fail) if rank in failing else None
    try:
        model(x).float().square().mean().backward()
        assert handle is None
    except MemoryError:
        assert handle is not None
        handle.remove()
    opt.zero_grad()
    found.append(whole())
    for _ in range(2):
        model(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    sizes.LEAST_BYTES, sizes.MOST_BYTES = least
    return [*found, whole(), opt.global_steps, opt.micro_steps]


@functools.cache
def all_go_on(slow: bool) -> dict:
    stages = [(0, False), (0, True)] if slow else [(2, True), (3, False)]
    return one_launch(2, goes_on, [(stage, who, buckets) for stage, buckets in stages for who in ((0, 1), (1,))])


@pytest.mark.parametrize("failing", [(0, 1), (1,)], ids=["all fail", "one fails"])
@pytest.mark.parametrize(
    ("stage", "buckets"),
    [(2, True), (3, False), *(pytest.param(0, x, marks=pytest.mark.slow) for x in (False, True))],
)
def test_after_a_backward_that_failed_half_way_training_goes_on(stage: int, buckets: bool, failing: tuple[int, ...]):
    ranks = all_go_on(stage == 0)[stage, failing, buckets]
    for before, after, end, steps, micro_steps in ranks:
        assert (steps, micro_steps) == (2, 2)
        assert all(not torch.equal(x, before[path]) for path, x in end.items())
        if len(failing) == 2:
            still = {path for path, x in after.items() if torch.equal(x, before[path])}
            assert still >= {"embed.weight", "blocks.0.weight", "blocks.0.bias"}
            if stage == 3:
                assert "head.bias" not in still
    for one, other in zip(*(r[:3] for r in ranks), strict=True):
        for path, x in one.items():
            assert torch.equal(x, other[path]), path
