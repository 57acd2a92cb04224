"""Signals at any moment of a training loop: the state is that of the step before or of the one after, and goes on."""

from __future__ import annotations

import _thread
import contextlib
import copy
import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from interrupts import RAISED, RAISES, Moment, by_signal, modes
from time_limits import limit
from torch import Tensor, nn
from trees import flat

import zerofn as zf
from zerofn import _interrupts  # inside: how interrupts are held, of which nothing is public
from zerofn.extend import Transform

BF16 = torch.bfloat16
CHAINS: dict[str, Callable[[], Transform]] = {
    "adamw": lambda: zf.adamw(1e-2),
    "accumulate, clip": lambda: zf.chain(zf.accumulate(2), zf.clip_by_global_norm(1.0), zf.adamw(1e-2)),
    "shard, accumulate": lambda: zf.chain(zf.shard(), zf.accumulate(2), zf.adamw(1e-2)),
    "scale_loss": lambda: zf.chain(zf.precision(param_dtype=torch.float16), zf.scale_loss("dynamic"), zf.adamw(1e-2)),
    "low precision": lambda: zf.chain(zf.precision(store_dtype=BF16), zf.low_precision_adam(1e-2), zf.ema(0.9)),
    "masters": lambda: zf.chain(zf.all_reduce(), zf.precision(param_dtype=BF16), zf.sgd(0.1, momentum=0.9)),
    "offload": lambda: zf.offload(zf.adamw(1e-2)),
}
IN_BACKWARD = ["adamw", "low precision", "offload"]
X = torch.linspace(-1, 1, 24).view(4, 6)


def attached(name: str, in_backward: bool = False) -> tuple[nn.Module, zf.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    return model, zf.attach(model, CHAINS[name](), in_backward=in_backward)


def iteration(model: nn.Module, opt: zf.Optimizer) -> None:
    """Of numbers that differ from step to step."""
    opt.zero_grad()
    model(X * (1 + opt.micro_steps % 7)).float().square().mean().backward()
    opt.step()


def values(model: nn.Module, opt: zf.Optimizer) -> list[Tensor]:
    state = opt.state
    tensors = [x for x in flat(state.transforms).values() if isinstance(x, Tensor)]
    tensors += [*state.leaves.values(), state.step, state.micro_step, *model.parameters()]
    return [x.detach().clone() for x in tensors]


def by_leaf(model: nn.Module, opt: zf.Optimizer) -> list[list[Tensor]]:
    """Of each parameter its value and what transforms keep for it."""
    state = opt.state
    own = [(p, [x.clone() for key, x in state[p].items() if not key.startswith("zerofn/")]) for p in model.parameters()]
    return [[p.detach().clone(), *xs] for p, xs in own]


def same(xs: list[Tensor], ys: list[Tensor]) -> bool:
    return len(xs) == len(ys) and all(map(torch.equal, xs, ys))


def moments(loop: Callable[[], object], how_many: int) -> list[int]:
    """Moments of a loop's body, drawn by lot."""
    with Moment(0) as count:
        loop()
    every = range(1, count.seen + 1)
    return sorted(random.Random(0).sample(every, min(how_many, count.seen)))


def interrupted(n: int, loop: Callable[[], object]) -> str:
    """Run a body with SIGINT at its n-th moment; where that was."""
    before, moment = modes(), Moment(n)
    try:
        with moment:
            loop()
    except RAISED:
        pass
    else:
        assert moment.where is None, f"lost: {moment.where}"
    assert modes() == before, moment.where
    return str(moment.where)


def run(name: str, how_many: int) -> None:
    (model, opt), (other, reference) = attached(name), attached(name)
    parameters = list(model.parameters())

    def both() -> None:
        iteration(model, opt)
        iteration(other, reference)
        assert same(values(model, opt), values(other, reference))

    both()
    found = moments(lambda: iteration(model, opt), how_many)
    iteration(other, reference)
    ends = set()
    for n in found:
        before = values(other, reference)
        where = interrupted(n, lambda: iteration(model, opt))
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True)), where
        after = not same(values(model, opt), before)
        if after:
            iteration(other, reference)
            assert same(values(model, opt), values(other, reference)), where
        ends.add(after)
        both()
    assert ends == {False, True}


@pytest.mark.parametrize("name", CHAINS)
def test_a_state_is_that_of_the_step_before_or_after(name):
    run(name, 20)


@pytest.mark.parametrize("number", RAISES)
@pytest.mark.parametrize("name", ["adamw", "accumulate, clip", "masters"])
def test_after_the_signal_of_a_batch_system_too(name, number):
    """Its handler raises, as one that ends a preempted run with a save."""
    with by_signal(number):
        run(name, 15)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_at_many_moments(name):
    run(name, 120)


