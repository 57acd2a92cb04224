"""zerofn on several ranks against DDP, FSDP2 and DeepSpeed: time of a step, memory, bytes kept, bytes sent.

    python examples/benchmarks/sharded.py                              # about 25 minutes on two idle cores
    python examples/benchmarks/sharded.py --sizes 3M --stages 3 --dtypes fp32 --rounds 3
    python examples/benchmarks/sharded.py --sizes tiny --steps 1 --rounds 2 --leaves 20    # seconds

Each contender has its own set of gloo ranks of one thread. All sets of a configuration live at once and take
turns: a few steps each, round after round, in an order that is turned by one each time, so that what disturbs
the machine disturbs all. `alone` sends nothing and cuts nothing: what is left when all a contender adds costs nothing.
`least` is the fastest step of all, and `CPU ms` is processor time of a rank for a step, threads of gloo included: on
a busy machine it is the steadier number. `exposed` is the share of a step by which it is longer than that of `alone`:
communication that no computation hides, and what else a contender adds.
Contenders that are not installed are named and skipped. DeepSpeed:

    pip install deepspeed==0.19.8 --no-deps && pip install py-cpuinfo hjson msgpack einops ninja pydantic tqdm psutil
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import multiprocessing as mp
import os
import platform
import socket
import statistics
import tempfile
from pathlib import Path
from typing import Any

import sharded_ranks
import torch
import torch._dynamo  # every torch.optim loads it, which is no contender's memory

import zerofn  # noqa: F401

MODELS = {
    "tiny": {"d_model": 64, "layers": 2, "batch": 2, "seq": 32},
    "3M": {"d_model": 256, "layers": 4, "batch": 8, "seq": 128},
    "25M": {"d_model": 512, "layers": 8, "batch": 4, "seq": 128},
}
PEERS = {"ddp": {0, 1}, "fsdp2": {2, 3}, "deepspeed": {1, 2, 3}, "alone": {0, 1, 2, 3}}
BYTES = {"fp32": 4, "bf16": 2}
TARGET = 1.1


# ---------------------------------------------------------------- ranks


class Ranks:
    """The ranks of one contender: they wait until they are given steps to take.

    They are forked, which spares each a second of imports; the parent computes nothing and so has no threads.
    """

    def __init__(self, name: str, size: int, o: dict[str, Any]):
        self.name = name
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.ranks: list[tuple[Any, Any]] = []
        for rank in range(size):
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            ours, theirs = mp.Pipe()
            process = mp.get_context("fork").Process(
                target=self.run, args=({**o, "name": name}, env, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.ranks.append((process, ours))

    def run(self, o: dict[str, Any], env: dict[str, str], orders: Any) -> None:
        # Libraries that talk on stdout would talk into the table.
        os.dup2(self.log.fileno(), 1)
        os.dup2(self.log.fileno(), 2)
        sharded_ranks.serve(o, env, orders)

    def answers(self) -> list[dict[str, Any]]:
        try:
            return [orders.recv() for _, orders in self.ranks]
        except EOFError:
            self.end()
            self.log.seek(0)
            raise RuntimeError(f"a rank of {self.name} has ended:\n{self.log.read()[-3000:]}") from None

    def take(self, steps: int, reset: bool = False, measure: bool = False) -> list[dict[str, Any]]:
        for _, orders in self.ranks:
            orders.send({"steps": steps, "reset": reset, "measure": measure})
        return self.answers()

    def end(self) -> None:
        for process, _ in self.ranks:
            process.kill()
            process.join()


# ---------------------------------------------------------------- formulas


def state_formula(stage: int, dtype: str, n: int) -> float:
    """Bytes per parameter of zerofn's parameters, gradients and two moments; p, g and s are stored in fp32.

    With one micro-batch in a step no full gradient has to wait at stage 1 either.
    """
    p, g, s = 4, 4, 8
    cut = 1 if stage == 0 else n
    if stage == 3:
        return (p + g + s) / cut
    # The resident parameters are the stored ones, or bf16 ones beside their masters.
    return 2 + (p + g + s) / cut if dtype == "bf16" else p + (g + s) / cut


def traffic_formula(o: dict[str, Any], stage: int, dtype: str, shapes: dict[str, list[int]], n: int) -> int:
    """Bytes a rank sends in a step, in rings: (n-1)/n of what is gathered or scattered, twice for a sum.

    Stage 3 gathers all for forward and, for backward, all but what is still there (the last block and what follows
    it) and the embeddings, whose backward needs no weights. With each leaf's gradient goes a flag, whether any rank
    has one; a scattered flag goes to every rank. The norm of the gradient, a metric, is one float more.
    """
    numels = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    total, leaves = sum(numels.values()), len(numels)
    seen = BYTES[dtype]
    flags = leaves * seen
    norm = 2 * (n - 1) * 4 // n  # one float, summed over shards
    if stage == 0:
        return 2 * (n - 1) * (total * seen + flags) // n
    scattered = (n - 1) * (total * seen // n + flags)
    gathered = total * seen
    if stage == 3:
        last = f"blocks.{o['layers'] - 1}."
        again = (x for name, x in numels.items() if name.startswith("blocks.") and not name.startswith(last))
        gathered += sum(again) * seen
    return scattered + (n - 1) * gathered // n + norm


# ---------------------------------------------------------------- what is printed


def installed() -> list[str]:
    found = []
    for peer in PEERS:
        if peer == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            print("deepspeed is not installed: skipped (see --help)")
        else:
            found.append(peer)
    return found


def machine(o: argparse.Namespace) -> str:
    cpu = Path("/proc/cpuinfo")
    names = (
        [x.split(":")[1].strip() for x in cpu.read_text().splitlines() if x.startswith("model name")]
        if cpu.exists()
        else []
    )
    libraries = ["torch", *(["deepspeed"] if importlib.util.find_spec("deepspeed") else [])]
    versions = ", ".join(f"{x} {importlib.metadata.version(x)}" for x in libraries)
    return (
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"{o.ranks} gloo ranks of 1 thread; {versions}, Python {platform.python_version()}, {platform.system()}"
    )


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:8.1f} [{low:7.1f},{high:7.1f}]"


def measure(o: argparse.Namespace, given: dict[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """Times, losses, peaks of every contender, in turns."""
    sets: list[Ranks] = []
    try:
        for name in names:
            sets.append(Ranks(name, o.ranks, given))
        found: dict[str, dict[str, Any]] = {
            s.name: {"times": [], "losses": [], "peaks": [], "rounds": [], "cpu": []} for s in sets
        }
        for s in list(sets):
            try:
                s.answers()
                found[s.name]["losses"] += s.take(2)[0]["losses"]
            except RuntimeError as error:
                print(f"{s.name} failed: {error}")
                sets.remove(s)
                found.pop(s.name)
        for i in range(o.rounds):
            turn = i % len(sets)
            for s in sets[turn:] + sets[:turn]:
                got = s.take(o.steps, reset=True, measure=i == o.rounds - 1)
                mine = found[s.name]
                # A step is over when its last rank has taken it.
                times = [1e3 * max(t) for t in zip(*(r["times"] for r in got), strict=True)]
                mine["times"] += times
                mine["rounds"].append(statistics.median(times))
                losses = zip(*(r["losses"] for r in got), strict=True)
                mine["losses"] += [sum(x) / len(x) for x in losses]
                mine["peaks"].append(max(r["peak"] for r in got))
                mine["cpu"] += [r["cpu"] for r in got]
                mine["last"] = got[0]
        return found
    finally:
        for s in sets:
            s.end()


def table(o: argparse.Namespace, size: str, stage: int, dtype: str, peers: list[str]) -> None:
    given = {**MODELS[size], "stage": stage, "dtype": dtype, "leaves": 0}
    found = measure(o, given, ["zerofn", *(p for p in peers if stage in PEERS[p])])
    rivals = [p for p in found if p not in ("zerofn", "alone")]
    print(f"\n{size}, stage {stage}, {dtype}: batch {given['batch']} x {given['seq']} per rank", end="; ")
    print(f"{o.rounds} rounds of {o.steps} steps")
    head = f"{'over ours':>10} {'exposed':>8} {'least':>8} {'CPU ms':>8} {'peak MiB':>9}   loss, first and last"
    print(f"{'':10} {'ms/step [quartiles]':>27} {head}")
    ours = found["zerofn"]
    for name, mine in found.items():
        ratio = statistics.median(a / b for a, b in zip(mine["rounds"], ours["rounds"], strict=True))
        exposed = ""
        if "alone" in found and name != "alone":
            hidden = statistics.median(a / b for a, b in zip(found["alone"]["rounds"], mine["rounds"], strict=True))
            exposed = f"{1 - hidden:.1%}"
        losses = "" if name == "alone" else f"{mine['losses'][0]:.4f} {mine['losses'][-1]:.4f}"
        peak = statistics.median(mine["peaks"]) / 2**20
        cpu = statistics.median(mine["cpu"])
        numbers = f"{ratio:10.3f} {exposed:>8} {min(mine['times']):8.1f} {cpu:8.1f} {peak:9.1f}"
        print(f"{name:10} {quartiles(mine['times'])} {numbers}   {losses}")
    if rivals:
        fastest = min(
            statistics.median(a / b for a, b in zip(found[p]["rounds"], ours["rounds"], strict=True)) for p in rivals
        )
        lowest = min(statistics.median(found[p]["peaks"]) for p in rivals)
        peak = statistics.median(ours["peaks"])
        least = min(min(found[p]["times"]) for p in rivals) / min(ours["times"])
        print(
            f"  time of the fastest peer over ours {fastest:.3f}, target >= {TARGET}: {verdict(fastest >= TARGET)}; "
            f"of the least times {least:.3f}"
        )
        print(f"  our peak over the lowest peer's    {peak / lowest:.3f}, target < 1:    {verdict(peak < lowest)}")
    shapes = ours["last"]["widths"]
    numel = sum(torch.Size(s).numel() for s in shapes.values())
    kept, formula = ours["last"]["state"] / numel, state_formula(stage, dtype, o.ranks)
    equal = verdict(abs(kept - formula) < 1e-9, equal=True)
    print(f"  bytes kept per parameter and rank  {kept:.4f}, formula {formula:.4f}: {equal}")
    sent = ours["last"]["traffic"]
    data, formula = sent["data"] / o.steps, traffic_formula(given, stage, dtype, shapes, o.ranks)
    print(
        f"  bytes sent per step and rank       {data:.0f}, formula {formula}: {verdict(data == formula, equal=True)}; "
        f"{sent['control'] / o.steps:.0f} more to agree",
        flush=True,
    )


def verdict(ok: bool, equal: bool = False) -> str:
    return ("equal" if ok else "DIFFER") if equal else ("met" if ok else "MISSED")


def overhead(o: argparse.Namespace, peers: list[str]) -> None:
    """Milliseconds of a step of models whose leaves hold 8 elements each."""
    counts = o.leaves
    for stage in o.stages:
        names = ["zerofn", *(p for p in peers if stage in PEERS[p] and p != "alone")]
        print(f"\nstage {stage}, leaves of 8 elements in blocks of ten, fp32, ms/step by number of leaves")
        rows: dict[str, list[float]] = {name: [] for name in names}
        for leaves in counts:
            given = {"leaves": leaves, "stage": stage, "dtype": "fp32", "batch": 1, "seq": 8}
            found = measure(o, given, names)
            for name in names:
                rows[name].append(statistics.median(found[name]["times"]) if name in found else float("nan"))
        print(f"{'':10}" + "".join(f"{n:>10}" for n in counts) + f"{'us/leaf':>10}")
        for name, row in rows.items():
            slope = (row[-1] - row[0]) / (counts[-1] - counts[0]) if len(counts) > 1 else row[0] / counts[0]
            print(f"{name:10}" + "".join(f"{t:10.2f}" for t in row) + f"{1e3 * slope:10.1f}", flush=True)


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sizes", nargs="*", choices=list(MODELS), default=["3M", "25M"])
    p.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 1, 2, 3])
    p.add_argument("--dtypes", nargs="+", choices=list(BYTES), default=list(BYTES))
    p.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    p.add_argument("--ranks", type=int, default=2)
    p.add_argument("--steps", type=int, default=4, help="in a turn (4)")
    p.add_argument("--rounds", type=int, default=7, help="of turns (7)")
    p.add_argument(
        "--leaves", type=int, nargs="*", default=[50, 200, 800], help="numbers of tiny leaves; none skips this part"
    )
    o = p.parse_args(argv)
    print(machine(o))
    peers = [peer for peer in installed() if peer in o.peers]
    for size in o.sizes:
        for dtype in o.dtypes:
            for stage in o.stages:
                table(o, size, stage, dtype, peers)
    if o.leaves:
        overhead(o, peers)


if __name__ == "__main__":
    main()
