"""Weights that somebody writes into an attached model are those that training goes on from, whatever keeps copies.

Some transforms keep slots that follow from a parameter (`Facts.shadows`). Who writes, through which chain, at which
stage and on how many ranks must not matter: before the first step the run is that of a model attached with these
weights. Later the slots are taken anew, which closed forms say in float64.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
from covering import covering, few_and_all
from time_limits import limit
from torch import Tensor, nn

import zerofn as zf
from zerofn.extend import Transform

BF16 = torch.bfloat16
LR = 0.125


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    with torch.no_grad():
        for p in model.parameters():
            # Numbers that bf16 has, for chains that store it.
            p.copy_(p.to(BF16))
    return model


def others() -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model_of(1).named_parameters()}


X = torch.linspace(-1, 1, 12).reshape(4, 3)


def step(model: nn.Module, opt: zf.Optimizer) -> None:
    model(X.to(next(model.parameters()).dtype)).float().square().mean().backward()
    opt.step()
    opt.zero_grad()


# ---- who writes ----


def load(model: nn.Module, opt: zf.Optimizer, new: dict[str, Tensor]) -> None:
    model.load_state_dict(new)


def load_one_by_one(model: nn.Module, opt: zf.Optimizer, new: dict[str, Tensor]) -> None:
    for name, x in new.items():
        model.load_state_dict({name: x}, strict=False)


def inside_gathered(model: nn.Module, opt: zf.Optimizer, new: dict[str, Tensor]) -> None:
    with opt.gathered(), torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(new[name])


def loaded_inside_gathered(model: nn.Module, opt: zf.Optimizer, new: dict[str, Tensor]) -> None:
    with opt.gathered():
        model.load_state_dict(new)


@torch.no_grad()
def by_copy(model: nn.Module, opt: zf.Optimizer, new: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p.copy_(new[name])


@torch.no_grad()
def by_init(model: nn.Module, opt: zf.Optimizer, new: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        nn.init.zeros_(p)
        p.add_(new[name])


WRITERS = (load, load_one_by_one, inside_gathered, loaded_inside_gathered, by_copy, by_init)


# ---- through which chain, at which stage ----


def stored_in_bf16(*tx: Transform) -> tuple[Transform, ...]:
    return (zf.precision(store_dtype=BF16), *tx)


CHAINS: dict[str, Callable[[], tuple[Transform, ...]]] = {
    "adamw": lambda: (zf.adamw(LR),),
    "schedule_free(sgd)": lambda: (zf.schedule_free(zf.sgd(LR, momentum=0.5)),),
    "schedule_free(adamw)": lambda: (zf.schedule_free(zf.adamw(LR)),),
    "schedule_free_adamw": lambda: (zf.schedule_free_adamw(LR),),
    "lookahead": lambda: (zf.lookahead(zf.sgd(LR, momentum=0.5), 2),),
    "lookahead in bf16": lambda: stored_in_bf16(zf.lookahead(zf.sgd(LR), 2)),
    "ema": lambda: (zf.adamw(LR), zf.ema(0.5)),
    "masked ema": lambda: (zf.adamw(LR), zf.masked(zf.ema(0.5), lambda path: "weight" in path)),
    "partition": lambda: (
        zf.partition(
            {"a": zf.schedule_free(zf.sgd(LR)), "b": zf.lookahead(zf.adamw(LR), 2)},
            lambda path: "a" if path.startswith("0") else "b",
        ),
    ),
    "clipped": lambda: (zf.clip_by_global_norm(0.5), zf.skip_nonfinite(), zf.lookahead(zf.adamw(LR), 2)),
    "masters": lambda: (zf.precision(param_dtype=BF16, output_dtype=torch.float32), zf.schedule_free(zf.sgd(LR))),
    "24 bits": lambda: (zf.precision(store_dtype="bf16+8"), zf.lookahead(zf.adamw(LR), 2)),
    "kahan": lambda: stored_in_bf16(zf.low_precision_adam(LR, rounding="kahan")),
    "offload": lambda: (zf.offload(zf.schedule_free(zf.adamw(LR))),),
    "masters on the host": lambda: stored_in_bf16(zf.offload(zf.adamw(LR), compute="host", master_dtype=torch.float32)),
}


def at_stage(stage: int, chain: tuple[Transform, ...]) -> Transform:
    """One backward for each update, so that sums have one term. At stage 1 sums need a cast before them."""
    every, casts = zf.accumulate(1), [t for t in chain if t.name == "precision"]
    rest = [t for t in chain if t.name != "precision"]
    if stage == 1:
        return zf.chain(*casts, every, zf.reduce_scatter(), *rest)
    before = {0: [zf.all_reduce()], 2: [zf.reduce_scatter()], 3: [zf.shard()]}
    return zf.chain(*before[stage], *casts, every, *rest)


def numbers(opt: zf.Optimizer) -> dict[str, Tensor]:
    found = {name: x.clone() for name, x in zf.full_params(opt.tx, opt.state).items()}
    for of in [name for name, own in opt.state.transforms.items() if "average" in own]:
        found |= {f"{of}/{name}": x.clone() for name, x in zf.full_params(opt.tx, opt.state, of=of).items()}
    return found


def run(name: str, stage: int, write: Callable[..., None] | None) -> list[dict[str, Tensor]]:
    """The numbers at the start and after each step; `write` puts in the weights that the model else begins with."""
    model = model_of(1 if write is None else 0)
    opt = zf.attach(model, at_stage(stage, CHAINS[name]()))
    if write is not None:
        write(model, opt, others())
    found = [numbers(opt)]
    for _ in range(3):
        step(model, opt)
        found.append(numbers(opt))
    opt.detach()
    return found


def of_ranks(rows: list[tuple]) -> list[str]:
    """Where a run with weights that are written after attach is not that of a model attached with them."""
    attached = functools.cache(functools.partial(run, write=None))
    return [
        f"{name}, {write.__name__}, stage {stage}, step {i}, {key}: {float((a[key] - b[key]).abs().max())}"
        for name, stage, write in rows
        for i, (a, b) in enumerate(zip(run(name, stage, write), attached(name, stage), strict=True))
        for key in a
        if not torch.equal(a[key], b[key])
    ]


ALONE = list(itertools.product(CHAINS, (0, 3), WRITERS))
ON_RANKS = list(itertools.product(CHAINS, (0, 1, 2, 3), WRITERS))


# Each chain at each stage, and each writer at each stage.
@pytest.mark.parametrize("rows", few_and_all(covering(ALONE, key=lambda row: (row[:2], row[1:])), ALONE))
def test_on_one_process(rows):
    assert of_ranks(rows) == []


# Each chain, and each writer at each stage.
@pytest.mark.parametrize("rows", few_and_all(covering(ON_RANKS), ON_RANKS))
def test_on_two_ranks(rows):
    for found in zf.launch(of_ranks, 2, rows, timeout=limit(400)):
        assert found == []


# ---- weights in a wider dtype than the copies that the model has ----


def exact(seed: int) -> dict[str, Tensor]:
    """Numbers that bf16 does not have."""
    torch.manual_seed(seed)
    return {name: torch.randn_like(p) for name, p in model_of().named_parameters()}


def not_as_wide(stages: tuple[int, ...]) -> list[str]:
    """Where masters are not what was loaded, to the last bit."""
    bad = []
    for stage in stages:
        for write in (load, load_one_by_one, inside_gathered, loaded_inside_gathered):
            model = model_of()
            opt = zf.attach(model, at_stage(stage, CHAINS["masters"]()))
            for seed in (2, 3):
                write(model, opt, exact(seed))
                bad += [
                    f"{write.__name__}, stage {stage}, {key}"
                    for key, x in numbers(opt).items()
                    if not torch.equal(x, exact(seed)[key.rpartition("/")[2]])
                ]
                step(model, opt)
            opt.detach()
    return bad


@pytest.mark.parametrize(("ranks", "stages"), [(1, (3,)), (2, (0, 1, 2, 3))])
def test_masters_take_loaded_weights_to_the_last_bit_at_every_stage(ranks, stages):
    for found in zf.launch(not_as_wide, ranks, stages, timeout=limit()):
        assert found == []


def test_masters_of_what_does_not_fit_stay():
    def run() -> None:
        model = model_of()
        opt = zf.attach(model, at_stage(0, CHAINS["masters"]()))
        before = numbers(opt)
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({"0.bias": torch.ones(7)}, strict=False)
        assert all(torch.equal(x, before[key]) for key, x in numbers(opt).items())

    run()


def test_a_copy_in_codes_cannot_follow_and_is_refused_by_name():
    torch.manual_seed(0)
    model = nn.Linear(512, 256, bias=False)
    opt = zf.attach(model, zf.quantize(zf.schedule_free(zf.adamw(LR))))
    new = {"weight": torch.ones(256, 512)}
    model.load_state_dict(new)
    model(torch.ones(1, 512)).square().mean().backward()
    for ask in (opt.step, lambda: opt.state):
        with pytest.raises(RuntimeError, match=r"(?s)a write into weight of .* keeps a copy, 'z'.*attach again"):
            ask()
    assert opt.detach().weight.equal(new["weight"])


# ---- writes between steps, against closed forms ----

SHARE, PERIOD, PART = 0.5, 3, 0.5


class Bowl(nn.Module):
    """Its gradient is the distance from a target."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Parameter(torch.randn(4, 2, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.c = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))

    def forward(self) -> Tensor:
        return sum(((p - 0.25).square().sum() / 2 for p in (self.a, self.b, self.c)), torch.zeros(()))


