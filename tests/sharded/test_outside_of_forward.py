"""Everything that is done with sharded parameters and gradients outside of forward: right, or refused by path.

Each program runs on two ranks under `shard` and, where it is to be right, on a plain model in one process. Ranks have
the same rows, so that the mean over ranks is the gradient of one.
"""

import copy
import io
import re

import pytest
import torch
import torch.nn.functional as F
from rank_programs import rank_and_size
from small_parts import said
from time_limits import limit
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm, parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerofn as zf

FULL = StateDictOptions(full_state_dict=True)


class Net(nn.Module):
    """As many rows as ranks, uneven rows, and leaves of one number, of which one rank has nothing."""

    def __init__(self):
        super().__init__()
        self.pair = nn.Linear(4, 2)
        self.odd = nn.Linear(2, 3)
        self.one = nn.Linear(3, 1)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.gain * self.one(torch.tanh(self.odd(torch.tanh(self.pair(x)))))


def make():
    torch.manual_seed(0)
    return Net().double()


def rows(step=0):
    g = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=g, dtype=torch.float64)


def loss_of(model, step=0):
    return model(rows(step)).square().mean()


class Both:
    """What programs are given: a model, its parameters, and a step of SGD with what is in `p.grad`."""

    def __init__(self, model, step, gathered):
        self.model, self.step, self.gathered = model, step, gathered
        self.w = model.pair.weight
        self.leaves = sorted(model.parameters(), key=lambda p: p is not self.w)

    def backward(self, more=0.0):
        (loss_of(self.model) + more).backward()


# -- what is right ------------------------------------------------------------------------------------------


def numbers_of_parameters(b):
    """With a graph and without one."""
    found = []
    for on in (True, False):
        with torch.set_grad_enabled(on):
            norms = [torch.linalg.vector_norm(p, k) for p in b.leaves for k in (1, 2, torch.inf, 0)]
            found += [b.w.norm().item(), b.w.sum().item(), b.w.max().item(), *(x.item() for x in norms)]
            found += [bool(torch.isnan(b.w).any()), bool((b.w > 0).all()), b.model.gain.item(), b.w[1, 2].item()]
            found += [get_total_norm(b.leaves).item(), parameters_to_vector(b.leaves).norm().item()]
            found += [F.linear(rows(), b.w).sum().item(), b.w.T.mean(1).tolist(), (b.w @ b.w.T).trace().item()]
    return found


def penalties(b):
    b.backward(0.1 * b.w.norm() + sum(p.square().sum() for p in b.leaves) + parameters_to_vector(b.leaves).logsumexp(0))
    b.step()


def head_in_the_loss(b):
    b.backward(F.linear(rows(1), b.w).exp().mean())
    b.step()


def teachers(b):
    """Averages of a plain model, by every spelling that gives it full parameters."""
    lerped, added, copied, listed = (copy.deepcopy(make()) for _ in range(4))
    b.backward()
    b.step()
    with torch.no_grad():
        for p, q, r, s in zip(b.model.parameters(), *(m.parameters() for m in (lerped, added, copied)), strict=True):
            q.lerp_(p, 0.25)
            r.mul_(0.75).add_(p, alpha=0.25)
            s.copy_(p)
        torch._foreach_lerp_(list(listed.parameters()), list(b.model.parameters()), 0.25)
    return [p.detach() for m in (lerped, added, copied, listed) for p in m.parameters()]


def filled(b):
    nn.init.constant_(b.w, 0.5)
    nn.init.zeros_(b.model.odd.bias)
    nn.init.ones_(b.model.gain)
    b.backward()
    b.step()


def clamped(b):
    b.w.data.clamp_(-0.1, 0.1)
    with torch.no_grad():
        b.model.odd.weight.clamp_(min=0.0)
        b.model.one.weight.mul_(0.5).add_(0.25)
    b.model.odd.bias.data[b.model.odd.bias.data.abs() < 0.2] = 0.0
    b.model.one.bias.detach().masked_fill_(b.model.one.bias.detach() > 0, 1.0)
    b.backward()
    b.step()


