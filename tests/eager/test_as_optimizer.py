"""What `zf.attach` returns as a torch.optim.Optimizer: schedules that are resumed, hooks, metrics that are kept."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import zerofn as zf

RATES = {"weight": 1e-2, "bias": 3e-3}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def backward(model: nn.Module, step: int = 0) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()


def kind_of(path: str) -> str:
    return path.rpartition(".")[2]


def of_torch(model: nn.Module) -> torch.optim.Optimizer:
    """One group for weights and one for biases, as `of_zerofn` has them."""
    groups = [
        {"params": [p for n, p in model.named_parameters() if kind_of(n) == kind], "lr": lr}
        for kind, lr in RATES.items()
    ]
    return torch.optim.AdamW(groups)


def of_zerofn(model: nn.Module) -> zf.Optimizer:
    return zf.attach(model, zf.partition({kind: zf.adamw(lr) for kind, lr in RATES.items()}, kind_of))


MAKE = {"torch": of_torch, "zerofn": of_zerofn}


def rates(opt: torch.optim.Optimizer) -> list[float]:
    return [float(g["lr"]) for g in opt.param_groups]


# -- a schedule that is resumed ------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 0.5**e),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 8)], [4]
    ),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.05, 0.02], total_steps=20, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1, min_lr=[1e-4, 1e-5]),
}


def one_step(model: nn.Module, opt: Any, schedule: Any, step: int) -> list[float]:
    opt.zero_grad()
    backward(model, step)
    opt.step()
    schedule.step(1.0) if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else schedule.step()
    return rates(opt)


def through_a_file(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("before", (3, 5))
@pytest.mark.parametrize("order", ("optimizer first", "schedule first"))
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_resumed_schedule(kind: str, order: str, before: int):
    """Every rate, those right after loading too, and the parameters are those of torch.optim.AdamW."""
    found, weights = {}, {}
    for library, make in MAKE.items():
        model = net()
        opt = make(model)
        schedule = SCHEDULES[kind](opt)
        for step in range(before):
            one_step(model, opt, schedule, step)
        kept, kept_schedule = through_a_file(opt.state_dict()), copy.deepcopy(schedule.state_dict())
        again = copy.deepcopy(model) if library == "torch" else net()
        other = make(again)
        if order == "optimizer first":
            other.load_state_dict(kept)
            resumed = SCHEDULES[kind](other)
            resumed.load_state_dict(kept_schedule)
        else:
            resumed = SCHEDULES[kind](other)
            other.load_state_dict(kept)
            resumed.load_state_dict(kept_schedule)
        steps = range(before, before + 7)
        found[library] = [rates(other)] + [one_step(again, other, resumed, step) for step in steps]
        weights[library] = [p.detach() for p in again.parameters()]
    assert found["zerofn"] == found["torch"]
    assert len({tuple(r) for r in found["torch"]}) > 1
    for a, b in zip(weights["zerofn"], weights["torch"], strict=True):
        torch.testing.assert_close(a, b)


def test_last_epoch():
    """torch's other way to resume needs the `initial_lr` of groups."""
    found = {}
    for library, make in MAKE.items():
        model = net()
        opt = make(model)
        schedule = lr_scheduler.LambdaLR(opt, lambda e: 1 / (1 + e))
        for step in range(3):
            one_step(model, opt, schedule, step)
        again = net()
        other = make(again)
        other.load_state_dict(copy.deepcopy(opt.state_dict()))
        resumed = lr_scheduler.LambdaLR(other, lambda e: 1 / (1 + e), last_epoch=2)
        found[library] = [resumed.base_lrs, rates(other)] + [one_step(again, other, resumed, s) for s in range(3, 6)]
    assert found["zerofn"] == found["torch"]


def test_a_resumed_schedule_through_zf_save(tmp_path):
    model, again = net(), net()
    opt, other = of_zerofn(model), of_zerofn(again)
    schedule = SCHEDULES["SequentialLR"](opt)
    for step in range(3):
        one_step(model, opt, schedule, step)
    zf.save(tmp_path, opt)
    zf.load(tmp_path, like=other)
    resumed = SCHEDULES["SequentialLR"](other)
    resumed.load_state_dict(copy.deepcopy(schedule.state_dict()))
    for step in range(3, 9):
        assert one_step(again, other, resumed, step) == one_step(model, opt, schedule, step)


def test_what_is_kept_of_groups():
    """Numbers, text and 0-d tensors, as copies; and nothing that could not be written."""
    opt = of_zerofn(net())
    mine = {"tag": "a", "rank": torch.tensor(2.0), "bounds": (0, [0.5, None]), "about": {"on": True}}
    opt.param_groups[0].update(mine, call=lambda: 0, matrix=torch.ones(2), half=[1, object()])
    kept = opt.state_dict()
    assert {k: v for k, v in kept["param_groups"][0].items() if k in mine} == mine
    assert not {"call", "matrix", "half"} & set(kept["param_groups"][0])
    assert not set(mine) & set(kept["param_groups"][1])
    opt.param_groups[0]["rank"].fill_(7)
    opt.param_groups[0]["bounds"][1].append(3)
    other = of_zerofn(net())
    other.load_state_dict(kept)
    assert other.param_groups[0]["rank"] == 2 and other.param_groups[0]["bounds"] == (0, [0.5, None])
    other.param_groups[0]["rank"].fill_(9)
    assert kept["param_groups"][0]["rank"] == 2
    with pytest.raises(ValueError, match=r"param_groups/1/lr: missing"):
        other.load_state_dict({**kept, "param_groups": [kept["param_groups"][0], {"name": "partition.bias"}]})


