"""Models of many small leaves under ZeRO-3 beside FSDP2: the time of a step, and of attaching; all of it is Python's.

    python examples/benchmarks/small_leaves.py                                        # some five minutes on two cores
    python examples/benchmarks/small_leaves.py --leaves 20 --attached 20 --rounds 2   # seconds

Leaves hold 8 elements, ten to a block. For the step each contender has its own gloo ranks of one thread, which
live at once and take turns (see `sharded.py`); models are attached in turns too, on ranks that have done
it once before. `CPU ms` is processor time of a rank, threads of gloo included: on a busy machine it is the steadier
number. Losses are those of the same model on the same data.
"""

from __future__ import annotations

import argparse
import statistics
import time

import sharded
import sharded_ranks
import torch
import torch.distributed as dist

import zerofn as zf

ATTACH_LIMIT = 2.0


def steps(o: argparse.Namespace) -> None:
    """A step of `o.leaves` leaves, in turns."""
    given = {"leaves": o.leaves, "stage": 3, "dtype": "fp32", "batch": 1, "seq": 8}
    found = sharded.measure(o, given, ["zerofn", "fsdp2"])
    print(f"\na step of {o.leaves} leaves, stage 3, fp32, {o.rounds} rounds of {o.steps} steps")
    print(f"{'':10} {'ms/step [quartiles]':>27} {'over ours':>10} {'least':>8} {'CPU ms':>8}   loss, first and last")
    ours = found["zerofn"]
    for name, mine in found.items():
        ratio = ratio_of(mine["rounds"], ours["rounds"])
        cpu, losses = statistics.median(mine["cpu"]), mine["losses"]
        numbers = f"{ratio:10.3f} {min(mine['times']):8.1f} {cpu:8.1f}"
        print(f"{name:10} {sharded.quartiles(mine['times'])} {numbers}   {losses[0]:.6f} {losses[-1]:.6f}")
    theirs = found["fsdp2"]
    by_turn, by_least = ratio_of(theirs["rounds"], ours["rounds"]), min(theirs["times"]) / min(ours["times"])
    by_cpu = statistics.median(theirs["cpu"]) / statistics.median(ours["cpu"])
    print(
        f"  FSDP2's time over ours {by_turn:.3f}, target > 1: {sharded.verdict(by_turn > 1)}; "
        f"of the least times {by_least:.3f}, of processor time {by_cpu:.3f}"
    )


def ratio_of(theirs: list[float], ours: list[float]) -> float:
    """The median over turns."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def attach_with(name: str, leaves: int) -> tuple[float, float]:
    """Seconds, and seconds of processor time, that it takes to make one model a sharded one."""
    model = sharded_ranks.Tiny(leaves)
    dist.barrier()
    begun, cpu = time.perf_counter(), time.process_time()
    if name == "zerofn":
        opt = zf.attach(model, zf.chain(zf.shard(), zf.adamw(lr=1e-3)))
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharded_ranks.adamw(model.parameters())
        opt = None
    took = time.perf_counter() - begun, time.process_time() - cpu
    if opt is not None:
        opt.detach()
    return took


def attach_in_turns(leaves: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    torch.set_num_threads(1)
    names = ["zerofn", "fsdp2"]
    for name in names:
        attach_with(name, 20)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % 2 :] + names[: i % 2]:
            found[name].append(attach_with(name, leaves))
    return found


def attaches(o: argparse.Namespace) -> None:
    """Attaching `o.attached` leaves, in turns on one set of ranks."""
    ranks = zf.launch(attach_in_turns, o.ranks, o.attached, o.rounds, timeout=1800)
    print(f"\nattaching {o.attached} leaves, with an optimizer, {o.rounds} rounds")
    print(f"{'':10} {'s [quartiles]':>27} {'least':>8} {'CPU s':>8}")
    # It is over when the last rank has done it.
    times = {n: [max(r[n][i][0] for r in ranks) for i in range(o.rounds)] for n in ranks[0]}
    for name, mine in times.items():
        low, middle, high = statistics.quantiles(mine, n=4)
        cpu = statistics.median(c for r in ranks for _, c in r[name])
        print(f"{name:10} {middle:10.3f} [{low:6.3f},{high:6.3f}] {min(mine):8.3f} {cpu:8.3f}")
    least = statistics.median(times["zerofn"])
    print(f"  ours {least:.3f} s, target < {ATTACH_LIMIT:.0f} s: {sharded.verdict(least < ATTACH_LIMIT)}", end="; ")
    print(f"FSDP2's time over ours {ratio_of(times['fsdp2'], times['zerofn']):.3f}", flush=True)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--leaves", type=int, default=500, help="of the model that is trained (500)")
    p.add_argument("--attached", type=int, default=2000, help="leaves of the model that is attached (2000)")
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--steps", type=int, default=4, help="in a turn (4)")
    p.add_argument("--rounds", type=int, default=12, help="of turns (12)")
    o = p.parse_args(argv)
    print(sharded.machine(o), flush=True)
    attaches(o)
    steps(o)


if __name__ == "__main__":
    main()
