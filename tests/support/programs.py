"""Random modules and random training programs over them, drawn from a seed: what the fuzz test runs.

A program is a list of small actions on a list of models; each action is a pure function of the run and of
its own random numbers, so the plain and the attached side do the same.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from parity import Run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 4
KINDS = ["linear", "linear", "norm", "gain", "twice", "frozen", "lora", "gru", "functional", "dict", "weight_norm"]
# Not a batch norm: before one a bias has no gradient, and three rows are too few to normalise by.
KINDS += ["in_place", "views", "experts"]


class Piece(nn.Module):
    """One random layer from width to width."""

    def __init__(self, rng: random.Random):
        super().__init__()
        self.kind = rng.choice(KINDS)
        kind = self.kind
        if kind in ("linear", "twice", "functional", "frozen", "weight_norm", "in_place", "views"):
            self.layer = nn.Linear(WIDTH, WIDTH)
        if kind == "experts":
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            # Not by the data, of which 16 bits may be on the other side of any border.
            self.route = [rng.randrange(3) for _ in range(3)]
        if kind == "norm":
            self.layer = nn.LayerNorm(WIDTH)
        if kind == "gain":
            self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        if kind in ("frozen", "lora"):
            self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        if kind == "lora":
            self.a, self.b = (nn.Parameter(torch.randn(*s) * 0.5) for s in ((2, WIDTH), (WIDTH, 2)))
        if kind == "gru":
            self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)
        if kind == "dict":
            self.params = nn.ParameterDict({k: nn.Parameter(torch.randn(WIDTH) * 0.5 + 1) for k in "ab"})
        if kind == "weight_norm":
            nn.utils.parametrizations.weight_norm(self.layer)
        rng.random()
        # None, or whether reentrant.
        self.again = rng.choice([None, None, None, True, False])

    def compute(self, x: Tensor) -> Tensor:
        if self.kind == "gain":
            x = x * self.gain
        elif self.kind == "dict":
            x = sum(x * p for p in self.params.values())
        elif self.kind == "twice":
            x = F.linear(torch.tanh(self.layer(x)), self.layer.weight)
        elif self.kind == "lora":
            x = self.layer(x) + x @ self.a.T @ self.b.T
        elif self.kind == "gru":
            x = self.layer(x[None])[0][0]  # the rows are a sequence
        elif self.kind == "functional":
            x = torch.func.functional_call(self.layer, {n: p * 1.5 for n, p in self.layer.named_parameters()}, (x,))
        elif self.kind == "in_place":
            x = F.leaky_relu_(self.layer(x).mul_(1.5), 0.1)
        elif self.kind == "views":
            x = self.layer(x).view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH)[:, :]
        elif self.kind == "experts":
            which = torch.arange(len(x)).apply_(lambda row: self.route[row % 3])
            parts = [e(x[which == i]) for i, e in enumerate(self.experts) if bool((which == i).any())]
            order = torch.cat([(which == i).nonzero()[:, 0] for i in range(3)])
            x = torch.cat(parts)[order.argsort()]
        else:
            x = self.layer(x)
        return torch.tanh(x) + 0.1 * x

    def forward(self, x: Tensor) -> Tensor:
        x = self.compute(x) if self.again is None else checkpoint(self.compute, x, use_reentrant=self.again)
        return x


class RandomPieces(nn.Module):
    """Pieces in a row, perhaps one of them used twice, perhaps skipped by an argument, and a random output."""

    def __init__(self, seed: int):
        super().__init__()
        rng = random.Random(seed)
        # A trained layer at both ends: a model whose pieces are all frozen has nothing to train.
        self.first = nn.Linear(WIDTH, WIDTH)
        self.pieces = nn.ModuleList(Piece(rng) for _ in range(rng.randint(1, 4)))
        self.last = nn.Linear(WIDTH, WIDTH)
        if rng.random() < 0.2:
            self.last.weight = self.first.weight
        self.order = [rng.randrange(len(self.pieces)) for _ in range(rng.randint(0, 2))]
        self.out = rng.choice(["tensor", "tuple", "dict", "views"])
        self.skips = rng.random() < 0.3
        self.outer = rng.choice([None, None, True, False])

    def body(self, x: Tensor) -> Tensor:
        for piece in self.pieces:
            x = piece(x)
        for i in self.order:
            x = self.pieces[i](x)
        return x

    def forward(self, x: Tensor, skip: bool = False) -> dict[str, Tensor] | tuple[Tensor, ...] | Tensor:
        x = self.first(x)
        if not (skip and self.skips):
            x = self.body(x) if self.outer is None else checkpoint(self.body, x, use_reentrant=self.outer)
        y = self.last(x)
        if self.out == "views":
            return y[:, :2], y[:, 2:]
        return {"tensor": y, "tuple": (y, None, x), "dict": {"y": y, "more": [x.mean(1)]}}[self.out]

    @property
    def reentrant(self) -> bool:
        """Whether reentrant checkpointing is used, which neither `autograd.grad` nor `inputs=` can pass."""
        return self.outer is True or any(p.again is True for p in self.pieces)

    @property
    def fused(self) -> bool:
        """Whether a layer's backward has no second derivative."""
        return any(p.kind == "gru" for p in self.pieces)


