"""`launch`: results, surroundings, and above all its endings. Nothing may be left running."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from time_limits import limit

from zerofn.ranks.launch import RankError, RankTimeout, launch  # inside: which error a time limit is


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, within=5.0):
    until = time.monotonic() + limit(within)
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def rank():
    return int(os.environ["RANK"])


def note_pid(directory):
    (Path(directory) / f"{rank()}.tmp").write_text(str(os.getpid()))
    os.rename(Path(directory) / f"{rank()}.tmp", Path(directory) / f"{rank()}.pid")


def pids(directory, n):
    until = time.monotonic() + limit()
    while time.monotonic() < until:
        found = [int(f.read_text()) for f in Path(directory).glob("*.pid")]
        if len(found) == n:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{n} ranks did not start")


# ------------------------------------------------------------------------------------------------ results


def surroundings(scale):
    t = torch.tensor([float(rank() + 1)])
    dist.all_reduce(t)
    assert (os.environ["LOCAL_RANK"], os.environ["MASTER_ADDR"]) == (os.environ["RANK"], "127.0.0.1")
    assert int(os.environ["MASTER_PORT"]) > 0
    weight = torch.nn.Parameter(torch.full((2,), float(rank())))
    (weight * 2).sum().backward()  # a backward inside a forked rank
    return {
        "sum": t * scale,
        "world": (dist.get_rank(), dist.get_world_size(), int(os.environ["WORLD_SIZE"])),
        "threads": torch.get_num_threads(),
        "grad": weight.grad,
        "weight": weight,
        "cwd": os.getcwd(),
        "mark": os.environ.get("A_MARK"),
    }


@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_results_in_rank_order(nproc, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_MARK", str(nproc))
    # A backward in this process starts threads: what follows must not fork it.
    torch.ones(3, requires_grad=True).sum().backward()
    results = launch(surroundings, nproc, torch.tensor(2.0), timeout=limit())
    for r, result in enumerate(results):
        assert result["sum"].item() == nproc * (nproc + 1)
        assert result["world"] == (r, nproc, nproc)
        assert result["threads"] == 1
        assert torch.equal(result["grad"], torch.full((2,), 2.0))
        assert isinstance(result["weight"], torch.nn.Parameter) and result["weight"][0] == r
        assert Path(result["cwd"]) == tmp_path and result["mark"] == str(nproc)


def test_closures_lambdas_shared_storage_and_large_results():
    factor = torch.arange(4.0)

    class Local:
        def __init__(self, x):
            self.x = x

    def closure(n):
        base = torch.full((n,), float(rank()))
        return Local(factor * rank()), base, base[:2]

    results = launch(closure, 2, 1_000_000, timeout=limit())
    assert torch.equal(results[1][0].x, factor) and isinstance(results[0][0], Local)
    base, view = results[1][1:]
    view.zero_()
    assert base[:3].tolist() == [0, 0, 1]
    assert launch(lambda: torch.get_num_threads(), 1, threads=2, timeout=limit()) == [2]
    assert launch(dist.is_initialized, 2, init=False, timeout=limit()) == [False, False]


def user_init():
    dist.init_process_group("gloo")  # from the environment, as under torchrun
    t = torch.ones(1)
    dist.all_reduce(t)
    dist.destroy_process_group()
    return t.item()


def test_a_rank_may_initialise_by_itself():
    assert launch(user_init, 2, init=False, timeout=limit()) == [2.0, 2.0]


def test_several_at_once():
    found = {}

    def one(i):
        found[i] = launch(surroundings, 2, torch.tensor(float(i)), timeout=limit())

    threads = [threading.Thread(target=one, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert {i: r[1]["sum"].item() for i, r in found.items()} == {0: 0.0, 1: 3.0, 2: 6.0}


def uneven(directory):
    note_pid(directory)
    if rank() == 0:
        others = pids(directory, 3)
        time.sleep(0.2)  # long after the others have returned
        return all(alive(pid) for pid in others)
    return rank()


def test_ranks_leave_together_with_no_collective(tmp_path):
    assert launch(uneven, 3, tmp_path, timeout=limit()) == [True, 1, 2]


def speak():
    print(f"out of {rank()}\n", end="")
    print(f"err of {rank()}\n", end="", file=sys.stderr)
    subprocess.run(["echo", f"echo of {rank()}"], check=True)


def test_what_ranks_print_arrives(capfd):
    launch(speak, 2, timeout=limit())
    out, err = capfd.readouterr()
    assert all(f"out of {r}\n" in out and f"err of {r}\n" in err and f"echo of {r}\n" in out for r in (0, 1))
    assert "terminate" not in err and "Warning" not in err


# ------------------------------------------------------------------------------------------------ endings


def raise_on(which, directory):
    note_pid(directory)
    if rank() == which:
        pids(directory, int(os.environ["WORLD_SIZE"]))
        raise KeyError("a key that is missing")
    dist.barrier()


@pytest.mark.parametrize("which", [0, 2])
def test_a_rank_that_raises(which, tmp_path):
    with pytest.raises(RankError, match=f"rank {which} raised") as caught:
        launch(raise_on, 3, which, tmp_path, timeout=limit())
    error = caught.value
    assert error.rank == which and error.exitcode == 1
    assert "KeyError: 'a key that is missing'" in error.traceback and "raise_on" in error.traceback
    assert "zerofn/ranks/fork_server.py" not in error.traceback, "the user's frames only"
    assert gone(pids(tmp_path, 3), within=0)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.rank, str(copy)) == (which, str(error))


def consequence(which):
    dist.barrier()
    if rank() == which:
        time.sleep(0.1)
        raise RuntimeError("the cause")
    dist.barrier()  # fails as soon as the other's sockets close


def test_the_cause_is_named_not_its_consequences():
    for which in (0, 1):
        with pytest.raises(RankError, match="the cause") as caught:
            launch(consequence, 3, which, timeout=limit())
        assert caught.value.rank == which


def slow_death(which):
    dist.barrier()
    if rank() == which:
        dist.destroy_process_group()  # the others fail now
        time.sleep(0.2)
        os._exit(9)
    dist.barrier()


def test_a_death_is_the_cause_even_if_seen_last():
    for which in (0, 1):
        with pytest.raises(RankError, match=rf"rank {which} ended with exit code 9(?s:.*)failed after it"):
            launch(slow_death, 3, which, timeout=limit())


def die(which, how, directory):
    note_pid(directory)
    pids(directory, 2)
    if rank() == which:
        if how == "exit":
            os._exit(7)
        if how == "quiet":
            os._exit(0)
        if how == "segfault":
            import ctypes

            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("exit", 7, "ended with exit code 7"),
        ("quiet", 0, "ended with exit code 0"),
        ("kill", -9, "killed by SIGKILL"),
        ("segfault", -11, "killed by SIGSEGV"),
    ],
)
def test_a_rank_that_dies(how, code, words, tmp_path):
    with pytest.raises(RankError, match=words) as caught:
        launch(die, 2, 1, how, tmp_path, timeout=limit())
    assert (caught.value.rank, caught.value.exitcode) == (1, code)
    assert gone(pids(tmp_path, 2), within=0)
    if how == "segfault":
        assert "die" in str(caught.value)  # where it was


def hang(directory):
    note_pid(directory)
    child = subprocess.Popen(["sleep", "10000"])
    (Path(directory) / f"child{rank()}").write_text(str(child.pid))
    if rank() == 1:
        return
    dist.barrier() if rank() == 0 else time.sleep(10_000)


def test_a_hang(tmp_path):
    launch(rank, 3, timeout=limit())  # the server is there
    start, timeout = time.monotonic(), limit(0.4)  # enough for rank 1 to end, and for the others to begin to hang
    with pytest.raises(
        RankTimeout, match=rf"ranks 0, 2 of 3 did not finish within timeout={timeout} seconds"
    ) as caught:
        launch(hang, 3, tmp_path, timeout=timeout)
    assert time.monotonic() - start < timeout + limit(3)
    assert isinstance(caught.value, TimeoutError) and caught.value.ranks == [0, 2]
    assert "barrier" in str(caught.value) and "hang" in str(caught.value)  # where they are
    children = [int(f.read_text()) for f in tmp_path.glob("child*")]
    assert gone(pids(tmp_path, 3) + children, within=0)


def unpicklable():
    return threading.Lock() if rank() else 0


def leave():
    sys.exit("enough")


def test_results_that_cannot_travel_and_sys_exit():
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*lock"):
        launch(unpicklable, 2, timeout=limit())
    with pytest.raises(RankError, match="SystemExit: enough"):
        launch(leave, 1, timeout=limit())
    assert launch(rank, 2, timeout=limit()) == [0, 1], "and the next one works"


CALLER = """
import os, signal, sys, time
from pathlib import Path
from zerofn.ranks.launch import launch

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it

