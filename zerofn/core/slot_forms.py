"""What tensors that a transform keeps of a leaf are to the leaf: cut as it is, of a shape of their own, or neither."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# As long as the leaf and cut with it; of one shape whatever the leaf is; neither.
ALONG, FIXED, OTHER = "along", "fixed", "other"


class SlotForm(NamedTuple):
    """The form of the tensors of one slot in a transform's state.

    Attributes:
        owner: the transform.
        slot: keys above the paths of leaves, with slashes between them.
        below: keys below those paths.
        form: `ALONG`, `FIXED` or `OTHER`.
        paths: of the leaves; `()` for all that have the slot.
    """

    owner: str
    slot: str
    below: str
    form: str
    paths: tuple[str, ...] = ()


# By slot and keys below a path.
FormsOfSlots = dict[tuple[str, str], list[SlotForm]]


def by_owner(slots: Iterable[SlotForm]) -> dict[str, FormsOfSlots]:
    """The forms of each transform."""
    found: dict[str, FormsOfSlots] = {}
    for form in slots:
        found.setdefault(form.owner, {}).setdefault((form.slot, form.below), []).append(form)
    return found


def form_of(forms: FormsOfSlots, slot: str, below: str, path: str) -> str | None:
    """The form of one tensor; `None` where it is not known.

    >>> forms = by_owner([SlotForm("mine", "value", "m", ALONG)])["mine"]
    >>> form_of(forms, "value", "m", "w"), form_of(forms, "value", "v", "w")
    ('along', None)
    """
    return next((x.form for x in forms.get((slot, below), ()) if not x.paths or path in x.paths), None)
