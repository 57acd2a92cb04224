"""What a random program does in a micro-step: forwards and backwards, and what people do beside them.

An event is a function of an `Env` and of random numbers that are the same on all ranks; what is left to a rank is drawn
from `env.own`. `EVENTS` has each by its name, with the kinds of programs in which it may stand:

- everyday: all blocks in order, at any stage; in one process with any pipeline, whose gradients are seen after every
  micro-step.
- uses: each rank calls the blocks that it likes, in an order of its own.
- promises: ranks mostly do the same in each step, and now and then something else.
- unusual: models with habits, hooks, closures, torch.func, calls on one rank. These may be refused.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from random_models import BATCHED, WIDTH, WRAPS, Stack, Stopped, tensors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerofn as zf

Event = Callable[["Env", random.Random], None]
EVENTS: dict[str, tuple[Event, frozenset[str]]] = {}


def event(kinds: str) -> Callable[[Event], Event]:
    def add(fn: Event) -> Event:
        EVENTS[fn.__name__.replace("_", " ")] = fn, frozenset(kinds.split())
        return fn

    return add


@dataclass
class Env:
    """What an event is given.

    Attributes:
        models: of which `model` is the one in use.
        orders: of blocks in a call: "all", "own" for what a rank draws, or "usual".
        usual: that order.
        some: the ranks that do something else in this step.
        grads: whether data of plain steps require gradients, for which the first layer is gathered in backward too; by
            chance where None.
        talks: whether a collective of the user's follows each forward.
        sharded: whether a rank has shards of parameters.
        opts: of the models; none in the reference.
        log: what the program has seen, to be compared with what the reference has seen.
    """

    models: list[Stack]
    rank: int = 0
    size: int = 1
    scaled: bool = False
    orders: str = "all"
    usual: tuple[int, ...] = ()
    some: tuple[int, ...] = ()
    grads: bool | None = None
    talks: bool = False
    sharded: bool = False
    opts: Sequence[Any] = ()
    talk: Callable[[], None] = lambda: None
    folder: str = ""
    dtype: torch.dtype = torch.float64
    own: random.Random = field(default_factory=random.Random)
    data: torch.Generator = field(default_factory=torch.Generator)
    log: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.models[0]

    def draw(self, grad: bool = False) -> Tensor:
        # Ranks have batches of different sizes.
        rows = self.own.choice((2, 3, 3, 4)) if self.size > 1 else 3
        return torch.randn(rows, WIDTH, generator=self.data, dtype=self.dtype).requires_grad_(grad)

    def note(self, *seen: Tensor | None) -> None:
        self.log += [None if t is None else bare(t.detach().double().clone()) for t in seen]

    @property
    def opt(self) -> Any:
        """That of the model in use."""
        return dict(zip(map(id, self.models), self.opts, strict=False)).get(id(self.model))

    @property
    def blocks(self) -> int:
        return len(self.model.blocks)

    def other(self, rng: random.Random, most: int = 0) -> list[int]:
        """Some order of blocks."""
        return [rng.randrange(self.blocks) for _ in range(rng.randint(0, most or self.blocks))]

    def call(self, x: Tensor | None = None, **how: Any) -> Any:
        """What the model gives; of data that are drawn, if it is given none."""
        if self.orders == "usual":
            how.setdefault("order", list(self.usual))
        elif self.orders == "own":
            how["order"] = self.other(self.own)
            how["wraps"] = [self.own.choice(("plain", *WRAPS)) for _ in how["order"]]
        return self.model(self.draw() if x is None else x, **how)

    def out(self, x: Tensor | None = None, **how: Any) -> Tensor:
        """The first tensor that it gives."""
        return tensors(self.call(x, **how))[0]

    def loss(self, x: Tensor | None = None, kind: int = 0, **how: Any) -> Tensor:
        return loss_of(self.call(x, **how), kind)


def bare(t: Tensor) -> Tensor:
    """A hook on a module that is called inside of torch.func sees wrappers, which cannot be stored."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def loss_of(out: object, kind: int = 0) -> Tensor:
    """A loss of all tensors of an output, in at least 32 bits."""
    fns: list[Callable[[Tensor], Tensor]] = [
        lambda t: (t - 0.3).square().mean(),
        lambda t: (0.5 * t).exp().mean(),
        lambda t: (t * 1.5).sin().sum(),
    ]
    wide = [t.float() if t.element_size() < 4 else t for t in tensors(out)]
    return sum(fns[(kind + i) % 3](t) for i, t in enumerate(wide))  # type: ignore[return-value]


