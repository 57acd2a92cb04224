"""Floating-point operations by phase, module and transform, by the formulas of torch.utils.flop_counter."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from .._compat.autograd import in_backward

# Attention on the processor has no formula before torch 2.15; it is that of the same kernel elsewhere.
_ATTENTION = (
    ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward"),
)


class Moment(Protocol):
    """What is done now."""

    @property
    def phase(self) -> str: ...
    @property
    def transform(self) -> str: ...


class Flops:
    """A counter, as a context.

    torch's own sums up over phases, so its formulas are called through one that looks which phase it is.

    Attributes:
        by_phase: operations by phase and module; `""` is all of them.
    """

    def __init__(self, moment: Moment):
        # Asked for here: to import it takes as long as to import zerofn.
        from torch.utils.flop_counter import FlopCounterMode

        self.moment = moment
        self.by_phase: dict[str, dict[str, int]] = {}
        self.mode = FlopCounterMode(display=False)
        formulas = dict(self.mode.flop_registry)
        for one, alike in _ATTENTION:
            formulas.setdefault(getattr(torch.ops.aten, one), formulas[getattr(torch.ops.aten, alike)])
        self.mode.flop_registry = {op: self._noting(formula) for op, formula in formulas.items()}

    def __enter__(self) -> Flops:
        self.mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)

    def _noting(self, formula: Any) -> Any:
        def count(*args: Any, **keywords: Any) -> int:
            found = formula(*args, **keywords)
            phase = self.moment.phase
            if phase != "update":
                phase = "backward" if phase == "backward" or in_backward() else "forward"
            inside = {self.moment.transform} if phase == "update" else self.mode.mod_tracker.parents - {"Global"}
            counts = self.by_phase.setdefault(phase, {"": 0})
            for name in {"", *inside}:
                counts[name] = counts.get(name, 0) + found
            return found

        return count
