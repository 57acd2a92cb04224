"""The law of sharded tensors: a function of a `Face` is the function of the whole, or raises; derivatives too."""

import face_programs as F
import pytest
import torch
from rank_programs import rank_and_size
from small_parts import said
from time_limits import limit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zerofn as zf
from zerofn.core.layout import Leaf  # inside: layouts of leaves that no model has
from zerofn.core.wires import Sharding  # inside: a wire by itself
from zerofn.ranks.process_groups import group_for  # inside: which groups are open, and what a process tells the others

# Uneven rows; a number; an uneven vector.
SHAPES = [(5, 3), (), (3,)]
# Of three ranks, fewer rows than ranks too; one element; an even vector of two.
MORE = [*SHAPES, (2, 3), (1, 1), (4,)]


def of_shape(shape):
    g = torch.Generator().manual_seed(len(shape))
    return [torch.randn(shape, dtype=torch.float64, generator=g) for _ in range(3)]


def gathering():
    mesh = init_device_mesh("cpu", (rank_and_size()[1],))
    from zerofn.sharded.gathering import Gathering  # inside: a face without a model

    return Gathering(Sharding(group_for("law", mesh)), lambda asked: "", lambda: False)


def face_of(full, by, requires_grad=False):
    from zerofn.sharded.face import Face, wrap  # inside: a face without a model
    from zerofn.sharded.gathering import Origin, rows_of  # inside: a face without a model

    of = Origin("x", Leaf("w", full.shape, full.dtype, "cpu"), by)
    return wrap(rows_of(full, of).clone(), of, Face, requires_grad)


def plain(x):
    if isinstance(x, torch.Tensor):
        x = x.full_tensor() if isinstance(x, DTensor) else x
        return x.detach().clone().as_subclass(torch.Tensor)
    return [plain(y) for y in x] if isinstance(x, list | tuple) else x


def programs(shape):
    """Tables of values, of writes, of what is differentiable, for tensors of a shape."""
    values, writes, smooth = dict(F.VALUES), dict(F.WRITES), dict(F.DIFFERENTIABLE)
    if shape:
        writes |= F.WRITES_OF_ROWS
        smooth |= F.ROWS
    if len(shape) == 2:
        writes |= F.WRITES_OF_MATRICES
        smooth |= F.MATRICES
    return values, writes, smooth


def derivatives(fn, p, o, v):
    """The value, the derivative along weights, and the second one along others."""
    out = fn(p, o)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
    (g,) = torch.autograd.grad((out * weights).sum(), p, create_graph=True, allow_unused=True)
    second = None
    if g is not None and g.requires_grad:
        (second,) = torch.autograd.grad((g * v).sum(), p, allow_unused=True)
    return [plain(x) for x in (out, g, second)]


def all_of(shape, make):
    """What every program gives of what `make` makes of a whole tensor; of one that raises its message."""
    whole, o, v = of_shape(shape)
    values, writes, smooth = programs(shape)
    found = {}
    with torch.no_grad():
        for name, fn in {**values, **{f"no_grad: {k}": fn for k, fn in smooth.items()}}.items():
            found[name] = said(lambda fn=fn: plain(fn(make(whole.clone()), o)))
        for name, fn in writes.items():
            with torch.enable_grad() if "AdamW" in name or "SGD" in name else torch.no_grad():
                found[name, "written"] = said(lambda fn=fn: plain(fn(make(whole.clone()), o)))
    for name, fn in smooth.items():
        found[name, "derivatives"] = said(lambda fn=fn: derivatives(fn, make(whole.clone(), True), o, v))
    return found


def on_ranks(shapes):
    by = gathering()
    return {shape: all_of(shape, lambda x, grad=False: face_of(x, by, grad)) for shape in shapes}


def differs(got, expected):
    """How what a rank has differs from what one process has."""
    if isinstance(expected, str):
        raised = "Error: " in expected
        return "" if got == expected or (raised and "Error: " in str(got)) else f"{got} in place of {expected}"
    try:
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12, equal_nan=True)
    except (AssertionError, ValueError, TypeError) as error:
        return f"{got}: {error}"
    return ""


# On one rank parameters are plain ones.
@pytest.mark.parametrize(
    ("size", "shapes"), [(2, SHAPES), *[pytest.param(n, MORE, marks=pytest.mark.slow) for n in (2, 3)]]
)
def test_a_function_of_a_face_is_that_of_the_whole(size, shapes):
    ranks = zf.launch(on_ranks, size, shapes, timeout=limit(120))
    for shape in shapes:
        want = all_of(shape, lambda x, grad=False: x.requires_grad_(grad))
        assert len(want) > 300
        for found in ranks:
            bad = {name: told for name, x in want.items() if (told := differs(found[shape][name], x))}
            assert not bad, (shape, bad)
