"""Finds tensors that leave a model under a loss scale in another way than by its return."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._compat.autograd import inputs_of_backward, sequence_nr
from .._compat.functorch import is_wrapped
from .._compat.tensors import backward_hooks, version
from .._errors import bad_leaves, explain
from ..core.layout import parameters_of
from ..core.view import EdgeMap, LeafView, linear_map, multiplied, untracked
from ..core.wrapper_names import modules_of
from .crossing import Crossing, crossing_of

# ----------------------------------------------------------------------------------------------------------------------
# `check_closed` searches the graph of a backward for tensors that got past the boundary of a model under `scale_loss`.
#
# The loss scale multiplies cotangents where they enter a model through its outputs, and divides them where they leave
# to parameters and inputs. So every path from the loss to a leaf crosses the boundary outward and inward by turns. On
# a path that does not, through an attribute, a hook, a closure or a cache, the factor is missing or counts twice.
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
        # The search has reached this node from both sides.
        inside = sequence_nr(other) not in owner.node_ranges or _is_outside(other, owner)
    if inside:
        _refuse_input(owner, leak, reached_by)
    _refuse_escape(owner, leak, reached_by)


def _is_outside(node: Any, owner: Any) -> bool:
    """Whether a node computes with an output of the model."""
    seen, queue = {id(node): node}, [node]
    while queue:
        node = queue.pop()
        crossing = crossing_of(node, owner)
        if crossing is not None:
            return not crossing.inward
        for other, _ in node.next_functions:
            if other is not None and id(other) not in seen:
                seen[id(other)] = other
                queue.append(other)
    return False


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
    steps: list[Step] = list(zip(repeat(None), roots, repeat(False)))
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
                # This crossing leads to a parameter, where the path ends.
                continue
            inside = not crossing.inward
            # Its other edges lead to what left upstream of it (`LeftOutputs`).
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

    It compares the number of references with that of a leaf that nobody holds. The argument is the node and not the
    leaf, which could count twice: after a use of `torch.compile` Python copies arguments that it would otherwise move.
    """
    with torch.enable_grad():
        product = torch.ones((), requires_grad=True) * 1.0
    free: Any = product.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    # The caller may hold one more reference, in a variable.
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
            "its cotangent bypasses the boundary, where the loss scale is applied, so gradients would be wrong",
            "return it from forward, in place of an attribute of a module, a hook or a closure;\n"
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
# `LeftOutputs` refuses the gradient of one output where another output was computed from it inside.
#
# Outputs are copies. So in `y, h = model(x)`, where `y` was computed from `h` inside, the backward from the user's `y`
# does not pass the user's `h`. The gradient of any loss is right all the same, because both paths meet inside. But a
# hook on that `h`, its `retain_grad()` and `torch.autograd.grad(y, h)` would miss the gradient that comes through `y`.
#
# `h` cannot be put on the path: when the graph from `h` to `y` is made, nobody knows that `h` will be returned, and
# autograd cannot change a graph. So these uses are refused when a cotangent comes to `y`. Its node gets an edge to
# the node of `h`, over which nothing flows: without it autograd would not run the node of `y` for a gradient by `h`.


class LeftOutput:
    """A tensor that has left a call.

    Attributes:
        outer: a weak reference to the tensor outside.
        shape: its shape.
        version: how often it had been written into when it left.
        edge: of the tensor inside.
        hooks: the dict of its hooks, which like them lives as long as its node.
    """

    __slots__ = ("edge", "hooks", "outer", "shape", "version")

    def __init__(self, inner: Tensor, outer: Tensor):
        self.outer, self.shape, self.version = weakref.ref(outer), tuple(outer.shape), version(outer)
        self.edge = get_gradient_edge(inner)
        # torch makes the dict with the first hook, and the handle of a hook has it.
        handle = outer.register_hook(lambda g: None)
        self.hooks: Any = handle.hooks_dict_ref()
        handle.remove()

    def wanted(self, asked: Sequence[Any]) -> tuple[str, str] | None:
        """The use that needs its gradient, in words; `None` if there is none. `asked` are the inputs of a backward."""
        outer = self.outer()
        if self.hooks:
            return "a hook on {}", "the hook"
        if outer is None or version(outer) != self.version:
            return None
        if any(x is outer or getattr(x, "node", None) is outer.grad_fn for x in asked):
            return "torch.autograd.grad(..., h) or backward(inputs=[h]) of {} as h", "the gradient"
        return ("retain_grad() on {}", "its .grad") if outer.retains_grad else None


