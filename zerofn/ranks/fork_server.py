"""The process that ranks are forked from, and a rank.

The forkserver of `multiprocessing` was tried in its place. It starts ranks as fast: 0.11 s for two ranks against 0.12 s
here, once it runs and if it has preloaded torch. It could replace the second half of this file, some 250 lines: the
server's loop and its start. It loses what `launch` promises:

* A kill of the caller leaves all ranks running, and what they have started. The server ends when all copies of a pipe
  are closed, and each rank has one. A rank may close its copy (a private attribute of `multiprocessing`) and ask the
  system to be killed with the server. Then ranks end, and processes that they have started in a session of their own
  still run: nobody is left to kill them. Here the server adopts them. It kills them when their rank or the caller
  ends.
* It runs `__main__` again in each rank. A script without a guard starts itself over, and pytest imports itself.
  To prevent that, `sys.modules["__main__"]` has to be replaced while ranks start, for all threads of the caller. A
  function of a notebook needs `cloudpickle` in either way.
* Ranks have the environment and the standard streams from when the server was started. A notebook or pytest has
  replaced them since.
* A process has one such server. If something else has started it before, such as a `DataLoader` with
  `multiprocessing_context="forkserver"`, it preloads nothing more, and each rank imports torch, which takes seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Container, Iterator
from typing import Any, NoReturn

import torch

from zerofn._errors import explain
from zerofn.ranks.backend import rank_of
from zerofn.ranks.process_groups import finished, initialize, join_background_threads

# ----------------------------------------------------------------------------------------------------------------------
# These functions send functions, arguments and results between the caller of `launch` and its ranks, in files.


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
        wrong = f"zf.launch of {getattr(fn, '__qualname__', fn)!r}"
        why = f"it or its arguments cannot be sent to another process ({type(error).__name__}: {error})"
        by_value = 'pip install "zerofn[notebooks]", which sends it by value; ' if by_name else ""
        right = f"{by_value}a function of a module, with arguments that can be pickled"
        raise ValueError(explain(wrong, why, right)) from error


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
    # `pread` and not seek and read, since processes with the same file share its position.
    parts = []
    while part := os.pread(fd, 1 << 30, start):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


# ----------------------------------------------------------------------------------------------------------------------
# `run_rank` is the process of a rank that `launch` forked: it runs the function, and sends its result or its
# traceback.


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
        # Broken connections are RuntimeErrors, so only those can be the consequence of another rank's end; and an error
        # that all ranks raise since one has.
        cause = rank_of(error)
        kind = b"C" if isinstance(error, RuntimeError) or cause not in (None, rank) else b"E"
        os.ftruncate(note, 0)
        os.pwrite(note, _traceback(error).encode(errors="replace"), NOTE)
        os.pwrite(note, kind + bytes(3) + struct.pack("=id", -1 if cause is None else cause, stamp), 0)
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
        # Whole lines are written at once, so they do not mix with those of another rank, nor get lost by a kill.
        stream.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    sys.stdin = open(os.devnull)  # noqa: SIM115
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the fork has copied its state; `random` seeds itself anew
    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    if job["main"]:
        import runpy

        # The script runs under another name, as in multiprocessing, so that its `if __name__ == "__main__":` is false.
        main = types.ModuleType("__mp_main__")
        vars(main).update(runpy.run_path(job["main"], run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    if job["init"]:
        # The store is a file and not a TCP store: for a log message each TCP store of torch asks a name server for the
        # name of 127.0.0.1 when it connects, and waits 5 s if no answer comes.
        initialize(job["backend"], job["store"] or f"/proc/self/fd/{store}")
    fn, args = load(io.BytesIO(job["payload"]))
    _add_globals_to_main(fn)
    value = fn(*args)
    join_background_threads()  # `os._exit` does not wait for threads
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
    """Make the system kill this rank when the server ends (on Linux; elsewhere it outlives the server)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Make descendants children of this process when their parent ends, also those in another session.

    This works on Linux. Elsewhere processes that have left the group of their rank are not found.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


# ----------------------------------------------------------------------------------------------------------------------
# `serve` is the loop of the fork server: it forks ranks, sends their exit codes, and kills ranks whose caller has
# ended.


