"""Hooks on parameters are given, under `shard`, this rank's rows of the mean over ranks, as FSDP2 gives them.

At all other stages, as under DistributedDataParallel, they are given this rank's own gradient, and the mean is taken of
what they return. What is linear makes the same step of both.
"""

import pytest
import rank_programs as P
import torch
from small_parts import rows, said, two
from time_limits import limit
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import zerofn as zf

WITHIN = 0.05


# -- what is linear ----------------------------------------------------------------------------------------------


def times(g, p):
    return 2 * g.neg() / -3


def decayed(g, p):
    return torch.add(g, p.detach(), alpha=0.1)


def by_the_parameter(g, p):
    return torch.addcmul(g, g, p.detach(), value=0.5).addcdiv(g, p.detach() + 7) + p.detach() * g


def averaged(g, p):
    return torch.lerp(g, p.detach(), 0.25)


def by_signs_of_the_parameter(g, p):
    negative = p.detach() < 0
    return torch.where(negative, 2 * g, g).masked_fill(p.detach() > 0.3, 0.0)


def in_place(g, p):
    g.mul_(3).sub_(p.detach(), alpha=0.5)


def there_and_back(g, p):
    return (g.expand_as(g) * 2).clone().view_as(g)


def in_a_list(g, p):
    (doubled,) = torch._foreach_mul([g], 2.0)
    torch._foreach_add_([doubled], [g])
    return doubled


def through_a_buffer(g, p, buffer=None):
    buffer = torch.zeros_like(p.detach())
    buffer[:] = g
    return buffer.mul_(0.9).add_(g).to(torch.float64)


def into_out(g, p):
    out = torch.empty_like(p.detach())
    return torch.mul(g, 3.0, out=out)


def full(g):
    return torch.arange(g.numel(), dtype=torch.float64).view(g.shape) % 3


def with_a_mask(g, p):
    return g * full(g) + full(g)[:1] * g


def where_a_mask_says(g, p):
    return torch.where(full(g) > 0, g, 0.0).masked_fill(full(g) > 1, 0.5)


def with_masks_in_lists(g, p):
    (masked,) = torch._foreach_mul([g], [full(g)])
    return torch.addcmul(masked, g, full(g) - 1, value=0.5)


LINEAR = (
    with_a_mask,
    where_a_mask_says,
    with_masks_in_lists,
    times,
    decayed,
    by_the_parameter,
    averaged,
    by_signs_of_the_parameter,
    in_place,
    there_and_back,
    in_a_list,
    through_a_buffer,
    into_out,
)


# -- what is not -------------------------------------------------------------------------------------------------


def clamped(g, p):
    return g.clamp(-WITHIN, WITHIN)


def clamped_in_place(g, p):
    g.clamp_(-WITHIN, WITHIN)


def signs(g, p):
    return g.sign()


def squared(g, p):
    return g * g


def of_powers(g, p):
    return g**3


def inverted(g, p):
    return 1e-4 / (g + 1)


def over_its_size(g, p):
    return g / (g.abs() + 1)


def soft(g, p):
    return torch.where(g > 0, g, 0.5 * g)


def rounded(g, p):
    return torch.div(g, WITHIN, rounding_mode="floor")


def of_a_buffer(g, p):
    return torch.zeros_like(p.detach()).add_(g).tanh()


def in_a_list_of_squares(g, p):
    return torch._foreach_mul([g], [g])[0]


def sorts(g, p):
    return g.to(torch.int64).to(g.dtype)


OTHERS = (
    clamped,
    clamped_in_place,
    signs,
    squared,
    of_powers,
    inverted,
    over_its_size,
    soft,
    rounded,
    of_a_buffer,
    in_a_list_of_squares,
    sorts,
)


def on_tensor(module, change):
    return module.weight.register_hook(lambda g: change(g, module.weight))


def on_accumulated(module, change):
    def hook(p):
        changed = change(p.grad, p)
        if changed is not None:
            p.grad.copy_(changed)

    return module.weight.register_post_accumulate_grad_hook(hook)


def moved(stage, change, register, before):
    """What one step with a hook moves, or what is said; and the step after it, without the hook."""
    rank, _ = P.rank_and_size()
    model = two()
    start = model.w.weight.detach().clone()
    handle = register(model.w, change) if before else None
    opt = zf.attach(model, P.pipe_of(stage, zf.sgd(1.0)))
    handle = handle or register(model.w, change)
    told = said(lambda: model(rows(0, rank)).square().sum().backward())
    if isinstance(told, str):
        handle.remove()
        opt.zero_grad()
        model(rows(0, rank)).square().sum().backward()
    opt.step()
    opt.detach()
    return told, model.w.weight.detach() - start