def live(env: Env) -> list[nn.Parameter]:
    return [p for p in env.model.parameters() if p.requires_grad]


def outer(env: Env) -> list[nn.Parameter]:
    """Those that every call uses."""
    return list(dict.fromkeys([*env.model.first.parameters(), *env.model.last.parameters()]))


def copies(env: Env) -> dict[str, Tensor]:
    """Of the full parameters, that may be differentiated."""
    with contextlib.nullcontext() if env.opt is None else env.opt.gathered():
        return {n: p.detach().clone().requires_grad_() for n, p in env.model.named_parameters()}


@contextlib.contextmanager
def hooked(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------- forwards and backwards in any number and order


@event("everyday uses promises unusual")
def plain(env: Env, rng: random.Random, **how: Any) -> None:
    x = env.draw(grad=rng.random() < 0.5 if env.grads is None else env.grads)
    loss = env.loss(x, rng.randrange(3), **how)
    if env.talks:
        env.talk()
    loss.backward()
    env.note(x.grad)


@event("everyday")
def skips(env: Env, rng: random.Random) -> None:
    plain(env, rng, skip=True)


@event("everyday uses")
def through_opt(env: Env, rng: random.Random) -> None:
    """Or twice: DeepSpeed loses one of them."""
    out, again = env.call(reentrant=False), rng.random() < 0.5
    for kind in range(1 + again):
        loss, keep = loss_of(out, kind), {"retain_graph": kind < again}
        loss.backward(**keep) if env.opt is None else env.opt.backward(loss, **keep)


@event("everyday uses")
def cotangents(env: Env, rng: random.Random) -> None:
    x = env.draw(grad=True)
    outs = [t for _ in range(rng.randint(1, 2)) for t in tensors(env.call(x))]
    torch.autograd.backward(outs, [torch.full_like(o, 0.5 + i) for i, o in enumerate(outs)])
    env.note(x.grad)


@event("everyday uses")
def one_in_two(env: Env, rng: random.Random) -> None:
    """One graph, two backwards. A reentrant checkpoint cannot be run backward twice."""
    x = env.draw(grad=True)
    out = env.call(x, reentrant=False)
    loss_of(out).backward(retain_graph=True)
    if rng.random() < 0.5:
        env.talk()
    loss_of(out, 1).backward()
    env.note(x.grad)


@event("everyday uses promises")
def two_in_one(env: Env, rng: random.Random) -> None:
    x = env.draw(grad=True)
    how = {"order": env.other(rng, env.blocks + 1)} if env.orders == "usual" else {}
    (env.loss(x) * 0.5 + env.loss(torch.tanh(x * 2), 1, **how)).backward()
    env.note(x.grad)


@event("everyday uses")
def crossed(env: Env, rng: random.Random) -> None:
    """Two graphs at a time; the other ones' backward never comes, or comes first."""
    losses = [env.loss(), env.loss(kind=1)]
    rng.shuffle(losses)
    losses[0].backward()
    if rng.random() < 0.5:
        env.talk()
    if rng.random() < 0.5:
        losses[1].backward()
    env.loss().backward()


@event("everyday")
def all_models(env: Env, rng: random.Random) -> None:
    """One feeds the next, perhaps through a detached hand-over between processes, or all have one loss."""
    x, how = env.draw(grad=True), rng.choice(["feeds", "hands over", "one loss"])
    given, handed = x, []
    for i, net in enumerate(env.models):
        y = torch.tanh(tensors(net(given if how == "one loss" else x))[0]).to(env.dtype)
        y = (y if y.shape[1] == WIDTH else y.repeat(1, 2)) * (1 + 0.1 * i)
        handed.append((y, y.detach().requires_grad_()))
        x = handed[-1][how == "hands over"]
    sum(y.square().mean() for y, _ in handed[0 if how == "one loss" else -1 :]).backward()  # type: ignore[union-attr]
    for y, x in handed[-2::-1] if how == "hands over" else ():
        y.backward(x.grad)
    env.note(given.grad)


@event("everyday uses")
def gradient_of_input(env: Env, rng: random.Random) -> None:
    """And a backward of the same graph, or a call with what was found."""
    x = env.draw(grad=True)
    loss = env.loss(x, reentrant=False)
    (g,) = torch.autograd.grad(loss, x, retain_graph=True)
    env.note(g)
    (loss if rng.random() < 0.5 else env.loss((x + g).detach())).backward()


@event("everyday uses")
def penalty(env: Env, rng: random.Random) -> None:
    if any(m.fused for m in env.models):
        return plain(env, rng)
    x = env.draw(grad=True)
    loss = env.loss(x, reentrant=False)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + g.square().sum()).backward()
    env.note(x.grad)


