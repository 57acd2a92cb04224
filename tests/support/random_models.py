"""Random models: blocks of every kind in a row, under checkpoints of both kinds, with the habits people give a forward.

A `Form` says what a model is made of, and is printed; `Stack(form, seed)` is the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint

WIDTH = 4
# Checkpoints: none, and of both kinds.
WRAPS = ("plain", "saved", "reentrant")


class Form(NamedTuple):
    """What a model is made of.

    Attributes:
        blocks: the kind of each, and how it is checkpointed.
        again: which are called once more behind the others.
        tied: whether the last layer has the weight of the first.
        same: whether the first block is the last one too.
        close: whether the first and the last layer are one unit.
        frozen: whether the first block is frozen.
        scale: whether there is a parameter of one number outside of blocks.
        outer: a checkpoint around all blocks.
        skips: whether a call may leave all blocks out.
        out: what a call returns: "tensor", "tuple", "dict", "views" or "features".
        habits: of `HABITS`.
        ways: which of `MOMENTUM`, `CLAMPS` and `INSIDE` a habit takes.
    """

    blocks: tuple[tuple[str, str], ...]
    again: tuple[int, ...] = ()
    tied: bool = False
    same: bool = False
    close: bool = False
    frozen: bool = False
    scale: bool = False
    outer: str = "plain"
    skips: bool = False
    out: str = "tensor"
    habits: tuple[str, ...] = ()
    ways: tuple[int, int, int] = (0, 0, 0)

    @property
    def plain(self) -> bool:
        """Whether there is no checkpoint around blocks."""
        return self.outer == "plain"


# ---------------------------------------------------------------- blocks


def wrapped(wrap: str, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return fn(x) if wrap == "plain" else checkpoint(fn, x, use_reentrant=wrap == "reentrant")


class Block(nn.Module):
    """One layer of some kind from width to width."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        if kind in LINEAR:
            self.inner: Any = nn.Linear(WIDTH, WIDTH)
        if kind == "gated":
            self.gain = nn.Parameter(torch.tensor(0.6))
        if kind == "bare":
            # Leaves read by name, one of them of one element, one never used.
            self.w, self.b = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH), nn.Parameter(torch.zeros(1))
            self.idle, self.empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(0, 3))
        if kind == "experts":
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if kind == "norm":
            self.inner = nn.LayerNorm(WIDTH)
        if kind == "gain":
            self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        if kind in ("frozen", "lora"):
            self.inner.requires_grad_(False)
        if kind == "lora":
            self.a, self.b = (nn.Parameter(torch.randn(*s) * 0.5) for s in ((2, WIDTH), (WIDTH, 2)))
        if kind == "gru":
            self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)
        if kind == "attention":
            self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        if kind == "conv":
            self.inner = nn.Conv2d(1, WIDTH, 2).to(memory_format=torch.channels_last)
        if kind == "dict":
            self.params = nn.ParameterDict({k: nn.Parameter(torch.randn(WIDTH) * 0.5 + 1) for k in "ab"})
        if kind == "normed":
            nn.utils.parametrizations.weight_norm(self.inner)

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(self, f"_{self.kind}", self._linear)(x)
        return torch.tanh(y) + 0.1 * y

    def _linear(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def _gated(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.inner(x))

    def _bare(self, x: Tensor) -> Tensor:
        return x @ self.w + self.b + self.empty.sum()

    def _gain(self, x: Tensor) -> Tensor:
        return x * self.gain

    def _dict(self, x: Tensor) -> Tensor:
        return sum(x * p for p in self.params.values())

    def _twice(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.inner(x)), self.inner.weight)

    def _lora(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.a.T @ self.b.T

    def _gru(self, x: Tensor) -> Tensor:
        return self.inner(x[None])[0][0]  # the rows are a sequence

    def _attention(self, x: Tensor) -> Tensor:
        return self.inner(x[None])[0]

    def _conv(self, x: Tensor) -> Tensor:
        return self.inner(x.view(-1, 1, 2, 2)).flatten(1)

    def _adapts(self, x: Tensor) -> Tensor:
        """A step on its own parameters within forward."""
        own = dict(self.inner.named_parameters())
        y = torch.func.functional_call(self.inner, own, (x,))
        grads = torch.autograd.grad(y.square().mean(), list(own.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(own.items(), grads, strict=True)}
        return torch.func.functional_call(self.inner, fast, (x,)) + self.inner(x)

    def _forces(self, x: Tensor) -> Tensor:
        """An energy and its derivative by the input."""
        return x + torch.autograd.grad(torch.tanh(self.inner(x)).sum(), x, create_graph=True)[0]

    def _functional(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.inner, {n: p * 1.5 for n, p in self.inner.named_parameters()}, (x,))

    def _in_place(self, x: Tensor) -> Tensor:
        return F.leaky_relu_(self.inner(x).mul_(1.5), 0.1)

    def _views(self, x: Tensor) -> Tensor:
        return self.inner(x).view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH)[:, :]

    def _experts(self, x: Tensor) -> Tensor:
        # Not by the data, of which 16 bits may be on the other side of any border. No rows reach the third.
        which = torch.arange(len(x)) % 2
        parts = [e(x[which == i]) for i, e in enumerate(self.experts) if bool((which == i).any())]
        return torch.cat(parts)[torch.cat([(which == i).nonzero()[:, 0] for i in range(2)]).argsort()]


# Those around one layer, and all. Not a batch norm: before one a bias has no gradient, and three rows are too few to
# normalise by.
LINEAR = ("linear", "tanh", "gated", "twice", "functional", "frozen", "lora", "in_place", "views", "normed")
LINEAR += ("adapts", "forces")
KINDS = (*LINEAR[:-2], "bare", "norm", "gain", "dict", "experts", "conv", "gru", "attention")
# Whose backward has no second derivative; which cannot be called without gradients; which torch.func can batch.
FUSED, DIFFERENTIATES = ("gru", "attention"), ("adapts", "forces")
BATCHED = ("linear", "tanh", "gated", "twice", "lora", "bare", "norm", "gain", "dict")


# ---------------------------------------------------------------- habits


def _assign(student: Tensor, teacher: Tensor) -> None:
    teacher.data = 0.75 * teacher.data + 0.25 * student.data


def _item(student: Tensor, teacher: Tensor) -> None:
    teacher[:, 0] = 0.75 * teacher[:, 0] + 0.25 * student[:, 0]


# A momentum encoder in the spellings that people use, and that count a version or exchange the memory.
MOMENTUM: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    lambda student, teacher: teacher.lerp_(student, 0.25),
    lambda student, teacher: teacher.mul_(0.75).add_(student, alpha=0.25),
    lambda student, teacher: teacher.copy_(0.75 * teacher + 0.25 * student),
    _assign,
    lambda student, teacher: torch._foreach_lerp_([teacher], [student.detach()], 0.25),
    _item,
)
CLAMPS: tuple[Callable[[Tensor], Any], ...] = (
    lambda w: w.clamp_(-0.3, 0.3),
    lambda w: w.copy_(w.clamp(-0.3, 0.3)),
    lambda w: w.mul_(0.9),
)


