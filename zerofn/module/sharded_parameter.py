"""`nn.Parameter` under `shard`: a DTensor in the place of each parameter that was there.

A DTensor has no memory of its own, so a plain parameter cannot become one: like `fully_shard`, `zf.attach` puts other
objects into the modules. The old ones come back at `opt.detach()`. Until then each keeps this rank's rows, flat, for
this package, and refuses all else.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from operator import methodcaller
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from .._compat.autograd import gradient_hooks, hooks_after, share_hooks
from .._compat.functorch import uncompiled
from .._compat.tensors import (
    dispatched_in_python,
    local_of,
    locals_of,
    read_grad,
    registered,
    set_local,
    set_spec,
    spec_of,
    write_grad,
)
from .._errors import bad_leaves, explain
from ..core.layout import Layout, Leaf, Leaves, as_complex, as_real, complex_form, span
from ..sharded.face import Face, flat, is_whole, own_face, same, set_data, wrap
from ..sharded.gathering import Gathering, Origin, rows_of
from ..sharded.guarded_parameter import Asks, GuardedParameter, in_memory
from ..sharded.torch_functions import tensors_in
from .complex_parameters import WHOLE, whole_of

_FLAT = methodcaller("reshape", -1)


def _refuse_detached() -> NoReturn:
    """Refuse `p.grad` of a parameter that the model had until it was detached: it would be `None` for ever."""
    raise RuntimeError(
        explain(
            "p.grad of a parameter from before opt.detach()",
            "under shard the attached model had DTensors for parameters, and it has its first objects again",
            "model.get_parameter(path), or model.parameters() after opt.detach()",
        )
    )


# The callbacks of a parameter whose model is detached.
NOBODY = Asks(lambda: False, _refuse_detached, lambda x: None, lambda x: None)


class Handed(NamedTuple):
    """A gradient hook of the user's. What it returns may be a full tensor."""

    hook: Callable[[Tensor], Any]

    def __call__(self, g: Tensor | None) -> Any:
        if g is None:  # the leaf's block is in the graph and the leaf is not: torch runs no hook of a plain leaf
            return None
        found = self.hook(g)
        with torch.DisableTorchFunctionSubclass():
            return found if found is None else own_face(g, found, "what a hook returns")


class AfterGradients:
    """A hook of the user's that runs once a gradient has been added to `p.grad`, and only then.

    torch runs it for all leaves of a block that is in the graph, also for those that the loss does not depend on.
    """

    def __init__(self, hook: Callable[[Tensor], Any], p: Tensor):
        self.hook, self.came = hook, False
        with torch.DisableTorchFunctionSubclass():
            self.watch = Tensor.register_hook(p, self.arrives)

    def arrives(self, g: Tensor | None) -> None:
        self.came = g is not None

    def __call__(self, p: Tensor) -> None:
        if self.came:
            self.hook(p)


