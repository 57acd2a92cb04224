"""What users do with parameters and gradients outside of forward, for a model in one process and under `shard`."""

import copy
import io
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    get_total_norm,
    parameters_to_vector,
    vector_to_parameters,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerofn as zf

FULL = StateDictOptions(full_state_dict=True)


class UnevenRows(nn.Module):
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
    return UnevenRows().double()


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


def whole(x):
    """The same result with full tensors in the places of shards."""
    if isinstance(x, list | tuple):
        return type(x)(map(whole, x))
    return x.full_tensor().detach() if hasattr(x, "full_tensor") else x


def attached_run(program, tx):
    """What a program gives of an attached model, and the parameters that it leaves."""
    model = make()
    opt = zf.attach(model, tx)

    def step():
        opt.step()
        opt.zero_grad()

    value = whole(program(Both(model, step, opt.gathered)))
    opt.detach()
    return value, [p.detach() for p in model.parameters()]


def plain_run(program):
    """The same of a plain model in one process."""
    model = make()
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        opt.step()
        opt.zero_grad()

    value = program(Both(model, step, torch.no_grad))
    return value, [p.detach() for p in model.parameters()]


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


def momentum_encoder(b):
    """A plain model whose data are assigned, by the line of MoCo and BYOL."""
    target = make()
    for _ in range(2):
        b.backward()
        b.step()
        for a, p in zip(target.parameters(), b.model.parameters(), strict=True):
            a.data = a.data * 0.9 + p.data * 0.1
    return loss_of(target).item()


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


# -- numbers of gradients, and everything that is no function of elements -------------------------------------------


def numbers_of(x):
    """Of one gradient or value, by every way to a number."""
    found = [x.norm().item(), x.norm(1).item(), torch.linalg.vector_norm(x, torch.inf).item(), x.sum().item()]
    found += [x.mean().item(), x.max().item(), x.abs().max().item(), float(x.std(unbiased=False)), int(x.argmax())]
    found += [bool(torch.isfinite(x).all()), bool(torch.isnan(x).any()), bool((x > 0).any()), x.tolist()]
    found += [(x.view(-1) @ x.flatten()).item(), x.reshape(-1)[0].item(), torch.dot(x.view(-1), x.view(-1)).item()]
    found += [torch.equal(x, x.clone()), torch.allclose(x, 2 * x), x.view(-1)[-1:].sum().item(), x.unsqueeze(0).sum(0)]
    return found


def numbers_of_gradients(b):
    b.backward()
    found = [numbers_of(p.grad) for p in b.leaves] + [numbers_of(p.data) for p in b.leaves[:3]]
    found += [numbers_of(b.w.grad.data * 2), numbers_of(b.w.detach().clone())]
    found += [numbers_of(torch.autograd.grad(loss_of(b.model, 1), b.leaves)[0])]
    g, v = b.w.grad, b.w.detach()
    found += [g[0], g[1, 2:], g[:, 1], g.T @ v, torch.linalg.matrix_norm(g), F.linear(rows(), g), [x.sum() for x in g]]
    found += [torch.stack([g, v]).sum(), torch.cat([g, v], 1), g.split(1)[1], F.cosine_similarity(g, v), g.topk(2)[0]]
    found += [
        torch.einsum("ij,ij->", g, v),
        (g * v).sum(),
        torch.where(g > 0)[0],
        g.softmax(1),
        g.view(4, 2).norm(dim=1),
    ]
    found += [F.normalize(g, dim=1), torch.randint_like(g, 0, 1).sum(), g.new_ones(3), torch.as_tensor(g).sum().item()]
    found += [torch.histc(g.float(), 5), F.mse_loss(g, v), g.quantile(0.5), b.model.gain.grad.item(), g.square().sum()]
    return found


def flat_numbers(b):
    b.backward()
    flat = parameters_to_vector([p.grad for p in b.leaves])
    values = torch.cat([p.detach().flatten() for p in b.leaves])
    found = [
        flat.norm(),
        flat @ values,
        (flat * values).sum(),
        values.max(),
        torch.isfinite(flat).all(),
        flat[5].item(),
    ]
    flat = flat / flat.norm()
    for p, g in zip(b.leaves, flat.split([p.numel() for p in b.leaves]), strict=True):
        p.grad.copy_(g.view_as(p.grad))
    vector_to_parameters(flat * 2, [p.grad for p in b.leaves])
    b.step()
    return [x.item() if isinstance(x, torch.Tensor) else x for x in found]


def clipped(b):
    found = []
    for step, (k, foreach) in enumerate([(2.0, None), (1.0, True), (torch.inf, None), (0.5, False), (3, None)]):
        loss_of(b.model, step).backward()
        found += [get_total_norm([p.grad for p in b.leaves], k, foreach=foreach).item()]
        found += [clip_grad_norm_(b.model.parameters(), 0.01, k, foreach=foreach).item()]
        found += [clip_grad_norm_(b.leaves, 100.0, k, error_if_nonfinite=True).item()]
        b.step()
    return found