# -- metrics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_backward", (False, True))
def test_metrics_are_the_users_own(in_backward: bool):
    """Neither does loading a state change those that were kept, nor writing to them the state."""
    model = net()
    scale = () if in_backward else (zf.scale_loss("dynamic", init_scale=8.0),)
    opt = zf.attach(model, zf.chain(*scale, zf.adamw(1e-2)), in_backward)
    start = copy.deepcopy(opt.state_dict())
    backward(model)
    opt.step()
    opt.zero_grad()
    if not in_backward:
        (model(torch.ones(1, 4)).sum() * float("inf")).backward()
        opt.step()
    kept = dict(opt.metrics)
    seen = {k: float(v) for k, v in kept.items()}
    assert seen["step"] == 1 and seen.get("loss_scale", 4.0) == 4.0
    opt.load_state_dict(start)
    assert {k: float(v) for k, v in kept.items()} == seen
    before = copy.deepcopy(opt.state_dict())
    for x in kept.values():
        x.fill_(1) if x.dtype == torch.bool else x.add_(1)
    assert opt.state.step == before["zerofn"]["step"]
    if not in_backward:
        assert opt.state.transforms["scale_loss"]["scale"] == 8.0


# -- hooks ---------------------------------------------------------------------------------------------------------


def test_step_hooks():
    """Called in the order and with the arguments of torch.optim, and not after they were removed."""
    calls: dict[str, list[Any]] = {}
    for library, make in MAKE.items():
        model = net()
        opt = make(model)
        log = calls[library] = []

        def note(name: str, log: list[Any] = log, opt: Any = opt) -> Callable[..., None]:
            def hook(o: Any, args: tuple, kwargs: dict) -> None:
                log.append((name, o is opt, args[0] is opt, len(args), sorted(kwargs)))

            return hook

        handles = [
            opt.register_step_post_hook(note("post 1")),
            opt.register_step_pre_hook(note("pre 1")),
            register_optimizer_step_pre_hook(note("pre, any")),
            register_optimizer_step_post_hook(note("post, any")),
            opt.register_step_pre_hook(note("pre 2")),
            opt.register_step_post_hook(note("post 2")),
        ]
        backward(model)
        opt.step()
        opt.step(lambda log=log: log.append("closure"))
        opt.step(closure=None)
        for handle in handles:
            handle.remove()
        opt.step()
        with pytest.raises(ZeroDivisionError):
            opt.register_step_post_hook(note("never"))
            opt.step(lambda: 1 / 0)
    assert calls["zerofn"] == calls["torch"]
    names = [c if isinstance(c, str) else c[0] for c in calls["torch"]]
    both = (["pre, any", "pre 1", "pre 2"], ["post 1", "post 2", "post, any"])
    assert names == [*both[0], *both[1], *both[0], "closure", *both[1], *both[0], *both[1]]


def test_a_step_hook_with_arguments_of_its_own():
    """What a pre-hook returns is what the step gets, here a closure; anything but a pair is refused."""
    for make in MAKE.values():
        model = net()
        opt = make(model)
        backward(model)
        handle = opt.register_step_pre_hook(lambda o, args, kwargs: (args, {"closure": lambda: 5.0}))
        assert opt.step() == 5.0
        handle.remove()
        assert opt.step() is None
        opt.register_step_pre_hook(lambda o, args, kwargs: 3)
        with pytest.raises(RuntimeError, match="must return None or a tuple"):
            opt.step()


def test_step_hooks_see_gradients_and_parameters():
    """A pre-hook that clips gradients by hand, and a post-hook that keeps parameters in bounds."""
    found: dict[str, list[Tensor]] = {}
    for library, make in MAKE.items():
        model = net()
        opt = make(model)

        def clip(o: Any, args: tuple, kwargs: dict) -> None:
            for group in o.param_groups:
                nn.utils.clip_grad_value_(group["params"], 0.01)

        @torch.no_grad()
        def bound(o: Any, args: tuple, kwargs: dict) -> None:
            for group in o.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.25, 0.25)

        opt.register_step_pre_hook(clip)
        opt.register_step_post_hook(bound)
        for step in range(4):
            opt.zero_grad()
            backward(model, step)
            opt.step()
        found[library] = [p.detach() for p in model.parameters()]
    for a, b in zip(found["zerofn"], found["torch"], strict=True):
        torch.testing.assert_close(a, b)
    assert max(float(p.abs().max()) for p in found["zerofn"]) <= 0.25


