"""Everyday programs of `backward`, each against the same program on the plain module.

Every row of what DeepSpeed 0.19 gets wrong on one process is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def non_scalar(run: Run):
    x = run.data(5, 6, grad=True)
    run.model(x).backward(run.data(5, 4, seed=1))
    return x.grad


def non_scalar_default_sum(run: Run):
    run.model(run.data(5, 6)).sum(0).backward(torch.ones(4))


def retained(run: Run):
    """`backward(l1, retain_graph=True); backward(l2); step()`: DeepSpeed loses one of them."""
    out = run.model(run.data(5, 6))
    l1, l2 = out.square().mean(), out[:, 0].exp().mean()
    l1.backward(retain_graph=True)
    l2.backward()


def engine_retained(run: Run):
    out = run.model(run.data(5, 6))
    l1, l2 = out.square().mean(), out[:, 0].exp().mean()
    if run.opt is None:
        (l1 + l2).backward()
    else:
        run.opt.backward(l1, retain_graph=True)
        run.opt.backward(l2)


def two_forwards_two_backwards(run: Run):
    a, b = run.model(run.data(5, 6)), run.model(run.data(5, 6, seed=1))
    a.square().mean().backward()
    b.square().mean().backward()


def forward_backward_twice(run: Run):
    for seed in (0, 1):
        run.model(run.data(5, 6, seed=seed)).square().mean().backward()


def siamese(run: Run):
    """`(engine(a) + engine(b)).backward()`."""
    a, b = run.model(run.data(5, 6)), run.model(run.data(5, 6, seed=1))
    (a + b.exp()).square().mean().backward()


def grad_of_input(run: Run):
    """`torch.autograd.grad(loss, x)` leaves parameters alone."""
    x = run.data(5, 6, grad=True)
    loss = run.model(x).square().mean()
    (g,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert all(p.grad is None for p in run.model.parameters())
    loss.backward()
    return g


def grad_of_parameters(run: Run):
    loss = run.model(run.data(5, 6)).square().mean()
    grads = torch.autograd.grad(loss, list(run.model.parameters()))
    run.model(run.data(5, 6)).square().mean().backward()
    return grads


def backward_to_inputs(run: Run):
    """`loss.backward(inputs=[x])`."""
    x = run.data(5, 6, grad=True)
    loss = run.model(x).square().mean()
    loss.backward(inputs=[x], retain_graph=True)
    loss.backward(inputs=list(run.model.parameters()))
    return x.grad


def gradient_penalty(run: Run):
    x = run.data(5, 6, grad=True)
    out = run.model(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.square().mean() + g.square().sum()).backward()
    return x.grad, g


def third_order(run: Run):
    x = run.data(5, 6, grad=True)
    (g,) = torch.autograd.grad(run.model(x).exp().sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
    h.square().mean().backward()
    return x.grad


def hessian_vector(run: Run):
    params = list(run.model.parameters())
    grads = torch.autograd.grad(run.model(run.data(5, 6)).exp().mean(), params, create_graph=True)
    products = torch.autograd.grad(sum(g.sum() for g in grads), params)
    run.model(run.data(5, 6)).square().mean().backward()
    return products


def penalty_on_weights(run: Run):
    """A parameter used in the loss outside of the model."""
    loss = run.model(run.data(5, 6)).square().mean()
    (loss + sum(p.square().sum() for p in run.model.parameters())).backward()


def several_at_once(run: Run):
    """`torch.autograd.backward` on several outputs with several cotangents."""
    a, b = run.model(run.data(5, 6)), run.model(run.data(3, 6, seed=1))
    torch.autograd.backward([a, b], [run.data(5, 4, seed=2), run.data(3, 4, seed=3)])


def nested_backward(run: Run):
    """A whole forward and backward inside a hook of another backward."""
    out = run.model(run.data(5, 6))

    def hook(g):
        with torch.enable_grad():
            run.model(run.data(5, 6, seed=1)).square().mean().backward()
        return g

    out.register_hook(hook)
    out.square().mean().backward()


def evaluation_between(run: Run):
    x = run.data(5, 6, grad=True)
    loss = run.model(x).square().mean()
    with torch.no_grad():
        evaluated = run.model(x)
    with torch.inference_mode():
        run.model(run.data(5, 6, seed=1))
        run.model.first(run.data(5, 6, seed=1))
    run.model.eval()
    with torch.no_grad():
        run.model.first(x)
    run.model.train()
    loss.backward()
    return x.grad, evaluated


def inner_module(run: Run):
    """Inner modules called directly, before, after and between calls of the whole."""
    x = run.data(5, 6, grad=True)
    first = run.model.first(x)
    whole = run.model(x)
    last = run.model.last(torch.tanh(run.model.first(x)))
    (whole.square().mean() + first.exp().mean() + last.square().mean()).backward()
    return x.grad


def modified_output(run: Run):
    """The caller changes an output in place."""
    out = run.model(run.data(5, 6))
    out.mul_(2.0)
    out[:, 0] = 0.0
    out.square().mean().backward()


def user_hooks(run: Run):
    """Hooks on parameters, inputs and outputs see true gradients."""
    x = run.data(5, 6, grad=True)
    seen = []
    handles = [p.register_hook(lambda g: seen.append(g.clone()) or g * 2) for p in run.model.parameters()]
    x.register_hook(lambda g: seen.append(g.clone()))
    out = run.model(x)
    out.register_hook(lambda g: seen.append(g.clone()))
    out.square().mean().backward()
    for h in handles:
        h.remove()
    return sorted(seen, key=lambda s: tuple(s.shape))


def accumulate_hooks(run: Run):
    seen: list[str] = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda p, n=n: seen.append(n) if p.grad is not None else None)
        for n, p in run.model.named_parameters()
    ]
    one(run)
    for h in handles:
        h.remove()
    assert sorted(seen) == sorted(n for n, _ in run.model.named_parameters())


def module_hooks(run: Run):
    """Forward hooks that look, change and replace; a backward hook on the model that changes."""
    kept = []
    handles = [
        run.model.first.register_forward_hook(lambda m, a, out: kept.append(out.detach())),
        run.model.first.register_forward_hook(lambda m, a, out: out * 1.5),
        run.model.last.register_forward_hook(lambda m, a, out: kept.append(out.detach().square().mean())),
        run.model.last.register_forward_pre_hook(lambda m, a: (a[0] + 0.1,)),
        run.model.register_forward_hook(lambda m, a, out: out + 1),
        run.model.register_full_backward_pre_hook(lambda m, go: (go[0] * 3,)),
    ]
    x = run.data(5, 6, grad=True)
    (run.model(x).square().mean() + sum(k.exp().mean() for k in kept)).backward()
    for h in handles:
        h.remove()
    return x.grad


def exceptions(run: Run, forget: Callable[[], Any] | None = None):
    """Half-way through forward and half-way through backward, then a clean iteration."""

    def fail(*_):
        raise KeyError("user")

    for register in (run.model.last.register_forward_pre_hook, run.model.last.register_forward_hook):
        handle = register(fail)
        with pytest.raises(KeyError):
            run.model(run.data(5, 6))
        handle.remove()
    out = run.model(run.data(5, 6))
    handle = run.model.gain.register_hook(fail)
    with pytest.raises(KeyError):
        out.square().mean().backward()
    handle.remove()
    if forget is not None:
        forget()
    else:
        for p in run.model.parameters():
            p.grad = None
    return one(run)


def interrupted(run: Run):
    """Ctrl-C in a forward, as in a notebook, and on with the next cell."""

    def stop(*_):
        raise KeyboardInterrupt

    handle = run.model.last.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        run.model(run.data(5, 6))
    handle.remove()
    return one(run)


def autocast(run: Run):
    with torch.autocast("cpu", torch.bfloat16):
        out = run.model(run.data(5, 6))
    out.float().square().mean().backward()


def autocast_fp16(run: Run):
    with torch.autocast("cpu", torch.float16):
        out = run.model(run.data(5, 6))
    out.float().square().mean().backward()


def checkpoint_around(run: Run):
    x = run.data(5, 6, grad=True)
    out = checkpoint(run.model, x, use_reentrant=run.step % 2 == 0)
    (out.square().mean() + run.model(x).mean()).backward()
    return x.grad


def functional(run: Run, params: dict[str, torch.Tensor] | None = None):
    """`torch.func.functional_call` from outside with tensors of the caller's."""
    params = params or {n: p.detach().clone().requires_grad_() for n, p in run.model.named_parameters()}
    x = run.data(5, 6, grad=True)
    torch.func.functional_call(run.model, params, (x,)).square().mean().backward()
    run.model(x).square().mean().backward()
    return [x.grad, *(p.grad for p in params.values())]


