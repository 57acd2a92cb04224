"""Parts of sharded parameters that meet wholes: in arithmetic, in state dicts of the model and of the optimizer."""

import itertools
import re

import torch
from small_parts import WIDTH, rows, said, two
from time_limits import limit
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import zerofn as zf

# -- parts beside wholes -------------------------------------------------------------------------------------

ROW = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)


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
    p.copy_(ROW.expand(2, WIDTH))


def row_into_part(model, p, g):
    p[0] = 1.0


def clipped_rows(model, p, g):
    p.renorm_(2, 0, 0.1)


def elements_by_index(model, p, g):
    p.put_(torch.tensor([1]), torch.ones(1, dtype=p.dtype))


def sums(model, p, g):
    p.cumsum_(0)


def teacher_by_state(model, p, g):
    teacher = two()
    for n, x in model.state_dict().items():
        teacher.state_dict()[n].mul_(0.5).add_(x)
    return teacher.w.weight.detach()


def parts_of_two(model, p, g):
    """Of leaves that are cut alike, and of one of another length."""
    p.mul_(0.5).add_(model.same.weight, alpha=0.5)
    torch._foreach_lerp_([p], [model.same.weight], 0.5)
    p.sub_(p.detach() * 0.5).clamp_(-1, 1)
    p[:] = p.detach() * 2
    p[...] = p.detach() * 0.5
    p *= 2
    p += torch.ones(())
    return p.detach() * model.w.bias.detach().unsqueeze(1) + model.w.bias[0]


def rows_as_long_as_parts(model, p, g):
    """What may be a row is one, also where a rank has but one."""
    p.add_(ROW).data.mul_(ROW)
    torch._foreach_add_([g], [ROW])
    p.copy_(p + ROW)
    found = nn.functional.mse_loss(p, ROW.expand(2, WIDTH)) + (p * ROW + p.data * ROW + ROW * g).sum()
    p.copy_(ROW)
    return found


def rows_that_say_so(model, p, g):
    p.mul_(ROW.expand(2, WIDTH))
    p.data.add_(ROW.unsqueeze(0))
    return g * ROW.view(1, -1) + p * ROW.view(1, -1)


def arguments_by_name(model, p, g):
    """Two of the names are first arguments of other functions."""
    assert g.flatten().view_as(other=g).is_same_size(other=g)
    assert torch.allclose(rtol=1e-5, other=g.clone(), input=g)
    positive = torch.where(condition=g > 0, input=g, other=torch.zeros_like(g))
    return positive.sum() + torch.searchsorted(sorted_sequence=ROW, input=g).sum()


def integers_that_backends_do_not_send(model, p, g):
    return (100 * p.detach()).short().abs().sum() + (100 * g).abs().to(torch.uint16).double().sum()


MIXED = [
    inner_step, inner_step_reversed, inner_step_by_name, inner_step_of_grad, with_its_data, mean_square,
    full_into_part, row_into_part, clipped_rows, elements_by_index, sums, teacher_by_state, parts_of_two,
    rows_that_say_so, rows_as_long_as_parts, arguments_by_name, integers_that_backends_do_not_send,
]  # fmt: skip


def program(fn, model):
    """What it gives, and what it leaves."""
    p = model.w.weight
    (g,) = torch.autograd.grad(model(rows(0, 0)).square().mean(), p)
    with torch.enable_grad() if fn is inner_step_of_grad else torch.no_grad():
        found = fn(model, p, g)
    return None if found is None else (found * 1).tolist(), (p * 1).tolist()


def mixed():
    found = {}
    for fn in MIXED:
        model = two()
        opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
        found[fn.__name__] = program(fn, model)
        opt.detach()
    return found


def test_parts_that_meet_wholes_are_gathered():
    for found in zf.launch(mixed, 2, timeout=limit()):
        for fn in MIXED:
            torch.testing.assert_close(found[fn.__name__], program(fn, two()), rtol=1e-13, atol=0.0, msg=fn.__name__)


# Beside each of these a plain tensor that is as long as this rank's piece, and does not fit the whole.
LOCAL = [
    lambda p, g, x: p * x,
    lambda p, g, x: p.data * x,
    lambda p, g, x: x + g,
    lambda p, g, x: p.mul_(x),
    lambda p, g, x: p.copy_(x),
    lambda p, g, x: p.data.add_(x),
    lambda p, g, x: torch._foreach_add_([g], [x]),
    lambda p, g, x: torch._foreach_mul([g], [x]),
    lambda p, g, x: x.add_(g),
    lambda p, g, x: x.copy_(p.data),
    lambda p, g, x: torch.allclose(x, p.data),
    lambda p, g, x: setattr(p, "grad", x),
    lambda p, g, x: setattr(p, "data", x),
    lambda p, g, x: setattr(g, "data", x),
]


def local():
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    p, found = model.weight, []
    before = p.detach().clone()
    for fn, flat in itertools.product(LOCAL, (False, True)):
        (g,) = torch.autograd.grad(model(rows(0, 0)[:, :3]).square().mean(), p)
        held = g.clone()
        with torch.no_grad():
            x = torch.ones_like(p.to_local())
            x = x.view(-1) if flat else x
            found.append(str(said(lambda fn=fn, g=g, x=x: fn(p, g, x))))
        assert torch.equal(g, held) and p.grad is None
    assert torch.equal(p, before)
    # Pieces by themselves on both sides, over the same memory.
    with torch.no_grad():
        p.to_local().add_(torch.ones_like(g.to_local()))
    assert torch.equal(p, before + 1)
    opt.detach()
    return found


def test_a_plain_tensor_of_a_pieces_shape_is_refused():
    for found in zf.launch(local, 2, timeout=limit()):
        for message in found:
            assert "must match the size of" in message or re.search("= [xy] of shape", message), message


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
    """Whether a state dict of full parameters goes into shards, and one of shards into full parameters."""
    found = []
    for make in (two, Vector):
        models = make(), make()
        opts = [
            zf.attach(m, tx) for m, tx in zip(models, (zf.adamw(0.1), zf.chain(zf.shard(), zf.adamw(0.1))), strict=True)
        ]
        with torch.no_grad():
            for p in opts[1]._own.params.values():
                p.mul_(2)
        for i, j in ((0, 1), (1, 0)):
            opts[i].load_state_dict(opts[j].state_dict())
            with opts[1].gathered():
                pairs = zip(*(m.parameters() for m in models), strict=True)
                found.append(all(torch.equal(a.detach(), b.detach()) for a, b in pairs))
        opts[1].detach()
    return found


def test_state_dicts_go_between_full_parameters_and_shards():
    assert zf.launch(states_of_optimizers, 2, timeout=limit()) == [[True] * 4] * 2


def test_full_state_dicts_are_refused_outside_of_gathered():
    assert zf.launch(full_states, 2, timeout=limit()) == [True, True]
