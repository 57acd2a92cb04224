"""The table of transforms: each public transform, and plain chains of them, with the facts that tests ask about them.

A new transform is one row: it stands in every test that takes its rows from here: `transforms/test_transforms.py`,
`transforms/test_optimizers.py`, `laws/test_law_11_cutting.py`, `core/test_capture.py`, `storage/test_every_row.py`,
`storage/test_travelling_states.py`, `storage/test_describe.py`, `storage/test_passes.py`, `eager/test_in_backward.py`,
`test_waits_and_launches.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import formulas
import pytest
import torch
import torchopt
from formulas import BETAS, by_torch, later
from torch import Tensor

import zerofn as zf

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class At:
    """What a row is built for.

    Attributes:
        rate: the learning rate, a number or a 0-d tensor.
        matrix: whether the leaf at a path is a matrix.
        half: whether a leaf is among those that a group or a mask has, of which there are others.
        device: of a rate that is a tensor.
    """

    rate: float | Tensor
    matrix: Callable[[str], bool]
    half: Callable[[str], bool]
    device: str = "cpu"


@dataclass(frozen=True)
class Either:
    """A label by path, which pickles."""

    asks: Callable[[str], bool]
    yes: Any
    no: Any

    def __call__(self, path: str) -> Any:
        return self.yes if self.asks(path) else self.no


# ---- the trees of the tests that take rows ----


def _sample_matrix(path: str) -> bool:
    return path in ("block.0.weight", "empty")


def _sample_half(path: str) -> bool:
    return "bias" not in path


def _formula_matrix(path: str) -> bool:
    return path in ("w", "square", "experts") or path.endswith("weight")


def _block_matrix(path: str) -> bool:
    return int(path[1:]) % 12 in (0, 2, 4, 6)


def _block_half(path: str) -> bool:
    return path < "p005"


def _layers(path: str) -> bool:
    return path.startswith("layer")


def _tied_matrix(path: str) -> bool:
    return path.endswith("weight") and "norm" not in path


def _two_layers(path: str) -> bool:
    return path.startswith("0")


def _weight(path: str) -> bool:
    return path.endswith("weight")


# `zerofn.testing.sample_params`, with the leaves of `test_transforms.py`.
SAMPLE = At(0.1, _sample_matrix, _sample_half)
# The leaves of `test_optimizers.py`, for whose rate formulas are written.
FORMULAS = At(formulas.LR, _formula_matrix, _sample_half)
# `virtual_steps.Many`.
BLOCK = At(1e-3, _block_matrix, _block_half, "cuda")
# `TiedAndUsedTwice` of `eager/test_in_backward.py`.
TIED = At(1e-2, _tied_matrix, _layers)
# A model of two linear layers.
LAYERS = At(1e-2, _weight, _two_layers)


# ---- functions of the user's ----


def falling(step: Any) -> Any:
    return 0.1 / (1.0 + step)


def asking(step: Any) -> float:
    return 0.1 / (1 + int(step))


def plus_one(squares: Tensor) -> Tensor:
    return squares + 1.0


def moved(old: Tensor, new: Tensor) -> dict[str, Tensor]:
    return {"moved": (new - old).square().sum()}


@zf.leafwise(needs="element")
def sign(grad, param, *, strength=1.0):
    return strength * grad.sign()


@zf.leafwise(init=torch.zeros_like, needs="element")
def smooth(grad, param, state, *, keep=0.9):
    state = keep * state + (1 - keep) * grad
    return state, state


@zf.leafwise(optimizer=True, needs="element")
def descend(grad, param, *, lr=0.1):
    return param - lr * grad


@zf.leafwise
def normalised(grad, param, *, eps=1e-6):
    return grad / (grad.norm() + eps)


# ---- rows ----

# What an update within backward is refused with.
WITHIN = {
    "number": "needs a number of the whole gradient",
    "tree": "treats the tree as a whole",
    "window": "keeps gradients for a later step",
    "overflow": "must look at every gradient for overflow",
    "loss": "computes with the loss of the step",
}

# Tests that run a row by default, where it does not say which.
OFTEN = "laws pieces capture launches waits bits verdict"


@dataclass(frozen=True)
class Row:
    """A transform, or a chain, and facts about it.

    Attributes:
        make: the transform for a tree, or what `place` says of it.
        place: "optimizer"; or what an optimizer follows, "before"; or what follows one, "behind".
        formula: what makes its reference: from a leaf to a function (parameter, gradient, update) -> new parameter.
        laws: whether `check_transform` runs on its sample; False with the reason in a comment.
        cut: whether flat pieces of leaves have the bits of whole ones.
        host: why a step of it cannot be captured: what the refusal says. "" where it can be.
        within: why it cannot update within backward, a key of `WITHIN`; "" where it can.
        loss: whether it reads the loss of its step.
        weighted: whether a step has a weight.
        launches: of one step of an attached model with 148 leaves, none of which may grow. A second number is the aim,
            where it is not reached: budgets can only fall. A string says why none are counted.
        by_leaf: whether something is launched or copied for each leaf, or for so many of them.
        waits: of the host in a step, with the reason.
        near: the relative difference of a step on the device from that on the CPU, where bits are not the same.
        verdict: "bits" where a skipped step on the device has the bits of the CPU's, "near" where numbers are derived
            from the count in float32 there, or are added up in another order; "" where there is no verdict.
        read: waits of three steps behind a verdict, with the reason.
        often: the tests that run it by default: "laws", "pieces", "capture", "launches", "waits", "bits", "verdict" and
            "graph". Others run it when slow tests are run.
    """

    make: Callable[[At], Any]
    place: str = "optimizer"
    formula: Callable[..., Any] | None = None
    laws: bool = True
    cut: bool = False
    host: str = ""
    within: str = ""
    loss: bool = False
    weighted: bool = False
    launches: int | tuple[int, int] | str = "a row like it is counted"
    by_leaf: bool = False
    waits: tuple[int, str] = (0, "")
    near: float = 0.0
    verdict: str = ""
    read: tuple[int, str] = (0, "")
    often: str = OFTEN

    def trained(self, at: At) -> zf.Transform:
        """The row as a whole step: with an optimizer, where it is none."""
        made = self.make(at)
        if self.place == "optimizer":
            return zf.chain(made)
        return zf.chain(*((made, zf.adamw(at.rate)) if self.place == "before" else (zf.adamw(at.rate), made)))


def _low(*members: zf.Transform, dtype: torch.dtype = BF16, **more: Any) -> zf.Transform:
    return zf.chain(zf.precision(store_dtype=dtype, **more), *members)


def _overflows(*members: zf.Transform) -> zf.Transform:
    """The scale of its first steps is too large."""
    return zf.chain(zf.scale_loss("dynamic", init_scale=2.0**127, growth_interval=2), *members)


def _groups(at: At) -> zf.Transform:
    inner = {"a": zf.adamw(at.rate), "b": zf.chain(zf.clip_by_value(0.01), zf.sgd(at.rate, momentum=0.9))}
    return zf.partition(inner, Either(at.half, "a", "b"))


def _matrices(at: At, matrices: zf.Transform, rest: zf.Transform) -> zf.Transform:
    return zf.partition({"matrix": matrices, "rest": rest}, Either(at.matrix, "matrix", "rest"))


def _adam(at: At) -> dict[str, Any]:
    return {"lr": at.rate, "betas": BETAS, "eps": 1e-8}


def _warmup(at: At) -> Any:
    return zf.schedules.warmup(at.rate, 3)


def _down(at: At) -> Any:
    return zf.schedules.linear(10 * at.rate, 0.0, 9)


ONE_GROUP = Either(bool, "all", "none")

ROWS: dict[str, Row] = {
    # ---- optimizers ----
    "sgd": Row(lambda at: zf.sgd(at.rate), cut=True, launches=5, verdict="bits", often="capture launches bits verdict"),
    "sgd, momentum": Row(
        lambda at: zf.sgd(at.rate, momentum=0.9, nesterov=True, weight_decay=0.1),
        cut=True,
        launches=5,
        verdict="bits",
        often=f"{OFTEN} graph",
    ),
    "sgd, dampening": Row(
        lambda at: zf.sgd(_down(at), momentum=0.9, dampening=0.5), verdict="near", often="capture verdict graph"
    ),
    "adam": Row(lambda at: zf.adam(at.rate, weight_decay=0.1), launches=10, verdict="bits"),
    "adam, tensor": Row(lambda at: zf.adam(torch.full((), at.rate, device=at.device)), often="graph"),
    "adam, uncorrected": Row(
        lambda at: zf.adam(at.rate, BETAS, weight_decay=0.1, bias_correction=False),
        formula=formulas.adam_uncorrected,
        often="",
    ),
    "adamw, uncorrected": Row(
        lambda at: zf.adamw(at.rate, BETAS, weight_decay=0.1, bias_correction=False),
        formula=partial(formulas.adamw, decay=0.1, corrected=False),
        launches=4,
        # A kernel fuses a product with a sum where torch on the CPU does not.
        near=1e-6,
        verdict="near",
    ),
    "adamw": Row(lambda at: zf.adamw(at.rate), launches=10, often=f"{OFTEN} graph"),
    "adamw, schedule": Row(
        lambda at: zf.adamw(zf.schedules.warmup_cosine(10 * at.rate, 2, 10), weight_decay=0.1),
        launches=10,
        verdict="near",
        often="capture launches bits verdict graph",
    ),
    "adamw, function": Row(
        lambda at: zf.adamw(falling),
        verdict="near",
        read=(3, "a function of the user's may ask for the number of its step"),
        often="graph",
    ),
    "adamw, own schedule": Row(
        lambda at: zf.adamw(asking),
        host="its schedule asking asks for the number of its step",
        verdict="bits",
        read=(3, "a function of the user's may ask for the number of its step"),
        often="capture verdict",
        laws=False,
    ),
    "low_precision_adam": Row(
        lambda at: zf.low_precision_adam(at.rate, weight_decay=0.1), cut=True, often="laws pieces"
    ),
    "low_precision_adam, a seed": Row(
        lambda at: zf.low_precision_adam(at.rate, betas=(0.99, 0.999), seed=3), cut=True, often="pieces"
    ),
    "low precision, stochastic": Row(
        lambda at: _low(zf.low_precision_adam(at.rate)), cut=True, launches=6, verdict="bits", often=OFTEN
    ),
    "low precision, kahan": Row(
        lambda at: _low(zf.low_precision_adam(_down(at), rounding="kahan")),
        cut=True,
        launches=6,
        verdict="bits",
        often="laws pieces capture launches",
    ),
    "low precision, nearest": Row(
        lambda at: _low(zf.low_precision_adam(at.rate, rounding="nearest")),
        cut=True,
        launches=6,
        often="pieces launches",
    ),
    **{
        f"fp16, {how}": Row(
            lambda at, how=how: _low(zf.low_precision_adam(at.rate, rounding=how), dtype=F16, grad_dtype=F32),
            cut=True,
            often="pieces",
        )
        for how in ("stochastic", "nearest", "kahan")
    },
    # On a GPU leaf by leaf: Triton prints no random bits yet.
    "stochastic storage, sgd": Row(
        lambda at: _low(zf.sgd(at.rate, momentum=0.9), rounding="stochastic"), cut=True, often="laws pieces capture"
    ),
    "stochastic storage, fp16": Row(
        lambda at: _low(zf.lion(at.rate), dtype=F16, rounding="stochastic", seed=3), cut=True, often="laws pieces"
    ),
    "stochastic storage, adan": Row(
        lambda at: _low(zf.adan(at.rate), rounding="stochastic"), cut=True, often="pieces capture"
    ),
    "stochastic storage, building blocks": Row(
        lambda at: _low(zf.trace(0.9), zf.scale_by_adam(), zf.scale_by_lr(_down(at)), rounding="stochastic"),
        cut=True,
        often="pieces",
    ),
    "stochastic storage, user's own": Row(
        lambda at: _low(smooth(keep=0.5), descend(lr=0.5), rounding="stochastic"), cut=True, often="pieces"
    ),
    "clip, low precision": Row(
        lambda at: _low(zf.clip_by_global_norm(1.0), zf.low_precision_adam(_down(at))),
        launches=6,
        near=1e-2,
        often="capture launches",
        within="number",
    ),
    "scale, clip, low precision": Row(
        lambda at: _low(
            zf.scale_loss("dynamic", init_scale=2.0**4), zf.clip_by_global_norm(1.0), zf.low_precision_adam(at.rate)
        ),
        # Each gradient is divided by the scale as it leaves backward, in 148 launches; two are of the output. In fp16,
        # for which the scale is, these launches cast the gradient in any case. At the end of backward it would be too
        # late: by then a gradient is added to an older `p.grad`, or to one that came past the model, and hooks have
        # seen it. A node of autograd for many leaves would run the hooks of those without a gradient.
        launches=(171, 12),
        near=1e-2,
        often="launches",
        within="overflow",
        by_leaf=True,
    ),
    "rmsprop": Row(
        lambda at: zf.rmsprop(at.rate, momentum=0.5, centered=True),
        launches=5,
        # A kernel rounds roots to nearest, torch on the CPU in some builds not.
        near=1e-6,
        verdict="near",
        often=f"{OFTEN} graph",
    ),
    "rmsprop, plain": Row(lambda at: zf.rmsprop(at.rate), launches=5, near=1e-6, often="launches"),
    "lion": Row(lambda at: zf.lion(at.rate, weight_decay=0.1), launches=5, verdict="bits", often=f"{OFTEN} graph"),
    "lion, schedule": Row(lambda at: zf.lion(_down(at)), verdict="near", often="verdict"),
    "lamb": Row(
        lambda at: zf.lamb(at.rate, BETAS, weight_decay=0.1),
        formula=formulas.lamb,
        verdict="near",
        often="laws capture bits verdict waits graph",
        within="tree",
        # Norms are added up in float32 there.
        near=1e-6,
        launches=21,
    ),
    "lamb, clamped": Row(
        lambda at: zf.lamb(at.rate, BETAS, weight_decay=0.1, bias_correction=False, ratio_bounds=(0.2, 0.4)),
        formula=partial(formulas.lamb, corrected=False, low=0.2, high=0.4),
        verdict="near",
        often="",
        within="tree",
        launches=23,
    ),
    "lars": Row(
        lambda at: zf.lars(at.rate, weight_decay=0.1, trust_coefficient=0.3),
        formula=formulas.lars,
        verdict="near",
        often="capture bits verdict waits",
        within="tree",
        near=1e-6,
        launches=24,
    ),
    "lars, nesterov": Row(
        lambda at: zf.lars(at.rate, weight_decay=0.1, trust_coefficient=0.3, nesterov=True),
        formula=partial(formulas.lars, nesterov=True),
        often="",
        within="tree",
    ),
    "adabelief": Row(
        lambda at: zf.adabelief(**_adam(at), weight_decay=0.1),
        formula=formulas.adabelief,
        verdict="near",
        often="capture launches bits verdict",
        launches=4,
    ),
    "nadam": Row(
        lambda at: zf.nadam(**_adam(at), weight_decay=0.1),
        formula=by_torch(torch.optim.NAdam, betas=BETAS, weight_decay=0.1),
        verdict="near",
        often="capture bits verdict waits",
        # The device that does not exist takes torch's root, off by an ulp.
        near=1e-6,
        launches=4,
    ),
    "nadam, decoupled": Row(
        lambda at: zf.nadam(**_adam(at), weight_decay=0.1, momentum_decay=0.1, decoupled_weight_decay=True),
        formula=by_torch(
            torch.optim.NAdam, betas=BETAS, weight_decay=0.1, momentum_decay=0.1, decoupled_weight_decay=True
        ),
        often="",
    ),
    "radam": Row(
        lambda at: zf.radam(**_adam(at), weight_decay=0.1),
        formula=by_torch(torch.optim.RAdam, betas=BETAS, weight_decay=0.1),
        often="",
    ),
    # Here the second moment is never known; there only in the last updates.
    "radam, never known": Row(
        lambda at: zf.radam(at.rate, (0.9, 0.6)),
        formula=by_torch(torch.optim.RAdam, betas=(0.9, 0.6)),
        verdict="near",
        often="capture bits verdict waits",
        launches=4,
    ),
    "radam, decoupled": Row(
        lambda at: zf.radam(**_adam(at), weight_decay=0.1, decoupled_weight_decay=True),
        formula=by_torch(torch.optim.RAdam, betas=BETAS, weight_decay=0.1, decoupled_weight_decay=True),
        often="",
    ),
    "adan": Row(
        lambda at: zf.adan(at.rate, (0.9, 0.8, 0.7), weight_decay=0.1),
        formula=formulas.adan,
        verdict="near",
        often="capture bits verdict waits",
        launches=4,
    ),
    "adafactor": Row(
        lambda at: zf.adafactor(at.rate, weight_decay=0.1),
        formula=by_torch(torch.optim.Adafactor, weight_decay=0.1),
        verdict="near",
        # Means are added up in float32 there.
        near=1e-6,
        launches=12,
        often="laws capture bits verdict waits",
    ),
    "adafactor, clipped": Row(
        lambda at: zf.adafactor(at.rate, -0.5, (1e-2, 0.1), 1.5),
        formula=by_torch(torch.optim.Adafactor, beta2_decay=-0.5, eps=(1e-2, 0.1), d=1.5),
        often="",
    ),
    "adopt": Row(
        lambda at: zf.adopt(at.rate, BETAS, weight_decay=0.1),
        formula=formulas.adopt,
        verdict="near",
        often="capture bits verdict waits",
        launches=4,
    ),
    "adopt, unclipped": Row(
        lambda at: zf.adopt(at.rate, BETAS, weight_decay=0.1, use_clipping=False),
        formula=partial(formulas.adopt, clipped=False),
        often="",
    ),
    "schedule_free_adamw": Row(
        lambda at: zf.schedule_free_adamw(_warmup(at), BETAS, weight_decay=0.1, r=0.5),
        formula=formulas.schedule_free,
        verdict="near",
        often="capture bits verdict waits",
        launches=6,
    ),
    "schedule_free": Row(
        lambda at: zf.schedule_free(zf.sgd(_warmup(at), momentum=0.5, weight_decay=0.1), 0.8, 1.0, 1.0),
        formula=formulas.schedule_free_sgd,
        verdict="near",
        often="laws capture launches bits verdict",
        launches=5,
    ),
    "schedule_free, of adamw": Row(
        lambda at: zf.schedule_free(zf.adamw(at.rate, betas=(0.0, 0.9)), weight_decay_at_y=0.1), often="capture"
    ),
    "schedule_free, of members": Row(
        lambda at: zf.partition({"all": zf.schedule_free(zf.sgd(_warmup(at), 0.5), 0.8, 1.0, 1.0, 0.2)}, ONE_GROUP),
        formula=partial(formulas.schedule_free_sgd, at_y=True),
        often="",
    ),
    "shampoo": Row(
        lambda at: zf.shampoo(at.rate, 0.5, 0.1, 0.1, update_freq=2, max_precond_dim=4),
        formula=formulas.shampoo,
        host="shampoo",
        # The device that does not exist takes torch's root on the CPU, off by an ulp.
        near=1e-6,
        often="laws capture waits",
        # No side is so short: all leaves are updated as vectors.
        launches=4,
    ),
    # Sides that a gradient fills: the basis of what it leaves would be as rounding has it.
    "soap": Row(
        lambda at: zf.soap(at.rate, (0.9, 0.95), weight_decay=0.1, precondition_frequency=2, max_precond_dim=4),
        formula=formulas.soap,
        laws=False,
        host="soap",
        often="capture waits",
        launches=4,
    ),
    "shampoo, matrices": Row(
        lambda at: _matrices(at, zf.shampoo(at.rate), zf.sgd(at.rate)),
        host="shampoo",
        # Once for each stack; for each matrix where the rate is a tensor.
        waits=(8, "torch asks whether its solver of eigenvectors has failed"),
        # Matrices of three shapes: stacks of these, and for roots stacks of their sides, of three lengths.
        launches=91,
        near=1e-4,
        often="",
    ),
    "soap, matrices": Row(
        lambda at: _matrices(at, zf.soap(at.rate), zf.sgd(at.rate)),
        laws=False,
        host="soap",
        launches=108,
        near=1e-4,
        often="waits",
    ),
    "muon": Row(
        lambda at: _matrices(
            at,
            zf.muon(at.rate, 0.9, True, 3, 0.1, None, (3.0, -3.2, 1.2), "match_rms_adamw"),
            zf.sgd(at.rate),
        ),
        formula=formulas.muon,
        often="laws",
    ),
    "muon, adamw": Row(
        lambda at: _matrices(at, zf.muon(at.rate), zf.adamw(at.rate)),
        # Matrices of three shapes in one stack: five iterations, three products of matrices, and two copies that they
        # are added to. Large matrices are a stack for each shape, with 30 launches (`kernels/test_formulas.py`).
        launches=43,
        near=1e-2,
        verdict="near",
        often="launches bits verdict graph",
    ),
    "lookahead": Row(
        lambda at: zf.lookahead(zf.sgd(at.rate, momentum=0.5), 3, 0.7),
        formula=formulas.lookahead,
        often="capture launches bits verdict",
        launches=4,
        verdict="bits",
    ),
    "lookahead, a count of leaves": Row(lambda at: zf.lookahead(zf.adopt(at.rate), 2), often="capture"),
    "apply_if": Row(
        lambda at: zf.apply_if(zf.adamw(**_adam(at), weight_decay=0.0), later),
        formula=formulas.now_and_then,
        host="adamw",
        often="laws capture",
        launches=9,
        verdict="near",
        read=(3, "a function of the user's is asked in each step"),
    ),
    "apply_if, clip": Row(
        lambda at: zf.chain(zf.apply_if(zf.clip_by_value(0.5), later), zf.sgd(at.rate)),
        formula=formulas.clipped_later,
        host="clip_by_value",
        often="",
    ),
    # ---- members ----
    "scale_by_adam": Row(
        lambda at: zf.chain(zf.scale_by_adam(), zf.add_decayed_weights(0.1), zf.scale_by_lr(at.rate)),
        verdict="near",
        often="laws launches bits verdict graph",
        launches=8,
    ),
    "trace": Row(
        lambda at: zf.chain(zf.trace(0.9, nesterov=True), zf.add_decayed_weights(0.1), zf.scale_by_lr(at.rate)),
        verdict="bits",
        often="launches bits verdict",
        launches=8,
    ),
    "centralize": Row(lambda at: zf.centralize(), place="before", launches=(109, 40), by_leaf=True, verdict="bits"),
    "adaptive_clip": Row(
        lambda at: zf.chain(zf.adaptive_clip(0.3), zf.sgd(at.rate)),
        formula=formulas.adaptive_clip,
        launches=(2569, 40),
        by_leaf=True,
        verdict="near",
        often="capture bits verdict waits",
        within="number",
    ),
    "mars": Row(
        lambda at: zf.chain(zf.mars(0.5, 0.9), zf.adamw(**_adam(at), weight_decay=0.0)),
        formula=formulas.mars,
        often="capture bits verdict waits",
        within="tree",
        near=1e-6,
        launches=18,
        verdict="near",
    ),
    "adaptive_clip, mars, lamb": Row(
        lambda at: zf.chain(zf.adaptive_clip(0.1), zf.mars(), zf.lamb(at.rate)), often="capture", within="number"
    ),
    "adaptive_clip, mars, scale_by_adam": Row(
        lambda at: zf.chain(zf.adaptive_clip(0.1), zf.mars(), zf.scale_by_adam(), zf.scale_by_lr(at.rate)),
        verdict="near",
        often="verdict",
        within="number",
    ),
    "adaptive_clip, mars, add_noise": Row(
        lambda at: zf.chain(zf.adaptive_clip(0.5), zf.mars(), zf.add_noise(0.1), zf.sgd(at.rate)),
        often="laws",
        within="number",
    ),
    "add_noise": Row(
        lambda at: zf.add_noise(0.1),
        place="before",
        verdict="bits",
        launches=(7409, 40),
        by_leaf=True,
        often="capture verdict waits",
    ),
    "cautious": Row(
        lambda at: zf.chain(zf.cautious(zf.scale_by_adam(BETAS)), zf.add_decayed_weights(0.1), zf.scale_by_lr(at.rate)),
        formula=formulas.cautious_adamw,
        verdict="near",
        launches=(1191, 40),
        by_leaf=True,
        often="laws capture bits verdict waits",
        within="tree",
    ),
    "cautious, adamw": Row(
        lambda at: zf.cautious(zf.adamw(**_adam(at), weight_decay=0.1)),
        formula=partial(formulas.cautious_adamw, by_parts=False),
        often="",
        within="tree",
    ),
    "cautious, adafactor": Row(lambda at: zf.cautious(zf.adafactor(at.rate)), often="", within="tree"),
    "scale_by_polyak": Row(
        lambda at: zf.chain(
            zf.accumulate(2), zf.scale_by_polyak(), zf.reduce_on_plateau(zf.adamw(at.rate), 0.5, patience=1)
        ),
        loss=True,
        often="capture",
        within="window",
    ),
    "scale_by_momo": Row(
        lambda at: zf.chain(zf.scale_by_momo(0.5), zf.sgd(1.0)), loss=True, often="capture", within="loss"
    ),
    # ---- before optimizers ----
    "clip_by_value": Row(lambda at: zf.clip_by_value(0.1), place="before", cut=True, launches=11, verdict="bits"),
    "clip_by_global_norm": Row(
        lambda at: zf.clip_by_global_norm(0.1),
        place="before",
        cut=True,
        launches=11,
        near=1e-2,
        verdict="near",
        within="number",
    ),
    "clip_by_global_norm, schedule": Row(
        lambda at: zf.chain(zf.clip_by_global_norm(0.1), zf.adamw(zf.schedules.warmup_cosine(at.rate, 2, 9))),
        often="capture",
        within="number",
    ),
    "clip_by_global_norm, over pipelines": Row(
        lambda at: zf.clip_by_global_norm(1.0, over=plus_one),
        place="before",
        host="clip_by_global_norm",
        launches=16,
        waits=(1, "what a function of the user's returns is checked before it is used"),
        near=1e-2,
        often="capture launches bits verdict",
        within="number",
    ),
    "accumulate, 1": Row(lambda at: zf.accumulate(1), place="before", often=""),
    "accumulate": Row(
        lambda at: zf.accumulate(3), place="before", launches=1, verdict="bits", often=f"{OFTEN} graph", within="window"
    ),
    "accumulate, clip, ema": Row(
        lambda at: zf.chain(zf.accumulate(3), zf.clip_by_value(0.3), zf.sgd(at.rate), zf.ema(0.9)),
        cut=True,
        often="pieces",
        within="window",
    ),
    "accumulate, clip_by_global_norm": Row(
        lambda at: zf.chain(zf.accumulate(3), zf.clip_by_global_norm(0.1), zf.adamw(at.rate)),
        often="capture",
        within="window",
    ),
    "accumulate, weighted": Row(
        lambda at: zf.accumulate(2, weighted=True),
        place="before",
        cut=True,
        host="accumulate",
        weighted=True,
        launches=13,
        verdict="bits",
        read=(3, "the weights of a window are checked, and are the host's"),
        often="pieces capture launches bits verdict",
        within="window",
    ),
    "accumulate, twice": Row(
        lambda at: zf.chain(zf.accumulate(2), zf.accumulate(2), zf.adamw(at.rate)), often="", within="window"
    ),
    "scale_loss": Row(lambda at: zf.scale_loss(), place="before", cut=True, often="laws pieces", within="overflow"),
    "scale_loss, static": Row(lambda at: zf.scale_loss(64.0), place="before", often="", within="overflow"),
    # As of "scale, clip, low precision".
    "scale_loss, overflow": Row(
        lambda at: _overflows(zf.adamw(at.rate)),
        launches=(168, 12),
        often="launches bits",
        within="overflow",
        by_leaf=True,
    ),
    "scale_loss, clip": Row(
        lambda at: _overflows(zf.clip_by_global_norm(0.1), zf.adamw(at.rate)), often="graph", within="overflow"
    ),
    "scale_loss, ema": Row(lambda at: _overflows(zf.adamw(at.rate), zf.ema(0.9)), often="capture", within="overflow"),
    "scale_loss, accumulate": Row(
        lambda at: _overflows(zf.accumulate(2), zf.sgd(at.rate, momentum=0.9)), often="graph", within="overflow"
    ),
    "scale_loss, low precision": Row(
        lambda at: _overflows(zf.accumulate(2), zf.low_precision_adam(at.rate)), often="capture", within="overflow"
    ),
    "skip_nonfinite": Row(
        lambda at: zf.skip_nonfinite(),
        place="before",
        launches=16,
        verdict="bits",
        often=f"{OFTEN} graph",
        within="number",
    ),
    "skip_nonfinite, of a window": Row(
        lambda at: zf.chain(zf.accumulate(2), zf.skip_nonfinite(), zf.sgd(at.rate, momentum=0.9)),
        verdict="bits",
        often="verdict",
        within="window",
    ),
    "skip_nonfinite, behind a clip": Row(
        lambda at: zf.chain(zf.clip_by_global_norm(0.1), zf.skip_nonfinite(), zf.sgd(at.rate)),
        verdict="near",
        often="verdict",
        within="number",
    ),
    "precision": Row(lambda at: zf.precision(param_dtype=BF16), place="before", cut=True, often="pieces"),
    "precision, stored bf16": Row(
        lambda at: zf.chain(zf.precision(param_dtype=F32, store_dtype=BF16, grad_dtype=F32), zf.sgd(at.rate)),
        often="laws",
    ),
    "precision, stored fp16": Row(lambda at: zf.chain(zf.precision(store_dtype=F16), zf.sgd(at.rate)), often="laws"),
    "masters": Row(
        lambda at: zf.chain(zf.precision(store_dtype="bf16+8"), zf.adamw(at.rate)),
        launches=5,
        often="laws launches bits",
    ),
    # ---- behind optimizers ----
    "ema": Row(lambda at: zf.ema(0.9), place="behind", cut=True, launches=11, verdict="bits"),
    "clip_by_global_norm, ema": Row(
        lambda at: zf.chain(zf.clip_by_global_norm(0.1), zf.adamw(at.rate), zf.ema(0.9)), often="graph", within="number"
    ),
    "watch": Row(lambda at: zf.watch(moved), place="behind", launches=20, verdict="bits", often=f"{OFTEN} graph"),
    # ---- around others ----
    "masked": Row(
        lambda at: zf.masked(zf.clip_by_value(0.01), at.half),
        place="before",
        launches=11,
        verdict="bits",
        often="launches bits verdict graph",
    ),
    "masked, optimizer": Row(
        lambda at: zf.masked(zf.sgd(at.rate, momentum=0.5), at.half), cut=True, often="laws pieces"
    ),
    "masked, ema": Row(lambda at: zf.chain(zf.sgd(at.rate), zf.masked(zf.ema(0.9), at.half)), often=""),
    "partition": Row(_groups, launches=8, verdict="bits"),
    "partition, clip": Row(
        lambda at: zf.partition(
            {"a": zf.chain(zf.clip_by_global_norm(0.5), zf.sgd(at.rate, momentum=0.9)), "b": zf.sgd(2 * at.rate)},
            Either(at.half, "a", "b"),
        ),
        cut=True,
        often="laws pieces",
        within="number",
    ),
    "partition, of partitions": Row(
        lambda at: _low(
            zf.partition(
                {
                    "a": zf.low_precision_adam(at.rate, weight_decay=0.3),
                    "b": zf.partition({"a.b": zf.adamw(at.rate), "c": zf.sgd(at.rate)}, Either(at.matrix, "a.b", "c")),
                },
                Either(at.half, "a", "b"),
            )
        ),
        laws=False,
        often="",
    ),
    "partition, frozen": Row(
        lambda at: zf.partition({"a": zf.adamw(at.rate), "b": None}, Either(at.half, "a", "b")), often=""
    ),
    "offload": Row(
        lambda at: zf.offload(zf.adamw(at.rate)),
        host="offload",
        launches=10,
        verdict="bits",
        read=(6, "counts of updates are the host's, with the states, of which the program asks"),
        often="capture launches bits verdict",
    ),
    "offload, partition": Row(lambda at: zf.offload(_groups(at)), host="offload", often=""),
    "offload, in a group": Row(
        lambda at: zf.partition(
            {"a": zf.adamw(at.rate), "b": zf.offload(zf.adamw(at.rate))}, Either(at.half, "a", "b")
        ),
        host="partition: offload",
        often="capture",
    ),
    "offload, low precision": Row(
        lambda at: _low(zf.offload(zf.low_precision_adam(at.rate))), host="offload", launches=6, often="launches"
    ),
    "offload, chain": Row(
        lambda at: zf.offload(zf.chain(zf.accumulate(1), zf.clip_by_global_norm(1.0), zf.adamw(at.rate), zf.ema(0.9))),
        host="offload",
        launches=13,
        near=1e-2,
        often="launches bits",
        within="number",
    ),
    "offload, window": Row(
        lambda at: zf.offload(zf.chain(zf.accumulate(2), zf.low_precision_adam(at.rate), zf.ema(0.5))),
        cut=True,
        host="offload",
        often="pieces",
        within="window",
    ),
    "clip, on the host": Row(
        lambda at: zf.chain(zf.clip_by_global_norm(1.0), zf.offload(zf.adamw(at.rate), compute="host")),
        host="offload",
        launches=14,
        waits=(1, "the host computes, so it waits for each bucket of gradients"),
        near=1e-2,
        often="launches bits",
        within="number",
        by_leaf=True,
    ),
    "on the host, masters": Row(
        lambda at: _low(zf.offload(zf.adamw(at.rate), compute="host", master_dtype=F32)),
        host="adamw",
        launches=12,
        waits=(1, "as above"),
        often="laws launches bits",
        by_leaf=True,
    ),
    "quantize": Row(
        lambda at: zf.quantize(zf.adamw(at.rate)),
        host="quantize",
        # Matrices in one launch, and one for their norms; vectors, which are not coded, as without `quantize`.
        launches=11,
        often="launches bits waits",
    ),
    "quantize, low precision": Row(
        lambda at: _low(zf.quantize(zf.low_precision_adam(at.rate, state_dtype=F32), bits=4)),
        host="low_precision_adam",
        launches=8,
        often="launches",
    ),
    "quantize, dynamic": Row(
        lambda at: zf.quantize(zf.adamw(at.rate), code="dynamic"),
        host="quantize",
        # Torch's operations, on all moments whose rows are of one length: three here.
        launches=(371, 40),
        often="launches bits",
    ),
    "quantize, blocks of 4": Row(
        lambda at: zf.quantize(zf.adamw(at.rate), block=4), host="quantize", often="laws capture"
    ),
    "quantize, 4 bits": Row(
        lambda at: zf.quantize(zf.chain(zf.accumulate(2), zf.lion(at.rate)), bits=4),
        often="",
        within="window",
        host="quantize",
    ),
    "named": Row(lambda at: zf.sgd(at.rate).named("descent"), often=""),
    "every": Row(
        lambda at: zf.every(2, zf.sgd(0.7, momentum=0.9, nesterov=True)),
        place="behind",
        laws=False,
        host="every",
        often="capture launches",
        within="tree",
        launches=(306, 40),
        by_leaf=True,
    ),
    # ---- of the user's, and of other libraries ----
    "user's own": Row(
        lambda at: sign(strength=0.5), place="before", verdict="bits", often="launches verdict", launches=10
    ),
    "user's own, with a state": Row(lambda at: smooth(keep=0.5), place="before", often="laws launches", launches=10),
    "user's own, an optimizer": Row(lambda at: descend(lr=0.5), often="laws"),
    "user's own, of whole leaves": Row(lambda at: normalised(eps=1e-3), place="before", often="laws"),
    "torchopt": Row(lambda at: torchopt.adam(at.rate), host="Gradient", often="", within="tree"),
    "guest": Row(
        lambda at: zf.guest(torchopt.adam(at.rate), needs="element"),
        host="Gradient",
        # torchopt's own operations.
        launches=2964,
        often="laws capture launches bits",
        within="tree",
        by_leaf=True,
    ),
    "from_torch": Row(
        lambda at: zf.from_torch(torch.optim.SGD, at.rate, momentum=0.9),
        host="from_torch",
        often="laws capture launches",
        launches=(743, 40),
        by_leaf=True,
    ),
    # ---- together ----
    "everything": Row(
        lambda at: zf.chain(
            zf.precision(param_dtype=BF16, grad_dtype=F32),
            zf.scale_loss(init_scale=64.0),
            zf.accumulate(2),
            zf.clip_by_global_norm(1.0),
            zf.adamw(zf.schedules.warmup_cosine(at.rate, 2, 10)),
            zf.ema(0.9),
        ),
        often="laws",
        within="overflow",
    ),
    # ---- stages, here of one process ----
    "all_reduce": Row(lambda at: zf.all_reduce(), place="before", often="laws launches", launches=9),
    "reduce_scatter": Row(lambda at: zf.reduce_scatter(), place="before", often="laws launches", launches=9),
    "shard": Row(lambda at: zf.shard(), place="before", often="laws launches", launches=9),
}


def row_params(kind: str, names: Iterable[str], part: int = 0, of: int = 1) -> list[Any]:
    """Arguments of a test, by name of row: what `often` does not say is slow.

    Of tests that ask the same at several places, each has a part of the slow rows.
    """
    often = lambda x: kind in ROWS[x].often.split()  # noqa: E731
    rows = [pytest.param(x, marks=() if often(x) else pytest.mark.slow) for x in names]
    return [row for i, row in enumerate(rows) if not row.marks or i % of == part]


def in_turn(kind: str, names: Iterable[str], ways: Sequence[Any]) -> list[Any]:
    """Of each row that is often run, a test for every way; of the others each in one of the ways, in turn.

    A fault of a way alone is found by any row, one of a row alone by any way.
    """
    return [
        pytest.param(*row.values, way, marks=row.marks)
        for i, row in enumerate(row_params(kind, names))
        for way in (ways[i % len(ways) :][:1] if row.marks else ways)
    ]
