"""Views of a gathered whole refuse writes, which would be lost.

In torch `p.grad[0].zero_()` writes into the gradient through a view. Of a part the row is gathered, and is no view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._compat.tensors import memory
from .._errors import explain
from .torch_function_kinds import in_place

PLAIN = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


class ReadOnly(Tensor):
    """A view of a gathered whole."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if has_other_class(types, (ReadOnly,)):
            return NotImplemented
        kwargs = kwargs or {}
        with torch.DisableTorchFunctionSubclass():
            if not is_dynamo_compiling():
                check_unwritten(func.__name__.partition(".")[0], args, kwargs)
            out = func(*args, **kwargs)
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, ReadOnly)]
            return out if is_dynamo_compiling() or func.__name__ == "as_subclass" else read_only(out, given)


def has_other_class(types: Any, ours: tuple[type, ...]) -> bool:
    """Whether a class that is not `ours` handles the function: that of sharded parameters, or one of the user's."""
    return any(t not in ours and getattr(t.__torch_function__, "__func__", None) is not PLAIN for t in types)


def read_only(out: Any, given: list[Any]) -> Any:
    """The result of a function, with views of `given`, the wholes that were gathered for it, as `ReadOnly`."""
    if type(out) is Tensor and any(memory(out) == memory(x) for x in given):
        return out.as_subclass(ReadOnly)
    return type(out)(read_only(x, given) for x in out) if type(out) in (list, tuple) else out


def check_unwritten(name: str, args: tuple, kwargs: dict) -> None:
    """Refuse a function that writes into a read-only view."""
    into = [args[0] if args and in_place(name) else None, kwargs.get("out")]
    if name != "requires_grad_" and any(_is(x) for x in into):
        raise RuntimeError(
            explain(
                f"{name} of a view of what was gathered",
                "p.grad[index], p.data.T and opt.state[p][name][index] of a shard are made of all ranks' shards,\n"
                "and what is written into them would be lost",
                "p.grad[index] = new, or x[index] = x[index] + 1 in place of x[index] += 1, on every rank;\n"
                "x.clone() for a tensor of one's own; for torch.optim.Muon, zf.muon(lr) in the chain of zf.attach",
            )
        )


def _is(x: Any) -> bool:
    return any(map(_is, x)) if type(x) in (list, tuple) else isinstance(x, ReadOnly)
