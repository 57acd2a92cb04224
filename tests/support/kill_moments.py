"""How to cut off a save: at a time, at an instruction, at a call to the system; and what is on disk then.

What is saved is a number: every tensor of a state is filled with it. So a directory that is read holds the number
that was there, or the new one, or neither: then data are lost.
"""

from __future__ import annotations

import contextlib
import dis
import errno
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from time_limits import limit
from torch.utils._pytree import tree_leaves

import zerofn as zf

# What an error may say of the checkpoint that is there, and which one that is.
SAID = (("as it was", "old"), ("the new checkpoint is in place", "new"))
UNSURE = "it cannot be told here"
PATIENCE = 3.0  # seconds that a load waits for a lock that nobody should hold
# Where saves spend their time, but for the system's own.
CODE = ("saving", "pieces", "files", "safetensors")
STORAGE = Path(zf.__file__).parent / "storage"


# ------------------------------------------------------------------------------------- what is saved


def pipeline():
    return zf.chain(zf.shard(), zf.adamw(1e-2))


def state(n: int, leaves: int = 8) -> zf.State:
    """Every number in it is `n`."""
    made = zf.init(pipeline(), {f"w{i}": torch.zeros(3000) for i in range(leaves)})
    for x in tree_leaves(made):
        if isinstance(x, torch.Tensor):
            x.fill_(n)
    return made