# -- parts beside wholes --------------------------------------------------------------------------------------------


def inner_steps(b):
    """As MAML does: a step that is another model's parameter."""
    b.backward()
    (h, *_) = torch.autograd.grad(loss_of(b.model, 1), b.leaves)
    found = [b.w - 0.1 * b.w.grad, -0.1 * h + b.w, torch.add(b.w, h, alpha=-0.1), torch.lerp(b.w, b.w.data, 0.5)]
    found += [F.mse_loss(b.w, b.w.detach()), b.w.detach() @ b.w.T, torch.sub(b.w.clone().detach(), h)]
    fast = {n: p - 0.1 * p.grad for n, p in b.model.named_parameters()}
    loss = torch.func.functional_call(make(), fast, (rows(2),)).square().mean()
    b.step()
    return [x.detach() for x in [*found, loss]]


def teachers_of_parts(b):
    """Averages of a plain model by every spelling that gives it parts."""
    lerped, added, copied, listed, stated = (copy.deepcopy(make()) for _ in range(5))
    b.backward()
    b.step()
    zipped = zip(b.model.parameters(), *(m.parameters() for m in (lerped, added, copied)), strict=True)
    with torch.no_grad():
        for p, q, r, s in zipped:
            q.data.lerp_(p.data, 0.25)
            r.mul_(0.75).add_(p.detach(), alpha=0.25)
            s.copy_(p.data)
        torch._foreach_lerp_(list(listed.parameters()), [p.detach() for p in b.model.parameters()], 0.25)
        for n, x in b.model.state_dict().items():
            stated.state_dict()[n].mul_(0.75).add_(x, alpha=0.25)
    return [p.detach() for m in (lerped, added, copied, listed, stated) for p in m.parameters()]


def two_losses(b):
    """As PCGrad does, the projection of one gradient on another, leaf by leaf and for all at once."""
    g, h = (torch.autograd.grad(loss_of(b.model, k), b.leaves) for k in range(2))
    found = []
    for p, x, y in zip(b.leaves, g, h, strict=True):
        p.grad = x - (x * y).sum() / y.norm() ** 2 * y
        found.append(torch.dot(x.flatten(), y.flatten()).item())
    b.step()
    g, h = (torch.autograd.grad(loss_of(b.model, k), b.leaves) for k in range(2))
    x, y = (torch.cat([t.flatten() for t in ts]) for ts in (g, h))
    if x @ y > -1:
        x = x - (x @ y) / (y @ y) * y
    at = 0
    for p in b.leaves:
        p.grad = x[at : at + p.numel()].view_as(p).clone()
        at += p.numel()
    b.step()
    return found


def sharpness(b):
    """As SAM does, an ascent by a step of given length and back."""
    b.backward()
    norm = torch.stack([p.grad.norm() for p in b.leaves]).norm()
    moved = []
    with torch.no_grad():
        for p in b.leaves:
            e = p.grad / norm
            p.add_(e, alpha=0.05)
            moved.append(e)
        whole = b.model.odd.weight * 0.01
        b.model.odd.weight.add_(whole)
    b.model.zero_grad()
    loss_of(b.model).backward()
    with torch.no_grad():
        for p, e in zip(b.leaves, moved, strict=True):
            p.sub_(e, alpha=0.05)
        b.model.odd.weight.sub_(whole)
    b.step()


def decays_by_hand(b):
    b.backward()
    for p in b.leaves:
        p.grad.add_(p.detach(), alpha=0.1)
        with torch.no_grad():
            p.grad.add_(p, alpha=0.1).add_(torch.ones(p.grad.norm().shape, dtype=p.dtype))
            p.mul_(1 - 0.01 * p.norm())
    b.w.grad = b.w.grad + 0.1 * b.w.detach() * torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4)
    b.step()


def wholes_into_parts(b):
    """Each spelling that puts something whole where a rank has a part of it."""
    w = torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4)
    b.backward()
    with torch.no_grad():
        b.w.copy_(w)
        b.w.add_(w.mean(0, keepdim=True)).mul_(w[:, :1] + 1)
        b.w.data.sub_(0.1 * w)
        b.w.grad.mul_(w > 0.3).add_(w[:1])
        torch._foreach_add_([b.w, b.model.odd.bias], [w, torch.arange(3.0)])
        torch.mul(b.w.data, w + 1, out=b.w.data)
    b.model.odd.weight.grad = torch.ones(3, 2, dtype=torch.float64)
    b.model.odd.weight.data = torch.full((3, 2), 0.25, dtype=torch.float64)
    b.model.one.weight.data = b.model.one.weight.data - 0.1 * b.model.one.weight
    b.model.odd.bias.grad.data = torch.arange(3.0, dtype=torch.float64)
    b.model.one.bias.data[:] = torch.full((1,), 0.5, dtype=torch.float64)
    handle = b.w.register_hook(lambda g: g.mul_(w > 0.5))
    loss_of(b.model).backward()
    handle.remove()
    b.step()


