"""Models that are sharded by torch's tensor parallelism."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .._compat.autograd import has_hooks
from .._compat.functorch import uncompiled
from .._compat.tensors import local_of, registered, set_local
from .._errors import bad_leaves, explain
from ..core.layout import Within
from ..ranks.dtensor import CUT, Form, is_distributed, why_not_attachable
from ..ranks.group import Group
from ..ranks.process_groups import group_for
from ..sharded.guarded_parameter import GuardedParameter, in_memory
from ..sharded.opaque import SIZES, handed, opaque, plain, printed, sizes
from ..sharded.torch_functions import PRIVATE, first_by_position, in_place

# ----------------------------------------------------------------------------------------------------------------------
# While a model of torch's tensor parallelism is attached, plain local parameters stand in for its DTensors.
#
# `parallelize_module` makes the parameters of a model DTensors, over one axis of a mesh. The library works on plain
# tensors, over another axis. So each parameter is exchanged for a local one on the same memory, and forward sees the
# DTensor that it was. `opt.detach()` puts the old objects back.


class DistributedModel:
    """The parameters of a model that are DTensors.

    Args:
        model: the model.
        named: its parameters by path, tied ones under each path.

    Attributes:
        forms: by path, the mesh and placement of the DTensor that a parameter is.
        within: by path, where the local tensor lies in the full one; also for plain parameters, which all ranks have.
        groups: of the ranks over which parameters are distributed: one, or none.

    Raises:
        ValueError: parameters are sharded over several axes or over other ranks than the rest, are partial sums, or
            have hooks. Each is named.
    """

    def __init__(self, model: nn.Module, named: dict[str, nn.Parameter]):
        self.model = model
        self.named = {path: p for path, p in named.items() if is_distributed(p)}
        self.locals: dict[int, nn.Parameter] = {}
        self.forms: dict[str, Form] = {}
        self.within: dict[str, Within] = {}
        self.groups: tuple[Group, ...] = ()
        if not self.named:
            return
        self._check()
        self.forms = {path: Form.of(p) for path, p in self.named.items()}
        first = next(iter(self.forms.values()))
        self.groups = (group_for("zf.attach", first.mesh),)
        for path, p in named.items():
            self.within[path] = within_of(p.shape, self.forms.get(path), first.place)

    def _check(self) -> None:
        bad = [(path, why) for path, p in self.named.items() if (why := why_not_attachable(p)) is not None]
        meshes: list[Any] = [p.device_mesh for p in self.named.values()]  # type: ignore[attr-defined]
        if not bad:
            told = [(path, mesh.mesh.tolist()) for path, mesh in zip(self.named, meshes, strict=True)]
            bad = [(path, f"lies over ranks {x}, and {told[0][0]} over {told[0][1]}") for path, x in told]
            bad = [] if all(mesh == meshes[0] for mesh in meshes) else bad
        hooked = [path for path, p in self.named.items() if has_hooks(p)]
        bad += [(path, "has hooks, which are to be registered after zf.attach") for path in hooked]
        if bad:
            raise ValueError(bad_leaves("attach: DTensors that cannot be parameters of a pipeline", bad, CUT))

    def check_attached(self, in_backward: bool, made: bool) -> None:
        """Refuse `in_backward=True`, and `zf.materialize` (`made`), for such a model."""
        if self.named and (in_backward or made):
            how = "zf.materialize(model, tx)" if made else "zf.attach(model, tx, in_backward=True)"
            why = "a leaf's update would be made of what one rank has before the others have sent theirs"
            if made:
                why = "every rank would draw the same numbers for its part"
            rows = [(path, f"a DTensor: {why}") for path in self.named]
            raise ValueError(
                bad_leaves(f"{how} of a model that is itself cut over ranks", rows, "zf.attach(model, tx)")
            )

    def enter(self) -> None:
        """Exchange DTensors for local parameters."""
        for p in self.named.values():
            if id(p) not in self.locals:
                self.locals[id(p)] = _local(p, Form.of(p))
        self._exchange(dict(self.locals))

    def leave(self) -> None:
        """Put the DTensors back, with the values of the local parameters."""
        back: dict[int, nn.Parameter] = {}
        for path, p in self.named.items():
            mine = self.locals.get(id(p))
            if mine is not None and id(mine) not in back:
                back[id(mine)] = _distributed(p, mine, self.forms[path])
        self._exchange(back)
        self.locals.clear()

    def _exchange(self, new: dict[int, nn.Parameter]) -> None:
        for module in self.model.modules() if new else ():
            for name, p in list(registered(module)[0].items()):
                if id(p) in new:
                    setattr(module, name, new[id(p)])


def within_of(shape: torch.Size, form: Form | None, place: int) -> Within:
    """Where a leaf lies in its full tensor.

    Args:
        shape: of a leaf that all ranks have.
        form: of a leaf that tensor parallelism has made a DTensor; `None` for others.
        place: the index of this rank among those of tensor parallelism.
    """
    full = shape if form is None else form.shape
    boxes = (((0,) * len(full), tuple(full)),) if form is None else form.boxes
    cut = len(boxes) > 1
    return Within(full, boxes, place if cut else 0, cut or place == 0)


def _local(p: Any, form: Form) -> nn.Parameter:
    """A local parameter on the memory of a DTensor, which is left without memory."""
    mine = nn.Parameter(local_of(p).detach(), p.requires_grad)
    vars(mine).update(vars(p))
    if p.grad is not None:
        mine.grad = form.local(p.grad.detach())
        p.grad = None
    # Code that still has the DTensor finds neither numbers nor memory in it.
    set_local(p, torch.empty_like(local_of(p), device="meta"))
    if p.requires_grad:
        vars(p)["_zerofn_refusal"] = p.register_hook(_refuse)
    return mine


def _distributed(p: Any, mine: nn.Parameter, form: Form) -> nn.Parameter:
    refusal = vars(p).pop("_zerofn_refusal", None)
    if refusal is not None:
        refusal.remove()
    if mine.dtype == p.dtype:
        set_local(p, mine.detach())
    else:
        # A tensor cannot change its dtype.
        made = nn.Parameter(form.wrap(mine.detach()), mine.requires_grad)
        vars(made).update(vars(p))
        p = made
    if p.requires_grad != mine.requires_grad:
        p.requires_grad_(mine.requires_grad)
    if mine.grad is not None and mine.grad.dtype == p.dtype:
        p.grad = form.wrap(mine.grad)
    return p


def _refuse(g: Tensor) -> NoReturn:
    raise RuntimeError(
        explain(
            "a backward to a parameter from before zf.attach",
            "a model whose parameters are DTensors has others while it is attached, so this one is not trained",
            "model.get_parameter(path), or model.parameters() after zf.attach",
        )
    )


# ----------------------------------------------------------------------------------------------------------------------
# A `DTensorParameter` is a plain local tensor to this package, and a DTensor to everybody else.
#
# User code that reads such a parameter, computes with it or writes into it gets the DTensor that it was, over the same
# memory: `p.shape`, `p.norm()`, `p.mul_(2)`, `p.grad` and `model.state_dict()` are as before `zf.attach`. Under
# `shard` a rank has a flat shard of its local tensor: reading gives that shard, computing gives the DTensor of the
# gathered tensor, and writing is refused.
#
# This is a subclass because torch asks only the class of a tensor (`__torch_function__`) before a function runs on it.
# Keeping the DTensors would take a case in every function of the package that touches a parameter.


# Functions and attributes of the leaf of a graph, which runs them on the local tensor.
BEGINNINGS = ("is_", "has_", "register_post", "requires_grad", "retain")
ITSELF = PRIVATE | {"__set__", "__delete__", "__hash__", "__dir__", "backward", "get_device", "type"}
# Attributes that are the DTensor's: sizes, and the same numbers in another order.
GLOBAL = frozenset({"shape", "ndim", "nbytes", "T", "mT", "H", "mH", "real", "imag"})
OF_DISTRIBUTED = ("device_mesh", "full_tensor", "placements", "redistribute", "to_local")
LOOKING = SIZES | {"__repr__", "__format__"}


class DTensorParameter(GuardedParameter):
    """A local tensor that is a DTensor to everybody else.

    Attributes:
        form: the mesh and placement by which local tensors are one DTensor.
        whole: returns the DTensor, differentiable.
        in_parts: whether this rank has a flat shard of its local tensor.
    """

    form: Form
    whole: Callable[[], Tensor]
    in_parts: Callable[[], bool]

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Not traced: in a graph it would be the local tensor.
        with torch.DisableTorchFunctionSubclass():
            name = func.__name__.partition(".")[0]
            args, kwargs = (args, kwargs or {}) if args else first_by_position(kwargs or {})
            if in_memory(sys._getframe(1)) or _by_itself(func, name):
                return func(*args, **kwargs)
            if name == "register_hook":
                return func(args[0], args[0]._given(args[1]))
            if name == "grad":
                return shown_gradients(func, args, kwargs, sys._getframe(1))
            in_parts = args and isinstance(args[0], DTensorParameter) and args[0].in_parts()
            if in_parts and (name in LOOKING or name == "__get__"):
                return _look(func, name, args, kwargs)
            if name == "__repr__":
                # torch's function for tensors asks a DTensor for its elements.
                return repr(args[0].whole())
            if name == "detach":
                args[0]._check_new(sys._getframe(1))
                return args[0]._shown(func(*args, **kwargs), "p.detach()", sys._getframe(1))
            if in_place(name):
                return _write(func, name, args, kwargs)
            return func(*map(_whole, args), **{k: _whole(x) for k, x in kwargs.items()})

    detach = Tensor.detach

    def __getattr__(self, name: str) -> Any:
        # It has what only a DTensor has.
        if name in OF_DISTRIBUTED:
            return getattr(self.whole(), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _shown(self, x: Tensor, how: str, frame: FrameType) -> Tensor:
        if in_memory(frame):
            return x
        if self.in_parts():
            return opaque(x, self.told(how), self.form.shape)
        return self.form.wrap(x)

    def _own(self, value: Tensor | None, how: str, frame: FrameType) -> Tensor | None:
        value = plain(value)
        return value if value is None or self.in_parts() else self.form.local(value)

    def _given(self, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Wrap a hook on the gradient, so that it gets the value that `p.grad` will have."""
        if self.in_parts():
            return handed(hook, self.told("what a hook is given"), self.form.shape)
        form = self.form

        def local(g: Tensor) -> Tensor | None:
            out = hook(form.wrap(g))
            return None if out is None else form.local(out)

        return local

    def told(self, how: str) -> str:
        """What a part of it is called in messages."""
        return f"{how} of the sharded parameter {self.path}"

    def __deepcopy__(self, memo: dict) -> nn.Parameter:
        self._check_copied("copy.deepcopy(model)")
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.form.wrap(self.data.clone()), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._check_copied("torch.save(model, file)")
        return nn.Parameter(self.form.wrap(self.data), self.requires_grad).__reduce_ex__(protocol)

    def _check_copied(self, how: str) -> None:
        if self.in_parts():
            why = f"under shard {self.path} is this rank's flat part, and a copy would have no other"
            raise RuntimeError(explain(f"{how} of an attached sharded model", why, f"with opt.gathered(): {how}"))


