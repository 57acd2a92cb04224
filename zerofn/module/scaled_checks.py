"""What a loss scale cannot see: tensors that leave the model by closures, caches and hooks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._compat.autograd import backward_call, sequence_nr
from .._compat.functorch import is_wrapped
from .._compat.tensors import backward_hooks, registered, version
from .._errors import bad_leaves, explain
from ..core.layout import parameters_of
from ..core.view import EdgeMap, LeafView, linear_map, multiplied, untracked
from ..core.wrapper_names import modules_of
from .crossing import Crossing, crossing_of
from .nested_tensors import made, map_tensors

# ----------------------------------------------------------------------------------------------------------------------
# Tensors also cross the boundary of a scaled model in attributes of modules, and in outputs given to hooks.
#
# The loss scale multiplies cotangents where they enter through outputs, and is divided out where they leave to
# parameters and inputs. A tensor of the inside that reaches the loss otherwise brings a cotangent without the factor,
# and gradients are too small by it, in silence. So tensors that a call leaves in attributes of modules, and outputs
# that hooks of the user's are given, cross the boundary too. Other ways (closures, globals) are searched for in the
# graphs of the first backwards (`check_closed`).


# Attributes that every module has.
ORDINARY = tuple(nn.Module().__dict__)
# Classes that `_replace` looks into.
HOLDERS = frozenset((Tensor, tuple, list, dict))

# Longer lists in attributes are vocabularies rather than losses.
LONGEST = 256

Fn = Callable[[Tensor], Tensor]


def is_outside(node: Any, owner: Any, start: int) -> bool:
    """Whether a node made since `start` computes with an output of the model, as a user's hook may."""
    seen, queue = {id(node): node}, [node]
    while queue:
        node = queue.pop()
        crossing = crossing_of(node, owner)
        if crossing is not None:
            return not crossing.inward
        for other, _ in node.next_functions if start <= sequence_nr(node) else ():
            if other is not None and id(other) not in seen:
                seen[id(other)] = other
                queue.append(other)
    return False


