"""Parts that meet wholes, hooks, `torch.func`, full state dicts, and gradients that have left: right, or told."""

import os
import re
import warnings

import rank_programs as P
import torch
import torch.distributed as dist
from time_limits import limit
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import zerofn as zf

WIDTH = 4


def said(fn):
    """The message of what `fn` raises, or what it returns."""
    try:
        return fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def rows(step, rank):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, WIDTH, generator=g, dtype=torch.float64)


# -- parts beside wholes -------------------------------------------------------------------------------------


class Two(nn.Module):
    """As many rows as ranks in one leaf; a leaf of two numbers; one of as many as a part of another."""

    def __init__(self):
        super().__init__()
        self.w = nn.Linear(WIDTH, 2)
        self.same = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.w(x) * torch.tanh(self.same(x))


def two():
    torch.manual_seed(0)
    return Two().double()


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
    "row_into_part": (row_into_part, r"p\[0\] = x of the sharded parameter w.weight(.|\n)*with opt.gathered\(\)"),
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


# -- hooks on parameters ---------------------------------------------------------------------------------------


def hooked(stage):
    """What a hook sees, and the step that it makes of it."""
    rank, _ = P.rank_and_size()
    model = two()
    before = model.w.weight.detach().clone()
    opt = zf.attach(model, P.pipe_of(stage, zf.sgd(1.0)))
    seen = []
    handle = model.w.weight.register_hook(lambda g: seen.append(g.clone()) or g.clamp(-0.05, 0.05))
    model(rows(0, rank)).square().sum().backward()
    opt.step()
    handle.remove()
    opt.detach()
    return seen[0], model.w.weight.detach() - before


def hooked_everywhere():
    return {stage: hooked(stage) for stage in P.FIRST}


def test_hooks_see_a_ranks_own_gradient_but_under_shard_its_part_of_the_mean():
    own = []
    for rank in range(2):
        model = two()
        model(rows(0, rank)).square().sum().backward()
        own.append(model.w.weight.grad)
    mean = (own[0] + own[1]) / 2
    cut = [x.clamp(-0.05, 0.05) for x in own]
    assert ((cut[0] + cut[1]) / 2 - mean.clamp(-0.05, 0.05)).abs().max() > 1e-2, "the hook is as good as linear"
    for rank, found in enumerate(zf.launch(hooked_everywhere, 2, timeout=limit())):
        for stage, (seen, moved) in found.items():
            want = mean.reshape(-1).split(WIDTH)[rank] if stage == 3 else own[rank]
            torch.testing.assert_close(seen, want, rtol=1e-12, atol=0)
            step = mean.clamp(-0.05, 0.05) if stage == 3 else (cut[0] + cut[1]) / 2
            torch.testing.assert_close(moved, -step, rtol=1e-10, atol=0)


# -- gradients that are not cleared ------------------------------------------------------------------------------


def to_none(model, opt):
    opt.zero_grad()


def to_zeros(model, opt):
    opt.zero_grad(set_to_none=False)


def by_the_model(model, opt):
    model.zero_grad()


def to_zeros_by_the_model(model, opt):
    model.zero_grad(set_to_none=False)


def never(model, opt):
    pass


CLEARING = (to_none, to_zeros, by_the_model, to_zeros_by_the_model, never)


