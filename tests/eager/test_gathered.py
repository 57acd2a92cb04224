"""Inside of `opt.gathered()` on ranks: it may be entered again, and what would be undone at its end is an error."""

import pytest
import torch
from time_limits import limit
from torch import nn

import zerofn as zf
from zerofn.extend import Transform, View, as_it_is

X = torch.linspace(-1, 1, 12).view(2, 6)
REFUSED = {
    "step": lambda opt, saved: opt.step(),
    "detach": lambda opt, saved: opt.detach(),
    "load_state_dict": lambda opt, saved: opt.load_state_dict(saved),
    "load_state": lambda opt, saved: opt.load_state(opt.state),
    "averaged": lambda opt, saved: opt.averaged().__enter__(),
}


def attached():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    tx = zf.chain(zf.shard(), zf.clip_by_global_norm(1.0), zf.sgd(0.1), zf.ema(0.5))
    return model, zf.attach(model, tx)


def entered_twice():
    model, opt = attached()
    outside = model(X)
    with opt.gathered():
        with torch.no_grad():
            model[0].bias.add_(1)
        with opt.gathered():
            inner = model(X)
            with torch.no_grad():
                model[2].bias.add_(1)
        again = model(X)
    after = model(X)
    return [x.detach().tolist() for x in (outside, inner, again, after)]


def refused():
    model, opt = attached()
    saved, told = opt.state_dict(), {}
    for name, act in REFUSED.items():
        model(X).square().mean().backward()
        before = model(X)
        with opt.gathered():
            try:
                act(opt, saved)
            except RuntimeError as error:
                told[name] = str(error)
        assert torch.equal(model(X), before), name
        opt.step()
        opt.zero_grad()
    return told, opt.global_steps


def failed():
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    before = [(p.shape, type(p), p.detach().clone()) for p in model.parameters()]
    tx = zf.chain(zf.shard(), zf.precision(store_dtype=torch.float64), zf.clip_by_global_norm(1.0), zf.sgd(0.1))
    with pytest.raises(ValueError, match="attach without in_backward"):
        zf.attach(model, tx, in_backward=True)
    now = [(p.shape, type(p), p.detach()) for p in model.parameters()]
    return all(
        a[:2] == b[:2] and a[2].dtype == b[2].dtype and torch.equal(a[2], b[2])
        for a, b in zip(before, now, strict=True)
    )


def programs():
    return entered_twice(), refused(), failed()


@pytest.fixture(scope="module")
def ranks():
    return zf.launch(programs, 2, timeout=limit())


def test_it_may_be_entered_again(ranks):
    for (outside, inner, again, after), *_ in ranks:
        assert outside != inner and inner != again and again == after


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_undone_at_its_end_is_refused(ranks, name):
    for _, (told, steps), _ in ranks:
        assert f"opt.{name}() inside of `with opt.gathered():`" in told[name]
        assert steps == len(REFUSED)


def test_a_model_that_cannot_be_attached_stays_as_it_was(ranks):
    assert all(same for *_, same in ranks)


WRITTEN = {
    "shard": lambda: (zf.shard(),),
    "shard, masters": lambda: (zf.shard(), zf.precision(param_dtype=torch.bfloat16)),
    "reduce_scatter": lambda: (zf.reduce_scatter(),),
    "all_reduce, masters": lambda: (zf.all_reduce(), zf.precision(param_dtype=torch.bfloat16)),
    "precision": lambda: (zf.precision(param_dtype=torch.bfloat16),),
}


def left(stage, error):
    """What is stored after a write inside that an error, or none, leaves; and after a step behind it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    opt = zf.attach(model, zf.chain(*WRITTEN[stage](), zf.adamw(0.1)))
    try:
        with opt.gathered():
            with torch.no_grad():
                model[0].bias.fill_(7.0)
                model[2].weight[1] = 0.5
            if error == "a gradient":
                model(X).float().sum().backward()
            if error:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert error
    found = []
    for _ in range(2):
        opt.zero_grad()
        found += [x.tolist() for x in zf.full_params(opt.tx, opt.state).values()]
        found.append(model(X).float().tolist())
        model(X).float().square().mean().backward()
        opt.step()
    return found


def writes_kept(stages, errors):
    return [[left(stage, error) for error in errors] for stage in stages]


def test_what_is_written_is_stored_by_an_exception_too():
    """At every stage, as where parameters are whole; the exception is the one that was raised."""
    over_ranks = [stage for stage in WRITTEN if stage != "precision"]
    ranks = zf.launch(writes_kept, 2, over_ranks, (None, "after the write"), timeout=limit())
    for found in (*ranks, writes_kept(list(WRITTEN), (None, "after the write", "a gradient"))):
        for plain, *others in found:
            assert plain[1] == [7.0] * 5 and plain[2][1] == [0.5] * 5
            assert all(other == plain for other in others)


def differentiated(stages):
    """Gradients and a second derivative of this rank's own loss, by parameters as they are inside."""
    found = []
    for stage in stages:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        opt = zf.attach(model, zf.chain(*stage, zf.sgd(0.1)))
        with opt.gathered():
            params = list(model.parameters())
            grads = torch.autograd.grad(model(X).square().mean(), params, create_graph=True)
            twice = torch.autograd.grad(sum(g.square().sum() for g in grads), params)
        found.append([x.detach().clone() for x in (*grads, *twice)])
        told = ""
        try:
            with opt.gathered():
                model(X).square().mean().backward()
        except RuntimeError as error:
            told = str(error)
        opt.zero_grad()
        assert (told != "") == (stage == [zf.shard()])
        assert not told or "the backward outside of it; torch.autograd.grad(loss, parameters) inside" in told
    return found


def test_a_model_is_differentiated_inside_as_a_plain_one():
    found = zf.launch(differentiated, 2, [[], [zf.reduce_scatter()], [zf.shard()]], timeout=limit())
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    params = list(plain.parameters())
    grads = torch.autograd.grad(plain(X).square().mean(), params, create_graph=True)
    twice = torch.autograd.grad(sum(g.square().sum() for g in grads), params)
    for of_stage in (x for of_rank in found for x in of_rank):
        for x, expected in zip(of_stage, (*grads, *twice), strict=True):
            assert torch.equal(x, expected)


def half():
    view = View(view=lambda x, leaf: x * 0.5, pull=lambda g, leaf: g * 0.5, store=lambda x, leaf: x * 2)
    return Transform("half", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is)


def called(reductions):
    """What the model gives outside and inside, wherever a view of one's own stands beside a cast."""
    found = {}
    for reduction in reductions:
        cast = zf.precision(param_dtype=torch.bfloat16)
        for where, parts in {"in front": [half(), reduction, cast], "behind": [reduction, half(), cast]}.items():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
            opt = zf.attach(model, zf.chain(*parts, zf.sgd(0.1)))
            outside = model(X).detach()
            with opt.gathered():
                found[f"{reduction.name}, {where}"] = outside, model(X).detach()
    return found


def test_a_model_computes_inside_in_the_dtype_of_outside_behind_a_view_of_ones_own():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    expected = plain.bfloat16()(X.bfloat16()).detach()
    reductions = [zf.all_reduce(), zf.reduce_scatter(), zf.shard()]
    for found in zf.launch(called, 2, reductions, timeout=limit()):
        assert len(found) == 6
        for where, (outside, inside) in found.items():
            # Bitwise: what is stored is twice what a plain model has, and half of it is seen.
            assert torch.equal(outside, expected) and torch.equal(inside, expected), where