def edited_gradients(b):
    b.backward()
    b.w.grad.mul_(0.5)
    b.model.odd.weight.grad.clamp_(-0.01, 0.01)
    b.model.odd.bias.grad = b.model.odd.bias.grad * 2
    b.model.one.weight.grad += b.model.one.weight.detach() * 0.1
    b.model.one.bias.grad.data.sign_()
    b.model.gain.grad.detach_().zero_()
    clip_grad_value_(b.leaves, 0.05)
    b.step()


def negated(p):
    p.grad.neg_()


def hooks(b):
    b.w.register_hook(lambda g: g * 2)
    b.model.gain.register_hook(lambda g: None)
    b.model.odd.weight.register_post_accumulate_grad_hook(negated)
    b.backward()
    b.step()


def steps_by_hand(b):
    b.backward()
    b.w.data.sub_(b.w.grad, alpha=0.1)
    with torch.no_grad():
        for p in b.leaves[1:]:
            p -= 0.1 * p.grad
    for p, g in zip(b.leaves, torch.autograd.grad(loss_of(b.model), b.leaves), strict=True):
        p.data.add_(g, alpha=-0.1)
    with torch.no_grad():
        torch._foreach_add_(b.leaves, torch._foreach_mul([p.grad for p in b.leaves], -0.1))


def swapped_averages(b):
    """An average of parts, swapped in for an evaluation and out again."""
    average = [p.detach().clone() for p in b.leaves]
    momentum = [torch.zeros_like(p) for p in b.leaves]
    for _ in range(2):
        b.backward()
        for p, m in zip(b.leaves, momentum, strict=True):
            m.mul_(0.9).add_(p.grad)
            p.data.sub_(m, alpha=0.1)
            p.grad = None
        for a, p in zip(average, b.leaves, strict=True):
            a.lerp_(p.detach(), 0.5)
    kept = [p.detach().clone() for p in b.leaves]
    for p, a in zip(b.leaves, average, strict=True):
        p.data.copy_(a)
    seen = loss_of(b.model).item()
    assert not torch.equal(kept[0], b.w.detach())
    with torch.no_grad():
        b.w.copy_(kept[0])
    return seen


def flat_gradients(b):
    """One behind the other, changed element by element, and apart again."""
    b.backward()
    flat = torch.cat([p.grad.view(-1) for p in b.leaves])
    flat = flat * 0.5 + torch.cat([p.detach().reshape(-1) for p in b.leaves]) * 0.1
    at = 0
    for p in b.leaves:
        p.grad = flat[at : at + p.numel()].view_as(p.grad)
        at += p.numel()
    b.step()


def gradient_penalty(b):
    """The square of the gradient's norm as part of the loss."""
    gs = torch.autograd.grad(loss_of(b.model), b.leaves, create_graph=True)
    penalty = 0.5 * sum(g.square().sum() for g in gs) + sum((g * torch.ones_like(g)).sum() for g in gs)
    (loss_of(b.model) + penalty).backward()
    b.step()


def state_dicts(b):
    """Parts of the same run, and full ones."""
    with b.gathered():
        full = {n: x.clone() for n, x in get_model_state_dict(b.model, options=FULL).items()}
    kept = {n: x.clone() for n, x in b.model.state_dict().items()}
    b.backward()
    b.step()
    with b.gathered():
        moved = [x.clone() for x in b.model.state_dict().values()]
    b.model.load_state_dict(kept)
    again = loss_of(b.model).item()
    set_model_state_dict(b.model, {n: 2 * x for n, x in full.items()}, options=FULL)
    return [*full.values(), *moved, again]