def tensors(out: object) -> list[Tensor]:
    """All tensors of an output."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, dict):
        out = list(out.values())
    return [t for o in out for t in tensors(o)] if isinstance(out, tuple | list) else []


def reduced(out: object, kind: int) -> Tensor:
    """A loss of all tensors of an output."""
    fns: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.square().mean(),
        lambda t: (0.5 * t).exp().mean(),
        lambda t: (t * 1.5).sin().sum(),
    ]
    return sum(fns[(kind + i) % 3](t.float()) for i, t in enumerate(tensors(out)))


@dataclass(frozen=True)
class Step:
    """What a program does in one micro-step: names of actions with their random numbers."""

    actions: tuple[tuple[str, int], ...]


class Actions:
    """Each action: forward, backward, and what else people do in between. Returns tensors to compare."""

    def __init__(self, run: Run, number: int):
        self.run, self.rng = run, random.Random(number)
        self.net = run.models[self.rng.randrange(len(run.models))]
        self.x = run.data(3, WIDTH, grad=True, seed=number % 997)
        self.skip = self.rng.random() < 0.3
        self.kind = self.rng.randrange(3)
        self.simple = any(m.reentrant for m in run.models)

    def loss(self, x: Tensor | None = None) -> Tensor:
        out = reduced(self.net(self.x if x is None else x, skip=self.skip), self.kind)
        return out

    def scalar(self):
        self.loss().backward()
        return [self.x.grad]

    def through_opt(self):
        loss = self.loss()
        if self.run.opt is not None and self.net is self.run.models[0]:
            self.run.opt.backward(loss)
        else:
            loss.backward()
        return [self.x.grad]

    def cotangents(self):
        outs = tensors(self.net(self.x, skip=self.skip))
        torch.autograd.backward(outs, [torch.full_like(o, 0.5 + i) for i, o in enumerate(outs)])
        return [self.x.grad]

    def retained(self):
        if self.simple:
            return self.scalar()
        out = self.net(self.x, skip=self.skip)
        losses = [reduced(out, self.kind), reduced(out, self.kind + 1)]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        return [self.x.grad]

    def two_calls(self):
        (self.loss() * 0.5 + self.loss(torch.tanh(self.x * 2))).backward()
        return [self.x.grad]

    def two_forwards_two_backwards(self):
        a = self.loss()
        b = self.loss(self.run.data(3, WIDTH, seed=5))
        a.backward()
        b.backward()
        return [self.x.grad]

    def all_models(self):
        x = self.x
        for i, net in enumerate(self.run.models):
            x = torch.tanh(tensors(net(x))[0]).float()
            x = (x if x.shape[1] == WIDTH else x.repeat(1, 2)) * (1 + 0.1 * i)
        (x.square().mean()).backward()
        return [self.x.grad]

    def grad_of_input(self):
        if self.simple:
            return self.scalar()
        loss = self.loss()
        (g,) = torch.autograd.grad(loss, self.x, retain_graph=True)
        loss.backward()
        return [g, self.x.grad]

    def penalty(self):
        if self.simple or self.net.fused:
            return self.scalar()
        loss = self.loss()
        (g,) = torch.autograd.grad(loss, self.x, create_graph=True)
        (loss + g.square().sum()).backward()
        return [self.x.grad]

    def inner_module(self):
        a = self.net.first(self.x).float()
        b = self.net.last(torch.tanh(self.net.first(self.x)).float()).float()
        (self.loss() + a.square().mean() + b.exp().mean()).backward()
        return [self.x.grad]

    def looks_between(self):
        loss = self.loss()
        with torch.no_grad():
            self.net(self.x)
            self.net.first(self.x)
            for p in self.net.pieces:
                p(self.run.data(3, WIDTH).to(next(iter(self.net.parameters())).dtype))
        with torch.inference_mode():
            self.net(self.run.data(3, WIDTH))
        loss.backward()
        return [self.x.grad]

    def around(self):
        reentrant = self.rng.random() < 0.5
        out = checkpoint(lambda x: tensors(self.net(x, skip=self.skip))[0], self.x, use_reentrant=reentrant)
        (reduced(out, self.kind) + self.net.first(self.x).float().square().mean()).backward()
        return [self.x.grad]

    def weight_penalty(self):
        extra = sum(p.float().square().sum() for p in self.net.parameters() if p.requires_grad)
        (self.loss() + 0.1 * extra).backward()
        return [self.x.grad]

    def fails_in_forward(self):
        def fail(*_):
            raise ArithmeticError

        handle = self.net.last.register_forward_pre_hook(fail)
        with contextlib.suppress(ArithmeticError):
            self.net(self.x)
        handle.remove()
        return self.scalar()

    def fails_in_backward(self):
        before = [(p, None if p.grad is None else p.grad.clone()) for net in self.run.models for p in net.parameters()]

        def fail(_):
            raise ArithmeticError

        handle = self.net.last.bias.register_hook(fail)
        with contextlib.suppress(ArithmeticError):
            self.loss().backward()
        handle.remove()
        for p, g in before:
            p.grad = g
        self.x.grad = None
        return self.scalar()

    def features(self):
        kept: list[Tensor] = []
        handle = self.net.first.register_forward_hook(lambda m, a, out: kept.append(out.detach()))
        change = self.rng.random() < 0.5
        other = self.net.last.register_forward_hook(lambda m, a, out: out * 2 if change else None)
        loss = self.loss()
        handle.remove()
        other.remove()
        (loss + sum(k.float().exp().mean() for k in kept)).backward()
        return [self.x.grad]

    def in_place(self):
        out = tensors(self.net(self.x, skip=self.skip))
        out[0].mul_(2.0)
        reduced(out, self.kind).backward()
        return [self.x.grad]

    def functional(self):
        params = {n: p.detach().clone().requires_grad_() for n, p in self.net.first.named_parameters()}
        a = torch.func.functional_call(self.net.first, params, (self.x,)).float()
        (a.square().mean() + self.loss()).backward()
        return [self.x.grad, params["weight"].grad]

    def hidden_backward(self):
        """A backward in a hook of a backward."""
        out = self.loss()

        def hook(g):
            with torch.enable_grad():
                self.net.first(self.x.detach()).float().square().mean().backward()
            return g

        out.register_hook(hook)
        out.backward()
        return [self.x.grad]


ACTIONS = [name for name in vars(Actions) if not name.startswith("_") and name != "loss"]


def draw(seed: int) -> tuple[list[int], list[Step], int, str]:
    """Seeds of models, micro-steps of a window, micro-batches, and the name of a pipeline."""
    from parity import PIPES

    rng = random.Random(seed)
    nets = [rng.randrange(10**6) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    every = rng.choice([1, 1, 2, 4])
    steps = [
        Step(tuple((rng.choice(ACTIONS), rng.randrange(10**6)) for _ in range(rng.randint(1, 3)))) for _ in range(every)
    ]
    return nets, steps, every, rng.choice(list(PIPES))


def program_of(steps: list[Step]) -> Callable[[Run], list[Tensor]]:
    """The program as `compare` runs it."""

    def program(run: Run) -> list[Tensor]:
        results = []
        for name, number in steps[run.step % len(steps)].actions:
            results += getattr(Actions(run, number), name)()
        # Every model gets a gradient in every micro-step.
        sum(reduced(net(run.data(3, WIDTH)), 0) for net in run.models).backward()
        return results

    return program
