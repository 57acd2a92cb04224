"""Gradients that have left, are parts, or were not cleared: what hooks and readers find, right or told."""

import gc
import re
import weakref

import rank_programs as P
import torch
import torch.distributed as dist
from small_parts import WIDTH, rows, said, two
from time_limits import limit
from torch import nn

import zerofn as zf

# -- hooks on modules -----------------------------------------------------------------------------------------


def cut_gradient(g):
    return g.clamp(-0.05, 0.05)


def twice_forward(model):
    model.w.register_forward_pre_hook(lambda m, args: (2 * args[0],))
    model.w.register_forward_hook(lambda m, args, y: y * m.weight.sum())


def cut_backward(model):
    model.w.register_full_backward_pre_hook(lambda m, g: (cut_gradient(g[0]),))


def module_hooked(register, make_opt, batches):
    model = two()
    register(model)
    start = [p.detach().clone() for p in model.parameters()]
    opt = make_opt(model)
    sum(model(x.requires_grad_()).square().sum() for x in batches).backward()
    opt.step()
    getattr(opt, "detach", lambda: None)()
    return [p.detach() - q for p, q in zip(model.parameters(), start, strict=True)]


def modules_hooked():
    rank, _ = P.rank_and_size()
    make = lambda stage: lambda m: zf.attach(m, P.pipe_of(stage, zf.sgd(0.2)))  # noqa: E731
    hooks = (twice_forward, cut_backward)
    return {(stage, f.__name__): module_hooked(f, make(stage), [rows(0, rank)]) for stage in P.STAGES for f in hooks}


def test_hooks_on_modules_are_as_in_plain_torch():
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    want = {f.__name__: module_hooked(f, sgd, [rows(0, 0), rows(0, 1)]) for f in (twice_forward, cut_backward)}
    for found in zf.launch(modules_hooked, 2, timeout=limit()):
        for (stage, name), moved in found.items():
            for x, y in zip(moved, want[name], strict=True):
                torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-14, msg=f"{stage} {name}")


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


def nothing(model, opt):
    pass


def trained_as_ever(model, opt):
    """What trainers and schedulers of torch do between backward and step."""
    torch.optim.lr_scheduler.StepLR(opt, 1)
    torch.nn.utils.get_total_norm(
        [x for x in [getattr(p.detach(), "to_local", p.detach)() for p in model.parameters()] if x.numel()]
    )
    dist.barrier()


def looked_for(stage, in_backward, edit):
    """What is there before a backward, in a hook, between backward and step, after the step, and once it is cleared."""
    rank, _ = P.rank_and_size()
    model = two()
    opt = zf.attach(model, P.pipe_of(stage, zf.sgd(0.1)), in_backward=in_backward)
    found, seen = [], model.w.weight
    seen.register_post_accumulate_grad_hook(lambda p: found.append(type(p.grad).__name__))
    found.append(type(seen.grad).__name__)
    model(rows(0, rank)).square().mean().backward()
    found.append(type(seen.grad).__name__)
    told = said(lambda: edit(model, opt))
    opt.step()
    found.append(type(seen.grad).__name__)
    model.zero_grad()
    found.append(type(seen.grad).__name__)
    opt.detach()
    return found, told


# With `in_backward` nothing of the last step is added to those of the next, and torch has nothing to clear.
LEAVING = {(0, False): "GoneGradient", (2, False): "GoneGradient", (0, True): "NoneType", (3, True): "NoneType"}


def looked_for_everywhere():
    cells = (*LEAVING, (3, False))
    return {(*cell, e.__name__): looked_for(*cell, e) for cell in cells for e in (sam, nothing, trained_as_ever)}


def test_who_looks_for_a_gradient_that_has_left_finds_one_without_numbers():
    alone = {(0, True, "sam"): looked_for(0, True, sam), (0, False, "sam alone"): looked_for(0, False, sam)}
    for found in (*zf.launch(looked_for_everywhere, 2, timeout=limit()), alone):
        for (stage, in_backward, edit), (types, told) in found.items():
            after = LEAVING.get((stage, in_backward))
            if after is not None and edit != "sam alone":
                assert types == ["NoneType", "GoneGradient", "GoneGradient", after, "NoneType"], (stage, in_backward)
                assert ("mul_ with p.grad of the parameter w.weight, which has no" in str(told)) == (edit == "sam")
            else:
                assert "GoneGradient" not in types and not isinstance(told, str), (stage, in_backward, edit, told)


# -- models that are dropped ------------------------------------------------------------------------------------------


def dropped(stage, in_backward):
    model = two()
    opt = zf.attach(model, P.pipe_of(stage, zf.adamw(0.1)), in_backward=in_backward)
    model(rows(0, P.rank_and_size()[0])).sum().backward()
    opt.step()
    opt.zero_grad()
    return weakref.ref(model)


def dropped_on_ranks():
    """A cell of a notebook that is run again: its first model goes, though nobody has detached it."""
    models = [dropped(stage, in_backward) for stage in P.STAGES for in_backward in (False, True) if stage != 1]
    gc.collect()
    return [model() is not None for model in models]


def test_a_model_that_is_dropped_is_freed():
    for alive in zf.launch(dropped_on_ranks, 2, timeout=limit()):
        assert alive == [False] * 6
    assert not any(dropped_on_ranks())