def written_by_index(b):
    """Rows, elements and running sums, which count those of the whole."""
    b.backward()
    with torch.no_grad():
        b.w[0] = 1.0
        b.w[:, 1] = torch.tensor([2.0, 3.0], dtype=torch.float64)
        b.w[b.w > 2.5] = 0.5
        b.model.odd.weight.renorm_(2, 0, 0.1)
        b.model.odd.bias.put_(torch.tensor([1]), torch.ones(1, dtype=torch.float64))
        b.model.one.weight.cumsum_(1)
        b.model.odd.bias.index_fill_(0, torch.tensor([2]), 0.3)
        b.model.gain[...] = 1.25
    b.w.grad[1] = 0.0
    b.w.grad[0, 2] = 1.0
    b.w.grad[0, 3] = b.w.grad[0, 3] + 1
    b.model.odd.weight.grad.data[1:] = b.model.odd.weight.detach()[1:] * 2
    b.model.odd.bias.grad[torch.tensor([True, False, True])] = 0.1
    b.model.odd.bias.data[b.model.odd.bias.data < 0] = 0.0
    b.step()


def noise(b):
    """With one seed on all ranks what one process draws."""
    b.backward()
    torch.manual_seed(3)
    for p in b.leaves:
        p.grad.add_(torch.randn_like(p.grad) * 0.1 + torch.rand_like(p))
        p.data.add_(torch.empty_like(p).normal_(0, 0.1))
    with torch.no_grad():
        b.w.uniform_(-1, 1)
        b.w.data.bernoulli_(0.5).add_(F.dropout(b.w.data, 0.5))
    b.step()
    return torch.rand(()).item()


def initialised(b):
    torch.manual_seed(4)
    for i, f in enumerate(INITS):
        with b.gathered() if i % 2 else nullcontext():
            getattr(nn.init, f)(b.w, *{"constant_": [0.5], "sparse_": [0.5]}.get(f, []))
        b.backward(b.w.square().sum())
        b.step()
    nn.init.normal_(b.model.odd.weight.data, std=0.1)
    with torch.no_grad():
        b.model.one.weight.normal_()
    vector_to_parameters(parameters_to_vector(b.model.parameters()) * 2, b.model.parameters())


def momentum_of_ones_own(b):
    """What is made beside a part is one, whose norm is that of the whole."""
    held = [torch.zeros_like(p) for p in b.leaves]
    found = []
    for _ in range(2):
        b.backward()
        for p, m in zip(b.leaves, held, strict=True):
            m.mul_(0.9).add_(p.grad)
            found.append(m.norm().item())
            p.data.sub_(m / (m.norm() + 1), alpha=0.1)
        b.model.zero_grad()
    return found


def average_outside(b):
    with b.gathered():
        averages = [AveragedModel(b.model), AveragedModel(b.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))]
        averages += [AveragedModel(b.model, avg_fn=lambda mean, x, n: mean + (x - mean) / (n + 1))]
    for _ in range(3):
        b.backward()
        b.step()
        for average in averages:
            average.update_parameters(b.model)
    return [p.detach() for average in averages for p in average.module.parameters()]


ROW = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)


def rows_as_long_as_parts(b):
    """On two ranks a part of `b.w` is as long as a row: what may be a row is one."""
    b.backward()
    p, g = b.w, b.w.grad
    with torch.no_grad():
        p.add_(ROW).data.mul_(ROW)
        torch._foreach_add_([g], [ROW])
        p.copy_(p + ROW)
        found = F.mse_loss(p, ROW.expand(2, 4)) + (p * ROW + p.data * ROW + ROW * g).sum()
        p.copy_(ROW).mul_(ROW.expand(2, 4))
        p.data.add_(ROW.unsqueeze(0)).mul_(0.1)
        more = g * ROW.view(1, -1) + p * ROW.view(1, -1)
        p.mul_(0.1)
    b.step()
    return found, more


def arguments_by_name(b):
    """Two of the names are first arguments of other functions."""
    b.backward()
    g = b.w.grad
    assert g.flatten().view_as(other=g).is_same_size(other=g)
    assert torch.allclose(rtol=1e-5, other=g.clone(), input=g)
    positive = torch.where(condition=g > 0, input=g, other=torch.zeros_like(g))
    found = positive.sum() + torch.searchsorted(sorted_sequence=ROW, input=g).sum()
    # Integers that backends do not send.
    found = found + (100 * b.w.detach()).short().abs().sum() + (100 * g).abs().to(torch.uint16).double().sum()
    b.step()
    return found


