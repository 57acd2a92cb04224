"""Ctrl-C at a terminal where torchrun runs: all ranks end, and nothing of the job stays."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from time_limits import limit

import zerofn

# Trains for ever; each rank writes its number once it does.
SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import zerofn as zf
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
front = zf.shard() if sys.argv[2] == "ZeRO-3" else zf.reduce_scatter()
opt = zf.attach(model, zf.chain(front, zf.adamw(1e-2)), in_backward=sys.argv[3] == "True")
while True:
    opt.zero_grad()
    model(torch.randn(3, 6)).square().mean().backward()
    opt.step()
    if opt.global_steps == 3:
        name = os.path.join(sys.argv[1], str(dist.get_rank()))
        with open(name + ".part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(name + ".part", name)
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks at processes in /proc")
@pytest.mark.parametrize(("stage", "in_backward"), [("ZeRO-2", False), ("ZeRO-3", False), ("ZeRO-3", True)])
def test_ctrl_c_ends_every_rank(stage, in_backward, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    # A shell that runs it in the background would have it ignore SIGINT.
    begin = (
        "import signal, runpy, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.argv = sys.argv[1:]; "
    )
    begin += "runpy.run_module('torch.distributed.run', run_name='__main__')"
    command = [sys.executable, "-c", begin, "torchrun", "--standalone", "--nproc-per-node", "2"]
    command += [str(script), str(tmp_path), stage, str(in_backward)]
    env = {**os.environ, "PYTHONPATH": str(Path(zerofn.__file__).parent.parent)}
    said = (tmp_path / "said").open("w+")
    job = subprocess.Popen(command, env=env, start_new_session=True, stdout=said, stderr=subprocess.STDOUT)
    ranks: list[int] = []
    try:
        deadline = time.monotonic() + limit(40)
        while len(ranks) < 2 and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
            ranks = [int((tmp_path / str(rank)).read_text()) for rank in range(2) if (tmp_path / str(rank)).exists()]
        assert len(ranks) == 2, (tmp_path / "said").read_text()
        os.killpg(job.pid, signal.SIGINT)
        # torchrun gives ranks 30 seconds, and kills those that are left.
        assert job.wait(limit(40)) != 0
        deadline = time.monotonic() + limit(5)
        while any(map(alive, ranks)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, ranks))
        assert "KeyboardInterrupt" in (tmp_path / "said").read_text() or "SIGINT" in (tmp_path / "said").read_text()
    finally:
        said.close()
        for pid in (job.pid, *ranks):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        job.wait()
