"""Gradients of what results were computed from: right, or refused where a copy would lack a part."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import BF16, FP32, LR, PIPES, Pipe, Run, compare
from torch import Tensor, nn

import zerofn as zf

KINDS = {name: PIPES[name] for name in ("scaled", "bf16 scaled", "fp16 dynamic")}
KINDS["output cast"] = Pipe(lambda k: zf.chain(zf.precision(param_dtype=BF16, output_dtype=FP32), zf.sgd(LR)), tol=5e-2)
SCALED = ["scaled", "bf16 scaled", "fp16 dynamic"]
COPY = r"(.|\n)*what leaves a model under scale_loss or precision\(output_dtype=...\) is a copy(.|\n)*bf16 needs none"


class FeatureAndHead(nn.Module):
    """A feature, what is computed from it, and a head beside them; `give` says what comes out."""

    def __init__(self, give: Callable[..., Any] = lambda m, h, y, z: (y, h)):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.beside = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(3, 4)
        self.give = give

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))[:, :]
        y = self.last(h) + h
        return self.give(self, h, y, self.beside(x).exp())


def of_views(m: Any, h: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    """`h` is a view, and others of its memory come out as well."""
    return h[:, 1:], h, y[:, :2], y[:, 1:], h[:, :2]


# How a result and a feature come out; by name.
WAYS: dict[str, tuple[Callable[..., Any], Callable[[Any, Tensor], tuple[Tensor, Tensor]]]] = {
    "first the result": (lambda m, h, y, z: (y, h), lambda m, x: m(x)),
    "first the feature": (lambda m, h, y, z: (h, y), lambda m, x: m(x)[::-1]),
    "nested": (lambda m, h, y, z: {"y": [y], "more": {"z": z, "h": h}}, lambda m, x: _nested(m(x))),
    "in steps": (lambda m, h, y, z: (y.exp(), y, h), lambda m, x: m(x)[::2]),
    "views": (of_views, lambda m, x: m(x)[3:0:-2]),
}


def _nested(out: Any) -> tuple[Tensor, Tensor]:
    return out["y"][0], out["more"]["h"]


def hook(y: Tensor, h: Tensor) -> None:
    h.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    y.square().sum().backward()


def retain(y: Tensor, h: Tensor) -> None:
    h.retain_grad()
    y.square().sum().backward()


def ask(y: Tensor, h: Tensor) -> None:
    torch.autograd.grad(y.square().sum(), h, allow_unused=True)


def ask_plainly(y: Tensor, h: Tensor) -> None:
    torch.autograd.grad(y.square().sum(), h)


def penalty(y: Tensor, h: Tensor) -> None:
    torch.autograd.grad(y.sum() + h.square().sum(), h, create_graph=True)


def among_others(y: Tensor, h: Tensor) -> None:
    more = torch.zeros_like(y, requires_grad=True)
    torch.autograd.grad((y + more).square().sum(), [more, h], allow_unused=True)


def into(y: Tensor, h: Tensor) -> None:
    (y.sum() + h.sum()).backward(inputs=[h])


def edge(y: Tensor, h: Tensor) -> None:
    torch.autograd.grad(y.sum(), torch.autograd.graph.get_gradient_edge(h), allow_unused=True)


def of_several(y: Tensor, h: Tensor) -> None:
    torch.autograd.graph.register_multi_grad_hook([h], lambda gs: None)
    y.sum().backward()


USES = {
    "a hook on": [hook, of_several],
    r"retain_grad\(\) on": [retain],
    r"torch.autograd.grad\(": [ask, ask_plainly, penalty, among_others, into, edge],
}


def data(grad: bool = False) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_(grad)


@pytest.mark.parametrize(("told", "use"), [(told, use) for told, uses in USES.items() for use in uses])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_an_intermediate_is_refused(kind, way, told, use):
    give, take = WAYS[way]
    model = FeatureAndHead(give)
    opt = zf.attach(model, KINDS[kind].build(1))
    y, h = take(model, data())
    with pytest.raises(RuntimeError, match=told + r"(.|\n)*tensor of shape \(5, \d\)" + COPY):
        use(y, h)
    # The next step is as if nothing had been.
    del y, h
    opt.zero_grad()
    y, h = take(model, data())
    (y.square().sum() + h.square().sum()).backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "beside" not in n)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SCALED)
def test_a_hook_on_a_tensor_that_nobody_holds_any_more_is_seen(kind, way):
    give, take = WAYS[way]
    model = FeatureAndHead(give)
    zf.attach(model, KINDS[kind].build(1))
    y, h = take(model, data())
    h.register_hook(lambda g: g * 2)
    gone = weakref.ref(h)
    del h
    assert gone() is None
    with pytest.raises(RuntimeError, match="a hook on" + COPY):
        y.square().sum().backward()


# -- what is right ---------------------------------------------------------------------------------------------------


def sums(run: Run) -> list[Any]:
    """Losses of both, with all that may be done with a result at the end of its way."""
    x, seen = run.data(5, 3, grad=True), []
    y, h, z = run.model(x)
    y.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    y.retain_grad()
    (y.square().mean() + (h * y).sum() + z.mean()).backward(retain_graph=True)
    (h.exp().mean() + y.sum()).backward()
    return [x.grad, *seen, y.grad]


def the_intermediate_alone(run: Run) -> list[Any]:
    """Where no cotangent comes by way of the result, nothing is left out."""
    x, seen = run.data(5, 3, grad=True), []
    y, h, z = run.model(x)
    h.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    h.retain_grad()
    (h.square().mean() + z.mean() + y.detach().sum()).backward()
    y, other, z = run.model(x)
    (g,) = torch.autograd.grad(other.square().sum() + z.sum(), other, retain_graph=True)
    (y.sum() + z.mean()).backward()
    return [x.grad, *seen, h.grad, g]


def results_beside_each_other(run: Run) -> list[Any]:
    """Neither was computed from the other: they have graphs of their own, with hooks of their own."""
    x, seen = run.data(5, 3), []
    y, _, z = run.model(x)
    for t in (y, z):
        t.register_hook(lambda g: seen.append(g.clone()) or g * 2)
        t.retain_grad()
    assert torch.autograd.grad(y.sum(), z, allow_unused=True, retain_graph=True) == (None,)
    y.square().mean().backward()
    z.square().mean().backward()
    return [*seen, y.grad, z.grad]


def a_hook_that_is_gone(run: Run) -> list[Any]:
    y, h, z = run.model(run.data(5, 3))
    h.register_hook(lambda g: g * 0).remove()
    (y.square().mean() + z.mean()).backward()
    return []


def fed_back(run: Run) -> list[Any]:
    """An output that goes in again is on the way."""
    x, seen = run.data(5, 3, grad=True), []
    _, h, z = run.model(x)
    h.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    h.retain_grad()
    y, _, again = run.model(h[:, :3])
    (y.square().mean() + again.mean() + z.mean()).backward()
    return [x.grad, h.grad, *seen]


def second_derivatives(run: Run) -> list[Any]:
    x = run.data(5, 3, grad=True)
    y, h, z = run.model(x)
    (g,) = torch.autograd.grad(y.square().sum() + h.sum() + z.sum(), x, create_graph=True)
    (g.square().sum() + h.square().sum()).backward()
    return [x.grad]


GOOD = [sums, the_intermediate_alone, results_beside_each_other, a_hook_that_is_gone, fed_back]


@pytest.mark.parametrize(
    ("kind", "program"), [(kind, program) for kind in KINDS for program in GOOD] + [("scaled", second_derivatives)]
)
def test_what_is_right(kind, program):
    compare(program, lambda: FeatureAndHead(lambda m, h, y, z: (y, h, z)), KINDS[kind], unused=("last.bias",))


def all_uses(run: Run) -> list[Any]:
    """What is refused under a scale and an output cast."""
    out, take = [], WAYS[vars(run.model)["way"]][1]
    x = run.data(5, 3, grad=True)
    y, h = take(run.model, x)
    h.register_hook(lambda g: out.append(g.clone()) or g * 2)
    h.retain_grad()
    (y.square().mean() + h.mean()).backward()
    other, feature = take(run.model, x)
    (g,) = torch.autograd.grad(other.square().sum() + feature.sum(), feature)
    return [*out, x.grad, h.grad, g]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pipe", ["fp32", "bf16", "bf16 states"])
def test_without_a_scale_and_an_output_cast_all_of_it_is_right(pipe, way):
    def make() -> nn.Module:
        model = FeatureAndHead(WAYS[way][0])
        model.__dict__["way"] = way
        return model

    compare(all_uses, make, pipe, unused=tuple(n for n, _ in make().named_parameters()))


class Recurrent(nn.Module):
    """Keeps what its next call starts from in an attribute."""

    def __init__(self, nest: Callable[[Tensor], Any], first: Callable[[Any], Tensor]):
        super().__init__()
        self.layer, self.state, self.nest, self.first = nn.Linear(3, 3), None, nest, first

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x) if self.state is None else self.layer(x) + self.first(self.state)
        self.state = self.nest(h.tanh())
        return h


@pytest.mark.parametrize(
    ("nest", "first"),
    [
        (lambda h: (h, 1), lambda state: state[0]),
        (lambda h: ((h, h * 2), 1), lambda state: state[0][0]),
        (lambda h: [((h,),)], lambda state: state[0][0][0]),
    ],
)
def test_what_a_call_keeps_in_nested_tuples_is_found_by_the_next(nest, first):
    torch.manual_seed(0)
    plain, model, x = Recurrent(nest, first), Recurrent(nest, first), torch.randn(2, 3)
    model.load_state_dict(plain.state_dict())
    opt = zf.attach(model, zf.chain(zf.scale_loss(8.0), zf.sgd(0.5)))
    for m in (plain, model):
        torch.stack([m(x * i).square().sum() for i in range(1, 4)]).sum().backward()
    torch.testing.assert_close(model.layer.weight.grad, plain.layer.weight.grad)
    opt.step()
