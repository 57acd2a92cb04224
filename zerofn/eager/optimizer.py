"""`zf.attach` and the optimizer that it returns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._compat.autograd import grad_mode_kept, set_grad_mode
from .._compat.functorch import register_pytree_node, uncompiled
from .._compat.tensors import HOOKS_OF, profiler_runs
from .._errors import explain
from .._interrupts import Writing, interrupts_held
from .._profiler_ranges import NOTHING, PHASE, heard, ranged
from ..core.arguments import check_flag
from ..core.facts import OVERFLOW_LEAF, SKIPPED_STEPS
from ..core.state import State
from ..core.transform import Transform
from ..core.tree import register_global
from ..core.uncompiled import kept_out_of_graphs
from .attachment import Attachment
from .resident_params import Start, from_values

if TYPE_CHECKING:
    from .loading import LoadedStates


class Metrics(dict[str, Tensor]):
    """The metrics of a step: a dict that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        # Only notebooks need this module.
        from ..core.html import card, numbers

        shown = [(name, f"{x.item():.4g}") for name, x in self.items() if x.numel() == 1]
        return card("metrics of the last step", numbers(shown) if shown else "none yet", text=repr(self))

    def __reduce__(self) -> Any:
        # torch.load accepts plain containers by default.
        return OrderedDict, (), None, None, iter(self.items())


def _flat(metrics: Metrics) -> tuple[tuple[Tensor, ...], tuple[str, ...], tuple[str, ...]]:
    """Values, and names twice: to make the dict again, and as paths. In the order in which optree has a dict's."""
    names = tuple(sorted(metrics))
    return tuple([metrics[name] for name in names]), names, names


def _metrics(names: Iterable[str], values: Iterable[Tensor]) -> Metrics:
    return Metrics(zip(names, values, strict=True))


register_global(Metrics, _flat, _metrics)
# torch's trees have a plain dict in its own order; by name both kinds of trees list the same values.
register_pytree_node(Metrics, lambda m: _flat(m)[:2], lambda values, names: _metrics(names, values))

# ----------------------------------------------------------------------------------------------------------------------
# `Optimizer` is what `zf.attach` returns. Its methods have the names of `torch.optim`.