def test_hooks_on_state_dicts():
    """In the order of torch.optim; a hook may change the dict or return another."""
    calls: dict[str, list[str]] = {}
    for library, make in MAKE.items():
        opt = make(net())
        log = calls[library] = []

        def add(name: str, log: list[str] = log) -> Callable[..., None]:
            return lambda *args: log.append(name)

        def wrap(o: Any, d: dict[str, Any]) -> dict[str, Any]:
            return {"inner": d, "version": 2}

        def unwrap(o: Any, d: dict[str, Any]) -> dict[str, Any]:
            assert d.pop("version") == 2
            return d["inner"]

        handles = [
            opt.register_state_dict_pre_hook(add("save, before")),
            opt.register_state_dict_pre_hook(add("save, first"), prepend=True),
            opt.register_state_dict_post_hook(wrap),
            opt.register_state_dict_post_hook(lambda o, d, log=log: log.append(f"saved {sorted(d)}")),
            opt.register_load_state_dict_pre_hook(unwrap),
            opt.register_load_state_dict_pre_hook(add("load, first"), prepend=True),
            opt.register_load_state_dict_post_hook(add("loaded")),
        ]
        kept = opt.state_dict()
        opt.param_groups[0]["lr"] = 0.5
        opt.load_state_dict(kept)
        assert kept["version"] == 2 and rates(opt) == list(RATES.values())
        if isinstance(opt, zf.Optimizer):
            # No dict of the user's own is made here.
            opt.load_state(opt.state)
        for handle in handles:
            handle.remove()
        assert "version" not in opt.state_dict()
        opt.load_state_dict(kept["inner"])
    assert calls["zerofn"] == calls["torch"]
    assert calls["torch"] == ["save, first", "save, before", "saved ['inner', 'version']", "load, first", "loaded"]


def test_a_profiler_that_records_stacks():
    """It reads the state of whatever optimizer of torch's it meets, by parameter."""
    model = net()
    opt = of_zerofn(model)
    options = dict(with_stack=True, profile_memory=True, record_shapes=True, acc_events=True)
    with torch.profiler.profile(**options) as profiler:
        backward(model)
        opt.step()
    assert any(e.key.startswith("Optimizer.step") for e in profiler.key_averages())


# -- modules that take no hooks ------------------------------------------------------------------------------------

PIPES = {
    "plain": lambda: zf.sgd(0.1),
    "scaled": lambda: zf.chain(zf.scale_loss(64.0), zf.sgd(0.1)),
    "cast": lambda: zf.chain(zf.precision(param_dtype=torch.bfloat16, store_dtype=torch.bfloat16), zf.sgd(0.1)),
}


@pytest.mark.parametrize("kind", PIPES)
@pytest.mark.parametrize("where", ("1.0", "0", ""))
def test_modules_of_torch_jit(kind: str, where: str):
    """Refused by name, with nothing changed: the same model trains under torch.optim afterwards."""
    model = net()
    if where == "1.0":
        model = nn.Sequential(model, nn.Sequential(torch.jit.script(nn.Linear(1, 1)), nn.ReLU()))
    elif where == "0":
        model[0] = torch.jit.trace(model[0], torch.ones(2, 4))
    else:
        model = torch.jit.script(model)
    before = [(p.data_ptr(), p.dtype, p.clone()) for p in model.parameters()]
    with pytest.raises(ValueError, match=r"attach: modules were compiled by torch.jit") as caught:
        zf.attach(model, PIPES[kind]())
    rows = str(caught.value).splitlines()
    assert [r.strip().split(":")[0] for r in rows[1:2]] == [where or "<root>"] and rows[2].startswith("  write: ")
    for (address, dtype, x), p in zip(before, model.parameters(), strict=True):
        assert (p.data_ptr(), p.dtype) == (address, dtype) and torch.equal(p, x)
        assert not hasattr(p, "_zerofn_owner")
    opt = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 4)).square().mean().backward()
    opt.step()


def test_scripted_after_training():
    """What the message says to write."""
    model = net()
    opt = zf.attach(model, PIPES["scaled"]())
    backward(model)
    opt.step()
    x = torch.ones(2, 4)
    expected = model(x)
    torch.testing.assert_close(torch.jit.script(opt.detach())(x), expected)


def pickled(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_the_state_goes_on(copied):
    """`torch.save(opt.state, file)`, and a state that `zf.launch` returns: training goes on from it, bitwise."""
    model, found, kept = net(), [], None
    opt = zf.attach(model, zf.chain(zf.precision(param_dtype=torch.bfloat16), zf.adamw(1e-2)))
    inputs = [torch.linspace(-1, 1, 8).view(2, 4).bfloat16() * (i + 1) for i in range(3)]
    for i in (0, 1, 2, None, 2):
        if i is None:
            opt.load_state(kept)
            continue
        model(inputs[i]).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
        found.append([p.detach().clone() for p in model.parameters()])
        if i == 1:
            kept = copied(opt.state)
            first = kept[kept.leaves["0.weight"]]["exp_avg"]
            assert torch.equal(first, opt.state[model[0].weight]["exp_avg"])
    torch.testing.assert_close(found[3], found[2], rtol=0, atol=0)
    assert not torch.equal(found[2][0], found[1][0])
