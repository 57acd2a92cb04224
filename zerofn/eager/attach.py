"""`attach`: a pipeline and a model that is trained by `loss.backward()`."""

from __future__ import annotations

from torch import nn

from .._errors import explain
from ..core.arguments import check_flag
from ..core.transform import Transform
from ..pure.uncompiled import kept_out_of_graphs
from .optimizer import Optimizer


@kept_out_of_graphs(
    "it makes an optimizer, and hooks on the model", "opt = zf.attach(model, tx), outside of what is compiled"
)
def attach(model: nn.Module, tx: Transform, in_backward: bool = False, hold_frozen: bool = False) -> Optimizer:
    """Bridge a pipeline to a model that is trained by `loss.backward()`.

    The model stays what it is: it is called as before, and any backward of PyTorch's own is right, on any output, any
    number of times. Gradients are true: no loss scale shows in `p.grad`, in an input's, or in a second derivative.

    Args:
        model: its parameters become the stored ones, in `precision`'s `store_dtype`.
        tx: a transform, or a chain, with an optimizer in it.
        in_backward: update each leaf as soon as its gradient has arrived, and let the gradient go: no
            gradient tree ever exists. `step()` then only closes the step. For pipelines that treat leaves
            alone, groups of `partition` and `masked` too, and one backward for each step.
        hold_frozen: make states for parameters that are frozen now, too, as `torch.optim` holds all that it is given,
            so that they can be unfrozen later. Without it they cost no memory, and stay frozen.

    Returns:
        An `Optimizer` to call `step()` and `zero_grad()` on; a `torch.optim.Optimizer` to whoever asks.

    What `p.grad` holds:

    ==================  =======================================================================
    after `backward()`  the sum of true gradients since it was last cleared, as in PyTorch. With
                        `shard` this rank's part of the mean over ranks. With `reduce_scatter` or
                        `all_reduce` before any `accumulate`, and with `in_backward`, `None`: the gradient
                        has left to be reduced, or was used
    after `step()`      the same; with `accumulate(k > 1)` it was moved into the sum, so `None`
    `zero_grad()`       `None`, or zeros with `set_to_none=False`
    ==================  =======================================================================

    Under `shard` a parameter and its gradient have the shape of the whole, and hold this rank's rows: `p.to_local()`.
    What computes with them, inside of the model and outside, has the whole, gathered on every rank: `p.grad.norm()`,
    `loss + model.head.weight.norm()`. What writes into them keeps this rank's rows. torch's functions that clip
    gradients raise where `p.grad` is not all there. Gradients of a block may be parts of one buffer: who keeps one of
    them longer than a step keeps all, unless it is a clone.

    Between steps `p.requires_grad_(False)` freezes a parameter that has a state and `p.requires_grad_(True)` unfreezes
    it, on every rank alike: a frozen one keeps its value, its state and its count of updates.

    A hook on a parameter is given what `p.grad` is to hold: under `shard` this rank's part of the mean, else the
    gradient of this rank. What is linear in it makes the same step of both; what is not (a clamp) is refused under
    `shard`. Where `p.grad` is `None` after backward, `p.register_post_accumulate_grad_hook` belongs
    before `attach`; later it finds `None`, and whoever reads that is warned.

    Raises:
        TypeError: `model` is no module.
        ValueError: it is attached already, has no parameters, or NaN in one, or modules of `torch.jit`;
            `in_backward` with a transform that needs the whole gradient.

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
    return Optimizer(model, tx, in_backward, hold_frozen=hold_frozen)