class AttributeTensors:
    """Tensors in attributes of modules: outer tensors between calls, inner ones during calls."""

    def __init__(self, owner: Any, modules: list[nn.Module]):
        self.owner = owner
        self.modules = modules
        # (container, key, what the user finds there, what the model finds there)
        self.known: list[tuple[Any, Any, Any, Any]] = []

    def hide(self, enter: Fn) -> None:
        """Before a call: the model finds the inner tensors that it left; those that the user put there enter."""
        self.known = [entry for entry in self.known if _holds(entry[0], entry[1], entry[2])]
        for holder, key, _, inner in self.known:
            holder[key] = inner
        mine = {id(t) for *_, inner in self.known for t in _flat(inner)}
        changed = self._replace(lambda t: enter(t) if t.requires_grad and id(t) not in mine else t)
        self.known += [(holder, key, old, new) for holder, key, old, new in changed]

    def put_back(self) -> None:
        """After a call that has ended without its hooks: tensors that were hidden from the user are outer again."""
        for holder, key, outer, inner in self.known:
            if _holds(holder, key, inner):
                holder[key] = outer

    def known_pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Of what the model left in earlier calls: the inner tensor and the outer one."""
        pairs = []
        for _, _, outer, inner in self.known:
            for i, o in zip(_flat(inner), _flat(outer), strict=True):
                crossing = crossing_of(getattr(i, "grad_fn", None), self.owner)
                # Tensors that came in from the user are on the gradient's path already.
                if isinstance(i, Tensor) and i.requires_grad and i is not o and not (crossing and crossing.inward):
                    pairs.append((i, o))
        return pairs

    def inner(self, start: int) -> list[Tensor]:
        """After a call that began at node number `start`: tensors that are to leave; earlier ones are outer again."""
        self.known = [e for e in self.known if _holds(e[0], e[1], e[3]) or _holds(e[0], e[1], e[2])]
        for holder, key, outer, _ in self.known:
            holder[key] = outer
        found: list[Tensor] = []

        def look(t: Tensor) -> Tensor:
            node = t.grad_fn
            made_in_it = node is not None and (sequence_nr(node) >= start or crossing_of(node, self.owner) is not None)
            if made_in_it and not is_outside(node, self.owner, start):
                found.append(t)
            return t

        self._replace(look)
        return found

    def show(self, outer: dict[int, Tensor]) -> None:
        """Put outer tensors into attributes, by the id of the inner one that the model left."""
        changed = self._replace(lambda t: outer.get(id(t), t))
        self.known += [(holder, key, new, old) for holder, key, old, new in changed]

    def _replace(self, fn: Fn) -> list[tuple[Any, Any, Any, Any]]:
        """Put `fn(t)` in the place of every tensor in attributes; (container, key, old, new) of each that changed."""
        changed: list[tuple[Any, Any, Any, Any]] = []
        # The old tensor is kept alive, for another object might be given its id.
        done: dict[int, tuple[Any, Any]] = {}

        def mapped(value: Any) -> Any:
            kind = type(value)
            if kind is Tensor:
                if id(value) not in done:
                    done[id(value)] = (value, fn(value))
                return done[id(value)][1]
            if kind is tuple and len(value) <= LONGEST:
                parts = tuple([mapped(v) for v in value])
                return value if all(p is v for p, v in zip(parts, value, strict=True)) else parts
            if kind in (list, dict) and len(value) <= LONGEST and id(value) not in done:
                done[id(value)] = (value, value)
                replace(value, list(value.items() if kind is dict else enumerate(value)))
            return value

        def replace(holder: Any, items: list[tuple[Any, Any]]) -> None:
            for key, value in items:
                new = mapped(value)
                if new is not value:
                    holder[key] = new
                    changed.append((holder, key, value, new))

        for module in self.modules:
            if attributes := _attributes(module):
                replace(module.__dict__, attributes)
            if buffers := registered(module)[2]:
                replace(buffers, list(buffers.items()))
        return changed


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """A module's own attributes that may hold a tensor: none of those that every module has.

    It runs over all modules before and after each call of the model, so it skips those at the front of the dict.
    """
    attributes = module.__dict__
    rest = islice(attributes.items(), len(ORDINARY) - 1, None)
    last, _ = next(rest, ("", None))
    if last != ORDINARY[-1]:
        return [(n, v) for n, v in attributes.items() if n not in ORDINARY and type(v) in HOLDERS]
    found: list[tuple[str, Any]] = []
    # No comprehension, which is a call in Python 3.11.
    for item in rest:
        if type(item[1]) in HOLDERS:
            found.append(item)
    return found


def _flat(value: Any) -> list[Any]:
    """The elements of a tuple and of tuples in it; anything else is one element."""
    return [x for v in value for x in _flat(v)] if isinstance(value, tuple) else [value]


def _holds(holder: Any, key: Any, value: Any) -> bool:
    if isinstance(holder, list):
        return key < len(holder) and holder[key] is value
    return holder.get(key) is value


class HookedOutput:
    """An output as hooks of the user's are given it, and with what the model goes on after them."""

    def __init__(self, inner: Any, leave: Callable[[Any], Any]):
        self.inner, self.outer = inner, leave(inner)
        self.items = _items(self.outer)
        self.versions: list[tuple[Tensor, int]] = []
        if self.outer is not inner:
            map_tensors(lambda t: self.versions.append((t, version(t))) or t, self.outer, "an output")

    def result(self, output: Any, enter: Fn) -> Any:
        """The inner output, where hooks have not changed it; else what they returned, taken in again."""
        looked = output is self.outer and _items(output) == self.items
        if looked and all(version(t) == count for t, count in self.versions):
            return self.inner
        return map_tensors(enter, output, "what a forward hook returned")


def _items(value: Any) -> list[int]:
    if isinstance(value, Mapping):
        return [id(v) for v in value.values()]
    return [id(v) for v in value] if isinstance(value, list) else []


# ----------------------------------------------------------------------------------------------------------------------
# `check_closed` searches the graph of a backward for tensors that got past the boundary of a model under `scale_loss`.
#
# The loss scale multiplies cotangents where they enter a model through its outputs, and divides them where they leave
# to parameters and inputs. So every path from the loss to a leaf crosses the boundary outward and inward by turns. On
# a path that does not, through a closure, a cache or a list, the factor is missing or counts twice.
#
# The first ten backwards are searched, and every one where `zf.attach(..., check=True)` asks for it: a search takes
# about 2 us for a node. What a program does in its thousandth step alone is not seen otherwise.


# Kinds of nodes.
OTHER, CROSSING, LEAF, GATHER, SCATTER = range(5)

# An edge of the graph: the node it comes from (`None` above the loss), the node it leads to, whether that is inside.
Step = tuple[Any, Any, bool]