@dispatched_in_python
class ShardedParameter(Face, GuardedParameter):
    """A parameter of which this rank has some rows.

    Attributes:
        row: the parameter that was there before, with this rank's rows, flat; of a complex one its parts.
    """

    row: nn.Parameter

    def _shown(self, x: Tensor, how: str) -> Tensor:
        return x if isinstance(x, Face) else self._own(x, how)  # type: ignore[return-value]

    def _own(self, value: Tensor | None, how: str) -> Tensor | None:
        if value is None:
            return value
        with torch.DisableTorchFunctionSubclass():
            return own_face(self, value, how)

    @property
    @uncompiled
    def data(self) -> Tensor:  # type: ignore[override]
        with torch.DisableTorchFunctionSubclass():
            return same(local_of(self).detach(), self, "p.data")

    @data.setter
    @uncompiled
    def data(self, value: Tensor) -> None:
        with torch.DisableTorchFunctionSubclass():
            before = local_of(self)
            set_data(self, value, "p.data = x")
            now = local_of(self)
            if now is before:
                return
            # The user may hold the old memory: `kept = p.data; p.data = average; evaluate(); p.data = kept`.
            mine = now if is_whole(self) else flat(self)
            if mine.is_complex():
                parts = torch.view_as_real(mine.resolve_conj())
                mine = parts if is_whole(self) else parts.flatten()
            Tensor.data.__set__(self.row, mine)  # type: ignore[attr-defined]
            # This counts as a write, since a graph from before it would gather the new numbers.
            increment_version(self.row)
            if not is_whole(self):
                vars(self.row)["adopted"] = self.row.data_ptr()
                self.asks.moved(self.path)

    def register_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        with torch.DisableTorchFunctionSubclass():
            return super().register_hook(Handed(hook))

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], Any]) -> Any:
        with torch.DisableTorchFunctionSubclass():
            return super().register_post_accumulate_grad_hook(AfterGradients(hook, self))

    def __repr__(self, **contents: Any) -> str:  # type: ignore[override]
        return f"Parameter containing:\n{super().__repr__(**contents)}"

    def __deepcopy__(self, memo: dict) -> Any:
        if not is_whole(self):
            _refuse_copy("copy.deepcopy(model)")
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(local_of(self).detach().clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_whole(self):
            _refuse_copy("torch.save(model, file)")
        return nn.Parameter(local_of(self).detach(), self.requires_grad).__reduce_ex__(protocol)


def _refuse_copy(how: str) -> NoReturn:
    """Refuse a copy: it would be a plain model with this rank's rows for parameters, of no use to anybody."""
    raise RuntimeError(
        explain(
            f"{how} of an attached sharded model",
            "under shard its parameters are this rank's shards, and a copy would have no way to gather the others",
            f"with opt.gathered(): {how}",
        )
    )


# Attributes of a `Row` that users may read. Optimizers read `p.grad`: a wrong answer would make their steps do nothing.
HARMLESS = frozenset({"device", "dtype", "grad_dtype", "grad_fn", "is_leaf", "layout", "requires_grad"})


class Row(nn.Parameter):
    """The parameter that a model had before it was attached: it keeps this rank's rows, for this package alone."""

    lent = 0
    path: str
    plain: type[nn.Parameter]

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch.DisableTorchFunctionSubclass():
            name = func.__name__
            attribute = func.__self__.__name__ if name in ("__get__", "__set__", "__delete__") else ""
            if (
                in_memory(sys._getframe(1))
                or (name == "__get__" and attribute in HARMLESS)
                or name in ("__hash__", "is_floating_point", "untyped_storage")
            ):
                return func(*args, **kwargs or {})
            _refuse_row(
                f"p.{attribute}" if attribute else name, next(x for x in tensors_in(args) if isinstance(x, Row))
            )

    def __deepcopy__(self, memo: dict) -> NoReturn:
        _refuse_row("copy.deepcopy", self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_row("torch.save", self)


def _refuse_row(how: str, row: Row) -> NoReturn:
    raise RuntimeError(
        explain(
            f"{how} of the parameter {row.path} from before zf.attach",
            "under shard the model has another object in its place, a DTensor, and this one is not trained",
            "model.get_parameter(path), or model.parameters(), after opt = zf.attach(model, tx), and opt.step()",
        )
    )


# ----------------------------------------------------------------------------------------------------------------------
# Putting sharded parameters into a model, and the old ones back.


class ModelFaces:
    """The sharded parameters of one attached model.

    Args:
        by: gathers them.
        wholes: by path, a function that gathers a parameter, differentiable.
        layout: of the pipeline.
        params: the model's own parameters by path, each with this rank's rows, flat.
        left_out: paths that stay as they are.

    Attributes:
        shown: by path, the parameters that the model has now.
    """

    def __init__(
        self,
        by: Gathering,
        whole: Callable[[str], Tensor],
        layout: Layout,
        params: Leaves,
        left_out: Collection[str],
    ):
        self.by, self.params, self.origins = by, params, dict[str, Origin]()
        self.complexes = {leaf.path: leaf for leaf in layout.complexes}
        self.shown: dict[str, Any] = dict(params)
        apart: list[tuple[str, str]] = []
        for leaf in layout.leaves:
            row = params[leaf.path]
            if leaf.path in left_out or not placed_by_torch(by, leaf, row):
                if leaf.complex is not None:
                    apart.append(
                        (leaf.path, f"{leaf.dtype.to_complex()}, of which ranks have no rows as torch cuts them")
                    )
                continue
            of = Origin("the values", complex_form(leaf), by, functools.partial(whole, leaf.path))
            self.origins[leaf.path] = of._replace(how="p.grad", whole=None)
            made = wrap(as_complex(row.detach(), leaf), of, ShardedParameter, row.requires_grad)
            with torch.DisableTorchFunctionSubclass():
                if leaf.complex is None and row.grad_dtype != made.grad_dtype:
                    made.grad_dtype = row.grad_dtype
            own = {k: x for k, x in vars(row).items() if k not in vars(made) and k != WHOLE}
            vars(made).update(own, row=row, path=leaf.path)
            self.shown[leaf.path] = made
        if apart:
            wrong = "zf.attach of complex parameters under shard, with a view or a wire of one's own on them"
            raise ValueError(bad_leaves(wrong, apart, "zf.reduce_scatter() in place of zf.shard()"))

    def put(self, model: nn.Module, undo: list[Callable[[], object]]) -> None:
        """Put them into the model; `undo` gets a function that puts the old ones back."""
        new = {id(whole_of(self.params[path])): self.shown[path] for path in self.origins}
        undo.append(functools.partial(self._leave, model))
        for path in self.origins:
            row, p = self.params[path], self.shown[path]
            grad = read_grad(row)
            if grad is not None:
                write_grad(row, None)
                write_grad(p, wrap(grad, self.origins[path]))
            share_hooks(whole_of(row), p)
            _wrap_hooks(p)
            for x in {id(x): x for x in (row, whole_of(row))}.values():
                vars(x).update(plain=type(x), path=path)
                x.__class__ = _row_class(type(x))
        _exchange(model, new)

    def _leave(self, model: nn.Module) -> None:
        old: dict[int, Any] = {}
        for path in self.origins:
            row, p = self.params[path], self.shown[path]
            _unwrap_hooks(p)
            # Its callbacks are dropped: they make a cycle, which would keep the model's process groups.
            p.asks = NOBODY
            write_grad(p, None)
            before = whole_of(row)
            for x in {id(x): x for x in (row, before)}.values():
                if isinstance(x, Row):
                    x.__class__ = x.plain  # type: ignore[assignment]
                for name in ("plain", "path", "lent", "adopted"):
                    vars(x).pop(name, None)
            with torch.DisableTorchFunctionSubclass():
                row.requires_grad_(p.requires_grad)
                before.requires_grad_(p.requires_grad)
            share_hooks(p, before)
            old[id(p)] = before
        _exchange(model, old)
        self.by.close()

    def _number(self, path: str) -> Tensor:
        """What the pipeline has of a parameter, in the numbers of the parameter."""
        mine, leaf = self.params[path].detach(), self.complexes.get(path)
        return mine if leaf is None else as_complex(mine, leaf)

    def show_wholes(self) -> None:
        """The rows are full parameters now: so are the sharded ones."""
        for path, of in self.origins.items():
            mine = self._number(path)
            set_local(self.shown[path], mine)
            set_spec(self.shown[path], of.by.replicated(mine))

    def show_rows(self) -> None:
        """The rows are this rank's again."""
        for path, of in self.origins.items():
            p = wrap(self._number(path), of)
            set_local(self.shown[path], local_of(p))
            set_spec(self.shown[path], spec_of(p))

    def gradient(self, leaf: Leaf, g: Tensor | None) -> Tensor | None:
        """This rank's elements of a gradient, flat, as autograd takes it to the parameter."""
        of = self.origins.get(leaf.path)
        if g is None or of is None:
            return g
        return wrap(g if leaf.complex is None else as_complex(g, leaf), of)

    def shard(self, leaf: Leaf, x: Tensor | None) -> Tensor | None:
        """The reverse: of a plain tensor, which is the whole, this rank's rows."""
        return x if x is None else self.mine(leaf.path, x)

    def mine(self, path: str, g: Tensor) -> Tensor:
        """This rank's elements of a gradient, flat: a plain tensor, which a hook may return, is the whole."""
        of = self.origins.get(path)
        if of is None:
            return g
        own = flat(g) if isinstance(g, Face) else rows_of(g, of).reshape(-1)
        return as_real(own, self.complexes[path], flat=True) if path in self.complexes else own

    def mine_of(self, grads: Leaves) -> Leaves:
        """`mine` of each of these gradients, by path: by functions of C where all are this rank's rows."""
        if set(map(type, grads.values())) == {Face} and not self.complexes:
            rows = list(locals_of(grads.values()))
            if all(map(Tensor.dim, rows)):
                return dict(zip(grads, map(_FLAT, rows), strict=True))
        return {path: self.mine(path, g) for path, g in grads.items()}

    def local(self, p: Tensor) -> Tensor:
        """A parameter that is whole now, as a plain tensor, differentiable."""
        return p.to_local() if isinstance(p, Face) else p.view_as(p)


def placed_by_torch(by: Gathering, leaf: Leaf, row: Tensor) -> bool:
    """Whether ranks have the rows of a leaf that torch would give them, and nothing else."""
    low, high = by.wire.span(leaf)
    chunk = span(leaf.shape, by.wire.group.rank, by.wire.group.size)
    return (low, high) == chunk and row.numel() == high - low and row.layout is torch.strided


@functools.cache
def _row_class(cls: type) -> type:
    return Row if cls is nn.Parameter else type(f"Row{cls.__name__}", (Row, cls), {})


def _exchange(model: nn.Module, new: dict[int, Any]) -> None:
    """Put other parameters at the places of those with these ids."""
    for module in model.modules():
        own = registered(module)[0]
        for name, p in list(dict.items(own)):
            if id(p) in new:
                dict.__setitem__(own, name, new[id(p)])


def _wrap_hooks(p: Any) -> None:
    """Make hooks from before `attach` like later ones."""
    hooks, after = gradient_hooks(p), hooks_after(p)
    hooks.update((number, Handed(hook)) for number, hook in hooks.items())
    after.update((number, AfterGradients(hook, p)) for number, hook in after.items())


def _unwrap_hooks(p: Any) -> None:
    for hooks in (gradient_hooks(p), hooks_after(p)):
        given = [(number, hook) for number, hook in hooks.items() if isinstance(hook, Handed | AfterGradients)]
        hooks.update((number, hook.hook) for number, hook in given)
        for _, hook in given:
            if isinstance(hook, AfterGradients):
                hook.watch.remove()