def functional_transforms(run: Run, params: dict[str, torch.Tensor] | None = None):
    params = {n: p.detach() for n, p in (params or dict(run.model.named_parameters())).items()}
    x = run.data(5, 6)

    def loss(p, x):
        return torch.func.functional_call(run.model, p, (x,)).square().mean()

    g = torch.func.grad(loss)(params, x)
    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x[:, None])
    run.model(x).square().mean().backward()
    return [*g.values(), *per_sample.values()]


PROGRAMS = [
    one,
    non_scalar,
    non_scalar_default_sum,
    retained,
    engine_retained,
    two_forwards_two_backwards,
    forward_backward_twice,
    siamese,
    grad_of_input,
    grad_of_parameters,
    backward_to_inputs,
    gradient_penalty,
    third_order,
    hessian_vector,
    penalty_on_weights,
    several_at_once,
    nested_backward,
    evaluation_between,
    inner_module,
    modified_output,
    user_hooks,
    accumulate_hooks,
    module_hooks,
    exceptions,
    interrupted,
    autocast,
    autocast_fp16,
    checkpoint_around,
    functional,
    functional_transforms,
]


AUTOCASTS = {autocast: 5e-2, autocast_fp16: 1e-2}


@pytest.mark.parametrize("every", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pipe", PIPES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_program(program, pipe: str, every: int):
    # Higher derivatives of rounded functions: each order loses about a bit.
    high = program in (third_order, hessian_vector, gradient_penalty)
    tol = PIPES[pipe].tol * (4 if high else 1)
    if program in AUTOCASTS and ("16" in pipe or "scaled" in pipe):
        # bf16 inside of fp16; small fp16 cotangents are rounded less under a scale.
        tol = max(tol, AUTOCASTS[program])
    compare(program, zoo.Net, pipe, every, windows=2 if every == 1 else 1, tol=tol)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_program_without_rounding(program, twin: str):
    """The casts and scales of the 16-bit pipelines, with more bits than the plain module."""
    # Autocast rounds to 16 bits, and at other places where it is given fp64.
    compare(program, zoo.Net, TWINS[twin], tol=AUTOCASTS.get(program, 1e-4))


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