def logged_norms(b):
    """A norm is a number to whatever writes, copies or saves it, and a part of the whole to arithmetic."""
    b.backward()
    found = []
    for n in (b.w.grad.norm(), torch._foreach_norm([p.grad for p in b.leaves])[1], b.w.data.norm()):
        # As under FSDP2.
        assert hasattr(n, "full_tensor") == hasattr(b.w, "full_tensor")
        torch.save(n, file := io.BytesIO())
        file.seek(0)
        copied = copy.deepcopy(n)
        assert type(copied) is torch.Tensor and type(whole(n)) is torch.Tensor
        text = f"{n} {n!r}"
        assert "Norm" not in text and "Face" not in text
        found += [float(f"{n:.3f}"), float(f"{n}"), n.item(), (n * 2).tolist(), copied.item(), torch.load(file).item()]
        found += [torch.clamp(0.5 / (n + 1e-6), max=1.0).item(), torch.zeros((), dtype=n.dtype).add_(n).item()]
        found += [whole(n).item(), torch.stack([n, n.to("cpu")]).norm().item()]
    # What is scaled by a norm is a part as before; of what has a graph the norm is as torch gives it.
    scaled = [b.w.grad / b.w.grad.norm(), b.w.grad.norm() * b.w.grad]
    assert all(type(x) is type(b.w.grad) for x in scaled)
    penalty = b.w.norm()
    assert type(penalty) is torch.Tensor and penalty.requires_grad
    b.step()
    return found, scaled


# -- graphs of gradients ---------------------------------------------------------------------------------------------


def root_of_a_penalty(b):
    gs = torch.autograd.grad(loss_of(b.model), b.leaves, create_graph=True)
    norm = sum(g.square().sum() for g in gs).sqrt()
    (loss_of(b.model) * norm + torch.cat([g.flatten() for g in gs]).logsumexp(0)).backward()
    b.step()
    return norm.item()


def products_of_hessians(b):
    gs = torch.autograd.grad(loss_of(b.model), b.leaves, create_graph=True)
    torch.manual_seed(5)
    vs = [torch.randn_like(p) for p in b.leaves]
    once = torch.autograd.grad(sum((g * v).sum() for g, v in zip(gs, vs, strict=True)), b.leaves, retain_graph=True)
    again = torch.autograd.grad(gs, b.leaves, vs, create_graph=True)
    third = torch.autograd.grad(sum(h.norm() for h in again), b.leaves)
    return [x.norm().item() for hs in (once, again, third) for x in hs]


def numbers_with_a_graph(b):
    """Whose derivatives are sums over all elements of a part."""
    held = [p.detach().square() for p in b.leaves]
    gs = torch.autograd.grad(loss_of(b.model), b.leaves, create_graph=True)
    norm, scale = gs[0].norm(), torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    units = [g / norm * scale for g in gs]
    near = sum((x * (p - 1) ** 2).sum() for x, p in zip(held, b.leaves, strict=True))
    (loss_of(b.model) + sum((u * u.exp()).sum() for u in units) + near + (gs[1] * b.model.gain).max()).backward()
    b.model.one.bias.grad.add_(0.1 * b.model.one.bias).mul_(b.model.gain)
    b.step()
    return scale.grad


def inner_steps_with_a_graph(b):
    gs = torch.autograd.grad(loss_of(b.model), b.leaves, create_graph=True)
    names = {id(p): n for n, p in b.model.named_parameters()}
    fast = {names[id(p)]: p - 0.1 * g for p, g in zip(b.leaves, gs, strict=True)}
    torch.func.functional_call(make(), fast, (rows(1),)).square().mean().backward()
    b.step()


INITS = [f for f in dir(nn.init) if f.endswith("_") and f[0] != "_" and f != "dirac_"]
RIGHT = [
    numbers_of_parameters, penalties, head_in_the_loss, teachers, filled, clamped, edited_gradients, hooks,
    steps_by_hand, swapped_averages, momentum_encoder, flat_gradients, gradient_penalty, state_dicts, averaged_model,
    numbers_of_gradients, flat_numbers, clipped, inner_steps, teachers_of_parts, two_losses, sharpness, decays_by_hand,
    wholes_into_parts, written_by_index, noise, initialised, momentum_of_ones_own, average_outside, root_of_a_penalty,
    products_of_hessians, inner_steps_with_a_graph, numbers_with_a_graph, rows_as_long_as_parts, arguments_by_name,
    logged_norms,
]  # fmt: skip
