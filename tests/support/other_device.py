"""A device that does not exist: its memory is the host's, and its operators refuse to be mixed with the CPU.

Code that makes a buffer, a counter or a mask on the wrong device runs on the CPU and fails on a GPU. Here it
fails without one, and since the arithmetic is the CPU's, all that is right is equal to the last bit. It
says nothing of streams, of asynchronous copies or of kernels for one kind of device.

torch lets one backend be registered for a process, and for good, so `compare` is to be run in a process of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.backend_registration as registration
import torchopt
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

import zerofn as zf

NAME = "elsewhere"
AVAILABLE = hasattr(registration, "_setup_privateuseone_for_python_backend")
aten = torch.ops.aten
MOVES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}


class Elsewhere(Tensor):
    """A tensor on the device, over a tensor `raw` on the CPU."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: Tensor, requires_grad: bool = False) -> Elsewhere:
        self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        self.raw = raw
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, dict(kwargs or {}))

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Any) -> None:
        # Of a wrapper torch exchanges the outside alone.
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.raw = value.raw


def inside(x: Any) -> Any:
    return x.raw if isinstance(x, Elsewhere) else x


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the memory of its arguments, after a look at where they lie."""
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    # A number in a tensor without dimensions may come from the CPU where a GPU takes it too: element by element.
    scalars = torch.Tag.pointwise in func.tags or "_foreach_" in func.name()
    strangers = [x for x in tensors if not isinstance(x, Elsewhere) and (x.ndim or not scalars)]
    if strangers and len(strangers) < len(tensors) and func not in MOVES:
        raise RuntimeError(f"{func} of tensors on two devices: {[(tuple(x.shape), str(x.device)) for x in tensors]}")
    device = torch.device(kwargs.get("device") or NAME)
    raw = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    if device.type == NAME and "device" in raw:
        raw["device"] = "cpu"
    out = func(*tree_map(inside, args), **tree_map(inside, raw))
    if func is aten.copy_.default:
        return args[0]
    if func is aten._to_copy.default:
        # From the device to the host is a copy, also where both are the same memory.
        out = out.clone() if out.data_ptr() == inside(args[0]).data_ptr() else out
        return Elsewhere(out) if device.type == NAME else out
    wrapped = tree_map(lambda x: Elsewhere(x) if isinstance(x, Tensor) and device.type == NAME else x, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


class Stream:
    def synchronize(self) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


class Backend(registration._DummyBackendModule):
    """What torch's own code asks of the module of a device; checkpoints copy on a stream."""

    def current_stream(self, *_: Any) -> Stream:
        return Stream()

    def stream(self, *_: Any) -> Any:
        return nullcontext()

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0