NUMBER = struct.Struct("q")


def serve(fd: int, modules: tuple[str, ...] = ()) -> NoReturn:
    """Fork a rank per message, send its pid and exit code, and kill it when its caller closes its socket.

    Args:
        fd: the server's end of the caller's socket.
        modules: what ranks find imported, beside what `_preload` imports.
    """
    control = socket.socket(fileno=fd)
    wake, waker = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wake-up pipe is written
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    _preload(modules)
    # Until here stderr shows a failed import; from here on this process holds no stream open.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    gc.collect()
    gc.freeze()  # ranks share these pages with this process as long as no garbage collector writes into them
    loop = _Loop(control, wake, waker)
    while True:
        for key, _ in loop.selector.select():
            loop.handle(key.fileobj)


class _Loop:
    """Handles requests of the caller, ends of ranks, and callers that close the socket of a rank.

    Args:
        control: a socket with the caller's requests.
        wake, waker: a pipe that signals write to.
    """

    def __init__(self, control: socket.socket, wake: int, waker: int):
        self.control, self.wake, self.waker = control, wake, waker
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)
        self.selector.register(wake, selectors.EVENT_READ)
        self.controls: dict[int, socket.socket] = {}
        self.pids: dict[socket.socket, int] = {}

    def handle(self, source: object) -> None:
        """Read a message from `source`."""
        if source is self.control:
            self._fork()
        elif source == self.wake:
            os.read(self.wake, 4096)
            self._reap()
        elif isinstance(source, socket.socket) and source in self.pids:
            self._on_control(source)

    def _fork(self) -> None:
        """Fork a rank that the caller asks for, or end all ranks if the caller has ended."""
        message, fds, _, _ = socket.recv_fds(self.control, NUMBER.size, 8)
        if not message:
            for pid in self.controls:
                _kill(pid)
            _sweep({})
            os._exit(0)
        _, _, control_fd, *_ = fds
        rank_control = socket.socket(fileno=control_fd)
        pid = os.fork()
        if pid == 0:
            self._run_rank(NUMBER.unpack(message)[0], fds, rank_control)
        for i, other in enumerate(fds):
            if i != 2:
                os.close(other)
        own_group(pid)
        self.controls[pid], self.pids[rank_control] = rank_control, pid
        self.selector.register(rank_control, selectors.EVENT_READ)
        _send(rank_control, pid)

    def _run_rank(self, rank: int, fds: list[int], rank_control: socket.socket) -> NoReturn:
        """In the forked child, run as that rank."""
        job, store, _, gate, result, note, out, err = fds
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for other in (self.control, rank_control, self.selector, *self.controls.values()):
            other.close()
        os.dup2(out, 1)
        os.dup2(err, 2)
        for other in (self.wake, self.waker, out, err):
            os.close(other)
        run_rank(rank, job, store, gate, result, note)

    def _on_control(self, rank_control: socket.socket) -> None:
        """Make a rank write its stack if the caller asks for it, or kill it if the caller has closed its socket."""
        try:
            word = rank_control.recv(1)
        except OSError:
            word = b""
        if word == b"D":
            os.kill(self.pids[rank_control], signal.SIGUSR1)
        else:
            self.selector.unregister(rank_control)
            _kill(self.pids.pop(rank_control))

    def _reap(self) -> None:
        while (pid := _ended()) is not None:
            _kill(pid)  # the group of the rank: processes that it started and left behind
            _, status = os.waitpid(pid, 0)
            if pid not in self.controls:
                continue
            rank_control = self.controls.pop(pid)
            if self.pids.pop(rank_control, None):
                self.selector.unregister(rank_control)
            _sweep(self.controls)
            _send(rank_control, os.waitstatus_to_exitcode(status))
            rank_control.close()


def _kill(pid: int) -> None:
    """Kill a process and its group."""
    for target in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            target(pid, signal.SIGKILL)


def _ended() -> int | None:
    """A child that has ended and is not reaped. While it is a zombie, no other process or group has its number."""
    try:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if info is None else info.si_pid


