"""How long a test waits before it calls a thing hung: the one place that says so.

Write seconds as they are on a quiet machine, with room: `zf.launch(fn, 2, timeout=limit())`,
`process.wait(limit(10))`, `assert took < limit(5)`. Limits of pytest-timeout, the default of `pyproject.toml` and
those of marks, go through here too. What is to hang in a test sleeps for 10,000 seconds, longer than any of these.
"""

from __future__ import annotations

import os

# A limit tells what hangs from what is slow. A false alarm costs more than a late one, so limits are wide before any
# load is seen: the load average lags by a minute, and other work may start after the limit has been taken.
ROOM = 5.0
# Of a core with several processes in its queue, one may get less than its share.
SHARE = 2.0
# A hang is a failure in bounded time however busy the machine is.
MOST = 30.0


def limit(seconds: float = 60.0) -> float:
    """The seconds to wait here and now for what takes less than `seconds` on a quiet machine.

    Call it where the wait begins: it looks at the load of that moment, which a constant of a module would not.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return seconds * min(max(ROOM, SHARE * os.getloadavg()[0] / cores), MOST)
