"""What a step asks of the virtual device: launches and waits, of an attached model and of the pure route.

Imported in the process of `virtual_cuda.processes` only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import virtual_cuda
from torch import Tensor, nn
from transforms_table import BLOCK, ROWS, Row
from virtual_cuda import LOG
from virtual_cuda import Row as Asked

import zerofn as zf
from zerofn.eager import in_backward  # inside: how many bytes of gradients wait
from zerofn.extend import optimizer
from zerofn.kernels import print_torch, print_triton, program  # inside: which kernel is taken
from zerofn.kernels.operations import OPERATIONS  # inside: the root of a device

BF16, FP16 = torch.bfloat16, torch.float16


def _launch(kernel: Any, programs: int, *args: Any) -> None:
    """One launch: the interpreter's own copies are not the device's."""
    LOG.add("launch", kernel.__name__)
    with LOG.silent():
        INTERPRETED(kernel, programs, *args)


INTERPRETED, print_triton.launch = print_triton.launch, _launch


@contextmanager
def counting() -> Iterator[None]:
    """Triton's kernels are counted and not run: by its interpreter ten leaves take a second, by torch 148 take two."""
    known = program.printer_for, print_triton.run, program.triton_for
    try:
        print_triton.launch = lambda kernel, *_: LOG.add("launch", kernel.__name__)
        program.printer_for = lambda device: print_triton if device.type == "cuda" else None  # type: ignore[assignment]
        print_triton.run, program.triton_for = _count, lambda device: print_triton  # type: ignore[assignment]
        yield
    finally:
        print_triton.launch = _launch
        program.printer_for, print_triton.run, program.triton_for = known


@contextmanager
def formulas_by_torch() -> Iterator[None]:
    """Inside, kernels for formulas are computed by torch, whose bits they have (`list_programs.compare`)."""
    known, root = (print_triton.run, program.triton_for), OPERATIONS["sqrt"]
    try:
        # Below this device is the CPU, whose torch takes another root than a GPU.
        OPERATIONS["sqrt"] = root._replace(torch=lambda x: x.double().sqrt().to(x.dtype))
        print_triton.run, program.triton_for = _run, lambda device: print_triton  # type: ignore[assignment]
        yield
    finally:
        OPERATIONS["sqrt"] = root
        print_triton.run, program.triton_for = known


def _launched(program: Any, each: bool) -> None:
    LOG.add("launch", "formula_kernel")
    if program.sums:
        LOG.add("launch", "sums")


def _count(program: Any, columns: Any, numbers: Any, scalars: Any, each: bool = True, *_: Any, **__: Any) -> Tensor:
    """`print_triton.run` that launches, and computes nothing: results are zero."""
    _launched(program, each)
    with LOG.silent():
        for column in dict(program.stores):
            if isinstance(columns[column][0], Tensor):
                torch._foreach_zero_(columns[column])
        sums = len(program.sums)
        return torch.zeros((sums, len(columns[0])) if each else (sums,), device="cuda")


def _run(program: Any, columns: Any, numbers: Any, scalars: Any, each: bool = True, *given: Any, **more: Any) -> Tensor:
    """`print_triton.run` by torch's own operations, counted as it launches."""
    _launched(program, each)
    with LOG.silent():
        # A GPU adds up in float32.
        return print_torch.run(program, columns, numbers, scalars, each, *given, **more).float()


WIDTH = 8
# The leaves of one block of a GPT: four matrices and eight vectors.
SHAPES = [(WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH,)]
SHAPES += [(4 * WIDTH, WIDTH), *[(WIDTH,)] * 5]


class Many(nn.Module):
    """So many leaves, each of which the output depends on."""

    def __init__(self, leaves: int) -> None:
        super().__init__()
        for i in range(leaves):
            self.register_parameter(f"p{i:03d}", nn.Parameter(torch.randn(SHAPES[i % 12]) * 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(p * x).sum() for p in self.parameters()]).sum()


# Of steps in which numbers should move.
FAST = replace(BLOCK, rate=1e-2)


def _weights(name: str, weight: float = 3.0) -> dict[str, Any]:
    return {"weight": weight} if ROWS[name].weighted else {}


def attached(pipeline: str, leaves: int = 10, steps: int = 2, **how: Any) -> list[Asked]:
    """What one step asks, from the first operator of forward to the end of `step`; after others, which may build."""
    given = _weights(pipeline) | ({"loss": torch.ones((), device="cuda")} if ROWS[pipeline].loss else {})
    return _own(_attached(ROWS[pipeline].trained(BLOCK), leaves, steps, given, **how))