def check_closed(owner: Any, roots: list[Any]) -> None:
    """Search the whole graph of the backward under way.

    Args:
        owner: the boundary, a `ModelBoundary`.
        roots: the nodes at which the backward began.

    Raises:
        RuntimeError: a tensor of the inside is used outside, or one of the outside inside.
    """
    reached_by: dict[int, Step] = {}
    leak = _find_leak(owner, roots, reached_by)
    if leak is None:
        return
    _, other, inside = leak
    owner.check_unchanged()
    if reached_by[id(other)] is not leak:
        # Reached from both sides.
        inside = sequence_nr(other) not in owner.node_ranges or is_outside(other, owner, 0)
    if inside:
        _refuse_input(owner, leak, reached_by)
    _refuse_escape(owner, leak, reached_by)


def _find_leak(owner: Any, roots: list[Any], reached_by: dict[int, Step]) -> Step | None:
    """The first step past the boundary without a crossing; known once the whole graph has been searched.

    Args:
        owner: the boundary.
        roots: the nodes of the losses.
        reached_by: filled with the step by which each node was reached first, by the node's id. It keeps the node
            alive, for another node might be given its id.
    """
    leak: Step | None = None
    # A class has one kind, and a program has few classes of nodes.
    node_kinds: dict[type, int] = owner.node_kinds
    steps: list[Step] = [(None, root, False) for root in roots]
    while steps:
        step = steps.pop()
        other, inside = step[1], step[2]
        before = reached_by.setdefault(id(other), step)
        if before is not step:
            if before[2] != inside:
                leak = leak or step
            continue
        kind = node_kinds.get(type(other))
        if kind is None:
            kind = node_kinds[type(other)] = _kind(other)
        if kind == CROSSING and type(crossing := other.forth.__self__) is Crossing and crossing.owner is owner:
            if other.forth.__func__ is Crossing.back:
                # A node of a second derivative, which belongs to neither side.
                return None
            if crossing.inward != inside:
                leak = leak or step
            if type(crossing.edge) is LeafView:
                # It leads to the parameter.
                continue
            inside = not crossing.inward
            # Its other edges lead to tensors that left upstream of it (`OutputTracker`).
            node = other.next_functions[0][0]
            if node is not None:
                steps.append((other, node, inside))
            continue
        elif kind == LEAF:
            leaf = other.variable
            if is_wrapped(leaf):
                # torch.func records other nodes for a crossing, and arguments would be taken for leaks.
                return None
            if inside and (isinstance(leaf, nn.Parameter) or _held(other)):
                leak = leak or step
            continue
        elif kind in (GATHER, SCATTER) and other.units is owner.units:
            if kind == SCATTER:
                return None
            # A gather divides by the scale as well, but for a parameter that is used outside of the model.
            if (other.i < owner.units.blocks) != inside:
                leak = leak or step
            continue
        for node, _ in other.next_functions:
            if node is not None:
                steps.append((other, node, inside))
    return leak


def _kind(node: Any) -> int:
    if getattr(node, "forth", None) is not None:
        return CROSSING
    if getattr(node, "variable", None) is not None:
        return LEAF
    if getattr(node, "units", None) is None:
        return OTHER
    return GATHER if node.name() == "GatherUnitBackward" else SCATTER


def _held(node: Any) -> bool:
    """Whether anybody but the graph holds the leaf of a node. A leaf that nobody holds was made, and is used, inside.

    By a comparison with the references to a leaf that nobody holds. The node is the argument, for a leaf as argument
    may count twice: once `torch.compile` was used in a process, Python copies arguments that it would else move.
    """
    with torch.enable_grad():
        product = torch.ones((), requires_grad=True) * 1.0
    free: Any = product.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    # One more for the caller's variable.
    return sys.getrefcount(node.variable) > sys.getrefcount(free.variable) + 1


def _refuse_input(owner: Any, leak: Step, reached_by: dict[int, Step]) -> NoReturn:
    """The model uses a tensor of the outside that is no argument."""
    node, other, _ = leak
    strangers = _path_up(node, reached_by, lambda n: sequence_nr(n) not in owner.node_ranges)
    leaf = getattr(other, "variable", None)
    if strangers:
        _refuse_stranger(f"a tensor computed outside (by {strangers[-1].name()})")
    if leaf is not None:
        for path, p in parameters_of(owner.model()).items():
            if p is leaf:
                _refuse_other_place(path)
        kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
        _refuse_stranger(f"a {kind} of shape {tuple(leaf.shape)}")
    if _kind(other) == GATHER:
        _refuse_other_place(owner.units.units[other.i][0].path)
    if _kind(other) == OTHER:
        _refuse_stranger(f"a tensor computed outside (by {other.name()})")
    raise RuntimeError(
        explain(
            "the attached model uses an output of one of its calls that did not come in as an argument",
            "its gradient would come out multiplied by the loss scale: it is used in a closure, or found in a cache, "
            "such as that of torch.nn.utils.parametrize.cached() where a weight is read outside of the model first",
            "model(x, kept) with the output as an argument; parametrize.cached() around calls of the model alone;\n"
            "or no scale_loss: bf16 needs none",
        )
    )