# By step, the leaves that are written before it, and how. Of `a` a row, and then one more element; `b` as a whole;
# `c` is clamped after every step, also where this changes nothing.
def written(n: int, name: str, x: Tensor) -> Tensor | None:
    x = x.clone()
    if name == "a" and n == 2:
        x[0] = 3.0
    elif name == "a" and n == 4:
        x[1, 1] = -2.0
    elif name == "b" and n == 5:
        x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    elif name == "c" and n > 0:
        x = x.clamp(-0.75, 0.5)
    else:
        return None
    return x


STEPS = 9


def by_hand(kind: str) -> dict[str, Tensor]:
    """Schedule-free SGD, Lookahead of SGD, or SGD with an average, with the rule for what was written."""
    found = {}
    for name, p in Bowl().named_parameters():
        p = p.detach().clone()
        copies = [p.clone(), p.clone()]
        again = False
        for n in range(STEPS):
            if (new := written(n, name, p)) is not None:
                changed = (new != p) if again else torch.ones_like(p, dtype=torch.bool)
                if kind != "ema" or n == 0:
                    copies = [torch.where(changed, new, x) for x in copies]
                p, again = new, True
            g = p - 0.25
            if kind == "schedule_free":
                z = copies[0] - LR * g
                x = copies[1] + (z - copies[1]) / (n + 1)
                p, copies = z + SHARE * (x - z), [z, x]
            elif kind == "lookahead":
                p = p - LR * g
                if (n + 1) % PERIOD == 0:
                    p = copies[1] + PART * (p - copies[1])
                    copies[1] = p
            else:
                p = p - LR * g
                copies[1] = copies[1] + 0.5 * (p - copies[1])
        found |= {name: p, f"sgd/{name}": copies[1]}
    return found


