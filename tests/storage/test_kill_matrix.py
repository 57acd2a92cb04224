"""A few moments of kinds at which saves are cut off; `python tests/support/kill_matrix.py` makes a thousand."""

import subprocess
import sys
from pathlib import Path

import pytest
from time_limits import limit

SCRIPT = Path(__file__).parents[1] / "support" / "kill_matrix.py"


# A kill or an interrupt at any instruction is one at any time, and an export is one file where a checkpoint has more.
# To count the instructions of two ranks takes as long as all others together.
FEW = "save: .*(instruction|fails|limit|removed)$|three at once|ranks: kill.*rank 0$|of the caller"


@pytest.mark.timeout(60)  # 10 s of computing, and much waiting for disks, on a machine that others use
@pytest.mark.parametrize("only", [FEW, pytest.param("", marks=pytest.mark.slow)], ids=["few", "all"])
def test_no_moment_loses_a_state(only):
    # In a process of its own: it forks, which one that has run a backward, as other tests do, must not.
    command = [sys.executable, str(SCRIPT), "--moments", "7", "--seed", "1", "--only", only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(60))
    assert done.returncode == 0, done.stdout + done.stderr
    *_, moments, old, new, lost, wrong = done.stdout.strip().splitlines()[-1].split()
    assert int(moments) >= 6 and int(old) > 1 and int(new) > 1
    assert (lost, wrong) == ("0", "0")
