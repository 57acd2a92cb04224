"""Differentiable collectives for functions of your own, over a tensor or a dict of tensors.

Each is a linear map between the ranks' tensors, and its backward is the adjoint map: `all_gather` and `reduce_scatter`
are each other's, so are `all_reduce` and `replicate`, and `all_to_all` is its own. They can be differentiated to any
order, by plain autograd and torch.func. Every rank must call the same ones in the same order. Before each call ranks
exchange two numbers, so that tensors that do not match raise on every rank; shards of different lengths can be
gathered. The transforms of a pipeline, such as `zf.shard`, need none of this.

Examples:
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
