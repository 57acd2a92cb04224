"""Refusals of sharded parameters: other memory, copies, and views that look for the edge of a graph."""

from __future__ import annotations

from types import FrameType
from typing import NoReturn

from torch import Tensor
from torch.nn.utils import parametrizations

from .._errors import explain


def refuse_edge(name: str, path: str) -> NoReturn:
    """A view of a parameter as itself is made to find the node at which its gradient ends, for a hook on that.

    It would never be called: the graph of a block ends at what was gathered for it.
    """
    raise RuntimeError(
        explain(
            f"p.{name}(p) of the sharded parameter {path}, as register_multi_grad_hook(params, fn) looks for an edge",
            "under shard its gradient is reduced where its block ends, and comes to no such edge of a graph",
            "p.register_hook(fn) of each, or register_multi_grad_hook(params, fn, mode='any')",
        )
    )


def check_data(value: Tensor, mine: Tensor) -> None:
    """Refuse `model.half()`, `model.to(device)` and `p.data = full`, which exchange this rank's part."""
    if value.shape != mine.shape or value.dtype != mine.dtype or value.device != mine.device:
        got, has = (f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (value, mine))
        raise RuntimeError(
            explain(
                f"other data for a sharded parameter: {got} in place of {has}",
                "under shard it holds this rank's flat part, in the dtype and on the device it was attached with",
                "opt.detach() before model.to(...) and zf.attach after it; with opt.gathered(): p.copy_(values)",
            )
        )


def check_parametrization(frame: FrameType, args: tuple) -> None:
    """Refuse `orthogonal`, which writes by index into `torch.zeros_like(p)` before it exchanges the memory of `p`."""
    if frame.f_globals.get("__name__") == parametrizations.__name__ and not args[0].is_whole():
        refuse_memory(f"{parametrizations.__name__}.orthogonal(...)", args[0].path)


def refuse_memory(how: str, path: str) -> NoReturn:
    """Parametrizations with a `right_inverse` exchange a parameter's memory by `p.set_(x)`."""
    raise RuntimeError(
        explain(
            f"{how} of the sharded parameter {path}",
            "it gives the parameter other memory, and under shard this rank's part is stored in what it has",
            "torch.nn.utils.parametrize and parametrizations before zf.attach, or after opt.detach();\n"
            "to write values alone, with torch.no_grad(): p.copy_(x)",
        )
    )


def refuse_copy(how: str) -> NoReturn:
    """A copy would be a plain model with flat parts for parameters, of no use to anybody."""
    raise RuntimeError(
        explain(
            f"{how} of an attached sharded model",
            "under shard its parameters are this rank's flat parts, and a copy would have no other",
            f"with opt.gathered(): {how}",
        )
    )
