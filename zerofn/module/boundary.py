"""The boundary of an attached model: casts and loss scale where inputs enter and outputs leave."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._compat.autograd import (
    NO_BACKWARD,
    current_function,
    current_node,
    graph_task,
    next_sequence_nr,
    roots_of_backward,
    saved_tensors_hooks,
    sequence_nr,
)
from .._compat.functorch import NOT_WRAPPED, functorch_active, innermost, is_wrapped, level_of
from .._compat.tensors import base_of, has_ended
from .._errors import bad_leaves, explain
from .._interrupts import interrupts_held
from ..core.layout import complex_form
from ..core.pipeline import Pipeline
from ..core.view import EdgeMap, LeafView, View, cast_to, crosses, differentiable, divided, is_cast, multiplied
from ..ranks.dtensor import is_distributed
from ..sharded.compiled import CompiledCalls
from ..sharded.gather_on_use import Units
from ..sharded.notes import Walks
from ..sharded.unit import outside_inference_mode
from .crossing import Crossing, Edge, crossing_of
from .nested_tensors import map_outputs, tensors_in
from .scaled_checks import LeftOutputs, check_closed

# ----------------------------------------------------------------------------------------------------------------------
# `ThreadState` knows which calls of an attached model are running, in each thread that calls it.


# A tensor's address, shape and strides.
Region = tuple[int, tuple[int, ...], tuple[int, ...]]
Seen = dict[str, tuple[Tensor, Tensor]]


class ThreadState(threading.local):
    """The state of one thread that calls the model.

    Attributes:
        calls: running calls of modules, the outermost first.
        walks: replaces gathered parameters, which graphs of calls have saved, by notes.
        seen: by path, for the current call: the stored tensor, and its view.
        crossed_at: the number of the next autograd node when a cotangent last crossed the boundary.
        last_views: by path, the last view of a parameter, and the stored tensor that it is a view of.
        scales: the loss scale of the last backwards, by their numbers.
        left: the outputs of the current call that have left; `None` where outputs are not copied.
    """

    def __init__(self, units: Units | None) -> None:
        self.calls: list[ActiveCall] = []
        self.walks = None if units is None else Walks(units)
        self.seen: Seen = {}
        self.crossed_at: int | None = None
        self.last_views: dict[str, tuple[weakref.ref[Tensor], Tensor]] = {}
        self.scales: dict[int, Tensor | None] = {}
        self.left: LeftOutputs | None = None

    def drop_stale_calls(self) -> None:
        """Forget calls that ended without their hooks."""
        while self.calls:
            self.calls.pop().undo.close()
        self.seen.clear()
        self.left = None
        if self.walks is not None:
            self.walks.open.clear()


class ActiveCall:
    """A running call of a module.

    Attributes:
        module: the module that is called.
        outermost: whether its caller is outside of the model.
        callers: for an outermost call, the modules that are called from outside together with it.
        start: the number of the first autograd node that may be made in it.
        error: the exception that was being handled when it began; any other one comes from the call.
        frame: for an outermost call, its Python frame, by which one sees whether it is still running.
        undo: functions that run at its end.
    """

    __slots__ = ("callers", "error", "frame", "module", "outermost", "start", "undo")

    def __init__(self, module: nn.Module, outermost: bool, start: int, error: BaseException | None, frame: Any):
        self.module, self.outermost, self.start, self.error, self.frame = module, outermost, start, error, frame
        self.callers: Collection[int] = ()
        self.undo = ExitStack()


class CalledTogether:
    """Groups modules whose calls from outside of the model run inside the same saved-tensor hooks of the user's.

    A checkpoint around several calls recomputes all of them at the first node of the last one's graph.
    """

    def __init__(self) -> None:
        # The key is the unpack hook, which the saved tensors keep alive.
        self.by_hooks: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()

    def called(self, module: nn.Module) -> set[int]:
        """The modules, by `id`, that are called together with `module`, which is called now."""
        together, hooks = set[int](), saved_tensors_hooks()
        if hooks is not None:
            # A hook that cannot be a key does not belong to a checkpoint.
            with suppress(TypeError):
                together = self.by_hooks.setdefault(hooks[1], together)
        together.add(id(module))
        return together


# ----------------------------------------------------------------------------------------------------------------------
# `NodeRanges` keeps ranges of the sequence numbers of autograd nodes that calls of a model have made.


# So many of the last calls are remembered even if their outputs are gone: a hook may have kept a tensor from inside.
LAST_CALLS = 32


class GraphOfCall:
    """The graph of a call. The nodes of its outputs keep it alive.

    Attributes:
        callers: the modules, by `id`, that are called together in this call from outside.
        again: the graph that a backward makes when it recomputes a part of the call.
    """

    __slots__ = ("__weakref__", "again", "callers")

    def __init__(self, callers: Collection[int] = ()):
        self.callers = callers
        self.again: GraphOfCall | None = None

    def live_with(self, outputs: Iterable[Tensor]) -> None:
        """Live as long as the graph of any of these."""
        for y in outputs:
            # A write into a view replaces its node, and keeps that of its base.
            for x in (y, base_of(y)):
                if x.grad_fn is not None:
                    metadata: Any = x.grad_fn.metadata
                    metadata[self] = None


class NodeRange(NamedTuple):
    """The autograd nodes numbered from `start` to before `end`, made in one call of the model."""

    start: int
    end: int
    graph: weakref.ref[GraphOfCall]


START, END = attrgetter("start"), attrgetter("end")


class NodeRanges:
    """Disjoint ranges in order; a number is found by bisection.

    Each thread counts its own nodes. A backward thread makes far fewer than the thread of forward, so its numbers are
    those of graphs that were freed long ago. Where ranges overlap the last one counts.

    Ranges of graphs that are gone are forgotten, so that a long run keeps nothing for the calls that it has made.
    """

    def __init__(self) -> None:
        self.ranges: list[NodeRange] = []
        self.last: deque[GraphOfCall] = deque(maxlen=LAST_CALLS)
        self.most = 2 * LAST_CALLS
        # Several threads may call the model. On Python 3.14 Ctrl-C may come between the taking of a lock and the body
        # of `with`: the lock stays taken then, and its thread must be able to take it again.
        self.lock = threading.RLock()

    def add(self, start: int, end: int, graph: GraphOfCall) -> None:
        """Add nodes from `start` to before `end`, made in the call of `graph`."""
        if end <= start:
            return
        with interrupts_held(), self.lock:
            self.last.append(graph)
            new = [NodeRange(start, end, weakref.ref(graph))]
            first, last = bisect_right(self.ranges, start, key=END), bisect_left(self.ranges, end, key=START)
            if first < last:
                # The parts of earlier ranges before and after the new one stay.
                before, after = self.ranges[first], self.ranges[last - 1]
                if before.start < start:
                    new.insert(0, before._replace(end=start))
                if after.end > end:
                    new.append(after._replace(start=end))
            self.ranges[first:last] = new
            if len(self.ranges) > self.most:
                self.ranges = [r for r in self.ranges if r.graph() is not None]
                self.most = 2 * max(LAST_CALLS, len(self.ranges))

    def find(self, number: int) -> GraphOfCall | None:
        """The graph that a node is in; `None` for a node that was made outside of all calls."""
        with self.lock:
            i = bisect_right(self.ranges, number, key=START) - 1
            return self.ranges[i].graph() if i >= 0 and number < self.ranges[i].end else None

    def __contains__(self, number: int) -> bool:
        return self.find(number) is not None


# ----------------------------------------------------------------------------------------------------------------------
# `ParameterViews` gives a model's forward one view of each parameter per call.


class ParameterViews:
    """The views of the parameters of one attached model.

    Args:
        pipe: its pipeline.
        units: gathers sharded parameters.
        local: the state of the calling thread.
        crossing: makes the crossing of a view, where there is a loss scale.

    Attributes:
        suspended: inside `opt.gathered()`: the model has full parameters and sees them through casts alone.
        inexact: paths of parameters that are seen through more than casts.
    """

    def __init__(
        self,
        pipe: Pipeline,
        units: Units | None,
        local: ThreadState,
        crossing: Callable[[Edge, bool], Crossing],
    ):
        self.pipe, self.units, self.local, self.crossing = pipe, units, local, crossing
        self.scaled = pipe.scaled
        self.suspended = False
        found = pipe.views_at_use.items()
        # By path, where casts stand behind a reduction, so that forward finds them done: the dtype of the parameter.
        self.cast_before: dict[str, torch.dtype] = {}
        casts = [(stage, dtypes) for stage in pipe.road.stages if (dtypes := stage.dtypes) is not None]
        for path, view in found if units is None else ():
            for stage, dtypes in casts:
                if stage not in view.stages and stage.changes(view.leaf):
                    self.cast_before[path] = dtypes.seen(view.leaf)
        self.inexact = {path for path, view in found if not all([stage.dtypes is not None for stage in view.stages])}

    def get(self, path: str, stored: Tensor) -> Tensor:
        """The view of a parameter, the same all through a call, so that a parameter used twice has one cotangent."""
        view = self.pipe.views_at_use[path]
        if current_node() is not None and (handed := self._handed(path, stored)) is not None:
            return handed
        if self.units is not None:
            if stored is self.units.shown[path]:
                return self.units.look(path, keep=bool(self.local.calls))
            view = _of_another(view, stored)
        elif self.suspended or (self.cast_before and self.cast_before.get(path, stored.dtype) != stored.dtype):
            # All casts are applied, on either side of a reduction: full parameters have the stored dtype, as has a copy
            # of one that torch.func.functional_call puts in the place of a parameter later.
            view = _only_cast(view, stored, self.pipe.road.stages)
        if not view.stages and not (self.scaled and torch.is_grad_enabled() and differentiable(stored)):
            return stored
        if not self.local.calls:
            return self._through(view, stored)
        found = self.local.seen.get(path)
        if found is None or found[0] is not stored:
            # A call has one view in all grad modes, like a parameter, so that a write under `no_grad` stays in it.
            # Entering modes that are already on would make the view a fifth slower.
            if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
                seen = self._through(view, stored)
            else:
                with outside_inference_mode(), torch.enable_grad():
                    seen = self._through(view, stored)
            found = self.local.seen[path] = (stored, seen)
        return found[1]

    def _handed(self, path: str, stored: Tensor) -> Tensor | None:
        """The view that forward has given to the user's `autograd.Function` whose backward calls a module again.

        Such a backward, as of an adjoint method, asks for the gradient of its argument, so the module must compute
        with that view.
        """
        ctx = current_function()
        if ctx is None:
            return None
        edges = [(node, output) for node, output in ctx.next_functions if self._gives(node, output, path, stored)]
        if not edges:
            return None
        last = self.local.last_views.get(path, (lambda: None, None))[0]()
        found = [last, *ctx.saved_tensors]
        return next((x for x in found if x is not None and (x.grad_fn, x.output_nr) in edges), None)

    def _gives(self, node: Any, output: int, path: str, stored: Tensor) -> bool:
        """Whether an output of an autograd node is a view of a parameter."""
        if is_cast(node):
            return getattr(node.next_functions[0][0], "variable", None) is stored
        if self.units is not None and getattr(node, "units", None) is self.units:
            return self.units.plans.place[path] == (node.i, output)
        made_by = getattr(getattr(node, "forth", None), "__self__", None)
        made_by = made_by.edge if isinstance(made_by, Crossing) else made_by
        return isinstance(made_by, LeafView) and made_by.leaf is self.pipe.views_at_use[path].leaf

    def _through(self, view: LeafView, stored: Tensor) -> Tensor:
        return self.crossing(view, True).cross(stored) if self.scaled else view(stored, None)

    def origin(self, path: str, x: Any) -> Any:
        """The stored tensor that `x` is a view of; `None` for any other tensor."""
        view, stored = self.local.last_views.get(path, (lambda: None, None))
        return stored if view() is x else None


def address(x: Tensor) -> Region | None:
    """The address, shape and strides of a tensor; `None` for a wrapper of torch.func, which has no memory."""
    return (x.data_ptr(), x.shape, x.stride()) if level_of(x) == NOT_WRAPPED else None


def _of_another(view: LeafView, given: Tensor) -> LeafView:
    """The view without a gather, for a full tensor that torch.func.functional_call puts in a parameter's place."""
    if is_wrapped(given) and is_distributed(innermost(given)):
        raise RuntimeError(
            explain(
                f"torch.func of a call of a sharded model, by its parameter {view.leaf.path}",
                "torch.func wraps its arguments, and a wrapped parameter cannot be gathered",
                "params = {n: p.full_tensor().detach() for n, p in model.named_parameters()}, on every rank, and\n"
                "torch.func.grad(lambda params: loss(functional_call(model, params, (x,))))(params)",
            )
        )
    shape = complex_form(view.leaf).shape
    if given.shape != shape:
        raise RuntimeError(
            bad_leaves(
                "a call of a sharded model with other parameters (torch.func.functional_call) takes full ones",
                [(view.leaf.path, f"given in shape {tuple(given.shape)}, in full it is {tuple(shape)}")],
                "with opt.gathered(): params = {n: p.clone() for n, p in model.named_parameters()}",
            )
        )
    return _only_cast(view, given, view.stages)


