"""Refuses numbers of a chain that require grad, in a step that autograd does not record: they would be constants.

A step that is not recorded runs its kernels on plain numbers, so a derivative by a rate, a decay or a weight is lost.
If the loss has a second term, its gradient still arrives, and nobody would see that the other term is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._errors import bad_leaves

RECORDED = (
    "zf.make_step(loss_fn, tx, create_graph=True) or zf.update(tx, grads, state, create_graph=True), and\n"
    "         zf.init(tx, params, create_graph=True) where parameters require grad; torch.func.grad around the steps;\n"
    "         rate.detach(), or create_graph=False, where no derivative is wanted"
)
ATTACHED = (
    "rate.detach() where no derivative is wanted: a step writes into the model. For a derivative zf.init and\n"
    "         zf.make_step(loss_fn, tx, create_graph=True), of a loss_fn that calls torch.func.functional_call"
)


class Unrecorded(RuntimeError):
    """A number requires grad in a step that is not recorded."""


def check_numbers(named: Iterable[tuple[str, Any]], right: str) -> None:
    """Refuse numbers that require grad; each is named.

    Raises:
        Unrecorded: there is one.
    """
    bad = [name for name, x in named if isinstance(x, Tensor) and x.requires_grad]
    if bad:
        raise unrecorded(bad, right)


def unrecorded(names: Iterable[str], right: str) -> Unrecorded:
    """The error for numbers, by name, that require grad in a step that is not recorded."""
    wrong = "a step that autograd does not record, with numbers that require grad: their derivative would be lost"
    return Unrecorded(bad_leaves(wrong, [(name, "requires grad") for name in names], right))


# ----------------------------------------------------------------------------------------------------------------------
# Numbers that a user's function reads from elsewhere are not arguments. The places of such numbers are found once: in
# the cells of its closure, among the globals that its code names, and among the attributes of its object. A step looks
# only at these places. If the number at one of them requires grad, the step looks at what the function returns.


class Place(NamedTuple):
    """A place from which a function reads a number, by name; `read` gives what is there now."""

    name: str
    read: Callable[[], Any]

    @property
    def requires_grad(self) -> bool:
        x = self.read()
        return isinstance(x, Tensor) and x.requires_grad


def places_behind(functions: Iterable[Callable[..., Any]]) -> tuple[Place, ...]:
    """The places from which functions of a user's, and those that they call, read numbers that are no arguments.

    Functions of the library are searched for those of a user. Containers and modules are not looked into: a model may
    have thousands of parameters.

    >>> rate = 0.5
    >>> def halved(grad):
    ...     return grad * rate
    >>> halved.__module__ = "mine"
    >>> [(place.name, place.read()) for place in places_behind([halved])]
    [('rate', 0.5)]
    """
    seen: set[int] = set()
    return tuple([place for function in functions for place in _behind(function, seen)])


def _behind(x: Any, seen: set[int]) -> Iterator[Place]:
    """The places behind what may be a function."""
    if id(x) in seen or not callable(x) or isinstance(x, type | nn.Module):
        return
    seen.add(id(x))
    if isinstance(x, FunctionType):
        users = _of_a_user(x.__module__)
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            yield from _at(name, partial(_content, cell), users, seen)
        if users:
            for name in sorted(_names(x.__code__) & x.__globals__.keys()):
                yield from _at(name, partial(x.__globals__.get, name), users, seen)
    elif isinstance(x, MethodType):
        yield from _behind(x.__func__, seen)
        yield from _attributes(x.__self__, seen)
    elif isinstance(x, partial):
        for inner in (x.func, *x.args, *x.keywords.values()):
            yield from _behind(inner, seen)
    else:
        yield from _behind(vars(type(x)).get("__call__"), seen)
        yield from _attributes(x, seen)


def _attributes(x: Any, seen: set[int]) -> Iterator[Place]:
    of = getattr(x, "__dict__", {})
    if id(of) not in seen and not isinstance(x, type | nn.Module):
        seen.add(id(of))
        for name in list(of):
            yield from _at(name, partial(of.get, name), _of_a_user(type(x).__module__), seen)


def _at(name: str, read: Callable[[], Any], users: bool, seen: set[int]) -> Iterator[Place]:
    x = read()
    if x is None or isinstance(x, Tensor | int | float):
        if users:
            yield Place(name, read)
    else:
        yield from _behind(x, seen)


def _of_a_user(module: str | None) -> bool:
    return not module or module.partition(".")[0] not in ("zerofn", "torch")


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # deleted, or not yet given a value


def _names(code: CodeType) -> set[str]:
    """The names in the code of a function, and of functions inside of it."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*inner)
