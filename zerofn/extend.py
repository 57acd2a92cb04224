"""What a transform of one's own may need. The built-in ones are written with it as well.

A `Transform` is a record of functions; `transform` makes a function that builds one remember its arguments, so that
it prints, compares and pickles. A `View` says how the model sees what is stored, a `Wire` carries leaves over ranks,
`Facts` tell the runner what it may not ask, and `through` says where in a chain it may stand.

>>> import torch, zerofn as zf
>>> from zerofn.extend import Transform, View, as_it_is, transform
>>> @transform
... def factor(by):
...     view = View(view=lambda x, leaf: x * by, pull=lambda g, leaf: g * by, store=lambda x, leaf: x / by)
...     return Transform("factor", needs="element", view_fn=lambda layout, ranks: view, through=as_it_is)
>>> tx = zf.chain(factor(2.0), zf.sgd(lr=1.0))
>>> state = zf.init(tx, {"w": torch.tensor([6.0])})
>>> state.params, zf.full_params(tx, state)
({'w': tensor([3.])}, {'w': tensor([6.])})
"""

from ._errors import bad_leaves, explain
from ._factory import transform
from ._group import Group
from ._kernels import adam_
from ._norms import not_finite, squared_norm
from ._optimizer import Group as LeavesOfOneCount
from ._optimizer import optimizer
from ._rounding import leaf_key, random_bits, stochastic_round
from ._run import counter
from ._spec import (
    Misplaced,
    Spec,
    as_it_is,
    changes_gradients,
    makes_parameters,
    watches_parameters,
)
from ._transfers import all_gather_into, all_reduce_, reduce_scatter_into
from ._tree import Layout, Leaf, Leaves
from ._types import Context, Facts, Prepared, Scope, Transform, number, select
from ._views import Dtypes, Like, Ranks, View, Wire, over_ranks

__all__ = [
    "Context",
    "Dtypes",
    "Facts",
    "Group",
    "Layout",
    "Leaf",
    "Leaves",
    "LeavesOfOneCount",
    "Like",
    "Misplaced",
    "Prepared",
    "Ranks",
    "Scope",
    "Spec",
    "Transform",
    "View",
    "Wire",
    "adam_",
    "all_gather_into",
    "all_reduce_",
    "as_it_is",
    "bad_leaves",
    "changes_gradients",
    "counter",
    "explain",
    "leaf_key",
    "makes_parameters",
    "not_finite",
    "number",
    "optimizer",
    "over_ranks",
    "random_bits",
    "reduce_scatter_into",
    "select",
    "squared_norm",
    "stochastic_round",
    "transform",
    "watches_parameters",
]
