"""Tensors in whatever a model takes and returns cross the boundary; nothing crosses it unseen."""

from __future__ import annotations

import collections
import gc
import random
import threading
from collections import OrderedDict
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributions as D
from one_launch import one_launch
from parity import Run, compare
from time_limits import limit
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerofn as zf
import zerofn.module.boundary  # inside: how often outputs are searched


class Out(NamedTuple):
    logits: Tensor
    loss: Tensor
    name: str = "x"


@dataclass
class Plain:
    logits: Tensor
    loss: Tensor
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    logits: Tensor
    loss: Tensor


@dataclass
class Unset:
    logits: Tensor
    loss: Tensor
    cache: Any = field(init=False)


class ModelOutput(OrderedDict):
    """A lookalike of transformers': a mapping and a dataclass at once, whose items are its attributes."""

    def __init_subclass__(cls) -> None:
        dataclass(cls)

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None:
                super().__setitem__(f.name, value)

    def __getitem__(self, k):
        return OrderedDict.__getitem__(self, k) if isinstance(k, str) else tuple(self.values())[k]

    def __setitem__(self, k, v):
        super().__setitem__(k, v)
        object.__setattr__(self, k, v)

    def __setattr__(self, name, value):
        if name in self.keys():
            OrderedDict.__setitem__(self, name, value)
        object.__setattr__(self, name, value)


class LMOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: Any = None


class Batch(collections.UserDict):
    pass


class MyList(list):
    pass


class Nested(nn.Module):
    """Takes nests, gives the container it was built with."""

    def __init__(self, wrap):
        super().__init__()
        self.a = nn.Linear(6, 4)
        self.b = nn.Linear(6, 4)
        self.wrap = wrap

    def forward(self, batch, *rest, flag, scale=None):
        assert flag == "text" and batch["ids"].dtype == torch.int64
        y = self.a(batch["x"][0]) + self.b(batch["x"][1]["deep"]) * (1.0 if scale is None else scale)
        return self.wrap(y, y.exp().mean())


WRAPS = {
    "tuple": lambda y, loss: (y, None, loss, 3),
    "list": lambda y, loss: [y, "text", loss],
    "list subclass": lambda y, loss: MyList([y, loss]),
    "dict": lambda y, loss: {"logits": y, "loss": loss, "n": 1},
    "ordered dict": lambda y, loss: OrderedDict(logits=y, loss=loss),
    "default dict": lambda y, loss: collections.defaultdict(list, logits=y, loss=loss),
    "user dict": lambda y, loss: Batch(logits=y, loss=loss),
    "named tuple": lambda y, loss: Out(y, loss),
    "dataclass": lambda y, loss: Plain(y, loss, {"again": [y]}),
    "dataclass with an unset field": lambda y, loss: Unset(y, loss),
    "frozen dataclass": lambda y, loss: Frozen(y, loss),
    "model output": lambda y, loss: LMOutput(loss=loss, logits=y),
    "nested": lambda y, loss: {"a": [Frozen(y, loss), (y,)]},
}


def take(out: Any) -> tuple[Tensor, Tensor]:
    if isinstance(out, dict) and "a" in out:
        out = out["a"][0]
    if isinstance(out, tuple | list) and not hasattr(out, "_fields"):
        tensors = [t for t in out if isinstance(t, Tensor)]
        return tensors[0], tensors[-1]
    if isinstance(out, LMOutput):
        assert out.logits is out["logits"] is out[1]
        return out.logits, out.loss
    if isinstance(out, collections.abc.Mapping):
        return out["logits"], out["loss"]
    return out.logits, out.loss


@pytest.mark.parametrize("pipe", ["scaled", "fp16 dynamic", "bf16 scaled"])
@pytest.mark.parametrize("kind", WRAPS)
def test_containers(kind: str, pipe: str):
    def program(run: Run):
        x, deep, scale = (
            run.data(5, 6, grad=True),
            run.data(5, 6, grad=True, seed=1),
            torch.tensor(2.0, requires_grad=True),
        )
        batch = Batch(x=(x, {"deep": deep, "none": None}), ids=torch.arange(5))
        out = run.model(batch, "more", flag="text", scale=scale)
        assert type(out) is type(WRAPS[kind](x, x))
        logits, loss = take(out)
        (logits.square().mean() + loss).backward()
        assert batch["x"][0] is x and batch["x"][1]["deep"] is deep
        return [x.grad, deep.grad, scale.grad]

    compare(program, lambda: Nested(WRAPS[kind]), pipe)


