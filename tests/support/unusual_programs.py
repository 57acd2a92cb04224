"""Random programs of what people do beside plain training: writes in forward, hooks, closures, calls on one rank.

A program is drawn from a seed: a model with some habits in its forward, and for each step a few actions. The
reference runs it on one plain float64 model per rank in one process, and averages gradients over those models.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from stages import around
from torch import Tensor, nn
from unusual_actions import ACTIONS, Env
from unusual_models import HABITS, UnusualStack

import zerofn as zf

STEPS = 3
Grads = dict[str, Tensor]


class Norming:
    """A transformation in the style of other libraries, which looks at the whole tree."""

    def init(self, params: Any) -> tuple:
        return ()

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        norm = torch.sqrt(sum(u.square().sum() for u in updates.values()))
        return {n: u / (1 + norm) for n, u in updates.items()}, state


def _tree_norm(grads: Grads) -> Grads:
    return Norming().update(grads, ())[0]


@zf.leafwise(needs="element")
def halved(grad, param):
    return grad * 0.5 + 0.01 * param


@zf.leafwise
def normed(grad, param):
    return grad / (1 + grad.norm())


# A transform of one's own: what goes into the chain, what it does to whole gradients, whether pieces may see it.
OWN: dict[str, tuple[Callable[[], Any], Callable[[Grads, Grads], Grads]]] = {
    "none": (lambda: (), lambda g, p: g),
    "element": (lambda: (halved(),), lambda g, p: {n: x * 0.5 + 0.01 * p[n] for n, x in g.items()}),
    "leaf": (lambda: (normed(),), lambda g, p: {n: x / (1 + x.norm()) for n, x in g.items()}),
    "guest": (lambda: (Norming(),), lambda g, p: _tree_norm(g)),
}


@dataclass(frozen=True)
class Program:
    """A drawn program.

    Attributes:
        actions: by step.
        cast: whether it is stored in fp32 and computed in float64.
    """

    seed: int
    size: int
    stage: int
    every: int
    scale: bool
    cast: bool
    own: str
    habits: tuple[str, ...]
    actions: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.size} ranks, ZeRO {self.stage}, every {self.every}"
            f"{', scaled' if self.scale else ''}{', cast' if self.cast else ''}, own {self.own}, "
            f"habits {list(self.habits)}, actions {[list(a) for a in self.actions]}"
        )

    def make(self) -> UnusualStack:
        return UnusualStack(self.seed, self.habits).to(torch.float32 if self.cast else torch.float64)

    def pipeline(self) -> zf.Transform:
        acc = (zf.accumulate(self.every),) if self.every > 1 or self.stage == 1 else ()
        scale = (zf.scale_loss(256.0),) if self.scale else ()
        cast = (zf.precision(param_dtype=torch.float64, output_dtype=torch.float64),) if self.cast else ()
        own = OWN[self.own][0]()
        return zf.chain(*around(self.stage, *cast, *scale, *acc), *own, zf.sgd(lr=0.2, momentum=0.7))

    def run(self, env: Env) -> None:
        """One micro-step on one rank."""
        env.data.manual_seed((self.seed * 1009 + env.step) * 31 + env.rank)
        for i, name in enumerate(self.actions[env.step]):
            ACTIONS[name](env, random.Random(f"{self.seed} {env.step} {i}"))
        # A rank that gives a step up, or evaluates alone, does not come to a collective of the user's with the others.
        if not {"gives up", "alone"} & set(self.actions[env.step]):
            env.talk()


def draw(seed: int) -> Program:
    rng = random.Random(f"{seed} unusual")
    scale = rng.random() < 0.4
    # A backward of the user's own that is not linear sees scaled cotangents, which the docstring of scale_loss says. A
    # feature in an attribute is refused there.
    possible = [h for h in HABITS if not (scale and h in ("own backward", "attribute"))]
    habits = tuple(rng.sample(possible, rng.choice([0, 0, 1, 1, 2])))
    names = rng.sample([n for n in ACTIONS if n != "plain"], rng.choice([1, 1, 2]))
    if {"returns features", "attribute"} & set(habits) and rng.random() < 0.7:
        names.append("features")
    every = rng.choice([1, 1, 2])
    actions = tuple(("plain", *rng.choices(names, k=rng.randint(0, 2))) for _ in range(STEPS * every))
    size, stage = rng.choice([1, 2, 2, 3]), rng.randrange(4)
    if stage == 3 and size > 1 and {"momentum", "clamp"} & set(habits):
        # One rank alone then sees parts that others have written and parts that they have not: docstring of shard.
        actions = tuple(tuple(a for a in step if a != "alone") for step in actions)
    return Program(
        seed,
        size=size,
        stage=stage,
        every=every,
        scale=scale,
        cast=rng.random() < 0.3,
        own=rng.choice(["none"] * 5 + ["element", "leaf", "guest"]),
        habits=habits,
        actions=actions,
    )


@dataclass
class Result:
    """What a rank ends with: the change of every parameter, and what the program has seen."""

    before: Grads
    after: Grads
    log: list[Tensor]


def values(model: nn.Module) -> Grads:
    return {n: p.detach().double().clone() for n, p in model.named_parameters()}


def reference(program: Program, apart: bool = False) -> list[Result]:
    """Plain torch: one model per rank in one process, gradients averaged by hand.

    Args:
        program: what to run.
        apart: whether each call computes with copies of its own. Torch refuses a backward where a parameter was
            written into after it was used, also where that changed no number, or changed a copy of another call.
    """
    models = [program.make().double() for _ in range(program.size)]
    for model in models:
        model.apart = apart
    before = values(models[0])
    moments: Grads = {}
    logs: list[list[Tensor]] = [[] for _ in models]
    total: Grads = {}
    for step in range(STEPS * program.every):
        for rank, model in enumerate(models):
            program.run(Env(model, rank, program.size, step, program.seed, program.scale, log=logs[rank]))
            for n, p in model.named_parameters():
                if p.grad is not None:
                    total[n] = total.get(n, 0) + p.grad
                    p.grad = None
        if (step + 1) % program.every:
            continue
        named = dict(models[0].named_parameters())
        grads = {n: g / (program.size * program.every) for n, g in total.items()}
        total = {}
        grads = OWN[program.own][1](grads, {n: p.detach() for n, p in named.items()})
        for n, g in grads.items():
            moments[n] = 0.7 * moments[n] + g if n in moments else g
        for model in models:
            with torch.no_grad():
                for n, p in model.named_parameters():
                    if n in grads:
                        p -= 0.2 * moments[n]
    return [Result(before, values(m), log) for m, log in zip(models, logs, strict=True)]


def attached(program: Program, rank: int, talk: Callable[[], None], folder: str) -> Result:
    """The same on this rank with an attached model."""
    model = program.make()
    before = values(model)
    opt = zf.attach(model, program.pipeline())
    log: list[Tensor] = []
    for step in range(STEPS * program.every):
        program.run(Env(model, rank, program.size, step, program.seed, program.scale, opt, talk, folder, log))
        opt.step()
        opt.zero_grad()
    opt.detach()
    return Result(before, values(model), log)


def worst(got: Result, want: Result) -> tuple[float, str]:
    """The largest error of a change, as a share of the largest change; and of what was seen, of its own size."""
    change = max(float((want.after[n] - want.before[n]).abs().max()) for n in want.after)
    assert change > 1e-4, "the reference did not train"
    found = (0.0, "")
    for n in want.after:
        off = float(((got.after[n] - got.before[n]) - (want.after[n] - want.before[n])).abs().max()) / change
        found = max(found, (off, n)) if off == off else (float("nan"), n)
    if len(got.log) != len(want.log):
        return float("inf"), f"{len(got.log)} tensors were seen instead of {len(want.log)}"
    for i, (g, w) in enumerate(zip(got.log, want.log, strict=True)):
        if g.shape != w.shape:
            return float("inf"), f"tensor {i} that was seen has shape {tuple(g.shape)}, not {tuple(w.shape)}"
        off = float(
            ((g - w).norm() / w.norm().clamp(min=1e-9)).nan_to_num(0.0 if w.isnan().all() and g.isnan().all() else 1e9)
        )
        found = max(found, (off, f"tensor {i} that was seen"))
    return found
