"""Parts of sharded parameters that meet wholes: in arithmetic, in state dicts of the model and of the optimizer."""

import re

import rank_programs as P
import torch
from small_parts import WIDTH, rows, said, two
from time_limits import limit
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import zerofn as zf

# -- parts beside wholes -------------------------------------------------------------------------------------


def inner_step(model, p, g):
    return p - 0.1 * g


def inner_step_reversed(model, p, g):
    return -0.1 * g + p


def inner_step_by_name(model, p, g):
    return torch.add(p, g, alpha=-0.1)


def inner_step_of_grad(model, p, g):
    model(rows(0, 0)).sum().backward()
    return torch.sub(p, p.grad)


def with_its_data(model, p, g):
    return torch.lerp(p, p.data, 0.5)


def mean_square(model, p, g):
    return nn.functional.mse_loss(p, p.detach())


def full_into_part(model, p, g):
    with torch.no_grad():
        p.copy_(torch.ones(2, WIDTH))


def row_into_part(model, p, g):
    with torch.no_grad():
        p[0] = 1.0


def clipped_rows(model, p, g):
    with torch.no_grad():
        p.renorm_(2, 0, 0.1)


def elements_by_index(model, p, g):
    with torch.no_grad():
        p.put_(torch.tensor([1]), torch.ones(1, dtype=p.dtype))


def sums(model, p, g):
    with torch.no_grad():
        p.cumsum_(0)


def teacher_by_state(model, p, g):
    teacher = two()
    with torch.no_grad():
        for n, x in model.state_dict().items():
            teacher.state_dict()[n].mul_(0.5).add_(x)


BESIDE = r"the sharded parameter w.weight, \(2, 4\), and a tensor of its part's shape \(4,\)(.|\n)*parts alone"
INTO = r"of a part of the sharded parameter w.weight and a tensor of shape \(2, 4\)(.|\n)*with opt.gathered\(\)"
MIXED = {
    **{
        f.__name__: (f, BESIDE)
        for f in (inner_step, inner_step_reversed, inner_step_by_name, inner_step_of_grad, with_its_data, mean_square)
    },
    "full_into_part": (full_into_part, INTO),
    "row_into_part": (row_into_part, r"p\[index\] = x of the sharded parameter w.weight(.|\n)*with opt.gathered\(\)"),
    **{
        f.__name__: (f, rf"p.{name}_\(...\) of the sharded parameter w.weight(.|\n)*with opt.gathered\(\)")
        for f, name in ((clipped_rows, "renorm"), (elements_by_index, "put"), (sums, "cumsum"))
    },
    "teacher_by_state": (teacher_by_state, r"state_dict\(\) and a tensor of shape \(2, 4\)(.|\n)*average.add_\(p\)"),
}


def mixed():
    found = {}
    for name, (fn, _) in MIXED.items():
        model = two()
        opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
        p = model.w.weight
        before = p.detach().clone()
        (g,) = torch.autograd.grad(model(rows(0, 0)).square().mean(), p)
        found[name] = said(lambda fn=fn, m=model, p=p, g=g: fn(m, p, g))
        assert torch.equal(p.detach(), before), name
        opt.detach()
    return found


def allowed():
    """What is right: on parts alone, on wholes alone, with numbers, and what is as long as no part."""
    rank, _ = P.rank_and_size()
    model, plain = two(), two()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    p, full, q = model.w.weight, plain.w.weight.detach(), plain.same.weight.detach()
    part = full.reshape(-1).split(WIDTH)[rank]
    average = torch.zeros_like(full)
    with torch.no_grad():
        average.add_(p, alpha=0.5)
        assert torch.equal(average, 0.5 * full)
        assert torch.equal(p * torch.ones(2, 1), full) and torch.equal(p + full, 2 * full)
        assert torch.equal(p * torch.arange(WIDTH).expand(2, WIDTH), full * torch.arange(WIDTH))
        assert torch.equal(p / torch.tensor([2.0]), full / 2) and torch.equal(
            p * model.w.bias[0], full * plain.w.bias[0]
        )
        p.mul_(0.5).add_(model.same.weight, alpha=0.5)
        assert torch.equal(p * 1, 0.5 * full + 0.5 * q)
        torch._foreach_lerp_([p], [model.same.weight], 1.0)
        assert torch.equal(p * 1, q)
        p.copy_(part)
        p[:] = part * 2
        p[...] = p.detach() * 0.5
        p.sub_(p.detach() * 0.5).clamp_(-1, 1)
        assert torch.equal(p * 1, (0.5 * full).clamp(-1, 1))
        p *= 2
        p += torch.ones(())
    opt.detach()
    return True


def test_parts_that_meet_wholes_are_told():
    for found in zf.launch(mixed, 2, timeout=limit()):
        for name, (_, pattern) in MIXED.items():
            assert re.search(pattern, str(found[name])), f"{name}: {found[name]}"
    assert zf.launch(allowed, 2, timeout=limit()) == [True, True]


# -- full state dicts -----------------------------------------------------------------------------------------------


def full_states():
    full = StateDictOptions(full_state_dict=True)
    model, plain = two(), two()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    with opt.gathered():
        inside = get_model_state_dict(model, options=full)
    assert all(torch.equal(x, inside[n]) for n, x in plain.state_dict().items())
    set_model_state_dict(model, {n: 2 * x for n, x in inside.items()}, options=full)
    assert torch.equal(zf.full_params(opt.tx, opt.state)["w.weight"], 2 * plain.w.weight.detach())
    opt.detach()
    assert get_model_state_dict(model, options=full)["w.weight"].shape == (2, WIDTH)
    return True


class Vector(nn.Module):
    """A whole leaf and a part of it differ in no dimension but one, of which a distributed tensor tells the whole."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x):
        return (self.scale * x).sum()


def states_of_optimizers():
    """What loading a whole into parts says, and parts into a whole, and whether all is as it was."""
    found = []
    for make in (two, Vector):
        whole, sharded = (zf.attach(make(), tx) for tx in (zf.adamw(0.1), zf.chain(zf.shard(), zf.adamw(0.1))))
        with torch.no_grad():
            for p in sharded._params.values():
                p.mul_(2)
        all_params = [p for opt in (whole, sharded) for p in opt._params.values()]
        before = [p.detach().clone() for p in all_params]
        for a, b in ((whole, sharded), (sharded, whole)):
            message = said(lambda a=a, b=b: a.load_state_dict(b.state_dict()))
            found.append((message, all(map(torch.equal, before, [p.detach() for p in all_params]))))
        sharded.load_state_dict(sharded.state_dict())
        sharded.detach()
    return found


def test_states_of_optimizers_in_parts_and_in_full_are_told_apart():
    for found in zf.launch(states_of_optimizers, 2, timeout=limit()):
        for message, kept in found:
            assert re.search(r"not the state of this pipeline(.|\n)*on as many ranks(.|\n)*zf.save", str(message)), (
                message
            )
            assert kept


def test_full_state_dicts_are_refused_outside_of_gathered():
    assert zf.launch(full_states, 2, timeout=limit()) == [True, True]