def normal(y: Tensor) -> D.Normal:
    return D.Normal(y.tanh(), 0.5 + y.sigmoid())


DISTRIBUTIONS = {
    "categorical": lambda y, loss: D.Categorical(logits=y.tanh()),
    "normal": lambda y, loss: normal(y),
    "independent": lambda y, loss: D.Independent(normal(y), 1),
    "squashed": lambda y, loss: D.TransformedDistribution(normal(y), [D.SigmoidTransform()]),
    "affine": lambda y, loss: D.TransformedDistribution(normal(y), [D.AffineTransform(y.cos(), 1 + y.sigmoid())]),
    "mixture": lambda y, loss: D.MixtureSameFamily(D.Categorical(logits=y.tanh()), normal(y)),
}


@pytest.mark.parametrize("pipe", ["scaled", "fp16 dynamic", "bf16 scaled"])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_distributions(kind: str, pipe: str):
    """A policy that gives a distribution, as those of reinforcement learning do."""

    def program(run: Run):
        x = run.data(5, 6, grad=True)
        found = run.model({"x": (x, {"deep": x}), "ids": torch.arange(5)}, flag="text")
        assert type(found) is type(DISTRIBUTIONS[kind](x, x.mean()))
        at = torch.arange(5) % 2 if kind == "categorical" else torch.full(found.batch_shape + found.event_shape, 0.25)
        (-found.log_prob(at.to(torch.int64 if kind == "categorical" else x.dtype)).float().mean()).backward()
        return [x.grad]

    compare(program, lambda: Nested(DISTRIBUTIONS[kind]), pipe)


def test_the_same_tensor_twice_stays_one():
    model = Nested(lambda y, loss: (y, [y]))
    zf.attach(model, zf.chain(zf.scale_loss(8.0), zf.sgd(0.1)))
    a, (b,) = model({"x": [torch.ones(2, 6), {"deep": torch.ones(2, 6)}], "ids": torch.arange(2)}, flag="text")
    assert a is b


def test_untouched_values_are_the_very_same():
    class Echo(nn.Linear):
        def forward(self, x, **rest):
            return super().forward(x), rest

    model = Echo(2, 2)
    zf.attach(model, zf.chain(zf.scale_loss(8.0), zf.sgd(0.1)))
    given = {"words": ["a"], "ids": torch.arange(3)}
    _, rest = model(torch.ones(1, 2), given=given)
    assert rest["given"] is given and rest["given"]["ids"] is given["ids"]


def test_a_parameter_and_an_input_as_outputs():
    class Leaky(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight, x

    def program(run: Run):
        x = run.data(3, 2, grad=True)
        y, w, same = run.model(x)
        (y.exp().mean() + w.square().sum() + same.square().sum()).backward()
        return x.grad

    for pipe in ("fp32", "scaled", "fp16 dynamic"):
        compare(program, lambda: Leaky(2, 2), pipe)


def test_outputs_that_need_no_gradient():
    class Detached(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y.detach(), (y > 0), y.argmax(1)

    def program(run: Run):
        y, d, mask, best = run.model(run.data(3, 2))
        assert not d.requires_grad and mask.dtype == torch.bool and best.dtype == torch.int64
        (y * d * mask).sum().backward()

    for pipe in ("scaled", "fp16 dynamic"):
        compare(program, lambda: Detached(2, 2), pipe, tol=0.05)


class Opaque:
    def __init__(self, hidden):
        self.hidden = hidden


def test_an_unknown_object_without_gradients_passes():
    class Hides(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, Opaque(y.detach())

    model = Hides(2, 2)
    zf.attach(model, zf.chain(zf.scale_loss(8.0), zf.sgd(0.1)))
    y, opaque = model(torch.ones(1, 2))
    assert torch.equal(opaque.hidden, y.detach())


# -- the other doors ------------------------------------------------------------------------------------------


def scaled(model: nn.Module) -> zf.Optimizer:
    return zf.attach(model, zf.chain(zf.scale_loss(1024.0), zf.sgd(0.1)))


def test_a_parameter_from_a_list_is_refused_by_name():
    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.weights = [self.inner.weight]

        def forward(self, x):
            return x @ self.weights[0] + self.inner.bias

    model = Uses()
    scaled(model)
    with pytest.raises(
        RuntimeError, match=r"its parameter inner.weight from elsewhere(.|\n)*self.weight in forward, or an nn.Param"
    ):
        model(torch.ones(1, 2)).sum().backward()
    plain = Uses()
    plain(torch.ones(1, 2)).sum().backward()
    other = Uses()
    zf.attach(other, zf.chain(zf.sgd(0.1)))
    other(torch.ones(1, 2)).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), other.parameters(), strict=True))


