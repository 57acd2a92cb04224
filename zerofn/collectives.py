"""Differentiable collectives for functions of one's own, over a tensor or a dict of tensors.

Each is a linear map between the tensors of the ranks, and its adjoint, which is its backward, is another one:
`all_gather` and `reduce_scatter`, `all_reduce` and `replicate`, `all_to_all` and itself. They have derivatives of any
order under plain autograd and under `torch.func`. Every rank must make the same ones in the same order. Before each the
ranks exchange three numbers, so that tensors which do not match are an error on every rank; parts of different lengths
can be gathered. The transforms of a pipeline, such as `zf.shard`, need none of this.

>>> import torch
>>> from zerofn import collectives
>>> group = collectives.world_group()               # all ranks; one process is a world of one
>>> w = torch.tensor([1.0, 2.0])                    # this rank's shard
>>> torch.func.grad(lambda w: collectives.all_gather(w, group).square().sum())(w)
tensor([2., 4.])
"""

from zerofn.ranks.differentiable import all_gather as all_gather
from zerofn.ranks.differentiable import all_gather_tree as all_gather_tree
from zerofn.ranks.differentiable import all_reduce as all_reduce
from zerofn.ranks.differentiable import all_reduce_tree as all_reduce_tree
from zerofn.ranks.differentiable import all_to_all as all_to_all
from zerofn.ranks.differentiable import reduce_scatter as reduce_scatter
from zerofn.ranks.differentiable import reduce_scatter_tree as reduce_scatter_tree
from zerofn.ranks.differentiable import replicate as replicate
from zerofn.ranks.differentiable import replicate_tree as replicate_tree
from zerofn.ranks.group import Group as Group
from zerofn.ranks.process_groups import mesh_group as mesh_group
from zerofn.ranks.process_groups import opened as opened
from zerofn.ranks.process_groups import world_group as world_group
