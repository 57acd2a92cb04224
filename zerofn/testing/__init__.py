"""The laws of a transform as one check, its kernels to read, and assertions over trees that report every bad leaf.

Examples:
    >>> import zerofn as zf
    >>> from zerofn.testing import check_transform
    >>> check_transform(zf.chain(zf.clip_by_value(1.0), zf.adamw(lr=0.1)))
    []
"""

from ..core.tree import clone
from .laws import check_transform
from .sources import kernel_source
from .trees import assert_trees_close, assert_trees_equal, random_like, sample_params

__all__ = [
    "assert_trees_close",
    "assert_trees_equal",
    "check_transform",
    "clone",
    "kernel_source",
    "random_like",
    "sample_params",
]