def cells():
    """A hook after `zf.attach` finds `None` where gradients have left by then."""
    return [
        (stage, register, before)
        for stage in P.STAGES
        for register, before in ((on_tensor, True), (on_tensor, False), (on_accumulated, True))
    ] + [(3, on_accumulated, False)]


def chosen(hooks, every):
    """Each hook with each `every`-th of the cells, from another one on; and each cell with some hook."""
    return [(f, *cell) for i, f in enumerate(hooks) for cell in cells()[i % every :: every]]


def moved_everywhere(rows):
    return {
        (f.__name__, stage, register.__name__, before): moved(stage, f, register, before)
        for f, stage, register, before in rows
    }


def own_gradients(ranks, name="weight"):
    found = []
    for rank in range(ranks):
        model = two()
        model(rows(0, rank)).square().sum().backward()
        found.append(getattr(model.w, name).grad)
    return found


def of_one(change, g):
    """What the hook makes of a plain gradient."""
    g, p = g.clone(), two().w.weight
    changed = change(g, p)
    return g if changed is None else changed


# One hook of nine in each run of the tests: each is tried in every cell.
RANKS = [(2, 12), *(pytest.param(ranks, 1, marks=pytest.mark.slow) for ranks in (2, 3))]


@pytest.mark.parametrize("ranks, every", RANKS)
@pytest.mark.parametrize("hooks", [LINEAR, OTHERS], ids=["linear", "others"])
def test_a_hook_is_given_the_mean_under_shard_and_each_ranks_own_elsewhere(hooks, ranks, every):
    own, rows = own_gradients(ranks), chosen(hooks, every)
    mean = sum(own) / ranks
    for found in zf.launch(moved_everywhere, ranks, rows, timeout=limit()):
        assert len(found) == len(rows) and {f.__name__ for f, *_ in rows} == {f.__name__ for f in hooks}
        for (name, stage, *where), (told, step) in found.items():
            if (name, stage, where[0]) == ("clamped_in_place", 1, "on_accumulated"):
                # A gradient that is reduced later is not clipped before, in a hook either.
                assert "p.grad.clamp_(...) of the parameter w.weight, as torch's clipping does" in told
                continue
            assert told is None, (name, stage, where, told)
            of_mean = of_one(globals()[name], mean)
            of_own = sum(of_one(globals()[name], g) for g in own) / ranks
            assert (of_own - mean).abs().max() > 1e-2, f"{name} changes nothing"
            # That of others is another one.
            assert (hooks is OTHERS) == bool((of_own - of_mean).abs().max() > 1e-5), name
            want = of_mean if stage == 3 else of_own
            message = lambda m, c=(name, stage, where): f"{c}: {m}"  # noqa: E731
            # float64, sums over ranks in another order.
            torch.testing.assert_close(step, -want, rtol=1e-10, atol=1e-13, msg=message)


def optimizers_in_hooks(make):
    """What torch's optimizers, one for each parameter, make of it within backward."""
    rank, _ = P.rank_and_size()
    model = two()
    zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.0)))
    optimizers = {p: make([p]) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: (optimizers[p].step(), optimizers[p].zero_grad()))
    for i in range(3):
        model(rows(i, rank)).square().sum().backward()
    return [p.full_tensor() for p in model.parameters()]


def adam(params):
    return torch.optim.Adam(params, lr=0.1)


def test_optimizers_of_torch_step_in_hooks_on_the_mean():
    plain = two()
    other = adam(plain.parameters())
    for i in range(3):
        sum(plain(rows(i, rank)).square().sum() / 2 for rank in range(2)).backward()
        other.step()
        other.zero_grad()
    for found in zf.launch(optimizers_in_hooks, 2, adam, timeout=limit()):
        for p, q in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=1e-9, atol=1e-12)


# -- what a hook keeps -------------------------------------------------------------------------------------------


def kept():
    rank, _ = P.rank_and_size()
    model, seen = two(), {}
    model.w.bias.register_hook(lambda g: seen.update(early=g))
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    w = model.w.weight
    total = torch.zeros_like(w.detach())

    def keeps(g):
        seen.update(g=g.clone())
        total.add_(g.view_as(total))

    w.register_hook(keeps)
    for _ in range(2):
        model(rows(0, rank)).square().sum().backward()
    g = seen["g"]
    made = {
        "norm": g.norm(),
        "sum": g.sum(),
        "abs": g.abs().full_tensor(),
        "joined": torch.cat([g.view(-1), w.grad.view(-1)])[: g.numel()].exp().full_tensor(),
        "a total": total.sign().full_tensor(),
        "early": seen["early"].square().full_tensor(),
        "whole": g.full_tensor(),
        "p.grad": w.grad.abs().full_tensor() / 2,
    }
    local = g.to_local().abs()
    opt.detach()
    return made, local