def _attached(tx: zf.Transform, leaves: int, steps: int, given: dict[str, Any], **how: Any) -> list[Asked]:
    torch.manual_seed(0)
    model = Many(leaves).cuda()
    opt = zf.attach(model, tx, **how)
    x = torch.ones((), device="cuda")
    found: list[Asked] = []
    for _ in range(steps):
        with LOG() as rows:
            loss = model(x.to(next(model.parameters()).dtype)).float()
            loss.backward()
            opt.step(**given)
            opt.zero_grad()
        found = rows
    return found


def with_and_without_a_scale(leaves: int, stored: bool) -> list[int]:
    """Launches of a step of an attached model that computes in fp16, and is `stored` so: with a loss scale, without.

    Those of the model and of autograd are counted too: a cast may be torch's own.
    """
    scale = zf.scale_loss("dynamic", init_scale=2.0**4)
    narrow = zf.precision(store_dtype=FP16) if stored else zf.precision(param_dtype=FP16)
    last = zf.low_precision_adam(1e-3) if stored else zf.adamw(1e-3)
    with counting():
        return [
            virtual_cuda.count(_attached(zf.chain(narrow, *more, last), leaves, 2, {}), "launch")
            for more in ([scale], [])
        ]


def pure(pipeline: str, leaves: int = 10, steps: int = 2, donate: bool = True) -> list[Asked]:
    """What one call of a step function asks, those of the model's operators included that it asks for itself."""
    torch.manual_seed(0)
    model = Many(leaves).cuda()
    state = zf.init(tx := ROWS[pipeline].trained(BLOCK), dict(model.named_parameters()))

    def loss_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, (x.to(p["p000"].dtype),)).float()

    step = zf.make_step(loss_fn, tx, donate=donate)
    x = torch.ones((), device="cuda")
    found: list[Asked] = []
    for _ in range(steps):
        with LOG() as rows:
            state, _ = step(state, x, **_weights(pipeline))
        found = rows
    return _own(found)


def _own(rows: list[Asked]) -> list[Asked]:
    """Rows that zerofn asked for: the model's own and autograd's have no place in it."""
    return [row for row in rows if row.where]


def counts(route: str, pipeline: str, leaves: int = 10, **how: Any) -> dict[str, Any]:
    with counting():
        rows = {"attached": attached, "pure": pure}[route](pipeline, leaves, **how)
    return {
        "launches": virtual_cuda.count(rows, "launch"),
        "waits": virtual_cuda.places(rows, "wait"),
        "copies": virtual_cuda.count(rows, "copy"),
        "by": virtual_cuda.places(rows, "launch"),
        # What a view launches is part of forward and backward.
        "step": virtual_cuda.count([row for row in rows if "core/view.py" not in row.where], "launch"),
    }


def within_backward(pipeline: str, most: int) -> tuple[int, list[str]]:
    """Launches of a step of 148 leaves within backward if gradients wait for `most` bytes; and what has other bits."""
    known = in_backward.TOGETHER
    in_backward.TOGETHER = most
    try:
        return counts("attached", pipeline, 148, in_backward=True)["launches"], compare(pipeline, in_backward=True)
    finally:
        in_backward.TOGETHER = known


def by_size(pipeline: str) -> list[int]:
    """Launches of `opt.step()` for eight leaves of 10 elements, and of a million."""
    found = []
    with counting():
        for numel in (10, 1 << 20):
            model = nn.ParameterList(torch.full((numel,), 0.5) for _ in range(8)).cuda()
            opt = zf.attach(model, ROWS[pipeline].trained(BLOCK))
            for _ in range(2):
                for p in model.parameters():
                    p.grad = torch.full_like(p, 1e-3)
                with LOG() as rows:
                    opt.step()
            found.append(virtual_cuda.count(rows, "launch"))
    return found


def known() -> dict[str, Any]:
    """Rows of the log for operators whose cost on a GPU is known."""
    x, host = torch.ones(4, device="cuda"), torch.ones(4)
    with LOG() as rows:
        x.sum().item()
        x.cpu()
        host.to("cuda")
        x.nonzero()
        host.pin_memory().to("cuda", non_blocking=True)
    waits, copies = [row.name for row in rows if row.kind == "wait"], [row for row in rows if row.kind == "copy"]
    lists = [[torch.ones(3, device="cuda") for _ in range(148)] for _ in range(4)]
    step = [torch.ones((), device="cuda")] * 148
    with LOG() as rows:
        x.add(1)
        torch._foreach_add_(lists[0], 1)
        torch._fused_adamw_(
            *lists, [], step, lr=1.0, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1.0, amsgrad=False, maximize=False
        )
    return {"waits": waits, "copies": len(copies), "launches": {row.name: row.count for row in rows}}


