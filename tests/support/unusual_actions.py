"""What people do in a micro-step beside plain training: features, hooks, closures, calls on one rank alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from unusual_models import WIDTH, UnusualStack

import zerofn as zf


@dataclass
class Env:
    """What an action is given. `opt` is None in the reference."""

    model: UnusualStack
    rank: int
    size: int
    step: int
    seed: int
    scaled: bool = False
    opt: Any = None
    talk: Callable[[], None] = lambda: None
    folder: str = ""
    log: list[Tensor] = field(default_factory=list)
    data: torch.Generator = field(default_factory=torch.Generator)

    def draw(self) -> Tensor:
        return torch.randn(3, WIDTH, generator=self.data, dtype=torch.float64)

    def note(self, *tensors: Tensor | None) -> None:
        """What the program has seen, to be compared with what the reference has seen."""
        self.log += [torch.full((1,), torch.nan) if t is None else bare(t.detach().double().clone()) for t in tensors]

    def out(self, x: Tensor | None = None) -> Tensor:
        y = self.model(self.draw() if x is None else x)
        return y[0] if isinstance(y, tuple) else y


def bare(t: Tensor) -> Tensor:
    """A hook on a module that is called inside of torch.func sees wrappers, which cannot be stored."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def loss_of(y: Tensor) -> Tensor:
    return ((y.double() - 0.3) ** 2).mean()


def plain(env: Env, rng: random.Random) -> None:
    loss_of(env.out()).backward()


def features(env: Env, rng: random.Random) -> None:
    """What is done with an intermediate that the model returned or left in an attribute."""
    x = env.draw().requires_grad_()
    y = env.model(x)
    y, h = y if isinstance(y, tuple) else (y, env.model.feature)
    if h is None:
        return loss_of(y).backward()
    way = rng.choice(["retain", "hook", "grad", "penalty", "side"])
    if way == "retain":
        h.retain_grad()
        loss_of(y).backward()
        env.note(h.grad)
    elif way == "hook":
        h.register_hook(lambda g: env.note(g))
        loss_of(y).backward()
    elif way == "grad":
        (g,) = torch.autograd.grad(loss_of(y), h, retain_graph=True, allow_unused=True)
        env.note(g)
        loss_of(y).backward()
    elif way == "penalty":
        (g,) = torch.autograd.grad(loss_of(y), h, create_graph=True, allow_unused=True)
        env.note(g)
        (loss_of(y) + (0 if g is None else g.double().square().sum())).backward()
    else:
        (loss_of(y) + h.double().square().mean()).backward()
    env.note(x.grad)


def module_hooks(env: Env, rng: random.Random) -> None:
    """Hooks on modules, of every kind."""
    m = env.model
    target = rng.choice([m, m.stem, m.head, m.blocks[0], m.blocks[0].inner])
    kind = rng.choice(["forward", "pre", "backward", "pre backward", "global", *([] if env.scaled else ["grad cam"])])
    kept: list[Tensor] = []
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    if kind == "forward":
        handle = target.register_forward_hook(lambda mod, a, out: kept.append(first(out)))
    elif kind == "pre":
        handle = target.register_forward_pre_hook(lambda mod, a: (a[0] * 1.5,))
    elif kind == "backward":
        handle = target.register_full_backward_hook(lambda mod, gi, go: env.note(*go))
    elif kind == "pre backward":
        handle = target.register_full_backward_pre_hook(lambda mod, go: env.note(*go))
    elif kind == "grad cam":
        handle = target.register_forward_hook(
            lambda mod, a, out: first(out).register_hook(lambda g: env.note(g)) and None
        )
    else:
        seen: list[Tensor] = []
        handle = nn.modules.module.register_module_full_backward_hook(lambda mod, gi, go: seen.append(go[0]))
    try:
        loss = loss_of(env.out())
        if kept:
            loss = loss + kept[0].double().exp().mean()
        loss.backward()
    finally:
        handle.remove()


def parameter_hooks(env: Env, rng: random.Random) -> None:
    """Linear hooks on parameters, and hooks that only look."""
    live = [p for p in env.model.parameters() if p.requires_grad]
    p = rng.choice(live)
    kind = rng.choice(["scale", "look", "after"])
    calls: list[int] = []
    if kind == "scale":
        handle = p.register_hook(lambda g: g * 2)
    elif kind == "look":
        handle = p.register_hook(lambda g: calls.append(1))
    else:
        handle = p.register_post_accumulate_grad_hook(lambda q: calls.append(1))
    try:
        loss_of(env.out()).backward()
    finally:
        handle.remove()


def closures(env: Env, rng: random.Random) -> None:
    """Tensors of the inside that reach the loss, or another call, through a closure."""
    kept: list[Tensor] = []
    way = rng.choice(["pre-hook", "deep", "other call", "cached weight"])
    m = env.model
    if way in ("pre-hook", "deep"):
        handle = m.head.register_forward_pre_hook(lambda mod, a: kept.append(a[0]))
        try:
            y = env.out()
        finally:
            handle.remove()
        extra = kept[0].double().square().mean()
        for _ in range(40 if way == "deep" else 0):
            extra = extra * 1.01
        (loss_of(y) + extra).backward()
    elif way == "other call":
        handle = m.stem.register_forward_hook(
            lambda mod, a, out: kept.append(out) or (out + kept[0] if len(kept) > 1 else None)
        )
        try:
            a, b = env.out(), env.out()
        finally:
            handle.remove()
        (loss_of(a) + loss_of(b)).backward()
    else:
        scale = m.blocks[0].gain * 2
        handle = m.head.register_forward_hook(lambda mod, a, out: out * scale)
        try:
            loss_of(env.out()).backward()
        finally:
            handle.remove()


