"""Functions that write into parts, and whose names do not say so: collectives, custom operators, several outputs."""

import functools

import pytest
import torch
import torch.distributed as dist
from one_launch import one_launch
from time_limits import limit
from torch import nn

import zerofn as zf

ROWS, COLUMNS = 3, 2
FULL = torch.arange(1.0, 1.0 + ROWS * COLUMNS).view(ROWS, COLUMNS)


@torch.library.custom_op("zerofn_tests::scale_rows", mutates_args=("x",))
def scale_rows(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor).add_(torch.arange(len(x))[:, None])


@torch.library.custom_op("zerofn_tests::scale_all", mutates_args=("xs",))
def scale_all(xs: list[torch.Tensor], factor: float) -> None:
    for x in xs:
        x.mul_(factor)


def sorted_into(x):
    torch.sort(FULL.flip(1), dim=1, descending=True, out=(x, torch.zeros(ROWS, COLUMNS, dtype=torch.long)))


def mantissas_into(x):
    torch.frexp(FULL + 0.3, out=(x, torch.zeros(ROWS, COLUMNS, dtype=torch.int32)))


def waited(x):
    dist.all_reduce(x, async_op=True).wait()


def gathered(x):
    out = [torch.zeros(ROWS, COLUMNS) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    x.copy_(sum(out))


# Each with what it makes of a whole, on two ranks that have the same one.
PROGRAMS = {
    "custom": (lambda x: scale_rows(x, 3.0), lambda x: x * 3 + torch.arange(ROWS)[:, None]),
    "custom, of a list": (lambda x: scale_all([x], 3.0), lambda x: x * 3),
    "custom, by its operator": (lambda x: torch.ops.zerofn_tests.scale_all([x], 2.0), lambda x: x * 2),
    "sort": (sorted_into, lambda x: FULL.flip(1).sort(dim=1, descending=True).values),
    "frexp": (mantissas_into, lambda x: torch.frexp(FULL + 0.3).mantissa),
    "all_reduce": (dist.all_reduce, lambda x: x * 2),
    "all_reduce, waited for": (waited, lambda x: x * 2),
    "broadcast": (lambda x: dist.broadcast(x, 1), lambda x: x),
    "all_gather": (gathered, lambda x: x * 2),
}


def parts(name):
    """What a program makes of a gradient, of the data, and of a buffer."""
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    with torch.no_grad():
        model.weight.copy_(FULL)
    zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    # The gradient is 2 * FULL.
    model.weight.square().sum().backward()
    program, _ = PROGRAMS[name]
    program(model.weight.grad)
    program(model.weight.data)
    buffer = torch.zeros_like(model.weight).copy_(FULL)
    program(buffer)
    return [x.full_tensor().detach().clone() for x in (model.weight.grad, model.weight, buffer)]


# Torch before 2.13 tells no subclass of a broadcast.
KNOWN = [name for name in PROGRAMS if name != "broadcast" or torch.__version__ >= "2.13"]


@functools.cache
def on_two_ranks():
    return one_launch(2, parts, [(name,) for name in KNOWN])


@pytest.mark.parametrize("name", KNOWN)
def test_what_they_write_is_stored(name):
    want = PROGRAMS[name][1]
    for found in on_two_ranks()[name,]:
        for got, whole in zip(found, (2 * FULL, FULL, FULL), strict=True):
            torch.testing.assert_close(got, want(whole), rtol=0, atol=0)


def refusals():
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    zf.attach(model, zf.chain(zf.shard(), zf.sgd(0.1)))
    model(torch.ones(1, COLUMNS)).sum().backward()
    said = []
    for call in (lambda: model.weight.grad.set_(FULL), lambda: scale_rows(model.weight, 2.0)):
        with pytest.raises(RuntimeError) as error:
            call()
        said.append(str(error.value))
    return said


def test_what_cannot_be_stored_is_refused():
    for memory, leaf in zf.launch(refusals, 2, timeout=limit()):
        assert "x.set_(y) of p.grad" in memory and "p.grad = y" in memory
        assert "scale_rows" in leaf or "leaf Variable" in leaf
