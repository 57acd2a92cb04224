"""`unroll`: differentiate through many steps with few states in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import get_device_states, set_device_states

from zerofn.extend import Unrecorded, check_count, explain, flatten, kept_out_of_graphs, kind_of, unflatten

# These have no public name: wrappers of torch's private names for the levels of torch.func.
from .._compat.functorch import (
    NO_LEVEL,
    constant,
    forward_level,
    forward_levels,
    functorch_active,
    is_function,
    unwrapped_if_dead,
)

Tree = Any

# ----------------------------------------------------------------------------------------------------------------------
# An `Ambient` keeps what a function depends on besides its arguments (random numbers, autocast), to run it again.


class Ambient:
    """The state of torch's random generators and of autocast; it does not know a user's own generators.

    Args:
        tensors: random numbers may be drawn on their devices.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.random = torch.get_rng_state()
        self.devices, self.states = get_device_states(*tensors)
        kinds = {"cpu", *(x.device.type for x in tensors if x.device.type != "meta")}
        self.casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self.cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore that state inside, and the present one afterwards.

        Examples:
            >>> ambient, first = Ambient([]), torch.rand(2)
            >>> with ambient.again():
            ...     torch.equal(torch.rand(2), first)
            True
        """
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self.devices))
            torch.set_rng_state(self.random)
            set_device_states(self.devices, self.states)
            for kind, enabled, dtype in self.casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.cached))
            yield


# ----------------------------------------------------------------------------------------------------------------------
# `unroll` makes one function of many steps, whose derivative keeps few of the states in between.


# A function of two lists of tensors, which returns two: those that can be differentiated, and the others.
Run = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]


@kept_out_of_graphs(
    "it runs steps again in backward, from states that it kept, which is no single graph",
    "zf.unroll(torch.compile(step), state, batches, every=k), outside of what is compiled",
)
def unroll(
    step: Callable[..., tuple[Any, Any]], state: Tree, batches: Iterable[Any], *args: Tree, every: int
) -> tuple[Any, Tensor]:
    """Run a step on all batches, as a function whose derivative needs the memory of `every` steps.

    Forward keeps each `every`-th state and nothing in between. Backward runs the steps again, `every` at a time, from
    the last to the first (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). The peak is n / every
    states plus the activations of `every` steps; the cost is one more forward of each step. The best `every` is about
    the square root of n. When backward runs a step again, the step draws the random numbers of its first run from
    torch's generators, under the autocast of its first run, as in `torch.utils.checkpoint`. A generator of your own is
    not reset.

    Args:
        step: `step(state, *batch, *args) -> (state, metrics)` with a 0-d tensor `metrics["loss"]`, from `zf.make_step`
            or a function around it.
        state: the first state, or any tree of tensors that `step` takes.
        batches: one entry per step, of which a tuple becomes several arguments; or a tensor with one row per step.
        args: further arguments of every step, after its batch. Whatever you differentiate by must be here, in `state`
            or in `batches`, because steps run again in backward, where tensors from a closure are constants. A
            closure's tensor that requires grad is refused.
        every: steps from one kept state to the next.

    Returns:
        `(state, losses)`: the last state, and a loss per step, of shape (n,). torch.func (`grad`, `vjp`, `jvp`, `vmap`
        and combinations) and plain autograd can differentiate both, to any order. Values are those of the steps;
        derivatives are those of the formula (see `zf.update`).

    Raises:
        TypeError: `step` cannot be called.
        ValueError: there are no batches, or `every` is not a positive int.
        RuntimeError: a derivative by a tensor of the closure of `step`: inside of torch.func at once, else in backward.

    Examples:
        >>> import torch, zerofn as zf
        >>> def step(state, x, rate):
        ...     return zf.make_step(lambda p, x: (p["w"] - x) ** 2, zf.sgd(rate))(state, x)
        >>> def final(rate):
        ...     start = zf.init(zf.sgd(rate), {"w": torch.tensor(0.0)})
        ...     state, losses = zf.unroll(step, start, [torch.tensor(1.0)] * 4, rate, every=2)
        ...     return state.params["w"]
        >>> torch.func.grad_and_value(final)(torch.tensor(0.25))
        (tensor(1.), tensor(0.9375))
    """
    if not callable(step):
        why = f"the first argument is a step, and {step!r} is {kind_of(step)}"
        right = "zf.unroll(zf.make_step(loss_fn, tx), state, batches, every=k)"
        raise TypeError(explain(f"zf.unroll({step!r}, ...)", why, right))
    check_count("zf.unroll", "every", every, "steps between states that are kept")
    batches = list(batches)
    if not batches:
        right = "zf.unroll(step, state, batches, every=k) with one entry of batches per step"
        raise ValueError(
            explain("zf.unroll(step, state, [])", "there are no batches, so there is no step to run", right)
        )
    if _in_forward_mode():
        # Forward mode keeps no states in any case, so nothing needs to run again.
        return _in_turn(step, state, batches, args)
    losses = []
    for i in range(0, len(batches), every):
        state, found = _segment(step, state, batches[i : i + every], args)
        losses.append(found)
    return state, torch.cat(losses)


def _in_forward_mode() -> bool:
    """Whether to differentiate the steps directly: in forward mode alone, or in forward mode more than once.

    A Function's `jvp` cannot open a level in plain forward mode, and torch drops tangents of tangents there.
    """
    if not functorch_active():
        return forward_level() != NO_LEVEL
    forward, reverse = forward_levels()
    return forward > 1 if reverse else forward > 0


def _in_turn(step: Callable, state: Tree, batches: list[Any], args: tuple) -> tuple[Any, Tensor]:
    losses = []
    for batch in batches:
        state, metrics = step(state, *(batch if isinstance(batch, tuple) else (batch,)), *args)
        losses.append(metrics["loss"])
    return state, torch.stack(losses)


def _segment(step: Callable, state: Tree, batches: list[Any], args: tuple) -> tuple[Any, Tensor]:
    """A few steps as one node of autograd's graph.

    Raises:
        RuntimeError: the steps depend on a differentiated tensor that is not among their arguments.
    """
    values, spec = flatten((state, batches, args))
    floats, others, constants = _sorted(values)
    given = [values[i] for i in (*floats, *others)]
    after: dict[str, Any] = {}

    def run(some: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        now, rows, more = unflatten(spec, _filled(constants, (*floats, *others), (*some, *fixed)))
        made, after["spec"] = flatten(_in_turn(step, now, rows, more))
        first, second, after["constants"] = _sorted(made)
        after["places"] = (*first, *second)
        return [made[i] for i in first], [made[i] for i in second]

    ambient = Ambient(given)
    # Run it on constants: if the result is differentiable all the same, `step` has a differentiated tensor from its
    # closure. Inside of a Function, torch.func would take that for a constant without an error.
    fixed = list(map(constant, given))
    try:
        made, rest = run(fixed[: len(floats)], fixed[len(floats) :])
    except Unrecorded as error:
        raise _from_elsewhere() from error
    if any(map(is_function, made)):
        raise _from_elsewhere()
    out = _Segment.apply(_Again(run, ambient, len(made) + len(rest), len(floats)), *made, *rest, *given)
    assert isinstance(out, tuple)
    return unflatten(after["spec"], _filled(after["constants"], after["places"], out))


class _Again(NamedTuple):
    """The steps of a segment, to be run again.

    Attributes:
        run: the steps.
        ambient: random numbers and autocast of the first run.
        results: how many tensors they return.
        floats: how many of the tensors that they take are floating-point.
    """

    run: Run
    ambient: Ambient
    results: int
    floats: int

    def __call__(self, some: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        with self.ambient.again():
            return self.run(some, fixed)


def _sorted(values: list[Any]) -> tuple[list[int], list[int], list[Any]]:
    """The indices of floating-point tensors; those of other tensors; and the values, with `None` for each tensor."""
    tensors = [i for i, x in enumerate(values) if isinstance(x, Tensor)]
    floats = [i for i in tensors if values[i].is_floating_point()]
    rest = [None if isinstance(x, Tensor) else x for x in values]
    return floats, [i for i in tensors if i not in set(floats)], rest


def _filled(constants: list[Any], places: Sequence[int], tensors: Sequence[Tensor]) -> list[Any]:
    found = list(constants)
    for i, x in zip(places, tensors, strict=True):
        found[i] = x
    return found


class _Segment(Function):
    """The results of `again`. Only its inputs are saved: backward and forward mode run it again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(again: _Again, *tensors: Tensor) -> tuple[Tensor, ...]:
        # The results are copies, since a Function may not return a tensor that it was given.
        return tuple([x.clone() for x in tensors[: again.results]])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.again, tensors = inputs[0], inputs[1 + inputs[0].results :]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(*(x for x in output if not x.is_floating_point()))

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple:  # type: ignore[override]
        again: _Again = ctx.again
        saved = list(map(unwrapped_if_dead, ctx.saved_tensors))
        given, fixed = saved[: again.floats], saved[again.floats :]
        alone = not torch.is_grad_enabled() and not functorch_active()
        if alone:
            given = [x.detach() for x in given]
        with torch.set_grad_enabled(alone or torch.is_grad_enabled()):
            made, pull = torch.func.vjp(lambda *xs: again(xs, fixed)[0], *given)  # type: ignore[misc]
        if alone and any(x.requires_grad for x in made):
            raise _from_elsewhere()
        found = pull([torch.zeros_like(y) if g is None else g for y, g in zip(made, cotangents, strict=False)])
        return None, *[None] * again.results, *found, *(None for _ in fixed)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple:  # type: ignore[override]
        again: _Again = ctx.again
        given, fixed = ctx.saved_tensors[: again.floats], ctx.saved_tensors[again.floats :]
        moving = tangents[1 + again.results :]
        pairs = [(x, torch.zeros_like(x) if t is None else t) for x, t in zip(given, moving, strict=False)]
        points, moved = zip(*pairs, strict=True)
        _, out = torch.func.jvp(lambda *xs: again(xs, fixed)[0], points, moved)  # type: ignore[misc]
        return (*out, *[None] * (again.results - len(out)))


def _from_elsewhere() -> RuntimeError:
    return RuntimeError(
        explain(
            "zf.unroll(step, state, batches) with a step whose closure has a tensor that is differentiated",
            "steps run again in backward, where that tensor is a constant: its gradient would be zero without an error",
            "zf.unroll(step, state, batches, rate, every=k) with def step(state, x, rate): ...; "
            "or rate.detach(), if it is a constant",
        )
    )
