"""How the ranks of a group find out that they are processes of one machine, and connect.

Every rank comes to the same answer, since each tells the others what it has found. Ranks on several machines, in
containers with networks of their own, or on systems without unnamed shared memory use what `torch.distributed` offers;
`ZEROFN_SHARED_MEMORY=0` in the environment of any of them has the same effect.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ._lane import Lane

SWITCH = "ZEROFN_SHARED_MEMORY"
# Seconds that ranks have to find each other once all of them are on their way.
MEETING = 60.0
_RANK = struct.Struct("=q")


def open_lane(rank: int, size: int, exchange: Callable[[Any], list[Any]]) -> Lane | None:
    """A lane between ranks that all are processes of one machine and one user; otherwise None, on all of them.

    Args:
        rank: of this process.
        size: of the group.
        exchange: gives every rank's object, in the order of ranks.
    """
    sockets: dict[int, socket.socket] = {}
    listener, offer = _listen(size)
    offers = exchange(offer)
    done = False
    if listener is not None:
        if None not in offers and len({machine for machine, _ in offers}) == 1:
            with suppress(OSError, struct.error):
                _meet(rank, listener, [name for _, name in offers], sockets)
                done = len(sockets) == size - 1
        listener.close()
    if all(exchange(done)):
        return Lane(rank, sockets)
    for s in sockets.values():
        s.close()
    return None


def _listen(size: int) -> tuple[socket.socket | None, tuple[str, str] | None]:
    """A socket that others may connect to, and what tells them where: the machine, and a name on it."""
    if os.environ.get(SWITCH, "1") == "0" or not (hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")):
        return None, None
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = file.read() + os.readlink("/proc/self/ns/net")
        name = f"\0zerofn-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(name)
        listener.listen(size)
    except OSError:
        return None, None
    return listener, (machine, name)


def _meet(rank: int, listener: socket.socket, names: list[str], sockets: dict[int, socket.socket]) -> None:
    """Connect to the ranks before this one and let those after it connect. No connect waits for an accept."""
    for r in range(rank):
        s = sockets[r] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        s.settimeout(MEETING)
        s.connect(names[r])
        s.send(_RANK.pack(rank))
    listener.settimeout(MEETING)
    for _ in range(len(names) - 1 - rank):
        s, _ = listener.accept()
        s.settimeout(MEETING)
        (r,) = _RANK.unpack(s.recv(_RANK.size))
        sockets[r] = s
    for s in sockets.values():
        # The name cannot be guessed, but it can be listed by any user of the machine.
        peer = s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", peer)[1] != os.getuid():
            raise OSError("the socket belongs to another user")
        s.setblocking(True)
