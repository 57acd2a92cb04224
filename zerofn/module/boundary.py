"""The boundary of an attached model: casts and loss scale where inputs enter it and outputs leave it."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.autograd import NO_BACKWARD, backward_call, current_node, graph_task, next_sequence_nr, sequence_nr
from .._compat.functorch import functorch_active
from ..core.linear_map import EdgeMap, cast_to, crosses, differentiable, over, times
from ..core.pipeline import Pipeline
from ..ranks.dtensor_parameters import Form
from ..sharded.gather_on_use import Units
from .active_calls import ActiveCall, CalledTogether, ThreadState
from .backward_graph_search import check_closed
from .crossing import Crossing, Edge, crossing_of
from .leaked_tensors import AttributeTensors
from .nested_tensors import map_outputs
from .node_ranges import NodeRanges
from .output_graph import RETURNED, SHOWN, OutputTracker
from .parameter_views import ParameterViews


def take_back(actions: list[Callable[[], object]]) -> None:
    """Call what undoes something, the last one first. One that is interrupted, as by Ctrl-C, is called again."""
    while actions:
        actions[-1]()
        actions.pop()


class ModelBoundary:
    """The boundary of one attached model.

    Args:
        pipe: its pipeline.
        scale: gives the loss scale in force.
        units: what gathers sharded parameters.
        model: the model.
        check_unchanged: raises if the model is not what was attached: the reason for much that goes wrong later.
        forms: by path, which DTensor forward has in place of a local parameter.

    Attributes:
        node_kinds: of autograd nodes by class, as far as `backward_graph_search` has met them.
        blocks: ids of the modules whose graphs are walked when a call ends.
        end_hooks, show_hooks: by id of a module, the numbers of the hook that ends its calls, and of the hook before
            the user's, which gives them an outer output.
        undo: takes hooks and views off again, the last one first.
    """

    def __init__(
        self,
        pipe: Pipeline,
        scale: Callable[[], Tensor | None],
        units: Units | None,
        model: nn.Module,
        check_unchanged: Callable[[], None],
        forms: Mapping[str, Form],
    ):
        self.pipe, self.scale, self.units, self.check_unchanged = pipe, scale, units, check_unchanged
        self.scaled, self.input_dtype = pipe.scaled, pipe.dtypes.inputs
        self.model = weakref.ref(model)
        self.local = ThreadState(units)
        self.crossing: Callable[[Edge, bool], Crossing] = functools.partial(Crossing, self)
        self.views = ParameterViews(pipe, units, self.local, self.crossing, forms)
        self.node_ranges = NodeRanges()
        self.node_kinds: dict[type, int] = {}
        self.attributes = AttributeTensors(self, list(model.modules()))
        self.blocks: set[int] = set()
        self.together = CalledTogether()
        self.end_hooks: dict[int, int] = {}
        self.show_hooks: dict[int, int] = {}
        self.undo: list[Callable[[], object]] = []

    def repeating(self, module: nn.Module | None = None) -> bool:
        """Whether a backward repeats a part of a call, and not the whole call of `module`.

        It does where the node that it executes was made during a call of the model. Any other node is the user's (a
        checkpoint around a call, a hook).
        """
        node = current_node()
        if node is None or crossing_of(node, self) is not None or node.name() == "BackwardHookFunctionBackward":
            return False
        made = self.node_ranges.find(sequence_nr(node))
        if made is None or (module is not None and id(module) in made.callers):
            return False
        # What is made here belongs to the call as well: a checkpoint inside a checkpoint.
        now = next_sequence_nr()
        self.node_ranges.add(now if self.local.crossed_at is None else self.local.crossed_at, now)
        return True

    def calls(self) -> list[ActiveCall]:
        """The calls that are under way in this thread, the outermost first.

        Torch runs no hook where Ctrl-C ends a call. Those are forgotten here: a parameter that the user asks for is
        none of a call, and the next call is none inside of another.
        """
        if self.local.stale():
            self.attributes.put_back()
            self.local.drop_stale_calls()
        return self.local.calls

    def begin(self) -> None:
        """Before a call from outside, or one that a backward repeats: tensors in attributes enter."""
        if self.scaled:
            self.attributes.hide(self.enter_attribute)
        if self.scaled or self.pipe.dtypes.output_dtype is not None:
            self.local.tracker = OutputTracker(self.crossing)
            self.local.tracker.carry(self.attributes.known_pairs())

    def collect_attributes(self, start: int) -> None:
        """After a call that began at node number `start`: what it left in attributes leaves in turn with outputs."""
        if self.local.tracker is not None and self.scaled:
            self.local.tracker.wait(self.attributes.inner(start))

    def release_attributes(self) -> None:
        """After the outputs have left: the rest of what is in attributes leaves, and the user finds it there."""
        tracker = self.local.tracker
        if tracker is None or not self.scaled:
            return
        # Under torch.func each by itself, as outputs there.
        by_itself = functorch_active()
        found = [(x, self.show(x)) for x in tracker.waiting] if by_itself else tracker.keep_until(math.inf)
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
            # Another tensor on the same memory: if the model calls `requires_grad_()` on it, that one is of the inside.
            return x.view_as(x) if torch.is_grad_enabled() else x
        return self.crossing(EdgeMap(over, dtype, x.dtype), True).cross(x)

    def leave(self, y: Tensor) -> Tensor:
        """An output on its way out."""
        if self.units is not None and y.grad_fn is not None:
            # Each backward ends with an exchange between ranks, whether or not this rank has to gather anything in it.
            y.grad_fn.register_prehook(self.units.rests.after_backward)
        dtype = cast_to(y, self.pipe.dtypes.output_dtype)
        if not crosses(y):
            return y
        return self._out(y, dtype, dtype not in (None, y.dtype) or (self.scaled and differentiable(y)), RETURNED)

    def show(self, y: Tensor) -> Tensor:
        """An inner tensor on its way to a hook of the user's, or to an attribute: not cast."""
        return self._out(y, None, self.scaled and differentiable(y), SHOWN)

    def _out(self, y: Tensor, dtype: torch.dtype | None, crosses: bool, how: str) -> Tensor:
        tracker = self.local.tracker
        if tracker is not None and y.requires_grad and torch.is_grad_enabled() and not functorch_active():
            return tracker.let_out(y, dtype, crosses, how)
        return self.crossing(EdgeMap(times, dtype, y.dtype), False).cross(y) if crosses else y

    def leave_all(self, output: Any) -> Any:
        """The outputs of a call on their way out."""
        if self.local.tracker is None and self.units is None:
            # Without a boundary.
            return output
        return map_outputs(self.leave, output, "the output of the model", self._viewed)

    def show_all(self, output: Any) -> Any:
        """The outputs of a call inside of the model, on their way to hooks of the user's."""
        return map_outputs(self.show, output, "an output inside the model", self._viewed)

    def _viewed(self, inner: Tensor, outer: Tensor) -> None:
        if self.local.tracker is not None and torch.is_grad_enabled() and not functorch_active():
            self.local.tracker.add(inner, outer, RETURNED)

    def enter_attribute(self, x: Tensor) -> Tensor:
        """A tensor of the user's that the model finds in an attribute, on its way in: not cast."""
        return self.crossing(EdgeMap(over, None, x.dtype), True).cross(x) if crosses(x) else x

    def scale_of_cotangent(self) -> Tensor | None:
        """The loss scale for a cotangent: one for a backward, whose graph is searched for ways past the boundary."""
        if not self.scaled or torch.compiler.is_compiling():
            return self.scale()
        local, task = self.local, graph_task()
        local.crossed_at = next_sequence_nr()
        if task == NO_BACKWARD:
            return self.scale()
        if task not in local.searched:
            roots, _ = backward_call()
            # A backward inside of another one, as reentrant checkpoints make them, ends before the outer one goes on.
            local.searched = {**({} if roots else local.searched), task: self.scale()}
            check_closed(self, roots)
        return local.searched[task]
