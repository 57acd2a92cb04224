"""Under a loss scale: what crosses the boundary of an attached model by another door than its arguments and results."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import models as zoo
import pytest
import torch
from parity import PIPES
from refusals import Kept, Refusals
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook, register_module_full_backward_pre_hook
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import zerofn as zf

WRONG = Refusals()
DTYPES: dict[str, list[zf.Transform]] = {
    "fp32": [],
    "bf16": [zf.precision(param_dtype=torch.bfloat16)],
    "fp16": [zf.precision(param_dtype=torch.float16)],
}


def attached(model: Any, dtype: str = "fp32") -> Any:
    zf.attach(model, zf.chain(*DTYPES[dtype], zf.scale_loss(256.0), zf.sgd(0.1)))
    return model


def data(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


# ---- outer tensors inside ----


class Double(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2 + w.sum()


@WRONG(
    RuntimeError,
    "did not come in as an argument",
    "parametrize.cached",
    over=list(itertools.product(DTYPES, [0, 2, 5])),
)
def a_cached_parametrization_that_was_read_outside_first(cell: tuple[str, int]) -> Iterator[None]:
    dtype, late = cell
    model = zoo.Parts()
    parametrize.register_parametrization(model.first, "weight", Double())
    attached(model, dtype)
    for _ in range(late):
        model(data()).square().mean().backward()
    with parametrize.cached():
        norm = model.first.weight.square().sum()
        loss = model(data()).square().mean() + norm
    yield
    loss.backward()


@WRONG(RuntimeError, "a tensor computed outside (by SumBackward1)", over=DTYPES)
def something_computed_from_an_output(dtype: str) -> Iterator[None]:
    model = attached(zoo.Parts(), dtype)
    kept = model.first(data()).exp().sum(0)
    model.read = lambda: kept
    yield
    model(data()).square().mean().backward()


SEEN = torch.ones(3, requires_grad=True)
OUTER: dict[str, Callable[[], Tensor]] = {
    "a parameter of shape (3,) that is neither its parameter nor an argument": lambda: nn.Parameter(torch.ones(3)),
    "a tensor computed outside (by ExpBackward0)": lambda: SEEN.exp(),
}


@WRONG(RuntimeError, "{}", over=OUTER)
def a_tensor_of_a_closure(kind: str) -> Iterator[None]:
    model, outer = attached(zoo.Parts()), OUTER[kind]()
    model.read = lambda: outer
    yield
    model(data()).square().mean().backward()


# ---- inner tensors outside ----


@WRONG(
    RuntimeError,
    "uses a tensor from inside the attached model",
    over=list(itertools.product(DTYPES, [0, 2, 5, 9])),
)
def a_tensor_that_a_pre_hook_kept(cell: tuple[str, int]) -> Iterator[None]:
    """Behind many operations, so that the loss begins as in the backwards before."""
    dtype, late = cell
    model, kept = attached(zoo.Parts(), dtype), []
    model.last.register_forward_pre_hook(lambda m, a: kept.append(a[0]))
    for i in range(late + 1):
        kept.clear()
        out = model(data(i))
        side = (kept[0] if i == late else kept[0].detach().requires_grad_()).exp().mean()
        for _ in range(60):
            side = side * 1.01
        loss = out.square().mean() + side
        if i < late:
            loss.backward()
    yield
    loss.backward()


class Keeps(zoo.Parts):
    """Leaves a feature in a place of its own."""

    def __init__(self, place: str):
        super().__init__()
        self.place, self.more = place, {}
        self.register_buffer("kept", None)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.place == "buffer":
            self.kept = h
        elif self.place == "parameter":
            self.__dict__["feature"] = self.first.weight
        else:
            self.feature = h
            self.more["nested"] = [(h,)]
        return self.last(h)


PLACES: dict[str, Callable[[Any], Tensor]] = {
    "attribute": lambda m: m.feature,
    "nested": lambda m: m.more["nested"][0][0],
    "buffer": lambda m: m.kept,
    "parameter": lambda m: m.feature,
}


@WRONG(
    RuntimeError,
    re.compile(r"the loss uses (.|\n)*did not come out of it(.|\n)*return it from forward"),
    over=list(itertools.product(DTYPES, PLACES)),
)
def a_tensor_that_a_call_left_in_the_model(cell: tuple[str, str]) -> Iterator[None]:
    dtype, place = cell
    model = attached(Keeps(place), dtype)
    loss = model(data()).square().mean() + PLACES[place](model).square().mean()
    yield
    loss.backward()


class Appends(nn.Linear):
    """Appends what `of` makes of itself and of its output to a list."""

    def __init__(self, kept: list[Tensor], of: Callable[[Any, Tensor], Tensor]):
        super().__init__(3, 2)
        self.kept, self.of = kept, of

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.kept.append(self.of(self, y))
        return y


@WRONG(RuntimeError, "the attached model's parameter weight as forward sees it", over=DTYPES)
def a_view_of_a_parameter_kept_by_forward(dtype: str) -> Iterator[None]:
    kept: list[Tensor] = []
    model = attached(Appends(kept, lambda m, y: m.weight), dtype)
    loss = model(data()).square().mean() + kept[0].square().sum().float()
    yield
    loss.backward()


@WRONG(RuntimeError, "tensor from inside the attached model (by ExpBackward0)", over=[False, True])
def a_tensor_that_leaves_through_a_closure(alone: bool) -> Iterator[None]:
    kept: list[Tensor] = []
    model = attached(Appends(kept, lambda m, y: y.exp()))
    out = model(data()).sum()
    yield
    (kept[-1].sum() + (0 if alone else out)).backward()


# ---- containers, writes, flags ----


class Opaque:
    def __init__(self, hidden: Any):
        self.hidden = hidden


class Slotted:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Any):
        self.hidden = hidden


HIDE: dict[str, Callable[[Tensor], Any]] = {
    "Opaque": Opaque,
    "Opaque ": lambda t: Opaque([t]),
    "Opaque  ": lambda t: Opaque({"k": (t,)}),
    "Slotted": Slotted,
}


@WRONG(TypeError, re.compile(r"the output of the model is a (Opaque|Slotted) with a tensor in \.hidden"), over=HIDE)
def outputs_in_unknown_objects(hide: str) -> Iterator[Any]:
    class Hides(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return HIDE[hide](super().forward(x))

    model = attached(Hides(2, 2))

    def again() -> None:
        # The call is over: the next one is as outermost as this one was.
        with pytest.raises(TypeError, match="the output of the model is a"):
            model(torch.ones(1, 2))

    yield Kept(lambda: {}, again)
    model(torch.ones(1, 2))


class Writes(nn.Embedding):
    def __init__(self, row: bool):
        super().__init__(7, 3)
        self.row = row

    def forward(self, x: Tensor) -> Tensor:
        (self.weight[0] if self.row else self.weight).mul_(2)
        return super().forward(x)


@WRONG(RuntimeError, re.compile(r"with gradients enabled(.|\n)*weight: changed by"), over=[False, True])
def a_write_with_gradients_as_torch_refuses_it(row: bool) -> Iterator[None]:
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        Writes(row)(torch.tensor([1]))
    model = attached(Writes(row))
    yield
    model(torch.tensor([1]))


WRONG.rows(ValueError, (lambda: zf.attach(zoo.Parts(), zf.sgd(0.1), check="all"), "check"))  # type: ignore[arg-type]

# ---- second derivatives ----


@WRONG(RuntimeError, "a second derivative after the loss scale went from 4 to 8")
def a_second_derivative_across_a_change_of_scale() -> Iterator[None]:
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    scale = zf.scale_loss("dynamic", init_scale=4.0, growth_interval=1)
    opt = zf.attach(model, zf.chain(*DTYPES["bf16"], scale, zf.sgd(0.1)))
    x = torch.ones(3, 2, requires_grad=True)
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model(x).sum().backward()
    opt.step()
    yield
    g.square().sum().backward()


@WRONG(RuntimeError, "second derivative after the loss scale went from")
def a_first_derivative_of_before_a_change_of_the_scale() -> Iterator[None]:
    model = zoo.Parts()
    opt = zf.attach(model, zf.chain(zf.scale_loss("dynamic"), zf.sgd(0.1)))
    old = torch.autograd.grad(model(data()).square().mean(), list(model.parameters()), create_graph=True)
    own = opt.state.transforms["scale_loss"]
    own["scale"] = own["scale"] * 2
    torch.autograd.grad(model(data()).square().mean(), list(model.parameters()), create_graph=True)
    yield
    torch.autograd.grad(sum(g.square().sum() for g in old), list(model.parameters()))


# ---- backward hooks on modules ----

PIPE = ["scaled", "bf16 scaled", "fp16 dynamic"]
INSIDE = r"backward hooks on modules of a model under scale_loss(.|\n)*first: {}(.|\n)*bf16 needs none"
HOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "register_full_backward_hook": lambda m, f: m.register_full_backward_hook(f),
    "register_full_backward_pre_hook": lambda m, f: m.register_full_backward_pre_hook(lambda m, out: f(m, out, None)),
    "register_backward_hook": lambda m, f: m.register_backward_hook(f),
}


def clamp(m: nn.Module, grads: Any, other: Any) -> Any:
    return tuple(None if g is None else g.clamp(-1e-3, 1e-3) for g in grads)


class FirstAgain(zoo.Net):
    """The first layer under activation checkpointing."""

    def __init__(self, reentrant: bool | None):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        first = (
            self.first if self.reentrant is None else lambda x: checkpoint(self.first, x, use_reentrant=self.reentrant)
        )
        return self.last(torch.tanh(first(x)) * self.gain)


def trains(model: nn.Module, inputs: bool = True) -> None:
    """A backward, for gradients of inputs too."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).requires_grad_(inputs)
    model(x).square().mean().backward()


