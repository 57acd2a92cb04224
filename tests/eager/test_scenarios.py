"""Models of every form, several models, autocast and numbers that need no reference, against the plain module.

What people do with one model is in `random_events`, and is run by `test_fuzz`.
"""

from __future__ import annotations

import models as zoo
import pytest
import torch
import torch.nn.functional as F
from parity import BF16, EXACT, FP16, PIPES, TWINS, Pipe, Run, compare
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerofn as zf


def one(run: Run):
    x = run.data(5, 6, grad=True)
    run.model(x).square().mean().backward()
    return x.grad


def autocast(run: Run):
    with torch.autocast("cpu", torch.bfloat16):
        out = run.model(run.data(5, 6))
    out.float().square().mean().backward()


def autocast_fp16(run: Run):
    with torch.autocast("cpu", torch.float16):
        out = run.model(run.data(5, 6))
    out.float().square().mean().backward()


@pytest.mark.parametrize(("program", "tol"), [(autocast, 5e-2), (autocast_fp16, 1e-2)])
@pytest.mark.parametrize("pipe", [*PIPES, *(f"{name}, wide" for name in TWINS)])
def test_autocast(program, tol: float, pipe: str):
    """It rounds to 16 bits: bf16 inside of fp16; small fp16 cotangents are rounded less under a scale."""
    name, _, wide = pipe.partition(", ")
    kind = TWINS[name] if wide else PIPES[name]
    compare(program, zoo.Net, kind, tol=max(tol if "16" in pipe or "scaled" in pipe else 0.0, kind.tol))


def tuple_loss(run: Run):
    x = run.data(5, 6, grad=True)
    a, b = run.model(x)
    (a.square().mean() + b.exp().mean()).backward()
    return x.grad


def lists(run: Run):
    x = run.data(5, 6, grad=True)
    a, b = run.model(x)
    (a.square().mean() + b).backward()
    return x.grad


def force_loss(run: Run):
    e, f = run.model(run.data(5, 6))
    (e.square().mean() + f.square().sum()).backward()


def image(run: Run):
    x = run.data(4, 2, 6, 6, grad=True)
    out = run.model(x)
    # Not the mean square: BatchNorm would make it almost independent of what comes before.
    (out * run.data(4, 3, seed=1)).sum().backward()
    return x.grad


def sequence(run: Run):
    x = run.data(3, 5, 6, grad=True)
    run.model(x).square().mean().backward()
    return x.grad


def tokens(run: Run):
    g = torch.Generator().manual_seed(run.step)
    ids = torch.randint(0, 11, (4, 5), generator=g)
    F.cross_entropy(run.model(ids).float().flatten(0, 1), ids.flatten()).backward()


def views(run: Run):
    a, b, c = run.model(run.data(5, 6))
    a.add_(1.0)
    (a.square().mean() + b.exp().mean() + c.abs().mean()).backward()


def attributes(run: Run):
    model: zoo.Stateful = run.model
    model.memory, model.losses = None, []
    total = sum(model(run.data(5, 6, seed=s)).exp().mean() for s in range(3))
    total = total + sum(model.losses) + model.memory.square().mean() + model.extra["features"][0].mean()
    model.memory = model.memory * 0.5  # the user's own, put back for the next call
    (total + model(run.data(5, 6, seed=4)).square().mean()).backward()
    model.memory, model.losses, model.extra = None, [], {}


def carried(run: Run):
    model: zoo.Stateful = run.model
    model.memory, model.losses = None, []
    sum(model(run.data(5, 6, seed=s)).exp().mean() for s in range(3)).backward()
    model.memory, model.losses, model.extra = None, [], {}


def weight_normed() -> nn.Module:
    net = zoo.Net()
    nn.utils.parametrizations.weight_norm(net.first)
    nn.utils.parametrizations.orthogonal(net.last)
    return net


def weight_norm_used_outside(run: Run):
    x = run.data(5, 6, grad=True)
    (run.model(x).square().mean() + run.model.first.weight.float().square().mean()).backward()
    return x.grad


MODELS = [
    (tuple_loss, zoo.Pair),
    (one, zoo.Reused),
    (tokens, zoo.Tied),
    (one, zoo.Lora),
    (one, lambda: zoo.Checkpointed(True)),
    (one, lambda: zoo.Checkpointed(False)),
    (one, lambda: zoo.Checkpointed(True, frozen=True)),
    (one, lambda: zoo.Checkpointed(False, frozen=True)),
    (views, zoo.Viewed),
    (lists, zoo.Lists),
    (one, zoo.Inner),
    (force_loss, zoo.Force),
    (image, zoo.Convs),
    (sequence, zoo.Recurrent),
]


@pytest.mark.parametrize("pipe", PIPES)
@pytest.mark.parametrize("program, make", MODELS, ids=[f"{p.__name__}-{i}" for i, (p, _) in enumerate(MODELS)])
def test_model(program, make, pipe: str):
    compare(program, make, pipe, tol=PIPES[pipe].tol * 2)


