"""Everything that is done with sharded parameters and gradients outside of forward: right, or refused by path.

Each program runs on ranks under `shard` and, where it is to be right, on a plain model in one process. Ranks have
the same rows, so that the mean over ranks is the gradient of one.
"""

import io
import itertools
import re

import numpy as np
import pytest
import torch
from outside_programs import RIGHT, Both, attached_run, loss_of, make, plain_run
from rank_programs import rank_and_size
from shape_programs import PROGRAMS
from small_parts import said
from time_limits import limit
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

import zerofn as zf

# What changes nothing.
LOOKING = ("numbers_of_parameters", "numbers_of_gradients", "products_of_hessians")


ALL = {program.__name__: program for program in RIGHT} | PROGRAMS


def runs(*first):
    return {name: attached_run(program, zf.chain(*first, zf.sgd(0.1))) for name, program in ALL.items()}


def sharded():
    return runs(zf.shard())


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_is_right(ranks):
    before = [p.detach() for p in make().parameters()]
    want = {name: plain_run(program) for name, program in ALL.items()}
    for found in zf.launch(sharded, ranks, timeout=limit()):
        for name, (value, after) in found.items():
            # float64, sums over ranks in another order.
            near = {"rtol": 1e-11, "atol": 1e-13, "msg": lambda m, name=name: f"{name}: {m}"}
            torch.testing.assert_close(value, want[name][0], **near)
            for old, new, expected in zip(before, after, want[name][1], strict=True):
                torch.testing.assert_close(new - old, expected - old, **near)
            assert name in LOOKING or not all(map(torch.equal, before, after)), name


# -- what is refused ----------------------------------------------------------------------------------------

PAIR = r"of the sharded parameter pair.weight(.|\n)*"
IN_BACKWARD = PAIR + r"in the middle of\n(.|\n)*grad_norm(.|\n)*clip_by_global_norm(.|\n)*to_local"
SAVED = r"saving (.|\n)*opt.gathered\(\)(.|\n)*zf.save"
LOST = r"of a view of what was gathered(.|\n)*p.grad\[index\] = new"


def by_a_hook(fn):
    def mistake(b):
        handle = b.w.register_hook(fn)
        try:
            loss_of(b.model).backward()
        finally:
            handle.remove()

    return mistake


def after_its_gradient(b):
    handle = b.w.register_post_accumulate_grad_hook(lambda p: clip_grad_norm_(p, 1.0))
    try:
        loss_of(b.model).backward()
    finally:
        handle.remove()