for _hook in HOOKS:

    @WRONG(ValueError, re.compile(INSIDE.format(_hook)), over=PIPE)
    def hooks_inside_at_attach(pipe: str, hook: str = _hook) -> Iterator[Any]:
        model = zoo.Net()
        handle = HOOKS[hook](model.first, clamp)

        def without() -> None:
            handle.remove()
            zf.attach(model, PIPES[pipe].build(1))

        yield Kept(lambda: {}, without)
        zf.attach(model, PIPES[pipe].build(1))

    @WRONG(RuntimeError, re.compile(INSIDE.format(_hook)), over=list(itertools.product(PIPE, [None, True, False])))
    def hooks_inside_at_the_next_call(cell: tuple[str, bool | None], hook: str = _hook) -> Iterator[Any]:
        pipe, again = cell
        model = FirstAgain(again)
        zf.attach(model, PIPES[pipe].build(1))
        trains(model)
        handle = HOOKS[hook](model.first, clamp)

        def without() -> None:
            with torch.no_grad():
                model(torch.ones(5, 6))
            handle.remove()
            trains(model)

        yield Kept(lambda: {}, without)
        trains(model)


@WRONG(
    RuntimeError,
    re.compile(INSIDE.format("register_")),
    over=[register_module_full_backward_hook, register_module_full_backward_pre_hook],
)
def hooks_of_all_modules(register: Callable[..., Any]) -> Iterator[Any]:
    model = zoo.Net()
    zf.attach(model, PIPES["scaled"].build(1))

    def without() -> None:
        trains(model, inputs=False)

    yield Kept(lambda: {}, without)
    handle = register(lambda *_: None)
    try:
        trains(model, inputs=False)
    finally:
        handle.remove()


