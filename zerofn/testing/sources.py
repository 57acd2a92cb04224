"""Shows people the kernels that a chain's step runs, and why a function is none."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._errors import explain
from ..core.chain import as_transform
from ..core.returned_values import COMPARED
from ..core.tree import flatten, tree_map
from ..kernels import print_c, print_torch
from ..kernels.fused_adam import LINE
from ..kernels.numbers import TOLD
from ..kernels.program import INSTEAD, KINDS, Program, triton_module
from ..pure.api import init
from ..pure.step import make_step


def kernel_source(tx: Any, params: Any = None, target: str = "c") -> str:
    """The kernels that a step of a chain runs on large leaves, for you to read.

    zerofn prints the formula of an optimizer, and a function of `leafwise(needs="element")`, as one kernel that reads
    each number once and writes it once. In the source `p0`, `p1`, ... are the tensors of a leaf, `x0`, `x1`, ... are
    what was read and computed, and `n0`, `n1`, ... are numbers such as the learning rate, which each step passes;
    `e0`, `e1`, ... are numbers that differ by leaf, such as a function of its norm. In C `a` and `b` are two
    neighbours, and `i` is the number of the first. `u0`, `u1`, ... (in Triton `t0`, ...) are added up over a leaf, for
    norms. What all kernels have in common is left out. Neighbours in a chain are one kernel where they can be. A
    comment in front of each kernel has its bytes. The norm of all gradients, which a clip needs first, is none of them.

    Some steps are run on small tensors of the dtypes and dimensions of the parameters: neighbours are joined once their
    first results were checked. A function that is no kernel runs by torch's operations: the source then begins with a
    comment that names the operation and the line that were the reason.

    Args:
        tx: a chain with an optimizer, on one process.
        params: a tree of parameters, for whose dtypes the kernels are; by default one fp32 tensor.
        target: `"c"`, for a CPU, or `"triton"`, for a GPU, which needs triton.

    Raises:
        ValueError: no part of the step is a kernel, or `target` is unknown or cannot express it.

    Examples:
        >>> import torch, zerofn as zf
        >>> @zf.leafwise(needs="element")
        ... def halved(grad, param):
        ...     return 0.5 * grad
        >>> tx = zf.chain(halved(), zf.scale_by_lr(0.1))
        >>> print(kernel_source(tx).splitlines()[0])
        // Kernel 1 of 1 reads 8 and writes 4 bytes for each number.
    """
    tx = as_transform(tx)
    if target not in ("c", "triton"):
        raise ValueError(explain(f"kernel_source(target={target!r})", 'kernels are in "c" or "triton"', 'target="c"'))
    printer = print_c if target == "c" else triton_module("print_triton")
    if printer is None:
        raise ValueError(explain('kernel_source(target="triton")', "triton is not installed", 'target="c"'))
    state = init(tx, tree_map(_small, {"w": torch.ones(LINE)} if params is None else params))
    step = make_step(_summed, tx, donate=True)
    found = _Found(printer)
    with found.watching():
        for _ in range(COMPARED + 2):
            found.programs.clear()
            state, _ = step(state)
    sign = "//" if target == "c" else "#"
    reasons = [f"{sign} Not one kernel: {why}" for why in found.reasons]
    if not found.programs:
        why = "\n".join(reason.partition(": ")[2] for reason in reasons) or "its kernels are written by hand"
        right = "arithmetic of tensors, numbers and torch.where: docs/your-formula-is-a-kernel.md"
        raise ValueError(explain(f"kernel_source of {tx.name}", f"no part of its step is printed: {why}", right))
    sources = map(_in_c if target == "c" else printer.source, found.programs)
    passes = [f"{sign} Kernel {i} of {len(found.programs)} {_moved(x)}" for i, x in enumerate(found.programs, 1)]
    return "\n".join([*reasons, *[x for both in zip(passes, sources, strict=True) for x in both]])


def reasons(step: Callable[[], Any]) -> list[str]:
    """Why functions of yours that a step calls are no kernels, each with the line that was the reason."""
    found = _Found(print_c)
    with found.watching():
        step()
    return [x for x in found.reasons if ", line " in x]


class _Found:
    """A printer that keeps the programs of a step, which run by torch's operations; and why others are none."""

    def __init__(self, printer: Any):
        self.printer = printer
        self.programs: dict[Program, None] = {}
        self.reasons: dict[str, None] = {}

    def can(self, program: Program) -> bool:
        return self.printer.can(program)

    def run(self, program: Program, *given: Any, **more: Any) -> Any:
        self.programs[program] = None
        return print_torch.run(program, *given, **more)

    def told(self, why: str) -> None:
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("zerofn", "torch"):
            # Behind these is who called them, and no formula.
            frame = None if frame.f_code in (kernel_source.__code__, reasons.__code__) else frame.f_back
        if frame is not None:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            why += f", in {frame.f_code.co_name}, line {frame.f_lineno}: {line}"
        self.reasons[why] = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        INSTEAD.append(self)
        TOLD.append(self.told)
        try:
            yield
        finally:
            INSTEAD.remove(self)
            TOLD.remove(self.told)


def _summed(params: Any) -> torch.Tensor:
    """A loss whose gradients have memory of their own."""
    return torch.stack([x.float().square().sum() for x in flatten(params)[0] if x.is_floating_point()]).sum()


def _small(x: torch.Tensor) -> torch.Tensor:
    """A tensor for the same kernel that fills vectors."""
    return torch.ones((*[min(n, 4) for n in x.shape[:-1]], LINE) if x.ndim else (), dtype=x.dtype, device=x.device)


def _moved(program: Program) -> str:
    """The bytes that a program moves, in words."""
    sizes = [dtype.itemsize for dtype in KINDS]
    read, written = (sum([sizes[kind] for kind in kinds]) for kinds in (program.loads, program.written))
    return f"reads {read} and writes {written} bytes for each number."


def _in_c(program: Program) -> str:
    """The function of a program that computes two neighbours."""
    text = print_c.source(program)
    return text[text.index("INLINE void pair(") : text.index("INLINE void line(")].rstrip() + "\n"