def _sweep(ranks: Container[int]) -> None:
    """Kill processes that ended ranks left behind: children of this process that are not ranks."""
    until = time.monotonic() + 5
    while (left := [pid for pid in _children() if pid not in ranks]) and time.monotonic() < until:
        for pid in left:
            _kill(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        # When one of them ends, the processes that it started become children of this one.
        time.sleep(0.002)


def _children() -> list[int]:
    """The numbers of this process's children; none where there is no /proc."""
    found, me = [], str(os.getpid())
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat") as file:
                if file.read().rpartition(")")[2].split()[1] == me:
                    found.append(int(name))
    return found


def _preload(modules: tuple[str, ...]) -> None:
    """Import what every rank will need. Nothing here may start a thread or use a GPU.

    It imports the compiler too, which the first `vmap`, optimizer or checkpoint of a process needs (0.7 s), and the
    whole of the package but `contrib` and `testing`: 0.4 s here, where each rank would spend 0.2 s at its first attach
    or step, and more at its first save.
    """
    import importlib
    import pkgutil

    import zerofn

    ours = ["zerofn.extend"]
    for part in ("pure", "eager", "module", "sharded", "storage", "transforms"):
        ours += [m.name for m in pkgutil.iter_modules([f"{zerofn.__path__[0]}/{part}"], f"zerofn.{part}.")]
    for name in ("optree", "numpy", "cloudpickle", *ours, *modules):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        import torch

        torch.compiler.disable(_preload)


def _send(rank_control: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the caller has ended, and its ranks are killed for it
        rank_control.sendall(NUMBER.pack(number))


# ----------------------------------------------------------------------------------------------------------------------
# `server` starts the fork server, once, in a process of its own; ranks are forked from it.
#
# The server has imported torch and done nothing with it; it runs `serve`. A launch of two ranks takes 0.03 s, after 2
# s for the first. Rejected alternatives, beside `multiprocessing`'s forkserver:
#
# * `spawn` takes 1.7 s for every launch;
# * `fork` of the caller breaks once the caller has run a backward, whose thread pool does not survive a fork, or has
#   used a GPU.


class _Server:
    """The server of this process: started at the first launch, ended with this process.

    Before that one may set `modules`, the names of modules that ranks are to find imported. The tests of this package
    do: each rank would import pytest, 0.1 s, since the functions of its test stand in a module that does.
    """

    def __init__(self) -> None:
        self.modules: tuple[str, ...] = ()
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None

    def fork(self, rank: int, fds: list[int]) -> None:
        """Make the server fork a rank, and pass it these files."""
        with self.lock:
            if self.process is None or self.control is None or self.process.poll() is not None:
                self.start()
            assert self.control is not None
            try:
                socket.send_fds(self.control, [NUMBER.pack(rank)], fds)
            except ConnectionError:  # it has just died
                self.start()
                socket.send_fds(self.control, [NUMBER.pack(rank)], fds)

    def start(self) -> None:
        self.stop()
        if not sys.executable:
            why = "launch starts another Python, and sys.executable does not say which"
            raise RuntimeError(explain("zf.launch(fn, nproc)", why, "torchrun --nproc-per-node 2 script.py"))
        # The socket comes first: if an interrupt keeps the process from being noted, closing the socket ends it.
        self.control, theirs = socket.socketpair()
        serve = "from zerofn.ranks.fork_server import serve"
        code = f"import sys; sys.path[:] = {sys.path!r}; {serve}; serve({theirs.fileno()}, {self.modules!r})"
        # A session of its own: an interrupt typed at the terminal reaches the caller, who ends the ranks.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def stop(self) -> None:
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            self.process.wait()
        self.process = self.control = None

    def renew(self) -> None:
        """Forget a server that has ended, so that the next fork starts another."""
        with self.lock:
            if self.process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5)  # it may still be ending
                    self.stop()

    def forget(self) -> None:
        """In a forked child, drop the server: it is the parent's, and must see when the parent ends."""
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            self.process.returncode = 0  # not a child of this process: nothing to wait for, nothing to warn of
        self.process = self.control = None
        self.lock = threading.Lock()


server = _Server()
atexit.register(server.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=server.forget)