def run_in_backward(name: str, how_many: int) -> None:
    """Leaf by leaf the state is that of the step before or after; `zero_grad` gives the rest up."""
    (model, opt), (other, reference) = attached(name, True), attached(name, True)
    iteration(model, opt)
    found, ends = moments(lambda: iteration(model, opt), how_many), set()
    for n in found:
        reference.load_state(opt.state)
        before = by_leaf(other, reference)
        iteration(other, reference)
        after = by_leaf(other, reference)
        where = interrupted(n, lambda: iteration(model, opt))
        opt.zero_grad()
        leaves = by_leaf(model, opt)
        made = [same(x, new) for x, new in zip(leaves, after, strict=True)]
        for x, old, is_new in zip(leaves, before, made, strict=True):
            assert is_new or same(x, old), where
        ends.add(sum(made))
        # What follows is a run from that state.
        reference.load_state(opt.state)
        iteration(model, opt)
        iteration(other, reference)
        assert same(values(model, opt), values(other, reference)), where
    assert {0, 4} < ends


@pytest.mark.parametrize("name", IN_BACKWARD)
def test_within_backward_each_leaf_is_that_of_the_step_before_or_after(name):
    run_in_backward(name, 20)


@pytest.mark.parametrize("number", RAISES)
def test_within_backward_after_the_signal_of_a_batch_system_too(number):
    with by_signal(number):
        run_in_backward("adamw", 15)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BACKWARD)
def test_within_backward_at_many_moments(name):
    run_in_backward(name, 120)


def test_within_backward_the_next_one_is_refused_by_name():
    model, opt = attached("adamw", True)
    hook = model[0].weight.register_hook(lambda g: _thread.interrupt_main())
    with pytest.raises(KeyboardInterrupt):
        iteration(model, opt)
    hook.remove()
    with pytest.raises(RuntimeError, match=r"opt.zero_grad\(\) after a backward that was interrupted"):
        model(X).square().mean().backward()
    iteration(model, opt)
    assert opt.global_steps == 1


# A second Ctrl-C while a write is held is the same keystroke, or comes late and is not held.
PATIENCE = {"at once": 1.0, "late": 0.0}


def run_twice(name: str, in_backward: bool, patience: str, how_many: int) -> None:
    """The state is whole, or the next step is refused by name: that is for a late one alone."""
    draw, before, ends = random.Random(name), modes(), Counter[str]()
    (model, opt), (other, reference) = attached(name, in_backward), attached(name)
    known = [values(other, reference)]

    def of_steps(steps: int) -> list[Tensor]:
        while len(known) <= steps:
            iteration(other, reference)
            known.append(values(other, reference))
        return known[steps]

    iteration(model, opt)
    with Moment(0) as count:
        iteration(model, opt)
    for _ in range(how_many):
        moment = Moment(draw.randint(1, count.seen), then=draw.choice([1, 2, 3, 5, 8, 13, 21]))
        try:
            with moment:
                iteration(model, opt)
        except KeyboardInterrupt:
            ends["both came"] += moment.again is not None
        where = f"{moment.where} and {moment.again}"
        assert modes() == before, where
        found = None if in_backward else values(model, opt)
        try:
            iteration(model, opt)
        except RuntimeError as error:
            assert patience == "late" and "raised while it was writing into the state" in str(error), (where, error)
            ends["refused"] += 1
            opt.detach()
            model, opt = attached(name, in_backward)
            iteration(model, opt)
        else:
            if found is not None:
                assert same(found, of_steps(opt.micro_steps - 1)), where
                assert same(values(model, opt), of_steps(opt.micro_steps)), where
    assert ends["both came"] > how_many / 8 and (patience == "late" or not ends["refused"])
    # Whether one comes in a write is chance: the writes of an offloaded state are short.
    assert ends["refused"] or patience != "late" or name == "offload"


TWICE = [("adamw", False), ("adamw", True), ("shard, accumulate", False)]
EVERY = [*((name, False) for name in CHAINS), *((name, True) for name in IN_BACKWARD)]


# The others with one patience, in turn.
@pytest.mark.parametrize(
    ("name", "in_backward", "patience"),
    [
        pytest.param(*row, patience, marks=() if row in TWICE else pytest.mark.slow)
        for i, row in enumerate(EVERY)
        for patience in (PATIENCE if row in TWICE else list(PATIENCE)[i % 2 :][:1])
    ],
)
def test_a_second_interrupt_while_the_first_is_handled(name, in_backward, patience, monkeypatch):
    monkeypatch.setattr(_interrupts, "PATIENCE", PATIENCE[patience])
    run_twice(name, in_backward, patience, 30)


