"""The eager scenarios of one process on gloo ranks: each rank on data of its own, against one plain module.

The plain fp32 module starts every window from the parameters that the ranks have, and runs the programs of all ranks
one after the other. Compared are the gradients that reach the optimizer, whatever the programs return, and
how far parameters move.
"""

from __future__ import annotations

import importlib
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import rank_programs as P
import torch
import torch.distributed as dist
from channels import Channels
from stages import around
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf
from zerofn.extend import Transform

# At the end, since a directory of tests may hold a module of the same name as one of here.
parity = importlib.import_module("parity")
zoo = importlib.import_module("models")
S = importlib.import_module("test_scenarios")

LR = 0.25
# Steps by which the data of two ranks are apart; even, as some programs do another thing in every other step.
APART = 10
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# How far a gradient may be from that of the plain module, as in the scenarios of one process.
PRECISIONS = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2}
# How many windows: the second of fp16 is under another loss scale; one of bf16 would only be another rounding.
WINDOWS = {"fp32": 2, "bf16": 1, "fp16": 2}


class OfLeaves(dict):
    """Gradients of parameters that a program returns: the rank's own, and under `shard` its part of the mean."""


def rank_of(run: Any) -> int:
    """Whose data the program is run on."""
    return run.step // APART


def full_parameters(run: Any) -> dict[str, Tensor]:
    """Copies of the parameters in their own shapes, that may be differentiated."""
    if run.opt is None:
        return {n: p.detach().clone().requires_grad_() for n, p in run.model.named_parameters()}
    with run.opt.gathered() as model:
        return {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}


# ---------------------------------------------------------------- programs that say something else on ranks


def grad_of_parameters(run: Any):
    return OfLeaves(zip(dict(run.model.named_parameters()), S.grad_of_parameters(run), strict=True))


def hessian_vector(run: Any):
    return OfLeaves(zip(dict(run.model.named_parameters()), S.hessian_vector(run), strict=True))


def user_hooks(run: Any):
    """Hooks on parameters, inputs and outputs see true gradients, and may change them."""
    x = run.data(5, 6, grad=True)
    seen, others = OfLeaves(), []
    handles = [
        p.register_hook(lambda g, n=n: seen.__setitem__(n, g.clone()) or g * 2) for n, p in run.model.named_parameters()
    ]
    x.register_hook(lambda g: others.append(g.clone()))
    out = run.model(x)
    out.register_hook(lambda g: others.append(g.clone()))
    out.square().mean().backward()
    for h in handles:
        h.remove()
    return [seen, *others]


def accumulate_hooks(run: Any):
    """Called once for each parameter. Where gradients leave during backward, `p.grad` is `None` by then."""
    seen: list[str] = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda _, n=n: seen.append(n)) for n, p in run.model.named_parameters()
    ]
    S.one(run)
    for h in handles:
        h.remove()
    assert sorted(seen) == sorted(n for n, _ in run.model.named_parameters())


def exceptions(run: Any):
    # The only way to drop gradients that have left already.
    return S.exceptions(run, (run.opt or run.model).zero_grad)


def functional(run: Any):
    return S.functional(run, full_parameters(run))


def functional_transforms(run: Any):
    return S.functional_transforms(run, full_parameters(run))


def forces(run: Any):
    """Energies and their derivative by an input whose gradient the caller has asked for."""
    x = run.data(5, 6, grad=True)
    energy, force = run.model(x)
    (energy.square().mean() + force.square().sum()).backward()
    return x.grad


def branches(run: Any):
    """Ranks take different branches, and other ones in the next step."""
    x = run.data(5, 6, grad=True)
    run.model(x, "ab"[(run.step + rank_of(run)) % 2]).square().mean().backward()
    return x.grad


