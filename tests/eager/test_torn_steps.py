"""A step that raises leaves its state as it was, or that state is refused until another one is loaded."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import models as zoo
import pytest
import torch
from time_limits import limit
from torch import Tensor, nn
from trees import flat

import zerofn as zf
from zerofn.extend import Transform
from zerofn.testing import assert_trees_equal


class Raises:
    """A transform that gives gradients as they come, and raises at the call that it is armed for; a call is a leaf."""

    def __init__(self, error: type[BaseException] = ZeroDivisionError):
        self.left, self.error = 0, error

    def __call__(self) -> Transform:
        # With needs="element" it would be traced once, and called no more.
        @zf.leafwise
        def watched(grad, param):
            self.left -= 1
            if self.left == 0:
                raise self.error("by the test")
            return grad

        return watched()


@zf.leafwise(optimizer=True, init=torch.zeros_like, needs="element")
def plain_sgd(grad, param, velocity, *, lr):
    velocity = 0.9 * velocity + grad
    return param - lr * velocity, velocity


CHAINS: dict[str, Callable[[Raises], Transform]] = {
    "first": lambda r: zf.chain(r(), zf.adamw(1e-2)),
    "behind accumulate": lambda r: zf.chain(zf.accumulate(2), r(), zf.adamw(1e-2)),
    "before accumulate": lambda r: zf.chain(r(), zf.accumulate(2), zf.adamw(1e-2)),
    "behind a norm": lambda r: zf.chain(zf.clip_by_global_norm(1.0), r(), zf.sgd(0.1, momentum=0.9)),
    "low precision": lambda r: zf.chain(r(), zf.low_precision_adam(1e-2), zf.ema(0.9)),
    "a direction": lambda r: zf.chain(zf.scale_by_adam(), r(), zf.scale_by_lr(1e-2)),
    "in a group": lambda r: zf.chain(
        zf.partition({"a": zf.adamw(1e-2), "b": zf.chain(r(), zf.sgd(0.1))}, lambda path: "ab"["last" in path])
    ),
    "own optimizer": lambda r: zf.chain(r(), plain_sgd(lr=0.1), zf.ema(0.9)),
}
# Leaves at which it raises: in the first bucket, in the second, in the last.
PLACES = [(name, at) for name in CHAINS for at in ((1, 2) if name == "in a group" else (1, 4, 5))]
# Each chain at one behind the first write, and some of them in front of it.
OFTEN = [(name, at) for name, at in PLACES if at == (2 if name == "in a group" else 4 + len(name) % 2)] + PLACES[:6:3]


def net() -> nn.Module:
    """Of leaves above 4 MiB, so that its updates are run in buckets."""
    torch.manual_seed(0)
    return zoo.Net(6, 150_000)


X = torch.linspace(-1, 1, 30).reshape(5, 6)


def backward(model: nn.Module, step: int) -> None:
    """On other numbers in each step, so that no mean of two gradients is one of them."""
    model(X * (1 + step)).square().mean().backward()


def one_step(model: nn.Module, opt: zf.Optimizer) -> None:
    opt.zero_grad()
    backward(model, opt.micro_steps)
    opt.step()


def values(opt: zf.Optimizer) -> list[Tensor]:
    state = opt.state
    tensors = [x for x in flat(state.transforms).values() if isinstance(x, Tensor)]
    return [x.clone() for x in (*state.leaves.values(), *tensors, state.step, state.micro_step)]


@pytest.mark.parametrize(
    ("name", "at"), [pytest.param(*x, marks=() if x in OFTEN else pytest.mark.slow) for x in PLACES]
)
def test_a_step_that_raises(name, at, tmp_path):
    """The error may come before the first write or after it. What follows is the run without an error, to the bit."""
    raises = Raises()
    model, other = net(), net()
    opt, reference = zf.attach(model, CHAINS[name](raises)), zf.attach(other, CHAINS[name](Raises()))
    for _ in range(3):
        one_step(model, opt)
        one_step(other, reference)
    saved, before = copy.deepcopy(opt.state_dict()), values(opt)
    zf.save(tmp_path / "saved", opt)
    opt.zero_grad()
    backward(model, opt.micro_steps)
    raises.left = at
    with pytest.raises(ZeroDivisionError):
        opt.step()
    if all(map(torch.equal, values(opt), before)):
        assert_trees_equal(opt.state_dict(), saved)
    else:
        for use in (opt.step, opt.state_dict):
            with pytest.raises(
                RuntimeError, match=r"opt\.\w+\(\) after a step or a load that raised while it was writing"
            ):
                use()
        for given in (opt, opt.state):
            with pytest.raises(RuntimeError, match="of a state into which a step or a load was writing when it raised"):
                zf.save(tmp_path / "torn", given)
        assert not (tmp_path / "torn").exists()
        if at % 2:
            opt.load_state_dict(saved)
        else:
            zf.load(tmp_path / "saved", like=opt)
    one_step(model, opt)
    one_step(other, reference)
    assert_trees_equal(opt.state_dict(), reference.state_dict())


def test_one_may_go_on_from_what_is_there():
    raises = Raises(KeyboardInterrupt)
    model = net()
    opt = zf.attach(model, zf.chain(zf.accumulate(2), raises(), zf.sgd(0.1)))
    one_step(model, opt)
    raises.left = 5
    with pytest.raises(KeyboardInterrupt):
        one_step(model, opt)
    with pytest.raises(RuntimeError, match=r"opt.load_state\(opt.state\) to go on from what is there"):
        one_step(model, opt)
    opt.load_state(opt.state)
    one_step(model, opt)
    assert opt.micro_steps == 2


class Bomb(Tensor):
    """Raises where it is copied from."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is Tensor.copy_:
            raise KeyboardInterrupt
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("at", ["params", "last"])
def test_a_load_that_raises_in_the_middle(at):
    model = net()
    opt = zf.attach(model, zf.adamw(0.1))
    one_step(model, opt)
    saved = copy.deepcopy(opt.state_dict())
    one_step(model, opt)
    broken = copy.deepcopy(saved)
    own = broken["zerofn"]
    entries = own["params"] if at == "params" else broken["state"][own["param_names"][0].index("last.bias")]
    name = "last.bias" if at == "params" else "exp_avg_sq"
    entries[name] = entries[name].as_subclass(Bomb)
    with pytest.raises(KeyboardInterrupt):
        opt.load_state_dict(broken)
    for use in (opt.step, opt.state_dict):
        with pytest.raises(RuntimeError, match="after a step or a load that raised while it was writing"):
            use()
    opt.load_state_dict(saved)
    assert_trees_equal(opt.state_dict(), saved)


