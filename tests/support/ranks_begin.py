"""What tests set in each rank of `zf.launch`, before it reads its arguments and hence before it computes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from seeds import seed_what_is_there
from uninitialized_memory import fill

from zerofn.ranks import collectives as _collectives  # inside: when a rank that waits looks for the others
from zerofn.ranks import launch as _launch  # inside: what is sent to ranks is wrapped
from zerofn.ranks.fork_server import pack  # inside: what ranks have before they begin


def set_in_ranks() -> None:
    """Have ranks of `zf.launch` begin with `begin`."""
    _launch.pack = lambda fn, args: pack(fn, _Begun(args))


def begin() -> None:
    fill()
    seed_what_is_there()
    # A rank that waits for ever says so after two looks: four seconds as the library has it.
    _collectives._LOOK = timedelta(seconds=0.7)


class _Begun(tuple):
    """Arguments of a rank."""

    def __reduce__(self) -> Any:
        return _begun, (tuple(self),)


def _begun(args: tuple) -> tuple:
    begin()
    return args
