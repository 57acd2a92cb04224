"""Functions, arguments and results between the caller of `launch` and its ranks, and the files that carry them."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch


def pickler() -> Any:
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


def pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    chosen = pickler()
    by_name = chosen is pickle
    in_main = getattr(fn, "__module__", None) == "__main__" and main_file() is None
    try:
        if by_name and in_main:
            raise pickle.PicklingError("it is defined in a notebook or an interactive session")
        return _dump((fn, args), chosen)
    except Exception as error:
        hint = 'install what sends it by value: pip install "zerofn[notebooks]"' if by_name else "see the cause"
        raise ValueError(
            f"{getattr(fn, '__qualname__', fn)!r} or its arguments cannot be sent to another process "
            f"({type(error).__name__}: {error}); {hint}, or move the function to a module"
        ) from error


def _dump(obj: Any, chosen: Any) -> bytes:
    # torch.save keeps tensors that share storage shared, and lets the other side choose the device.
    file = io.BytesIO()
    torch.save(obj, file, pickle_module=chosen)
    return file.getvalue()


def load(file: Any) -> Any:
    return torch.load(file, map_location="cpu", weights_only=False)


def main_file() -> str | None:
    """The path of the script, if `__main__` is one and its functions are sent by name."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    return os.path.abspath(file) if file and os.path.exists(file) and pickler() is pickle else None


def unnamed_file() -> int:
    """A file without a name, in memory where the system can. Unlike a pipe it never makes the writer wait."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("zerofn")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@contextlib.contextmanager
def store_path() -> Iterator[str | None]:
    """The name of a file for the ranks' store; None where an unnamed file will do."""
    if os.path.isdir("/proc/self/fd"):
        yield None
    else:
        with tempfile.NamedTemporaryFile(prefix="zerofn-") as file:
            yield file.name


def read(fd: int, start: int = 0) -> bytes:
    # Not by seek and read: processes with the same file share its position.
    parts = []
    while part := os.pread(fd, 1 << 30, start):
        parts.append(part)
        start += len(part)
    return b"".join(parts)