class Apart(Many):
    """Each third leaf stays on the host when the others go to a device."""

    def to(self, device: str) -> Apart:  # type: ignore[override]
        for i, (name, p) in enumerate(list(self.named_parameters())):
            if i % 3:
                self.register_parameter(name, nn.Parameter(p.detach().to(device)))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(p * x.to(p.device)).sum().cpu() for p in self.parameters()]).sum()


def _trained(pipeline: str, device: str, kind: type[Many] = Many, leaves: int = 14, **how: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = kind(leaves).to(device)
    opt = zf.attach(model, ROWS[pipeline].trained(BLOCK), **how)
    for x in torch.randn(3):
        model(x.to(device).to(model.p000.dtype)).float().backward()
        opt.step(**_weights(pipeline))
        opt.zero_grad()
    stray = [p for p, x in opt.state.params.items() if x.device.type != model.get_parameter(p).device.type]
    assert not stray, f"parameters that are on another device: {stray}"
    kept = dict(_tensors(opt.state.transforms))
    return {p: x.detach().cpu() for p, x in {**opt.state.params, **kept}.items()}


def _tensors(x: Any, path: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(x, Tensor):
        return [(path, x)]
    return [row for key, value in x.items() for row in _tensors(value, f"{path}.{key}")] if isinstance(x, dict) else []


def compare(pipeline: str, apart: bool = False, interpreted: bool = False, **how: Any) -> list[str]:
    """What differs from the same steps on the CPU; with `apart`, of leaves of which some stay there.

    With `interpreted` formulas are kernels of Triton's under its interpreter, which take a second for four leaves.
    """
    kind = Apart if apart else Many
    how["leaves"] = 4 if interpreted else 14
    here = _trained(pipeline, "cpu", kind, **how)
    with nullcontext() if interpreted else formulas_by_torch():
        there = _trained(pipeline, "cuda", kind, **how)
    assert here.keys() == there.keys()
    if near := ROWS[pipeline].near:
        return [
            p
            for p in here
            if not torch.allclose(here[p].double(), there[p].double(), rtol=near, atol=max(near / 1e3, 1e-7))
        ]
    return [p for p in here if not torch.equal(here[p], there[p])]


def without_triton(pipeline: str) -> tuple[int, list[str]]:
    """Launches for 148 leaves where Triton is not installed, and what differs from the same steps on the CPU."""
    known = program.printer_for, program.triton_for
    program.printer_for = program.triton_for = lambda device: None  # type: ignore[assignment]
    try:
        return virtual_cuda.count(attached(pipeline, 148), "launch"), compare(pipeline)
    finally:
        program.printer_for, program.triton_for = known


def with_a_rate_of_the_host(name: str) -> tuple[dict[str, int], list[str]]:
    """Waits of a third step whose rate is a tensor of the host; and what differs from the CPU."""
    found: list[dict[str, Tensor]] = []
    waits: dict[str, int] = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = Many(7).to(device)
        opt = zf.attach(model, ROWS[name].trained(replace(BLOCK, rate=torch.tensor(1e-2))))
        for x in torch.randn(3):
            given = x.to(device).to(model.p000.dtype)
            with formulas_by_torch(), LOG() as rows:
                model(given).float().backward()
                opt.step()
                opt.zero_grad()
            waits = virtual_cuda.places(_own(rows), "wait")
        found.append({p: x.detach().cpu() for p, x in opt.state.params.items()})
    here, there = found
    return waits, [p for p in here if not torch.allclose(here[p].float(), there[p].float(), rtol=1e-2, atol=1e-5)]


def batched_rates_of_the_host(name: str) -> list[str]:
    """What differs from the CPU in a batch of steps, each with a rate of its own in a tensor of the host."""
    found = []
    for device in ("cpu", "cuda"):
        params = {"w": torch.linspace(-1, 1, 6).view(2, 3).to(device)}

        def trained(rate: Tensor, params: dict[str, Tensor] = params) -> dict[str, Tensor]:
            tx = getattr(zf, name)(rate)
            state = zf.init(tx, params)
            for _ in range(2):
                state, _ = zf.update(tx, {"w": params["w"] * 3}, state)
            return state.params

        found.append(torch.func.vmap(trained)(torch.tensor([0.1, 0.01]))["w"].cpu())
    here, there = found
    return [] if torch.equal(here, there) else [f"{here} {there}"]


def captured_with_a_rate_of_the_host() -> str:
    """What `capturable=True` says to a rate in a tensor of the host."""
    try:
        zf.attach(Many(3).cuda(), zf.adamw(torch.tensor(1e-3)), capturable=True)
    except ValueError as error:
        return str(error)
    return ""


def captured(route: str) -> str:
    """What an update says while a CUDA graph is captured."""
    model = Many(3).cuda()
    tx = zf.sgd(1e-3)
    opt = zf.attach(model, tx, in_backward=route == "in backward") if route != "pure" else None
    state = zf.init(tx, dict(model.named_parameters())) if opt is None else None
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        if state is not None:
            zf.update(tx, {p: torch.ones_like(x) for p, x in state.params.items()}, state)
        elif opt is not None:
            model(torch.ones((), device="cuda")).backward()
            opt.step()
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.is_current_stream_capturing = lambda: False
    return ""


def on_two_devices() -> str:
    """What an update says of a gradient on another device than its parameter."""
    state = zf.init(tx := zf.low_precision_adam(), {"w": torch.ones(2, device="cuda", dtype=BF16)})
    try:
        zf.update(tx, {"w": torch.ones(2, dtype=BF16, device="cpu")}, state)
    except ValueError as error:
        return str(error)
    return ""


class _OfAllShapes(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in (("number", ()), ("vector", (3,)), ("matrix", (4, 3)), ("expanded", (5,))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape).to(dtype)))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.matrix @ self.vector) * x * self.number).sum() + self.expanded.sum()