def averaged_model(b):
    with b.gathered():
        average = AveragedModel(b.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        b.backward()
        b.step()
        with b.gathered():
            average.update_parameters(b.model)
    return [p.detach() for p in average.module.parameters()] + [average(rows()).sum().item()]


RIGHT = [
    numbers_of_parameters, penalties, head_in_the_loss, teachers, filled, clamped, edited_gradients, hooks,
    steps_by_hand, swapped_averages, flat_gradients, gradient_penalty, state_dicts, averaged_model,
]  # fmt: skip


def sharded_runs(programs):
    found = {}
    for program in programs:
        model = make()
        opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))

        def step(opt=opt):
            opt.step()
            opt.zero_grad()

        value = program(Both(model, step, opt.gathered))
        opt.detach()
        found[program.__name__] = value, [p.detach() for p in model.parameters()]
    return found


def plain_run(program):
    model = make()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        opt.step()
        opt.zero_grad()

    value = program(Both(model, step, torch.no_grad))
    return value, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_is_right(ranks):
    before = [p.detach() for p in make().parameters()]
    want = {program.__name__: plain_run(program) for program in RIGHT}
    for found in zf.launch(sharded_runs, ranks, RIGHT, timeout=limit()):
        for name, (value, after) in found.items():
            # float64, sums over ranks in another order.
            near = {"rtol": 1e-11, "atol": 1e-13, "msg": lambda m, name=name: f"{name}: {m}"}
            torch.testing.assert_close(value, want[name][0], **near)
            for old, new, expected in zip(before, after, want[name][1], strict=True):
                torch.testing.assert_close(new - old, expected - old, **near)
            assert name == "numbers_of_parameters" or not all(map(torch.equal, before, after))


# -- what is refused ----------------------------------------------------------------------------------------

PAIR = r"of the sharded parameter pair.weight(.|\n)*"
GRADIENT = PAIR + r"grad_norm(.|\n)*clip_by_global_norm(.|\n)*as_subclass"
VALUE = PAIR + r"of the parameter itself(.|\n)*opt.gathered\(\)(.|\n)*as_subclass"
ANY_BESIDE = r"of the sharded parameter \w+(.|\n)*a tensor of shape (.|\n)*average.add_\(p\)"
BESIDE = PAIR + r"a tensor of shape \(2, 4\)(.|\n)*average.add_\(p\)"
SAVED = r"saving (.|\n)*opt.gathered\(\)(.|\n)*zf.save"


def two_losses(b):
    """As PCGrad does, the projection of one gradient on another."""
    g, h = (torch.autograd.grad(loss_of(b.model, k), b.leaves) for k in range(2))
    for x, y in zip(g, h, strict=True):
        x - (x * y).sum() / y.norm() ** 2 * y


def sharpness(b):
    """As SAM does, an ascent by a step of given length."""
    norm = torch.stack([p.grad.norm() for p in b.leaves]).norm()
    for p in b.leaves:
        p.data.add_(p.grad / norm, alpha=0.05)


def by_a_hook(b):
    handle = b.w.register_hook(lambda g: g / g.norm())
    try:
        loss_of(b.model).backward()
    finally:
        handle.remove()


def norm_of_flat(b):
    torch.cat([p.grad.view(-1) for p in b.leaves]).norm()


def average_outside(b):
    with b.gathered():
        average = AveragedModel(b.model)
    average.update_parameters(b.model)


def root_of_a_penalty(b):
    gs = torch.autograd.grad(loss_of(b.model), b.leaves, create_graph=True)
    sum(g.square().sum() for g in gs).sqrt()


def teacher():
    return torch.zeros(2, 4, dtype=torch.float64)


