"""An attach that raises, by an error or by Ctrl-C, leaves the model as it was; `opt.detach()` may be called again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupts import Interrupt
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf

BF16 = torch.bfloat16
STAGES = {
    "shard": lambda: (zf.shard(),),
    "reduce_scatter": lambda: (zf.reduce_scatter(),),
    "masters": lambda: (zf.all_reduce(), zf.precision(param_dtype=BF16)),
    "shard, masters": lambda: (zf.shard(), zf.precision(param_dtype=BF16)),
    "scaled": lambda: (zf.precision(param_dtype=torch.float16), zf.scale_loss(1024.0)),
    "bf16": lambda: (zf.shard(), zf.precision(store_dtype=BF16)),
}
X = torch.linspace(-1, 1, 12).view(2, 6)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def look(model: nn.Module) -> list[Any]:
    """Classes, dtypes and numbers of all that the model has, and of gradients; hooks, and other attributes."""
    found: list[Any] = []
    for x in [*model.parameters(), *model.buffers()]:
        plain = x.detach().as_subclass(Tensor)
        grad = None if x.grad is None else x.grad.tolist()
        found.append((type(x), x.dtype, getattr(x, "grad_dtype", None), plain.tolist(), grad, sorted(vars(x))))
    for m in model.modules():
        hooks = [v for k, v in sorted(vars(m).items()) if "hooks" in k and isinstance(v, dict)]
        found.append((list(map(len, hooks)), type(m._parameters), sorted(vars(m))))
    return found


def failed(stage: str, error: str) -> list[Any]:
    """At the first state of the second leaf, on every rank."""
    model, seen = net(), []
    if zf.shard() not in STAGES[stage]():
        model(X).sum().backward()

    def init(p: Tensor) -> Tensor:
        seen.append(p)
        if len(seen) == 2:
            raise {"an error": ZeroDivisionError, "Ctrl-C": KeyboardInterrupt}[error]("by the test")
        return torch.zeros_like(p)

    @zf.leafwise(init=init, needs="element")
    def momentum(grad, param, state):
        return state + grad, state + grad

    before, tx = look(model), zf.chain(*STAGES[stage](), momentum(), zf.sgd(0.1))
    with pytest.raises((ZeroDivisionError, KeyboardInterrupt), match="by the test") as raised:
        zf.attach(model, tx)
    after = look(model)
    other = net()
    steps = []
    for m in (model, other):
        opt = zf.attach(m, tx)
        opt.zero_grad()
        m(X).float().square().mean().backward()
        opt.step()
        steps.append([x.tolist() for x in zf.full_params(opt.tx, opt.state).values()])
        opt.detach()
    notes = getattr(raised.value, "__notes__", [])
    return [before == after, [b == a for b, a in zip(before, after, strict=True)], steps[0] == steps[1], notes]


def all_failed(stages: list[str]) -> list[Any]:
    return [(stage, error, *failed(stage, error)) for stage in stages for error in ("an error", "Ctrl-C")]


OVER_RANKS = [stage for stage in STAGES if stage != "scaled"]


@pytest.mark.parametrize(
    "over_ranks",
    [pytest.param(["shard, masters", "bf16"], id="few"), pytest.param(OVER_RANKS, marks=pytest.mark.slow, id="all")],
)
def test_first_states_that_raise(over_ranks):
    """On one process and on two. What a narrower dtype has rounded is told, and the same numbers are stored again."""
    for found in (all_failed(list(STAGES)), *zf.launch(all_failed, 2, over_ranks, timeout=limit())):
        for stage, error, same, parts, again, notes in found:
            assert again, (stage, error)
            if stage == "bf16":
                assert not same
                assert any("are rounded to it: 0.weight, 0.bias, 1.weight, ..." in note for note in notes)
            else:
                assert same and not notes, (stage, error, parts)


def with_gradients(stage: str) -> list[Any]:
    model = net()
    model[0](X).sum().backward()
    before = look(model)
    try:
        zf.attach(model, zf.chain(*STAGES[stage](), zf.sgd(0.1)))
    except ValueError as error:
        told = str(error)
    same = look(model) == before
    model.zero_grad()
    zf.attach(model, zf.chain(*STAGES[stage](), zf.sgd(0.1))).detach()
    return [told, same]


def test_gradients_of_whole_parameters_are_refused_where_they_become_shards():
    for told, same in zf.launch(with_gradients, 2, "shard, masters", timeout=limit()):
        assert same and "model.zero_grad() before zf.attach" in told
        assert "0.weight: has a gradient" in told and "0.bias: has" in told and "2.weight" not in told


class AtLine:
    """Ctrl-C at the n-th line of the package."""

    def __init__(self, n: int):
        self.left = n

    def __enter__(self) -> AtLine:
        sys.settrace(lambda frame, event, arg: self.line if "/zerofn/" in frame.f_code.co_filename else None)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)

    def line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line


TRACED = {
    "scaled": (STAGES["scaled"], False),
    "masters": (STAGES["masters"], False),
    "in_backward": (lambda: (), True),
    "shard": (STAGES["shard"], False),
}


def interrupted_attach(name: str) -> None:
    """The model is as it was, while a traceback keeps all that there was; and the cell that is run again is right."""
    first, early = TRACED[name]
    expected, before, kept = None, look(net()), []
    for n in range(1, 10_000, 67):
        model = net()
        try:
            with AtLine(n) as mode:
                opt = zf.attach(model, zf.chain(*first(), zf.adamw(1e-2)), in_backward=early)
        except KeyboardInterrupt as error:
            torch.set_grad_enabled(True)
            kept.append(error)
            assert look(model) == before, n
            opt = zf.attach(model, zf.chain(*first(), zf.adamw(1e-2)), in_backward=early)
        model(X).float().square().mean().backward()
        opt.step()
        found = [x.tolist() for x in opt.state.leaves.values()]
        expected = expected or found
        assert found == expected, n
        if mode.left > 0:
            assert len(kept) > 12
            return
    raise AssertionError("it has no end")


def detach_interrupted_and_called_again(name: str) -> None:
    first, early = TRACED[name]
    expected = None
    for n in range(1, 2000, 13):
        model = net()
        opt = zf.attach(model, zf.chain(*first(), zf.adamw(1e-2)), in_backward=early)
        model(X).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
        try:
            with AtLine(n) as mode:
                opt.detach()
        except KeyboardInterrupt:
            torch.set_grad_enabled(True)
            opt.detach()
        expected = expected or look(model)
        assert look(model) == expected, n
        if mode.left > 0:
            assert n > 50
            return
    raise AssertionError("it has no end")


# The casts and hooks that attach has to take back, and the parts that detach has to make whole.
DEFAULT = [(interrupted_attach, "masters"), (detach_interrupted_and_called_again, "shard")]
EVERY = [(program, name) for program in (interrupted_attach, detach_interrupted_and_called_again) for name in TRACED]


@pytest.mark.parametrize(
    ("program", "name"), [pytest.param(*row, marks=() if row in DEFAULT else pytest.mark.slow) for row in EVERY]
)
def test_interrupted_at_any_line(program: Callable[[str], None], name: str):
    """In a process of its own: an interrupt in the line that leaves a `with` of torch leaves its mode on."""
    zf.launch(program, 1, name, timeout=limit())


def interrupted_detach() -> list[Any]:
    """At an operation on every rank; the second call ends what the first has begun."""
    found = []
    for n in (0, 2, 5):
        model = net()
        opt = zf.attach(model, zf.chain(zf.shard(), zf.precision(param_dtype=BF16), zf.adamw(1e-2)))
        model(X).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
        try:
            with Interrupt(n):
                opt.detach()
        except KeyboardInterrupt:
            opt.detach()
        found.append(look(model))
    return found


def test_a_detach_that_is_interrupted_on_ranks():
    for plain, *others in zf.launch(interrupted_detach, 2, timeout=limit()):
        assert all(other == plain for other in others)
