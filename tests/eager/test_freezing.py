"""Parameters that are frozen and unfrozen between steps, beside torch.optim on the batch of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pairs import cover
from stages import STAGES, around
from time_limits import limit
from torch import Tensor, nn

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


def freeze(model: nn.Sequential, layers: tuple[int, ...]) -> None:
    for i in (0, 2, 4):
        model[i].requires_grad_(i not in layers)


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


def attached(
    front: list, schedule: list[tuple[int, ...]], data: Callable[[int], Tensor], clip: bool, **more: bool
) -> list[Tensor]:
    model = net()
    if more.get("hold_frozen"):
        freeze(model, schedule[0])
    clips = [zf.clip_by_global_norm(0.5)] if clip else []
    opt = zf.attach(model, zf.chain(*front, *clips, zf.adamw(RATE, weight_decay=DECAY)), **more)
    for i in range(STEPS):
        freeze(model, schedule[i])
        model(data(i)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.detach()
    return [p.detach().clone() for p in model.parameters()]


def fronts(stage: str, every: int) -> list:
    window = zf.accumulate(every)
    middle = [window] if stage in ("one process", "data parallel", "ZeRO-2", "ZeRO-3") else []
    return around(stage, *(middle if every > 1 else []), window=window)


# Whether leaves are frozen before `attach`, accumulation, and updates within backward: those take no clip, no window.
RUNS = [
    (name, hold, every, early)
    for name in SCHEDULES
    for hold in (False, True)
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


@pytest.mark.parametrize("name, hold, every, early", RUNS)
def test_one_process_freezes_as_torch_optim_does(name, hold, every, early):
    schedule, clip = SCHEDULES[name], not early
    data = lambda i: whole(2, i)  # noqa: E731
    mine = attached(fronts("one process", every), schedule, data, clip, hold_frozen=hold, in_backward=early)
    close(mine, torch_optim(schedule, every, 2, clip), (name, hold, every, early))


def on_a_rank(stage: str, runs: list) -> list[list[Tensor]]:
    data = lambda i: batch(dist.get_rank(), i)  # noqa: E731
    return [
        attached(fronts(stage, every), SCHEDULES[name], data, not early, hold_frozen=hold, in_backward=early)
        for name, hold, every, early in runs
    ]


@pytest.mark.parametrize(
    ("stage", "runs"),
    [
        ("data parallel", cover(RUNS)[::2]),
        ("ZeRO-3", cover(RUNS)[1::2]),
        *[pytest.param(x, RUNS, marks=pytest.mark.slow) for x in STAGES],
    ],
)
def test_ranks_freeze_as_torch_optim_does(stage, runs):
    for ranks in zf.launch(on_a_rank, 2, stage, runs, timeout=limit()):
        for run, mine in zip(runs, ranks, strict=True):
            name, _, every, early = run
            close(mine, torch_optim(SCHEDULES[name], every, 2, not early), (stage, *run))


# What else looks at a leaf: transforms by themselves, at each stage and on one process, must see the same leaves.
WEIGHTS = lambda path: "muon" if path.endswith("weight") else "adamw"  # noqa: E731
OTHERS: dict[str, tuple[Callable[[], list], Callable[[], list]]] = {
    "owners": (lambda: [], lambda: [zf.partition({"muon": zf.muon(RATE), "adamw": zf.adamw(RATE)}, WEIGHTS)]),
    "average": (lambda: [], lambda: [zf.adamw(RATE), zf.ema(0.9)]),
    "host": (lambda: [], lambda: [zf.offload(zf.adamw(RATE))]),
    "scaled": (lambda: [zf.scale_loss(128.0)], lambda: [zf.adamw(RATE)]),
    "momentum": (lambda: [], lambda: [zf.sgd(RATE, momentum=0.9)]),
    "masters": (lambda: [zf.precision(param_dtype=torch.bfloat16)], lambda: [zf.sgd(RATE)]),
}


def others(stage: str, data: Callable[[int], Tensor], hold: bool) -> dict[str, list[Tensor]]:
    found = {}
    for name, (middle, rest) in OTHERS.items():
        model = net()
        if hold:
            freeze(model, BETWEEN[0])
        held = [zf.accumulate(2)] if stage == "one process" else []
        opt = zf.attach(
            model, zf.chain(*around(stage, *middle(), *held, window=zf.accumulate(2)), *rest()), hold_frozen=hold
        )
        for i in range(STEPS):
            freeze(model, BETWEEN[i])
            model(data(i)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        opt.detach()
        found[name] = [p.detach().clone() for p in model.parameters()]
    return found


def dropped(every: int) -> dict[str, list[Tensor]]:
    """On one process, of a model in which nothing is frozen and gradients are dropped by hand."""
    found = {}
    for name, (middle, rest) in OTHERS.items():
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
        found[name] = [p.detach().clone() for p in model.parameters()]
    return found


def others_on_a_rank(stage: str, holds: tuple[bool, ...]) -> list[dict[str, list[Tensor]]]:
    return [others(stage, lambda i: batch(dist.get_rank(), i), hold) for hold in holds]


@pytest.mark.parametrize("hold", [False, True])
def test_a_frozen_leaf_is_one_without_a_gradient(hold):
    expected = dropped(2)
    for name, mine in others("one process", lambda i: whole(2, i), hold).items():
        assert all(torch.equal(a, b) for a, b in zip(mine, expected[name], strict=True)), name


@pytest.mark.parametrize(
    ("stage", "holds"),
    [
        ("ZeRO-1", (True,)),
        ("ZeRO-2", (False,)),
        *[pytest.param(x, (False, True), marks=pytest.mark.slow) for x in STAGES],
    ],
)
def test_a_frozen_leaf_is_one_without_a_gradient_on_ranks(stage, holds):
    expected = dropped(2 if stage == "ZeRO-1" else 1)
    for both in zf.launch(others_on_a_rank, 2, stage, holds, timeout=limit()):
        for found in both:
            for name, mine in found.items():
                # bf16 rounds what ranks compute of half a batch each.
                near = {"rtol": 0.0, "atol": 1e-3} if name == "masters" else {"rtol": 1e-5, "atol": 3e-6}
                for a, b in zip(mine, expected[name], strict=True):
                    torch.testing.assert_close(a, b, **near, msg=lambda m, name=name: f"{name}: {m}")


# -- what has no state ---------------------------------------------------------------------------------------


def test_a_leaf_that_was_frozen_at_attach_has_no_state_and_cannot_be_unfrozen():
    model = net()
    freeze(model, (0,))
    opt = zf.attach(model, zf.adamw(RATE))
    assert set(opt.state.transforms["adamw"]["exp_avg"]) == {"2.weight", "2.bias", "4.weight", "4.bias"}
    before = [p.detach().clone() for p in model.parameters()]
    freeze(model, ())
    model(batch(0, 0)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"0\.weight: frozen when it was attached") as caught:
        opt.step()
    assert "0.bias" in str(caught.value) and "zf.attach(model, tx, hold_frozen=True)" in str(caught.value)
    assert all(torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True))


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


def test_frozen_leaves_of_materialize_can_be_held():
    with torch.device("meta"):
        model = net()
    freeze(model, (0,))
    opt = zf.materialize(model, zf.adamw(RATE), hold_frozen=True)
    assert "0.weight" in opt.state.transforms["adamw"]["exp_avg"] and not model[0].weight.requires_grad
    start = model[0].weight.detach().clone()
    for frozen in (True, False):
        freeze(model, (0,) if frozen else ())
        model(batch(0, 0)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        assert torch.equal(model[0].weight, start) is frozen
