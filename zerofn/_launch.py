"""`launch`: run a function on a few local ranks, from a script, a test or a notebook.

Ranks are forked from a *server*: one quiet process per caller that has imported torch and done nothing
with it. A launch of two ranks then takes 0.03 s, after 2 s for the first. What was weighed:

* `spawn` takes 1.7 s for every launch;
* `fork` of the caller breaks once the caller has run a backward (its thread pool does not survive a
  fork) or touched a GPU;
* the standard library's forkserver is as fast, but runs `__main__` again in every rank (a script without
  a guard starts itself over, pytest imports itself), takes the environment and the standard streams from
  the moment it was started (a notebook or pytest has replaced them since), and leaves ranks running when
  the caller is killed.

Every rank has two channels, so that whatever ends ends the rest:

* `chan`, server to caller: the rank's pid, later its exit code. When the caller's end closes, by will or
  by death, the server kills the rank's process group.
* `gate`, rank to caller: "finished"; the rank leaves when all are finished and the caller says so. A rank
  that left earlier would take its sockets from under the others.
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
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from zerofn import _collectives

__all__ = ["RankError", "RankTimeout", "launch"]

_MARK = "ZEROFN_RANK"  # set in ranks and inherited by what they start: launches do not nest
_NOTE = 16  # bytes before the text of a note: kind and time
_GRACE = 0.5  # seconds to wait for the cause after the first consequence was seen
_NUMBER = struct.Struct("q")


class RankError(RuntimeError):
    """A rank raised or died. `rank` is which, `exitcode` how its process ended (negative: by a signal),
    `traceback` the text of its traceback ("" if it died without one)."""

    def __init__(self, message: str, rank: int = -1, exitcode: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.exitcode, self.traceback = rank, exitcode, traceback


class RankTimeout(RankError, TimeoutError):
    """Ranks were not finished in time. `ranks` are all of them, `rank` the first."""

    ranks: list[int]


def launch(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout: float | None = None,
    threads: int | None = 1,
    backend: str | None = None,
    init: bool = True,
) -> list[Any]:
    """Runs `fn(*args)` on `nproc` local ranks and returns their results in rank order.

    In each rank RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as under
    torchrun, and the default process group is initialised: NCCL and gloo if there is a GPU per rank, else
    gloo, or `backend`. With `init=False` that is left to `fn`. One rank is a process too, so that nothing
    changes with the number but the number.

    Functions of a script, a notebook or another function travel by value if `cloudpickle` is installed;
    functions of a module always travel by name. Tensors in arguments and results travel by value and arrive
    on the CPU. Each rank computes with `threads` threads (None: torch's own choice). What ranks print
    goes where this process prints. `atexit` handlers do not run in ranks, as in `multiprocessing`.

    timeout: seconds for the whole run, None for no limit.

    Raises `RankError` when a rank raises or dies, with its rank and traceback, and `RankTimeout` when ranks
    are not finished in time, with where they are. In every case, an interrupt and a kill of this process
    included, all ranks and what they started are gone afterwards.

        >>> def hello(greeting):
        ...     import torch.distributed as dist
        ...     return f"{greeting} from rank {dist.get_rank()} of {dist.get_world_size()}"
        >>> launch(hello, 2, "hello")                                       # doctest: +SKIP
        ['hello from rank 0 of 2', 'hello from rank 1 of 2']
    """
    if not callable(fn):
        raise TypeError(
            f"launch(fn, nproc, *args) needs a function to run, got {type(fn).__name__}: pass the function "
            "itself and its arguments after nproc, launch(train, 2, config), not launch(train(config), 2)"
        )
    if isinstance(nproc, bool) or not isinstance(nproc, int):
        raise TypeError(f"nproc is a number of ranks, got {nproc!r}: launch(fn, 2, *args)")
    if nproc < 1:
        raise ValueError(f"nproc={nproc}: at least one rank is needed")
    if timeout is not None and timeout <= 0:
        raise ValueError(f"timeout={timeout}: seconds greater than zero, or None for no limit")
    if _MARK in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        raise RuntimeError(
            f"launch inside rank {os.environ.get('RANK', '?')} of a job that is running already: its ranks "
            "are there, call the function itself"
        )
    if not hasattr(socket, "send_fds"):
        raise RuntimeError("launch forks its ranks, which this system cannot; use torchrun")
    backend = backend or _collectives.default_backend(nproc)
    job = {
        "payload": _pack(fn, args),
        "main": _main_file(),
        "cwd": os.getcwd(),
        "path": list(sys.path),
        "argv": list(sys.argv),
        "backend": backend,
        "threads": threads,
        "init": init,
    }
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(_reserve_port())
        job["env"] = {**os.environ, **_rank_env(nproc, port.getsockname()[1], threads)}
        job["store"] = stack.enter_context(_store_path())
        run = stack.enter_context(contextlib.closing(_Run(nproc, pickle.dumps(job))))
        run.start()
        run.wait(timeout)
        return run.results()


def _rank_env(nproc: int, port: int, threads: int | None) -> dict[str, str]:
    env = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        _MARK: "1",
    }
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    # Local ranks need no more than the loopback; the address of the host's name may not even be reachable.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        env["GLOO_SOCKET_IFNAME"] = loopback[0]
    return env


def _reserve_port() -> socket.socket:
    """A port for rank 0 to serve a store on, should `fn` make a process group by itself.

    It stays bound here, not listening, for as long as the ranks run: the system gives it to nobody else,
    and SO_REUSEADDR lets rank 0 listen on it all the same.
    """
    dual = socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if dual:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.bind(("", 0))
    return held


# ------------------------------------------------------------------------------------- what travels


def _pickler() -> Any:
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


def _pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    pickler = _pickler()
    by_name = pickler is pickle
    in_main = getattr(fn, "__module__", None) == "__main__" and _main_file() is None
    try:
        if by_name and in_main:
            raise pickle.PicklingError("it is defined in a notebook or an interactive session")
        return _dump((fn, args), pickler)
    except Exception as error:
        hint = 'install what sends it by value: pip install "zerofn[notebooks]"' if by_name else "see the cause"
        raise ValueError(
            f"{getattr(fn, '__qualname__', fn)!r} or its arguments cannot be sent to another process "
            f"({type(error).__name__}: {error}); {hint}, or move the function to a module"
        ) from error


def _dump(obj: Any, pickler: Any) -> bytes:
    # torch.save keeps tensors that share storage shared, and lets the other side choose the device.
    file = io.BytesIO()
    torch.save(obj, file, pickle_module=pickler)
    return file.getvalue()


def _load(file: Any) -> Any:
    return torch.load(file, map_location="cpu", weights_only=False)


def _main_file() -> str | None:
    """The script, if `__main__` is one. Used by ranks only where its functions had to be sent by name."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    return os.path.abspath(file) if file and os.path.exists(file) and _pickler() is pickle else None


def _scratch() -> int:
    """A file without a name, in memory where the system has such. Unlike a pipe it has no size at which the
    writer waits for the reader."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("zerofn")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@contextlib.contextmanager
def _store_path() -> Iterator[str | None]:
    """The name of a file through which ranks find each other; None where an unnamed one can be used."""
    if os.path.isdir("/proc/self/fd"):
        yield None
    else:
        with tempfile.NamedTemporaryFile(prefix="zerofn-") as file:
            yield file.name


def _read(fd: int, start: int = 0) -> bytes:
    # Not by seek and read: processes that were handed the same file share its position.
    parts = []
    while part := os.pread(fd, 1 << 30, start):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


# ----------------------------------------------------------------------------- the caller's side


class _Rank:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.chan, self.their_chan = socket.socketpair()
        self.gate, self.their_gate = socket.socketpair()
        self.result, self.note = _scratch(), _scratch()
        self.pid: int | None = None
        self.exitcode: int | None = None
        self.finished = False
        self.ended_at = float("inf")

    def hand_over(self) -> list[int]:
        return [self.their_chan.fileno(), self.their_gate.fileno(), self.result, self.note]

    def close_theirs(self) -> None:
        self.their_chan.close()
        self.their_gate.close()

    def close(self) -> None:
        self.close_theirs()
        self.chan.close()
        self.gate.close()
        os.close(self.result)
        os.close(self.note)

    def error(self) -> tuple[float, str] | None:
        """When and with what traceback the function raised, if it did."""
        note = _read(self.note)
        if note[:1] not in (b"E", b"C"):
            return None
        return struct.unpack_from("d", note, 8)[0], note[_NOTE:].decode(errors="replace")

    def may_be_consequence(self) -> bool:
        return _read(self.note)[:1] != b"E"

    def stack(self) -> str:
        return _read(self.note, _NOTE).decode(errors="replace").strip("\0").rstrip()


class _Run:
    """The ranks of one call, from start to end."""

    def __init__(self, nproc: int, job: bytes) -> None:
        self.ranks: list[_Rank] = []
        self.selector = selectors.DefaultSelector()
        self.job, self.store = _scratch(), _scratch()
        with os.fdopen(os.dup(self.job), "wb") as file:
            file.write(job)
        for rank in range(nproc):
            self.ranks.append(_Rank(rank))

    def start(self) -> None:
        # What this process prints to: `sys.stdout` may be a notebook's or a test's, its file number is ours.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for r in self.ranks:
            _server.fork(r.rank, [self.job, self.store, *r.hand_over(), 1, 2])
            r.close_theirs()
            self.selector.register(r.chan, selectors.EVENT_READ, r)
            self.selector.register(r.gate, selectors.EVENT_READ, r)

    def wait(self, timeout: float | None) -> None:
        deadline = time.monotonic() + timeout if timeout is not None else None
        while any(r.exitcode is None for r in self.ranks):
            if all(r.finished for r in self.ranks):
                deadline = None  # the results are there, and the ranks are told to leave
            if not self.step(deadline):
                raise self.late(timeout)
            failed = [r for r in self.ranks if r.exitcode or (r.exitcode == 0 and not r.finished)]
            if failed:
                # A rank that ends closes its sockets, and the others fail of that: wait for the cause.
                until = time.monotonic() + (_GRACE if all(r.may_be_consequence() for r in failed) else 0)
                while any(r.exitcode is None and not r.finished for r in self.ranks) and self.step(until):
                    pass
                raise self.failure()

    def step(self, deadline: float | None) -> bool:
        """Takes in what has happened; False when the deadline passed with nothing happening."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return False
        for key, _ in self.selector.select(left):
            r: _Rank = key.data
            if key.fileobj is r.gate:
                r.finished |= r.gate.recv(1) == b"F"
                self.selector.unregister(r.gate)
                if all(other.finished for other in self.ranks):
                    for other in self.ranks:
                        with contextlib.suppress(OSError):  # killed at the gate: its exit code will tell
                            other.gate.send(b"G")
            else:
                self.hear(r)
        return deadline is None or time.monotonic() < deadline or all(r.exitcode is not None for r in self.ranks)

    def hear(self, r: _Rank) -> None:
        data = r.chan.recv(_NUMBER.size, socket.MSG_WAITALL)
        if len(data) < _NUMBER.size:
            raise RuntimeError("the process that starts ranks has ended; call launch again for a new one")
        number = _NUMBER.unpack(data)[0]
        if r.pid is None:
            r.pid = number
        else:
            r.exitcode, r.ended_at = number, time.monotonic()
            self.selector.unregister(r.chan)

    def failure(self) -> RankError:
        failed = [r for r in self.ranks if r.exitcode is not None and not (r.exitcode == 0 and r.finished)]
        errors = {r.rank: r.error() for r in failed}

        def when(r: _Rank) -> float:
            error = errors[r.rank]
            # A process is seen to end only after its sockets have closed and others failed for it.
            return error[0] if error else r.ended_at - _GRACE

        first = min(failed, key=when)
        others = [r.rank for r in failed if r is not first]
        tail = f"\n(ranks {others} failed after it)" if others else ""
        error, code = errors[first.rank], first.exitcode
        assert code is not None
        if error:
            text = error[1]
            return RankError(f"rank {first.rank} raised:\n\n{text.rstrip()}{tail}", first.rank, code, text)
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        stack = first.stack()
        where = f"\n\n{stack}" if stack else ""
        return RankError(
            f"rank {first.rank} {how} before the function returned (exit code {code}){where}{tail}",
            first.rank,
            code,
        )

    def late(self, timeout: float | None) -> RankTimeout:
        slow = [r for r in self.ranks if not r.finished and r.exitcode is None]
        for r in slow:
            r.chan.send(b"D")  # the server asks the rank where it is
        time.sleep(0.1)
        stacks = "".join(f"\n\nrank {r.rank} is at:\n{r.stack()}" for r in slow)
        names = [r.rank for r in slow]
        error = RankTimeout(
            f"rank{'s' if len(names) > 1 else ''} {', '.join(map(str, names))} of {len(self.ranks)} did not "
            f"finish within timeout={timeout} seconds{stacks}",
            names[0] if names else -1,
        )
        error.ranks = names
        return error

    def results(self) -> list[Any]:
        out = []
        for r in self.ranks:
            with os.fdopen(os.dup(r.result), "rb") as file:
                file.seek(0)
                out.append(_load(file))
        return out

    def close(self) -> None:
        """Ends what still runs, and returns when it has ended."""
        for r in self.ranks:
            if r.exitcode is None and r.their_chan.fileno() == -1:
                r.chan.shutdown(socket.SHUT_WR)  # the server reads this as the order to kill
                r.chan.settimeout(10)
                try:
                    while r.exitcode is None:
                        self.hear(r)
                except (OSError, RuntimeError, KeyError, ValueError):
                    pass  # no server, no ranks: they die with it
        self.selector.close()
        for r in self.ranks:
            r.close()
        os.close(self.job)
        os.close(self.store)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _Server:
    """This process's end of the server: started at the first launch, ended with this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None

    def fork(self, rank: int, fds: list[int]) -> None:
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.start()
            assert self.control is not None
            try:
                socket.send_fds(self.control, [_NUMBER.pack(rank)], fds)
            except ConnectionError:  # it has just died
                self.start()
                socket.send_fds(self.control, [_NUMBER.pack(rank)], fds)

    def start(self) -> None:
        self.stop()
        if not sys.executable:
            raise RuntimeError("launch starts another Python and sys.executable does not say which; use torchrun")
        ours, theirs = socket.socketpair()
        code = f"import sys; sys.path[:] = {sys.path!r}; from zerofn._launch import _serve; _serve({theirs.fileno()})"
        # A session of its own: an interrupt typed at the terminal reaches the caller, who ends the ranks.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.control = ours

    def stop(self) -> None:
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            self.process.wait()
        self.process = self.control = None

    def forget(self) -> None:
        """After a fork of this process: the server is the parent's, and must see the parent end."""
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            self.process.returncode = 0  # not a child of this process: nothing to wait for, nothing to warn of
        self.process = self.control = None
        self.lock = threading.Lock()


_server = _Server()
atexit.register(_server.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_server.forget)


# ----------------------------------------------------------------------------- the server's side


def _serve(fd: int) -> NoReturn:
    """Forks a rank per message, tells its pid and exit code, kills it when its caller lets go."""
    control = socket.socket(fileno=fd)
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_r, False)
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wake-up pipe is written
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _preload()
    # stderr was there for a failed import; from now on nobody's stream is held open by this process.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    gc.collect()
    gc.freeze()  # ranks share these pages as long as no collector writes in them

    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake_r, selectors.EVENT_READ)
    chans: dict[int, socket.socket] = {}
    pids: dict[socket.socket, int] = {}

    def kill(pid: int) -> None:
        for target in (lambda: os.killpg(pid, signal.SIGKILL), lambda: os.kill(pid, signal.SIGKILL)):
            with contextlib.suppress(OSError):
                target()

    def reap() -> None:
        while chans:
            # Look before reaping: while the rank is a zombie its number is its own, and so is its group's.
            info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is None:
                return
            kill(info.si_pid)  # what the rank started and left behind
            _, status = os.waitpid(info.si_pid, 0)
            chan = chans.pop(info.si_pid)
            if pids.pop(chan, None):
                selector.unregister(chan)
            _tell(chan, os.waitstatus_to_exitcode(status))
            chan.close()

    while True:
        for key, _ in selector.select():
            if key.fileobj is control:
                message, fds, _, _ = socket.recv_fds(control, _NUMBER.size, 8)
                if not message:
                    for pid in chans:
                        kill(pid)
                    os._exit(0)
                job, store, chan_fd, gate, result, note, out, err = fds
                chan = socket.socket(fileno=chan_fd)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    for other in (control, chan, selector, *chans.values()):
                        other.close()
                    os.dup2(out, 1)
                    os.dup2(err, 2)
                    for other in (wake_r, wake_w, out, err):
                        os.close(other)
                    _be_rank(_NUMBER.unpack(message)[0], job, store, gate, result, note)
                for other in (job, store, gate, result, note, out, err):
                    os.close(other)
                _own_group(pid)
                chans[pid], pids[chan] = chan, pid
                selector.register(chan, selectors.EVENT_READ)
                _tell(chan, pid)
            elif key.fileobj == wake_r:
                os.read(wake_r, 4096)
                reap()
            elif key.fileobj in pids:
                chan = key.fileobj
                assert isinstance(chan, socket.socket)
                try:
                    order = chan.recv(1)
                except OSError:
                    order = b""
                if order == b"D":
                    os.kill(pids[chan], signal.SIGUSR1)
                else:
                    selector.unregister(chan)
                    kill(pids.pop(chan))


