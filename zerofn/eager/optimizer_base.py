"""What an optimizer shows of its model: the state, counters, full parameters and averages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .._errors import explain
from ..core.facts import OVERFLOW_LEAF, SKIPPED_STEPS
from ..core.state import State
from ..core.transform import Transform
from .attachment import Attachment


def _not_assigned(name: str, why: str, right: str) -> AttributeError:
    return AttributeError(explain(f"opt.{name} = ...", why, right))


class OptimizerBase(torch.optim.Optimizer):
    """The properties of an `Optimizer`, and its views of parameters.

    A subclass, since learning-rate schedulers and trainers ask `isinstance(opt, torch.optim.Optimizer)`; of the base
    class only the hooks on steps and state dicts are used, and its constructor does not run.
    """

    metrics: dict[str, Tensor]
    _own: Attachment
    _tx: Transform

    @property
    def state(self) -> State:  # type: ignore[override]
        """The pipeline's state. On one process its stored parameters are the model's own.

        To libraries that expect that of `torch.optim` it is a mapping: `opt.state[model.weight]["exp_avg"]`, of the
        shape of the weight. Under `shard` and behind `reduce_scatter` it holds this rank's rows, `x.to_local()`; norms,
        indices and writes by index are those of the whole, for which every rank makes the call.
        """
        settled, seen = self._own.home.settled(), self._own.home.state_views
        return settled.keyed_by(self._own.params, lambda x: seen.shown(settled, x), self._own.dicts.named(settled))

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
    def is_boundary(self) -> bool:
        """Whether the next `step` closes the accumulation window."""
        return self._own.steps.window.closes()

    @is_boundary.setter
    def is_boundary(self, _: object) -> None:
        raise _not_assigned("is_boundary", "it says what the next step does", "opt.set_boundary(True)")

    @property
    def global_steps(self) -> int:
        """Updates that were applied: `state.step`."""
        return int(self._own.home.current.state.step)

    @property
    def micro_steps(self) -> int:
        """Calls of `step`, those that were held or skipped too: `state.micro_step`."""
        return int(self._own.home.current.state.micro_step)

    @property
    def skipped_steps(self) -> int:
        """Micro-steps that `scale_loss` or `skip_nonfinite` has left out; 0 without them."""
        states = self._own.home.current.state.transforms.values()
        return sum(int(own[SKIPPED_STEPS]) for own in states if SKIPPED_STEPS in own)

    @property
    def overflow_leaf(self) -> str | None:
        """Path of the first leaf whose gradient overflowed in the last `step`, on any rank; `None` if none did."""
        index = int(self.metrics.get(OVERFLOW_LEAF, -1))
        return None if index < 0 else self._own.pipe.layout.leaves[index].path

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch.amp.GradScaler asks before a step. On one process it may scale; over ranks it would hang."""
        _refuse_scaler(self._own)
        return False

    @contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Full parameters are visible in the model: `with opt.gathered(): torch.save(model.state_dict(), f)`.

        On several ranks under `shard` every rank enters it, and one may then do inside what it likes. What is written
        inside is stored at every stage, also where an exception leaves it, as by FSDP and DeepSpeed.

        Raises:
            RuntimeError: only some ranks came, as for `zf.save`; inside, where parameters were gathered, of a step, of
                `detach`, `averaged` and of what loads a state.
        """
        own = self._own
        own.check("gathered", inside=True)
        around = "and inside of it `if rank == 0:` around what one rank does alone"
        own.meet_if_sharded("opt.gathered()", f"with opt.gathered(): on every rank, {around}")
        with own.home.gathered():
            yield own.model

    @contextmanager
    def averaged(self, of: str | None = None) -> Iterator[nn.Module]:
        """The model computes with averages of its parameters: `with opt.averaged(): evaluate(model)`.

        They take the place of the parameters, which are copied and put back to the bit at the end; a rank copies its
        own part. On ranks every one enters it where parameters are cut. `opt.gathered()` may be entered inside.

        Args:
            of: the name of an `ema`, or of the `masked` or `partition` that holds one; by default the only one. What is
                not averaged there stays.

        Raises:
            ValueError: there is no such average.
            RuntimeError: under `shard` only some ranks came, or to its end; inside, of a step, a save or a state dict,
                which would take averages for parameters.

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
        # A rank that computes with averages while another does with parameters would be given some of either.
        right = "with opt.averaged(): evaluate(model) on every rank"
        own.meet_if_sharded("opt.averaged()", right)
        with own.averages.during(own.home.settled(), of):
            yield own.model
            own.meet_if_sharded("the end of opt.averaged()", f"{right}, to its end")

    def detach(self) -> nn.Module:
        """Make the model a plain module again, with full parameters. The optimizer is of no use afterwards.

        Channels between ranks that were opened for this model alone are closed; gradients on their way are lost.

        Raises:
            RuntimeError: on several ranks, only some of them came, as for `zf.save`.
        """
        self._own.detach()
        return self._own.model


def _refuse_scaler(own: Attachment) -> None:
    if own.pipe.step_groups:
        why = "each rank looks for overflow in what it has alone, and some would skip a step that others make"
        right = 'zf.scale_loss("dynamic") in the chain, and loss.backward() and opt.step() without a scaler'
        raise RuntimeError(explain("torch.amp.GradScaler with a pipeline over ranks", why, right))
    if own.home.in_backward is not None:
        why = "backward has updated parameters with gradients that were scaled, and none is left to be looked at"
        right = "zf.attach(model, tx) without in_backward; or bf16, which needs no scale"
        raise RuntimeError(explain("torch.amp.GradScaler with in_backward=True", why, right))
