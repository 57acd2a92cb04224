"""Tensors between ranks of one machine: through shared memory, with a message to say that they are there.

gloo sends everything over TCP. On one machine that is two copies in the kernel for each byte, three threads
that wake each other for each message, and one of them turns idly, at the full speed of a core, for as long
as another writes to the same socket (its event loop finds the connection locked and asks again): on two
cores up to 60,000 turns in a step, taken from the model's own arithmetic. Here a rank writes what it
sends where the others can read it, and they read no more than they need, into the place where they need it.

The memory has no name (`memfd_create`) and is passed on through the sockets: nothing is left behind however a
process ends, `/dev/shm`, which containers keep small, is not used, and the end of a rank is seen at once. Pages
are kept and used again, so a step touches no new ones.

All ranks must issue the same sequence on a lane, as on any channel. A lane belongs to one thread at a time.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

READY, READ, FORGET = 0, 1, 2
_HEAD = struct.Struct("=Bqqq")  # kind, number in the sequence, region, bytes
_FD = struct.Struct("=i")
_FD_SPACE = socket.CMSG_LEN(_FD.size) if hasattr(socket, "CMSG_LEN") else 0
# Bytes up to which a tensor travels in the message itself.
INLINE = 256
# Regions that are kept without use; more are given back.
SPARE = 3
PAGE = 4096
# Seconds after which a rank that waits gives up, which is what torch grants a process group.
PATIENCE = 1800.0


class Region:
    """Memory of this rank that others can read."""

    def __init__(self, key: int, size: int):
        self.key = key
        self.fd: int | None = os.memfd_create("zerofn", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.bytes = _mapped(self.fd, size)
        self.readers = 0  # ranks, this one included, that have not read what was published in it
        self.user: Callable[[], Any] = lambda: None  # the tensor that is being filled

    def free(self) -> bool:
        return not self.readers and self.user() is None

    def shared(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class Arrival(NamedTuple):
    """What another rank has published: where, or, if it is small, what."""

    key: int
    size: int
    data: bytes


class Lane:
    """One rank's end of it.

    Args:
        rank: of this process in the group.
        sockets: to the other ranks.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket]):
        self.rank, self.sockets = rank, sockets
        self.size = len(sockets) + 1
        self.number = 0
        self.keys = 0
        self.regions: dict[int, Region] = {}  # by address
        self.theirs: dict[tuple[int, int], Tensor] = {}
        self.arrived: dict[int, dict[int, Arrival]] = {r: {} for r in sockets}  # by number in the sequence
        self.heard = dict.fromkeys(sockets, 0)  # how much each rank has published
        self.polls = {r: select.poll() for r in sockets}
        for r, s in sockets.items():
            self.polls[r].register(s, select.POLLIN)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor that can be published without a copy; it is taken back once it was, or is dropped."""
        numel = torch.Size(shape).numel()
        region = self._region(numel * dtype.itemsize)
        out = region.bytes[: numel * dtype.itemsize].view(dtype).view(*shape)
        region.user = weakref.ref(out)
        return out

    def publish(self, t: Tensor) -> Passage:
        """Show a tensor to the other ranks; from now on it must not be written to, until they have read it."""
        data = t.detach().contiguous().view(-1).view(torch.uint8)
        size = len(data)
        if size <= INLINE:
            return self.tell(bytes(data.tolist()))
        number = self.number
        self.number += 1
        region = self.regions.get(data.data_ptr())
        if region is None or region.readers:
            region = self._region(size)
            region.bytes[:size].copy_(data)
        region.readers = self.size
        message = _HEAD.pack(READY, number, region.key, size)
        for r in self.sockets:
            self._say(r, message, region.fd)
        region.shared()
        self.theirs[self.rank, region.key] = region.bytes
        return Passage(self, number, Arrival(region.key, size, b""))

    def tell(self, data: bytes) -> Passage:
        """Show the other ranks a few bytes."""
        number = self.number
        self.number += 1
        message = _HEAD.pack(READY, number, -1, len(data)) + data
        for r in self.sockets:
            self._say(r, message)
        return Passage(self, number, Arrival(-1, len(data), data))

    def _region(self, size: int) -> Region:
        """The smallest that is free and large enough, or a new one."""
        for r in self.sockets:
            while self._hear(r, 0):
                pass
        free = sorted((x for x in self.regions.values() if x.free()), key=lambda x: len(x.bytes))
        found = next((x for x in free if len(x.bytes) >= size), None)
        if found is not None:
            return found
        for x in free[: max(0, len(free) - SPARE)]:
            del self.regions[x.bytes.data_ptr()]
            self.theirs.pop((self.rank, x.key), None)
            for r in self.sockets:
                self._say(r, _HEAD.pack(FORGET, 0, x.key, 0))
            x.shared()
        self.keys += 1
        made = Region(self.keys, -(-size // PAGE) * PAGE)
        self.regions[made.bytes.data_ptr()] = made
        return made

    def _say(self, r: int, message: bytes, fd: int | None = None) -> None:
        # That a rank is gone is told by what it does not send.
        with suppress(BrokenPipeError, ConnectionError):
            if fd is None:
                self.sockets[r].send(message)
            else:
                socket.send_fds(self.sockets[r], [message], [fd])

    def _hear(self, r: int, seconds: float) -> bool:
        """Take in a message of a rank; false if none comes in time."""
        try:
            if seconds and not self.polls[r].poll(1e3 * seconds):
                return False
            # (`socket.recv_fds` of Python 3.11 takes flags and forgets them.)
            message, more, _, _ = self.sockets[r].recvmsg(_HEAD.size + INLINE, _FD_SPACE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise RuntimeError(f"the connection to rank {r} of the group broke: {error}") from error
        if not message:
            if not seconds:
                return False  # whoever needs something of it will say so
            raise RuntimeError(f"rank {r} of the group has ended while this one waits for it")
        kind, number, key, size = _HEAD.unpack_from(message)
        if kind == READY:
            if more:
                fd = _FD.unpack_from(more[0][2])[0]
                self.theirs[r, key] = _mapped(fd, os.fstat(fd).st_size)
                os.close(fd)
            self.arrived[r][number] = Arrival(key, size, message[_HEAD.size :])
            self.heard[r] += 1
        elif kind == READ:
            self._read(key)
        else:
            self.theirs.pop((r, key), None)
        return True

    def _read(self, key: int) -> None:
        region = next((x for x in self.regions.values() if x.key == key), None)
        if region is not None:
            region.readers -= 1

    def close(self) -> None:
        for s in self.sockets.values():
            s.close()
        for x in self.regions.values():
            x.shared()


class Passage:
    """One step of the sequence on one rank: what it has published, and what the others have.

    The handle of a collective.
    """

    def __init__(self, lane: Lane, number: int, mine: Arrival):
        self.lane, self.number, self.mine = lane, number, mine
        self.deadline = time.monotonic() + PATIENCE
        self.failed = False

    def is_completed(self) -> bool:
        return self.failed or self.ready_within(0)

    def ready_within(self, seconds: float) -> bool:
        """Whether every rank has published its part, now or soon."""
        lane = self.lane
        end = time.monotonic() + seconds
        for r in lane.sockets:
            while lane.heard[r] <= self.number:
                left = max(0.0, end - time.monotonic())
                if not lane._hear(r, left) and not left:
                    return False
        return True

    def wait(self, timeout: timedelta) -> bool:
        """
        Raises:
            RuntimeError: a rank has ended, or was late.
        """
        if self.ready_within(timeout.total_seconds()):
            return True
        self.failed = time.monotonic() > self.deadline
        raise RuntimeError("timed out waiting for another rank on this machine")

    def parts(self, like: Tensor) -> list[Tensor]:
        """What each rank has published, in the dtype of `like`; to be read before `close`."""
        found = []
        for r, (key, size, data) in enumerate(self._arrivals()):
            memory = torch.frombuffer(bytearray(data), dtype=torch.uint8) if key < 0 else self.lane.theirs[r, key]
            found.append(memory[:size].view(like.dtype))
        return found

    def told(self) -> list[bytes]:
        """What each rank has told."""
        return [x.data for x in self._arrivals()]

    def _arrivals(self) -> list[Arrival]:
        lane = self.lane
        found = [self.mine if r == lane.rank else lane.arrived[r][self.number] for r in range(lane.size)]
        for r, x in enumerate(found):
            if x.size != self.mine.size:
                raise RuntimeError(
                    f"this rank takes part in a collective of {self.mine.size} bytes and rank {r} of the group in one "
                    f"of {x.size}; every rank must issue the same sequence of collectives"
                )
        return found

    def close(self) -> None:
        """This rank has read all of it."""
        lane = self.lane
        for r in lane.sockets:
            key, _, _ = lane.arrived[r].pop(self.number)
            if key >= 0:
                lane._say(r, _HEAD.pack(READ, 0, key, 0))
        if self.mine.key >= 0:
            lane._read(self.mine.key)


def _mapped(fd: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
