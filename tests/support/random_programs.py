"""The generator of random pipelines, trees, models and training programs. Fuzzers and laws are properties over it.

A seed draws a whole `Program`: a model of blocks (`random_models`), a pipeline around a stage, and the events
(`random_events`) of each micro-step on k ranks. It prints itself as the Python that makes it: delete events from what a
failure shows, and run it again. `python -m fuzzing` in this folder does all of that.

Hypothesis draws pipelines, trees and small modules for laws. Only integers and choices are drawn, so examples shrink.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import strategies as st
from random_events import EVENTS, Env, events_of
from random_models import DIFFERENTIATES, HABITS, KINDS, WRAPS, Form, Stack
from stages import around
from torch import Tensor, nn

import zerofn as zf
from zerofn.ranks.ordered_collectives import TRUSTED  # inside: when ranks trust each other
from zerofn.testing import random_like

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Pair(NamedTuple):
    first: object
    second: object


seeds = st.integers(0, 9999)
shapes = st.sampled_from([(), (1,), (3,), (4, 2), (0,), (2, 0, 3), (17,), (2, 3, 2)])


def leaves(dtypes):
    return st.tuples(shapes, st.sampled_from(dtypes)).map(lambda d: torch.zeros(d[0], dtype=d[1]))


def _containers(children):
    return st.one_of(
        st.lists(children, min_size=1, max_size=3),
        st.lists(children, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", "weight", "z"]), children, min_size=1, max_size=3),
        st.tuples(children, children).map(lambda p: Pair(*p)),
        st.lists(children, min_size=1, max_size=2).map(lambda xs: OrderedDict(zip(("y", "b"), xs, strict=False))),
    )


@st.composite
def trees(draw, dtypes=(F32,)):
    """A nested tree of live numbers; at least one leaf has elements."""
    skeleton = draw(st.recursive(st.one_of(leaves(dtypes), leaves(dtypes), st.none()), _containers, max_leaves=5))
    return random_like({"tree": skeleton, "live": torch.zeros(3, dtype=dtypes[0])}, draw(seeds))


OPTIMIZERS = [
    zf.sgd(0.1),
    zf.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    zf.adam(0.01, weight_decay=0.1),
    zf.adamw(0.02),
    zf.adamw(zf.schedules.cosine(0.1, 5)),
    zf.low_precision_adam(0.02),
    zf.masked(zf.adamw(0.1), lambda path: "b" not in path),
    zf.partition(
        {"x": zf.chain(zf.clip_by_global_norm(0.5), zf.adam(0.1)), "y": zf.sgd(0.1)}, lambda p: "xy"[len(p) % 2]
    ),
    zf.offload(zf.adamw(0.05)),
    zf.lion(0.01, weight_decay=0.1),
    zf.rmsprop(0.01, momentum=0.5, centered=True),
    zf.scale_by_lr(0.1),
]
GRADIENT = [
    zf.clip_by_value(0.5),
    zf.clip_by_global_norm(0.7),
    zf.masked(zf.clip_by_value(0.1), lambda path: "w" in path),
    zf.scale_by_adam(),
    zf.trace(0.5, nesterov=True),
    zf.add_decayed_weights(0.1),
]
CASTS = [
    zf.precision(param_dtype=BF16),
    zf.precision(param_dtype=BF16, output_dtype=F32),
    zf.precision(store_dtype=F32),
]
SCALES = [zf.scale_loss(1024.0), zf.scale_loss(init_scale=2.0**10, growth_interval=2)]
ACCUMULATES = [zf.accumulate(1), zf.accumulate(2), zf.accumulate(3)]


@st.composite
def pipelines(draw, casts=True, optimizers=OPTIMIZERS):
    """Members in an order with a meaning, each there or not."""
    maybe = lambda options: draw(st.one_of(st.none(), st.sampled_from(options)))  # noqa: E731
    parts = [maybe(CASTS) if casts else None, maybe(SCALES), maybe(ACCUMULATES)]
    parts += draw(st.lists(st.sampled_from(GRADIENT), max_size=2))
    parts += [draw(st.sampled_from(optimizers)), maybe([zf.ema(0.9)])]
    return [p for p in parts if p is not None]


class RandomParts(nn.Module):
    """A small module of smooth parts with whatever a boundary trips over: ties, norms, buffers, several uses."""

    def __init__(self, kind):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4) if kind % 2 else nn.Identity()
        self.second = nn.Linear(4, 4, bias=bool(kind & 2))
        self.head = nn.Linear(4, 2)
        self.gain = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        if kind & 4:
            self.second.weight = nn.Parameter(self.second.weight.detach().clone())
            self.tied = nn.Linear(4, 4, bias=False)
            self.tied.weight = self.second.weight
        self.kind = kind

    def forward(self, x, shift=None):
        h = self.norm(torch.tanh(self.first(x)))
        h = torch.tanh(self.second(h)) * self.gain * self.frozen
        if self.kind & 4:
            h = h + self.tied(h)
        if shift is not None:
            h = h + shift["by"]
        # The same module twice in one call.
        return self.head(h), {"hidden": torch.tanh(self.head(h * 0.5)), "text": "kept"}


def module(kind, seed, dtype=F32):
    net = RandomParts(kind).to(dtype)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=F64) * 0.6)
    return net


kinds = st.integers(0, 7)


def loss(params, data):
    """Alive in every leaf that has elements."""
    pairs = zip(optree.tree_leaves(params), optree.tree_leaves(data), strict=True)
    return sum(((p.float() * d).sum() + 0.3 * (p.float() ** 2 * d.abs()).sum() for p, d in pairs), torch.zeros(()))


def run(tx, params, steps, donate=False, seed=0):
    step, state = zf.make_step(loss, tx, donate=donate), zf.init(tx, params)
    for i in range(steps):
        state, _ = step(state, random_like(params, seed + i))
    return state


# ---------------------------------------------------------------- programs

Grads = dict[str, Tensor]
SGD = {"lr": 0.2, "momentum": 0.7}
CLIP = 0.5


class Norming:
    """A transformation in the style of other libraries, which looks at the whole tree."""

    def init(self, params: Any) -> tuple:
        return ()

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = torch.sqrt(sum(u.square().sum() for u in updates.values()))
        return {n: u / (1 + norm) for n, u in updates.items()}, state


@zf.leafwise(needs="element")
def halved(grad, param):
    return grad * 0.5 + 0.01 * param


@zf.leafwise
def normed(grad, param):
    return grad / (1 + grad.norm())


def clipped(grads: Grads) -> Grads:
    norm = torch.stack([g.norm() for g in grads.values()]).norm()
    return {n: g * (CLIP / (norm + 1e-6)).clamp(max=1.0) for n, g in grads.items()}


# What stands before the optimizer: the transform, and what it does to whole gradients.
OWN: dict[str, tuple[Callable[[], Any], Callable[[Grads, Grads], Grads]]] = {
    "none": (lambda: (), lambda g, p: g),
    "clip": (lambda: (zf.clip_by_global_norm(CLIP),), lambda g, p: clipped(g)),
    "element": (lambda: (halved(),), lambda g, p: {n: x * 0.5 + 0.01 * p[n] for n, x in g.items()}),
    "leaf": (lambda: (normed(),), lambda g, p: {n: x / (1 + x.norm()) for n, x in g.items()}),
    "guest": (lambda: (Norming(),), lambda g, p: Norming().update(g, ())[0]),
}
# Those that every stage can have. Behind a clip no scale is seen.
PIECES = ("none", "none", "clip", "element", "leaf")


@dataclass(frozen=True)
class Program:
    """A training program on ranks.

    Attributes:
        kind: of `random_events`.
        seed: of parameters, data, and what is left to an event.
        events: by micro-step.
        forms: of models.
        pipe: of one process, which of `parity.PIPES`; over ranks what follows makes the pipeline.
        every: micro-steps of a window.
        scale: of the loss, a number or "dynamic".
        cast: whether it is stored in fp32 and computed in float64.
        own: of `OWN`.
        bucket: at most so many bytes are reduced together; as the library has it where None.
        orders: of blocks in a call, "all", "own" or "usual".
        usual: blocks in their usual order.
        talks: whether a collective of the user's follows each forward.
        ends: whether one follows each micro-step.
    """

    kind: str
    seed: int
    events: tuple[tuple[str, ...], ...]
    forms: tuple[Form, ...]
    size: int = 1
    pipe: str = ""
    stage: int = 0
    every: int = 1
    scale: float | str | None = None
    cast: bool = False
    own: str = "none"
    bucket: int | None = None
    orders: str = "all"
    usual: tuple[int, ...] = ()
    talks: bool = False
    ends: bool = True

    def make(self) -> list[Stack]:
        return [Stack(form, self.seed + i).to(F32 if self.cast else F64) for i, form in enumerate(self.forms)]

    def pipeline(self) -> zf.Transform:
        acc = (zf.accumulate(self.every),) if self.every > 1 or self.stage == 1 else ()
        dynamic = {"init_scale": 256.0, "growth_interval": 1} if self.scale == "dynamic" else {}
        scale = (zf.scale_loss(self.scale, **dynamic),) if self.scale else ()
        cast = (zf.precision(param_dtype=F64, output_dtype=F64),) if self.cast else ()
        return zf.chain(*around(self.stage, *cast, *scale, *acc), *OWN[self.own][0](), zf.sgd(**SGD))

    def run(self, models: list[Stack], step: int, rank: int = 0, **given: Any) -> list[Tensor | None]:
        """One micro-step on one rank. Returns what the program has seen."""
        some = random.Random(f"{self.seed} {step}")
        env = Env(
            models,
            rank,
            self.size,
            scaled=self.scale is not None,
            orders=self.orders,
            usual=self.usual,
            some=tuple(some.sample(range(self.size), some.randint(1, self.size))),
            # The same in each step where ranks are to do the same.
            grads=self.seed % 2 == 0 if self.orders == "usual" else None,
            talks=self.talks,
            sharded=self.stage == 3 and self.size > 1,
            own=random.Random(f"{self.seed} {step} {rank}"),
            **given,
        )
        env.data.manual_seed((self.seed * 1009 + step) * 31 + rank)
        events, taken = self.events[step % len(self.events)], set()
        for i, name in enumerate(events):
            rng = random.Random(f"{self.seed} {step} {i}")
            env.model = rng.choice(models)
            taken.add(id(env.model))
            EVENTS[name][0](env, rng)
        # A step of a model without any gradient is refused; in one process `fuzzing.attached_is_plain` gives it one.
        for env.model in models if self.size > 1 else ():
            if id(env.model) not in taken:
                EVENTS["plain"][0](env, random.Random(f"{self.seed} {step}"))
        # A rank that gives a step up, or evaluates alone, does not come to a collective of the user's with the others.
        if self.ends and not any("calls-differ" in EVENTS[name][1] for name in events):
            env.talk()
        return env.log

    @property
    def messages(self) -> int | None:
        """How many a micro-step takes at most of a program that does the same in each; None where it does not.

        A forward whose units are all still full from the backward before takes one less.
        """
        if self.kind != "promises" or {name for step in self.events for name in step} != {"plain"}:
            return None
        return 1 + (3 if self.talks else 1) * len(self.events[0])


def draw(kind: str, seed: int, size: int | None = None) -> Program:
    """The program of a seed, on `size` ranks, or as many as it says."""
    return {"everyday": _everyday, "uses": _uses, "promises": _promises, "unusual": _unusual}[kind](
        random.Random(f"{seed} {kind}"), seed, size
    )


def _form(rng: random.Random, kinds: tuple[str, ...], most: int, least: int = 1, **more: Any) -> Form:
    blocks = ((rng.choice(kinds), rng.choice(("plain", *WRAPS))) for _ in range(rng.randint(least, most)))
    return Form(tuple(blocks), tied=rng.random() < 0.3, **more)


def _everyday(rng: random.Random, seed: int, size: int | None) -> Program:
    from parity import PIPES

    size = size or 1
    # In one process not of one number, of which gradients of micro-steps may cancel in fp32.
    kinds = tuple(kind for kind in KINDS if size > 1 or kind not in ("gated", "bare"))

    def form() -> Form:
        made = _form(rng, kinds, 4)
        return made._replace(
            again=tuple(rng.randrange(len(made.blocks)) for _ in range(rng.randint(0, 2))),
            out=rng.choice(["tensor", "tuple", "dict", "views"]),
            skips=rng.random() < 0.3,
            outer=rng.choice(("plain", *WRAPS)),
        )

    forms = tuple(form() for _ in range(rng.choice([1, 1, 1, 2, 3])))
    every = rng.choice([1, 1, 2, 4])
    # Of several models one waits for ranks where another's calls differ.
    without = [*(["one-process"] if size > 1 else []), *(["calls-differ"] if len(forms) > 1 else [])]
    names = events_of("everyday", tuple(without))
    events = tuple(tuple(rng.choices(names, k=rng.randint(1, 3))) for _ in range(every))
    if size == 1:
        return Program("everyday", seed, events, forms, pipe=rng.choice(list(PIPES)), every=every, ends=False)
    scale, cast = rng.choice([None, 256.0, "dynamic"]), rng.random() < 0.3
    return Program(
        "everyday",
        seed,
        events * 2,
        forms,
        size,
        stage=rng.randrange(4),
        every=every,
        scale=scale,
        cast=cast,
        own=rng.choice(PIECES),
    )


# Of blocks with leaves of several numbers, each of which has a gradient in every call.
NET = Form((("gain", "plain"), ("linear", "saved")))


def each_everyday(size: int, few: bool) -> list[Program]:
    """Each everyday event at each stage, and each kind of blocks, with a loss scale and casts and without.

    `few` of them have each event and each kind of blocks once.
    """
    rows = [((name, "plain"), NET) for name in events_of("everyday", ("one-process",))]
    # A leaf that no call uses is in the unit of those that are differentiated twice.
    rows += [(("products with hessians",), Form((("bare", "plain"),)))]
    # A recurrent module keeps a list of its weights, which has those of the caller then.
    rows += [(("functional",), Form((("gru", "plain"), ("linear", "plain"))))]
    for i, kind in enumerate((*KINDS, *DIFFERENTIATES)):
        wraps = ("plain",) if kind in DIFFERENTIATES else WRAPS[i % 3 :][:1] if few else WRAPS
        rows += [(("plain", "two in one"), Form(((kind, wrap), (kind, "plain")))) for wrap in wraps]
    cells = [
        (*row, stage, *scaled) for row in rows for stage in range(4) for scaled in ((None, False), ("dynamic", True))
    ]
    return [
        Program("everyday", i, (events,) * 2, (form,), size, stage=stage, scale=scale, cast=cast, bucket=400)
        for i, (events, form, stage, scale, cast) in enumerate(cells)
        # Of the eight of each row another one; and second derivatives where they are taken through collectives,
        # and weights of the caller's where casts are done before forward.
        if not few
        or i % 8 == i // 8 * 3 % 8
        or (events[0] in ("products with hessians", "functional") and i % 8 == 6)
        or (events[0] == "functional" and i % 8 == 1)
    ]


def _uses(rng: random.Random, seed: int, size: int | None) -> Program:
    names = [n for n in events_of("uses") if n not in ("writes", "more on some")]
    quiet, every = rng.random() < 0.4, rng.choice([1, 1, 2])
    return Program(
        "uses",
        seed,
        tuple(
            (
                *(["writes"] if rng.random() < 0.3 else []),
                "plain",
                *rng.choices(names, k=rng.randint(0, 3)),
                *(["more on some"] if quiet else []),
            )
            for _ in range(3)
        ),
        (
            _form(
                rng,
                KINDS,
                most=6,
                least=2,
                same=rng.random() < 0.3,
                frozen=rng.random() < 0.3,
                scale=rng.random() < 0.7,
            ),
        ),
        size or rng.choice([1, 2, 3, 4]),
        stage=rng.choice([0, 1, 2, 3, 3]),
        every=every,
        scale=rng.choice([None, 1.0, 256.0, 256.0]),
        own=rng.choice(PIECES),
        bucket=rng.choice([1, 150, 600, 1 << 24]),
        orders="own",
        ends=not quiet,
    )


def _promises(rng: random.Random, seed: int, size: int | None) -> Program:
    form = _form(rng, ("tanh", "gated", "norm", "twice", "lora"), most=5, least=2, frozen=rng.random() < 0.2)
    blocks = len(form.blocks)
    talks, backwards = rng.random() < 0.3, rng.choice([1, 1, 2])
    # With a collective of the user's after each call it hangs by itself where ranks call the model in different
    # numbers, or in the order in which threads come.
    ways = events_of("promises", (*(["quiet"] if talks else []), *(["untied"] if form.tied else [])))
    ways.remove("plain")
    # Programs that only do the usual tell how many messages that takes.
    calm = rng.random() < 0.15
    form = form._replace(close=calm and rng.random() < 0.5)

    def events(step: int) -> tuple[str, ...]:
        if calm or step <= TRUSTED or rng.random() < 0.55:
            return ("plain",) * backwards
        way = rng.choice(ways)
        return (way, *(["plain" if "quiet" in EVENTS[way][1] else way] * (backwards - 1)))

    return Program(
        "promises",
        seed,
        tuple(events(step) for step in range(9)),
        (form,),
        size or 3,
        stage=3,
        every=rng.choice([1, 1, 2]),
        scale=rng.choice([None, None, 256.0]),
        own=rng.choice(PIECES),
        orders="usual",
        usual=tuple(i for i in range(blocks) if rng.random() < 0.8) or (0,),
        talks=talks,
        ends=talks,
    )


def _unusual(rng: random.Random, seed: int, size: int | None) -> Program:
    scale = 256.0 if rng.random() < 0.4 else None
    # A backward of the user's own that is not linear sees scaled cotangents, which the docstring of scale_loss says. A
    # feature in an attribute is refused there.
    possible = [h for h in HABITS if not (scale and h in ("own backward", "attribute"))]
    habits = tuple(rng.sample(possible, rng.choice([0, 0, 1, 1, 2])))
    names = rng.sample([n for n in events_of("unusual") if n != "plain"], rng.choice([1, 1, 2]))
    if {"returns features", "attribute"} & set(habits) and rng.random() < 0.7:
        names.append("features")
    every = rng.choice([1, 1, 2])
    size, stage = size or rng.choice([1, 2, 2, 3]), rng.randrange(4)
    if stage == 3 and size > 1 and {"momentum", "clamp"} & set(habits):
        # One rank alone then sees parts that others have written and parts that they have not: docstring of shard.
        names = [n for n in names if n != "alone"] or ["plain"]
    more = tuple((rng.choice(("gated", "gated", "linear", "norm")), "plain") for _ in range(rng.randint(0, 2)))
    return Program(
        "unusual",
        seed,
        tuple(("plain", *rng.choices(names, k=rng.randint(0, 2))) for _ in range(3 * every)),
        (
            Form(
                (("gated", "plain"), *more),
                habits=habits,
                ways=(rng.randrange(6), rng.randrange(3), rng.randrange(5)),
            ),
        ),
        size,
        stage=stage,
        every=every,
        scale=scale,
        cast=rng.random() < 0.3,
        own=rng.choice(["none"] * 5 + ["element", "leaf", "guest"]),
    )


# ---------------------------------------------------------------- what a program must give


@dataclass
class Result:
    """What a rank ends with: parameters before and after, and what the program has seen.

    Attributes:
        messages: how many were exchanged, in all and in the last step.
        collectives: how many of units were run.
        most: so many units were full at the same time.
    """

    before: Grads
    after: Grads
    log: list[Tensor | None]
    messages: tuple[int, int] = (0, 0)
    collectives: int = 0
    most: int = 0


def values(models: list[Stack]) -> Grads:
    return {f"{i}.{n}": p.detach().double().clone() for i, m in enumerate(models) for n, p in m.named_parameters()}


def reference(program: Program, apart: bool = False) -> list[Result]:
    """Plain torch: float64 models of each rank in one process, gradients averaged by hand, and momentum.

    Args:
        program: what to run.
        apart: whether each call computes with copies of its own. Torch refuses a backward where a parameter was
            written into after it was used, also where that changed no number, or changed a copy of another call.
    """
    ranks = [[m.double() for m in program.make()] for _ in range(program.size)]
    for model in itertools.chain(*ranks):
        model.apart = apart
    before = values(ranks[0])
    logs: list[list[Tensor | None]] = [[] for _ in ranks]
    # By model.
    moments, totals = ([Grads() for _ in program.forms] for _ in range(2))
    for step in range(len(program.events)):
        for rank, models in enumerate(ranks):
            logs[rank] += program.run(models, step, rank)
            for model, total in zip(models, totals, strict=True):
                for n, p in model.named_parameters():
                    if p.grad is not None:
                        total[n] = total.get(n, 0) + p.grad
                        p.grad = None
        if (step + 1) % program.every:
            continue
        for i, (total, moment) in enumerate(zip(totals, moments, strict=True)):
            grads = {n: g / (program.size * program.every) for n, g in total.items()}
            total.clear()
            params = {n: p.detach() for n, p in ranks[0][i].named_parameters()}
            for n, g in OWN[program.own][1](grads, params).items() if grads else ():
                moment[n] = SGD["momentum"] * moment[n] + g if n in moment else g
                for models in ranks:
                    models[i].get_parameter(n).data.sub_(moment[n], alpha=SGD["lr"]) if n in grads else None
    return [Result(before, values(models), log) for models, log in zip(ranks, logs, strict=True)]


def worst(got: Result, want: Result) -> tuple[float, str]:
    """The largest error of a change, as a share of the largest change; and of what was seen, of its own size."""
    moved = {n: want.after[n] - want.before[n] for n in want.after}
    change = max(float(x.abs().max()) for x in moved.values() if x.numel())
    # One that diverges multiplies each rounding.
    assert 1e-4 < change < 10, f"the reference did not train: it changed by {change:.1e}"
    found = (0.0, "")
    for n, x in moved.items():
        off = float((got.after[n] - got.before[n] - x).norm(torch.inf)) / change if x.numel() else 0.0
        found = max(found, (off, n)) if off == off else (float("nan"), n)
    if len(got.log) != len(want.log):
        return float("inf"), f"{len(got.log)} tensors were seen instead of {len(want.log)}"
    for i, (g, w) in enumerate(zip(got.log, want.log, strict=True)):
        where = f"tensor {i} that was seen"
        if g is None or w is None:
            found = found if g is w else (float("inf"), f"{where} is {g} instead of {w}")
        elif g.shape != w.shape:
            return float("inf"), f"{where} has shape {tuple(g.shape)}, not {tuple(w.shape)}"
        else:
            off = float((g - w).norm() / w.norm().clamp(min=1e-9))
            found = max(found, (off if off == off else 1e9, where))
    return found
