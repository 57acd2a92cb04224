"""For those who port: torch's schedulers and closures, DeepSpeed's engine calls, its configuration."""

from __future__ import annotations

import json
import math

import models as zoo
import pytest
import torch
from parity import LR, Run, compare
from torch import nn
from torch.optim import lr_scheduler

import zerofn as zf
from zerofn.contrib.deepspeed import (  # inside: the schedules that a config names
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def net() -> nn.Module:
    torch.manual_seed(0)
    return zoo.Net()


def loss_of(model: nn.Module, step: int = 0) -> torch.Tensor:
    return model(Run([model], step).data(5, 6)).float().square().mean()


# -- what a torch.optim.Optimizer is asked for -----------------------------------------------------------------

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda e: 1 / (1 + e)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=8),
    "OneCycleLR, momentum kept": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=8, cycle_momentum=False),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.1, patience=1),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers(kind: str):
    """torch.optim.SGD under the same scheduler, within seven roundings of a product, which torch fuses with a sum."""
    model, plain = net(), net()
    opt, ref = zf.attach(model, zf.sgd(0.3, momentum=0.9)), torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    schedules = [SCHEDULERS[kind](o) for o in (opt, ref)]
    rates = []
    for step in range(7):
        for m, o, s in ((model, opt, schedules[0]), (plain, ref, schedules[1])):
            o.zero_grad()
            loss_of(m, step).backward()
            o.step()
            s.step(1.0) if kind == "ReduceLROnPlateau" else s.step()
        assert opt.param_groups[0]["lr"] == ref.param_groups[0]["lr"]
        assert opt.param_groups[0]["momentum"] == ref.param_groups[0]["momentum"]
        rates.append(ref.param_groups[0]["lr"])
    assert len(set(rates)) > 1
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    assert isinstance(opt, torch.optim.Optimizer)


def test_groups_of_a_partition():
    labels = {"first.weight": "fast"}
    tx = zf.partition({"fast": zf.sgd(1.0), "slow": zf.sgd(0.1)}, lambda p: labels.get(p, "slow"))
    model, plain = net(), net()
    opt = zf.attach(model, tx)
    assert [g["name"] for g in opt.param_groups] == ["partition.fast", "partition.slow"]
    assert opt.param_groups[0]["params"][0] is model.first.weight and len(opt.param_groups[1]["params"]) == 4
    opt.param_groups[1]["lr"] = 0.5
    for m in (model, plain):
        loss_of(m).backward()
    opt.step()
    for n, p in plain.named_parameters():
        want = p.detach() - (1.0 if n in labels else 0.5) * p.grad
        assert torch.allclose(dict(model.named_parameters())[n], want, atol=1e-7)


def test_closure():
    model, plain = net(), net()
    opt = zf.attach(model, zf.sgd(LR))
    calls = []

    def closure():
        opt.zero_grad()
        loss = loss_of(model)
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return loss

    with torch.no_grad():
        assert torch.equal(opt.step(closure), loss_of(plain))
    assert calls == [True]
    loss_of(plain).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b - LR * b.grad)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(to_none: bool):
    model = net()
    opt = zf.attach(model, zf.sgd(LR))
    loss_of(model).backward()
    old = model.gain.grad
    opt.zero_grad(set_to_none=to_none)
    assert (model.gain.grad is None) if to_none else (model.gain.grad.abs().max() == 0)
    assert old.abs().max() > 0, "the tensor itself may be held by the user"
    loss_of(model).backward()
    assert torch.equal(model.gain.grad, old)


def test_state_dict_goes_on_bit_for_bit(tmp_path):
    tx = zf.chain(zf.scale_loss("dynamic", init_scale=8.0, growth_interval=3), zf.accumulate(2), zf.adamw(1e-2))
    model = net()
    opt = zf.attach(model, tx)

    def train(m, o, steps):
        for step in steps:
            loss_of(m, step).backward()
            o.step()
            o.zero_grad()

    train(model, opt, range(5))
    torch.save(opt.state_dict(), tmp_path / "run.pt")
    train(model, opt, range(5, 9))
    other = zoo.Net()
    again = zf.attach(other, tx)
    again.load_state_dict(torch.load(tmp_path / "run.pt"))
    train(other, again, range(5, 9))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert again.micro_steps == 9 and again.global_steps == 4