class Prompted(nn.Linear):
    def forward(self, x):
        return super().forward(x * self.prompt[0] + self.soft)


def prompted(run: Run):
    model: Any = run.model
    model.prompt, model.soft = [torch.ones(2, requires_grad=True)], torch.zeros(2, requires_grad=True)
    for _ in range(2):
        model(run.data(3, 2)).exp().mean().backward()
    return [model.prompt[0].grad, model.soft.grad]


def test_a_tensor_of_the_users_in_an_attribute_is_used_without_a_scale():
    compare(prompted, lambda: Prompted(2, 2), "fp32")
    with pytest.raises(RuntimeError, match=r"neither its parameter nor an argument(.|\n)*pass it to the model"):
        compare(prompted, lambda: Prompted(2, 2), "scaled")


def test_writing_into_a_cast_parameter_is_stored():
    class Writes(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.01, 0.01)
            return super().forward(x)

    model = Writes(2, 2)
    zf.attach(model, zf.chain(zf.precision(param_dtype=torch.bfloat16), zf.sgd(0.1)))
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    # An element that was within its bounds is as exact as it was.
    bound = torch.tensor(-0.01).bfloat16().float().abs()
    inside = before.bfloat16().float().abs() <= bound
    assert torch.equal(model.weight, torch.where(inside, before, bound * before.sign())) and not inside.all()
    model = Writes(2, 2)
    scaled(model)
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.abs().max() <= 0.01


class Recurrent(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.inner = getattr(nn, kind)(4, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0]).square().mean()


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_threads_that_call_a_recurrent_module_do_not_share_its_weights(kind: str):
    """One thread stops between the choice of the weights and the kernel, and another one calls the model."""
    plain, model = Recurrent(kind), Recurrent(kind)
    opt = scaled(model)
    xs = [torch.randn(3, 6, 4), torch.randn(3, 6, 4)]
    check, inside, done = model.inner.check_forward_args, threading.Event(), threading.Event()

    def check_slowly(*args: Any) -> None:
        if not inside.is_set():
            inside.set()
            done.wait(0.3)
        check(*args)

    model.inner.check_forward_args = check_slowly
    losses: list[Tensor] = []
    one = threading.Thread(target=lambda: losses.append(model(xs[0])))
    one.start()
    assert inside.wait(limit(10))
    losses.append(model(xs[1]))
    done.set()
    one.join()
    for x, loss in zip(xs, losses, strict=True):
        plain(x).backward()
        loss.backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=lambda text, name=name: f"{name}: {text}")
    # A call that failed has let the others in again.
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 6, 5))
    other = threading.Thread(target=model, args=(xs[0],), daemon=True)
    other.start()
    other.join(limit(10))
    assert not other.is_alive()
    del model.inner.check_forward_args
    opt.detach()
    model.zero_grad()
    model(xs[0]).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
def test_a_backward_through_thousands_of_calls_repeats_parts_of_the_first_ones_too():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: y * self.gain, x, use_reentrant=True)

    model = Inner()
    scaled(model)
    x = torch.ones(4, requires_grad=True)
    torch.stack([model(x) for _ in range(4200)]).sum().backward()
    assert torch.equal(model.gain.grad, torch.full((4,), 4200.0))


def test_ranges_are_found_as_by_a_look_at_all_of_them():
    """Numbers of several threads overlap, and the last span counts."""
    boundary, rng = zerofn.module.boundary, random.Random(0)
    for _ in range(50):
        ranges, every = boundary.NodeRanges(), []
        for i in range(200):
            start = rng.randrange(60)
            end = start + rng.randrange(12)
            graph = boundary.GraphOfCall({i})
            ranges.add(start, end, graph)
            every.append((start, end, graph))
            for number in (*range(80), (1 << 64) - 1) if i < 40 or not i % 20 else ():
                made = [graph for a, b, graph in every if a <= number < b]
                assert (number in ranges) == bool(made) and ranges.find(number) is (made[-1] if made else None)


