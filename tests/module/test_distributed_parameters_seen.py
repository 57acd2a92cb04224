"""Parameters of tensor parallelism that are printed, copied, hooked, or come to attach with gradients."""

import copy

import tensor_parallel as T
import torch
from time_limits import limit
from torch.distributed.tensor import DTensor

import zerofn as zf

# Sums over ranks and over columns are made in another order.
BOUND = 1e-12


def loss(model):
    x, y = T.batch(0)
    return ((model(x) - y) ** 2).mean()


def attached(tp, *stage, model=None):
    model = T.cut(tp) if model is None else model
    return model, zf.attach(model, zf.chain(*stage, zf.sgd(0.1)))


def seen():
    dp, tp = T.axes(1, 2)
    model, opt = attached(tp, zf.all_reduce(dp))
    assert "DTensor(local_tensor=tensor([" in repr(model.gain)
    assert "device_mesh" in f"{model.gain}"
    twin = copy.deepcopy(model)
    assert isinstance(twin.gain, DTensor)
    with torch.no_grad():
        twin.gain.mul_(2)
    model.gain.register_hook(lambda g: g * 0)
    loss(model).backward()
    opt.step()
    opt.detach()
    return T.wholes(model)["gain"], T.wholes(twin)["gain"]


def test_they_are_printed_copied_and_hooked_as_dtensors():
    for mine, copied in zf.launch(seen, 2, timeout=limit()):
        start = T.wholes(T.plain())["gain"]
        assert torch.equal(mine, start) and torch.equal(copied, 2 * start)


def with_gradients():
    dp, tp = T.axes(1, 2)
    model = T.cut(tp)
    loss(model).backward()
    loss(model).backward()
    _, opt = attached(tp, zf.all_reduce(dp), model=model)
    assert isinstance(model.gain.grad, DTensor)
    opt.step()
    opt.detach()
    return T.wholes(model)


def test_gradients_from_before_attach_are_stepped_with():
    model = T.plain()
    (2 * loss(model)).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    for got in zf.launch(with_gradients, 2, timeout=limit()):
        assert T.difference(got, T.wholes(model)) < BOUND


def stored_in_fp32():
    dp, tp = T.axes(1, 2)
    model = T.cut(tp)
    start = T.wholes(model)
    opt = zf.attach(model, zf.chain(zf.precision(store_dtype=torch.float32), zf.all_reduce(dp), zf.sgd(0.1)))
    opt.detach()
    kinds = {(p.dtype, isinstance(p, DTensor)) for p in (model.gain, model.blocks[0].up.weight)}
    return kinds, all(torch.equal(p, start[path].float()) for path, p in T.wholes(model).items())


def test_detached_they_have_the_stored_dtype():
    assert zf.launch(stored_in_fp32, 2, timeout=limit()) == [({(torch.float32, True)}, True)] * 2


def over_both_axes():
    dp, tp = T.axes(2, 2)
    model, opt = attached(tp, zf.shard(dp))
    given = []
    model.gain.register_hook(lambda g: given.append(tuple(g.shape)) or g * 0)
    for wrong in (lambda: copy.deepcopy(model), lambda: model.gain.mul_(2)):
        try:
            with torch.no_grad():
                wrong()
        except RuntimeError as error:
            assert "gain" in str(error) and "with opt.gathered()" in str(error), error
        else:
            raise AssertionError("it was taken")
    loss(model).backward()
    opt.step()
    with opt.gathered():
        twin = copy.deepcopy(model)
    assert isinstance(twin.gain, DTensor)
    opt.detach()
    return given, T.wholes(model), T.wholes(twin)


def test_under_shard_a_hook_is_given_a_part_and_copies_are_made_of_gathered_ones():
    model = T.plain()
    model.gain.register_hook(lambda g: g * 0)
    loss(model).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    for given, mine, copied in zf.launch(over_both_axes, 4, timeout=limit()):
        assert given == [(3,)]
        for got in (mine, copied):
            assert T.difference({**got, "gain": 0}, {p: x for p, x in T.wholes(model).items() if p != "gain"}) < BOUND
            assert torch.equal(got["gain"], T.wholes(T.plain())["gain"])