# -- the engine's spellings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize("pipe", ["fp32", "scaled", "fp16 dynamic", "bf16", "offload"])
@pytest.mark.parametrize("every", [1, 3])
def test_the_engine_loop(every: int, pipe: str, clear: bool):
    """`backward; step` without zero_grad: what a step has used is not used again."""
    from parity import PIPES

    model, plain = net(), net()
    opt = zf.attach(model, PIPES[pipe].build(every))
    for window in range(3):
        start = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p, s in zip(plain.parameters(), start, strict=True):
                p.copy_(s)
        for micro in range(every):
            step = window * every + micro
            loss = loss_of(model, step)
            shown = opt.backward(loss)
            assert torch.allclose(shown, loss / every) and shown.grad_fn is not None
            assert opt.is_boundary == (micro == every - 1)
            opt.step()
            if clear:
                opt.zero_grad()
            (loss_of(plain, step) / every).backward()
        for p, q, s in zip(model.parameters(), plain.parameters(), start, strict=True):
            far = (p - s + LR * q.grad).norm() / (LR * q.grad).norm()
            assert far < max(PIPES[pipe].tol, 2e-5), far
            q.grad = None
    assert (opt.micro_steps, opt.global_steps, opt.skipped_steps) == (3 * every, 3, 0)


def test_gradients_that_arrived_after_a_step_are_kept():
    model = net()
    opt = zf.attach(model, zf.sgd(LR))
    opt.backward(loss_of(model))
    opt.step()
    opt.backward(loss_of(model, 1))
    once = model.gain.grad.clone()
    opt.backward(loss_of(model, 1))
    assert torch.allclose(model.gain.grad, 2 * once)
    opt.step()
    loss_of(model, 2).backward()  # PyTorch's own adds to what is there
    assert not torch.allclose(model.gain.grad, once)
    opt.zero_grad()
    opt.backward(loss_of(model, 2))
    first = model.gain.grad.clone()
    opt.zero_grad()
    loss_of(model, 2).backward()
    assert torch.equal(model.gain.grad, first)


@pytest.mark.parametrize("pipe", ["plain", "scaled", "offload"])
def test_losses_divided_by_the_caller(pipe: str):
    """`scale_wrt_gas=False`, one step a micro-batch, or several backwards and one step at a boundary set by hand."""
    build = {
        "plain": lambda: zf.chain(zf.accumulate(4), zf.sgd(LR)),
        "scaled": lambda: zf.chain(zf.scale_loss(32.0), zf.accumulate(4), zf.sgd(LR)),
        "offload": lambda: zf.chain(zf.offload(zf.accumulate(4)), zf.sgd(LR)),
    }[pipe]
    plain = net()
    for step in range(4):
        (loss_of(plain, step) / 4).backward()
    counted, by_hand = net(), net()
    opt = zf.attach(counted, build())
    for step in range(4):
        loss = loss_of(counted, step) / 4
        assert opt.backward(loss, scale_wrt_gas=False) is loss
        opt.step()
    other = zf.attach(by_hand, build())
    other.set_boundary(False)
    for step in range(3):
        other.backward(loss_of(by_hand, step) / 4, scale_wrt_gas=False)
    other.step()
    assert not bool(other.metrics["updated"])
    other.backward(loss_of(by_hand, 3) / 4, scale_wrt_gas=False)
    other.set_boundary(True)
    other.step()
    for model in (counted, by_hand):
        for p, q, s in zip(model.parameters(), plain.parameters(), net().parameters(), strict=True):
            assert torch.allclose(p, s - LR * q.grad, rtol=1e-5, atol=1e-7)
    # It does not stick to the next window: DeepSpeed 0.19.6 did.
    other.set_boundary(None)
    before = by_hand.gain.detach().clone()
    plain.zero_grad()
    plain.load_state_dict(by_hand.state_dict())
    for step in range(4):
        other.backward(loss_of(by_hand, step))
        other.step()
        (loss_of(plain, step) / 4).backward()
    assert torch.allclose(by_hand.gain, before - LR * plain.gain.grad, rtol=1e-5, atol=1e-7)


