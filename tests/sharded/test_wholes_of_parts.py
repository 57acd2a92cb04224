"""Parts are gathered by all ranks that have come to the same line; a rank that has not, and all others, are told."""

import re

import pytest
import rank_programs as P
import torch
from outside_programs import RIGHT, attached_run, loss_of, make, rows
from small_parts import said
from time_limits import limit

import zerofn as zf

# -- who asks -------------------------------------------------------------------------------------------------------


def gradient(rank=0):
    model = make()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    loss_of(model, rank).backward()
    return model, opt


def alone_before_a_step(model, opt, rank):
    """A log on one rank, between backward and step."""
    if rank == 0:
        model.pair.weight.grad.norm()


def others(model, opt, rank):
    return [model.pair.weight, model.odd.weight][rank].grad.norm()


def other_functions(model, opt, rank):
    return model.pair.weight.grad.norm() if rank else model.pair.weight.grad.mean()


def gradient_and_value(model, opt, rank):
    return (model.pair.weight.grad if rank else model.pair.weight.data).norm()


def other_gradients(model, opt, rank):
    """One rank has gone through another backward, of which the other one has its part meanwhile."""
    grads = [p.grad for p in model.parameters()]
    if rank == 0:
        loss_of(model, 1).backward()
        return None
    return grads[0].norm()


def gradients(model):
    """This rank's parts by themselves."""
    return [p.grad.to_local().clone() for p in model.parameters()]


def told(programs):
    rank, _ = P.rank_and_size()
    found = []
    for program in programs:
        model, opt = gradient()
        before = gradients(model)
        found.append(str(said(lambda p=program, m=model, o=opt: p(m, o, rank))))
        # The ranks go on together.
        if program is not other_gradients:
            assert all(map(torch.equal, before, gradients(model)))
        opt.step()
        opt.zero_grad()
        loss_of(model).backward()
        assert model.pair.weight.grad.norm() > 0
        opt.step()
        opt.detach()
    return found


ALL_TOLD = [others, other_functions, gradient_and_value]


def test_ranks_that_ask_for_different_ones_are_told_and_go_on():
    for found in zf.launch(told, 2, ALL_TOLD, timeout=limit()):
        for program, message in zip(ALL_TOLD, found, strict=True):
            assert re.search(r"not all ranks ask for(.|\n)*ranks \[0, 1\] have come to different ones", message), (
                program,
                message,
            )


def test_a_rank_that_asks_alone_before_a_step_is_told_and_goes_on():
    alone, other = zf.launch(told, 2, [alone_before_a_step, other_gradients], timeout=limit())
    assert re.search(
        r"norm of p.grad of the sharded parameter pair.weight(.|\n)*ranks \[0\] ask for it, and ranks \[1\]", alone[0]
    )
    assert other[0] == "None"
    assert re.search(r"ranks \[1\] ask for it, and ranks \[0\] are at opt.step", other[1]), other


def asks_after_all_have_gone():
    rank, _ = P.rank_and_size()
    model, _ = gradient()
    if rank == 0:
        model.gain.grad.norm()


def test_a_rank_that_asks_last_is_told():
    with pytest.raises(RuntimeError, match="rank 0"):
        zf.launch(asks_after_all_have_gone, 2, timeout=limit())


def unequal_work():
    """Ranks differ in what they do before they come to the same line."""
    rank, _ = P.rank_and_size()
    model, opt = gradient()
    found = []
    for step in range(3):
        if rank == step % 2:
            # An evaluation on one rank, and its number.
            with torch.no_grad():
                loss_of(model, 5).item()
                model.odd.weight.norm()
        found.append(model.pair.weight.grad.norm().item())
        opt.step()
        opt.zero_grad()
        loss_of(model, step).backward()
        if rank == 0 and step < 2:
            model(rows())
    opt.detach()
    return found