@event("everyday")
def gradient_of_parameters(env: Env, rng: random.Random) -> None:
    found = torch.autograd.grad(env.loss(kind=1, reentrant=False), outer(env))
    if not env.sharded:
        env.note(*found)
    env.loss().backward()


@event("everyday")
def products_with_hessians(env: Env, rng: random.Random) -> None:
    """Of some leaves: others in the same unit have no cotangent."""
    if any(m.fused for m in env.models):
        return plain(env, rng)
    params = [*outer(env)[::2], *[p for p in env.model.blocks[0].parameters() if p.requires_grad][:1]]
    first = torch.autograd.grad(env.loss(kind=1, reentrant=False), params, create_graph=True)
    found = torch.autograd.grad(sum(g.square().sum() for g in first), params)  # type: ignore[arg-type]
    if not env.sharded:
        env.note(*found)
    env.loss().backward()


@event("everyday")
def backward_to_inputs(env: Env, rng: random.Random) -> None:
    x = env.draw(grad=True)
    loss = env.loss(x, reentrant=False)
    loss.backward(inputs=[x], retain_graph=True)
    loss.backward(inputs=outer(env))
    env.note(x.grad)
    env.loss().backward()


@event("everyday")
def third_order(env: Env, rng: random.Random) -> None:
    if any(m.fused for m in env.models):
        return plain(env, rng)
    x = env.draw(grad=True)
    (g,) = torch.autograd.grad(env.loss(x, 1, reentrant=False), x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
    (100 * h.square().mean()).backward()
    env.note(x.grad)
    env.loss().backward()


@event("everyday calls-differ")
def inner_module(env: Env, rng: random.Random) -> None:
    """On some ranks other ones than on others."""
    x = env.draw(grad=True)
    loss = env.loss(x) + loss_of(env.model.first(x))
    if env.rank in env.some:
        loss = loss + loss_of(env.model.last(torch.tanh(env.model.first(x))), 1)
    loss.backward()
    env.note(x.grad)


@event("everyday")
def looks_between(env: Env, rng: random.Random) -> None:
    x = env.draw(grad=True)
    loss = env.loss(x)
    env.model.train(rng.random() < 0.5)
    with torch.no_grad():
        env.note(env.out(x))
        env.model.first(x)
        for block in env.model.blocks:
            block(env.draw().to(next(iter(env.model.parameters())).dtype))
    with torch.inference_mode():
        env.model(env.draw())
    env.model.train()
    loss.backward()
    env.note(x.grad)


@event("everyday")
def around(env: Env, rng: random.Random) -> None:
    x, reentrant = env.draw(grad=True), rng.random() < 0.5
    out = checkpoint(env.out, x, use_reentrant=reentrant)
    (loss_of(out) + loss_of(env.model.first(x), 1)).backward()
    env.note(x.grad)


@event("everyday uses")
def weight_penalty(env: Env, rng: random.Random) -> None:
    params = live(env)
    extra = sum(p.float().square().sum() if p.element_size() < 4 else p.square().sum() for p in params)
    if env.orders == "own":
        extra = extra + env.own.choice(params).sum().cos() + params[0].norm()
    (env.loss() + 0.01 * extra).backward()


@event("uses")
def talk(env: Env, rng: random.Random) -> None:
    env.talk()


@event("uses")
def evaluate(env: Env, rng: random.Random) -> None:
    with torch.no_grad():
        env.note(env.out())


@event("uses")
def more_on_some(env: Env, rng: random.Random) -> None:
    """Only where no collective of the user's follows may ranks differ in how often they use the model."""
    for _ in range(env.own.randint(0, 2)):
        env.loss().backward()


@event("uses")
def writes(env: Env, rng: random.Random) -> None:
    """Into all parameters, in a way that all ranks take."""
    way = rng.choice(["halve", "clamp", "load"])
    with torch.no_grad():
        for p in env.model.parameters() if way != "load" else ():
            p.mul_(0.5) if way == "halve" else p.data.clamp_(-0.25, 0.25)
    if way == "load":
        env.model.load_state_dict({n: 0.8 * t for n, t in env.model.state_dict().items()})


# ---------------------------------------------------------------- what breaks a promise


@event("promises")
def other_on_all(env: Env, rng: random.Random) -> None:
    plain(env, rng, order=env.other(rng, env.blocks + 1))


@event("promises")
def other_on_some(env: Env, rng: random.Random) -> None:
    plain(env, rng, **({"order": env.other(env.own, env.blocks + 1)} if env.rank in env.some else {}))


@event("promises")
def more_on_one(env: Env, rng: random.Random) -> None:
    plain(env, rng, **({"order": [*env.usual, *range(env.blocks)]} if env.rank == env.some[0] else {}))


@event("promises quiet")
def evaluate_on_one(env: Env, rng: random.Random) -> None:
    if env.rank == env.some[0]:
        with torch.no_grad():
            env.note(env.out(order=env.other(env.own, env.blocks + 1), reentrant=False))
    plain(env, rng)


def _stopped(place: str, env: Env, rng: random.Random) -> None:
    if env.rank in env.some:
        stop = place, env.own.randrange(len(env.usual))
        with contextlib.suppress(Stopped):
            env.loss(stop=stop, reentrant=place == "forward").backward()
    plain(env, rng)


@event("promises quiet")
def stopped_in_forward(env: Env, rng: random.Random) -> None:
    _stopped("forward", env, rng)


@event("promises quiet untied")
def stopped_in_backward(env: Env, rng: random.Random) -> None:
    """torch adds up both uses of a tied leaf first, so this leaves it nothing; here one use has its sum."""
    _stopped("backward", env, rng)


@event("promises quiet")
def threads(env: Env, rng: random.Random) -> None:
    xs = [env.draw() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda x: env.loss(x, reentrant=False).backward(), xs))


