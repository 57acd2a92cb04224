"""Many steps with few states kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import get_device_states, set_device_states

from zerofn.extend import Unrecorded, check_count, explain, flatten, kept_out_of_graphs, kind_of, unflatten

# What has no public name: torch's own private names for the levels of torch.func.
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
# An `Ambient` keeps what a function depends on besides its arguments, random numbers and autocast, to run it again
# later.


class Ambient:
    """Torch's random numbers and autocast as they are now; a generator of the user's own is not known here.

    Args:
        tensors: on whose devices random numbers may be drawn.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.random = torch.get_rng_state()
        self.devices, self.states = get_device_states(*tensors)
        kinds = {"cpu", *(x.device.type for x in tensors if x.device.type != "meta")}
        self.casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self.cached = torch.is_autocast_cache_enabled()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside it is as it was; afterwards as it is now.

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
# `unroll` makes one function of many steps. Its derivative keeps few of the states in between.


# Tensors in, tensors out: those that can be differentiated, and the others.
Run = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]


@kept_out_of_graphs(
    "it runs steps again in backward, from states that it kept: these are graphs of their own",
    "zf.unroll(torch.compile(step), state, batches, every=k), outside of what is compiled",
)
def unroll(
    step: Callable[..., tuple[Any, Any]], state: Tree, batches: Iterable[Any], *args: Tree, every: int
) -> tuple[Any, Tensor]:
    """Run a step on all batches, as a function whose derivative needs the memory of `every` steps.

    Forward keeps each `every`-th state and nothing of the steps between; backward runs them again, `every` at a time,
    from the last to the first (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016). So the peak is that
    of n / every states and of the activations of `every` steps, for one more evaluation of each step. Best is about the
    root of the number of steps. What is run again draws the same numbers of torch's generators, under the autocast of
    forward, as `torch.utils.checkpoint` has it; a generator of your own goes on from where it is.

    Args:
        step: `step(state, *batch, *args) -> (state, metrics)` with a 0-d tensor `metrics["loss"]`: of
            `zf.make_step`, or a function around it.
        state: the first state, or any tree of tensors that `step` takes.
        batches: one entry for each step, of which a tuple is spread over arguments; or a tensor, a row for each step.
        args: what else the steps get, alike in each, after their batch. What the result is differentiated by must be
            here, in `state` or in `batches`: a step is run again in backward, where tensors of its closure are
            constants. One of those that requires grad is refused.
        every: how many steps lie between two states that are kept.

    Returns:
        `(state, losses)`: the last state, and the loss of each step, of shape (n,). Functions of the state, the batches
        and `args` to torch.func (`grad`, `vjp`, `jvp`, `vmap` and what is made of them) and to plain autograd, to any
        order. Values are those of the steps; derivatives are those of the formula (see `zf.update`).

    Raises:
        ValueError: no batches.
        RuntimeError: a derivative by a tensor that `step` has from elsewhere: inside of torch.func at once, and else in
            backward.

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
        raise ValueError(explain("zf.unroll(step, state, [])", "there is no step to run", "a batch for each step"))
    if _in_forward_mode():
        # Forward mode keeps nothing of any step.
        return _in_turn(step, state, batches, args)
    losses = []
    for i in range(0, len(batches), every):
        state, found = _segment(step, state, batches[i : i + every], args)
        losses.append(found)
    return state, torch.cat(losses)


def _in_forward_mode() -> bool:
    """Whether steps are to be differentiated as they are: in forward mode alone, or more than once in forward mode.

    The `jvp` of a Function can open no level in plain forward mode, and torch drops tangents of tangents there.
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
        RuntimeError: they are functions of tensors that they are not given.
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
    # Of constants, so that what is differentiated here comes from elsewhere. Within a Function torch.func would take it
    # for a constant and say nothing.
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
    """A segment's steps, to be run again.

    Attributes:
        run: the steps.
        ambient: random numbers and autocast of the first run.
        results: how many tensors it gave.
        floats: how many of the tensors that it is given have derivatives.
    """

    run: Run
    ambient: Ambient
    results: int
    floats: int

    def __call__(self, some: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        with self.ambient.again():
            return self.run(some, fixed)


def _sorted(values: list[Any]) -> tuple[list[int], list[int], list[Any]]:
    """The places of tensors that have derivatives; those of other tensors; and the values, `None` for each tensor."""
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
    """The results of `again`, of which only the inputs are saved; backward and forward mode run it again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(again: _Again, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Copies: a Function may not return a tensor that it was given.
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
            "zf.unroll(step, state, batches) of a step that has a tensor from elsewhere which is differentiated",
            "steps are run again in backward, where it is a constant: its gradient would be zero in silence",
            "zf.unroll(step, state, batches, rate, every=k) with def step(state, x, rate): ...; "
            "or rate.detach(), if it is a constant",
        )
    )
