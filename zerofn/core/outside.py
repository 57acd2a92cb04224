"""What a function of the user's reads besides its arguments: whether it does the same in every step."""

from __future__ import annotations

import builtins
import dis
import functools
from collections.abc import Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from ..kernels.numbers import line_of

_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype)
# Their functions give the same for the same arguments. `Plans` sees itself which tensors a formula makes.
_MODULES = ("torch", "math", "operator", "_operator", "zerofn")
_BUILTINS = (abs, all, any, divmod, isinstance, len, max, min, pow, round, sorted, sum)
_CLASSES = (bool, dict, enumerate, float, int, list, map, range, reversed, set, tuple, type, zip)
_CLASSES += (AssertionError, TypeError, ValueError)


def constants(*values: Any) -> tuple[Any, ...] | None:
    """What these values are, and what functions among them read besides their arguments; `None` if it may change.

    Constants and functions that read nothing else do not change while the result, which can be compared, is the same.
    An object, a list, a tensor or the clock may have changed, and nothing would tell.

    Examples:
        >>> constants(torch.sign, 2.0)[-1]
        2.0
        >>> constants([2.0]) is None
        True
    """
    found: list[Any] = []
    return tuple(found) if all([_constant(x, found) for x in values]) else None


def may_change(function: Any, options: Mapping[str, Any]) -> tuple[str, str]:
    """What makes `constants` say `None` of a function and its arguments: their names, and the line of the function.

    Examples:
        >>> rates = [2.0]
        >>> may_change(lambda grad: rates[0] * grad, {"beta": 0.9})[0]
        'rates, which may change'
    """
    names = [name for name, x in options.items() if not _constant(x, [])]
    call: Any = function if isinstance(function, FunctionType) else type(function).__call__
    code = getattr(call, "__code__", None)
    names += _changing(function, []) if call is function else [f"an object of {type(function).__name__}"]
    return f"{', '.join(names)}, which may change", "" if code is None else line_of(code, code.co_firstlineno)


def _changing(x: Any, seen: list[Any]) -> list[str]:
    """The names by which a function, or one that it calls, reads what may change."""
    if not isinstance(x, FunctionType) or any([x is y for y in seen]):
        return []
    seen.append(x)
    names = _names(x.__code__)
    read: dict[str, Any] = {name: x.__globals__.get(name, getattr(builtins, name, _MISSING)) for name in names or ()}
    for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
        try:
            read[name] = cell.cell_contents
        except ValueError:  # a cell that is empty
            read[name] = _MISSING
    found = ["a module that is imported there"] if names is None else []
    for name, value in read.items():
        if not _constant(value, []):
            found += _changing(value, seen) or [name]
    return found


def _constant(x: Any, found: list[Any]) -> bool:
    kind = type(x)
    if kind in _PLAIN:
        # 1, 1.0 and True are equal.
        found += [kind, x]
        return True
    if kind is tuple:
        found.append(len(x))
        return all([_constant(y, found) for y in x])
    if kind is ModuleType:
        return _root(x.__name__) in _MODULES
    if kind is FunctionType:
        if any([x is y for y in found]):
            return True
        found.append(x)
        return _root(x.__module__) in _MODULES or _reads_constants(x, found)
    if kind is BuiltinFunctionType or isinstance(x, type):
        found.append(x)
        return x in _BUILTINS or x in _CLASSES or _root(x.__module__ or _of_class(x)) in _MODULES
    return False


def _root(module: str) -> str:
    return module.partition(".")[0]


def _of_class(x: Any) -> str:
    """The module of the class that a builtin method belongs to: `torch.add` is one of `torch._C._VariableFunctions`."""
    owner = getattr(x, "__self__", None)
    return owner.__module__ if isinstance(owner, type) else ""


def _reads_constants(function: FunctionType, found: list[Any]) -> bool:
    names = _names(function.__code__)
    if names is None:
        return False
    given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *function.__dict__.values())
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is empty
        return False
    known = function.__globals__
    read = [known[name] if name in known else getattr(builtins, name, _MISSING) for name in names]
    return all([_constant(x, found) for x in (*given, *cells, *read)])


_MISSING = object()


@functools.cache
def _names(code: CodeType) -> tuple[str, ...] | None:
    """The global variables that a function reads, and those that it defines; `None` if it imports something."""
    found: list[str] = []
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            return None
        found += [step.argval] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
    for inner in [_names(x) for x in code.co_consts if type(x) is CodeType]:
        if inner is None:
            return None
        found += inner
    return tuple(dict.fromkeys(found))