def test_a_window_closed_early():
    """Six micro-batches with accumulation 4: DeepSpeed carries two over in silence."""
    model, plain = net(), net()
    opt = zf.attach(model, zf.chain(zf.accumulate(4), zf.sgd(LR)))
    for step in range(4):
        loss_of(model, step).backward()
        opt.step()
    plain.load_state_dict(model.state_dict())
    start = [p.detach().clone() for p in model.parameters()]
    for step in (4, 5):
        loss_of(model, step).backward()
        opt.set_boundary(step == 5)
        opt.step()
        (loss_of(plain, step) / 2).backward()
    for p, q, s in zip(model.parameters(), plain.parameters(), start, strict=True):
        assert torch.allclose(p, s - LR * q.grad, rtol=1e-5, atol=1e-7)


def test_scheduler_is_stepped_at_applied_updates_only():
    model = nn.Linear(1, 1, bias=False)
    opt = zf.attach(model, zf.chain(zf.scale_loss("dynamic", init_scale=4.0), zf.accumulate(2), zf.sgd(1.0)))
    opt.lr_scheduler = lr_scheduler.LambdaLR(opt, lambda e: 1 / (1 + e))
    rates = []
    for value in (1.0, 1.0, math.inf, 1.0, 1.0):
        opt.backward((model(torch.ones(1, 1)) * value).sum())
        opt.step()
        rates.append(opt.param_groups[0]["lr"])
    # The third overflows and is skipped; the window ends with the fifth.
    assert rates == [1.0, 0.5, 0.5, 0.5, pytest.approx(1 / 3)]
    assert (opt.global_steps, opt.micro_steps, opt.skipped_steps) == (2, 5, 1)
    for _ in range(2):
        opt.backward(model(torch.ones(1, 1)).sum())
        opt.step(lr_kwargs={"epoch": None})
    assert opt.param_groups[0]["lr"] == 0.25
    with pytest.raises(TypeError, match="nonsense"):
        # DeepSpeed swallows this, and steps the schedule by the batch size.
        for _ in range(2):
            opt.backward(model(torch.ones(1, 1)).sum())
            opt.step(lr_kwargs={"nonsense": 1})


def test_multi_output_loss_is_returned_divided():
    def program(run: Run):
        out = run.model(run.data(5, 6))
        loss = out.square().mean() + out.exp().mean()
        if run.opt is None:
            loss.backward()
            return loss / 3
        return run.opt.backward(loss)

    compare(program, zoo.Net, "scaled", every=3)


