"""What passes the boundary of an attached model: inputs in, outputs out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.autograd import backward_call, executing, graph_task, next_sequence, number_of
from .._compat.functorch import functorch_active
from ..core.linear_map import EdgeMap, cast_to, crosses, differentiable, over, times
from ..core.pipeline import Pipeline
from ..ranks.dtensor_parameters import Form
from ..sharded.gather_on_use import Units
from .active_calls import Local
from .backward_graph_search import check_closed
from .crossing import Crossing, Edge, crossing_of
from .leaked_tensors import Attributes
from .nested_tensors import map_outputs
from .node_ranges import Spans
from .output_graph import RETURNED, SHOWN, Leaving
from .parameter_views import ParameterViews


class Sight:
    """Whether parameters are being seen by the model now, and through which maps. One for each attached model."""

    def __init__(
        self,
        pipe: Pipeline,
        scale: Callable[[], Tensor | None],
        units: Units | None,
        model: nn.Module,
        unchanged: Callable[[], None],
        forms: Mapping[str, Form],
    ):
        self.pipe = pipe
        self.scaled, self.input_dtype = pipe.scaled, pipe.dtypes.inputs
        self.scale = scale
        self.units = units
        self.model = weakref.ref(model)
        # Raises if the model is no longer what was attached: the reason for much that goes wrong later.
        self.unchanged = unchanged
        self.local = Local(units)
        self.views = ParameterViews(pipe, units, self.local, self._crossing, forms)
        self.spans = Spans()
        self.kinds: dict[type, int] = {}  # of autograd nodes by class, as far as `closed_graph` has met them
        self.attributes = Attributes(self, list(model.modules()))
        # The hook that ends each module's calls, and the one that shows the user's hooks an output.
        self.ends: dict[int, int] = {}
        # Modules whose graphs are walked when a call ends.
        self.blocks: set[int] = set()
        self.shows: dict[int, int] = {}
        self.undo: list[Callable[[], Any]] = []

    def active(self) -> bool:
        """Whether the model itself is asking: during its calls, and when checkpointing repeats a part of one."""
        return bool(self.local.calls) or self.repeating()

    def repeating(self, module: nn.Module | None = None) -> bool:
        """Whether a part of a call is being repeated in a backward, and not the whole call of `module`.

        Told by the node that backward executes: it was made during a call of the model, or else the
        user is the one who asks (a checkpoint around a call, a hook of the user's).
        """
        node = executing()
        if node is None or crossing_of(node, self) is not None or node.name() == "BackwardHookFunctionBackward":
            return False
        number = number_of(node)
        if number not in self.spans or (module is not None and self.spans.maker(number) == id(module)):
            return False
        # What is made now belongs to the call as well: a checkpoint inside a checkpoint.
        now = next_sequence()
        self.spans.add(now if self.local.mark is None else self.local.mark, now)
        return True

    def forget_calls(self) -> None:
        """Calls that were left without a trace."""
        while self.local.calls:
            self.local.calls.pop().undo.close()
        self.local.seen.clear()
        self.local.leaving = None
        if self.local.walks is not None:
            self.local.walks.open.clear()

    def begin(self) -> None:
        """Before a call from outside, or one that a backward repeats."""
        if self.scaled:
            self.attributes.hide(self.admit)
        if self.scaled or self.pipe.dtypes.output_dtype is not None:
            self.local.leaving = Leaving(lambda edge: self._crossing(edge, False))
            self.local.leaving.carry(self.attributes.known_pairs())

    def let_attributes_out(self, start: int, at_once: bool) -> None:
        """After a call that began at node number `start`: what it left in attributes leaves too, each in its turn."""
        leaving = self.local.leaving
        if leaving is None or not self.scaled:
            return
        inner = self.attributes.inner(start)
        if not functorch_active():
            leaving.wait(inner)
        if not at_once:
            return
        # Under torch.func as outputs do there, each by itself.
        found = [(x, self.show(x)) for x in inner] if functorch_active() else leaving.keep_all()
        if found:
            self.attributes.show({id(x): outer for x, outer in found})

    def enter(self, x: Tensor) -> Tensor:
        """An input on its way in: cast to the compute dtype."""
        dtype = cast_to(x, self.input_dtype)
        if not crosses(x) or (dtype in (None, x.dtype) and not self.scaled):
            return x
        if not self.scaled:
            return x.to(dtype)
        if dtype in (None, x.dtype) and not differentiable(x):
            # Another tensor on the same memory: if the model asks for its gradient, that one is of the inside.
            return x.view_as(x) if torch.is_grad_enabled() else x
        return self._crossing(EdgeMap(over, dtype, x.dtype), True).cross(x)

    def leave(self, y: Tensor) -> Tensor:
        """An output on its way out."""
        if self.units is not None and y.grad_fn is not None:
            # Every backward rests at its end, on every rank as often, whether or not it has to gather anything.
            y.grad_fn.register_prehook(self.units.rests.after_backward)
        dtype = cast_to(y, self.pipe.dtypes.output_dtype)
        if not crosses(y):
            return y
        return self._out(y, dtype, dtype not in (None, y.dtype) or (self.scaled and differentiable(y)), RETURNED)

    def show(self, y: Tensor) -> Tensor:
        """An inner tensor as the user may have it: as an output, but for its dtype."""
        return self._out(y, None, self.scaled and differentiable(y), SHOWN)

    def _out(self, y: Tensor, dtype: torch.dtype | None, crosses: bool, how: str) -> Tensor:
        leaving = self.local.leaving
        if leaving is not None and y.requires_grad and torch.is_grad_enabled() and not functorch_active():
            return leaving.let_out(y, dtype, crosses, how)
        return self._crossing(EdgeMap(times, dtype, y.dtype), False).cross(y) if crosses else y

    def leave_all(self, output: Any) -> Any:
        """The outputs of a call on their way out."""
        if self.local.leaving is None and self.units is None:
            # Nothing is there for them to pass.
            return output
        return map_outputs(self.leave, output, "the output of the model", self._viewed)

    def show_all(self, output: Any) -> Any:
        """An output inside of the model as hooks of the user's may have it."""
        return map_outputs(self.show, output, "an output inside the model", self._viewed)

    def _viewed(self, inner: Tensor, outer: Tensor) -> None:
        if self.local.leaving is not None and torch.is_grad_enabled() and not functorch_active():
            self.local.leaving.add(inner, outer, RETURNED)

    def admit(self, x: Tensor) -> Tensor:
        """A tensor of the user's that the model finds in an attribute: as an input, but for its dtype."""
        return self._crossing(EdgeMap(over, None, x.dtype), True).cross(x) if crosses(x) else x

    def _crossing(self, edge: Edge, inward: bool) -> Crossing:
        return Crossing(self, edge, inward, self.scale, self.noticed if self.scaled else None)

    def noticed(self, crossing: Crossing) -> None:
        """A cotangent crosses. With the first one of a backward its whole graph is searched for one that does not."""
        if torch.compiler.is_compiling():
            return
        local, task = self.local, graph_task()
        local.mark = next_sequence()
        if task not in local.tasks:
            roots, _ = backward_call()
            # One inside of another, as reentrant checkpoints make them, ends before the outer one goes on.
            local.tasks = {task} if roots else {*local.tasks, task}
            check_closed(self, roots, self.spans)