def saved(directory: Path) -> int | str:
    """The number in a checkpoint, or why there is none."""
    try:
        loaded = zf.load(directory, like=state(-1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    found = {float(v) for x in tree_leaves(loaded) for v in x.unique()}
    return int(min(found)) if len(found) == 1 else f"a mixture of {sorted(found)}"


def exported(path: Path) -> int | str:
    """The number in a file of safetensors."""
    from safetensors.torch import load_file

    try:
        found = {float(v) for x in load_file(path).values() for v in x.unique()}
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return int(min(found)) if len(found) == 1 else f"a mixture of {sorted(found)}"


def impatient() -> None:
    """Do not wait for minutes for a lock that was left behind."""
    for name in ("zerofn.storage.files", "zerofn.storage.files"):
        if hasattr(sys.modules.get(name), "PATIENCE"):
            sys.modules[name].PATIENCE = PATIENCE  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------- processes


class Child:
    """A fork of this process that runs `work` and tells how it went, if it lives."""

    def __init__(self, work: Callable[[Callable[..., None]], None]):
        read, write = os.pipe()
        self.begun = 0.0
        self.words: list[dict[str, Any]] = []
        self._text = b""
        self.pid = os.fork()
        if not self.pid:
            _live(work, lambda **word: os.write(write, json.dumps(word).encode() + b"\n"))
        os.close(write)
        self._pipe = read

    def listen(self, seconds: float, until: str | None = None) -> bool:
        """Take in what it tells; whether it has ended, or told of `until`."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self._pipe], [], [], left)[0]:
                return False
            new = os.read(self._pipe, 65536)
            *lines, self._text = (self._text + new).split(b"\n")
            self.words += [json.loads(line) for line in lines]
            if not new or any(until in word for word in self.words):
                return True
        return False

    def end(self, seconds: float | None = None) -> dict[str, Any]:
        """What it has told in all, when it has ended or was ended."""
        while not self.listen(limit(30) if seconds is None else seconds):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._pipe)
        return {k: v for word in self.words for k, v in word.items()}

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def _live(work: Callable[[Callable[..., None]], None], tell: Callable[..., None]) -> None:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        impatient()
        work(tell)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def attempt(tell: Callable[..., None], save: Callable[[], None], read: Callable[[], int | str]) -> None:
    """Save; after a failure read, in the same process and while its traceback is still there."""
    try:
        tell(begin=True)
        save()
        tell(done=True)
    except BaseException as error:
        sys.settrace(None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        tell(error=type(error).__name__, text="\n".join([str(error), *getattr(error, "__notes__", [])]))
        start = time.monotonic()
        tell(read=read(), waited=time.monotonic() - start)


# -------------------------------------------------------------------------------------------- moments


def is_watched(file: str) -> bool:
    path = Path(file)
    return path.parent == STORAGE and path.stem in CODE


def stop_at(number: int, act: Callable[[], None], only_after_calls: bool) -> set[tuple[str, int, int]]:
    """Run `act` before an instruction of the code that saves, the one that is the `number`th new one to come.

    Args:
        number: of the instruction.
        act: kills, or raises.
        only_after_calls: count those alone before which Python delivers an interrupt.

    Returns:
        The instructions that have come.
    """
    seen: set[tuple[str, int, int]] = set()
    before: dict[int, int] = {}

    def each(frame: Any, event: str, arg: Any) -> Any:
        if event != "opcode":
            return each
        code, here = frame.f_code, frame.f_lasti
        last = before.get(id(frame))
        before[id(frame)] = here
        name = dis.opname[code.co_code[last]] if last is not None else ""
        key = (code.co_filename, code.co_firstlineno, here)
        if key in seen or (only_after_calls and not name.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))):
            return each
        seen.add(key)
        if len(seen) == number:
            act()
        return each

    def enter(frame: Any, event: str, arg: Any) -> Any:
        if not is_watched(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        before.pop(id(frame), None)  # of a frame that has ended
        return each

    # Python 3.12 has no events of opcodes unless a frame has asked for them before `settrace`.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(enter)
    return seen


def fail_at(number: int, directory: Path, code: int = errno.EIO) -> list[str]:
    """Let the `number`th call to the system that names something in `directory`, or makes it durable, fail."""
    calls: list[str] = []

    def each(event: str, args: tuple) -> None:
        if not event.startswith(("os.", "open", "shutil.")) or event in ("os.fork", "os.listdrives"):
            return
        if any(str(directory) in os.fsdecode(a) for a in args if isinstance(a, str | bytes | os.PathLike)):
            count(event)

    def count(event: str) -> None:
        calls.append(event)
        if len(calls) == number:
            raise OSError(code, os.strerror(code))

    def fsync(handle: int) -> None:
        count("fsync")
        real(handle)

    real, os.fsync = os.fsync, fsync
    sys.addaudithook(each)
    return calls


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


# ------------------------------------------------------------------------------------------ two ranks


def two_ranks(save: Callable[[zf.State], None], n: int, store: Path, cuts: dict[int, Callable[[], Any]]) -> list[Child]:
    """Two ranks that save `n`, when both are ready to; `cuts` are run before it."""

    def rank(number: int) -> Callable[[Callable[..., None]], None]:
        def work(tell: Callable[..., None]) -> None:
            os.environ.update(RANK=str(number), WORLD_SIZE="2", LOCAL_RANK=str(number), GLOO_SOCKET_IFNAME="lo")
            from zerofn.ranks.process_groups import initialize  # inside: ranks without zf.launch

            initialize("gloo", str(store))
            new = state(n)
            torch.distributed.barrier()
            seen = cuts[number]() if number in cuts else ()
            try:
                tell(begin=True)
                save(new)
                sys.settrace(None)
                tell(done=True, instructions=len(seen))
            except BaseException as error:
                sys.settrace(None)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                tell(error=type(error).__name__, text="\n".join([str(error), *getattr(error, "__notes__", [])]))

        return work

    return [Child(rank(0)), Child(rank(1))]


def save_for_ever(directory: str, n: int, diary: str) -> None:
    """A rank of `zf.launch` that saves one number after the other, and writes down which it has saved."""

    rank = zf.collectives.world_group("test").rank
    (Path(diary) / f"pid{rank}").write_text(str(os.getpid()))
    while True:
        zf.save(directory, state(n))
        with open(Path(diary) / f"saved{rank}", "a") as file:
            file.write(f"{n}\n")
        n += 1


def wait_for(what: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)
    return found


def sleep_part(duration: float, chance: random.Random, most: float = 1.2) -> None:
    time.sleep(duration * chance.uniform(0, most))
