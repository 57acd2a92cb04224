"""The tensors that transforms keep for one leaf, under the names of `torch.optim`: `opt.state[p]["exp_avg"]`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from .._errors import explain, kind_of
from .leaf_entries import Place, is_by_path, places


class LeafTensors(MutableMapping[str, Any]):
    """The tensors that belong to one leaf, by name; to assign one copies it into the state.

    A name is that of the slot, `"exp_avg"`; where several transforms have one of that name, each has its transform in
    front: `"adamw.average"`, `"ema.average"`. Counters of a whole transform, such as `step`, belong to no leaf.
    Items of a tuple are listed as `slot.0`, `slot.1`; those of a NamedTuple too, which its slot's name gives besides.

    Args:
        transforms: their states, by name.
        path: of the leaf.
        paths: of all leaves.
        shown: what to give of a tensor; itself by default.
    """

    def __init__(
        self,
        transforms: Mapping[str, Any],
        path: str,
        paths: AbstractSet[str],
        shown: Callable[[Any], Any] | None = None,
    ):
        self._path, self._shown = path, shown
        found = list(_of_leaf(transforms, path, paths, ()))
        # As they were listed once, whole.
        self._tuples = _by_name([(keys, x) for keys, x in found if isinstance(x, tuple)])
        self._tensors = _by_name([item for keys, x in found for item in _items(x, keys)])
        self._own: Mapping[str, str] = {}

    def renamed(self, names: Mapping[str, str], more: Mapping[str, Any]) -> LeafTensors:
        """The same tensors under other names, which are added to those that they have.

        Args:
            names: from the names that are listed to those of now, in the order in which they are listed.
            more: what is listed besides.
        """
        self._own = {own: name for name, own in names.items()}
        self._tensors = {**{name: self._tensors[own] for name, own in names.items()}, **more}
        return self

    def __getitem__(self, name: str) -> Any:
        name = self._own.get(name, name)
        x = self._tensors[name] if name in self._tensors else self._tuples[name]
        return x if self._shown is None else self._shown(x)

    def __setitem__(self, name: str, value: Any) -> None:
        self.check(name, value)
        mine = self[name]
        if mine is not value:
            with torch.no_grad():
                mine.copy_(value)

    def check(self, name: str, value: Any) -> None:
        """Raise a `ValueError` where a value cannot be assigned."""
        mine = self.get(name)
        if mine is value and mine is not None:
            return
        if not isinstance(mine, Tensor) or not isinstance(value, Tensor) or mine.shape != value.shape:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else kind_of(value)
            held = {k: tuple(x.shape) if isinstance(x, Tensor) else kind_of(x) for k, x in self.items()}
            why = f"of {self._path} the pipeline keeps {held or 'nothing'}, whose shapes are those of the pipeline"
            wrong = f"opt.state[{self._path}][{name!r}] = {what}"
            raise ValueError(explain(wrong, why, "a tensor of that shape, under one of these names"))

    def __delitem__(self, name: str) -> None:
        wrong, why = f"del opt.state[{self._path}][{name!r}]", "a state has the entries that its transforms have made"
        raise TypeError(explain(wrong, why, f"opt.state[{self._path}][{name!r}].zero_()"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return repr(dict(self))


def _by_name(found: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    times = Counter(keys[-1] for keys, _ in found)
    return {keys[-1] if times[keys[-1]] == 1 else ".".join(keys): x for keys, x in found}


def entries_stay(wrong: str) -> TypeError:
    """The error for taking an entry out of a state."""
    why = "a state has the entries that its transforms have made, of every parameter"
    anew = "tx = opt.tx; opt.detach(); opt = zf.attach(model, tx) for states made anew"
    return TypeError(explain(wrong, why, f"opt.state[parameter]['exp_avg'].zero_();\n{anew}"))


def assign(mine: LeafTensors, given: Any) -> None:
    """Copy what another mapping has under the same names; all of them, or an error and nothing is changed."""
    if not isinstance(given, Mapping) or set(given) != set(mine):
        what = f"{sorted(map(str, given))}" if isinstance(given, Mapping) else kind_of(given)
        why = f"of this parameter the pipeline keeps {sorted(mine)}"
        raise ValueError(explain(f"opt.state[parameter] = {what}", why, "a dict with these names, each a tensor"))
    for name, x in given.items():
        mine.check(name, x)
    for name, x in given.items():
        mine[name] = x


def _of_leaf(
    own: Any, path: str, paths: AbstractSet[str], above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What a transform's state has under `path`, with the keys that lead there: transform, members, slot."""
    if isinstance(own, tuple | list):
        for i, x in enumerate(own):
            if isinstance(x, Mapping | tuple | list):
                yield from _of_leaf(x, path, paths, (*above[:-1], f"{above[-1]}.{i}"))
        return
    # The outermost keys are slots, or labels of members, of which one may be a leaf's path as well.
    by_path = len(above) > 1 and is_by_path(own, paths)
    if by_path and path in own:
        yield from _leaves(own[path], above)
        return
    # Beside other names a path may be a name too: of entries by path, or where another name has such.
    named = any([k not in paths and places(x, paths, True) is not Place.SHARED for k, x in own.items()])
    mixed = len(above) > 1 and not by_path and not named
    leaves = {k for k, x in own.items() if mixed and k in paths and not is_by_path(x, paths)}
    if path in leaves:
        yield from _leaves(own[path], above)
    for key, x in own.items():
        # What is a tuple below a path is of that leaf.
        if key not in leaves and (isinstance(x, Mapping) or (not by_path and isinstance(x, tuple | list))):
            yield from _of_leaf(x, path, paths, (*above, str(key)))


def _leaves(x: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The tensors of a leaf's own state, which may be a tree; items of a tuple are named `slot.0`, `slot.1`."""
    if isinstance(x, Mapping):
        for key, part in x.items():
            yield from _leaves(part, (*above, str(key)))
    elif type(x) in (tuple, list):
        for i, part in enumerate(x):
            yield from _leaves(part, (*above[:-1], f"{above[-1]}.{i}"))
    else:
        yield above, x


def _items(x: Any, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What a NamedTuple has in it, and anything else itself; nothing of `None`."""
    if isinstance(x, tuple):
        yield from (item for keys, y in _leaves(list(x), above) for item in _items(y, keys))
    elif x is not None:
        yield above, x
