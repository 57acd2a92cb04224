"""`SlotForm`: an entry of pickled layouts of older versions, which name this class and this module.

Nothing makes it any more. `fixed_of` reads from it what `Placement.fixed` says now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class SlotForm(NamedTuple):
    """How the tensors of one slot in a transform's state followed their leaves.

    Attributes:
        owner: the transform.
        slot: keys above the paths of leaves, with slashes between them.
        below: keys below those paths.
        form: `"along"`, `"fixed"` or `"other"`.
        paths: of the leaves; `()` for all that have the slot.
    """

    owner: str
    slot: str
    below: str
    form: str
    paths: tuple[str, ...] = ()


def fixed_of(slots: Iterable[SlotForm | Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """The transforms and slots of which all tensors had a shape of their own, from the forms of all slots.

    >>> fixed_of([SlotForm("sgd", "momentum", "", "fixed"), SlotForm("ema", "average", "", "along")])
    (('sgd', 'momentum'),)
    """
    forms = [SlotForm(**x) if isinstance(x, Mapping) else x for x in slots]
    # A number beside tensors of the leaf's shape, in a tree below a path, needs no word.
    others = {(x.owner, x.slot) for x in forms if x.form != "fixed"}
    return tuple(dict.fromkeys([at for x in forms if (at := (x.owner, x.slot)) not in others]))