REFUSED = {
    "noise of a part": (lambda b: b.w.data.add_(torch.ones(1, 1, 2, 4)), r"shape"),
    "by a hook": (by_a_hook(lambda g: g / g.norm()), IN_BACKWARD),
    "another whole in a hook": (by_a_hook(lambda g: g * torch.ones(3, 2, 4)), IN_BACKWARD),
    "a product in a hook": (by_a_hook(lambda g: g.T @ g), IN_BACKWARD),
    "an index in a hook": (by_a_hook(lambda g: g[0]), IN_BACKWARD),
    "after its gradient": (after_its_gradient, IN_BACKWARD),
    "average": (lambda b: AveragedModel(b.model), r"copy.deepcopy\(model\)(.|\n)*opt.gathered\(\)"),
    "a row in place": (lambda b: b.w.grad[0].zero_(), LOST),
    "a column in place": (lambda b: b.w.grad.T[0].mul_(2), LOST),
    "added to": (lambda b: b.w.grad[0].__iadd__(1), LOST),
    "rows in place": (lambda b: [x.mul_(2) for x in b.w.data], LOST),
    "in place by out": (lambda b: torch.add(b.w.grad[0], 1.0, out=b.w.grad[0]), LOST),
    "pickled": (lambda b: torch.save({"w": b.w.data}, io.BytesIO()), SAVED),
    "pickled state": (lambda b: torch.save(b.model.state_dict(), io.BytesIO()), SAVED),
    "by NumPy": (lambda b: b.w.detach().numpy(), SAVED),
    "as an array": (lambda b: np.asarray(b.w.grad), SAVED),
    "another shape": (lambda b: setattr(b.w, "data", torch.ones(4, 2)), r"p.data = x of shape \(4, 2\)(.|\n)*\(2, 4\)"),
    "a transpose in place": (lambda b: b.w.data.t_(), PAIR),
    "a view in place": (lambda b: b.w.view(-1)[0].zero_(), r"writes into a parameter(.|\n)*opt.gathered\(\)"),
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
        (g,) = torch.autograd.grad(model(torch.ones(5, 3, dtype=torch.float64)).square().mean(), p)
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


# -- sizes, and what is made of trees ----------------------------------------


def alone():
    """What one rank asks of sizes and prints, without the others."""
    rank, size = rank_and_size()
    model = make()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    loss_of(model).backward()
    p, gain = model.odd.weight, model.gain
    found = []
    if rank == size - 1:
        found = [repr(p), str(p.grad), f"{gain}", f"{gain.grad}", repr(p.data)]
        found += [p.numel(), gain.grad.ndim, p.is_contiguous(), tuple(p.to_local().shape), tuple(gain.to_local().shape)]
        assert p.to_local().data_ptr() == p.data.to_local().data_ptr() and p.to_local().requires_grad
    opt.step()
    opt.detach()
    return found


def test_one_rank_may_look_alone():
    *none, found = zf.launch(alone, 3, timeout=limit())
    assert none == [[], []]
    of = r"of the sharded parameter odd.weight, shape=\(3, 2\), S(hard)?\(.*0\), of which this rank has elements 4 to 5"
    assert re.match(
        rf"Parameter containing:\nFace\(the values {of}:\ntensor\(\[.*, .*\], dtype=torch.float64\)\)", found[0]
    ), found[0]
    assert re.match(rf"Face\(p.grad {of}", found[1]) and re.match(rf"Face\(p.data {of}", found[4]), found
    assert "shape=()" in found[2] and "this rank has none" in found[2] and "gain" in found[3]
    assert found[5:] == [6, 0, True, (1, 2), ()]


def numbers():
    """Numbers of one element are printed in a format, which gathers them."""
    model = make()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    loss_of(model).backward()
    found = f"{model.gain.grad:.6f}", str(said(lambda: f"{model.gain:.6f}")), str(said(lambda: len(model.gain.grad)))
    opt.detach()
    return found


def test_a_number_in_a_format():
    model = make()
    loss_of(model).backward()
    for number, of_parameter, length in zf.launch(numbers, 2, timeout=limit()):
        assert number == f"{model.gain.grad:.6f}"
        # As of any parameter of torch's.
        assert of_parameter.startswith("TypeError: unsupported format string")
        assert length == "TypeError: len() of a 0-d tensor"


def by_functions():
    """Gradients and parameters of an attached model in the functions of trees."""
    model = make()
    opt = zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    loss_of(model).backward()
    of = lambda f: {n: f(p) for n, p in model.named_parameters()}  # noqa: E731
    trees = [of(lambda p: p.grad), of(lambda p: p.data), of(lambda p: p)]
    norms = [zf.global_norm(tree, opt.tx, opt.state) for tree in trees]
    norms += [zf.global_norm(tree) for tree in trees]
    fulls = [zf.gather(opt.tx, opt.state, tree) for tree in trees]
    state, _ = zf.update(opt.tx, trees[0], opt.state)
    after = zf.full_params(opt.tx, state)
    model.zero_grad()
    norms[2].backward()
    fulls.append(of(lambda p: p.grad.full_tensor()))
    opt.detach()
    return [x.item() for x in norms], fulls, after


def test_functions_of_trees_take_parts():
    model = make()
    params = dict(model.named_parameters())
    loss_of(model).backward()
    grads = {n: p.grad.clone() for n, p in params.items()}
    norms = [zf.global_norm(x) for x in (grads, params, params)]
    model.zero_grad()
    norms[2].backward()
    for found, fulls, after in zf.launch(by_functions, 3, timeout=limit()):
        assert found == pytest.approx([x.item() for x in (*norms, *norms)], rel=1e-13)
        for full, want in zip(fulls, (grads, params, params, {n: p.grad for n, p in params.items()}), strict=True):
            torch.testing.assert_close(dict(full), want, rtol=1e-12, atol=1e-14)
        for n, p in params.items():
            torch.testing.assert_close(after[n], p.detach() - 0.1 * grads[n], rtol=1e-13, atol=0.0)