def _preload() -> None:
    """What every rank will need, imported once. Nothing here may start a thread or touch a GPU.

    `torch._dynamo` is what the first `vmap`, optimizer or checkpoint of a process imports (0.7 s).
    """
    import importlib

    for name in ("zerofn", "torch._dynamo", "optree", "numpy", "cloudpickle"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _tell(chan: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the caller is gone, and its ranks are being ended for it
        chan.sendall(_NUMBER.pack(number))


def _own_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # by both sides: whoever comes second finds it done


# ------------------------------------------------------------------------------- the rank's side


def _be_rank(rank: int, job_fd: int, store_fd: int, gate_fd: int, result: int, note: int) -> NoReturn:
    code = 1
    try:
        server = os.getppid()
        _own_group(0)
        _die_with_parent()
        os.lseek(note, _NOTE, os.SEEK_SET)
        faulthandler.enable(note)
        faulthandler.register(signal.SIGUSR1, note, all_threads=False)
        if os.getppid() == server:
            _work(rank, pickle.loads(_read(job_fd)), store_fd, result)
            code = 0
    except BaseException as error:
        stamp = time.monotonic()  # before anything closes: the others fail later than this
        # Broken connections are RuntimeErrors, so only those can be the consequence of another rank's end.
        kind = b"C" if isinstance(error, RuntimeError) else b"E"
        os.ftruncate(note, 0)
        os.pwrite(note, _traceback(error).encode(errors="replace"), _NOTE)
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
        _collectives.initialize(job["backend"], job["store"] or f"/proc/self/fd/{store}")
    fn, args = _load(io.BytesIO(job["payload"]))
    value = fn(*args)
    _collectives.finished()
    with os.fdopen(os.dup(result), "wb") as file:
        torch.save(value, file, pickle_module=_pickler())


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
