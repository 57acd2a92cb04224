"""`Gathering` all-gathers rows of parameters, gradients and states in the middle of user code.

A rank can join the gather of a parameter at any line. It cannot join that of a gradient or of a result before it has
computed it. So ranks meet first (`Rounds.meet`): a rank that asks alone raises, and all raise where they have come
to different lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Partial as Unsummed

from .._compat.functorch import uncompiled
from .._compat.tensors import spec_of
from .._errors import explain
from ..core.layout import Leaf
from ..core.view import Wire, over_ranks
from ..ranks.dtensor import leave_group, mesh_of_group

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

    def placed(self, leaf: Leaf, local: Tensor) -> tuple[Any, tuple[int, ...]]:
        """A leaf's mesh, placement and global shape, as DTensors keep them; and the shape of this rank's rows."""
        key = (leaf.shape, local.dtype, local.device)
        if key not in self._specs:
            whole = torch.empty(leaf.shape, device="meta")
            # A 0-d tensor has no rows. The first rank has it, and the others have zeros.
            placement = Shard(0) if leaf.shape else Unsummed()
            rows = self.rows(leaf.shape)
            local = local.detach().view(rows) if leaf.shape else local.new_zeros(())
            how: Any = dict(run_check=False, shape=whole.shape, stride=whole.stride())
            self._specs[key] = spec_of(DTensor.from_local(local, self._mesh(local), [placement], **how)), rows
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

    def whole(self, mine: Tensor, leaf: Leaf, asked: str) -> Tensor:
        """The full tensor, differentiable; the arguments are those of `gather`."""
        if mine.requires_grad and torch.is_grad_enabled():
            return _Gather.apply(mine, leaf, self, asked)  # type: ignore[return-value]
        return self.gather(mine.detach(), leaf, asked)

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


# The derivative of a gather averages the cotangents over ranks and shards the mean. Every rank computes the same from
# the full tensor, so a sum over ranks would count it once per rank. Each of the two is the other's derivative.


class _Gather(Function):
    @staticmethod
    def forward(mine: Tensor, leaf: Leaf, by: Gathering, asked: str) -> Tensor:
        return by.gather(mine, leaf, asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.leaf, ctx.by, asked = inputs
        ctx.asked = f"the derivative of {asked} (gather {ctx.by.gathers})"

    @staticmethod
    @uncompiled
    def backward(ctx: Any, g: Tensor) -> tuple:  # type: ignore[override]
        return _Mean.apply(g, ctx.leaf, ctx.by, ctx.asked), None, None, None


class _Mean(Function):
    @staticmethod
    def forward(full: Tensor, leaf: Leaf, by: Gathering, asked: str) -> Tensor:
        return by.mean(full, leaf, asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.leaf, ctx.by, ctx.asked = inputs

    @staticmethod
    @uncompiled
    def backward(ctx: Any, v: Tensor) -> tuple:  # type: ignore[override]
        return _Gather.apply(v, ctx.leaf, ctx.by, f"the derivative of {ctx.asked}"), None, None, None


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


def rows_of(whole: Tensor, of: Origin) -> Tensor:
    """This rank's rows of a tensor that broadcasts to the full shape, a view; of a number, zero on other ranks."""
    shape, group = of.leaf.shape, of.by.wire.group
    if not shape:
        return torch.zeros_like(whole) if group.rank else whole
    each = -(-shape[0] // group.size)
    low, high = (min(i * each, shape[0]) for i in (group.rank, group.rank + 1))
    return whole.expand(shape)[low:high]
