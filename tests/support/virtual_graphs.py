"""CUDA graphs on the virtual device: operations of a step that are recorded, and repeated without a line of its code.

Imported in the process of `virtual_cuda.processes` only.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import virtual_cuda
import virtual_steps
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transforms_table import ROWS
from virtual_steps import FAST, Many

import zerofn as zf
from zerofn.kernels import print_triton  # inside: a graph has the launches of its kernels


class Graph(TorchDispatchMode):
    """Inside, operations are run and recorded. `replay` runs them again, with the same tensors and numbers.

    Attributes:
        host: the operations that took or gave something of the host, which no replay would repeat.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict[str, Any], Any]] = []
        self.host: list[str] = []

    def __enter__(self) -> Graph:
        self._capturing, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, lambda: True
        self._launch, print_triton.launch = print_triton.launch, self._launched
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.cuda.is_current_stream_capturing, print_triton.launch = self._capturing, self._launch

    def _launched(self, kernel: Any, programs: int, *args: Any) -> None:
        with _disable_current_modes():
            self._launch(kernel, programs, *args)
        self.calls.append((self._launch, (kernel, programs, *args), {}, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given, found = ([x for x in tree_leaves(y) if isinstance(x, Tensor)] for y in ((args, kwargs), out))
        there = any(x.is_cuda for x in given)
        if func is torch.ops.aten._local_scalar_dense.default and there:
            self.host.append("read")
        if (there or any(x.is_cuda for x in found)) and any(x.is_cpu and x.ndim for x in (*given, *found)):
            self.host.append(str(func))
        if "copy" in func._schema.name and len({x.device for x in (*given, *found)}) > 1:
            self.host.append(f"{func} at {virtual_cuda._where()}")
        if there or any(x.is_cuda for x in found):
            self.calls.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        # A replay of CUDA's runs no code of torch's, which would count the writes.
        used = tree_leaves([call[1:] for call in self.calls])
        kept = tuple({id(x): x for x in used if isinstance(x, Tensor) and not x.is_inference()}.values())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(kept):
            for func, args, kwargs, out in self.calls:
                name = "" if out is None else func._schema.name
                if out is not None and ("empty" in name or _views(func)):
                    continue
                for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old is not new:
                        old.copy_(new)

    def rows(self) -> list[Any]:
        """The operations, with their numbers, and addresses of tensors by what has them."""
        return [(getattr(f, "__name__", str(f)), [_told(x) for x in tree_leaves((a, k))]) for f, a, k, _ in self.calls]


def _views(func: Any) -> bool:
    """Whether an operator returns its argument in another shape, and writes nothing."""
    infos = [x.alias_info for x in func._schema.returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)


def _told(x: Any) -> Any:
    if isinstance(x, Tensor):
        return tuple(x.shape), str(x.dtype), str(x.device), None if x.is_cuda else x.tolist()
    if type(x) is int and x > 1 << 32:
        # A temporary may be elsewhere in another graph, which has memory of its own.
        return "address"
    return x.__name__ if hasattr(x, "__name__") else x


STEPS = 7


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.to(next(model.parameters()).dtype)).float()


def _attached(pipeline: str, capturable: bool) -> tuple[dict[str, Tensor], list[dict[str, float]], Graph | None]:
    model = Many(5).cuda()
    opt, x = zf.attach(model, ROWS[pipeline].trained(FAST), capturable=capturable), torch.ones((), device="cuda")

    def step() -> dict[str, Tensor]:
        _loss(model, x).backward()
        opt.step()
        opt.zero_grad()
        return opt.metrics

    found = _run(step, x, capturable)
    return _kept(opt.state), *found


def _pure(pipeline: str, capturable: bool) -> tuple[dict[str, Tensor], list[dict[str, float]], Graph | None]:
    model, x = Many(5).cuda(), torch.ones((), device="cuda")
    tx = ROWS[pipeline].trained(FAST)
    states = [zf.init(tx, dict(model.named_parameters()))]

    def loss_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, (x.to(p["p000"].dtype),)).float()

    one = zf.make_step(loss_fn, tx, donate=True, capturable=capturable)

    def step() -> dict[str, Tensor]:
        states[0], metrics = one(states[0], x)
        return metrics

    found = _run(step, x, capturable)
    return _kept(states[0]), *found


def _run(step: Callable[[], dict[str, Tensor]], x: Tensor, capturable: bool) -> tuple[list[dict[str, float]], Any]:
    """Steps on other inputs; of a capturable one the third is recorded, and the others are replays of it."""
    told, graph, metrics = [], None, {}
    for i, value in enumerate(torch.randn(STEPS).tolist()):
        x.fill_(value)
        if graph is not None:
            graph.replay()
        elif capturable and i == 2:
            with Graph() as graph:
                metrics = step()
        else:
            metrics = step()
        told.append({name: m.item() for name, m in metrics.items()})
    return told, graph