def scaled_gradients(dtype: torch.dtype, scale: float) -> tuple[list[str], int]:
    """Gradients of parameters and of an input that differ from the CPU's, and the launches of their division."""
    found: list[dict[str, Tensor]] = []
    launches = 0
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = _OfAllShapes(torch.float32).to(device)
        zf.attach(model, zf.chain(zf.precision(store_dtype=dtype), zf.scale_loss(scale), zf.sgd(0.1)))
        x = torch.randn(4).to(device, dtype).requires_grad_()
        loss = model(x)
        with LOG() as rows:
            loss.float().backward()
        divided = [row for row in rows if row.kind == "launch" and "core/view.py" in row.where]
        launches = sum(row.count for row in divided)
        found.append({**{n: p.grad.cpu() for n, p in model.named_parameters()}, "x": x.grad.cpu()})  # type: ignore[union-attr]
    here, there = found
    return [n for n in here if here[n].dtype != there[n].dtype or not torch.equal(here[n], there[n])], launches


def overflowed() -> tuple[dict[str, int], int]:
    """Waits of a step in which the last leaves overflow, and the first one that did."""
    model = Many(10).cuda()
    opt = zf.attach(model, zf.chain(zf.scale_loss("dynamic", init_scale=8.0), zf.sgd(1e-3)))
    # Once in a process a kernel of Triton is tried, and its result compared.
    program.printer_for(next(model.parameters()).device)
    model(torch.ones((), device="cuda")).backward()
    for p in list(model.parameters())[7:]:
        p.grad.fill_(torch.inf)  # type: ignore[union-attr]
    with LOG() as rows:
        opt.step()
    return virtual_cuda.places(rows, "wait"), int(opt.metrics["overflow_leaf"])