@event("promises quiet")
def no_batch_on_one(env: Env, rng: random.Random) -> None:
    if env.rank != env.some[0]:
        plain(env, rng)
    elif env.own.random() < 0.5:
        # It loses a batch, and may go through the model all the same.
        env.call()


# ---------------------------------------------------------------- exceptions


@event("everyday")
def fails_in_forward(env: Env, rng: random.Random) -> None:
    """Of itself, or by Ctrl-C, as in a notebook."""
    error = rng.choice([ArithmeticError, KeyboardInterrupt])

    def fail(*_: Any) -> None:
        raise error

    with hooked(env.model.last.register_forward_pre_hook(fail)), contextlib.suppress(error):
        env.call()
    plain(env, rng)


@event("everyday one-process")
def fails_in_backward(env: Env, rng: random.Random) -> None:
    before = [(p, None if p.grad is None else p.grad.clone()) for m in env.models for p in m.parameters()]

    def fail(_: Any) -> None:
        raise ArithmeticError

    with hooked(env.model.last.bias.register_hook(fail)), contextlib.suppress(ArithmeticError):
        env.loss().backward()
    for p, g in before:
        p.grad = g
    plain(env, rng)


@event("unusual calls-differ")
def gives_up(env: Env, rng: random.Random) -> None:
    """A step that fails on one rank, or on all, is cleared and made anew."""
    everywhere, late = rng.random() < 0.4, rng.random() < 0.5
    who = rng.randrange(env.size)

    def fail(*_: Any) -> None:
        raise ArithmeticError

    if everywhere or env.rank == who:
        target = env.model.first if late else env.model.last
        handles = [target.register_forward_hook(fail)] if rng.random() < 0.5 else []
        with hooked(*handles), contextlib.suppress(ArithmeticError):
            y = env.out()
            if not handles:
                y.register_hook(fail) if late else None
                loss_of(y).backward()
                fail()
        (env.model if env.opt is None else env.opt).zero_grad()
    plain(env, rng)