class Optimizer(torch.optim.Optimizer):
    """The optimizer that `attach` returns, with the methods of `torch.optim` and some of DeepSpeed's.

    It is a subclass because learning-rate schedulers and trainers ask `isinstance(opt, torch.optim.Optimizer)`. It uses
    only the base class's hooks on steps and state dicts, and does not run its constructor.

    Attributes:
        metrics: those of the last `step`, as 0-d tensors of their own.
        param_groups: one for each optimizer in the pipeline. Its `lr` may be set, and `weight_decay`, `betas` and
            `momentum` where it has them (docs/how-to/change-settings.md). An optimizer without a rate shows an `lr` of
            1.0.
    """

    def __init__(
        self,
        model: nn.Module,
        tx: Transform,
        in_backward: bool = False,
        start: Start = from_values,
        hold_frozen: bool = False,
        check: bool = False,
        capturable: bool = False,
    ):
        # These are torch's lists of hooks, which its constructor would make. torch itself runs the hooks on steps.
        for name in HOOKS_OF.values():
            setattr(self, name, OrderedDict())
        self._tx = tx
        self.metrics = Metrics()
        self.lr_scheduler: Any = None
        try:
            self._own = own = Attachment(model, tx, in_backward, start, hold_frozen, check, capturable)
            own.belongs_to(self)
            self.defaults = {k: x for k, x in self.param_groups[0].items() if k != "params"}
        except BaseException as error:
            if hasattr(self, "_own"):
                self._own.give_up(error)
            raise

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._own.groups.groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._own.groups.groups = groups

    @uncompiled
    @torch.optim.Optimizer.profile_hook_step
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        weight: Any = None,
        lr_kwargs: dict[str, Any] | None = None,
        **given: Any,
    ) -> Any:
        """One micro-step: hand the gradients of the parameters to the pipeline.

        Parameters change when the pipeline applies the step: `metrics["updated"]`. Returns the closure's result.

        Args:
            closure: evaluates the loss and runs backward, as in torch.optim. A transform that asks for a second
                gradient (`sam`) needs a closure: `step` calls it twice, and clears gradients between the calls.
            weight: of this micro-batch, for `accumulate(weighted=True)`.
            lr_kwargs: for `lr_scheduler.step`, as in DeepSpeed. If `opt.lr_scheduler` is a torch scheduler, it is
                stepped after each applied update, and only then.
            given: by keyword, the numbers that a transform wants, such as `loss=` for `scale_by_polyak`. You need not
                pass the loss after `opt.backward(loss)`, nor with a closure.

        Raises:
            RuntimeError: the model is detached, in the middle of a backward or of another step, or has changed since it
                was attached; or a step raised while it was writing into the state, and no state has been loaded since.
            TypeError: no transform wants a number of that name.
            ValueError: no parameter has a gradient, or a number that a transform wants is missing.
        """
        own = self._own
        if lr_kwargs is not None and self.lr_scheduler is None:
            why = "it is passed to the step() of opt.lr_scheduler, and there is none"
            raise ValueError(explain("opt.step(lr_kwargs=...)", why, "opt.lr_scheduler = scheduler, before opt.step()"))
        loss = None
        if closure is not None:
            own.check("step")
            with torch.enable_grad():
                loss = closure()
        if own.pipe.second is not None:
            own.evaluate_again(closure)
        if given or own.pipe.wants:
            given = own.numbers_of_step(given, loss)
        # Entering a range that nobody records takes longer than this check.
        listened = heard() is not None or profiler_runs()
        fully, mode = own.fully_sharded, torch.is_grad_enabled()
        try:
            # Over ranks collectives come before the first write. Updates in backward have written already.
            late = own.home.alone and own.home.in_backward is None
            hold: Any = Writing() if late else interrupts_held()
            with hold, ranged(PHASE, "update") if listened else NOTHING:
                step = own.step if fully is None else partial(own.step_fully_sharded, fully)
                self.metrics = Metrics(step(weight, given, hold if late else set()))
                if self.lr_scheduler is not None and bool(self.metrics["updated"]):
                    self.lr_scheduler.step(**(lr_kwargs or {}))
        except BaseException:
            # A second Ctrl-C is not held. If it comes while torch enters or leaves a grad mode, that mode would stay.
            set_grad_mode(mode)
            raise
        return loss

    # torch calls this in each step. Its own is for a profiler that records stacks: it reads `state` by parameter, and
    # would fail. `bool` is a C function that does nothing here.
    _optimizer_step_code = staticmethod(bool)  # type: ignore[assignment]

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this micro-step; accumulated sums stay."""
        with interrupts_held():
            self._own.clear(set_to_none)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """DeepSpeed's spelling of `loss.backward()`.

        As with DeepSpeed, you need no `zero_grad`: `backward` first drops the gradients that the last `step` has used.

        Args:
            loss: a tensor of one element.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: as in DeepSpeed, whether zerofn divides by the number of accumulated micro-batches. With
                `False` you have divided, and `accumulate` only adds. It must be the same for a whole window.

        Returns:
            The loss divided by the number of accumulated micro-batches; with `scale_wrt_gas=False` as it is.

        Raises:
            RuntimeError: there are gradients of an earlier `loss.backward()`, which a `step` may have used already.
                Call `opt.zero_grad()` after each step with `loss.backward()`.
        """
        self._own.check("backward", inside=True)
        check_flag("opt.backward", "scale_wrt_gas", scale_wrt_gas)
        return self._own.backward(loss, retain_graph, scale_wrt_gas)

    def set_boundary(self, boundary: bool | None) -> None:
        """Decide by hand whether steps close the accumulation window; `None` lets `accumulate` decide again."""
        self._own.window.force(boundary)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Everything needed to go on, in the form of `torch.optim`, for `torch.save`, DCP and torch's own optimizers.

        `state` and `param_groups` have the keys of torch's counterpart. Entries that belong to no parameter (a loss
        scale, the count of a window) are among those of the first parameter, under names that begin with `zerofn/`.
        Parameters, counters and names are under the key `"zerofn"`, which torch's optimizers ignore. Shards are
        DTensors of the full shapes, sharded by rows; a sharded 0-d tensor is in full on every rank. If only the owner
        of a leaf has the leaf's state, `state_dict` sends this state to the other ranks. `zf.save` keeps the module's
        buffers too. If leaves are sharded, every rank must call `state_dict`, because each rank has only a part of the
        state.

        Raises:
            RuntimeError: `state_dict` is called in the middle of a step, or of a window whose sums differ between
                ranks; or leaves are sharded, and only some ranks call it.

        Examples:
            >>> import torch, zerofn as zf
            >>> opt = zf.attach(torch.nn.Linear(2, 2), zf.adamw(0.1))
            >>> saved = opt.state_dict()
            >>> sorted(saved), sorted(saved["state"][0])
            (['param_groups', 'state', 'zerofn'], ['exp_avg', 'exp_avg_sq', 'step'])
        """
        self._own.check_state_dict()
        _run_hooks(self, "state_dict", "pre")
        return _run_hooks(self, "state_dict", "post", self._own.dicts.to_save())

    def load_state(self, state: State, param_groups: list[dict[str, Any]] | None = None) -> None:
        """Copy a `State` of this pipeline and model into the current state and the model's parameters.

        Args:
            state: for instance of `zf.load(directory, like=opt.state)`. The module's buffers stay as they are.
            param_groups: learning rates, as `state_dict()["param_groups"]` has them; by default they stay.

        Raises:
            ValueError: as `load_state_dict`, whose hooks do not run.
        """
        self._own.load("load_state", partial(self._own.dicts.read_state, state, param_groups))

    def load_state_dict(self, state_dict: dict[str, Any]) -> LoadedStates:  # type: ignore[override]
        """Go on from a `state_dict` of ours or of `torch.optim`. Every rank calls it.

        From a state dict of torch's, it loads moments, counts and rates, full or as DTensors
        (docs/how-to/torch-checkpoints.md).
        Parameters are matched by name if it has names, else by their order. A parameter without a state there gets a
        new one, as in torch.

        Returns:
            How parameters were matched, `by` their `"name"` or `"order"`, and the paths of those that were `made_anew`.

        Raises:
            ValueError: the state dict is of another pipeline or model, or has the shards of another rank. Every
                missing, unexpected, doubled or misshapen entry is named on every rank, and nothing is changed.
        """
        self._own.dicts.check_complete()
        given = _run_hooks(self, "load_state_dict", "pre", state_dict)
        report = self._own.load("load_state_dict", partial(self._own.dicts.read, given))
        _run_hooks(self, "load_state_dict", "post")
        return report

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: groups are written as `zf.partition`."""
        why = "the state was made for the parameters that the model had when it was attached"
        right = "zf.partition({'a': zf.adamw(1e-3), 'b': zf.adamw(1e-4)}, lambda path: ...) before zf.attach"
        raise NotImplementedError(explain("opt.add_param_group(...)", why, right))

    def __repr__(self) -> str:
        return f"attach({type(self._own.model).__name__}, {self.tx!r})"

    def _repr_html_(self) -> str:
        # Only notebooks need this module.
        from ..core.html import card

        metrics = self.metrics._repr_html_() if self.metrics else ""
        shown = (self.tx._repr_html_(), metrics, self.state._repr_html_())
        return card(f"{type(self._own.model).__name__}, attached", *shown)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wrong = "a copy or a pickle of what zf.attach returned"
        why = "an optimizer belongs to one model by hooks, and a copy would belong to none"
        right = "opt.state_dict() to keep it; for a second model, another = zf.attach(other_model, opt.tx)"
        raise TypeError(explain(wrong, why, right))

    @property
    def state(self) -> State:  # type: ignore[override]
        """The pipeline's state. On one process its stored parameters are the model's own.

        It is also a mapping, as libraries expect of `torch.optim`: `opt.state[model.weight]["exp_avg"]` has the shape
        of the weight. Under `shard` and behind `reduce_scatter` it holds this rank's rows, `x.to_local()`. Norms,
        indices and writes by index are those of the full tensor, and every rank must make the call.
        """
        state, seen = self._own.home.state_now(), self._own.home.state_views
        shown = (lambda x: x) if seen is None else partial(seen.shown, state)
        return state.keyed_by(self._own.params, shown, self._own.dicts.named(state), self._own.restart)

    @state.setter
    def state(self, _: object) -> None:
        raise _not_assigned(
            "state",
            "the pipeline has made its state for this model, and to assign another would leave the model's parameters",
            "tx = opt.tx; opt.detach(); opt = zf.attach(model, tx) for one made anew;\n"
            "opt.load_state(state) for one of this pipeline and model",
        )

    @property
    def tx(self) -> Transform:
        """The pipeline that the model was attached with."""
        return self._tx

    @tx.setter
    def tx(self, _: object) -> None:
        why = "the model is attached with another one, and has its state"
        raise _not_assigned("tx", why, "opt.detach(); opt = zf.attach(model, tx)")

    @property
    def attached(self) -> bool:
        """Whether the model is attached still: `detach` ends it."""
        return self._own.here

    @property
    def is_boundary(self) -> bool:
        """Whether the next `step` closes the accumulation window."""
        return self._own.window.closes()

    @is_boundary.setter
    def is_boundary(self, _: object) -> None:
        raise _not_assigned("is_boundary", "it says what the next step does", "opt.set_boundary(True)")

    @property
    def global_steps(self) -> int:
        """Updates that were applied: `state.step`."""
        return int(self._own.home.current.state.step)

    @property
    def micro_steps(self) -> int:
        """Calls of `step`, accumulated or skipped ones included: `state.micro_step`."""
        return int(self._own.home.current.state.micro_step)

    @property
    def skipped_steps(self) -> int:
        """Micro-steps that `scale_loss` or `skip_nonfinite` has skipped; 0 without them."""
        states = self._own.home.current.state.arriving.values()
        return sum(int(own[SKIPPED_STEPS]) for own in states if SKIPPED_STEPS in own)

    @property
    def overflow_leaf(self) -> str | None:
        """Path of the first leaf whose gradient overflowed in the last `step`, on any rank; `None` if none did."""
        index = int(self.metrics.get(OVERFLOW_LEAF, -1))
        return None if index < 0 else self._own.pipe.layout.leaves[index].path

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler reads this before a step. On one process it may scale; over ranks it would hang."""
        _refuse_scaler(self._own)
        return False

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Inside the block the model has full parameters: `with opt.gathered(): torch.save(model.state_dict(), f)`.

        Under `shard` every rank must enter the block; inside, ranks may run different code. What you write into
        parameters inside the block is stored, at every ZeRO stage, and also if an exception leaves the block, as with
        FSDP and DeepSpeed.

        Raises:
            RuntimeError: only some ranks came, as for `zf.save`. Inside, where parameters were gathered: a step,
                `detach`, `averaged`, or a load of a state.
        """
        own = self._own
        own.check("gathered", inside=True)
        if own.fully_sharded is not None:
            raise RuntimeError(
                explain(
                    "opt.gathered() of a model of fully_shard",
                    "FSDP2 gathers its parameters for forward and backward, and zerofn does not",
                    "p.full_tensor(), on every rank;\n"
                    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) for all of them",
                )
            )
        around = "and inside of it `if rank == 0:` around what one rank does alone"
        own.meet_if_sharded("opt.gathered()", f"with opt.gathered(): on every rank, {around}")
        with grad_mode_kept(), own.home.gathered():
            yield own.model

    @contextmanager
    def averaged(self, of: str | None = None) -> Iterator[nn.Module]:
        """The model computes with averages of its parameters: `with opt.averaged(): evaluate(model)`.

        Inside the block averages replace the parameters. The parameters are copied before, and restored bit for bit at
        the end. Each rank copies its own shards. If parameters are sharded, every rank must enter the block. You may
        enter `opt.gathered()` inside.

        Args:
            of: the name of the transform whose state holds the averages: `"ema"`, `"schedule_free_adamw"`, for
                `schedule_free` and `lookahead` the name of the optimizer that they wrap, or the name of a `masked` or
                `partition` that holds one of them. It may be left out if the chain has one average. Parameters that
                are not averaged keep their values.

        Raises:
            ValueError: the chain has no such average, or has several and `of` is left out.
            RuntimeError: under `shard` only some ranks came to its beginning or its end. Inside: a step, a save or a
                state dict, which would take averages for parameters.

        Examples:
            >>> import torch, zerofn as zf
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> _ = torch.nn.init.zeros_(model.weight)
            >>> opt = zf.attach(model, zf.chain(zf.sgd(1.0), zf.ema(0.5)))
            >>> model(torch.ones(1, 1)).sum().backward()
            >>> opt.step()
            >>> with opt.averaged():
            ...     model(torch.ones(1, 1)).item()
            -0.5
            >>> model.weight.item()
            -1.0
        """
        own = self._own
        own.check("averaged")
        # If one rank computed with averages and another with parameters, both would gather a mixture.
        right = "with opt.averaged(): evaluate(model) on every rank"
        own.meet_if_sharded("opt.averaged()", right)
        with own.averages.during(own.home.state_now(), of):
            yield own.model
            own.meet_if_sharded("the end of opt.averaged()", f"{right}, to its end")

    def detach(self) -> nn.Module:
        """Make the model a plain module again, with full parameters. The optimizer cannot be used afterwards.

        `detach` closes the process groups that zerofn opened for this model alone. Gradients that are still being
        reduced are lost.

        Raises:
            RuntimeError: on several ranks, only some of them came, as for `zf.save`.
        """
        self._own.detach()
        return self._own.model


def _run_hooks(opt: Optimizer, method: str, when: str, *state_dict: Any) -> Any:
    """Run the hooks that the user has registered `pre` or `post` a method. A hook may return another state dict."""
    hooks = list(getattr(opt, HOOKS_OF[method, when]).values())
    if hooks and when == "pre" and state_dict:
        # Hooks get a copy, so that the caller does not see what they write into it.
        state_dict = (state_dict[0].copy(),)
    for hook in hooks:
        other = hook(opt, *state_dict)
        if state_dict and other is not None:
            state_dict = (other,)
    return state_dict[0] if state_dict else None


def _not_assigned(name: str, why: str, right: str) -> AttributeError:
    return AttributeError(explain(f"opt.{name} = ...", why, right))


def _refuse_scaler(own: Attachment) -> None:
    if own.pipe.step_groups:
        why = "each rank would look for overflow in its own gradients, and some would skip a step that others make"
        right = 'zf.scale_loss("dynamic") in the chain, and loss.backward() and opt.step() without a scaler'
        raise RuntimeError(explain("torch.amp.GradScaler with a pipeline over ranks", why, right))
    if own.home.in_backward is not None:
        why = "backward has already updated parameters with scaled gradients, and has freed these"
        right = "zf.attach(model, tx) without in_backward; or bf16, which needs no scale"
        raise RuntimeError(explain("torch.amp.GradScaler with in_backward=True", why, right))


# ----------------------------------------------------------------------------------------------------------------------
# `attach` binds a pipeline to a model that is trained by `loss.backward()`.


@kept_out_of_graphs(
    "it makes an optimizer, and hooks on the model", "opt = zf.attach(model, tx), outside of what is compiled"
)
def attach(
    model: nn.Module,
    tx: Transform,
    in_backward: bool = False,
    hold_frozen: bool = False,
    check: bool = False,
    capturable: bool = False,
) -> Optimizer:
    """Attach a pipeline to a model that is trained by `loss.backward()`.

    The model stays the same object, and you call it as before. Every backward of PyTorch works, on any output, any
    number of times. Gradients do not contain a loss scale: neither `p.grad`, nor the gradient of an input, nor a second
    derivative.

    Args:
        model: its parameters become the stored ones, in `precision`'s `store_dtype`.
        tx: a transform, or a chain, with an optimizer in it.
        in_backward: update each leaf as soon as backward has computed its gradient, and free the gradient, so that the
            gradients of all leaves never exist at once. `step()` then only ends the step. The chain must treat each
            leaf independently of the others, and each step must have one backward.
        hold_frozen: make states at once for parameters that are frozen now, too. By default a frozen parameter has no
            state until you unfreeze it. A captured step, and a model that is compiled as one graph under `shard`, train
            later only what had a state when it was attached.
        check: make the checks of the first steps in every step, for a program that changes as it runs. Under
            `scale_loss` zerofn searches the graphs of the first ten backwards for tensors that left the model otherwise
            than by `return`, and with `check` the graph of every backward. zerofn compares the memory addresses of the
            results of your own transforms in the first three steps, and with `check` in every step.
        capturable: let `opt.step()` be captured in a CUDA graph, as in `torch.optim`: counts of updates, rates of
            schedules and scales are kept on the device, and each replay is a step. See docs/how-to/cuda-graphs.md.

    Returns:
        An `Optimizer` to call `step()` and `zero_grad()` on. It is an instance of `torch.optim.Optimizer`.

    What `p.grad` holds:

    - After `backward()`, `p.grad` is the sum of the gradients without a loss scale since `p.grad` was last cleared, as
      in PyTorch.
    - Under `shard`, after `backward()`, `p.grad` is this rank's shard of the mean gradient over ranks.
    - If `reduce_scatter` or `all_reduce` comes before any `accumulate`, `p.grad` has a shape and no numbers after
      `backward()` on several ranks, because the gradient is being reduced. Before `opt.step()`, `p.grad.clone()` on
      every rank is the mean over ranks, in full; zeros if no rank has a gradient.
    - With `in_backward`, `p.grad` has a shape and no numbers after `backward()`, because the gradient was used.
    - After `step()`, `p.grad` is `None` with `accumulate(k > 1)`, which has moved the gradient into its sum, and with
      `in_backward`. Otherwise `step()` does not change `p.grad`.
    - After `zero_grad()`, `p.grad` is `None`, or zeros with `set_to_none=False`.

    Under `shard` on several ranks a parameter and its gradient are DTensors with the placement `Shard(0)`. As after
    `fully_shard`, the model has other parameter objects until `opt.detach()`: take them from the model. A computation
    with these DTensors, inside the model or outside, gathers the full tensor on every rank: `p.grad.norm()`, `loss +
    model.head.weight.norm()`. A write into a DTensor keeps this rank's rows. torch's functions that clip gradients
    raise if `p.grad` has no numbers or is not yet averaged over ranks. Gradients of a block may be views of one buffer.
    If you keep one gradient longer than a step, clone it: otherwise the memory of the whole buffer is kept.

    Between steps `p.requires_grad_(False)` freezes a parameter, and `p.requires_grad_(True)` unfreezes it. All ranks
    must do the same. A frozen parameter keeps its value, its state and its count of updates. A parameter without a
    state gets one in the first step after it is unfrozen, as in `torch.optim`. That step hooks the model anew, and
    under `shard` the gradient is in `p.grad` only behind it.

    A hook on a parameter gets the value for `p.grad`: under `shard` this rank's shard of the mean gradient, as under
    FSDP2, otherwise the gradient of this rank. So a linear hook makes the same step with and without `shard`, and a
    hook that is not linear (a clamp) does not. If `p.grad` has no numbers after backward, call
    `p.register_post_accumulate_grad_hook` before `attach`.

    Raises:
        TypeError: `model` is no module.
        ValueError: the model is attached already, has no parameters, NaN in one, or modules of `torch.jit`;
            `in_backward` with a transform that needs the full gradient; or `capturable` with several ranks, a
            transform or a schedule that needs the CPU in every step.

    Examples:
        >>> import torch, zerofn as zf
        >>> model = torch.nn.Linear(2, 1)
        >>> opt = zf.attach(model, zf.chain(zf.clip_by_global_norm(1.0), zf.adamw(lr=1e-2)))
        >>> loss = model(torch.ones(4, 2)).square().mean()
        >>> loss.backward()
        >>> opt.step()
        >>> opt.zero_grad()
        >>> bool(opt.metrics["updated"]), int(opt.state.step)
        (True, 1)
    """
    if not isinstance(model, nn.Module):
        right = "zf.attach(model, tx); for a tree of tensors, zf.init(tx, params) and zf.make_step(loss_fn, tx)"
        raise TypeError(
            explain(f"attach({type(model).__name__}, tx)", "the eager route hooks a torch.nn.Module", right)
        )
    check_flag("attach", "in_backward", in_backward)
    check_flag("attach", "hold_frozen", hold_frozen)
    check_flag("attach", "check", check)
    check_flag("attach", "capturable", capturable)
    return Optimizer(model, tx, in_backward, hold_frozen=hold_frozen, check=check, capturable=capturable)