def _by_path(p: Tensor, g: Tensor, slots: dict[str, Tensor], at: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return p - at.lr * len(at.path) * g, slots


def _by_dtype(p: Tensor, g: Tensor, slots: dict[str, Tensor], at: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return (p - at.lr * g if p.dtype is torch.float32 else p - at.lr * g.roll(1, 0)), slots


@zf.leafwise(init=torch.zeros_like, optimizer=True, needs="element")
def _own_lion(grad, param, momentum, *, lr, beta=0.99):
    return param - lr * (0.9 * momentum + 0.1 * grad).sign(), beta * momentum + (1 - beta) * grad


@zf.leafwise(init=lambda p: {"v": torch.zeros_like(p), "m": p.clone()}, needs="element")
def _two_states(grad, param, state):
    v = state["v"] + grad**2
    return grad / (abs(param) + 1.0), {"v": v, "m": torch.lerp(state["m"], param, 0.25)}


@zf.leafwise(needs="element")
def _branching(grad, param):
    return torch.where(grad > 0, grad, 0.5 * grad)


@zf.leafwise(init=lambda p: p.new_zeros(()), needs="element")
def _counting(grad, param, seen):
    return grad / (1 + seen), seen + 1


@zf.leafwise(needs="element")
def _by_name(grad, param, *, path):
    return grad * len(path)


@zf.leafwise(needs="row")
def _by_row(grad, param):
    return 2 * grad


def _moved(fn: Callable[..., Any]) -> zf.Transform:
    return zf.chain(zf.sgd(0.125), zf.watch(fn, labels=lambda path: path[-1]))


OWN: dict[str, Callable[[], zf.Transform]] = {
    "formula, path": lambda: optimizer("own", 0.1, {}, _by_path),
    "formula, dtype": lambda: optimizer("own", 0.1, {}, _by_dtype),
    "leafwise": lambda: _own_lion(lr=0.1),
    "leafwise, two states": lambda: zf.chain(_two_states(), zf.sgd(0.125)),
    "leafwise, branching": lambda: zf.chain(_branching(), zf.sgd(0.125)),
    "leafwise, a state of another shape": lambda: zf.chain(_counting(), zf.sgd(0.125)),
    "leafwise, path": lambda: zf.chain(_by_name(), zf.sgd(0.125)),
    "leafwise, rows": lambda: zf.chain(_by_row(), zf.sgd(0.125)),
    "watch": lambda: _moved(lambda old, new: {"a": ((new - old) ** 2).sum(), "b": abs(new).sum()}),
    "watch, a constant": lambda: _moved(lambda old, new: {"a": (new - old).sum(), "n": new.numel()}),
    "watch, comparing": lambda: _moved(lambda old, new: {"a": (new > old).sum()}),
}


def own_transform(name: str) -> tuple[int, list[str]]:
    """Launches of an update by a transform of the user's, of 20 leaves of two dtypes; and wrong bits."""
    found, make = [], OWN[name]
    # One is interpreted, which takes seconds.
    with nullcontext() if name == "leafwise" else formulas_by_torch():
        return _own_transform(make, found)


def _own_transform(make: Callable[[], zf.Transform], found: list[dict[str, Tensor]]) -> tuple[int, list[str]]:
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        params = {f"p{i}": torch.randn(4, dtype=BF16 if i % 3 else torch.float32, device="cpu") for i in range(20)}
        grads = {p: torch.randn_like(x).to(device) for p, x in params.items()}
        state = zf.init(tx := make(), {p: x.to(device) for p, x in params.items()})
        for _ in range(2):
            with LOG() as rows:
                state, metrics = zf.update(tx, grads, state)
        kept = {**state.params, **dict(_tensors(state.transforms)), **{p: x.float() for p, x in metrics.items()}}
        found.append({p: x.cpu() for p, x in kept.items()})
    (here, there), metrics = found, set(metrics)
    assert here.keys() == there.keys()
    bad = [p for p in here if not torch.equal(here[p], there[p])]
    bad = [p for p in bad if not (p in metrics and torch.allclose(here[p], there[p], rtol=1e-5))]
    return virtual_cuda.count(rows, "launch"), bad


def _guarded(row: Row) -> zf.Transform:
    """The row behind a scale of the loss, where it has no verdict of its own."""
    parts = zf.chain(row.trained(FAST)).parts
    if any(x.name in ("scale_loss", "skip_nonfinite") for x in parts):
        return zf.chain(*parts)
    casts = 1 if parts[0].name == "precision" else 0
    return zf.chain(*parts[:casts], zf.scale_loss("dynamic", init_scale=8.0, growth_interval=2), *parts[casts:])


def _skipped(pipeline: str, device: str, route: str) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """What is left of six steps of which the third is skipped, their metrics, and the waits of the last three.

    A leaf is without a gradient in the second and the fourth step.
    """
    torch.manual_seed(0)
    params = {f"p{i:03d}": torch.randn(SHAPES[i % 12]) for i in range(14)}
    grads = [{p: torch.randn_like(x) for p, x in params.items()} for _ in range(6)]
    grads[2]["p007"][0] = torch.inf
    tx, told, waits = _guarded(ROWS[pipeline]), [], 0
    model = nn.Module()
    for p, x in params.items():
        model.register_parameter(p, nn.Parameter(x.to(device)))
    opt = zf.attach(model, tx) if route == "attached" else None
    state = zf.init(tx, dict(model.named_parameters())) if opt is None else opt.state
    for i, by_path in enumerate(grads):
        if i in (1, 3):
            by_path["p003"] = None
        given = {p: None if g is None else g.to(device, state.leaves[p].dtype) for p, g in by_path.items()}
        more = _weights(pipeline, 1.0 + i)
        with LOG() as rows:
            if opt is None:
                state, metrics = zf.update(tx, given, state, **more)
            else:
                for p, x in model.named_parameters():
                    x.grad = given.get(p)
                opt.step(**more)
                state, metrics = opt.state, opt.metrics
        waits += virtual_cuda.count(rows, "wait") if i > 2 else 0
        told.append({name: x.item() for name, x in metrics.items()})
    kept = dict(_tensors(state.transforms))
    return {p: x.detach().cpu() for p, x in {**state.leaves, **kept, "step": state.step}.items()}, told, waits


def skipping(pipeline: str, route: str) -> tuple[list[str], int]:
    """What differs from the same steps on the CPU; and the waits."""
    here, of_here, _ = _skipped(pipeline, "cpu", route)
    with formulas_by_torch():
        there, of_there, waits = _skipped(pipeline, "cuda", route)
    assert here.keys() == there.keys() and here["step"] < 6
    near = ROWS[pipeline].verdict == "near"
    bad = [p for p in here if not torch.equal(here[p], there[p])]
    bad = [p for p in bad if not (near and torch.allclose(here[p], there[p], rtol=1e-5, atol=1e-6))]
    for i, (a, b) in enumerate(zip(of_here, of_there, strict=True)):
        # Of an optimizer that looks at the whole tree the CPU reports no rate where it is not reached.
        assert a.keys() == b.keys() - ({"lr"} - a.keys())
        bad += [f"{k} at {i}: {a[k]} {b[k]}" for k in a if a[k] != b[k] and abs(a[k] - b[k]) > 1e-5 * abs(a[k])]
    return bad, waits


def gradients_elsewhere_in_each_step() -> tuple[int, list[str]]:
    """How many addresses the gradients of one leaf had in three steps of the Triton kernel; and wrong bits."""
    found: list[dict[str, Tensor]] = []
    addresses: set[int] = set()
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = Many(1).to(device)
        opt = zf.attach(model, ROWS["low precision, stochastic"].trained(BLOCK))
        kept: list[Tensor] = []
        for x in torch.randn(3):
            model(x.to(device).to(BF16)).float().backward()
            # Those of the steps before are not freed, so that these are elsewhere.
            kept += [p.grad for p in model.parameters() if p.grad is not None]
            addresses |= {model.p000.grad.data_ptr()} if device == "cuda" else set()
            opt.step()
            opt.zero_grad()
        found.append({path: x.detach().cpu() for path, x in opt.state.params.items()})
    here, there = found
    return len(addresses), [p for p in here if not torch.equal(here[p], there[p])]


def without_a_compiler() -> tuple[list[str], list[str]]:
    """Warnings of steps where triton finds no C compiler for its launchers; and wrong bits."""

    def fail(kernel: Any, programs: int, *args: Any) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    program.triton_for.cache_clear()
    print_triton.launch = fail
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            wrong = compare("low precision, stochastic", interpreted=True)
    finally:
        print_triton.launch = _launch
        program.triton_for.cache_clear()
    return [str(one.message) for one in said], wrong


def capturable_on_two_devices() -> str:
    """What a model hears of which some leaves stay on the host."""
    try:
        zf.attach(Apart(3).to("cuda"), zf.adamw(1e-3), capturable=True)
    except ValueError as error:
        return str(error)
    return ""


def written_states() -> list[bool]:
    """Whether torch counts a step as a write into each tensor of an offloaded state, in its own memory."""
    model = Many(3).cuda()
    opt = zf.attach(model, zf.offload(zf.adamw(1e-3)))
    before = [(x, x._version) for _, x in _tensors(opt.state.transforms) if x.ndim]
    model(torch.ones((), device="cuda")).backward()
    opt.step()
    after = [x for _, x in _tensors(opt.state.transforms) if x.ndim]
    return [x is y and x._version > n for x, (y, n) in zip(after, before, strict=True)]