def test_within_backward():
    raises = Raises()
    model, plain = net(), net()
    opt = zf.attach(model, zf.chain(zf.scale_by_adam(), raises(), zf.scale_by_lr(1e-2)), in_backward=True)
    one_step(model, opt)
    saved = copy.deepcopy(opt.state_dict())
    plain.load_state_dict(model.state_dict())
    raises.left = 2
    with pytest.raises(ZeroDivisionError):
        backward(model, 1)
    opt.zero_grad()
    with pytest.raises(
        RuntimeError, match=r"loss.backward\(\) with in_backward=True after a step or a load that raised"
    ):
        backward(model, 1)
    for use in (opt.step, opt.state_dict):
        with pytest.raises(RuntimeError):
            use()
    opt.load_state_dict(saved)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    one_step(model, opt)
    assert opt.global_steps == 2


@pytest.mark.parametrize("route", ["eager", "donated"])
def test_sums_that_are_divided_are_written(route):
    """The window closes in a micro-step that brings one of two leaves no gradient: its sum is divided all the same."""
    raises, params = Raises(), {"a": torch.ones(3), "b": torch.ones(3)}
    tx = zf.chain(zf.accumulate(2), raises(), zf.sgd(1.0))
    if route == "eager":
        model = nn.ParameterDict(params)
        opt = zf.attach(model, tx)
        model["a"].sum().backward()
        opt.step()
        opt.zero_grad()
        model["b"].sum().backward()
        again = opt.step
    else:
        step = zf.make_step(lambda p, key: p[key].sum(), tx, donate=True)
        state, _ = step(zf.init(tx, params), "a")
        again = partial(step, state, "b")
    raises.left = 1
    with pytest.raises(ZeroDivisionError):
        again()
    with pytest.raises(RuntimeError, match=r"or a load that raised while it was writing|or a load was writing"):
        again()


def test_a_watch_that_raises_at_the_end_of_a_step_within_backward():
    """A leaf without a gradient comes to the watch in `opt.step()`, behind the average that is written."""
    left = [2]

    def update(grads, state, params, carry, ctx):
        left[0] -= 1
        if not left[0]:
            raise ZeroDivisionError
        return grads, state

    watch = Transform("watch", needs="element", facts=zf.extend.Facts(watches=True), update_fn=update)
    model = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2)})
    opt = zf.attach(model, zf.chain(zf.sgd(0.5), zf.ema(0.5), watch), in_backward=True)
    model["a"].sum().backward()
    with pytest.raises(ZeroDivisionError):
        opt.step()
    with pytest.raises(RuntimeError, match="after a step or a load that raised while it was writing"):
        opt.step()