@pytest.mark.parametrize("pipe", PIPES)
def test_tensors_in_attributes(pipe: str):
    """What a call leaves for the next one is inside. Under a scale the loss is made of what the model returns."""
    if "scale" not in pipe and "dynamic" not in pipe:
        compare(attributes, zoo.Stateful, pipe, tol=PIPES[pipe].tol * 2)
        return
    compare(carried, zoo.Stateful, pipe, tol=PIPES[pipe].tol * 2)
    with pytest.raises(RuntimeError, match="a tensor from inside the attached model"):
        compare(attributes, zoo.Stateful, pipe)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("program, make", MODELS, ids=[f"{p.__name__}-{i}" for i, (p, _) in enumerate(MODELS)])
def test_model_without_rounding(program, make, twin: str):
    if program is image:
        pytest.skip("BatchNorm has no kernel for fp64 beside fp32 statistics")
    compare(program, make, TWINS[twin])


@pytest.mark.parametrize("pipe", ["fp32", "scaled", "offload"])
def test_parametrizations(pipe: str):
    # In fp32 alone: the QR decomposition of `orthogonal` has no 16-bit kernel.
    compare(weight_norm_used_outside, weight_normed, pipe)


def branches(run: Run):
    """A parameter unused in this step is not moved, offloaded or not."""
    run.model(run.data(5, 6), "ab"[run.step % 2]).square().mean().backward()


@pytest.mark.parametrize("pipe", EXACT)
def test_unused_parameters_stay(pipe: str):
    compare(branches, zoo.Branch, pipe, windows=4, unused=("a.weight", "a.bias", "b.weight", "b.bias"))


@pytest.mark.parametrize("pipe", EXACT)
def test_branches_within_a_window(pipe: str):
    compare(branches, zoo.Branch, pipe, every=2, windows=3, unused=("a.weight", "a.bias", "b.weight", "b.bias"))


# -- checkpointing meets direct calls -----------------------------------------------------------------------


def look_between(run: Run):
    """An inner module that is repeated in backward was called by the user in between."""
    x = run.data(5, 6, grad=True)
    loss = run.model(x).square().mean()
    with torch.no_grad():
        run.model.layers[0](x)
    loss.backward()
    return x.grad


def repeated_by_both(run: Run):
    """The model repeats an inner module, and so does the user."""
    x = run.data(5, 6, grad=True)
    r = run.model.reentrant
    mine = checkpoint(run.model.layers[0], x, use_reentrant=r).exp().mean()
    loss = run.model(x).square().mean()
    after = checkpoint(run.model.layers[1], x, use_reentrant=r).exp().mean()
    (loss + mine + after).backward()
    return x.grad


def function_of_the_user(run: Run):
    """A function of the user's over a parameter, repeated in backward: outside of the model, hence undivided."""
    x = run.data(5, 6, grad=True)
    out = checkpoint(lambda y: F.linear(y, run.model.weight.float()).exp(), x, use_reentrant=run.model.reentrant)
    (out.mean() + run.model(x).square().mean()).backward()
    return x.grad


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("pipe", ["scaled", "fp16 dynamic", "bf16 scaled"])
@pytest.mark.parametrize("program", [look_between, repeated_by_both, function_of_the_user])
def test_checkpoint(program, pipe: str, reentrant: bool):
    compare(program, lambda: zoo.Checkpointed(reentrant), pipe, tol=PIPES[pipe].tol * 2)


# -- several models -----------------------------------------------------------------------------------------


def shared_loss(run: Run):
    x = run.data(5, 6, grad=True)
    sum(m(x).square().mean() / (i + 1) for i, m in enumerate(run.models)).backward()
    return x.grad


def feeding(run: Run):
    """One model feeds the other: vision to text."""
    x = run.data(5, 6, grad=True)
    run.models[1](torch.tanh(run.models[0](x)).repeat(1, 2)[:, :6]).square().mean().backward()
    return x.grad


def handed_over(run: Run):
    """The same through a detached hand-over between processes (the Ray pattern)."""
    x = run.data(5, 6, grad=True)
    features = run.models[0](x)
    handed = features.detach().clone().requires_grad_()
    run.models[1](handed.repeat(1, 2)[:, :6]).square().mean().backward()
    features.backward(handed.grad)
    return x.grad


def head_outside(run: Run):
    """The model feeds a parameter that is not its own, in fp32 as it would be anywhere."""
    head = torch.linspace(-1, 1, 4).requires_grad_()
    (run.model(run.data(5, 6)).float() @ head).square().mean().backward()
    run.models[1](run.data(5, 6)).square().mean().backward()
    return head.grad


def scaled(scale: float) -> Pipe:
    return Pipe(
        lambda k: (
            PIPES["scaled"].build(k)
            if scale == 1024
            else zf.chain(zf.scale_loss(scale), *([zf.accumulate(k)] if k > 1 else []), zf.sgd(0.25))
        ),
        1e-5,
    )