def _kept(state: zf.State) -> dict[str, Tensor]:
    kept = dict(virtual_steps._tensors(state.transforms))
    return {p: x.detach().cpu() for p, x in {**state.leaves, **kept, "step": state.step}.items()}


ROUTES = {"attached": _attached, "pure": _pure}


def replayed(route: str, pipeline: str) -> tuple[list[str], list[str]]:
    """What differs after replays of a captured step from as many steps; and what that asked of the host."""
    torch.manual_seed(0)
    with virtual_steps.formulas_by_torch():
        here, of_here, _ = ROUTES[route](pipeline, False)
    torch.manual_seed(0)
    there, of_there, graph = ROUTES[route](pipeline, True)
    assert graph is not None and here.keys() == there.keys() and here["step"] > 0
    bad = [p for p in here if not torch.allclose(here[p], there[p], rtol=1e-5, atol=1e-6)]
    for i, (a, b) in enumerate(zip(of_here, of_there, strict=True)):
        bad += [f"{k} at {i}: {a[k]} {b[k]}" for k in a if a[k] != b[k] and abs(a[k] - b[k]) > 1e-4 * abs(a[k])]
    return bad, graph.host


def alike(pipeline: str) -> list[tuple[Any, Any]]:
    """The operations in which two recorded steps differ."""
    torch.manual_seed(0)
    model = Many(5).cuda()
    opt, found = zf.attach(model, ROWS[pipeline].trained(FAST), capturable=True), []
    grads = {p: torch.randn_like(x) for p, x in model.named_parameters()}
    for i in range(4):
        for p, x in model.named_parameters():
            x.grad = grads[p]
        with Graph() as graph:
            opt.step()
        found += [graph.rows()] if i > 1 else []
    a, b = found
    return [pair for pair in zip(a, b, strict=True) if pair[0] != pair[1]] if len(a) == len(b) else [(len(a), len(b))]


def refused() -> str:
    """What the first step of a state says while it is captured."""
    tx = zf.adamw(1e-2)
    step = zf.make_step(lambda p: sum(x.sum() for x in p.values()), tx, donate=True, capturable=True)
    state = zf.init(tx, dict(Many(3).cuda().named_parameters()))
    try:
        with Graph():
            step(state)
    except RuntimeError as error:
        return str(error)
    return ""


def saved(folder: str, capturable: bool) -> dict[str, Any]:
    """Whether runs that are loaded from what another has saved go on as that one, here and on the CPU."""
    x = torch.ones((), device="cuda")

    def tx() -> zf.Transform:
        scale = zf.scale_loss("dynamic", init_scale=8.0, growth_interval=2)
        return zf.chain(scale, zf.clip_by_global_norm(0.1), zf.adamw(zf.schedules.linear(0.1, 0.0, 9)))

    def fresh(device: str, **how: Any) -> tuple[nn.Module, zf.Optimizer]:
        torch.manual_seed(0)
        model = Many(4).to(device)
        return model, zf.attach(model, tx(), **how)

    def train(model: nn.Module, opt: zf.Optimizer, steps: int) -> list[Tensor]:
        for _ in range(steps):
            model(x.to(next(model.parameters()).device)).backward()
            opt.step()
            opt.zero_grad()
        return [p.detach().cpu().clone() for p in model.parameters()]

    model, opt = fresh("cuda", capturable=capturable)
    train(model, opt, 3)
    kept = io.BytesIO()
    torch.save(opt.state_dict(), kept)
    zf.save(folder, opt)
    last = train(model, opt, 2)
    kept.seek(0)
    dict_model, by_dict = fresh("cuda", capturable=capturable)
    place = by_dict.state.step.data_ptr()
    by_dict.load_state_dict(torch.load(kept, map_location="cpu"))
    file_model, by_file = fresh("cuda", capturable=capturable)
    zf.load(folder, like=by_file)
    cpu_model, on_cpu = fresh("cpu")
    zf.load(folder, like=on_cpu)
    runs = [train(dict_model, by_dict, 2), train(file_model, by_file, 2), train(cpu_model, on_cpu, 2)]
    return {
        "same": [all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(last, run, strict=True)) for run in runs],
        "steps": [o.global_steps for o in (opt, by_dict, by_file, on_cpu)],
        "in place": by_dict.state.step.data_ptr() == place,
    }
