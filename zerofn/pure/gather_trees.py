"""`gather` and `global_norm`: a tree that is cut over ranks as the parameters are, whole, and its norm."""

from __future__ import annotations

import torch
from torch import Tensor

from .._errors import bad_leaves, explain
from ..core.coalesced_views import view_all
from ..core.layout import Leaves
from ..core.state import State
from ..core.transform import Transform
from ..core.tree import Tree, flatten
from ..kernels.norms import squared_norm
from ..kernels.recording import root
from ..sharded.guarded_parameter import pieces
from .states import pipe_of
from .uncompiled import RESOLVES, kept_out_of_graphs


@kept_out_of_graphs(RESOLVES, "zf.gather(tx, state, tree), outside of what is compiled")
def gather(tx: Transform, state: State, tree: Tree) -> Tree:
    """A tree that is laid out as `state.params` is, whole: gradients of a bound function, moments, a vector.

    Not differentiable. Every rank calls it.

    Args:
        tx: the pipeline.
        state: its state.
        tree: tensors of the structure and the shapes of `state.params`, or gradients and parameters of an attached
            model; leaves that are `None` stay away.

    Returns:
        The tree with leaves in their whole shapes, in the dtypes they have. Where nothing is cut, the same tensors.

    Raises:
        ValueError: a leaf is not of the shape of this rank's part; each is named.

    >>> import torch, zerofn as zf
    >>> tx = zf.chain(zf.shard(), zf.sgd(0.1))
    >>> state = zf.init(tx, {"w": torch.ones(2, 2)})
    >>> grads = torch.func.grad(zf.bind(lambda p: (p["w"] ** 2).sum(), tx, state))(state.params)
    >>> zf.gather(tx, state, grads)["w"].shape
    torch.Size([2, 2])
    """
    pipe = pipe_of(tx, state, "zf.gather")
    leaves = {p: x.detach() for p, x in _leaves(state, tree, "zf.gather").items()}
    wrong = [
        (p, f"of shape {tuple(x.shape)}; this rank's part is of {tuple(state.leaves[p].shape)}")
        for p, x in leaves.items()
        if x.shape != state.leaves[p].shape
    ]
    if wrong:
        raise ValueError(bad_leaves("zf.gather: what is not laid out as state.params", wrong, "this rank's part of it"))
    if pipe.sharding is None:
        return tree
    cutting = tuple(stage for stage in pipe.stages if stage.wire is not None and stage.wire.cuts)
    which = [leaf for leaf in state.layout.leaves if leaf.path in leaves]
    for stage in reversed(cutting):
        leaves = view_all(stage, leaves, which)
    return state.layout.join(leaves)


def global_norm(tree: Tree, tx: Transform | None = None, state: State | None = None) -> Tensor:
    """The norm of all numbers of a tree together, as optax's: the root of the sum of all squares.

    Args:
        tree: of tensors; `None` leaves count for nothing. In at least fp32.
        tx: the pipeline, where the tree is laid out over ranks as `state.params` is: then it is the norm of the whole.
        state: its state.

    Returns:
        A 0-d tensor, equal on all ranks where `tx` and `state` are given. Its derivative where all is zero is zero, as
        that of `torch.linalg.vector_norm`.

    Raises:
        TypeError: one of `tx` and `state` is given without the other.

    >>> import torch, zerofn as zf
    >>> zf.global_norm({"w": torch.tensor([3.0]), "b": [torch.tensor(4.0), None]})
    tensor(5.)
    """
    if (tx is None) != (state is None):
        raise TypeError(
            explain(
                "zf.global_norm(tree, tx, state) with one of the two",
                "over ranks a norm is that of a tree which lies as the parameters of a state",
                "zf.global_norm(tree), or zf.global_norm(tree, tx, state)",
            )
        )
    if tx is not None and state is not None:
        return _of_the_whole(tree, tx, state)
    return root(_squares({str(i): x for i, x in enumerate(flatten(tree)[0]) if isinstance(x, Tensor)}))


@kept_out_of_graphs(
    RESOLVES,
    'metrics["grad_norm"] of a compiled step; or zf.global_norm(tree, tx, state), outside of what is compiled',
    "global_norm",
)
def _of_the_whole(tree: Tree, tx: Transform, state: State) -> Tensor:
    pipe = pipe_of(tx, state, "zf.global_norm")
    squares = pipe.reduction.sum(_squares(_leaves(state, tree, "zf.global_norm")))
    return root(pipe.reduction.alike(squares))


def _squares(leaves: Leaves) -> Tensor:
    return squared_norm(leaves) if leaves else torch.zeros(())


def _leaves(state: State, tree: Tree, where: str) -> Leaves:
    """Leaves by path; of a tied leaf what stands at the first place that has something."""
    found: Leaves = {}
    what = f"{where} of a tree that is not of the structure of state.params"
    for i, _, x in state.layout.match(tree, what, "gradients of zf.bind or zf.vjp, or state.params itself"):
        if isinstance(x, Tensor):
            found.setdefault(state.layout.leaves[i].path, x)
    return pieces(found)
