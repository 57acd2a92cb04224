"""A full parameter that is gathered when something is computed with it.

A `Lazy` has a shape, a dtype, a device, a node in autograd's graph, and no memory. An operation on it gathers its
unit (`gather_on_use.Units`) and runs on the full parameter; a view of it is another `Lazy`. A tensor without memory has
to be a subclass of Tensor, as DTensor is.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from .._compat.functorch import uncompiled
from .._compat.tensors import no_torch_function, schema, without_memory
from .._errors import explain
from ..core.layout import Leaf, Leaves
from ..core.tree import Tree, tree_map


class Source(Protocol):
    """Gathers the parameter. `gather_on_use.Units` implements it; it imports this file."""

    units: list[list[Leaf]]
    params: Leaves

    def parameter(self, i: int, j: int, age: int) -> Tensor: ...
    def age(self, i: int, j: int) -> int: ...


class Lazy(Tensor):
    """A full parameter, or a view of one with the sizes and dtype of `like`, gathered on use."""

    # `__torch_dispatch__` does everything. It is below autograd, which sees an ordinary tensor.
    __torch_function__ = no_torch_function  # type: ignore[assignment]
    blocks: Source
    # The leaf's unit and place in it, and how often it had changed when this was made.
    place: tuple[int, int]
    age: int

    @staticmethod
    def __new__(cls, blocks: Source, place: tuple[int, int], like: Tensor) -> Lazy:
        leaf = blocks.units[place[0]][place[1]]
        self = without_memory(
            cls,
            like.size(),
            like.stride(),
            like.storage_offset(),
            dtype=like.dtype,
            device=blocks.params[leaf.path].device,
            storage_size=0,
        )
        self.blocks, self.place, self.age = blocks, place, blocks.age(*place)
        return self

    def full(self) -> Tensor:
        """The tensor with memory, gathered; outside of autograd."""
        with torch.inference_mode(False), torch.no_grad():
            full = self.blocks.parameter(*self.place, self.age)
        return full.as_strided(self.size(), self.stride(), self.storage_offset())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Lazy(shape={tuple(self.shape)}, dtype={self.dtype}, gathered on use)"

    def tolist(self) -> list:
        return self.clone().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.clone().numpy(force=force)

    def data_ptr(self) -> int:
        raise RuntimeError(
            explain(
                "the address of a parameter",
                "under shard it is gathered when something is computed with it, and has no memory before",
                "kernel(params['w'].clone())",
            )
        )

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _compute(func, args, kwargs or {})


@uncompiled
def _compute(func: Any, args: tuple, kwargs: dict) -> Any:
    if schema(func).is_mutable:
        _check_unwritten(func, args, kwargs)
    elif func.is_view and isinstance(args[0], Lazy):
        lazy = args[0]
        seen = func(_shape_only(lazy), *args[1:], **kwargs)
        parts = seen if isinstance(seen, list | tuple) else [seen]
        if all(x.dtype == lazy.dtype and not (x.is_conj() or x.is_neg()) for x in parts):
            views = [Lazy(lazy.blocks, lazy.place, x) for x in parts]
            return views if parts is seen else views[0]
    return func(*map(_full, args), **{k: _full(v) for k, v in kwargs.items()})


def _shape_only(lazy: Lazy) -> Tensor:
    """A meta tensor of the same sizes and strides; a view of it gives the sizes and strides of the real view."""
    i, j = lazy.place
    flat = torch.empty(lazy.blocks.units[i][j].numel, dtype=lazy.dtype, device="meta")
    return flat.as_strided(lazy.size(), lazy.stride(), lazy.storage_offset())


def _full(x: Any) -> Any:
    if isinstance(x, Lazy):
        return x.full()
    return [_full(v) for v in x] if isinstance(x, list | tuple) else x


def _check_unwritten(func: Any, args: tuple, kwargs: dict) -> None:
    named = schema(func).arguments
    written = [a.name for a in named if a.alias_info is not None and a.alias_info.is_write]
    given = dict(zip((a.name for a in named), args, strict=False)) | kwargs
    if any(isinstance(x, Lazy) for name in written for x in _flat(given.get(name))):
        raise RuntimeError(
            explain(
                f"{func} writes into a parameter",
                "under shard it is gathered anew when it is used again, so what is written would be lost",
                "with opt.gathered(): on an attached model; w = params['w'].clone() in a function of parameters",
            )
        )


def _flat(x: Any) -> Any:
    return x if isinstance(x, list | tuple) else (x,)


def gather_lazy(tree: Tree) -> Tree:
    """The same tree with each `Lazy` gathered into a tensor of its own, for results of a function of parameters."""
    return tree_map(lambda x: x.clone() if isinstance(x, Lazy) else x, tree)