def _refuse_escape(owner: Any, leak: Step, reached_by: dict[int, Step]) -> NoReturn:
    """The loss uses a tensor of the inside that did not leave through the boundary."""
    node, other, _ = leak
    inner = _path_up(node, reached_by, lambda n: sequence_nr(n) in owner.node_ranges)
    if inner:
        what = f"a tensor from inside the attached model (by {inner[-1].name()})"
    elif _kind(other) == OTHER:
        what = f"a tensor from inside the attached model (by {other.name()})"
    elif _kind(other) == GATHER:
        what = f"the attached model's parameter {owner.units.units[other.i][0].path} as forward sees it,"
    elif isinstance(edge := other.forth.__self__.edge, LeafView):
        what = f"the attached model's parameter {edge.leaf.path} as forward sees it,"
    else:
        what = "an argument of the attached model as forward sees it,"
    raise RuntimeError(
        explain(
            f"the loss uses {what} that did not come out of it",
            "its cotangent does not pass the boundary where the loss scale acts, so gradients would be wrong",
            "return it from forward, or keep it in an attribute of a module: both pass the boundary;\n"
            "or no scale_loss: bf16 needs none",
        )
    )


def _path_up(node: Any, reached_by: dict[int, Step], belongs: Callable[[Any], bool]) -> list[Any]:
    """From `node` towards the loss, as they were reached: nodes that `belongs` accepts, and not past a crossing."""
    found = []
    while node is not None and _kind(node) == OTHER and belongs(node):
        found.append(node)
        node = reached_by[id(node)][0]
    return found


def _refuse_other_place(path: str) -> NoReturn:
    what = f"the attached model uses its parameter {path} from elsewhere than its module: from a list, or a closure"
    right = f"self.{path.rpartition('.')[2]} in forward, or an nn.ParameterList instead of the list"
    raise RuntimeError(explain(what, "its gradient would come out multiplied by the loss scale", right))


def _refuse_stranger(what: str) -> NoReturn:
    what = f"the attached model uses {what} that is neither its parameter nor an argument"
    right = "pass it to the model as an argument, or register it before zf.attach: self.x = nn.Parameter(x)"
    raise RuntimeError(explain(what, "its gradient would come out multiplied by the loss scale", right))


# ----------------------------------------------------------------------------------------------------------------------
# `OutputTracker` knows which outputs of a model were computed from which others, so that hooks on these can be
# refused.
#
# Outputs are copies. So in `y, h = model(x)`, where `y` was computed from `h` inside, the backward from the user's `y`
# does not pass the user's `h`. The gradient of any loss is right all the same, because both paths meet inside. But a
# hook on that `h`, its `retain_grad()` and `torch.autograd.grad(y, h)` would miss the gradient that comes through `y`.
#
# `h` cannot be put on the path: when the graph from `h` to `y` is made, nobody knows that `h` will be returned, and
# autograd cannot change a graph. So these uses are refused when a cotangent comes to `y`. Its node gets an edge to the
# node of `h`, over which nothing flows: without it autograd would not run the node of `y` for a gradient by `h`.


# How a tensor has left.
RETURNED, KEPT, SHOWN = "that the model returned", "that it keeps in an attribute", "that a forward hook was given"


class OutputRecord:
    """A tensor that has left, and what shows that somebody wants its gradient.

    Attributes:
        how: in which way it has left.
        shape: its shape.
        outer: a weak reference to the tensor outside.
        version: how often it had been written into when it left.
        hooks: the dict of its hooks, which like them lives as long as its node; `None` before `watch`.
    """

    __slots__ = ("hooks", "how", "outer", "shape", "version")

    def __init__(self, outer: Tensor, how: str):
        self.how, self.shape, self.version = how, tuple(outer.shape), version(outer)
        self.outer = weakref.ref(outer)
        self.hooks: Any = None

    def watch(self) -> None:
        """Find its hooks, those that will be registered too."""
        outer = self.outer()
        if self.hooks is None and outer is not None:
            # torch makes the dict with the first hook, and the handle of a hook has it.
            handle = outer.register_hook(lambda g: None)
            self.hooks = handle.hooks_dict_ref()
            handle.remove()

    def as_it_left(self) -> Tensor | None:
        """The tensor outside, if somebody holds it and nobody has written into it."""
        outer = self.outer()
        return outer if outer is not None and version(outer) == self.version else None