def test_a_rank_that_has_more_to_do_before_is_waited_for():
    model = make()
    opt = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model).backward()
    want = []
    for step in range(3):
        want.append(model.pair.weight.grad.norm().item())
        opt.step()
        opt.zero_grad()
        loss_of(model, step).backward()
    for found in zf.launch(unequal_work, 2, timeout=limit()):
        assert found == pytest.approx(want, rel=1e-12)


def left():
    model, opt = gradient()
    g = model.pair.weight.grad
    with opt.gathered():
        inside = g.norm().item(), model.pair.weight.grad.norm().item(), model.pair.weight.data.norm().item()
        assert model.pair.weight.shape == (2, 4)
    opt.detach()
    return inside, str(said(lambda: g.norm()))


def test_parts_in_gathered_and_after_detach():
    model = make()
    loss_of(model).backward()
    norm = model.pair.weight.grad.norm().item()
    for inside, message in zf.launch(left, 2, timeout=limit()):
        assert inside == pytest.approx([norm, norm, model.pair.weight.norm().item()], rel=1e-13)
        assert re.search(r"norm of p.grad(.|\n)*after opt.detach\(\)", message)


# -- derivatives ----------------------------------------------------------------------------------------------------


def penalised(model, rank):
    """A loss in which the norm of the mean gradient is weighted by what only this rank has."""
    loss = loss_of(model, rank)
    gs = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss, gs


def penalties():
    rank, _ = P.rank_and_size()
    model = make()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.scale_loss(16.0), zf.sgd(0.1)))
    loss, gs = penalised(model, rank)
    norm = torch.stack([g.norm() for g in gs]).norm()
    (loss * norm + (rank + 1) * gs[0].exp().mean() * loss).backward()
    pairs = zip(model.parameters(), make().parameters(), strict=True)
    # A tensor of another shape has the whole beside it.
    whole = [p.grad + torch.zeros((1, *q.shape), dtype=q.dtype) for p, q in pairs]
    opt.detach()
    return norm.item(), whole


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_derivatives_of_wholes_count_once(size):
    model = make()
    losses = [loss_of(model, rank) for rank in range(size)]
    params = list(model.parameters())
    gs = torch.autograd.grad(sum(losses) / size, params, create_graph=True)
    norm = torch.stack([g.norm() for g in gs]).norm()
    total = sum(loss * norm + (rank + 1) * gs[0].exp().mean() * loss for rank, loss in enumerate(losses)) / size
    want = torch.autograd.grad(total, params)
    for found, grads in zf.launch(penalties, size, timeout=limit()):
        assert found == pytest.approx(norm.item(), rel=1e-12)
        for got, expected in zip(grads, want, strict=True):
            # float64, sums over ranks in another order.
            torch.testing.assert_close(got[0], expected, rtol=1e-10, atol=1e-13)


# -- other pipelines ------------------------------------------------------------------------------------------------

PIPES = {
    "accumulated": lambda *first: zf.chain(*first, zf.accumulate(2), zf.sgd(0.1)),
    "scaled, in fp32": lambda *first: zf.chain(
        *first, zf.precision(param_dtype=torch.float32), zf.scale_loss(64.0), zf.sgd(0.1)
    ),
}
CHOSEN = {"accumulated": ("clipped", "flat_numbers"), "scaled, in fp32": ("two_losses", "sharpness")}


def run(pipe, first):
    chosen = [program for program in RIGHT if program.__name__ in CHOSEN[pipe]]
    return {program.__name__: attached_run(program, PIPES[pipe](*first())) for program in chosen}


def on_ranks():
    return {pipe: run(pipe, lambda: (zf.shard(),)) for pipe in PIPES}


def test_other_pipelines():
    for found in zf.launch(on_ranks, 2, timeout=limit()):
        for pipe in PIPES:
            want = run(pipe, tuple)
            for name in CHOSEN[pipe]:
                # What was computed in fp32.
                near = {"rtol": 1e-11, "atol": 1e-13} if pipe == "accumulated" else {"rtol": 1e-4, "atol": 1e-5}
                torch.testing.assert_close(found[pipe][name], want[name], **near, msg=lambda m, n=name: f"{n}: {m}")
