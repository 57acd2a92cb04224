"""Parameters that are frozen and unfrozen between steps, beside torch.optim on the batch of all ranks."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from covering import covering, few_and_all
from one_launch import one_launch
from pairs import cover
from stages import STAGES, around
from time_limits import limit
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zerofn as zf

RATE, DECAY, STEPS = 1e-2, 0.1, 10
# By micro-step, which layers are frozen; windows of two micro-steps begin at the even ones.
BETWEEN = [(0, 2), (0, 2), (0,), (0,), (), (), (2, 4), (2, 4), (), ()]
WITHIN = [(0,), (), (2,), (0, 2), (), (0,), (4,), (4,), (4,), ()]
# A leaf that no step reaches at all.
NEVER = [(2,)] * STEPS
SCHEDULES = {"between windows": BETWEEN, "within windows": WITHIN, "never trained": NEVER}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def whole(size: int, step: int) -> Tensor:
    return torch.cat([batch(rank, step) for rank in range(size)])


def freeze(model: nn.Sequential, layers: tuple[int, ...], before: tuple[int, ...] | None = None) -> None:
    """Freeze these layers, and unfreeze the others; `before` is what was frozen: what stays is not touched."""
    for i in (0, 2, 4):
        if before is None or (i in layers) != (i in before):
            model[i].requires_grad_(i not in layers)


def change(model: nn.Sequential, schedule: list[tuple[int, ...]], i: int) -> None:
    """Freeze and unfreeze what differs from the step before."""
    freeze(model, schedule[i], schedule[i - 1] if i else None)


def torch_optim(schedule: list[tuple[int, ...]], every: int, size: int, clip: bool) -> list[Tensor]:
    model = net()
    opt = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
    for i in range(STEPS):
        freeze(model, schedule[i])
        (model(whole(size, i)).square().mean() / every).backward()
        if (i + 1) % every == 0:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
    return [p.detach() for p in model.parameters()]


# When leaves of the first step are frozen, and whether they have states then.
AFTER, HELD, UNFROZEN = HOWS = ("after attach", "before, with states", "before, without states")


def attached(
    front: list, schedule: list[tuple[int, ...]], data: Callable[[int], Tensor], clip: bool, how: str, early: bool
) -> list[Tensor]:
    model = net()
    if how != AFTER:
        freeze(model, schedule[0])
    clips = [zf.clip_by_global_norm(0.5)] if clip else []
    tx = zf.chain(*front, *clips, zf.adamw(RATE, weight_decay=DECAY))
    opt = zf.attach(model, tx, hold_frozen=how == HELD, in_backward=early)
    for i in range(STEPS):
        change(model, schedule, i)
        model(data(i)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.detach()
    return [p.detach().clone() for p in model.parameters()]


def fronts(stage: str, every: int) -> list:
    window = zf.accumulate(every)
    middle = [window] if stage in ("one process", "data parallel", "ZeRO-2", "ZeRO-3") else []
    return around(stage, *(middle if every > 1 else []), window=window)


# How leaves are frozen, accumulation, and updates within backward: those take no clip, no window.
RUNS = [
    (name, how, every, early)
    for name in SCHEDULES
    for how in HOWS
    for every, early in ((1, False), (2, False), (1, True))
    if name != "within windows" or every == 2
]


def close(mine: list[Tensor], reference: list[Tensor], what: object) -> None:
    start = [p.detach() for p in net().parameters()]
    moved = [not torch.equal(b, s) for b, s in zip(reference, start, strict=True)]
    assert any(moved), "the reference is dead"
    for a, b, s, trained in zip(mine, reference, start, moved, strict=True):
        # A leaf that was frozen in every step has the bits that it had.
        assert torch.equal(a, s) if not trained else torch.allclose(a, b, rtol=1e-5, atol=2e-6), what


@pytest.mark.parametrize("name, how, every, early", RUNS)
def test_one_process_freezes_as_torch_optim_does(name, how, every, early):
    schedule, clip = SCHEDULES[name], not early
    mine = attached(fronts("one process", every), schedule, lambda i: whole(2, i), clip, how, early)
    close(mine, torch_optim(schedule, every, 2, clip), (name, how, every, early))


def on_a_rank(stage: str, runs: list) -> list[list[Tensor]]:
    data = lambda i: batch(dist.get_rank(), i)  # noqa: E731
    return [
        attached(fronts(stage, every), SCHEDULES[name], data, not early, how, early) for name, how, every, early in runs
    ]


@pytest.mark.parametrize(
    ("stage", "size", "runs"),
    [
        ("data parallel", 2, cover(RUNS)[::2]),
        ("ZeRO-3", 2, cover(RUNS)[1::2]),
        *[pytest.param(x, 3, RUNS, marks=pytest.mark.slow) for x in STAGES],
    ],
)
def test_ranks_freeze_as_torch_optim_does(stage, size, runs):
    for ranks in zf.launch(on_a_rank, size, stage, runs, timeout=limit()):
        for run, mine in zip(runs, ranks, strict=True):
            name, _, every, early = run
            close(mine, torch_optim(SCHEDULES[name], every, size, not early), (stage, size, *run))


# What else looks at a leaf: transforms by themselves, at each stage and on one process, must see the same leaves.
WEIGHTS = lambda path: "muon" if path.endswith("weight") else "adamw"  # noqa: E731
HALVES = lambda path: "a" if path.startswith("4") else "b"  # noqa: E731
OTHERS: dict[str, tuple[Callable[[], list], Callable[[], list]]] = {
    "owners": (lambda: [], lambda: [zf.partition({"muon": zf.muon(RATE), "adamw": zf.adamw(RATE)}, WEIGHTS)]),
    # All leaves of one member, and of one mask, are frozen at first.
    "members": (lambda: [], lambda: [zf.partition({"a": zf.sgd(RATE, momentum=0.9), "b": zf.adamw(RATE)}, HALVES)]),
    "mask": (lambda: [], lambda: [zf.adamw(RATE), zf.masked(zf.ema(0.5), lambda path: path.startswith("2"))]),
    "average": (lambda: [], lambda: [zf.adamw(RATE), zf.ema(0.9)]),
    "host": (lambda: [], lambda: [zf.offload(zf.adamw(RATE))]),
    "scaled": (lambda: [zf.scale_loss(128.0)], lambda: [zf.adamw(RATE)]),
    "momentum": (lambda: [], lambda: [zf.sgd(RATE, momentum=0.9)]),
    "masters": (lambda: [zf.precision(param_dtype=torch.bfloat16)], lambda: [zf.sgd(RATE)]),
    "schedule": (lambda: [], lambda: [zf.clip_by_global_norm(0.1), zf.lion(lambda step: RATE / (1 + step))]),
    "free": (lambda: [], lambda: [zf.schedule_free(zf.sgd(RATE))]),
    "codes": (lambda: [], lambda: [zf.quantize(zf.adamw(RATE), block=4)]),
    "other": (lambda: [], lambda: [zf.leafwise(lambda grad, param: -RATE * grad - 1e-3 * param, optimizer=True)()]),
}


def other(name: str, stage: str, how: str, data: Callable[[int], Tensor]) -> list[Tensor]:
    middle, rest = OTHERS[name]
    model = net()
    if how != AFTER:
        freeze(model, BETWEEN[0])
    held = [zf.accumulate(2)] if stage == "one process" else []
    tx = zf.chain(*around(stage, *middle(), *held, window=zf.accumulate(2)), *rest())
    opt = zf.attach(model, tx, hold_frozen=how == HELD)
    for i in range(STEPS):
        change(model, BETWEEN, i)
        model(data(i)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.detach()
    return [p.detach().clone() for p in model.parameters()]


@functools.cache
def dropped(name: str, every: int) -> list[Tensor]:
    """On one process, of a model in which nothing is frozen and gradients are dropped by hand."""
    middle, rest = OTHERS[name]
    model = net()
    held = [zf.accumulate(every)] if every > 1 else []
    opt = zf.attach(model, zf.chain(*middle(), *held, *rest()))
    for i in range(STEPS):
        model(whole(2, i)).square().mean().backward()
        for layer in BETWEEN[i]:
            for p in model[layer].parameters():
                p.grad = None
        opt.step()
        opt.zero_grad()
    opt.detach()
    return [p.detach().clone() for p in model.parameters()]


def other_on_a_rank(name: str, stage: str, how: str) -> list[Tensor]:
    return other(name, stage, how, lambda i: batch(dist.get_rank(), i))


@pytest.mark.parametrize("how", HOWS)
def test_a_frozen_leaf_is_one_without_a_gradient(how):
    for name in OTHERS:
        mine = other(name, "one process", how, lambda i: whole(2, i))
        assert all(torch.equal(a, b) for a, b in zip(mine, dropped(name, 2), strict=True)), name


OVER_RANKS = list(itertools.product(OTHERS, STAGES, HOWS))
# Each transform at one stage in turn: what a stage does to a leaf is the same for all of them. States of owners grow
# where leaves are cut.
FRONTS = {"ZeRO-1": HELD, "ZeRO-2": UNFROZEN, "ZeRO-3": UNFROZEN}
IN_TURN = [*covering(list(itertools.product(OTHERS, FRONTS))), ("owners", "ZeRO-3")]
IN_TURN = [(name, stage, FRONTS[stage]) for name, stage in IN_TURN]


@pytest.mark.parametrize("rows", few_and_all(IN_TURN, OVER_RANKS))
def test_a_frozen_leaf_is_one_without_a_gradient_on_ranks(rows):
    for (name, stage, how), found in one_launch(2, other_on_a_rank, rows).items():
        # bf16 rounds what ranks compute of half a batch each.
        near = {"rtol": 0.0, "atol": 1e-3} if name == "masters" else {"rtol": 1e-5, "atol": 3e-6}
        for mine in found:
            for a, b in zip(mine, dropped(name, 2 if stage == "ZeRO-1" else 1), strict=True):
                torch.testing.assert_close(a, b, **near, msg=lambda m, of=(name, stage, how): f"{of}: {m}")


# -- what has no state ---------------------------------------------------------------------------------------


def test_a_leaf_that_was_frozen_at_attach_gets_its_state_at_its_first_step():
    model = net()
    freeze(model, (0,))
    opt = zf.attach(model, zf.adamw(RATE))
    trained = {"2.weight", "2.bias", "4.weight", "4.bias"}
    kept = {path: id(x) for path, x in opt.state.transforms["adamw"]["exp_avg"].items()}
    assert set(kept) == trained and model[0].weight not in opt.state
    assert len(opt.param_groups[0]["params"]) == 4
    groups = opt.param_groups
    groups[0]["lr"] = 0.5
    freeze(model, ())
    assert set(opt.state.transforms["adamw"]["exp_avg"]) == trained
    model(batch(0, 0)).square().mean().backward()
    opt.step()
    moments = opt.state.transforms["adamw"]["exp_avg"]
    assert list(moments) == [*dict(model.named_parameters())]
    assert all(id(moments[path]) == x for path, x in kept.items())
    assert opt.param_groups is groups and groups[0]["lr"] == 0.5
    assert all(p is q for p, q in zip(groups[0]["params"], model.parameters(), strict=True))


# -- where unfreezing meets other features ----------------------------------------------------------------------


def trained_on(model: nn.Module, opt: zf.Optimizer, steps: range, run: nn.Module | None = None) -> None:
    for i in steps:
        change(model, BETWEEN, i)
        (run or model)(batch(dist.get_rank(), i)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def of_fully_shard() -> list[Tensor]:
    model = net()
    freeze(model, BETWEEN[0])
    for i in (0, 2, 4):
        fully_shard(model[i])
    opt = zf.attach(fully_shard(model), zf.adamw(RATE, weight_decay=DECAY))
    trained_on(model, opt, range(STEPS))
    return [p.full_tensor().detach() for p in model.parameters()]


def compiled(stage: str) -> list[Tensor]:
    model = net()
    freeze(model, BETWEEN[0])
    opt = zf.attach(model, zf.chain(*fronts(stage, 1), zf.adamw(RATE, weight_decay=DECAY)))
    trained_on(model, opt, range(STEPS), torch.compile(model, backend="aot_eager", fullgraph=True))
    opt.detach()
    return [p.detach().clone() for p in model.parameters()]


def resumed(stage: str, how: str, directory: str) -> list[Tensor]:
    """Saved when some leaves have states that they had not at first, and loaded where these are unfrozen too."""
    tx = lambda: zf.chain(*fronts(stage, 1), zf.adamw(RATE, weight_decay=DECAY))  # noqa: E731
    model = net()
    freeze(model, BETWEEN[0])
    opt = zf.attach(model, tx())
    trained_on(model, opt, range(3))
    zf.save(directory, opt)
    saved = copy.deepcopy(opt.state_dict())
    opt.detach()
    values = [p.detach().clone() for p in model.parameters()]
    model = net()
    freeze(model, BETWEEN[0])
    with torch.no_grad():
        for p, x in zip(model.parameters(), values, strict=True):
            p.copy_(x)
    opt = zf.attach(model, tx())
    freeze(model, BETWEEN[2])
    if how == "zf.load":
        zf.load(directory, like=opt)
    else:
        opt.load_state_dict(saved)
    trained_on(model, opt, range(3, STEPS))
    opt.detach()
    return [p.detach().clone() for p in model.parameters()]


def meetings(stage: str, directory: str) -> dict[str, list[Tensor]]:
    found = {how: resumed(stage, how, f"{directory}/{stage}") for how in ("zf.load", "load_state_dict")}
    if stage == "ZeRO-3":
        found["fully_shard"] = of_fully_shard()
        with pytest.raises(RuntimeError, match=r"unfrozen under shard and torch\.compile.*\n  2\.bias.*\n  2\.weight"):
            compiled(stage)
    else:
        found["compiled"] = compiled(stage)
    return found


@pytest.mark.parametrize(
    "stage",
    ["ZeRO-3", pytest.param("data parallel", marks=pytest.mark.slow), pytest.param("ZeRO-2", marks=pytest.mark.slow)],
)
def test_unfrozen_leaves_are_saved_loaded_compiled_and_cut_by_torch(stage, tmp_path):
    reference = torch_optim(BETWEEN, 1, 2, False)
    for found in zf.launch(meetings, 2, stage, str(tmp_path), timeout=limit()):
        for how, mine in found.items():
            close(mine, reference, (stage, how))


def second_gradients(stage: str, hold: bool) -> list[Tensor]:
    """`sam` takes its second gradient at a point that an unfrozen leaf moves to as well."""
    model = net()
    freeze(model, BETWEEN[0])
    opt = zf.attach(model, zf.chain(*fronts(stage, 1), zf.sam(), zf.adamw(RATE)), hold_frozen=hold)
    for i in range(STEPS):
        change(model, BETWEEN, i)

        def closure(i: int = i) -> Tensor:
            loss = model(batch(dist.get_rank(), i)).square().mean()
            loss.backward()
            return loss

        opt.step(closure)
        opt.zero_grad()
    opt.detach()
    return [p.detach().clone() for p in model.parameters()]


def asked_by_hand() -> str:
    model = net()
    freeze(model, (0,))
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(RATE)))
    freeze(model, ())
    with pytest.raises(RuntimeError) as error:
        torch.autograd.grad(model(batch(0, 0)).sum(), [model[0].weight])
    opt.zero_grad()
    model(batch(0, 0)).sum().backward()
    opt.step()
    assert model[0].weight.requires_grad and model[0].weight.grad is not None
    torch.autograd.grad(model(batch(0, 0)).sum(), [model[0].weight])
    opt.detach()
    return str(error.value)


def seconds(stages: list[str]) -> tuple[list[list[list[Tensor]]], str]:
    return [[second_gradients(stage, hold) for hold in (True, False)] for stage in stages], asked_by_hand()


def test_what_else_asks_for_gradients_of_unfrozen_leaves():
    for found, said in zf.launch(seconds, 2, ["ZeRO-3", "data parallel"], timeout=limit()):
        assert "torch.autograd.grad by 0.weight, unfrozen since the last step" in said
        for held, unfrozen in found:
            for a, b in zip(held, unfrozen, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_captured_step_trains_no_unfrozen_leaf():
    model = net()
    freeze(model, (0,))
    opt = zf.attach(model, zf.adamw(RATE), capturable=True)
    freeze(model, ())
    model(batch(0, 0)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight: frozen when it was attached(.|\n)*hold_frozen=True"):
        opt.step()


def test_a_checkpoint_with_states_of_leaves_that_are_frozen_here_says_so(tmp_path):
    model = net()
    zf.save(tmp_path / "saved", zf.attach(model, zf.adamw(RATE)))
    other = net()
    freeze(other, (0,))
    opt = zf.attach(other, zf.adamw(RATE))
    with pytest.raises(ValueError, match=r"adamw/exp_avg/0\.weight: unexpected(.|\n)*p\.requires_grad_\(True\)"):
        zf.load(tmp_path / "saved", like=opt)
    freeze(other, ())
    zf.load(tmp_path / "saved", like=opt)
    assert other[0].weight in opt.state


def test_held_leaves_are_saved_and_loaded_whatever_is_frozen(tmp_path):
    """The structure of a state does not depend on what is frozen when it is saved."""
    runs = []
    for resumed in (False, True):
        model = net()
        freeze(model, (0, 2))
        opt = zf.attach(model, zf.adamw(RATE), hold_frozen=True)
        for i in range(6):
            if resumed and i == 2:
                zf.save(tmp_path / "saved", opt)
                model = net()
                opt = zf.attach(model, zf.adamw(RATE))
                opt.load_state(zf.load(tmp_path / "saved", like=opt))
            freeze(model, BETWEEN[i])
            model(batch(0, i)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("hold", [True, False])
def test_frozen_leaves_of_materialize_can_be_unfrozen(hold):
    with torch.device("meta"):
        model = net()
    freeze(model, (0,))
    opt = zf.materialize(model, zf.adamw(RATE), hold_frozen=hold)
    assert ("0.weight" in opt.state.transforms["adamw"]["exp_avg"]) is hold and not model[0].weight.requires_grad
    start = model[0].weight.detach().clone()
    for frozen in (True, False):
        freeze(model, (0,) if frozen else ())
        model(batch(0, 0)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        assert torch.equal(model[0].weight, start) is frozen