@WRONG(RuntimeError, "<root>: {}", over=["register_full_backward_hook", "register_backward_hook"])
def hooks_on_the_model_that_see_gradients_of_inputs(kind: str) -> Iterator[None]:
    model = zoo.Net()
    zf.attach(model, PIPES["scaled"].build(1))
    HOOKS[kind](model, clamp)
    yield
    trains(model)


# ---- results between that are dropped ----


class FeatureAndHead(nn.Module):
    """A feature, what is computed from it, and one of that."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.first(x))[:, :]
        y = self.last(h) + h
        return y.exp(), y, h


USES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "hook": lambda y, h: (h.register_hook(lambda g: g.clamp(-1e-3, 1e-3)), y.square().sum().backward()),
    "retain": lambda y, h: (h.retain_grad(), y.square().sum().backward()),
    "ask": lambda y, h: torch.autograd.grad(y.square().sum(), h),
}
COPY = r"(.|\n)*what leaves a model under scale_loss or precision\(output_dtype=...\) is a copy(.|\n)*bf16 needs none"


@WRONG(RuntimeError, re.compile(COPY), over=list(itertools.product(USES, [*PIPE, "output cast"])))
def through_a_result_between_that_is_dropped(cell: tuple[str, str]) -> Iterator[None]:
    """Nobody holds the middle one."""
    use, pipe = cell
    cast = zf.precision(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = FeatureAndHead()
    zf.attach(model, PIPES[pipe].build(1) if pipe in PIPE else zf.chain(cast, zf.sgd(0.1)))
    y, _, h = model(data())
    del _
    yield
    USES[use](y, h)


# ---- complex tensors ----


class Complex(nn.Module):
    """One weight, with a complex tensor in an attribute that is used in its place once it is there."""

    def __init__(self):
        super().__init__()
        self.w, self.kept = nn.Parameter(torch.ones(3, dtype=torch.float64)), None

    def forward(self, z: Tensor) -> Tensor:
        return self.w * (z if self.kept is None else self.kept)


def complex_data() -> Tensor:
    return (torch.ones(3, dtype=torch.complex128) * (0.5 - 1j)).requires_grad_()


@WRONG(RuntimeError, re.compile(r"neither its parameter nor an argument(.|\n)*pass it to the model"))
def a_complex_tensor_in_an_attribute() -> Iterator[None]:
    model = attached(Complex())
    model.kept = complex_data()
    yield
    model(complex_data()).abs().square().sum().backward()


@WRONG(RuntimeError, re.compile(r"from inside the attached model(.|\n)*return it from forward"))
def complex_outputs_that_a_hook_keeps() -> Iterator[None]:
    model, seen = attached(nn.Sequential(Complex(), nn.Identity())), []
    model[0].register_forward_hook(lambda _, args, out: seen.append(out))
    yield
    (model(complex_data()).abs().square().sum() + seen[0].abs().square().sum()).backward()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("row", WRONG)
def test_refused(row):
    row.check()