def _by_grad_of_weight(net: Stack, h: Tensor) -> Tensor:
    return h @ torch.func.grad(lambda w: F.linear(h, w).square().mean())(net.last.weight).T


# torch.func inside of a forward.
INSIDE: tuple[Callable[[Stack, Tensor], Tensor], ...] = (
    lambda net, h: torch.func.vmap(lambda row: torch.tanh(net.last.weight @ row))(h),
    lambda net, h: torch.func.grad(lambda z: net.blocks[0](z).square().sum())(h),
    _by_grad_of_weight,
    lambda net, h: torch.func.jvp(net.blocks[0], (h,), (torch.ones_like(h),))[1],
    lambda net, h: torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(net.last.weight @ row)))(h).sum(2),
)
HABITS = ("momentum", "clamp", "hook in forward", "own backward", "torch.func", "attribute", "returns features")


class Clamped(torch.autograd.Function):
    """Nonlinear in its cotangent, as a clipped backward is. Cotangents here stay below the bound."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g.clamp(-8.0, 8.0)


class Stopped(Exception):
    """What a program raises in the middle of forward or backward, and catches."""


class StopsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        raise Stopped


# ---------------------------------------------------------------- a model


class Stack(nn.Module):
    """Blocks between a first and a last layer, each a unit of its own; which are used, and how, a call may tell."""

    def __init__(self, form: Form, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        # A trained layer at both ends: a model whose blocks are all frozen has nothing to train.
        self.first = nn.Linear(WIDTH, WIDTH)
        if form.close:
            self.last = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(kind) for kind, _ in form.blocks)
        self.wraps = [wrap for _, wrap in form.blocks]
        if form.same:
            self.blocks.append(self.blocks[0])
            self.wraps.append(self.wraps[0])
        if not form.close:
            # In a unit of its own: a backward that is stopped has its gradients, as in torch.
            self.last = nn.Linear(WIDTH, WIDTH)
        if form.tied:
            self.last.weight = self.first.weight
        if form.frozen:
            self.blocks[0].requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.1)) if form.scale else 1.0
        self.form, self.habits = form, form.habits
        if self.habits:
            self.teacher: Any = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.momentum, self.clamp, self.inside = (
            ways[i % len(ways)] for ways, i in zip((MOMENTUM, CLAMPS, INSIDE), form.ways, strict=True)
        )
        self.assigns = "momentum" in self.habits and self.momentum is _assign
        # Whether what is computed with are copies, of this call alone, of what is written into.
        self.apart = False
        self.feature: Tensor | None = None

    def forward(
        self,
        x: Tensor,
        order: Sequence[int] | None = None,
        wraps: Sequence[str] | None = None,
        stop: tuple[str, int] | None = None,
        reentrant: bool = True,
        skip: bool = False,
    ) -> Any:
        """`order` is of blocks, `wraps` of their checkpoints, which are not `reentrant` where that is False; `stop`
        says where forward or backward raises `Stopped`; `skip` leaves out all blocks, in a model that allows it."""
        if "momentum" in self.habits and self.training:
            with torch.no_grad():
                self.momentum(self.first.weight, self.teacher.weight)
        if "clamp" in self.habits and self.training:
            with torch.no_grad():
                self.clamp(self.blocks[0].inner.weight)  # type: ignore[union-attr, arg-type]
        order = [*range(len(self.blocks)), *self.form.again] if order is None else order
        wraps = [self.wraps[i] for i in order] if wraps is None else wraps
        wraps = [wrap if reentrant or wrap != "reentrant" else "plain" for wrap in wraps]
        outer = self.form.outer if reentrant or self.form.outer != "reentrant" else "plain"
        copies = {n: p.clone() for n, p in self.named_parameters()} if self.apart else {}

        def body(h: Tensor) -> Tensor:
            for at, (i, wrap) in enumerate(zip(order, wraps, strict=True)):
                if stop == ("forward", at):
                    raise Stopped
                if stop == ("backward", at):
                    h = StopsBackward.apply(h)  # type: ignore[assignment]
                h = wrapped(wrap, self.blocks[i], h)
            return h

        with _reparametrize_module(self, copies):
            return self.compute(x, (lambda h: h) if skip and self.form.skips else lambda h: wrapped(outer, body, h))

    def compute(self, x: Tensor, body: Callable[[Tensor], Tensor]) -> Any:
        h = self.first(x)
        if "hook in forward" in self.habits and h.requires_grad:
            h.register_hook(lambda g: g * 0.5)
        if "own backward" in self.habits:
            h = Clamped.apply(h)
        h = body(h)
        if "torch.func" in self.habits:
            h = h + 0.1 * self.inside(self, h)
        if "attribute" in self.habits:
            self.feature = h
        y = self.last(h * self.scale)
        if self.habits:
            y = y + 0.2 * torch.tanh(self.teacher(h))
        return {
            "tensor": lambda: y,
            "tuple": lambda: (y, None, h),
            "dict": lambda: {"y": y, "more": [h.mean(1)]},
            "views": lambda: (y[:, :2], y[:, 2:]),
            "features": lambda: (y, h),
        }["features" if "returns features" in self.habits else self.form.out]()

    @property
    def fused(self) -> bool:
        """Whether a layer's backward has no second derivative."""
        return any(kind in FUSED for kind, _ in self.form.blocks)


def tensors(out: object) -> list[Tensor]:
    """All tensors of an output."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, dict):
        out = list(out.values())
    return [t for o in out for t in tensors(o)] if isinstance(out, tuple | list) else []
