"""Shows people the kernels that a chain's step runs, and why a function is none."""

from __future__ import annotations

from typing import Any

import torch

from .._errors import explain
from ..core.chain import as_transform
from ..core.layout import make_layout
from ..core.passes import alone, passes_of_large
from ..core.pipeline import pipeline
from ..kernels import print_c
from ..kernels.program import Program, triton_module


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
    comment that names the operation and the line that were the reason. So it does where a function is called in each
    step, since what it does in one is not known to be right in the next.

    Args:
        tx: a chain with an optimizer.
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
    layout, _ = make_layout({"w": torch.ones(1)} if params is None else params)
    passes, reasons = passes_of_large(pipeline(tx, layout, "kernel_source", alone), printer)
    found = {x.program: x for x in passes if x.program is not None}
    sign = "//" if target == "c" else "#"
    called = [x.why for x in found.values() if x.why]
    shown = [f"{sign} Not one kernel: {why}" for why in reasons if why not in called]
    shown += [f"{sign} Called in each step: {why}" for why in dict.fromkeys(called)]
    if not found:
        why = "\n".join(reasons) or "its kernels are written by hand"
        right = "arithmetic of tensors, numbers and torch.where: docs/your-formula-is-a-kernel.md"
        raise ValueError(explain(f"kernel_source of {tx.name}", f"no part of its step is printed: {why}", right))
    for i, (program, x) in enumerate(found.items(), 1):
        shown += [f"{sign} Kernel {i} of {len(found)} reads {x.reads:g} and writes {x.writes:g} bytes for each number."]
        shown += [_in_c(program) if target == "c" else printer.source(program)]
    return "\n".join(shown)


def _in_c(program: Program) -> str:
    """The function of a program that computes two neighbours."""
    text = print_c.source(program)
    return text[text.index("INLINE void pair(") : text.index("INLINE void line(")].rstrip() + "\n"