def register() -> list[torch.library.Library]:
    """Make the device known; what is returned must be kept alive."""
    registration._setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
    library = torch.library.Library("aten", "IMPL")

    def factory(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, device=None, pin_memory=None, **kwargs: Elsewhere(fn(*args, device="cpu", **kwargs))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        inside(target).copy_(inside(source))
        return target

    library.impl("empty.memory_format", factory(aten.empty.memory_format), "PrivateUse1")
    library.impl("empty_strided", factory(aten.empty_strided.default), "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    return [library]


def move(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = nn.Parameter(Elsewhere(p.detach().clone()), p.requires_grad)
        for name, b in list(module._buffers.items()):
            if b is not None:
                module._buffers[name] = Elsewhere(b.clone())
    return model


# ---------------------------------------------------------------- what is trained there


class ShiftedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.register_buffer("shift", torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x)) + self.shift.to(x.dtype)
        return self.norm(x)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LR = zf.schedules.warmup_cosine(1e-2, 2, 10)
HALF = {"store_dtype": BF16, "param_dtype": FP32}
PIPELINES: dict[str, Callable[[], zf.Transform]] = {
    "adamw": lambda: zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(LR, weight_decay=0.1)),
    "sgd": lambda: zf.chain(zf.clip_by_value(0.01), zf.sgd(LR, momentum=0.9)),
    "stochastic": lambda: zf.chain(zf.precision(**HALF), zf.clip_by_global_norm(1.0), zf.low_precision_adam(LR)),
    "kahan": lambda: zf.chain(zf.precision(**HALF), zf.low_precision_adam(LR, rounding="kahan")),
    "nearest": lambda: zf.chain(zf.precision(**HALF), zf.low_precision_adam(LR, rounding="nearest")),
    "fp16": lambda: zf.chain(
        zf.precision(store_dtype=FP16),
        zf.scale_loss("dynamic", init_scale=2.0**20),
        zf.accumulate(2),
        zf.clip_by_global_norm(1.0),
        zf.low_precision_adam(LR),
    ),
    "always skipped": lambda: zf.chain(
        zf.precision(store_dtype=FP16), zf.scale_loss("dynamic", init_scale=2.0**40), zf.low_precision_adam(LR)
    ),
    "shard, ema": lambda: zf.chain(
        zf.shard(), zf.scale_loss("dynamic"), zf.accumulate(2, weighted=True), zf.adam(LR), zf.ema(0.9)
    ),
    "offload": lambda: zf.chain(
        zf.reduce_scatter(), zf.offload(zf.accumulate(2)), zf.offload(zf.adamw(LR)), zf.offload(zf.ema(0.9))
    ),
    "offload, bf16": lambda: zf.chain(zf.precision(store_dtype=BF16), zf.offload(zf.low_precision_adam(LR))),
    "offload, groups": lambda: zf.chain(
        zf.offload(
            zf.partition(
                {"a": zf.adamw(LR), "b": zf.chain(zf.clip_by_value(0.01), zf.sgd(LR, momentum=0.9))},
                lambda path: "a" if "block" in path else "b",
            )
        ),
        zf.offload(zf.ema(0.9)),
    ),
    "offload, on the host": lambda: zf.chain(
        zf.precision(**HALF),
        zf.clip_by_global_norm(1.0),
        zf.offload(zf.chain(zf.accumulate(2), zf.adamw(LR), zf.ema(0.9)), compute="host", master_dtype=FP32),
    ),
    "offload, guest": lambda: zf.chain(zf.offload(torchopt.adam(lr=1e-2))),
    "masked, partition": lambda: zf.chain(
        zf.masked(zf.clip_by_value(0.01), lambda path, *_: "weight" in path),
        zf.partition({"a": zf.adamw(LR), "b": zf.sgd(LR)}, lambda path, *_: "a" if "block" in path else "b"),
    ),
}
ROUTES = "eager", "pure", "donate"
LEAFWISE = "sgd", "kahan", "nearest", "offload, bf16", "offload, groups"  # which can also be updated during backward
CASES = [(name, route) for name in PIPELINES for route in ROUTES] + [(name, "in backward") for name in LEAFWISE]


def loss_of(y: Tensor) -> Tensor:
    return F.smooth_l1_loss(y.float(), torch.ones_like(y, dtype=FP32))


def train(pipeline: str, route: str, there: bool, steps: int = 5) -> dict[str, Tensor]:
    """Losses, parameters and transforms' states after a few steps and a checkpoint, all brought to the CPU."""
    torch.manual_seed(0)
    tx, model = PIPELINES[pipeline](), ShiftedBlocks()
    batches = torch.randn(steps, 4, 6)
    if there:
        model, batches = move(model), Elsewhere(batches)
    weights = [{"weight": torch.tensor(3.0 + i)} if pipeline == "shard, ema" else {} for i in range(steps)]
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        if route in ("eager", "in backward"):
            opt = zf.attach(model, tx, in_backward=route == "in backward")
            for x, weight in zip(batches, weights, strict=True):
                loss = loss_of(model(x))
                loss.backward()
                opt.step(**weight)
                opt.zero_grad()
                losses.append(loss.detach())
            zf.save(checkpoint, opt)
            zf.load(checkpoint, like=opt)
            opt.load_state_dict(opt.state_dict())
            state = opt.state
        else:
            state = zf.init(tx, dict(model.named_parameters()))

            def loss_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
                return loss_of(functional_call(model, p, (x.to(p["norm.weight"].dtype),)))

            call = zf.make_step(loss_fn, tx, donate=route == "donate")
            for x, weight in zip(batches, weights, strict=True):
                state, metrics = call(state, x, **weight)
                losses.append(metrics["loss"])
            zf.save(checkpoint, state)
            state = zf.load(checkpoint, like=state)
        zf.export_safetensors(Path(folder) / "model.safetensors", state)
        zf.describe(state)
    if there:
        stray = {p: str(x.device) for p, x in state.leaves.items() if not isinstance(x, Elsewhere)}
        assert not stray, f"parameters that are elsewhere no more: {stray}"
    kept = [x for x in tree_flatten(state.transforms)[0] if isinstance(x, Tensor)]
    named = {f"loss {i}": x for i, x in enumerate(losses)} | state.leaves | {f"kept {i}": x for i, x in enumerate(kept)}
    return {name: inside(x.detach()).clone() for name, x in named.items()}


def compare(pipeline: str, route: str) -> list[str]:
    """What differs between the two devices, and what did not train at all."""
    here, there = train(pipeline, route, False), train(pipeline, route, True)
    wrong = [name for name in here if not torch.equal(here[name], there[name])]
    start = dict(ShiftedBlocks().named_parameters())
    moved = any(here[name].float().sub(p).abs().max() > 1e-3 for name, p in start.items())
    return wrong if here.keys() == there.keys() and (moved or pipeline == "always skipped") else [*wrong, "untrained"]
