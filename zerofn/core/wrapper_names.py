"""Names of a model without wrappers' prefixes: `_orig_mod.` of torch.compile, `module.` of DistributedDataParallel, ...

A wrapper is a module whose only submodule is the one that it wraps. Its prefix in names would bind files, labels and
messages to how a model happens to be wrapped. So leaves and buffers get the names of the plain model here, once. A
module of the user's that is called `module` is distinguished by its class.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from .._compat.tensors import WRAPPERS, persistent_buffers, registered, wrapper_attributes
from .._errors import bad_leaves

# Users also give their own modules the name `module`. At the start of a name it is mostly DistributedDataParallel's.
_ADDED = re.compile(rf"(?:{'|'.join(sorted({wrapper.attribute for wrapper in WRAPPERS} - {'module'}))}|^module)\.")


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """A function that removes wrappers' prefixes from a name in `model`.

    It goes by the classes of modules, as torch.distributed.checkpoint does. `named_parameters()` of some wrappers
    leaves their own prefix out already.
    """
    attribute_of = wrapper_attributes(model)
    if attribute_of is None:
        return str

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
    if plain is str:
        return {}
    named = [(plain(name), name) for name, _ in model.named_parameters(remove_duplicate=False)]
    return {short: name for short, name in named if short != name}


def modules_of(model: nn.Module, wrappers: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()`, by names without wrappers' prefixes: a wrapper has the name of the module inside."""
    plain, attribute_of = plain_names(model), wrapper_attributes(model)
    if attribute_of is None:
        return model.named_modules()
    named = [(plain(name) if name else name, module) for name, module in model.named_modules()]
    return iter([(name, module) for name, module in named if wrappers or attribute_of(module) is None])


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


def remedy(names: Iterable[str]) -> str:
    """A hint for messages about a file whose names have wrappers' prefixes; empty if they have none.

    >>> remedy(["a.module.b"]), remedy(["a._orig_mod.b"]).splitlines()[-1].strip()
    ('', "names of the plain model: {name.replace('_orig_mod.', '', 1): x for name, x in d.items()}")
    """
    added = next((found for name in names if (found := _ADDED.search(name))), None)
    if added is None:
        return ""
    return f";\n         names of the plain model: {{name.replace({added[0]!r}, '', 1): x for name, x in d.items()}}"