REFUSED = {
    "norm of a gradient": (lambda b: b.w.grad.norm(), GRADIENT),
    "of its data": (lambda b: b.w.grad.data.norm(2), GRADIENT),
    "its mean": (lambda b: b.w.grad.mean(), GRADIENT),
    "its largest": (lambda b: b.w.grad.abs().max(), GRADIENT),
    "its number": (lambda b: b.w.grad.sum().item(), GRADIENT),
    "is it finite": (lambda b: bool(torch.isfinite(b.w.grad).all()), GRADIENT),
    "as a list": (lambda b: b.w.grad.tolist(), GRADIENT),
    "noise beside it": (lambda b: torch.randn_like(b.w.grad), PAIR),
    "noise beside a parameter": (lambda b: torch.randn_like(b.w), r"randn_like of (.|\n)*opt.gathered\(\)"),
    "total norm": (lambda b: get_total_norm([p.grad for p in b.leaves]), r"norm of p.grad(.|\n)*grad_norm"),
    **{
        f"clipped by norm {k}": (lambda b, k=k: clip_grad_norm_(b.leaves, 1.0, k), r"clip_grad(.|\n)*by_global_norm")
        for k in (1.0, 2.0, torch.inf, 0.0)
    },
    "two losses": (two_losses, GRADIENT),
    "sharpness": (sharpness, GRADIENT),
    "by a hook": (by_a_hook, GRADIENT),
    "norm of flat gradients": (norm_of_flat, r"parts of several sharded parameters(.|\n)*grad_norm"),
    "root of a penalty": (root_of_a_penalty, r"sqrt of a sum over this rank's part(.|\n)*\(g \* g\).sum\(\)"),
    "norm of data": (lambda b: b.w.data.norm(), VALUE),
    "a matrix product": (lambda b: F.linear(rows(), b.w.data), VALUE),
    "a row": (lambda b: b.w.data[0], PAIR + r"opt.gathered\(\)"),
    "a row written": (lambda b: b.w.data.__setitem__(0, 0.0), PAIR + r"opt.gathered\(\)"),
    "teacher by data": (lambda b: teacher().lerp_(b.w.data, 0.1), BESIDE),
    "teacher by detach": (lambda b: teacher().mul_(0.9).add_(b.w.detach(), alpha=0.1), BESIDE),
    "teachers in a list": (lambda b: torch._foreach_lerp_([teacher()], [b.w.detach()], 0.1), BESIDE),
    "copy": (lambda b: teacher().copy_(b.w.data), BESIDE),
    "average": (lambda b: AveragedModel(b.model), r"copy.deepcopy\(model\)(.|\n)*opt.gathered\(\)"),
    "average outside": (average_outside, ANY_BESIDE),
    "whole minus part": (lambda b: b.w - 0.1 * b.w.grad, PAIR.replace("of ", "") + r"parts alone"),
    "drawn": (lambda b: nn.init.normal_(b.w), r"normal_ of(.|\n)*opt.gathered\(\)"),
    "drawn into data": (lambda b: b.w.data.normal_(), PAIR),
    "pickled": (lambda b: torch.save({"w": b.w.data}, io.BytesIO()), SAVED),
    "pickled state": (lambda b: torch.save(b.model.state_dict(), io.BytesIO()), SAVED),
    "by NumPy": (lambda b: b.w.detach().numpy(), SAVED),
    "another shape": (lambda b: setattr(b.w, "data", teacher()), r"other data for a sharded parameter"),
}  # fmt: skip


def what_is_said():
    rank_and_size()
    found = {}
    for name, (mistake, _) in REFUSED.items():
        model = make()
        opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
        loss_of(model).backward()
        before = [p.detach().clone() for p in model.parameters()]
        b = Both(model, opt.step, opt.gathered)
        found[name] = str(said(lambda b=b, f=mistake: f(b)))
        assert all(map(torch.equal, before, [p.detach() for p in model.parameters()])), name
        # The ranks are where they were: no collective is left open.
        opt.zero_grad()
        loss_of(model).backward()
        opt.step()
        opt.detach()
    return found


def test_the_rest_is_refused_by_path():
    for found in zf.launch(what_is_said, 2, timeout=limit()):
        assert found.keys() == REFUSED.keys()
        for name, (_, pattern) in REFUSED.items():
            assert re.search(pattern, found[name]), f"{name}: {found[name]}"
