"""Under a loss scale a tensor that passes the boundary by another door is refused in the first ten backwards."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from gone_gradients import has_numbers
from models import Parts
from parity import Run, compare
from torch import Tensor, nn
from torch.nn.utils import parametrize

import zerofn as zf
from zerofn._compat.autograd import inputs_of_backward, roots_of_backward  # inside: where a backward is

SCALED: dict[str, list[zf.Transform]] = {
    "fp32": [],
    "bf16": [zf.precision(param_dtype=torch.bfloat16)],
    "fp16": [zf.precision(param_dtype=torch.float16)],
}


@pytest.fixture(params=SCALED)
def tx(request):
    return zf.chain(*SCALED[request.param], zf.scale_loss(256.0), zf.sgd(0.1))


class Double(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2 + w.sum()


def data(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


# -- an outer tensor used inside ---------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 2, 5])
def test_an_output_of_one_call_used_inside_another(tx, late):
    model = Parts()
    zf.attach(model, tx)
    for _ in range(late):
        model(data()).square().mean().backward()
    kept = model.first(data())
    model.read = lambda: kept
    loss = model(data()).square().mean()
    with pytest.raises(RuntimeError, match="uses an output of one of its calls that did not come in as an argument"):
        loss.backward()
    assert late or not any(map(has_numbers, model.parameters()))


def test_cached_parametrizations_inside_alone_are_right():
    def make() -> nn.Module:
        model = Parts()
        parametrize.register_parametrization(model.first, "weight", Double())
        return model

    def program(run: Run) -> Any:
        x = run.data(4, 3, grad=True)
        with parametrize.cached():
            loss = run.model(x).square().mean() + run.model(run.data(4, 3, seed=1)).square().mean()
        loss.backward()
        return x.grad

    for pipe in ("scaled", "bf16 scaled", "fp16 dynamic"):
        compare(program, make, pipe)


# -- an inner tensor used outside --------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [None, lambda o: o * 2])
def test_a_tensor_that_a_forward_hook_was_given(tx, change):
    """What a hook returns goes on inside; what it keeps has not left."""
    model, plain, kept = Parts(), Parts(), []
    zf.attach(model, tx)
    for net in (model, plain):
        net.first.register_forward_hook(lambda m, a, o: kept.append(o) or (None if change is None else change(o)))
        net(data()).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=5e-2, atol=1e-2)
    kept.clear()
    loss = model(data()).square().mean() + kept[0].square().mean()
    with pytest.raises(RuntimeError, match="a tensor from inside the attached model"):
        loss.backward()


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_of_the_model_is_given_what_has_left(tx, late):
    """Whether it was registered before the model was attached or after it."""
    model, plain, kept = Parts(), Parts(), []
    for net in (model, plain):
        if not late:
            net.register_forward_hook(lambda m, a, o: kept.append(o) or o * 2)
        if net is model:
            zf.attach(model, tx)
        if late:
            net.register_forward_hook(lambda m, a, o: kept.append(o) or o * 2)
        (net(data()).square().mean() + kept[-1].square().mean()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=5e-2, atol=1e-2)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("late", [9, 10, 23])
def test_later_backwards_are_searched_where_check_asks_for_it(late, check):
    """What is not refused is wrong by the scale (docs/how-to/loss-scale.md). A refused backward does not count."""
    model, scale = Parts(), 256.0
    opt = zf.attach(model, zf.chain(zf.scale_loss(scale), zf.sgd(0.1)), check=check)
    kept: list[Tensor] = []
    model.last.register_forward_pre_hook(lambda m, a: kept.append(a[0]))
    for i in range(late):
        model(data(i)).square().mean().backward()
        if not i:
            with pytest.raises(RuntimeError, match="uses a tensor from inside the attached model"):
                (model(data(i)).square().mean() + kept[-1].sum()).backward()
    opt.zero_grad()
    out = model(data())
    loss = 0 * out.sum() + kept[-1].sum()
    if check or late < 10:
        with pytest.raises(RuntimeError, match="uses a tensor from inside the attached model"):
            loss.backward()
        return
    loss.backward()
    plain = Parts()
    torch.tanh(plain.first(data())).sum().backward()
    for p, q in zip(model.first.parameters(), plain.first.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad / scale)


# -- what lies on the right side -----------------------------------------------------------------------------------


def parts_in_a_row(run: Run) -> list[Any]:
    """Outer tensors go in as arguments, twice, beside a plain use."""
    x = run.data(4, 3, grad=True)
    model: Any = run.model
    e = model.first(x)
    loss = model.last(torch.tanh(e)).square().mean() + model(e * e).square().mean() + e.exp().mean()
    loss.backward()
    return [x.grad]


def weights_beside(run: Run) -> None:
    loss = run.model(run.data(4, 3)).square().mean()
    (loss + sum(p.square().sum() for p in run.model.parameters()) * loss.detach()).backward()


@pytest.mark.parametrize("program", [parts_in_a_row, weights_beside])
@pytest.mark.parametrize("pipe", ["scaled", "bf16 scaled", "fp16 dynamic"])
def test_programs_that_are_right(program, pipe):
    compare(program, Parts, pipe, windows=3)


def call_of_backward() -> tuple[list[Any], tuple]:
    return roots_of_backward(), inputs_of_backward()


def test_a_backward_on_another_thread_is_told_by_that_thread():
    """On a GPU the nodes of a backward run in a thread that did not call it."""
    found: list[Any] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: found.append(call_of_backward()))
            thread.start()
            thread.join()
            found.append(call_of_backward())
            return g

    x = torch.ones(2, requires_grad=True)
    y = Asks.apply(x).sum()
    torch.autograd.grad(y, x)
    for roots, inputs in found:
        assert roots == [y.grad_fn] and len(inputs) == 1 and inputs[0] is x
    assert call_of_backward() == ([], ())


def test_a_copy_is_not_searched():
    """No search without a scale, nor once detached."""
    model = Parts()
    opt = zf.attach(model, zf.chain(zf.scale_loss(8.0), zf.sgd(0.1)))
    opt.detach()
    kept = model.first(data())
    model.read = lambda: kept
    other = copy.deepcopy(model)
    model(data()).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters()) and other.read() is kept


# -- writes into parameters ------------------------------------------------------------------------------------------


class Bounded(nn.Module):
    """Layers that keep their weights in bounds, in each spelling that torch allows."""

    def __init__(self, spelling: str):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 3, max_norm=0.7 if spelling == "max_norm" else None)
        self.last, self.spelling = nn.Linear(3, 2), spelling

    def forward(self, x: Tensor) -> Tensor:
        w = self.embed.weight
        if self.spelling == "detach":
            self.embed.weight.detach().clamp_(-0.3, 0.3)
        if self.spelling == "data":
            self.embed.weight.data.clamp_(-0.3, 0.3)
        if self.spelling == "after a look":
            with torch.no_grad():
                self.embed.weight.clamp_(-0.3, 0.3)
        return self.last(self.embed(x) + 0 * w.sum())


@pytest.mark.parametrize("spelling", ["max_norm", "detach", "data", "after a look"])
def test_weights_that_are_kept_in_bounds_in_forward(spelling):
    plain, model = Bounded(spelling), Bounded(spelling)
    before = model.embed.weight.detach().clone()
    opt = zf.attach(model, zf.chain(zf.scale_loss(256.0), zf.sgd(0.125)))
    other = torch.optim.SGD(plain.parameters(), 0.125)
    x = torch.tensor([1, 2, 2, 5])
    for _ in range(3):
        for net, o in ((plain, other), (model, opt)):
            net(x).square().mean().backward()
            o.step()
            o.zero_grad()
    for (n, p), q in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), n
    assert (model.embed.weight - before).abs().max() > 0.3


def test_max_norm_in_another_dtype_shortens_the_rows_that_are_stored():
    model = Bounded("max_norm")
    before = model.embed.weight.detach().clone()
    zf.attach(model, zf.chain(zf.precision(param_dtype=torch.float16), zf.scale_loss(256.0), zf.sgd(0.1)))
    model(torch.tensor([1]))
    want = before.clone()
    half = before.half()
    with torch.no_grad():
        torch.nn.functional.embedding(torch.tensor([1]), half, max_norm=model.embed.max_norm)
    want[1] = half[1].float()
    assert torch.equal(model.embed.weight, want) and not torch.equal(want[1], before[1])
