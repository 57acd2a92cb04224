"""Programs that ask parameters and gradients for their shapes, for a model in one process and under `shard`."""

import torch
from outside_programs import loss_of, make
from torch import nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters


def said_of(x):
    """Every answer about sizes."""
    found = [tuple(x.shape), tuple(x.size()), x.numel(), x.nelement(), x.dim(), x.ndim, x.ndimension(), x.nbytes]
    found += [x.stride(), x.is_contiguous(), x.storage_offset(), torch.numel(x), x.is_same_size(torch.empty(2, 4))]
    if x.ndim:
        return [*found, len(x), x.size(0), x.size(-1), x.stride(0), x.dim_order(), [len(row.shape) for row in x]]
    return found


def all_sizes(b):
    b.backward()
    found = []
    for p in b.leaves:
        seen = [p, p.grad, p.data, p.detach(), p.grad.data, p.grad * 2, torch.zeros_like(p), torch.randn_like(p.grad)]
        found += [said_of(x) for x in [*seen, p.detach().clone().to(torch.float32), p > 0, p.data.view(-1)]]
    found += [said_of(g) for g in torch.autograd.grad(loss_of(b.model), b.leaves)]
    found += [said_of(x) for x in b.model.state_dict().values()]
    first, second = [], []
    b.w.register_hook(lambda g: first.append((g.ndim, tuple(g.shape), g.numel())))
    b.model.odd.weight.register_post_accumulate_grad_hook(lambda p: second.append((len(p.grad), len(p))))
    b.backward()
    b.step()
    return found, first, second


def counts(b):
    """What libraries ask to report sizes, to form groups, and to see that two models fit."""
    parameters = list(b.model.parameters())
    decayed = [p.ndim >= 2 for p in parameters]
    sizes = [sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)]
    other = make()
    fits = [g.shape == w.shape for g, w in zip(parameters, other.parameters(), strict=True)]
    b.backward()
    fits += [p.grad.shape == p.shape == p.data.size() for p in parameters]
    b.step()
    return decayed, sizes, fits, nn.utils.parameters_to_vector(parameters).numel()


def momentum_of_zeros(b):
    """Buffers by shape alone, which are whole."""
    held = [(torch.zeros(p.shape, dtype=p.dtype), p.new_zeros(p.shape), p.new_zeros(p.size())) for p in b.leaves]
    for _ in range(2):
        b.backward()
        for p, (m, v, c) in zip(b.leaves, held, strict=True):
            m.mul_(0.9).add_(p.grad)
            torch.add(v * 0.5, p.grad.square(), out=v)
            c += p.detach().view(p.shape)
            p.data.sub_(m / (v.sqrt() + 1), alpha=0.1).mul_(torch.ones(p.shape))
            p.grad = None
    return [x for xs in held for x in xs]


def reshaped(b):
    b.backward()
    found = [b.w.grad.view(4, 2).shape, b.w.grad.view(-1, 1, 4).shape, b.w.grad.flatten().shape, b.w.grad.T.shape]
    flat = b.w.grad.view(-1)
    b.w.grad = (flat * 2).view(b.w.shape)
    b.model.odd.weight.grad = b.model.odd.weight.grad.reshape(6).view_as(b.model.odd.weight) * 0.5
    b.model.gain.grad = b.model.gain.grad.view(1).squeeze()
    b.w.data = b.w.data.view(b.w.shape) + 1
    b.model.odd.bias.data.copy_(torch.linspace(0, 1, b.model.odd.bias.numel()))
    b.step()
    return found


def taken_apart(b):
    """Parts one behind the other, by the ends of leaves and elsewhere, by every spelling."""
    b.backward()
    sizes = [p.numel() for p in b.leaves]
    flat = torch.cat([p.grad.view(-1) for p in b.leaves]) * 0.5
    twice = [sizes[0] + sizes[1], *sizes[2:]]
    found = [len(flat), flat[3:9].tolist(), flat[0].item(), flat[:0].shape, [x.tolist() for x in flat.split(5)]]
    found += [x.norm().item() for x in flat.split(twice)] + [flat.split([1, len(flat) - 1])[1].sum().item()]
    found += [x.sum().item() for x in torch.split(flat, sizes)] + [flat[sizes[0] : sum(twice[:2])].shape]
    at = 0
    for p in b.leaves:
        p.grad = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    b.step()
    values = parameters_to_vector(b.model.parameters())
    vector_to_parameters(values * 1.5, b.model.parameters())
    vector_to_parameters(torch.cat([p.detach().flatten() for p in b.model.parameters()]) + 1, b.model.parameters())
    return found


def by_assertions(b):
    b.backward()
    full = lambda x: x.full_tensor() if hasattr(x, "full_tensor") else x  # noqa: E731
    torch.testing.assert_close(b.w.grad, b.w.grad.clone())
    torch.testing.assert_close(full(b.w), make().pair.weight)
    torch.testing.assert_close(full(b.w.detach() + 1), make().pair.weight.detach() + 1)
    assert not torch.equal(b.w.grad, torch.zeros(2, 4, dtype=torch.float64))
    wrong = 0
    for x in (torch.zeros(2, 4, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)):
        try:
            torch.testing.assert_close(full(b.w.grad), x)
        except AssertionError:
            wrong += 1
    b.step()
    return wrong


def full_into_model(b):
    """Full tensors by `load_state_dict`, in which shapes are compared first."""
    full = {n: 2 * x for n, x in make().state_dict().items()}
    b.model.load_state_dict(full)
    found = []
    try:
        b.model.load_state_dict({**full, "odd.weight": torch.zeros(4)})
    except RuntimeError as error:
        found.append("torch.Size([4]) from checkpoint" in str(error) and "torch.Size([3, 2])" in str(error))
    b.backward()
    b.step()
    return found


def of_images(b):
    """A format of images is none of parts."""
    with torch.no_grad():
        found = [b.w.view(1, 2, 2, 2).contiguous(memory_format=torch.channels_last).stride()]
        found += [b.w.detach().view(1, 2, 2, 2).clone(memory_format=torch.channels_last).stride()]
    b.backward()
    b.step()
    return found


def by_torch(make_opt):
    """Steps of an optimizer of torch's over the model's parameters."""

    def program(b):
        opt, found = make_opt(b.leaves), []
        for step in range(3):
            opt.zero_grad()
            loss_of(b.model, step).backward()
            norm = clip_grad_norm_(b.leaves, 0.1)
            found.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
            opt.step()
        return found, [tuple(p.shape) for p in b.leaves]

    return program


O = torch.optim  # noqa: E741
OPTIMIZERS = {
    "sgd": lambda ps: O.SGD(ps, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda ps: O.AdamW(ps, 0.05, foreach=False),
    "adamw, fused": lambda ps: O.AdamW(ps, 0.05, fused=True),
    "adamw, listed": lambda ps: O.AdamW(ps, 0.05, foreach=True),
    "adafactor": lambda ps: O.Adafactor(ps, 0.1),
    "adafactor, listed": lambda ps: O.Adafactor(ps, 0.1, foreach=True),
    "rmsprop": lambda ps: O.RMSprop(ps, 0.01, centered=True),
    "adagrad": lambda ps: O.Adagrad(ps, 0.1),
}
PROGRAMS = {
    f.__name__: f
    for f in (all_sizes, counts, momentum_of_zeros, reshaped, taken_apart, by_assertions, full_into_model, of_images)
} | {name: by_torch(make_opt) for name, make_opt in OPTIMIZERS.items()}