class LeftOutputs:
    """The tensors that have left one call of a model.

    Args:
        crossing: makes the crossing of an edge, inward or not.
    """

    def __init__(self, crossing: Callable[[EdgeMap, bool], Crossing]):
        self.crossing = crossing
        # By id of the node inside and number of its output.
        self.left: dict[tuple[int, int], LeftOutput] = {}

    def let_out(self, y: Tensor, dtype: torch.dtype | None, crosses: bool) -> Tensor:
        """The tensor outside: `y` itself where it need not be copied, and nothing that left is upstream of it.

        Args:
            y: a tensor of the inside that requires a gradient.
            dtype: what it is cast to.
            crosses: whether a cast or the loss scale needs a copy.
        """
        upstream = self._upstream(get_gradient_edge(y))
        if not crosses and not upstream:
            return y
        outers = [x for left in upstream if (x := left.outer()) is not None]
        outer = Exit.apply(y, self.crossing(EdgeMap(multiplied, dtype, y.dtype), False), upstream, *outers)
        assert isinstance(outer, Tensor)
        self.add(y, outer)
        return outer

    def add(self, inner: Tensor, outer: Tensor) -> None:
        """Record that a tensor has left."""
        left = LeftOutput(inner, outer)
        self.left[id(left.edge.node), left.edge.output_nr] = left

    def _upstream(self, edge: GradientEdge) -> list[LeftOutput]:
        """The nearest ones that an output was computed from."""
        found: dict[int, LeftOutput] = {}
        seen: dict[int, Any] = {}
        steps: list[tuple[Any, int]] = [(edge.node, edge.output_nr)] if self.left else []
        # Older nodes lead to none of them.
        first = min([sequence_nr(left.edge.node) for left in self.left.values()], default=0)
        while steps:
            node, number = steps.pop()
            left = self.left.get((id(node), number))
            if left is not None:
                found[id(left)] = left
                if left.outer() is not None:
                    continue
            if id(node) not in seen:
                seen[id(node)] = node
                steps += [(n, i) for n, i in node.next_functions if n is not None and sequence_nr(n) >= first]
        return list(found.values())


class Exit(Function):
    """The Function of an outward crossing, with edges to what has left upstream of it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, crossing: Crossing, upstream: list[LeftOutput], *outers: Tensor) -> Tensor:  # type: ignore[override]
        ctx.forth, ctx.back, ctx.upstream = crossing.forth, crossing.back, upstream
        ctx.others = (None,) * (2 + len(outers))
        # A cotangent is `None` if only edges from other crossings lead here.
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


def check_unwanted(upstream: list[LeftOutput]) -> None:
    """Refuse a backward from an output that was computed from these, where somebody wants their gradients.

    Raises:
        RuntimeError: the cotangent of the output would be missing in such a gradient.
    """
    asked = inputs_of_backward()
    for left in upstream:
        wanted = left.wanted(asked)
        if wanted is not None:
            what, who = wanted[0].format(f"a tensor of shape {left.shape} that the model returned"), wanted[1]
            raise RuntimeError(
                explain(
                    f"{what}, where an output of the model was computed from it inside",
                    "what leaves a model under scale_loss or precision(output_dtype=...) is a copy: what comes back by "
                    f"way of that output does not pass it, and {who} would lack it",
                    "no scale_loss, for bf16 needs none, and output.float() outside of the model instead of "
                    "output_dtype;\nor a model that ends with this tensor, and what was computed from it outside",
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
