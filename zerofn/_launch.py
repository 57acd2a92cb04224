"""`launch`: run a function on a few local ranks, from a script, a test or a notebook."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
from collections.abc import Callable
from typing import Any

from ._collectives import default_backend
from ._rank_run import RankError as RankError
from ._rank_run import RankTimeout as RankTimeout
from ._rank_run import Run
from ._travel import main_file, pack, store_path

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
        run = stack.enter_context(contextlib.closing(Run(nproc, pickle.dumps(job))))
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
