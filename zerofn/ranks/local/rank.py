"""The process of a rank that `launch` forked: it runs the function, and sends its result or its traceback."""

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
        os.setpgid(pid, pid)  # both server and rank do it: the second one finds it done


def run_rank(rank: int, job_fd: int, store_fd: int, gate_fd: int, result: int, note: int) -> NoReturn:
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
        stamp = time.monotonic()  # before any socket closes: other ranks fail later than this
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
        # No rank is in a collective, and the kernel closes the sockets: the destructors of process groups, which join
        # threads and print warnings, do not run.
        os._exit(code)


def _work(rank: int, job: dict[str, Any], store: int, result: int) -> None:
    os.environ.clear()
    os.environ.update(job["env"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(job["cwd"])
    sys.path[:] = job["path"]
    sys.argv[:] = job["argv"]
    for stream in (sys.stdout, sys.stderr):
        # Whole lines, at once: neither mixed with those of another rank nor lost when this one is killed.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    sys.stdin = open(os.devnull)  # noqa: SIM115
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the fork has copied its state; `random` seeds itself anew
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    if job["main"]:
        import runpy

        # As multiprocessing does: under another name, so that `if __name__ == "__main__":` of the script does not run.
        main = types.ModuleType("__mp_main__")
        vars(main).update(runpy.run_path(job["main"], run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    if job["init"]:
        # Through a file and not over TCP: for a log message each TCP store of torch asks a name server for the name of
        # 127.0.0.1 when it connects, and waits 5 s if no answer comes.
        initialize(job["backend"], job["store"] or f"/proc/self/fd/{store}")
    fn, args = load(io.BytesIO(job["payload"]))
    _add_globals_to_main(fn)
    value = fn(*args)
    settle()  # `os._exit` does not wait for threads
    finished()
    with os.fdopen(os.dup(result), "wb") as file:
        torch.save(value, file, pickle_module=pickler())


def _add_globals_to_main(fn: Any) -> None:
    """Put the globals of a function of a script into `__main__`, where torch's compiler looks for them."""
    if isinstance(fn, types.FunctionType) and fn.__globals__.get("__name__") == "__main__":
        main = vars(sys.modules["__main__"])
        main.update({name: x for name, x in fn.__globals__.items() if name not in main})


def _traceback(error: BaseException) -> str:
    """The text of a traceback from the user's first frame on."""
    tb = error.__traceback__
    while tb and tb.tb_next and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return "".join(traceback.format_exception(type(error), error, tb))


def _die_with_parent() -> None:
    """Have this rank killed when the server is (on Linux; elsewhere it outlives the server)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Have processes below this one become its children when their parent ends, also those in another session.

    On Linux; elsewhere processes that have left the group of their rank are not found.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