def test_ranges_of_graphs_that_are_gone_are_forgotten():
    boundary = zerofn.module.boundary
    ranges, kept = boundary.NodeRanges(), {}
    for i in range(1000):
        graph = boundary.GraphOfCall({i})
        ranges.add(3 * i, 3 * i + 2, graph)
        if not i % 100:
            kept[i] = graph
        assert len(ranges.ranges) <= 2 * (boundary.LAST_CALLS + len(kept))
        assert all(3 * j in ranges for j in range(max(0, i - boundary.LAST_CALLS + 1), i + 1))
        assert all(ranges.find(3 * j) is graph for j, graph in kept.items())
    assert 3 not in ranges


CHAINS = {
    "precision": lambda: (zf.precision(torch.bfloat16),),
    "a scale": lambda: (zf.scale_loss(8.0),),
    "both": lambda: (zf.precision(torch.bfloat16, output_dtype=torch.float32), zf.scale_loss(8.0)),
    "shard": lambda: (zf.shard(), zf.precision(torch.bfloat16)),
}


class Repeated(nn.Module):
    """Checkpoints a part of its call."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return checkpoint(lambda x: (self.inner(x) @ self.inner.weight).sin(), x, use_reentrant=False).view(-1)


def trains(model, opt, x):
    model(x).float().square().mean().backward()
    opt.step()
    opt.zero_grad()


def without_gradients(model, opt, x):
    with torch.no_grad():
        model(x)


def dropped(model, opt, x):
    model(x)


def writes_into_the_output(model, opt, x):
    y = model(x)
    y *= 2
    y.float().sum().backward()
    opt.zero_grad()


def raises(model, opt, x):
    with pytest.raises((RuntimeError, IndexError)):
        model(x[0, :3])


HABITS = (trains, without_gradients, dropped, writes_into_the_output, raises)


def kept_by_calls(chain):
    """How many Python objects more there are for each call after others, for each habit."""
    torch.manual_seed(0)
    model, x = Repeated(), torch.ones(2, 8)
    opt = zf.attach(model, zf.chain(*CHAINS[chain](), zf.adamw(0.01)))
    found = {}
    for habit in HABITS:
        # Records of graphs that nobody has run are looked through once in many calls.
        calls = 160 if habit is dropped else 64
        for _ in range(calls):
            habit(model, opt, x)
        gc.collect()
        before = len(gc.get_objects())
        for _ in range(calls):
            habit(model, opt, x)
        gc.collect()
        found[habit.__name__] = (len(gc.get_objects()) - before) / calls
    return found


# The one of both has what each of them keeps; calls under shard are made on ranks.
@pytest.mark.parametrize("chains", [("both",), pytest.param(tuple(CHAINS), marks=pytest.mark.slow)])
def test_calls_keep_no_objects(chains):
    """Records of calls whose graph is gone are dropped, at every stage."""
    for chain in chains:
        assert max(kept_by_calls(chain).values()) < 0.9, chain


@pytest.mark.parametrize("chain", ["shard", pytest.param("both", marks=pytest.mark.slow)])
def test_calls_on_ranks_keep_no_objects(chain):
    for ranks in one_launch(2, kept_by_calls, [(chain,)], 120.0).values():
        assert all(max(found.values()) < 0.9 for found in ranks), ranks


@pytest.mark.slow
def test_a_soak_of_calls_keeps_nothing():
    model, x = Repeated(), torch.ones(2, 8)
    opt = zf.attach(model, zf.chain(zf.precision(torch.bfloat16), zf.scale_loss(8.0), zf.sgd(0.01)))
    objects = []
    for calls in (1000, 20_000):
        for i in range(calls):
            HABITS[i % len(HABITS)](model, opt, x)
        gc.collect()
        objects.append(len(gc.get_objects()))
    assert objects[1] - objects[0] < 150


def test_a_graph_that_is_kept_is_repeated_after_many_calls():
    """Outputs may wait for their backward: also one that is a view, and was written into."""
    wanted = []
    for others in (0, 300):
        torch.manual_seed(0)
        model, x = Repeated(), torch.randn(2, 8)
        opt = zf.attach(model, zf.chain(zf.precision(torch.bfloat16), zf.scale_loss(8.0), zf.sgd(0.01)))
        y = model(x.clone())
        y *= 3
        for _ in range(others):
            model(x)
        y.float().square().sum().backward()
        opt.step()
        wanted.append(model.inner.weight.detach().clone())
    assert torch.equal(*wanted)