def outside(env: Env, rng: random.Random) -> None:
    """Computing with parameters outside of forward, and writes by hand."""
    m = env.model
    way = rng.choice(["norm", "linear", "sgd by hand", "teacher data", "teacher lerp", "clamp", "grad edit"])
    if way == "norm":
        (loss_of(env.out()) + 0.1 * m.head.weight.norm()).backward()
    elif way == "linear":
        (
            loss_of(env.out()) + F.linear(env.draw().to(m.head.weight.dtype), m.head.weight).double().square().mean()
        ).backward()
    elif way == "sgd by hand":
        loss = loss_of(env.out())
        grads = torch.autograd.grad(loss, [m.head.weight], retain_graph=True)
        fast = m.head.weight - 0.1 * grads[0]
        (loss + fast.double().square().mean()).backward()
    elif way == "teacher data":
        m.teacher.weight.data.mul_(0.5).add_(m.stem.weight.data, alpha=0.5)
        loss_of(env.out()).backward()
    elif way == "teacher lerp":
        with torch.no_grad():
            m.teacher.weight.lerp_(m.stem.weight, 0.5)
        loss_of(env.out()).backward()
    elif way == "clamp":
        with torch.no_grad():
            for p in m.parameters():
                p.clamp_(-0.4, 0.4)
        loss_of(env.out()).backward()
    else:
        loss_of(env.out()).backward()
        with torch.no_grad():
            for p in m.parameters():
                if p.grad is not None:
                    p.grad.mul_(1.0)


def func_outside(env: Env, rng: random.Random) -> None:
    """torch.func over the attached model, or `is_grads_batched`."""
    x = env.draw()
    way = rng.choice(["vmap", "jvp of input", "grad of input", "batched"])
    if env.model.assigns and way in ("jvp of input", "grad of input"):
        way = "vmap"  # torch itself dies of `w.data = x` inside of the other two
    if way == "vmap":
        env.note(torch.func.vmap(lambda row: env.out(row[None])[0])(x))
    elif way == "jvp of input":
        env.note(torch.func.jvp(lambda z: env.out(z), (x,), (torch.ones_like(x),))[1])
    elif way == "grad of input":
        env.note(torch.func.grad(lambda z: loss_of(env.out(z)))(x))
    else:
        x.requires_grad_()
        y = env.out(x)
        eye = torch.eye(y.numel(), dtype=y.dtype).reshape(-1, *y.shape)
        env.note(torch.autograd.grad(y, x, eye, is_grads_batched=True)[0])
    plain(env, rng)


def gives_up(env: Env, rng: random.Random) -> None:
    """A step that fails on one rank, or on all, is cleared and made anew."""
    everywhere, late = rng.random() < 0.4, rng.random() < 0.5
    who = rng.randrange(env.size)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    if everywhere or env.rank == who:
        target = env.model.stem if late else env.model.head
        handle = target.register_forward_hook(fail) if rng.random() < 0.5 else None
        try:
            with contextlib.suppress(ArithmeticError):
                y = env.out()
                if handle is None:
                    y.register_hook(fail) if late else None
                    loss_of(y).backward()
                    fail()
        finally:
            if handle is not None:
                handle.remove()
        (env.model if env.opt is None else env.opt).zero_grad()
    plain(env, rng)


def alone(env: Env, rng: random.Random) -> None:
    """What people do on the first rank alone: look, log, evaluate, save."""
    way = rng.choice(["evaluate", "log norm", "print", "state_dict", "describe", "save", "gathered", "export"])
    if env.rank == 0:
        m, opt = env.model, env.opt
        if way == "evaluate":
            m.eval()
            with torch.no_grad():
                env.note(env.out())
            m.train()
        elif way == "log norm":
            with torch.no_grad():
                env.note(m.head.weight.norm())
        elif way == "print":
            repr(m.head.weight), repr(m)
        elif way == "state_dict":
            m.state_dict()
        elif opt is not None and way == "describe":
            zf.describe(opt.state)
        elif opt is not None and way == "save":
            zf.save(f"{env.folder}/checkpoint", opt)
        elif opt is not None and way == "export":
            zf.export_safetensors(f"{env.folder}/model.safetensors", opt)
        elif opt is not None and way == "gathered":
            with opt.gathered():
                env.note(m.head.weight)
        elif way == "gathered":
            env.note(m.head.weight)
    plain(env, rng)


ACTIONS: dict[str, Callable[[Env, random.Random], None]] = {
    "plain": plain,
    "features": features,
    "module hooks": module_hooks,
    "parameter hooks": parameter_hooks,
    "closures": closures,
    "outside": outside,
    "torch.func outside": func_outside,
    "gives up": gives_up,
    "alone": alone,
}
