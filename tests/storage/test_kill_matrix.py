"""A few moments of each kind at which saves are cut off; `python tests/support/kill_matrix.py` makes a thousand."""

import subprocess
import sys
from pathlib import Path

import pytest
from time_limits import limit

SCRIPT = Path(__file__).parents[1] / "support" / "kill_matrix.py"


@pytest.mark.timeout(60)  # 10 s of computing, and much waiting for disks, on a machine that others use
def test_no_moment_loses_a_state():
    # In a process of its own: it forks, which one that has run a backward, as other tests do, must not.
    command = [sys.executable, str(SCRIPT), "--moments", "15", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stdout + done.stderr
    *_, moments, old, new, lost, wrong = done.stdout.strip().splitlines()[-1].split()
    assert int(moments) >= 15 and int(old) > 3 and int(new) > 1
    assert (lost, wrong) == ("0", "0")