@pytest.mark.parametrize("given_up", ["load_state_dict", "a backward that raised"])
def test_a_window_that_was_given_up_says_nothing_of_the_next(given_up):
    """Its losses were divided by the user; those of the next one by the chain."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    opt = zf.attach(model, zf.chain(zf.accumulate(2), zf.sgd(1.0)))
    saved, x = copy.deepcopy(opt.state_dict()), torch.ones(1, 1)
    if given_up == "load_state_dict":
        opt.backward(model(x).sum(), scale_wrt_gas=False)
        opt.step()
        opt.load_state_dict(saved)
        opt.zero_grad()
    else:
        hidden = model(x)
        hidden.register_hook(lambda g: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            opt.backward(hidden.sum(), scale_wrt_gas=False)
        opt.zero_grad()
    for _ in range(2):
        opt.backward(model(x).sum())
        opt.step()
    assert model.weight.item() == -1.0


def loss_fn(params: Any, x: Tensor) -> Tensor:
    return (params["a"] * x.sum() + params["b"].sum() * x.square().sum()).square().mean()


@pytest.mark.parametrize("donate", [False, True])
def test_the_pure_route(donate, tmp_path):
    """A donated step that raises before its first write leaves its state usable; one that raises behind it does not."""
    raises = Raises()
    tx = zf.chain(raises(), zf.accumulate(1), zf.scale_by_adam(), raises(), zf.scale_by_lr(1e-2))
    step = zf.make_step(loss_fn, tx, donate=donate)
    params = {"a": torch.linspace(-1, 1, 8), "b": torch.linspace(0, 1, 3)}
    state, _ = step(zf.init(tx, params), X[0])
    zf.save(tmp_path / "saved", state)
    expected, _ = zf.make_step(loss_fn, tx)(state, X[1])
    raises.left = 1
    with pytest.raises(ZeroDivisionError):
        step(state, X[1])
    raises.left = 3
    with pytest.raises(ZeroDivisionError):
        step(state, X[1])
    if donate:
        torn = "of a state into which a step or a load was writing when it raised"
        for use in (partial(step, state, X[1]), partial(zf.save, tmp_path / "torn", state)):
            with pytest.raises(RuntimeError, match=torn):
                use()
        state = zf.load(tmp_path / "saved", like=state)
    state, _ = step(state, X[1])
    assert_trees_equal(state.transforms, expected.transforms)
    assert_trees_equal(state.leaves, expected.leaves)


def test_of_a_donated_state_the_form_is_there(tmp_path):
    """The step is made, and what it gave is lost, as by Ctrl-C before the assignment."""
    tx = zf.adamw(1e-2)
    step = zf.make_step(loss_fn, tx, donate=True)
    state, _ = step(zf.init(tx, {"a": torch.linspace(-1, 1, 8), "b": torch.linspace(0, 1, 3)}), X[0])
    saves = zf.Checkpoints(tmp_path)
    saves.save(state)
    saved = copy.deepcopy(state.leaves)
    expected, _ = zf.make_step(loss_fn, tx)(state, X[1])
    step(state, X[1])
    with pytest.raises(RuntimeError, match="of a state that was donated"):
        zf.save(tmp_path / "other", state)
    with pytest.raises(RuntimeError, match="of a state that was donated"):
        zf.load(saves.at(1), like=state, strict=False, tx=tx)
    for loaded in (zf.load(saves.at(1), like=state), saves.load(like=state)):
        assert_trees_equal(loaded.leaves, saved)
        after, _ = step(loaded, X[1])
        assert_trees_equal((after.leaves, after.transforms), (expected.leaves, expected.transforms))


def _on_ranks(stage: str) -> list[str]:
    """Rank 1 alone raises behind the first write; a loop that goes on after errors ends on all ranks, and in time."""
    raises, found = Raises(), []
    first = {"zero0": zf.all_reduce, "zero3": zf.shard}[stage]()
    model = zoo.Net()
    opt = zf.attach(model, zf.chain(first, zf.scale_by_adam(), raises(), zf.scale_by_lr(1e-2)))
    rank = torch.distributed.get_rank()
    for step in range(4):
        raises.left = 2 if rank == 1 and step == 1 else 0
        try:
            opt.zero_grad()
            backward(model, step)
            opt.step()
            found.append("made")
        except ZeroDivisionError:
            found.append("raised")
        except RuntimeError as error:
            found.append(str(error).splitlines()[0])
            break
    return found


@pytest.mark.parametrize("stage", [pytest.param("zero0", marks=pytest.mark.slow), "zero3"])
def test_on_one_rank_alone(stage):
    """Not one step is made after it, on any rank, and none waits for the others until a time limit."""
    zero, one = zf.launch(_on_ranks, 2, stage, timeout=limit(60))
    told = r"ranks disagree on the number of steps|this rank waits in all_(reduce|gather) for rank"
    assert one[:2] == ["made", "raised"] and len(one) == 3 and re.match(told, one[2])
    # Where a number of all ranks is needed in the step itself, rank 0 does not come to its end.
    told += "|an update of whole leaves that failed at their owner"
    assert zero[:-1] in (["made"], ["made", "made"]) and re.match(told, zero[-1])