class Experts(nn.Module):
    """A router over experts, one of which is not even called."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)) for _ in range(3))

    def forward(self, x: Tensor, without: int) -> Tensor:
        gates = self.router(x).softmax(1)
        return sum(gates[:, i : i + 1] * e(x) for i, e in enumerate(self.experts) if i != without)  # type: ignore


def experts(run: Any):
    """Each rank leaves out an expert of its own."""
    x = run.data(5, 6, grad=True)
    run.model(x, rank_of(run)).square().mean().backward()
    return x.grad


def one_expert(run: Any):
    """Each rank calls an expert of its own, and every other rank the whole model after that."""
    x = run.data(5, 6, grad=True)
    rank = rank_of(run)
    out = run.model.experts[rank](x)
    if rank % 2:
        out = out + run.model(x, 0)
    out.square().mean().backward()
    return x.grad


def unequal_rows(run: Any):
    """Ranks with batches of different sizes, the first backward of two being smaller."""
    for seed in (0, 1):
        x = run.data(1 + rank_of(run) + seed, 6, seed=seed)
        run.model(x).square().mean().backward()


def called_twice(run: Any):
    x = run.data(5, 6, grad=True)
    run.model(torch.tanh(run.model(x))).square().mean().backward()
    return x.grad


def weight_normed() -> nn.Module:
    net = zoo.Net()
    nn.utils.parametrizations.weight_norm(net.first)
    return net


# ------------------------------------------------------------------------------------------------ the matrix


@dataclass(frozen=True)
class Scenario:
    """A program, its models, and where it is run.

    Attributes:
        program: what a rank does between two steps.
        makes: one for each model.
        every: micro-batches in a window.
        looser: factor on the tolerance of 16 bits: a higher derivative loses about a bit with each order, and
            a deeper model adds up roundings.
        unused: prefixes of leaves that may stay without gradient.
        precisions: where it is run.
        refused: where it is not run, besides: by number of ranks, stage and precision.
    """

    program: Callable[[Any], Any]
    makes: tuple[Callable[[], nn.Module], ...] = field(default_factory=lambda: (zoo.Net,))
    every: int = 1
    looser: float = 1.0
    unused: tuple[str, ...] = ()
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    refused: Callable[[int, int, str], bool] = lambda size, stage, precision: False

    def runs(self, size: int, stage: int, precision: str) -> bool:
        """Whether it is run there."""
        return precision in self.precisions and not self.refused(size, stage, precision)


ON_RANKS: dict[str, Callable[[Any], Any]] = {
    f.__name__: f
    for f in (
        grad_of_parameters,
        hessian_vector,
        user_hooks,
        accumulate_hooks,
        exceptions,
        functional,
        functional_transforms,
    )
}


def sharded(size: int, stage: int, precision: str) -> bool:
    """Where the model's parameters are gathered on use."""
    return size > 1 and stage == 3


REFUSED: dict[str, Callable[[int, int, str], bool]] = {
    # Under `shard` a call of the model uses saved_tensors_hooks, which torch.func.grad refuses; zf.bind has none.
    "functional_transforms": sharded,
}


def refused(program: Callable[[Any], Any]) -> Callable[[int, int, str], bool]:
    return REFUSED.get(program.__name__, lambda size, stage, precision: False)


HIGHER = ("third_order", "hessian_vector", "gradient_penalty")
PROGRAMS: list[Callable[[Any], Any]] = S.PROGRAMS
SCENARIOS: dict[str, Scenario] = {
    p.__name__: Scenario(
        ON_RANKS.get(p.__name__, p),
        looser=4.0 if p.__name__ in HIGHER else 1.0,
        refused=refused(p),
    )
    for p in PROGRAMS
}
SCENARIOS |= {
    f"{p.__name__} {i}": Scenario(p, (make,), looser=2.0, refused=refused(p)) for i, (p, make) in enumerate(S.MODELS)
}
for again in (S.look_between, S.repeated_by_both, S.function_of_the_user):
    for reentrant in (True, False):
        SCENARIOS[f"{again.__name__}, {'' if reentrant else 'non-'}reentrant"] = Scenario(
            again, (lambda r=reentrant: zoo.Checkpointed(r),), looser=2.0, refused=refused(again)
        )
