"""A sharded tensor outside of a block: a DTensor of which torch's functions give what they give of the whole.

Under `shard` the parameters of an attached model are `Face`s, and so are `p.data`, `p.detach()`, `p.grad`, the tensors
of `model.state_dict()` and those of `opt.state[p]`. A `Face` is a DTensor, `Shard(0)` in torch's chunks of rows.

Elementwise functions of Faces run on this rank's rows. A plain tensor beside one is taken for the whole. All else is
computed of gathered wholes, and gives a plain tensor, the same on all ranks. What autograd records is computed of
wholes too. Only `x.redistribute(...)` goes by torch's own rules for DTensors. By these rules `x.norm().item()` would be
this rank's alone, `x.data = y` would have no effect, `normal_` under one seed would give all ranks the same rows, a
plain tensor beside a DTensor would be an error, and a rank that asks alone would hang.

A gather is a collective in the middle of the user's code. Any rank may gather the values of a parameter alone: the
others join. Before the gather of anything else, such as a gradient, ranks meet, and a rank that asks alone raises.
Within backward, where ranks may come to a gather in different orders, it is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Partial as Unsummed

from .._compat.autograd import arguments_of_functions, in_backward
from .._compat.functorch import asked_by_compiler, functorch_active, uncompiled
from .._compat.tensors import (
    CONVERTING,
    asked_by_fully_shard,
    dispatched_in_python,
    local_of,
    memory,
    schema,
    set_local,
    spec_of,
    version,
)
from .._errors import explain
from ..core.layout import Leaf
from ..core.view import Wire, over_ranks
from ..ranks.dtensor import leave_group, mesh_of_group, why_not_of_this_rank
from .torch_functions import (
    COMPUTED,
    CONVERSIONS,
    FOREACH,
    FUSED,
    GIVING_MEMORY,
    NORMS,
    RANDOM,
    RESHAPES,
    first_by_position,
    from_init,
    in_place,
    looks,
    pointwise,
    tensors_in,
)

DETACH = torch.ops.aten.detach.default
APPLYING = CONVERTING.__code__
# The module of all-reduces, broadcasts and the like.
COLLECTIVES = "torch.distributed.distributed_c10d"
# Functions that torch does not run for tensor subclasses.
BY_VALUE = frozenset({"tolist", "numpy"})

# ----------------------------------------------------------------------------------------------------------------------
# `Gathering` all-gathers rows in the middle of user code.
#
# A rank can join the gather of a parameter at any line. It cannot join that of a gradient or of a result before it has
# computed it. So ranks meet first (`Rounds.meet`): a rank that asks alone raises, and all raise where they have come
# to different lines.
#
# The derivative of this gather averages the cotangents over ranks and shards the mean. Every rank computes the same
# from the full tensor, so a sum over ranks would count it once per rank. Each of the two is the other's derivative.


# By size in bytes, a dtype that every backend sends. Other integer dtypes are sent as these.
SENT_AS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


class Gathering:
    """Gathers rows of the leaves of one attached model.

    Args:
        wire: the wire that shards the leaves.
        meet: waits until all ranks have come to the line that its argument names, the same on all ranks; if one will
            not come, returns where the others are.
        left: whether the model is detached.

    Attributes:
        gathers: how many gathers there were, so that the derivatives of two of them have different names.
    """

    def __init__(self, wire: Wire, meet: Callable[[str], str], left: Callable[[], bool]):
        self.wire, self.meet, self.left = wire, meet, left
        self.gathers = 0
        self._meshes: dict[str, Any] = {}
        self._specs: dict[tuple, Any] = {}

    def placed(self, leaf: Leaf, local: Tensor) -> Any:
        """The mesh, the placement and the global shape of a leaf, as DTensors keep them."""
        key = (leaf.shape, local.dtype, local.device)
        if key not in self._specs:
            whole = torch.empty(leaf.shape, device="meta")
            # A 0-d tensor has no rows. The first rank has it, and the others have zeros.
            placement = Shard(0) if leaf.shape else Unsummed()
            local = local.detach().view(self.rows(leaf.shape)) if leaf.shape else local.new_zeros(())
            how: Any = dict(run_check=False, shape=whole.shape, stride=whole.stride())
            self._specs[key] = spec_of(DTensor.from_local(local, self._mesh(local), [placement], **how))
        return self._specs[key]

    def rows(self, shape: torch.Size) -> tuple[int, ...]:
        """The shape of this rank's rows of a leaf."""
        if not shape:
            return ()
        each = -(-shape[0] // self.wire.group.size)
        return (max(min(each, shape[0] - self.wire.group.rank * each), 0), *shape[1:])

    def _mesh(self, x: Tensor) -> Any:
        kind = x.device.type
        if kind not in self._meshes:
            self._meshes[kind] = mesh_of_group(self.wire.group, kind)
        return self._meshes[kind]

    def replicated(self, whole: Tensor) -> Any:
        """The same for a tensor that all ranks have."""
        key = (whole.shape, whole.stride(), whole.dtype, whole.device.type, None)
        if key not in self._specs:
            if len(self._specs) > 1000:
                self._specs.clear()
            mesh = self._mesh(whole)
            self._specs[key] = spec_of(DTensor.from_local(whole.detach(), mesh, [Replicate()], run_check=False))
        return self._specs[key]

    def gather(self, mine: Tensor, leaf: Leaf, asked: str) -> Tensor:
        """The full tensor.

        Args:
            mine: this rank's elements of the leaf, flat.
            leaf: the leaf.
            asked: the function that needs it, the same on all ranks.
        """
        self.meet_for(f"{asked} {mine.dtype}")
        self.gathers += 1
        # Training could not use a tensor that was made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            number = mine.is_floating_point() or mine.is_complex()
            sent = mine if number else mine.view(SENT_AS[mine.element_size()])
            # The tensor of a state may be in host memory.
            _, rows = self.wire.send_parts([sent.to(self.wire.group.device)], [leaf])
            (full,) = self.wire.join_parts(rows, [leaf])
            return full.view(mine.dtype).to(mine.device).view(leaf.shape)

    def mean(self, full: Tensor, leaf: Leaf, asked: str) -> Tensor:
        """This rank's elements of the mean over ranks of a full tensor, flat."""
        self.meet_for(asked)
        view = over_ranks(self.wire.on(self.wire.group, None), False)
        with torch.inference_mode(False), torch.no_grad():
            return view.pull(full, leaf).reshape(-1).to(full.dtype)

    def close(self) -> None:
        """Let go of the process group, once the model is detached."""
        for mesh in self._meshes.values():
            leave_group(mesh)

    def meet_for(self, asked: str) -> None:
        """Wait until all ranks have come to the same line.

        Raises:
            RuntimeError: one of them will not come, or the model was detached.
        """
        if self.left():
            why, right = "the model was detached, so these rows can no longer be gathered", "it before opt.detach()"
            raise RuntimeError(explain(f"{asked}, after opt.detach()", why, right))
        apart = self.meet(asked)
        if apart:
            why = f"under shard each has a part, and the whole is gathered from all: {apart}"
            right = "the same line on every rank, and what is done with its result on one:\n"
            right += "norm = p.grad.norm()\nif rank == 0: log(norm)"
            raise RuntimeError(explain(f"{asked}, which not all ranks ask for", why, right))


class Origin(NamedTuple):
    """The leaf that a `Face` shows, and how to gather it.

    Attributes:
        how: the expression by which the user got it, for messages.
        leaf: the leaf, with the shape of the Face: that of the parameter, or another one with as many rows.
        by: gathers it.
        whole: of a parameter, gathers the full one, differentiable; `None` for what is no parameter.
    """

    how: str
    leaf: Leaf
    by: Gathering
    whole: Callable[[], Tensor] | None = None

    def __str__(self) -> str:
        return f"{self.how} of the sharded parameter {self.leaf.path}"


# ----------------------------------------------------------------------------------------------------------------------
# `Face`. Operations of autograd in C++ come to its `__torch_dispatch__`, all others to `__torch_function__`.


@dispatched_in_python
class Face(DTensor):
    """This rank's rows of a leaf as a DTensor; or a tensor that all ranks have, which was computed of such.

    Attributes:
        of: what it is of; what all ranks have is of nothing, and has the place of what it was computed of.
        lent: whether it is a view of a gathered tensor, in which a write would be lost.
        node_is_known: whether user code has the autograd node that accumulates its gradient, and may have put a hook
            on it.
    """

    of: Origin
    lent = node_is_known = False

    @classmethod
    @uncompiled
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(_of_others(t) for t in types):
            return NotImplemented
        frame = sys._getframe(1)
        with torch.DisableTorchFunctionSubclass():
            if asked_by_compiler(frame):
                return func(*args, **kwargs or {})
            args, kwargs = (args, kwargs or {}) if args else first_by_position(kwargs or {})
            return _call(func, func.__name__.partition(".")[0], args, kwargs, frame)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is DETACH:
            # Autograd does this once for each leaf in each backward, so it is fast.
            (x,) = args
            made: Any = Face(local_of(x).detach(), spec_of(x), requires_grad=False)
            # The result may be a leaf. A graph from it must not lead to the parameter, so `whole` is left out.
            made.of, made.lent = x.of if x.of.whole is None else x.of._replace(whole=None), x.lent
            return made
        return _by_autograd(func, args, kwargs or {})

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """This rank's rows as a plain tensor, differentiable, as `DTensor.to_local`."""
        with torch.DisableTorchFunctionSubclass():
            if self.requires_grad and torch.is_grad_enabled():
                return ToLocal.apply(self)
            return local_of(self).view_as(local_of(self))

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The full tensor as a plain one, gathered and differentiable: every rank must call it."""
        with torch.DisableTorchFunctionSubclass():
            full = _whole(self, "full_tensor")
            # The full tensor of a parameter may be lazy. A copy gathers it.
            return full.clone() if self.lent or (self.of.whole is not None and not is_whole(self)) else full

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> Any:
        """A DTensor with other placements, as `DTensor.redistribute`; torch's own class, and torch's own rules."""
        with torch.DisableTorchFunctionSubclass():
            if not is_whole(self):
                _check_gather("redistribute", self)
                self.of.by.meet_for(f"redistribute of {self.of}")
            how: Any = dict(run_check=False, shape=self.shape, stride=self.stride())
            mine = DTensor.from_local(self.to_local(), self.device_mesh, self.placements, **how)
            return mine.redistribute(device_mesh, placements, **kwargs)

    # torch's DCP calls the next three methods to save and load a rank's part. It does not take `Partial`, the placement
    # of a 0-d tensor, so there the first rank saves it.

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        if self.dim():
            return super().__create_write_items__(fqn, object)
        from .._compat.checkpoint import items_to_write

        return items_to_write(fqn, self._number()) if flat(self).numel() else []

    def __create_chunk_list__(self) -> Any:
        if self.dim():
            return super().__create_chunk_list__()
        from .._compat.checkpoint import chunks_to_read

        return chunks_to_read(self._number()) if flat(self).numel() else []

    def __get_tensor_shard__(self, index: Any) -> Any:
        return super().__get_tensor_shard__(index) if self.dim() else self._number()

    def _number(self) -> Tensor:
        return local_of(self).detach()

    def set_(self, *source: Any, **more: Any) -> Tensor:
        # torch does not call `__torch_function__` for `set_`. Setting a parameter to itself (spectral_norm) is allowed.
        if not source or source[0] is not self:
            _refuse_set(self)
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch.DisableTorchFunctionSubclass():
            mine = local_of(self).detach()
            if is_whole(self):
                return repr(mine)
            low, high = self.of.by.wire.span(self.of.leaf)
            mine_in_words = f"elements {low} to {high - 1}" if high > low else "none"
            where = f"shape={tuple(self.shape)}, {self.placements[0]}, of which this rank has {mine_in_words}"
            return f"Face({self.of}, {where}:\n{mine!r})"

    def __deepcopy__(self, memo: dict) -> Any:
        with torch.DisableTorchFunctionSubclass():
            mine = local_of(self).detach().clone()
            return (
                mine if is_whole(self) else wrap(mine, self.of._replace(whole=None)).requires_grad_(self.requires_grad)
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_whole(self):
            refuse_memory(self)
        with torch.DisableTorchFunctionSubclass():
            return local_of(self).detach().clone().__reduce_ex__(protocol)


def _of_others(cls: Any) -> bool:
    """Whether another library's class of tensors is to answer."""
    how = cls.__torch_function__
    return not issubclass(cls, DTensor) and getattr(how, "__func__", how) not in PLAIN


# The `__torch_function__`s of plain tensors, parameters and DTensors.
PLAIN = (Tensor.__torch_function__.__func__, nn.Parameter.__torch_function__, DTensor.__torch_function__)  # type: ignore[attr-defined]


def wrap(local: Tensor, of: Origin, cls: type[Face] = Face, requires_grad: bool = False) -> Any:
    """A Face on the memory of this rank's elements of a leaf, flat or in the shape of its rows."""
    spec, rows = of.by.placed(of.leaf, local), of.by.rows(of.leaf.shape)
    if not rows and not local.numel():
        local = local.new_zeros(())
    mine = local if local.shape == rows else local.view(rows)
    # torch's constructor does one thing more: it keeps itself out of graphs, which takes longer than making the tensor.
    made: Any = cls.__new__(cls, mine, spec, requires_grad=requires_grad)
    made.of = of
    return made


def _replicated(whole: Tensor, of: Origin, lent: bool) -> Any:
    made: Any = Face(whole, of.by.replicated(whole), requires_grad=False)
    made.of, made.lent = of, lent
    return made


def is_whole(x: Any) -> bool:
    """Whether a Face is one that all ranks have."""
    return spec_of(x).placements[0].is_replicate()


def flat(x: Any) -> Tensor:
    """This rank's elements of a Face, flat, on the same memory."""
    local = local_of(x)
    if not local.dim() and not is_whole(x) and x.of.by.wire.group.rank:
        return local.new_empty(0)
    return local.reshape(-1)


def as_torchs(x: Any) -> Any:
    """A Face as a DTensor of torch's own class on the same memory, which may be pickled."""
    mine = local_of(x).detach()
    how: Any = dict(run_check=False, shape=x.shape, stride=x.stride())
    return DTensor.from_local(mine, x.device_mesh, x.placements, **how)


def local_shard(x: Any) -> Any:
    """This rank's elements of a Face, flat and differentiable; anything else as it is."""
    if not isinstance(x, Face):
        return x
    with torch.DisableTorchFunctionSubclass():
        return x.to_local().reshape(-1)[: flat(x).numel()] if x.requires_grad else flat(x)


# ----------------------------------------------------------------------------------------------------------------------
# These functions gather a Face, or take its local rows, each with a derivative.


class GatherRows(Function):
    """Gathers a Face to the full tensor; its derivative is `MeanOfWholes`."""

    @staticmethod
    def forward(x: Any, asked: str) -> Tensor:
        return x.of.by.gather(flat(x).detach(), x.of.leaf, asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, asked = inputs
        ctx.of = x.of
        ctx.asked = f"the derivative of {asked} (gather {x.of.by.gathers})"

    @staticmethod
    @uncompiled
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        return MeanOfWholes.apply(g, ctx.of, ctx.asked), None


class MeanOfWholes(Function):
    """Averages cotangents of full tensors over ranks, and keeps this rank's rows; its derivative is `GatherRows`."""

    @staticmethod
    def forward(g: Tensor, of: Origin, asked: str) -> Tensor:
        return wrap(of.by.mean(g, of.leaf, asked), of._replace(how="a gradient", whole=None))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.of, ctx.asked = inputs

    @staticmethod
    @uncompiled
    def backward(ctx: Any, v: Any) -> tuple:  # type: ignore[override]
        return GatherRows.apply(_as_face(v, ctx.of), f"the derivative of {ctx.asked}"), None, None


class ToLocal(Function):
    """This rank's rows of a Face; its derivative is `FromLocal`."""

    @staticmethod
    def forward(x: Any) -> Tensor:
        return local_of(x).view_as(local_of(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.x = inputs[0]
        ctx.of = None if is_whole(ctx.x) else ctx.x.of

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        if (ctx.of is None) != is_whole(ctx.x):
            since = "opt.gathered()" if ctx.of is not None else "the end of opt.gathered()"
            why = "its gradients have other sizes than the parameters have now"
            right = f"all backwards of a graph before {since}, or the forward again after it"
            raise RuntimeError(explain(f"backward through a graph from before {since}", why, right))
        return g if ctx.of is None else FromLocal.apply(g, ctx.of)


class FromLocal(Function):
    """A Face of this rank's rows; its derivative is `ToLocal`."""

    @staticmethod
    def forward(rows: Tensor, of: Origin) -> Any:
        return wrap(rows.contiguous(), of._replace(how="a gradient", whole=None))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.of = inputs[1]

    @staticmethod
    def backward(ctx: Any, v: Any) -> tuple:  # type: ignore[override]
        return _as_face(v, ctx.of).to_local(), None


def _as_face(x: Tensor, of: Origin) -> Any:
    """A cotangent as a Face: autograd may bring a plain tensor, which is the whole."""
    return x if isinstance(x, Face) else wrap(rows_of(x, of).clone(memory_format=torch.contiguous_format), of)


def _whole(x: Any, asked: str) -> Tensor:
    """The full tensor of a Face, differentiable."""
    if is_whole(x):
        return x.to_local() if x.requires_grad else local_of(x)
    if x.of.whole is not None:
        _check_no_argument()
        return x.of.whole()
    _check_gather(asked, x)
    if x.requires_grad and torch.is_grad_enabled():
        return GatherRows.apply(x, f"{asked} of {x.of}")
    return x.of.by.gather(flat(x).detach(), x.of.leaf, f"{asked} of {x.of}")


def rows_of(whole: Tensor, of: Origin) -> Tensor:
    """This rank's rows of a tensor that broadcasts to the full shape, a view; of a number, zero on other ranks."""
    shape, group = of.leaf.shape, of.by.wire.group
    if not shape:
        return torch.zeros_like(whole) if group.rank else whole
    each = -(-shape[0] // group.size)
    low, high = (min(i * each, shape[0]) for i in (group.rank, group.rank + 1))
    return whole.expand(shape)[low:high]


def _check_gather(asked: str, x: Any) -> None:
    if in_backward():
        why = "the whole of it is gathered, for which ranks would wait for each other: in the middle of\n"
        why += "backward one of them may never come to it"
        right = 'opt.metrics["grad_norm"] after opt.step(), which is that of the whole; or it after backward;\n'
        right += "zf.clip_by_global_norm(max_norm), or a zf.leafwise function of whole gradients, in the chain\n"
        right += "x.to_local() for this rank's rows by themselves"
        raise RuntimeError(explain(f"{asked} of {x.of}", why, right))
    _check_no_argument()


def _check_no_argument() -> None:
    """Refuse to gather inside an `autograd.Function` that is given a Face and has to return its gradient."""
    for x in arguments_of_functions():
        if isinstance(x, Face) and x.requires_grad and not is_whole(x):
            why = "under shard its gradient is sharded, and the function's backward would give that of the whole"
            right = "Function.apply(x, p.clone()): the whole, at every stage; where a library calls it (gpytorch),\n"
            right += "zf.attach of a module whose forward calls that model: inside of a call parameters are whole"
            raise RuntimeError(explain(f"an autograd.Function that is given {x.of}", why, right))


def _refuse_set(x: Any) -> NoReturn:
    """Refuse what exchanges a tensor's memory, as parametrizations with a `right_inverse` do."""
    why = "it gives the tensor other memory, and under shard the optimizer updates the present memory"
    right = "x.copy_(y); p.grad = y; p.data = y"
    if x.of.whole is not None:
        right = "torch.nn.utils.parametrize and parametrizations before zf.attach, or after opt.detach();\n"
        right += "to write values alone, with torch.no_grad(): p.copy_(x)"
    raise RuntimeError(explain(f"x.set_(y) of {x.of}", why, right))


def refuse_memory(x: Any) -> NoReturn:
    """Raise for a function that exposes memory: its caller would take this rank's rows for the full tensor."""
    raise RuntimeError(
        explain(
            f"saving {x.of}",
            "its tensors are this rank's shards",
            "with opt.gathered(): torch.save(model.state_dict(), file), on every rank\n"
            "dcp.async_save(get_model_state_dict(model), ...): of torch.distributed.checkpoint, on every rank\n"
            "zf.export_safetensors(path, opt.state), or zf.save(directory, opt) to go on from\n"
            "x.full_tensor() for the whole, on every rank; x.to_local() for this rank's rows by themselves",
        )
    )


def refuse_fully_shard(x: Any) -> NoReturn:
    """Raise where `fully_shard` is about to shard a parameter. Its own error would be one of meshes."""
    raise RuntimeError(
        explain(
            "fully_shard(model) after zf.attach(model, tx)",
            f"shard has sharded the parameter {x.of.leaf.path} already, and FSDP2 would shard its rows once more",
            "fully_shard(block) of each block and fully_shard(model) first, then zf.attach(model, tx) with a tx\n"
            "without shard; or zf.attach(model, zf.chain(zf.shard(), ...)) alone, which replaces fully_shard",
        )
    )


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
            self.watch = p.register_hook(self.arrives)

    def arrives(self, g: Tensor | None) -> None:
        self.came = g is not None

    def __call__(self, p: Tensor) -> None:
        if self.came:
            self.hook(p)


# ----------------------------------------------------------------------------------------------------------------------
# These functions run a torch function that is given Faces.


def _call(func: Any, name: str, args: tuple, kwargs: dict, frame: Any) -> Any:
    """Run a torch function that is given a Face."""
    if name in ("__get__", "__set__"):
        return _attribute(func, name, args)
    if name == "__format__":
        return func(_whole(args[0], name), *args[1:]) if args[1] or is_whole(args[0]) else repr(args[0])
    faces = [x for x in tensors_in((*args, *kwargs.values())) if isinstance(x, Face)]
    if name == "storage_offset":
        return 0
    if name == "is_same_size":
        return args[0].shape == (args[1] if args[1:] else kwargs["other"]).shape
    if name == "register_hook":
        return func(args[0], Handed(args[1]))
    if name == "register_post_accumulate_grad_hook":
        return func(args[0], AfterGradients(args[1], args[0]))
    if looks(name):
        # `fully_shard` calls this for every parameter before it changes any.
        if name == "is_contiguous" and asked_by_fully_shard(frame):
            refuse_fully_shard(args[0])
        return func(*args, **kwargs)
    if name == "detach":
        # It is detached above autograd, so that both tensors have one count of writes.
        return same(local_of(faces[0]).detach(), faces[0], "x.detach()")
    if name in GIVING_MEMORY:
        return func(_whole(args[0], name), *args[1:], **kwargs) if is_whole(args[0]) else refuse_memory(args[0])
    if name == "share_memory_":
        _refuse_sharing(args[0])
    if name.startswith("new_"):
        return func(*[local_of(x) if isinstance(x, Face) else x for x in args], **kwargs)
    writes = in_place(name) or kwargs.get("out") is not None
    if name.startswith(FOREACH) and kwargs.get("out") is None:
        # Lists run one tensor after the other, so that only two full tensors are in memory, and not a model.
        found = [_call_one(func, name, column, kwargs, writes, frame) for column in _columns(args)]
        return args[0] if writes else tuple([x for (x,) in found])
    return _call_one(func, name, args, kwargs, writes, frame)


def _call_one(func: Any, name: str, args: tuple, kwargs: dict, writes: bool, frame: Any) -> Any:
    """Run a torch function of one tensor of each list, if it takes lists."""
    faces = [x for x in tensors_in((*args, *kwargs.values())) if isinstance(x, Face)]
    if not faces:
        return func(*args, **kwargs)
    args, kwargs = _exchanged(name, args, kwargs, faces[0])
    if name.endswith("_like") and isinstance(args[0], Face) and not is_whole(args[0]):
        return _like(func, name, args, kwargs)
    if name in CONVERSIONS and not writes:
        return _converted(func, name, args, kwargs, frame)
    if name in RESHAPES and isinstance(args[0], Face) and not is_whole(args[0]):
        found = _reshaped(func, args, kwargs)
        if found is not None:
            return found
    if writes:
        return _write(func, name, args, kwargs)
    if pointwise(name) and not (name == "where" and len(args) + len(kwargs) == 1) and not _records(args, kwargs):
        found = _elements(func, name, args, kwargs)
        if found is not None:
            return found[0]
    if name == "__getitem__" and isinstance(args[0], Face) and args[0].dim() and _all_of_it(args[1]):
        return same(args[0].detach(), args[0]) if not _records(args, kwargs) else _whole(args[0], name)
    return _computed(func, name, args, kwargs)


def _records(args: tuple, kwargs: dict) -> bool:
    """Whether autograd, or a transform of torch.func, differentiates a function of these arguments."""
    if functorch_active():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in((*args, *kwargs.values())))


def _map(fn: Callable[[Any], Any], x: Any) -> Any:
    """`fn` of each tensor among arguments, in lists and dicts too."""
    if isinstance(x, Tensor):
        return fn(x)
    if type(x) is tuple or isinstance(x, list):
        mapped = [_map(fn, y) for y in x]
        return tuple(mapped) if type(x) is tuple else mapped
    if type(x) is dict:
        return {k: _map(fn, y) for k, y in x.items()}
    return x


def same(local: Any, like: Any, how: str = "") -> Any:
    """A Face of the same leaf as another one: of a DTensor, or of this rank's rows.

    Args:
        local: the memory.
        like: the other one.
        how: the expression by which the user gets it, for messages.
    """
    if isinstance(local, Face):
        return local
    local = local_of(local) if isinstance(local, DTensor) else local
    if is_whole(like):
        return _replicated(local, like.of, like.lent)
    return wrap(local, like.of._replace(whole=None, how=how or like.of.how))


def _attribute(func: Any, name: str, args: tuple) -> Any:
    attribute = func.__self__.__name__
    x = args[0]
    if name == "__get__":
        if attribute in COMPUTED:
            return _computed(func, attribute, args, {})
        return same(local_of(x).detach(), x, "x.data") if attribute == "data" else func(*args)
    if attribute == "data":
        set_data(x, args[1])
        return None
    if attribute == "grad":
        value = args[1] if len(args) > 1 else None
        return func(x, value if value is None else own_face(x, value, "x.grad = y"))
    return func(*args)


def set_data(x: Any, value: Any, how: str = "x.data = y") -> None:
    """Run `x.data = value`: the Face takes the memory of another Face, or of this rank's rows of a full tensor."""
    mine = local_of(x)
    if (
        isinstance(value, Tensor)
        and type(value) is Tensor
        and value.data_ptr() == mine.data_ptr()
        and value.shape == mine.shape
    ):
        return
    value = own_face(x, value, how)
    if value.dtype != x.dtype or value.device != x.device:
        got, has = (f"{y.dtype} on {y.device}" for y in (value, x))
        right = "opt.detach() before model.to(...) and zf.attach after it; with opt.gathered(): p.copy_(values)"
        raise RuntimeError(explain(f"other data for {x.of}: {got} in place of {has}", "it is stored so", right))
    set_local(x, local_of(value).detach())


def own_face(x: Any, value: Any, how: str) -> Any:
    """A value that the user assigns in the place of a Face, as a Face like it. It may be a full tensor or a DTensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{how} of {x.of}: a tensor is expected, and this is {type(value).__name__}")
    if isinstance(value, DTensor) and not isinstance(value, Face):
        value = _of_dtensor(value, x, how)
    if isinstance(value, Face) and value.shape == x.shape and is_whole(value) == is_whole(x):
        return value if type(value) is Face else same(local_of(value).detach(), x)
    if value.shape != x.shape:
        why = f"it is of the whole's shape, {tuple(x.shape)}, as at any other stage"
        raise RuntimeError(explain(f"{how} of shape {tuple(value.shape)} for {x.of}", why, "a tensor of that shape"))
    full = _whole(value, how) if isinstance(value, Face) else value
    if is_whole(x):
        return _replicated(full.detach(), x.of, False)
    return wrap(rows_of(full.detach(), x.of).clone(memory_format=torch.contiguous_format), x.of._replace(whole=None))


def _all_of_it(index: Any) -> bool:
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _exchanged(name: str, args: tuple, kwargs: dict, face: Any) -> tuple[tuple, dict]:
    """The arguments with Faces in the place of other DTensors."""
    if all(isinstance(x, Face) or not isinstance(x, DTensor) for x in tensors_in((*args, *kwargs.values()))):
        return args, kwargs
    taken = lambda x: _of_dtensor(x, face, name) if isinstance(x, DTensor) and not isinstance(x, Face) else x  # noqa: E731
    return _map(taken, args), _map(taken, kwargs)


def _of_dtensor(x: Any, beside: Any, name: str) -> Any:
    """A DTensor of torch's as a Face on its memory, if it lies like one; what all ranks have as a plain tensor."""
    spec, recorded = spec_of(beside), x.requires_grad and torch.is_grad_enabled()
    lies = f"over ranks {x.device_mesh.mesh.tolist()} as {', '.join(map(str, x.placements))}"
    if (why := why_not_of_this_rank(x)) is None and x.device_mesh.mesh.equal(spec.mesh.mesh):
        if spec_of(x).placements == spec.placements and x.shape == beside.shape and not recorded:
            return same(local_of(x).detach(), beside)
        if all(placement.is_replicate() for placement in x.placements):
            return x.to_local()
    raise RuntimeError(
        explain(
            f"{name} of {beside.of}, {tuple(beside.shape)}, and a DTensor of shape {tuple(x.shape)} {lies}",
            f"it has {why}" if why is not None else "it is cut otherwise, or a graph is recorded of it",
            "x.redistribute(p.device_mesh, p.placements), or x.full_tensor(), on every rank of the DTensor",
        )
    )


def _elements(func: Any, name: str, args: tuple, kwargs: dict) -> list[Any] | None:
    """Run an elementwise function on this rank's rows, and return its result in a list; `None` where that would not do.

    Faces are of one shape, and other tensors broadcast to it.
    """
    tensors = [*tensors_in((*args, *kwargs.values()))]
    like = next((x for x in tensors if isinstance(x, Face) and not is_whole(x)), None)
    if (
        like is None
        or not all(_stays(x, like) for x in tensors)
        or (_beside_a_full(tensors, like) and not in_backward())
    ):
        return None
    out = func(*_map(lambda x: _mine(x, like), args), **_map(lambda x: _mine(x, like), kwargs))
    # torch also calls comparisons such as `equal` elementwise, which return one answer.
    if not isinstance(out, Tensor) and type(out) not in (list, tuple):
        return None
    return [_map(lambda y: _settled(wrap(y.contiguous(), like.of._replace(whole=None))), out)]


def _beside_a_full(tensors: list[Tensor], like: Any) -> bool:
    """Whether one operand is a plain tensor of the full shape, as in `average.data * 0.9 + p.data * 0.1`.

    That result is gathered, since the next line often is `average.data = result`: `average` is a plain tensor, so torch
    asks no subclass, gives it the memory of a shard that it cannot read, and the process dies at the next use. A hook
    on a parameter may not gather, and returns its result to the Face.
    """
    return any(not isinstance(x, Face) and x.shape == like.shape for x in tensors)


def _stays(x: Any, like: Any) -> bool:
    """Whether an operand broadcasts to the shape of a Face, so that rows of the result are those of the operands."""
    if isinstance(x, Face) and not is_whole(x):
        return x.shape == like.shape and x.of.by.wire.group.ranks == like.of.by.wire.group.ranks
    shape, whole = x.shape, like.shape
    aligned = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(own in (1, size) for own, size in aligned)


def _mine(x: Any, like: Any) -> Tensor:
    """An operand beside this rank's rows of a Face."""
    local = local_of(x) if isinstance(x, Face) else x
    if (isinstance(x, Face) and not is_whole(x)) or not local.dim():
        return local
    return rows_of(local, like.of)


def _settled(x: Any) -> Any:
    """A number lies on the first rank, and the others have zeros, whatever was computed of them."""
    if not x.shape and not is_whole(x) and x.of.by.wire.group.rank:
        local_of(x).zero_()
    return x


def _columns(args: tuple) -> Iterator[tuple]:
    """The arguments of a `foreach` function for each tensor of its lists, as lists of one element."""
    longest = max((len(x) for x in args if type(x) in (list, tuple)), default=0)
    for i in range(longest):
        yield tuple(type(x)(x[i : i + 1]) if type(x) in (list, tuple) else x for x in args)


def _like(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Run `zeros_like` and the like, which give a Face. Random numbers are drawn for the whole, as in one process."""
    x = args[0]
    requires_grad = kwargs.pop("requires_grad", False)
    of = x.of._replace(how=f"{name}(...)", whole=None)
    if name.startswith("rand"):
        drawn = func(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args[1:], **kwargs)
        return wrap(rows_of(drawn, of).clone(memory_format=torch.contiguous_format), of).requires_grad_(requires_grad)
    mine = func(local_of(x), *args[1:], **kwargs)
    return _settled(wrap(mine.contiguous(), of)).requires_grad_(requires_grad)


def _converted(func: Any, name: str, args: tuple, kwargs: dict, frame: Any) -> Any:
    """Run `clone`, `to` and the like. `model.to(...)` of what the parameters are already changes nothing."""
    x = args[0]
    if not isinstance(x, Face):
        return func(x, *[local_of(y).new_empty(0) if isinstance(y, Face) else y for y in args[1:]], **kwargs)
    if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        return _computed(func, name, args, kwargs)
    local = local_of(x).detach()
    out = func(local, *[local_of(y) if isinstance(y, Face) else y for y in args[1:]], **kwargs)
    nothing = out is local or (name != "clone" and out.dtype == local.dtype and out.device == local.device)
    if _applied(frame):
        # torch would replace the parameter object, because the result is no plain tensor.
        if not nothing:
            got, has = (f"{y.dtype} on {y.device}" for y in (out, local))
            right = "opt.detach() before model.to(...) and zf.attach after it; with opt.gathered(): p.copy_(values)"
            why = "under shard it holds this rank's rows, in the dtype and on the device it was attached with"
            raise RuntimeError(explain(f"other data for {x.of}: {got} in place of {has}", why, right))
        return local_of(x)
    if nothing and not kwargs.get("copy", len(args) > 3 and isinstance(args[-2], bool) and args[-1]):
        return x
    if _records(args, kwargs):
        return _computed(func, name, args, kwargs)
    return same(out, x)


def _applied(frame: Any) -> bool:
    """Whether `nn.Module._apply` converts parameters, by a function that it is given."""
    return frame.f_code is APPLYING or (frame.f_back is not None and frame.f_back.f_code is APPLYING)


def _reshaped(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run `view`, `reshape` and the like where the sizes stay; `None` elsewhere.

    The result has the same memory. It is in the graph, as `p.view_as(p)` is by which programs find the AccumulateGrad
    node of `p`.
    """
    x, *rest = args
    if any(isinstance(y, torch.dtype) for y in (*rest, *kwargs.values())):
        return None
    on_meta = lambda y: torch.empty(y.shape, dtype=y.dtype, device="meta")  # noqa: E731
    if func(on_meta(x), *_map(on_meta, tuple(rest)), **_map(on_meta, kwargs)).shape != x.shape:
        return None
    if not _records(args, kwargs):
        return same(local_of(x), x)
    x.node_is_known = True
    return Tensor.view_as(x, x)


def _computed(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    faces = [x for x in tensors_in((*args, *kwargs.values())) if isinstance(x, Face)]
    if not faces:
        return func(*args, **kwargs)
    given: dict[int, Tensor] = {}

    def whole(x: Tensor) -> Tensor:
        if not isinstance(x, Face):
            return x
        if id(x) not in given:
            given[id(x)] = _whole(x, name)
        return given[id(x)]

    wholes, named = _map(whole, args), _map(whole, kwargs)
    before = {key: _version(x) for key, x in given.items()}
    records = _records(wholes, named)
    if name in BY_VALUE:
        # The full tensor of a parameter may be lazy. A copy gathers it.
        wholes = (wholes[0].clone(), *wholes[1:])
    out = func(*wholes, **named)
    # Collectives write into their first or second argument, without a change of its version.
    sends = getattr(func, "__module__", None) == COLLECTIVES
    if sends and callable(wait := getattr(out, "wait", None)):
        wait()
    for x in faces:
        full = given[id(x)]
        if (sends and full.shape == x.shape) or _version(full) != before[id(x)]:
            if x.requires_grad and torch.is_grad_enabled():
                _refuse_write(name, x)
            with torch.no_grad():
                local_of(x).copy_(full if is_whole(x) else rows_of(full.detach(), x.of))
    if records:
        return out
    # Inside `opt.gathered()` parameters are whole, and a write into a view of one is stored: views are no lent memory.
    shared = {memory(given[id(x)]) for x in faces if x.lent or not is_whole(x)} - {0}
    norm = name in NORMS or all(is_whole(x) for x in faces)

    def shown(y: Tensor) -> Tensor:
        if type(y) is not Tensor or y.requires_grad:
            return y
        view = memory(y) in shared
        return _replicated(y, faces[0].of, view) if view or norm else y

    return _map(shown, out)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else version(x)


# ----------------------------------------------------------------------------------------------------------------------
# These functions run a torch function that writes into Faces.


def _write(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Run a function that writes into its first argument, or into `out`."""
    out = kwargs.get("out")
    target = args[0] if out is None else out
    if type(target) in (list, tuple) and not (name.startswith(FOREACH) and out is None):
        if pointwise(name) and _write_elements(func, name, args, kwargs, target):
            return target
        if out is None:
            faces = [x for x in tensors_in(target) if isinstance(x, Face)]
            _refuse_list(name, faces)
        return _computed(func, name, args, kwargs)
    return _write_one(func, name, args, kwargs)


def _write_one(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    out = kwargs.get("out")
    target = args[0] if out is None else out
    inner: Any = target[0] if type(target) in (list, tuple) else target
    if not isinstance(inner, Face):
        _computed(func, name, args, kwargs)
        return target
    if inner.requires_grad and torch.is_grad_enabled() and not from_init(func):
        _refuse_write(name, inner)
    if is_whole(inner):
        if inner.lent:
            _refuse_lent(name)
        with torch.no_grad():
            all_of = lambda x: local_of(x) if x is inner else _whole(x, name) if isinstance(x, Face) else x  # noqa: E731
            func(*_map(all_of, args), **_map(all_of, kwargs))
        return target
    others = tensors_in((*args[1:], *kwargs.values()))
    if any(x.requires_grad for x in others) and torch.is_grad_enabled():
        # The write is not recorded, as torch records none in `p.grad`.
        with torch.no_grad():
            return _write_one(func, name, args, kwargs)
    drawn = name in RANDOM or from_init(func)
    alone = not drawn and (pointwise(name) or (name == "__setitem__" and _all_of_it(args[1])))
    if alone and _write_elements(func, name, args, kwargs, [inner]):
        return target
    with torch.no_grad():
        if drawn or out is not None:
            whole = torch.empty(inner.shape, dtype=inner.dtype, device=inner.device)
        else:
            whole = _whole_stored(inner, name)
        swap = lambda x: whole if x is inner else _whole(x, name) if isinstance(x, Face) else x  # noqa: E731
        func(*_map(swap, args), **_map(swap, kwargs))
        if whole.shape != inner.shape:
            _refuse_write(name, inner)
        local_of(inner).copy_(rows_of(whole, inner.of))
    return target


def _whole_stored(x: Any, name: str) -> Tensor:
    """The full tensor of what a Face has now, in memory of its own."""
    _check_gather(name, x)
    return x.of.by.gather(flat(x).detach(), x.of.leaf, f"{name} of {x.of}")


def _write_elements(func: Any, name: str, args: tuple, kwargs: dict, targets: Any) -> bool:
    """Run a function that writes elementwise into Faces on this rank's rows; `False` where that would not do."""
    likes = [x for x in tensors_in(targets) if isinstance(x, Face) and not is_whole(x)]
    if len(likes) < len([*tensors_in(targets)]) or any(x.requires_grad and torch.is_grad_enabled() for x in likes):
        return False
    tensors = [*tensors_in((*args, *kwargs.values()))]
    if len(likes) > 1:
        # The lists must have a Face in each place, beside 0-d tensors.
        if not all(isinstance(x, Face) or not x.dim() for x in tensors):
            return False
    elif not all(_stays(x, likes[0]) for x in tensors):
        return False
    with torch.no_grad():
        func(*_map(lambda x: _mine(x, likes[0]), args), **_map(lambda x: _mine(x, likes[0]), kwargs))
        if name in FUSED:
            # torch counts no write of these kernels, so a gathered copy would seem up to date.
            increment_version([local_of(x) for x in likes])
        for x in tensors:
            if isinstance(x, Face):
                _settled(x)
    return True


def _refuse_write(name: str, x: Any) -> NoReturn:
    why = "autograd would have to record the write, and only this rank's rows are stored"
    raise RuntimeError(explain(f"{name} of {x.of}, which requires grad", why, f"with torch.no_grad(): x.{name}(...)"))


def _refuse_list(name: str, faces: list) -> NoReturn:
    raise RuntimeError(
        explain(
            f"{name} into {faces[0].of if faces else 'tensors'} and others",
            "under shard each tensor is a shard, and zerofn does not know what this function does to a list of shards",
            'a transform in the chain of zf.attach; for torch.amp.GradScaler, zf.scale_loss("dynamic")',
        )
    )


def _refuse_sharing(x: Any) -> NoReturn:
    raise RuntimeError(
        explain(
            f"model.share_memory(), or x.share_memory_(), of {x.of}",
            "its memory has this rank's rows, and another process would take them for the full tensor",
            "with opt.gathered(): shared = copy.deepcopy(model).share_memory(), a copy for other processes",
        )
    )


def _refuse_lent(name: str) -> NoReturn:
    raise RuntimeError(
        explain(
            f"{name} of a view of what was gathered",
            "p.grad[index], p.data.T and opt.state[p][name][index] of a shard are made of all ranks' shards,\n"
            "and what is written into them would be lost",
            "p.grad[index] = new, or x[index] = x[index] + 1 in place of x[index] += 1, on every rank;\n"
            "x.clone() for a tensor of one's own; for torch.optim.Muon, zf.muon(lr) in the chain of zf.attach",
        )
    )


# ----------------------------------------------------------------------------------------------------------------------
# Autograd itself adds, detaches and copies gradients that are Faces. These functions run its operators.


# Operators whose result has elements in the same places.
ALIKE = frozenset({"_to_copy", "alias", "clone", "copy_", "detach", "empty_like", "ones_like", "zeros_like"})
VIEWS = frozenset({"_unsafe_view", "expand", "view"})


def _by_autograd(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator below autograd."""
    name = schema(func).name.partition("::")[2]
    faces = [x for x in tensors_in((*args, *kwargs.values())) if isinstance(x, Face)]
    like = next((x for x in faces if not is_whole(x)), faces[0])
    if name in VIEWS and tuple(args[1]) == tuple(like.shape):
        return same(local_of(like).view_as(local_of(like)), like)
    if name == "new_empty_strided" and tuple(args[1]) == tuple(like.shape):
        # Autograd copies a gradient that somebody else holds into such a tensor.
        return same(local_of(like).new_empty(local_of(like).shape, dtype=kwargs.get("dtype")), like)
    if name not in ALIKE and not pointwise(name):
        raise NotImplementedError(
            explain(
                f"{name} of {like.of}, below autograd",
                "it was not called by a function of torch, and on this rank's rows it would give another result",
                "x.full_tensor(), which every rank calls; x.to_local() for this rank's rows by themselves",
            )
        )
    own = lambda x: local_of(x) if isinstance(x, Face) and is_whole(like) else _mine(x, like)  # noqa: E731
    out = func(*_map(own, args), **_map(own, kwargs))
    if in_place(name):
        return args[0]
    return _map(lambda y: _settled(same(y, like)) if y.shape == local_of(like).shape else y, out)
