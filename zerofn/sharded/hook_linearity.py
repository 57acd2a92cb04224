"""Gradient hooks on sharded parameters may compute what is linear, so that the step is that of other stages.

At other stages a hook is given this rank's own gradient, and what it returns is averaged over ranks. Under `shard`
gradients are averaged as they leave a block, and a hook is given this rank's part of the mean. A sum, a product with a
mask or a parameter commutes with the mean, so the step is the same. A clamp, a sign, a square or a comparison does not,
and the step would silently be another one. It is refused in the hook, and later for what the hook kept. To run hooks
before the reduction would need the full gradients of all blocks in memory, which `shard` is there to avoid.
"""

from __future__ import annotations

from collections.abc import Callable

from .part_origin import Origin, OriginOf, refuse_in_hook
from .torch_function_arguments import FOREACH, tensors_in
from .torch_function_kinds import Kind, kind_of

# The position of an argument that is given by name.
PLACES = {
    "input": 0, "self": 0, "condition": 0, "other": 1, "end": 1, "tensor1": 1, "mask": 1, "src": 1, "tensor2": 2,
    "weight": 2, "value": 2,
}  # fmt: skip
SUMS = ("add", "copy", "fill", "iadd", "isub", "neg", "negative", "positive", "radd", "rsub", "sub", "subtract", "zero")
PRODUCTS = ("imul", "mul", "multiply", "rmul")
QUOTIENTS = ("div", "divide", "itruediv", "true_divide", "truediv")
# Of a function: whether it is linear in its arguments at these positions together.
LINEAR: dict[str, Callable[[set[int]], bool]] = {
    **dict.fromkeys(SUMS, lambda places: True),
    **dict.fromkeys(PRODUCTS, lambda places: not {0, 1} <= places),
    **dict.fromkeys(QUOTIENTS, lambda places: 1 not in places),
    "addcdiv": lambda places: 2 not in places,
    "addcmul": lambda places: not {1, 2} <= places,
    "lerp": lambda places: 2 not in places,
    "masked_fill": lambda places: 1 not in places,
    "where": lambda places: 0 not in places,
}


def from_hooks(args: tuple, kwargs: dict, origin_of: OriginOf) -> dict[int, Origin]:
    """The arguments that are computed from what hooks are given: position and origin."""
    given = [*enumerate(args), *((PLACES.get(k, -1), x) for k, x in kwargs.items() if k != "out")]
    found = ((at, origin_of(x)) for at, value in given for x in tensors_in((value,)))
    return {at: of for at, of in found if of is not None and of.in_hook}


def check_linear(name: str, kwargs: dict, places: dict[int, Origin]) -> None:
    """Refuse an elementwise function that is not linear in what hooks are given. Of others `Origin.whole` decides.

    Args:
        name: of the function.
        kwargs: its arguments by name.
        places: `from_hooks` of its arguments.
    """
    if kind_of(name) is not Kind.ELEMENTS:
        return
    linear = LINEAR.get(name.removeprefix(FOREACH).strip("_"))
    if linear is None or not linear(set(places)) or kwargs.get("rounding_mode") is not None:
        refuse_in_hook(name, next(iter(places.values())))
