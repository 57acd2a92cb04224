"""`launch`: run a function on a few local ranks, from a script, a test or a notebook."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import sys
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from ..._errors import explain
from ..backend import default_backend
from .fork_server import server
from .ranks import RankError as RankError
from .ranks import RankTimeout as RankTimeout
from .ranks import Run, ServerEnded
from .serialization import main_file, pack, store_path

__all__ = ["RankError", "RankTimeout", "launch"]

_MARK = "ZEROFN_RANK"  # set in ranks and inherited by what they start: launches do not nest


def launch(
    fn: Callable[..., Any],
    nproc: int,
    *args: Any,
    timeout: float | None = None,
    threads: int | None = 1,
    backend: str | None = None,
    init: bool = True,
) -> list[Any]:
    """Run `fn(*args)` on `nproc` local ranks and return their results in rank order.

    In each rank RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as under torchrun,
    and the default process group is initialised: NCCL and gloo if there is a GPU per rank, else gloo, or `backend`.
    With `init=False` that is left to `fn`. A single rank is a process of its own too.

    Functions of a script, a notebook or another function travel by value if `cloudpickle` is installed; functions of a
    module always travel by name. Tensors in arguments and results travel by value and arrive on the CPU. Each rank
    computes with `threads` threads (None: torch's own choice). What ranks print goes where this process prints.
    `atexit` handlers do not run in ranks, as in `multiprocessing`.

    timeout: seconds for the whole run, None or infinity for no limit.

    Raises `RankError` when a rank raises or dies, with its rank and traceback, and `RankTimeout` when ranks
    are not finished in time, with the stack of each. In every case, also after an interrupt or a kill of this process,
    all ranks and the processes that they started, in sessions of their own too, have ended afterwards. (Outside of
    Linux, processes that have left the group of their rank stay.) `TypeError` and `ValueError` name a wrong argument.

        >>> def hello(greeting):
        ...     import torch.distributed as dist
        ...     return f"{greeting} from rank {dist.get_rank()} of {dist.get_world_size()}"
        >>> launch(hello, 2, "hello")                                       # doctest: +SKIP
        ['hello from rank 0 of 2', 'hello from rank 1 of 2']
    """
    _check(fn, nproc, timeout, threads, backend, init)
    nproc = int(nproc)
    backend = backend or default_backend(nproc)
    job = {
        "payload": pack(fn, args),
        "main": main_file(),
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
        job["store"] = stack.enter_context(store_path())
        message = pickle.dumps(job)
        limit = None if timeout is None or math.isinf(timeout) else float(timeout)
        try:
            return _run(nproc, message, limit)
        except ServerEnded as error:
            if error.began:
                raise
        # The server ended between two launches: no rank of this one has been forked.
        server.renew()
        return _run(nproc, message, limit)


def _run(nproc: int, job: bytes, timeout: float | None) -> list[Any]:
    with contextlib.closing(Run(nproc, job)) as run:
        run.start()
        run.wait(timeout)
        return run.results()


def _check(fn: Any, nproc: Any, timeout: Any, threads: Any, backend: Any, init: Any) -> None:
    """Refuse wrong arguments, and a launch from inside of a rank or on a system without fork."""
    number = lambda x, kind: isinstance(x, kind) and not isinstance(x, bool)  # noqa: E731
    if not callable(fn):
        wrong = f"zf.launch({type(fn).__name__}, {nproc!r})"
        why = "it needs the function itself, to be called on every rank with the arguments after nproc"
        raise TypeError(explain(wrong, why, "launch(train, 2, config), not launch(train(config), 2)"))
    if not number(nproc, Integral):
        raise TypeError(explain(f"zf.launch(fn, {nproc!r})", "nproc is a number of ranks", "zf.launch(fn, 2, *args)"))
    if nproc < 1:
        raise ValueError(explain(f"zf.launch(fn, nproc={nproc})", "at least one rank is needed", "zf.launch(fn, 2)"))
    if timeout is not None and not number(timeout, Real):
        raise TypeError(_wrong("timeout", timeout, "it is a number of seconds, or None for no limit", "60"))
    if timeout is not None and not timeout > 0:
        raise ValueError(_wrong("timeout", timeout, "it is seconds greater than zero, or None for no limit", "60"))
    if threads is not None and not number(threads, Integral):
        raise TypeError(_wrong("threads", threads, "it is a number of threads, or None for torch's own choice", "1"))
    if threads is not None and threads < 1:
        raise ValueError(_wrong("threads", threads, "each rank needs a thread to compute with", "1"))
    if backend is not None and not (isinstance(backend, str) and backend):
        raise TypeError(
            _wrong("backend", backend, "it is a name of torch.distributed, or None for the fitting", "'gloo'")
        )
    if not isinstance(init, bool):
        raise TypeError(_wrong("init", init, "it is True, or False where fn makes the process group", "False"))
    if _MARK in os.environ or ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        wrong = f"launch inside rank {os.environ.get('RANK', '?')} of a job that is running already"
        raise RuntimeError(explain(wrong, "its ranks are there", "fn(*args), on every rank"))
    if not hasattr(socket, "send_fds"):
        why = "launch forks its ranks, which this system cannot"
        raise RuntimeError(explain("zf.launch(fn, nproc)", why, "torchrun --nproc-per-node 2 script.py"))


def _wrong(name: str, value: Any, why: str, right: str) -> str:
    return explain(f"zf.launch(fn, nproc, {name}={value!r})", why, f"zf.launch(fn, nproc, {name}={right})")


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
    # Local ranks need the loopback only; the address of the host name may not be reachable.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        env["GLOO_SOCKET_IFNAME"] = loopback[0]
    return env


def _reserve_port() -> socket.socket:
    """A port on which rank 0 can serve a store, if `fn` makes a process group by itself.

    It stays bound here without listening while the ranks run: the system gives it to no other process, and SO_REUSEADDR
    lets rank 0 listen on it.
    """
    dual = socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if dual:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.bind(("", 0))
    return held
