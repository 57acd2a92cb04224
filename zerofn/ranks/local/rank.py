"""The life of a rank that `launch` forked, from the fork to its last word."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
import types
from typing import Any, NoReturn

import torch

from ..background_thread import settle
from ..open_groups import finished
from ..process_groups import initialize
from .serialization import load, pickler, read

NOTE = 16  # bytes before the text of a note: kind and time


def own_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # by both sides: whoever comes second finds it done


def be_rank(rank: int, job_fd: int, store_fd: int, gate_fd: int, result: int, note: int) -> NoReturn:
    code = 1
    try:
        server = os.getppid()
        own_group(0)
        adopt_orphans()
        _die_with_parent()
        os.lseek(note, NOTE, os.SEEK_SET)
        faulthandler.enable(note)
        faulthandler.register(signal.SIGUSR1, note, all_threads=False)
        if os.getppid() == server:
            _work(rank, pickle.loads(read(job_fd)), store_fd, result)
            code = 0
    except BaseException as error:
        stamp = time.monotonic()  # before anything closes: the others fail later than this
        # Broken connections are RuntimeErrors, so only those can be the consequence of another rank's end.
        kind = b"C" if isinstance(error, RuntimeError) else b"E"
        os.ftruncate(note, 0)
        os.pwrite(note, _traceback(error).encode(errors="replace"), NOTE)
        os.pwrite(note, kind + bytes(7) + struct.pack("d", stamp), 0)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if code == 0:
            with socket.socket(fileno=gate_fd) as gate:
                gate.send(b"F")
                gate.recv(1)
        # Straight out: nobody is in a collective any more, the kernel closes the sockets, and the destructors
        # of process groups, with their threads and their last words, do not run.
        os._exit(code)


def _work(rank: int, job: dict[str, Any], store: int, result: int) -> None:
    os.environ.clear()
    os.environ.update(job["env"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(job["cwd"])
    sys.path[:] = job["path"]
    sys.argv[:] = job["argv"]
    for stream in (sys.stdout, sys.stderr):
        # Whole lines, at once: neither torn by another rank's nor lost when this one is killed.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    sys.stdin = open(os.devnull)  # noqa: SIM115
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the server's generator was copied; `random` sees to itself
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    if job["main"]:
        import runpy

        # As multiprocessing does: the script under another name, so that its guarded part does not run.
        main = types.ModuleType("__mp_main__")
        vars(main).update(runpy.run_path(job["main"], run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    if job["init"]:
        # Through a file and not over TCP: each of torch's TCP stores asks a name server for the name of
        # 127.0.0.1 when it connects, for a log message, and waits 5 s when the answer does not come.
        initialize(job["backend"], job["store"] or f"/proc/self/fd/{store}")
    fn, args = load(io.BytesIO(job["payload"]))
    _bring_along(fn)
    value = fn(*args)
    settle()  # the interpreter, which would wait for its threads, is not asked
    finished()
    with os.fdopen(os.dup(result), "wb") as file:
        torch.save(value, file, pickle_module=pickler())


def _bring_along(fn: Any) -> None:
    """Put what a function of a script has come with into `__main__`: torch's compiler looks for its globals there."""
    if isinstance(fn, types.FunctionType) and fn.__globals__.get("__name__") == "__main__":
        main = vars(sys.modules["__main__"])
        main.update({name: x for name, x in fn.__globals__.items() if name not in main})


def _traceback(error: BaseException) -> str:
    """From the user's first frame on."""
    tb = error.__traceback__
    while tb and tb.tb_next and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb))


def _die_with_parent() -> None:
    """Should the server be killed, the ranks go with it (Linux; elsewhere they outlive it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Whatever this process starts stays below it, in a session of its own too, and when what started it has ended.

    On Linux; elsewhere what has left the rank's process group is not found.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
