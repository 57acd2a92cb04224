"""What sharded parameters and gradients say of their shapes, and what is computed from that: as in one process."""

import re

import pytest
import torch
from outside_programs import attached_run, loss_of, make, plain_run
from rank_programs import rank_and_size
from shape_programs import PROGRAMS
from small_parts import said
from time_limits import limit

import zerofn as zf

# `p.data = x`, which is refused where a parameter is a plain tensor.
BY_DATA = ("reshaped", "taken_apart")


def attached(*first):
    found = {}
    for name, program in PROGRAMS.items():
        if first or name not in BY_DATA:
            found[name] = attached_run(program, zf.chain(*first, zf.sgd(0.1)))
    return found


def sharded():
    return attached(zf.shard())


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_is_as_in_one_process(ranks):
    before = [p.detach() for p in make().parameters()]
    want = {name: plain_run(program) for name, program in PROGRAMS.items()}
    for found in zf.launch(sharded, ranks, timeout=limit()) if ranks > 1 else [attached()]:
        for name, (value, after) in found.items():
            # float64, sums over ranks in another order.
            near = {"rtol": 1e-11, "atol": 1e-13, "msg": lambda m, name=name: f"{name}: {m}"}
            torch.testing.assert_close(value, want[name][0], **near)
            for old, new, expected in zip(before, after, want[name][1], strict=True):
                torch.testing.assert_close(new - old, expected - old, **near)
            assert not all(map(torch.equal, before, after)), name


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
