"""The optimizer that `zf.attach` returns, under the names of `torch.optim`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._compat.compiler import uncompiled
from .._compat.modules import HOOKS_OF
from .._errors import explain
from .._interrupts import interrupts_held
from .._ranges import PHASE, ranged
from ..core.arguments import check_flag
from ..core.state import State
from ..core.transform import Transform
from .attachment import Attachment
from .optimizer_base import OptimizerBase
from .resident_params import Start, from_values
from .torch_state_dict import LoadedStates


class Optimizer(OptimizerBase):
    """What `attach` returns: an `Attachment` under the names of `torch.optim`, and some of DeepSpeed's.

    Attributes:
        metrics: those of the last `step`, as 0-d tensors of their own.
        param_groups: one for each optimizer in the pipeline. Its `lr` may be set, and `weight_decay`, `betas` and
            `momentum` where it has them: docs/frameworks.md. An optimizer without a rate shows an `lr` of 1.0.
    """

    def __init__(
        self,
        model: nn.Module,
        tx: Transform,
        in_backward: bool = False,
        start: Start = from_values,
        hold_frozen: bool = False,
    ):
        # Torch's lists of hooks, which the constructor of its class would make. It runs those of steps itself.
        for name in HOOKS_OF.values():
            setattr(self, name, OrderedDict())
        self._tx = tx
        self.metrics: dict[str, Tensor] = {}
        self.lr_scheduler: Any = None
        try:
            self._own = own = Attachment(model, tx, in_backward, start, hold_frozen)
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
        self, closure: Callable[[], Any] | None = None, *, weight: Any = None, lr_kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One micro-step: hand the gradients of the parameters to the pipeline.

        Parameters change when the pipeline lets the step through: `metrics["updated"]`. Gives what the closure gave.

        Args:
            closure: evaluates the loss and runs backward, as in torch.optim.
            weight: of this micro-batch, for `accumulate(weighted=True)`.
            lr_kwargs: for `lr_scheduler.step`, as in DeepSpeed. Set `opt.lr_scheduler` to a torch scheduler and it is
                stepped after each update that was applied, and not otherwise.

        Raises:
            RuntimeError: detached, in the middle of a backward, or the model changed since it was attached; or a step
                raised while it was writing into the state, and none has been loaded since.
            ValueError: no parameter has a gradient.
        """
        self._own.check("step")
        if lr_kwargs is not None and self.lr_scheduler is None:
            raise ValueError("step(lr_kwargs=...) has no effect without a scheduler: opt.lr_scheduler = scheduler.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # With what belongs to the step: a rate that was not set would be that of the step before.
        with interrupts_held(), ranged(PHASE, "update"):
            self.metrics = self._own.steps.run(weight)
            if self.lr_scheduler is not None and bool(self.metrics["updated"]):
                self.lr_scheduler.step(**(lr_kwargs or {}))
        return loss

    def _optimizer_step_code(self) -> None:
        """Where a profiler that records stacks reads `state` by parameter, which it cannot here."""

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of this micro-step; sums that are held stay."""
        with interrupts_held():
            self._own.steps.clear(set_to_none)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """DeepSpeed's spelling of `loss.backward()`.

        Like DeepSpeed's, it needs no `zero_grad`: gradients that the last `step` has used are dropped first.

        Args:
            loss: a tensor of one element.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: as in DeepSpeed, whether zerofn is to divide by the number of accumulated micro-batches. With
                `False` you have, and `accumulate` adds up and does not. One and the same for a whole window.

        Returns:
            The loss divided by the number of accumulated micro-batches; with `scale_wrt_gas=False` as it is.
        """
        self._own.check("backward", inside=True)
        check_flag("opt.backward", "scale_wrt_gas", scale_wrt_gas)
        return self._own.steps.backward(loss, retain_graph, scale_wrt_gas)

    def set_boundary(self, boundary: bool | None) -> None:
        """Decide by hand whether steps close the window; `None` gives the decision back to `accumulate`."""
        self._own.steps.window.force(boundary)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Everything needed to go on, in the form of `torch.optim`, for `torch.save`, DCP and torch's own optimizers.

        `state` and `param_groups` have the keys of torch's counterpart. What belongs to no parameter (a loss scale, the
        count of a window) stands among the entries of the first parameter, under names that begin with `zerofn/`; the
        parameters themselves, counters and names under the key `"zerofn"`, which torch's optimizers pass over. Shards
        are distributed tensors of the shapes of parameters, cut by rows. Where a leaf has fewer rows than ranks, or an
        owner, it is gathered for this, so every rank calls it. `zf.save` keeps the module's buffers too.

        Raises:
            RuntimeError: in the middle of a step; or only some ranks came to a gather.

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
        """Go on from a `State` of this pipeline and model: its numbers are copied into the model's parameters.

        Args:
            state: for instance of `zf.load(directory, like=opt.state)`. The module's buffers stay as they are.
            param_groups: learning rates, as `state_dict()["param_groups"]` has them; by default they stay.

        Raises:
            ValueError: as `load_state_dict`, whose hooks do not run.
        """
        self._own.load(self._own.dicts.of(state, param_groups), "load_state")

    def load_state_dict(self, state_dict: dict[str, Any]) -> LoadedStates:  # type: ignore[override]
        """Go on from a `state_dict` of ours, of older versions, or of `torch.optim`. Every rank calls it.

        Of torch's, moments, counts and rates are taken, whole or distributed: docs/frameworks.md. Parameters are told
        by name where it has names, else by their order. One that has no state there begins anew, as in torch.

        Returns:
            How parameters were told, `by` their `"name"` or `"order"`, and the paths of those that were `made_anew`.

        Raises:
            ValueError: of another pipeline or model; every missing, unexpected, doubled or misshapen entry is named,
                and nothing is changed.
        """
        self._own.dicts.check_loadable(state_dict)
        told = self._own.load(_run_hooks(self, "load_state_dict", "pre", state_dict), "load_state_dict")
        _run_hooks(self, "load_state_dict", "post")
        return told

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: groups are written as `zf.partition`."""
        why = "the state is made once, for the model as it was attached"
        right = "zf.partition({'a': zf.adamw(1e-3), 'b': zf.adamw(1e-4)}, lambda path: ...) before zf.attach"
        raise NotImplementedError(explain("opt.add_param_group(...)", why, right))

    def __repr__(self) -> str:
        return f"attach({type(self._own.model).__name__}, {self.tx!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        wrong = "a copy or a pickle of what zf.attach returned"
        why = "it is bound to its model by hooks, and a copy would be bound to nothing"
        right = "opt.state_dict() to keep it; for a second model, another = zf.attach(other_model, opt.tx)"
        raise TypeError(explain(wrong, why, right))


def _run_hooks(opt: Optimizer, method: str, when: str, *state_dict: Any) -> Any:
    """Run the hooks that the user has registered `pre` or `post` a method: one may return another state dict."""
    hooks = list(getattr(opt, HOOKS_OF[method, when]).values())
    if hooks and when == "pre" and state_dict:
        # Of the caller, who is not to see what hooks write into it.
        state_dict = (state_dict[0].copy(),)
    for hook in hooks:
        other = hook(opt, *state_dict)
        if state_dict and other is not None:
            state_dict = (other,)
    return state_dict[0] if state_dict else None