# ---------------------------------------------------------------- hooks, closures, what leaves a model


@event("everyday unusual")
def hooks_that_keep(env: Env, rng: random.Random) -> None:
    """What a hook of an inner module kept is in the loss, and others change what goes in or out."""
    kept: list[Tensor] = []
    first, last, x = env.model.first, env.model.last, env.draw(grad=True)
    looks = first.register_forward_hook(lambda m, a, out: kept.append(out.detach()))
    changes = [
        lambda: last.register_forward_hook(lambda m, a, out: out * 2),
        lambda: last.register_forward_pre_hook(lambda m, a: (a[0] + 0.1,)),
        lambda: first.register_forward_hook(lambda m, a, out: out * 1.5),
    ]
    with hooked(looks, *(make() for make in rng.sample(changes, rng.randint(0, 3)))):
        loss = env.loss(x)
    (loss + sum(loss_of(k, 1) for k in kept)).backward()
    env.note(x.grad)


@event("everyday")
def hooks_on_tensors(env: Env, rng: random.Random) -> None:
    """Of an input, an output, and each parameter, which see true gradients and may change them."""
    x = env.draw(grad=True)
    x.register_hook(lambda g: env.note(g))
    with hooked(*(p.register_hook(lambda g: g * 2) for p in live(env))):
        out = env.out(x)
        out.register_hook(lambda g: env.note(g))
        loss_of(out).backward()


@event("everyday")
def in_place(env: Env, rng: random.Random) -> None:
    x = env.draw(grad=True)
    out = tensors(env.call(x))
    out[0].mul_(2.0)
    out[0][:, 0] = 0.0
    loss_of(out).backward()
    env.note(x.grad)


@event("everyday")
def functional(env: Env, rng: random.Random) -> None:
    """`torch.func.functional_call` from outside, with tensors of the caller's."""
    x, params = env.draw(grad=True), copies(env)
    loss_of(torch.func.functional_call(env.model, params, (x,))).backward()
    env.loss(x).backward()
    env.note(x.grad, *(p.grad for p in params.values()))


@event("everyday one-process")
def functional_transforms(env: Env, rng: random.Random) -> None:
    x, params = env.draw(), {n: p.detach() for n, p in copies(env).items()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return loss_of(torch.func.functional_call(env.model, params, (x,), {"reentrant": False}))

    if all(kind in BATCHED and wrap == "plain" for kind, wrap in env.model.form.blocks) and env.model.form.plain:
        env.note(*torch.func.grad(loss)(params, x).values())
        env.note(*torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x[:, None]).values())
    env.loss(x).backward()


@event("everyday")
def hidden_backward(env: Env, rng: random.Random) -> None:
    """A forward and a backward in a hook of a backward."""
    x, whole = env.draw(), rng.random() < 0.5
    out = env.loss(x)

    def hook(g: Tensor) -> Tensor:
        with torch.enable_grad():
            (env.loss(x) if whole else loss_of(env.model.first(x))).backward()
        return g

    out.register_hook(hook)
    out.backward()


@event("unusual")
def features(env: Env, rng: random.Random) -> None:
    """What is done with an intermediate that the model returned or left in an attribute."""
    x = env.draw(grad=True)
    out = env.call(x)
    y, h = out if isinstance(out, tuple) else (out, env.model.feature)
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


@event("unusual")
def module_hooks(env: Env, rng: random.Random) -> None:
    """Hooks on modules, of every kind."""
    m = env.model
    target = rng.choice([m, m.first, m.last, m.blocks[0], m.blocks[0].inner])
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
    with hooked(handle):
        loss = loss_of(env.out())
        if kept:
            loss = loss + kept[0].double().exp().mean()
        loss.backward()


@event("everyday unusual")
def parameter_hooks(env: Env, rng: random.Random) -> None:
    """Linear hooks on parameters, and hooks that only look."""
    p, calls = rng.choice(live(env)), list[int]()
    with hooked(
        rng.choice(
            [
                lambda: p.register_hook(lambda g: g * 2),
                lambda: p.register_hook(lambda g: calls.append(1)),
                lambda: p.register_post_accumulate_grad_hook(lambda q: calls.append(1)),
            ]
        )()
    ):
        env.loss().backward()