def _by_itself(func: Any, name: str) -> bool:
    if name == "__get__":
        return func.__self__.__name__ not in GLOBAL
    return name in ITSELF or name.startswith(BEGINNINGS)


def _look(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Run a function that asks about a parameter of which this rank has a flat shard: sizes are the DTensor's."""
    p, attribute = args[0], func.__self__.__name__ if name == "__get__" else ""
    if name in SIZES or attribute in SIZES:
        return sizes(func, args, kwargs, p.form.shape)
    return printed(p, p.told("the values"), p.form.shape) if name == "__repr__" else func(*args, **kwargs)


def _whole(x: Any) -> Any:
    if isinstance(x, DTensorParameter):
        return x.whole()
    return type(x)(map(_whole, x)) if type(x) in (list, tuple) else x


def _write(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Write into the local memory, through a DTensor over it."""
    written = args[0] if type(args[0]) in (list, tuple) else [args[0]]
    for p in written:
        if isinstance(p, DTensorParameter) and (p.in_parts() or (p.requires_grad and torch.is_grad_enabled())):
            why = f"{p.path} is a leaf that requires a gradient"
            if p.in_parts():
                why = f"under shard this rank has a flat part of {p.path}, which is a DTensor over other ranks besides"
            right = f"with opt.gathered(), torch.no_grad(): p.{name}(...), on every rank"
            raise RuntimeError(explain(f"p.{name}(...) of an attached parameter", why, right))
    over = [p.form.wrap(p.detach()) if isinstance(p, DTensorParameter) else p for p in written]
    first = over[0] if written[0] is args[0] else over
    func(first, *map(_whole, args[1:]), **{k: _whole(x) for k, x in kwargs.items()})
    return args[0]


def shown_gradients(func: Any, args: tuple, kwargs: dict, frame: FrameType) -> tuple:
    """Run `torch.autograd.grad`: return each gradient as `p.grad` would be shown to the caller in `frame`."""
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    inputs = inputs if isinstance(inputs, Sequence) else [inputs]
    given = zip(inputs, func(*args, **kwargs), strict=True)
    return tuple(
        p._shown(g, "a gradient", frame) if isinstance(p, GuardedParameter) and g is not None else g for p, g in given
    )