def work(directory):
    rank = os.environ["RANK"]
    path = Path(directory) / rank
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    os.rename(path.with_suffix(".tmp"), path.with_suffix(".pid"))
    time.sleep(10_000)

try:
    launch(work, 2, sys.argv[1])
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise SystemExit(3)
"""


def start_caller(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    caller = subprocess.Popen([sys.executable, script, tmp_path], env=env, stdout=subprocess.PIPE, text=True)
    return caller, pids(tmp_path, 2)


def server_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks at processes in /proc")
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGTERM, signal.SIGINT))]
)
@pytest.mark.slow
def test_when_the_caller_ends(how, tmp_path):
    caller, ranks = start_caller(tmp_path)
    server = server_of(ranks[0])
    try:
        assert server != caller.pid and all(alive(p) for p in ranks)
        caller.send_signal(how)
        out, _ = caller.communicate(timeout=limit())
        assert gone([*ranks, server])
        if how == signal.SIGINT:
            assert (out, caller.returncode) == ("interrupted\n", 3)
    finally:
        caller.kill()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks at processes in /proc")
def test_when_the_server_ends(tmp_path):
    def work():
        note_pid(tmp_path)
        time.sleep(10_000)

    def kill():
        os.kill(server_of(pids(tmp_path, 2)[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RuntimeError, match="the process that starts ranks has ended"):
        launch(work, 2, timeout=limit())
    killer.join()
    assert gone(pids(tmp_path, 2))
    assert launch(rank, 2, timeout=limit()) == [0, 1], "a new one is started"


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks at processes in /proc")
def test_a_server_that_was_killed_between_two_launches_is_not_noticed(tmp_path):
    def work():
        note_pid(tmp_path)
        return os.getppid()

    for _ in range(3):
        server = launch(work, 2, timeout=limit())[0]
        os.kill(server, signal.SIGKILL)
        assert launch(rank, 2, timeout=limit()) == [0, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
@pytest.mark.parametrize("how", ["returns", "raises", "is killed"])
def test_a_child_in_a_session_of_its_own_goes_with_its_rank(how, tmp_path):
    def work():
        if rank() == 0:
            # A daemon's way: a session of its own, and a parent that ends at once.
            code = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); "
            code += "open(sys.argv[1], 'w').write(str(os.getpid())); os.rename(sys.argv[1], sys.argv[1] + '.pid'); "
            code += "time.sleep(10000)"
            subprocess.run([sys.executable, "-c", code, str(tmp_path / "daemon")], check=True)
            pids(tmp_path, 1)
            if how == "raises":
                raise ArithmeticError
            if how == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)

    with contextlib.nullcontext() if how == "returns" else pytest.raises(RankError):
        launch(work, 2, timeout=limit())
    assert gone(pids(tmp_path, 1))


def test_infinity_is_no_limit():
    assert launch(rank, 1, timeout=float("inf")) == [0]


# ------------------------------------------------------------------------------- scripts and bad input

SCRIPT = """
import sys
import torch
{hide}
from zerofn.ranks.launch import launch