KINDS: dict[str, Callable[[], tuple[Transform, ...]]] = {
    "schedule_free": lambda: (zf.schedule_free(zf.sgd(LR), SHARE),),
    "lookahead": lambda: (zf.lookahead(zf.sgd(LR), PERIOD, PART),),
    "ema": lambda: (zf.sgd(LR), zf.ema(0.5)),
}


def far(kind: str, stage: int, in_backward: bool = False, read: bool = False) -> list[str]:
    """Where a run with writes between its steps is not the one by hand."""
    model = Bowl()
    tx = zf.chain(*KINDS[kind]()) if in_backward else at_stage(stage, KINDS[kind]())
    opt = zf.attach(model, tx, in_backward=in_backward)
    for n in range(STEPS):
        whole = zf.full_params(opt.tx, opt.state)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if (new := written(n, name, whole[name])) is not None:
                    p.copy_(new)
                if read:
                    # Many programs log it. It writes nothing.
                    p.data.norm()
        model().backward()
        opt.step()
        opt.zero_grad()
    mine, right = {key.replace("ema/", "sgd/"): x for key, x in numbers(opt).items()}, by_hand(kind)
    opt.detach()
    bad = [f"{kind}, stage {stage}, {key}" for key, x in mine.items() if (x - right[key]).abs().max() > 1e-12]
    return bad if mine.keys() == right.keys() else [*bad, str(sorted(mine))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_backward", [False, True])
def test_writes_between_steps_on_one_process(kind, in_backward):
    assert far(kind, 0, in_backward) == far(kind, 0, in_backward, read=True) == []


def far_on_ranks(rows: list[tuple]) -> list[str]:
    return [x for kind, stage in rows for x in far(kind, stage, read=kind == "lookahead")]


BETWEEN = list(itertools.product(KINDS, (0, 1, 2, 3)))


@pytest.mark.parametrize("rows", few_and_all(covering(BETWEEN), BETWEEN))
@pytest.mark.parametrize("ranks", [2, 3])
def test_writes_between_steps_on_ranks(ranks, rows):
    for found in zf.launch(far_on_ranks, ranks, rows, timeout=limit()):
        assert found == []


# -- the pure route: nobody sees a write into a state, so new parameters are refused where a copy would win ----------


FOLLOWED = {"adamw", "ema", "masked ema", "masters on the host", "24 bits alone", "kahan"}
TRAVELS: dict[str, Callable[[zf.State], zf.State]] = {
    "as it is": lambda state: state,
    "copied": copy.deepcopy,
    "pickled": lambda state: pickle.loads(pickle.dumps(state)),
}


@pytest.mark.parametrize("how", TRAVELS)
@pytest.mark.parametrize("name", [*CHAINS, "24 bits alone"])
def test_replaced_parameters_are_trained_or_refused(name, how):
    chain = (zf.precision(store_dtype="bf16+8"), zf.adamw(LR)) if name == "24 bits alone" else CHAINS[name]()
    tx = zf.chain(*chain)
    params = [{n: p.detach().clone() for n, p in model_of(i).named_parameters()} for i in (0, 1)]
    start, want = (zf.init(tx, x) for x in params)
    start, new = TRAVELS[how](start), want.params
    grads = {n: torch.ones_like(x) for n, x in want.leaves.items()}

    def replaced() -> zf.State:
        return zf.update(tx, grads, start.replace(params=new))[0]

    if name in FOLLOWED:
        # Averages stay, as documented; parameters are those of a state that begins with them.
        want, _ = zf.update(tx, grads, want)
        assert all(torch.equal(x, want.leaves[n]) for n, x in replaced().leaves.items())
    else:
        with pytest.raises(
            ValueError, match=r"state\.replace\(params=\.\.\.\) of a state of (schedule_free|lookahead)"
        ):
            replaced()
