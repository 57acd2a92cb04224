"""Differentiable collectives for functions of one's own, over a tensor or a dict of tensors.

Each is a linear map between what the ranks hold, and the derivative of each is its partner: `all_gather` and
`reduce_scatter`, `all_reduce` and `replicate`. They are right under plain autograd and under `torch.func`, to any
order, and every rank must make the same ones in the same order. Before each the ranks exchange three numbers, so that
tensors which do not match are an error on every rank; parts of different lengths can be gathered. The transforms of
a pipeline, `zf.shard` and the like, need none of this.

>>> import torch
>>> from zerofn import collectives
>>> group = collectives.world_group()               # all ranks; one process is a world of one
>>> w = torch.tensor([1.0, 2.0])                    # this rank's shard
>>> torch.func.grad(lambda w: collectives.all_gather(w, group).square().sum())(w)
tensor([2., 4.])
"""

from ._adjoint import all_gather as all_gather
from ._adjoint import all_reduce as all_reduce
from ._adjoint import reduce_scatter as reduce_scatter
from ._adjoint import replicate as replicate
from ._adjoint_trees import all_gather_tree as all_gather_tree
from ._adjoint_trees import all_reduce_tree as all_reduce_tree
from ._adjoint_trees import reduce_scatter_tree as reduce_scatter_tree
from ._adjoint_trees import replicate_tree as replicate_tree
from ._group import Group as Group
from ._groups import mesh_group as mesh_group
from ._groups import world_group as world_group