class Box:
    def __init__(self, x):
        self.x = x

def work(scale):
    import torch.distributed as dist
    return Box(torch.ones(2) * scale * dist.get_rank())

{guard}
    torch.ones(2, requires_grad=True).sum().backward()
    boxes = launch(work, 2, 3.0)
    assert type(boxes[1]) is Box, type(boxes[1])
    print(boxes[1].x.tolist())
"""


@pytest.mark.parametrize("cloudpickle", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_script(cloudpickle, tmp_path):
    script = tmp_path / "script.py"
    # With cloudpickle the functions travel by value, and a script needs no guard.
    guard = "if True:" if cloudpickle else 'if __name__ == "__main__":'
    hide = "" if cloudpickle else "sys.modules['cloudpickle'] = None"
    script.write_text(SCRIPT.format(guard=guard, hide=hide))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-W", "error", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit())
    assert (done.stdout, done.stderr) == ("[3.0, 3.0]\n", "")


COMPILED = """
import torch, torch.nn.functional as F
import zerofn as zf

def loss(p, x):
    return F.mse_loss(x @ p["w"], torch.ones(4))

def work():
    tx = zf.chain(zf.all_reduce(), zf.sgd(0.1))
    step = torch.compile(zf.make_step(loss, tx), backend="eager")
    state, metrics = step(zf.init(tx, {"w": torch.zeros(3)}), torch.ones(4, 3))
    return float(metrics["loss"])

print(zf.launch(work, 2))
"""


@pytest.mark.slow
def test_a_script_may_compile_what_it_defines(tmp_path):
    """The compiler looks for the globals of a function of `__main__` in that module."""
    script = tmp_path / "script.py"
    script.write_text(COMPILED)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=limit(60))
    assert done.stdout == "[1.0, 1.0]\n", done.stderr


@pytest.mark.slow
def test_file_descriptors_do_not_pile_up():
    launch(rank, 2, timeout=limit())
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(3):
        launch(rank, 2, timeout=limit())
        with pytest.raises(RankError):
            launch(leave, 2, timeout=limit())
    after = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    assert after <= before + 2


def engine_in_a_rank():
    names = ("eager.gradients", "module.boundary", "sharded.reducer", "storage.saving", "transforms.adam")
    return [name for name in names if f"zerofn.{name}" not in sys.modules]


def test_a_rank_has_the_engine_loaded_when_it_begins():
    """Where each would import it at its first attach: 0.2 s, and in the same moment as all others."""
    assert launch(engine_in_a_rank, 2, timeout=limit()) == [[], []]
