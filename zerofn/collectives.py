"""Differentiable collectives for functions of your own, over a tensor or a dict of tensors.

Each collective is a linear map between the ranks' tensors, and its backward is the adjoint map. The backward of
`all_gather` is `reduce_scatter`, and the reverse. The backward of `all_reduce` is `replicate`, and the reverse. The
backward of `all_to_all` is `all_to_all`. Plain autograd and torch.func can differentiate the collectives to any order.
Every rank must call the same collectives in the same order. Before each call ranks exchange two numbers, so tensors
that do not match raise on every rank. Shards of different lengths can be gathered. You do not need these functions for
the transforms of a chain, such as `zf.shard`.

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
from zerofn.ranks.process_groups import bytes_sent as bytes_sent
from zerofn.ranks.process_groups import mesh_group as mesh_group
from zerofn.ranks.process_groups import opened as opened
from zerofn.ranks.process_groups import world_group as world_group
