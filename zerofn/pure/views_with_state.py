"""Views that read a state of their transform's, given the state that a function is called with."""

from __future__ import annotations

from torch import Tensor

from .._compat.functorch import constant, is_function, is_wrapped, levels
from .._errors import bad_leaves
from ..core.pipeline import Pipeline
from ..core.state import State
from ..core.tree import flatten, tree_map, tree_paths


def seeing(pipe: Pipeline, state: State, where: str) -> Pipeline:
    """The pipeline with views that read what this state holds of their transforms.

    They are called where a leaf is pulled back too. What they read has no derivative and no batch there: for those a
    state would have to be an argument of every view's rule.

    Raises:
        RuntimeError: what a view reads is differentiated or batched: refused, for it would be taken for a constant.
    """
    if not pipe.reads:
        return pipe
    names = [view.name for view in pipe.views if view is not None and view.reads]
    read = {name: state.transforms[name] for name in names}
    bad = [
        (path, "differs along a batch" if levels(x) else "is differentiated")
        for path, x in zip(tree_paths(read), flatten(read)[0], strict=True)
        if isinstance(x, Tensor) and (levels(x) or is_function(x))
    ]
    if bad:
        wrong = f"{where}: a view takes its transform's state for a constant, and this one is none"
        raise RuntimeError(bad_leaves(wrong, bad, "a parameter for what is learned or differs along a batch"))
    # What a transform of torch.func has wrapped is of no use inside of a rule, which runs beneath that transform.
    plain = tree_map(lambda x: constant(x) if is_wrapped(x) else x, read)
    return pipe.reading(plain.__getitem__)