def test_what_a_hook_keeps_is_the_means():
    own = [own_gradients(2, name) for name in ("weight", "bias")]
    mean, bias = [(a + b) / 2 for a, b in own]
    for rank, (made, local) in enumerate(zf.launch(kept, 2, timeout=limit())):
        want = {
            "norm": mean.norm(),
            "sum": mean.sum(),
            "abs": mean.abs(),
            "joined": mean.view(-1).exp(),
            "a total": mean.sign(),
            "early": bias.square(),
            "whole": mean,
            "p.grad": mean.abs(),
        }
        for name, x in want.items():
            torch.testing.assert_close(made[name], x, rtol=1e-12, atol=1e-15, msg=name)
        torch.testing.assert_close(local, mean.abs()[rank : rank + 1], rtol=1e-12, atol=1e-15)


def before_and_after():
    """Hooks from before `zf.attach` and from after it are given DTensors, and plain gradients after `opt.detach()`."""
    rank, _ = P.rank_and_size()
    model, seen = two(), []
    w = model.w.weight
    w.register_hook(lambda g: seen.append((type(g).__name__, tuple(g.shape))))
    gone = w.register_hook(lambda g: seen.append("gone"))
    for stage in (3, 3, 0):
        opt = zf.attach(model, P.pipe_of(stage, zf.sgd(0.1)))
        gone.remove()
        handle = model.w.weight.register_hook(lambda g: seen.append((type(g).__name__, tuple(g.shape))))
        model(rows(0, rank)).square().sum().backward()
        opt.detach()
        model(rows(0, rank)).square().sum().backward()
        handle.remove()
        model.zero_grad()
    return seen


def test_hooks_from_before_are_told():
    plain, part = ("Tensor", (2, 4)), ("Face", (2, 4))
    for seen in zf.launch(before_and_after, 2, timeout=limit()):
        assert seen == 2 * [part, part, plain, plain] + 4 * [plain]


def on_several():
    rank, _ = P.rank_and_size()
    model, seen = two(), []
    opt = zf.attach(model, P.pipe_of(3, zf.sgd(0.1)))
    first = list(model.parameters())[:2]
    register_multi_grad_hook(first, lambda gs: seen.append([type(g).__name__ for g in gs]))
    get_gradient_edge(first[1]).node.register_hook(lambda new, gs: seen.append("at an edge"))
    first[0].expand_as(first[0]).grad_fn.next_functions[0][0].register_hook(lambda new, gs: seen.append("by hand"))
    register_multi_grad_hook(first, lambda g: seen.append(type(g).__name__), mode="any")
    model(rows(0, rank)).square().sum().backward()
    opt.detach()
    return seen


def test_hooks_on_several_parameters_and_on_the_edges_of_their_graphs_are_called():
    for seen in zf.launch(on_several, 2, timeout=limit()):
        assert len(seen) == 4 and ["Face", "Face"] in seen and {"Face", "at an edge", "by hand"} < set(map(str, seen))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x


class ProductWithSetup(torch.autograd.Function):
    """The same without `ctx` in forward, and with any number of arguments."""

    @staticmethod
    def forward(*args):
        return args[0] @ args[1].T

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    backward = Product.backward


def given_to_a_function(product):
    """What a Function that is given a part says; the change of the weight where it is given a clone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2, bias=False))
    before = model[1].weight.detach().clone()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(1.0)))
    x = torch.linspace(-1, 1, 12).view(2, 6)
    with pytest.raises(RuntimeError, match=r"an autograd.Function that is given .*1.weight"):
        product.apply(model[0](x), model[1].weight)
    product.apply(model[0](x), model[1].weight.clone()).square().mean().backward()
    opt.step()
    opt.detach()
    return model[1].weight.detach() - before


@pytest.mark.parametrize("product", [Product, ProductWithSetup])
def test_a_function_is_given_the_whole_or_refused(product):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2, bias=False))
    x = torch.linspace(-1, 1, 12).view(2, 6)
    Product.apply(model[0](x), model[1].weight).square().mean().backward()
    for change in zf.launch(given_to_a_function, 2, product, timeout=limit()):
        torch.testing.assert_close(change, -model[1].weight.grad, rtol=1e-5, atol=1e-6)  # a sum over ranks in fp32
