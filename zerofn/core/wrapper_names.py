"""Names of a model without wrappers' prefixes: `_orig_mod.` of torch.compile, `module.` of DistributedDataParallel, ...

A wrapper is a module whose only submodule is the one that it wraps. Its prefix in names would bind files, labels and
messages to how a model happens to be wrapped. So leaves and buffers get the names of the plain model here, once. A
module of the user's that is called `module` is distinguished by its class. Files have only names, so there a name is
read with and without each of these prefixes (`unwrapped_names`).
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from .._compat.tensors import WRAPPERS, persistent_buffers, registered, wrapper_attributes
from .._errors import bad_leaves, explain, users_line

# `module` alone is a name that people give to modules of their own, too.
_ADDED = sorted({wrapper.attribute for wrapper in WRAPPERS})
_ANY, _UNMISTAKABLE = (
    re.compile(rf"(?:(?<=[./])|^)(?:{'|'.join(added)})\.") for added in (_ADDED, [x for x in _ADDED if x != "module"])
)


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """A function that removes wrappers' prefixes from a name in `model`.

    It goes by the classes of modules, as torch.distributed.checkpoint does. `named_parameters()` of some wrappers
    leaves their own prefix out already.
    """
    attribute_of = wrapper_attributes()

    def plain(name: str) -> str:
        found: list[str] = []
        at: Any = model
        for key in name.split("."):
            while (attribute := attribute_of(at)) is not None and key != attribute:
                inside = _submodule(at, attribute)
                if inside is None or _submodule(at, key) is not None:
                    break
                at = inside
            if attribute is None or key != attribute:
                found.append(key)
            at = _submodule(at, key)
        return ".".join(found)

    return plain


def _submodule(at: Any, name: str) -> nn.Module | None:
    """The submodule of this name; `None` if there is none."""
    if not isinstance(at, nn.Module) or name not in registered(at)[1]:
        return None
    # Not `get`: a TorchScript module does not keep its submodules in a dict.
    return registered(at)[1][name]


def names_with_wrappers(model: nn.Module) -> dict[str, str]:
    """By name without wrappers' prefixes, the name in `model.named_parameters()`, if the two differ."""
    plain = plain_names(model)
    named = [(plain(name), name) for name, _ in model.named_parameters(remove_duplicate=False)]
    return {short: name for short, name in named if short != name}


def modules_of(model: nn.Module, wrappers: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()`, by names without wrappers' prefixes: a wrapper has the name of the module inside."""
    plain, attribute_of = plain_names(model), wrapper_attributes()
    for name, module in model.named_modules():
        if wrappers or attribute_of(module) is None:
            yield plain(name) if name else name, module


def buffers_in(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`model.named_buffers()`, by names without wrappers' prefixes."""
    plain = plain_names(model)
    return ((plain(name), x) for name, x in model.named_buffers())


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers in `model.state_dict()`, and integer parameters, by names without wrappers' prefixes."""
    plain = plain_names(model)
    return {plain(name): x for name, x in persistent_buffers(model).items()}


def without_wrappers(model: nn.Module, named: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of `model` by names without wrappers' prefixes.

    Raises:
        ValueError: two entries get the same name; each is named.
    """
    plain = plain_names(model)
    names = {name: plain(name) for name in named}
    many = Counter(names.values())
    bad = [(name, f"{short} without what wrappers add") for name, short in names.items() if many[short] > 1]
    if bad:
        right = "another name for the one that the wrapper itself has, or zf.attach(model, tx) of what it wraps"
        raise ValueError(bad_leaves("two parameters of a wrapped model have one name", bad, right))
    return {names[name]: x for name, x in named.items()}


def unwrapped_names(given: Iterable[str], wanted: Collection[str]) -> dict[str, str]:
    """By wanted name, the given one that differs from it only by wrappers' prefixes. Equal names are left out.

    If several given names or several wanted ones match, none is taken.

    >>> unwrapped_names(["adamw/count/_orig_mod.0.weight", "step"], ["adamw/count/0.weight", "step"])
    {'adamw/count/0.weight': 'adamw/count/_orig_mod.0.weight'}
    >>> unwrapped_names(["module.a"], ["module.a", "a"]), unwrapped_names(["module.a", "_orig_mod.a"], ["a"])
    ({}, {'a': '_orig_mod.a'})
    """
    left, open_ = dict.fromkeys(given), dict.fromkeys(wanted)
    for name in left.keys() & open_.keys():
        del left[name], open_[name]
    found: dict[str, str] = {}
    # First the names that no user's module has.
    for added in (_UNMISTAKABLE, _ANY):
        theirs, ours = (_by_plain_name(names, added) for names in (left, open_))
        for name in ours.keys() & theirs.keys():
            if len(ours[name]) == len(theirs[name]) == 1:
                found[ours[name][0]] = theirs[name][0]
        for mine, other in found.items():
            open_.pop(mine, None)
            left.pop(other, None)
    return {name: found[name] for name in wanted if name in found}


def _by_plain_name(names: Iterable[str], added: re.Pattern[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(added.sub("", name), []).append(name)
    return found


def warn_of_other_names(call: str, found: Mapping[str, str]) -> None:
    """Warn that entries were read whose names differ by wrappers' prefixes.

    Args:
        call: the function that was called.
        found: a result of `unwrapped_names`.
    """
    if found:
        mine, theirs = next(iter(found.items()))
        warnings.warn(
            explain(
                f"{call}: {len(found)} names differ by what wrappers add: {theirs} is read as {mine}",
                "torch.compile, checkpoint_wrapper and DistributedDataParallel put an attribute of theirs before names",
                "nothing: names are those of the plain model in what is saved from now on",
            ),
            stacklevel=users_line(),
        )
