"""What `zf.contrib` refuses: wrong programs and the words that tell them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchopt
from refusals import Refusals
from torch import nn
from torch.optim import lr_scheduler

import zerofn as zf
from zerofn import curvature

WRONG = Refusals()
ONE = {"w": torch.ones(4)}
SGD = zf.sgd(0.1)


def loss(p: dict[str, torch.Tensor], *_: Any) -> torch.Tensor:
    return p["w"].square().sum()


# ---- zf.curvature ----


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def attends(params):
    q = params["w"].view(1, 1, 2, 2)
    return F.scaled_dot_product_attention(q, q, q).sum()


def largest(loss_fn, **more):
    return lambda: curvature.max_eigenvalue(loss_fn, SGD, zf.init(SGD, ONE), **more)


WRONG.rows(
    ValueError,
    (largest(lambda p: p["w"].sum()), "does not depend on the parameters"),
    (largest(lambda p: p["w"].detach().sum()), "does not depend on the parameters"),
    (largest(lambda p: p["w"] ** 2), "returns a tensor of shape"),
    (largest(loss, blocks=["w", "v", "x.y"]), "'v', 'x.y' match no trainable"),
    (largest(loss, tol=-1.0), "tol must lie in"),
    (largest(loss, max_iter=0), "max_iter is a number of products"),
    (lambda: curvature.trace(loss, SGD, zf.init(SGD, ONE), samples=1), "needs at least two samples"),
)
WRONG.rows(
    RuntimeError,
    (largest(lambda p: Once.apply(p["w"]).square().sum()), "a first derivative only"),
    (largest(attends), "SDPBackend.MATH"),
)
WRONG.rows(TypeError, (lambda: curvature.spectrum(loss, SGD, ONE), "it is not a state"))

# ---- zf.from_deepspeed ----

ADAMW = {"type": "AdamW", "params": {"lr": 0.1}}
WARM = {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 10}


def configured(config: dict[str, Any], *words: str) -> tuple[Any, ...]:
    return partial(zf.from_deepspeed, {"optimizer": ADAMW, **config}), *words


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def scheduled(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


WRONG.rows(
    ValueError,
    configured(zero(stage=1, foo=1), "zero_optimization.foo: unknown"),
    configured({"fp17": {"enabled": True}}, "fp17.enabled: unknown"),
    configured({"amp": {"enabled": True}}, "amp.enabled: not supported; use torch.autocast"),
    configured(
        zero(stage=3, offload_param={"device": "disk"}),
        "zero_optimization.offload_param.device: 'disk' is none of none, cpu, nvme",
    ),
    configured(zero(stage=4), "zero_optimization.stage: 4 is none of 0, 1, 2, 3"),
    configured({"gradient_clipping": "auto"}, "gradient_clipping: 'auto' is filled in by the Hugging Face Trainer"),
    configured({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled: fp16 is enabled too"),
    configured({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "needs bf16.enabled and bf16.bf16_master"),
    configured({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type: 'OneBitAdam'; use Adam, AdamW, Lamb or SGD"),
    configured(
        {"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}},
        "params.learning_rate: unknown; AdamW takes lr",
    ),
    configured({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, "params.amsgrad: true is not supported"),
    configured(
        {"optimizer": {"type": "Lamb", "params": {"min_coeff": 2.0, "max_coeff": 1.0}}}, "min_coeff: 2.0 is above"
    ),
    configured(
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 0.5}}, "gradient_clipping": 1.0},
        "optimizer.params.max_grad_norm: 0.5, but gradient_clipping says 1.0; leave one of them out",
    ),
    configured(
        {
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
            "optimizer": {"type": "Lamb", "params": {"amsgrad": True}},
            "train_batch_size": 7,
            "train_micro_batch_size_per_gpu": 2,
        },
        # All at once.
        *("optimizer.type: Lamb on 16-bit masters", "amsgrad: true is", "train_batch_size: 7 is not 2 * 3 * 1"),
    ),
    configured({"scheduler": {"type": "Nope"}}, "scheduler.type: 'Nope' is none of WarmupLR"),
    configured(
        scheduled("OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0),
        "scheduler.params.cycle_momentum: betas are constant here",
    ),
    configured({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.params.total_num_steps: missing"),
    configured(
        {"fp16": {"enabled": True, "consecutive_hysteresis": True}}, "fp16.consecutive_hysteresis: not supported"
    ),
    configured(
        {"torch_autocast": {"enabled": False, "lower_precision_safe_modules": ["torch.nn.Linear"]}},
        "lower_precision_safe_modules: not supported; use communication_data_type",
    ),
    configured({"communication_data_type": "int8"}, "communication_data_type: 'int8' is none of fp16"),
    configured({"train_batch_size": 0}, "train_batch_size: 0 is no positive int"),
    configured(
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
        "  train_batch_size: 8 is not 3 * 2 * 1",
        "write 6, or leave one of the three out",
    ),
    configured({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "  train_batch_size: 7 is not 2 * 3 * 1"),
    configured(
        {"a": 1, "b": {"c": 2}, "optimizer": {"type": "X"}},
        *("keys without a transform", "  a: ", "  b.c: ", "  optimizer.type: "),
    ),
    (lambda: zf.attach(nn.Linear(1, 1), zf.from_deepspeed({})), "no optimizer"),
    configured({"optimizer": {"params": {"lr": 0.1}}}, "  optimizer.params.lr: needs an optimizer.type"),
    configured(
        {"optimizer": {"type": "Adam"}, "scheduler": {"params": {"warmup_num_steps": 3}}},
        "  scheduler.params.warmup_num_steps: needs a scheduler.type",
    ),
    (
        lambda: zf.from_deepspeed(zero(offload_optimizer={"device": "cpu"})),
        "  zero_optimization.offload_optimizer.device: needs an optimizer: ",
        "; or zf.offload(...) around yours",
    ),
)
WRONG.rows(
    TypeError,
    (lambda: zf.from_deepspeed({}, values=[3e-4]), "it is a list"),  # type: ignore[arg-type]
    *(
        (partial(zf.from_deepspeed, {"scheduler": {"type": "WarmupLR", "params": WARM}}, optimizer=it), "optimizer=")
        for it in (zf.adamw(), "AdamW", lambda lr=None: torch.zeros(1))
    ),
)

# ---- torch's schedulers and DeepSpeed's engine calls ----


def small(*made: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 1)
    return model, zf.attach(model, zf.chain(*made))


@WRONG(ValueError, "that transform owns its learning rate")
def a_scheduler_against_a_schedule() -> Iterator[None]:
    model, opt = small(zf.adamw(zf.schedules.cosine(1e-3, 10)))
    lr_scheduler.LambdaLR(opt, lambda e: 0.5)
    model(torch.ones(1, 2)).sum().backward()
    yield
    opt.step()


@WRONG(ValueError, "in a window that began with True")
def a_window_is_divided_or_not() -> Iterator[None]:
    model, opt = small(zf.accumulate(2), zf.sgd(0.1))
    opt.backward(model(torch.ones(1, 2)).sum())
    opt.step()
    yield
    opt.backward(model(torch.ones(1, 2)).sum(), scale_wrt_gas=False)


@WRONG(ValueError, "divided by the weights")
def a_weighted_window_that_is_not_divided() -> Iterator[None]:
    model, opt = small(zf.accumulate(2, weighted=True), zf.sgd(0.1))
    yield
    opt.backward(model(torch.ones(1, 2)).sum(), scale_wrt_gas=False)


# ---- zf.from_torch ----


class Norm(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / p.grad.norm())


class InGroups(Norm):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


WRONG.rows(
    ValueError,
    *(
        (partial(zf.from_torch, cls, lr=1e-2), re.compile(rf"from_torch\({cls.__name__}\)\n.*{why}(.|\n)*zf.muon"))
        for cls, why in [
            (torch.optim.LBFGS, "closure"),
            (torch.optim.Muon, "2D"),
            (torch.optim.Adafactor, r"'row_var' is a tensor of shape \(3, 1\)"),
            (torch.optim.SparseAdam, "dense"),
            (Norm, "two pieces"),
            (InGroups, "param_groups"),
        ]
    ),
    (lambda: zf.from_torch(torch.optim.NAdam, lr=-1.0), "lr must lie in"),
)
WRONG.rows(
    TypeError,
    (lambda: zf.from_torch(torch.optim.NAdam, beta=(0.9, 0.9)), "has no keyword 'beta'. Did you mean betas"),
    (lambda: zf.from_torch(torch.optim.NAdam, foreach=True), "foreach=True"),
    (lambda: zf.from_torch(torch.optim.NAdam([torch.zeros(1)])), "it takes the class"),  # type: ignore[arg-type]
)


@WRONG(RuntimeError, "NAdam writes into parameters in place")
def a_derivative_of_a_class_of_torch() -> Iterator[None]:
    tx = zf.from_torch(torch.optim.NAdam)
    state = zf.init(tx, {"w": torch.ones(2)})
    yield
    torch.func.grad(lambda g: zf.update(tx, {"w": g}, state)[0].params["w"].sum())(torch.ones(2))


# ---- zf.as_torchopt ----

WRONG.rows(
    ValueError,
    (
        lambda: zf.as_torchopt(zf.chain(zf.precision(param_dtype=torch.bfloat16), zf.sgd(0.1))),
        "changes what the model sees",
    ),
    (lambda: zf.as_torchopt(zf.chain(zf.scale_loss(8.0), zf.sgd(0.1))), "changes what the model sees"),
)
WRONG.rows(TypeError, (lambda: zf.as_torchopt(torchopt.adam(1e-3)), "it is not a transform"))


@WRONG(ValueError, "params=params")
def an_update_of_torchopt_without_parameters() -> Iterator[None]:
    pair = zf.as_torchopt(SGD)
    state = pair.init(ONE)
    yield
    pair.update(ONE, state)


# ---- zf.layer_drop ----

KEEP = zf.schedules.layer_keep(0.4, 0.05)
X = torch.ones(4, 3)


class Blocks(nn.Module):
    """As many lists of blocks as there are names."""

    def __init__(self, *names: str):
        super().__init__()
        for name in names:
            setattr(self, name, nn.ModuleList([nn.Linear(3, 3)]))


def dropped(blocks, keep=KEEP, **more):
    return lambda: zf.layer_drop(blocks, keep, **more)


NOW: dict[str, Any] = {"step": lambda: 0}
WRONG.rows(
    ValueError,
    *(
        (partial(zf.schedules.layer_keep, **given), f"layer_keep({next(iter(given))}=")
        for given in ({"theta": 0.0}, {"theta": 1.5}, {"theta": "a"}, {"gamma": -1.0})
    ),
    (dropped(Blocks("a", "b"), **NOW), "does not have exactly one: a, b"),
    (dropped(nn.Linear(2, 2), **NOW), "does not have exactly one: none"),
    (dropped(nn.ModuleList(), **NOW), "the list is empty"),
    (dropped(nn.ModuleList([nn.Linear(3, 3)] * 3), **NOW), "blocks [1, 2] are also"),
    (lambda: zf.layer_drop([lambda x: x[:1]], KEEP)(X, step=0), "returns (1, 3) for (4, 3)"),
    (lambda: zf.layer_drop([torch.sin], lambda s, d: 0.0)(X, step=0), "a probability lies in"),
)
WRONG.rows(
    TypeError,
    (dropped([torch.sin], 0.5), "schedule is a function of step and depth"),
    (dropped([]), "blocks are functions"),
    (dropped(Blocks("a")), "a call of a module does not tell"),
    (lambda: zf.layer_drop([lambda x: (x,)], KEEP)(X, step=0), "returns a tuple for a Tensor"),
)

# ---- zf.profile ----


def attached() -> Any:
    return small(zf.adamw(1e-3))[1]


WRONG.rows(
    TypeError,
    (lambda: zf.profile(small(zf.adamw(1e-3))[0]), "it is not a training step"),
    (lambda: zf.profile(3), "it is not a training step"),
    (lambda: zf.profile(attached())(torch.ones(2)), "a call of zf.profile(opt)"),
)
WRONG.rows(
    ValueError,
    *(
        (lambda steps=steps: zf.profile(attached(), steps=steps), "steps is a list of ints from 0")
        for steps in (3, [], [-1], [1.5], [True], "12")
    ),
    (lambda: zf.profile(attached(), flops=1), "flops is True or False"),
)


@WRONG(ValueError, "after opt.detach")
def a_profile_of_what_is_detached() -> Iterator[None]:
    _, opt = small(zf.adamw(1e-3))
    opt.detach()
    yield
    zf.profile(opt)


# ---- zf.replay, zf.sequence_parallel ----

WRONG.rows(
    TypeError,
    (lambda: zf.replay(zf.make_step(loss, SGD), ONE, torch.ones(3)), "replay got a dict"),
    (lambda: zf.sequence_parallel(3), "wraps a function of queries, keys and values"),
    (lambda: zf.sequence_parallel(F.scaled_dot_product_attention, "x"), "sequence_parallel(..., mesh='x')"),
)
WRONG.rows(
    ValueError,
    (lambda: zf.record(zf.make_step(loss, SGD), last=0), "last"),
    (lambda: zf.sequence_mean(torch.ones(3), weights=torch.ones(2)), "each loss has one weight"),
)


@pytest.mark.parametrize("row", WRONG)
def test_refused(row):
    row.check()