SCENARIOS |= {
    p.__name__: Scenario(p, (zoo.Net, zoo.Net), looser=2.0)
    for p in (S.shared_loss, S.feeding, S.handed_over, S.head_outside)
}
SCENARIOS |= {
    "accumulation": Scenario(S.forward_backward_twice, every=2),
    "accumulation of kept graphs": Scenario(S.retained, every=2),
    "accumulation of penalties": Scenario(S.gradient_penalty, every=2, looser=4.0),
    "accumulation of two models": Scenario(S.feeding, (zoo.Net, zoo.Net), every=2, looser=2.0),
    "accumulation of branches": Scenario(branches, (zoo.Branch,), every=2),
    # One process alone uses one branch in each step.
    "branches": Scenario(branches, (zoo.Branch,), unused=("a.", "b.")),
    # Nobody uses the first expert where there is no second rank.
    "experts": Scenario(experts, (Experts,), unused=("experts.0.",)),
    "experts called directly": Scenario(one_expert, (Experts,), unused=("experts.", "router.")),
    "unequal rows": Scenario(unequal_rows),
    "called twice": Scenario(called_twice, (lambda: zoo.Net(6, 6),), looser=2.0),
    "forces": Scenario(forces, (zoo.Force,), looser=4.0),
    "weight norm": Scenario(S.weight_norm_used_outside, (weight_normed,), looser=2.0),
    # The QR decomposition of `orthogonal` has no 16-bit kernel.
    "orthogonal": Scenario(S.weight_norm_used_outside, (S.weight_normed,), precisions=("fp32",)),
}


def build(scenario: Scenario) -> list[nn.Module]:
    """The same models on every rank."""
    torch.manual_seed(0)
    return [make() for make in scenario.makes]


def pipe_of(stage: int, precision: str, every: int, seen: dict[str, Tensor]) -> zf.Transform:
    """A pipeline that shows in `seen` the gradients that its optimizer gets."""

    def show(grads: dict[str, Tensor], state: Any, params: Any, carry: Any, ctx: Any):
        seen.update({path: g.detach().clone() for path, g in grads.items()})
        return grads, state

    cast = {
        "fp32": [],
        "bf16": [zf.precision(store_dtype=BF16, grad_dtype=FP32)],
        "fp16": [
            zf.precision(param_dtype=FP16, output_dtype=FP32),
            # Small enough not to overflow on the data here, and growing at every step.
            zf.scale_loss("dynamic", init_scale=256.0, growth_interval=1),
        ],
    }[precision]
    held = [zf.accumulate(every)] if every > 1 else [P.hold()] if stage == 1 else []
    last = zf.low_precision_adam(1e-3, rounding="stochastic") if precision == "bf16" else zf.sgd(LR)
    shown = Transform("show", needs="element", update_fn=show)
    return zf.chain(*around(stage, *cast, *held), shown, last)


def parameters(models: list[nn.Module]) -> list[dict[str, Tensor]]:
    return [{n: p.detach().clone() for n, p in m.named_parameters()} for m in models]


def stored(opts: list[zf.Optimizer]) -> list[dict[str, Tensor]]:
    """What the states keep of the parameters on this rank: models may hold them rounded to the compute dtype."""
    return [{n: x.detach().clone() for n, x in opt.state.leaves.items()} for opt in opts]