class Sometimes(nn.Module):
    """One layer is used in the first step alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, both):
        return self.a(x) + self.b(x) if both else self.a(x)


def clears(make_opt, clear, data):
    torch.manual_seed(0)
    model = Sometimes().double()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt = make_opt(model)
    for step in range(3):
        model(data(step), step == 0).square().mean().backward()
        opt.step()
        clear(model, opt)
    getattr(opt, "detach", lambda: None)()
    return {n: p.detach() - before[n] for n, p in model.named_parameters()}


def clears_everywhere():
    rank, _ = P.rank_and_size()
    return {
        (stage, clear.__name__): said(
            lambda s=stage, c=clear: clears(
                lambda m: zf.attach(m, P.pipe_of(s, zf.sgd(0.1, momentum=0.9))), c, lambda step: rows(step, rank)
            )
        )
        for stage in (0, 2, 3)
        for clear in CLEARING
    }


def test_gradients_that_are_kept_are_as_in_torch_or_refused():
    data = lambda step: torch.cat([rows(step, 0), rows(step, 1)])  # noqa: E731
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    want = {c.__name__: clears(sgd, c, data) for c in CLEARING}
    assert (want["to_none"]["b.weight"] - want["to_zeros"]["b.weight"]).abs().max() > 1e-3
    for found in zf.launch(clears_everywhere, 2, timeout=limit()):
        for (stage, clear), got in found.items():
            if clear == "never" and stage != 3:
                assert re.search(r"never cleared since the last step(.|\n)*opt.zero_grad\(\) after opt.step", str(got))
                continue
            assert not isinstance(got, str), (stage, clear, got)
            for n, x in want[clear].items():
                torch.testing.assert_close(got[n], x, rtol=1e-10, atol=1e-14, msg=f"{stage} {clear} {n}")


# -- gradients that are looked for where they have left -----------------------------------------------------------


def sam(model, opt):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def warned(stage, in_backward, edit, times=2):
    rank, _ = P.rank_and_size()
    model = two()
    opt = zf.attach(model, P.pipe_of(stage, zf.sgd(0.1)), in_backward=in_backward)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert model.w.weight.grad is None
        for step in range(times):
            model(rows(step, rank)).square().mean().backward()
            edit(model, opt)
            opt.step()
            opt.zero_grad()
            assert model.w.weight.grad is None
    opt.detach()
    return [(str(w.message), os.path.basename(w.filename)) for w in caught if "p.grad" in str(w.message)]


def nothing(model, opt):
    pass


def trained_as_ever(model, opt):
    """What trainers and schedulers of torch do between backward and step."""
    torch.optim.lr_scheduler.StepLR(opt, 1)
    torch.nn.utils.get_total_norm([x for x in [p.detach() for p in model.parameters()] if x.numel()])
    dist.barrier()


def warned_everywhere():
    return {
        (stage, in_backward, edit.__name__): warned(stage, in_backward, edit)
        for stage, in_backward in ((0, False), (2, False), (3, False), (0, True), (3, True))
        for edit in (sam, nothing, trained_as_ever)
    }


def test_who_looks_for_a_gradient_that_has_left_is_told_once():
    for found in zf.launch(warned_everywhere, 2, timeout=limit()):
        for (stage, in_backward, edit), told in found.items():
            if edit == "sam" and (stage != 3 or in_backward):
                ((message, file),) = told
                assert "p.grad is read between backward and step" in message and "zf.leafwise" in message
                assert file == os.path.basename(__file__), file
            else:
                assert told == [], (stage, in_backward, edit, told)


# -- full state dicts -----------------------------------------------------------------------------------------------


def full_states():
    full = StateDictOptions(full_state_dict=True)
    offloaded = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, plain = two(), two()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    found = [said(lambda o=o: get_model_state_dict(model, options=o)) for o in (full, offloaded)]
    assert get_model_state_dict(model)["w.weight"].shape == (WIDTH,)
    with opt.gathered():
        inside = get_model_state_dict(model, options=full)
    assert all(torch.equal(x, inside[n]) for n, x in plain.state_dict().items())
    set_model_state_dict(model, {n: 2 * x for n, x in inside.items()}, options=full)
    assert torch.equal(zf.full_params(opt.tx, opt.state)["w.weight"], 2 * plain.w.weight.detach())
    opt.detach()
    assert get_model_state_dict(model, options=full)["w.weight"].shape == (2, WIDTH)
    return found


def test_full_state_dicts_are_refused_outside_of_gathered():
    for found in zf.launch(full_states, 2, timeout=limit()):
        for message in found:
            assert re.search(
                r"full_state_dict=True\)\) of a sharded model(.|\n)*with opt.gathered\(\): get_model", message
            )


# -- torch.func ---------------------------------------------------------------------------------------------------


class Functional(nn.Module):
    """Forward gives a function of its parameters to a transform of torch.func."""

    def __init__(self, fn):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fn = fn

    def forward(self, x):
        return self.fn(self, self.a(x))


def layer(m, x):
    return torch.tanh(x @ m.b.weight.T + m.b.bias)


RIGHT = {
    "vmap": lambda m, x: vmap(lambda row: torch.tanh(m.b(row)))(x),
    "vmap twice": lambda m, x: vmap(vmap(lambda e: e * m.b.weight.sum()))(x),
    "vmap without grad": lambda m, x: torch.no_grad()(vmap(lambda row: layer(m, row)))(x) + m.b(x),
    "jvp": lambda m, x: jvp(lambda t: layer(m, t), (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda m, x: vmap(jacfwd(lambda t: layer(m, t)))(x).sum(-1),
    "around": lambda m, x: torch.tanh(m.b(x)),
}
REFUSED = {
    "grad": lambda m, x: grad(lambda t: layer(m, t).sum())(x),
    "vjp": lambda m, x: vjp(lambda t: layer(m, t), x)[1](torch.ones_like(x))[0],
    "jacrev": lambda m, x: vmap(jacrev(lambda t: layer(m, t)))(x).sum(-1),
    "hessian": lambda m, x: vmap(hessian(lambda t: layer(m, t).sum()))(x).sum(-1),
}


def functional(name, fn, make_opt, data):
    torch.manual_seed(0)
    model = Functional(fn).double()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt = make_opt(model)
    for step in range(2):
        # "around": the call itself is given to vmap.
        (vmap(model) if name == "around" else model)(data(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    getattr(opt, "detach", lambda: None)()
    return {n: p.detach() - before[n] for n, p in model.named_parameters()}


def functional_everywhere():
    rank, _ = P.rank_and_size()
    scale = zf.scale_loss(64.0)
    return {
        (name, scaled): said(
            lambda n=name, f=fn, middle=middle: functional(
                n, f, lambda m: zf.attach(m, zf.chain(zf.shard(), *middle, zf.sgd(0.1))), lambda step: rows(step, rank)
            )
        )
        for name, fn in {**RIGHT, **REFUSED}.items()
        for scaled, middle in ((False, ()), (True, (scale,)))
    }


def test_transforms_of_torch_func_inside_of_forward():
    data = lambda step: torch.cat([rows(step, 0), rows(step, 1)])  # noqa: E731
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    want = {name: functional(name, fn, sgd, data) for name, fn in RIGHT.items()}
    for found in zf.launch(functional_everywhere, 2, timeout=limit()):
        for (name, _), got in found.items():
            if name in REFUSED:
                assert re.search(r"torch.func.grad, vjp, jacrev or hessian in the forward(.|\n)*jacfwd", str(got)), got
                continue
            assert not isinstance(got, str), f"{name}: {got}"
            for n, x in want[name].items():
                torch.testing.assert_close(got[n], x, rtol=1e-10, atol=1e-14, msg=f"{name} {n}")


# -- rows that a lookup makes shorter -------------------------------------------------------------------------------


def shortened(same):
    """`nn.Embedding(max_norm)` writes into the rows that a batch looks up."""
    rank, _ = P.rank_and_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, WIDTH, max_norm=0.5), nn.Linear(WIDTH, 1)).double()
    before = model[0].weight.detach().clone()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    words = torch.arange(6) if same else torch.arange(3) + 3 * rank

    def step():
        model(words).square().mean().backward()
        opt.step()

    message = said(step)
    opt.detach()
    return message, model[0].weight.detach() - before


def test_rows_that_a_lookup_makes_shorter():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, WIDTH, max_norm=0.5), nn.Linear(WIDTH, 1)).double()
    before = model[0].weight.detach().clone()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(6)).square().mean().backward()
    opt.step()
    want = model[0].weight.detach() - before
    assert want.abs().max() > 0.1
    for message, moved in zf.launch(shortened, 2, True, timeout=limit()):
        assert message is None
        torch.testing.assert_close(moved, want, rtol=1e-10, atol=1e-14)
    for message, _ in zf.launch(shortened, 2, False, timeout=limit()):
        assert re.search(
            r"ranks disagree on what the model wrote in forward into its parameters 0.weight", str(message)
        )