@event("unusual")
def closures(env: Env, rng: random.Random) -> None:
    """Tensors of the inside that reach the loss, or another call, through a closure."""
    kept: list[Tensor] = []
    way = rng.choice(["pre-hook", "deep", "other call", "cached weight"])
    m = env.model
    if way in ("pre-hook", "deep"):
        with hooked(m.last.register_forward_pre_hook(lambda mod, a: kept.append(a[0]))):
            y = env.out()
        extra = kept[0].double().square().mean()
        for _ in range(40 if way == "deep" else 0):
            extra = extra * 1.01
        (loss_of(y) + extra).backward()
    elif way == "other call":
        with hooked(
            m.first.register_forward_hook(
                lambda mod, a, out: kept.append(out) or (out + kept[0] if len(kept) > 1 else None)
            )
        ):
            a, b = env.out(), env.out()
        (loss_of(a) + loss_of(b)).backward()
    else:
        scale = m.blocks[0].gain * 2
        with hooked(m.last.register_forward_hook(lambda mod, a, out: out * scale)):
            env.loss().backward()


# ---------------------------------------------------------------- parameters outside of forward, one rank alone


@event("unusual")
def outside(env: Env, rng: random.Random) -> None:
    """Computing with parameters outside of forward, and writes by hand."""
    m = env.model
    w = m.last.weight
    way = rng.choice(["norm", "linear", "sgd by hand", "teacher data", "teacher lerp", "clamp", "grad edit"])
    if way.startswith("teacher") and not m.habits:
        way = "norm"
    loss = loss_of(env.out()) if way in ("norm", "linear", "sgd by hand", "grad edit") else None
    if way == "norm":
        loss = loss + 0.1 * w.norm()
    elif way == "linear":
        loss = loss + F.linear(env.draw().to(w.dtype), w).double().square().mean()
    elif way == "sgd by hand":
        (g,) = torch.autograd.grad(loss, [w], retain_graph=True)
        loss = loss + (w - 0.1 * g).double().square().mean()
    elif way == "teacher data":
        m.teacher.weight.data.mul_(0.5).add_(m.first.weight.data, alpha=0.5)
    with torch.no_grad():
        if way == "teacher lerp":
            m.teacher.weight.lerp_(m.first.weight, 0.5)
        for p in m.parameters() if way == "clamp" else ():
            p.clamp_(-0.4, 0.4)
    (loss_of(env.out()) if loss is None else loss).backward()
    with torch.no_grad():
        for p in m.parameters() if way == "grad edit" else ():
            if p.grad is not None:
                p.grad.mul_(1.0)


@event("unusual")
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
        y = env.out(x.requires_grad_())
        eye = torch.eye(y.numel(), dtype=y.dtype).reshape(-1, *y.shape)
        env.note(torch.autograd.grad(y, x, eye, is_grads_batched=True)[0])
    plain(env, rng)


@event("unusual calls-differ")
def alone(env: Env, rng: random.Random) -> None:
    """What people do on the first rank alone: look, log, evaluate, save."""
    way = rng.choice(["evaluate", "log norm", "print", "state_dict", "describe", "save", "gathered", "export"])
    m, opt = env.model, env.opt
    if env.rank == 0:
        if way == "evaluate":
            m.eval()
            with torch.no_grad():
                env.note(env.out())
            m.train()
        elif way == "log norm":
            with torch.no_grad():
                env.note(m.last.weight.norm())
        elif way == "print":
            repr(m.last.weight), repr(m)
        elif way == "state_dict":
            m.state_dict()
        elif way == "gathered":
            with contextlib.nullcontext() if opt is None else opt.gathered():
                env.note(m.last.weight)
        elif opt is not None:
            {
                "describe": lambda: zf.describe(opt.state),
                "save": lambda: zf.save(f"{env.folder}/checkpoint", opt),
                "export": lambda: zf.export_safetensors(f"{env.folder}/model.safetensors", opt),
            }[way]()
    plain(env, rng)


def events_of(kind: str, without: tuple[str, ...] = ()) -> list[str]:
    """Names of the events of a kind of programs."""
    return [n for n, (_, kinds) in EVENTS.items() if kind in kinds and not kinds & set(without)]