# Python swallows one that comes in the callback of a weak reference, of which the compiler has some.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_at_random_times(name):
    """By a timer, so that it comes inside of kernels too."""
    (model, opt), (other, reference) = attached(name), attached(name)
    draw, before, came = random.Random(name), modes(), 0
    for _ in range(40):
        timer = threading.Timer(draw.uniform(0.001, 0.02), _thread.interrupt_main)
        try:
            timer.start()
            while timer.is_alive():
                iteration(model, opt)
            iteration(model, opt)
        except KeyboardInterrupt:
            came += 1
        timer.join()
        assert modes() == before
        while reference.micro_steps < opt.micro_steps:
            iteration(other, reference)
        assert same(values(model, opt), values(other, reference))
    assert came >= 36


class Cached(nn.Module):
    """Adds a tensor of the user's, and stops where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rnn = nn.Linear(6, 6), nn.GRU(6, 6)
        self.stop: Callable[[], object] = bool

    def forward(self, x: Tensor, beside: Tensor) -> Tensor:
        self.stop()
        return self.rnn(self.linear(x + beside.to(x.dtype)))[0]


def test_a_call_that_was_interrupted_is_closed():
    """The user finds parameters, not what the call had in their places."""

    def grads(stopped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Cached()
        zf.attach(model, zf.chain(zf.precision(param_dtype=BF16), zf.scale_loss(8.0), zf.adamw(1e-3)))
        parameters = list(model.parameters())
        mine = torch.ones(6, requires_grad=True)
        if stopped:
            model.stop = _thread.interrupt_main
            with pytest.raises(KeyboardInterrupt):
                model(X, mine)
            model.stop = bool
            assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
            assert model.linear.weight is parameters[0]
            # A part of the model by itself: a call from outside, whose inputs are cast.
            assert model.linear(X).dtype is BF16
        model(X, mine).float().square().sum().backward()
        return [mine.grad, *(p.grad for p in parameters)]

    assert same(grads(True), grads(False))


def test_a_recurrent_call_that_was_interrupted_leaves_no_lock():
    model = nn.GRU(6, 6)
    zf.attach(model, zf.chain(zf.precision(param_dtype=BF16), zf.adamw(1e-3)))
    handle = model.register_forward_pre_hook(lambda *_: _thread.interrupt_main())
    with pytest.raises(KeyboardInterrupt):
        model(X)
    handle.remove()
    assert model.weight_ih_l0.dtype is torch.float32
    thread = threading.Thread(target=model, args=(X,), daemon=True)
    thread.start()
    thread.join(limit(20))
    assert not thread.is_alive()


@pytest.mark.parametrize("number", [None, *RAISES])
@pytest.mark.parametrize("name", ["averaged", "load"])
def test_what_else_writes_a_state(name, number):
    """An average in the place of parameters, and a load: at every moment all of it, or nothing."""
    with contextlib.nullcontext() if number is None else by_signal(number):
        write_else(name, 20)


def write_else(name: str, how_many: int) -> None:
    (model, opt), (other, reference) = attached("low precision"), attached("low precision")
    for _ in range(2):
        iteration(model, opt)
        iteration(other, reference)
    before, saved = values(model, opt), copy.deepcopy(reference.state_dict())
    iteration(other, reference)
    after = values(other, reference)

    def write() -> None:
        if name == "load":
            opt.load_state_dict(reference.state_dict())
        else:
            with opt.averaged():
                pass

    reached = set()
    for n in moments(write, how_many):
        opt.load_state_dict(saved)
        interrupted(n, write)
        now = values(model, opt)
        assert same(now, before) or (name == "load" and same(now, after))
        reached.add(same(now, before))
        iteration(model, opt)
    assert reached == ({True} if name == "averaged" else {False, True})


@pytest.mark.parametrize("name", ["shard, accumulate", "masters", "low precision"])
def test_full_parameters_that_were_interrupted(name):
    """At the entry, inside and at the end: the model has its parameters, and the next step is that of before."""
    (model, opt), (other, reference) = attached(name), attached(name)
    parameters = list(model.parameters())

    def enter() -> None:
        with opt.gathered():
            pass

    for n in moments(enter, 25):
        iteration(model, opt)
        iteration(other, reference)
        where = interrupted(n, enter)
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True)), where
        assert same(values(model, opt), values(other, reference)), where
