"""Groups of workers as Ray actors, and a Ray for one script.

Each actor is told the rank, the size and the meeting place of its group, as torchrun tells its ranks.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlm_engines import GRACE, START, Sums, explained


def start_ray(variables: dict[str, str], **options: Any) -> Any:
    """A Ray of this process's own, whose workers have these variables and find modules where this process does.

    On a machine that is busy its helpers may take longer than it waits for them. Variables are inherited: to give them
    by `runtime_env`, as a cluster that runs already needs it, starts other workers in place of those that wait, for a
    quarter more of the time on cores.
    """
    os.environ.setdefault("RAY_agent_register_timeout_ms", "200000")
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), **variables}
    import ray

    for last in (False, False, True):
        try:
            ray.init(object_store_memory=100 << 20, include_dashboard=False, logging_level="error", **options)
            break
        except Exception as error:
            ray.shutdown()
            if last or "timed out" not in str(error):
                raise
    return ray


class RayPost:
    """What a Ray actor has of the others: the object store, and an actor that adds up."""

    def __init__(self, meeting: Any):
        self.meeting = meeting

    def put(self, parcel: Any) -> Any:
        import ray

        # In a list, or Ray would fetch it before the method that is given it begins.
        return [ray.put(parcel)]

    def get(self, handles: list[Any]) -> list[Any]:
        import ray

        return ray.get([ref for handle in handles for ref in handle])

    def meet(self, tag: Any, group: str, value: float) -> float:
        import ray

        return ray.get(self.meeting.meet.remote(tag, group, value))


class Meeting:
    """Groups wait here for each other's number."""

    def __init__(self, groups: int):
        self.sums = Sums(groups)
        self.totals: dict[Any, Any] = {}

    async def meet(self, tag: Any, group: str, value: float) -> float:
        import asyncio

        total = self.totals.setdefault(tag, asyncio.get_running_loop().create_future())
        found = self.sums.add(tag, group, value)
        if found is not None and not total.done():
            total.set_result(found)
        for old in [t for t in self.totals if t < tag - 1]:
            del self.totals[old]
        return await total


class Actor:
    """A worker, once it knows where the ranks of its group meet."""

    def __init__(self, name: str, kind: Any, rank: int, size: int, o: Namespace, meeting: Any):
        self.given = kind, name, rank, size, o, RayPost(meeting)

    def address(self) -> tuple[str, str]:
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), str(free.getsockname()[1])

    def join(self, address: tuple[str, str]) -> None:
        import torch

        kind, *given = self.given
        rank, size = given[1], given[2]
        # As torchrun sets them; zerofn opens this world when it is first asked for ranks.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": address[1]}
        torch.set_num_threads(1)
        self.worker = kind(*given)

    def do(self, method: str, args: tuple) -> Any:
        return getattr(self.worker, method)(*args)


class RayEngine:
    """Groups of Ray actors, in a Ray of this process's own."""

    def __init__(self, groups: int):
        self.ray = ray = start_ray({"OMP_NUM_THREADS": "1"}, num_cpus=2)
        # Actors share the cores there are.
        self.meeting = ray.remote(num_cpus=0)(Meeting).remote(groups)
        self.names: dict[Any, str] = {}

    def start(self, name: str, kind: Any, size: int, o: Namespace) -> list[Any]:
        ray = self.ray
        remote = ray.remote(num_cpus=0, max_restarts=0)(Actor)
        actors = [remote.remote(name, kind, rank, size, o, self.meeting) for rank in range(size)]
        self.names |= {actor: f"{name}[{rank}]" for rank, actor in enumerate(actors)}
        address = ray.get(actors[0].address.remote(), timeout=START)
        ray.get([actor.join.remote(address) for actor in actors], timeout=START)
        return actors

    def call(self, workers: Sequence[Any], method: str, *args: Any) -> list[Any]:
        return [(worker, worker.do.remote(method, args)) for worker in workers]

    def results(self, calls: Sequence[Any]) -> list[Any]:
        """What the calls return, in their order; the first error ends all."""
        names = {ref: self.names[worker] for worker, ref in calls}
        failed: list[tuple[str, bool, str]] = []
        open_, until = list(names), float("inf")
        while open_ and time.monotonic() < until:
            ready, open_ = self.ray.wait(open_, num_returns=1, timeout=0.2)
            for ref in ready:
                try:
                    self.ray.get(ref)
                except self.ray.exceptions.RayActorError as error:
                    failed.append((names[ref], True, str(error).strip().splitlines()[0]))
                except self.ray.exceptions.RayTaskError as error:
                    failed.append((names[ref], False, str(error)))
            if failed:
                until = min(until, time.monotonic() + GRACE)
            if any(died for _, died, _ in failed):
                break
        if failed:
            raise explained(failed)
        return self.ray.get([ref for _, ref in calls])

    def close(self) -> None:
        for actor in [*self.names, self.meeting]:
            self.ray.kill(actor)
        self.ray.shutdown()