def _only_cast(view: LeafView, given: Tensor, stages: Sequence[View]) -> LeafView:
    casts = tuple([s for s in stages if s.dtypes is not None and s.changes(view.leaf)])
    return replace(view, stages=casts, grad_dtype=given.dtype)


# ----------------------------------------------------------------------------------------------------------------------
# `ModelBoundary` casts and scales where inputs enter an attached model and outputs leave it.


# The graphs of this many backwards are searched for paths past the boundary. Most programs do the same in each step,
# and a search takes 2 us for every node of the graph.
SEARCHED = 10
# Of how many earlier backwards the loss scale is kept: there may be as many inside of each other.
NESTED = 8


class ModelBoundary:
    """The boundary of one attached model.

    Args:
        pipe: its pipeline.
        scale: returns the current loss scale.
        units: gathers sharded parameters.
        model: the model.
        check_unchanged: raises if the model has changed since it was attached, which explains many later errors.

    Attributes:
        to_search: the number of backwards that are still to be searched.
        node_kinds: kinds of autograd nodes, by class, of all classes that `scaled_checks` has met in its search.
        blocks: ids of the modules whose graphs are walked when a call ends.
        end_hooks: by id of a module, the id of the hook that ends its calls.
        undo: functions that remove hooks and views, called from the last to the first.
        compiled: what hooks do in compiled calls; `None` if the same as in others.
    """

    def __init__(
        self,
        pipe: Pipeline,
        scale: Callable[[], Tensor | None],
        units: Units | None,
        model: nn.Module,
        check_unchanged: Callable[[], None],
    ):
        self.pipe, self.scale, self.units, self.check_unchanged = pipe, scale, units, check_unchanged
        self.scaled, self.input_dtype = pipe.scaled, pipe.dtypes.inputs
        self.model = weakref.ref(model)
        self.local = ThreadState(units)
        self.crossing: Callable[[Edge, bool], Crossing] = functools.partial(Crossing, self)
        self.views = ParameterViews(pipe, units, self.local, self.crossing)
        self.node_ranges = NodeRanges()
        self.to_search: float = math.inf if pipe.checked else SEARCHED
        self.node_kinds: dict[type, int] = {}
        self.blocks: set[int] = set()
        self.together = CalledTogether()
        self.end_hooks: dict[int, int] = {}
        self.undo: list[Callable[[], object]] = []
        self.compiled: CompiledCalls | None = None

    def repeating(self, module: nn.Module | None = None) -> bool:
        """Whether a backward recomputes a part of a call, and not the whole call of `module`.

        It does if the autograd node that runs was made during a call of the model. Any other node is the user's (a
        checkpoint around a call, a hook).
        """
        node = current_node()
        if node is None or crossing_of(node, self) is not None or node.name() == "BackwardHookFunctionBackward":
            return False
        made = self.node_ranges.find(sequence_nr(node))
        if made is None or (module is not None and id(module) in made.callers):
            return False
        # Nodes that are made here belong to the call too, as those of a checkpoint inside a checkpoint.
        if self.local.crossed_at is not None:
            if made.callers:
                made.again = made.again or GraphOfCall()
            self.node_ranges.add(self.local.crossed_at, next_sequence_nr(), made.again or made)
        return True

    def calls(self) -> list[ActiveCall]:
        """The running calls in this thread, the outermost first.

        torch runs no hook when Ctrl-C ends a call. This forgets such calls, so that the user's next access to a
        parameter is not taken for one in a call, and the next call is not taken for an inner one.
        """
        local = self.local
        if local.calls and local.calls[0].frame is not None and has_ended(local.calls[0].frame):
            local.drop_stale_calls()
        return local.calls

    def begin(self) -> None:
        """Begin a call from outside, or one that a backward recomputes."""
        if self.scaled or self.pipe.dtypes.output_dtype is not None:
            self.local.left = LeftOutputs(self.crossing)

    def enter(self, x: Tensor) -> Tensor:
        """Let an input enter: cast it to the compute dtype."""
        dtype = cast_to(x, self.input_dtype)
        if not crosses(x) or (dtype in (None, x.dtype) and not self.scaled):
            return x
        if not self.scaled:
            return x.to(dtype)
        if dtype in (None, x.dtype) and not differentiable(x):
            # The model gets another tensor on the same memory: its `requires_grad_()` must not change the user's.
            return x.view_as(x) if torch.is_grad_enabled() else x
        return self.crossing(EdgeMap(divided, dtype, x.dtype), True).cross(x)

    def leave(self, y: Tensor) -> Tensor:
        """Let an output leave."""
        dtype = cast_to(y, self.pipe.dtypes.output_dtype)
        if not crosses(y):
            return y
        crosses_it = dtype not in (None, y.dtype) or (self.scaled and differentiable(y))
        left = self.local.left
        if left is not None and y.requires_grad and torch.is_grad_enabled() and not functorch_active():
            return left.let_out(y, dtype, crosses_it)
        return self.crossing(EdgeMap(multiplied, dtype, y.dtype), False).cross(y) if crosses_it else y

    def leave_all(self, output: Any) -> Any:
        """Let the outputs of a call leave."""
        if self.units is not None:
            # Each backward ends with an exchange between ranks, even if this rank gathers nothing in it.
            for y in tensors_in(output):
                if y.grad_fn is not None:
                    y.grad_fn.register_prehook(self.units.schedule.after_backward)
        if self.local.left is None:
            # Outputs are not copied.
            return output
        return map_outputs(self.leave, output, "the output of the model", self._viewed)

    def _viewed(self, inner: Tensor, outer: Tensor) -> None:
        if self.local.left is not None and torch.is_grad_enabled() and not functorch_active():
            self.local.left.add(inner, outer)

    def scale_of_cotangent(self) -> Tensor | None:
        """The loss scale for a cotangent, the same all through a backward.

        At the first cotangent of each of the first backwards its graph is searched for paths that bypass the boundary.
        """
        if not self.scaled or torch.compiler.is_compiling():
            return self.scale()
        local, task = self.local, graph_task()
        local.crossed_at = next_sequence_nr()
        if task == NO_BACKWARD:
            return self.scale()
        if task not in local.scales:
            # The outer backward of one inside of it, as reentrant checkpoints make them, goes on with its own.
            local.scales = dict([*list(local.scales.items())[-NESTED:], (task, self.scale())])
            if self.to_search and (roots := roots_of_backward()):
                check_closed(self, roots)
                # A backward that was refused has raised here, and is not counted.
                self.to_search -= 1
        return local.scales[task]
