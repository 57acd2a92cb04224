"""`LeafStep`: what a formula of one leaf is given besides its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..kernels.formulas import beside
from ..kernels.numbers import Number
from ..kernels.program import Bits, Draws, TensorList
from ..kernels.recording import differentiated, straight_through
from ..kernels.rounding import leaf_key, stochastic_round
from .context import Rounding
from .transform import TransformState

Numbers = Mapping[str, Any]
# The dtypes that are rounded to at random.
SHORT = (torch.bfloat16, torch.float16)


def stream_of(place: int) -> tuple[int, int]:
    """The stream of the random bits of a stored tensor, and the bit of its words from which they are taken.

    The parameter has place 0, and the slots those from 1 on. The parameter and the second slot share the words of
    stream 0, as in `low_precision_adam`.

    Examples:
        >>> [stream_of(place) for place in range(6)]
        [(0, 0), (1, 0), (0, 16), (1, 16), (2, 0), (2, 16)]
    """
    half = (0, 2, 1)[place] if place < 3 else place
    return half // 2, half % 2 * 16


@dataclass(frozen=True)
class LeafStep:
    """One update of one leaf: the arguments of a formula besides its tensors.

    Attributes:
        count: the number of the leaf's updates including this one; a 0-d tensor under `vmap` and in a compiled graph.
        lr: the learning rate of this update, a number or a 0-d tensor.
        path: the leaf's name.
        offset: the place in the whole leaf of the first stored element.
        numbers: hyperparameters by name; numbers, or 0-d tensors.
        shared: state that all leaves share, by name; only read.
        derived: the results of the optimizer's `derived` for count, rate and hyperparameters; numbers, or 0-d tensors.
        paths, offsets: of each leaf, where one call updates a list of leaves.
        rounding: how results are rounded where they are stored in 16 bits; by default to nearest.
        dtype: of the stored parameter, where the formula is given it in a wider one; else `None`.
    """

    count: Any
    lr: Any
    path: str
    offset: int
    numbers: Numbers = field(default_factory=dict)
    shared: TransformState = field(default_factory=dict)
    derived: Numbers = field(default_factory=dict)
    paths: Sequence[str] = ()
    offsets: Sequence[int] = ()
    rounding: Rounding | None = None
    dtype: torch.dtype | None = None

    def at_random(self, x: Any, dtype: torch.dtype, seed: int, form: Any, stream: int, shift: int = 0) -> Any:
        """`x` rounded at random to a dtype of 16 bits; its derivative is that of the identity.

        Random bits depend on the seed, the number of the update, the path and the global index of each element.

        Args:
            x: in float32.
            dtype: `torch.bfloat16` or `torch.float16`.
            seed: of the bits.
            form: the format of the draws.
            stream: tensors that shall have bits of their own have another stream, or another half of its words.
            shift: 16 takes the upper half of each word.
        """
        if isinstance(x, TensorList):
            draws = Draws(seed, self.count, form, list(map(leaf_key, self.paths)), list(self.offsets))
            return x.random(dtype, Bits(draws, stream, shift))
        bits = Draws(seed, self.count, form, [leaf_key(self.path)], [self.offset]).words(x, 0, stream, shift)
        if not differentiated(x):
            return stochastic_round(x, dtype, bits=bits)
        return straight_through(x, stochastic_round(x.detach(), dtype, bits=bits).float()).to(dtype)

    def stored(self, x: Any, dtype: torch.dtype, place: int, copy: bool = False) -> Any:
        """A result in the dtype in which it is stored: rounded as `rounding` says if that has 16 bits, else to nearest.

        Args:
            x: the result.
            dtype: in which it is stored.
            place: 0 of the parameter, then the slots from 1 on, in their order.
            copy: whether the result must not be `x` itself.
        """
        if self.rounding is None or dtype not in SHORT or x.dtype is not torch.float32:
            return x.to(dtype, copy=copy)
        return self.at_random(x, dtype, self.rounding.seed, self.rounding.form, *stream_of(place))

    def scalar(self, value: Any, like: Tensor) -> Any:
        """A number to compute with beside the tensor `like`.

        If `value` is a tensor it is converted to the dtype and the device of `like`. Anything else is returned
        unchanged. A formula calls `scalar` if it computes in another dtype than the one in which `optimizer` gives it
        numbers.
        """
        if isinstance(value, TensorList):
            return value.to(like.dtype)
        if isinstance(value, Number):
            return value.through(partial(Tensor.to, dtype=like.dtype)) if _is_tensor(value) else value
        return beside(value, like, like.dtype) if isinstance(value, Tensor) else value

    def beside(self, like: Tensor) -> LeafStep:
        """The same update, with rate, hyperparameters and derived numbers passed through `scalar`."""
        if not any(map(_is_tensor, (self.lr, *self.numbers.values(), *self.derived.values()))):
            return self
        numbers, derived = ({k: self.scalar(x, like) for k, x in of.items()} for of in (self.numbers, self.derived))
        rate = self.scalar(self.lr, like)
        return replace(self, lr=rate, numbers=numbers, derived=derived)


def _is_tensor(x: Any) -> bool:
    """Whether a number is a tensor, or stands for one while a formula is traced."""
    return isinstance(x, Tensor | TensorList) or (isinstance(x, Number) and isinstance(x.now, Tensor))