def sorted_out(result: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What a program returns: tensors of the rank's own, and gradients of parameters."""
    items = result if isinstance(result, list | tuple) else [] if result is None else [result]
    own = [x.detach().clone() for x in items if not isinstance(x, OfLeaves)]
    ofs = (pair for item in items if isinstance(item, OfLeaves) for pair in item.items())
    return own, {n: getattr(x, "to_local", lambda x=x: x)().detach().clone() for n, x in ofs}


def cell(scenario: Scenario, stage: int, precision: str) -> dict[str, Any]:
    """One scenario on this rank: parameters before each window and after the last, gradients, and results."""
    models = build(scenario)
    seen: list[dict[str, Tensor]] = [{} for _ in models]
    opts = [zf.attach(m, pipe_of(stage, precision, scenario.every, s)) for m, s in zip(models, seen, strict=True)]
    params, grads, results = [stored(opts)], [], []
    for window in range(WINDOWS[precision]):
        for micro in range(scenario.every):
            step = window * scenario.every + micro
            torch.manual_seed(step)
            result = scenario.program(parity.Run(models, step + APART * dist.get_rank(), opts[0]))
            results.append(sorted_out(result))
            for opt in opts:
                opt.step()
                opt.zero_grad()
        assert all(bool(opt.metrics["updated"]) for opt in opts)
        grads.append([dict(s) for s in seen])
        for s in seen:
            s.clear()
        params.append(stored(opts))
    for opt in opts:
        opt.detach()
    return {"params": params, "grads": grads, "results": results, "final": parameters(models)}


def cells_of(cells: list[tuple[str, int]], precision: str) -> dict[tuple[str, int], Any]:
    out = {}
    channels = Channels()
    for name, stage in cells:
        if SCENARIOS[name].runs(dist.get_world_size(), stage, precision):
            channels.next = 0
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    out[name, stage] = cell(SCENARIOS[name], stage, precision)
            except Exception:
                out[name, stage] = traceback.format_exc()
                # Something may still be under way in those.
                channels.opened.clear()
    return out


def whole(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """The parameter, or its gradient, of which every rank has a part, or all."""
    if all(part.shape == shape for part in parts) and (len(parts) == 1 or len(shape) != 1 or not cut(parts, shape)):
        assert all(torch.equal(part, parts[0]) for part in parts), "ranks differ"
        return parts[0].float()
    return torch.cat(parts).reshape(shape).float()


def cut(parts: list[Tensor], shape: torch.Size) -> bool:
    """Whether ranks hold flat parts, and not each the whole."""
    return sum(part.numel() for part in parts) == shape.numel()


@dataclass
class Wanted:
    """What the plain module does in one window.

    Attributes:
        grads: by model and path, the mean over ranks and micro-batches.
        results: by micro-batch and rank.
    """

    grads: list[dict[str, Tensor]]
    results: list[list[tuple[list[Tensor], dict[str, Tensor]]]]


def plain_window(scenario: Scenario, size: int, window: int, start: list[dict[str, Tensor]]) -> Wanted:
    models = build(scenario)
    with torch.no_grad():
        for m, params in zip(models, start, strict=True):
            for n, p in m.named_parameters():
                p.copy_(params[n])
    results = []
    for micro in range(scenario.every):
        step = window * scenario.every + micro
        results.append([])
        for rank in range(size):
            torch.manual_seed(step)
            others = [p.grad for m in models for p in m.parameters()]
            for m in models:
                m.zero_grad()
            results[-1].append(sorted_out(scenario.program(parity.Run(models, step + APART * rank))))
            for p, old in zip((p for m in models for p in m.parameters()), others, strict=True):
                if old is not None:
                    p.grad = old if p.grad is None else p.grad + old
    count = size * scenario.every
    grads = [{n: p.grad / count for n, p in m.named_parameters() if p.grad is not None} for m in models]
    for m, found in zip(models, grads, strict=True):
        for n, p in m.named_parameters():
            lively = n in found and float(found[n].norm()) > 0
            assert lively or not p.requires_grad or n.startswith(scenario.unused or ("-",)), f"{n}: dead data"
    return Wanted(grads, results)


class Reference:
    """Windows of the plain module; those that start from the same parameters are run once."""

    def __init__(self, scenario: Scenario, size: int):
        self.scenario, self.size = scenario, size
        self.known: dict[tuple[int, bytes], Wanted] = {}

    def __call__(self, window: int, start: list[dict[str, Tensor]]) -> Wanted:
        key = window, b"".join(x.numpy().tobytes() for params in start for x in params.values())
        if key not in self.known:
            self.known[key] = plain_window(self.scenario, self.size, window, start)
        return self.known[key]


def near(what: str, got: Tensor, want: Tensor, tol: float) -> None:
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    error = parity.difference(got, want)
    assert error < tol, f"{what} off by {error:.2e}, allowed {tol:.0e}"


def check(name: str, stage: int, precision: str, ranks: list[Any], reference: Reference) -> None:
    """Compare one cell.

    Raises:
        AssertionError: naming what differs.
    """
    scenario = reference.scenario
    tol = PRECISIONS[precision] * (1.0 if precision == "fp32" else scenario.looser)
    if scenario.program in S.AUTOCASTS and precision != "fp32":
        # bf16 inside of fp16.
        tol = max(tol, S.AUTOCASTS[scenario.program])
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in build(scenario)]

    def joined(pick: Callable[[Any], list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
        found = [pick(r) for r in ranks]
        assert all([d.keys() for d in f] == [d.keys() for d in found[0]] for f in found), "ranks have other leaves"
        return [{n: whole([f[i][n] for f in found], shapes[i][n]) for n in found[0][i]} for i in range(len(found[0]))]

    for window in range(WINDOWS[precision]):
        before = joined(lambda r, w=window: r["params"][w])
        after = joined(lambda r, w=window: r["params"][w + 1])
        want = reference(window, before)
        grads = joined(lambda r, w=window: r["grads"][w])
        for i, (found, wanted) in enumerate(zip(grads, want.grads, strict=True)):
            assert found.keys() == wanted.keys(), f"gradients of {sorted(found.keys() ^ wanted.keys())}"
            for n, g in wanted.items():
                near(f"window {window}, gradient of {n}", found[n], g, tol)
            for n, start in before[i].items():
                moved = after[i][n] - start
                if n not in wanted:
                    assert not moved.any(), f"window {window}, {n} moved without a gradient"
                elif precision != "bf16":
                    far = float((moved + LR * wanted[n]).norm())
                    # The stored parameter is rounded once more, at its own size.
                    allowed = tol * LR * float(wanted[n].norm()) + 2e-7 * float(start.norm())
                    assert far < allowed, f"window {window}, change of {n} off by {far:.2e}, allowed {allowed:.0e}"
            assert any(not torch.equal(after[i][n], start) for n, start in before[i].items()), "nothing moved"
        for micro, wants in enumerate(want.results):
            gots = [r["results"][window * scenario.every + micro] for r in ranks]
            for rank, ((own, leaves), (own_want, leaves_want)) in enumerate(zip(gots, wants, strict=True)):
                where = f"window {window}, rank {rank}"
                assert len(own) == len(own_want)
                for k, (g, w) in enumerate(zip(own, own_want, strict=True)):
                    assert float(w.norm()) > 0, f"result {k} is dead data"
                    near(f"{where}, result {k}", g, w, tol)
                assert leaves.keys() == leaves_want.keys()
                for n, w in leaves_want.items() if stage < 3 else ():
                    near(f"{where}, returned gradient of {n}", leaves[n], w, tol)
            for n in gots[0][1] if stage == 3 else ():
                mean = torch.stack([w[1][n] for w in wants]).mean(0)
                got = whole([g[1][n] for g in gots], mean.shape)
                near(f"window {window}, returned gradient of {n}", got, mean, tol)
    final, last = joined(lambda r: r["final"]), joined(lambda r: r["params"][-1])
    for left, right in zip(final, last, strict=True):
        assert left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left), "detach changed them"


EVERY = [(name, stage) for stage in P.STAGES for name in SCENARIOS]
# In each run of the tests each scenario at one stage, in fp16, which has a loss scale.
OFTEN = [(name, P.STAGES[i % len(P.STAGES)]) for i, name in enumerate(SCENARIOS)]


@pytest.mark.parametrize(
    ("size", "precision", "cells"),
    [
        (2, "fp16", OFTEN),
        *(pytest.param(size, kind, EVERY, marks=pytest.mark.slow) for size in (1, 2, 3) for kind in PRECISIONS),
    ],
)
def test_scenarios_give_the_gradients_of_plain_torch(size: int, precision: str, cells: list[tuple[str, int]]):
    ranks = zf.launch(cells_of, size, cells, precision, timeout=limit(120))
    references = {name: Reference(SCENARIOS[name], size) for name, _ in cells}
    bad = []
    for name, stage in ranks[0]:
        found = [r[name, stage] for r in ranks]
        raised = [f"rank {i} raised\n{f}" for i, f in enumerate(found) if isinstance(f, str)]
        try:
            assert not raised, raised[0]
            check(name, stage, precision, found, references[name])
        except AssertionError as error:
            bad.append(f"{name}, stage {stage}: {str(error).splitlines()[0] if not raised else error}")
    assert not bad, "\n".join([f"{len(bad)} of {len(ranks[0])} cells:", *bad])