class OutputTracker:
    """The tensors that leave during one call of a model.

    Args:
        crossing: makes the crossing of an edge, inward or not.
    """

    def __init__(self, crossing: Callable[[EdgeMap, bool], Crossing]):
        self.crossing = crossing
        # By id of the node inside and number of its output. The nodes are kept alive, and with them the ids.
        self.left: dict[tuple[int, int], tuple[OutputRecord, Any]] = {}
        # The smallest number of those nodes: older nodes lead to none of them.
        self.first = 1 << 64
        # Tensors in attributes that are to leave, the last made first; and those that have left: (inner, outer).
        self.waiting: list[Tensor] = []
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.carried: list[Tensor] = []

    def carry(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Record what earlier calls have left in attributes: pairs of an inner tensor and an outer one.

        The outer ones are held during the call, in which the model may put others in their place: the path to what left
        in still earlier calls leads over them.
        """
        self.carried = [outer for _, outer in pairs]
        for inner, outer in pairs:
            self.add(inner, outer, KEPT)

    def wait(self, tensors: list[Tensor]) -> None:
        """Tensors in attributes that are to leave in turn with the outputs: what was made first leaves first."""
        done = {id(t) for t, _ in self.kept}
        waiting = {id(t): t for t in (*self.waiting, *tensors) if id(t) not in done}
        self.waiting = sorted(waiting.values(), key=made, reverse=True)

    def keep_until(self, number: float) -> list[tuple[Tensor, Tensor]]:
        """Let out tensors in attributes that were made up to node `number`; (inner, outer) of all that have left."""
        while self.waiting and made(self.waiting[-1]) <= number:
            t = self.waiting.pop()
            self.kept.append((t, self.let_out(t, None, True, KEPT)))
        return self.kept

    def let_out(self, y: Tensor, dtype: torch.dtype | None, crosses: bool, how: str) -> Tensor:
        """The tensor outside: `y` itself where it need not be copied, and nothing that left is upstream of it.

        Args:
            y: a tensor of the inside that requires a gradient.
            dtype: what it is cast to.
            crosses: whether a cast or the loss scale needs a copy.
            how: in which way it leaves.
        """
        self.keep_until(made(y))
        edge = get_gradient_edge(y)
        left, _ = self.left.get((id(edge.node), edge.output_nr), (None, None))
        outer = None if left is None else left.as_it_left()
        if outer is not None and dtype in (None, outer.dtype):
            return outer
        upstream = self._upstream(edge)
        if not crosses and not upstream:
            return y
        crossing = self.crossing(EdgeMap(multiplied, dtype, y.dtype), False)
        outer = Exit.apply(y, crossing, upstream, *(o for left in upstream if (o := left.as_it_left()) is not None))
        assert isinstance(outer, Tensor)
        self.add(y, outer, how)
        return outer

    def add(self, inner: Tensor, outer: Tensor, how: str) -> None:
        """Record that a tensor has left."""
        edge = get_gradient_edge(inner)
        left = OutputRecord(outer, how)
        if how == SHOWN:
            # At once, for it may be gone when the next one leaves.
            left.watch()
        self.left[id(edge.node), edge.output_nr] = left, edge.node
        self.first = min(self.first, made(inner))

    def _upstream(self, edge: GradientEdge) -> list[OutputRecord]:
        """The nearest ones that an output was computed from, as far as somebody may ask for their gradients."""
        found: dict[int, OutputRecord] = {}
        seen: dict[int, Any] = {}
        steps: list[tuple[Any, int]] = [(edge.node, edge.output_nr)] if self.left else []
        while steps:
            node, number = steps.pop()
            left = self.left.get((id(node), number), (None, None))[0]
            if left is not None:
                left.watch()
                there = left.as_it_left() is not None
                if there or left.hooks:
                    found[id(left)] = left
                if there:
                    continue
            if id(node) not in seen:
                seen[id(node)] = node
                steps += [(n, i) for n, i in node.next_functions if n is not None and sequence_nr(n) >= self.first]
        return list(found.values())


class Exit(Function):
    """The Function of an outward crossing, with edges to what has left upstream of it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, crossing: Crossing, upstream: list[OutputRecord], *outers: Tensor) -> Tensor:  # type: ignore[override]
        ctx.forth, ctx.back, ctx.upstream = crossing.forth, crossing.back, upstream
        ctx.others = (None,) * (2 + len(outers))
        # `None` where a cotangent came only over the edges from other crossings.
        ctx.set_materialize_grads(False)
        return crossing.forth(y, None)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple:  # type: ignore[override]
        if ctx.upstream and not torch.compiler.is_compiling():
            check_unwanted(ctx.upstream)
        if g is None:
            return None, *ctx.others
        pulled = ctx.back(g, None) if untracked() else linear_map(g, None, ctx.back, ctx.forth)
        return pulled, *ctx.others

    @staticmethod
    def jvp(ctx: Any, y: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return linear_map(y, None, ctx.forth, ctx.back)


def check_unwanted(upstream: list[OutputRecord]) -> None:
    """Refuse a backward from an output that was computed from these, where somebody wants their gradients.

    Raises:
        RuntimeError: the cotangent of the output would be missing in such a gradient.
    """
    asked = backward_call()[1]
    for left in upstream:
        outer = left.as_it_left()
        if left.hooks:
            _refuse(left, "a hook on {}", "the hook")
        if outer is not None and any(x is outer or getattr(x, "node", None) is outer.grad_fn for x in asked):
            _refuse(left, "torch.autograd.grad(..., h) or backward(inputs=[h]) of {} as h", "the gradient")
        if outer is not None and outer.retains_grad:
            _refuse(left, "retain_grad() on {}", "its .grad")


def _refuse(left: OutputRecord, what: str, who: str) -> NoReturn:
    tensor = f"a tensor of shape {left.shape} {left.how}"
    raise RuntimeError(
        explain(
            f"{what.format(tensor)}, where an output of the model was computed from it inside",
            "what leaves a model under scale_loss or precision(output_dtype=...) is a copy: what comes back by way of "
            f"that output does not pass it, and {who} would lack it",
            "no scale_loss, for bf16 needs none, and output.float() outside of the model instead of output_dtype;\n"
            "or a model that ends with this tensor, and what was computed from it outside",
        )
    )


# ----------------------------------------------------------------------------------------------------------------------
# These functions refuse backward hooks on inner modules of a scaled model, whose cotangents contain the loss scale.
#
# A clamp, a threshold or a statistic of a scaled number is wrong without an error. To give true gradients to the hooks
# would take a hook of ours before theirs and one after, which torch has for gradients of inputs and not for those of
# outputs; and in fp16 true gradients underflow, which is why there is a scale. Hooks on the model itself see true
# gradients.


def check_inner_hooks(model: nn.Module) -> None:
    """Refuse all that there are when the model is attached.

    Raises:
        ValueError: a module inside of the model has a backward hook.
    """
    found = [(name, hooks) for name, m in modules_of(model) if m is not model and (hooks := backward_hooks(m))]
    if found:
        raise ValueError(_message([(name, ", ".join(hooks)) for name, hooks in found]))


def check_hooks_of_call(model: nn.Module | None, module: nn.Module, outermost: bool, args: tuple) -> None:
    """Refuse the hooks of a module that is called, if they would be given cotangents of the inside.

    Args:
        model: the attached one.
        module: is called.
        outermost: whether by the user: then cotangents of its outputs are true, and those of its inputs are not.
        args: what it is called with.

    Raises:
        RuntimeError: there is such a hook.
    """
    hooks = backward_hooks(module)
    if not hooks or not torch.is_grad_enabled():
        return
    if outermost and not any(isinstance(a, Tensor) and a.requires_grad for a in args):
        hooks = [h for h in hooks if h == "register_backward_hook"]
    elif outermost:
        hooks = [h for h in hooks if h != "register_full_backward_pre_hook"]
    if hooks:
        names = [name for name, m in modules_of(model) if m is module] if model is not None else []
        raise RuntimeError(_message([(names[0] if names else type(module).__name__, ", ".join(hooks))]))


def _message(found: list[tuple[str, str]]) -> str:
    return bad_leaves(
        "backward hooks on modules of a model under scale_loss: there cotangents are multiplied by the loss scale, "
        "and whatever a hook reads, clamps or replaces would be wrong",
        found,
        "no scale_loss: bf16 needs none, zf.precision(param_dtype=torch.bfloat16);\n         or a hook on a "
        "parameter or on an output of the model, which see true gradients; or p.grad and opt.metrics after backward",
    )