MIXES = {
    "same": [PIPES["fp16 dynamic"]] * 2,
    "scales": [scaled(1024.0), scaled(3.0)],
    "dtypes": [PIPES["fp16 dynamic"], PIPES["bf16"]],
    "plain and scaled": [PIPES["fp32"], scaled(8.0)],
}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("program", [shared_loss, feeding, handed_over, head_outside], ids=lambda p: p.__name__)
def test_several_models(program, mix: str, every: int):
    compare(program, [zoo.Net, zoo.Net], every=every, pipes=MIXES[mix])


def test_called_twice_feeding_itself():
    def program(run: Run):
        x = run.data(5, 6, grad=True)
        run.model(torch.tanh(run.model(x))).square().mean().backward()
        return x.grad

    for pipe in PIPES:
        compare(program, lambda: zoo.Net(6, 6), pipe, tol=PIPES[pipe].tol * 2)


# -- numbers that need no reference module ---------------------------------------------------------------------


def test_zero_sized_parameter():
    class Empty(zoo.Net):
        def __init__(self):
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x):
            return super().forward(x) + self.nothing.sum()

    torch.manual_seed(0)
    model = Empty()
    opt = zf.attach(model, PIPES["scaled"].build(1))
    before = model.first.weight.detach().clone()
    model(torch.ones(2, 6)).sum().backward()
    opt.step()
    assert bool(opt.metrics["updated"]) and not torch.equal(model.first.weight, before)


def test_growth_uses_the_scale_that_was_used():
    """DeepSpeed divides by the new scale at the step at which it grows: half an update."""
    model = nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    opt = zf.attach(model, zf.chain(zf.scale_loss("dynamic", init_scale=4.0, growth_interval=1), zf.sgd(1.0)))
    for i in range(4):
        before = model.weight.detach().clone()
        model(torch.tensor([[1.0, 2.0]])).sum().backward()
        opt.step()
        opt.zero_grad()
        assert torch.equal(before - model.weight, torch.tensor([[1.0, 2.0]])), i
        assert float(opt.metrics["loss_scale"]) == 2.0 ** (i + 3)


def test_overflow_backs_off_skips_and_recovers():
    """torch_autocast with fp16 in DeepSpeed never backs off, and clips the scaled norm."""
    model = nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    tx = zf.chain(
        zf.precision(param_dtype=FP16, output_dtype=torch.float32),
        zf.scale_loss("dynamic", init_scale=2.0**16),
        zf.clip_by_global_norm(1.0),
        zf.sgd(1.0),
    )
    opt = zf.attach(model, tx)
    x = torch.tensor([[3.0, 4.0]])
    for _ in range(8):
        (model(x).sum() * 1.0).backward()
        opt.step()
        opt.zero_grad()
        if bool(opt.metrics["updated"]):
            break
    # 65536 * 4 overflows fp16, 32768 * 4 too; 8192 * 4 does not, 16384 * 4 does (65504 is the largest).
    assert opt.skipped_steps == 3 and float(opt.metrics["loss_scale"]) == 2.0**13
    assert torch.allclose(model.weight, torch.tensor([[-0.6, -0.8]]), atol=1e-5)
    assert float(opt.metrics["grad_norm"]) == 5.0


def test_small_gradients_survive_fp16():
    """The reason for the scale: 1e-8 is nothing in fp16."""
    model = nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    for tx, want in (
        (zf.chain(zf.precision(param_dtype=FP16, output_dtype=torch.float32), zf.sgd(1.0)), 0.0),
        (
            zf.chain(zf.precision(param_dtype=FP16, output_dtype=torch.float32), zf.scale_loss(2.0**16), zf.sgd(1.0)),
            1e-8,
        ),
    ):
        opt = zf.attach(model, tx)
        (model(torch.ones(1, 1)) * 1e-8).sum().backward()
        assert model.weight.grad.item() == pytest.approx(want, rel=2e-3)
        opt.detach()
        model.weight.grad = None


def test_fp32_sums_on_bf16_parameters():
    """599 gradients of 2**-9 on top of 1: in bf16 they vanish."""
    model = nn.Linear(1, 1, bias=False)
    opt = zf.attach(model, zf.chain(zf.precision(store_dtype=BF16, grad_dtype=torch.float32), zf.sgd(1.0)))
    model(torch.ones(1, 1, dtype=BF16)).sum().backward()
    for _ in range(599):
        (model(torch.ones(1, 1, dtype=BF16)) * 2.0**-9).sum().backward()
    assert model.weight.grad.item() == 1 + 599 * 2.0**-9
    opt.step()


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_offload_is_exact(kind: str):
    """Four backwards in a step: DeepSpeed reports 7.45e-9 between offload and none in fp32; here it is 0."""
    results = []
    for wrap in (zf.offload, lambda t: t):
        torch.manual_seed(0)
        model = zoo.Net()
        cast = [zf.precision(store_dtype=BF16)] if kind == "bf16" else []
        adam = zf.low_precision_adam(1e-3) if kind == "bf16" else zf.adamw(1e-3)
        opt = zf.attach(model, zf.chain(*cast, wrap(zf.accumulate(2)), wrap(adam)))
        for step in range(4):
            for seed in range(4):
                x = Run([model], step).data(5, 6, seed=seed)
                model(x).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
