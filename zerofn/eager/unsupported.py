"""Errors for what a `torch.optim.Optimizer` can do and that of an attached model cannot."""

from __future__ import annotations

from .._errors import explain


def another_group() -> NotImplementedError:
    """Why there is no group to add later."""
    return NotImplementedError(
        explain(
            "opt.add_param_group(...)",
            "the state is made once, for the model as it was attached",
            "zf.partition({'a': zf.adamw(1e-3), 'b': zf.adamw(1e-4)}, lambda path: ...) before zf.attach",
        )
    )


def scaler_over_ranks() -> RuntimeError:
    """Why a scaler of torch's is none for a pipeline over ranks, where it would hang."""
    return RuntimeError(
        explain(
            "torch.amp.GradScaler with a pipeline over ranks",
            "each rank looks for overflow in what it has alone, and some would skip a step that others make",
            'zf.scale_loss("dynamic") in the chain, and loss.backward() and opt.step() without a scaler',
        )
    )


def half_a_step() -> RuntimeError:
    """Why there is no state dict between a backward that is the step and `opt.step()`."""
    return RuntimeError(
        explain(
            "opt.state_dict() between a backward and opt.step(), with in_backward=True",
            "leaves that had a gradient are updated and counters are not, so that another run would go on from it",
            "opt.state_dict() after opt.step()",
        )
    )


def copied() -> TypeError:
    """Why there is no second one of it, in memory or on disk."""
    return TypeError(
        explain(
            "a copy or a pickle of what zf.attach returned",
            "it is bound to its model by hooks, and a copy would be bound to nothing",
            "opt.state_dict() to keep it; for a second model, another = zf.attach(other_model, opt.tx)",
        )
    )


def replaced(name: str, why: str, right: str) -> AttributeError:
    """Why something is not assigned, which in `torch.optim` would be, or would be taken without a word."""
    return AttributeError(explain(f"opt.{name} = ...", why, right))