# -- from_deepspeed -------------------------------------------------------------------------------------------

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
ONE = zf.adamw(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
CLIP = zf.clip_by_global_norm(1.0)


CONFIGS = {
    "stage 0": ({}, zf.chain(zf.all_reduce(), CLIP, ONE)),
    "stage 1": (
        {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5},
        zf.chain(zf.accumulate(4), zf.reduce_scatter(), zf.clip_by_global_norm(0.5), ONE),
    ),
    "stage 2": (
        {"zero_optimization": {"stage": 2}, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2},
        zf.chain(zf.reduce_scatter(), zf.accumulate(4), CLIP, ONE),
    ),
    "stage 3, no clip": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 0},
        zf.chain(zf.shard(), zf.offload(ONE)),
    ),
    "bf16": (
        {"bf16": {"enabled": True}, "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}},
        zf.chain(
            zf.precision(param_dtype=BF16, store_dtype=FP32, reduce_dtype=FP32, grad_dtype=FP32),
            zf.all_reduce(),
            CLIP,
            ONE,
        ),
    ),
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}},
        zf.chain(
            zf.precision(param_dtype=FP16, store_dtype=FP32),
            zf.scale_loss(init_scale=256.0, growth_interval=2, hysteresis=1),
            zf.all_reduce(),
            CLIP,
            ONE,
        ),
    ),
    "fp16 defaults": (
        {"fp16": {"enabled": True}, "zero_optimization": {"stage": 3}},
        zf.chain(
            zf.shard(),
            zf.precision(param_dtype=FP16, store_dtype=FP32),
            zf.scale_loss(init_scale=65536.0, growth_interval=1000, hysteresis=2),
            CLIP,
            ONE,
        ),
    ),
    "static scale": (
        {"fp16": {"enabled": True, "loss_scale": 138}},
        zf.chain(zf.precision(param_dtype=FP16, store_dtype=FP32), zf.scale_loss(138.0), zf.all_reduce(), CLIP, ONE),
    ),
    "bf16 master": (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        zf.chain(
            zf.precision(param_dtype=BF16, store_dtype=BF16),
            zf.all_reduce(),
            CLIP,
            zf.low_precision_adam(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, state_dtype=BF16),
        ),
    ),
    "fp16 master, the announcement's spelling": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_gradients": True, "loss_scale": 8}},
        zf.chain(
            zf.precision(param_dtype=FP16, store_dtype=FP16),
            zf.scale_loss(8.0),
            zf.all_reduce(),
            CLIP,
            zf.low_precision_adam(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, state_dtype=FP32),
        ),
    ),
    "bf16 overflow check": (
        {"bf16": {"enabled": True, "check_grad_overflow": True}},
        zf.chain(zf.precision(param_dtype=BF16, store_dtype=FP32), zf.scale_loss(1.0), zf.all_reduce(), CLIP, ONE),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_from_deepspeed(name: str, tmp_path):
    config, want = CONFIGS[name]
    got = zf.from_deepspeed({"optimizer": ADAMW, **config})
    assert got == want and repr(got) == repr(want)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": ADAMW, **config}))
    assert zf.from_deepspeed(path) == zf.from_deepspeed(str(path)) == want
    model = net()
    opt = zf.attach(model, got)
    opt.backward(loss_of(model))
    opt.step()


OPTIMIZERS = {
    "Adam": ({"type": "Adam", "params": {"lr": 1e-3}}, zf.adamw(1e-3, weight_decay=0.0)),
    "Adam, coupled": (
        {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False, "torch_adam": True}},
        zf.adam(1e-3, weight_decay=0.1),
    ),
    "SGD": (
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        zf.sgd(0.1, momentum=0.9, nesterov=True),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str):
    block, want = OPTIMIZERS[name]
    assert zf.from_deepspeed({"optimizer": block, "gradient_clipping": 0}) == zf.chain(zf.all_reduce(), want)


def test_without_an_optimizer_block():
    tx = zf.chain(zf.from_deepspeed({"bf16": {"enabled": True}}), zf.sgd(0.1))
    assert [t.name for t in tx.parts] == ["precision", "all_reduce", "clip_by_global_norm", "sgd"]


def test_settings_without_effect_are_named():
    config = {"optimizer": ADAMW, "steps_per_print": 10, "zero_optimization": {"stage": 2, "overlap_comm": True}}
    with pytest.warns(UserWarning, match="steps_per_print, zero_optimization.overlap_comm say how DeepSpeed runs"):
        zf.from_deepspeed(config)
    with pytest.warns(UserWarning, match=r"torch.autocast\(device, torch.float16\)"):
        tx = zf.from_deepspeed({"optimizer": ADAMW, "torch_autocast": {"enabled": True, "dtype": "float16"}})
    assert tx.parts[0] == zf.scale_loss()


SCHEDULES = {
    # Update `step` uses the scheduler's number `step - 1`, since it is stepped after each update.
    "WarmupLR linear": (WarmupLR(0.1, 1.1, 4, "linear"), [0.1, 0.1, 0.35, 0.6, 0.85, 1.1, 1.1]),
    "WarmupLR log": (WarmupLR(0.0, 1.0, 4), [0.0, 0.0, math.log(2, 4), math.log(3, 4), 1.0, 1.0]),
    "WarmupDecayLR": (WarmupDecayLR(0.0, 1.0, 2, "linear", 6), [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
    "WarmupCosineLR": (
        WarmupCosineLR(2.0, 6, start=0.5, steps=2, end=0.0, kind="linear"),
        [0.0, 1.0, 1.5, 1 + math.cos(math.pi / 4), 1.0, 1 - math.cos(math.pi / 4), 0.0, 0.0],
    ),
    "OneCycle": (OneCycle(0.0, 1.0, 2, 4), [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
    "OneCycle decay": (OneCycle(1.0, 3.0, 1, 1, rate=1.0, decay_every=2), [1.0, 3.0, 1.0, 1 / 1.5, 1 / 2.0]),
    "OneCycle stairs": (OneCycle(0.0, 1.0, 4, 4, stairs=2), [0.0, 0.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0, 0.0]),
    "LRRangeTest": (LRRangeTest(0.1, 2, 1.0), [0.1, 0.15, 0.2, 0.25]),
    "LRRangeTest stairs": (LRRangeTest(0.1, 2, 1.0, True), [0.1, 0.1, 0.2, 0.2, 0.3]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_deepspeeds_schedules(name: str):
    schedule, want = SCHEDULES[name]
    assert [schedule(step) for step in range(len(want))] == pytest.approx(want, abs=1e-12)


def test_scheduler_blocks():
    def rate(kind, **params):
        block = {"type": kind, "params": params}
        return zf.from_deepspeed({"optimizer": ADAMW, "scheduler": block}).parts[-1].config["lr"]

    assert rate("WarmupLR", warmup_num_steps=5, warmup_type="linear") == WarmupLR(0.0, 1e-3, 5, "linear")
    assert rate("WarmupDecayLR", total_num_steps=9) == WarmupDecayLR(0.0, 1e-3, 1000, "log", 9)
    assert rate("WarmupCosineLR", total_num_steps=9) == WarmupCosineLR(1e-3, 9)
    assert rate("OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_momentum=False) == OneCycle(0.1, 1.0)
    assert rate("LRRangeTest") == LRRangeTest()


# -- back to a plain model -------------------------------------------------------------------------------------


def narrow(dtype: torch.dtype, grad_dtype: torch.dtype | None = None) -> zf.Transform:
    casts = zf.precision(store_dtype=dtype, grad_dtype=grad_dtype)
    return zf.chain(casts, zf.scale_loss(8.0), zf.low_precision_adam(1e-2))


@pytest.mark.parametrize(("dtype", "grad_dtype"), [(FP16, None), (BF16, FP32)])
def test_a_detached_model_keeps_gradients_as_it_did_before(dtype: torch.dtype, grad_dtype: torch.dtype | None):
    model = nn.Linear(4, 2)
    opt = zf.attach(model, narrow(dtype, grad_dtype))
    model(torch.ones(2, 4)).float().sum().backward()
    assert model.weight.grad is not None and model.weight.grad.dtype == FP32
    opt.detach()
    for p in model.parameters():
        assert p.grad is not None and p.grad_dtype == p.grad.dtype == p.dtype == dtype
        p.grad = None
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.dtype == dtype
    torch.optim.AdamW(model.parameters(), 1e-2, fused=True).step()
    for tx, want in (
        (narrow(BF16), BF16),
        (narrow(FP16), FP32),
        (zf.chain(zf.precision(store_dtype=FP32), zf.sgd(0.1)), FP32),
    ):
        opt = zf.attach(model, tx)
        opt.zero_grad()
        model(torch.ones(2, 4)).float().sum().backward()
        assert model.weight.grad.dtype == want
        opt.step()
        opt.detach()
        assert all(p.grad_dtype == p.dtype for p in model.parameters())


@pytest.mark.parametrize("chosen", [FP32, None])
def test_a_dtype_of_gradients_that_the_user_chose_is_there_again_after_detach(chosen: torch.dtype | None):
    model = nn.Linear(4, 2).to(BF16)
    for p in model.parameters():
        p.grad_dtype = chosen
    opt = zf.attach(model, narrow(BF16))
    model(torch.ones(2, 4)).float().sum().backward()
    assert model.weight.grad is not None and model.weight.grad.dtype == BF16
    opt.detach()
    assert all(p.grad_dtype == chosen for p in model.parameters())
